"""Studies: which norm or residual scheme trains better, at which rate, by several seeds; `normformer-rs compare`.

`declared.py` says what a study consists of, `measured.py` runs it, `outcome.py` chooses rates and compares the arms,
`page.py` writes what was found. `trials.py` is for training loops of the user's own.
"""

from .declared import Study

__all__ = ["Study"]
