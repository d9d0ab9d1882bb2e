"""mhc-lite against its authors' module: first values, outputs and all gradients, in f64."""

import pytest
import torch
from authors_support import module
from streams_support import EINOPS, LAYERS, WIDTH, N, compare, put, stack_of, sublayers
from torch.testing import assert_close

AUTHORS = "FFTYYY/mhc-lite", "ea197752957e520063ae0e26a88c8061834c67fa", "hyper_conn/mhc_lite.py"


def parts_of(theirs):
    """Their parameters as our weight, scale, bias; their gain is γ − 1."""
    static, scale = theirs.static_alpha, [theirs.pre_branch_scale[0], theirs.h_post_scale, theirs.residual_scale[0]]
    weight = torch.cat([theirs.dynamic_alpha_fn[:, :N], theirs.dynamic_beta_fn, theirs.dynamic_alpha_fn[:, N:]], 1).T
    return {
        "weight": weight,
        "scale": torch.stack(scale),
        "bias": torch.cat([static[:N], theirs.static_beta, static[N:]]),
    }


@pytest.mark.parametrize("kind", ["Encoder", "Decoder"])
def test_mhc_lite(kind):
    """Their layers are our sublayers."""
    authors = module(*AUTHORS, einops=EINOPS, einops__layers__torch=LAYERS)
    expand, reduce = authors.get_expand_reduce_stream_functions(N)
    stack = stack_of(kind, "mhc-lite", mhc_lite_streams=N)
    for number, (ours, _) in enumerate(sublayers(stack)):
        theirs = authors.MHCLite(N, dim=WIDTH, layer_index=number)
        for part, value in {**parts_of(theirs), "gain": theirs.norm.gamma + 1}.items():
            assert_close(ours[part].float(), value, rtol=0, atol=0)

    def run(stack, x, parts_and_functions):
        streams = expand(x)
        for parts, function in parts_and_functions:
            theirs = authors.MHCLite(N, dim=WIDTH, branch=function)
            (p, g, r), (pre, post, between) = (
                parts[name].split([N, N, len(parts["bias"]) - 2 * N]) for name in ("weight", "bias")
            )
            put(theirs, dynamic_alpha_fn=torch.cat([p, r]).T, dynamic_beta_fn=g.T)
            put(theirs, static_alpha=torch.cat([pre, between]), static_beta=post)
            scales = parts["scale"]
            put(theirs, pre_branch_scale=scales[:1], h_post_scale=scales[1], residual_scale=scales[2:])
            put(theirs.norm, gamma=parts["gain"] - 1)
            streams = theirs(streams)
        return stack.norm(reduce(streams))

    compare(stack, run)
