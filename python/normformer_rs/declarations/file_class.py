"""Parses `file.py:Class`, a text that names code, loads the class, and checks files for such texts.

The text may run code only if the user wrote it, on a command line or in a call. So every reader of a file calls
`refuse_code` first.
"""

import copyreg
import hashlib
import importlib.machinery
import importlib.util
import operator
import os
import re
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, SupportsIndex

from ..errors import InputError

_PREFIX = "normformer_rs_file_"
"""The prefix of the names of modules that are made from users' files."""


def names_code(value: Any) -> bool:
    """True if the value is a text of the form file.py:Class."""
    return isinstance(value, str) and ".py:" in value


def refuse_code(options: Mapping[str, Any], origin: Any, trust: bool = False) -> None:
    """Raises InputError if an option that was read from a file names code. `origin`: the file. `trust`: True if the
    user allows the file's code."""
    for name, value in options.items():
        if names_code(value) and not trust:
            raise InputError(
                f"{origin}: {name} is {value!r}, which names Python code, and no code of a file runs without consent: "
                "read the code, then allow it with --trust on the command line or trust=True in Python"
            )


def load_class(option: str, text: str, kind: type) -> type:
    """Loads the class that `text`, file.py:Class, names, a subclass of `kind`. `option`: the option that has the text,
    for messages. Errors: InputError if there is no such class."""
    file, _, name = text.rpartition(":")
    if not os.path.isfile(file):
        raise InputError(f"{option} {text!r}: there is no file {file!r}; expected file.py:Class")
    module = _module(file)
    cls = vars(module).get(name)
    if not isinstance(cls, type) or not issubclass(cls, kind):
        of_kind = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, kind)]
        # The message leaves out classes that the file only imports.
        own = [key for key in of_kind if vars(module)[key].__module__ == module.__name__]
        raise InputError(
            f"{option} {text!r}: {file} has no class {name} of normformer_rs.{kind.__name__}; it has {own}"
        )
    return cls


def _module(file: str) -> ModuleType:
    """Loads the file as a module. Its name follows from the file's name and content: an edited file is another
    module, and another process that loads the same file can read pickles of its classes."""
    path = os.path.realpath(file)
    with open(path, "rb") as opened:
        source = opened.read()
    stem = re.sub(r"\W", "_", os.path.basename(file).removesuffix(".py"))
    name = f"{_PREFIX}{stem}_{hashlib.sha256(source).hexdigest()[:16]}"
    # If a file with the same name and content in another folder is loaded already, this one gets a module of its own.
    if name in sys.modules and sys.modules[name].__file__ != path:
        name += "_" + hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    if name in sys.modules:
        return sys.modules[name]
    loader = importlib.machinery.SourceFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    code = loader.source_to_code(source, path)  # compiles the bytes that the name stands for, never a stale cache
    sys.modules[name] = module  # comes before the code runs, because dataclasses look their module up
    try:
        exec(code, vars(module))
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


class FromFile:
    """A base of classes that a user's file may define. The pickle of an object of such a class names the module that
    was made from the file."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickles an object of a file's class with the names of module and class, which `_new` looks up."""
        reduced = super().__reduce_ex__(protocol)
        kind = type(self)
        # Only the usual way of pickling, an empty object and its state, is replaced: `_new` makes the empty object.
        if not kind.__module__.startswith(_PREFIX) or reduced[0] is not getattr(copyreg, "__newobj__"):  # noqa: B009
            return reduced
        return (_new, (kind.__module__, kind.__qualname__), *reduced[2:])


def _new(module: str, name: str) -> Any:
    """Returns an empty object of the class `name` of a file's `module`, for unpickling. Errors: InputError if the file
    is not loaded."""
    # `_module` makes the name out of the prefix, the file's stem, which is group 1, and a digest of its content.
    parsed = re.match(rf"{_PREFIX}(\w+)_[0-9a-f]{{16}}", module)
    loaded = sys.modules.get(module)
    if loaded is None and parsed is not None:  # a file of the same name and content may be loaded from elsewhere
        loaded = next((other for key, other in [*sys.modules.items()] if key.startswith(parsed[0])), None)
    if loaded is None:
        stem = parsed[1] if parsed else module
        raise InputError(
            f"the pickle holds an object of the class {name} of a file {stem}.py: name that file first, as in "
            f'TransformerConfig(norm="{stem}.py:{name}"); a file that was edited since is another file'
        )
    kind = operator.attrgetter(name)(loaded)
    return kind.__new__(kind)
