"""The exceptions of the package. Rust raises the same ones."""


class InputError(ValueError):
    """Raised for wrong input or options. The message says what was expected, what was given and what to do."""


class DivergedError(RuntimeError):
    """Raised when the loss or the gradient is no longer finite. The message names the update and the last good
    checkpoint."""


class Interrupted(Exception):
    """Raised when Ctrl-C stops training. Everything is saved, and the message says how to resume."""
