"""normformer_rs.nn in training loops: update numbers, profiling, padding, parameter groups, processes."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from nn_support import FF, HEADS, D, embed, encoder, rust_and_skeleton
from torch import nn

import normformer_rs as nfrs
from normformer_rs import nn as nfnn
from normformer_rs.nn.step_hooks import PATIENCE


def test_parameter_groups_leave_norms_and_sums_alone():
    stack = nfnn.TransformerEncoder(nfnn.TransformerEncoderLayer(D, HEADS, FF, residual="dlcl"), 2)
    model = nn.ModuleDict({"stack": stack, "norm": nfnn.LayerNorm((3, 4)), "torchs": nn.LayerNorm((3, 4))})
    matrices, others = (group["params"] for group in nfnn.parameter_groups(model, 0.1))
    names = {p: name for name, p in model.named_parameters()}
    assert {names[p].rsplit(".", 1)[0].rsplit(".", 1)[-1] for p in matrices} == {
        "linear1",
        "linear2",
        "self_attn",
        "out_proj",
    }
    assert {"norm.weight", "torchs.weight", "stack.combine.weight"} <= {names[p] for p in others}
    rust = nfrs.Transformer(nfrs.TransformerConfig(vocab_size=9, d_model=D, heads=HEADS, residual="dlcl"))
    names = {p: name for name, p in rust.named_parameters()}
    matrices, _ = (group["params"] for group in nfnn.parameter_groups(rust, 0.1))
    assert matrices and not any("combine" in names[p] for p in matrices)
    theirs = nn.ModuleDict({"combine": nn.Linear(2, 2)})
    assert len(nfnn.parameter_groups(theirs, 0.1)[0]["params"]) == 1


def test_set_num_updates_moves_t_and_says_when_nobody_does():
    model, x = encoder("branchnorm", branchnorm_steps=4), torch.randn(2, 5, D)
    assert list(dict(model.named_buffers())) == ["t"] and model.t.item() == 1
    early = model(x)
    assert nfnn.set_num_updates(model, 4) == 1 and model.t.item() == 4
    assert not torch.equal(model(x), early)

    def by_hand():
        model(x).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.data.sub_(0.01 * p.grad)

    for k in range(1, 4):
        nfnn.set_num_updates(model, k)
        by_hand()
    with pytest.warns(UserWarning, match="set_num_updates"):
        for _ in range(PATIENCE + 1):
            by_hand()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_hand(), model(x)
        model.eval(), by_hand(), model(x)
        frozen = encoder("branchnorm").eval()
        frozen(x)
    with pytest.raises(ValueError, match="from 1"):
        nfnn.set_num_updates(model, 0)
    assert nfnn.set_num_updates(encoder("prenorm"), 3) == 0


def test_layers_of_prores_grow_one_after_the_other():
    """The stack is prenorm's with the last linear layers of layer l times its α."""
    model, x = encoder("prores", prores_steps=100), torch.randn(2, 5, D)
    base = encoder("prenorm")
    base.load_state_dict({k: v for k, v in model.state_dict().items() if k != "t"})
    for t, alphas in {1: (0.01, 0.005), 100: (1.0, 0.5), 200: (1.0, 1.0)}.items():
        assert nfnn.set_num_updates(model, t) == 1
        for layer, alpha in zip(base.layers, alphas):
            layer.load_state_dict(model.layers[layer.place.layer].state_dict())
            for name in ("self_attn.out_proj", "linear2"):
                linear = layer.get_submodule(name)
                with torch.no_grad():
                    linear.weight.mul_(alpha), linear.bias.mul_(alpha)
        torch.testing.assert_close(model(x), base(x), rtol=1e-5, atol=1e-6)


def test_profile_sets_the_rust_models_gains():
    """docs/spec.md §3.4, admin; what Rust's own profiling does is tested there."""
    layer = nfnn.TransformerEncoderLayer(D, HEADS, FF, 0.0, batch_first=True, residual="admin", norm="layernorm")
    model, x = nfnn.TransformerEncoder(layer, 3).eval(), 2 * torch.randn(4, 5, D)
    y, r, expected = x, torch.ones(()), []
    with torch.no_grad():
        for block in model.layers:
            for i, branch in enumerate((lambda z, b=block: b.self_attn(z, z, z)[0], None)):
                f = branch(y) if branch else block.linear2(block.linear1(y).relu())
                expected.append(r)
                scaled = r * y
                r = (scaled.var(correction=0) + f.var(correction=0)).sqrt()
                y = getattr(block, f"norm{i + 1}")(scaled + f)
    assert nfnn.profile(model, x) == 6 and not model.training
    gains = [getattr(block, f"residual_scale{i}") for block in model.layers for i in (1, 2)]
    for gain, omega in zip(gains, expected):
        torch.testing.assert_close(gain.detach(), omega.expand(D))
    torch.testing.assert_close(model(x), y)
    with pytest.raises(ValueError, match="no gain was profiled"):
        nfnn.profile(encoder("prenorm"), x)


def test_a_gain_that_is_not_finite_is_refused():
    layer = nfnn.TransformerEncoderLayer(D, HEADS, FF, 0.0, batch_first=True, residual="admin", norm="repbn")
    with pytest.raises(nfrs.InputError, match="a gain on x of inf: expected a finite number"):
        nfnn.profile(nfnn.TransformerEncoder(layer, 12), 9 * torch.randn(4, 5, D))


