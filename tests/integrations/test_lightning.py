"""Lightning's Trainer on a module with this package's norms and schemes."""

import csv
from pathlib import Path

import pytest
import torch
from torch import nn

import normformer_rs as nfrs
from normformer_rs import nn as nfnn

pytest.importorskip("lightning")
import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger

from normformer_rs.integrations.lightning import NormCallback, TrialCallback

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:.*log_every_n_steps",
    "ignore:The dirpath has changed",
    "ignore::FutureWarning",
)


class Task(pl.LightningModule):
    def __init__(self, residual):
        super().__init__()
        layer = nfnn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, residual=residual, norm="scalenorm")
        self.encoder = nfnn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 1)

    def training_step(self, batch, _):
        return self.head(self.encoder(batch)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2, weight_decay=0.1)


def fit(residual, folder, steps=4, seed=0, callback=None, clip=None, **options):
    torch.manual_seed(seed)
    task, logger = Task(residual), CSVLogger(folder / "logs")
    rows = torch.linspace(-1, 1, 4 * 3 * 8).sin().view(4, 3, 8)
    data = torch.utils.data.DataLoader(rows.repeat(2, 1, 1), batch_size=4)  # equal batches: Lightning skips some
    checkpoint = pl.callbacks.ModelCheckpoint(
        folder / "kept", filename="{step}", save_top_k=-1, save_on_train_epoch_end=True
    )
    trainer = pl.Trainer(
        max_steps=steps, accelerator="cpu", logger=logger, log_every_n_steps=2, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback or NormCallback(), checkpoint], gradient_clip_val=clip,
    )  # fmt: skip
    trainer.fit(task, data, **options)
    return task, logger


def test_t_moves_and_gains_and_alpha_are_logged(tmp_path):
    task, logger = fit("branchnorm", tmp_path)
    assert task.encoder.t.item() == 5
    logged = csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines())
    rows = [row for row in logged if row["alpha/encoder"]]
    assert [int(row["step"]) for row in rows] == [2, 4]
    assert float(rows[-1]["alpha/encoder"]) == pytest.approx(5 / 4000)
    found, gain = rows[-1]["gain/encoder.layers.1.norm2.weight"], task.encoder.layers[1].norm2.weight.item()
    assert float(found) == pytest.approx(gain)


def test_gradients_are_logged_on_request_before_clipping(tmp_path):
    """Their squares sum up to the whole gradient's, which the clipping to 1e-6 would have made tiny."""
    heard = []

    class Hearing(Task):
        def configure_gradient_clipping(self, optimizer, *given, **options):
            heard.append(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]).item())
            super().configure_gradient_clipping(optimizer, *given, **options)

    tasks, folder = {False: Task, True: Hearing}, tmp_path
    for wanted, kind in tasks.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("test_lightning.Task", kind)
            _, logger = fit("prenorm", folder / str(wanted), callback=NormCallback(gradients=wanted), clip=1e-6)
        (*_, last) = csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines())
        norms = {name: float(value) for name, value in last.items() if name.startswith("gradient/")}
        assert bool(norms) is wanted
    assert "gradient/encoder.layers.1" in norms and "gradient/head" in norms
    assert sum(norm**2 for norm in norms.values()) ** 0.5 == pytest.approx(heard[-1], rel=1e-4)


def test_admin_is_profiled_by_the_first_batch_and_a_resumed_run_has_the_same_bits(tmp_path):
    whole, _ = fit("admin", tmp_path / "a")
    gains = [layer.residual_scale2 for layer in whole.encoder.layers]
    assert not any((gain == 1).all() for gain in gains)
    resumed, _ = fit("admin", tmp_path / "b", seed=5, ckpt_path=str(tmp_path / "a" / "kept" / "step=2.ckpt"))
    for (name, p), q in zip(whole.named_parameters(), resumed.parameters()):
        assert torch.equal(p, q), name


def test_one_group_with_decay_does_not_reach_gains(tmp_path):
    class Still(Task):
        def training_step(self, batch, _):
            return sum(0 * p.sum() for p in self.parameters())

    task = Still("layerscale")
    before = {name: p.detach().clone() for name, p in task.named_parameters()}
    data = torch.utils.data.DataLoader(torch.randn(4, 3, 8), batch_size=4)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = pl.Trainer(max_steps=1, callbacks=[NormCallback()], enable_checkpointing=False, **quiet)
    trainer.fit(task, data)
    for name, p in task.named_parameters():
        is_gain = "norm" in name or "branch_scale" in name
        assert torch.equal(p, before[name]) == (is_gain or not before[name].any()), name
    assert len(trainer.optimizers[0].param_groups) == 1


def test_a_study_of_trainers(tmp_path):
    """The trial has each step's loss, the metric that was named, and ends the training with its budget."""

    class Validated(Task):
        def validation_step(self, batch, _):
            self.log("val_loss", self.head(self.encoder(batch)).square().mean())

    study = nfrs.Study(arms={"pre": {"norm": "rmsnorm"}}, lr=[1e-2], seeds=1, updates=3)
    for trial in study.trials(tmp_path / "study"):
        task = trial.apply(Validated("prenorm"))
        rows = torch.randn(8, 3, 8, generator=trial.generator)
        data = torch.utils.data.DataLoader(rows, batch_size=4)
        ended = pl.Trainer(
            max_steps=9, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, callbacks=[TrialCallback(trial)], val_check_interval=1,
        )  # fmt: skip
        ended.fit(task, data, data)
        assert ended.global_step == 3 == len(trial.losses) and trial.is_over
        assert trial.valid == float(ended.callback_metrics["val_loss"])
    assert (tmp_path / "study" / "study.html").exists()


def test_losses_of_accumulated_batches_are_whole(tmp_path):
    study, seen = nfrs.Study(arms={"pre": {"norm": "rmsnorm"}}, lr=[1e-2], seeds=1, updates=2), []

    class Heard(Task):
        def training_step(self, batch, number):
            loss = super().training_step(batch, number)
            seen.append(float(loss.detach()))
            return loss

    trial = next(study.trials(tmp_path / "study"))
    rows = torch.randn(32, 3, 8, generator=trial.generator)
    ended = pl.Trainer(
        max_steps=9, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[TrialCallback(trial)], accumulate_grad_batches=4,
    )  # fmt: skip
    ended.fit(trial.apply(Heard("prenorm")), torch.utils.data.DataLoader(rows, batch_size=4))
    assert trial.losses == pytest.approx([seen[3], seen[7]])
