"""Limits of length and memory, asked where lengths arise; blank lines; byte order marks; a resumed run's text."""

import gzip
import json
import math
from pathlib import Path

import pytest
import torch
from train_support import events, fit, losses

import normformer_rs as nfrs

pytestmark = pytest.mark.usefixtures("one_thread")
LEARNED = {"positions": "learned", "max_positions": 9}


def long_pairs(corpus, part, count):
    """Some pairs that are longer than nine tokens with the end of sentence."""
    for side, word in (("source", "1"), ("target", "b")):
        path = Path(corpus[f"{part}_{side}"])
        lines = path.read_text().splitlines()
        path.write_text("".join(f"{line}\n" for line in [*lines, *[" ".join([word] * 12)] * count]))


@pytest.fixture
def short(corpus):
    """The corpus without its line of ten words."""
    for part in ("train", "valid"):
        for side in ("source", "target"):
            path = Path(corpus[f"{part}_{side}"])
            path.write_text("".join(f"{line}\n" for line in path.read_text().splitlines() if len(line.split()) <= 8))
    return corpus


@pytest.mark.full
def test_evaluation_and_translation_end_at_the_table_of_positions(tmp_path, short):
    """A model that never says its end: its first evaluation asks for sources + 50 tokens."""
    fit(tmp_path / "run", short, LEARNED, {"updates": 2, "evaluate_every": 1, "lr": 1e-5})
    assert len(events(tmp_path / "run", "evaluated")) == 2
    for rule in ("google", "fairseq"):
        (found,) = nfrs.translate(tmp_path / "run", ["1 2"], nfrs.SearchConfig(rule=rule, beam=2))
        assert 0 < len(found[0].text.split()) <= 9
    fit(tmp_path / "run", short, LEARNED, {"updates": 3, "evaluate_every": 1, "lr": 1e-5}, resume=True)


@pytest.mark.parametrize("part", ["train", "valid"])
@pytest.mark.one_in(test=2)
def test_pairs_longer_than_the_table_are_counted_before_the_run(tmp_path, short, part):
    long_pairs(short, part, 3)
    count = {"train": 40, "valid": 8}[part] + 3
    trainer = nfrs.Trainer(
        nfrs.TransformerConfig(d_model=16, d_ff=24, heads=2, encoder_layers=1, decoder_layers=1, **LEARNED),
        nfrs.TrainingConfig(updates=1),
        nfrs.DataConfig(**short, no_bpe=True),
    )
    says = rf"3 of {count} sentences are longer than .*positions of --max-positions 9 \(the longest has 13 tokens"
    for work in (trainer.dry_run, lambda: trainer.fit(tmp_path / "run", progress=False)):
        with pytest.raises(nfrs.InputError, match=says + ".*--skip-long"):
            work()
    assert not (tmp_path / "run").exists()
    skipping = nfrs.Trainer(trainer.model, trainer.training, trainer.data.replace(skip_long=True))
    assert skipping.dry_run().skipped == (3 if part == "train" else 0)
    skipping.fit(tmp_path / "run", progress=False)
    said = [event["text"] for event in events(tmp_path / "run", "message")]
    assert any("left out 3 of 43" in text and "--max-positions 9" in text for text in said) == (part == "train")


def test_a_line_that_is_too_long_is_named(tmp_path, short):
    fit(tmp_path / "run", short, LEARNED, {"updates": 1})
    lines = ["1 2", "3", " ".join(["4"] * 9), "5", " ".join(["6"] * 20)]
    with pytest.raises(nfrs.InputError, match=r"line 3 has 10 tokens .* = 9; 2 of 5 lines are too long"):
        nfrs.translate(tmp_path / "run", lines)
    assert len(nfrs.translate(tmp_path / "run", [lines[0], " ".join(["4"] * 8)])) == 2
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text(f"{lines[0]}\n{lines[2]}\n")
    target.write_text("a\na\n")
    with pytest.raises(nfrs.InputError, match="1 of 2 sentences are longer than"):
        nfrs.evaluate_loss(tmp_path / "run", source, target)


@pytest.mark.parametrize("rule", ["google", "fairseq"])
@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.one_in(test=4, all=3)
def test_a_blank_line_is_translated_by_a_blank_line(tmp_path, corpus, rule, beam):
    fit(tmp_path / "run", corpus, training={"updates": 1})
    lines = ["1 2", "", "3", " \t ", "\u00a0"]
    search = nfrs.SearchConfig(rule=rule, beam=beam, n_best=beam)
    found = nfrs.translate(tmp_path / "run", lines, search)
    assert [len(hypotheses) for hypotheses in found] == [beam, 1, beam, 1, 1]
    assert [found[i] for i in (1, 3, 4)] == [[nfrs.Translation("", 0.0)]] * 3
    words = nfrs.translate(tmp_path / "run", [lines[0], lines[2]], search)
    assert [found[0], found[2]] == words
    assert nfrs.translate(tmp_path / "run", ["", ""], search) == [[nfrs.Translation("", 0.0)]] * 2


