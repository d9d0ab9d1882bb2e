"""Words of evaluations: languages without spaces, unknown words, and what is said where BLEU measures nothing."""

import math
import random
import shutil
import struct
from pathlib import Path

import pytest
from train_support import events, fit

import normformer_rs as nfrs

QUIET = {"curves": False, "tensorboard": False}
SIGNS = [chr(0x4E00 + 37 * i) for i in range(12)]


def write(folder, name, lines):
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


@pytest.fixture
def chinese(tmp_path):
    """Numbers to signs, without spaces between these."""
    chosen, files = random.Random(1), {}
    for part, count in (("train", 60), ("valid", 12)):
        rows = [[chosen.randrange(12) for _ in range(chosen.randint(4, 10))] for _ in range(count)]
        files[f"{part}_source"] = write(tmp_path, f"{part}.en", (" ".join(f"s{i}" for i in row) for row in rows))
        files[f"{part}_target"] = write(tmp_path, f"{part}.zh", ("".join(SIGNS[i] for i in row) + "。" for row in rows))
    return files


def train(output, data, *, training=(), **options):
    """A run with BPE, of a model that learns its few lines by heart."""
    model = nfrs.TransformerConfig(d_model=32, d_ff=64, heads=2, encoder_layers=1, decoder_layers=1, dropout=0.0)
    given = {"updates": 2, "max_tokens": 400, "lr": 5e-3, "warmup": 0, "schedule": "constant", "evaluate_every": 2}
    data = nfrs.DataConfig(**{**data, "bpe_operations": 20, **options})
    nfrs.Trainer(model, nfrs.TrainingConfig(**{**given, **dict(training)}), data).fit(output, **QUIET, progress=False)
    return output


def warnings(run):
    return [e["text"] for e in events(run, "message") if e["level"] == "warning"]


def test_characters_choose_the_best_checkpoint_of_a_text_without_spaces(tmp_path, chinese):
    chinese |= {"valid_source": chinese["train_source"], "valid_target": chinese["train_target"]}
    training = {"updates": 160, "evaluate_every": 40, "criterion": "bleu", "evaluation_tokenize": "zh"}
    found = events(train(tmp_path / "run", chinese, training=training), "evaluated")
    best = [e for e in found if e["best"]][-1]
    assert best["nll"] <= 2 * min(e["nll"] for e in found) and best["bleu"] > 20
    assert not warnings(tmp_path / "run")


def test_a_text_without_spaces_is_said_and_never_chooses(tmp_path, chinese):
    (said,) = warnings(train(tmp_path / "run", chinese))
    assert "no spaces stand between the words" in said or "no validation target has four words" in said
    assert 'evaluation_tokenize = "char" (Chinese: "zh")' in said
    for training in (
        {"criterion": "bleu"},
        {"schedule": "val-decay"},
        {"criterion": "bleu", "evaluation_tokenize": "13a"},
    ):
        with pytest.raises(nfrs.InputError, match=r'BLEU measures nothing here.*evaluation_tokenize = "char"'):
            train(tmp_path / "other", chinese, training=training)
    assert not (tmp_path / "other").exists() or not any((tmp_path / "other").iterdir())


def test_targets_below_four_words_are_said(tmp_path):
    short = write(tmp_path, "short", ["a b c", "c b a"] * 4)
    data = {f"{part}_{side}": short for part in ("train", "valid") for side in ("source", "target")}
    fit(tmp_path / "run", data, training={"updates": 1}, **QUIET)
    assert any("no validation target has four words" in text for text in warnings(tmp_path / "run"))
    with pytest.raises(nfrs.InputError, match="no validation target has four words"):
        fit(tmp_path / "bleu", data, training={"updates": 1, "criterion": "bleu"})


def test_evaluations_with_a_beam_of_0_translate_nothing(tmp_path, chinese):
    run = train(tmp_path / "run", chinese, training={"updates": 2, "evaluate_every": 1, "evaluation_beam": 0})
    assert [e["bleu"] for e in events(run, "evaluated")] == [None, None]
    assert not warnings(run), "a run without BLEU is not told that BLEU measures nothing"
    with pytest.raises(nfrs.InputError, match='criterion = "bleu" needs an evaluation_beam of at least 1, got 0'):
        train(tmp_path / "other", chinese, training={"criterion": "bleu", "evaluation_beam": 0})


def test_fewer_merges_than_asked_are_counted(tmp_path, chinese):
    run = train(tmp_path / "run", chinese, bpe_operations=32000)
    learned = len([line for line in (run / "bpe.codes").read_text().splitlines() if not line.startswith("#")])
    assert any(f"learned {learned} merges of the 32000" in text for text in warnings(run)) and learned < 32000
    assert not any("merges" in text for text in warnings(train(tmp_path / "all", chinese)))


# Unknown words.


def binarise(folder, part, texts, pieces):
    """fairseq's mmap format: a piece beyond the dictionary is <unk>, number 3."""
    for lang, lines in texts.items():
        rows = [[*(pieces.index(p) + 4 if p in pieces else 3 for p in line.split()), 2] for line in lines]
        sizes, starts = [len(row) for row in rows], [2 * sum(map(len, rows[:i])) for i in range(len(rows))]
        index = struct.pack("<9sQBQ", b"MMIDIDX\0\0", 1, 8, len(rows))
        index += struct.pack(f"<{len(rows)}i", *sizes) + struct.pack(f"<{len(rows)}q", *starts)
        (folder / f"{part}.a-b.{lang}.idx").write_bytes(index)
        (folder / f"{part}.a-b.{lang}.bin").write_bytes(b"".join(struct.pack(f"<{len(row)}H", *row) for row in rows))
        (folder / f"dict.{lang}.txt").write_text("".join(f"{piece} 9\n" for piece in pieces))


