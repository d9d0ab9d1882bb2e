"""`normformer_rs.figures`: series of runs are those of `analysis` and of the log, and every picture is drawn."""

import json

import numpy as np
import pytest
import torch

import normformer_rs as nfrs
from normformer_rs import analysis, figures
from normformer_rs.analysis import observations

SMALL = {"d_model": 16, "d_ff": 32, "heads": 2, "encoder_layers": 2, "decoder_layers": 3}
STEPS = {"warmup": 2, "max_tokens": 300, "updates": 6, "evaluate_every": 3, "keep": 2, "log_statistics": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """An encoder-decoder with scalenorm, one with powernorm and fewer layers, and a language model."""
    folder = tmp_path_factory.mktemp("runs")
    lines = {
        "source": [f"one {i} two {i % 7}" for i in range(40)],
        "target": [f"eins {i % 5} zwei drei" for i in range(40)],
    }
    for side, text in lines.items():
        (folder / side).write_text("\n".join(text) + "\n")
    data = {f"{part}_{side}": str(folder / side) for part in ("train", "valid") for side in ("source", "target")}

    def train(name, model, data, **training):
        shape = {"vocab_size": 60, **SMALL, **model}
        trainer = nfrs.Trainer(
            nfrs.TransformerConfig(**shape),
            nfrs.TrainingConfig(**STEPS, **training),
            nfrs.DataConfig(**data, bpe_operations=20),
        )
        trainer.fit(folder / name, progress=False, curves=False, tensorboard=False)
        return folder / name

    of_words = {name: path for name, path in data.items() if name.endswith("target")}
    return {
        "scalenorm": train("scalenorm", {"norm": "scalenorm"}, data, criterion="bleu"),
        "powernorm": train(
            "powernorm", {"norm": "powernorm", "encoder_layers": 1, "decoder_layers": 1}, data, criterion="bleu"
        ),
        "language": train("language", {"architecture": "decoder-only", "norm": "scalenorm"}, of_words),
    }


def test_gains_are_the_models(runs):
    for name, places in (("scalenorm", 6), ("language", 3)):
        found = observations.gains(runs[name], "last")
        assert len(found) == places
        learned = sorted(gain.g for gain in analysis.gains(nfrs.Transformer.from_checkpoint(runs[name], "last")))
        shown = sorted(g for series in found.values() for g in series)
        assert len(shown) >= 7 and all(np.isclose(learned, g, rtol=1e-4).any() for g in shown)
    found = observations.gains(runs["scalenorm"], "last")
    assert [len(found[f"gain-{place}"]) for place in ("encoder-attention", "decoder-encoder", "final")] == [2, 3, 1]
    with pytest.raises(nfrs.InputError, match='norm = "powernorm" learns no g'):
        observations.gains(runs["powernorm"], "last")


def test_singular_values_of_the_words(runs):
    model = nfrs.Transformer.from_checkpoint(runs["scalenorm"], "last")
    values = torch.linalg.svdvals(model.state_dict()["embedding.weight"].double())
    found = observations.singular_values(runs["scalenorm"], "last")["singular"]
    np.testing.assert_allclose(found, (values / values[0]).numpy(), rtol=1e-4)


def test_logged_series_are_the_logs(runs):
    history = nfrs.History.read(runs["powernorm"])
    found = observations.statistics(history)
    assert found["logged"] == [2.0, 4.0, 6.0]
    assert {"distance-power", "gradient-power"} <= found.keys()
    logged = history.layers["batch_distance/encoder.0.power"]
    np.testing.assert_allclose(found["distance-power"], logged[~np.isnan(logged)], rtol=1e-4)
    assert observations.statistics(nfrs.History.read(runs["scalenorm"])) == {}
    assert len(observations.changes(history)["change"]) == 3


def test_layers_are_those_of_held_out_text(runs):
    data = json.loads((runs["scalenorm"] / "config.json").read_text())["data"]
    found = observations.layers(runs["scalenorm"], "last", data["valid_source"], data["valid_target"])
    assert [len(found[f"{what}-decoder"]) for what in ("cosine", "active", "size")] == [3, 3, 4]
    assert len(found["cosine-encoder"]) == 2 and all(-1 <= value <= 1 for value in found["cosine-encoder"])
    alone = observations.layers(runs["language"], "last", None, data["valid_target"])
    assert {name.partition("-")[2] for name in alone} == {"decoder"}


@pytest.mark.parametrize(
    ("name", "chosen"),
    [("gradient_norms", "all"), ("bleu", "pairs"), ("bleu_by_depth", "pairs"), ("gains", "learned"),
     ("singular_values", "all"), ("statistics", "powernorm"), ("changes", "all"), ("layers", "pairs"),
     ("layers", "language"), ("stream", "all")],
)  # fmt: skip
@pytest.mark.one_in(test=10, all=5)
def test_every_picture(name, chosen, runs, tmp_path):
    taken = {"all": [*runs], "pairs": ["scalenorm", "powernorm"], "learned": ["scalenorm", "language"]}
    folders = [runs[run] for run in taken.get(chosen, [chosen])]
    path = getattr(figures, name)(*folders, path=tmp_path / "picture.png")
    assert path == tmp_path / "picture.png" and path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_words_for_what_is_lacking(runs, tmp_path):
    for call, said in (
        (lambda: figures.gains(), "no run to draw"),
        (lambda: figures.gains(tmp_path), "no log.jsonl there"),
        (lambda: figures.bleu(runs["language"]), "no BLEU was measured"),
        (
            lambda: figures.statistics(runs["scalenorm"]),
            "train batchnorm, powernorm-v or powernorm with log_statistics",
        ),
        (lambda: figures.stream(runs["scalenorm"], names=["a", "b"]), "a name for each of the 1 runs; got 2"),
    ):
        with pytest.raises(nfrs.InputError, match=said):
            call()
