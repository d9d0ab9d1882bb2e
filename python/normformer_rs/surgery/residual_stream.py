"""A tensor subclass that stands for the residual stream while another library's block runs its own forward.

An addition to the stream ends a sublayer: the scheme's residual connection is computed instead. Any other operation on
it gets the tensor that the scheme's sublayer reads. The block's own norms on the stream return it unchanged, or the
scheme calls them.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..errors import InputError
from ..nn.interpreter import Streams, open_streams
from .converted import Converted, residual_of
from .record import ADDITIONS, FOLLOWED, TIMES, UNCHANGED, kind_of, takes_all, tensors_in
from .structure import Structure

_LOOKS = frozenset(
    (
        *("__get__", "__set__", "__len__", "__hash__", "__repr__", "__bool__", "size", "dim", "ndimension", "stride"),
        *("is_floating_point", "is_complex", "numel", "nelement", "is_contiguous", "element_size", "get_device"),
        *("data_ptr", "is_same_size"),
    )
)
"""Operations that read a tensor's properties, such as its shape, but not its numbers."""
_REARRANGES = FOLLOWED | {"__getitem__"}
"""Operations whose output may still be the stream, in another dtype, shape or order."""


class Pass:
    """One call of a block, with the additions that end its sublayers and those that only read the stream.

    `residual`: the block's `BlockResidual` or `LoopResidual`. `writes`: the sublayer of each addition that will occur
    in this call, in order.
    """

    def __init__(self, residual: Any, writes: tuple[int, ...], structure: Structure) -> None:
        self.residual, self.writes, self.structure = residual, writes, structure
        kept = [i for i, sublayer in enumerate(structure.writes) if sublayer in writes]
        self.recorded = (*kept, len(structure.writes))
        """The position in `structure.writes` of each addition of this call, which may leave sublayers out. The last
        entry is for operations after all additions."""
        self.became: tuple[Tensor, Stream] | None = None
        """If the block added the stream to a branch in place: the branch, and the stream after the addition."""
        self.has_begun = self.is_over = False
        """Whether the stream of a loop's span has begun, and whether the call has ended."""
        self.written = 0
        """The number of additions to the stream so far."""
        self.has_gradients = torch.is_grad_enabled()
        self.seen: dict[tuple[str, int], int] = {}
        """(kind, number of writing additions before) → how many operations of the kind ("+" or "*") came since then."""
        self.totals: dict[tuple[str, int], int] = {}
        """A copy of `seen` from the end of the call."""

    def shown(self, rows: Tensor) -> Tensor:
        """Returns rows in the block's layout: a block of images has the channels in the second dimension."""
        return rows.movedim(-1, 1) if self.structure.has_channels_first else rows

    def as_rows(self, f: Tensor, shape: Any) -> Tensor:
        """Returns the branch f in the layout of `Stream.streams`, whose last dimension is the width."""
        return f.movedim(1, -1) if self.structure.has_channels_first else f.reshape(shape)

    def only_reads(self, written: int) -> bool:
        """Returns whether the addition under way only reads the stream. Counts it. `written`: the number of writing
        additions before it."""
        return self._counted("+", written) in self.structure.reads

    def goes_on(self, written: int) -> bool:
        """Returns whether the result of the multiplication under way is the stream from then on. Counts it. `written`:
        as in `only_reads`."""
        return self._counted("*", written) in self.structure.scales

    def _counted(self, kind: str, written: int) -> tuple[int, int]:
        """Counts the operation under way, of the kind "+" or "*". Returns its number as in `Structure.reads`: (number
        of writing additions before it, index since the last of them). The first also counts the additions of sublayers
        that this call leaves out."""
        index = self.seen.get((kind, written), 0)
        if self.is_over and (kind, written) in self.totals:  # a recomputation begins to count at 0
            index %= self.totals[kind, written]
        self.seen[kind, written] = index + 1
        return self.recorded[written], index

    def refuse_reentrant(self) -> None:
        """Raises InputError within a reentrant checkpoint that has begun during this call, since its second run would
        not reach the stream's gradients."""
        if self.is_over or not self.has_gradients or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code.co_name == "forward" and frame.f_globals.get("__name__") == "torch.utils.checkpoint":
                raise InputError(
                    f"{self.residual.described()} uses its residual stream within a reentrant checkpoint, and "
                    "gradients would be lost: use use_reentrant=False, or checkpoint the whole block"
                )
            frame = frame.f_back

    def end(self) -> None:
        """Ends the call. From then on, only recomputations use its streams."""
        self.is_over, self.totals = True, dict(self.seen)


