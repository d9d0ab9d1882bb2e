"""Training: against the oracle, reproducible, resumable, and what it says of bad input."""

import json
import pickle
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import normformer_rs as nfrs
import reference as ref
from normformer_rs import _core
from normformer_rs.convert import to_fairseq

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = {"d_model": 16, "d_ff": 24, "heads": 2, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}


@pytest.fixture
def corpus(tmp_path):
    """Digits to letters, reversed: 40 training pairs, 8 held out."""
    generator = random.Random(5)
    paths = {}
    for part, n in (("train", 40), ("valid", 8)):
        pairs = [[generator.choice("0123456789") for _ in range(generator.randint(1, 6))] for _ in range(n)]
        pairs += [list("0123456789")] if part == "train" else []
        for side, lines in (("source", pairs), ("target", [[chr(97 + int(d)) for d in p[::-1]] for p in pairs])):
            path = tmp_path / f"{part}.{side}"
            path.write_text("".join(" ".join(line) + "\n" for line in lines))
            paths[f"{part}_{side}"] = str(path)
    return paths


def fit(output, data, model=(), training=(), **options):
    trainer = nfrs.Trainer(
        nfrs.TransformerConfig(**{**TINY, **dict(model)}),
        nfrs.TrainingConfig(
            **{"updates": 10, "max_tokens": 10000, "schedule": "constant", "lr": 1e-2, "warmup": 0, **dict(training)}
        ),
        nfrs.DataConfig(**data, no_bpe=True),
    )
    return trainer.fit(output, progress=False, **options)


