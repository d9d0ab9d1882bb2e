"""Exact swaps: LayerNorm becomes RMSNorm with equal outputs, because the residual stream's mean becomes 0."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InputError
from .blocks import Group, parts_of
from .converted import Converted, converted_class
from .flow import Flow, Writer
from .handover import reclass
from .probe import RecognisedNorm
from .recognise import read_norm
from .spec import Part, Stack, at, chosen
from .stream import Matrix, Places, Site, disturbed, is_declared, join, matrices, prenorm_groups, refuse_meta, sites
from .undo import Edits, Row

BY = "swap_norms(..., exact=True)"


class Centred(Converted):
    """A module whose output adds up to 0 over the last dimension: y − mean y."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        y: Tensor = super().forward(*args, **kwargs)  # type: ignore[misc]
        wide = y.to(torch.promote_types(y.dtype, torch.float32))
        return (wide - wide.mean(-1, keepdim=True)).to(y.dtype)


class _Writer(NamedTuple):
    """A module or parameter that writes the stream: its weights are centred, or else its output."""

    name: str
    matrix: Matrix | None
    module: nn.Module
    width: int
    """The stream's."""


class ExactSwap:
    """The plan of an exact swap; the constructor raises every error.

    In a block x + F(LN(x)) let C = I − 11ᵀ/d. LN(x) = LN(Cx), and LN = RMSNorm where x = Cx. With C applied to
    everything that writes x, every LN that reads x can be RMSNorm.
    """

    def __init__(self, model: nn.Module, known: Mapping[nn.Module, RecognisedNorm], example: Any = None) -> None:
        """`known`: the model's norms."""
        self.known, self.places = known, Places(model)
        self.sites: dict[nn.Module, Site] = {}
        self.writers: list[_Writer] = []
        self.unfit: dict[nn.Module, str] = {}
        self.flow: Flow | None = None
        try:
            self._plan_declared(model, known)
        except InputError:
            if is_declared(model):
                raise
            refuse_meta(model, BY)
            self.flow = Flow.of(model, example, self.places)
            if self.flow is None:
                raise
            self._plan_found(model, self.flow)

    def _plan_found(self, model: nn.Module, flow: Flow) -> None:
        """By a run, where blocks are not declared."""
        fit, self.unfit = flow.streams(self.known)
        writing = {writer.module for writers in fit.values() for writer in writers}
        fit = {norm: writers for norm, writers in fit.items() if norm not in writing}
        every = flow.sites(self.known)
        self.sites = {norm: every[norm] for norm in fit}
        if not [*self.unfit, *fit]:
            return  # all norms are RMSNorm
        if all(site.fault for site in self.sites.values()):
            norm, reason = next(iter((self.unfit or {n: s.fault for n, s in self.sites.items()}).items()))
            raise InputError(
                f"{BY} finds no LayerNorm that reads nothing but what can be centred, and that a branch reads: of "
                f"{flow.name(norm)} {reason}"
            )
        _refuse_training(model)
        self.writers = []
        for norm, writers in fit.items():
            for writer in writers:
                paths = self.places.modules[writer.module]
                self.writers += [_found_writer(writer, path, self.known[norm].width) for path in paths]
        order = {module: i for i, module in enumerate(model.modules())}
        self.writers.sort(key=lambda writer: order[writer.module])
        self._settle()

    def _plan_declared(self, model: nn.Module, known: Mapping[nn.Module, RecognisedNorm]) -> None:
        groups = prenorm_groups(model, BY)
        self.sites = sites(groups, self.places)
        if all(_computes(known, norm) == "rmsnorm" for norm in self.sites):
            return
        self._refuse_norms()
        _refuse_training(model)
        refuse_meta(model, BY)
        owners: dict[nn.Module, tuple[Stack, int]] = {}
        for group in groups:
            stack = _stack(group)
            _refuse_strangers(group, groups, stack)
            assert group.end is not None
            width = known[group.end.norm].width
            owners[group.end.owner] = (stack, width)
            self.writers += _of_blocks(group, self.places, width)
        for owner, (stack, width) in owners.items():
            for path in self.places.modules[owner]:
                self.writers += _sources(owner, path, stack, width)
        self._settle()

    def _refuse_norms(self) -> None:
        for norm, site in self.sites.items():
            computes = _computes(self.known, norm)
            if computes != "layernorm":
                raise InputError(
                    f"{BY} needs LayerNorm wherever a norm reads the residual stream, and {min(site.names)} is a "
                    f"{type(norm).__name__} ({computes or 'no known norm'}), which a centred stream would change: undo "
                    "earlier swaps, or leave exact=True out"
                )

    def _settle(self) -> None:
        """Leaves one entry for each writer, and decides which of them have weights that can be centred."""
        names: dict[Any, set[str]] = {}
        for writer in self.writers:
            names.setdefault(writer.module, set()).add(writer.name)
        every = {writer.name if writer.matrix is None else writer.matrix.name for writer in self.writers}
        settled: dict[Any, _Writer] = {}
        for writer in self.writers:
            matrix = writer.matrix
            key = writer.module if matrix is None else tuple(map(id, matrix.parameters.values()))
            fault = self._fault(writer, every)
            if matrix is not None and not fault and (outputs := matrix.rows().shape[0]) != writer.width:
                raise InputError(
                    f"{writer.name} has {outputs} outputs, and the residual stream that it is declared to write has "
                    f"{writer.width}: correct the declaration"
                )
            if fault:
                # an embedding is centred after the look-up where its weight serves others, too
                if matrix is not None and not isinstance(writer.module, nn.Embedding):
                    raise InputError(f"{fault}, so its writes to the residual stream cannot be centred: {_WAYS}")
                other = min({*self.places.modules[writer.module]} - names[writer.module], default="")
                said = disturbed(writer.name, writer.module) or (f"{writer.name} is {other}, too" if other else "")
                if said:
                    raise InputError(f"{said}, so its output cannot be centred: {_WAYS}")
                key, writer = writer.module, writer._replace(matrix=None)
            settled.setdefault(key, writer)
        self.writers = [*settled.values()]

    def _fault(self, writer: _Writer, every: set[str]) -> str:
        """The reason why its weights cannot be centred."""
        if writer.matrix is None:
            return f"{writer.name} is a {type(writer.module).__name__}"
        other = self.places.beyond(writer.matrix, every)
        is_parameter = writer.matrix.bias == ""
        fault = "" if is_parameter else writer.matrix.fault()
        return fault or (f"{writer.name} shares a parameter with {other}" if other else "")

    # What `swap_norms` asks for.

    def writes(self, norm: nn.Module) -> bool:
        """The norm writes the stream: it stays, and a row of `apply` says so."""
        return any(writer.module is norm for writer in self.writers)

    def reason(self, norm: nn.Module) -> str:
        """The reason why a norm stays, or nothing."""
        site = self.sites.get(norm)
        if site is None:
            return self.unfit.get(norm, "reads no residual stream")
        elsewhere = min({*self.places.modules[norm]} - site.names, default="")
        return f"is {elsewhere}, too" if elsewhere else ""

    def folds(self, norm: nn.Module) -> bool:
        """β goes into biases that are there."""
        site = self.sites[norm]
        return not site.fault and all(matrix.offsets() is not None for matrix in site.readers)

    def note(self, norm: nn.Module) -> str:
        """The table's words for β."""
        if self.known[norm].bias is None:
            return ""
        site = self.sites[norm]
        bare = next((matrix.name for matrix in site.readers if matrix.offsets() is None), "")
        return f"bias into {site.said}" if self.folds(norm) else f"bias kept: {site.fault or f'{bare} has none'}"

    @torch.no_grad()
    def apply(self, edits: Edits, swapped: Collection[nn.Module]) -> list[Row]:
        """Folds the β of the norms that are swapped, and centres all writers. Returns rows of these."""
        biased = [norm for norm in swapped if self.known[norm].bias is not None and self.folds(norm)]
        edits.remember_values(self.edited(swapped))
        for norm in biased:
            for matrix in self.sites[norm].readers:
                matrix.take_in(None, getattr(norm, self.known[norm].bias or "").detach())
        rows = []
        for name, written, module, _ in self.writers:
            kind = type(module).__name__
            if written is not None:
                written.centre()
            else:
                edits.remember(module)
                reclass(module, converted_class(type(module), Centred))
            rows.append(Row(name, kind, kind, "output centred" if written is None else "centred"))
        return rows

    def edited(self, swapped: Collection[nn.Module]) -> list[nn.Parameter]:
        """The parameters that `apply` writes, each once."""
        found = [matrix for _, matrix, _, _ in self.writers if matrix is not None]
        for norm in swapped:
            if self.known[norm].bias is not None and self.folds(norm):
                found += self.sites[norm].readers
        return [*dict.fromkeys(p for matrix in found for p in matrix.parameters.values())]


