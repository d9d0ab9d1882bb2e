"""What belongs to a stack lives on the stack: whichever block runs last, in checkpoints, caches and pipelines."""

import copy

import pytest
import torch
from block_models import BART, GENERATING, build, inputs, move
from test_blocks import loss, outputs, texts
from torch import nn

import normformer_rs as nfrs
from normformer_rs.surgery import swap_norms, swap_residuals

transformers = pytest.importorskip("transformers")
WIDE = ("dlcl", "resi-dual", "denseformer", "attnres", "mhc", "hyper-connections", "x0-lambdas", "value-residual")
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")


def encoder(scheme, **options):
    """BART's, which drops whole layers; γ = 1 and β = 0 in its norms."""
    torch.manual_seed(0)
    config = transformers.BartConfig(**BART | {"encoder_layers": 3, "forced_eos_token_id": None} | options)
    model = transformers.BartModel(config).encoder
    swap_residuals(model, scheme, init=None)
    return model


def variances(rows):
    return rows.var(-1, unbiased=False)


@pytest.mark.parametrize("scheme", ["prenorm", "sandwich", "peri-ln", "denseformer", "mhc"])
@pytest.mark.one_in(test=5, all=4)
def test_dropped_layers_leave_the_last_norm(scheme):
    model, ids = encoder(scheme, encoder_layerdrop=0.5).train(), torch.randint(3, 40, (2, 7))
    for seed in range(20):
        torch.manual_seed(seed)
        y = model(ids).last_hidden_state
        assert y.shape == (2, 7, model.config.d_model)
        torch.testing.assert_close(variances(y), torch.ones(2, 7), atol=0.02, rtol=0)


@pytest.mark.parametrize("scheme", ["prenorm", "resi-dual", "mhc", "attnres"])
@pytest.mark.one_in(test=4, all=3)
def test_blocks_that_are_cut_off_leave_the_last_norm(scheme):
    model, ids = encoder(scheme).eval(), torch.randint(3, 40, (2, 7))
    whole = model(ids).last_hidden_state
    model.layers = model.layers[:2]
    y = model(ids).last_hidden_state
    assert y.shape == whole.shape and not torch.equal(y, whole)
    if scheme != "resi-dual":  # whose output is a sum of two normed ones
        torch.testing.assert_close(variances(y), torch.ones(2, 7), atol=0.02, rtol=0)


def test_the_first_norm_does_not_go_with_the_first_block():
    model, ids = encoder("peri-ln").eval(), torch.randint(3, 40, (1, 5))
    model.layers = model.layers[1:]
    met = []
    model.stack_residual.embedding_norm.register_forward_hook(lambda *_: met.append(1))
    model(ids)
    assert met == [1]


@pytest.mark.parametrize("scheme", WIDE)
@pytest.mark.parametrize("name", ["GPT2", "Llama", "Bert", "T5"])
@pytest.mark.one_in(test=32, all=31)
def test_hidden_states_are_x(name, scheme):
    model, given = build(name).eval(), inputs(name)
    swap_residuals(model, scheme, init=None)
    found = model(**given, output_hidden_states=True)
    states = found.decoder_hidden_states if name == "T5" else found.hidden_states
    assert len(states) == 3 and {tuple(state.shape) for state in states} == {(2, 7, 16)}
    assert all(type(state) is torch.Tensor and torch.isfinite(state).all() for state in states)


@pytest.mark.parametrize("scheme", WIDE)
@pytest.mark.parametrize("name", ["Llama", "Bart", "GPT2"])
@pytest.mark.one_in(test=24, all=23)
def test_cached_generation_equals_uncached(name, scheme):
    assert name in GENERATING
    model = build(name).eval()
    swap_residuals(model, scheme)
    move(model)
    options = {"max_new_tokens": 5, "do_sample": False, "num_beams": 2}
    cached, plain = (model.generate(**texts(name), **options, use_cache=use) for use in (True, False))
    assert torch.equal(cached, plain)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("scheme", ["sandwich", "resi-dual", "mhc", "denseformer", "value-residual"])
@pytest.mark.parametrize("name", ["Llama", "Bert"])
@pytest.mark.one_in(test=20, all=10)
def test_both_kinds_of_checkpoints(name, scheme, reentrant):
    model, given = build(name).train(), inputs(name)
    swap_residuals(model, scheme)
    expected = gradients(model, given)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    torch.testing.assert_close(gradients(model, given), expected, rtol=1e-4, atol=1e-6)