def events(output, kind):
    lines = (Path(output) / "log.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] == kind]


def losses(output):
    return {e["update"]: e["loss"] for e in events(output, "updated")}


def weights(output, name="last"):
    return nfrs.Transformer.from_checkpoint(output, name).state_dict()


def whole_batch(output, corpus, start="bos"):
    """The training text as one batch of the oracle's, and the target vocabulary."""
    vocabulary = [line.split()[0] for line in (output / "vocabulary.txt").read_text().splitlines()]
    ids = {piece: i + 4 for i, piece in enumerate(vocabulary)}
    sides = [
        [[ids[piece] for piece in line.split()] for line in Path(corpus[f"train_{side}"]).read_text().splitlines()]
        for side in ("source", "target")
    ]
    mask = torch.zeros(len(ids) + 4, dtype=torch.bool)
    mask[[ref.EOS, ref.UNK, *(t for line in sides[1] for t in line)]] = True
    batch = ref.Batch(
        ref.pad([[*line, ref.EOS] for line in sides[0]]),
        ref.pad([[{"bos": ref.BOS, "eos": ref.EOS}[start], *line] for line in sides[1]]),
        ref.pad([[*line, ref.EOS] for line in sides[1]]),
    )
    return batch, mask


RESIDUALS = [entry["name"] for entry in nfrs.tables()["residuals"]]


@pytest.mark.parametrize(
    "norm,residual,smoothing,start",
    [(norm, residual, "fairseq", "bos") for norm in ("layernorm", "scalenorm") for residual in RESIDUALS]
    + [("layernorm", "prenorm", "twt", "eos"), ("scalenorm", "postnorm", "twt", "bos")],
)
def test_ten_losses_equal_the_oracles(tmp_path, corpus, norm, residual, smoothing, start):
    """One batch holds the whole corpus, so its order does not matter; seed 1 fixes the first weights."""
    model = {"norm": norm, "residual": residual, "decoder_start": start}
    fit(tmp_path / "run", corpus, model, {"smoothing": smoothing, "clip_norm": 0.5, "weight_decay": 0.01, "lr": 1e-3})
    batch, mask = whole_batch(tmp_path / "run", corpus, start)
    config = nfrs.TransformerConfig(**TINY, **model, vocab_size=len(mask))
    first = nfrs.Transformer(config, seed=1)
    state = {k: v.double() for k, v in first.named_parameters()} | dict(first.named_buffers())
    options = {
        k: v for k, v in {**TINY, **model, "vocab_size": len(mask)}.items() if k not in ("dropout", "decoder_start")
    }
    if residual == "admin":
        state |= ref.profile_admin(state, options, batch.source, batch.target_input, ref.Dropout())
    optimizer = ref.Adam(betas=(0.9, 0.98), weight_decay=0.01)
    for update, loss in losses(tmp_path / "run").items():
        if residual == "branchnorm":
            state |= {"encoder.t": torch.tensor([update]), "decoder.t": torch.tensor([update])}
        step = ref.train_step(
            state, options, [batch], optimizer, 1e-3, formula=smoothing, vocabulary_mask=mask, max_norm=0.5
        )
        # f32 against f64: the loss is about 3, a rounding of it 2e-7; the norm gathers a few dozen roundings
        assert abs(loss - step.loss) < 2e-6, f"update {update}: {loss} against {step.loss}"
        assert abs(events(tmp_path / "run", "updated")[update - 1]["grad_norm"] / step.grad_norm - 1) < 2e-5
        state = step.state


class TorchAdam:
    """torch.optim.Adam where the oracle's training step wants its own Adam."""

    def __init__(self, betas, eps):
        self.settings, self.adam = {"betas": betas, "eps": eps}, None

    def step(self, state, grads, lr):
        if self.adam is None:
            self.parameters = {name: state[name].detach().clone() for name in grads}
            self.adam = torch.optim.Adam(self.parameters.values(), lr=lr, **self.settings)
        for name, grad in grads.items():
            self.parameters[name].grad = grad
        self.adam.step()
        return {name: parameter.clone() for name, parameter in self.parameters.items()}


@pytest.mark.parametrize("form", ["torch", "fairseq"])
def test_adam_s_epsilon_stands_where_the_form_says(tmp_path, corpus, form):
    """Losses of ten updates; ε is so large that the other form's first rate is a seventh."""
    eps, betas = 1e-2, (0.9, 0.98)
    fit(tmp_path / "run", corpus, training={"adam_form": form, "adam_eps": eps, "lr": 1e-2})
    batch, mask = whole_batch(tmp_path / "run", corpus)
    options = {k: v for k, v in {**TINY, "vocab_size": len(mask)}.items() if k != "dropout"}

    def oracle(optimizer):
        first = nfrs.Transformer(nfrs.TransformerConfig(**TINY, vocab_size=len(mask)), seed=1)
        state = {k: v.double() for k, v in first.named_parameters()} | dict(first.named_buffers())
        for _ in range(10):
            step = ref.train_step(state, options, [batch], optimizer, 1e-2, vocabulary_mask=mask)
            yield step.loss
            state = step.state

    found = [*losses(tmp_path / "run").values()]
    of_torch, of_twin = oracle(TorchAdam(betas, eps)), oracle(ref.Adam(betas, eps, form="torch"))
    other = [*oracle(ref.Adam(betas, eps))]
    of_torch, of_twin = [*of_torch], [*of_twin]
    assert of_twin == pytest.approx(of_torch, rel=1e-12)
    expected, wrong = (of_torch, other) if form == "torch" else (other, of_torch)
    assert found == pytest.approx(expected, abs=2e-6)
    assert abs(found[-1] - wrong[-1]) > 1e-3


def test_accumulation_is_one_batch(tmp_path, corpus):
    fit(tmp_path / "one", corpus, training={"updates": 1})
    fit(tmp_path / "count", corpus, training={"updates": 1, "max_tokens": 150})
    batches = round(events(tmp_path / "count", "started")[0]["updates_per_epoch"])
    assert batches > 1
    fit(tmp_path / "many", corpus, training={"updates": 1, "max_tokens": 150, "accumulate": batches})
    one, many = (events(tmp_path / name, "updated")[0] for name in ("one", "many"))
    assert one["tokens"] == many["tokens"]
    # f32 sums in another order
    assert abs(one["loss"] / many["loss"] - 1) < 1e-6 and abs(one["grad_norm"] / many["grad_norm"] - 1) < 1e-5


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_the_same_seed_gives_the_same_bits(tmp_path, corpus, precision):
    training = {"max_tokens": 100, "precision": precision, "word_dropout": 0.1}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        fit(tmp_path / name, corpus, {"dropout": 0.3}, {**training, "seed": seed})
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "c")
    first, second = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(first[k], second[k]) for k in first)