_WAYS = "untie, unwrap or merge it first, or leave exact=True out"


def _computes(known: Mapping[nn.Module, RecognisedNorm], norm: nn.Module) -> str | None:
    return known[norm].computes if norm in known else None


def _refuse_training(model: nn.Module) -> None:
    training = next((name for name, module in model.named_modules() if module.training), None)
    if training is not None:
        raise InputError(
            f"{BY} needs a model in evaluation mode, and {training or 'it'} is in training mode: dropout leaves a "
            "centred vector with a mean again. Call model.eval() first"
        )


# The writers of the stream.


def _found_writer(writer: Writer, name: str, width: int) -> _Writer:
    """`name`: one of the module's paths."""
    _, module, leaf = writer
    if leaf is not None:
        matrix = Matrix(name, module, leaf, "", getattr(module, leaf).dim() - 1)
        return _Writer(join(name, leaf), matrix, module, width)
    axis = 1 if isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D" else 0
    matrix = Matrix(name, module, "weight", "bias", axis)
    has_rows = getattr(module._parameters.get("weight"), "ndim", 0) > 1
    return _Writer(name, matrix if has_rows else None, module, width)


def _stack(group: Group) -> Stack:
    """The declared stream around the blocks."""
    first = f"{group.names[0]}, a {type(group.blocks[0]).__name__}" if group.names[0] else "the model"
    if group.end is None or not group.end.stack.writers:
        around = "no norm is declared after the blocks" if group.end is None else "nothing is declared to write it"
        raise InputError(
            f"{BY} must know the residual stream around {first}: {around}, in {type(group.holder).__name__} or around "
            "it. Register the module that has the embeddings, the blocks and the last norm with "
            "normformer_rs.surgery.register_stack(kind, end_norm, writers=(...))"
        )
    return group.end.stack


