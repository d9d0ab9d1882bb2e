"""`load_swapped`: a swapped Hugging Face model, as `save_pretrained` wrote it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from .folding import fold_norms
from .marker import KEY
from .norms import swap_norms
from .residuals import swap_residuals


def load_swapped(
    folder: Any,
    kind: Any = None,
    *,
    swap: Callable[[nn.Module], Any] | None = None,
    example: Any = None,
    **options: Any,
) -> Any:
    """A model that was swapped and then saved by Hugging Face's `save_pretrained`, to the bit.

        model = LlamaForCausalLM.from_pretrained(name)
        swap_residuals(model, "deepnorm")
        model.save_pretrained("swapped")
        model = load_swapped("swapped")

    The stock model is built of config.json, swapped as that says, and gets its weights through the stock class's own
    mapping of names. A folder of an adapter of PEFT is loaded onto such a model by PEFT's own function.

    Args:
        folder: what `from_pretrained` takes: a folder or a repository's name.
        kind: the class of models; None: the one that config.json names.
        swap: makes the swaps, in place of those that config.json names: needed for norms that are classes of one's
            own, which no file holds.
        example: as in `swap_residuals`.
        options: those of `from_pretrained`.

    Returns: the model, in evaluation mode as `from_pretrained` gives it.

    Errors: InputError where `transformers` is not there, config.json names no swaps, or swaps to a class of one's own.
    """
    try:
        import transformers
    except ImportError as reason:
        raise InputError("load_swapped loads models of Hugging Face: install transformers") from reason
    hub = {name: options[name] for name in ("revision", "token", "cache_dir", "subfolder") if name in options}
    read: Any = getattr(kind, "config_class", None) or transformers.AutoConfig
    config = options.pop("config", None) or read.from_pretrained(folder, **hub)
    swaps = getattr(config, KEY, {}).get("swaps", [])
    if swap is None and not swaps:
        raise InputError(
            f"{folder}'s config.json names no swaps: load it with from_pretrained; or pass swap=, a function that "
            "swaps the stock model as it was before it was saved"
        )
    if kind is None:
        names = getattr(config, "architectures", None) or []
        kind = next((found for name in names if (found := getattr(transformers, name, None)) is not None), None)
    if kind is None:
        raise InputError(f"{folder}'s config.json names no class of transformers as its architecture: pass kind=")
    setattr(config, KEY, {})

    def again(model: nn.Module) -> None:
        if swap is not None:
            swap(model)
        else:
            for one in swaps:
                _swap(model, dict(one), example)

    model = _class(kind, again).from_pretrained(folder, config=config, **options)
    model.__class__ = kind
    return model


def _class(kind: Any, again: Callable[[nn.Module], None]) -> Any:
    """A class of the stock class's name and module, whose models are swapped as they are built."""

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        with torch.device("cpu"):  # the loader builds on meta, where nothing can be run
            kind.__init__(self, config, *args, **kwargs)
            with torch.no_grad():
                for p in self.parameters():
                    if p.is_floating_point():
                        p.uniform_(-0.1, 0.1)  # the loader leaves them as memory was
            for name, source in dict(getattr(self, "all_tied_weights_keys", None) or {}).items():
                owner, _, leaf = name.rpartition(".")  # the loader ties last, and swaps ask what is tied
                setattr(self.get_submodule(owner), leaf, self.get_parameter(source))
            again(self.eval())
            for module in self.modules():  # so that the loader fills buffers that no file holds
                module.__dict__.pop("_is_hf_initialized", None)

    body = {"__init__": build, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), body)


def _swap(model: nn.Module, how: dict[str, Any], example: Any) -> None:
    """One swap, as config.json has it."""
    if "swap_residuals" in how:
        to, depth = how.pop("swap_residuals"), how.pop("depth", None)
        swap_residuals(
            model, to, depth=tuple(depth) if isinstance(depth, list) else depth, init=None, example=example, **how
        )
    elif "swap_norms" in how:
        to, names = how.pop("swap_norms"), {*how.pop("names")}
        if to is None:
            raise InputError(
                "the model's norms were swapped to a class of one's own, which config.json does not hold: pass swap=, "
                "a function that makes the swaps again"
            )
        swap_norms(model, to, filter=lambda name, _: name in names, example=example, **how)
    else:
        fold_norms(model, example=example)
