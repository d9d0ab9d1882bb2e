"""Python that Rust calls within a run: its exceptions arrive as they are, signals wait for it, and the run is saved."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import ClassVar

import pytest
import torch
from train_support import events, fit, losses, weights

import normformer_rs as nfrs
from normformer_rs import cli
from normformer_rs.loop.signals import as_ctrl_c, ask, held, listening
from normformer_rs.norms import Norm, Parameter
from normformer_rs.schemes import ResidualSpec, Scheme, norm

pytestmark = pytest.mark.usefixtures("one_thread")
SAVING = {"updates": 12, "evaluate_every": 5, "keep": 2, "max_tokens": 100}


class Stopped(BaseException):
    """Neither Exception nor KeyboardInterrupt."""


class Calls:
    """Counts the calls of a norm, and does something within one of them."""

    done = 0
    planned: ClassVar[dict] = {}
    """By kind of call, how many calls are left until what happens."""

    @classmethod
    def plan(cls, kind, left, act):
        cls.planned = {kind: [left, act]}

    @classmethod
    def made(cls, kind):
        cls.done += 1
        if kind in cls.planned:
            cls.planned[kind][0] -= 1
            if cls.planned[kind][0] == 0:
                cls.planned.pop(kind)[1]()


class Scaled(torch.autograd.Function):
    """weight·x, whose backward pass is Python's, too."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, dy):
        Calls.made("backward")
        x, weight = ctx.saved_tensors
        return dy * weight, (dy * x).sum(tuple(range(x.dim() - 1)))


class Watched(Norm):
    name = "watched"
    parameters: ClassVar = {"weight": Parameter()}

    def normalize(self, x, weight):
        Calls.made("forward" if torch.is_grad_enabled() else "evaluation")
        return Scaled.apply(x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt(), weight)


class Sums(Scheme):
    name = "own-sums"

    def around(self, place):
        return ResidualSpec(before=norm(), alpha=1.0, beta=0.5)


@pytest.fixture(autouse=True)
def no_plan():
    Calls.planned = {}
    yield
    Calls.planned = {}


def raises(raised):
    def act():
        raise raised

    return act


def after(update, kind, calls, act):
    """A callback that plans an act for so many calls after an update."""

    def plan(name, values):
        if name == "updated" and values["update"] == update:
            Calls.plan(kind, calls, act)

    return plan


def checkpoints(run):
    return [path.name for path in sorted((run / "checkpoints").glob("update-*"))]


def is_whole(run, corpus, whole, model, training=SAVING):
    fit(run, corpus, model, training, resume=True)
    assert losses(run) == losses(whole)
    found = weights(run)
    assert all(torch.equal(tensor, found[name]) for name, tensor in weights(whole).items())


RAISED = [SystemExit(3), GeneratorExit(), asyncio.CancelledError(), ValueError("mine"), Stopped("enough")]
PLACES = [("forward", 7, 3, False), ("backward", 4, 3, False), ("forward", 5, 3, True), ("evaluation", 2, 5, False)]
"""In which pass, at which call, after which update, and whether activations are recomputed."""


@pytest.mark.parametrize("kind, calls, update, recompute", PLACES)
@pytest.mark.parametrize("raised", RAISED, ids=repr)
@pytest.mark.one_in(test=20, all=19)
def test_an_exception_of_a_norm_is_the_object_itself_and_the_run_is_saved(
    tmp_path, corpus, raised, kind, calls, update, recompute
):
    model, training = {"norm": Watched()}, {**SAVING, "activation_checkpointing": recompute}
    plan = after(update, kind, calls, raises(raised))
    with pytest.raises(type(raised)) as caught:
        fit(tmp_path / "run", corpus, model, training, callbacks=[plan])
    assert caught.value is raised and not Calls.planned
    assert checkpoints(tmp_path / "run") == [f"update-{update:08}"]
    if isinstance(raised, ValueError):
        fit(tmp_path / "whole", corpus, model, training)
        is_whole(tmp_path / "run", corpus, tmp_path / "whole", model, training)


def test_a_keyboard_interrupt_of_a_norm_is_ctrl_c(tmp_path, corpus):
    plan = after(3, "forward", 2, raises(KeyboardInterrupt()))
    with pytest.raises(nfrs.Interrupted, match="stopped after update 3; everything is saved"):
        fit(tmp_path / "run", corpus, {"norm": Watched()}, SAVING, callbacks=[plan])
    assert checkpoints(tmp_path / "run") == ["update-00000003"]


@pytest.mark.full
def test_statistics_and_counters_are_those_of_the_last_whole_update(tmp_path, corpus):
    """The encoder's norm raises in the backward pass, when the decoder's has taken the batch in."""
    model = {"encoder_norm": Watched(), "decoder_norm": "powernorm", "powernorm_warmup": 2}
    training = {**SAVING, "accumulate": 2}
    fit(tmp_path / "whole", corpus, model, training)
    with pytest.raises(ValueError, match="mine"):
        fit(tmp_path / "run", corpus, model, training, callbacks=[after(3, "backward", 8, raises(ValueError("mine")))])
    is_whole(tmp_path / "run", corpus, tmp_path / "whole", model, training)


