"""fairseq's binarised folders and checkpoints, read by this package's loop and written for fairseq."""

import argparse
import gzip
import itertools
import math
from pathlib import Path

import numpy
import pytest
import torch
from fairseq_support import MARKS, RECIPE, SIZES, SMOOTHED, batch, command, generate, parameters, preprocess, train

import normformer_rs as nfrs
from normformer_rs import cli
from normformer_rs.formats import convert

pytestmark = MARKS


@pytest.fixture(scope="module", params=["mmap", "cached"])
def twin(request, data, tmp_path_factory) -> Path:
    """The corpus binarised again, numbered as this package numbers text: nothing is added to reach a multiple of 8."""
    return preprocess(
        data.parent, tmp_path_factory.mktemp("twin"), f"--padding-factor 1 --dataset-impl {request.param}"
    )


def files_of(folder: Path) -> dict[str, str]:
    sides = {"source": "de", "target": "en"}
    return {
        f"{part}_{side}": str(folder / f"{part}.{lang}") for part in ("train", "valid") for side, lang in sides.items()
    }


def fit(output: Path, data: nfrs.DataConfig) -> list[float]:
    """The losses of a short run of the Rust loop."""
    model = nfrs.TransformerConfig(d_model=32, d_ff=48, heads=4, encoder_layers=1, decoder_layers=1)
    training = nfrs.TrainingConfig(updates=12, max_tokens=300, lr=1e-2, warmup=5, evaluate_every=12, vocab_mask=True)
    history = nfrs.Trainer(model, training, data).fit(output, progress=False, curves=False, tensorboard=False)
    return [*history.loss, *history.evaluations.loss, *history.evaluations.bleu]


@pytest.mark.one_in(test=2)
def test_the_loop_reads_binarised_folders(data, twin, tmp_path, capfd):
    text = fit(tmp_path / "text", nfrs.DataConfig(**files_of(data.parent), no_bpe=True))
    assert fit(tmp_path / "bin", nfrs.DataConfig(data_bin=str(twin))) == text
    files = [tmp_path / run / name for name in ("vocabulary.txt", "target_types.txt") for run in ("text", "bin")]
    assert files[0].read_text() == files[1].read_text() and files[2].read_text() == files[3].read_text()
    lines = (data.parent / "test.de").read_text().splitlines()
    expected = nfrs.translate(tmp_path / "text", lines)
    assert nfrs.translate(tmp_path / "bin", nfrs.Binarised(twin)) == expected
    assert (
        nfrs.translate(tmp_path / "bin", nfrs.Binarised(data)) == expected
    )  # numbered otherwise: known by their pieces
    assert cli.main(["translate", "--model", str(tmp_path / "bin"), "--data-bin", str(twin), "--split", "test"]) == 0
    assert capfd.readouterr().out.splitlines() == [found[0].text for found in expected]
    given = ["train", "--data-bin", str(twin), "--source-lang", "en", "--output", str(tmp_path / "back"), "--dry-run"]
    assert cli.main([*given, "--preset", "transformer-tiny"]) == 0
    assert "vocabulary: 25 types" in capfd.readouterr().out


def test_what_is_no_binarised_folder_is_one_line(data, tmp_path, capsys):
    def error(*arguments: str) -> str:
        assert cli.main([*arguments]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        return said

    train = ["train", "--output", str(tmp_path / "run")]
    assert "none: not there; expected what fairseq-preprocess writes" in error(*train, "--data-bin", f"{tmp_path}/none")
    assert "found de-en" in error(*train, "--data-bin", str(data), "--source-lang", "fr")
    assert "leave train_target out" in error(*train, "--data-bin", str(data), "--train-target", "x")
    assert "--data-bin exclude each other" in error(*train, "--data-bin", str(data), "--no-bpe")
    separate = preprocess(data.parent, tmp_path / "separate", "--dataset-impl mmap", joined=False)
    assert "--joined-dictionary" in error(*train, "--data-bin", str(separate))
    content = (data / "train.de-en.de.idx").read_bytes()
    for path in data.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "train1.de-en.de.idx").write_bytes(content)
    assert "train1.de-en.de.idx: fairseq reads train, train1" in error(*train, "--data-bin", str(tmp_path), "--dry-run")
    (tmp_path / "train1.de-en.de.idx").unlink()
    (tmp_path / "train.de-en.de.idx").write_bytes(content[:18] + b"\xff" * 7 + content[25:])
    assert "it is damaged" in error(*train, "--data-bin", str(tmp_path))


