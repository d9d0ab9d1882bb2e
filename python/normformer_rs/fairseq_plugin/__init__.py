"""The fairseq plug-in: every norm, residual scheme and initialisation of this package. It is the folder for --user-dir.

    normformer-rs fairseq train DATA --arch nfrs_transformer --norm scalenorm --residual prenorm …

runs fairseq-train with the architectures, schedules and the criterion of this folder, also on Python versions on which
fairseq alone does not run. On Python 3.10 fairseq's own commands work, too, with `--user-dir $(normformer-rs
fairseq-user-dir)`.
"""

# fairseq imports this folder under the name `fairseq_plugin`. All imports here are absolute, so that there is only one
# copy of each module.
import contextlib
import sys
from pathlib import Path

from normformer_rs.fairseq_plugin import compat

compat.apply()

from normformer_rs.fairseq_plugin import criterion, hooks, model, schedules  # noqa: E402, F401

if __name__ == "fairseq_plugin":
    # fairseq has put the folder normformer_rs at the front of sys.path, where its modules would hide other packages.
    with contextlib.suppress(ValueError):
        sys.path.remove(str(Path(__file__).parent.parent))
else:
    sys.modules.setdefault("fairseq_plugin", sys.modules[__name__])
