"""Norms swapped into models that somebody else wrote."""

import copy
import functools

import pytest
import torch
from surgery_support import MODELS, NORMS, D, assert_same, build, run, state_of, torchs_encoder, train
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import normformer_rs as nfrs
from normformer_rs import nn as nfnn
from normformer_rs.surgery import swap_norms, swap_residuals

pytestmark = pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor", "ignore:The PyTorch API of nested tensors", "ignore:norms with statistics stand in"
)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(test=84, all=83)
def test_norms_swap_train_and_return(name, norm):
    model = build(name).eval()
    before, state = run(model)[0], state_of(model)
    small = {"start": "zeros"} if norm == "repbn" else {}  # η = 1 doubles the stream at each norm
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    done = swap_norms(model, norm, optimizer=optimizer, **small)
    olds = [
        m for m in model.modules() if type(m).__name__ in ("LayerNorm", "T5LayerNorm") and type(m) is not nfnn.LayerNorm
    ]
    assert not olds and len(done) >= 5 and not model.training
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    assert len(swap_norms(model, norm)) == 0, "idempotent"
    if norm != "layernorm" or name.startswith("t5"):
        assert not torch.equal(run(model)[0], before)
    back = done.undo()
    assert "bit-equal" in back[0].note
    assert torch.equal(run(model)[0], before)
    assert_same(state_of(model), state)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}

    done = swap_norms(model, norm, optimizer=optimizer, **small)
    losses = train(model, optimizer)
    assert losses[-1] < losses[0]
    norms = [m for m in model.modules() if isinstance(m, nfnn.norm_class(norm))]
    fresh = [p for m in norms for p in m.parameters()]
    assert all(p.grad is not None and p in optimizer.state for p in fresh if p.requires_grad)
    assert "trained since" in done.undo()[0].note
    for key, (identity, value) in state_of(model).items():
        if "norm" in key.lower() or "ln_" in key:
            assert state[key][0] == identity and torch.equal(state[key][1], value), key
    with pytest.raises(ValueError, match="taken back already"):
        done.undo()


def test_the_fast_path_is_off():
    """torch.nn's fused evaluation would compute LayerNorm of whatever weights it finds."""
    model = torchs_encoder()
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[0, -2:] = True
    x = torch.randn(3, 5, D)
    swap_norms(model, "rmsnorm")
    model.eval()
    slow = model(x, src_key_padding_mask=mask)  # parameters need gradients: no fast path
    with torch.no_grad():
        fast = model(x, src_key_padding_mask=mask)
    torch.testing.assert_close(fast[~mask], slow[~mask])
    single = torchs_encoder().layers[0].eval()
    done = swap_norms(single, "scalenorm", filter=lambda name, _: name == "norm1")
    slow = single(x)
    with torch.no_grad():
        torch.testing.assert_close(single(x), slow)
    assert "fast path" in repr(done)
    done.undo()
    assert single.activation_relu_or_gelu == 1


def test_device_dtype_hooks_sharing_mode_and_filter_are_kept():
    model = nn.ModuleDict({"a": nn.LayerNorm(4), "b": nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))})
    model["c"] = model["a"]
    model = model.double()
    model["a"].eval()
    model["a"].weight.requires_grad_(False)
    heard = []
    handle = model["a"].register_forward_hook(lambda *_: heard.append(1))
    model["a"].register_forward_pre_hook(lambda *_: heard.append(2))
    seen = []
    done = swap_norms(
        model, "rmsnorm", filter=lambda name, module: seen.append((name, type(module))) or not name.startswith("b")
    )
    assert model["a"] is model["c"] and type(model["a"]) is nfnn.RMSNorm and type(model["b"][0]) is nn.LayerNorm
    assert ("b.0", nn.LayerNorm) in seen
    assert model["a"].weight.dtype == torch.float64 and not model["a"].training and not model["a"].weight.requires_grad
    model["a"](torch.randn(2, 4).double())
    assert heard == [2, 1]
    handle.remove()
    model["a"](torch.randn(2, 4).double())
    assert heard == [2, 1, 2]
    assert [row.name for row in done] == ["a", "c"]
    done.undo()
    assert model["a"] is model["c"] and type(model["a"]) is nn.LayerNorm
    on_meta = nn.Sequential(nn.LayerNorm(4, device="meta", dtype=torch.bfloat16))
    swap_norms(on_meta, "scalenorm")
    assert on_meta[0].weight.is_meta and on_meta[0].weight.dtype == torch.bfloat16


