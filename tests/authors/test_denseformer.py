"""DenseFormer against its authors' language model, with dilation 1 and period 1."""

import re
from types import SimpleNamespace

import torch
from authors_support import module

from normformer_rs import nn

AUTHORS = ("epfml/DenseFormer", "c99a623bdb5f6611bf0d37e964c67ecbf15c3c19", "experiments/models/denseformer.py")
CHANGES = {"from . import": "import", "torch.Tensor().to(full_tensor.device)": "full_tensor.new_empty(0)"}  # for f64
NAMES = {r".*\.h\.(\d)\.0": r"layers.\1", ".*ln_f": "norm", "ln_": "norm", "attn.c_attn.": "self_attn.in_proj_"}
NAMES |= {"attn.c_proj": "self_attn.out_proj", "mlp.c_fc": "linear1", "mlp.c_proj": "linear2", ".*wte.weight": "words"}


class NoPositions(torch.nn.Module):
    """In place of the authors' positional encoders: changes nothing."""

    def forward(self, tokens):
        places = ("adapt_model_input", "adapt_queries", "adapt_keys")
        return tokens, SimpleNamespace(**dict.fromkeys(places, lambda x, **_: x))


def in_our_names(tensors):
    """Returns the authors' parameters, or their gradients, in our names. Row 0 of our W does nothing."""
    sums = torch.zeros(4, 4, dtype=torch.float64)
    for row in (1, 2, 3):
        sums[row, : row + 1] = tensors.pop(f"weights.{row - 1}.weight")[0]
    for old, new in NAMES.items():
        tensors = {re.sub(old, new, name): tensor for name, tensor in tensors.items()}
    return tensors | {"combine.weight": sums}


def test_denseformer():
    """The first values of the sums; outputs and gradients with random weights. The words' matrix is tied."""
    torch.manual_seed(0)
    caches = SimpleNamespace(get_cache=lambda _: lambda _: SimpleNamespace(get_storage_for_layer=lambda _: None))
    positions = SimpleNamespace(get_encoder=lambda _: lambda _: NoPositions())
    beside = {"caches": caches, "positional_encoders": positions, "tiktoken": SimpleNamespace(get_encoding=str)}
    sizes = {"n_embd": 16, "n_head": 4, "n_layer": 3, "vocab_size": 11, "sequence_length": 8, "dropout": 0.0}
    sizes |= {"increase_T_every": 1, "dilation_factor": 1, "bias": True, "attention_window_length": None}
    config = SimpleNamespace(**sizes, lm_cache=None, positional_encoder=None)
    theirs = module(*AUTHORS, CHANGES, **beside).DenseFormer(config).double()
    layer = nn.TransformerEncoderLayer(16, 4, 64, 0.0, "gelu", batch_first=True, residual="denseformer")
    ours = nn.TransformerEncoder(layer, 3).double()
    ours.words = torch.nn.Parameter(torch.empty(11, 16, dtype=torch.float64))
    first = in_our_names(dict(theirs.named_parameters()))["combine.weight"]
    torch.testing.assert_close(ours.combine.weight[1:], first[1:], rtol=0, atol=0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ours.load_state_dict(in_our_names(dict(theirs.named_parameters())))
    tokens = torch.randint(11, (2, 7))
    mask = torch.nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    outputs = [ours(ours.words[tokens], mask) @ ours.words.T, theirs(tokens, tokens, get_logits=True)["logits"]]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-11)
    weights = torch.randn_like(outputs[0])
    torch.autograd.backward(outputs, [weights, weights])
    gradients = [{name: parameter.grad for name, parameter in model.named_parameters()} for model in (ours, theirs)]
    torch.testing.assert_close(gradients[0], in_our_names(gradients[1]), rtol=0, atol=1e-10)
