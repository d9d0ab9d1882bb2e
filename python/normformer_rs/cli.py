"""The command `normformer-rs`; `_parser` lists its commands.

A command imports the modules that need torch when it runs: help and mistyped options are answered without them.
"""

import argparse
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import demo, export_command, fairseq_commands, generate_command, text
from .config import DataConfig, SearchConfig, TrainingConfig, TransformerConfig, __version__, readable, split
from .errors import DivergedError, InputError, Interrupted
from .options import Parser, UsageError, add_flags, add_model, given, layered, read_run, read_toml
from .presets import PRESETS
from .progress import duration, log_to_stderr, write
from .reproduce import flags as reproduce_flags

if TYPE_CHECKING:
    from .training import Trainer

PROG = "normformer-rs"
EXIT_FAILURE = 2
_FAILURES = (
    InputError,
    ImportError,
    Interrupted,
    KeyboardInterrupt,
    DivergedError,
    OSError,
    RuntimeError,
    MemoryError,
    UnicodeError,
)
"""Errors reported in one line, without a traceback; any other is a bug."""
_COMMAND = {"preset", "output"}
"""Options that a file may have besides the configs'."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, or 2 with a line on stderr that says what is wrong.

    A command line that cannot be read has a second line: how it is written, or where to look.
    """
    log_to_stderr()
    try:
        for word in sys.argv[1:] if argv is None else argv:
            readable("argument", word)
        args = _parser().parse_args(argv)
        args.run(args)
        return 0
    except BrokenPipeError:
        # The output's reader has gone, as in `… | head`: the flush at exit must not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get("NORMFORMER_RS_TRACEBACK") == "1":
            raise
        if not isinstance(error, _FAILURES):
            raise
        what = "interrupted" if isinstance(error, (Interrupted, KeyboardInterrupt)) else "error"
        message = " ".join(str(error).split())
        print(f"{PROG}: {what}" + (f": {message}" if message else ""), file=sys.stderr)
        if isinstance(error, UsageError):
            print(error.where, file=sys.stderr)
        return EXIT_FAILURE


def _parser() -> Parser:
    parser = Parser(prog=PROG, description="Trains Transformers, translates and continues texts with them.")
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for name, build in (
        ("train", _train_parser),
        ("translate", _translate_parser),
        ("generate", generate_command.parser),
        ("evaluate", _evaluate_parser),
        ("average", _average_parser),
        ("plot", _plot_parser),
        ("demo", _demo_parser),
        ("reproduce", reproduce_flags.parser),
        ("convert", _convert_parser),
        ("export", export_command.parser),
        ("fairseq", _fairseq_parser),
        ("fairseq-user-dir", _fairseq_user_dir_parser),
    ):
        summary, run, add = build()
        command = commands.add_parser(name, help=summary, description=summary)
        command.set_defaults(run=run, parser=command)
        add(command)
    return parser


_Command = tuple[str, Callable[[argparse.Namespace], None], Callable[[argparse.ArgumentParser], None]]
"""A line of help, the function that runs the command, and the one that adds its flags."""


def _train_parser() -> _Command:
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

    return "Train a model.", _train, add


_COMMON = (
    *("train_source", "train_target", "valid_source", "valid_target", "bpe_operations"),
    *("norm", "residual", "init", "updates", "max_tokens", "lr", "precision", "device", "seed"),
)
"""Options that help lists first, whatever their group."""


def _train(args: argparse.Namespace) -> None:
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
        from . import _core

        _core.check_run(output)
        run = read_run(output, sorted(known))
    options = layered(flags.get("preset", file.get("preset")), run, file, flags)
    options = {name: value for name, value in options.items() if name not in _COMMAND}
    model, training, data = split(options, *kinds)
    from .training import Trainer

    return Trainer(TransformerConfig(**model), TrainingConfig(**training), DataConfig(**data)), output


def _translate_parser() -> _Command:
    def add(parser: argparse.ArgumentParser) -> None:
        add_model(parser, required=True)
        source = parser.add_mutually_exclusive_group()
        source.add_argument("--input", metavar="FILE", default=text.STANDARD, help="Source text; -: standard input.")
        source.add_argument("--data-bin", metavar="DIR", help="fairseq's binarised folder; its --split is read.")
        binarised = parser.add_argument_group("with --data-bin")
        binarised.add_argument("--split", metavar="NAME", default="test", help="Default: test.")
        binarised.add_argument("--source-lang", metavar="LANG", help="Default: as the files' names have it.")
        binarised.add_argument("--target-lang", metavar="LANG", help="Default: as the files' names have it.")
        parser.add_argument("--output", metavar="FILE", default=text.STANDARD, help="Translations; -: standard output.")
        parser.add_argument(
            "--max-tokens", metavar="N", type=int, default=8192, help="Padded source tokens in a batch."
        )
        add_flags(parser.add_argument_group("search"), SearchConfig.FIELDS)

    return "Translate a text, line by line.", _translate, add