STATISTICS = [{"norm": "batchnorm"}, {"norm": "powernorm-v"}] + [
    {"norm": "powernorm", "powernorm_mode": mode, "powernorm_warmup": 2, "residual": residual}
    for mode, residual in [("paper", "prenorm"), ("paper", "postnorm"), ("release", "prenorm")]
]


@pytest.mark.parametrize("model", [{"residual": name} for name in RESIDUALS] + STATISTICS, ids=str)
def test_activation_checkpointing_changes_no_bit(tmp_path, corpus, model):
    """Nor any statistic, though two micro-batches go forward and back between updates; layers do run twice."""
    calls = {}
    for name, recompute in (("plain", False), ("checkpointed", True)):
        training = {"updates": 2, "accumulate": 2, "max_tokens": 150, "activation_checkpointing": recompute}
        before = nfrs._core.operator_counts()["relu_dropout"]
        fit(tmp_path / name, corpus, {"dropout": 0.3, **model}, training)
        calls[name] = sum(nfrs._core.operator_counts()["relu_dropout"]) - sum(before)
    assert calls["checkpointed"] >= calls["plain"] + 2 * 2 * 4  # updates, micro-batches, layers
    assert losses(tmp_path / "plain") == losses(tmp_path / "checkpointed")
    plain, checkpointed = weights(tmp_path / "plain"), weights(tmp_path / "checkpointed")
    assert all(torch.equal(plain[k], checkpointed[k]) for k in plain)


def test_growth_is_in_the_checkpoint(tmp_path, corpus):
    model = {"residual": "branchnorm", "branchnorm_steps": 10}
    fit(tmp_path / "run", corpus, model, {"updates": 7})
    assert weights(tmp_path / "run")["decoder.t"].tolist() == [7]


