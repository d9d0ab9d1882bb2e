"""Small stacks, and the Rust model with its skeleton, for tests of normformer_rs.nn."""

import torch

import normformer_rs as nfrs
import reference as ref
from normformer_rs import nn as nfnn

NORMS = [entry["name"] for entry in nfrs.tables()["norms"]]
RESIDUALS = [entry["name"] for entry in nfrs.tables()["residuals"]]
PAIRS = [(norm, residual) for norm in NORMS for residual in RESIDUALS if ref.is_defined(norm, residual)]
MIXED = ("attnres", "mhc", "hyper-connections", "mhc-lite")
"""Schemes that read x from several tensors."""
BETWEEN_LAYERS = ("dlcl", "denseformer", "resi-dual", "value-residual", "x0-lambdas", *MIXED)
D, HEADS, FF = 16, 4, 24
SOURCES = [[5, 6, 7, 8, 9, 2], [10, 2], [11, 12, 13, 2]]
TARGETS = [[0, 14, 15], [0, 16, 17, 18, 19], [0]]
SHAPE = {"vocab_size": 23, "d_model": D, "d_ff": FF, "heads": HEADS, "encoder_layers": 2, "decoder_layers": 3}
# 1/4 is exact in f32
OPTIONS = {"branchnorm": {"branchnorm_steps": 4}, "layerscale": {"layerscale_init": 0.1}, "prores": {"prores_steps": 4}}


def shake(model):
    """Away from γ = 1, β = 0 and branches that start at zero."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def rust_and_skeleton(norm="layernorm", residual="prenorm", **options):
    """The Rust loop's model, and its skeleton with the same weights."""
    options = {**OPTIONS.get(residual, {}), **options}
    if norm in ref.BLENDED_NORMS:  # η = 1 doubles the stream at each norm, and its rounding
        options = {"repbn_start": "zeros"} | options
    config = nfrs.TransformerConfig(**{**SHAPE, "dropout": 0.0, "norm": norm, "residual": residual, **options})
    rust = shake(nfrs.Transformer(config, seed=3).double())
    skeleton = nfnn.Transformer(
        D,
        HEADS,
        2,
        3,
        FF,
        0.0,
        batch_first=True,
        dtype=torch.float64,
        norm=norm,
        residual=residual,
        **options,
    )
    state = rust.state_dict()
    skeleton.load_state_dict({k: v for k, v in state.items() if k.startswith(("encoder.", "decoder."))}, strict=True)
    return rust, skeleton


def encoder(residual="prenorm", norm="scalenorm", dropout=0.0, **options):
    layer = nfnn.TransformerEncoderLayer(
        D, HEADS, FF, dropout, batch_first=True, residual=residual, norm=norm, **options
    )
    return shake(nfnn.TransformerEncoder(layer, 2))


def embed(table, tokens, has_positions=True):
    real = tokens != ref.PAD
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    added = ref.sinusoids(positions, D, "twt").to(table.dtype) if has_positions else 0
    return (table[tokens] * D**0.5 + added) * real.unsqueeze(-1)
