"""Measurements of a model by layer and role: gradients, weights, updates, activations, attention."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._html import table
from ..errors import InputError
from ..loop.model import Transformer
from ..surgery.blocks import is_transposed, parts_of
from ..surgery.discover import find_stacks
from ..surgery.examples import caller, quietly
from ..surgery.record import is_norm
from .logits import MASKED, Attentions

MEASURES = {
    "gradient": "‖∂loss/∂W‖₂ of the rows, before clipping",
    "weight": "‖W‖₂ of the rows",
    "update": "‖ΔW‖₂/‖W‖₂ of the rows over one step of the optimizer",
    "rms": "√(mean x²) of the output",
    "largest": "max |x| of the output",
    "kurtosis": "mean (x − m)⁴ / (mean (x − m)²)² of the output, m its mean: 3 for normal numbers",
    "entropy": "−Σ p ln p of attention's weights, in nats: the mean over queries",
    "logit": "the largest logit that softmax sees, those of sinks included",
    "head_logit": "the largest logit of one head that softmax sees, those of sinks included",
    "cosine": "the cosine of the layer's output and its input: the mean over tokens",
    "rank": "e to the entropy of the singular values over their sum, of the layer's output (Roy & Vetterli 2007)",
    "active": "the share of positive numbers among those that the feed-forward's last matrix reads",
    "gain": "the mean of a norm's gain",
}
"""The measures and their formulas."""
_ROLES_OF_LOOP = {"out_proj": "out", "linear1": "fc1", "linear2": "fc2", "linear3": "gate"}
_ROLES = {"query": "q", "key": "k", "value": "v", "output": "out"}
"""The probe's roles: `_ROLES_OF_LOOP` by the last part of a module's name in the loop's Transformer, `_ROLES` by the
roles of `surgery`."""


class Reading(NamedTuple):
    """One number."""

    name: str
    """The module or the parameter."""
    layer: int | None
    """The layer within its stack, from 0; None outside the stacks."""
    role: str
    """q, k, v, out, fc1, gate, fc2, norm, attention, head 0, head 1, …, layer or other."""
    measure: str
    """A name of `MEASURES`."""
    value: float


class _Share(NamedTuple):
    """The rows of a matrix that have one role."""

    role: str
    axis: int
    """The dimension of the rows: −2 for (fan_out, fan_in), −1 for (fan_in, fan_out)."""
    rows: Tensor

    def of(self, t: Tensor, axis: int | None = None) -> Tensor:
        """Returns the part of a tensor that has the role. `axis`: its dimension; None: that of the matrix's rows."""
        return t.index_select(self.axis if axis is None else axis, self.rows.to(t.device))


class Readings(list[Reading]):
    """The measurements of one pass. A notebook shows a table with a line for each role and measure."""

    def of(self, measure: str, role: str | None = None) -> dict[str, float]:
        """Returns the values of a measure by name; with a role, only those of that role."""
        return {
            reading.name: reading.value
            for reading in self
            if reading.measure == measure and role in (None, reading.role)
        }

    def layers(self, measure: str, role: str) -> dict[int, float]:
        """Returns the largest value of a measure and role in each layer."""
        largest: dict[int, float] = {}
        for reading in self:
            if reading.layer is not None and (reading.measure, reading.role) == (measure, role):
                largest[reading.layer] = max(reading.value, largest.get(reading.layer, -math.inf))
        return largest

    def _repr_html_(self) -> str:
        """Returns a table in HTML: a line for each role and measure, and a column for each layer."""
        rows = sorted({(reading.role, reading.measure) for reading in self if reading.layer is not None})
        depth = 1 + max((reading.layer for reading in self if reading.layer is not None), default=-1)
        lines = []
        for role, measure in rows:
            values = self.layers(measure, role)
            lines.append([role, measure, *(f"{values[n]:.3g}" if n in values else "" for n in range(depth))])
        return table(["role", "measure", *map(str, range(depth))], lines)


