"""Finds signs in norms that a model was trained. A norm that replaces another one remembers the old norm's sign."""

from torch import nn

HANDED_ON = "_sign_of_training"


def sign_in_norm(norm: nn.Module, name: str) -> str | None:
    """Returns a sign, in words, that a norm was trained, or that the norm which it replaced was. None: there is none.

    Libraries initialise gains with ones (Gemma: zeros) and biases with zeros, and the first update changes them. A
    parameter of one number gives no sign, because its initial value is not known.
    """
    for key, p in norm.named_parameters(prefix=name):
        if p.numel() > 1 and not p.is_meta and not (p == p.flatten()[0].round().clamp(0, 1)).all():
            return f"{key} is not at its first value"
    return getattr(norm, HANDED_ON, None)


def hand_on(old: nn.Module, new: nn.Module, name: str) -> None:
    """Stores the sign of training that the norm `old`, called `name`, gives in the norm `new`, which replaces it."""
    if sign := sign_in_norm(old, name):
        setattr(new, HANDED_ON, sign.replace("is not", "was not"))