class Stream(Tensor):
    """The residual stream x within a block, after `written` additions."""

    under_way: Pass
    plain: Tensor
    """x as a plain tensor, in the shape that the block expects."""
    value: Tensor
    """The tensor that the sublayer under way reads if the block has no norm before it. The stream's memory holds these
    numbers, so code that bypasses `__torch_function__` reads them: properties, functions that save tensors, kernels."""
    streams: Streams
    """The scheme's tensors: x, further streams, and the tensor that the sublayer reads. Their last dimension is the
    width."""
    written: int
    """The number of additions to the stream so far in this call."""
    parallel: Tensor | None
    """The sum so far, if the sublayer has several branches that the block adds one by one. Else None."""
    shape_of_rows: Any
    """The shape of the tensors in `streams`, which may differ from the block's."""

    @staticmethod
    def of(
        x: Tensor,
        under_way: Pass,
        streams: Streams,
        written: int = 0,
        parallel: Tensor | None = None,
        shape: Any = None,
        value: Tensor | None = None,
    ) -> "Stream":
        """Returns a stream for x, given in the shape and dtype that the block expects. `value`: the tensor that the
        sublayer under way reads; None: it is computed. `shape`: that of the tensors in `streams`; None: that of x."""
        value = _value(x, under_way, streams, written, parallel) if value is None else value
        stream = value.as_subclass(Stream) if _is_plain(value) else _around(value)
        stream.under_way, stream.plain, stream.streams, stream.written = under_way, x, streams, written
        stream.parallel, stream.value, stream.shape_of_rows = parallel, value, shape or x.shape
        return stream

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch that has a stream among its arguments. Additions to the stream end a sublayer as
        the scheme says, reshapes and casts return the stream, and others get the tensor that the sublayer reads."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if _is_used_after_call(args):
                return func(*tree_map(_after_call, args), **tree_map(_after_call, kwargs))
            if name in _LOOKS:
                return func(*args, **kwargs)
            if name in ADDITIONS and (added := _added(args, kwargs)) is not None:
                stream, f = added
                made = write(stream, f)
                # f.add_(stream) leaves f in the block's variables, and f is the stream from now on
                is_into_branch = name == "add_" and args[0] is f
                stream.under_way.became = (f, made) if is_into_branch else None
                return made
            # the block's own factor on x is left out, since the scheme has another
            if name in TIMES and args and isinstance(args[0], Stream) and _goes_on(*args, *kwargs.values()):
                return args[0]
            if name in _REARRANGES and args and isinstance(args[0], Stream):
                moved = _rearranged(func, args, kwargs)
                if moved is not None:
                    return moved
            is_write = name in _WRITES or (name.endswith("_") and not name.endswith("__") and name not in UNCHANGED)
            if is_write and args and isinstance(args[0], Stream) and not args[0].under_way.structure.is_in_place:
                raise InputError(
                    f"{args[0].under_way.residual.described()} writes into its residual stream ({name}), which it did "
                    "not in the run that it was swapped by: swap with an example that does"
                )
            return func(*map(_read, args), **{key: _read(value) for key, value in kwargs.items()})


