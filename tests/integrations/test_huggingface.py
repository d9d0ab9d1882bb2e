"""Hugging Face's Trainer, with its defaults, on models with this package's norms and schemes."""

import importlib
import json
import sys

import pytest
import torch
from torch import nn

import normformer_rs as nfrs
from normformer_rs import nn as nfnn
from normformer_rs.errors import InputError
from normformer_rs.integrations.gains import Undecayed, gain_values
from normformer_rs.nn.running import RunningNorm
from normformer_rs.surgery import load_swapped, swap_norms, swap_residuals

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from normformer_rs.integrations.huggingface import NormCallback, TrialCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.pin_memory.", "ignore::FutureWarning")
SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}


def bert():
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=40, **SHAPE))


def sentences(count=16):
    """Of 3 to 9 tokens; a batch is padded with 0 by `collate`."""
    torch.manual_seed(1)
    return [{"input_ids": torch.randint(3, 40, (3 + i % 7,))} for i in range(count)]


def collate(batch):
    longest = max(len(one["input_ids"]) for one in batch)
    ids = torch.stack([nn.functional.pad(one["input_ids"], (0, longest - len(one["input_ids"]))) for one in batch])
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def trainer(model, folder, callbacks=(), **options):
    settings = {"max_steps": 4, "per_device_train_batch_size": 4, "save_strategy": "no", "logging_steps": 2}
    settings |= {"learning_rate": 1e-2, "use_cpu": True, "disable_tqdm": True, "report_to": [], "seed": 3}
    arguments = transformers.TrainingArguments(str(folder), **settings | options)
    return transformers.Trainer(
        model, arguments, train_dataset=sentences(), data_collator=collate, callbacks=[*callbacks]
    )


