"""What fuzz.py's valid calls are made in: modes and wrappers of torch that stand between a caller and an operator.

A context gets an operator and valid arguments, calls it, and judges outputs and gradients as a plain call's are. It may
refuse by an exception. A signal, or another value than the twin's, is a fault.
"""

import torch
from fuzz_tensors import Draw
from fuzz_twins import DIFFERENTIABLE, Wrong, written
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor


def tensors_of(a: dict) -> list[str]:
    return [name for name, t in a.items() if isinstance(t, Tensor)]


def wrt(a: dict) -> list[str]:
    return [n for n in DIFFERENTIABLE if isinstance(a.get(n), Tensor) and a[n].is_floating_point()]


def negated(t: Tensor) -> Tensor:
    """The same numbers, with the negative bit."""
    return torch._neg_view(t.detach().neg()) if t.is_floating_point() else t


def twin(t: Tensor) -> TwoTensor:
    """A wrapper around the tensor and a copy of it."""
    return TwoTensor(t, torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t.detach()))


def fake(d: Draw, op: str, a: dict, run, judge) -> None:
    """Shapes and types are a plain call's; some tensors may have been left real."""
    mode = FakeTensorMode(allow_non_fake_inputs=d.chance(0.3))
    real = {} if d.chance(0.7) else {d.one(*tensors_of(a))}
    with mode:
        given = {n: mode.from_tensor(t) if isinstance(t, Tensor) and n not in real else t for n, t in a.items()}
        found = run(op, given)
    for k, (ours, plain) in enumerate(zip(found, run(op, {n: clone(t) for n, t in a.items()}))):
        made, wanted = (f"{t.dtype} {tuple(t.shape)}" for t in (ours, plain))
        if made != wanted:
            raise Wrong(f"{op} in FakeTensorMode: output {k} is {made}, not {wanted}")


def clone(t):
    return t.clone() if isinstance(t, Tensor) else t


def functional(d: Draw, op: str, a: dict, run, judge) -> None:
    names = tensors_of(a)
    judge(torch.func.functionalize(lambda *given: tuple(run(op, a | dict(zip(names, given)))))(*(a[n] for n in names)))


def negative(d: Draw, op: str, a: dict, run, judge) -> None:
    """Written arguments stay negated views, and get their numbers."""
    chosen = [n for n in tensors_of(a) if d.chance(0.5)]
    given = a | {n: negated(a[n]) for n in chosen}
    out = run(op, given)
    for n in written(op):
        if n in chosen:
            a[n].copy_(given[n])
        elif isinstance(a[n], Tensor):
            a[n] = given[n]
    judge(out)


def subclass(d: Draw, op: str, a: dict, run, judge) -> None:
    """Wrappers without memory of their own around all tensors, or around some of what is read alone."""
    is_whole = d.chance(0.5) or written(op)  # a wrapper calls twice
    chosen = [n for n in tensors_of(a) if is_whole or d.chance(0.5)]
    out = run(op, a | {n: twin(a[n]) for n in chosen})
    judge([t.a if isinstance(t, TwoTensor) else t for t in out])


def subclass_again(d: Draw, op: str, a: dict, run, judge) -> None:
    """The same where gradients are differentiated again."""
    leaves = {n: a[n].detach().clone().requires_grad_() for n in wrt(a)}
    chosen = [n for n in tensors_of(a) if n not in leaves and d.chance(0.7)]
    out = run(op, a | leaves | {n: twin(a[n]) for n in chosen})
    roots = [t for t in out if t.requires_grad]
    torch.autograd.grad([t.sum() for t in roots], list(leaves.values()), create_graph=True, allow_unused=True)


def hollow(d: Draw, op: str, a: dict, run, judge) -> None:
    """Fake tensors that reach kernels, as inside another subclass's rules."""
    mode = FakeTensorMode()
    chosen = [n for n in tensors_of(a) if d.chance(0.5)]
    given = a | {n: mode.from_tensor(a[n]) for n in chosen}
    with torch._C._DisableTorchDispatch():
        run(op, given)


def examples(d: Draw, op: str, a: dict, run, judge) -> None:
    """vmap over two examples, each judged; what is not stacked is the same for both."""
    names = [n for n in tensors_of(a) if n not in ("ranges", "target", "mask") and d.chance(0.6)]
    if not names:
        return
    given = [torch.stack([a[n].detach()] * 2) for n in names]
    out = torch.func.vmap(lambda *ts: tuple(run(op, a | dict(zip(names, ts)))))(*given)
    for i in range(2):
        judge([t[i] for t in out])


def outer_gradient(d: Draw, op: str, a: dict, run, judge) -> dict:
    """torch.func.grad of the outputs' sum, and of two examples at once by vmap: gradients by name."""
    names = wrt(a)

    def summed(given, rest):
        out = run(op, a | given | rest)
        kept = out[:1] if op == "residual" or "residual" not in op else out[:2]
        return sum(t.double().sum() for t in kept)

    given = {n: a[n].detach() for n in names}
    rest = {n: a[n] for n in tensors_of(a) if n == "seed"}
    if d.chance(0.5):
        return torch.func.grad(summed)(given, rest)
    twice = {n: torch.stack([t] * 2) for n, t in given.items()}
    seeds = {n: torch.stack([t] * 2) for n, t in rest.items()} if d.chance(0.5) else rest
    found = torch.func.vmap(torch.func.grad(summed), (0, 0 if seeds is not rest else None))(twice, seeds)
    return {n: t[d.one(0, 1)] for n, t in found.items()}


HOOKS = {
    "identity": (lambda t: t, lambda t: t),
    "clone": (lambda t: t.clone(), lambda t: t),
    "unpacked clone": (lambda t: t, lambda t: t.clone()),
    "cpu": (lambda t: t.to("cpu"), lambda t: t.to("cpu")),
    "numbers": (lambda t: (t.dtype, t.shape, t.tolist()), lambda p: torch.tensor(p[2], dtype=p[0]).view(p[1])),
    "negated": (lambda t: t, negated),
}
CONTEXTS = {
    "fake": fake,
    "functional": functional,
    "negative": negative,
    "subclass": subclass,
    "subclass again": subclass_again,
    "hollow": hollow,
    "examples": examples,
}