LEARNED = "--encoder-learned-pos --decoder-learned-pos --max-source-positions 24 --max-target-positions 24"
CONVERTED = {
    "nfrs": "--arch nfrs_transformer --norm scalenorm --residual prenorm --fixnorm --vocab-mask",
    "admin": "--arch nfrs_transformer --norm layernorm --residual admin --output-bias --decoder-start bos",
    "stock": "--arch transformer",
    "learned": f"--arch transformer {LEARNED}",
    "learned positions": f"--arch nfrs_transformer --norm rmsnorm {LEARNED}",
    "ngpt": "--arch nfrs_transformer --residual ngpt",
}
STOCK = ("stock", "learned")


@pytest.mark.parametrize("which", CONVERTED)
@pytest.mark.one_in(all=5)
def test_converts_both_ways(which, data, tmp_path):
    loss = SMOOTHED if which not in STOCK else "cross_entropy"
    train(data, tmp_path / "out", 60, f"{CONVERTED[which]} {SIZES} --criterion {loss} --disable-validation")
    last, run, back = tmp_path / "out" / "checkpoint_last.pt", tmp_path / "run", tmp_path / "back.pt"
    assert cli.main(["convert", "--from", str(last), "--to", str(run)]) == 0
    ours = nfrs.Transformer.from_checkpoint(run)
    from fairseq import checkpoint_utils

    (theirs,), _ = checkpoint_utils.load_model_ensemble([str(last)], arg_overrides={"decoder_start": "eos"})
    source, target = batch()
    logits = theirs.eval()(source, None, target)[0]
    torch.testing.assert_close(ours(source, target)[target != 1], logits[target != 1], atol=1e-4, rtol=1e-4)
    assert cli.main(["convert", "--from", str(run), "--to", str(back)]) == 0
    first, second = (parameters(path) for path in (last, back))
    for state in (first, second):
        state.pop("is_profiled", None)
        for name in [name for name in state if name.endswith("embed_positions.weight")]:
            state[name] = state[name][2:]  # fairseq draws the row 0, which nothing reads; 1 is padding's
    assert which in STOCK or {n: v.tolist() for n, v in second.items()} == {n: v.tolist() for n, v in first.items()}
    convert.from_fairseq(back, tmp_path / "again", data=data)
    again = nfrs.Transformer.from_checkpoint(tmp_path / "again").state_dict()
    assert all(torch.equal(again[name], value) for name, value in ours.state_dict().items())
    if which == "stock":
        torch.save(before_0_9(torch.load(last, weights_only=True)), tmp_path / "old.pt")
        convert.from_fairseq(tmp_path / "old.pt", tmp_path / "old")
        old = nfrs.Transformer.from_checkpoint(tmp_path / "old").state_dict()
        assert all(torch.equal(old[name], value) for name, value in ours.state_dict().items())
    found = nfrs.translate(run, nfrs.Binarised(data), nfrs.SearchConfig(beam=5, rule="fairseq", max_length=12))
    for path in (last, back):
        assert_same_but_for_ties(found, generate(data, path))


@pytest.mark.full
def test_what_learned_positions_cannot_be_is_said(data, tmp_path):
    """One side's alone, and tables of two lengths."""
    last, run = tmp_path / "out" / "checkpoint_last.pt", tmp_path / "run"
    given = f"{SIZES} --criterion cross_entropy --disable-validation --arch transformer --max-source-positions 24"
    for flags, message in (
        ("--encoder-learned-pos", "--encoder-learned-pos alone: models of this package have learned positions on both"),
        (LEARNED.replace("24", "16", 1), "tables of positions have 16 and 24 rows"),
    ):
        train(data, tmp_path / "out", 1, f"{given} {flags} --reset-optimizer --restore-file none.pt")
        with pytest.raises(nfrs.InputError, match=message):
            convert.from_fairseq(last, run)
        assert not run.exists()


