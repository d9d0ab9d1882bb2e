"""A resume with changed options: each has the effect that the table in docs/names.md says, and no other."""

import json
from pathlib import Path

import pytest
import torch
from train_support import TINY, events, fit, losses, weights, whole_batch

import normformer_rs as nfrs
import reference as ref
from normformer_rs import _tables, cli, config

pytestmark = pytest.mark.usefixtures("one_thread")

EFFECTS = _tables.read()["resume"]
MODEL = [field.name for field in nfrs.TransformerConfig.FIELDS]
RUN = [field.name for kind in (config.TrainingConfig, config.DataConfig) for field in kind.FIELDS]
BASE = {"updates": 4, "max_tokens": 100, "evaluate_every": 2, "schedule": "constant", "lr": 1e-5, "warmup": 0}
"""Two evaluations; the rate is so low that the second is the best of any kind."""
CHANGED = {
    "updates": 12,
    "epochs": 3,
    "max_tokens": 80,
    "accumulate": 2,
    "schedule": "t-fixup",
    "lr": 2e-5,
    "lr_scale": 2.0,
    "lr_multiplier": 2.0,
    "warmup": 20,
    "warmup_init_lr": 1e-6,
    "warmup_share": 0.5,
    "lr_end": 0.5,
    "decay_share": 0.5,
    "lr_decay_rule": "paper",
    "lr_decay_factor": 0.5,
    "lr_decay_patience": 1,
    "count_from_zero": True,
    "min_lr": 1e-9,
    "optimizer": "lion",
    "muon_momentum": 0.9,
    "muon_nesterov": False,
    "muon_scale": "spectral",
    "muon_lr_multiplier": 2.0,
    "muon_on_sphere": True,
    "unit_matrices": True,
    "normuon_beta2": 0.9,
    "beta1": 0.8,
    "beta2": 0.9,
    "adam_eps": 1e-6,
    "adam_form": "torch",
    "weight_decay": 0.1,
    "weight_decay_of": "all",
    "clip_norm": 0.5,
    "qk_clip": 0.5,
    "label_smoothing": 0.2,
    "smoothing": "twt",
    "z_loss": 1e-3,
    "vocab_mask": False,
    "word_dropout": 0.1,
    "evaluate_every": 2,
    "criterion": "bleu",
    "patience": 9,
    "keep": 3,
    "log_layers": 1,
    "log_statistics": 1,
    "evaluation_beam": 2,
    "evaluation_tokenize": "char",
    "activation_checkpointing": True,
    "precision": "bf16",
    "moments": "bf16",
    "device": "auto",
    "cuda_graphs": False,
    "seed": 2,
    "skip_long": True,
}
"""A valid other value of each option that a translation model's run can change."""
BEFORE = {
    "lr_scale": {"lr": None, "schedule": "inverse-sqrt", "warmup": 4, "lr_multiplier": 1e-3, "min_lr": 0.0},
    "schedule": {"schedule": "val-decay"},
    "lr_decay_rule": {"schedule": "val-decay"},
    "evaluation_beam": {"criterion": "bleu"},
    "evaluation_tokenize": {"criterion": "bleu"},
    "weight_decay_of": {"weight_decay": 0.1},
    "lr_end": {"schedule": "cosine"},
    "decay_share": {"schedule": "wsd"},
    "normuon_beta2": {"optimizer": "normuon"},
    **{
        f"muon_{name}": {"optimizer": "muon"}
        for name in ("momentum", "nesterov", "scale", "lr_multiplier", "on_sphere")
    },
}
"""Options of the first run, where the change needs others than BASE."""


def warnings_of(output):
    return [event["text"] for event in events(output, "message") if event["level"] == "warning"]


def options_of(output):
    options = json.loads((output / "checkpoints" / "last" / "config.json").read_text())
    return {**options["training"], **options["data"]}


def test_the_table_names_each_option_of_a_run():
    assert sorted(EFFECTS) == sorted(RUN)
    by_text = {name for name in RUN if name.startswith(("train_", "valid_"))} | {
        "data_bin",
        "source_lang",
        "target_lang",
    }
    own_tests = by_text | {"bpe_operations", "bpe_codes", "no_bpe", "segment_length"}
    assert not own_tests & CHANGED.keys() and own_tests | CHANGED.keys() == set(RUN)


