"""Hooks on the whole process, and patches of torch: those that docs/reliability.md lists, and no others."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LISTED = {"nn/step_hooks.py", "surgery/optimizers.py"}
FOREIGN = r"(?:torch|nn|F|transformers|peft|accelerate|lightning|builtins)"
PROCESS_WIDE = re.compile(
    rf"""\bregister_(?:optimizer_step_(?:pre|post)_hook|module_\w+_hook|module_\w+_registration_hook)\(
    | \b(?:sys\.(?:meta_path|path_hooks|excepthook)|gc\.callbacks)\b
    | \bset(?:attr|default)\(\s*{FOREIGN}(?:\.\w+)*\s*,
    | ^\s*{FOREIGN}(?:\.\w+)+\s*=[^=]
    | \bset_default_(?:dtype|device|tensor_type)\(""",
    re.X | re.M,
)


def reached(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*.py") if PROCESS_WIDE.search(path.read_text())}


def test_what_reaches_the_whole_process_is_listed():
    section = (ROOT / "docs/reliability.md").read_text().partition("## The process of others")[2].partition("\n## ")[0]
    rows = {found[1]: found[0] for found in re.finditer(r"^- `([\w/]+\.py)`, [^:\n]+: [^`\n]{20,}", section, re.M)}
    assert reached(ROOT / "python/normformer_rs") == rows.keys() == LISTED


@pytest.mark.parametrize(
    "line",
    [
        "torch.nn.Module.__call__ = ours",
        "    nn.Linear.forward = ours",
        "setattr(transformers.PreTrainedModel, 'forward', ours)",
        "torch.nn.modules.module.register_module_forward_hook(ours)",
        "register_optimizer_step_pre_hook(ours)",
        "sys.meta_path.insert(0, ours)",
    ],
)
def test_such_lines_are_found(line, tmp_path):
    (tmp_path / "one.py").write_text(f"import torch\n{line}\n")
    assert reached(tmp_path) == {"one.py"}
    (tmp_path / "one.py").write_text("import torch\nif torch.version == 1:\n    x = torch.nn.Linear\n")
    assert not reached(tmp_path)
