"""Residual schemes in the models people use: every family whose blocks `swap_residuals` knows."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from block_models import FAMILIES, GENERATING, LAYERS, D, build, inputs, loss, move, outputs
from surgery_support import assert_same, state_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from normformer_rs import InputError
from normformer_rs.surgery import converted, fold_norms, swap_norms, swap_residuals

SECOND = {name: ("subln", "sandwich", "normformer", "rezero")[i % 4] for i, name in enumerate(FAMILIES)}
"""A scheme beside deepnorm that each family is trained with."""


def own(name):
    return FAMILIES[name][2]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.one_in(all=27)
def test_its_own_scheme_changes_nothing(name):
    """Outputs and gradients, in evaluation and in training, with padding; and the way back is bit-equal."""
    for dtype, rtol, atol in ((torch.float32, 1e-5, 1e-6), (torch.float64, 0.0, 1e-12)):
        model, given = move(build(name)).to(dtype), inputs(name, dtype)
        state, kinds = state_of(model), [type(m) for m in model.modules()]

        def run(train, model=model, given=given):
            model.train(train).zero_grad()
            torch.manual_seed(3)
            result = outputs(model, given)
            result.square().mean().backward()
            return result.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

        before = {train: run(train) for train in (False, True)}
        done = swap_residuals(model, own(name), init=None)
        assert len(done) and all("weights kept" in row.note for row in done if own(name) in row.new)
        for train, (expected, gradients) in before.items():
            result, found = run(train)
            torch.testing.assert_close(result, expected, rtol=rtol, atol=atol)
            assert found.keys() == gradients.keys()
            torch.testing.assert_close(found, gradients, rtol=10 * rtol, atol=10 * atol)
        assert "bit-equal" in done.undo()[0].note
        for train, (expected, _) in before.items():
            assert torch.equal(run(train)[0], expected)
        assert_same(state_of(model), state)
        assert [type(m) for m in model.modules()] == kinds


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.one_in(all=27)
def test_every_family_trains_and_returns(name):
    for scheme in ("deepnorm", SECOND[name]):
        model, given = build(name), inputs(name)
        expected, state = outputs(model.eval(), given), state_of(model)
        swap_residuals(model, scheme).undo()
        assert torch.equal(outputs(model, given), expected)
        assert_same(state_of(model), state)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        done = swap_residuals(model, scheme, optimizer=optimizer)
        assert any("weights drawn" in row.note for row in done)
        assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
        losses = []
        for _ in range(10):
            optimizer.zero_grad()
            value = loss(model.train(), given)
            value.backward()
            optimizer.step()
            losses.append(value.item())
        assert losses[-1] < losses[0], (scheme, losses)
        inside = [n for n, p in model.named_parameters() if ".residual." in n and p.requires_grad and p.grad is None]
        assert not inside


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.one_in(test=27, all=7)
def test_dropout_falls_on_each_sublayer_once(name):
    """Under pre-norm an entry passes a block unchanged where the dropouts of all its sublayers fall on it."""
    model, given = build(name).double(), inputs(name, torch.float64)
    swap_residuals(model, "prenorm", init=None)
    block = next(m for m in model.modules() if hasattr(m, "residual"))
    rates = []
    for i, part in enumerate(block.residual.parts):
        moved = block.residual._modules.get(f"dropout{i + 1}")
        if moved is None and part.dropout is not None:
            moved = getattr(block, part.dropout)
        if isinstance(moved, float):
            setattr(block, part.dropout, 0.5)
        elif moved is None and hasattr(block, "attention"):  # BERT and its like: inside the outputs
            moved = block.get_submodule(part.norm.rpartition(".")[0])._modules.get("dropout")
        elif moved is None and hasattr(block, "layer"):  # T5
            moved = block.layer[i].dropout
        if isinstance(moved, nn.Dropout):
            moved.p = 0.5
        rates.append(0.5 if isinstance(moved, float | nn.Dropout) else 0.0)
    met = []
    block.register_forward_hook(lambda _, args, out: met.append((args[0], out[0] if isinstance(out, tuple) else out)))
    torch.manual_seed(4)
    for _ in range(8):
        outputs(model.train(), given)
    same = torch.cat([(x == y).flatten() for x, y in met]).double().mean().item()
    assert same == pytest.approx(torch.tensor(rates).prod().item(), abs=0.06), (same, rates)


def texts(name):
    """What a model generates from: prompts of unequal lengths, padded on the left where one stack reads them."""
    given = {key: value for key, value in inputs(name).items() if key != "labels"}
    if "attention_mask" in given and name not in ("T5", "Bart", "Marian", "MBart", "Pegasus", "M2M100"):
        given = {key: value.flip(1) for key, value in given.items()}
    return given


@pytest.mark.parametrize("name", GENERATING)
@pytest.mark.one_in(test=16, all=15)
def test_generation(name):
    """The same tokens as before under its own scheme; under another one the same with a cache and without."""
    model = move(build(name)).eval()
    options = {"max_new_tokens": 5, "do_sample": False, "num_beams": 2}
    expected = model.generate(**texts(name), **options)
    swap_residuals(model, own(name), init=None)
    assert torch.equal(model.generate(**texts(name), **options), expected)
    model = build(name).eval()
    swap_residuals(model, "deepnorm")
    cached, plain = (model.generate(**texts(name), **options, use_cache=use) for use in (True, False))
    assert torch.equal(cached, plain)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.one_in(test=14, all=6)
def test_checkpointing_gives_the_same_gradients(name):
    model, given = build(name), inputs(name)
    swap_residuals(model, "deepnorm")

    def gradients():
        model.train().zero_grad()
        loss(model, given).backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    expected, calls = gradients(), []
    block = next(m for m in model.modules() if hasattr(m, "residual"))
    block.residual.run = lambda *args, run=block.residual.run: calls.append(0) or run(*args)
    if name == "timm":
        model.set_grad_checkpointing()
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(gradients(), expected, rtol=1e-4, atol=1e-6)
    assert len(calls) == 2, "the block ran twice"


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("timm", "CLIP", "Whisper")])
@pytest.mark.one_in(test=12, all=6)
def test_what_the_library_records(name):
    """Hidden states and attentions, which `transformers` takes by hooks on its classes."""
    model, given = move(build(name, attn_implementation="eager")).eval(), inputs(name)
    wanted = {"output_hidden_states": True, "output_attentions": True}
    before = model(**given, **wanted)
    swap_residuals(model, own(name), init=None)
    after = model(**given, **wanted)
    recorded = [key for key, value in before.items() if isinstance(value, tuple) and "past" not in key]
    assert len(recorded) >= 2
    for key in recorded:
        assert len(after[key]) == len(before[key]), key
        torch.testing.assert_close(after[key], before[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["Bert", "Llama", "T5", "MBart", "CLIP", "timm"])
@pytest.mark.one_in(test=6, all=3)
def test_copies_and_pickles_stand_alone(name, monkeypatch):
    model, given = move(build(name)).eval(), inputs(name)
    swap_residuals(model, "admin", init=None)
    expected, text = outputs(model, given), pickle.dumps(model)
    monkeypatch.setattr(converted, "_MADE", {})  # as in a process that has swapped nothing
    for twin in (copy.deepcopy(model), pickle.loads(text)):
        assert torch.equal(outputs(twin, given), expected)
        assert len(swap_residuals(twin, "admin", init=None)) == 0, "it has the scheme already"


def test_interleaved_heads_get_the_values_of_their_roles():
    """GPT-NeoX stacks query, key and value head by head; deepnorm draws values smaller than queries and keys."""
    d, heads = 128, 8
    model = build("GPTNeoX", hidden_size=d, num_attention_heads=heads)
    swap_residuals(model, "deepnorm")
    weight = model.gpt_neox.layers[0].attention.query_key_value.weight.unflatten(0, (heads, 3, -1))
    beta, xavier = (8 * 2) ** -0.25, d**-0.5
    for i, gain in enumerate((1.0, 1.0, beta)):
        assert weight[:, i].std().item() == pytest.approx(gain * xavier, rel=0.05)


@pytest.mark.parametrize("name", ["Llama", "Gemma", "T5"])
@pytest.mark.one_in(test=3)
def test_a_shift_before_the_activation_falls_on_the_gate(name):
    """Of a gated pair the activation reads one, and its declaration says which."""
    model, met = build(name).eval(), {}
    swap_residuals(model, "r-fixup")
    shifts = [p for path, p in model.named_parameters() if path.endswith("shift2")]
    with torch.no_grad():
        for shift in shifts:
            shift.fill_(3.0)
    feeds = [m for m in model.modules() if hasattr(m, "gate_proj") or hasattr(m, "wi_0")]
    assert len(feeds) == len(shifts) >= LAYERS
    for feed in feeds:
        names = ("gate_proj", "act_fn") if name != "T5" else ("wi_0", "act")
        for module in (getattr(feed, path) for path in names):
            module.register_forward_pre_hook(lambda module, args: met.__setitem__(module, args[0].detach()))
    outputs(model, inputs(name))
    for feed in feeds:
        gate, activation = (getattr(feed, path) for path in names)
        torch.testing.assert_close(met[activation], met[gate] @ gate.weight.T - 3.0)


@pytest.mark.parametrize("name", ["Bart", "MBart"])
def test_encoder_layers_keep_float16_finite(name):
    layer = build(name).half().eval().model.encoder.layers[0]
    with torch.no_grad():
        (layer.final_layer_norm if name == "Bart" else layer.fc2).bias.fill_(60000)
        layer.final_layer_norm.weight.fill_(10000)
    x = torch.full((1, 2, D), 30000, dtype=torch.float16) + 100 * torch.randn(1, 2, D).half()
    model = nn.ModuleList([layer])
    expected = layer(x, None)
    assert torch.isfinite(expected).all() and expected.max() == torch.finfo(torch.float16).max - 1000
    swap_residuals(model, own(name), init=None, example=lambda model: model[0](x / 1e4, None))
    layer.residual.stack.end = ()  # the norm after the stack, which this list of layers lacks
    torch.testing.assert_close(layer(x, None), expected, rtol=1e-3, atol=0)


def test_norms_around_a_stack_follow_its_scheme():
    """CLIP's stand two modules above the blocks; OPT's post-norm models have none."""
    model = build("CLIP")
    done = swap_residuals(model, "deepnorm")
    ends = [row.name for row in done if row.new == "Identity"]
    assert len(ends) == 2 and all(type(model.get_submodule(end)) is nn.Identity for end in ends)
    model = build("OPT, post-norm")
    swap_residuals(model, "prenorm")
    assert type(model.model.decoder.stack_residual.norm).__name__ == "LayerNorm"


class Mixing(nn.Linear):
    def forward(self, x, gain=1.0):
        return gain * super().forward(x)


class Block(nn.Module):
    """Somebody's own: pre-norm, with a dropout inside its feed-forward."""

    def __init__(self):
        super().__init__()
        self.ln1, self.ln2, self.heads = nn.LayerNorm(D), nn.LayerNorm(D), 1
        self.mix, self.drop = Mixing(D, D), nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D), nn.Dropout(0.2))

    def forward(self, x, gain=1.0):
        x = x + self.drop(self.mix(self.ln1(x), gain))
        return x + self.mlp(self.ln2(x))


