"""Looking at runs: pictures, tables in notebooks, callbacks."""

import dataclasses
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import normformer_rs as nfrs
from normformer_rs import _html, cli, demo
from normformer_rs.loop import history
from normformer_rs.pictures import curves, drawing


def written(folder: Path, updates=40, bleu=True, evaluations=True, scale=1.0) -> Path:
    """A run's folder with a log, as the loop writes it."""
    folder.mkdir(parents=True)
    events = [{"event": "started", "update": 0, "parameters": 10}]
    for u in range(1, updates + 1):
        values = {"loss": scale * 9 / u, "nll": scale * 8 / u, "lr": scale * u * 1e-4, "grad_norm": scale + 1 / u}
        events.append(
            {"event": "updated", "update": u, "epoch": 1, "tokens_per_second": 9.0, "seconds": u / 4, **values}
        )
        if evaluations and u % 10 == 0:
            values = {"loss": scale * 9.5 / u, "nll": scale * 9 / u, "perplexity": float(np.exp(scale * 9 / u))}
            values |= {"bleu": float(u) if bleu else None, "best": True, "seconds": 0.1}
            events.append({"event": "evaluated", "update": u, "epoch": 1, **values})
    (folder / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


UPDATED = {"event": "updated", "update": 21, "epoch": 1, "loss": 1.0, "nll": 1.0, "lr": 0.1, "grad_norm": 1.0}
DAMAGES = {
    "half a line": b'{"event": "updated", "upd',
    "invalid UTF-8": b'{"event": "updated", "update": 21, "note": "\xff"}',
    "binary": bytes(range(1, 10)) + bytes(range(128, 256)),
    "zeros, as a crash leaves them": bytes(4096),
    "a blank line": b"",
    "white space": b" \t ",
    "no object": b"[1, 2]",
    "a number": b"17",
    "null": b"null",
    "no event": b'{"update": 21}',
    "an event that is no word": b'{"event": 3, "update": 21}',
    "no update": json.dumps({**UPDATED, "update": None}).encode(),
    "no update of an evaluation": b'{"event": "evaluated", "epoch": 1}',
    "a negative update": json.dumps({**UPDATED, "update": -1}).encode(),
    "a fractional update": json.dumps({**UPDATED, "update": 2.5}).encode(),
    "an update of 64 bits": json.dumps({**UPDATED, "update": 2**63}).encode(),
    "a long number": b'{"event": "updated", "update": ' + b"9" * 5000 + b"}",
    "a huge integer": json.dumps({**UPDATED, "loss": 10**400}).encode(),
    "infinity": json.dumps({**UPDATED, "loss": float("inf")}).encode(),
    "NaN": json.dumps({**UPDATED, "loss": float("nan")}).encode(),
    "1e999": json.dumps({**UPDATED, "loss": 0}).replace(": 0,", ": 1e999,").encode(),
    "text for a number": json.dumps({**UPDATED, "lr": "0.1"}).encode(),
    "true for a number": json.dumps({**UPDATED, "grad_norm": True}).encode(),
    "a list for a number": json.dumps({**UPDATED, "seconds": [1]}).encode(),
    "a word for best": b'{"event": "evaluated", "update": 20, "epoch": 1, "best": "yes"}',
    "layers that are none": json.dumps({**UPDATED, "layers": 3}).encode(),
    "layers without numbers": json.dumps({**UPDATED, "layers": {"gradients": {"a": "b"}}}).encode(),
    "a layer's list": json.dumps({**UPDATED, "layers": {"gains": [1]}}).encode(),
    "statistics that are a list": json.dumps({**UPDATED, "statistics": [1, 2]}).encode(),
    "statistics that are text": json.dumps({**UPDATED, "statistics": {"size/decoder.0": "1"}}).encode(),
    "statistics of statistics": json.dumps({**UPDATED, "statistics": {"size": {"decoder.0": 1.0}}}).encode(),
    "a start with an entropy of text": b'{"event": "started", "update": 0, "unigram_entropy": "2.7"}',
    "a line of many MiB": json.dumps({**UPDATED, "note": "x" * (4 << 20)}).encode(),
    "a lone surrogate": json.dumps({**UPDATED, "layers": {"gains": {"\ud800": 1.0}}}).encode(),
    "deep": b'{"event": "updated", "update": 21, "x": ' + b"[" * 100_000,
    "a start that is none": b'{"event": "started", "update": "last"}',
    "two lines in one": json.dumps(UPDATED).encode() * 2,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_line_is_left_out(tmp_path, caplog, damage):
    run = written(tmp_path / "run")
    whole = nfrs.History.read(run)
    lines = (run / "log.jsonl").read_bytes().removesuffix(b"\n").split(b"\n")
    for at in (5, 21):
        lines.insert(at - 1, DAMAGES[damage])
    (run / "log.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    found = nfrs.History.read(run)
    for part, expected in ((found, whole), (found.evaluations, whole.evaluations)):
        for name, values in vars(expected).items():
            if isinstance(values, np.ndarray):
                np.testing.assert_array_equal(getattr(part, name), values, name)
    (warning,) = caplog.messages
    assert f"2 of {len(lines)} lines are damaged or incomplete, and left out; the first is line 5" in warning


def test_a_damaged_log_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run = written(tmp_path / "run")
    with (run / "log.jsonl").open("ab") as log:
        log.write(b"\n".join(DAMAGES.values()))
    assert cli.main(["plot", str(run)]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [str(run / "curves.png")]
    assert captured.err.count("\n") == 1 and captured.err.startswith("warning: ") and "first is line 46" in captured.err


def test_every_line_may_be_damaged(tmp_path, caplog):
    run = written(tmp_path / "run", updates=0)
    (run / "log.jsonl").write_bytes(b"\n".join(DAMAGES.values()))
    history = nfrs.History.read(run)
    assert len(history.update) == 0 and history.best is None and history.parameters == 0
    assert len(caplog.messages) == 1
    with pytest.raises(nfrs.InputError, match="has made no update yet"):
        history.plot()


def test_a_whole_log_is_no_damage(tmp_path, caplog):
    run = written(tmp_path / "run")
    with (run / "log.jsonl").open("a") as log:
        log.write('{"event": "message", "level": "info", "text": "\\u00e4 \\ud83d\\ude00"}\n')  # a pair is a letter
    assert len(nfrs.History.read(run).update) == 40 and caplog.messages == []
    (run / "log.jsonl").write_text("")
    assert len(nfrs.History.read(run).update) == 0 and caplog.messages == []


def test_layers_may_have_any_names(tmp_path):
    names = ["a10", "a2", "a²", "9" * 5000, "", "a02b"]
    event = {**UPDATED, "layers": {"gains": dict.fromkeys(names, 1.0)}, "statistics": {"b": None}}
    (tmp_path / "log.jsonl").write_text(json.dumps(event) + "\n")
    layers = nfrs.History.read(tmp_path).layers
    assert sorted(layers) == sorted(["b", *(f"gain/{name}" for name in names)])
    order = list(layers)
    assert order.index("gain/a2") < order.index("gain/a02b") < order.index("gain/a10")


def test_layers_of_a_forged_log_take_no_more_than_they_hold(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(history, "_CELLS", 1000)
    events = [{**UPDATED, "update": u, "statistics": {f"layer {u}": 1.0, "same": 1.0}} for u in range(1, 201)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    found = nfrs.History.read(tmp_path)  # 201 names of 200 updates, and 400 numbers
    assert len(found.update) == 200 and found.layers == {}
    assert caplog.messages == ["201 names of layers are too many for 200 updates: no layers are read"]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events[:100]))
    assert len(nfrs.History.read(tmp_path).layers) == 101


def test_cut_anywhere_a_log_is_read(tmp_path, caplog):
    run = written(tmp_path / "run", updates=3)
    whole = (run / "log.jsonl").read_bytes()
    for length in range(len(whole)):
        (run / "log.jsonl").write_bytes(whole[:length])
        assert len(nfrs.History.read(run).update) <= 3
    generator = np.random.default_rng(1)
    for _ in range(300):  # and with any byte changed
        damaged = bytearray(whole)
        damaged[generator.integers(len(whole))] = generator.integers(256)
        (run / "log.jsonl").write_bytes(damaged)
        assert len(nfrs.History.read(run).update) <= 3


def test_a_log_that_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(nfrs.InputError, match=r"log\.jsonl: .*expected a regular file"):
        nfrs.History.read(tmp_path)
    with pytest.raises(nfrs.InputError, match=r"no log\.jsonl there"):
        nfrs.plot(tmp_path)


def test_names_are_drawn_as_they_are(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.text import Text

    name, shown = "a$_$b\\$^\udc80", "a$_$b\\$^\\udc80"
    runs = [nfrs.History.read(written(tmp_path / part, updates=2)) for part in ("1", "2")]
    figures = [curves._figure(runs[:1], [name]), curves._figure(runs, [name, "other"])]
    for draw in (drawing.gradient_norms, lambda found, title: drawing.lines(found, title, name, name)):
        series = {(name,): [1.0, 200.0]}
        figures.append(draw({"raw": series} if draw is drawing.gradient_norms else {(name,): ([1, 2], [3, 4])}, name))
    for figure in figures:
        texts = [text for text in curves.literal(figure).findobj(Text) if shown in text.get_text()]
        assert texts and not any(text.get_parse_math() for text in texts)
    drawing.save(figures[-1], tmp_path / "figure.svg")


def test_marks_of_axes_that_are_names_are_drawn_as_they_are(tmp_path):
    pytest.importorskip("matplotlib")
    figure = drawing.new_figure(3, 3)
    axis = figure.subplots()
    axis.plot([1, 2], [1, 1000])
    axis.set_yscale("log")
    axis.set_xticks([1, 2], ["a$_$b", "$^$"])
    axis.legend(["$_$"])
    drawing.save(figure, tmp_path / "figure.png")
    assert [label.get_parse_math() for label in axis.get_xticklabels()] == [False, False]
    assert all(label.get_parse_math() for label in axis.get_yticklabels()), "powers of ten are formulas"


NUMBERS = ("loss", "nll", "lr", "grad_norm", "tokens_per_second", "perplexity", "bleu", "seconds")


@pytest.mark.parametrize("value", [None, 0.0, -1.0, 3e38])
@pytest.mark.parametrize("names", [NUMBERS, ("lr", "grad_norm", "bleu")], ids=["all", "some"])
@pytest.mark.one_in(test=8, all=7)
def test_odd_numbers_are_drawn(tmp_path, value, names):
    run = written(tmp_path / "run")
    events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    events = [{name: value if name in names else old for name, old in event.items()} for event in events]
    (run / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    pytest.importorskip("matplotlib")
    history = nfrs.History.read(run)
    assert history.plot().stat().st_size > 1000


def panels(*runs, names=None):
    """The titles of the picture's panels, and the words in each."""
    figure = curves._figure([nfrs.History.read(run) for run in runs], names or [run.name for run in runs])
    return {axis.get_title(loc="left"): [text.get_text() for text in axis.texts] for axis in figure.axes}


def test_a_language_models_curves_have_no_empty_panel(tmp_path):
    titles = list(panels(written(tmp_path / "a", bleu=False)))
    assert titles == ["loss", "validation perplexity", "gradient norm", "learning rate"]
    titles = list(panels(written(tmp_path / "b", evaluations=False)))
    assert titles == ["loss", "gradient norm", "learning rate"]
    assert "validation BLEU" in panels(written(tmp_path / "c"))


def test_runs_are_overlaid_and_named_at_their_ends(tmp_path):
    runs = [written(tmp_path / name, scale=scale) for name, scale in (("a", 1.0), ("b", 1.001), ("c", 2.0))]
    found = panels(*runs)
    assert len(found) == 4
    for title, words in found.items():
        assert sorted(words) == ["a", "b", "c"], title
    figure = curves._figure([nfrs.History.read(run) for run in runs], ["a", "b", "c"])
    heights = sorted(text.xyann[1] for text in figure.axes[0].texts)
    assert min(np.diff(heights)) > 0.06  # a and b lie on each other, their names do not
    colours = {text.get_text(): text.get_color() for axis in figure.axes for text in axis.texts}
    lines = {line.get_color() for axis in figure.axes for line in axis.lines}
    assert set(colours.values()) == lines and len(lines) == 3


def test_more_runs_than_colours_are_all_drawn(tmp_path):
    run = nfrs.History.read(written(tmp_path / "run"))
    names = [f"run {i}" for i in range(len(curves.COLOURS) + 2)]
    runs = [dataclasses.replace(run, grad_norm=run.grad_norm * (1 + i)) for i in range(len(names))]
    loss, *_ = curves._figure(runs, names).axes
    assert len(loss.lines) == 2 * len(names)


def test_lines_that_are_the_same_have_one_name(tmp_path):
    found = panels(*(written(tmp_path / name) for name in "ab"))
    assert found["learning rate"] == ["all"] and sorted(found["validation BLEU"]) == ["a", "b"]
    found = panels(tmp_path / "a", tmp_path / "b", written(tmp_path / "c", scale=2.0))
    assert sorted(found["learning rate"]) == ["2 runs", "c"]


def test_names_lie_apart_and_near_their_lines():
    assert curves.spread([0.1, 0.5, 0.9]) == [0.1, 0.5, 0.9]
    found = curves.spread([0.5, 0.5, 0.5, 0.52], gap=0.1)
    assert np.allclose(np.diff(found), 0.1) and abs(np.mean(found) - 0.505) < 1e-9


def test_smoothed_lines_keep_length_and_level():
    values = np.linspace(5.0, 1.0, 400)
    assert len(curves._smooth(values)) == 400
    assert np.allclose(curves._smooth(np.full(400, 3.0)), 3.0) and list(curves._smooth(values[:5])) == list(values[:5])


def test_runs_of_one_name_are_told_apart():
    assert curves.told_apart([Path("a/run"), Path("b/run"), Path("c")]) == ["a/run", "b/run", "c"]
    assert curves.told_apart([Path("x/a"), Path("x/b")]) == ["a", "b"]
    assert curves.told_apart([Path("x/a"), Path("x/a")]) == ["x/a", "x/a"]


@pytest.mark.full
def test_the_command_draws(tmp_path, capsys, monkeypatch):
    runs = [str(written(tmp_path / name)) for name in "ab"]
    assert cli.main(["plot", runs[0]]) == 0
    assert (tmp_path / "a" / "curves.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plot", *runs, "--names", "one", "two"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "curves.png" and (tmp_path / "curves.png").exists()
    assert cli.main(["plot", *runs, "--output", "both.svg"]) == 0
    assert "<svg" in (tmp_path / "both.svg").read_text()


@pytest.mark.parametrize(
    "words, message",
    [
        (["none"], "none: no log.jsonl there; expected the --output folder of a run"),
        (["a", "--names", "x", "y"], "a name for each of the 1 runs; got 2 names"),
        (["a"] * 21, "plot takes 1 to 20 runs; got 21"),
        (["empty"], "empty: this run has made no update yet"),
    ],
)
def test_what_cannot_be_drawn_is_said(tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "a")
    written(tmp_path / "empty", updates=0)
    assert cli.main(["plot", *words]) == 2
    assert message in capsys.readouterr().err


def test_python_draws_histories_and_folders(tmp_path):
    runs = [written(tmp_path / name) for name in "ab"]
    path = nfrs.plot(nfrs.History.read(runs[0]), runs[1], path=tmp_path / "both.png", names=["x", "y"])
    assert path == tmp_path / "both.png" and path.stat().st_size > 1000


def test_a_history_in_a_notebook(tmp_path, monkeypatch):
    history = nfrs.History.read(written(tmp_path / "run"))
    shown = history._repr_html_()
    assert "<th" in shown and "perplexity" in shown and "data:image/png;base64," in shown
    assert shown.count("<tr>") == 1 + len(history.evaluations.update)
    monkeypatch.setattr("normformer_rs.loop.history.available", lambda name: False)
    assert "<img" not in history._repr_html_()


def test_swaps_and_tables_in_a_notebook():
    import torch

    model = torch.nn.TransformerEncoderLayer(8, 2, 16)
    swaps = nfrs.swap_norms(model, "scalenorm", filter=lambda name, norm: name == "norm1")
    shown = swaps._repr_html_()
    assert shown.count("<tr>") == 1 + len(swaps) and "ScaleNorm" in shown and "<b>swap_norms to scalenorm" in shown
    tables = nfrs.tables()
    assert isinstance(tables, dict) and tables["norms"][0]["name"] == "layernorm"
    assert "x⁺ = x + F(N(x))" in tables._repr_html_() and "Ba et al. 2016" in tables["norms"]._repr_html_()
    assert _html.table(["a"], [["<script>"]]).count("&lt;script&gt;") == 1


def test_a_history_as_a_data_frame(tmp_path):
    pytest.importorskip("pandas")
    frame = nfrs.History.read(written(tmp_path / "run")).to_pandas()
    assert list(frame.index) == list(range(1, 41)) and frame.index.name == "update"
    assert frame.loc[10, "valid_bleu"] == 10 and np.isnan(frame.loc[11, "valid_bleu"])
    assert frame["loss"].iloc[0] == 9.0 and {"lr", "grad_norm", "valid_perplexity"} <= set(frame.columns)


def test_a_data_frame_needs_pandas(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    history = nfrs.History.read(written(tmp_path / "run"))
    with pytest.raises(ImportError, match=r'History\.to_pandas needs pandas: pip install "pandas>=2\.2"'):
        history.to_pandas()


@pytest.fixture
def trainer(tmp_path):
    """Four updates on number words, evaluated twice."""
    pytest.importorskip("num2words")
    data = demo.write_corpus(tmp_path / "text", demo.Corpus(*(part[:60] for part in demo.corpus())))
    model, training = demo.configs(4)
    model = model.replace(d_model=16, d_ff=16, heads=2, encoder_layers=1, decoder_layers=1)
    return nfrs.Trainer(model, training.replace(evaluate_every=2, criterion="loss", max_tokens=400), data)


def test_callbacks_hear_what_the_log_has(trainer, tmp_path):
    heard = []
    trainer.fit(tmp_path / "run", progress=False, curves=False, callbacks=[lambda *event: heard.append(event)])
    logged = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    logged = [event for event in logged if event["event"] in ("started", "updated", "evaluated")]
    assert [name for name, _ in heard] == [event["event"] for event in logged]
    assert [name for name, _ in heard].count("updated") == 4 and [name for name, _ in heard].count("evaluated") >= 2
    for (_, values), event in zip(heard, logged):
        assert values.items() <= event.items()


def test_a_damaged_log_ends_no_training(trainer, tmp_path, caplog):
    trainer.fit(tmp_path / "run", progress=False, curves=False)
    with (tmp_path / "run" / "log.jsonl").open("ab") as log:
        log.write(b"\n".join(DAMAGES[name] for name in ("invalid UTF-8", "no update", "no object")) + b"\n")
    trainer.training = trainer.training.replace(updates=6)
    caplog.clear()
    history = trainer.fit(tmp_path / "run", progress=False, curves=False, resume=True)
    assert list(history.update) == [1, 2, 3, 4, 5, 6]
    (warning,) = [message for message in caplog.messages if "damaged" in message]
    assert warning.split(": ", 1)[1].startswith("3 of ")


def test_what_a_callback_raises_comes_back(trainer, tmp_path):
    class Mine(Exception):
        pass

    def stop(event, values):
        if event == "updated" and values["update"] == 2:
            raise Mine("enough")

    with pytest.raises(Mine, match="enough"):
        trainer.fit(tmp_path / "run", progress=False, curves=False, callbacks=[stop])
    history = trainer.fit(tmp_path / "run", progress=False, curves=False, overwrite=True)
    assert len(history.update) == 4


def test_the_callback_of_the_documentation(trainer, tmp_path, monkeypatch):
    """docs/train.md's, for Weights & Biases, hears a run."""
    text = (Path(__file__).parents[2] / "docs" / "train.md").read_text()
    (block,) = [block for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "def to_" in block]
    logged = []
    wandb = ModuleType("wandb")
    wandb.init, wandb.log = (lambda **options: logged.append(options)), logged.append
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    names = {}
    exec(block, names)
    trainer.fit(tmp_path / "run", progress=False, curves=False, tensorboard=False, callbacks=[names["to_wandb"]])
    assert logged[0]["project"] == "normformer" and logged[0]["config"]["parameters"] > 0
    assert {name for values in logged[1:] for name in values} >= {"evaluated/perplexity", "updated/loss", "updated/lr"}