class Followed(Tensor):
    """A tensor from which a residual stream is computed by a few operations, which are followed by their kinds."""

    plain: Tensor
    operations: tuple[str, ...]
    """The kinds of the operations that are still to come."""
    begin: Callable[[Tensor], Stream]
    """Returns the stream that begins with the last operation's result."""

    @staticmethod
    def of(x: Tensor, operations: tuple[str, ...], begin: Callable[[Tensor], Stream]) -> Tensor:
        """Returns x as such a tensor, or the stream if no operation is to come."""
        if not operations:
            return begin(x)
        followed: Any = x.as_subclass(Followed)
        followed.plain, followed.operations, followed.begin = x, operations, begin
        return followed  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch on plain tensors. If it is the next operation, its result is followed."""
        kwargs, kind = kwargs or {}, kind_of(getattr(func, "__name__", ""))
        followed = next((t for t in tensors_in((args, kwargs)) if isinstance(t, Followed)), None)
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*tree_map(_unfollowed, args), **tree_map(_unfollowed, kwargs))
            if followed is None or kind != followed.operations[0] or not isinstance(out, Tensor):
                return out
            return Followed.of(out, followed.operations[1:], followed.begin)


def _unfollowed(value: Any) -> Any:
    """Returns the plain tensor of one that is followed, and any other value as it is."""
    return value.plain if isinstance(value, Followed) else value


def _goes_on(stream: Stream, *factors: Any) -> bool:
    """Returns whether a multiplication by numbers is the block's own factor on x. It is then left out, because the
    scheme has its own factor on x."""
    run = stream.under_way
    return (
        bool(run.structure.scales)
        and all(isinstance(factor, int | float) for factor in factors)
        and run.goes_on(stream.written)
    )


def _as_scheme(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that marks what it computes as the scheme's, not the block's."""

    @functools.wraps(step)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return step(*args, **kwargs)
        before, RUNS.is_schemes = RUNS.is_schemes, True
        try:
            return step(*args, **kwargs)
        finally:
            RUNS.is_schemes = before

    return marked


@_as_scheme
def _value(x: Tensor, run: Pass, streams: Streams, written: int, parallel: Tensor | None) -> Tensor:
    """Returns the tensor that the sublayer under way reads if it reads the stream directly; x if it reads through one
    of the block's norms, or if no sublayer is under way. The arguments are those of `Stream.of`."""
    is_after_last = written >= len(run.writes)
    if is_after_last or parallel is not None or run.residual.parts[run.writes[written]].before is not None:
        return x
    value = run.residual.read(run.writes[written], streams, None)
    value = run.shown(value) if run.structure.has_channels_first else value
    return value.reshape(x.shape) if value.numel() == x.numel() else value


def _is_used_after_call(args: Any) -> bool:
    """Returns whether a stream among the arguments is used after its block's call, but not in a backward pass: there,
    functions read the tensors that they saved."""
    first = next((a for a in args if isinstance(a, Stream)), None)
    # autograd's task id is −1 outside a backward pass
    return first is not None and first.under_way.is_over and torch._C._current_graph_task_id() == -1


def _after_call(value: Any) -> Any:
    """Returns x as a plain tensor for a stream, and any other value as it is."""
    return bare(value) if isinstance(value, Stream) else value


def bare(x: Stream) -> Tensor:
    """Returns x as a plain tensor."""
    return x.plain if x.value is not x.plain else _numbers(x)


def _numbers(x: Stream) -> Tensor:
    """Returns the stream's `value` as a plain tensor. Normally this is a view of the stream, because reentrant
    checkpoints detach the stream, and gradients must reach that tensor. Dynamo cannot change a tensor's class, so it
    gets `value` itself."""
    return x.value if torch.compiler.is_compiling() or not _is_plain(x.value) else x.as_subclass(Tensor)


def _is_plain(x: Tensor) -> bool:
    """Returns whether a tensor is of no subclass; always True while Dynamo compiles."""
    return torch.compiler.is_dynamo_compiling() or type(x) in (Tensor, nn.Parameter)


def _around(x: Tensor) -> Any:
    """Returns a stream that wraps a tensor of a subclass, as torch.export has."""
    properties: dict[str, Any] = {"dtype": x.dtype, "device": x.device, "requires_grad": x.requires_grad}
    return Tensor._make_wrapper_subclass(_Around, x.shape, strides=x.stride(), **properties)


