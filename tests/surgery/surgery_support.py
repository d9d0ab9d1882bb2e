"""Models that somebody else wrote, for swaps: torch.nn's and Hugging Face's."""

import pytest
import torch
from torch import nn

import normformer_rs as nfrs

NORMS = [entry["name"] for entry in nfrs.tables()["norms"]]


RESIDUALS = [entry["name"] for entry in nfrs.tables()["residuals"]]
ROTATED = ("ngpt",)
"""Schemes that act on queries and keys after their rotation, which other libraries' blocks do not show."""
SWAPPABLE = [name for name in RESIDUALS if name not in ROTATED]
BETWEEN_LAYERS = ("dlcl", "denseformer", "resi-dual", "attnres", "mhc", "hyper-connections", "mhc-lite")
BETWEEN_LAYERS += ("value-residual", "x0-lambdas")


D, HEADS, FF = 16, 4, 32


def torchs_encoder(**options):
    layer = nn.TransformerEncoderLayer(D, HEADS, FF, 0.1, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2)


def torchs_transformer():
    return nn.Transformer(D, HEADS, 2, 3, FF, 0.1, batch_first=True)


class Task(nn.Module):
    """Embeds tokens, runs a model of torch.nn, and predicts each token again."""

    def __init__(self, model):
        super().__init__()
        self.embedding, self.model = nn.Embedding(11, D), model

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = self.model(x, x) if isinstance(self.model, nn.Transformer) else self.model(x)
        logits = x @ self.embedding.weight.T
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def hugging_face(name):
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 40, "pad_token_id": 0}
    if name == "bert":
        config = transformers.BertConfig(
            hidden_size=D, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=FF, **common
        )
        return transformers.BertForMaskedLM(config)
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=D, n_layer=2, n_head=HEADS, n_positions=32, bos_token_id=1, eos_token_id=2, **common
        )
        return transformers.GPT2LMHeadModel(config)
    if name.startswith("t5"):
        config = transformers.T5Config(
            d_model=D,
            d_kv=6 if "gated" in name else 4,  # T5 1.1 small: heads·d_kv is not d_model, nor does heads divide it
            d_ff=FF,
            num_layers=2,
            num_heads=3 if "gated" in name else HEADS,
            feed_forward_proj="gated-gelu" if "gated" in name else "relu",
            decoder_start_token_id=0,
            **common,
        )
        return transformers.T5ForConditionalGeneration(config)
    config = transformers.MarianConfig(
        d_model=D,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=FF,
        decoder_ffn_dim=FF,
        max_position_embeddings=32,
        decoder_start_token_id=0,
        eos_token_id=2,
        forced_eos_token_id=None,
        decoder_vocab_size=40,
        **common,
    )
    return transformers.MarianMTModel(config)


HUGGING_FACE = ["bert", "gpt2", "t5", "t5-gated", "marian"]


MODELS = ["encoder", "transformer", *HUGGING_FACE]


def build(name):
    torch.manual_seed(0)
    if name in HUGGING_FACE:
        return hugging_face(name)
    return Task(torchs_encoder() if name == "encoder" else torchs_transformer())


def run(model):
    """(logits, loss) on fixed tokens."""
    tokens = torch.arange(3, 11).repeat(2, 1)
    if isinstance(model, Task):
        return model(tokens)
    out = model(input_ids=tokens, labels=tokens)
    return out.logits, out.loss


def train(model, optimizer, updates=8):
    model.train()
    losses = []
    for _ in range(updates):
        loss = run(model)[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def state_of(model):
    return {name: (id(p), p.detach().clone()) for name, p in model.state_dict(keep_vars=True).items()}


def assert_same(a, b):
    assert list(a) == list(b)
    for name in a:
        assert a[name][0] == b[name][0] and torch.equal(a[name][1], b[name][1]), name


class Wrapped(nn.Module):
    """As adapters wrap a linear layer: a module around it, which shows its weight and bias."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return self.base_layer(x)