@pytest.mark.parametrize("norm", ["layernorm", "batchnorm", "powernorm-v", "powernorm"])
@pytest.mark.parametrize("schedule", ["inverse-sqrt", "val-decay"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, corpus, schedule, norm):
    training = {"max_tokens": 100, "accumulate": 2, "schedule": schedule, "warmup": 4, "evaluate_every": 5}
    model = {"dropout": 0.3, "norm": norm} | ({"powernorm_warmup": 10} if norm == "powernorm" else {})
    fit(tmp_path / "whole", corpus, model, {**training, "updates": 20})
    fit(tmp_path / "parts", corpus, model, {**training, "updates": 7})
    fit(tmp_path / "parts", corpus, model, {**training, "updates": 20}, resume=True)
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert whole == parts
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture
def ctrl_c(monkeypatch):
    """Makes the next run be interrupted after an update."""
    from normformer_rs import training as module

    original = module._core.train

    def at(update):
        def interrupted(*arguments, **options):
            observer = arguments[-1]
            updated = observer.updated

            def stop(event):
                updated(event)
                if event["update"] == update:
                    monkeypatch.undo()
                    raise KeyboardInterrupt

            observer.updated = stop
            return original(*arguments, **options)

        monkeypatch.setattr(module._core, "train", interrupted)

    return at


@pytest.mark.parametrize("update", [4, 5, 12])
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

    class Stopping(nfrs.training._Observer):
        def updated(self, event):
            super().updated(event)
            if event["update"] == 2:
                signal.setitimer(signal.ITIMER_REAL, within)

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(nfrs.Interrupted, match=r"after update 2.*--resume"):
            patch.setattr(nfrs.training, "_Observer", Stopping)
            fit(tmp_path / "parts", data, model, training)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not events(tmp_path / "parts", "evaluated")
    fit(tmp_path / "parts", data, model, training, resume=True)
    for event, name in (("evaluated", "loss"), ("evaluated", "bleu"), ("updated", "loss")):
        whole, parts = ([(e["update"], e[name]) for e in events(tmp_path / run, event)] for run in ("whole", "parts"))
        assert parts == whole and whole[-1][0] == 4


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


def test_the_rate_decays_by_bleu(tmp_path, corpus):
    """Held-out text that training leads away from: its loss rises between evaluations, its BLEU stays zero."""
    lines = {"train": ["a b c"] * 40 + ["d d d d"], "valid": ["d d d d"] * 4}
    for name in corpus:
        (tmp_path / name).write_text("\n".join(lines[name[:5]]) + "\n")
    files = {name: str(tmp_path / name) for name in corpus}
    training = {"updates": 12, "evaluate_every": 1, "schedule": "no-warmup", "lr": 0.01, "label_smoothing": 0.0}
    fit(tmp_path / "run", files, training=training | {"criterion": "loss", "max_tokens": 100})
    evaluated = events(tmp_path / "run", "evaluated")
    assert all(e["bleu"] == 0 for e in evaluated)
    losses = [e["loss"] for e in evaluated]
    assert any(losses[i] > max(losses[i - 3 : i]) for i in range(3, 11)), "by the loss the rate would have decayed"
    assert {e["lr"] for e in events(tmp_path / "run", "updated")} == {0.01}
    # A language model has no BLEU: there the loss counts, which rises.
    text = {name: files[name] for name in ("train_target", "valid_target")}
    fit(tmp_path / "lm", text, {"architecture": "decoder-only"}, training | {"max_tokens": 100})
    assert min(e["lr"] for e in events(tmp_path / "lm", "updated")) < 0.01


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


def test_a_checkpoint_of_another_model_does_not_translate(tmp_path, corpus):
    for run, heads in (("one", 2), ("other", 4)):
        fit(tmp_path / run, corpus, {"heads": heads}, training={"updates": 2})
    with pytest.raises(ValueError, match=r"of another model than the run .*: heads was 2, now 4"):
        nfrs.translate(tmp_path / "one", ["1 2"], checkpoint=str(tmp_path / "other" / "checkpoints" / "last"))
    with pytest.raises(ValueError, match=r'no checkpoint "bst"; .* has update-00000001, .*last'):
        nfrs.translate(tmp_path / "one", ["1 2"], checkpoint="bst")


def test_a_run_has_its_own_modes(tmp_path, corpus):
    """Whatever gradients and autocast are around it."""
    fit(tmp_path / "plain", corpus, training={"updates": 3})
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        fit(tmp_path / "other", corpus, training={"updates": 3})
    assert losses(tmp_path / "plain") == losses(tmp_path / "other")


def test_training_leaves_torchs_generator_alone(tmp_path, corpus):
    state = torch.get_rng_state()
    fit(tmp_path / "run", corpus, training={"updates": 2})
    nfrs.Transformer.from_checkpoint(tmp_path / "run")
    nfrs.Transformer(nfrs.TransformerConfig(**TINY, vocab_size=9), seed=3)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_terminal_that_goes_ends_no_run(tmp_path, corpus, monkeypatch):
    class Gone:
        def isatty(self):
            return True

        def write(self, text):
            raise OSError(5, "Input/output error")

        def flush(self):
            raise OSError(5, "Input/output error")

    from normformer_rs import cli, progress

    cli._log_to_stderr()
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr("normformer_rs.training.choose", lambda wanted: progress.Lines())
    monkeypatch.setattr(sys, "stderr", Gone())
    model, training = nfrs.TransformerConfig(**TINY), nfrs.TrainingConfig(updates=2, max_tokens=10000)
    trainer = nfrs.Trainer(model, training, nfrs.DataConfig(**corpus, no_bpe=True))
    history = trainer.fit(tmp_path / "run", progress=True, tensorboard=False, curves=False)
    assert list(history.update) == [1, 2]


def test_wrong_lines_are_said(tmp_path, corpus):
    fit(tmp_path / "run", corpus, training={"updates": 2})
    for lines, message in (("1 2", "got one text"), ([b"1"], "item 0 is b'1'"), (["1", 2], "item 1 is 2")):
        with pytest.raises(nfrs.InputError, match=message):
            nfrs.translate(tmp_path / "run", lines)
    assert nfrs.translate(tmp_path / "run", ["1 2"], checkpoint=2) == nfrs.translate(tmp_path / "run", ["1 2"])
    with pytest.raises(nfrs.InputError, match="the model has an encoder: it is evaluated with source text"):
        nfrs.evaluate_loss(tmp_path / "run", None, corpus["valid_target"])


@pytest.mark.parametrize("work", ["translate", "evaluate_loss"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])
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


def test_errors_travel_between_processes():
    for kind in (nfrs.InputError, nfrs.DivergedError, nfrs.Interrupted):
        error = pickle.loads(pickle.dumps(kind("what went wrong")))
        assert type(error) is kind and str(error) == "what went wrong"


def test_a_line_that_was_cut_short_stays_a_line(tmp_path, corpus):
    fit(tmp_path / "run", corpus, training={"updates": 2})
    with (tmp_path / "run" / "log.jsonl").open("a") as log:
        log.write('{"event":"upda')
    history = fit(tmp_path / "run", corpus, training={"updates": 4}, resume=True)
    assert list(history.update) == [1, 2, 3, 4]


def test_it_learns_translates_and_averages(tmp_path, corpus):
    training = {"updates": 150, "evaluate_every": 50, "max_tokens": 400, "lr": 5e-3}
    history = fit(tmp_path / "run", corpus, {"d_model": 32, "d_ff": 64, "norm": "scalenorm", "fixnorm": True}, training)
    assert history.loss[-1] < 0.7 * history.loss[0] and len(history.loss) == 150
    path = nfrs.average(tmp_path / "run", last=3)
    assert Path(path).name == "average"
    lines = Path(corpus["train_source"]).read_text().splitlines()
    for checkpoint in ("best", "last", "average"):
        found = nfrs.translate(tmp_path / "run", lines, checkpoint=checkpoint)
        assert len(found) == len(lines)
    newest = [
        weights(tmp_path / "run", p.name) for p in sorted((tmp_path / "run" / "checkpoints").glob("update-*"))[-3:]
    ]
    for name, tensor in weights(tmp_path / "run", "average").items():
        mean = sum(w[name].double() for w in newest) / 3
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("segment_length", [2, 64])
def test_unigrams_of_a_language_model(tmp_path, corpus, segment_length):
    """Each token counts once, however the stream is cut."""
    files = {name: path for name, path in corpus.items() if name.endswith("target")} | {
        "segment_length": segment_length
    }
    fit(tmp_path / "run", files, {"architecture": "decoder-only"}, {"updates": 1})
    lines = Path(corpus["train_target"]).read_text().splitlines()
    tokens = [token for line in lines for token in [*line.split(), "</s>"]]
    shares = torch.tensor([tokens.count(token) / len(tokens) for token in {*tokens}], dtype=torch.float64)
    (started,) = events(tmp_path / "run", "started")
    assert started["unigram_entropy"] == pytest.approx(-(shares * shares.log()).sum().item(), rel=1e-12)


def test_a_language_model(tmp_path, corpus):
    data = {k: v for k, v in corpus.items() if k.endswith("target")}
    model = {"architecture": "decoder-only", "norm": "rmsnorm"}
    history = fit(tmp_path / "run", {**data, "segment_length": 8}, model, {"updates": 30, "max_tokens": 200})
    assert history.loss[-1] < history.loss[0]
    assert events(tmp_path / "run", "evaluated")[-1]["bleu"] is None


def test_a_tensorized_language_model(tmp_path, corpus):
    data = {k: v for k, v in corpus.items() if k.endswith("target")}
    model = {"architecture": "decoder-only", "attention": "tensorized", "tensorized_segment": 8, "tensorized_rank": 5}
    model["positions"] = "fairseq"
    with pytest.raises(ValueError, match=r"64 tokens in a row, .*at most tensorized_segment = 8: cut the text shorter"):
        fit(tmp_path / "run", data, model, {"updates": 30})
    data["segment_length"] = 8
    training = {"updates": 30, "max_tokens": 200, "evaluate_every": 10}
    history = fit(tmp_path / "run", data, model, training)
    assert history.loss[-1] < history.loss[0]
    fit(tmp_path / "again", data, model, training | {"activation_checkpointing": True})
    assert losses(tmp_path / "again") == pytest.approx(losses(tmp_path / "run"), rel=1e-5)
    with pytest.raises(nfrs.InputError, match="its attention is tensorized"):
        to_fairseq(tmp_path / "run", tmp_path / "run.pt")


def bad(change):
    def apply(corpus, tmp_path):
        corpus.update(change(corpus, tmp_path))
        return corpus

    return apply


def write(path, data):
    path.write_bytes(data)
    return str(path)


BAD_FILES = {
    "missing": (lambda c, t: {"train_source": str(t / "nothing")}, "nothing"),
    "empty": (lambda c, t: {"train_source": write(t / "empty", b"")}, "empty"),
    "lengths": (lambda c, t: {"train_source": write(t / "short", b"1 2\n3\n")}, "2 .*41|41 .*2"),
    "utf8": (lambda c, t: {"valid_target": write(t / "bad", b"a b\n\xff\n" + b"a\n" * 6)}, "line 2"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_said_and_nothing_is_written(tmp_path, corpus, case):
    change, message = BAD_FILES[case]
    with pytest.raises((ValueError, OSError), match=message):
        fit(tmp_path / "run", {**corpus, **change(corpus, tmp_path)})
    assert not (tmp_path / "run").exists()


def test_what_cannot_run_destroys_nothing(tmp_path, corpus):
    """The width of a norm is known only when the model is built."""
    impossible = {"norm": "batchnorm", "groupscaling": 3}
    with pytest.raises(ValueError, match="3 groups"):
        fit(tmp_path / "new", corpus, impossible)
    assert not (tmp_path / "new").exists()
    fit(tmp_path / "run", corpus, training={"updates": 2})
    before = weights(tmp_path / "run")
    with pytest.raises(ValueError, match="3 groups"):
        fit(tmp_path / "run", corpus, impossible, overwrite=True)
    assert all(torch.equal(v, before[k]) for k, v in weights(tmp_path / "run").items())


def test_somebody_elses_files_are_not_written_over(tmp_path, corpus):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "bpe.codes").write_text("#version: 0.2\n1 2</w>\n")
    with pytest.raises(ValueError, match=r"holds bpe\.codes, which a run would write over"):
        fit(tmp_path / "data", corpus)
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["bpe.codes"]
    config, checkpoint = tmp_path / "theirs" / "config.json", tmp_path / "theirs" / "checkpoints" / "checkpoint_best.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text("fairseq's")
    config.write_text("{}")
    with pytest.raises(ValueError, match="was not written by a run"):
        fit(tmp_path / "theirs", corpus, overwrite=True)
    config.unlink()
    for _ in range(2):
        fit(tmp_path / "theirs", corpus, training={"updates": 2}, overwrite=True)
    assert checkpoint.read_text() == "fairseq's"


def test_long_sentences_are_refused_or_skipped(tmp_path, corpus):
    with pytest.raises(ValueError, match="skip-long"):
        fit(tmp_path / "run", corpus, training={"max_tokens": 8})
    assert not (tmp_path / "run").exists()
    valid = {k: str(tmp_path / f"short.{k}") for k in ("valid_source", "valid_target")}
    for path in valid.values():
        Path(path).write_text("1 2\n")
    fit(tmp_path / "run", {**corpus, **valid, "skip_long": True}, training={"max_tokens": 8, "updates": 2})
    assert "left out 1 of 41 sentences" in events(tmp_path / "run", "message")[0]["text"]
    for path in valid.values():
        Path(path).write_text("1 2\n" + "1 " * 12 + "\n")
    with pytest.raises(ValueError, match="held-out text: 1 of 2 sentences"):
        fit(tmp_path / "long", {**corpus, **valid}, training={"max_tokens": 11})
    fit(tmp_path / "long", {**corpus, **valid, "skip_long": True}, training={"max_tokens": 11, "updates": 2})
    assert nfrs.evaluate_loss(tmp_path / "long", valid["valid_source"], valid["valid_target"]).tokens == 16


def test_a_folder_with_a_run_is_not_overwritten(tmp_path, corpus):
    fit(tmp_path / "run", corpus, training={"updates": 2})
    before = weights(tmp_path / "run")
    with pytest.raises(ValueError, match="--resume continues it, --overwrite starts anew"):
        fit(tmp_path / "run", corpus)
    assert all(torch.equal(v, before[k]) for k, v in weights(tmp_path / "run").items())
    with pytest.raises(ValueError, match="d_model was 16, now 32"):
        fit(tmp_path / "run", corpus, {"d_model": 32}, resume=True)
    with pytest.raises(ValueError, match="no run to resume"):
        fit(tmp_path / "other", corpus, resume=True)
    fit(tmp_path / "run", corpus, training={"updates": 3}, overwrite=True)
    assert list(losses(tmp_path / "run")) == [1, 2, 3]


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, corpus):
    training = {"updates": 50, "lr": 1e30, "evaluate_every": 1}
    with pytest.raises(nfrs.DivergedError, match=r"after update \d+ is (NaN|inf).*(untouched|no checkpoint)"):
        fit(tmp_path / "run", corpus, training=training)


def test_damaged_checkpoints_are_said(tmp_path, corpus):
    fit(tmp_path / "run", corpus, training={"updates": 2})
    with pytest.raises(ValueError, match="holds no model"):
        nfrs.translate(tmp_path, ["1 2"])
    with pytest.raises(ValueError, match="no checkpoint"):
        nfrs.translate(tmp_path / "run", ["1 2"], checkpoint="update-7")
    weights_file = tmp_path / "run" / "checkpoints" / "last" / "model.safetensors"
    whole = weights_file.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    forged = json.loads(whole[8 : 8 + header])
    name = next(name for name in forged if name != "__metadata__")
    forged[name] |= {"shape": [2**40, 2**20], "data_offsets": [0, 2**62]}
    text = json.dumps(forged).encode()
    for damaged in (
        whole[: len(whole) // 2],
        (2**63).to_bytes(8, "little") + whole[8:],
        len(text).to_bytes(8, "little") + text + whole[8 + header :],
    ):
        weights_file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            nfrs.translate(tmp_path / "run", ["1 2"], checkpoint="last")


@pytest.mark.data
def test_real_text_trains_and_translates(tmp_path, corpora):
    """A short version of the long runs: 40 updates on Multi30k beat the unigram model."""
    folder = corpora / "multi30k-bpe-en-de"
    data = {
        f"{part}_{side}": str(folder / f"{part}.{ext}.gz")
        for part in ("train", "valid")
        for side, ext in (("source", "en"), ("target", "de"))
    }
    trainer = nfrs.Trainer(
        nfrs.TransformerConfig(d_model=64, d_ff=128, heads=4, encoder_layers=2, decoder_layers=2, dropout=0.1),
        nfrs.TrainingConfig(updates=40, max_tokens=2048, lr=5e-3, warmup=40, evaluate_every=40),
        nfrs.DataConfig(**data, no_bpe=True),
    )
    history = trainer.fit(tmp_path / "run", progress=False)
    entropy = events(tmp_path / "run", "started")[0]["unigram_entropy"]
    assert history.nll[-1] < 0.95 * entropy
    assert events(tmp_path / "run", "evaluated")[-1]["bleu"] is not None


def test_a_killed_run_resumes_to_the_same_bits():
    """The short version of `make kill-test`: six random kills, two processes at once, every ninth act of writing."""
    script = Path(__file__).with_name("kill_test.py")
    subprocess.run([sys.executable, script, "--kills", "6", "--stride", "9"], check=True, timeout=600)