@pytest.mark.parametrize("option", CHANGED)
@pytest.mark.one_in(all=50)
def test_a_changed_option_has_its_effect(tmp_path, corpus, option):
    run, effect = tmp_path / "run", EFFECTS[option]
    before = BASE | BEFORE.get(option, {})
    of_data = {"skip_long": CHANGED[option]} if option == "skip_long" else {}
    fit(run, corpus, training=before)
    now = before | {"updates": 8} | ({} if of_data else {option: CHANGED[option]})
    if effect.startswith("refused"):
        files = sorted((path, path.read_bytes()) for path in run.rglob("*") if path.is_file())
        with pytest.raises(nfrs.InputError, match=f"{option} was .*, now .*; resume with the same options"):
            fit(run, corpus, training=now, resume=True)
        assert files == sorted((path, path.read_bytes()) for path in run.rglob("*") if path.is_file())
        return
    quiet = len(warnings_of(run))
    fit(run, {**corpus, **of_data}, training=now, resume=True, curves=False, tensorboard=False)
    said = [text for text in warnings_of(run)[quiet:] if "no instructions for products" not in text]
    assert [*losses(run)] == [*range(1, len(losses(run)) + 1)] and len(losses(run)) > 4
    assert options_of(run)[option] == CHANGED[option]
    is_place, is_forgotten = "the place in the epoch" in effect, "forgotten" in effect
    if option == "skip_long":  # no sentence is long: the text is the one that it was
        is_place = is_forgotten = False
    assert any("goes on in epoch" in text and f"{option} was" in text for text in said) == is_place, said
    assert any("forgotten" in text and f"{option} was" in text for text in said) == is_forgotten, said
    assert len(said) == (is_place or is_forgotten), said


@pytest.mark.parametrize("option", MODEL)
@pytest.mark.one_in(test=14, all=10)
def test_another_model_is_refused(tmp_path, corpus, option, run_of_six):
    if option == "vocab_size":
        pytest.skip("follows from the data")
    field = next(field for field in nfrs.TransformerConfig.FIELDS if field.name == option)
    before = TINY.get(option, field.default)
    if field.kind == "bool":
        other = not before
    elif field.choices:
        other = next(choice for choice in field.choices if choice != before)
    else:
        other = {"int": 4, "float": 0.75}[field.kind]
        other = other if other != before else other * 2
    with pytest.raises(nfrs.InputError, match=rf"trained with another model: .*\b{option} was .*, now"):
        fit(run_of_six[0], run_of_six[1], {option: other}, BASE, resume=True)


