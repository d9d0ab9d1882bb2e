"""Language models that speak, and their perplexity by a sliding window, against the oracle; the command."""

import json
import os
import random
import signal
import threading
import time

import pytest
import torch

import normformer_rs as nfrs
import reference as ref
from normformer_rs import _core, cli
from normformer_rs.loop import generation

pytestmark = pytest.mark.usefixtures("one_thread")
WORDS = ["viele", "vier", "viereck", "hund", "hunde", "hundert", "haus", "hausboot", "boot", "bote", "zwei", "zweig"]
SEGMENT = 16
MODEL = {"architecture": "decoder-only", "d_model": 16, "d_ff": 24, "heads": 2, "decoder_layers": 2, "dropout": 0.0}


def text_of(lines: int, seed: int) -> list[str]:
    """Sentences of 1 to 9 words; the next word is often a neighbour's in the list."""
    generator = random.Random(seed)
    found = []
    for _ in range(lines):
        at, line = generator.randrange(len(WORDS)), []
        for _ in range(generator.randint(1, 9)):
            line.append(WORDS[at])
            at = (at + generator.choice([1, 1, 1, 2, 5])) % len(WORDS)
        found.append(" ".join(line))
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a language model that has learned something."""
    folder = tmp_path_factory.mktemp("lm")
    for part, lines in (("train", 200), ("valid", 20)):
        (folder / part).write_text("\n".join(text_of(lines, len(part))) + "\n")
    training = nfrs.TrainingConfig(
        updates=60, max_tokens=1000, schedule="constant", lr=1e-2, warmup=0, label_smoothing=0.0
    )
    files = {"train_target": folder / "train", "valid_target": folder / "valid"}
    data = nfrs.DataConfig(**files, bpe_operations=20, segment_length=SEGMENT)
    trainer = nfrs.Trainer(nfrs.TransformerConfig(**MODEL), training, data)
    history = trainer.fit(folder / "run", progress=False, curves=False)
    assert history.nll[-1] < 0.75 * history.nll[0]
    return folder / "run"


@pytest.fixture(scope="module")
def oracle(run):
    """The model's state in f64, its options, and the target vocabulary."""
    model = nfrs.Transformer.from_checkpoint(run)
    state = {name: tensor.double() for name, tensor in model.state_dict().items()}
    flags = torch.tensor(_core.target_vocabulary(str(run)))
    return state, model.config.asdict(), flags


def ids(run, text: str) -> list[int]:
    """A text's ids, EOS between its lines."""
    lines = _core.encode(str(run), text.split("\n"))
    return [token for line in lines for token in [*line, ref.EOS]][:-1]


def prompts() -> list[str]:
    """50 of 0 to 12 words."""
    generator = random.Random(3)
    return [" ".join(generator.choices(WORDS, k=n % 13)) for n in range(50)]


@pytest.mark.full
def test_the_most_probable_text_is_the_oracles(run, oracle):
    """On 50 prompts, with a cache here and without one there."""
    state, config, mask = oracle
    generation = nfrs.GenerationConfig(temperature=0, max_length=20, sentences=2)
    found = nfrs.generate(run, prompts(), generation)
    assert len(found) == 50 and all(len(texts) == 1 for texts in found)
    made = {texts[0].text for texts in found}
    assert len(made) > 5
    for prompt, (text,) in zip(prompts(), found):
        how = {"context": SEGMENT, "max_length": 20, "sentences": 2, "mask": mask}
        tokens, total = ref.greedy_text(state, config, ids(run, prompt), **how)
        assert (text.tokens, text.finished) == (len(tokens), tokens.count(ref.EOS) == 2)
        assert text.log_probability == pytest.approx(total, abs=1e-3)
        if prompt and tokens[-1] == ref.EOS:
            assert ids(run, prompt + text.text) == [*ids(run, prompt), *tokens[:-1]]


SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.7},
    {"temperature": 1.5, "top_k": 9, "top_p": 0.9},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.one_in(test=2)