def test_a_beam_wider_than_the_vocabulary(tmp_path, corpus):
    """Room is taken for what there is: at most V continuations of each hypothesis, of which three tokens make few."""
    model = {"positions": "learned", "max_positions": 3}
    for side in ("train_source", "train_target", "valid_source", "valid_target"):
        path = Path(corpus[side])
        path.write_text("".join(f"{' '.join(line.split()[:2])}\n" for line in path.read_text().splitlines()[:4]))
    fit(tmp_path / "run", corpus, model, {"updates": 1, "evaluation_beam": 10**12})
    for rule in ("google", "fairseq"):
        (found,) = nfrs.translate(tmp_path / "run", ["1 2"], nfrs.SearchConfig(rule=rule, beam=10**12))
        assert len(found) == 1
    with pytest.raises(nfrs.InputError, match="alpha must lie between -10 and 10"):
        nfrs.translate(tmp_path / "run", ["1"], nfrs.SearchConfig(alpha=1e6))


def test_more_tokens_than_memory_are_refused():
    config = nfrs.TransformerConfig(vocab_size=9, d_model=16, d_ff=24, heads=2, encoder_layers=1, decoder_layers=1)
    model, ids = nfrs.Transformer(config).eval(), torch.full((1, 1), 5)
    for source, target in ((ids.expand(2**20, 2**20), ids), (ids, ids.expand(2**20, 2**20))):
        with pytest.raises((nfrs.InputError, RuntimeError), match="not enough memory"):
            model(source, target)


@pytest.mark.parametrize("packed", [False, True])
def test_a_byte_order_mark_is_no_text(tmp_path, packed):
    codes = "#version: 0.2\nl o\nlo w</w>\ne r</w>\n"
    seen = []
    for mark in (b"", b"\xef\xbb\xbf"):
        folder = tmp_path / ("marked" if mark else "plain")
        folder.mkdir()
        text = mark + b"lower low low lowest newer\n" * 20
        (folder / "text").write_bytes(gzip.compress(text) if packed else text)
        (folder / "codes").write_bytes(mark + codes.encode())
        data = nfrs.DataConfig(train_target=folder / "text", valid_target=folder / "text", bpe_codes=folder / "codes")
        model = nfrs.TransformerConfig(architecture="decoder-only", d_model=16, d_ff=16, heads=2, decoder_layers=1)
        trainer = nfrs.Trainer(model, nfrs.TrainingConfig(updates=1, warmup=1), data)
        trainer.fit(folder / "run", progress=False, curves=False, tensorboard=False)
        seen.append([(folder / "run" / name).read_bytes() for name in ("vocabulary.txt", "bpe.codes")])
    assert seen[0] == seen[1] and seen[0][1] == codes.encode()


def test_a_text_without_words_is_said(tmp_path, corpus):
    for side in ("source", "target"):
        Path(corpus[f"train_{side}"]).write_text("\n" * 9)
    with pytest.raises(nfrs.InputError, match="the training text holds no words: all 9 target lines are blank"):
        fit(tmp_path / "run", corpus)


def warnings(run):
    return [event["text"] for event in events(run, "message") if event["level"] == "warning"]


@pytest.mark.parametrize("now", [48, 400])
@pytest.mark.one_in(all=2)
def test_a_place_in_an_epoch_is_scaled_by_sentences(tmp_path, corpus, now):
    training = {"max_tokens": 100, "updates": 4, "evaluate_every": 100}
    fit(tmp_path / "run", corpus, training=training)
    seen, sentences = json.loads((tmp_path / "run/checkpoints/last/state.json").read_text())["state"]["seen"]
    assert 0 < seen < sentences == 41
    fit(tmp_path / "run", corpus, training={**training, "max_tokens": now, "updates": 6}, resume=True)
    (said,) = warnings(tmp_path / "run")
    assert (
        f"max_tokens was 100, now {now}: the run goes on" in said
        and f"{100 * seen / 41:.1f} % of the epoch was seen" in said
    )
    behind = int(said.split("behind ")[1].split()[0])
    largest = now // 3  # the shortest sentence has two tokens and its end
    assert seen <= behind < seen + largest or (behind == 0 and seen + largest > 41)
    assert [*losses(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.full
def test_other_text_is_noticed(tmp_path, corpus):
    training = {"max_tokens": 100, "updates": 4, "evaluate_every": 2}
    fit(tmp_path / "run", corpus, training=training)
    for part in ("train", "valid"):
        for side in ("source", "target"):
            path = Path(corpus[f"{part}_{side}"])
            path.write_text("".join(f"{line}\n" for line in reversed(path.read_text().splitlines())))
    fit(tmp_path / "run", corpus, training={**training, "updates": 8}, resume=True)
    said = warnings(tmp_path / "run")
    assert any("the training text is not the one that the run was trained on" in text for text in said)
    assert any("the validation text is not the one of the run so far" in text for text in said)
    assert events(tmp_path / "run", "evaluated")[2]["best"]
    fit(tmp_path / "run", corpus, training={**training, "updates": 9}, resume=True)
    assert warnings(tmp_path / "run") == said, "the text is the one of the checkpoint again"
    assert all(math.isfinite(loss) for loss in losses(tmp_path / "run").values())