def test_norms_without_parameters_and_shared_ones():
    model = nn.Sequential(nn.LayerNorm(D, elementwise_affine=False), nn.Linear(D, D)).to("meta", torch.bfloat16)
    swap_norms(model, "batchnorm")
    assert model[0].weight is None and model[0].running_mean.is_meta
    swap_norms(nn.Sequential(nn.LayerNorm(D, elementwise_affine=False)), "powernorm")
    model = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.LayerNorm(D), nn.LayerNorm(D))
    model[2].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    done = swap_norms(model, "scalenorm", optimizer=optimizer)
    assert model[2].weight is model[0].weight and model[3].weight is not model[0].weight
    assert {*optimizer.param_groups[0]["params"]} == {*model.parameters()}
    done.undo()
    assert {*optimizer.param_groups[0]["params"]} == {*model.parameters()}


def test_shared_parameters_stay_with_whoever_keeps_them():
    model = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.LayerNorm(D))
    model[2].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    swap_norms(model, "rmsnorm", filter=lambda name, _: name == "0", optimizer=optimizer)
    assert {*optimizer.param_groups[0]["params"]} == {*model.parameters()}
    model = nn.Sequential(nn.RMSNorm(D), nn.RMSNorm(D))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    swap_norms(model, "layernorm", optimizer=optimizer)
    assert {*optimizer.param_groups[0]["params"]} == {*model.parameters()} and model[1].weight is model[0].weight


def test_matching_values():
    def swapped(norm, to, init="match"):
        model = nn.Sequential(norm)
        swap_norms(model, to, init=init)
        return model[0]

    norm = nn.LayerNorm(9)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(9.0)), norm.bias.fill_(2.0)
    assert torch.equal(swapped(norm, "layernorm").weight, norm.weight)
    assert torch.equal(swapped(norm, "layernorm").bias, norm.bias)
    assert torch.equal(swapped(norm, "rmsnorm").weight, norm.weight)
    torch.testing.assert_close(swapped(norm, "scalenorm").weight, norm.weight.norm().reshape(1))
    assert swapped(norm, "scalenorm", "default").weight.item() == 3.0
    gain = nfnn.ScaleNorm(9)
    nn.init.constant_(gain.weight, 6.0)
    torch.testing.assert_close(swapped(gain, "rmsnorm").weight, torch.full((9,), 2.0))
    assert swapped(nn.LayerNorm(4, elementwise_affine=False), "rmsnorm").weight is None


