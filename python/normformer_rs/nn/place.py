"""A layer's place in a model: the configuration from its arguments, and the scheme's declaration there."""

import operator
import reprlib
from collections.abc import Mapping
from typing import Any

from ..config import LANGUAGE_MODELS, TransformerConfig, unknown
from ..errors import InputError
from .scheme import MOST_LAYERS, LayerSpec, Sublayer, declare

OWN: tuple[str, ...] = (
    "architecture",
    "vocab_size",
    "d_model",
    "d_ff",
    "heads",
    "norm",
    "norm_eps",
    "residual",
    "init",
    "fixnorm",
    "input_alpha",
    "output_alpha",
)
OWN += ("tie_embeddings", "output_bias", "dropout", "embedding_dropout", *LANGUAGE_MODELS)
OWN += ("attention_length", "attn_softmax_alpha", "ffn_act_alpha", "res_alpha", "res_attn_ratio")
"""Options of TransformerConfig that a layer's free options exclude: it lacks them, or has an argument for them."""


def configure(options: Mapping[str, Any], **given: Any) -> TransformerConfig:
    """Builds a TransformerConfig from a module's arguments and its free options; InputError for an unknown option."""
    if options.get("parametrisation") == "u-mup":
        raise InputError(
            'parametrisation = "u-mup" is one of whole models, and layers of nn do not multiply their products: '
            "build a normformer_rs.Transformer, or choose another parametrisation"
        )
    known = [field.name for field in TransformerConfig.FIELDS if field.name not in OWN]
    for name in options:
        if name not in known:
            raise InputError(unknown("option", name, known))
    # Layers have no vocabulary; 5 is the smallest size that Rust accepts.
    return TransformerConfig(**{"vocab_size": 5, **options, **given})


def count_of_layers(name: str, value: Any) -> int:
    """Checks a stack's number of layers and returns it. Errors: InputError."""
    number = whole_number(name, value)
    if not 1 <= number <= MOST_LAYERS:
        raise InputError(f"{name} must lie between 1 and {MOST_LAYERS}; got {in_short(value)}")
    return number


def whole_number(name: str, value: Any) -> int:
    """Returns an integer, which may be numpy's. Errors: InputError."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InputError(f"{name} must be a whole number; got {in_short(value)}")
    return operator.index(value)


def in_short(value: Any) -> str:
    """Describes a value of any size in few words."""
    is_huge = isinstance(value, int) and value.bit_length() > 64  # Python refuses to print very long integers
    return f"one of {value.bit_length()} bits" if is_huge else reprlib.repr(value)


class Place:
    """A layer's position: the model's configuration, the stack, and the layer's number from 0. `kinds`: the kinds of
    its sublayers, if they differ from the stack's, as in blocks of other libraries."""

    def __init__(
        self, config: TransformerConfig, stack: str, layer: int = 0, kinds: tuple[str, ...] | None = None
    ) -> None:
        self.config, self.stack, self.layer, self.kinds = config, stack, layer, kinds
        self.declared = declare(config, stack, kinds)

    def at(self, layer: int) -> "Place":
        """Returns the place of another layer of the stack."""
        return Place(self.config, self.stack, layer, self.kinds)

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        """The declarations of this layer's sublayers."""
        return self.spec.sublayers

    @property
    def spec(self) -> LayerSpec:
        """The declaration of this layer."""
        return self.declared.layers[self.layer]

    @property
    def depth(self) -> int:
        """The number of layers of the stack."""
        return len(self.declared.layers)

    @property
    def norm(self) -> Any:
        """The stack's norm: a name, or the user's own norm."""
        given = getattr(self.config, f"{self.stack}_norm") or self.config.norm  # type: ignore[attr-defined]
        return self.declared.norm if isinstance(given, str) else given

    # Copies share a Place, because `declared` describes the whole stack; unpickling reads it from Rust again.
    def __deepcopy__(self, _: Any) -> "Place":
        return self

    def __reduce__(self) -> Any:
        return Place, (self.config, self.stack, self.layer, self.kinds)
