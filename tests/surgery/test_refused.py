"""What surgery cannot take over is refused in one sentence, or stays with a row; the model is as before."""

import re

import pytest
import torch
from surgery_support import HEADS, D, Wrapped, assert_same, hugging_face, state_of
from torch import nn
from torch.nn.utils import parametrize

import normformer_rs as nfrs
from normformer_rs import nn as nfnn
from normformer_rs.surgery import (
    Linear,
    Part,
    fold_norms,
    register_block,
    swap_norms,
    swap_residuals,
)


class Same(nn.Module):
    def forward(self, w):
        return w


@pytest.mark.parametrize("kind", [nn.LayerNorm, nfnn.RMSNorm, nfnn.PowerNormV], ids=lambda kind: kind.__name__)
def test_a_parametrized_norm_has_a_row(kind):
    model = nn.Sequential(kind(8), nn.LayerNorm(8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))
    parametrize.register_parametrization(model[0], "weight", Same())
    done = swap_norms(model, "scalenorm")
    assert [row.name for row in done] == ["1", "0"]
    note = "stays: parametrized: remove its parametrizations first, and parametrize the new norm"
    assert done[1].note == note
    with pytest.raises(ValueError, match=f"holds no known norm .*; 0, a Parametrized{kind.__name__}, {note}"):
        swap_norms(nn.Sequential(model[0]), "scalenorm")
    parametrize.remove_parametrizations(model[0], "weight")
    assert len(swap_norms(model, "scalenorm")) == 1


def test_a_norm_with_a_buffer_for_a_weight_has_a_row():
    transformers = pytest.importorskip("transformers")
    config = transformers.FalconMambaConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, state_size=4, intermediate_size=16
    )
    model = transformers.FalconMambaForCausalLM(config)
    notes = {row.note for row in swap_norms(model, "layernorm") if row.old == "FalconMambaWeightlessRMSNorm"}
    assert notes == {"stays: keeps the buffer weight"}


# Linear layers that are none


class Quantized(nn.Parameter):
    """As torchao has them: a linear layer's weight is another tensor."""


class LoraLinear(Wrapped):
    """As PEFT has them."""


LoraLinear.__module__, LoraLinear.__name__, LoraLinear.__qualname__ = "peft.tuners.lora.layer", "Linear", "Linear"


def llama(how):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=D, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=32
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for block in model.model.layers:
        if how == "quantized":
            for linear in (block.self_attn.q_proj, block.mlp.gate_proj):
                linear.weight = Quantized(linear.weight.detach())
        elif how == "wrapped":
            block.self_attn.q_proj = LoraLinear(block.self_attn.q_proj)
            block.mlp.gate_proj = LoraLinear(block.mlp.gate_proj)
    return model


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("quantized", "a Linear, which has a weight of type Quantized, and none to change"),
        ("wrapped", "a peft.tuners.lora.layer.Linear, which has no weight of its own to change"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*PEFT's adapters")
@pytest.mark.one_in(all=2)
def test_linear_layers_that_cannot_be_drawn(how, said):
    model = llama(how)
    state, kinds = state_of(model), [type(m) for m in model.modules()]
    named = re.escape(f"self_attn.q_proj of a LlamaDecoderLayer is {said}: ")
    with pytest.raises(ValueError, match=f"{named}.*init=None"):
        swap_residuals(model, "deepnorm")
    assert_same(state_of(model), state)
    assert [type(m) for m in model.modules()] == kinds
    done = swap_residuals(model, "sandwich", init=None)
    model(torch.arange(5)[None]).logits.sum().backward()
    done.undo()
    note = next(row.note for row in fold_norms(model) if row.name == "model.layers.0.input_layernorm")
    assert ("has a Quantized of torch.float32" if how == "quantized" else "weight into base_layer, k_proj") in note


# Mixtures of experts


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
@pytest.mark.one_in(all=2)
def test_a_models_mixture_of_experts_is_named(name):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=2,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    notes = {row.name.rpartition(".")[2]: row.note for row in fold_norms(model)}
    assert notes["post_attention_layernorm"].startswith("stays: ") and "q_proj" in notes["input_layernorm"]
    assert [row.name for row in swap_residuals(model, "sandwich")] == ["model.layers.0"]


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(2, 8, 16)), nn.Parameter(torch.randn(2, 16, 8))

    def forward(self, x):
        return torch.einsum("btef,efd->btd", torch.einsum("btd,edf->btef", x, self.w1).relu(), self.w2)


