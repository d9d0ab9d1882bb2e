"""Names of parameters in fairseq's checkpoints and in this package's."""

import re

import torch
from torch import Tensor

_STOCK = re.compile(r"(?:^|\.)(?:self_attn|encoder_attn)\.q_proj\.weight$")
_LAYER = re.compile(r"^(encoder|decoder)\.layers\.(\d+)\.(.+)$")
_NORMS = {
    "encoder": {"self_attn_layer_norm": "norm1", "final_layer_norm": "norm2"},
    "decoder": {"self_attn_layer_norm": "norm1", "encoder_attn_layer_norm": "norm2", "final_layer_norm": "norm3"},
}
_INSIDE = {"encoder_attn": "multihead_attn", "fc1": "linear1", "fc2": "linear2"}
_NEVER_TRAINED = re.compile(r"^(in_proj|out_proj|fc1|fc2)_(weight|bias)$")
"""Second copies that fairseq's encoder layers keep for their fast path."""


def from_fairseq_names(state: dict[str, Tensor]) -> None:
    """Renames, in place, the layers of a checkpoint of fairseq's `transformer` archs to this package's names.

    q, k and v become one matrix, norms are numbered in their order, copies that were never trained go. A checkpoint
    with this package's names stays as it is.
    """
    if not any(_STOCK.search(name) for name in state):
        return
    is_alone = not any(".encoder_attn." in name for name in state)  # a language model's decoder
    for name in [*state]:
        found = _LAYER.match(name)
        if found:
            stack, number, rest = found.groups()
            value = state.pop(name)
            if not _NEVER_TRAINED.match(rest):
                norms = _NORMS["encoder" if is_alone else stack]
                state[f"{stack}.layers.{number}.{_rename(rest, norms)}"] = value
        elif re.match(r"^(encoder|decoder)\.layer_norm\.", name):
            state[name.replace(".layer_norm.", ".norm.")] = state.pop(name)
    _join(state)


def _rename(rest: str, norms: dict[str, str]) -> str:
    first, dot, others = rest.partition(".")
    return norms.get(first, _INSIDE.get(first, first)) + dot + others


def _join(state: dict[str, Tensor]) -> None:
    """q_proj, k_proj and v_proj become in_proj."""
    for name in [name for name in state if ".q_proj." in name]:
        parts = [state.pop(name.replace(".q_proj.", f".{which}_proj.")) for which in "qkv"]
        state[name.replace(".q_proj.", ".in_proj_")] = torch.cat(parts)