def gradients(model, given):
    model.zero_grad()
    loss(model, given).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("scheme", ["peri-ln", *WIDE])
@pytest.mark.one_in(test=5, all=3)
def test_a_pipeline_by_hand(scheme):
    """Two stages that call the blocks themselves; only the hidden state goes from one to the other."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
            self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
            self.num_heads, self.fc1, self.fc2 = 2, nn.Linear(16, 24), nn.Linear(24, 16)

        def attend(self, x):
            q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
            return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

        def forward(self, x):
            x = x + self.attend(self.norm1(x))
            return x + self.fc2(self.fc1(self.norm2(x)).relu())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.norm = nn.ModuleList(Block() for _ in range(4)), nn.LayerNorm(16)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.norm(x)

    model, x = Model().eval(), torch.randn(2, 5, 16)
    swap_residuals(model, scheme, init=None, example=x)
    expected = model(x)
    hidden = x
    for layer in model.layers[:2]:
        hidden = layer(hidden)
    sent = torch.empty_like(hidden)
    sent.copy_(hidden)
    for layer in model.layers[2:]:
        sent = layer(sent)
    assert torch.equal(model.norm(sent), expected)


def test_norms_and_schemes_swap_in_either_order():
    one, other = build("Llama").eval(), build("Llama").eval()
    swap_norms(one, "scalenorm"), swap_residuals(one, "sandwich", init=None)
    swap_residuals(other, "sandwich", init=None), swap_norms(other, "scalenorm")
    given = inputs("Llama")
    for a, b in zip(outputs(one, given), outputs(other, given), strict=True):
        torch.testing.assert_close(a, b)
    twin = copy.deepcopy(other)
    assert torch.equal(outputs(twin, given)[0], outputs(other, given)[0])


class Parallel(nn.Module):
    """Attention's place is taken by a linear layer; both branches are added at once."""

    def __init__(self):
        super().__init__()
        self.norm, self.mix, self.mlp = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        y = self.norm(x)
        return x + self.mix(y) + self.mlp(y)


class Doubled(nfrs.Scheme):
    """x + k·F(N(x)), k the number of additions in its layer."""

    name = "doubled"

    def around(self, place):
        return nfrs.schemes.ResidualSpec(before=[nfrs.schemes.norm()], beta=float(place.sublayers + 1))


def test_constants_count_additions():
    """Four blocks of one addition are as deep as two of two; a scheme of one's own is told how many there are."""
    x = torch.randn(2, 3, 16)
    model = nn.Sequential(*(Parallel() for _ in range(4)))
    swap_residuals(model, "deepnorm", example=x)
    (sublayer,) = model[3].residual.sublayers
    assert sublayer.alpha == pytest.approx(4**0.25)
    model = nn.Sequential(*(Parallel() for _ in range(4))).eval()
    first = copy.deepcopy(model[0])
    swap_residuals(model, Doubled(), init=None, example=x)
    torch.testing.assert_close(model[0](x), x + 2 * (first(x) - x))


def test_factors_of_branches_are_a_scheme():
    """Granite's number and DINOv2's vectors go; layerscale takes vectors over, and computes the same."""
    widths = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.GraniteConfig(vocab_size=40, residual_multiplier=0.25, num_key_value_heads=2, **widths)
    granite = transformers.GraniteForCausalLM(config).double().eval()
    plain = copy.deepcopy(granite)
    for layer in plain.model.layers:
        layer.residual_multiplier = 1.0
    tokens = torch.arange(3, 12)[None]
    before = granite(tokens).logits
    done = swap_residuals(granite, "prenorm", init=None)
    assert "factor 0.25 gone" in done[0].note
    torch.testing.assert_close(granite(tokens).logits, plain(tokens).logits, rtol=1e-6, atol=1e-6)
    done.undo()
    assert torch.equal(granite(tokens).logits, before)
    config = transformers.Dinov2Config(image_size=8, patch_size=4, mlp_ratio=2, layerscale_value=0.5, **widths)
    dino = move(transformers.Dinov2Model(config)).double().eval()
    pixels = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    before = dino(pixels).last_hidden_state
    swap_residuals(dino, "layerscale", init=None)
    assert not any("layer_scale" in name for name, _ in dino.named_parameters())
    torch.testing.assert_close(dino(pixels).last_hidden_state, before, rtol=1e-12, atol=1e-12)
