"""Exact swaps: LayerNorms become RMSNorms with equal outputs, since the swap also centres the residual stream: each of
its rows gets mean 0."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InputError
from .converted import Converted, converted_class
from .flow import Flow, Writer
from .handover import reclass
from .probe import RecognisedNorm
from .stream import Matrix, Places, Site, disturbed, join, refuse_meta
from .undo import Edits, Row

BY = "swap_norms(..., exact=True)"


class Centred(Converted):
    """A module whose output y is centred over the last dimension: y − mean y."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the original forward's output without its mean."""
        y: Tensor = super().forward(*args, **kwargs)  # type: ignore[misc]
        # the mean is taken in f32 or wider
        wide = y.to(torch.promote_types(y.dtype, torch.float32))
        return (wide - wide.mean(-1, keepdim=True)).to(y.dtype)


class _Writer(NamedTuple):
    """A module or parameter that writes the stream. `name`: its path; `matrix`: its weights, which are centred; None:
    the module's output is centred instead."""

    name: str
    matrix: Matrix | None
    module: nn.Module


class ExactSwap:
    """The plan of an exact swap. The constructor raises all errors, so that `apply` cannot fail half-way.

    In a block x + F(LN(x)) let C = I − 11ᵀ/d, which subtracts the mean. Then LN(x) = LN(Cx), and LN(x) = RMSNorm(x) if
    x = Cx. With C applied to all writers of x, every LN that reads x can be an RMSNorm.
    """

    def __init__(self, model: nn.Module, known: Mapping[nn.Module, RecognisedNorm], example: Any = None) -> None:
        """Plans the swap and checks that it is possible. `known`: the model's norms."""
        self.known, self.places = known, Places(model)
        self.writers: list[_Writer] = []
        refuse_meta(model, BY)
        self.flow = flow = Flow.needed(model, example, self.places)
        # LayerNorms whose stream can be centred → the stream's writers; and the others → the reason why it cannot
        fit, self.unfit = flow.streams(self.known)
        # a norm that writes a stream is not swapped: its output is centred
        writing = {writer.module for writers in fit.values() for writer in writers}
        fit = {norm: writers for norm, writers in fit.items() if norm not in writing}
        all_sites = flow.sites(self.known)
        # only the norms that are swapped have a site
        self.sites: dict[nn.Module, Site] = {norm: all_sites[norm] for norm in fit}
        if not [*self.unfit, *fit]:
            return  # no norm is a LayerNorm, so there is nothing to swap
        if all(site.fault for site in self.sites.values()):  # true also if no norm fits, since there is no site then
            norm, reason = next(iter((self.unfit or {n: s.fault for n, s in self.sites.items()}).items()))
            raise InputError(
                f"{BY} finds no LayerNorm that reads nothing but what can be centred, and that a branch reads: of "
                f"{flow.name(norm)} {reason}"
            )
        _refuse_training(model)
        # one entry for each name of a writer's module
        for writer in (writer for writers in fit.values() for writer in writers):
            self.writers += [_found_writer(writer, path) for path in self.places.modules[writer.module]]
        order = {module: i for i, module in enumerate(model.modules())}
        self.writers.sort(key=lambda writer: order[writer.module])
        self._settle()

    def _settle(self) -> None:
        """Reduces `writers` to one entry for each module or set of tied weights. Writers whose weights cannot be
        centred lose their matrix, so that their output is centred. Errors: InputError if neither is possible."""
        names = {writer.name if writer.matrix is None else writer.matrix.name for writer in self.writers}
        settled: dict[Any, _Writer] = {}
        for writer in self.writers:
            matrix = writer.matrix
            # writers with tied weights have one key, and are centred once
            key = writer.module if matrix is None else tuple(map(id, matrix.parameters.values()))
            fault = self._fault(writer, names)
            if fault:
                # if an embedding's weight is shared, as with the output layer, its output is centred instead
                if matrix is not None and not isinstance(writer.module, nn.Embedding):
                    raise InputError(f"{fault}, so its writes to the residual stream cannot be centred: {_WAYS}")
                if reason := disturbed(writer.name, writer.module):
                    raise InputError(f"{reason}, so its output cannot be centred: {_WAYS}")
                key, writer = writer.module, writer._replace(matrix=None)
            settled.setdefault(key, writer)
        self.writers = [*settled.values()]

    def _fault(self, writer: _Writer, names: set[str]) -> str:
        """Returns the reason why a writer's weights cannot be centred; "" if they can. `names`: all writers' names."""
        if writer.matrix is None:
            return f"{writer.name} is a {type(writer.module).__name__}"
        other = self.places.beyond(writer.matrix, names)
        is_parameter = writer.matrix.bias == ""  # a bare parameter, and no layer whose class could be at fault
        fault = "" if is_parameter else writer.matrix.fault()
        return fault or (f"{writer.name} shares a parameter with {other}" if other else "")

    # `swap_norms` calls the methods below.

    def writes(self, norm: nn.Module) -> bool:
        """Returns whether the norm writes the stream. Such a norm is not swapped but centred, with a row in `apply`'s
        result."""
        return any(writer.module is norm for writer in self.writers)

    def reason(self, norm: nn.Module) -> str:
        """Returns the reason why a norm is not swapped; "" if it is."""
        return "" if norm in self.sites else self.unfit.get(norm, "reads no residual stream")

    def folds(self, norm: nn.Module) -> bool:
        """Returns whether the norm's β is folded into the linear layers that read the norm: they are known (`fault` is
        empty), and each has a bias to add it to."""
        site = self.sites[norm]
        return not site.fault and all(matrix.offsets() is not None for matrix in site.readers)

    def note(self, norm: nn.Module) -> str:
        """Returns the table's note about a norm's β; "" if it has none."""
        if self.known[norm].bias is None:
            return ""
        site = self.sites[norm]
        bare = next((matrix.name for matrix in site.readers if matrix.offsets() is None), "")
        return f"bias into {site.said}" if self.folds(norm) else f"bias kept: {site.fault or f'{bare} has none'}"

    @torch.no_grad()
    def apply(self, edits: Edits, swapped: Collection[nn.Module]) -> list[Row]:
        """Folds the β of the swapped norms, and centres all writers. Returns one row of the table for each writer.
        `swapped`: the old norms that are replaced."""
        biased = [norm for norm in swapped if self.known[norm].bias is not None and self.folds(norm)]
        edits.remember_values(self.edited(swapped))
        for norm in biased:
            beta = getattr(norm, str(self.known[norm].bias)).detach()
            for matrix in self.sites[norm].readers:
                matrix.take_in(gain=None, bias=beta)
        rows = []
        for name, weights, module in self.writers:
            kind = type(module).__name__
            if weights is not None:
                weights.centre()
            else:
                edits.remember(module)
                reclass(module, converted_class(type(module), Centred))
            rows.append(Row(name, old=kind, new=kind, note="output centred" if weights is None else "centred"))
        return rows

    def edited(self, swapped: Collection[nn.Module]) -> list[nn.Parameter]:
        """Returns the parameters that `apply` changes, each once. `swapped`: the old norms that are replaced."""
        matrices = [writer.matrix for writer in self.writers if writer.matrix is not None]
        for norm in swapped:
            if self.known[norm].bias is not None and self.folds(norm):
                matrices += self.sites[norm].readers
        return [*dict.fromkeys(p for matrix in matrices for p in matrix.parameters.values())]