def test_the_optimizers_groups_and_states():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.RMSNorm(4))
    groups = [
        {"params": [model[1].weight, model[1].bias, model[3].weight], "weight_decay": 0.0, "lr": 0.5},
        {"params": [*model[0].parameters(), *model[2].parameters()], "weight_decay": 0.1},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    kept = optimizer.state[model[0].weight]
    done = swap_norms(model, "scalenorm", optimizer=optimizer)

    def first_group():
        names = {id(p): name for name, p in model.named_parameters()}
        return [names[id(p)] for p in optimizer.param_groups[0]["params"]]

    assert first_group() == ["1.weight", "3.weight"]
    assert optimizer.param_groups[0]["weight_decay"] == 0.0 and optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.state[model[0].weight] is kept and len(optimizer.state) == 4
    done.undo()
    done = swap_norms(model, "layernorm", optimizer=optimizer)
    assert first_group() == ["1.weight", "1.bias", "3.weight", "3.bias"]
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    before = list(model.modules())
    with pytest.raises(ValueError, match="does not own"):
        swap_norms(model, "scalenorm", optimizer=stranger)
    assert list(model.modules()) == before


@pytest.mark.parametrize("norm", ["scalenorm", "powernorm"])
def test_averages_of_weights_follow_a_swapped_model(norm):
    """torch's exponential averages, buffers too; the average is a model of its own."""
    model = build("bert")
    swap_norms(model, norm)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    expected = {}
    for _ in range(3):
        train(model, optimizer, updates=1)
        average.update_parameters(model)
        for name, value in model.state_dict().items():
            old = expected.get(name)
            is_whole = old is None or not value.is_floating_point()
            expected[name] = value.clone() if is_whole else 0.75 * old + 0.25 * value
    found = average.module.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value.is_floating_point():
            torch.testing.assert_close(found[name], value)
    assert not torch.equal(run(average.module.eval())[0], run(model.eval())[0])


def test_bad_input_is_said():
    model = torchs_encoder()
    with pytest.raises(ValueError, match=r"did you mean .scalenorm"):
        swap_norms(model, "scalnorm")
    with pytest.raises(ValueError, match=r"did you mean .match"):
        swap_norms(model, "scalenorm", init="macth")
    with pytest.raises(ValueError, match="register_norm"):
        swap_norms(nn.Linear(2, 2), "scalenorm")
    with pytest.raises(ValueError, match="itself a LayerNorm"):
        swap_norms(nn.LayerNorm(4), "scalenorm")
    with pytest.raises(ValueError, match=r"did you mean .deepnorm"):
        swap_residuals(model, "deepnrm")
    with pytest.raises(ValueError, match=r"holds no list of modules .*register_block"):
        swap_residuals(nn.Linear(2, 2), "deepnorm")
    with pytest.raises(ValueError, match=r"did you mean .branchnorm_steps"):
        swap_residuals(model, "branchnorm", branchnorm_step=3)
    with pytest.raises(ValueError, match=r"must be a torch\.nn\.Module"):
        swap_norms("model", "scalenorm")
    with pytest.raises(ValueError, match="depth must be at least 2"):
        swap_residuals(model, "deepnorm", depth=1)
    with pytest.raises(ValueError, match="depth must be one number"):
        swap_residuals(model, "deepnorm", depth=(2, 2))
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    state, kinds = state_of(model), [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match="does not own"):
        swap_residuals(model, "rezero", optimizer=optimizer)
    assert_same(state_of(model), state)
    assert [type(m) for m in model.modules()] == kinds


def test_wrapped_models_are_refused(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(torchs_encoder())
        for swap, to in ((swap_norms, "scalenorm"), (swap_residuals, "deepnorm")):
            with pytest.raises(ValueError, match=r"DistributedDataParallel.*swap first, then wrap"):
                swap(wrapped, to)
            with pytest.raises(ValueError, match="model is wrapped"):
                swap(nn.ModuleDict({"model": wrapped}), to)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("to", ["layernorm", "rmsnorm"])
def test_epsilon_is_carried_over(to):
    model = nn.Sequential(nn.LayerNorm(D, eps=1e-12))
    swap_norms(model, to)
    assert model[0].eps == 1e-12
    other = nn.Sequential(nn.LayerNorm(D, eps=1e-12))
    swap_norms(other, to, eps=1e-3)
    assert other[0].eps == 1e-3


def test_an_epsilon_of_none_is_the_types_own():
    for to in ("rmsnorm", "layernorm"):
        model, x = nn.Sequential(nn.RMSNorm(8)), torch.randn(2, 8) * 1e-3
        before = model(x)
        swap_norms(model, to)
        assert model[0].eps == torch.finfo(torch.float32).eps
        if to == "rmsnorm":
            torch.testing.assert_close(model(x), before)


def test_options_are_the_new_norms():
    model = nn.Sequential(nn.RMSNorm(8))
    with pytest.raises(
        ValueError, match=r'unknown option of powernorm "grups" \(did you mean "groups"\?\); expected one of eps, '
    ):
        swap_norms(model, "powernorm", grups=2)
    swap_norms(model, "layernorm", bias=False)
    assert model[0].bias is None


def test_a_gain_that_goes_is_told_of():
    (row,) = swap_norms(nn.Sequential(nn.LayerNorm(8)), "scalenorm-fixed")
    assert row.note == "gain dropped, bias dropped"


def gemma(dtype):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.GemmaConfig(vocab_size=30, intermediate_size=24, head_dim=8, pad_token_id=0, **shape)
    model = transformers.GemmaForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(-0.004, 0.004)  # 1 + so little is 1 in bf16, or nearly
    return model.to(dtype)


@pytest.mark.parametrize("to", ["rmsnorm", "rmsnorm:gemma"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.one_in(test=4, all=2)
def test_gemmas_norms_keep_their_numbers(to, dtype):
    model, ids = gemma(dtype), torch.arange(3, 20).view(1, -1)
    before = model(ids).logits
    norms = {name: p.detach().clone() for name, p in model.named_parameters() if "norm" in name}
    done = swap_norms(model, to)
    assert len(done) == 5
    keeps_offset = to == "rmsnorm:gemma" or dtype == torch.bfloat16
    for name, p in model.named_parameters():
        if "norm" in name:
            assert torch.equal(p, norms[name] if keeps_offset else 1 + norms[name]), name
    twin = model.model.layers[0].input_layernorm
    assert type(twin) is nfnn.RMSNorm and twin.zero_centred == keeps_offset
    x = torch.randn(50, 16).to(dtype)
    wanted = (1 + norms["model.layers.0.input_layernorm.weight"].float()) * torch.nn.functional.rms_norm(
        x.float(), (16,), eps=1e-6
    )
    torch.testing.assert_close(twin(x).float(), wanted, rtol=2e-6 if dtype == torch.float32 else 2**-8, atol=1e-6)
    assert len(swap_norms(model, to)) == 0
    after = model(ids).logits
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(after, before, **tolerance)
    swap_norms(model, "layernorm")  # γ = 1 + w, as the offset was read
    if dtype == torch.float32:
        weight = model.model.layers[0].input_layernorm.weight
        torch.testing.assert_close(weight, 1 + norms["model.layers.0.input_layernorm.weight"])


def test_families_are_swapped_in_by_name():
    model = nn.Sequential(nn.RMSNorm(32, eps=1e-4), nn.Linear(32, 32))
    nn.init.uniform_(model[0].weight)
    weight, x = model[0].weight.detach().clone(), torch.randn(3, 32)
    before = model(x)
    swap_norms(model, "rmsnorm:gemma")
    assert model[0].eps == 1e-4 and torch.equal(model[0].weight, (weight.double() - 1).float())
    torch.testing.assert_close(model(x), before)
    swap_norms(model, "rmsnorm:llama")
    assert model[0].cast == "before" and not model[0].zero_centred
    torch.testing.assert_close(model(x), before)
    assert len(swap_norms(model, "rmsnorm:llama")) == len(swap_norms(model, "rmsnorm")) == 0
    swap_norms(model, "rmsnorm:original")
    assert (model[0].eps, model[0].eps_place) == (1e-8, "outside")
    (row,) = swap_norms(model, "rmsnorm:nanochat")
    assert row.note == "gain dropped" and model[0].weight is None
    with pytest.raises(ValueError, match=r"did you mean .rmsnorm:llama"):
        swap_norms(model, "rmsnorm:lama")


def test_dyt_comes_and_goes():
    """Gain and bias are taken over both ways; α comes with its own first value and goes with a note of none."""
    model = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D))
    nn.init.uniform_(model[0].weight), nn.init.uniform_(model[0].bias)
    weight, bias = model[0].weight.detach().clone(), model[0].bias.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=r'unknown option of dyt "eps"; expected one of elementwise_affine, bias, '):
        swap_norms(model, "dyt", eps=1e-3)
    swap_norms(model, nfnn.DyT, optimizer=optimizer)
    assert type(model[0]) is nfnn.DyT and model[0].alpha.item() == 0.5
    assert torch.equal(model[0].weight, weight) and torch.equal(model[0].bias, bias)
    assert {*optimizer.param_groups[0]["params"]} == {*model.parameters()}
    swap_norms(model, "layernorm", optimizer=optimizer)
    assert torch.equal(model[0].weight, weight) and torch.equal(model[0].bias, bias)
    assert {*optimizer.param_groups[0]["params"]} == {*model.parameters()}


class ReadsItsNorm(nn.Module):
    """Calls a function on the weight of its first norm."""

    def __init__(self):
        super().__init__()
        self.read, self.called = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x):
        return self.called(nn.functional.layer_norm(x, (8,), self.read.weight, self.read.bias))


