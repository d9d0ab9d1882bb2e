"""What the training loop says of bad files, folders and numbers."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from train_support import events, fit, losses, weights

import normformer_rs as nfrs

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.full
def test_a_checkpoint_of_another_model_does_not_translate(tmp_path, corpus):
    for run, heads in (("one", 2), ("other", 4)):
        fit(tmp_path / run, corpus, {"heads": heads}, training={"updates": 2})
    with pytest.raises(ValueError, match=r"of another model than the run .*: heads was 2, now 4"):
        nfrs.translate(tmp_path / "one", ["1 2"], checkpoint=str(tmp_path / "other" / "checkpoints" / "last"))
    with pytest.raises(ValueError, match=r'no checkpoint "bst"; .* has update-00000001, .*last'):
        nfrs.translate(tmp_path / "one", ["1 2"], checkpoint="bst")


def test_wrong_lines_are_said(tmp_path, corpus):
    fit(tmp_path / "run", corpus, training={"updates": 2})
    for lines, message in (("1 2", "got one text"), ([b"1"], "line 1 is b'1'"), (["1", 2], "line 2 is 2")):
        with pytest.raises(nfrs.InputError, match=message):
            nfrs.translate(tmp_path / "run", lines)
    assert nfrs.translate(tmp_path / "run", ["1 2"], checkpoint=2) == nfrs.translate(tmp_path / "run", ["1 2"])
    with pytest.raises(nfrs.InputError, match="the model has an encoder: it is evaluated with source text"):
        nfrs.evaluate_loss(tmp_path / "run", None, corpus["valid_target"])


def test_errors_travel_between_processes():
    for kind in (nfrs.InputError, nfrs.DivergedError, nfrs.Interrupted):
        error = pickle.loads(pickle.dumps(kind("what went wrong")))
        assert type(error) is kind and str(error) == "what went wrong"


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


@pytest.mark.full
def test_somebody_elses_files_are_not_written_over(tmp_path, corpus):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "bpe.codes").write_text("#version: 0.2\n1 2</w>\n")
    with pytest.raises(ValueError, match=r"holds bpe\.codes, which no run wrote"):
        fit(tmp_path / "data", corpus)
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["bpe.codes"]
    config, checkpoint = tmp_path / "theirs" / "config.json", tmp_path / "theirs" / "checkpoints" / "checkpoint_best.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text("fairseq's")
    config.write_text("{}")
    with pytest.raises(ValueError, match=r"holds config\.json, which no run wrote"):
        fit(tmp_path / "theirs", corpus, overwrite=True)
    config.unlink()
    for _ in range(2):
        fit(tmp_path / "theirs", corpus, training={"updates": 2}, overwrite=True)
    assert checkpoint.read_text() == "fairseq's"


@pytest.mark.full
def test_long_sentences_are_refused_or_skipped(tmp_path, corpus):
    with pytest.raises(ValueError, match="skip-long"):
        fit(tmp_path / "run", corpus, training={"max_tokens": 8})
    assert not (tmp_path / "run").exists()
    valid = {k: str(tmp_path / f"short.{k}") for k in ("valid_source", "valid_target")}
    for path in valid.values():
        Path(path).write_text("1 2\n")
    fit(tmp_path / "run", {**corpus, **valid, "skip_long": True}, training={"max_tokens": 8, "updates": 2})
    assert any("left out 1 of 41 sentences" in said["text"] for said in events(tmp_path / "run", "message"))
    for path in valid.values():
        Path(path).write_text("1 2\n" + "1 " * 12 + "\n")
    with pytest.raises(ValueError, match="held-out text: 1 of 2 sentences"):
        fit(tmp_path / "long", {**corpus, **valid}, training={"max_tokens": 11})
    fit(tmp_path / "long", {**corpus, **valid, "skip_long": True}, training={"max_tokens": 11, "updates": 2})
    assert nfrs.evaluate_loss(tmp_path / "long", valid["valid_source"], valid["valid_target"]).tokens == 16


@pytest.mark.full
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


@pytest.mark.parametrize("word", ["gpu", "GPU", "gpu:0"])
def test_a_gpu_is_called_cuda(word, tmp_path, corpus):
    """By spelling it is close to cpu. Training and what reads a run say the same."""
    said = rf'unknown device "{word}" \(did you mean "cuda"\?\)'
    fit(tmp_path / "run", corpus, training={"updates": 1})
    with pytest.raises(nfrs.InputError, match=said):
        fit(tmp_path / "other", corpus, training={"updates": 1, "device": word})
    with pytest.raises(nfrs.InputError, match=said):
        nfrs.translate(tmp_path / "run", ["1 2"], device=word)
    with pytest.raises(nfrs.InputError, match=said):
        nfrs.Transformer.from_checkpoint(tmp_path / "run", device=word)