@pytest.mark.parametrize("norm", ["batchnorm", "powernorm-v", "powernorm"])
@pytest.mark.one_in(all=3)
def test_statistics_are_those_of_unpadded_rows(norm, tmp_path):
    """The bar: no line beside the swap. Each norm's statistics, again from the rows that are real."""
    model, found = bert(), {}
    swap_norms(model, norm)
    masks = []
    model.register_forward_pre_hook(lambda _, __, given: masks.append(given["attention_mask"]), with_kwargs=True)

    def hear(module, args):
        rows = args[0].detach().double()[masks[-1].bool()]
        square, mean = rows.square().mean(0), rows.mean(0)
        if norm == "batchnorm":
            old = found.get(module, (torch.zeros(16).double(), torch.ones(16).double()))
            new = mean, rows.var(0, correction=0)
            found[module] = tuple(0.9 * a + 0.1 * b for a, b in zip(old, new))
        elif norm == "powernorm":  # within its warm-up: the mean of all batches so far
            count, old = found.get(module, (0, torch.zeros(16).double()))
            found[module] = count + 1, (count * old + square) / (count + 1)
        else:
            found[module] = (0.9 * found.get(module, (torch.ones(16).double(),))[0] + 0.1 * square,)

    norms = [m for m in model.modules() if isinstance(m, RunningNorm)]
    for module in norms:
        module.register_forward_pre_hook(hear)
    trainer(model, tmp_path).train()
    assert len(found) == len(norms) == 6 and any((mask == 0).any() for mask in masks)
    for module in norms:
        names = ("running_mean", "running_var") if norm == "batchnorm" else ("running_phi",)
        for name, expected in zip(names, found[module][-len(names) :]):
            torch.testing.assert_close(getattr(module, name).flatten().double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adafactor"])
@pytest.mark.one_in(all=2)
def test_branchnorms_t_follows_the_trainers_optimizer(optim, tmp_path):
    model = bert()
    swap_residuals(model, "branchnorm", init=None)
    trainer(model, tmp_path, optim=optim, gradient_accumulation_steps=2).train()
    assert [b.item() for name, b in model.named_buffers() if name.endswith(".t")] == [5]


class Decayed(nn.Module):
    """Gains that the Trainer decays by its own rule, without a gradient; and a matrix."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.head = nfnn.ScaleNorm(4), nn.Linear(4, 4)
        self.block = nfnn.Residual(nn.Linear(4, 4), 4, scheme="rezero")

    def forward(self, input_ids, attention_mask=None, labels=None):
        still = sum(0 * p.sum() for p in self.parameters())
        return {"loss": still, "logits": input_ids}


@pytest.mark.parametrize("with_callback", [True, False])
@pytest.mark.one_in(test=2)
def test_gains_are_not_decayed(with_callback, tmp_path):
    model = Decayed()
    with torch.no_grad():
        model.block.branch_scale.fill_(1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    callbacks = [NormCallback()] if with_callback else []
    one = trainer(model, tmp_path, callbacks, weight_decay=0.1)
    one.train()
    same = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    biases = {name for name in before if name.endswith("bias")}
    assert same == biases | ({"ln_1.weight", "block.branch_scale"} if with_callback else set())
    assert len(one.optimizer.param_groups) == 2


def test_a_resumed_run_has_the_same_bits(tmp_path):
    def run(folder, **options):
        model = bert()
        swap_residuals(model, "admin", init=None)
        swap_norms(model, "scalenorm")
        one = trainer(model, folder, [NormCallback()], weight_decay=0.1, save_strategy="steps", save_steps=2, **options)
        one.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2") if "b" in folder.name else None)
        return model.state_dict(), one.optimizer.state_dict()

    (whole, adam), (resumed, again) = run(tmp_path / "a"), run(tmp_path / "b")
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name
    assert adam["state"].keys() == again["state"].keys()
    for i, state in adam["state"].items():
        assert all(torch.equal(value, again["state"][i][key]) for key, value in state.items())
    last = max((tmp_path / "a").glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    step = json.loads((last / "trainer_state.json").read_text())
    assert step["global_step"] == step["max_steps"]
    saved = load_swapped(last).state_dict()
    assert saved.keys() == whole.keys() and all(torch.equal(value, whole[name]) for name, value in saved.items())
    gains = [value for name, value in whole.items() if "residual_scale" in name]
    assert len(gains) == 4 and not any((gain == 1).all() for gain in gains)


class Reporter(transformers.TrainerCallback):
    """As those for TensorBoard and others, which come before callbacks of the user's."""

    def __init__(self):
        self.heard = []

    def on_log(self, args, state, control, logs=None, **_):
        self.heard.append({**logs})


@pytest.mark.full
def test_gains_and_alpha_are_logged_to_every_reporter(tmp_path):
    model, reporter = bert(), Reporter()
    swap_residuals(model, "branchnorm", init=None)
    swap_norms(model, "scalenorm")
    one = trainer(model, tmp_path, [reporter])
    NormCallback.add_to(one)
    one.train()
    heard = [logs for logs in reporter.heard if "loss" in logs]
    assert len(heard) == 2 and all(logs.items() <= log.items() for logs, log in zip(heard, one.state.log_history))
    values = gain_values(model)
    assert {name for name in heard[-1] if "/" in name} == values.keys()
    last = heard[-1]["gain/bert.encoder.layer.1.output.LayerNorm.weight"]
    assert last == pytest.approx(model.bert.encoder.layer[1].output.LayerNorm.weight.item())
    alphas = [[value for name, value in logs.items() if name.startswith("alpha/")] for logs in heard]
    assert alphas[0] == [pytest.approx(3 / 4000)] and alphas[1] == [pytest.approx(5 / 4000)]


def test_a_reporter_that_would_miss_gains_is_named(tmp_path):
    one = trainer(bert(), tmp_path, [NormCallback()], max_steps=1)
    one.args.report_to = ["tensorboard"]
    with pytest.warns(UserWarning, match=r"tensorboard will not show gains.*NormCallback\.add_to\(trainer\)"):
        one.train()


def test_groups_and_the_order_of_states_are_the_trainers_between_steps():
    model = Decayed()
    matrices, others = [model.head.weight, model.ln_1.weight], [model.head.bias]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    at_step = []
    undecayed = Undecayed(optimizer, model)
    optimizer.register_step_pre_hook(lambda o, *_: at_step.append([[*g["params"]] for g in o.param_groups]))
    for p in (*matrices, *others):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [[id(p) for p in group] for group in at_step[0]] == [
        [id(model.head.weight)],
        [id(model.head.bias), id(model.ln_1.weight)],
    ]
    assert [g["params"] for g in optimizer.param_groups] == [matrices, others]
    optimizer.param_groups[1]["lr"] = 0.5  # no group has the decayed one's options: one more, for the step
    optimizer.step()
    assert len(at_step[1]) == 3 and at_step[1][2][0] is model.ln_1.weight and len(optimizer.param_groups) == 2

    def broken(*_):
        raise RuntimeError("no step")

    handle = optimizer.register_step_pre_hook(broken)
    with pytest.raises(RuntimeError, match="no step"):
        optimizer.step()
    assert [g["params"] for g in optimizer.state_dict()["param_groups"]] == [[0, 1], [2]]
    handle.remove(), undecayed.remove()
    optimizer.step()
    assert len(at_step[-1]) == 2
    with pytest.raises(InputError, match=r"expected a torch\.optim\.Optimizer, got a Linear"):
        Undecayed(nn.Linear(1, 1), model)


@pytest.mark.parametrize("package,module", [("transformers", "huggingface"), ("lightning", "lightning")])
def test_a_missing_package_is_named(package, module, monkeypatch):
    name = f"normformer_rs.integrations.{module}"
    for found in [found for found in sys.modules if found.partition(".")[0] == package or found == name]:
        monkeypatch.delitem(sys.modules, found)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"integrations\.{module} needs {package}: pip install"):
        importlib.import_module(name)


