"""First values: fairseq against fairseq 0.7.2, which is as old as TwT, fairseq-0.12.2 against 0.12.2, xavier against
torch."""

import argparse
import dataclasses
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from authors_support import module
from torch.testing import assert_close

import normformer_rs as nfrs
from normformer_rs import nn

FAIRSEQ = "facebookresearch/fairseq"
OLD, NEW = "b002d0096ea82c77be7027b205d0b29de82edde4", "4a388e64cd646ed7d7ad8de8fae55df2b8eea91d"
LAYERS, SIZES = {"encoder": 2, "decoder": 3}, {"embed_dim": 16, "ffn_embed_dim": 24, "attention_heads": 2}
BASE = type("Base", (torch.nn.Module,), {"__init__": lambda self, *_: torch.nn.Module.__init__(self)})
BASES = dict.fromkeys(["FairseqEncoder", "FairseqIncrementalDecoder", "FairseqEncoderDecoderModel"], BASE)
WORDS = type("Words", (), {"__len__": lambda _: 40})()
NAMES = {"encoder_attn.": "multihead_attn.", ".fc": ".linear", "decoder.embed_out": "output_projection.weight"}
NAMES |= {"decoder.output_projection": "output_projection", ".q_proj.": ".in_proj_"}
NAMES |= {"encoder.embed_tokens": "source_embedding", "decoder.embed_tokens": "target_embedding"}


def layer_norm(width, export=False):
    return torch.nn.LayerNorm(width)


class Off(argparse.Namespace):
    """Flags; what it does not have is off."""

    def __getattr__(self, name):
        return None


def fairseq_0_7_2():
    """Returns the encoder and the decoder of what is there called a transformer, without shared tables."""
    attention = module(FAIRSEQ, OLD, "fairseq/modules/multihead_attention.py", fairseq=MagicMock())
    modules = MagicMock(LayerNorm=layer_norm, MultiheadAttention=attention.MultiheadAttention)
    registers = dict.fromkeys(["register_model", "register_model_architecture"], lambda *_: lambda made: made)
    beside = {"fairseq": MagicMock(), "fairseq__models": SimpleNamespace(**BASES, **registers)}
    authors = module(FAIRSEQ, OLD, "fairseq/models/transformer.py", fairseq__modules=modules, **beside)
    flags = argparse.Namespace(max_source_positions=9, max_target_positions=9, no_token_positional_embeddings=True)
    for stack, layers in LAYERS.items():
        vars(flags).update({f"{stack}_{name}": size for name, size in (SIZES | {"layers": layers}).items()})
    authors.base_architecture(flags)
    stacks = authors.TransformerEncoder, authors.TransformerDecoder
    return [stack(flags, WORDS, authors.Embedding(40, 16, 1)) for stack in stacks]


def fairseq_0_12_2():
    """Returns the encoder and the decoder, without shared tables."""
    plain = {"fairseq__incremental_decoding_utils": SimpleNamespace(with_incremental_state=lambda made: made)}
    plain |= {"fairseq__modules__quant_noise": SimpleNamespace(quant_noise=lambda made, *_, **__: made)}
    plain |= {"fairseq": MagicMock(**{"utils.eval_str_dict": lambda *_, **__: None})}
    plain |= {"fairseq__models": SimpleNamespace(**BASES)}
    plain |= {"fairseq__distributed": SimpleNamespace(fsdp_wrap=lambda layer, **_: layer)}
    plain |= {"fairseq__models__transformer": MagicMock(TransformerEncoderBase=BASE, TransformerDecoderBase=BASE)}
    for name in ("dataclass__utils", "modules__fairseq_dropout", "modules__checkpoint_activations"):
        plain[f"fairseq__{name}"] = MagicMock()
    attention = module(FAIRSEQ, NEW, "fairseq/modules/multihead_attention.py", **plain)
    modules = MagicMock(LayerNorm=layer_norm, MultiheadAttention=attention.MultiheadAttention)
    plain["fairseq__modules"] = modules
    modules.transformer_layer = module(FAIRSEQ, NEW, "fairseq/modules/transformer_layer.py", **plain)
    path = "fairseq/models/transformer/transformer"
    base, encoder, decoder = (module(FAIRSEQ, NEW, f"{path}_{name}.py", **plain) for name in ("base", *LAYERS))
    numbers = {"dropout": 0.0, "activation_dropout": 0.0, "base_layers": 0}
    flags = Off(no_token_positional_embeddings=True, quant_noise=Off(pq=0), **numbers)
    for stack, layers in LAYERS.items():
        setattr(flags, stack, Off(**SIZES, layers=layers, layerdrop=0.0, output_dim=16))
    kinds = encoder.TransformerEncoderBase, decoder.TransformerDecoderBase
    return [kind(flags, WORDS, base.Embedding(40, 16, 1)) for kind in kinds]


