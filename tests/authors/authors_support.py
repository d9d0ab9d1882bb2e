"""The authors' own code, from a checkout that stands outside this repository. None of it is kept here.

NORMFORMER_RS_AUTHORS names a folder of checkouts, each called OWNER+NAME: a git repository, with or without a work
tree. Without it the tests skip.
"""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

FOLDER = os.environ.get("NORMFORMER_RS_AUTHORS")

# A Llama of four layers in peft_pretraining, as the releases of GPAS and ProRes have it: its names, and our options.
OUTER = {"target_embedding": "model.embed_tokens", "output_projection": "lm_head", "decoder.norm": "model.norm"}
INNER = {"self_attn.out_proj": "self_attn.o", "linear1": "mlp.gate", "linear2": "mlp.down", "linear3": "mlp.up"}
SHAPE = {"d_model": 8, "d_ff": 12, "heads": 2, "vocab_size": 11, "norm": "rmsnorm:llama", "dropout": 0.0}
SHAPE |= {"activation": "swiglu", "positions": "rotary", "linear_biases": False, "tie_embeddings": "none"}
SHAPE |= {"architecture": "decoder-only", "encoder_layers": 0, "decoder_layers": 4, "scale_embeddings": False}


def source(repository: str, commit: str, path: str) -> str:
    """Returns the text of a file at a commit; skips the test without a checkout."""
    name = repository.replace("/", "+")
    found = [Path(FOLDER, name), Path(FOLDER, name, "repo")] if FOLDER else []
    there = [folder for folder in found if (folder / "HEAD").exists() or (folder / ".git").exists()]
    if not there:
        pytest.skip(f"NORMFORMER_RS_AUTHORS has no checkout of https://github.com/{repository}")
    show = subprocess.run(
        ["git", "-C", str(there[0]), "show", f"{commit}:{path}"], capture_output=True, text=True, check=False
    )
    if show.returncode:
        pytest.fail(f"{there[0]} has no {path} at commit {commit}: {show.stderr.strip()}")
    return show.stdout


def module(
    repository: str, commit: str, path: str, changes: dict[str, str] | None = None, **beside
) -> types.ModuleType:
    """Runs a file as a module. `changes`: texts to replace, each of which must occur (such as a cast to 16 bits);
    `beside`: modules that it imports, by name with __ for the dot, which are there while it runs."""
    text = source(repository, commit, path)
    for old, new in (changes or {}).items():
        assert old in text, f"{repository}'s {path} has no {old!r}"
        text = text.replace(old, new)
    made = types.ModuleType(Path(path).stem)
    names = {made.__name__: made, **{name.replace("__", "."): value for name, value in beside.items()}}
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        exec(compile(text, f"{repository}/{path}", "exec"), made.__dict__)
    finally:
        for name, value in before.items():
            sys.modules.pop(name) if value is None else sys.modules.update({name: value})
    return made


def assert_same_language_models(ours, theirs, in_our_names, run_ours, tolerances=(1e-12, 1e-10)) -> None:
    """Gives both models the same random weights and tokens: logits and the gradients of all parameters must be equal.

    `in_our_names`: changes a dictionary of the authors' tensors to our names and layouts; `run_ours`: a function of the
    tokens that returns our logits.
    """
    torch.manual_seed(0)
    weights = dict(theirs.named_parameters())
    for weight in weights.values():
        torch.nn.init.normal_(weight, std=0.5)
    for name, weight in in_our_names(weights).items():
        ours.get_parameter(name).data.copy_(weight)
    ids, factors = torch.randint(2, 11, (3, 7)), torch.randn(3, 7, 11, dtype=torch.float64)
    logits = run_ours(ids), theirs(ids, use_cache=False, return_dict=False)[0]
    assert_close(*logits, rtol=0, atol=tolerances[0])
    torch.autograd.backward(logits, [factors, factors])
    gradients = in_our_names({name: weight.grad for name, weight in weights.items()})
    assert_close({name: w.grad for name, w in ours.named_parameters()}, gradients, rtol=0, atol=tolerances[1])
