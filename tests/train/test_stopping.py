"""Runs that stop and go on: Ctrl-C, signals, resumption, checkpoints that are kept."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from train_support import TINY, events, fit, losses, weights

import normformer_rs as nfrs
from normformer_rs import _core
from normformer_rs.loop import training as loop

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("norm", ["layernorm", "batchnorm", "powernorm-v", "powernorm", "prepbn"])
@pytest.mark.parametrize("schedule", ["inverse-sqrt", "val-decay"])
@pytest.mark.one_in(test=9, all=7)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, corpus, schedule, norm):
    training = {"max_tokens": 100, "accumulate": 2, "schedule": schedule, "warmup": 4, "evaluate_every": 5}
    model = {"dropout": 0.3, "norm": norm} | {
        "powernorm": {"powernorm_warmup": 10},
        "prepbn": {"prepbn_steps": 10},
    }.get(norm, {})
    fit(tmp_path / "whole", corpus, model, {**training, "updates": 20})
    fit(tmp_path / "parts", corpus, model, {**training, "updates": 7})
    fit(tmp_path / "parts", corpus, model, {**training, "updates": 20}, resume=True)
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert whole == parts
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.full
def test_a_resumed_run_rounds_its_moments_alike(tmp_path, corpus):
    """In bf16 a number's rounding is its place's and its update's; the moments take half of the checkpoint."""
    training = {"max_tokens": 100, "moments": "bf16", "beta2": 0.999}
    fit(tmp_path / "f32", corpus, training={**training, "updates": 12, "moments": "f32"})
    fit(tmp_path / "whole", corpus, training={**training, "updates": 12})
    fit(tmp_path / "parts", corpus, training={**training, "updates": 5})
    fit(tmp_path / "parts", corpus, training={**training, "updates": 12}, resume=True)
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts") and all(torch.equal(a[k], b[k]) for k in a)

    def moments(run):
        return load_file(tmp_path / run / "checkpoints" / "last" / "optimizer.safetensors")

    wide, narrow = moments("f32"), moments("whole")
    assert all(t.dtype == torch.bfloat16 for t in narrow.values())
    for name, moment in narrow.items():  # twelve updates away from each other
        torch.testing.assert_close(moment.float(), wide[name], rtol=0.1, atol=0.05 * float(wide[name].abs().max()))
    fit(tmp_path / "parts", corpus, training={**training, "updates": 13, "moments": "f32"}, resume=True)
    assert all(t.dtype == torch.float32 for t in moments("parts").values())


