"""Warnings of options that are valid and that few runs want, and checks of folders without torch."""

import pytest

import normformer_rs as nfrs
from normformer_rs import InputError, TrainingConfig, TransformerConfig, _core, cli, commands
from normformer_rs.commands import beforehand
from normformer_rs.loop.advice import warnings_of

LARGE = 46_000_000
DEFAULT = TransformerConfig()


def warnings(training=(), parameters=10, chosen=None, **model):
    return warnings_of(TransformerConfig(**model), TrainingConfig(**dict(training)), parameters, chosen)


@pytest.mark.parametrize(
    "options, is_said",
    [
        ({"updates": 100}, True),  # of 4,000 updates of warm-up
        ({"updates": 4000}, False),  # the last update has the peak
        ({"updates": 3999}, True),
        ({"updates": 4000, "count_from_zero": True}, True),  # the last is number 3,999
        ({"updates": 4001, "count_from_zero": True}, False),
        ({"updates": 100, "schedule": "constant"}, True),
        ({"updates": 100, "schedule": "val-decay", "lr": 1e-3}, True),
        ({"updates": 100, "schedule": "no-warmup"}, False),
        ({"updates": 100, "schedule": "t-fixup"}, False),
        ({"updates": 100, "warmup": 0}, False),
        ({"updates": 0, "epochs": 3}, False),  # how many updates these are, the text says
        ({}, False),
    ],
)
def test_a_warm_up_that_never_ends_is_said(options, is_said):
    found = warnings(options)
    assert len(found) == is_said
    for line in found:
        assert f"the run of {options['updates']:,}: the learning rate never reaches its peak; choose a smaller" in line


def test_the_schedule_s_peak_is_where_the_warning_has_it():
    """By the schedules' equations, update by update."""
    for options in ({"warmup": 10}, {"warmup": 10, "count_from_zero": True}, {"warmup": 10, "schedule": "constant"}):
        rate = [rate_at(options, update) for update in range(1, 14)]
        peak = 1 + rate.index(max(rate))
        assert not warnings({**options, "updates": peak}) and warnings({**options, "updates": peak - 1}), options


def rate_at(options, update):
    """Goyal's and Vaswani's: the number of an update over the warm-up's, then 1 or √(warm-up/number)."""
    number = update - bool(options.get("count_from_zero"))
    if number <= options["warmup"]:
        return number / options["warmup"]
    return 1.0 if options.get("schedule") == "constant" else (options["warmup"] / number) ** 0.5


@pytest.mark.parametrize(
    "given, is_said",
    [
        ({"chosen": set()}, True),
        ({"chosen": {"lr", "norm", "output"}}, True),
        ({"chosen": {"preset"}}, False),
        ({"chosen": {"d_model"}}, False),
        ({"chosen": {"decoder_layers"}}, False),
        ({"chosen": None}, False),
        ({"chosen": set(), "parameters": 19_000_000}, False),
        ({"chosen": set(), "training": {"device": "cuda"}}, False),
    ],
)
def test_a_large_default_on_a_cpu_is_said(given, is_said):
    found = warnings(**{"parameters": LARGE, **given})
    assert len(found) == is_said
    for line in found:
        assert "46,000,000 parameters" in line and "--preset transformer-tiny" in line
    assert "transformer-tiny" in nfrs.PRESETS and "llama-tiny" in nfrs.PRESETS
    for line in warnings(architecture="decoder-only", **{"parameters": LARGE, **given}):
        assert "--preset llama-tiny" in line


def test_train_warns_once_before_the_first_update(monkeypatch, capsys, tmp_path):
    """After the text has been read, when the size is known, and as the loop reports its start."""
    seen = []

    def train(model, training, data, output, mode, group, observer, from_checkpoint, init_from):
        observer.started({"parameters": LARGE, "vocabulary": 7, "device": "cpu", "update": 0, "updates": 2})
        seen.append(capsys.readouterr().err)
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "log.jsonl").write_text("")
        raise _core.Interrupted("enough")

    monkeypatch.setattr(_core, "train", train)
    (tmp_path / "text").write_text("a b\n")
    text = [f"--{part}-{side}={tmp_path / 'text'}" for part in ("train", "valid") for side in ("source", "target")]
    given = ["train", "--output", str(tmp_path / "run"), *text, "--no-bpe", "--no-progress"]
    assert cli.main([*given, "--updates", "100"]) == 2
    warned = [line for line in seen[0].splitlines() if line.startswith("warning: ")]
    assert len(warned) == 2 and "warm-up of 4,000" in warned[0] and "default size" in warned[1]
    assert cli.main([*given, "--preset", "transformer-tiny", "--overwrite"]) == 2
    assert "warning: " not in seen[1]
    fades = ["--preset", "transformer-tiny", "--norm", "prepbn", "--warmup", "10", "--overwrite"]
    assert cli.main([*given, *fades, "--updates", "100"]) == 2
    assert "warning: prepbn fades for 4,000 updates, and the run has 100" in seen[2]
    assert cli.main([*given, *fades, "--updates", "100", "--prepbn-steps", "60"]) == 2
    assert "warning: " not in seen[3]
    fades = ["--preset", "transformer-tiny", "--encoder-norm", "prepbn", "--warmup", "10", "--overwrite"]
    assert cli.main([*given, *fades, "--updates", "100"]) == 2
    assert "warning: prepbn fades for 4,000 updates, and the run has 100" in seen[4]


def test_a_dry_run_warns_too(monkeypatch, capsys):
    needs = '{"parameters": 46000000, "parameter_bytes": 4936, "activation_bytes": 2, "training_bytes": 3, '
    needs += '"vocabulary": 9712, '
    needs += '"sentences": 40, "skipped": 0}'
    monkeypatch.setattr(_core, "dry_run", lambda *_: needs)
    monkeypatch.setattr(commands.train, "check_data", lambda model, data: None)
    assert cli.main(["train", "--dry-run", "--updates", "10"]) == 0
    assert capsys.readouterr().err.count("warning: ") == 2


@pytest.mark.parametrize("alpha", [1e6, -1e6, 10.5, -11])
def test_an_alpha_that_makes_all_scores_zero_is_refused(alpha):
    with pytest.raises(
        InputError, match=r"alpha must lie between -10 and 10; got .*: all scores would be 0 or infinite"
    ):
        nfrs.SearchConfig(alpha=alpha)
    assert [nfrs.SearchConfig(alpha=value).alpha for value in (-10, 0, 10, None)] == [-10.0, 0.0, 10.0, None]


def test_a_run_s_checkpoints_are_found_by_name_and_number(tmp_path, monkeypatch):
    checkpoints = tmp_path / "checkpoints"
    for name in ("update-00000010", "update-00000020-2", "average"):
        (checkpoints / name).mkdir(parents=True)
    with pytest.raises(InputError, match="holds no model"):
        beforehand.check_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    for name in ("best", "last", "average", "10", "20", "update-00000010"):  # the core says where a link leads nowhere
        beforehand.check_model(tmp_path, name)
    for name in ("15", "bset", "update-00000015", "1", ""):
        with pytest.raises(InputError, match=r'there is no checkpoint ".*"; .* has average, update-00000010, '):
            beforehand.check_model(tmp_path, name)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    for path in ("elsewhere", str(tmp_path / "nowhere")):  # paths: the core says what lies there
        beforehand.check_model(tmp_path, path)