VERSIONS = {"fairseq": fairseq_0_7_2, "fairseq-0.12.2": fairseq_0_12_2}


def as_ours(values):
    """Names the authors' parameters as this package does."""
    ours = {}
    for name, value in values.items():
        if ".q_proj." in name:
            value = torch.cat([values[name.replace("q_proj", f"{letter}_proj")] for letter in "qkv"])
        for old, new in NAMES.items():
            name = name.replace(old, new)
        ours[name] = value
    return ours


@pytest.mark.parametrize("init", VERSIONS)
def test_fairseq(init, monkeypatch):
    """The authors' parameters get the bound of a uniform distribution in place of draws, and minus the standard
    deviation of a normal one. Our layers are what torch then draws in their order, our tables those of gpt2 from the
    same seed, times the ratio of the deviations."""
    with monkeypatch.context() as held:
        held.setattr(torch.Tensor, "uniform_", lambda t, start, end, **_: t.data.fill_(end))
        held.setattr(torch.Tensor, "normal_", lambda t, mean=0.0, std=1.0, **_: t.data.fill_(-std))
        theirs = torch.nn.ModuleDict(dict(zip(LAYERS, VERSIONS[init]())))
    expected = as_ours(dict(theirs.named_parameters()))
    ours = nn.Transformer(16, 2, *LAYERS.values(), 24, 0.0, residual="postnorm", init=init)
    torch.manual_seed(0)
    ours.reset_parameters()
    torch.manual_seed(0)
    for name, value in ours.named_parameters():
        if "norm" not in name:
            bounds = expected[name].chunk(3 if "in_proj" in name else 1)
            drawn = [b * torch.empty_like(b).uniform_(-1, 1) if b.max() > 0 else b for b in bounds]
            assert_close(value, torch.cat(drawn), rtol=1e-6, atol=0)
    sizes = {"d_model": 16, "d_ff": 24, "heads": 2, "vocab_size": 40, "tie_embeddings": "none"}
    config = nfrs.TransformerConfig(**sizes, encoder_layers=2, decoder_layers=3, residual="postnorm", init=init)
    ours = nfrs.Transformer(config, seed=0)
    normal = nfrs.Transformer(dataclasses.replace(config, init="gpt2"), seed=0)
    for name in ("source_embedding", "target_embedding", "output_projection"):
        name += ".weight"
        assert_close(ours.get_parameter(name), normal.get_parameter(name) / 0.02 * -expected[name], rtol=1e-6, atol=0)


def test_xavier():
    """torch's Xavier normal of each matrix, q, k and v for themselves."""
    ours = nn.Transformer(16, 2, *LAYERS.values(), 24, 0.0, residual="postnorm", init="xavier")
    torch.manual_seed(0)
    ours.reset_parameters()
    torch.manual_seed(0)
    for name, value in ours.named_parameters():
        parts = torch.zeros_like(value).chunk(3 if "in_proj" in name else 1)
        expected = [torch.nn.init.xavier_normal_(part) if part.ndim == 2 else part for part in parts]
        if "norm" not in name:
            assert_close(value.detach(), torch.cat(expected), rtol=0, atol=0)
