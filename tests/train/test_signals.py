"""What ends a run from outside or from a callback: it saves, and the same object is raised."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from train_support import fit, losses, weights

import normformer_rs as nfrs
from normformer_rs.loop.signals import as_ctrl_c, held
from processes import errors_of

pytestmark = pytest.mark.usefixtures("one_thread")
SAVING = {"updates": 12, "evaluate_every": 5, "keep": 2, "max_tokens": 100}


class Stopped(BaseException):
    """Neither Exception nor KeyboardInterrupt, as of a framework that ends its jobs."""


def goes_on(run, whole, corpus, **options):
    fit(run, corpus, training=SAVING, resume=True, **options)
    assert losses(run) == losses(whole)
    assert all(torch.equal(tensor, weights(run)[name]) for name, tensor in weights(whole).items())


@pytest.mark.parametrize("event", ["started", "updated", "evaluated"])
@pytest.mark.parametrize(
    "raised",
    [SystemExit(3), GeneratorExit(), asyncio.CancelledError(), ValueError("mine"), Stopped("enough")],
    ids=repr,
)
@pytest.mark.one_in(all=15)
def test_what_a_callback_raises_leaves_fit_as_it_is_after_saving(tmp_path, corpus, raised, event):
    def leave(name, values):
        if name == event and (name == "started" or values["update"] in (3, 5)):
            raise raised

    fit(tmp_path / "whole", corpus, training=SAVING)
    with pytest.raises(type(raised)) as caught:
        fit(tmp_path / "run", corpus, training=SAVING, callbacks=[leave])
    assert caught.value is raised
    saved = {"started": {"update-00000000"}, "updated": {"update-00000003"}, "evaluated": {"update-00000005"}}[event]
    assert {path.name for path in (tmp_path / "run" / "checkpoints").glob("update-*")} == saved
    goes_on(tmp_path / "run", tmp_path / "whole", corpus)


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGUSR1])
def test_what_a_handler_raises_leaves_fit_as_it_is_after_saving(tmp_path, corpus, number):
    """Between callbacks: the handler's exception is nobody's but its own."""
    raised = TimeoutError("the alarm rang")

    def rings(*_):
        raise raised

    def ring(name, values):
        if name == "updated" and values["update"] == 3:
            os.kill(os.getpid(), number)
            time.sleep(0.01)

    before = signal.signal(number, rings)
    try:
        with pytest.raises(TimeoutError) as caught:
            fit(tmp_path / "run", corpus, training=SAVING, callbacks=[ring])
    finally:
        signal.signal(number, before)
    assert caught.value is raised
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("update-*")] == ["update-00000003"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.one_in(all=3)
def test_slurm_kubernetes_and_a_closed_terminal_are_ctrl_c(tmp_path, corpus, number):
    fit(tmp_path / "whole", corpus, training=SAVING)
    program = """
        import json, os, signal, sys
        import torch
        torch.set_num_threads(1)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what nohup starts begins with it ignored
        from train_support import fit
        def send(name, values):
            if name == "updated" and values["update"] == 3:
                os.kill(os.getpid(), int(sys.argv[3]))
        from normformer_rs import Interrupted
        try:
            fit(sys.argv[1], json.loads(sys.argv[2]), training=json.loads(sys.argv[4]), callbacks=[send])
        except Interrupted as stopped:
            print("saved", stopped)
        print(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP))
    """
    import json

    words = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "run"), json.dumps(corpus)]
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [*words, str(int(number)), json.dumps(SAVING)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    saved, handlers = done.stdout.splitlines()
    assert "stopped after update 3; everything is saved: the same command with --resume goes on" in saved
    assert handlers == "0 0", "the handlers are as before"
    goes_on(tmp_path / "run", tmp_path / "whole", corpus)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("later", [0.0, 0.002, 0.02, 0.2])
@pytest.mark.one_in(all=8)
def test_a_launcher_repeats_the_terminals_signal(tmp_path, corpus, first, later):
    """The second one takes nothing from what the first one ends with, wherever it comes."""
    sizes = "--d-model 16 --d-ff 24 --heads 2 --encoder-layers 2 --decoder-layers 2 --updates 100000 --no-progress"
    data = [word for key, value in corpus.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    words = [sys.executable, "-m", "normformer_rs", "train", "--no-bpe", *data, *sizes.split()]
    process = subprocess.Popen([*words, "--output", tmp_path / "run"], stderr=subprocess.PIPE, text=True)
    log = tmp_path / "run" / "log.jsonl"
    while process.poll() is None and not (log.exists() and len(losses(log.parent)) > 2):
        time.sleep(0.01)
    process.send_signal(first)
    time.sleep(later)
    process.send_signal(signal.SIGINT)
    said = errors_of(process)
    assert "everything is saved: the same command with --resume goes on" in said and "Traceback" not in said, said
    assert process.returncode in (-first, -signal.SIGINT)  # the latter where it comes after the last word


def test_a_signal_waits_for_the_end_of_held_work():
    """As an exception amid TensorBoard's queue leaves its lock taken; the third signal does not wait."""
    done = []
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"), as_ctrl_c():
        with held():
            with held():
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGINT)
            done.append("work")
        done.append("never")
    assert done == ["work"]
    with pytest.raises(KeyboardInterrupt, match="SIGINT"), as_ctrl_c(), held():
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        pytest.fail("the third one was held as well")
    with held():
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.full
def test_a_users_handler_stays(tmp_path, corpus):
    called = []
    before = signal.signal(signal.SIGTERM, lambda *_: called.append(1))

    def send(name, values):
        if name == "updated" and values["update"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        fit(tmp_path / "run", corpus, training=SAVING, callbacks=[send])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert called == [1] and max(losses(tmp_path / "run")) == 12


@pytest.mark.full
def test_a_search_hears_at_each_step(tmp_path, corpus):
    """One batch that would take minutes: a wide beam that never ends. Seconds are the processor's."""
    fit(tmp_path / "run", corpus, training={**SAVING, "updates": 1})
    lines = ["1 2 3 4"] * 400
    search = nfrs.SearchConfig(beam=8, max_length=10**6)

    def rings(*_):
        raise TimeoutError("the alarm rang")

    before = signal.signal(signal.SIGPROF, rings)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            signal.setitimer(signal.ITIMER_PROF, 0.5)
            start = time.process_time()
            with pytest.raises(TimeoutError):
                nfrs.translate(tmp_path / "run", lines, search, max_tokens=10**6)
            assert time.process_time() - start < 5.0
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@pytest.mark.full
def test_two_runs_at_once_keep_their_seeds(tmp_path, corpus):
    """Threads that draw from torch's generator meanwhile change no first value, and a run changes none of theirs."""
    fit(tmp_path / "alone", corpus, training={**SAVING, "updates": 1})
    is_over = threading.Event()

    def draws():
        while not is_over.is_set():
            torch.rand(3)

    def train(number):
        fit(tmp_path / f"run-{number}", corpus, training={**SAVING, "updates": 1}, tensorboard=False, curves=False)

    noise = threading.Thread(target=draws)
    noise.start()
    runs = [threading.Thread(target=train, args=(number,)) for number in range(3)]
    [run.start() for run in runs]
    [run.join() for run in runs]
    is_over.set()
    noise.join()
    alone = weights(tmp_path / "alone")
    for number in range(3):
        found = weights(tmp_path / f"run-{number}")
        assert all(torch.equal(found[name], tensor) for name, tensor in alone.items())
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    fit(tmp_path / "last", corpus, training={**SAVING, "updates": 1}, tensorboard=False, curves=False)
    assert torch.equal(torch.rand(4), expected)
