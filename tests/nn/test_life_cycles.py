"""Modules that training frameworks build on the meta device, shard, empty and reset: their values are those of the
scheme's initialisation, whoever calls which reset, and in which order."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from nn_support import FF, HEADS, NORMS, OPTIONS, RESIDUALS, D
from torch import nn

import normformer_rs as nfrs
from normformer_rs import nn as nfnn

FAMILIES = [entry["name"] for entry in nfrs.tables()["families"]]
SCHEMES = [*({"residual": name, **OPTIONS.get(name, {})} for name in RESIDUALS)]
SCHEMES += [{"residual": "ln-scaling", "ln_scaling_mode": "weight"}, {"residual": "postnorm*1/4,prenorm"}]
SCHEMES += [{"residual": "prenorm", "norm": norm} for norm in NORMS]
TORCHS = [{}, {"norm_first": True}, {"residual": "deepnorm", "init": "torch"}]
ORDERS = ("whole", "parents first", "children first")


def build(d=D, ff=FF, **options):
    return nfnn.Transformer(d, HEADS, 2, 3, ff, batch_first=True, **options)


def spoil(model):
    """Leaves in memory what uninitialised memory may hold."""
    with torch.no_grad():
        for t in (*model.parameters(), *model.buffers()):
            t.fill_(torch.nan if t.is_floating_point() else -7)


def reset(model, order):
    modules = [*model.modules()][:: -1 if order == "children first" else 1]
    for module in modules[:1] if order == "whole" else modules:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def state(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("options", [*SCHEMES, *TORCHS], ids=str)
@pytest.mark.one_in(test=49, all=36)
def test_every_order_ends_in_the_first_values(options, order):
    fresh, model = build(64, 96, **options), build(64, 96, **options)
    spoil(model)
    reset(model, order)
    wanted = state(fresh)
    for name, found in state(model).items():
        for a, b in zip(*(t.chunk(3) if "in_proj_weight" in name else [t] for t in (found, wanted[name]))):
            if b.numel() < 2 or b.std() == 0 or b.ndim == 1 or "weight" not in name or b.numel() < 1000:
                is_drawn = "residual_gate" in name or ".gate_" in name  # variance-gate's, gated-rmsnorm's
                is_torchs = b.ndim == 1 and name.endswith("bias")  # torch.nn.Linear's
                random = (is_drawn or is_torchs) and b.numel() > 1 and b.std() > 0
                assert a.isfinite().all() and (random or torch.equal(a, b)), name
            else:  # two samples of n numbers differ by a few 1/√(2n)
                assert abs(a.std() / b.std() - 1) < 8 / (2 * a.numel()) ** 0.5, name
                assert abs(a.mean()) < 6 * b.std() / a.numel() ** 0.5, name


def test_a_given_stack_keeps_its_first_values():
    """torch.nn.Transformer's own values are for the stacks that it makes."""
    stack = nfnn.TransformerEncoder(nfnn.TransformerEncoderLayer(64, 4, 96, residual="mhc"), 2)
    before = copy.deepcopy(stack.state_dict())
    model = nfnn.Transformer(64, 4, 2, 2, 96, custom_encoder=stack)
    for name, value in model.encoder.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_reset_themselves(copied):
    layer = nfnn.TransformerEncoderLayer(64, 4, 96, residual="deepnorm", encoder_layers=6)
    twin, alone = copied(layer), copied(layer.linear1)
    before = layer.linear1.weight.clone()
    spoil(alone)
    alone.reset_parameters()  # alone, it is torch.nn's
    assert not alone.bias.eq(0).any() and alone.weight.isfinite().all()
    other = copied(twin)
    for linear in (twin.linear1, other.linear1):
        spoil(linear)
        linear.reset_parameters()
        assert linear.bias.eq(0).all() and linear.weight.std().item() == pytest.approx(before.std().item(), rel=0.1)
    assert torch.equal(layer.linear1.weight, before)


KINDS = {name: nfnn.norm_class(name) for name in (*NORMS, *FAMILIES)}


@pytest.mark.parametrize("name", [*NORMS])
def test_skip_init(name):
    norm = nn.utils.skip_init(KINDS[name], D)
    spoil(norm)
    norm.reset_parameters()
    for key, value in KINDS[name](D).state_dict().items():
        assert ".gate_" in f".{key}" or torch.equal(norm.state_dict()[key], value), key
    assert norm(torch.randn(4, 3, D)).isfinite().all()