@pytest.mark.parametrize("update", [4, 5, 12])
@pytest.mark.one_in(test=3, all=2)
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, corpus, ctrl_c, update):
    """Between evaluations, at one, and at the end: what is left is what an uninterrupted run leaves."""
    training = {"max_tokens": 100, "updates": 12, "evaluate_every": 4, "keep": 2, "schedule": "val-decay"}
    fit(tmp_path / "whole", corpus, training=training)
    ctrl_c(update)
    with pytest.raises(nfrs.Interrupted, match=rf"after update {update}.*--resume"):
        fit(tmp_path / "parts", corpus, training=training)
    fit(tmp_path / "parts", corpus, training=training, resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    whole, parts = (
        [(e["update"], e["loss"], e["bleu"], e["best"]) for e in events(tmp_path / run, "evaluated")]
        for run in ("whole", "parts")
    )
    assert parts == whole and [update for update, *_ in whole] == [4, 8, 12]

    def kept(run):
        """The updates that have a checkpoint; one that is saved again has a number after its name."""
        folder = tmp_path / run / "checkpoints"
        found = [*folder.glob("update-*"), (folder / "best").resolve(), (folder / "last").resolve()]
        return sorted(path.name.split("-")[1] for path in found)

    assert kept("parts") == kept("whole")


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder-only"])
@pytest.mark.one_in(all=2)
def test_ctrl_c_within_an_evaluation(tmp_path, corpus, architecture):
    """It is heard there, and the evaluation made by the run that goes on."""
    data = {name: path for name, path in corpus.items() if "target" in name or architecture == "encoder-decoder"}
    for name, path in data.items():
        if "valid" in name:
            Path(path).write_text(Path(path).read_text() * 200)
    model, training = {"architecture": architecture}, {"max_tokens": 64, "updates": 4, "evaluate_every": 2}
    fit(tmp_path / "whole", data, model, training)
    # Well within what takes nearly all of the time: translating, or, in a language model, the loss.
    within = events(tmp_path / "whole", "evaluated")[0]["seconds"] / 4

    def stop(*_):
        raise KeyboardInterrupt

    class Stopping(loop._Observer):
        def updated(self, event):
            super().updated(event)
            if event["update"] == 2:
                signal.setitimer(signal.ITIMER_REAL, within)

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(nfrs.Interrupted, match=r"after update 2.*--resume"):
            patch.setattr(loop, "_Observer", Stopping)
            fit(tmp_path / "parts", data, model, training)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not events(tmp_path / "parts", "evaluated")
    fit(tmp_path / "parts", data, model, training, resume=True)
    for event, name in (("evaluated", "loss"), ("evaluated", "bleu"), ("updated", "loss")):
        whole, parts = ([(e["update"], e[name]) for e in events(tmp_path / run, event)] for run in ("whole", "parts"))
        assert parts == whole and whole[-1][0] == 4


@pytest.mark.full
def test_tensorboard_shows_what_the_log_holds(tmp_path, corpus, ctrl_c):
    """Every number of log.jsonl, once, over an interruption, too."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    training = {"max_tokens": 100, "updates": 12, "evaluate_every": 4}
    ctrl_c(6)
    with pytest.raises(nfrs.Interrupted):
        fit(tmp_path / "run", corpus, training=training)
    fit(tmp_path / "run", corpus, training=training, resume=True)
    shown = event_accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    shown.Reload()
    named = {"train": "loss nll lr grad_norm tokens_per_second", "valid": "loss nll perplexity bleu"}
    names = [
        (kind, group, name)
        for kind, group in (("updated", "train"), ("evaluated", "valid"))
        for name in named[group].split()
    ]
    assert sorted(shown.Tags()["scalars"]) == sorted(f"{group}/{name}" for _, group, name in names)
    for kind, group, name in names:
        logged = [(e["update"], e[name]) for e in events(tmp_path / "run", kind)]
        found = [(e.step, e.value) for e in shown.Scalars(f"{group}/{name}")]
        assert [step for step, _ in found] == [step for step, _ in logged] and len(found) == (
            12 if group == "train" else 3
        )
        assert [value for _, value in found] == pytest.approx([value for _, value in logged], rel=1e-6)


@pytest.mark.full
def test_what_stops_a_run(tmp_path, corpus):
    def stopped(name, **training):
        fit(tmp_path / name, corpus, training={"max_tokens": 100, "evaluate_every": 1, **training})
        return len(losses(tmp_path / name)), events(tmp_path / name, "message")[-1]["text"]

    updates, text = stopped("epochs", updates=0, epochs=2)
    assert "2 epochs are done" in text and updates % 2 == 0 and updates > 2
    updates, text = stopped("patience", updates=100, patience=3, lr=1.0)  # no better than the first
    assert "3 evaluations without a better one" in text and updates < 100
    evaluated = events(tmp_path / "patience", "evaluated")
    assert [e["best"] for e in evaluated[-3:]] == [False] * 3 and evaluated[-4]["best"]
    updates, text = stopped("rate", updates=100, schedule="inverse-sqrt", lr=1e-3, warmup=2, min_lr=5e-4)
    assert updates == 8 and "below min_lr 5.00e-4" in text  # 1e-3·√(2/8)


@pytest.mark.full
def test_a_resumed_run_with_other_options_is_averaged(tmp_path, corpus):
    fit(tmp_path / "run", corpus, training={"updates": 2, "evaluate_every": 1})
    fit(tmp_path / "run", corpus, training={"updates": 4, "evaluate_every": 1, "max_tokens": 100}, resume=True)
    assert Path(nfrs.average(tmp_path / "run", last=4)).name == "average"


def test_only_the_last_evaluations_are_averaged(tmp_path, corpus, ctrl_c):
    """Neither what an interruption left, nor an old best checkpoint with a gap after it."""
    training = {"updates": 12, "evaluate_every": 2, "keep": 2, "lr": 1e-5}
    ctrl_c(5)
    with pytest.raises(nfrs.Interrupted):
        fit(tmp_path / "run", corpus, training=training)
    with pytest.raises(ValueError, match="the last 2 evaluations, cannot average 3"):
        nfrs.average(tmp_path / "run", last=3)
    checkpoints = tmp_path / "run" / "checkpoints"
    averaged = json.loads((Path(nfrs.average(tmp_path / "run", last=2)) / "state.json").read_text())
    assert averaged["update"] == 4
    fit(tmp_path / "run", corpus, training=training, resume=True)
    best = checkpoints / "update-00000006"
    best.mkdir()
    for path in (checkpoints / "last").resolve().iterdir():
        (best / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="the last 2 evaluations, cannot average 3"):
        nfrs.average(tmp_path / "run", last=3)


@pytest.mark.full
def test_what_was_best_by_another_criterion_is_forgotten(tmp_path, corpus):
    training = {"updates": 4, "evaluate_every": 1, "lr": 1e-3}
    fit(tmp_path / "run", corpus, training=training | {"criterion": "bleu"})
    more = training | {"criterion": "loss", "updates": 8}
    fit(tmp_path / "run", corpus, training=more, resume=True)
    assert [e["best"] for e in events(tmp_path / "run", "evaluated")][4:] == [True] * 4


def test_a_run_goes_on_with_its_own_text(tmp_path, corpus):
    fit(tmp_path / "run", corpus, training={"updates": 2})
    more = {"updates": 4}
    with pytest.raises(ValueError, match="trained on other text: vocab_mask was true, now false"):
        fit(tmp_path / "run", corpus, training=more | {"vocab_mask": False}, resume=True)
    Path(corpus["train_target"]).write_text("a\n" * 41)
    with pytest.raises(ValueError, match="other target types"):
        fit(tmp_path / "run", corpus, training=more, resume=True)


def test_a_terminal_that_goes_ends_no_run(tmp_path, corpus, monkeypatch):
    class Gone:
        def isatty(self):
            return True

        def write(self, text):
            raise OSError(5, "Input/output error")

        def flush(self):
            raise OSError(5, "Input/output error")

    from normformer_rs.loop import progress

    progress.log_to_stderr()
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr("normformer_rs.loop.training.choose", lambda wanted: progress.Lines())
    monkeypatch.setattr(sys, "stderr", Gone())
    model, training = nfrs.TransformerConfig(**TINY), nfrs.TrainingConfig(updates=2, max_tokens=10000)
    trainer = nfrs.Trainer(model, training, nfrs.DataConfig(**corpus, no_bpe=True))
    history = trainer.fit(tmp_path / "run", progress=True, tensorboard=False, curves=False)
    assert list(history.update) == [1, 2]


@pytest.mark.parametrize("work", ["translate", "evaluate_loss"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])
@pytest.mark.one_in(test=4, all=3)
def test_signals_are_heard_between_batches(tmp_path, corpus, monkeypatch, work, kind):
    """Ctrl-C's exception becomes this package's; what another handler raises stays what it is."""
    fit(tmp_path / "run", corpus, training={"updates": 2, "max_tokens": 20})
    for side in ("source", "target"):
        text = Path(corpus[f"valid_{side}"]).read_text()
        (tmp_path / side).write_text(5000 * text)
    lines = (tmp_path / "source").read_text().splitlines()
    given = {"translate": [lines], "evaluate_loss": [tmp_path / "source", tmp_path / "target"]}[work]
    called = getattr(_core, work)

    def interrupted(*arguments):
        """The signal comes while Rust is at work, for seconds, and Python's handler runs when it is asked for."""
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        return called(*arguments)

    def rings(*_):
        raise kind("the alarm rang")

    monkeypatch.setattr(_core, work, interrupted)
    before = signal.signal(signal.SIGALRM, rings)
    try:
        with pytest.raises((KeyboardInterrupt, TimeoutError, nfrs.Interrupted)) as stopped:
            getattr(nfrs, work)(tmp_path / "run", *given)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    expected = (nfrs.Interrupted, "was stopped") if kind is KeyboardInterrupt else (TimeoutError, "the alarm rang")
    assert stopped.type is expected[0] and expected[1] in str(stopped.value)


@pytest.mark.full
def test_a_line_that_was_cut_short_stays_a_line(tmp_path, corpus):
    fit(tmp_path / "run", corpus, training={"updates": 2})
    with (tmp_path / "run" / "log.jsonl").open("a") as log:
        log.write('{"event":"upda')
    history = fit(tmp_path / "run", corpus, training={"updates": 4}, resume=True)
    assert list(history.update) == [1, 2, 3, 4]


@pytest.mark.full
def test_a_killed_run_resumes_to_the_same_bits():
    """The short version of `make kill-test`, on one corpus: a random kill, two processes at once, every 300th act of
    writing."""
    script = Path(__file__).with_name("kill_test.py")
    subprocess.run(
        [sys.executable, script, "--kills", "1", "--stride", "300", "--best", "first"], check=True, timeout=600
    )
