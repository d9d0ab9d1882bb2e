"""Writes docs/models.md: what `swap_residuals`, `fold_norms` and exact swaps make of each model of the zoo.

    PYTHONPATH=… python tests/surgery/models_page.py ROWS.jsonl [--every 0/2]

Each model is built small, with random weights, and every residual scheme is swapped in and taken back. Models of
libraries that are not installed are left out. ROWS.jsonl keeps what is done: a second call goes on after it. With
`--every 0/2` and `--every 1/2`, two processes share the models. The page is written when no model is left.
"""

import argparse
import json
import logging
import re
import warnings
from pathlib import Path

import torch
from surgery_support import SWAPPABLE
from test_zoo import outputs
from zoo import LIBRARY, MODELS, UNSEEN

import normformer_rs as nfrs
from normformer_rs.surgery.blocks import TORCHS, structure_of
from normformer_rs.surgery.discover import find_stacks
from normformer_rs.surgery.spec import Part

PAGE = Path(__file__).resolve().parents[2] / "docs/models.md"
HEAD = f"""<!-- Made by `python tests/surgery/models_page.py`; do not edit. -->

# Models that were tried

What surgery makes of small models of random weights, each by {len(SWAPPABLE)} residual schemes; ngpt works in
torch.nn's layers alone. A model that is not here may work as well: blocks are recognised by what they compute
([how](swap.md#how-blocks-are-found)).

The block: `a` attention, `c` attention to an encoder, `f` anything else, each followed by its norms: before it, x +
F(N(x)); after the addition, N(x + F(x)); on the branch, x + N(F(x)); `×`: a factor of the branch. `+`: parallel
branches, one addition. Matrices: what a run of the model showed each matrix of the first block to be for, with the
number of heads; `stays`: no role that a first value depends on. Schemes: how many of the {len(SWAPPABLE)} are taken.
Fold, exact: how many norms `fold_norms` and `swap_norms(…, "rmsnorm", exact=True)` change, of all that they look at.

| model | library | block | matrices | schemes | fold | exact | what is refused, and why |
|---|---|---|---|---|---|---|---|
"""


def shown(part: Part) -> str:
    """A sublayer in a few letters."""
    text = {"self-attention": "a", "cross-attention": "c", "feed-forward": "f"}[part.kind]
    places = (("before", part.before), ("after", part.after), ("branch", part.branch))
    norms = [place for place, path in places if path is not None]
    return (
        text
        + "+" * part.is_parallel
        + "×" * (part.beta != 1.0 or bool(part.scales))
        + (f" ({', '.join(norms)})" if norms else "")
    )


def blocks(model, inputs) -> tuple[str, str]:
    """Returns the sublayers of the first block of each stack, and their matrices with the roles."""
    try:
        groups = find_stacks(model, inputs).groups
    except nfrs.InputError:
        return "—", "—"
    shapes, matrices = [], []
    for first in (group.blocks[0] for group in groups):
        if type(first) in TORCHS:
            shapes.append("torch.nn's")
            matrices.append("by their class")
            continue
        found = structure_of(first)
        shapes.append(", ".join(map(shown, found.parts)))
        matrices.append(f"not read: {found.no_roles}" if found.no_roles else "; ".join(map(str, found.parts)))
    return " · ".join(dict.fromkeys(shapes)), " · ".join(dict.fromkeys(matrices))


def row(name: str) -> str | None:
    """The model's line; None: its library is not there."""
    try:
        model, inputs = (MODELS | UNSEEN)[name]()
    except ImportError:
        return None
    model.eval()
    (shape, matrices), taken, reasons = blocks(model, inputs), 0, {}
    for scheme in SWAPPABLE:
        try:
            done = nfrs.swap_residuals(model, scheme, init=None, example=inputs)
        except nfrs.InputError as reason:
            said = str(reason).partition("residual stream: ")[2] or str(reason)
            said = re.sub(r" at \S+:\d+", "", said)  # lines differ between versions of a library
            same = re.sub(rf"\b{scheme}(?!_rs)\b", "it", said).replace("|", "/")
            reasons.setdefault(same.partition(": choose")[0], []).append(scheme)
        else:
            with torch.no_grad():
                outputs(model, inputs)
            done.undo()
            taken += 1
    counts = []
    for swap in (
        lambda: nfrs.fold_norms(model, example=inputs),
        lambda: nfrs.swap_norms(model, "rmsnorm", exact=True, example=inputs),
    ):
        try:
            done = swap()
            rows = [one for one in done if "orm" in one.old]
            counts.append(f"{sum(not one.note.startswith('stays') for one in rows)}/{len(rows)}")
            done.undo()
        except nfrs.InputError:
            counts.append("0")
    whys = "; ".join(
        f"{', '.join(some) if len(some) < len(SWAPPABLE) else 'all'}: {why}" for why, some in reasons.items()
    )
    cells = (name, LIBRARY[name] or "written here", shape, matrices.replace("|", "/"), str(taken), *counts, whys[:400])
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, metavar="ROWS.jsonl")
    parser.add_argument("--every", default="0/1", metavar="I/N", help="only every N-th model, from number I")
    arguments = parser.parse_args()
    first, step = map(int, arguments.every.split("/"))
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    names = [*MODELS, *UNSEEN]
    arguments.rows.touch()
    for name in names[first::step]:
        if name not in kept(arguments.rows):
            line = json.dumps({"name": name, "row": row(name)}, ensure_ascii=False)
            with arguments.rows.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    done = kept(arguments.rows)
    if done.keys() >= {*names}:
        rows = [done[name] for name in names if done[name] is not None]
        PAGE.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")


def kept(rows: Path) -> dict[str, str | None]:
    """The rows that are done, by the model's name; None for a model whose library is not there."""
    lines = [line for line in rows.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    return {one["name"]: one["row"] for one in map(json.loads, lines)}  # a killed process may leave half a line


if __name__ == "__main__":
    main()
