"""The protocol between training.py and its workers. Each reply is one line of JSON on stdout:

    (at start)        {"ready": true, "torch": "2.11.0+cu130", "threads": 2, …}
    window SECONDS    {"updates": 19, "target_tokens": 132884, "seconds": 20.79, "loss": 9.48}
    quit              (the end of the input does the same)

A window lasts for whole updates, until the first that ends after SECONDS, and counts what an update costs, waiting for
the batch and the change of epoch included; validation and checkpoints are switched off. Tokens are real ones, without
padding, with each sentence's end mark. `loss` is the label-smoothed training loss per target token over the window, in
nats. Between windows training stands still in the middle of an epoch and uses no processor.

This file runs on any Python from 3.8 on, because fairseq may have an interpreter of its own.
"""

import json
import math
import sys
import time


class Quit(Exception):
    """Raised when the parent process wants no more windows."""


class Windows:
    """Reads commands, counts the updates of the open window, and replies when the window is over.

    `before_update` and `after_update` are called around each update. A window closes when the update after its last is
    about to start, so that n updates come with n waits for a batch.
    """

    def __init__(self, commands, replies, greeting):
        self.commands, self.replies, self.greeting = commands, replies, greeting
        self.length = None  # seconds; None while no window is open

    def before_update(self):
        """Closes the window if its time is over, and then waits for the next command. Raises Quit if that command is
        the end."""
        if self.greeting:
            self.reply({"ready": True, **self.greeting})
            self.greeting = None
        if self.length is not None:
            seconds = time.perf_counter() - self.start
            if seconds < self.length:
                return
            counts = {"updates": self.updates, "target_tokens": self.target_tokens, "seconds": seconds}
            self.reply({**counts, "loss": self.loss_sum / self.target_tokens})
        self.open(self.commands.readline().split())

    def after_update(self, target_tokens, loss):
        """Counts one update of mean loss `loss` in nats per target token."""
        self.updates += 1
        self.target_tokens += target_tokens
        self.loss_sum += loss * target_tokens

    def open(self, command):
        if command in ([], ["quit"]):
            raise Quit
        try:
            verb, length = command
            self.length = float(length)
            if verb != "window" or not 0 < self.length < math.inf:
                raise ValueError
        except ValueError:
            sys.exit(f"expected 'window SECONDS' or 'quit', got {' '.join(command)!r}")
        self.updates = self.target_tokens = 0
        self.loss_sum = 0.0
        self.start = time.perf_counter()

    def reply(self, message):
        print(json.dumps(message), file=self.replies, flush=True)
