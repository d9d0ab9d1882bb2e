"""Looks in norms for signs that a model was trained. A norm that replaces another one remembers the old norm's sign."""

from torch import nn

HANDED_ON = "_sign_of_training"
"""The attribute of a new norm that holds the message of `sign_in_norm` about the norm that it replaced."""


def sign_in_norm(norm: nn.Module, name: str) -> str | None:
    """Returns a message that says why a norm, or the norm that it replaced, looks trained. None: it does not.

    Libraries initialise gains with ones (Gemma: zeros) and biases with zeros, and the first update changes them. A
    parameter of one number gives no sign, because its initial value is not known.
    """
    for key, p in norm.named_parameters(prefix=name):
        if p.numel() <= 1 or p.is_meta:
            continue
        initial = p.flatten()[0].round().clamp(0, 1)  # 0 or 1, whichever is nearer
        if not (p == initial).all():
            return f"{key} is not at its first value"
    return getattr(norm, HANDED_ON, None)


def hand_on(old: nn.Module, new: nn.Module, name: str) -> None:
    """Stores the message of `sign_in_norm` for the norm `old`, called `name`, in the norm `new` that replaces it."""
    if sign := sign_in_norm(old, name):
        setattr(new, HANDED_ON, sign.replace("is not", "was not"))