@pytest.mark.parametrize("calls", [3, 8])
@pytest.mark.one_in(all=2)
def test_a_first_update_that_profiles_is_made_again(tmp_path, corpus, calls):
    """Call 3 lies in the profile's pass, call 8 of those with gradients in the update's."""
    model = {"norm": Watched(), "residual": "admin"}
    fit(tmp_path / "whole", corpus, model, SAVING)
    Calls.planned = {kind: [calls, raises(ValueError("mine"))] for kind in ("evaluation", "forward")}
    with pytest.raises(ValueError, match="mine"):
        fit(tmp_path / "run", corpus, model, SAVING)
    Calls.planned = {}
    assert checkpoints(tmp_path / "run") == ["update-00000000"]
    is_whole(tmp_path / "run", corpus, tmp_path / "whole", model)


def test_where_saving_fails_the_exception_has_that_as_its_cause(tmp_path, corpus, monkeypatch):
    def spoil():
        (tmp_path / "run" / "checkpoints").rmdir()
        (tmp_path / "run" / "checkpoints").write_text("no folder")
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        fit(tmp_path / "run", corpus, {"norm": Watched()}, SAVING, callbacks=[after(3, "forward", 2, spoil)])
    assert isinstance(caught.value.__cause__, OSError), caught.value.__cause__


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.one_in(test=2)
def test_what_a_norm_raises_leaves_translations_and_measurements_as_it_is(tmp_path, corpus, threads):
    fit(tmp_path / "run", corpus, {"norm": Watched()}, {**SAVING, "updates": 1})
    torch.set_num_threads(threads)
    model, tokens = nfrs.Transformer.from_checkpoint(tmp_path / "run", "last"), torch.ones(1, 3).long()
    uses = [
        lambda: nfrs.translate(tmp_path / "run", ["1 2 3"] * 40, max_tokens=20),
        lambda: nfrs.evaluate_loss(tmp_path / "run", corpus["valid_source"], corpus["valid_target"]),
        lambda: model(tokens, tokens),
    ]
    for use in uses:
        for raised in (SystemExit(5), ValueError("mine"), Stopped("enough")):
            Calls.planned = {kind: [3, raises(raised)] for kind in ("evaluation", "forward")}
            with pytest.raises(type(raised)) as caught:
                use()
            assert caught.value is raised
    Calls.planned = {kind: [3, raises(KeyboardInterrupt())] for kind in ("evaluation", "forward")}
    with pytest.raises(nfrs.Interrupted, match="translation was stopped"):
        uses[0]()


def test_the_number_of_sys_exit_is_the_commands(tmp_path, corpus):
    fit(tmp_path / "run", corpus, {"norm": Watched()}, {**SAVING, "updates": 3})
    Calls.plan("forward", 9, lambda: sys.exit(7))
    with pytest.raises(SystemExit) as left:
        cli.main(["train", "--output", str(tmp_path / "run"), "--resume", "--updates", "20", "--no-progress"])
    assert left.value.code == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("kind, calls, update, recompute", PLACES)
@pytest.mark.one_in(all=12)
def test_a_signal_waits_until_a_norm_returns(tmp_path, corpus, number, kind, calls, update, recompute):
    """The update is made, and reported; an evaluation is left, and made anew at the resume."""
    model, training = {"norm": Watched()}, {**SAVING, "activation_checkpointing": recompute}
    ended = []

    def send():
        os.kill(os.getpid(), number)
        time.sleep(0.001)
        ended.append(True)

    with pytest.raises(nfrs.Interrupted, match="everything is saved"):
        before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what nohup starts begins with it ignored
        try:
            fit(tmp_path / "run", corpus, model, training, callbacks=[after(update, kind, calls, send)])
        finally:
            signal.signal(signal.SIGHUP, before)
    made = update + (kind != "evaluation")
    assert ended == [True] and max(losses(tmp_path / "run")) == made
    assert checkpoints(tmp_path / "run") == [f"update-{made:08}"]
    if number == signal.SIGTERM:
        fit(tmp_path / "whole", corpus, model, training)
        is_whole(tmp_path / "run", corpus, tmp_path / "whole", model, training)


def test_a_callback_that_swallows_ctrl_c_is_followed_by_the_end(tmp_path, corpus):
    def swallow(name, values):
        if name == "updated" and values["update"] == 3:
            try:
                signal.raise_signal(signal.SIGTERM)
                pytest.fail("a callback is broken off")
            except KeyboardInterrupt:
                pass

    with pytest.raises(nfrs.Interrupted, match="stopped after update"):
        fit(tmp_path / "run", corpus, training=SAVING, callbacks=[swallow])
    assert max(losses(tmp_path / "run")) == 3