def unknown_text(count, names):
    """Copied words, four of six of them names that stand nowhere else."""
    chosen = random.Random(names)
    rows = [[f"w{chosen.randrange(6)}" for _ in range(6)] for _ in range(count)]
    for i, row in enumerate(rows):
        row[1:5] = (f"n{names + 4 * i + k}" for k in range(4))
    return [" ".join(row) for row in rows]


def test_unknown_words_match_nothing(tmp_path):
    """Of references that are ids, and of texts that hold the word <unk>: as against the text itself."""
    words = [f"w{i}" for i in range(6)]
    texts = {"train": unknown_text(60, 0), "valid": unknown_text(12, 1000)}
    (tmp_path / "bin").mkdir()
    for part, lines in texts.items():
        binarise(tmp_path / "bin", part, {"a": lines, "b": lines}, words)
    training = {"updates": 60, "evaluate_every": 60, "lr": 1e-2, "vocab_mask": True}
    model = nfrs.TransformerConfig(d_model=32, d_ff=64, heads=2, encoder_layers=1, decoder_layers=1, dropout=0.0)
    given = {"max_tokens": 400, "warmup": 0, "schedule": "constant", **training}
    data = nfrs.DataConfig(data_bin=str(tmp_path / "bin"))
    nfrs.Trainer(model, nfrs.TrainingConfig(**given), data).fit(tmp_path / "run", **QUIET, progress=False)
    (evaluated,) = events(tmp_path / "run", "evaluated")
    said = [found[0].text for found in nfrs.translate(tmp_path / "run", texts["valid"], nfrs.SearchConfig(beam=1))]
    assert sum(line.count("<unk>") for line in said) > 12  # it says what it has learned
    pytest.importorskip("sacrebleu")
    from sacrebleu.metrics import BLEU

    metric = BLEU(tokenize="none", smooth_method="none", force=True)
    assert evaluated["bleu"] == pytest.approx(metric.corpus_score(said, [texts["valid"]]).score, abs=1e-9)
    as_words = [" ".join(w if w in words else "<unk>" for w in line.split()) for line in texts["valid"]]
    assert metric.corpus_score(said, [as_words]).score > evaluated["bleu"] + 20


# Checkpoints by their evaluations.


def test_an_old_best_is_not_one_of_the_last_evaluations(tmp_path, corpus):
    """Between a checkpoint and the others that of an evaluation is missing, as `keep` leaves an old best one."""
    fit(tmp_path / "run", corpus, training={"updates": 6, "evaluate_every": 1}, **QUIET)
    assert Path(nfrs.average(tmp_path / "run", last=6)).name == "average"
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "update-00000003")
    with pytest.raises(nfrs.InputError, match="the last 3 evaluations, cannot average 4"):
        nfrs.average(tmp_path / "run", last=4)
    assert Path(nfrs.average(tmp_path / "run", last=3)).name == "average"


# Numbers beyond all numbers, and lengths.


@pytest.mark.full
def test_a_translation_says_whether_its_length_was_cut(tmp_path, corpus):
    fit(tmp_path / "run", corpus, training={"updates": 200, "evaluate_every": 200, "lr": 5e-3}, **QUIET)
    lines = ["1 2 3 4 5 6", "7 8", ""]
    for rule in ("google", "fairseq"):
        for beam in (1, 3):
            whole = nfrs.translate(tmp_path / "run", lines, nfrs.SearchConfig(rule=rule, beam=beam))
            assert [found[0].finished for found in whole] == [True] * 3
            search = nfrs.SearchConfig(rule=rule, beam=beam, n_best=beam, max_length=2)
            cut = nfrs.translate(tmp_path / "run", lines, search)
            assert not all(h.finished for h in cut[0]) and cut[2] == [nfrs.Translation("", 0.0, True)]
            assert all(len(h.text.split()) <= 2 for found in cut for h in found)
            assert all(len(h.text.split()) < 2 for found in cut for h in found if h.finished)


def test_perplexity_per_word_of_a_text_without_words(tmp_path, capsys):
    from normformer_rs import cli

    chosen = random.Random(1)
    text = write(tmp_path, "text", ("".join(chosen.choice(SIGNS) for _ in range(600)) + "。" for _ in range(4)))
    model = nfrs.TransformerConfig(architecture="decoder-only", d_model=16, d_ff=32, heads=2, decoder_layers=1)
    training = nfrs.TrainingConfig(updates=1, max_tokens=1000, lr=1e-5, warmup=0, schedule="constant")
    data = nfrs.DataConfig(train_target=text, valid_target=text, bpe_operations=5, segment_length=32)
    nfrs.Trainer(model, training, data).fit(tmp_path / "run", **QUIET, progress=False)
    found = nfrs.evaluate_windows(tmp_path / "run", text)
    assert (found.word_perplexity, found.words, found.characters) == (math.inf, 8, 4 * 602)
    assert found.bits_per_character == pytest.approx(found.nll * found.tokens / (4 * 602) / math.log(2))
    assert cli.main(["evaluate", "--model", str(tmp_path / "run"), "--reference", text, "--stride", "16"]) == 0
    _, per_word, bits = capsys.readouterr().out.splitlines()
    assert per_word.startswith("per word:   inf (8 words") and bits.startswith("bits:       ")
