"""`python -m normformer_rs.fairseq_plugin COMMAND …` is `normformer-rs fairseq COMMAND …`."""

import runpy

if __name__ == "__main__":
    # A spawned worker imports its parent's main module again, unless that is called __main__ like this one.
    runpy.run_module("normformer_rs.fairseq_plugin.command", run_name="__main__", alter_sys=True)