class Probe:
    """Reads a model while your own code runs it.

    The roles of the matrices' rows are read from one run of the model on `example`, as `swap_residuals` reads them; a
    `normformer_rs.Transformer` needs no run. Inside a `with` block each forward pass is measured; at its end, gradients
    and weights are read, so clip gradients after it. The latest pass counts. Outside, nothing is hooked.

    >>> from torch import nn
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> model, x = nn.TransformerEncoder(layer, 2), torch.ones(1, 3, 8)
    >>> watch = Probe(model, x)
    >>> with watch:
    ...     model(x).square().mean().backward()
    >>> sorted({one.role for one in watch.readings})
    ['attention', 'fc1', 'fc2', 'head 0', 'head 1', 'k', 'layer', 'norm', 'out', 'q', 'v']

    Args:
        model: any model of torch whose blocks `swap_residuals` would find, or a `normformer_rs.Transformer`, whose
            padding is left out.
        example: an input as for `swap_residuals`; None for one that the model's configuration tells.

    Measures are those of `MEASURES`, computed in f64. Attention is measured in torch's operator, torch.nn's modules,
    and products around a softmax within the blocks; of tensorized attention only q, k and v are read. Heads are all
    dimensions between the batch's and the last two; logits of three dimensions have no heads.

    Errors: InputError for a model whose blocks are not found.
    """

    def __init__(self, model: nn.Module, example: Any = None) -> None:
        self.model = model
        self.readings = Readings()
        self._layers: dict[nn.Module, tuple[str, int]] = {}
        """Each block, with its name and its number within its stack."""
        for names, blocks in _stacks_of_loop(model) if isinstance(model, Transformer) else _stacks(model, example):
            for number, (name, block) in enumerate(zip(names, blocks)):
                self._layers[block] = (name, number)
        self._names = {module: name for name, module in model.named_modules()}
        self._norms = {module for module in self._names if is_norm(module)}
        self._shares = _shares_of_loop(model) if isinstance(model, Transformer) else self._find_shares()
        """The name of each matrix's parameter → the roles of its rows."""
        self._hooks: list[RemovableHandle] = []
        self._stack = contextlib.ExitStack()
        self._passes: dict[tuple[str, str, str], tuple[int | None, float]] = {}
        """(name, role, measure) → (layer, value)."""
        self._within: list[nn.Module] = []
        """The blocks that are running, the innermost last."""
        self._coming: Iterator[nn.Module] = iter(())
        """In a pass of the loop's Transformer: the layers that have not run yet."""
        self._input: Tensor | None = None
        """In such a pass: the running layer's input."""

    def _find_shares(self) -> dict[str, list[_Share]]:
        """Returns the roles of the matrices in all blocks, by the names of their parameters. A matrix may have several
        roles, each for some of its rows, such as one that computes queries, keys and values."""
        shares: dict[str, list[_Share]] = {}
        parameters = dict(self.model.named_parameters())
        for block, (name, _) in self._layers.items():
            for part in parts_of(block):
                for linear in (*part.linears, *part.experts):
                    path = f"{name}.{linear.path}".lstrip(".")
                    # The path names a parameter, such as the matrices of a stack of experts, or a linear layer, whose
                    # matrix is its `weight`.
                    matrix = path if path in parameters else f"{path}.weight"
                    if matrix not in parameters or matrix in shares:
                        continue
                    is_module = matrix != path
                    # A module may keep its own weight as (fan_in, fan_out), too, as Hugging Face's Conv1D does.
                    is_fan_in_first = linear.is_transposed or (is_module and is_transposed(block, linear.path))
                    axis = -1 if is_fan_in_first else -2
                    size = parameters[matrix].shape[axis]
                    shares[matrix] = [_Share(_ROLES.get(role, role), axis, torch.tensor(linear.rows_of(role, size)))
                                     for role in linear.roles]  # fmt: skip
        return shares

    def __enter__(self) -> "Probe":
        """Adds the hooks that measure each pass. A `normformer_rs.Transformer` reports its passes itself."""
        self._passes = {}
        if isinstance(self.model, Transformer):
            before = self.model._heard  # the listener of a probe around this one, or None

            def heard(event: str, name: str, first_row: int, tensors: list[Tensor]) -> None:
                """Passes an event of the pass on to the probe around this one, and measures it."""
                if before is not None:
                    before(event, name, first_row, tensors)
                self._hear(event, name, first_row, tensors)

            self.model._heard = heard
            self._stack.callback(setattr, self.model, "_heard", before)
            return self
        for module, name in self._names.items():
            if module in self._layers:
                self._hooks.append(module.register_forward_pre_hook(self._enter_block, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(self._leave_block, with_kwargs=True, always_call=True))
            elif f"{name}.weight" in self._shares or module in self._norms:
                self._hooks.append(module.register_forward_hook(self._leave))
        self._stack.enter_context(Attentions(self._attended))
        return self

    def __exit__(self, *_: object) -> None:
        """Removes the hooks, measures gradients and weights, and stores all numbers in `readings`."""
        self._stack.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._within = [], []
        for name, parameter in self.model.named_parameters():
            self._parameter(name, parameter.grad, "gradient")
            self._parameter(name, parameter, "weight")
        measured = [Reading(name, layer, role, measure, value)
                 for (name, role, measure), (layer, value) in self._passes.items()]  # fmt: skip
        # The readings are sorted by layer. Those outside the layers come last.
        self.readings = Readings(
            sorted(measured, key=lambda r: (r.layer is None, r.layer or 0, r.name, r.role, r.measure))
        )

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Measures `update` of the optimizer's step inside the block, and adds it to `readings`."""
        before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        yield
        self._passes = {}  # `_updated` fills it with the updates
        for name, p in self.model.named_parameters():
            if name in before and before[name].shape == p.shape:
                self._updated(name, before[name], p)
        self.readings = Readings([reading for reading in self.readings if reading.measure != "update"])
        self.readings += [Reading(name, layer, role, measure, value)
                          for (name, role, measure), (layer, value) in self._passes.items()]  # fmt: skip

    # ---- the layer and role of a number ----

    def _layer_of(self, name: str) -> int | None:
        """Returns the number of the layer that has the module or parameter of this name; None if no layer has it."""
        path = f"{name}."
        # The pairs (name, number) of the blocks around it. The name is empty if the model itself is the block.
        around = [(block, layer) for block, layer in self._layers.values() if not block or path.startswith(f"{block}.")]
        # All names are beginnings of the same path, so the greatest one is the longest: that of the innermost block.
        return max(around, default=("", None))[1]

    def _put(self, name: str, role: str, measure: str, value: float) -> None:
        """Stores one number of the current pass."""
        self._passes[name, role, measure] = (self._layer_of(name), value)

    def _parts(self, name: str, t: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yields the roles of a parameter, each with its part of `t`, a tensor of the parameter's shape. Yields nothing
        for the bias of a matrix whose roles are known."""
        owner = name.rpartition(".")[0]
        if name in self._shares:
            yield from ((share.role, share.of(t)) for share in self._shares[name])
        elif not any(key.rpartition(".")[0] == owner for key in self._shares):
            yield ("norm" if self.model.get_submodule(owner) in self._norms else "other"), t

    # ---- parameters ----

    def _parameter(self, name: str, t: Tensor | None, measure: str) -> None:
        """Stores the norm of a parameter or of its gradient, by role, and the mean of a norm's gain. `measure`:
        "weight" or "gradient"; `t`: that tensor, or None if there is no gradient."""
        for role, part in self._parts(name, t.detach()) if t is not None else ():
            self._put(name, role, measure, _norm(part))
            if measure == "weight" and role == "norm" and name.endswith("weight"):
                self._put(name, role, "gain", float(part.double().mean()))

    def _updated(self, name: str, before: Tensor, after: Tensor) -> None:
        """Stores ‖after − before‖/‖before‖ of a parameter over one step of the optimizer, by role."""
        changes = self._parts(name, after.detach().double() - before.double())
        for (role, part), (_, change) in zip(self._parts(name, before), changes):
            size, moved = _norm(part), _norm(change)
            # For a matrix of zeros the ratio is infinite if it moved, 0 if it stayed.
            self._put(name, role, "update", moved / size if size else math.inf if moved else 0.0)

    # ---- passes ----

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        """A hook on norms and linear layers: measures the output, by role, and how many inputs of fc2 are positive."""
        name = self._names[module]
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return
        shares, x = self._shares.get(f"{name}.weight"), out.detach()
        if shares is None:  # the module is a norm, because its weight has no role of a matrix
            self._activations(name, "norm", x)
        for share in shares or ():
            # The rows of the matrix are the features of its output.
            self._activations(name, share.role, share.of(x, -1))
            if share.role == "fc2" and args:
                self._put(name, "fc2", "active", float((args[0].detach() > 0).double().mean()))

    def _activations(self, name: str, role: str, x: Tensor) -> None:
        """Measures rms, largest and kurtosis of x."""
        x = x.double()
        mean, squares = x.mean(), x.square().mean()
        centred = (x - mean).square()
        variance = centred.mean()
        self._put(name, role, "rms", float(squares.sqrt()))
        self._put(name, role, "largest", float(x.abs().max()) if x.numel() else 0.0)
        self._put(name, role, "kurtosis", float(centred.square().mean() / variance.square()) if variance > 0 else 0.0)

    def _enter_block(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        """A hook on blocks: notes that the block runs, and removes the attentions of its earlier passes."""
        self._within.append(block)
        name = self._layers[block][0]
        of_attention = ("logit", "head_logit", "entropy")
        # "NAME", "NAME (2)" and "NAME head 0" are names of attentions of the block NAME.
        earlier = [key for key in self._passes if key[2] in of_attention and f"{key[0]} ".startswith(f"{name} ")]
        for key in earlier:
            del self._passes[key]

    def _leave_block(self, block: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """A hook on blocks: measures a layer's output, alone and against its input."""
        self._within.pop()
        # The stream before and after the block: the first tensor of floats with two or more dimensions on each side.
        x, y = (next((t for t in _tensors(value) if t.is_floating_point() and t.dim() > 1), None)
                for value in ((args, kwargs), out))  # fmt: skip
        if y is not None:
            self._layer(self._layers[block][0], x, y)

    def _layer(self, name: str, x: Tensor | None, y: Tensor) -> None:
        """Measures the output y of a layer, alone and against its input x."""
        self._activations(name, "layer", y.detach())
        if x is not None and x.shape == y.shape:
            cosines = F.cosine_similarity(x.detach().double(), y.detach().double(), -1)
            self._put(name, "layer", "cosine", float(cosines.mean()))
        self._put(name, "layer", "rank", _effective_rank(y.detach().double()))

    def _hear(self, event: str, name: str, first_row: int, tensors: list[Tensor]) -> None:
        """Measures what the loop's Transformer reports in a pass. `event` says what `tensors` hold. `name` is that of a
        norm or matrix, and `first_row` the first of the matrix's rows in a product (src/bindings/listener.rs)."""
        with torch.no_grad():
            if event == "pass":
                self._coming, self._within = iter(self._layers), []
            elif event == "layer input":
                (self._input,) = tensors
                self._enter_block(next(self._coming), (), {})
            elif event == "layer":
                self._layer(self._layers[self._within.pop()][0], self._input, *tensors)
            elif event == "norm":
                # A norm without parameters has no module in the Transformer, so nothing is added for it.
                self._norms.update(module for module, module_name in self._names.items() if module_name == name)
                self._activations(name, "norm", tensors[0].detach())
            elif event == "product":
                self._product(name, first_row, *tensors)
            elif event == "attention":
                self._attended(part.double() for part in tensors)

    def _product(self, matrix: str, first_row: int, x: Tensor, y: Tensor) -> None:
        """Measures y, the product of x with a matrix's rows from `first_row` on, by role."""
        name = matrix.rpartition(".")[0]
        for share in self._shares.get(matrix, ()):
            # Row r of the matrix computes column r − first_row of y.
            columns = share.rows - first_row
            columns = columns[(columns >= 0) & (columns < y.shape[-1])]
            if len(columns):
                self._activations(name, share.role, y.detach().index_select(-1, columns.to(y.device)))
            if share.role == "fc2":
                self._put(name, "fc2", "active", float((x.detach() > 0).double().mean()))

    def _attended(self, logits: Iterator[Tensor]) -> None:
        """Measures an attention from its logits, which come in parts, each for some of the queries."""
        if not self._within:
            return
        name, layer = self._layers[self._within[-1]]
        # The number of this block's attentions in this pass so far. Their names are "NAME", "NAME (2)", …
        earlier = sum(key[0].partition(" (")[0] == name for key in self._passes if key[2] == "logit")
        name = f"{name} ({earlier + 1})" if earlier else name
        largest, entropy_sum, queries = -math.inf, 0.0, 0
        head_maxima: list[float] = []
        for part in logits:
            is_visible = part > MASKED
            visible = part.masked_fill(~is_visible, -math.inf)
            entropies = torch.special.entr(visible.softmax(-1)).sum(-1)
            entropies = entropies[is_visible.any(-1)]  # a query that sees no key has no weights
            largest = max(largest, float(visible.max()))
            entropy_sum, queries = entropy_sum + float(entropies.sum()), queries + entropies.numel()
            if visible.dim() > 3:
                # Grouped heads may have two dimensions. They become one: (B, heads, queries, keys).
                by_head = visible.flatten(1, -3)
                maxima = by_head.transpose(0, -3).flatten(1).amax(1).tolist()
                head_maxima = [*map(max, maxima, head_maxima or maxima)]  # the first part has no earlier maxima
        for head, value in enumerate(head_maxima):
            self._passes[f"{name} head {head}", f"head {head}", "head_logit"] = (layer, value)
        self._passes[name, "attention", "logit"] = (layer, largest)
        self._passes[name, "attention", "entropy"] = (layer, entropy_sum / queries if queries else math.nan)


def probe(model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None = None) -> Readings:
    """Measures a model in one pass over a batch, in its current mode; the state of the model does not change.

    Args:
        model: as for `Probe`.
        batch: an input as for `swap_residuals`; keyword arguments may have labels.
        loss: a function of the model's output; None for its attribute `loss`. Without either there are no gradients.

    Returns: the numbers by layer, role and measure. Errors: as those of `Probe`; InputError for a loss that is not one
    number that depends on the parameters.
    """
    watch, run = Probe(model, batch), caller(model, batch)
    if run is None:
        raise InputError(f"probe needs a batch for a {type(model).__name__}, whose configuration names no input")
    # Gradients that the parameters have already are put back at the end.
    gradients = {name: p.grad for name, p in model.named_parameters()}
    try:
        for p in model.parameters():
            p.grad = None
        with quietly(model), torch.enable_grad(), watch:
            out = run()
            value = getattr(out, "loss", None) if loss is None else loss(out)
            if value is not None and not (isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad):
                raise InputError("loss must be one number that depends on the parameters")
            if value is not None:
                value.backward()
    finally:
        for name, p in model.named_parameters():
            p.grad = gradients[name]
    return watch.readings


def _stacks(model: nn.Module, example: Any) -> Iterator[tuple[Sequence[str], Sequence[nn.Module]]]:
    """Yields the names and blocks of each stack. Errors: as `Probe`."""
    with quietly(model):
        yield from ((group.names, group.blocks) for group in find_stacks(model, example).groups)


def _stacks_of_loop(model: Transformer) -> Iterator[tuple[Sequence[str], Sequence[nn.Module]]]:
    """Yields the names and layers of each stack, in the order in which they run."""
    for stack in ("encoder", "decoder"):
        if hasattr(model, stack):
            layers = model.get_submodule(f"{stack}.layers")
            yield [f"{stack}.layers.{number}" for number, _ in layers.named_children()], [*layers.children()]


def _shares_of_loop(model: Transformer) -> dict[str, list[_Share]]:
    """Returns the roles of the matrices in all layers, by the names of their parameters."""
    shares: dict[str, list[_Share]] = {}
    for name, parameter in model.named_parameters():
        module, _, leaf = name.rpartition(".")
        if leaf == "in_proj_weight":  # its rows are those of queries, keys and values, in this order
            rows = len(parameter)
            # Tensorized attention has equal thirds. Otherwise grouped keys and values may have fewer rows than queries.
            queries = rows // 3 if model.config.attention == "tensorized" else model.config.d_model
            sizes = [queries, (rows - queries) // 2, (rows - queries) // 2]
            shares[name] = [
                _Share(role, axis=-2, rows=part) for role, part in zip("qkv", torch.arange(rows).split(sizes))
            ]
        elif leaf == "weight" and (role := _ROLES_OF_LOOP.get(module.rpartition(".")[2])):
            shares[name] = [_Share(role, axis=-2, rows=torch.arange(len(parameter)))]
    return shares


def _effective_rank(y: Tensor) -> float:
    """Returns e to the entropy of the singular values over their sum, of y (…, d) as a matrix with d columns. Returns
    NaN if a number is not finite."""
    if not y.numel() or not y.isfinite().all():
        return math.nan
    values = torch.linalg.svdvals(y.reshape(-1, y.shape[-1]))
    return float(torch.special.entr(values / values.sum()).sum().exp())


def _norm(t: Tensor) -> float:
    """Returns the Euclidean norm of a tensor, computed in f64."""
    return float(torch.linalg.vector_norm(t.detach(), dtype=torch.float64))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested lists, tuples, mappings and outputs of Hugging Face models."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from itertools.chain.from_iterable(map(_tensors, value.values()))
    elif isinstance(value, (list, tuple)):
        yield from itertools.chain.from_iterable(map(_tensors, value))
    elif hasattr(value, "to_tuple"):
        yield from _tensors(value.to_tuple())