class Block(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.heads, self.ln1, self.ln2, self.attn, self.mlp = 1, nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 8), mlp

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class ExpertBlock(Block):
    def __init__(self):
        super().__init__(Experts())


class PlainBlock(Block):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)))


class Steps:
    """What a registered subclass has."""

    def parts(self):
        return [ATTENTION, MLP]

    def heads(self):
        return 1

    def forward(self, x):
        return self.residual.step(1, self.residual.step(0, x, self.attn), self.mlp)


class ConvertedExperts(Steps, ExpertBlock):
    def parts(self):
        return [ATTENTION, MLP._replace(linears=())]


class ConvertedPlain(Steps, PlainBlock):
    pass


ATTENTION = Part("self-attention", "ln1", (Linear("attn", ("output",)),))
MLP = Part("feed-forward", "ln2", (Linear("mlp.0", ("fc1",)), Linear("mlp.2", ("fc2",))))
register_block(ExpertBlock, ConvertedExperts)
register_block(PlainBlock, ConvertedPlain)
IDS, ROWS = torch.arange(6).view(2, 3), torch.randn(2, 3, 8)


class Model(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(9, 8), nn.ModuleList([make(), make()])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 9)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("scheme", ["subln", "normformer"])
def test_a_declaration_without_a_second_layer_is_refused(scheme):
    model = Model(ExpertBlock)
    state = state_of(model)
    with pytest.raises(
        ValueError, match="declaration of ExpertBlock names no linear layer with the role 'fc2' in its feed"
    ):
        swap_residuals(model, scheme, init=None, example=IDS)
    assert_same(state_of(model), state)


# The norm after registered blocks


@pytest.mark.parametrize("scheme", ["sandwich", "postnorm"])
def test_the_norm_after_registered_blocks_is_found(scheme):
    """Else a pre-norm scheme would make a second norm at the end, and postnorm keep one too many."""

    class Without(Model):
        def forward(self, ids):
            x = self.norm(self.embedding(ids))
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    ends = []
    for kind in (Model, Without):
        model = kind(PlainBlock)
        swap_residuals(model, scheme, init=None, example=IDS)
        ends.append((type(model.norm).__name__, len(model.stack_residual.end)))
    wanted = {"sandwich": [("LayerNorm", 0), ("LayerNorm", 1)], "postnorm": [("Identity", 0), ("LayerNorm", 0)]}
    assert ends == wanted[scheme]


def test_registered_blocks_need_an_example():
    model = Model(PlainBlock)
    state = state_of(model)
    with pytest.raises(ValueError, match=r"Model's parts are found by running the model once, .* pass example="):
        swap_residuals(model, "sandwich", init=None)
    assert_same(state_of(model), state)


class Unlisted(nn.Module):
    """A block outside a list, and the norm after it."""

    def __init__(self, make):
        super().__init__()
        self.block, self.norm = make(), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.block(x))


def test_the_norm_after_a_registered_block_outside_a_list_is_found():
    listed, alone = nn.Sequential(PlainBlock(), nn.LayerNorm(8)), Unlisted(PlainBlock)
    for model in (listed, alone):
        swap_residuals(model, "postnorm", init=None, example=ROWS)
        assert isinstance([*model.children()][1], nn.Identity)
        model(ROWS).sum().backward()


@pytest.mark.filterwarnings("ignore:.* leaves unused as it is")
def test_a_registered_block_that_the_run_does_not_call_stays():
    class Unused(Model):
        def __init__(self):
            super().__init__(PlainBlock)
            self.unused = PlainBlock()

    model = Unused()
    rows = {row.name: row for row in swap_residuals(model, "sandwich", init=None, example=IDS)}
    assert rows["unused"].old == "PlainBlock" and rows["unused"].new == "stays"
    assert rows["unused"].note == "a PlainBlock: the run did not call it with a tensor"