class _Around(Stream):
    """A stream without memory of its own: operations act on the tensor `value` that it wraps."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls an operator on the wrapped tensors."""
        return func(*tree_map(_unwrapped, args), **tree_map(_unwrapped, kwargs or {}))


def _unwrapped(value: Any) -> Any:
    """Returns the tensor that a stream wraps, and any other value as it is."""
    return value.value if isinstance(value, _Around) else value


def _added(args: Any, kwargs: Any) -> tuple[Stream, Tensor] | None:
    """Returns the stream and the branch that an addition adds to it, multiplied by the addition's factor `alpha`. None:
    the addition does not write the stream."""
    if len(args) != 2 or {*kwargs} - {"alpha"} or not all(isinstance(a, Tensor) for a in args):
        return None
    streams = [a for a in args if isinstance(a, Stream)]
    alpha = kwargs.get("alpha", 1)  # it multiplies the second operand
    # the run that the swap is based on has found additions that read the stream without writing it
    if len(streams) != 1 or streams[0].under_way.only_reads(streams[0].written):
        return None
    is_broadcast = args[0].shape != args[1].shape  # a branch has the stream's shape
    if is_broadcast or (alpha != 1 and args[1] is streams[0]):
        return None
    f = args[1] if args[0] is streams[0] else args[0]
    return streams[0], f if alpha == 1 else alpha * f


_WRITES = frozenset({"__setitem__", "__isub__", "__imul__", "__itruediv__", "__ipow__"})
"""Operators that write into their first argument, beside methods whose names end in an underscore."""
_SHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as"})
"""Operations that only change the shape."""


def _rearranged(func: Any, args: Any, kwargs: Any) -> Stream | None:
    """Returns the stream after a change of its dtype, of its shape before the last dimension, or of the order of its
    first dimensions. None: the operation does something else."""
    stream, name = args[0], getattr(func, "__name__", "")
    x = bare(stream)
    made = func(x, *args[1:], **kwargs)
    if not isinstance(made, Tensor):
        return None
    if name == "__getitem__" and not takes_all(args[1]):
        return None
    streams, shape, value = stream.streams, stream.shape_of_rows, None
    if name == "transpose":
        # the result is the stream only if the width stays last, and the scheme's tensors have the dimensions of x
        if shape != x.shape or any(d % x.dim() == x.dim() - 1 for d in args[1:3]) or len(args) != 3:
            return None
        new_x, *rest = (func(t, *args[1:], **kwargs) for t in (streams.x, *streams.others, *streams.outputs))
        count = len(streams.others)
        streams = streams._replace(x=new_x, others=tuple(rest[:count]), outputs=tuple(rest[count:]), normed=None)
        if streams.read is not None:
            unwritten = tuple(func(t, *args[1:], **kwargs) for t in streams.unwritten)
            streams = streams._replace(read=made, unwritten=unwritten)
        shape, value = made.shape, func(_numbers(stream), *args[1:], **kwargs)
    elif made.shape != x.shape:  # the scheme's tensors keep their shape, to which `write` reshapes the branch
        if name not in _SHAPES or made.shape[-1:] != x.shape[-1:] or made.numel() != x.numel():
            return None
        value = _numbers(stream).reshape(made.shape)
    elif made.dtype != x.dtype:  # a cast; `normed` is dropped, since it was computed in the old dtype
        cast = tuple(other.to(made.dtype) for other in streams.others)
        read_tensor = None if streams.read is None else made
        streams = streams._replace(x=streams.x.to(made.dtype), others=cast, normed=None, read=read_tensor)
    elif name == "clamp":
        streams = streams._replace(x=func(streams.x, *args[1:], **kwargs), normed=None)
        run = stream.under_way
        if streams.read is not None and stream.written < len(run.writes):
            residual, i = run.residual.layer_of(run.writes[stream.written])
            streams = open_streams(residual, residual.sublayers[i], streams)
            read_tensor = streams.x if streams.read is None else streams.read
            made = run.shown(read_tensor).reshape(made.shape)
    return Stream.of(made, stream.under_way, streams, stream.written, stream.parallel, shape, value)


