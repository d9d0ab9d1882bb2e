"""A new run that begins with the weights of another one."""

import pytest
import torch
from train_support import events, fit, losses, weights

import normformer_rs as nfrs
from normformer_rs import cli
from normformer_rs.errors import Interrupted
from normformer_rs.loop import training

QUIET = {"curves": False, "tensorboard": False}


def warnings(run):
    return [event["text"] for event in events(run, "message") if event["level"] == "warning"]


@pytest.fixture
def trained(tmp_path, corpus):
    fit(tmp_path / "first", corpus, training={"updates": 30, "evaluate_every": 10}, **QUIET)
    return tmp_path / "first"


def test_its_first_loss_is_the_other_runs_next_one(trained, tmp_path, corpus):
    """A resume goes on with the next batch; a new run of one batch an epoch has the same batch."""
    fit(tmp_path / "second", corpus, training={"updates": 1}, init_from=f"{trained}:last", **QUIET)
    assert losses(tmp_path / "second")[1] < 0.7 * losses(trained)[1]
    fit(trained, corpus, training={"updates": 31}, resume=True, **QUIET)
    assert losses(tmp_path / "second")[1] == pytest.approx(losses(trained)[31], rel=1e-6)
    assert not warnings(tmp_path / "second")


@pytest.mark.parametrize("checkpoint", ["best", "average", "update-00000010"])
def test_checkpoints_of_any_kind(checkpoint, trained, tmp_path, corpus):
    nfrs.average(trained, last=2)
    fit(
        tmp_path / "second",
        corpus,
        training={"updates": 1, "lr": 1e-12, "min_lr": 0.0},
        init_from=f"{trained}:{checkpoint}",
        **QUIET,
    )
    found, expected = weights(tmp_path / "second"), weights(trained, checkpoint)
    assert all(torch.allclose(found[name], expected[name], atol=1e-9) for name in expected)


def test_admins_learned_gains_are_not_measured_again(tmp_path, corpus):
    fit(tmp_path / "first", corpus, {"residual": "admin"}, {"updates": 5}, **QUIET)
    training = {"updates": 1, "lr": 1e-12, "min_lr": 0.0}
    fit(tmp_path / "second", corpus, {"residual": "admin"}, training, init_from=tmp_path / "first", **QUIET)
    found, expected = weights(tmp_path / "second"), weights(tmp_path / "first")
    gains = [name for name in expected if "residual_scale" in name]
    assert gains and any((expected[name] != 1).any() for name in gains)
    assert all(torch.allclose(found[name], expected[name], atol=1e-9) for name in gains)


def test_nor_after_a_stop_before_the_first_update(tmp_path, corpus, monkeypatch):
    fit(tmp_path / "first", corpus, {"residual": "admin"}, {"updates": 5}, **QUIET)
    original = training._core.train

    def interrupted(*arguments, **options):
        def stop(event):
            raise KeyboardInterrupt

        arguments[-1].started = stop
        return original(*arguments, **options)

    options = {"updates": 1, "lr": 1e-12, "min_lr": 0.0}
    with monkeypatch.context() as patch:
        patch.setattr(training._core, "train", interrupted)
        with pytest.raises(Interrupted):
            fit(tmp_path / "second", corpus, {"residual": "admin"}, options, init_from=tmp_path / "first", **QUIET)
    fit(tmp_path / "second", corpus, {"residual": "admin"}, options, resume=True, **QUIET)
    found, expected = weights(tmp_path / "second"), weights(tmp_path / "first")
    assert all(torch.allclose(found[name], expected[name], atol=1e-9) for name in expected if "residual_scale" in name)


def test_rows_go_over_by_their_types(trained, tmp_path, corpus):
    """The second text has other types, and those of the first in another order."""
    lines = {"source": "9 9 9 9 8 x x\n1 2 3\n" * 9, "target": "j j j j i x x\nb c d\n" * 9}
    data = dict(corpus)
    for side, text in lines.items():
        data[f"train_{side}"] = str(tmp_path / f"other.{side}")
        (tmp_path / f"other.{side}").write_text(text)
    training = {"updates": 1, "lr": 1e-12, "min_lr": 0.0, "seed": 9}
    fit(tmp_path / "second", data, training=training, init_from=trained, **QUIET)
    fit(tmp_path / "drawn", data, training=training, **QUIET)
    (said,) = warnings(tmp_path / "second")
    assert "1 of the vocabulary's" in said and "their rows keep the drawn values" in said
    here, there = ((run / "vocabulary.txt").read_text().splitlines() for run in (tmp_path / "second", trained))
    here, there = ([line.split()[0] for line in lines] for lines in (here, there))
    found, first, drawn = (
        weights(run)["embedding.weight"] for run in (tmp_path / "second", trained, tmp_path / "drawn")
    )
    for id, piece in enumerate(here, 4):
        expected = first[there.index(piece) + 4] if piece in there else drawn[id]
        assert torch.allclose(found[id], expected, atol=1e-9), piece
    assert torch.allclose(found[:4], first[:4], atol=1e-9)


def test_another_model_is_refused_or_said(trained, tmp_path, corpus):
    with pytest.raises(nfrs.InputError, match=r"init_from: .* is of another model: .*linear1.*d_ff was 24, now 32"):
        fit(tmp_path / "second", corpus, {"d_ff": 32}, init_from=trained, **QUIET)
    with pytest.raises(
        nfrs.InputError, match=r"of another model: this run's has no .*residual was .*prenorm.*, now .*rezero"
    ):
        fit(tmp_path / "second", corpus, {"residual": "rezero", "norm": "layernorm"}, init_from=trained, **QUIET)
    fit(tmp_path / "second", corpus, {"norm_eps": 1e-3}, {"updates": 1}, init_from=trained, **QUIET)
    assert any(
        "trained in another model: norm_eps was null, now 0.001" in text for text in warnings(tmp_path / "second")
    )
    with pytest.raises(nfrs.InputError, match="leave one of them out"):
        fit(tmp_path / "second", corpus, {"norm_eps": 1e-3}, {"updates": 2}, init_from=trained, resume=True, **QUIET)
    with pytest.raises((nfrs.InputError, OSError), match="nothing"):
        fit(tmp_path / "third", corpus, init_from=tmp_path / "nothing", **QUIET)
    assert not any((tmp_path / "third").glob("*.json"))


def test_the_command(trained, tmp_path, corpus):
    flags = [word for name, path in corpus.items() for word in (f"--{name.replace('_', '-')}", path)]
    shape = "--d-model 16 --d-ff 24 --heads 2 --encoder-layers 2 --decoder-layers 2 --dropout 0 --no-bpe --no-progress"
    words = ["train", "--output", str(tmp_path / "second"), "--init-from", str(trained), *flags, *shape.split()]
    assert cli.main([*words, "--updates", "1"]) == 0
    assert losses(tmp_path / "second")[1] < 0.8 * losses(trained)[1]
