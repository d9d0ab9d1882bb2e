"""`python -m normformer_rs` is the command `normformer-rs`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
