"""The exceptions of the package. Rust raises the same ones."""


class InputError(ValueError):
    """Wrong input or options; the message says what was expected, what was given and what to do."""


class DivergedError(RuntimeError):
    """The loss or the gradient stopped being finite; the message names the update and the last good checkpoint."""


class Interrupted(Exception):
    """Training was stopped by Ctrl-C; everything is saved and the message says how to resume."""
