"""What a run takes is measured before it, and a budget is kept."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

import normformer_rs as nfrs
from normformer_rs.quantities import in_bytes, size

WIDE = {"d_model": 128, "d_ff": 512, "heads": 4}
TRAINING = {"updates": 2, "max_tokens": 2000, "criterion": "loss", "device": "cpu"}


@pytest.fixture
def text(tmp_path):
    """Lines of one length: every batch is like the largest."""
    files = {}
    for name, lines in (("train", 400), ("valid", 2)):
        for side in ("source", "target"):
            path = tmp_path / f"{name}.{side}"
            path.write_text("".join(f"{' '.join(str((i + j) % 900) for j in range(24))}\n" for i in range(lines)))
            files[f"{name}_{side}"] = str(path)
    return files


def trainer(text, model=(), training=()):
    return nfrs.Trainer(
        nfrs.TransformerConfig(**{**WIDE, **dict(model)}),
        nfrs.TrainingConfig(**{**TRAINING, **dict(training)}),
        nfrs.DataConfig(**text, no_bpe=True),
    )


@pytest.mark.parametrize("residual", ["prenorm", "mhc", "dlcl", "attnres"])
def test_many_layers_are_told_from_few(text, residual):
    """Of eight layers: by the polynomial through two, four and six, and by the run, whose allocator keeps nothing."""
    model = {"residual": residual, "encoder_layers": 8, "decoder_layers": 8}
    needs = trainer(text, model).dry_run()
    program = """
        import json, sys
        import torch
        torch.set_num_threads(1)
        import normformer_rs as nfrs
        def held(name):
            return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])
        model, training, data = (json.loads(word) for word in sys.argv[2:])
        run = nfrs.Trainer(
            nfrs.TransformerConfig(**model), nfrs.TrainingConfig(**training), nfrs.DataConfig(**data, no_bpe=True)
        )
        before = held("VmRSS")
        run.fit(sys.argv[1], progress=False, tensorboard=False, curves=False)
        print(held("VmHWM") - before)
    """
    words = [json.dumps(part) for part in ({**WIDE, **model}, TRAINING, text)]
    lines = [line[8:] for line in program.strip("\n").splitlines()]
    environment = {**os.environ, "NORMFORMER_RS_ALLOCATOR": "return", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines), text["train_source"] + ".run", *words],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    said = needs.activation_bytes + 16 * needs.parameters
    assert said == pytest.approx(int(done.stdout), rel=0.15), size(said)  # of a quarter of a gigabyte; libraries, too


def test_moments_in_bf16_take_half(text):
    trainer(text).dry_run()  # after which libraries and data are there
    plain, half = (trainer(text, training={"moments": moments}).dry_run() for moments in ("f32", "bf16"))
    assert half.activation_bytes == plain.activation_bytes
    assert plain.training_bytes - half.training_bytes == pytest.approx(4 * plain.parameters, abs=4 << 20)


def test_activations_are_fewer_where_they_are_made_again(text):
    plain, again = (trainer(text, training={"activation_checkpointing": again}).dry_run() for again in (False, True))
    assert again.activation_bytes < 0.6 * plain.activation_bytes
    assert again.parameters == plain.parameters
    half = trainer(text, training={"max_tokens": 1000}).dry_run()
    assert half.activation_bytes == pytest.approx(plain.activation_bytes / 2, rel=0.1)


def test_a_budget_is_kept(monkeypatch, text):
    """Of 1,000 bytes beside activations, which are 4,000, and 800 where they are made again."""

    def dry_run(self):
        activations = 800 if self.training.activation_checkpointing else 4000
        return dataclasses.replace(measured, activation_bytes=activations, training_bytes=1000 + activations)

    run = trainer(text)
    measured = run.dry_run()
    monkeypatch.setattr(nfrs.Trainer, "dry_run", dry_run)
    assert run.within(5000).training == run.training
    for memory in (4999, 1800):
        assert run.within(memory).training == run.training.replace(activation_checkpointing=True)
    with pytest.raises(nfrs.InputError, match="max_tokens of about 500 would fit; accumulate"):
        run.within(1200)
    with pytest.raises(nfrs.InputError, match="parameters, gradients and moments alone are 1000 B"):
        run.within(1000)


def test_the_command_takes_a_size(tmp_path, text, capsys):
    flags = [word for key, value in text.items() for word in (f"--{key.replace('_', '-')}", value)]
    flags += ["--d-model", "128", "--d-ff", "512", "--heads", "4", "--max-tokens", "2000", "--device", "cpu"]
    shape = ["--no-bpe", "--dry-run"]
    from normformer_rs import cli

    before = os.environ.pop("NORMFORMER_RS_ALLOCATOR", None)
    try:
        assert cli.main(["train", *flags, *shape, "--memory", "20GB"]) == 0
        assert "memory to train: about" in capsys.readouterr().out
        assert cli.main(["train", *flags, *shape, "--memory", "much"]) == 2
        assert "expected a size of memory, such as 20GB" in capsys.readouterr().err
        assert cli.main(["train", *flags, *shape, "--memory", "10MB"]) == 2
        assert "take a smaller model" in capsys.readouterr().err
    finally:
        os.environ.pop("NORMFORMER_RS_ALLOCATOR", None)
        if before is not None:
            os.environ["NORMFORMER_RS_ALLOCATOR"] = before


@pytest.mark.parametrize(
    "text_of,count",
    [("20GB", 20 * 2**30), ("1.5g", 3 * 2**29), ("800 MiB", 800 * 2**20), ("4000000", 4_000_000), ("2K", 2048)],
)
def test_sizes(text_of, count):
    assert in_bytes(text_of) == count


@pytest.mark.parametrize("wrong", ["", "GB", "-1GB", "0", "1e9", "5 apples"])
def test_no_sizes(wrong):
    with pytest.raises(nfrs.InputError, match="expected a size"):
        in_bytes(wrong)