def test_a_norm_that_is_only_read_stays():
    model, x = ReadsItsNorm(), torch.randn(2, 8)
    done = swap_norms(model, "rmsnorm", example=x)
    assert [(row.name, row.note) for row in done if row.new == row.old] == [
        ("read", "stays: the model does not call it: the operation layer_norm reads its weight")
    ]
    assert type(model.read) is nn.LayerNorm and type(model.called) is nfnn.RMSNorm
    assert model(x).shape == x.shape


def test_a_swap_that_stops_half_way_is_taken_back(monkeypatch):
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before, norm = [*model.parameters()], model[1]
    monkeypatch.setattr("normformer_rs.surgery.norms.mark", lambda *_: [][0])
    with pytest.raises(nfrs.InputError, match=r"nothing was changed: IndexError: list index"):
        swap_norms(model, "rmsnorm", optimizer=optimizer)
    assert model[1] is norm and all(p is old for p, old in zip(model.parameters(), before, strict=True))
    assert all(p is old for p, old in zip(optimizer.param_groups[0]["params"], before, strict=True))


@pytest.mark.parametrize("name", ["batchnorm", "powernorm-v", "powernorm", "repbn"])
def test_convert_sync_batchnorm_is_for_torchs_classes(name):
    """It leaves a swapped norm as it leaves the LayerNorm that stood there, and converts its neighbour."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4))
    swapped = copy.deepcopy(plain)
    swap_norms(swapped, name)
    before = [model[1] for model in (plain, swapped)]
    settings, state = (repr(swapped[1]), {key: value.clone() for key, value in swapped[1].state_dict().items()})
    converted = [nn.SyncBatchNorm.convert_sync_batchnorm(model) for model in (plain, swapped)]
    for model, norm in zip(converted, before, strict=True):
        assert model[1] is norm and type(model[2]) is nn.SyncBatchNorm
    assert repr(swapped[1]) == settings and not swapped[1].sync
    torch.testing.assert_close(dict(swapped[1].state_dict()), state)


# Norms under other names, and norms that are no modules.


class Listed(nn.Module):
    """Calls its norms past the names under which they are children."""

    def __init__(self, way):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        norm = self.norm
        ways = {
            "list": [(norm, self.linear)],
            "dict": {"steps": {"first": norm}},
            "closure": lambda x: norm(x),
            "partial": functools.partial(lambda call, x: call(x), norm),
            "method": norm.forward,
            "default": lambda x, call=norm: call(x),
        }
        self.way, self.kept = way, ways[way]

    def forward(self, x):
        call = {"list": lambda y: self.kept[0][0](y), "dict": lambda y: self.kept["steps"]["first"](y)}
        return x + self.linear(call.get(self.way, self.kept)(x))


@pytest.mark.parametrize("has_example", [False, True])
@pytest.mark.parametrize("way", ["list", "dict", "closure", "partial", "method", "default"])
def test_a_norm_that_runs_under_another_name_is_refused(way, has_example):
    model, x = nn.Sequential(Listed(way), Listed(way)), torch.randn(2, 3, 8)
    before = [(name, id(module)) for name, module in model.named_modules()]
    said = "stays: the model does not call it" if way == "method" else "goes on calling 0.norm"
    with pytest.raises(nfrs.InputError, match=said if has_example else r"0\.kept holds a norm, a LayerNorm, outside"):
        swap_norms(model, "dyt", example=x if has_example else None)
    assert [(name, id(module)) for name, module in model.named_modules()] == before
    other = nn.Sequential(nn.LayerNorm(8), model)
    assert [row.name for row in swap_norms(other, "dyt", filter=lambda name, _: name == "0", example=x)] == ["0"]


def test_a_norm_that_is_kept_elsewhere_and_called_by_its_name_is_swapped():
    model, x = nn.Sequential(Listed("list")), torch.randn(2, 3, 8)
    model[0].forward = lambda x: x + model[0].linear(model[0].norm(x))
    assert len(swap_norms(model, "dyt", example=x)) == 1 and type(model[0].norm) is nfnn.DyT


def _centred(x):
    return x - x.mean(-1, keepdim=True)


FORMULAS = {
    "layer_norm": lambda x, g: nn.functional.layer_norm(x, (8,), g),
    "rms_norm": lambda x, g: torch.rms_norm(x, (8,), g),
    "normalize": lambda x, g: nn.functional.normalize(x, dim=-1) * g,
    "mul": lambda x, g: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * g,
    "div": lambda x, g: g * (_centred(x) / (_centred(x).std(-1, keepdim=True) + 1e-6)),
}


class Formula(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.gain, self.linear, self.what = nn.Parameter(torch.ones(8)), nn.Linear(8, 8), what

    def forward(self, x):
        return x + self.linear(FORMULAS[self.what](x, self.gain))


@pytest.mark.parametrize("what", FORMULAS)
def test_norms_that_are_no_modules_are_named(what):
    model, x = nn.Sequential(Formula(what), nn.LayerNorm(8)), torch.randn(2, 3, 8)
    table = {row.name: row.note for row in swap_norms(model, "dyt", example=x)}
    assert table["0"] == f"stays: the operation {what} in its forward norms rows, and no module does"
    with pytest.raises(nfrs.InputError, match=f"no known norm .*; the model, a Formula, stays: the operation {what}"):
        swap_norms(Formula(what), "dyt", example=x)


def test_operations_that_norm_nothing_are_not_named():
    class Gate(nn.Module):
        def forward(self, x):
            return x * x.sigmoid() / 3 * x.softmax(-1)

    assert len(swap_norms(nn.Sequential(Gate(), nn.LayerNorm(8)), "dyt", example=torch.randn(2, 3, 8))) == 1
