"""Lets `python -m normformer_rs.fairseq_plugin COMMAND …` do the same as `normformer-rs fairseq COMMAND …`."""

import runpy

if __name__ == "__main__":
    # The command runs as the main module itself, because a spawned worker imports its parent's main module, and would
    # not import one that is called __main__.
    runpy.run_module("normformer_rs.fairseq_plugin.command", run_name="__main__", alter_sys=True)
