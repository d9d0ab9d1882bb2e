"""The commands of `normformer-rs`, each with its flags and the function that runs it; cli.py lists them.

A command imports the modules that need torch when it runs, so help and mistyped options are answered without them.
"""

import argparse
from collections.abc import Callable

PROG = "normformer-rs"
Command = tuple[str, Callable[[argparse.Namespace], None], Callable[[argparse.ArgumentParser], None]]
"""A line of help, the function that runs the command, and the function that adds its flags."""