def test_samples_have_the_oracles_distribution(run, oracle, settings):
    """Pearson's chi-square of 4,000 next tokens; a distribution that is a little off is seen."""
    state, config, mask = oracle
    draws, prompt = 4000, "viele hunde"
    log_p = ref.next_log_p(state, config, ids(run, prompt), SEGMENT, mask)
    wanted = ref.choices(log_p, **settings)
    (texts,) = nfrs.generate(run, [prompt], nfrs.GenerationConfig(max_length=1, sentences=0, samples=draws, **settings))
    # of all tokens each has another log p
    numbers = torch.tensor([text.log_probability for text in texts], dtype=torch.float64)
    tokens = (numbers[:, None] - log_p[None, :]).abs().argmin(1)
    assert (numbers - log_p[tokens]).abs().max() < 1e-4

    def statistic(probabilities):
        expected, counts = probabilities * draws, torch.bincount(tokens, minlength=len(probabilities)).double()
        assert bool((counts[expected == 0] == 0).all()) or probabilities is not wanted
        expected, counts = expected[expected > 0], counts[expected > 0]
        return float(((counts - expected) ** 2 / expected).sum()), len(expected) - 1

    found, freedom = statistic(wanted)
    limit = freedom + 4 * (2 * freedom) ** 0.5 + 4
    assert freedom >= 2 and found < limit
    temperature = settings.get("temperature", 1.0) * 1.5
    assert statistic(ref.choices(log_p, **{**settings, "temperature": temperature}))[0] > limit


def test_a_text_depends_on_seed_prompt_and_sample_alone(run):
    given, generation = prompts()[:12], nfrs.GenerationConfig(max_length=15, sentences=0, samples=3)
    together = nfrs.generate(run, given, generation)
    one_by_one = nfrs.generate(run, given, generation, max_tokens=1)
    turned = nfrs.generate(run, given[::-1], generation)[::-1]
    fewer = nfrs.generate(run, given, generation.replace(samples=2))
    words = [[text.text for text in texts] for texts in together]
    for other in (one_by_one, turned):
        assert [[text.text for text in texts] for texts in other] == words
    assert [[text.text for text in texts] for texts in fewer] == [texts[:2] for texts in words]
    assert len({text for texts in words for text in texts}) > 30
    other = nfrs.generate(run, given, generation.replace(seed=2))
    assert sum(a.text == b.text for x, y in zip(together, other) for a, b in zip(x, y)) < 4


@pytest.mark.parametrize("context", [None, 5, 1])
@pytest.mark.one_in(test=2)
def test_a_prompt_longer_than_the_window(run, oracle, context):
    """The window holds its end; it moves on by half while the text grows."""
    state, config, mask = oracle
    long = "\n".join(text_of(8, 9))
    assert len(ids(run, long)) > 3 * SEGMENT
    generation = nfrs.GenerationConfig(temperature=0, max_length=30, sentences=0, context=context)
    ((text,), (short,)) = nfrs.generate(run, [long, "hund"], generation)
    for prompt, made in ((long, text), ("hund", short)):
        how = {"context": context or SEGMENT, "max_length": 30, "sentences": 0, "mask": mask}
        tokens, total = ref.greedy_text(state, config, ids(run, prompt), **how)
        assert made.tokens == 30 == len(tokens) and not made.finished
        assert made.log_probability == pytest.approx(total, abs=1e-3)


