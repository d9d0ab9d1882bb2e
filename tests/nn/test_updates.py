"""What follows an optimizer's steps: branchnorm's t, and the question whether admin was profiled."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import normformer_rs as nfrs
from normformer_rs import nn as nfnn
from normformer_rs.surgery import swap_residuals

D = 8


def encoder(residual="branchnorm", **options):
    layer = nfnn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True, residual=residual, **options)
    return nfnn.TransformerEncoder(layer, 2)


def train(model, optimizer, steps=3, micro_batches=1):
    x = torch.randn(2, 3, D)

    def loss():
        optimizer.zero_grad()
        for _ in range(micro_batches):
            one = model(x).square().mean()
            one.backward()
        return one

    for _ in range(steps):
        optimizer.step(loss)
    return model


class Child(torch.optim.SGD):
    """Calls its parent's step, whose hooks run inside its own."""

    def step(self, closure=None):
        return super().step(closure)


class Around(torch.optim.Optimizer):
    """Calls another optimizer's step."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)


OPTIMIZERS = {
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "plain": lambda p: torch.optim.SGD(p, 0.1),
    "closures": lambda p: torch.optim.LBFGS(p, max_iter=4),
    "parent": lambda p: Child(p, 0.1),
    "around": lambda p: Around(torch.optim.SGD(p, 0.1)),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_t_moves_once_a_step(kind):
    torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)  # SGD.step has hooks of its own from here on
    model, other = encoder(), encoder()
    train(model, OPTIMIZERS[kind]([*model.parameters()]), micro_batches=2)
    assert (model.t.item(), other.t.item()) == (4, 1)


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_the_scaler_skips_moves_nothing(fused):
    model = encoder()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=fused), torch.amp.GradScaler("cpu")
    seen = []
    for factor in (1.0, torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(factor * model(torch.randn(2, 3, D)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append(model.t.item())
    assert seen == [2, 2, 3]


def test_the_owner_of_the_first_matrix_moves_t():
    model = encoder()
    matrices, others = ([p for p in model.parameters() if (p.dim() > 1) == big] for big in (True, False))
    both = torch.optim.SGD(matrices, 0.1), torch.optim.AdamW(others)
    model(torch.randn(2, 3, D)).sum().backward()
    both[1].step(), both[1].step()
    assert model.t.item() == 1
    both[0].step()
    assert model.t.item() == 2
    for p in model.layers[0].parameters():
        p.requires_grad_(False)
    torch.optim.SGD([model.layers[1].self_attn.in_proj_weight], 0.1).step()
    assert model.t.item() == 3


def test_a_norm_before_the_first_matrix_does_not_move_t():
    model = nfnn.Residual(nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D)), D, scheme="branchnorm")
    norm, linear = model.sublayer
    torch.optim.SGD(norm.parameters(), 0.1).step()
    assert model.t.item() == 1
    torch.optim.SGD(linear.parameters(), 0.1).step()
    assert model.t.item() == 2


def test_t_stays_with_copies_states_and_absolute_numbers():
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for k in (1, 2, 3):
        assert model.t.item() == k
        nfnn.set_num_updates(model, k)  # says what is so
        train(model, optimizer, 1)
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), encoder()
    twins[2].load_state_dict(model.state_dict())
    for twin in twins:
        train(twin, torch.optim.SGD(twin.parameters(), 0.1), 1)
    assert [m.t.item() for m in (model, *twins)] == [4, 5, 5, 5]
    nfnn.set_num_updates(model, 100)
    train(model, optimizer, 2)
    assert model.t.item() == 102


def test_the_rust_models_t():
    shape = {"d_model": D, "d_ff": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    config = nfrs.TransformerConfig(vocab_size=9, residual="branchnorm", **shape)
    model = nfrs.Transformer(config)
    twin, ids = copy.deepcopy(model), torch.tensor([[5, 6, 2]])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(ids, ids).sum().backward()
    optimizer.step(), optimizer.step()
    torch.optim.SGD(twin.encoder.parameters(), 0.1).step()
    numbers = [m.t.item() for one in (model, twin) for m in (one.encoder, one.decoder)]
    assert numbers == [3, 3, 2, 1]
    model.set_num_updates(7)
    assert (model.encoder.t.item(), model.decoder.t.item()) == (7, 7)


@pytest.mark.filterwarnings("ignore:Profiler record function")
@pytest.mark.full
def test_a_compiled_step_moves_t():
    model = encoder()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 3, D)).sum().backward()
    step = torch.compile(optimizer.step, backend="eager")
    step(), step()
    assert model.t.item() == 3


def test_zero_redundancy(tmp_path):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        model = encoder()
        train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1), 2)
        assert model.t.item() == 3
    finally:
        dist.destroy_process_group()


def swapped(residual):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        swap_residuals(model, residual)
    return model


@pytest.mark.parametrize("build", [encoder, swapped])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_admin_that_was_never_profiled_says_so_once(build):
    model = build("admin")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.randn(2, 3, D))  # no training yet
    with pytest.warns(UserWarning, match=r"never profiled: call normformer_rs\.nn\.profile"):
        train(model, optimizer, 1)
    train(model, optimizer, 2)

    profiled = build("admin")
    nfnn.profile(profiled, torch.randn(2, 3, D))
    train(profiled, torch.optim.SGD(profiled.parameters(), 0.1), 1)
    loaded = build("admin")
    loaded.load_state_dict(profiled.state_dict())
    train(loaded, torch.optim.SGD(loaded.parameters(), 0.1), 1)
    profiled.reset_parameters()
    with pytest.warns(UserWarning, match="never profiled"):
        train(profiled, torch.optim.SGD(profiled.parameters(), 0.1), 1)