def _refuse_strangers(group: Group, groups: list[Group], stack: Stack) -> None:
    """InputError for children of the list of blocks, and of the module around it, that might write the stream."""
    assert group.end is not None
    owner, known = group.end.owner, [block for other in groups for block in other.blocks]
    listed = group.path.removeprefix(group.end.path).lstrip(".")
    paths = [group.end.name, listed, *stack.after, *(path for some in stack.writers or () for path in some.split("|"))]
    own = {path.partition(".")[0] for path in paths}
    strangers: list[tuple[str, Any]] = [(n, p) for n, p in owner._parameters.items() if p is not None and n not in own]
    strangers += [(n, child) for n, child in owner.named_children() if n not in own and [*child.parameters()]]
    holder = owner.get_submodule(listed)
    strangers += [(join(listed, n), child) for n, child in holder.named_children() if _unwrapped(child) not in known]
    for name, child in strangers:
        what = f"{join(group.end.path, name)}, a {type(child).__name__} of {type(owner).__name__}"
        if isinstance(child, nn.Module) and read_norm(child) is not None:
            raise InputError(
                f"{what}, is a norm that writes the residual stream: γ⊙x̂ + β has a mean that no weight before it "
                f"takes away, so {BY} cannot keep the outputs. Swap without exact=True, or pass a part of the model "
                "without it"
            )
        raise InputError(
            f"{what}, may write the residual stream, and its declaration does not name it: register the class with "
            "normformer_rs.surgery.register_stack(kind, end_norm, writers=(...), after=(...))"
        )


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module in activation checkpointing's or the compiler's wrapper."""
    for name in ("_checkpoint_wrapped_module", "_orig_mod"):
        module = getattr(module, name, module)
    return module


def _of_blocks(group: Group, places: Places, width: int) -> Iterator[_Writer]:
    """The last linear layers of all sublayers."""
    for block in group.blocks:
        for part in parts_of(block):
            for name in places.modules[block]:
                found = matrices(block, name, part, ("output", "fc2"))
                if not found:
                    raise InputError(
                        f"the declaration of {type(block).__name__} names no linear layer that ends its {part.kind}: "
                        'give one the role "output" or "fc2" in normformer_rs.surgery.register_block'
                    )
                yield from (_Writer(matrix.name, matrix, matrix.owner, width) for matrix in found)
            _refuse_after(block, places.modules[block][0], part)


def _refuse_after(block: nn.Module, name: str, part: Part) -> None:
    """InputError for a module that changes the last linear layer's output before it reaches the stream."""
    last = next(linear.path for linear in part.linears if {"output", "fc2"} & {*linear.roles})
    runs = [i for i, path in enumerate(part.run) if last == path or last.startswith(f"{path}.")]
    for path in part.run[runs[-1] + 1 :] if runs else ():
        what = at(block, path)
        if not isinstance(what, float | int | nn.Identity | nn.Dropout):
            raise InputError(
                f"{join(name, path)}, a {type(what).__name__}, changes what {join(name, last)} writes to the residual "
                f"stream, and {BY} centres the linear layer alone: fold it into that layer first"
            )


def _sources(owner: nn.Module, path: str, stack: Stack, width: int) -> Iterator[_Writer]:
    """The modules and parameters that make the first block's input."""
    for paths in stack.writers or ():
        try:
            found = chosen(owner, paths)
        except AttributeError:
            raise InputError(
                f"{type(owner).__name__} has no {paths}, which its declaration says to write the residual stream: "
                "another version of its library may have changed it; declare it with "
                "normformer_rs.surgery.register_stack"
            ) from None
        if found is None:
            continue
        what, name = at(owner, found), join(path, found)
        parent, _, leaf = found.rpartition(".")
        module = owner.get_submodule(parent)
        if leaf in module._parameters or leaf in module._buffers:
            yield _Writer(name, Matrix(join(path, parent), module, leaf, "", what.dim() - 1), module, width)
        elif isinstance(what, nn.Embedding | nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            axis = 1 if isinstance(what, nn.Embedding) else 0
            yield _Writer(name, Matrix(name, what, "weight", "bias", axis), what, width)
        elif isinstance(what, nn.Module):
            yield _Writer(name, None, what, width)
        else:
            raise InputError(
                f"{name} is a {type(what).__name__}, and neither a module, a parameter nor a buffer, so that it cannot "
                f"be centred: {_WAYS}"
            )
