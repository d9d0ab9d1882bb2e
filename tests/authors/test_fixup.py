"""R-Fixup against its authors' fork of fairseq, Fixup's transformer_zero, in f64."""

from authors_fairseq import arguments, assert_same_models, fork, in_our_names, our_model, their_stacks
from torch.testing import assert_close

AUTHORS = "hongyi-zhang/Fixup", "f3fa449fbb8906ccb7143cea822f8b964b3d9258"
PATHS = ["fairseq/fairseq/modules/multihead_attention_zero.py", "fairseq/fairseq/models/transformer_zero.py"]
CHANGES = {"attn_weights.float()": "attn_weights", "q *= self.scaling": "q = q * self.scaling"}  # for f64 and autograd
CHANGES = {PATHS[0]: CHANGES, PATHS[1]: {"from . import": "from fairseq.models import"}}
NAMES = {r"er\.shift0.bias": "er.end_shift", r"er\.scale0.weight": "er.end_scale"}
NAMES |= {r"(encoder.*)shift([1-3]).bias": r"\1shift\2", "shift0.bias": "self_attn.input_shift"}
NAMES |= {"shift1.bias": "multihead_attn.input_shift"} | {f"shift{i}.bias": f"shift{i - 1}" for i in (2, 3, 4)}
NAMES |= {f"scale{i}.weight": f"branch_scale{i + 1}" for i in range(3)}


def models(width, words):
    """With 3 and 2 layers there are 12 branches, as the authors' cross-attention assumes of every model."""
    args = arguments(width, (3, 2), words)
    return our_model(args, "r-fixup"), their_stacks(fork(*AUTHORS, PATHS, CHANGES), args, "TransformerZero")


def test_logits_and_gradients():
    assert_same_models(*models(8, 11), NAMES)


def test_first_values():
    """Scales, shifts and zeros are equal. Of the others the authors' are uniform, ours normal: deviations are equal.

    The authors draw q, k and v as one matrix, which makes them √½ as large (docs/spec.md, 3.1).
    """
    ours, theirs = models(128, 500)
    expected = in_our_names(dict(theirs.named_parameters()), NAMES)
    for name, weight in ours.named_parameters():
        first = expected[name].detach() * (2**0.5 if "in_proj" in name else 1)
        if first.max() == first.min():
            assert_close(weight.detach(), first, rtol=0, atol=0)
        else:
            assert_close(weight.std(), first.std(), rtol=0.02, atol=0)
