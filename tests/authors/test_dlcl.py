"""Dynamic linear combination of layers against its authors' fork of fairseq, pre- and post-norm, in f64."""

import pytest
from authors_fairseq import arguments, assert_same_models, fork, in_our_names, our_model, their_stacks
from torch.testing import assert_close

AUTHORS = "wangqiangneu/dlcl", "c632ee2bc22a007541243d8d6d2820697c62111b"
PATHS = [f"fairseq/{path}.py" for path in ("modules/dlcl", "modules/multihead_attention", "models/dlcl_transformer")]
CHANGES = {"attn_weights.float()": "attn_weights", "q *= self.scaling": "q = q * self.scaling"}  # for f64 and autograd
CHANGES = {PATHS[0]: {"\\sum": "sum"}, PATHS[1]: CHANGES, PATHS[2]: {"from . import": "from fairseq.models import"}}
NAMES = {r"history\.layer_norms": "combine.norms", "history": "combine"}
NAMES |= {rf"layer_norms\.{i}": f"norm{i + 1}" for i in range(3)}


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_model(norm):
    """First values of sums and norms; then logits and gradients with random weights, and padding on both sides."""
    before = dict.fromkeys(("encoder_normalize_before", "decoder_normalize_before"), norm == "pre")
    args = arguments(8, (3, 2), 11, normalize_learned_weight=False, **before)
    theirs = their_stacks(fork(*AUTHORS, PATHS, CHANGES), args, "DlclTransformer")
    ours = our_model(args, "dlcl", dlcl_norm=norm)
    found, first = dict(ours.named_parameters()), in_our_names(dict(theirs.named_parameters()), NAMES)
    names = [name for name in first if "combine" in name or "norm" in name]
    assert_close([found[name] for name in names], [first[name] for name in names], rtol=0, atol=1e-7)
    assert_same_models(ours, theirs, NAMES)
