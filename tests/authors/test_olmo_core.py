"""olmo2, peri-ln, ln-scaling, normal, llama-depth and fan-in against OLMo-core's whole models."""

import importlib
import re
import sys
import types
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

import pytest
import torch
from authors_support import assert_same_language_models, source
from torch.testing import assert_close

from normformer_rs import Transformer, TransformerConfig

AUTHORS = "allenai/OLMo-core", "fa6c5014c9f6e9ee789da2d9c20d5126fee8df0d"
PACKAGES = ["distributed", "distributed.parallel", "nn.attention", "nn.functional", "nn.moe", "nn.transformer", "ops"]
ABSENT = ["cached_path", "data", "float8", "io", "kernels", "nn.vision", "optim", "rich", "train"]
SHAPE = {"d_model": 12, "d_ff": 20, "heads": 3, "decoder_layers": 4, "vocab_size": 11, "norm": "rmsnorm:olmo"}
SHAPE |= {"activation": "swiglu", "positions": "rotary", "linear_biases": False, "tie_embeddings": "none"}
SHAPE |= {"architecture": "decoder-only", "encoder_layers": 0, "scale_embeddings": False, "dropout": 0.0}
SCHEMES = {"olmo2": {"kind": "reordered_norm", "qk_norm": True}, "ln-scaling": {"kind": "default_scaled"}}
SCHEMES |= {"peri-ln": {"kind": "peri_norm", "embedding_norm": True}, "peri-ln without": {"kind": "peri_norm"}}
INITS = {"normal": {"init": "normal"}, "llama-depth": {"init": "llama_depth"}, "fan-in": {"init": "fan_in"}}
INITS |= {"fan-in scaled": {"init": "fan_in", "embed_scale": 12**0.5}}
NAMES = {"blocks.": "decoder.layers.", "embeddings.": "target_embedding.", "lm_head.norm": "decoder.norm"}
NAMES |= {"lm_head.w_out": "output_projection", "embedding_norm": "decoder.embedding_norm", "attention.": "self_attn."}
NAMES |= {"post_attention_norm": "post_norm1", "post_feed_forward_norm": "post_norm2", "w_out": "out_proj"}
NAMES |= {"attention_norm": "norm1", "feed_forward_norm": "norm2", "feed_forward.w": "linear", "w_q.": "in_proj_"}


class Modules:
    """Finds the authors' modules in the checkout, in f64, and puts mocks in the place of those that no model needs."""

    def find_spec(self, name, path=None, target=None):
        is_theirs = name.partition(".")[0] in ("olmo_core", "cached_path", "dataclass_extensions", "rich")
        is_package = name.removeprefix("olmo_core.") in [*PACKAGES, "olmo_core", "nn"]
        return ModuleSpec(name, self, is_package=is_package) if is_theirs else None

    def create_module(self, spec):
        name = spec.name.removeprefix("olmo_core.")
        if name == "dataclass_extensions":
            generic = {"__class_getitem__": lambda cls, _: cls, "register": staticmethod(lambda _: lambda made: made)}
            return types.SimpleNamespace(Registrable=type("Registrable", (), generic), decode=None)
        return MagicMock(__path__=[]) if name.partition(".")[0] in ABSENT or name in ABSENT else None

    def exec_module(self, made):
        name = made.__name__
        if isinstance(made, types.ModuleType) and name not in ("olmo_core", "olmo_core.nn"):
            path = name.replace(".", "/") + ("/__init__" if name.removeprefix("olmo_core.") in PACKAGES else "")
            text = re.sub(r"torch\.float(32)?\b", "torch.float64", source(*AUTHORS, f"src/{path}.py"))
            exec(compile(text.replace(".float()", ".double()"), path, "exec"), made.__dict__)


@pytest.fixture(scope="module")
def authors():
    """Returns a function that builds the authors' model with a kind of block, or with an initialisation."""
    source(*AUTHORS, "src/olmo_core/config.py")  # skips
    before, found = {*sys.modules}, Modules()
    sys.meta_path.insert(0, found)
    transformer = importlib.import_module("olmo_core.nn.transformer")
    norms, linear = (importlib.import_module(f"olmo_core.nn.{name}") for name in ("layer_norm", "feed_forward"))

    def build(kind="default", init="normal", **options):
        norm = norms.LayerNormConfig(name=norms.LayerNormType.rms, eps=1e-6, bias=False)
        options |= {"embedding_norm": norm if options.get("embedding_norm") else None, "rope_theta": 10_000}
        options |= {"feed_forward": linear.FeedForwardConfig(hidden_size=20, bias=False), "layer_norm_eps": 1e-6}
        options |= {"init_method": transformer.InitMethod(init), "block_name": transformer.TransformerBlockType(kind)}
        size = {"d_model": 12, "vocab_size": 11, "n_layers": 4, "n_heads": 3}
        return transformer.TransformerConfig.llama_like(**size, **options).build()

    yield build
    sys.meta_path.remove(found)
    for name in {*sys.modules} - before:
        if name.partition(".")[0] in ("olmo_core", "cached_path", "dataclass_extensions", "rich"):
            del sys.modules[name]


def as_ours(weights):
    """Names the authors' weights, or their gradients, as this package does."""
    ours = {}
    for name, weight in weights.items():
        if "w_q" in name:
            weight = torch.cat([weights[name.replace("w_q", f"w_{letter}")] for letter in "qkv"])
        for old, new in NAMES.items():
            name = name.replace(old, new)
        ours |= {name: weight} if "w_k" not in name and "w_v" not in name else {}
    return ours


@pytest.mark.parametrize("scheme", SCHEMES)
def test_outputs_and_gradients(authors, scheme):
    """All heads' queries and keys have one norm in olmo2; the norm of the embeddings can be left out of peri-ln."""
    theirs = authors(**SCHEMES[scheme]).double()
    forward = theirs.forward
    theirs.forward = lambda ids, **_: [forward(ids)]
    options = {"peri_ln_embedding_norm": False} if "without" in scheme else {}
    ours = Transformer(TransformerConfig(**SHAPE, residual=scheme.split()[0], **options)).double()
    assert_same_language_models(ours, theirs, as_ours, lambda ids: ours(None, ids))


@pytest.mark.parametrize("init", INITS)
def test_first_values(authors, init, monkeypatch):
    """The authors' matrices get their standard deviations in place of draws, negative ones where they do not cut at
    three of them. Ours are those of the same seed with a deviation of 1, cut or not (Xavier's table), times these."""

    def hold(weight, mean=0.0, std=1.0, a=None, b=None, generator=None):
        assert (mean, a, b) in [(0.0, None, None), (0.0, -3 * std, 3 * std)]
        weight.data.fill_(-std if a is None else std)

    def our_values(init, **options):
        config = TransformerConfig(**SHAPE | {"scale_embeddings": "embed_scale" in given}, init=init, **options)
        return Transformer(config, seed=1).state_dict()

    given = INITS[init]
    theirs = authors(**given)
    monkeypatch.setattr(torch.nn.init, "normal_", hold)
    monkeypatch.setattr(torch.nn.init, "trunc_normal_", hold)
    theirs.init_weights(device=torch.device("cpu"))
    ours, cut, xavier = our_values(init.split()[0]), our_values("normal", init_std=1.0), our_values("xavier")
    for name, std in as_ours(dict(theirs.named_parameters())).items():
        draws = -(12**0.5) * xavier[name] if std.min() < 0 else cut[name]
        assert std.min() < 0 or draws.abs().max() <= 3
        assert_close(ours[name], (draws * std).float(), rtol=1e-6, atol=0)
