"""Pre-norm models for exact swaps and folds: all norms, biases and weights random, in f64."""

import contextlib

import torch
from block_models import FAMILIES, inputs
from block_models import build as first_values
from surgery_support import Wrapped
from torch import nn

import normformer_rs as nfrs
from normformer_rs.surgery.probe import Widened

D, VOCABULARY = 8, 11
TOKENS = torch.arange(1, 6).repeat(2, 1)


def build(name, seed=1, **options):
    """A model of a family in evaluation mode. GPT-NeoX's default is parallel sublayers: `parallel`."""
    model = first_values(name, **options)
    return scattered(model, seed)


def scattered(model, seed=1):
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model.eval().double()


def run(model, name=None, **given):
    """Logits, or last states of a model without a head, or similarities. In f64, also where a library's norm converts
    to f32 whatever comes."""
    if name is None or name not in FAMILIES:
        return model(TOKENS)
    dtype = next(model.parameters()).dtype
    arguments = inputs(name, dtype) | given
    if name == "CLIP" and not hasattr(model, "logit_scale"):
        arguments.pop("pixel_values")
    if getattr(model.config if hasattr(model, "config") else None, "add_cross_attention", False):
        arguments["encoder_hidden_states"] = torch.linspace(-1, 1, 2 * 3 * 16, dtype=dtype).reshape(2, 3, 16)
    with Widened() if dtype == torch.float64 else contextlib.nullcontext():
        out = model(**arguments)
    if isinstance(out, torch.Tensor):
        return out
    for key in ("logits_per_text", "logits", "last_hidden_state"):
        if key in out:
            return out[key]
    raise AssertionError(list(out))


def exact(model, **options):
    """The swap under test."""
    return nfrs.swap_norms(model, "rmsnorm", exact=True, example=example_of(model), **options)


def example_of(model):
    """None for models that have a configuration."""
    return TOKENS if isinstance(model, Model | Towers | Torchs) else None


def gap(found, expected):
    """The largest difference, relative to the largest number."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


class Mixer(nn.Module):
    """Attention without heads: values of earlier positions are added up."""

    def __init__(self, width):
        super().__init__()
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.out(self.value(x).cumsum(1).tanh())


class Block(nn.Module):
    """A pre-norm block of somebody's own; `scale` stands where others have LayerScale."""

    heads = 1

    def __init__(self, width=D):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixer, self.scale = Mixer(width), nn.Identity()
        self.fc1, self.act, self.fc2 = nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width)

    def forward(self, x):
        x = x + self.scale(self.mixer(self.ln1(x)))
        return x + self.fc2(self.act(self.fc1(self.ln2(x))))


class Parallel(Block):
    """x + A(N(x)) + F(N(x)) with one norm."""

    def __init__(self, width=D):
        super().__init__(width)
        self.ln2 = self.ln1

    def forward(self, x):
        y = self.ln1(x)
        return x + self.scale(self.mixer(y)) + self.fc2(self.act(self.fc1(y)))


class Model(nn.Module):
    """A language model around blocks, its head untied."""

    def __init__(self, *blocks, width=D):
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, width), nn.Parameter(torch.zeros(5, width))
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Towers(nn.Module):
    """Two models of different widths, their logits added up."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide = Model(Block()), Model(Block(12), width=12)

    def forward(self, tokens):
        return self.narrow(tokens) + self.wide(tokens)


class Torchs(nn.Module):
    """A language model around torch.nn's encoder, or the package's with a scheme."""

    def __init__(self, scheme=None):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, D)
        if scheme is None:
            layer = nn.TransformerEncoderLayer(D, 2, 12, 0.1, norm_first=True, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(D), enable_nested_tensor=False)
        else:
            layer = nfrs.nn.TransformerEncoderLayer(D, 2, 12, 0.1, residual=scheme, batch_first=True)
            self.encoder = nfrs.nn.TransformerEncoder(layer, 2)

    def forward(self, tokens):
        return self.encoder(self.embedding(tokens))


class Normed(nfrs.Scheme):
    """Pre-norm, with a norm inside each attention."""

    name = "normed"

    def __init__(self, point):
        self.point = point

    def around(self, place):
        return nfrs.schemes.ResidualSpec(before=[nfrs.schemes.norm()])

    def inside(self, place):
        return {self.point: [nfrs.schemes.norm("inner")]} if place.sublayer == "self-attention" else {}

    def stack(self, place):
        return nfrs.schemes.StackSpec(end=nfrs.schemes.norm())


class Lora(Wrapped):
    """peft's way: a module around the linear layer."""

    def __init__(self, base):
        super().__init__(base)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
        self.double().eval()

    def forward(self, x):
        return super().forward(x) + self.up(self.down(x))


class OwnLinear(nn.Linear):
    """loralib's way: a linear layer that computes more."""

    def forward(self, x):
        return super().forward(x) * 2 + 1
