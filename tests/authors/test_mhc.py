"""mhc against DeepSeek's reference, in f64, and against mHC-lite's first values."""

import types

import pytest
import torch
from authors_support import module
from streams_support import PARTS, WIDTH, N, compare, stack_of, sublayers
from torch.testing import assert_close

DEEPSEEK = "deepseek-ai/TileKernels", "36d9e45d38e204ebb87e6f6e833821eee0482fe5", "tile_kernels/torch/mhc.py"
LITE = "FFTYYY/mhc-lite", "ea197752957e520063ae0e26a88c8061834c67fa", "hyper_conn/mhc.py"
IN_F64 = {".bfloat16()": "", ".float()": "", "== torch.float\n": "== torch.double\n"}
EPS = 1e-6


@pytest.mark.parametrize(("magnitude", "iterations"), [(2.0, 20), (1.5, 3)])
@pytest.mark.parametrize("kind", ["Encoder", "Decoder"])
def test_outputs_and_gradients(kind, magnitude, iterations):
    """The authors' functions, each from the one before, around our sublayers and before the norm after the stack."""
    authors = module(*DEEPSEEK, IN_F64)

    def run(stack, x, parts_and_functions):
        streams = authors.expand_to_mhc_ref(x, N)
        for parts, function in parts_and_functions:
            mixes = authors.mhc_pre_norm_fn_ref(streams, parts["weight"], None, EPS)
            mixes = authors.mhc_pre_split_mixes_ref(mixes, parts["scale"], parts["bias"], N, magnitude, EPS)
            y = function(authors.mhc_pre_apply_mix_ref(streams, mixes[0]))
            between = authors.sinkhorn_normalize_ref(mixes[2], iterations, EPS)
            streams = authors.mhc_post_ref(y, streams, mixes[1], between)
        mixes = authors.mhc_pre_norm_fn_ref(streams, stack.end_hyper_weight, None, EPS)
        mix = authors.mhc_head_compute_mix_ref(mixes, stack.end_hyper_scale, stack.end_hyper_bias, EPS)
        return stack.norm(authors.mhc_pre_apply_mix_ref(streams, mix.unsqueeze(-1)))

    options = {"mhc_streams": N, "mhc_magnitude": magnitude, "mhc_iterations": iterations}
    compare(stack_of(kind, "mhc", **options), run)


@pytest.mark.parametrize("kind", ["Encoder", "Decoder"])
def test_first_values(kind):
    """DeepSeek's code has none; ours are mHC-lite's, whose layers are our sublayers."""
    unused = dict.fromkeys(["rearrange", "repeat", "reduce", "einsum"])
    layers = types.SimpleNamespace(Rearrange=lambda *_, **__: None, Reduce=None)
    authors = module(*LITE, einops=types.SimpleNamespace(**unused), einops__layers__torch=layers)
    for number, (ours, _) in enumerate(sublayers(stack_of(kind, "mhc", mhc_streams=N))):
        theirs = authors.ManifoldConstrainedHyperConnections(N, dim=WIDTH, layer_index=number)
        alpha, weights = theirs.static_alpha, torch.cat([theirs.dynamic_alpha_fn, theirs.dynamic_beta_fn], 1).T
        scale = torch.stack([theirs.pre_branch_scale[0], theirs.h_post_scale, theirs.residual_scale[0]])
        bias = torch.cat([alpha[:, 0], theirs.static_beta, alpha[:, 1:].flatten()])
        for part, value in zip(PARTS, [weights, scale, bias]):
            assert_close(ours[part].float(), value, rtol=0, atol=0)