def _translate(args: argparse.Namespace) -> None:
    if not 1 <= args.max_tokens < 2**31:
        raise InputError(f"max_tokens must lie in [1, 2147483648); got {args.max_tokens}")
    text.check_writable(args.output)
    search = SearchConfig(**given(args, SearchConfig))
    from .translation import Binarised, translate

    lines: list[str] | Binarised
    if args.data_bin is None:
        lines = text.read_lines(args.input)
    else:
        lines = Binarised(args.data_bin, args.split, args.source_lang, args.target_lang)
    start = time.monotonic()
    options = {"checkpoint": args.checkpoint, "precision": args.precision, "device": args.device}
    found = translate(args.model, lines, search, max_tokens=args.max_tokens, **options)
    if search.n_best == 1:
        text.write_lines(args.output, (hypotheses[0].text for hypotheses in found))
    else:  # Moses' format
        numbered = ((i, h) for i, hypotheses in enumerate(found) for h in hypotheses)
        text.write_lines(args.output, (f"{i} ||| {h.text} ||| {h.score:.6f}" for i, h in numbered))
    write(f"translated {len(found):,} lines in {duration(time.monotonic() - start)}")


def _evaluate_parser() -> _Command:
    def add(parser: argparse.ArgumentParser) -> None:
        bleu = parser.add_argument_group("BLEU of translations")
        bleu.add_argument("--hypothesis", metavar="FILE", help="Translations, one a line.")
        bleu.add_argument("--reference", metavar="FILE", required=True, help="Reference translations.")
        bleu.add_argument("--baseline", metavar="FILE", help="Another system's translations, for a paired bootstrap.")
        bleu.add_argument("--tokenize", metavar="NAME", default="13a", help="13a, or none for tokenised text.")
        bleu.add_argument("--lowercase", action="store_true", help="Ignore case.")
        bleu.add_argument("--no-bpe", action="store_true", help="The texts are split: join pieces that end in `@@`.")
        bleu.add_argument(
            "--split-compounds",
            action="store_true",
            help="Split a-b into three words, as for WMT14 En-De; for tokenised text, with --tokenize none.",
        )
        perplexity = parser.add_argument_group("perplexity of a model, given --source, on --reference")
        add_model(perplexity, required=False)
        perplexity.add_argument("--source", metavar="FILE", help="Source text; none for a language model.")
        window = "Of a language model: slide a window of so many tokens over the text. Default: segment_length."
        perplexity.add_argument("--window", metavar="N", type=int, help=window)
        stride = "By how many tokens the window moves on; each is scored once. Default: half the window."
        perplexity.add_argument("--stride", metavar="N", type=int, help=stride)

    return "Score translations, or a model's perplexity.", _evaluate, add


def _evaluate(args: argparse.Namespace) -> None:
    if args.hypothesis is None and args.model is None:
        raise InputError("evaluate needs --hypothesis FILE (for BLEU), --model DIR (for perplexity), or both")
    if args.hypothesis is not None:
        from . import _core, scores

        def words(path: str) -> list[str]:
            lines = text.read_lines(path)
            return [_core.join_line(line) for line in lines] if args.no_bpe else lines

        baseline = None if args.baseline is None else words(args.baseline)
        lines = words(args.hypothesis), words(args.reference)
        options = {"tokenize": args.tokenize, "lowercase": args.lowercase, "split_compounds": args.split_compounds}
        found = scores.score(*lines, baseline, **options)
        print(f"sacreBLEU:  {found.sacrebleu}")
        print(f"multi-bleu: {found.multi_bleu}")
        if found.comparison is not None:
            print(f"bootstrap:  {found.comparison}")
    if args.model is not None:
        options = {"checkpoint": args.checkpoint, "precision": args.precision, "device": args.device}
        if args.window is not None or args.stride is not None:
            _evaluate_windows(args, options)
            return
        from .translation import evaluate_loss

        measured = evaluate_loss(args.model, args.source, args.reference, **options)
        print(
            f"perplexity: {measured.perplexity:.3f} (nll {measured.nll:.4f}, smoothed loss {measured.loss:.4f} nats "
            f"per token, {measured.tokens:,} tokens)"
        )