def test_text_comes_as_it_is_made(run):
    heard: dict[tuple[int, int], list[str | None]] = {}

    def listen(prompt, sample, text):
        heard.setdefault((prompt, sample), []).append(text)

    given = ["", "viele ", "hund", "haus\n", "zwei\nvier"]
    generation = nfrs.GenerationConfig(max_length=25, sentences=3, samples=2)
    found = nfrs.generate(run, given, generation, on_text=listen)
    assert len(heard) == 10
    parts = []
    for (prompt, sample), said in heard.items():
        text = found[prompt][sample].text
        assert said[-1] is None and None not in said[:-1] and "" not in said
        assert "".join(said[:-1]) == text
        whole = given[prompt] + text
        assert all(word in whole for word in whole.split()) and "@@" not in whole and "  " not in whole
        assert text.count("\n") == 3 - found[prompt][sample].finished or not found[prompt][sample].finished
        parts += said[:-1]
    assert any(part[0] not in " \n" for part in parts[1:]), "no word came in parts"
    assert found[2][0].text[0] in " \n" and found[3][0].text[:1] != " " and found[1][0].text[:1] != " "


def test_what_the_listener_raises_ends_it(run):
    def raising(kind):
        def listen(*_):
            raise kind("enough")

        return listen

    with pytest.raises(ValueError, match="enough"):
        nfrs.generate(run, ["hund"], on_text=raising(ValueError))
    with pytest.raises(nfrs.Interrupted, match="generation was stopped"):
        nfrs.generate(run, ["hund"], on_text=raising(KeyboardInterrupt))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])
def test_signals_are_heard_and_other_threads_run(monkeypatch, run, kind):
    """Without a listener, in the middle of a long text: another thread signals after fifty turns of its own."""

    def count():
        begun.wait()
        for _ in range(50):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGALRM)

    def generates(*arguments, of=generation._core.generate):
        begun.set()
        return of(*arguments)

    def rings(number, _):
        raise kind("the alarm rang") if number == signal.SIGALRM else AssertionError("the GIL was held")

    begun, other = threading.Event(), threading.Thread(target=count, daemon=True)
    monkeypatch.setattr(generation._core, "generate", generates)
    before = {number: signal.signal(number, rings) for number in (signal.SIGALRM, signal.SIGPROF)}
    try:
        signal.setitimer(signal.ITIMER_PROF, 20)  # of the processor's seconds
        other.start()
        with pytest.raises((nfrs.Interrupted, TimeoutError)) as stopped:
            nfrs.generate(run, ["hund"], nfrs.GenerationConfig(max_length=10**7, sentences=0))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        begun.set()
        for number, handler in before.items():
            signal.signal(number, handler)
    other.join()
    assert stopped.type is (nfrs.Interrupted if kind is KeyboardInterrupt else TimeoutError)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"temperature": -0.5}, "temperature must be at least 0"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
        ({"top_p": 1.01}, r"top_p must lie in \(0, 1\]"),
        ({"max_length": 0}, "max_length must be at least 1"),
        ({"sentences": -1}, "sentences must be at least 0"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"context": 0}, "context must be at least 1"),
        ({"temperature": 0, "top_k": 3}, "top_k would do nothing"),
    ],
)
def test_options_that_cannot_be_meant(run, options, words):
    with pytest.raises(nfrs.InputError, match=words):
        nfrs.generate(run, ["hund"], nfrs.GenerationConfig(**options))


def test_arguments_that_cannot_be_meant(run, tmp_path):
    for prompts_, words in (("hund", "got one text: split it into lines first"), ([b"x"], "line 1 is b'x'")):
        with pytest.raises(nfrs.InputError, match=words):
            nfrs.generate(run, prompts_)
    with pytest.raises(nfrs.InputError, match="max_tokens must be at least 1"):
        nfrs.generate(run, ["hund"], max_tokens=0)
    with pytest.raises(nfrs.InputError, match="max_tokens must be from 1 to"):
        nfrs.translate(run, ["hund"], max_tokens=2**64)
    with pytest.raises(nfrs.InputError, match="holds no model"):
        nfrs.generate(tmp_path, ["hund"])
    with pytest.raises(nfrs.InputError, match="unknown option of GenerationConfig"):
        nfrs.GenerationConfig(topk=3)
    assert nfrs.generate(run, []) == []