_WAYS = "untie, unwrap or merge it first, or leave exact=True out"
"""The advice at the end of messages."""


def _refuse_training(model: nn.Module) -> None:
    """Raises InputError if a module of the model is in training mode."""
    training = next((name for name, module in model.named_modules() if module.training), None)
    if training is not None:
        raise InputError(
            f"{BY} needs a model in evaluation mode, and {training or 'it'} is in training mode: dropout leaves a "
            "centred vector with a mean again. Call model.eval() first"
        )


# The function below describes the modules and parameters that write the stream.


def _found_writer(writer: Writer, name: str) -> _Writer:
    """Returns a writer that `Flow` found, with its matrix if its weight has two or more dimensions. `name`: one of the
    module's paths."""
    _, module, leaf = writer
    if leaf is not None:  # a bare parameter, whose last dimension is the stream's width
        matrix = Matrix(name, module, leaf, bias="", axis=getattr(module, leaf).dim() - 1)
        return _Writer(join(name, leaf), matrix, module)
    # the dimension of the weight that is the stream's width
    axis = 1 if isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D" else 0
    matrix = Matrix(name, module, "weight", "bias", axis)
    has_rows = getattr(module._parameters.get("weight"), "ndim", 0) > 1  # a norm's weight, for example, is a vector
    return _Writer(name, matrix if has_rows else None, module)
