"""Represents linear layers as matrices that can be edited in place, and finds the names under which a model holds its
tensors. Folding of norms and exact swaps use both."""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import nn as nfnn
from ..errors import InputError
from ..nn.init import Role
from .blocks import full_name, is_transposed, parent_of, projection
from .handover import has_accelerates_hook, own_forward
from .spec import Part

_AFFINE = (  # the forwards of layers that `Matrix` can edit
    *(kind.forward for kind in (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)),
    *(kind.forward for kind in (nn.MultiheadAttention, nfnn.MultiheadAttention)),
)
_PLAIN_NAMES = ("Linear", "Embedding", "Conv1D", "Conv1d", "Conv2d", "Conv3d")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Matrix(NamedTuple):
    """The weight and bias of an affine layer, or those of some of its outputs (`share`). It may also be a single
    parameter or buffer without a layer."""

    name: str
    """The layer's path in the model."""
    owner: nn.Module
    """The layer."""
    weight: str
    """The weight's name in the owner."""
    bias: str
    """The bias's name in the owner, which need not exist; "" for a single parameter."""
    axis: int
    """The weight's dimension over the outputs."""
    share: tuple[int, int] | None = None
    """(First output, number of outputs); None: all outputs."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The weight and the bias, as far as they exist: the name in the owner → the tensor."""
        own = self.owner._parameters | self.owner._buffers
        return {name: p for name in (self.weight, self.bias) if (p := own.get(name)) is not None}

    def rows(self) -> Tensor:
        """Returns the weight as a view whose first dimension is the outputs."""
        return self._shared(self.parameters[self.weight].detach().movedim(self.axis, 0))

    def offsets(self) -> Tensor | None:
        """Returns the bias as a view. None: there is none."""
        bias = self.parameters.get(self.bias)
        return None if bias is None else self._shared(bias.detach())

    def _shared(self, outputs: Tensor) -> Tensor:
        """Returns the rows of `share` from a tensor whose first dimension is the outputs."""
        return outputs if self.share is None else outputs.narrow(0, *self.share)

    def take_in(self, gain: Tensor | None, bias: Tensor | None) -> None:
        """Folds a norm's gain and bias in: W ← W·diag(gain), b ← b + W·bias. The layer then reads x̂ instead of
        gain⊙x̂ + bias. Computes in f64, and rounds once."""
        rows, offsets = self.rows(), self.offsets()
        old_rows = widened(rows)
        if bias is not None:
            assert offsets is not None
            offsets.copy_(widened(offsets) + old_rows @ bias.to(old_rows))
        if gain is not None:
            rows.copy_(old_rows * gain.to(old_rows))

    def add_bias(self) -> None:
        """Gives the layer a bias of zeros."""
        weight = self.parameters[self.weight]
        bias = nn.Parameter(weight.new_zeros(weight.shape[self.axis]), weight.requires_grad)
        self.owner.register_parameter(self.bias, bias)

    def centre(self) -> None:
        """Centres W and b over the outputs, which then add up to 0. Computes in f64, and rounds once."""
        for outputs in (self.rows(), self.offsets()):
            if outputs is not None:
                before = widened(outputs)
                outputs.copy_(before - before.mean(0, keepdim=True))

    def fault(self) -> str:
        """Returns the reason why editing weight and bias would not change the layer's output as expected, or ""."""
        kind = type(self.owner)
        is_conv1d = full_name(kind) == "transformers.pytorch_utils.Conv1D"
        if self.weight not in self.parameters or not (is_conv1d or kind.forward in _AFFINE):
            what = full_name(kind) if kind.__name__ in _PLAIN_NAMES else kind.__name__  # PEFT has a Linear, too
            return f"{self.name} is a {what}, and no plain linear layer"
        uneditable = next((p for p in self.parameters.values() if not (_is_plain(p) and p.is_floating_point())), None)
        if uneditable is not None:
            kind_of_tensor = type(uneditable).__name__
            return f"{self.name} has a {kind_of_tensor} of {uneditable.dtype}, which cannot be edited in place"
        if getattr(self.owner, "max_norm", None) is not None:
            return f"{self.name} has max_norm, which rescales its weight at each look-up"
        return disturbed(self.name, self.owner)


def disturbed(name: str, module: nn.Module) -> str:
    """Returns the reason why a module may not compute what its class does, or "". `name`: its path, for the reason."""
    if own_forward(module) is not None or has_accelerates_hook(module):
        return f"{name} has a forward of its own, which was put into the instance"
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return f"{name} has forward hooks, which may change its inputs or outputs"
    return ""


