"""The tokenizer that `export` writes: `AutoTokenizer` gives the ids and the text that the package has."""

import json
import random
from pathlib import Path

import pytest

import normformer_rs as nfrs
from normformer_rs import _core
from normformer_rs.formats import tokenizer
from normformer_rs.formats.tokenizer import _passes, tokenizer_files

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

BOS, PAD, EOS, UNK = range(4)
SPECIALS = ["<s>", "<pad>", "</s>", "<unk>"]
HOSTILE = [
    *["", " ", "   ", "\r", "\n", "\n\n", " \n ", "\r\n", "a", " a", "a ", "a\n", "\na", "a\r\nb\r", "\r a \r b \r"],
    *[
        "the  cat   sat",
        "  the cat  ",
        "the\tcat",
        "the\u00a0cat sat",
        "low\x0b\x0cer \x1c\x1d\x1e\x1f \x85 \u2028 \u3000",
    ],
    *[
        "naïve café",
        "cafe\u0301",
        "\u00fc\u00fc \u200b \ufeff",
        "日本語 ελληνικά 😀😀 👩\u200d👩\u200d👧",
        "\U0010ffff\ue000\uffff\x00",
    ],
    *["the, cat. (sat) [on] {the} $mat^ | a*b+c? \\d \\", "#-&~`'\"/<>=!%:;_"],
    *[*SPECIALS, "a</s>b <s> the </s>", "<unk>the<unk>", "<pad> <PAD> < s >"],
    *["the</w>", "</w>", "a</w> </w></w> b", "the@@ cat @@ @@@ @ a@@b @@", "th e", "\ud7ff"],
]
SENTENCES = [
    "the cat sat on the mat , and the other cat sat there",
    "a naïve dog ran to the café ; it is (the) best",
    "#! 3 x 4 = 12",
]
INSIDE = "a\rb c\u2028d"
"""Ends of lines for some readers, inside of words."""


def by_package(folder, text):
    """A text's ids as `generate` reads it: an end of sentence for each newline."""
    first, *others = _core.encode(str(folder), text.split("\n"))
    return first + [id for line in others for id in [EOS, *line]]


def said(pieces, ids):
    """A text of ids as `generate` writes it."""
    lines = [[]]
    for id in ids:
        lines.append([]) if id == EOS else lines[-1].append(id)
    return "\n".join(_core.join_line(" ".join(pieces[id] for id in line if id not in (BOS, PAD))) for line in lines)


def run_folder(folder, pieces, codes):
    """Writes the files of a run that `_core.encode` reads, and makes their tokenizer."""
    folder.mkdir(exist_ok=True)
    data = nfrs.DataConfig(train_target="-", valid_target="-", **({"bpe_operations": 1} if codes else {"no_bpe": True}))
    model = nfrs.TransformerConfig(architecture="decoder-only")
    parts = {"model": model, "training": nfrs.TrainingConfig(), "data": data}
    (folder / "config.json").write_text(json.dumps({name: json.loads(part.to_json()) for name, part in parts.items()}))
    vocabulary = "".join(f"{piece} 1\n" for piece in pieces)
    for name, text in (("vocabulary.txt", vocabulary), ("bpe.codes", codes)):
        if text:
            (folder / name).write_bytes(text.encode())
    return tokenizers.Tokenizer.from_str(
        tokenizer_files(vocabulary, codes, [], 4 + vocabulary.count("\n"))["tokenizer.json"]
    )


