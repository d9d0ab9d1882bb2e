"""RepBN and PRepBN against their authors' modules, those of images and of Llama, in f64."""

from functools import partial, reduce

import pytest
import torch
from authors_support import module, source

from normformer_rs import nn

AUTHORS = "xinghaochen/SLAB", "f58db00b9db3959b5de03986f454aa5ff064279a"
NAMES = {"norm1.": "row_", "norm2.": "", "bn.": "", "alpha": "share"}
COUNTS = ("warm", "iter", "total_step", "num_step")


def their_norm(is_llama, warm, steps):
    """Their PRepBN; their RepBN for no steps. Llama's without its cast to f32."""
    if not is_llama:
        authors = module(*AUTHORS, "classification/models/prepbn.py")
        return authors.LinearNorm(6, torch.nn.LayerNorm, authors.RepBN, warm, steps) if steps else authors.RepBN(6)
    text, found = source(*AUTHORS, "llama/modeling/llama-350M/modeling_llama.py"), {"torch": torch, "nn": torch.nn}
    exec(text[text.index("class LlamaRMSNorm") : text.index("linearnorm =")].replace(".to(torch.float32)", ""), found)
    rms, repbn = found["LlamaRMSNorm"], found["RepBN"]
    return found["LinearNorm"](6, rms, repbn, warm=warm, step=steps) if steps else repbn(6)


def in_our_names(named):
    of_norms = {name: tensor for name, tensor in named.items() if name not in COUNTS}
    return {reduce(lambda name, pair: name.replace(*pair), NAMES.items(), name): t for name, t in of_norms.items()}


@pytest.mark.parametrize("warm,steps", [(0, 0), (0, 4), (2, 4)])
@pytest.mark.parametrize("is_llama", [False, True], ids=["images", "llama"])
def test_first_values_forwards_statistics_and_steps(is_llama, warm, steps):
    """Our t follows SGD, or Llama's count of 16 forwards. Their variances are n/(n−1) of ours; λ = k/4 is exact."""
    theirs = their_norm(is_llama, warm, steps).double()
    options = ({"steps": steps, "warm": warm} | ({"row": "rmsnorm"} if is_llama else {})) if steps else {}
    ours = (nn.PRepBN if steps else nn.RepBN)(6, start="zeros" if is_llama else "ones", **options).double()
    learned = in_our_names(dict(theirs.named_parameters()))
    torch.testing.assert_close(dict(ours.named_parameters()), learned, rtol=0, atol=0)
    rules = [torch.optim.SGD(norm.parameters(), 0.1, momentum=0.9) for norm in (theirs, ours)]
    mask = torch.rand(3, 7) < (0.4 if is_llama else 0.0)
    real, left, close = (~mask).sum(), 1.0, partial(torch.testing.assert_close, rtol=0, atol=1e-11)
    for forward in range((warm + steps + 3) * (16 if is_llama else 1)):
        if is_llama and steps:
            ours.set_t(forward // 16 + (2 if forward % 16 else 1))
        left *= 0.9 if not steps or ours.t > warm else 1.0
        values, slope = torch.randn(3, 7, 6).double() + 0.5, torch.randn(3, 7, 6).double() * ~mask[..., None]
        x = [values.clone().requires_grad_() for _ in rules]
        y, expected = ours(x[0], mask), theirs(x[1], *([(~mask).long()] if is_llama else []))
        y.backward(slope), expected.backward(slope)
        close([y[~mask], x[0].grad], [expected[~mask], x[1].grad])
        computed = [name for name, p in learned.items() if p.grad is not None]  # in the warm-up ours are 0
        close([getattr(ours, name).grad for name in computed], [learned[name].grad for name in computed])
        mean, var = (in_our_names(theirs.state_dict())[name] for name in ("running_mean", "running_var"))
        close([ours.running_mean, (ours.running_var - left) * real / (real - 1)], [mean, var - left])
        [rule.step() for rule in rules], [rule.zero_grad() for rule in rules]
        close(dict(ours.named_parameters()), learned)
    ours.load_state_dict(in_our_names(theirs.state_dict()), strict=not steps)
    close(ours.eval()(x[0]), theirs.eval()(x[1]))
