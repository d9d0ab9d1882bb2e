"""Fixed ScaleNorm, and FixNorm with it and with LayerNorm, against the model of Transformers without Tears, in f64."""

import types

import pytest
import torch
from authors_support import module
from test_transformers_without_tears import OURS, THEIRS, WHERE, in_our_order, logits_of

import normformer_rs as nfrs

IN_F64 = {"torch.tensor(scale)": "torch.tensor(scale, dtype=torch.float64)"}


def their_model(residual, norm, fixnorm):
    """Returns the authors' model. The paper's Table 7 keeps g = √d but for the decoder's last; the release has no
    option for that, so here these g are not learned."""
    constants = module(*WHERE, "all_constants.py", {"PAD_ID = 0": "PAD_ID = 1", "BOS_ID = 1": "BOS_ID = 0"})  # as ours
    utils = module(*WHERE, "utils.py", {"device=device)": "device=device, dtype=torch.float64)"})
    layers = module(*WHERE, "layers.py", IN_F64)
    authors = module(*WHERE, "model.py", layers=layers, utils=utils, all_constants=constants)
    options = module(*WHERE, "configurations.py", all_constants=constants).base() | THEIRS | {"lang_vocab_size": 2}
    options |= {"pre_act": residual == "prenorm", "scnorm": "scale" in norm, "fix_norm": fixnorm}
    theirs = authors.Transformer(types.SimpleNamespace(**options)).double().eval()
    fixed = [*theirs.encoder.scales, *theirs.decoder.scales][:-1] if "scale" in norm else []
    for scale in fixed:
        scale.requires_grad_(False)
    return theirs


def learned(theirs, of):
    """Returns `of` each of the authors' parameters in our order, without the single numbers, but for the last one."""
    *found, last = in_our_order(theirs, of)
    return [value for value in found if value.numel() > 1] + [last]


@pytest.mark.parametrize(
    ("norm", "fixnorm"), [("scalenorm-fixed", False), ("scalenorm-fixed", True), ("layernorm", True)]
)
@pytest.mark.parametrize("residual", ["prenorm", "postnorm"])
def test_model(residual, norm, fixnorm):
    """First values of the last norm and of the words, the latter by deciles; then logits and all gradients at other
    values, with padding on both sides."""
    torch.manual_seed(0)
    theirs = their_model(residual, norm, fixnorm)
    config = nfrs.TransformerConfig(**OURS, residual=residual, norm=norm, fixnorm=fixnorm, output_bias=True)
    ours = nfrs.Transformer(config).double().eval()
    first, deciles = learned(theirs, torch.Tensor.detach), torch.arange(1, 10).double() / 10
    torch.testing.assert_close([*ours.parameters()][-1].detach(), first[-1], rtol=1e-7, atol=0)
    found, expected = (words.detach().quantile(deciles) for words in (next(ours.parameters()), first[0]))
    torch.testing.assert_close(found, expected, rtol=0, atol=0.1 * expected[-1].item())
    y, expected = logits_of(ours, theirs, first)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    slope = torch.randn_like(y)
    y.backward(slope), expected.backward(slope)
    gradients = learned(theirs, lambda p: torch.zeros(()) if p.grad is None else p.grad)
    torch.testing.assert_close([p.grad for p in ours.parameters()], gradients, rtol=0, atol=1e-12)
