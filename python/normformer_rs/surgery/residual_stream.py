"""The residual stream as a tensor: another library's block runs its own forward on it.

Adding to it closes a sublayer, and any other reading of it gives what the scheme's sublayer reads. The block's own
norms on the stream let it through.
"""

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..errors import InputError
from ..nn.interpreter import Streams
from .converted import Converted
from .record import ADDITIONS, FOLLOWED, TIMES, takes_all
from .structure import Structure

_LOOKS = frozenset(
    (
        *("__get__", "__set__", "__len__", "__hash__", "__repr__", "__bool__", "size", "dim", "ndimension", "stride"),
        *("is_floating_point", "is_complex", "numel", "nelement", "is_contiguous", "element_size", "get_device"),
        *("data_ptr", "is_same_size"),
    )
)
"""Operations that ask for a tensor's form and not for its numbers."""
_REARRANGES = FOLLOWED | {"__getitem__"}


class Pass:
    """One call of a block: which sublayers its additions close, and which additions only read the stream."""

    def __init__(self, residual: Any, writes: tuple[int, ...], structure: Structure) -> None:
        self.residual, self.writes, self.structure = residual, writes, structure
        every = structure.writes
        kept = [i for i, sublayer in enumerate(every) if sublayer in writes]
        self.recorded = (*kept, len(every))
        self.became: tuple[Tensor, Stream] | None = None
        """A branch that the stream was added to in place, and the stream after it."""
        self.is_over = False
        """The call has ended."""
        self.seen: dict[tuple[str, int], int] = {}
        """Additions that only read, and multiplications, by how many additions wrote before."""

    def shown(self, rows: Tensor) -> Tensor:
        """Rows as the block sees them: of images the channels come first."""
        return rows.movedim(-1, 1) if self.structure.has_channels_first else rows

    def as_rows(self, f: Tensor, shape: Any) -> Tensor:
        """A branch as rows of that shape."""
        return f.movedim(1, -1) if self.structure.has_channels_first else f.reshape(shape)

    def only_reads(self, written: int) -> bool:
        """Whether the addition under way only reads the stream."""
        return self._counted("+", written) in self.structure.reads

    def goes_on(self, written: int) -> bool:
        """Whether the stream goes on from the multiplication under way."""
        return self._counted("*", written) in self.structure.scales

    def _counted(self, what: str, written: int) -> tuple[int, int]:
        """The operation under way, as the structure counts: with the additions of sublayers that are left out."""
        number = self.seen.get((what, written), 0)
        self.seen[what, written] = number + 1
        return self.recorded[written], number


class Stream(Tensor):
    """x on its way through a block, `written` additions after its start."""

    under_way: Pass
    plain: Tensor
    """x, as the block sees its shape."""
    value: Tensor
    """What the sublayer under way reads past the block's own norms. The stream holds these numbers: whatever gets
    past `__torch_function__`, as properties, functions that save tensors, or kernels, reads them."""
    streams: Streams
    """x, what goes beside it, and what was read of it."""
    written: int
    parallel: Tensor | None
    """The sum of the sublayer's first branches, where several are added one by one."""
    shape_of_rows: Any
    """The shape of `streams`, where the block sees another."""

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
        """`x` as the stream: what the block sees as its input's shape and type. `value`: where it is known."""
        value = _value(x, under_way, streams, written, parallel) if value is None else value
        stream = value.as_subclass(Stream) if _is_plain(value) else _around(value)
        stream.under_way, stream.plain, stream.streams, stream.written = under_way, x, streams, written
        stream.parallel, stream.value, stream.shape_of_rows = parallel, value, shape or x.shape
        return stream

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if _is_kept(args):
                return func(*tree_map(_after_call, args), **tree_map(_after_call, kwargs))
            if name in _LOOKS:
                return func(*args, **kwargs)
            if name in ADDITIONS and (added := _added(args, kwargs)) is not None:
                stream, f = added
                made = write(stream, f)
                stream.under_way.became = (f, made) if name == "add_" and args[0] is f else None
                return made
            if name in TIMES and args and isinstance(args[0], Stream) and _goes_on(*args):
                return args[0]
            if name in _REARRANGES and args and isinstance(args[0], Stream):
                moved = _rearranged(func, args, kwargs)
                if moved is not None:
                    return moved
            return func(*map(_read, args), **{key: _read(value) for key, value in kwargs.items()})