def _read(value: Any) -> Any:
    """Returns an argument with each stream in it replaced by the tensor that the sublayer reads."""
    if isinstance(value, Stream):
        return read(value)
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return type(value)(map(_read, value))
    return value


@_as_scheme
def read(stream: Stream, norm: nn.Module | None = None) -> Tensor:
    """Returns the tensor that the sublayer under way reads, as a plain tensor: through the block's norm `norm`, or
    directly if `norm` is None. Between two branches of one sublayer, and after the last sublayer, this is x."""
    run = stream.under_way
    if stream.written >= len(run.writes) or stream.parallel is not None or _is_used_after_call((stream,)):
        return bare(stream)
    run.refuse_reentrant()
    if norm is None and run.residual.parts[run.writes[stream.written]].before is None:
        value = _numbers(stream)
    else:
        value = run.residual.read(run.writes[stream.written], stream.streams, norm)
        value = run.shown(value) if run.structure.has_channels_first else value
        value = value.reshape(stream.shape) if value.numel() == stream.numel() else value
    return value.clone() if run.structure.is_in_place else value  # the block may write into what it reads


@_as_scheme
def write(stream: Stream, f: Tensor) -> Stream:
    """Returns the stream after the block has added the branch f to it. Errors: InputError if the block adds more often
    than in the recorded run."""
    run, number = stream.under_way, stream.written
    if number >= len(run.writes):
        raise InputError(
            f"{run.residual.described()} adds to its residual stream more often than in the run that it was swapped by"
        )
    if not run.is_over:
        if number < run.written:
            raise InputError(
                f"{run.residual.described()} went another way than in the run that it was swapped by: it adds to its "
                "residual stream as it was before an earlier addition. Swap with an example that goes this way"
            )
        run.refuse_reentrant()
        run.written = number + 1
    f = f if stream.parallel is None else stream.parallel + f
    # if the next addition belongs to the same sublayer, the scheme gets the sum of both branches there
    if number + 1 < len(run.writes) and run.writes[number + 1] == run.writes[number]:
        return Stream.of(bare(stream), run, stream.streams, number + 1, f, stream.shape_of_rows)
    following = run.writes[number + 1] if number + 1 < len(run.writes) else None
    streams = run.residual.write(run.writes[number], stream.streams, run.as_rows(f, stream.shape_of_rows), following)
    plain = streams.x if streams.read is None else streams.read
    plain = run.shown(plain) if run.structure.has_channels_first else plain
    # a scheme that mixes several streams gives x another size, and f stands in as a tensor of the block's shape
    plain = plain.reshape(f.shape) if plain.numel() == f.numel() else f.to(plain.dtype)
    return Stream.of(plain, run, streams, number + 1, None, stream.shape_of_rows)


class Identity(nn.Identity):
    """Replaces a norm of a block that the scheme does not have. Given the stream before a sublayer, it returns the
    tensor that the sublayer reads."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the tensor that the sublayer reads for the stream before it, and any other tensor as it is."""
        if not isinstance(x, Stream):
            _refuse_outside(self)
            return x
        return read(x, self) if x.under_way.residual.stands_before(self, x) else x


class StreamNorm(Converted):
    """A block's norm on its stream. Before a sublayer, it returns the tensor that the sublayer reads; after one, the
    stream itself. If the scheme has a norm there, it calls this module with a plain tensor, which is normed."""

    goes_over = True
    """`hand_over` makes the norm that replaces this one a StreamNorm, too."""
    computes_as: ClassVar[type]
    """The norm's own class, whose operator may be used in place of a call."""

    def __init_subclass__(cls) -> None:
        """Gives the converted class a forward with the signature of the norm's own."""
        cls.computes_as, own = cls._nfrs_kind, cls._nfrs_kind.forward

        @functools.wraps(own)
        def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not isinstance(x, Stream):
                _refuse_plain(self)
                return own(self, x, *args, **kwargs)
            if any(isinstance(other, Tensor) for other in (*args, *kwargs.values())):
                raise InputError(
                    f"{x.under_way.residual.described()} gives its {type(self).__name__} a second tensor, which the "
                    "scheme's norm does not know: call the norm with the residual stream alone"
                )
            return read(x, self) if x.under_way.residual.stands_before(self, x) else x

        cls.forward = forward  # type: ignore[attr-defined]


