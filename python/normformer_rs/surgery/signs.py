"""Signs in norms that a model was trained, which outlive an exchange of the norms."""

from torch import nn

HANDED_ON = "_sign_of_training"


def sign_in_norm(norm: nn.Module, name: str) -> str | None:
    """A sign that a norm was trained, or the norm that stood in its place before, in words; None: there is no sign.

    Libraries begin with gains of one (Gemma: zero) and biases of zero, and the first update moves them. A single gain
    gives no sign, because its first value is not known.
    """
    for key, p in norm.named_parameters(prefix=name):
        if p.numel() > 1 and not p.is_meta and not (p == p.flatten()[0].round().clamp(0, 1)).all():
            return f"{key} is not at its first value"
    return getattr(norm, HANDED_ON, None)


def hand_on(old: nn.Module, new: nn.Module, name: str) -> None:
    """Has the norm in the place `name` remember the sign that the old one there gave."""
    if sign := sign_in_norm(old, name):
        setattr(new, HANDED_ON, sign.replace("is not", "was not"))