class Positive(nn.Module):
    def forward(self, weight):
        return nn.functional.softplus(weight)


@pytest.mark.parametrize("name", [name for name in NORMS if name not in ("scalenorm-fixed", "l2norm")])
def test_a_parametrized_norm_is_copied(name):
    norm, x = KINDS[name](D), torch.randn(4, 3, D)
    norm.train(name != "prepbn")  # in the first update it is a norm of rows, without this weight
    nn.utils.parametrize.register_parametrization(norm, "weight", Positive())
    twin = copy.deepcopy(norm)
    assert torch.equal(twin(x), norm(x))
    assert type(twin).__name__ == type(norm).__name__ and twin is not norm
    twin.parametrizations.weight.original.data.fill_(3.0)
    assert not torch.equal(twin(x), norm(x))


def test_from_pretrained():
    rows = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    table = nfnn.FixNormEmbedding.from_pretrained(rows, scale=2.0)
    torch.testing.assert_close(table(torch.tensor([0, 1])), torch.tensor([[1.2, 1.6], [0.0, 2.0]]))
    assert not table.weight.requires_grad and table.weight.data_ptr() == rows.data_ptr()
    trained = nfnn.FixNormEmbedding.from_pretrained(rows.double(), freeze=False, padding_idx=0)
    assert trained.weight.requires_grad and trained.weight.dtype == torch.float64 and trained.padding_idx == 0


def test_undone_surgery_gives_torchs_values_back():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 96), 2, enable_nested_tensor=False)
    swap = nfrs.swap_residuals(model, "deepnorm", init="deepnorm")
    linear = model.layers[0].linear1
    linear.reset_parameters()
    assert linear.bias.eq(0).all()
    swap.undo()
    linear.reset_parameters()
    assert linear.bias.ne(0).any() and linear.weight.abs().max() <= 64**-0.5


def test_a_dropped_model_is_gone_at_once():
    import gc
    import weakref

    layer = nfnn.TransformerEncoderLayer(D, HEADS, FF, residual="deepnorm")
    kept = weakref.ref(layer.linear1)
    gc.disable()
    try:
        del layer
        assert kept() is None
    finally:
        gc.enable()


# Two ranks.


def on_ranks(rank, ranks, meeting, schemes):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))

        def same(make, orders, apart):
            """A model from the meta device, shared out, has the values of a whole one reset alike."""
            for seed, order in enumerate(orders):
                with torch.device("meta"):
                    model = make()
                for part in apart(model):
                    fully_shard(part, mesh=mesh)
                fully_shard(model, mesh=mesh)
                model.to_empty(device="cpu")
                spoil(model)
                torch.manual_seed(seed)
                reset(model, order)
                whole = make()
                torch.manual_seed(seed)
                reset(whole, order)
                wanted = state(whole)
                for name, found in state(model).items():
                    found = found.full_tensor() if hasattr(found, "full_tensor") else found
                    assert torch.equal(found, wanted[name]), (order, name)
                yield model

        for options in schemes:
            *_, model = same(lambda o=options: build(**o), ORDERS, lambda m: [*m.encoder.layers])
            x = torch.randn(2, 5, D)
            assert model(x, x).isfinite().all()
        for name in (*NORMS, *FAMILIES):
            for norm in same(lambda n=name: nn.Sequential(nfnn.norm_class(n)(D)), ("children first",), lambda m: []):
                assert norm(torch.randn(4, 6, D)).isfinite().all()
        for _ in same(lambda: nn.Sequential(nfnn.FixNormEmbedding(10, D)), ("children first",), lambda m: []):
            pass
    finally:
        dist.destroy_process_group()


OF_EACH_KIND = [{"residual": "dlcl"}, {"residual": "mhc"}, {}]
ALL = pytest.param([*SCHEMES, *TORCHS], marks=pytest.mark.full)


@pytest.mark.parametrize("schemes", [OF_EACH_KIND, ALL], ids=["some", "all"])
@pytest.mark.long
def test_fsdp2_from_the_meta_device(tmp_path, schemes):
    mp.spawn(on_ranks, (2, str(tmp_path / "meet"), schemes), nprocs=2)
