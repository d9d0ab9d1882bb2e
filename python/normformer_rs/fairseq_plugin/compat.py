"""Patches that make fairseq 0.12.2 run on today's Python and torch. They change no file of fairseq.

Each patch names its reason and may be applied twice. Those of Python are applied before fairseq is imported; they and
the patch of numpy do nothing on a version that does not need them. The other patches are always needed, because this
package supports only one version of torch.
"""

import contextlib
import dataclasses
import functools
import importlib
import sys
import types
from collections.abc import Iterator
from importlib.machinery import FileFinder
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from normformer_rs._optional import available, require
from normformer_rs.formats.convert import SAFE

_FOREIGN = ("fairseq", "fairseq_cli", "hydra")
"""The packages whose dataclasses may be field defaults."""


def apply() -> None:
    """Imports fairseq and applies every patch that this Python, this numpy and torch need."""
    allow_dataclass_defaults()
    give_finders_find_module()
    require(
        "fairseq",
        "the fairseq plug-in",
        hint='only pip before 24.1 installs it: first pip install "pip<24.1"',
    )
    lend_names_of_numpy_1()
    allow_checkpoints()
    broadcast_objects()
    switch_fast_path_off()
    keep_half_precision_on_cpus()


def allow_dataclass_defaults() -> None:
    """Allows dataclasses as field defaults. Python 3.11 refuses an unhashable default; fairseq's and hydra 1.0's
    configs have dataclasses there.

    `dataclasses` checks whether the default's type has a hash. So the type gets one while the field is made. A
    default_factory cannot be used instead, because fairseq reads `Field.default`.
    """
    original: Any = dataclasses._get_field  # type: ignore[attr-defined]
    if sys.version_info < (3, 11) or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def get_field(cls: type, name: str, *rest: Any) -> Any:
        """Runs the original function, with a hash for the default's type if fairseq or hydra declares it."""
        default = cls.__dict__.get(name)
        if isinstance(default, dataclasses.Field):  # the default was written as field(default=…)
            default = default.default
        kind = type(default)
        is_foreign = kind.__module__.partition(".")[0] in _FOREIGN and dataclasses.is_dataclass(kind)
        with _hashable(kind) if is_foreign and kind.__hash__ is None else contextlib.nullcontext():
            return original(cls, name, *rest)

    dataclasses._get_field = get_field  # type: ignore[attr-defined]


@contextlib.contextmanager
def _hashable(kind: Any) -> Iterator[None]:
    """Gives the class a hash inside the block."""
    kind.__hash__ = object.__hash__
    try:
        yield
    finally:
        kind.__hash__ = None


def give_finders_find_module() -> None:
    """Restores `FileFinder.find_module`, which hydra 1.0 uses to find its plug-ins and which Python 3.12 removed."""
    if sys.version_info < (3, 12) or hasattr(FileFinder, "find_module"):
        return

    def find_module(self: FileFinder, name: str, path: Any = None) -> Any:
        """Returns the loader of a module, or None if this finder does not find the module."""
        spec = self.find_spec(name)
        return None if spec is None else spec.loader

    FileFinder.find_module = find_module  # type: ignore[attr-defined]


def lend_names_of_numpy_1() -> None:
    """Gives the modules of fairseq that use `np.int`, `np.float` or `np.compat` a numpy that has these names. numpy
    1.24 removed the first two, numpy 2.0 the third."""
    if hasattr(np, "int") and hasattr(np, "compat"):
        return
    substitute: Any = types.ModuleType("numpy")
    substitute.__getattr__ = functools.partial(getattr, np)  # Python calls it for names that the module lacks
    substitute.int, substitute.float, substitute.compat = int, float, types.SimpleNamespace(long=int)
    for name in (
        "data.token_block_dataset",
        "data.language_pair_dataset",
        "data.data_utils",
        "modules.dynamic_crf_layer",
    ):
        importlib.import_module(f"fairseq.{name}").np = substitute  # type: ignore[attr-defined]


def allow_checkpoints() -> None:
    """Allows the types in `SAFE` in fairseq checkpoints: torch 2.6 and later load tensors and plain data only.

    The types are added again before each load, because torch's context manager `safe_globals`, which other libraries'
    trainers use, removes them when it ends.
    """
    from fairseq import checkpoint_utils

    load = checkpoint_utils.load_checkpoint_to_cpu

    @functools.wraps(load)
    def load_checkpoint_to_cpu(*arguments: Any, **options: Any) -> Any:
        """Adds the types again, then runs fairseq's own function."""
        torch.serialization.add_safe_globals(SAFE)
        return load(*arguments, **options)

    torch.serialization.add_safe_globals(SAFE)
    checkpoint_utils.load_checkpoint_to_cpu = load_checkpoint_to_cpu


def broadcast_objects() -> None:
    """Makes fairseq send objects to other processes with torch's own broadcast, which uses pickle. fairseq itself uses
    torch.load, which since torch 2.6 refuses the configuration that rank 0 sends when several processes resume."""
    from fairseq.distributed import utils

    def broadcast_object_slow(obj: Any, src_rank: int, group: Any, dist_device: torch.device) -> Any:
        """Returns, in each process of the group, the object that the process `src_rank` has given."""
        sent = [obj]  # torch replaces the objects in this list by those of `src_rank`
        dist.broadcast_object_list(sent, src=src_rank, group=group, device=dist_device)
        return sent[0]

    utils._broadcast_object_slow = broadcast_object_slow


def keep_half_precision_on_cpus() -> None:
    """Makes --bf16 and --fp16 work on CPUs. fairseq 0.12.2's command line treats --bf16 as a request for TPUs and fails
    without torch_xla. With --fp16 it puts flat gradients on the current GPU, which fails if there is none."""
    from fairseq import options

    parse = options.parse_args_and_arch
    if hasattr(parse, "__wrapped__"):
        return

    @functools.wraps(parse)
    def parse_args_and_arch(*arguments: Any, **named: Any) -> Any:
        """Runs fairseq's function, then corrects the two options where there is no TPU or no GPU."""
        parsed = parse(*arguments, **named)
        args = parsed[0] if isinstance(parsed, tuple) else parsed  # fairseq may return (args, unknown words)
        if getattr(args, "bf16", False) and not available("torch_xla"):
            args.tpu = False
        if getattr(args, "fp16", False) and not torch.cuda.is_available():
            args.fp16_no_flatten_grads = True
        return parsed

    options.parse_args_and_arch = parse_args_and_arch


def switch_fast_path_off() -> None:
    """Switches the fast path off that fairseq's own encoder layer takes in evaluation: torch 2 needs an argument there
    that fairseq does not pass."""
    from fairseq.modules.transformer_layer import TransformerEncoderLayerBase

    # fairseq assigns to this attribute. The property ignores that, and is always False.
    never = property(lambda self: False, lambda self, value: None)
    TransformerEncoderLayerBase.can_use_fastpath = never