def encoded(tokenizer, text):
    tokenizer.encode_special_tokens = True
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module", params=["bpe", "split"])
def exported(request, tmp_path_factory):
    """A run and its folder for Hugging Face."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "text").write_bytes("\n".join([*SENTENCES, INSIDE] * 20).encode())
    cut = {"bpe_operations": 40} if request.param == "bpe" else {"no_bpe": True}
    data = nfrs.DataConfig(train_target=folder / "text", valid_target=folder / "text", segment_length=32, **cut)
    size = {"d_model": 16, "d_ff": 24, "heads": 4, "kv_heads": 2, "decoder_layers": 2}
    training = nfrs.TrainingConfig(updates=40, max_tokens=500, schedule="constant", lr=1e-2, warmup=0)
    model = nfrs.preset("llama-tiny")[0].replace(**size)
    nfrs.Trainer(model, training, data).fit(folder / "run", progress=False, curves=False)
    nfrs.to_huggingface(folder / "run", folder / "out")
    return folder / "run", folder / "out"


@pytest.mark.one_in(test=2)
def test_texts_have_the_ids_of_the_package(exported):
    run, out = exported
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    shuffled = ["".join(random.Random(i).sample(SENTENCES[0], 30)) for i in range(50)]
    texts = [*HOSTILE, *SENTENCES, INSIDE, "\n".join(SENTENCES), *shuffled]
    expected = [by_package(run, text) for text in texts]
    for text, ids in zip(texts, expected):
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids, repr(text)
        assert tokenizer(text)["input_ids"] == [EOS, *ids], repr(text)
    assert tokenizer(texts, add_special_tokens=False)["input_ids"] == expected
    assert any(UNK in ids for ids in expected) and all(BOS not in ids and PAD not in ids for ids in expected)


def test_ids_have_the_text_of_the_package(exported):
    run, out = exported
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert (out / "vocabulary.txt").read_bytes() == (run / "vocabulary.txt").read_bytes()
    lines = (run / "vocabulary.txt").read_bytes().decode().split("\n")[:-1]
    pieces = [*SPECIALS, *(line.rpartition(" ")[0] for line in lines)]
    assert tokenizer.convert_ids_to_tokens(range(len(pieces))) == pieces and len(tokenizer) == len(pieces)
    generator = random.Random(3)
    for length in [*range(12)] * 20:
        ids = generator.choices([*range(4), *range(len(pieces))], k=length)
        assert tokenizer.decode(ids) == said(pieces, ids), ids
    text = "\n".join(SENTENCES)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == "\n" + text
    assert tokenizer.decode(tokenizer(SENTENCES[1])["input_ids"], skip_special_tokens=True) == SENTENCES[1]


def test_greedy_texts_are_those_of_generate(exported):
    run, out = exported
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    prompts = ["the cat", "", "a naïve dog", f"{SENTENCES[2]}\na", "the unknown ☃ cat", "#!"]
    options = nfrs.GenerationConfig(temperature=0, max_length=12)
    for prompt, (ours,) in zip(prompts, nfrs.generate(run, prompts, options)):
        given = tokenizer(prompt, return_tensors="pt")
        (ids,) = model.generate(**given, do_sample=False, max_new_tokens=12)
        assert ids[given["input_ids"].shape[1] :].tolist().count(EOS) == ours.finished
        read = tokenizer.decode(given["input_ids"][0])
        assert tokenizer.decode(ids) == read + ours.text + ("\n" if ours.finished else "")
    without_prompt, empty = (
        model.generate(**given, do_sample=False, max_new_tokens=12)
        for given in ({}, tokenizer("", return_tensors="pt"))
    )
    assert without_prompt.tolist() == empty.tolist()
    padded = tokenizer(prompts[:3], return_tensors="pt", padding=True)
    together = tokenizer.decode(model.generate(**padded, do_sample=False, max_new_tokens=12)[0])
    assert together.startswith("\nthe cat" + nfrs.generate(run, prompts[:1], options)[0][0].text)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "olmo2", "gpt2", "gpt_neox"])
def test_every_architecture_takes_it(model_type, tmp_path):
    run_folder(tmp_path / "run", ["th@@", "e", "cat", "c@@"], "#version: 0.2\nt h\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name, text in tokenizer_files("th@@ 1\ne 1\ncat 1\nc@@ 1\n", "#version: 0.2\nt h\n", [], 8).items():
        (tmp_path / name).write_text(text)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("the  ce\ncat")["input_ids"] == [EOS, 4, 5, 7, 5, EOS, *by_package(tmp_path / "run", "cat")]
    ids = tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id
    assert ids == (BOS, PAD, EOS, UNK)


@pytest.mark.parametrize("version", ["0.1", "0.2"])
def test_any_merges(version, tmp_path):
    """Few letters: overlapping pairs, pieces that several merges spell, merges out of order, pieces left out."""
    generator = random.Random(version)
    found = set()
    for number in range(60):
        letters = ["a", "b", "ü", ".", "</w>", "@"][: generator.randint(1, 6)]
        words = ["".join(generator.choices(letters, k=generator.randint(1, 9))) for _ in range(27)]
        lines = [" ".join(words[i::3]) for i in range(3)]
        try:
            merges = _core.learn_bpe(lines[:2], generator.randint(1, 40))
        except nfrs.InputError:  # no pair occurs twice
            continue
        if number % 2:
            generator.shuffle(merges)
        codes = f"#version: {version}\n" + "".join(f"{left} {right}\n" for left, right in merges)
        made = {piece.removesuffix("</w>") for pair in merges for piece in [*pair, "".join(pair)]} - {""}
        known = sorted(generator.sample(sorted(made), len(made) * 2 // 3))
        tokenizer = run_folder(tmp_path / str(number), [piece + end for piece in known for end in ("", "@@")], codes)
        for text in [*lines, "\n".join(lines), *letters]:
            ids = by_package(tmp_path / str(number), text)
            assert encoded(tokenizer, text) == ids, (text, codes)
            found |= {*ids}
        found |= {"again"} if len([*_passes(merges)]) > len(merges) else set()
    assert UNK in found and "again" in found and len(found) > 25


def test_written_text(tmp_path):
    """A page of the documentation, with merges of its first half, and a fifth of the pieces left out."""
    lines = (Path(__file__).parents[2] / "docs" / "language-models.md").read_text(encoding="utf-8").split("\n")
    merges = _core.learn_bpe(lines[: len(lines) // 2], 400)
    codes = "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges)
    made = sorted({"".join(pair) for pair in merges} | {piece for pair in merges for piece in pair})
    kept = random.Random(1).sample(made, len(made) * 4 // 5)
    pieces = [f"{piece}@@".removesuffix("</w>@@") for piece in kept]
    tokenizer = run_folder(tmp_path / "run", [*dict.fromkeys(pieces)], codes)
    ids = encoded(tokenizer, "\n".join(lines))
    assert ids == by_package(tmp_path / "run", "\n".join(lines))
    assert len({*ids}) > 200 and ids.count(UNK) > 100


def test_any_white_space_and_code_point(tmp_path):
    """A code point between letters, in text that merges cut and in text that is cut already."""
    points = [*range(0x3100), 0xD7FF, 0xE000, 0xFEFF, 0xFFFE, 0x1F600, 0x10FFFF]
    text = " ".join(f"a{chr(i)}b" for i in points if chr(i) != "\n")
    for codes in (None, "#version: 0.2\na b</w>\n"):
        tokenizer = run_folder(tmp_path / str(bool(codes)), ["a", "b", "a@@", "ab", "\u00a0@@", "\r@@"], codes)
        assert encoded(tokenizer, text) == by_package(tmp_path / str(bool(codes)), text)


def test_merges_of_any_characters(tmp_path):
    """Merges of characters that mean something in regular expressions."""
    characters = [chr(i) for i in [*range(0x21, 0x300), 0x2028, 0x1F600] if not chr(i).isspace()]
    codes = "#version: 0.2\n" + "".join(f"{c} x\nx {c}</w>\n" for c in characters)
    tokenizer = run_folder(tmp_path / "run", [f"{c}x@@" for c in characters] + [f"x{c}" for c in characters], codes)
    text = " ".join(f"{c}x中 中x{c}" for c in characters)
    ids = encoded(tokenizer, text)
    assert ids == by_package(tmp_path / "run", text)
    assert {*range(4, 4 + 2 * len(characters))} <= {*ids}


def test_pieces_outside_of_the_target_vocabulary_are_unknown():
    """As `generate` reads its prompts; they have a text all the same."""
    files = tokenizer_files("a 3\nb 2\n.* 1\n", None, [5, 6], 7)
    tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    assert encoded(tokenizer, "a b ab .* bb a") == [4, UNK, UNK, UNK, UNK, 4]
    assert tokenizer.decode([4, 5, 6]) == "a b .*"


def test_a_model_without_text_has_no_tokenizer(tmp_path):
    small = {"vocab_size": 20, "d_model": 16, "heads": 4, "kv_heads": 2, "d_ff": 8}
    nfrs.to_huggingface(nfrs.Transformer(nfrs.preset("llama-tiny")[0].replace(**small)), tmp_path / "out")
    assert not [*(tmp_path / "out").glob("tokenizer*")]


@pytest.mark.parametrize(
    "vocabulary, codes, what",
    [
        ("a 3\n", "#version: 0.2\na b\n", "has 5 types and the model 6"),
        ("", None, "has 5 types and the model 6"),
        ("a 3\nb 2\n", "", "expected #version.*got ''"),
        ("a 3\nb 2\n", "a b\n", "expected #version.*got 'a b'"),
    ],
)
def test_damaged_files_are_refused(vocabulary, codes, what):
    with pytest.raises(nfrs.InputError, match=what):
        tokenizer_files(vocabulary, codes, [], 6)


def test_of_a_merge_that_comes_twice_the_first_counts(monkeypatch):
    whole = tokenizer_files("ab 3\n", "#version: 0.2\na b\nab c\n", [], 5)
    assert tokenizer_files("ab 3\n", "#version: 0.2\n" + "a b\nab c\n" * 10_000, [], 5) == whole
    monkeypatch.setattr(tokenizer, "_MOST", 1)
    with pytest.raises(nfrs.InputError, match="2 merges"):
        tokenizer_files("ab 3\n", "#version: 0.2\na b\nab c\n", [], 5)


def test_a_last_line_without_its_end_counts():
    whole = tokenizer_files("a 3\nb 2\n", "#version: 0.2\na b\n", [], 6)
    assert tokenizer_files("a 3\nb 2", "#version: 0.2\na b", [], 6) == whole