def test_a_registered_block_alone():
    block = PlainBlock()
    swap_residuals(block, "sandwich", init=None, example=ROWS)
    block(ROWS).sum().backward()


def test_librarys_own_models_need_no_stack():
    """BART's embeddings have a norm beside the blocks."""
    transformers = pytest.importorskip("transformers")
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    shape = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 9} | heads
    config = transformers.BartConfig(vocab_size=20, **shape)
    swap_residuals(transformers.BartModel(config), "sandwich", init=None)
    swap_residuals(hugging_face("bert"), "sandwich", init=None)


# torch's own errors


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x):
        return x + self.linear(self.norm(x))


def _sparse(model):
    model[0].linear.weight = nn.Parameter(model[0].linear.weight.detach().to_sparse())
    return model


ODD = {
    "fp8": (lambda m: m.to(torch.float8_e4m3fn), swap_norms, "scalenorm", r"torch\.float8_e4m3fn: convert the model"),
    "complex": (lambda m: m.to(torch.complex64), swap_norms, "scalenorm", r"torch\.complex64: convert the model"),
    "sparse": (_sparse, swap_residuals, "deepnorm", r"0\.linear\.weight is a torch\.sparse_coo tensor"),
    "scripted": (torch.jit.script, swap_residuals, "deepnorm", "compiled by torch.jit: swap first"),
    "another width": (
        lambda m: m,
        swap_norms,
        lambda w: nn.LayerNorm(w + 1),
        f"a norm of width {D + 1}, and 0.n",
    ),
    "another result": (lambda m: m, swap_norms, lambda w: nn.Linear(w, w + 1), "Sequential does not run with <lambda>"),
}


@pytest.mark.filterwarnings("ignore:Complex modules are", "ignore:Casting complex")
@pytest.mark.parametrize("name", ODD)
def test_torchs_own_errors_are_input_errors(name):
    make, swap, to, said = ODD[name]
    x = None if name in ("fp8", "complex") else torch.randn(2, 3, D)
    model = make(nn.Sequential(Plain(), Plain()))
    before = [(name, id(module), [*module._parameters.values()]) for name, module in model.named_modules()]
    with pytest.raises(nfrs.InputError, match=said):
        swap(model, to, example=x)
    after = [(name, id(module), [*module._parameters.values()]) for name, module in model.named_modules()]
    assert [one[:2] for one in after] == [one[:2] for one in before]
    assert all(a is b for x, y in zip(before, after) for a, b in zip(x[2], y[2], strict=True))


@pytest.mark.parametrize("filter", [lambda name: True, 3, lambda name, module: {}[name]])
def test_a_wrong_filter_is_an_input_error(filter):
    model = nn.Sequential(Plain(), Plain())
    state = state_of(model)
    with pytest.raises(nfrs.InputError, match=r"is not possible, and nothing was changed: (Type|Key)Error"):
        swap_norms(model, "dyt", filter=filter)
    assert_same(state_of(model), state)


class Stages(nn.Module):
    """A list of lists, whose last norm reads the output of each stage."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([nn.ModuleList([PreNorm(), PreNorm()]) for _ in range(2)])
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        found = 0
        for stage in self.stages:
            for block in stage:
                x = block(x)
            found = found + self.norm(x)
        return found


class PreNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(self.norm(x))))


def backbone(*stages):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    return transformers.Dinov2Backbone(transformers.Dinov2Config(**sizes, out_features=[*stages])).eval()


@pytest.mark.parametrize(
    ("build", "x"),
    [
        (Stages, torch.linspace(-1, 1, 48).view(2, 3, 8)),
        (lambda: backbone("stage1", "stage3"), {"pixel_values": torch.linspace(-1, 1, 2352).view(1, 3, 28, 28)}),
    ],
)
def test_a_norm_that_reads_between_the_blocks_takes_no_scheme_with_several_tensors(build, x):
    """BridgeTower's kind; a scheme that has only x is taken."""
    model = build()
    for scheme in ("dlcl", "resi-dual", "mhc"):
        with pytest.raises(
            nfrs.InputError, match=r"^(norm|layernorm), the norm after .* also norms the output of a block"
        ):
            swap_residuals(model, scheme, init=None, example=x)
    swap_residuals(model, "deepnorm", init=None, example=x)
