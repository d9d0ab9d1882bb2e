"""hyper-connections against lucidrains' module: first values, outputs and all gradients, in f64."""

import pytest
import torch
from authors_support import module
from streams_support import EINOPS, LAYERS, PARTS, WIDTH, N, compare, put, stack_of, sublayers
from torch.testing import assert_close

COMMIT = "47751035f6e92f73121f1da56603f0d410115799"
AUTHORS = "lucidrains/hyper-connections", COMMIT, "hyper_connections/hyper_connections.py"
LAYER_NORM = {"self.norm = RMSNorm(dim)": "self.norm = nn.LayerNorm(dim)"}


@pytest.mark.parametrize("kind", ["Encoder", "Decoder"])
def test_hyper_connections(kind):
    """Their norm is an RMSNorm; the paper's and ours is LayerNorm (spec.md, 2.31). Their layers are our sublayers."""
    authors = module(*AUTHORS, LAYER_NORM, einops=EINOPS, einops__layers__torch=LAYERS)
    expand, reduce = authors.get_expand_reduce_stream_functions(N)
    stack = stack_of(kind, "hyper-connections", hyper_connections_streams=N)
    for number, (ours, _) in enumerate(sublayers(stack)):
        theirs = authors.HyperConnections(N, dim=WIDTH, layer_index=number)
        static = torch.cat([theirs.static_alpha, theirs.static_beta[:, None]], 1).flatten()
        weights = torch.cat([theirs.dynamic_alpha_fn, theirs.dynamic_beta_fn[:, None]], 1).T
        scale = torch.stack([theirs.dynamic_alpha_scale, theirs.dynamic_beta_scale])
        for part, value in zip(PARTS, [weights, scale, static, *theirs.norm.parameters()]):
            assert_close(ours[part].float(), value, rtol=0, atol=0)

    def run(stack, x, parts_and_functions):
        streams = expand(x)
        for parts, function in parts_and_functions:
            theirs, static = authors.HyperConnections(N, dim=WIDTH, branch=function), parts["bias"].view(N, N + 2)
            put(theirs, static_alpha=static[:, :-1], static_beta=static[:, -1])
            put(theirs, dynamic_alpha_fn=parts["weight"][:-1].T, dynamic_beta_fn=parts["weight"][-1])
            put(theirs, dynamic_alpha_scale=parts["scale"][0], dynamic_beta_scale=parts["scale"][1])
            put(theirs.norm, weight=parts["norm_weight"], bias=parts["norm_bias"])
            streams = theirs(streams)
        return stack.norm(reduce(streams))

    compare(stack, run)