def test_a_block_of_the_users_own():
    model, x = nn.Sequential(Block(), Block(), nn.Identity()).eval(), torch.randn(2, 3, D)
    expected = model[0](x, 2.0)
    done = swap_residuals(model, "prenorm", init=None, example=x)
    assert type(model[0].mlp[3]) is nn.Identity and model[0].residual.dropout2.p == 0.2
    torch.testing.assert_close(model[0](x, 2.0), expected)
    torch.testing.assert_close(model[0](x, gain=2.0), model[0](x, 2.0))
    with pytest.raises(TypeError, match="positional arguments"):
        model[0](x, 2.0, 3.0)
    done.undo()
    assert type(model[0].mlp[3]) is nn.Dropout


# Models that are refused.


def test_a_block_that_its_library_has_changed_is_refused():
    model = build("Llama")
    model.model.layers[1].adapter = nn.Linear(D, D)
    assert any("unweighted" in row.new for row in fold_norms(model))  # by a run
    model = build("Llama")
    model.model.layers[1].mlp.up = model.model.layers[1].mlp._modules.pop("up_proj")
    with pytest.raises(InputError, match=r"does not take the input that its configuration tells .*up_proj"):
        swap_residuals(model, "deepnorm")


@pytest.mark.full
def test_no_library_is_imported():
    program = "import sys, torch, normformer_rs.surgery as s; s.swap_residuals(torch.nn.Transformer(8, 2, 1, 1, 8),"
    program += "'deepnorm'); print('transformers' in sys.modules or 'timm' in sys.modules)"
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


