"""Norm classes by the names of Rust's table."""

import functools
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import _core
from ..config import TransformerConfig, unknown
from ..errors import InputError
from . import blended, composed, norms, running
from .norm_table import DECLARED, FAMILIES
from .scheme import drawn_over_width

if TYPE_CHECKING:
    from ..norms import Norm


def _class_of(name: str, module: str) -> Any:
    """Returns the class `module` of the norm `name`. Errors: ImportError if no file defines or builds it."""
    for home in (norms, running, blended, composed):
        if norm_type := getattr(home, module, None):
            return norm_type
    raise ImportError(f"norm {name} has a form that its options choose, so it needs a class {module} in nn/norms.py")


_CLASSES: dict[str, Any] = {name: _class_of(name, entry.module) for name, entry in DECLARED.items()}
FUSED: tuple[type[norms.RowNorm], ...] = tuple(
    _CLASSES[name] for name, entry in DECLARED.items() if entry.form == "rows"
)
"""The norms that the fused residual step supports."""


def norm_class(name: "str | Norm") -> Any:
    """Returns the class for a norm's name, one of `normformer_rs.tables()`; InputError with the names if there is none.
    For a family's name, returns the class with the family's keyword arguments.

    >>> norm_class("scalenorm").__name__
    'ScaleNorm'
    >>> norm_class("rmsnorm:gemma")(4)
    RMSNorm((4,), eps=1e-06, zero_centred=True, elementwise_affine=True)
    """
    if not isinstance(name, str):  # a norm of the user's own
        return name
    if name in FAMILIES:
        family = FAMILIES[name]
        return functools.partial(_CLASSES[family.norm], **family.settings)
    if name not in _CLASSES:
        raise InputError(unknown("norm", name, [*_CLASSES, *FAMILIES]))
    return _CLASSES[name]


def family_norm(name: str) -> str:
    """Returns the table's name for a norm's or a family's name."""
    return FAMILIES[name].norm if name in FAMILIES else name


def norm_of_config(
    name: "str | Norm",
    width: int,
    config: TransformerConfig,
    *,
    last_of_decoder: bool = False,
    ends_stack: bool = False,
    is_weighted: bool = True,
    bias: bool = True,
    device: Any = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Builds the norm of a model with this configuration, with its options: lpnorm_p, powernorm_mode, groupscaling, …

    `last_of_decoder`: True for the norm that keeps its gain under scalenorm-fixed. `ends_stack`: True for a norm after
    a stack, where powernorm's release mode warms up for 1000 forwards. `is_weighted`: False leaves out the weight of an
    rmsnorm. `bias`: True to learn a bias, in norms that have one.
    """
    own = _own(name, config) if isinstance(name, str) else name
    if own is not None:
        norm = own(width, device=device, dtype=dtype)
        return _drawn(norm, {parameter: own.shape(parameter) for parameter in own.parameters}, config)
    assert isinstance(name, str)
    norm_type = norm_class(name)
    settings = {**_settings(name, config, last_of_decoder, ends_stack)}
    if not is_weighted:
        settings |= {"elementwise_affine": False, "zero_centred": False}
    shapes = {parameter.name: parameter.shape for parameter in DECLARED[family_norm(name)].parameters}
    if "bias" in shapes:
        settings["bias"] = bias
    return _drawn(norm_type(width, **settings, device=device, dtype=dtype), shapes, config)


def _drawn(norm: Any, shapes: Mapping[str, Any], config: TransformerConfig) -> Any:
    """Returns the norm, after initialising its matrices over the width as the model's parametrisation says. `shapes`:
    the declared shape of each parameter."""
    factor = drawn_over_width(config)
    over_width = [name for name, shape in shapes.items() if not isinstance(shape, str) and shape[-1] == "width"]
    if over_width and factor != 1.0:
        for name in over_width:
            numbers = norm.numbers_of[name]
            norm.numbers_of[name] = numbers._replace(std=numbers.std * factor)  # the norm's own reset uses this std
        norm.reset_parameters()
    return norm


def _own(name: str, config: TransformerConfig) -> "Norm | None":
    """Returns the user's own norm with this name in the configuration; None if it is a norm of the table. Rust may have
    added # and a mark to the name, to tell different declarations of one name apart."""
    if name in DECLARED or name in FAMILIES:
        return None
    given = (config.norm, config.encoder_norm, config.decoder_norm)
    owns: list[Any] = [own for own in given if own is not None and not isinstance(own, str)]
    declared_name = name.partition("#")[0]
    return next((own for own in owns if own.name == declared_name), None)


@functools.lru_cache(maxsize=256)
def _settings(name: str, config: TransformerConfig, last_of_decoder: bool, ends_stack: bool) -> Mapping[str, Any]:
    """Returns the norm's keyword arguments, which Rust derives from the configuration."""
    settings = json.loads(_core.norm_settings(config.to_json(), name, last_of_decoder, ends_stack))
    return {keyword: math.inf if value == "inf" else value for keyword, value in settings.items()}
