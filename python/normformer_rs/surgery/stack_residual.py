"""The parts of a residual scheme that belong to a whole stack of another library's blocks: changes at the stack's begin
and end, learned sums of all outputs, further streams, and the update number t.

Further streams and outputs travel inside the hidden state: if a scheme has n tensors, the hidden state between blocks
is n times as wide. The stack's own loop passes it on unchanged; so do checkpointing, pipelines and skipped layers.
"""

import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..declarations.declared import Learned, NormAt, parts_of
from ..errors import InputError
from ..nn import mixing
from ..nn.build import install, reset, reset_module
from ..nn.interpreter import KeptTensors, Streams, apply_changes, apply_norm
from ..nn.place import Place
from ..nn.profiling import begin_stack
from ..nn.stacks import Sums
from ..nn.step_hooks import Growing
from .blocks import like_of
from .calls import StackCall, begin_stack_call, end_stack_call, stack_call
from .record import tensors_in


class StackResidual(Growing):
    """The modules and parameters that a residual scheme has for a whole stack. `place`: that of the first block;
    `has_end_norm`: the model keeps its own norm after the stack, so the scheme's is left out."""

    place: Place

    def __init__(self, place: Place, blocks: Sequence[nn.Module], has_end_norm: bool) -> None:
        super().__init__()
        like = like_of(blocks[0])
        self._blocks = tuple(blocks)  # in a tuple, so that torch does not register them as children
        factory = {"device": like.device, "dtype": like.dtype}
        self.place, declared = place, place.declared
        self.width = place.config.d_model
        self.is_wide = self.carries_more(place)  # the hidden state between blocks holds several tensors
        self.end = tuple(c for c in declared.end if c.kind != "norm" or not has_end_norm)
        self.acts_between = bool(self.is_wide or declared.begin or self.end)
        """Whether the scheme does something before the first layer, after the last one, or carries tensors from layer
        to layer."""
        self.declared_parts = self._declared()
        install(self, self.declared_parts, place, factory=factory)
        if declared.combine is not None:
            self.combine = Sums(declared.combine, place, factory, bias=True)  # learned sums of the layers' outputs
        self.train(blocks[0].training)
        self.grow(declared.growth, like.device)
        self.began_later = False
        """Whether the stack has begun with another layer than its first in a run without gradients, such as the first
        run of a reentrant checkpoint. Its second run gives the layer another tensor, which `PLACES` does not know."""
        self.compiled_last: int | None = None
        """The number of the layer that ran last as compiled code, which does not see the call of the stack's module.
        None: no compiled layer has run in this call."""
        self.kept_widths: dict[str, int] = {}  # name → width of kept tensors whose width need not be d
        # needed[i]: the names of kept tensors that layer i or a later one takes
        layers = declared.layers
        self.needed = [sorted({name for later in layers[i:] for name in later.takes}) for i in range(len(layers) + 1)]

    def _declared(self) -> list[NormAt | Learned]:
        """Returns the scheme's norms and parameters for the whole stack, except those of the learned sums."""
        declared = self.place.declared
        end_norms = (norm for norm in declared.streams if norm is not None)  # each further stream may end with a norm
        own = [*parts_of((*declared.begin, *self.end)), *end_norms]
        return own + parts_of(declared.mixing)

    def reset_parameters(self) -> None:
        """Resets the norms, the parameters and the update number t."""
        reset(self, self.declared_parts)
        reset_module(self._modules.get("combine"))
        self.reset_growth()

    def watched(self) -> Iterator[nn.Parameter]:
        """Yields the parameters of all blocks."""
        return (p for block in self._blocks for p in block.parameters())

    def __deepcopy__(self, memo: dict[int, Any]) -> "StackResidual":
        if not memo:  # this module alone is copied, not a model: the copy refers to the same blocks
            memo |= {id(block): block for block in self._blocks}
        new = type(self).__new__(type(self))
        memo[id(self)] = new  # before the attributes, some of which refer to this module
        new.__setstate__(copy.deepcopy(self.__dict__, memo))
        return new

    @staticmethod
    def carries_more(place: Place) -> bool:
        """Returns whether a scheme's blocks pass on more tensors than x."""
        declared = place.declared
        takes = any(layer.takes for layer in declared.layers)
        return bool(declared.streams or declared.combine or declared.mixing or takes)

    # The methods below run between the blocks.

    def number(self, x: Tensor, own: int, is_shared: bool) -> tuple[int, bool]:
        """Returns the layer's number in this call of a block, and whether the stack begins with it.

        If several layers share the block (`is_shared`), they are counted during the stack's call; else the number is
        `own`, the block's. Activation checkpointing may run a block again outside the stack's call: then both results
        are looked up by x, the block's input. Errors: InputError if they are unknown.
        """
        call = stack_call(self)  # None: the block runs outside a call of the module around the stack
        begin = self.place.declared.begin
        # Compiled code that reads a layer's number serves that layer alone. So it does not read it without need, and
        # all layers share the compiled code.
        if call is None and torch.compiler.is_compiling() and not self.acts_between:
            return 0, False
        # whether the scheme depends on the layer's number, and the block alone does not tell it
        needs_layer = is_shared and self.acts_between
        if call is None and torch.compiler.is_compiling() and not needs_layer:
            return own, own == 0
        if call is None:
            known = None if torch.compiler.is_compiling() else PLACES.get(x)
            # whether the scheme depends on where the stack begins, and that may be another layer than the first
            needs_begin = self.began_later and begin and not self.is_wide
            if known is None and (needs_layer or needs_begin):
                why = f"{self.place.depth} layers share it" if is_shared else "the stack has run without its first"
                raise InputError(
                    f"a block runs outside the call of its stack, or compiled alone, and {self.place.config.residual} "
                    f"must know which layer it is ({why}): checkpoint it with use_reentrant=False, compile the whole "
                    "model, or call the whole stack"
                )
            return (own, own == 0) if known is None else known
        layer = own
        if is_shared:
            layer = 0 if call.last is None else call.last[1] + 1  # `last`: (hidden state, layer)
            if (self.is_wide or self.end) and layer >= self.place.depth:
                raise InputError(
                    f"a block ran more than {self.place.depth} times, as often as when the model was swapped, and "
                    f"{self.place.config.residual} does something after the last of them: swap with an example that "
                    "runs it as often, or give depth="
                )
        # the first layer begins another pass if its input is not what the last one has returned
        is_anew = layer == 0 and call.last is not None and call.last[0] is not x
        begins, call.has_begun = is_anew or not (call.has_begun or self.compiled_last is not None), True
        # note the place for a recomputation, if it does not follow from the block's number alone
        if (is_shared or begins != (layer == 0)) and not torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                PLACES[x] = layer, begins
            else:
                self.began_later = self.began_later or not is_shared
        return layer, begins

    def open(self, x: Tensor, layer: int, begins: bool) -> Streams:
        """Returns the streams that are packed in the hidden state x at the input of a layer. `begins`: whether the
        stack begins with the layer. If the scheme has learned sums, the streams' x is the layer's sum."""
        kept: KeptTensors = {}
        outputs: list[Tensor] = []
        if x.shape[-1] != self.width:  # an earlier layer has packed further tensors into x
            streams, outputs, kept = self._unpack(x, layer)
        else:
            if self.is_wide or begins:
                begin_stack()
                streams = self._begun(x, kept)
            else:
                streams = Streams(x)
        combine: Any = self._modules.get("combine")
        if combine is not None:
            # one output for each earlier layer: if layers were skipped, the last output stands for theirs, or x
            outputs += [outputs[-1]] * (layer - len(outputs)) if outputs else [streams.x] * layer
            streams = streams._replace(x=combine(streams.x, outputs, None))
        return streams._replace(kept=kept, outputs=tuple(outputs))

    def _begun(self, x: Tensor, kept: KeptTensors) -> Streams:
        """Returns the streams at the stack's begin, from its input x. Puts the tensors that the scheme keeps there into
        `kept`."""
        declared = self.place.declared
        x = apply_changes(self, declared.begin, x, None, kept)
        return Streams(mixing.begin(declared.mixing, x), (x,) * len(declared.streams), kept=kept)

    def close(self, streams: Streams, layer: int) -> Tensor:
        """Returns the hidden state that a layer passes on; for the last layer, the stack's output."""
        call = stack_call(self)
        if call is None and torch.compiler.is_compiling() and not self.acts_between:
            return streams.x  # `layer` is unknown here (see `number`)
        is_last = layer + 1 == self.place.depth
        y = self._finish(streams) if is_last else self._pack(streams, layer)
        # note the layer, so that `StackCalls` can end the stack if it was the last to run
        if call is not None:
            call.last, call.is_finished = (y, layer), call.is_finished or is_last
        elif torch.compiler.is_compiling():
            self.compiled_last = layer
        # Between layers a wide y holds several streams side by side; a model's list of hidden states shows x alone.
        if self.is_wide and not is_last and not torch.compiler.is_compiling():
            WIDE[y] = (weakref.ref(self), layer)
        return y

    def _pack(self, streams: Streams, layer: int) -> Tensor:
        """Returns all tensors of the scheme side by side in one hidden state, as `layer` passes it on."""
        x = streams.x
        if not self.is_wide:
            return x
        # a hyper-connection's x is (…, streams, d)
        first = x.flatten(-2) if getattr(self.place.declared.mixing, "streams", 1) > 1 else x
        kept = [(streams.kept or {})[name] for name in self.needed[layer + 1]]
        parts = [first, *streams.others, *streams.outputs, *(tensor.to(x.dtype) for tensor in kept)]
        return torch.cat(parts, -1)

    def _unpack(self, wide: Tensor, layer: int) -> tuple[Streams, list[Tensor], KeptTensors]:
        """Returns the streams, the outputs and the kept tensors in a hidden state that enters `layer`. The inverse of
        `_pack`."""
        # the columns: x (hyper·d), further streams and outputs (d each), and the kept tensors (`widths`)
        declared, d = self.place.declared, self.width
        names = self.needed[layer]
        widths = [self.kept_widths.get(name, d) for name in names]
        hyper = getattr(declared.mixing, "streams", 1)  # the number of streams that x consists of
        columns_between = wide.shape[-1] - sum(widths) - hyper * d
        first, *others = wide.split([hyper * d, *[d] * (columns_between // d), *widths], -1)
        kept = dict(zip(names, others[len(others) - len(names) :], strict=True))
        others = others[: len(others) - len(names)]
        x = first.unflatten(-1, (hyper, d)) if hyper > 1 else first
        # the number of further streams; a scheme with a mixing has no outputs after them
        count = len(others) if declared.mixing is not None else len(declared.streams)
        # Under Dynamo `others` is a tuple, hence the conversions.
        return Streams(x, tuple(others[:count])), list(others[count:]), kept

    def keeps(self, widths: Mapping[str, int]) -> None:
        """Notes the widths of kept tensors whose width need not be d: name → width."""
        self.kept_widths = {**self.kept_widths, **widths}

    def _finish(self, streams: Streams) -> Tensor:
        """Returns the stack's output from the streams after the last layer that ran."""
        declared, x, others = self.place.declared, streams.x, streams.others
        combine: Any = self._modules.get("combine")
        if combine is not None:
            outputs = [y.to(x.dtype) for y in streams.outputs]
            # x stands for the outputs that are missing, such as those of layers that did not run
            outputs += [x] * (self.place.depth - len(outputs))
            x = combine(x, outputs, None)
        for end_norm, stream in zip(declared.streams, others):  # each further stream is added, after its norm if any
            x = x + (stream if end_norm is None else apply_norm(getattr(self, end_norm.name), stream, None))
        x, _ = mixing.read(declared.mixing, self, (x, *others))
        return apply_changes(self, self.end, x, None, dict(streams.kept or {}))

    def finish(self, y: Tensor, layer: int) -> Tensor:
        """Returns the stack's output if `layer` was the last to run, from the hidden state y after it. `layer` is −1 if
        no layer has run."""
        if y.shape[-1] == self.width:
            return self._finish(self._begun(y, {}) if layer < 0 else Streams(y))
        streams, outputs, kept = self._unpack(y, layer + 1)
        return self._finish(streams._replace(outputs=tuple(outputs), kept=kept))

    def seen(self, y: Tensor, layer: int) -> Tensor:
        """Returns what a model's list of hidden states shows for the hidden state y after a layer: x alone."""
        if y.shape[-1] == self.width:
            return y
        streams, _, _ = self._unpack(y, layer + 1)
        return mixing.seen(self.place.declared.mixing, (streams.x, *streams.others))

    def extra_repr(self) -> str:
        return f"{str(self.place.config.residual)!r}, depth {self.place.depth}"


class StackCalls:
    """Hooks around a stack's calls. They end the stack as the scheme says if later blocks did not run. `early`: how
    often the norm after the stack is called before the first block."""

    def __init__(self, stack: StackResidual, early: int = 0) -> None:
        self.stack, self.early = stack, early

    def begin(self, *_: Any) -> None:
        """Begins a call of the stack. A hook before the call."""
        self.stack.compiled_last = None
        begin_stack_call(self.stack)

    def end(self, module: nn.Module, __: Any, output: Any) -> Any:
        """Replaces the hidden state in the output by the stack's output if the last block did not run. A hook after the
        stack's call. Errors: InputError if the output does not have the hidden state, and the scheme does something
        after the last layer."""
        call = end_stack_call(self.stack)
        if call is None or self._is_finished(call):
            return None
        layer = self._layer(call)
        is_packed = layer >= 0 and self.stack.is_wide  # the hidden state is then wider than d
        candidates = [t for t in tensors_in(output) if t.is_floating_point() and t.dim() > 1]
        candidates = [t for t in candidates if (t.shape[-1] != self.stack.width) == is_packed]
        # if no layer has run, or only compiled ones, the hidden state is the output's first tensor of its width
        hidden: Any = call.last[0] if call.last is not None else next(iter(candidates), None)
        is_unclear = call.last is None and len(candidates) > 1
        # if no layer has run, the call may not concern this stack: a model may call its encoder without its decoder
        is_elsewhere = layer >= 0 and (is_unclear or all(t is not hidden for t in tensors_in(output)))
        if output is not None and is_elsewhere and (self.stack.end or self.stack.is_wide):
            raise InputError(
                f"the last of {self.stack.place.depth} layers did not run, and {self.stack.place.config.residual} does "
                f"something after it: that has no place in {type(module).__name__}, which goes on with the hidden "
                "state. Run all layers, or put their loop into a module of its own and swap anew"
            )
        return _replaced(output, lambda t: t if t is not hidden else self.stack.finish(t, layer))

    def _layer(self, call: StackCall) -> int:
        """Returns the number of the layer that ran last in a call; −1: none."""
        # eager layers note themselves in the call, compiled ones in the stack
        layers = [call.last[1] if call.last is not None else -1, self.stack.compiled_last]
        return max(layer for layer in layers if layer is not None)

    def _is_finished(self, call: StackCall) -> bool:
        """Returns whether the stack's last layer has run in a call, or the norm after it."""
        return call.is_finished or self._layer(call) + 1 == self.stack.place.depth

    def before_norm(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Replaces the input of the norm after the stack by the stack's output if the last block did not run. The first
        `early` calls are left alone, since they come before the stack. A hook before the norm's call."""
        call = stack_call(self.stack)
        if call is not None:
            call.norms += 1
            if call.norms <= self.early:
                return None
        is_unfinished = call is not None and not self._is_finished(call)
        y = args[0] if args else None
        # outside the stack's call, a wide y shows that the stack has not ended
        if not isinstance(y, Tensor) or not (is_unfinished or (call is None and y.shape[-1] != self.stack.width)):
            return None
        if call is None:  # outside the stack's call, the last block is taken to be the only one that did not run
            layer = self.stack.place.depth - 2
        else:
            is_narrow = y.shape[-1] == self.stack.width
            # whether y is the output of the layer that ran last; a compiled layer does not note its output
            is_last = y is call.last[0] if call.last is not None else self.stack.compiled_last is not None
            if is_narrow and not is_last:
                return None  # another tensor, which the model norms by the same module
            call.is_finished = True
            layer = self._layer(call)
        return (self.stack.finish(y, layer), *args[1:])


PLACES: Any = WeakTensorKeyDictionary()
"""For the input of a block that does not itself tell which layer it is: (number of the layer, whether the stack begins
there). A recomputation, for activation checkpointing, reads this."""
WIDE: Any = WeakTensorKeyDictionary()
"""For each hidden state that holds more than x: (its stack, the number of the layer that returned it)."""


def show(_: nn.Module, __: Any, output: Any) -> Any:
    """Replaces wide hidden states in an output by x. A hook after the calls of modules around a stack."""
    return _replaced(output, _shown) if len(WIDE) else None


def _shown(t: Tensor) -> Tensor:
    """Returns x for a wide hidden state, and any other tensor as it is."""
    reference, layer = WIDE.get(t, (None, 0))
    stack = None if reference is None else reference()
    return t if stack is None else stack.seen(t, layer)


def _replaced(value: Any, change: Any) -> Any:
    """Returns nested tuples, lists and mappings with the function `change` applied to each tensor. Mappings change in
    place, since Hugging Face's outputs are mappings with attributes."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_replaced(item, change) for item in value)
    if isinstance(value, list):
        return [_replaced(item, change) for item in value]
    if isinstance(value, Mapping):
        for name in [*value]:
            new = _replaced(value[name], change)
            if new is not value[name]:
                value[name] = new  # type: ignore[index]
    return value