# What a swap takes away, and what a file says of it.


def test_trained_weights_are_drawn_only_if_init_says_so():
    fresh = build("Bert")
    done = swap_residuals(fresh, "deepnorm")  # no warning
    assert done[0].note.startswith("init deepnorm, 6 weights drawn; query, 4 heads, key, 4 heads")
    assert done[1].note == "init deepnorm, 6 weights drawn"  # the same block
    model = build("Bert")
    with torch.no_grad():
        model.bert.encoder.layer[1].output.LayerNorm.weight[3] += 1e-3
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError, match=r"look trained .*layer\.1\.output.*give init=None"):
        swap_residuals(model, "deepnorm")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    done = swap_residuals(model, "deepnorm", init="scheme")
    assert "6 weights drawn" in done[1].note
    done.undo()
    swap_residuals(model, "deepnorm", init=None).undo()
    with pytest.warns(UserWarning, match="set 12 biases of BertForMaskedLM to zero"):
        swap_residuals(model, "r-fixup", init=None)


@pytest.mark.parametrize("between", [("scalenorm",), ("l2norm",), ("lpnorm", "rmsnorm")], ids="-".join)
@pytest.mark.one_in(test=3)
def test_exchanged_norms_remember_that_weights_are_trained(between):
    model = build("GPT2")
    with torch.no_grad():
        model.transformer.h[1].ln_1.weight[3] += 1e-3
    for norm in between:
        swap_norms(model, norm)
    with pytest.raises(
        InputError, match=r"look trained \(transformer\.h\.1\.ln_1\.weight (is|was) not at its first value"
    ):
        swap_residuals(copy.deepcopy(model), "deepnorm")


