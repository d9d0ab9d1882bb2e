"""ScaleNorm, FixNorm, prenorm, postnorm and smallinit against the model of Transformers without Tears, in f64."""

import types

import pytest
import torch
from authors_support import module

import normformer_rs as nfrs

WHERE = "tnq177/transformers_without_tears", "c2dfaaa93c2437a75f08b52de88b1132f78e7cad"
THEIRS = {"embed_dim": 128, "ff_dim": 192, "num_enc_layers": 2, "num_dec_layers": 2, "joint_vocab_size": 500}
OURS = {"d_model": 128, "d_ff": 192, "heads": 8, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 500}


def in_our_order(theirs, of):
    """Returns `of` each of the authors' parameters, but for the embedding of languages, which we do not have."""
    found, decoder = [of(theirs.word_embedding), of(theirs.out_bias)], theirs.decoder
    for stack, attentions in ((theirs.encoder, [theirs.encoder.atts]), (decoder, [decoder.atts, decoder.cross_atts])):
        norms = iter(stack.scales)
        for i in range(2):
            for kind in attentions:
                weights, biases = of(kind[i].weights), of(kind[i].biases)  # q, k and v, then the output's
                found += [weights[:384], biases[:384], weights[384:], biases[384:], *map(of, next(norms).parameters())]
            found += map(of, [*stack.ffs[i].parameters(), *next(norms).parameters()])
        found += [of(p) for norm in norms for p in norm.parameters()]  # prenorm's last
    return [torch.atleast_1d(value) for value in found]


def logits_of(ours, theirs, views):
    """Moves both models' parameters by the same random numbers, and returns the logits of both on padded sentences.
    `views`: the authors' parameters in our order."""
    theirs.lang_embedding.data.zero_()
    for p, view in zip(ours.parameters(), views, strict=True):
        p.data.copy_(view.add_(torch.randn_like(view), alpha=0.05))
    source, target = torch.randint(2, 500, (2, 3, 6))
    source[1, 4:] = target[2, 3:] = 1
    real, logits, logit_fn = target != 1, [], theirs.logit_fn
    theirs.logit_fn = lambda *given: logits.append(logit_fn(*given)) or logits[0]
    theirs(source, target, target, 0, 1, torch.ones(500))
    return ours(source, target)[real], logits[0].reshape(3, 6, 500)[real]


@pytest.mark.parametrize(("norm", "fixnorm"), [("scalenorm", True), ("layernorm", False)])
@pytest.mark.parametrize("residual", ["prenorm", "postnorm"])
def test_model(residual, norm, fixnorm):
    """First values, by their deciles; then logits and gradients at other values, with padding on both sides."""
    constants = module(*WHERE, "all_constants.py", {"PAD_ID = 0": "PAD_ID = 1", "BOS_ID = 1": "BOS_ID = 0"})  # as ours
    utils = module(*WHERE, "utils.py", {"device=device)": "device=device, dtype=torch.float64)"})
    authors = module(*WHERE, "model.py", layers=module(*WHERE, "layers.py"), utils=utils, all_constants=constants)
    options = module(*WHERE, "configurations.py", all_constants=constants).base() | THEIRS | {"lang_vocab_size": 2}
    options |= {"pre_act": residual == "prenorm", "scnorm": norm == "scalenorm", "fix_norm": fixnorm}
    theirs = authors.Transformer(types.SimpleNamespace(**options)).double().eval()
    config = nfrs.TransformerConfig(**OURS, residual=residual, norm=norm, fixnorm=fixnorm, output_bias=True)
    ours = nfrs.Transformer(config).double().eval()
    deciles = torch.arange(1, 10).double() / 10
    for p, first in zip(ours.parameters(), in_our_order(theirs, torch.Tensor.detach), strict=True):
        spread = first.std(correction=0).item()
        torch.testing.assert_close(p.data.quantile(deciles), first.quantile(deciles), rtol=1e-7, atol=spread / 12)
    y, expected = logits_of(ours, theirs, in_our_order(theirs, torch.Tensor.detach))
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    slope = torch.randn_like(y)
    y.backward(slope), expected.backward(slope)
    found = [p.grad for p in ours.parameters()]
    torch.testing.assert_close(found, in_our_order(theirs, lambda p: p.grad), rtol=0, atol=1e-12)
