"""The operators' schemas, which are a contract: `python tests/operators/schemas.py` adds those of new operators."""

from pathlib import Path

import torch

import normformer_rs  # noqa: F401  # registers the operators

PYTHONS = ("own_norm", "growth", "kept_seed")
KEPT = Path(__file__).with_name("schemas.txt")


def kept() -> set[str]:
    """Those that were promised."""
    return set(KEPT.read_text().splitlines())


def registered() -> set[str]:
    """Those of our operators that the core registers. Python's are there once `nn` is imported, or a norm declared."""
    found = {str(schema) for schema in torch._C._jit_get_all_schemas()}
    own = {schema for schema in found if schema.startswith("normformer_rs::")}
    return {schema for schema in own if schema.partition("(")[0].partition("::")[2] not in PYTHONS}


if __name__ == "__main__":
    KEPT.write_text("\n".join(sorted(kept() | registered())) + "\n")
