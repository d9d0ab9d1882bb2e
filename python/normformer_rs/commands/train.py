"""The commands `normformer-rs train`, and `normformer-rs demo`, which trains a small model on made-up data."""

import argparse
import os
import shlex
from typing import Any, NamedTuple

from .. import demo, text
from ..config import DataConfig, TrainingConfig, TransformerConfig, split
from ..declarations.norm import own_norms, using
from ..errors import InputError
from ..loop.memory import keep_memory
from ..loop.presets import PRESETS
from ..loop.progress import duration, write
from ..loop.quantities import in_bytes, size
from . import PROG, Command
from .beforehand import check_data, check_output
from .options import add_flags, given, layered, read_run, read_toml

_COMMON = (
    *("train_source", "train_target", "valid_source", "valid_target", "bpe_operations"),
    *("norm", "residual", "init", "updates", "max_tokens", "lr", "precision", "device", "seed"),
)
"""Options that help lists first, in the group "common", whatever their own group is."""
_COMMAND = {"preset", "output"}
"""Options that belong to the command itself, not to a config; a TOML file may set them, too."""


def parser() -> Command:
    """Returns the help line, the function and the flags of `normformer-rs train`."""

    def add(parser: argparse.ArgumentParser) -> None:
        """Adds the flags of the command to its parser."""
        parser.usage = "%(prog)s --output DIR [OPTION …]"
        kinds = (DataConfig, TransformerConfig, TrainingConfig)
        # There is no flag for vocab_size, because the vocabulary's size follows from the data.
        fields = {field.name: field for kind in kinds for field in kind.FIELDS if field.name != "vocab_size"}
        names = ["common", *dict.fromkeys(field.group for field in fields.values())]
        groups = {name: parser.add_argument_group(name) for name in names}
        common, run = groups["common"], groups["run"]
        # Like the configs' flags, these are absent from the parsed arguments unless they are given.
        absent: dict[str, Any] = {"default": argparse.SUPPRESS}
        folder = "Folder of the run: checkpoints, vocabulary, log, curves."
        common.add_argument("--output", metavar="DIR", help=folder, **absent)
        common.add_argument("--preset", metavar="NAME", help=f"Options to start from: {', '.join(PRESETS)}.", **absent)
        file = "TOML file of options. Flags override it, and it overrides the preset."
        common.add_argument("--config", metavar="FILE.toml", help=file)
        trust = "Run code that --config's file or the resumed run names as file.py:Class."
        run.add_argument("--trust", action="store_true", help=trust)
        common.add_argument("--resume", action="store_true", help="Go on from the last checkpoint in --output.")
        which = "With --resume: go on from this checkpoint: best, last, its name or an update's number."
        run.add_argument("--from-checkpoint", metavar="NAME", help=which)
        begins = "Begin a new run with the weights of this run's best checkpoint, or of RUN:CHECKPOINT."
        run.add_argument("--init-from", metavar="RUN", help=begins)
        run.add_argument("--overwrite", action="store_true", help="Start again where --output holds a run.")
        run.add_argument("--dry-run", action="store_true", help="Print parameter count and memory, then stop.")
        budget = (
            "The most memory of a process, such as 20GB: activations are recomputed where they do not fit, and freed "
            "memory is given back at once. A dry run measures what fits."
        )
        run.add_argument("--memory", metavar="SIZE", help=budget)
        run.add_argument("--no-progress", action="store_true", help="No progress bar.")
        add_flags(common, (fields.pop(name) for name in _COMMON))  # removed from `fields`, so that none comes twice
        for name, group in groups.items():
            add_flags(group, (field for field in fields.values() if field.group == name))

    return "Train a model.", _run, add


class Plan(NamedTuple):
    """The run that a command line describes."""

    model: TransformerConfig
    training: TrainingConfig
    data: DataConfig
    output: str | None
    chosen: set[str]
    """The names of the options that are set by the command line, the file, the preset or the resumed run."""


