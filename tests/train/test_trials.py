"""Trials of a study in training loops of one's own: seeds, swaps, losses, what is kept."""

import dataclasses
import functools
import itertools
import json
import math

import pytest
import torch
from torch import nn

import normformer_rs as nfrs
from normformer_rs.study import Study
from normformer_rs.study.measured import results_of

pytestmark = pytest.mark.usefixtures("one_thread")
ARMS = {"pre": {"residual": "prenorm"}, "post": {"residual": "postnorm"}}


def build() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1), 2)


def loop(trial, model: nn.Module, seen: dict) -> None:
    """A training loop that knows nothing of studies but the two lines of a trial."""
    seen[trial.arm, trial.lr, trial.seed] = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.lr)
    for step in itertools.count(1):
        x = torch.randn(2, 3, 8, generator=trial.generator)
        loss = (model(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.setdefault((trial.arm, "batches"), []).append(float(x.sum()))
        if not trial.report(step, loss):
            break


def test_a_loop_of_ones_own(tmp_path):
    seen: dict = {}
    arms = {"stock": lambda model: None, "deepnorm": {"residual": "deepnorm"}, "rms": {"norm": "rmsnorm"}}
    study = Study(arms=arms, lr=[1e-3, 1e-2], seeds=2, updates=4)
    for trial in study.trials(tmp_path):
        loop(trial, trial.apply(build()), seen)
    results = results_of(dataclasses.replace(study, text="own loop"), tmp_path)
    assert len(results.rows) == study.runs == 18 and (tmp_path / "study.html").exists()
    found = json.loads((tmp_path / "study.json").read_text())
    assert found["missing_runs"] == 0 and [arm["arm"] for arm in found["arms"]] == [*arms]
    assert seen["stock", "batches"] == seen["rms", "batches"] == seen["deepnorm", "batches"], "equal batches by seed"
    stock, rms = seen["stock", 1e-3, 1001], seen["rms", 1e-3, 1001]
    assert all(torch.equal(stock[name], rms[name]) for name in stock if name in rms)
    assert not [*study.trials(tmp_path)], "a second call has nothing to do"


def test_a_trial_that_ends_early_is_made_again(tmp_path):
    study = Study(arms={"stock": lambda model: None}, lr=[1e-2], seeds=1, updates=4)
    with pytest.raises(ZeroDivisionError):
        for trial in study.trials(tmp_path):
            trial.report(1, 2.0)
            1 / 0  # noqa: B018
    made = [repr(trial) for trial in study.trials(tmp_path) if trial.report(1, 2.0)]
    assert made == ["Trial(stock, 0.01, seed 1001)", "Trial(stock, 0.01, seed 1)"]


def test_a_validation_loss_that_is_not_finite_is_no_value(tmp_path):
    """The training loss does not stand in for it."""
    study = Study(arms={"stock": lambda model: None}, lr=[1e-2], seeds=1, updates=2)
    for trial in study.trials(tmp_path):
        trial.report(1, 2.0)
        trial.report(2, 1.0, valid=math.inf)
    assert json.loads((tmp_path / "study.json").read_text())["arms"][0]["failed"] == 1


def test_the_studys_options_hold_for_arms_of_a_loop(tmp_path):
    study = Study(arms={"pre": {"residual": "prenorm"}}, options={"norm": "rmsnorm"}, lr=[1e-2], seeds=1, updates=2)
    for trial in study.trials(tmp_path):
        model = trial.apply(build())
        assert any("RMSNorm" in type(module).__name__ for module in model.modules())
        break


def test_a_loss_that_is_not_finite_ends_a_trial_as_diverged(tmp_path):
    study = Study(arms={"stock": lambda model: None}, lr=[1e-2], seeds=1, updates=9)
    for trial in study.trials(tmp_path):
        assert trial.report(1, 2.0)
        assert not trial.report(2, math.nan) and trial.is_over
        with pytest.raises(nfrs.InputError, match="is over"):
            trial.report(3, 1.0)
    found = json.loads((tmp_path / "study.json").read_text())
    assert found["arms"][0]["failed"] == 1 and found["arms"][0]["verdicts"] == "failed with every rate"


def test_wrong_trials_are_named(tmp_path):
    study = Study(arms={"stock": lambda model: None}, lr=[1e-2], seeds=1, updates=9)
    with pytest.raises(nfrs.InputError, match="use `for trial in study`"):
        study.run(tmp_path)
    for trial in study.trials(tmp_path):
        trial.report(3, 1.0)
        with pytest.raises(nfrs.InputError, match="expected an update after 3; got step 2"):
            trial.report(2, 1.0)
        break
    with pytest.raises(nfrs.InputError, match="is counted in updates: give updates in place of tokens or flop"):
        next(Study(arms=ARMS, tokens=300).trials(tmp_path))
    with pytest.raises(nfrs.InputError, match='metric must be "valid_nll"'):
        next(Study(arms=ARMS, metric="bleu", updates=3).trials(tmp_path))


def test_functions_are_known_by_what_they_hold():
    def by(eps):
        return lambda model: eps

    def recipe(arm):
        study = Study(arms={"a": arm}, updates=5)
        return study.row(study.cells[0], 1e-3, 1).recipe

    assert recipe(by(1)) == recipe(by(1)) != recipe(by(2))
    partial = functools.partial
    assert recipe(partial(build, eps=1)) == recipe(partial(build, eps=1)) != recipe(partial(build, eps=2))
