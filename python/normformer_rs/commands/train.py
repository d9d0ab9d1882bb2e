"""`normformer-rs train` and `normformer-rs demo`: both train a model."""

import argparse
import os
from typing import TYPE_CHECKING, Any

from .. import demo
from ..config import DataConfig, TrainingConfig, TransformerConfig, split
from ..errors import InputError
from ..options import add_flags, given, layered, read_run, read_toml
from ..presets import PRESETS
from ..progress import duration, write
from . import PROG, Command

if TYPE_CHECKING:
    from ..training import Trainer

_COMMON = (
    *("train_source", "train_target", "valid_source", "valid_target", "bpe_operations"),
    *("norm", "residual", "init", "updates", "max_tokens", "lr", "precision", "device", "seed"),
)
"""Options that help lists first, whatever their group."""
_COMMAND = {"preset", "output"}
"""Options that a file may have besides the configs'."""


def parser() -> Command:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.usage = "%(prog)s --output DIR [OPTION …]"
        kinds = (DataConfig, TransformerConfig, TrainingConfig)
        # The vocabulary's size follows from the data.
        fields = {field.name: field for kind in kinds for field in kind.FIELDS if field.name != "vocab_size"}
        names = ["common", *dict.fromkeys(field.group for field in fields.values())]
        groups = {name: parser.add_argument_group(name) for name in names}
        common, run = groups["common"], groups["run"]
        said: dict[str, Any] = {"default": argparse.SUPPRESS}  # like the configs' flags: absent unless given
        folder = "Folder of the run: checkpoints, vocabulary, log, curves."
        common.add_argument("--output", metavar="DIR", help=folder, **said)
        common.add_argument("--preset", metavar="NAME", help=f"Options to start from: {', '.join(PRESETS)}.", **said)
        file = "TOML file of options. Flags override it, and it overrides the preset."
        common.add_argument("--config", metavar="FILE.toml", help=file)
        common.add_argument("--resume", action="store_true", help="Go on from the last checkpoint in --output.")
        which = "With --resume: go on from this checkpoint: best, last, its name or an update's number."
        run.add_argument("--from-checkpoint", metavar="NAME", help=which)
        run.add_argument("--overwrite", action="store_true", help="Start again where --output holds a run.")
        run.add_argument("--dry-run", action="store_true", help="Print parameter count and memory, then stop.")
        run.add_argument("--no-progress", action="store_true", help="No progress bar.")
        add_flags(common, (fields.pop(name) for name in _COMMON))
        for name, group in groups.items():
            add_flags(group, (field for field in fields.values() if field.group == name))

    return "Train a model.", _run, add


def _run(args: argparse.Namespace) -> None:
    trainer, output = trainer_of(args)
    if args.dry_run:
        needs = trainer.dry_run()
        print(f"parameters: {needs.parameters:,} ({_size(needs.parameter_bytes)})")
        print(f"vocabulary: {needs.vocabulary:,} types")
        print(f"memory to train: about {_size(needs.training_bytes)}")
        return
    if output is None:
        raise InputError("train needs --output DIR, the folder that the run is written to")
    how = {"resume": args.resume, "from_checkpoint": args.from_checkpoint, "overwrite": args.overwrite}
    history = trainer.fit(output, **how, progress=not args.no_progress)
    if os.environ.get("RANK", "0") != "0":  # under torchrun, only the first process reports
        return
    write(f"trained {len(history.update):,} updates in {duration(history.seconds[-1] if len(history.seconds) else 0)}")
    best = history.best
    if best is not None:
        write(f"best: update {history.evaluations.update[best]}, perplexity {history.evaluations.perplexity[best]:.2f}")
    if trainer.model.architecture == "decoder-only":
        write(f"perplexity: {PROG} evaluate --model {output} --reference FILE")
        write(f'continue a text: {PROG} generate --model {output} --prompt "…"')
    else:
        write(f"translate: {PROG} translate --model {output} --input FILE --output FILE")


def trainer_of(args: argparse.Namespace) -> "tuple[Trainer, str | None]":
    """The trainer and the output folder of a command line: flags override --config's file, which overrides the preset.

    With --resume the options of the run itself come between preset and file.
    """
    kinds = (TransformerConfig, TrainingConfig, DataConfig)
    known = {field.name for kind in kinds for field in kind.FIELDS} | _COMMAND
    flags = given(args, *kinds) | {name: value for name, value in vars(args).items() if name in _COMMAND}
    file = read_toml(args.config, sorted(known)) if args.config else {}
    output = flags.get("output", file.get("output"))
    if not isinstance(output, str | None) or output == "":
        raise InputError(f"output must be a folder's path; got {output!r}")
    run: dict[str, Any] = {}
    if output and args.resume:
        from .. import _core

        _core.check_run(output)
        run = read_run(output, sorted(known))
    options = layered(flags.get("preset", file.get("preset")), run, file, flags)
    options = {name: value for name, value in options.items() if name not in _COMMAND}
    model, training, data = split(options, *kinds)
    from ..training import Trainer

    return Trainer(TransformerConfig(**model), TrainingConfig(**training), DataConfig(**data)), output


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def demo_parser() -> Command:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--output", metavar="DIR", default="runs/demo", help="Default: runs/demo.")
        parser.add_argument("--updates", metavar="N", type=int, help=f"Default: {demo.TRAINING['updates']}.")
        parser.add_argument("--no-progress", action="store_true", help="No progress bar.")

    return "Train a small model on number and date words, English to Vietnamese.", _run_demo, add


def _run_demo(args: argparse.Namespace) -> None:
    demo.run(args.output, updates=args.updates, progress=not args.no_progress)