def _run(args: argparse.Namespace) -> None:
    """Trains the model that the command line describes, or with --dry-run prints the size of the run."""
    plan = plan_of(args)
    if args.dry_run:
        text.check_writable(text.STANDARD)
    elif plan.output is None:
        raise InputError("train needs --output DIR, the folder that the run is written to")
    check_data(plan.model, plan.data)
    from ..loop.training import Trainer

    trainer = Trainer(plan.model, plan.training, plan.data)
    trainer.chosen = plan.chosen
    if args.memory is not None:
        os.environ.setdefault("NORMFORMER_RS_ALLOCATOR", "return")
        keep_memory()  # with the value "return" set above, the process returns freed memory at once
        trainer = trainer.within(in_bytes(args.memory))
    if args.dry_run or plan.output is None:  # only a dry run has no output, as checked above
        needs = trainer.dry_run()
        trainer.warn(needs.parameters)
        print(f"parameters: {needs.parameters:,} ({size(needs.parameter_bytes)})")
        print(f"vocabulary: {needs.vocabulary:,} types")
        if needs.skipped:
            print(f"left out:   {needs.skipped:,} of {needs.skipped + needs.sentences:,} sentences, as too long")
        print(f"memory to train: about {size(needs.training_bytes)}")
        return
    start = {"resume": args.resume, "from_checkpoint": args.from_checkpoint, "overwrite": args.overwrite}
    start["init_from"] = args.init_from
    history = trainer.fit(plan.output, **start, progress=not args.no_progress)
    if not _is_first():
        return
    write(f"trained {len(history.update):,} updates in {duration(history.seconds[-1] if len(history.seconds) else 0)}")
    best = history.best
    if best is not None:
        write(f"best: update {history.evaluations.update[best]}, perplexity {history.evaluations.perplexity[best]:.2f}")
    model = f"--model {shlex.quote(plan.output)}"
    if trainer.model.architecture == "decoder-only":
        write(f"perplexity: {PROG} evaluate {model} --reference FILE")
        write(f'continue a text: {PROG} generate {model} --prompt "…"')
    else:
        write(f"translate: {PROG} translate {model} --input FILE --output FILE")


def _is_first() -> bool:
    """Returns True in the process that checks the output folder and reports: the only one, or torchrun's rank 0."""
    return os.environ.get("RANK", "0") == "0"


def plan_of(args: argparse.Namespace) -> Plan:
    """Returns the options of a command line: flags override --config's file, which overrides the preset.

    With --resume the options of the run override the preset, and the file overrides them.
    Errors: InputError for wrong options, and for a folder that cannot be the output.
    """
    kinds = (TransformerConfig, TrainingConfig, DataConfig)
    known = {field.name for kind in kinds for field in kind.FIELDS} | _COMMAND
    flags = given(args, *kinds) | {name: value for name, value in vars(args).items() if name in _COMMAND}
    file = read_toml(args.config, sorted(known), args.trust) if args.config else {}
    output = flags.get("output", file.get("output"))
    if not isinstance(output, str | None) or output == "":
        raise InputError(f"output must be a folder's path; got {output!r}")
    # Only the first process checks the folder, because it may have begun the run when another process gets here.
    if output and not args.dry_run and _is_first():
        check_output(output, args.resume, args.from_checkpoint, args.overwrite)
    run: dict[str, Any] = {}
    if output and args.resume:
        from .. import _core

        _core.check_run(output)
        # The run's config.json may name a norm of the user's own, whose class only the flags or the file hold.
        with using(*own_norms(flags | file)):
            run = read_run(output, sorted(known), args.from_checkpoint, args.trust)
    options = layered(flags.get("preset", file.get("preset")), run, file, flags)
    chosen = {*options, *flags, *file}
    options = {name: value for name, value in options.items() if name not in _COMMAND}
    model, training, data = split(options, *kinds)
    return Plan(TransformerConfig(**model), TrainingConfig(**training), DataConfig(**data), output, chosen)


def demo_parser() -> Command:
    """Returns the help line, the function and the flags of `normformer-rs demo`."""

    def add(parser: argparse.ArgumentParser) -> None:
        """Adds the flags of the command to its parser."""
        parser.add_argument("--output", metavar="DIR", default="runs/demo", help="Default: runs/demo.")
        parser.add_argument("--updates", metavar="N", type=int, help=f"Default: {demo.TRAINING['updates']}.")
        parser.add_argument("--no-progress", action="store_true", help="No progress bar.")

    return "Train a small model on number and date words, English to Vietnamese.", _run_demo, add


def _run_demo(args: argparse.Namespace) -> None:
    """Trains the demo's model on made-up data."""
    text.check_writable(text.STANDARD)
    demo.run(args.output, updates=args.updates, progress=not args.no_progress)
