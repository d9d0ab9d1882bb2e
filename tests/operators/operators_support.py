"""The row norms' oracles, and tensors for them."""

import itertools

import torch
from fuzz_tensors import Draw
from fuzz_twins import DIFFERENTIABLE, FAMILIES, OPS_BY_NAME

import reference as ref
from row_norms import EPS, NORMS, OPS, parameters

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 2, 7, 16, 31, 123, 512, 1000]
__all__ = ["EPS", "NORMS", "OPS", "parameters"]


def leaves(*tensors):
    return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]


class Usual(Draw):
    """Draws contiguous float32 matrices, and the middle one of other choices."""

    def __init__(self):
        super().__init__(0, 0)

    def one(self, *choices):
        choices = [choice for choice in choices if choice is not None]
        return torch.float32 if torch.float32 in choices else choices[len(choices) // 2]

    def chance(self, p):
        return False

    def shape(self, least=0):
        return [4, 8]

    def normal(self, shape, dtype=torch.float64, scale=1.0):
        return (scale * torch.randn(shape, generator=self.generator, dtype=torch.float64, device="cpu")).to(dtype)


def usual(op):
    """The arguments of a usual call, by what the fuzzer knows of the operator: always the same numbers, as leaves."""
    given = FAMILIES[op][0](Usual(), op)
    given = {n: t.to(torch.get_default_device()) if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    return tuple(leaves(t)[0] if n in DIFFERENTIABLE and isinstance(t, torch.Tensor) else t for n, t in given.items())


def of_x(op):
    """x → the first output of a usual call, whose matrix x takes the place of."""

    def call(x):
        out = getattr(OPS, op)(x, *usual(op)[1:])
        return out if isinstance(out, torch.Tensor) else out[0]

    call.__name__ = op
    return call


OF_X = {
    op: of_x(op)
    for op in FAMILIES
    if OPS_BY_NAME[op][0].name == "x" and not op.endswith("_forward") and not any(a.kwarg_only for a in OPS_BY_NAME[op])
}
"""The usual call of every operator of a matrix x."""


def gradients(y, inputs, dy):
    return torch.autograd.grad(y, [t for t in inputs if t is not None], dy)


def residual_arguments(norm, width=8, p=0.0, gains=False, x_type=torch.float64, f_type=torch.float64):
    x, f = torch.randn(4, width).to(x_type), torch.randn(4, width).to(f_type)
    given = parameters(norm, width, torch.float64) if norm else [None, None]
    alpha, beta = (torch.rand(1).double() + 0.5, torch.rand(width).double() + 0.5) if gains else (None, None)
    seed = torch.tensor([77, 3, 1]) if p else None
    return leaves(x, f, alpha, beta, *given), seed


def residual_oracle(norm, tensors, p, kind=torch.float64):
    x, f, alpha, beta, *given = (None if t is None else t.to(kind) for t in tensors)
    keep = ref.dropout_keep(77, 3, 1, 5, 4, x.shape[-1], p).to(x.device) if p else None
    x_plus = (1 if alpha is None else alpha) * x
    branch = f if keep is None else f * keep * ref.dropout_scale(p)
    x_plus = x_plus + (1 if beta is None else beta) * branch
    return x_plus, NORMS[norm](x_plus, *given) if norm else None


LENGTHS = [(3, 5), (1, 1), (9, 70), (33, 2), (0, 4)]  # (queries, keys) of each sentence


def attention_arguments(causal, dtype=torch.float64, heads=3, d_head=5):
    lengths = [(k, k) if causal else (q, k) for q, k in LENGTHS]
    starts = list(itertools.accumulate(lengths, lambda a, b: (a[0] + b[0], a[1] + b[1]), initial=(0, 0)))
    ranges = torch.tensor([[qs, q, ks, k] for (qs, ks), (q, k) in zip(starts, lengths)])
    q_rows, k_rows = starts[-1]
    # slices of a fused projection: rows further apart than they are wide
    q = torch.randn(q_rows, 2 * heads * d_head).to(dtype)[:, : heads * d_head]
    kv = torch.randn(k_rows, 2 * heads * d_head).to(dtype)
    return q, kv[:, : heads * d_head], kv[:, heads * d_head :], ranges, heads


def attention_oracle(q, k, v, ranges, heads, causal, scale, p):
    keep = ref.dropout_keep(9, 8, 7, 6, len(q) * heads, max(ranges[:, 3]).item(), p).to(q.device) if p else None
    rows = []
    for q_start, q_len, k_start, k_len in ranges.tolist():
        cut = lambda t, start, n: t[start : start + n].unflatten(1, (heads, -1)).transpose(0, 1)  # noqa: E731
        mask = ref.causal_mask(k_len) if causal else None
        own = None
        if p:
            own = keep[q_start * heads : (q_start + q_len) * heads, :k_len].unflatten(0, (q_len, heads)).transpose(0, 1)
        out = ref.attention(
            cut(q, q_start, q_len) * scale,
            cut(k, k_start, k_len),
            cut(v, k_start, k_len),
            mask,
            own,
            ref.dropout_scale(p) if p else 1.0,
        )
        rows.append(out.transpose(0, 1).flatten(1))
    return torch.cat(rows)
