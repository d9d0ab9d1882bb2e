"""fairseq with every norm, residual scheme and initialisation of this package: the folder for --user-dir.

    normformer-rs fairseq train DATA --arch nfrs_transformer --norm scalenorm --residual prenorm …

is fairseq-train with the architectures, schedules and the criterion below, also on Python versions on which fairseq
alone does not run. On Python 3.10 fairseq's own commands work, too, with `--user-dir $(normformer-rs
fairseq-user-dir)`.
"""

# fairseq imports this folder by itself, as `fairseq_plugin`; with absolute imports both names lead to the same modules.
import contextlib
import sys
from pathlib import Path

from normformer_rs.fairseq_plugin import compat

compat.apply()

from normformer_rs.fairseq_plugin import criterion, hooks, model, schedules  # noqa: E402, F401

if __name__ == "fairseq_plugin":
    # fairseq has put the package's own folder at the front of sys.path, where its modules would hide others' names.
    with contextlib.suppress(ValueError):
        sys.path.remove(str(Path(__file__).parent.parent))
else:
    sys.modules.setdefault("fairseq_plugin", sys.modules[__name__])
