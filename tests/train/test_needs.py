"""What a run takes is measured before it, and a budget is kept."""

import dataclasses
import os
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file
from torch.autograd import profiler
from train_support import weights

import normformer_rs as nfrs
from normformer_rs.loop.quantities import in_bytes, size

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
@pytest.mark.one_in(all=4)
def test_many_layers_are_told_from_few(tmp_path, text, residual):
    """Eight layers: the polynomial through two, four and six layers gives the peak that the run's tensors reach."""
    model = {"residual": residual, "encoder_layers": 8, "decoder_layers": 8}
    run = trainer(text, model, {"updates": 1})
    needs = run.dry_run()
    with tensor_bytes() as peak:
        run.fit(tmp_path / "run", progress=False, tensorboard=False, curves=False)
    said = needs.activation_bytes + 16 * needs.parameters
    assert said == pytest.approx(peak[0], rel=0.1), size(said)  # 0.3 to 1 GB; the run adds up to 4% of its own


@contextmanager
def tensor_bytes():
    """Gives a list that has, after the block, the most bytes that tensors of this thread held at once within it.

    torch's own count: neither the allocator, nor other processes, nor libraries change it.
    """
    profile, peak = profiler.profile(profile_memory=True), []
    kinds = {torch.profiler.ProfilerActivity.CPU}
    torch.autograd._prepare_profiler(profile.config(), kinds)
    # no operator is recorded: a run has millions of them
    torch.autograd._enable_profiler(profile.config(), kinds, {torch._C._profiler.RecordScope.USER_SCOPE})
    try:
        yield peak
    finally:
        found = (event.typed for event in torch.autograd._disable_profiler().experimental_event_tree())
        # the running total: events' clocks may differ between cores
        totals = [fields.total_allocated for kind, fields in found if kind == torch._C._profiler._EventType.Allocation]
        peak.append(max(totals))


@pytest.mark.full
def test_moments_in_bf16_take_half(tmp_path, text):
    """The sizes are those of the tensors: a run for a GPU counts nothing else."""
    plain, half = (trainer(text, training={"moments": kind, "device": "cuda"}).dry_run() for kind in ("f32", "bf16"))
    assert half.activation_bytes == plain.activation_bytes
    assert plain.training_bytes == plain.activation_bytes + 16 * plain.parameters
    assert plain.training_bytes - half.training_bytes == 4 * plain.parameters
    for kind, size_of_one in (("f32", 4), ("bf16", 2)):
        trainer(text, {"encoder_layers": 1, "decoder_layers": 1}, {"updates": 1, "moments": kind}).fit(
            tmp_path / kind, progress=False, tensorboard=False, curves=False
        )
        moments = load_file(tmp_path / kind / "checkpoints" / "last" / "optimizer.safetensors").values()
        parameters = sum(tensor.numel() for tensor in weights(tmp_path / kind).values())
        assert sum(tensor.nbytes for tensor in moments) == 2 * size_of_one * parameters


@pytest.mark.full
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


@pytest.mark.full
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