def before_0_9(saved: dict) -> dict:
    """A checkpoint as earlier versions of fairseq wrote it: one matrix for q, k and v."""
    state = saved["model"]
    for name in [name for name in state if ".q_proj." in name]:
        parts = [state.pop(name.replace("q_proj", f"{which}_proj")) for which in "qkv"]
        state[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
    return saved


@pytest.mark.parametrize("before", [False, True])
def test_stock_language_models_convert(before, data, tmp_path):
    """Postnorm, unless their flag says otherwise."""
    from fairseq.data import Dictionary
    from fairseq.models.transformer_lm import TransformerLanguageModel, base_lm_architecture

    dictionary = Dictionary.load(str(data / "dict.de.txt"))
    sizes = {"decoder_layers": 2, "decoder_embed_dim": 32, "decoder_ffn_embed_dim": 48, "decoder_attention_heads": 4}
    flags = argparse.Namespace(**sizes, tokens_per_sample=64, share_decoder_input_output_embed=True)
    base_lm_architecture(flags)
    flags.decoder_normalize_before, flags.activation_dropout, flags.arch = before, 0.0, "transformer_lm"
    task = argparse.Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    model = TransformerLanguageModel.build_model(flags, task).eval()
    task = {"data": str(data), "source_lang": "de"}
    torch.save({"model": model.state_dict(), "cfg": {"model": flags, "task": task}}, tmp_path / "lm.pt")
    convert.from_fairseq(tmp_path / "lm.pt", tmp_path / "run")
    tokens = torch.tensor([[2, 5, 6, 7]])
    ours = nfrs.Transformer.from_checkpoint(tmp_path / "run")(None, tokens)
    torch.testing.assert_close(ours, model(tokens)[0], atol=1e-5, rtol=1e-4)
    flags.decoder_normalize_before, flags.residual = True, "postnorm"
    torch.save({"model": model.state_dict(), "cfg": {"model": flags, "task": task}}, tmp_path / "lm.pt")
    with pytest.raises(nfrs.InputError, match="means --residual prenorm; got --residual postnorm: leave it out"):
        convert.from_fairseq(tmp_path / "lm.pt", tmp_path / "other")


def assert_same_but_for_ties(found: list, expected: list[tuple[str, float]]) -> None:
    """99.5% of the lines are the same; the others score the same to 1e-4."""
    pairs = [(best.text, best.score, text, score * math.log(2)) for (best, *_), (text, score) in zip(found, expected)]
    others = [pair for pair in pairs if pair[0] != pair[2]]
    assert len(found) == len(expected) and len(others) <= 0.005 * len(pairs), others
    assert all(abs(ours - theirs) < 1e-4 for _, ours, _, theirs in others), others


@pytest.mark.data
@pytest.mark.parametrize("which", ["stock", "nfrs"])
@pytest.mark.long
def test_translates_multi30k_as_fairseq_does(which, corpora, fairseq, tmp_path):
    """A small model, trained for a minute, on the thousand lines of test.2016."""
    folder = tmp_path / "text"
    folder.mkdir()
    for split, name, lines in (("train", "train", 8000), ("valid", "valid", 100), ("test", "test.2016", 1000)):
        for lang, theirs in (("de", "en"), ("en", "de")):  # English to German, under the names that `preprocess` takes
            packed = corpora / "multi30k-bpe-en-de" / f"{name}.{theirs}.gz"
            with gzip.open(packed, "rt", encoding="utf-8") as text:
                (folder / f"{split}.{lang}").write_text("".join(itertools.islice(text, lines)), encoding="utf-8")
    binarised = preprocess(folder, tmp_path / "bin")
    model = f"{CONVERTED[which]} {SIZES.replace('32', '64').replace('48', '128')} --disable-validation"
    loss = (
        "--criterion label_smoothed_cross_entropy --label-smoothing 0.1"
        if which == "stock"
        else f"--criterion {SMOOTHED}"
    )
    losses = train(binarised, tmp_path / "out", 250, f"{model} {loss} --dropout 0.1 --max-tokens 2000")
    assert losses[-1] < 0.8 * losses[0]
    last = tmp_path / "out" / "checkpoint_last.pt"
    convert.from_fairseq(last, tmp_path / "run")
    search = nfrs.SearchConfig(beam=5, rule="fairseq", max_length=40)  # what was hardly trained hardly ends
    found = nfrs.translate(tmp_path / "run", nfrs.Binarised(binarised), search)
    assert len({best.text for best, *_ in found}) > 500
    arguments = "--max-tokens 4000 --max-len-b 40 --post-process subword_nmt"
    assert_same_but_for_ties(found, generate(binarised, last, arguments, lines=1000))


@pytest.mark.full
def test_checkpoints_of_other_models_are_one_line(data, tmp_path):
    model = f"--arch nfrs_transformer {SIZES} --criterion {SMOOTHED} --disable-validation"
    train(data, tmp_path, 1, f"{model} --norm layernorm")
    last = tmp_path / "checkpoint_last.pt"

    def error(flags: str) -> str:
        given = f"{data} {RECIPE} {model} --save-dir {tmp_path} --max-update 2 {flags}"
        done = command("normformer_rs", "fairseq", "train", *given.split())
        assert done.returncode == 2 and "Traceback" not in done.stderr
        return done.stderr.strip().splitlines()[-1]

    wanted = (
        "error: the checkpoint is another architecture's: encoder.layers.0.norm1.weight should be (1,), it is (32,)"
    )
    assert wanted in error("--norm scalenorm")
    saved = torch.load(last, weights_only=True)
    saved["model"]["version"] += 1
    torch.save(saved, last)
    assert "version 2 of the nfrs architectures" in error("--norm layernorm")
    with pytest.raises(nfrs.InputError, match="version 2 of the nfrs architectures"):
        convert.from_fairseq(last, tmp_path / "run")


@pytest.mark.full
def test_checkpoints_with_bleu(data, tmp_path):
    """Their metrics hold numpy's arrays."""
    model = f"--arch nfrs_transformer {SIZES} --criterion {SMOOTHED} --best-checkpoint-metric bleu --eval-bleu "
    model += '--eval-bleu-args {"beam":2,"max_len_b":12} --eval-bleu-detok space --maximize-best-checkpoint-metric'
    last = tmp_path / "out" / "checkpoint_last.pt"
    train(data, tmp_path / "out", 3, model)
    with torch.serialization.safe_globals([numpy.ndarray, numpy.dtype]):
        pass  # as Hugging Face's Trainer does, and both are refused afterwards
    train(data, tmp_path / "out", 5, model)
    generate(data, last)
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()  # as in a process without fairseq
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(last)
        assert {name.split(".")[-1] for name in names} >= {"_reconstruct", "ndarray", "dtype"}
        convert.from_fairseq(last, tmp_path / "run")
        torch.save(torch.load(last, weights_only=False) | {"more": Path("x")}, last)
        with pytest.raises(nfrs.InputError, match="holds pathlib"):
            convert.from_fairseq(last, tmp_path / "trusted")
        convert.from_fairseq(last, tmp_path / "trusted", trust=True)
    finally:
        torch.serialization.add_safe_globals(allowed)
    trusted, first = (nfrs.Transformer.from_checkpoint(tmp_path / name).state_dict() for name in ("trusted", "run"))
    assert all(torch.equal(trusted[name], value) for name, value in first.items())


@pytest.mark.parametrize("flags", ["--norm powernorm --residual branchnorm --vocab-mask", "--residual admin"])
@pytest.mark.one_in(all=2)
def test_averages_of_checkpoints(flags, data, tmp_path):
    """fairseq's script adds up whatever a model holds and divides, whole numbers without a remainder."""
    last, states = tmp_path / "checkpoint_last.pt", []
    for updates in (2, 4, 6):
        train(data, tmp_path, updates, f"--arch nfrs_transformer {SIZES} --criterion {SMOOTHED} {flags}")
        states.append(torch.load(last, weights_only=True))
    averaged = {name: tensor.clone() for name, tensor in states[0]["model"].items()}
    for name, tensor in averaged.items():
        for state in states[1:]:
            tensor += state["model"][name]
        tensor.div_(3) if tensor.is_floating_point() else tensor.floor_divide_(3)
    torch.save(states[-1] | {"model": averaged}, last)
    for name in ("version", "decoder.vocab_mask", "is_profiled"):
        assert name not in averaged or torch.equal(averaged[name], states[-1]["model"][name])
    found = generate(data, last)
    convert.from_fairseq(last, tmp_path / "run")
    ours = nfrs.translate(
        tmp_path / "run", nfrs.Binarised(data), nfrs.SearchConfig(beam=5, rule="fairseq", max_length=12)
    )
    assert_same_but_for_ties(ours, found)


@pytest.mark.full
def test_old_files_with_an_output_matrix_of_their_own_convert(data, tmp_path):
    """Until fairseq 0.9 it was `decoder.embed_out`; and shared tables were there once."""
    given = f"{SIZES} --criterion cross_entropy --disable-validation --arch transformer"
    train(data, tmp_path / "out", 2, given, **{"model.share_all_embeddings": False})
    last = tmp_path / "out" / "checkpoint_last.pt"
    convert.from_fairseq(last, tmp_path / "new")
    saved = torch.load(last, weights_only=True)
    saved["model"]["decoder.embed_out"] = saved["model"].pop("decoder.output_projection.weight")
    torch.save(saved, last)
    convert.from_fairseq(last, tmp_path / "old")
    new, old = (nfrs.Transformer.from_checkpoint(tmp_path / name).state_dict() for name in ("new", "old"))
    assert "output_projection.weight" in new and all(torch.equal(old[name], value) for name, value in new.items())
    for change, message in (
        (
            lambda model, options: model.pop("encoder.layers.0.self_attn.k_proj.weight"),
            "its model lacks 'encoder.layers.0",
        ),
        (lambda model, options: vars(options).pop("dropout"), "its options are not those of .*dropout"),
        (
            lambda model, options: vars(options).update(encoder_attention_heads="x"),
            "encoder_?attention_?heads|heads must",
        ),
    ):
        saved = torch.load(last, weights_only=True)
        options = saved["cfg"]["model"]
        change(saved["model"], options)
        torch.save(saved, tmp_path / "changed.pt")
        with pytest.raises(nfrs.InputError, match=message):
            convert.from_fairseq(tmp_path / "changed.pt", tmp_path / "run")


def test_conversion_refuses(data, tmp_path):
    def error(*arguments: Path, **options: bool) -> str:
        with pytest.raises(nfrs.InputError) as raised:
            convert.from_fairseq(*arguments, **options)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert "no such file" in error(tmp_path / "none.pt", tmp_path / "run")
    torch.save({"model": {}, "args": Path("x")}, tmp_path / "code.pt")
    assert "code.pt: holds pathlib" in error(tmp_path / "code.pt", tmp_path / "run")
    assert "--trust" in error(tmp_path / "code.pt", tmp_path / "run")
    for content in (b"", b"nothing", gzip.compress(b"nothing")):
        (tmp_path / "bad.pt").write_bytes(content)
        for trust in (False, True):
            said = error(tmp_path / "bad.pt", tmp_path / "run", trust=trust)
            assert "bad.pt: not a checkpoint of fairseq, or damaged (" in said and "--trust" not in said
    for saved, expected in (
        ([], "a dictionary with model"),
        ({"model": [1], "args": 1}, "a dictionary of tensors"),
        ({"model": {}, "args": 1}, "cfg, with model and task, or args"),
        ({"model": {}, "cfg": {"x": 1}}, "cfg, with model and task, or args"),
        ({"model": {}, "cfg": {"model": None, "task": {}}}, "cfg, with model and task, or args"),
        ({"model": {}, "cfg": {"model": {"_name": "transformer"}, "task": {}}}, "--data DIR"),
    ):
        torch.save(saved, tmp_path / "bad.pt")
        assert expected in error(tmp_path / "bad.pt", tmp_path / "run")
    torch.save({"model": {}, "cfg": {"model": {"_name": "lstm"}, "task": {}}}, tmp_path / "lstm.pt")
    assert '"lstm"' in error(tmp_path / "lstm.pt", tmp_path / "run")
    flags = {"_name": "transformer_tiny", "encoder_embed_dim": 32, "encoder_layers": 1, "activation_fn": "gelu"}
    flags |= {"encoder_ffn_embed_dim": 48, "encoder_attention_heads": 4, "decoder_layers": 1, "dropout": 0.0}
    flags |= {"attention_dropout": 0.0, "activation_dropout": 0.0, "share_all_embeddings": True}
    flags |= {f"{side}_normalize_before": False for side in ("encoder", "decoder")}
    task = {"data": str(data), "source_lang": "de", "target_lang": "en"}
    state = {"decoder.embed_tokens.weight": torch.zeros(9, 32)}
    for change, message in {
        "activation_fn": "--activation-fn gelu: models of this package have ReLU",
        "layernorm_embedding": "--layernorm-embedding True: models of this package have",
        "": "embedding.weight must have shape [32, 32], the given one has [9, 32]",
    }.items():
        changed = {**flags, "activation_fn": "relu", **({change: flags.get(change, True)} if change else {})}
        torch.save({"model": state, "cfg": {"model": changed, "task": task}}, tmp_path / "other.pt")
        assert message in error(tmp_path / "other.pt", tmp_path / "run")
        assert not (tmp_path / "run").exists()
    (tmp_path / "there").mkdir()
    assert "exists already" in error(tmp_path / "lstm.pt", tmp_path / "there")
