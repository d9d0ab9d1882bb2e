"""The configuration of a swapped Hugging Face model. Its config.json keeps stock classes from loading the folder.

In the file, `model_type` and `architectures` name this package, and `transformers_weights` names a file that does not
exist. So transformers' Auto classes, its stock classes and programs that serve models refuse the folder. After this
package has registered its configuration (`register`), the Auto classes load the swapped model.

A swap that does not change the model's function writes the stock configuration, because the stock class computes the
same.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import InputError

KEY = "normformer_rs"
"""The configuration's attribute, and the `model_type` in the file."""
_NO_WEIGHTS = "load-with-normformer_rs.load_swapped.safetensors"
"""The name of a file that does not exist, at which stock classes fail."""
LOAD: list[Any] = []
"""Holds `load_swapped`, which Auto classes call. loading.py appends it here, since it imports this file."""
_STOCK = ("model_type", "architectures")
"""Fields that the file overwrites. Their stock values are in KEY's object, under "stock"."""


class Swapped:
    """The first base class of swapped models' configurations; the second one is the stock class. It only changes which
    files are saved."""

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        """Writes config.json and, if the folder has none, the model's card README.md."""
        super().save_pretrained(save_directory, *args, **options)  # type: ignore[misc]
        stock: dict[str, Any] = json.loads(self.to_json_string())  # type: ignore[attr-defined]
        card = Path(save_directory, "README.md")
        if not keeps_function(stock.get(KEY)) and not card.exists():
            card.write_text(model_card(stock), encoding="utf-8")

    def to_json_file(self, json_file_path: Any, use_diff: bool = True) -> None:
        """Writes config.json with the marks of the swap, or the stock one if the swap keeps the model's function."""
        stock: dict[str, Any] = json.loads(self.to_json_string(use_diff))  # type: ignore[attr-defined]
        if keeps_function(stock.get(KEY)):
            super().to_json_file(json_file_path, use_diff)  # type: ignore[misc]
            return
        stock_values = {name: stock[name] for name in _STOCK if stock.get(name) is not None}
        kinds = [f"{KEY}.{kind}" for kind in stock.get("architectures") or ()]
        overwritten = {"model_type": KEY, "architectures": kinds, "transformers_weights": _NO_WEIGHTS}
        file = {**stock, **overwritten, KEY: {**stock[KEY], "stock": stock_values}}
        Path(json_file_path).write_text(json.dumps(file, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Makes pickles name the stock class, since this class is made at run time."""
        return _restored, (stock_class(self),), vars(self)


def stock_class(config: Any) -> Any:
    """Returns the stock class of a configuration."""
    return next(kind for kind in type(config).__mro__ if not issubclass(kind, Swapped))


def _restored(stock: Any) -> Any:
    """Returns an empty configuration of a swapped model for a stock class; unpickling fills it."""
    kind = swapped_class(stock)
    return kind.__new__(kind)


def keeps_function(marks: Any) -> bool:
    """Returns whether the stock class computes the same from the saved weights as the swapped model. `marks`: the
    configuration's attribute KEY, a dictionary that describes the swaps.

    If only a part of the model was swapped, or a module around it, the marks do not list all swaps. Then the result is
    False if they name a residual scheme, a norm or a fold.
    """
    swaps = _swaps(marks)
    if not swaps or marks.get("part"):
        return not (isinstance(marks, Mapping) and {"residual", "norm", "folded"} & marks.keys())
    # an exact swap keeps the function, as does a fold without new biases, for which the stock class has no place
    return all(swap.get("exact") is True or (swap.get("fold_norms") and not swap.get("biases")) for swap in swaps)


def _swaps(marks: Any) -> list[Any]:
    """Returns the swaps that the marks list, without damaged entries."""
    swaps = marks.get("swaps") if isinstance(marks, Mapping) else None
    return [swap for swap in swaps if isinstance(swap, Mapping)] if isinstance(swaps, list) else []


_CLASSES: dict[Any, Any] = {}
"""The classes that `swapped_class` has made: stock class → its class."""


def swapped_class(kind: Any) -> Any:
    """Returns the configuration class of swapped models for a stock configuration class. It has the same name."""
    if issubclass(kind, Swapped):
        return kind
    if kind in _CLASSES:
        return _CLASSES[kind]
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    # without an __init__ in the class's own body, transformers would generate one from the fields
    swapped = type(kind.__name__, (Swapped, kind), {**body, "__init__": kind.__init__})
    _register_models(swapped, kind)
    _CLASSES[kind] = swapped
    return swapped


def stock_config(file: Mapping[str, Any], folder: Any) -> dict[str, Any]:
    """Returns the content of a config.json (`file`) as the stock class would have written it. `folder`: for messages.
    Errors: InputError if it is damaged."""
    if file.get("model_type") != KEY:  # no swapped model wrote it
        return dict(file)
    marks = file.get(KEY)
    values = marks.get("stock") if isinstance(marks, Mapping) else None  # the stock values of overwritten fields
    if not isinstance(values, Mapping) or not isinstance(values.get("model_type"), str):
        raise InputError(f"{folder}'s config.json: {KEY}.stock must name the type of the swapped model; got {values!r}")
    stock = {name: value for name, value in file.items() if name not in (*_STOCK, "transformers_weights")}
    marks = {name: value for name, value in file[KEY].items() if name != "stock"}
    return {**stock, **{name: values[name] for name in _STOCK if name in values}, KEY: marks}


def read_config(folder: Any, kind: Any, **hub: Any) -> Any:
    """Returns the configuration in a folder or repository, as swapped models have it. `kind`: the class of models;
    None: the class that the file names. `hub`: options of the download, such as `revision`."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    file, _ = PreTrainedConfig.get_config_dict(folder, **hub)
    stock = stock_config(file, folder)
    config_class = getattr(kind, "config_class", None)
    if config_class is None:
        if stock.get("model_type") not in CONFIG_MAPPING:
            raise InputError(
                f"{folder}'s config.json: transformers has no model of type {stock.get('model_type')!r}; import the "
                "module that registers it, or pass the class of models as kind="
            )
        config_class = CONFIG_MAPPING[stock["model_type"]]
    # the configuration of a part, such as a text model, is a field of the whole model's
    part = getattr(config_class, "base_config_key", "")
    if part and isinstance(stock.get(part), Mapping):
        stock = dict(stock[part])
    return swapped_class(config_class).from_dict(stock)


@cache
def register() -> None:
    """Makes transformers' Auto classes load swapped models. Changes only their registries."""
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

    class SwappedConfig(PreTrainedConfig):  # type: ignore[misc]
        """AutoConfig reads the file with this class, which returns the configuration of the swapped model."""

        model_type = KEY

        @classmethod
        def from_dict(cls, config_dict: Any, **options: Any) -> Any:
            """Returns the swapped model's configuration from the content of config.json."""
            folder = options.get("name_or_path", "the model")
            stock = stock_config(config_dict, folder)
            if stock["model_type"] not in CONFIG_MAPPING:
                raise InputError(f"{folder}'s config.json: transformers has no model of type {stock['model_type']!r}")
            return swapped_class(CONFIG_MAPPING[stock["model_type"]]).from_dict(stock, **options)

    AutoConfig.register(KEY, SwappedConfig, exist_ok=True)


def model_class(auto: Any, config: Any) -> Any:
    """Returns the stock class of models that an Auto class chooses for a configuration. Errors: KeyError if it has
    none."""
    found = auto._model_mapping[stock_class(config)]
    candidates = [*found] if isinstance(found, list | tuple) else [found]
    names = getattr(config, "architectures", None) or ()
    return next((kind for kind in candidates if kind.__name__ in names), candidates[0])


def _register_models(made: Any, stock: Any) -> None:
    """Registers `made`, a configuration class of swapped models, with each Auto class that has a model for the stock
    one."""
    from transformers.models.auto import modeling_auto

    for auto in vars(modeling_auto).values():
        mapping = getattr(auto, "_model_mapping", None)
        if isinstance(auto, type) and mapping is not None and stock in mapping:
            mapping.register(made, _loader(auto, stock), exist_ok=True)


def _loader(auto: Any, stock: Any) -> Any:
    """Returns the class that stands for a class of models in the registry of the Auto class `auto`, and loads swapped
    models. `stock`: the stock configuration class."""

    class Loader:
        @classmethod
        def from_pretrained(
            cls, folder: Any, *_: Any, trust_remote_code: Any = None, trust: bool = False, **options: Any
        ) -> Any:
            """Loads the swapped model in a folder with `load_swapped`."""
            # Auto classes add these to the caller's options, and `load_swapped` does not know them
            for name in ("_from_auto", "adapter_kwargs"):
                options.pop(name, None)
            return LOAD[0](folder, auto, trust=trust or bool(trust_remote_code), **options)

        @classmethod
        def _from_config(cls, config: Any, **options: Any) -> Any:
            """Makes a stock model; refuses a configuration with marks of swaps."""
            if getattr(config, KEY, None):
                raise InputError(
                    f"a {stock.__name__} of a swapped model makes no model without its weights: make the stock model "
                    "and swap it, or load the folder with from_pretrained"
                )
            return model_class(auto, config)._from_config(config, **options)

    return Loader


UPLOAD = "_upload_modified_files"
"""The method with which transformers' `push_to_hub` uploads a folder that it has filled."""


def upload(kind: Any, working_dir: Any, *args: Any, **options: Any) -> Any:
    """Stands in for UPLOAD of a swapped model of the class `kind`: replaces the card that transformers has just made by
    the model's own, with the same tags. A card from the repository stays, unless it is transformers' as well."""
    config, file = Path(working_dir, "config.json"), Path(working_dir, "README.md")
    stock = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
    if stock.get("model_type") == KEY and file.exists():
        from huggingface_hub import ModelCard

        made = ModelCard(file.read_text(encoding="utf-8"))
        if _is_generic(made):
            card = ModelCard(model_card(stock_config(stock, working_dir)))
            data: Any = card.data
            data.tags = [*dict.fromkeys([*data.tags, *(made.data.to_dict().get("tags") or [])])]
            card.save(file)
    # The method reads no attribute of its model, so an empty model serves. A reference to the real one would delay the
    # release of its memory.
    return getattr(kind, UPLOAD)(kind.__new__(kind), working_dir, *args, **options)


def _is_generic(card: Any) -> bool:
    """Returns whether a card is transformers' template with nothing in it but one sentence of description and tags."""
    from huggingface_hub import ModelCard, ModelCardData

    before, after = ModelCard.from_template(ModelCardData(), model_description="DESCRIPTION").text.split("DESCRIPTION")
    is_template = card.text.startswith(before) and card.text.endswith(after)
    description = card.text.removeprefix(before).removesuffix(after)
    return is_template and "\n" not in description.strip() and {*card.data.to_dict()} <= {"library_name", "tags"}


def model_card(stock: Mapping[str, Any]) -> str:
    """Returns the text of README.md: what was swapped, how to load the model, and how to find the papers. `stock`: the
    content of config.json as the stock class would write it, with the marks under KEY."""
    kind = (stock.get("architectures") or [stock.get("model_type")])[0]
    marks, swaps = stock[KEY], _swaps(stock[KEY])  # each swap: the function's name → its first argument, and options
    is_whole = swaps and not marks.get("part")  # the marks list all swaps, of the whole model
    # names of schemes and norms, whose papers the card cites
    names: list[str] = [] if is_whole else [marks[what] for what in ("residual", "norm") if what in marks]
    rows = [f"- in a part of the model: {name}" for name in names]
    for swap in swaps:
        function = next(name for name in ("swap_residuals", "swap_norms", "fold_norms") if name in swap)
        target = swap[function]
        target = target.get("name") if isinstance(target, Mapping) else target
        options = ", ".join(
            f"{k}={v!r}" for k, v in swap.items() if k not in (function, "names") and v not in (None, False)
        )
        target_name = "a class of its own" if target is None else target
        rows.append(f"- `{function}`: {target_name}{f' ({options})' if options else ''}")
        names += [target] if isinstance(target, str) else []
    swapped = "\n".join(rows)
    cited = ", ".join(map(repr, dict.fromkeys(names)))
    arguments = "FOLDER" if is_whole else "FOLDER, swap=FUNCTION"
    other_ways = (
        "After `import transformers, normformer_rs` transformers' own Auto classes load it, too."
        if is_whole
        else "FUNCTION gets the stock model and makes the same swaps in it."
    )
    return f"""---
library_name: normformer_rs
tags:
- normformer_rs
---

# A {kind} with other norms or residual connections

This model is not the stock {kind}: it computes another function of the same inputs. It was changed by
the Python package normformer_rs:

{swapped}

## Load it

```python
import normformer_rs

model = normformer_rs.load_swapped({arguments})
```

{other_ways} Stock classes refuse it.

## Papers

`normformer_rs.cite({cited})` prints the papers that define these names, as BibTeX.
"""
