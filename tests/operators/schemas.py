"""The operators' schemas, which are a contract: `python tests/operators/schemas.py` adds those of new operators."""

from pathlib import Path

import torch

import normformer_rs  # noqa: F401  # registers the operators

KEPT = Path(__file__).with_name("schemas.txt")


def kept() -> set[str]:
    """Those that were promised."""
    return set(KEPT.read_text().splitlines())


def registered() -> set[str]:
    """Those of our operators; `own_norm` is there only where a user declares a norm."""
    found = {str(schema) for schema in torch._C._jit_get_all_schemas()}
    return {schema for schema in found if schema.startswith("normformer_rs::") and "::own_norm(" not in schema}


if __name__ == "__main__":
    KEPT.write_text("\n".join(sorted(kept() | registered())) + "\n")