@pytest.mark.parametrize("window, stride", [(None, None), (16, 16), (16, 3), (5, 1), (40, 20)])
@pytest.mark.one_in(test=5, all=4)
def test_a_sliding_window_is_the_oracles(run, oracle, window, stride):
    state, config, mask = oracle
    path = run.parent / "valid"
    lines = path.read_text().splitlines()
    tokens = [token for line in _core.encode(str(run), lines) for token in [*line, ref.EOS]]
    wanted = ref.window_losses(state, config, tokens, window or SEGMENT, stride or SEGMENT // 2, mask)
    found = nfrs.evaluate_windows(run, path, window=window, stride=stride)
    total, words = sum(wanted), sum(len(line.split()) + 1 for line in lines)
    assert (found.tokens, found.words, found.lines) == (len(tokens), words, len(lines)) and len(tokens) > words
    assert found.nll == pytest.approx(total / len(tokens), rel=1e-5)
    assert found.perplexity == pytest.approx(2.718281828459045**found.nll)
    assert found.word_perplexity == pytest.approx(2.718281828459045 ** (found.nll * len(tokens) / words))
    assert found.characters == sum(len(line) + 1 for line in lines)
    assert 2 ** (found.bits_per_character * found.characters / words) == pytest.approx(found.word_perplexity)
    if window == stride == SEGMENT:
        assert found.nll == pytest.approx(nfrs.evaluate_loss(run, None, path).nll, rel=1e-6)


def test_windows_that_cannot_be_meant(run):
    path = run.parent / "valid"
    for window, stride, words in (
        (0, None, "window must be at least 1"),
        (8, 9, "stride must lie between 1 and the window, 8"),
        (None, 17, "the window, 16"),
        (None, 0, "stride must be at least 1"),
    ):
        with pytest.raises(nfrs.InputError, match=words):
            nfrs.evaluate_windows(run, path, window=window, stride=stride)


def test_a_model_that_translates_does_not_speak(tmp_path):
    for part in ("train", "valid"):
        (tmp_path / part).write_text("a b c\nb c a\n")
    shape = {name: value for name, value in MODEL.items() if name != "architecture"}
    model = nfrs.TransformerConfig(**shape, encoder_layers=1)
    files = {f"{part}_{side}": tmp_path / part for part in ("train", "valid") for side in ("source", "target")}
    trainer = nfrs.Trainer(model, nfrs.TrainingConfig(updates=1), nfrs.DataConfig(**files, no_bpe=True))
    trainer.fit(tmp_path / "run", progress=False, curves=False)
    with pytest.raises(nfrs.InputError, match="this model has an encoder: translate with it"):
        nfrs.generate(tmp_path / "run", ["a"])
    with pytest.raises(nfrs.InputError, match="this model has an encoder: leave window and stride out"):
        nfrs.evaluate_windows(tmp_path / "run", tmp_path / "valid")


def test_a_tensorized_model_speaks(tmp_path):
    """It reads its window anew for each token, and no longer one than it knows."""
    (tmp_path / "text").write_text("\n".join(text_of(30, 1)) + "\n")
    model = nfrs.TransformerConfig(**MODEL, attention="tensorized", tensorized_rank=3, tensorized_segment=8)
    files = {"train_target": tmp_path / "text", "valid_target": tmp_path / "text"}
    data = nfrs.DataConfig(**files, bpe_operations=20, segment_length=8)
    nfrs.Trainer(model, nfrs.TrainingConfig(updates=2), data).fit(tmp_path / "run", progress=False, curves=False)
    ((text,),) = nfrs.generate(tmp_path / "run", ["hund"], nfrs.GenerationConfig(max_length=20, sentences=0))
    assert text.tokens == 20
    with pytest.raises(nfrs.InputError, match="reads at most tensorized_segment = 8"):
        nfrs.generate(tmp_path / "run", ["hund"], nfrs.GenerationConfig(context=9))


def said(capsysbinary, *flags: str) -> str:
    assert cli.main(["generate", *flags]) == 0
    return capsysbinary.readouterr().out.decode()


def test_the_command_speaks(run, capsysbinary, tmp_path):
    given, flags = ["hund", "viele", ""], ["--model", str(run), "--max-length", "12", "--seed", "5"]
    options = nfrs.GenerationConfig(max_length=12, seed=5)
    wholes = [p + texts[0].text for p, texts in zip(given, nfrs.generate(run, given, options))]
    several = [word for prompt in given for word in ("--prompt", prompt)]
    assert said(capsysbinary, *flags, *several) == "".join(whole + "\n" for whole in wholes)
    (tmp_path / "in").write_text("\n".join(given) + "\n")
    assert said(capsysbinary, *flags, "--input", str(tmp_path / "in")) == "".join(f"{whole}\n" for whole in wholes)
    out = tmp_path / "out"
    assert said(capsysbinary, *flags, *several, "--output", str(out)) == ""
    assert out.read_text() == "".join(whole + "\n" for whole in wholes)
    more = ["--sentences", "0", "--samples", "2", "--temperature", "0.8", "--top-k", "9", "--top-p", "0.95"]
    named = {"sentences": 0, "samples": 2, "temperature": 0.8, "top_k": 9, "top_p": 0.95}
    texts = nfrs.generate(run, given, options.replace(**named))
    wholes = [p + made.text for p, found in zip(given, texts) for made in found]
    assert said(capsysbinary, *flags, *several, *more) == "".join(whole + "\n\n" for whole in wholes)
    assert said(capsysbinary, *flags, *several, *more, "--output", str(out)) == ""
    assert out.read_text() == "".join(whole + "\n\n" for whole in wholes)


def test_the_command_shows_text_while_it_comes(monkeypatch, capsysbinary):
    """The first text that is not over is shown; what others have said by then follows at once."""
    from normformer_rs.commands.generate import Live

    live, shown = Live(["a", "b", "c"], 1, ""), []
    for event in ((0, 0, " x"), (1, 0, " y"), (2, 0, " z"), (2, 0, None), (0, 0, "w"), (0, 0, None), (1, 0, None)):
        live(*event)
        shown.append(capsysbinary.readouterr().out.decode())
    assert shown == ["a x", "", "", "", "w", "\nb y", "\nc z\n"]
    live.close()
    assert capsysbinary.readouterr().out == b""
    cut = Live(["a"], 1, "")
    cut(0, 0, " x")
    cut.close()
    assert capsysbinary.readouterr().out == b"a x\n"


def test_no_prompts_are_continued_by_nothing(run, tmp_path, capsys):
    (tmp_path / "in").write_bytes(b"")
    for output in ([], ["--output", str(tmp_path / "out")]):
        assert cli.main(["generate", "--model", str(run), "--input", str(tmp_path / "in"), *output]) == 0
        assert capsys.readouterr().out == ""
    assert (tmp_path / "out").read_bytes() == b""


def test_the_command_evaluates_by_a_window(run, capsys):
    path = run.parent / "valid"
    assert cli.main(["evaluate", "--model", str(run), "--reference", str(path), "--stride", "4"]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    found = nfrs.evaluate_windows(run, path, stride=4)
    assert first == (
        f"perplexity: {found.perplexity:.3f} (nll {found.nll:.4f} nats per token, {found.tokens:,} tokens)"
    )
    assert second.startswith(f"per word:   {found.word_perplexity:.3f} ({found.words:,} words")
    assert third.startswith(f"bits:       {found.bits_per_character:.4f} per character ({found.characters:,}")
    code = cli.main(["evaluate", "--model", str(run), "--reference", str(path), "--window", "8", "--source", "x"])
    assert code == 2 and "which has no --source" in capsys.readouterr().err


def test_the_options_are_the_cores():
    fields = json.loads(_core.tables())["options"]["generation"]
    assert [field["name"] for field in fields] == [field.name for field in nfrs.GenerationConfig.FIELDS]