@pytest.mark.parametrize("norm", ["layernorm", "powernorm"])
def test_profile_sets_the_same_gains_as_rust(norm):
    rust, skeleton = rust_and_skeleton(norm, "admin")
    source, target = torch.tensor([[5, 6, 7], [8, 9, 2]]), torch.tensor([[0, 14], [0, 16]])  # no padding
    table = rust.state_dict()["embedding.weight"]
    rust.profile(source, target)
    causal = torch.ones(2, 2, dtype=torch.bool).triu(1)
    assert nfnn.profile(skeleton, embed(table, source), embed(table, target), tgt_mask=causal) == 2 * 2 + 3 * 3
    state, found = rust.state_dict(), 0
    for name, p in skeleton.named_parameters():
        if "residual_scale" in name:
            found += 1
            torch.testing.assert_close(p.detach(), state[name], rtol=1e-6, atol=1e-6)
    assert found == 13 and not (state["decoder.layers.2.residual_scale3"] == 1).all()


def test_the_releases_powernorm_warms_up_for_less_at_the_end():
    layer = nfnn.TransformerEncoderLayer(
        D, HEADS, FF, norm="powernorm", residual="prenorm", powernorm_mode="release", powernorm_warmup=8000
    )
    model = nfnn.TransformerEncoder(layer, 1)
    assert (model.layers[0].norm1.warmup_iters, model.norm.warmup_iters) == (8000, 1000)


def test_padding_reaches_norms_with_statistics():
    """What stands at padding enters no statistic, in either layout."""
    for batch_first in (True, False):
        layer = nfnn.TransformerEncoderLayer(D, HEADS, FF, 0.0, batch_first=batch_first, norm="powernorm-v")
        x, padding = torch.randn(2, 5, D), torch.zeros(2, 5, dtype=torch.bool)
        padding[1, 3:] = True
        other = x.masked_fill(padding[..., None], 100.0)
        outputs = []
        for given in (x, other):
            twin = copy.deepcopy(layer)
            y = twin(given if batch_first else given.transpose(0, 1), src_key_padding_mask=padding)
            outputs.append(((y if batch_first else y.transpose(0, 1))[~padding], twin.norm1.running_phi))
        for a, b in zip(*outputs):
            torch.testing.assert_close(a, b)


def test_parameter_groups():
    model = encoder("admin", norm="layernorm")
    decayed, others = nfnn.parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, others = ({names[id(p)] for p in group["params"]} for group in (decayed, others))
    assert decayed | others == set(names.values())
    assert all("norm" in name or "bias" in name or "scale" in name for name in others)
    assert all(name.endswith("weight") for name in decayed) and len(decayed) == 8
    torch.optim.AdamW(nfnn.parameter_groups(model, 0.1))


def test_a_single_row_is_a_vector():
    """Of a user's module, as transformers' class tokens and gains are; a linear layer with one output keeps its
    matrix."""
    model = nn.Module()
    model.gain, model.token = nn.Parameter(torch.ones(1, D)), nn.Parameter(torch.zeros(1, 1, D))
    model.head, model.mixing = nn.Linear(D, 1), nn.Parameter(torch.zeros(3, D))
    decayed, others = (group["params"] for group in nfnn.parameter_groups(model, 0.1))
    assert {*map(id, decayed)} == {id(model.head.weight), id(model.mixing)}
    groups = nfrs.param_groups(model, 1e-3, weight_decay=0.1)
    assert {id(p) for group in groups if group["weight_decay"] for p in group["params"]} == {*map(id, decayed)}
    assert {id(p) for group in groups if not group["weight_decay"] for p in group["params"]} == {*map(id, others)}


def _ddp(rank, path, residual, gradients):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(encoder(residual))
    torch.manual_seed(1)
    x = torch.randn(4, 5, D)
    model(x[2 * rank : 2 * rank + 2]).square().mean().backward()
    if rank == 0:
        torch.save([p.grad for p in model.parameters()], gradients)
    dist.destroy_process_group()


@pytest.mark.parametrize("residual", ["prenorm", "branchnorm"])
@pytest.mark.one_in(all=2)
def test_ddp(residual, tmp_path):
    mp.spawn(_ddp, (str(tmp_path / "meet"), residual, str(tmp_path / "gradients")), nprocs=2)
    torch.manual_seed(0)
    model = encoder(residual)
    torch.manual_seed(1)
    model(torch.randn(4, 5, D)).square().mean().backward()
    for p, grad in zip(model.parameters(), torch.load(tmp_path / "gradients")):
        torch.testing.assert_close(grad, p.grad, rtol=1e-4, atol=1e-5)


def test_profiling_restarts_with_each_chain_of_residuals():
    def chain():
        make = lambda i: nfnn.Residual(nn.Linear(D, D), D, scheme="admin", layer=i, layers=2)  # noqa: E731
        return nn.Sequential(make(0), make(1))

    model = nn.Sequential(chain(), chain())
    nfnn.profile(model, torch.randn(8, D))
    first, second = ([layer.residual_scale2 for layer in chained] for chained in model)
    for gains in (first, second):
        assert torch.equal(gains[0], torch.ones_like(gains[0])) and not torch.equal(gains[1], gains[0])
