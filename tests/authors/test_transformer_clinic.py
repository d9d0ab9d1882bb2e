"""Admin, its profiling and its constants, deepnorm and postnorm against code of Admin's authors, in f64."""

import pytest
from authors_fairseq import (
    arguments,
    assert_same_first_values,
    assert_same_models,
    fork,
    in_our_names,
    our_model,
    sentences,
    their_stacks,
)
from authors_support import module
from torch.testing import assert_close

CLINIC = "LiyuanLucasLiu/Transformer-Clinic", "70f72b708ab074db5ca3726494e3263516041159"
CONSTANTS = "microsoft/admin-torch", "08b6605bf92af0fcef2b9e9abb2b6d49e852298a", "admin_torch/admin.py"
PATHS = ["modules/multihead_attention", "modules/transformer_layer", "models/transformer"]
PATHS = [f"fairseq/fairseq/{path}.py" for path in PATHS]
CHANGES = {".float().data": ".double().data", "open('profile.ratio.init', 'w')": "__import__('io').StringIO()"}
CHANGES = {PATHS[1]: CHANGES, PATHS[2]: {"torch.float\n": "torch.double\n"}}
NAMES = {"(attention|self)_ratio_change": "residual_scale1", "encoder_ratio_change": "residual_scale2"}
NAMES |= {"(encoder.*)fc_ratio_change": r"\1residual_scale2", "fc_ratio_change": "residual_scale3"}
LAYERS = 2, 3


def models(init_type, residual, width=8, words=11):
    args = arguments(width, LAYERS, words, init_type=init_type)
    return our_model(args, residual), their_stacks(fork(*CLINIC, PATHS, CHANGES), args)


def test_admin():
    ours, theirs = models("adaptive-profiling", "admin")
    assert_same_models(ours, theirs.eval(), NAMES)


def test_profiling():
    """The factors that one batch with padding sets, in training."""
    ours, theirs = models("adaptive-profiling", "admin")
    ours.load_state_dict(in_our_names(dict(theirs.named_parameters()), NAMES))
    source, target = sentences(11)
    theirs["decoder"](target, theirs["encoder"](source, None))
    ours.profile(source, target)
    found, expected = dict(ours.named_parameters()), in_our_names(dict(theirs.named_parameters()), NAMES)
    factors = [name for name in expected if "residual_scale" in name]
    assert len(factors) == 2 * LAYERS[0] + 3 * LAYERS[1]
    assert_close([found[name] for name in factors], [expected[name] for name in factors], rtol=0, atol=1e-12)


def test_constants():
    """The factors of the authors' later package, admin-torch, in the layers of their fork."""
    constants = module(*CONSTANTS, {"torch.FloatTensor": "torch.DoubleTensor"})
    ours, theirs = models("adaptive-profiling", "admin-const")
    for stack, branches in (("encoder", 2 * LAYERS[0]), ("decoder", 3 * LAYERS[1])):
        for layer in theirs[stack].layers:
            for name in [name for name, _ in layer.named_parameters(recurse=False)]:
                delattr(layer, name)
                constants.as_buffer(layer, name, branches)
    assert_same_models(ours, theirs.eval())


@pytest.mark.parametrize(("init_type", "residual"), [("default", "postnorm"), ("deepnet", "deepnorm")])
def test_without_admin(init_type, residual):
    assert_same_models(*models(init_type, residual))


def test_first_values_of_deepnorm():
    assert_same_first_values(*models("deepnet", "deepnorm", 128, 500))