@pytest.fixture(scope="module")
def run_of_six(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    paths = {name: str(folder / name) for name in ("train_source", "train_target", "valid_source", "valid_target")}
    for path in paths.values():
        Path(path).write_text("a b c\nb c d\n" * 5)
    fit(folder / "run", paths, training=BASE)
    return folder / "run", paths


class OracleAdam(ref.Adam):
    """Adam whose decay may leave out vectors."""

    decays_vectors = True

    def step(self, state, grads, lr):
        after = super().step(state, grads, lr)
        if not self.decays_vectors:
            for name in grads:
                if state[name].dim() < 2:
                    after[name] = after[name] + lr * self.weight_decay * state[name]
        return after


@pytest.mark.parametrize(
    "before,change",
    [
        ({}, {"lr": 3e-3}),
        ({}, {"lr_multiplier": 0.5}),
        ({}, {"warmup": 8, "warmup_init_lr": 1e-3}),
        ({"warmup": 8}, {"count_from_zero": True}),
        ({}, {"schedule": "t-fixup"}),
        ({}, {"schedule": "inverse-sqrt", "warmup": 2}),
        ({}, {"beta1": 0.5}),
        ({}, {"beta2": 0.8}),
        ({}, {"adam_eps": 1e-2}),
        ({"adam_eps": 1e-2}, {"adam_form": "torch"}),
        ({}, {"weight_decay": 0.3}),
        ({"weight_decay": 0.3}, {"weight_decay": 0.0}),
        ({"weight_decay": 0.3}, {"weight_decay_of": "all"}),
        ({"weight_decay": 0.3, "weight_decay_of": "all"}, {"weight_decay_of": "matrices"}),
        ({}, {"clip_norm": 0.2}),
        ({}, {"label_smoothing": 0.3}),
        ({}, {"smoothing": "twt"}),
        ({}, {"accumulate": 2}),
        ({}, {"activation_checkpointing": True}),
        ({}, {"seed": 7}),
    ],
    ids=str,
)
@pytest.mark.one_in(all=20)
def test_from_a_taken_option_on_losses_are_the_oracles(tmp_path, corpus, before, change):
    """The oracle trains five updates with the old options and five with the new ones; one batch is the whole corpus."""
    run, first = tmp_path / "run", {"updates": 5, "lr": 1e-2, "schedule": "constant", "warmup": 0} | before
    fit(run, corpus, training=first)
    fit(run, corpus, training={**first, **change, "updates": 10}, resume=True)
    batch, mask = whole_batch(run, corpus)
    options = {k: v for k, v in {**TINY, "vocab_size": len(mask)}.items() if k != "dropout"}
    model = nfrs.Transformer(nfrs.TransformerConfig(**TINY, vocab_size=len(mask)), seed=1)
    state = {k: v.double() for k, v in model.named_parameters()} | dict(model.named_buffers())
    optimizer = OracleAdam()
    for update, loss in losses(run).items():
        now = {**first, **(change if update > 5 else {})}
        optimizer.betas = (now.get("beta1", 0.9), now.get("beta2", 0.98))
        optimizer.eps, optimizer.form = now.get("adam_eps", 1e-8), now.get("adam_form", "fairseq")
        optimizer.weight_decay = now.get("weight_decay", 0.0)
        optimizer.decays_vectors = now.get("weight_decay_of", "matrices") == "all"
        warm = (now["warmup"], now.get("warmup_init_lr", 0.0))
        number = update - now.get("count_from_zero", False)
        lr = {
            "constant": lambda now=now, warm=warm, n=number: ref.ValDecay(now["lr"], *warm).learning_rate(n),
            "t-fixup": lambda now=now, n=number: ref.t_fixup_decay(n, now["lr"]),
            "inverse-sqrt": lambda now=now, warm=warm, n=number: ref.inverse_sqrt_peak(n, now["lr"], *warm),
        }[now["schedule"]]()
        step = ref.train_step(
            state,
            options,
            [batch],
            optimizer,
            lr * now.get("lr_multiplier", 1.0),
            smoothing=now.get("label_smoothing", 0.1),
            formula=now.get("smoothing", "fairseq"),
            vocabulary_mask=mask,
            max_norm=now.get("clip_norm", 0.0),
        )
        assert abs(loss - step.loss) < 3e-6, f"update {update}: {loss} against {step.loss}"
        state = step.state


def test_moments_bear_their_parameters_names(tmp_path, corpus):
    from safetensors.torch import load_file

    fit(tmp_path / "run", corpus, training={"updates": 2})
    moments = load_file(tmp_path / "run/checkpoints/last/optimizer.safetensors")
    shapes = {name: tensor.shape for name, tensor in weights(tmp_path / "run").items()}
    for kind in ("exp_avg", "exp_avg_sq"):
        found = {name.removeprefix(f"{kind}."): m.shape for name, m in moments.items() if name.startswith(f"{kind}.")}
        assert found == shapes
        assert all(torch.isfinite(m).all() for m in moments.values())


def write_lines(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


@pytest.fixture
def language(tmp_path):
    lines = [" ".join(f"w{(i * j) % 7}" for j in range(1, 9)) for i in range(1, 31)]
    path = write_lines(tmp_path / "text", lines)
    return {"train_target": path, "valid_target": path}


LANGUAGE = {"architecture": "decoder-only", "positions": "rotary"}


@pytest.mark.full
def test_other_rows_keep_the_place_and_forget_the_best(tmp_path, language):
    run, training = tmp_path / "run", BASE | {"max_tokens": 64}
    fit(run, {**language, "segment_length": 32}, LANGUAGE, training)
    tokens = sum(event["tokens"] for event in events(run, "updated"))
    fit(run, {**language, "segment_length": 11}, LANGUAGE, training | {"updates": 20}, resume=True)
    said = warnings_of(run)
    assert any("segment_length was 32, now 11: the run goes on in epoch" in text for text in said), said
    assert any("segment_length was 32, now 11: forgotten: the best score" in text for text in said), said
    of_epoch = [event["tokens"] for event in events(run, "updated") if event["epoch"] == 1 + tokens // 270]
    assert sum(of_epoch) <= 270 + 64  # 30 lines of 8 words and an end; the last update may begin the next epoch
    logged = [event["nll"] for event in events(run, "evaluated")][-1]
    measured = nfrs.evaluate_loss(run, None, language["valid_target"], checkpoint="last").nll
    assert measured == pytest.approx(logged, abs=1e-5), "figures are measured in the checkpoint's own rows"


@pytest.mark.full
def test_options_of_a_resume_hold_at_the_next(tmp_path, corpus, capsys):
    words = [f"--{name.replace('_', '-')}={path}" for name, path in corpus.items()]
    words += ["--no-bpe", "--d-model=16", "--d-ff=32", "--heads=2", "--encoder-layers=1", "--decoder-layers=1"]
    words += ["--schedule=constant", "--warmup=0", "--lr=1e-3", "--updates=2"]
    run = ["train", "--output", str(tmp_path / "run"), "--no-progress"]
    assert cli.main([*run, *words]) in (None, 0)
    assert cli.main([*run, "--resume", "--lr", "1e-5", "--clip-norm", "3", "--updates", "4"]) in (None, 0)
    assert cli.main([*run, "--resume", "--updates", "6"]) in (None, 0)
    assert [event["lr"] for event in events(tmp_path / "run", "updated")] == [1e-3] * 2 + [1e-5] * 4
    assert options_of(tmp_path / "run")["clip_norm"] == 3
    first = [*run, "--resume", "--from-checkpoint", "2", "--updates", "3"]
    assert cli.main(first) in (None, 0)
    assert [event["lr"] for event in events(tmp_path / "run", "updated")][-1] == 1e-3, "as that checkpoint has it"


def test_merges_are_the_runs(tmp_path, corpus):
    codes = {name: tmp_path / f"{name}.codes" for name in ("a", "b")}
    codes["a"].write_text("#version: 0.2\na b</w>\n")
    codes["b"].write_text("#version: 0.2\nb c</w>\n")
    same = tmp_path / "same.codes"
    same.write_bytes(codes["a"].read_bytes())

    def train(updates, resume, **data):
        trainer = nfrs.Trainer(
            nfrs.TransformerConfig(**TINY), nfrs.TrainingConfig(updates=updates, warmup=1), nfrs.DataConfig(**data)
        )
        trainer.fit(tmp_path / "run", progress=False, curves=False, resume=resume)

    train(2, False, **corpus, bpe_codes=codes["a"])
    for other in ({"bpe_codes": codes["b"]}, {"bpe_operations": 5}, {"no_bpe": True}):
        with pytest.raises(nfrs.InputError, match=r"was trained on other text: .*resume with the same options"):
            train(4, True, **corpus, **other)
    train(4, True, **corpus, bpe_codes=same)


def test_statistics_measure_from_the_first_values(tmp_path, corpus):
    training = BASE | {"log_statistics": 1, "lr": 1e-3}
    fit(tmp_path / "run", corpus, training=training)
    fit(tmp_path / "run", corpus, training=training | {"updates": 8, "seed": 5}, resume=True)
    change = [event["statistics"]["change/decoder"] for event in events(tmp_path / "run", "updated")]
    assert all(later < 3 * change[3] for later in change[4:]), change


@pytest.mark.parametrize("schedule", ["constant", "inverse-sqrt"])
@pytest.mark.one_in(test=2)
def test_a_run_that_nothing_stops_is_refused(tmp_path, corpus, schedule):
    training = {"updates": 0, "schedule": schedule, "warmup": 0, "lr": 1e-3}
    with pytest.raises(nfrs.InputError, match=r"nothing would stop this run.*give updates, epochs or patience"):
        fit(tmp_path / "run", corpus, training=training)
    assert not (tmp_path / "run" / "config.json").exists()
    falls = {"updates": 0, "schedule": "inverse-sqrt", "warmup": 2, "lr": 1e-3, "min_lr": 5e-4}
    fit(tmp_path / "falls", corpus, training=falls)
    assert max(losses(tmp_path / "falls")) == 8  # 1e-3·√(2/8)


def test_a_run_that_ends_before_its_first_update_is_refused(tmp_path, corpus):
    with pytest.raises(nfrs.InputError, match=r"rate 5.00e-7 is below min_lr 1.00e-6"):
        fit(tmp_path / "run", corpus, training={"lr": 5e-7})
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_model_without_a_training_s_state_is_no_beginning(tmp_path, corpus):
    run = tmp_path / "run"
    fit(run, corpus, training={"updates": 2, "evaluate_every": 1})
    nfrs.average(run, last=2)
    (run / "checkpoints/last").unlink()
    average = run / "checkpoints/average"
    for name in [path.name for path in (run / "checkpoints").glob("update-*")]:
        for path in (run / "checkpoints" / name).iterdir():
            path.write_bytes((average / path.name).read_bytes())
    with pytest.raises(nfrs.InputError, match="is a model without a training's state") as refused:
        fit(run, corpus, training={"updates": 4}, resume=True)
    assert "--init-from" in str(refused.value) and "struct" not in str(refused.value)


class Listed(nfrs.Scheme):
    """A scheme whose initial values are long lists."""

    name = "listed-values"

    def around(self, place):
        from normformer_rs.schemes import Learned, ResidualSpec, norm

        values = Learned("gain", [0.123456789 + i for i in range(place.d_model)], place.d_model)
        return ResidualSpec(before=norm(), beta=values)

    def stack(self, place):
        from normformer_rs.schemes import StackSpec, norm

        return StackSpec(end=norm())


def test_a_configuration_that_no_reader_takes_is_refused_before_the_work(tmp_path, corpus):
    model = {"residual": Listed(), "d_model": 1024, "d_ff": 4, "encoder_layers": 60, "decoder_layers": 60}
    with pytest.raises(nfrs.InputError, match=r"config.json would have \d+ bytes, expected at most 4194304"):
        fit(tmp_path / "run", corpus, model, {"updates": 1})
    assert not (tmp_path / "run" / "config.json").exists()