def test_a_wish_stays_until_it_arrives():
    with as_ctrl_c():
        with contextlib.suppress(KeyboardInterrupt):  # as an import of torch's does
            signal.raise_signal(signal.SIGTERM)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
                ask()
        signal.raise_signal(signal.SIGINT)  # the launcher's second one
    ask()
    done = []
    with pytest.raises(KeyboardInterrupt, match="SIGINT"), as_ctrl_c(), held():
        ask()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt, match="SIGINT"), listening():
            pytest.fail("the signal that waits comes first")
        with pytest.raises(ValueError, match="mine"), held():
            raise ValueError("mine")
        done.append("the work")
    assert done == ["the work"]
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"), as_ctrl_c(), held(), listening():
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("a function of the user's is broken off")


SWALLOWS = """
import signal
try:
    signal.raise_signal(signal.SIGTERM)
    after = True
except KeyboardInterrupt:
    after = False
"""


def test_a_signal_within_an_import_arrives_at_its_end(tmp_path, monkeypatch):
    """Imports of torch's swallow KeyboardInterrupt, and one that is broken off leaves half a module."""
    (tmp_path / "swallows_inside.py").write_text(SWALLOWS)
    (tmp_path / "swallows_signals.py").write_text("import swallows_inside")
    monkeypatch.syspath_prepend(tmp_path)
    reached, traced = [], sys.gettrace()

    def command():
        import swallows_signals  # noqa: F401

        reached.append("the line after it")

    with pytest.raises(KeyboardInterrupt, match="SIGTERM"), as_ctrl_c():
        command()
    assert reached == [] and sys.modules["swallows_inside"].after
    assert sys.gettrace() is traced
    for name in ("swallows_inside", "swallows_signals"):
        del sys.modules[name]


COMMANDS = {
    "train": "--architecture decoder-only --no-bpe --train-target train.target --valid-target valid.target --output r",
    "translate": "--model run --input valid.source",
    "generate": "--model lm --prompt a",
    "evaluate": "--model lm --reference valid.target",
    "average": "--model run --last 1",
    "export": "--model lm --output exported",
    "doctor": "",
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.one_in(all=20)
def test_a_signal_amid_a_commands_imports_ends_it(tmp_path, corpus, command, number):
    words = COMMANDS[command].split()
    targets = {name: path for name, path in corpus.items() if name.endswith("target")}
    if "run" in words:
        fit(tmp_path / "run", corpus, {}, {"updates": 1})
    if "lm" in words:
        fit(tmp_path / "lm", targets, {"architecture": "decoder-only"}, {"updates": 1})
    program = f"""
        import os, sys
        class Send:
            sent = False
            def find_spec(self, name, path=None, target=None):
                if name == "numpy" and not Send.sent:
                    Send.sent = True
                    os.kill(os.getpid(), {int(number)})
        sys.meta_path.insert(0, Send())
    """
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(program))
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "normformer_rs", command, *words],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    name = signal.Signals(number).name
    assert (done.returncode, done.stderr) == (-number, f"normformer-rs: interrupted: {name}\n"), done


def interrupt_and_resume(tmp_path, corpus, signals):
    """Signals at random moments of a run whose norm, scheme and callback are Python; after each the run goes on."""
    rng = random.Random(signals)
    model = {"norm": Watched(), "residual": Sums()}
    training = {"updates": 6 * signals, "evaluate_every": 4, "keep": 2, "max_tokens": 60}
    fit(tmp_path / "whole", corpus, model, training, tensorboard=False, curves=False)
    saved = sent = 0
    while sent < signals:
        number, wait = rng.choice([signal.SIGINT, signal.SIGTERM]), rng.choice([0.0, rng.uniform(0.0, 0.01)])

        def send(number=number, wait=wait):
            sender = threading.Thread(target=lambda: (time.sleep(wait), os.kill(os.getpid(), number)))
            sender.start()
            if wait == 0.0:
                sender.join()

        def callback(name, _):
            Calls.made(name)

        kinds = {"forward": 40, "backward": 40, "evaluation": 80, "updated": 4, "evaluated": 1, "started": 1}
        kind = rng.choice([*kinds])
        Calls.plan(kind, rng.randint(1, kinds[kind]), send)
        try:
            fit(
                tmp_path / "run",
                corpus,
                model,
                training,
                callbacks=[callback],
                resume=sent > 0,
                tensorboard=False,
                curves=False,
            )
        except nfrs.Interrupted as error:
            assert "everything is saved" in str(error)
            last = max(losses(tmp_path / "run"), default=0)
            saved += checkpoints(tmp_path / "run")[-1].startswith(f"update-{last:08}")
        sent += 1
        assert not Calls.planned
    is_whole(tmp_path / "run", corpus, tmp_path / "whole", model, training)
    assert len(events(tmp_path / "run", "updated")) == training["updates"]
    return saved


@pytest.mark.full
def test_six_signals_into_a_run_of_ones_own(tmp_path, corpus):
    assert interrupt_and_resume(tmp_path, corpus, 6) == 6


@pytest.mark.long
def test_a_hundred_signals_into_a_run_of_ones_own(tmp_path, corpus):
    assert interrupt_and_resume(tmp_path, corpus, 100) == 100