def _goes_on(stream: Stream, *factors: Any) -> bool:
    """The stream goes on from a multiplication by a number, which the scheme's own factor of x stands for."""
    run = stream.under_way
    return (
        bool(run.structure.scales) and all(isinstance(a, int | float) for a in factors) and run.goes_on(stream.written)
    )


def _value(x: Tensor, run: Pass, streams: Streams, written: int, parallel: Tensor | None) -> Tensor:
    """What the sublayer under way reads past the block's own norms; x where it reads through them."""
    if written >= len(run.writes) or parallel is not None or run.residual.parts[run.writes[written]].before is not None:
        return x
    value = run.residual.read(run.writes[written], streams, None)
    value = run.shown(value) if run.structure.has_channels_first else value
    return value.reshape(x.shape) if value.numel() == x.numel() else value


def _is_kept(args: Any) -> bool:
    """A stream is read after its block's call. Backward passes of functions read what these saved."""
    first = next((a for a in args if isinstance(a, Stream)), None)
    return first is not None and first.under_way.is_over and torch._C._current_graph_task_id() == -1


def _after_call(value: Any) -> Any:
    return bare(value) if isinstance(value, Stream) else value


def bare(x: Stream) -> Tensor:
    """x without the class."""
    return x.plain if x.value is not x.plain else _numbers(x)


def _numbers(x: Stream) -> Tensor:
    """What the stream holds, without the class. Dynamo cannot take it off, and reentrant checkpoints need the tensor
    that they detached."""
    return x.value if torch.compiler.is_compiling() or not _is_plain(x.value) else x.as_subclass(Tensor)


def _is_plain(x: Tensor) -> bool:
    return torch.compiler.is_dynamo_compiling() or type(x) in (Tensor, nn.Parameter)


def _around(x: Tensor) -> Any:
    """A stream around a tensor that has a class already, as in torch.export."""
    what: dict[str, Any] = {"dtype": x.dtype, "device": x.device, "requires_grad": x.requires_grad}
    return Tensor._make_wrapper_subclass(_Around, x.shape, strides=x.stride(), **what)