class _Runs(threading.local):
    """The calls of blocks under way in this thread, the innermost last. `is_schemes`: the code that runs now is the
    scheme's, not the block's."""

    def __init__(self) -> None:
        self.under_way: list[Pass] = []
        self.is_schemes = False


RUNS = _Runs()


@contextlib.contextmanager
def under_way(run: Pass) -> Iterator[None]:
    """Marks the operations inside a `with` block as those of a block's own code, except where the scheme computes."""
    if torch.compiler.is_compiling():
        yield
        return
    before, RUNS.is_schemes = RUNS.is_schemes, False
    RUNS.under_way.append(run)
    try:
        yield
    finally:
        RUNS.under_way.pop()
        RUNS.is_schemes = before


def _refuse_plain(norm: nn.Module) -> None:
    """Raises InputError if a block's code calls one of its stream's norms with another tensor, and did not in the run
    that it was swapped by, or outside the block's forward."""
    if not RUNS.under_way:
        _refuse_outside(norm)
    if torch.compiler.is_compiling() or RUNS.is_schemes or not RUNS.under_way:
        return
    residual = RUNS.under_way[-1].residual
    if _is_stream_norm(norm, residual):
        raise InputError(
            f"{residual.described()} calls its {type(norm).__name__} on another tensor than its residual stream, "
            "unlike in the run that it was swapped by: swap with an example in which it does"
        )


def _is_stream_norm(norm: nn.Module, residual: Any) -> bool:
    """Returns whether a module is one of the block's norms on its stream, and norms nothing else."""
    own = {path for part in residual.parts for path in (part.before, part.after, *part.twins) if path is not None}
    return any(residual.module_at(path) is norm for path in own - residual.structure.elsewhere)


def _refuse_outside(norm: nn.Module) -> None:
    """Raises InputError if another method of a block than its forward calls one of the block's norms, and none did in
    the run that it was swapped by, or if a module around the block calls one that the swap has removed. The swap has
    changed forwards alone."""
    if torch.compiler.is_compiling() or RUNS.is_schemes or RUNS.under_way:
        return
    if torch._C._current_graph_task_id() != -1:  # a checkpoint recomputes in a backward pass
        return
    # look for the calling method among the frames: the first one of a block's call, or of a module with this norm
    frame = inspect.currentframe()
    while frame is not None:
        owner, method, frame = _owner_of(frame), frame.f_code.co_name, frame.f_back
        if owner is None or owner is norm:
            continue
        residual = residual_of(owner)
        if residual is not None and (method in _CALLS or method.startswith("torch_dynamo_resume")):
            return
        is_removed = isinstance(norm, Identity) and any(module is norm for module in owner.modules())
        if is_removed or (residual is not None and _is_stream_norm(norm, residual)):
            raise InputError(
                f"{method}() of {type(owner).__name__} calls a swapped block's {type(norm).__name__} outside the "
                "block's forward, which alone has the new scheme: call the block instead, or undo() the swap"
            )


def _owner_of(frame: Any) -> nn.Module | None:
    """Returns the module whose method runs in a frame. None: the frame is of another function."""
    code = frame.f_code
    name = code.co_varnames[0] if code.co_argcount else "self"  # a method's first argument
    owner = frame.f_locals.get(name)
    is_method = name == "self" or getattr(getattr(type(owner), code.co_name, None), "__code__", None) is code
    return owner if is_method and isinstance(owner, nn.Module) else None


_CALLS = frozenset({"forward", "_call_impl", "_wrapped_call_impl"})
"""The functions through which a call of a module runs."""