def matrices(block: nn.Module, name: str, part: Part, roles: Iterable[Role]) -> list[Matrix]:
    """Returns the matrices of a sublayer that have one of these roles. If only some outputs of a linear layer do, its
    matrix has only these. `name`: the block's path, or "" if paths in messages are to begin at the block. Errors:
    InputError if a layer's roles are unknown, or its rows with these roles are not adjacent."""
    found, wanted = [], {*roles}
    for linear in part.linears:
        owner, weight, bias = projection(block, linear.path)
        path = join(name, parent_of(linear.path) if weight == "in_proj_weight" else linear.path)
        whole = Matrix(path, owner, weight, bias, axis=1 if is_transposed(block, linear.path) else 0)
        if any(rows.role is None for rows in linear.rows) or not linear.roles:
            raise InputError(
                f"what each row of {path} is for is not known, as of latent projections and routers, and it may read "
                "the norm: such blocks cannot be folded"
            )
        if wanted.issuperset(linear.roles):
            found.append(whole)
            continue
        for role in linear.roles:
            rows = linear.rows_of(role, whole.rows().shape[0]) if role in wanted else []
            if rows and rows != [*range(rows[0], rows[-1] + 1)]:
                raise InputError(
                    f"{path} stacks rows that read the norm and rows that do not: such blocks cannot be folded"
                )
            found += [whole._replace(share=(rows[0], len(rows)))] if rows else []
    return found


def readers(block: nn.Module, name: str, part: Part) -> list[Matrix]:
    """Returns the matrices of a sublayer that read its norm. Keys and values of cross-attention do not: they read the
    encoder's output."""
    is_cross = part.kind == "cross-attention"
    own: tuple[Role, ...] = ("query", "fc1", "gate", "output_gate")
    return matrices(block, name, part, own if is_cross else (*own, "key", "value"))


class Places:
    """All names of each module and tensor of a model. Tied tensors, which begin at one address, count as one."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: dict[nn.Module, list[str]] = {}
        self._tensors: dict[Any, set[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self.modules.setdefault(module, []).append(path)
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self._tensors.setdefault(_key(tensor), set()).add(join(path, name))

    def beyond(self, matrix: Matrix, expected: Iterable[str]) -> str:
        """Returns a name that the matrix's weight or bias has outside the layers named in `expected`, as a tied weight
        has; "" if there is none."""
        known = {join(name, leaf) for name in expected for leaf in matrix.parameters}
        names = {name for p in matrix.parameters.values() for name in self._tensors[_key(p)]}
        return min(names - known, default="")

    def tied(self, candidates: Iterable[Matrix]) -> str:
        """Returns the name of a layer among these that shares a tensor with another of them, or "" if there is none."""
        owners: dict[Any, nn.Module] = {}
        for matrix in candidates:
            for p in matrix.parameters.values():
                if owners.setdefault(_key(p), matrix.owner) is not matrix.owner:
                    return matrix.name
        return ""


def _key(tensor: Tensor) -> Any:
    """Returns a key that is equal for tensors that begin at the same address; for one without memory, its identity."""
    has_place = _is_plain(tensor) and tensor.numel() and not tensor.is_meta
    return (tensor.device, tensor.data_ptr()) if has_place else id(tensor)


def _is_plain(tensor: Tensor) -> bool:
    """Returns whether a tensor is of no subclass (quantized, distributed) and not sparse."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided


def widened(tensor: Tensor) -> Tensor:
    """Returns the tensor in the device's widest dtype: f32 on mps, else f64."""
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def join(*paths: str) -> str:
    """Returns the given paths joined by dots; empty ones, which name the model itself, are left out."""
    return ".".join(path for path in paths if path)


@dataclasses.dataclass
class Site:
    """A norm that the run calls: its names, the reason why it cannot be folded (`fault`; "": it can), and the linear
    layers that read it."""

    names: set[str]
    fault: str
    readers: list[Matrix] = dataclasses.field(default_factory=list)

    @property
    def said(self) -> str:
        """The last parts of the reading layers' names, for tables."""
        return ", ".join(dict.fromkeys(m.name.rpartition(".")[2] for m in self.readers))


def refuse_meta(model: nn.Module, by: str) -> None:
    """Raises InputError if the model has weights on the meta device."""
    name = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if name is not None:
        raise InputError(
            f"{by} changes weights' values, and {name} is on the meta device, where it has none: load the weights first"
        )