class _Around(Stream):
    """A stream that holds another tensor in place of being one."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*tree_map(_held, args), **tree_map(_held, kwargs or {}))


def _held(value: Any) -> Any:
    return value.value if isinstance(value, _Around) else value


def _added(args: Any, kwargs: Any) -> tuple[Stream, Tensor] | None:
    """The stream, and what is added to it; None: the addition is another."""
    if len(args) != 2 or {*kwargs} - {"alpha"} or not all(isinstance(a, Tensor) for a in args):
        return None
    streams = [a for a in args if isinstance(a, Stream)]
    alpha = kwargs.get("alpha", 1)
    if len(streams) != 1 or streams[0].under_way.only_reads(streams[0].written):
        return None
    if args[0].shape != args[1].shape or (alpha != 1 and args[1] is streams[0]):
        return None
    f = args[1] if args[0] is streams[0] else args[0]
    return streams[0], f if alpha == 1 else alpha * f


_SHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as"})


def _rearranged(func: Any, args: Any, kwargs: Any) -> Stream | None:
    """The stream after a change of its type, of its leading shape, or of the order of its first dimensions; None: the
    operation is another."""
    stream, name = args[0], getattr(func, "__name__", "")
    x = bare(stream)
    made = func(x, *args[1:], **kwargs)
    if not isinstance(made, Tensor):
        return None
    if name == "__getitem__" and not takes_all(args[1]):
        return None
    streams, shape, value = stream.streams, stream.shape_of_rows, None
    if name == "transpose":
        if shape != x.shape or any(d % x.dim() == x.dim() - 1 for d in args[1:3]) or len(args) != 3:
            return None
        x_, *others = (func(t, *args[1:], **kwargs) for t in (streams.x, *streams.others, *streams.outputs))
        count = len(streams.others)
        streams = streams._replace(x=x_, others=tuple(others[:count]), outputs=tuple(others[count:]), normed=None)
        if streams.read is not None:
            unwritten = tuple(func(t, *args[1:], **kwargs) for t in streams.unwritten)
            streams = streams._replace(read=made, unwritten=unwritten)
        shape, value = made.shape, func(_numbers(stream), *args[1:], **kwargs)
    elif made.shape != x.shape:
        if name not in _SHAPES or made.shape[-1:] != x.shape[-1:] or made.numel() != x.numel():
            return None
        value = _numbers(stream).reshape(made.shape)
    elif made.dtype != x.dtype:
        cast = tuple(other.to(made.dtype) for other in streams.others)
        streams = streams._replace(x=streams.x.to(made.dtype), others=cast, normed=None)
    elif name == "clamp":
        streams = streams._replace(x=func(streams.x, *args[1:], **kwargs))
    return Stream.of(made, stream.under_way, streams, stream.written, stream.parallel, shape, value)


def _read(value: Any) -> Any:
    if isinstance(value, Stream):
        return read(value)
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return type(value)(map(_read, value))
    return value


def read(stream: Stream, norm: nn.Module | None = None) -> Tensor:
    """What the sublayer reads, through one of the block's norms or past them."""
    run = stream.under_way
    if stream.written >= len(run.writes) or stream.parallel is not None or _is_kept((stream,)):
        return bare(stream)
    if norm is None and run.residual.parts[run.writes[stream.written]].before is None:
        value = _numbers(stream)
    else:
        value = run.residual.read(run.writes[stream.written], stream.streams, norm)
        value = run.shown(value) if run.structure.has_channels_first else value
        value = value.reshape(stream.shape) if value.numel() == stream.numel() else value
    return value.clone() if run.structure.is_in_place else value  # the block may write into what it reads


def write(stream: Stream, f: Tensor) -> Stream:
    """The stream after an addition."""
    run, number = stream.under_way, stream.written
    if number >= len(run.writes):
        raise InputError(
            f"{run.residual.described()} adds to its residual stream more often than in the run that it was swapped by"
        )
    f = f if stream.parallel is None else stream.parallel + f
    if number + 1 < len(run.writes) and run.writes[number + 1] == run.writes[number]:
        return Stream.of(bare(stream), run, stream.streams, number + 1, f, stream.shape_of_rows)
    following = run.writes[number + 1] if number + 1 < len(run.writes) else None
    streams = run.residual.write(run.writes[number], stream.streams, run.as_rows(f, stream.shape_of_rows), following)
    seen = streams.x if streams.read is None else streams.read
    seen = run.shown(seen) if run.structure.has_channels_first else seen
    seen = seen.reshape(f.shape) if seen.numel() == f.numel() else f
    return Stream.of(seen, run, streams, number + 1, None, stream.shape_of_rows)


class Identity(nn.Identity):
    """In the place of a norm that a sublayer read through, and that the scheme has not."""

    def forward(self, x: Tensor) -> Tensor:
        return read(x, self) if isinstance(x, Stream) else x


class StreamNorm(Converted):
    """A norm that a block calls on its stream. The scheme decides where norms stand, and calls it with a plain x."""

    goes_over = True
    """To the norm that takes its place."""
    computes_as: ClassVar[type]
    """The class whose operator may stand in for a call."""

    def __init_subclass__(cls) -> None:
        cls.computes_as, own = cls.kind, cls.kind.forward

        @functools.wraps(own)
        def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not isinstance(x, Stream):
                return own(self, x, *args, **kwargs)
            return read(x, self) if x.under_way.residual.stands_before(self, x) else x

        cls.forward = forward  # type: ignore[attr-defined]
