"""Generates the page of the command line from the help of each command."""

import argparse
import os
from unittest import mock

from normformer_rs import cli


def page() -> str:
    """Returns the page, with every command and all its options as `--help` prints them."""
    with mock.patch.dict(os.environ, {"COLUMNS": "96"}):
        parser = cli._parser()
        (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        for command in commands.choices.values():
            command.add_options()
        parts = [
            "# Command line",
            "`normformer-rs COMMAND --help` prints the same.",
            f"```text\n{parser.format_help()}```",
        ]
        parts += [f"## {name}\n\n```text\n{command.format_help()}```" for name, command in commands.choices.items()]
    return "\n\n".join(parts) + "\n"
