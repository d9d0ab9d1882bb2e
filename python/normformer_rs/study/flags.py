"""The flags of `normformer-rs compare`."""

import argparse
import dataclasses
from pathlib import Path

from .. import text
from ..commands import Command
from ..commands.options import UsageError
from ..config import unknown
from ..errors import InputError

REPORTS = ("tensorboard", "wandb", "trackio")
"""The names of the clients. Their functions are in `reports.py`, which is not imported here, because it needs torch."""
DEFAULT = Path(__file__).with_name("default.toml")
"""The file of the study that is made if the command line names none."""


def parser() -> Command:
    """Returns the command: its line of help, the function that runs it, and the function that adds its flags."""

    def add(parser: argparse.ArgumentParser) -> None:
        """Adds the flags of the command to its parser."""
        parser.usage = "%(prog)s [STUDY.toml] [OPTION …]"
        lines = DEFAULT.read_text(encoding="utf-8").splitlines()
        parser.epilog = "\n".join(["STUDY.toml, in the default study:", "", *lines])
        parser.add_argument("study", metavar="STUDY.toml", nargs="?", help="The study. Default: the one below.")
        folder = "Folder of runs, rows and page. A stopped study goes on when the command is given again, and several "
        folder += "processes share one. Default: study."
        parser.add_argument("--output", metavar="DIR", default="study", help=folder)
        parser.add_argument("--data", metavar="DIR", help="Folder of the corpora. Default: the study's, data.")
        parser.add_argument("--only", metavar="ARM", nargs="+", default=[], help="Make only the runs of these arms.")
        hours = "Begin no new run after X hours. Default: no limit."
        parser.add_argument("--max-hours", metavar="X", type=float, default=float("inf"), help=hours)
        parser.add_argument("--device", metavar="NAME", default="cpu", help="cpu, cuda, cuda:N or auto. Default: cpu.")
        clients = "Log curves and rows at the end, with the client of that name: tensorboard, wandb or trackio."
        parser.add_argument("--report", metavar="CLIENT", choices=REPORTS, help=clients)
        jobs = "Make the runs in N jobs of submitit: Slurm's where it is installed, else processes of this machine."
        parser.add_argument("--jobs", metavar="N", type=int, default=0, help=jobs)
        setting = "A setting of the jobs, such as slurm_partition=gpu or timeout_min=600; may be repeated."
        parser.add_argument("--job-setting", metavar="NAME=VALUE", action="append", default=[], help=setting)
        plan = "Print the runs and their cost, estimated from a few measured updates, then stop."
        parser.add_argument("--dry-run", action="store_true", help=plan)
        parser.add_argument("--no-train", action="store_true", help="Make no run; write the page of the measured runs.")
        parser.add_argument("--trust", action="store_true", help="Run code that the file names as file.py:Class.")
        parser.add_argument("--no-progress", action="store_true", help="No progress bar.")

    return "Compare norms, schemes or any options: rates, seeds, intervals, a page.", _run, add


def _run(args: argparse.Namespace) -> None:
    """Makes the study that the command line names, or only prints its plan (--dry-run)."""
    text.check_writable(text.STANDARD)
    from . import Study, command

    if not args.max_hours > 0:
        raise InputError(f"--max-hours must be positive; got {args.max_hours}")
    study = Study.read(args.study or DEFAULT, trust=args.trust)
    study = study if args.data is None else dataclasses.replace(study, data=args.data)
    for name in args.only:
        if name not in study.arms:
            raise UsageError(unknown("arm", name, study.arms), "--only takes names of the study's arms")
    if args.dry_run:
        command.print_plan(study, args.device)
        return
    settings = _settings(args.job_setting)
    if args.jobs < 0:
        raise InputError(f"--jobs must not be negative; got {args.jobs}")
    if args.jobs and not args.no_train:
        from .jobs import work

        run_options = {"only": args.only, "max_hours": args.max_hours, "device": args.device}
        work(study, Path(args.output), args.jobs, settings, **run_options)
    words = " ".join(["normformer-rs compare", *([args.study] if args.study else [])])
    outcome = command.run(
        study,
        Path(args.output),
        only=args.only,
        max_hours=args.max_hours,
        train=not (args.no_train or args.jobs),
        progress=not args.no_progress,
        words=f"{words}\n\n{Path(args.study or DEFAULT).read_text(encoding='utf-8')}",
        device=args.device,
    )
    if args.report is not None:
        from .reports import REPORTS as clients

        clients[args.report](outcome, Path(args.output))
    print(outcome)
    print(f"page: {Path(args.output) / 'study.html'}")


def _settings(words: list[str]) -> dict[str, int | str]:
    """Returns the settings of the words NAME=VALUE; a value of digits becomes an int."""
    settings: dict[str, int | str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise InputError(f"--job-setting: expected NAME=VALUE, such as timeout_min=600; got {word}")
        settings[name] = int(value) if value.isdigit() else value
    return settings