@pytest.mark.full
def test_gradients_are_logged_on_request(tmp_path):
    """Of each layer, as the Trainer has clipped them: together they have the length that it clips to."""
    for wanted in (False, True):
        made = trainer(bert(), tmp_path, max_grad_norm=0.01)
        NormCallback.add_to(made, gradients=wanted, log=False)
        made.train()
        logs = [log for log in made.state.log_history if "loss" in log]
        norms = [{k: v for k, v in log.items() if k.startswith("gradient/")} for log in logs]
        assert len(logs) == 2 and all(bool(found) is wanted for found in norms)
    assert "gradient/bert.encoder.layer.1" in norms[-1] and not any(name.startswith("gain/") for name in logs[-1])
    assert sum(norm**2 for norm in norms[-1].values()) ** 0.5 == pytest.approx(0.01, rel=1e-3)
    assert logs[-1]["grad_norm"] > 0.1


def test_a_study_of_trainers(tmp_path):
    """Four lines beside the Trainer: the trial's losses are those that the Trainer logs."""
    arms, seen = {"bert": lambda model: model, "deep": {"residual": "deepnorm"}}, {}
    study = nfrs.Study(arms=arms, lr=[1e-2], seeds=1, updates=4)
    for trial in study.trials(tmp_path / "study"):
        options = {"max_steps": 9, "logging_steps": 1, "seed": trial.seed, "learning_rate": trial.lr}
        task = trainer(trial.apply(bert()), tmp_path, [TrialCallback(trial)], **options)
        task.train()
        task.evaluate(sentences())
        logged = [entry["loss"] for entry in task.state.log_history if "loss" in entry]
        assert trial.is_over and trial.losses == logged and len(logged) == 4, "it ends with the budget"
        evaluated = [entry["eval_loss"] for entry in task.state.log_history if "eval_loss" in entry]
        assert trial.valid == evaluated[-1]
        seen[repr(trial)] = trial.valid
    assert len(seen) == 4
    found = json.loads((tmp_path / "study" / "study.json").read_text())
    assert [round(seen[f"Trial({arm['arm']}, 0.01, seed 1)"], 4) for arm in found["arms"]] == [
        arm["values"]["1"] for arm in found["arms"]
    ]


def test_a_loss_that_is_not_finite_reaches_the_trial(tmp_path):
    """The Trainer's own filter would log 0 in its place."""
    study = nfrs.Study(arms={"bert": lambda model: model}, lr=[1e-2], seeds=1, updates=4)
    for trial in study.trials(tmp_path / "study"):
        model = trial.apply(bert())
        with torch.no_grad():
            model.bert.embeddings.word_embeddings.weight.fill_(torch.nan)
        task = trainer(model, tmp_path, [TrialCallback(trial)], max_steps=9, logging_steps=1)
        task.train()
        assert trial.is_over and len(trial.losses) == 1 and not torch.tensor(trial.losses).isfinite().any()
    assert json.loads((tmp_path / "study" / "study.json").read_text())["arms"][0]["failed"] == 1