def test_an_optimizer_with_state_tells_of_training():
    model, given = build("Llama"), inputs("Llama")
    optimizer = torch.optim.SGD(model.parameters(), 1e-9, momentum=0.9)  # moves no bit of a norm's gain
    loss(model, given).backward()
    optimizer.step()
    with pytest.raises(InputError, match=r"look trained .the optimizer has state"):
        swap_residuals(model, "deepnorm", optimizer=optimizer)


@pytest.mark.parametrize("name", ["Bert", "Llama", "CLIP"])
def test_the_stock_class_does_not_load_a_swapped_model(name, tmp_path):
    model = build(name)
    kind = type(model)
    done = swap_residuals(model, "deepnorm")
    model.save_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"load-with-normformer_rs\.load_swapped"):
        kind.from_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="scheme_deepnorm"):
        build(name).load_state_dict(model.state_dict())
    norms = swap_norms(model, "scalenorm")
    norms.undo()
    done.undo()
    assert not hasattr(model.config, "normformer_rs")


def test_load_then_swap_then_load_the_state(tmp_path):
    """The order that swap_residuals documents."""
    build("Bert").save_pretrained(tmp_path)
    kind, given = type(build("Bert")), inputs("Bert")
    model = kind.from_pretrained(tmp_path)
    swap_residuals(model, "deepnorm")
    move(model).eval()
    again = kind.from_pretrained(tmp_path).eval()
    swap_residuals(again, "deepnorm", init=None)
    again.load_state_dict(model.state_dict())
    assert torch.equal(outputs(again, given), outputs(model, given))
    other = kind.from_pretrained(tmp_path)
    swap_residuals(other, "postnorm", init=None)
    with pytest.raises(RuntimeError, match="scheme_deepnorm"):
        other.load_state_dict(model.state_dict())


# Models on the meta device.


class Storages(TorchDispatchMode):
    """The largest storage that an operation makes, in bytes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor) and not t.is_meta:
                self.largest = max(self.largest, t.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize(
    "swap, to, options", [(swap_residuals, "deepnorm", {"init": None}), (swap_norms, "scalenorm", {})]
)
@pytest.mark.one_in(test=2)
def test_a_model_on_meta_is_swapped_without_its_weights(swap, to, options):
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=9000, **shape))
    size = sum(p.numel() * p.itemsize for p in model.parameters())
    stock = transformers.LlamaForCausalLM(model.config)
    with Storages() as storages:
        swap(model, to, **options)
    assert 0 < storages.largest < size / 20  # the embedding has two fifths of all
    assert all(p.is_meta for p in model.parameters())
    swap(stock, to, **options)
    assert [*stock.state_dict()] == [*model.state_dict()]