def _evaluate_windows(args: argparse.Namespace, options: dict[str, Any]) -> None:
    if args.source is not None:
        raise InputError("--window and --stride are for the text of a language model, which has no --source")
    from .generation import evaluate_windows

    found = evaluate_windows(args.model, args.reference, window=args.window, stride=args.stride, **options)
    print(f"perplexity: {found.perplexity:.3f} (nll {found.nll:.4f} nats per token, {found.tokens:,} tokens)")
    print(
        f"per word:   {found.word_perplexity:.3f} ({found.words:,} words, the ends of {found.lines:,} lines among them)"
    )


def _average_parser() -> _Command:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model", metavar="DIR", required=True, help="The --output of training.")
        which = parser.add_mutually_exclusive_group(required=True)
        which.add_argument("--last", metavar="N", type=int, help="The last N checkpoints.")
        which.add_argument("--updates", metavar="N", type=int, nargs="+", help="The checkpoints of these updates.")

    return "Average checkpoints; translate with --checkpoint average.", _average, add


def _average(args: argparse.Namespace) -> None:
    from .translation import average

    print(average(args.model, last=args.last, updates=args.updates))


def _plot_parser() -> _Command:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("runs", metavar="RUN", nargs="+", help="The --output of training; several are overlaid.")
        where = "The picture, by its ending png, svg or pdf. Default: curves.png, of one run in its folder, else here."
        parser.add_argument("--output", metavar="FILE", help=where)
        parser.add_argument("--names", metavar="NAME", nargs="+", help="Of the runs. Default: their folders.")

    return "Draw loss, BLEU or perplexity, gradient norm and learning rate of runs.", _plot, add


def _plot(args: argparse.Namespace) -> None:
    from .curves import plot

    alone = Path(args.runs[0]) / "curves.png" if len(args.runs) == 1 else "curves.png"
    print(plot(*args.runs, path=args.output or alone, names=args.names))


def _demo_parser() -> _Command:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--output", metavar="DIR", default="runs/demo", help="Default: runs/demo.")
        parser.add_argument("--updates", metavar="N", type=int, help=f"Default: {demo.TRAINING['updates']}.")
        parser.add_argument("--no-progress", action="store_true", help="No progress bar.")

    return "Train a small model on number and date words, English to Vietnamese.", _demo, add


def _demo(args: argparse.Namespace) -> None:
    demo.run(args.output, updates=args.updates, progress=not args.no_progress)


def _convert_parser() -> _Command:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--from", dest="origin", metavar="PATH", required=True, help="A .pt, or a run's --output.")
        parser.add_argument("--to", metavar="PATH", required=True, help="A new --output folder, or a new .pt.")
        parser.add_argument("--data", metavar="DIR", help="fairseq's binarised folder, for its dictionary.")
        parser.add_argument("--checkpoint", metavar="NAME", default="best", help="Of --from, if that is a folder.")
        parser.add_argument("--trust", action="store_true", help="Load a .pt even if that could run code.")

    return "Turn a fairseq checkpoint into a model of this package, or back.", _convert, add


def _convert(args: argparse.Namespace) -> None:
    if args.origin.endswith(".pt") == args.to.endswith(".pt"):
        raise InputError(f"one of --from and --to must be a .pt of fairseq; got {args.origin} and {args.to}")
    from . import convert

    if args.origin.endswith(".pt"):
        convert.from_fairseq(args.origin, args.to, data=args.data, trust=args.trust)
    else:
        convert.to_fairseq(args.origin, args.to, checkpoint=args.checkpoint)
    write(f"wrote {args.to}")


def _fairseq_parser() -> _Command:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("command", metavar="COMMAND", help=f"One of {', '.join(fairseq_commands.COMMANDS)}.")
        rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="As for fairseq-COMMAND.")
        rest.required = False

    return "fairseq's commands with this package's architectures, schedules and criterion.", _fairseq, add


def _fairseq(args: argparse.Namespace) -> None:
    fairseq_commands.check(args.command, args.arguments)
    sys.argv = [f"{PROG} fairseq", args.command, *args.arguments]
    # Like `python -m`, so that workers that fairseq spawns find the same main module and its patches.
    try:
        runpy.run_module("normformer_rs.fairseq_plugin.command", run_name="__main__", alter_sys=True)
    except (ImportError, KeyboardInterrupt):
        raise
    except Exception:
        traceback.print_exc()  # fairseq's own error
        raise SystemExit(1) from None


def _fairseq_user_dir_parser() -> _Command:
    def run(_: argparse.Namespace) -> None:
        print(Path(__file__).parent / "fairseq_plugin")

    return "Print the folder for the --user-dir of fairseq's own commands (Python 3.10).", run, lambda _: None


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
