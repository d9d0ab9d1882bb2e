"""fairseq's side of the training benchmark: `fairseq-train` itself, run in timed windows.

`make fairseq` installs fairseq 0.12.2 beside this package; the plug-in makes it run on Python 3.11 and later.
Without the plug-in fairseq needs an interpreter of its own: Python 3.10 or older, and pip below 24.1 while it installs:

    python3.10 -m venv FAIRSEQ
    FAIRSEQ/bin/pip install "pip<24.1"
    FAIRSEQ/bin/pip install torch==2.11.0 "numpy<2"
    FAIRSEQ/bin/pip install fairseq==0.12.2

The benchmark starts this file on a folder made by `fairseq_data.prepare` and talks to it by the protocol of
`windows.py`; everything fairseq says goes to stderr:

    python fairseq_worker.py DATA [--max-tokens 4096] [--update-freq 2] [a flag of fairseq-train …]

The environment of the worker sets the allocator: with `TUNED_ALLOCATOR` below it keeps memory, without it has its
default behaviour. The number of threads is PyTorch's default unless OMP_NUM_THREADS is set.
"""

import argparse
import contextlib
import math
import multiprocessing
import os
import shlex
import signal
import sys
import tempfile

from windows import Quit, Windows

# glibc's malloc maps every block above a threshold of at most 32 MB separately, and unmaps it when it is freed. So each
# update has page faults for its logits again (4,050 x 9,712 floats, 157 MB, several times). With the settings below
# (mallopt's M_MMAP_MAX and M_TRIM_THRESHOLD) no block is mapped and the heap is never trimmed, so memory is kept.
TUNED_ALLOCATOR = {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184"}

# transformer_tiny of the Multi30k recipe. fairseq's architecture of that name is smaller (2+2 layers, width 64), so all
# sizes are given here. fairseq's other defaults hold: post-norm, dropout 0 on attention weights and after ReLU.
RECIPE = shlex.split("""
    --task translation --arch transformer_tiny --share-all-embeddings
    --encoder-layers 4 --encoder-embed-dim 128 --encoder-ffn-embed-dim 256 --encoder-attention-heads 4
    --decoder-layers 4 --decoder-embed-dim 128 --decoder-ffn-embed-dim 256 --decoder-attention-heads 4
    --dropout 0.3 --criterion label_smoothed_cross_entropy --label-smoothing 0.1
    --optimizer adam --adam-betas '(0.9, 0.98)' --lr 0.005 --lr-scheduler inverse_sqrt --warmup-updates 2000
    --cpu --distributed-world-size 1 --no-progress-bar --log-format simple
""")


def windowed(trainer, windows):
    """Returns a subclass of fairseq's `Trainer` that reports each update to `windows`. The update itself is not
    changed."""

    class WindowedTrainer(trainer):
        def train_step(self, samples, raise_oom=False):
            windows.before_update()
            output = super().train_step(samples, raise_oom)
            target_tokens = sum(sample["ntokens"] for sample in samples)
            windows.after_update(target_tokens, output["loss"] * math.log(2))  # fairseq logs losses in bits
            return output

    return WindowedTrainer


def keep_stdout():
    """Returns the real stdout, and redirects file descriptor 1, to which fairseq logs, to stderr."""
    sys.stdout.flush()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def end_data_workers():
    """Ends the processes in which fairseq reads its data. PyTorch's handler of SIGCHLD is removed first, because it
    would raise an error when they end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.terminate()
        child.join()


def main():
    parser = argparse.ArgumentParser(
        description="Train with fairseq in windows asked for on stdin.", allow_abbrev=False
    )
    parser.add_argument("data", help="folder written by fairseq-preprocess")
    parser.add_argument("--max-tokens", type=int, default=4096, help="padded tokens in a mini-batch")
    parser.add_argument("--update-freq", type=int, default=2, help="mini-batches in an update")
    parser.add_argument("--seed", type=int, default=1)
    arguments, flags = parser.parse_known_args()
    if sys.version_info >= (3, 11):
        import normformer_rs.fairseq_plugin  # noqa: F401  the import patches this Python for fairseq

    replies = keep_stdout()
    import fairseq
    import torch
    from fairseq_cli import train

    greeting = {
        "fairseq": fairseq.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    train.Trainer = windowed(train.Trainer, Windows(sys.stdin, replies, greeting))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        # Data workers make their sockets in this folder, and fairseq writes files even with --no-save.
        tempfile.tempdir = scratch
        sys.argv = [
            "fairseq-train",
            arguments.data,
            *RECIPE,
            "--no-save",
            "--disable-validation",
            "--save-dir",
            scratch,
        ]
        for name in ("max_tokens", "update_freq", "seed"):
            sys.argv += ["--" + name.replace("_", "-"), str(getattr(arguments, name))]
        sys.argv += flags  # given flags come last, because fairseq uses the last value of a flag
        with contextlib.suppress(Quit):
            train.cli_main()
        end_data_workers()
    # The process ends without the interpreter's usual cleanup. fairseq's batch buffer is a daemon thread, which the
    # cleanup sometimes kills inside C++ code; that would abort the process.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
