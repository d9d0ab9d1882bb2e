"""The fairseq plug-in: against fairseq's own Transformer, and every norm and residual scheme through its commands."""

import contextlib
import copy
import functools
import io
import json
import logging
import math
import os
import random
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import torch

import normformer_rs as nf
from conftest import REQUIRED
from normformer_rs import binarised, cli, convert
from normformer_rs._optional import available
from normformer_rs.config import tables

if not available("fairseq"):
    if "fairseq" in REQUIRED:
        raise ImportError("NORMFORMER_RS_REQUIRE names fairseq, which is not installed: make fairseq")
    pytest.skip("fairseq is not installed: make fairseq", allow_module_level=True)

# fairseq and hydra 1.0 warn of much that is not this package's to change.
pytestmark = [pytest.mark.fairseq, pytest.mark.filterwarnings("ignore")]

NORMS = [entry["name"] for entry in tables()["norms"]]
SCHEMES = [entry["name"] for entry in tables()["residuals"]]
SIZES = "--encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 32 --encoder-ffn-embed-dim 48 "
SIZES += "--encoder-attention-heads 4 --decoder-attention-heads 4"
SMOOTHED = "nfrs_label_smoothed_cross_entropy --label-smoothing 0.1"
RECIPE = "--optimizer adam --clip-norm 1.0 --lr 0.01 --lr-scheduler inverse_sqrt --warmup-updates 10 --max-tokens 300 "
RECIPE += "--cpu --num-workers 0 --log-interval 1 --log-format json --no-epoch-checkpoints --share-all-embeddings"


@pytest.fixture(scope="module")
def fairseq():
    """fairseq with the plug-in."""
    torch.set_num_threads(1)
    import normformer_rs.fairseq_plugin

    return normformer_rs.fairseq_plugin


@pytest.fixture(scope="module")
def data(tmp_path_factory, fairseq) -> Path:
    """A binarised corpus: letters, and the same letters as capitals; "k" only on the source side."""
    from fairseq import options
    from fairseq_cli import preprocess

    folder, chosen = tmp_path_factory.mktemp("data"), random.Random(0)
    for split, lines in (("train", 200), ("valid", 24), ("test", 24)):
        texts = [chosen.choices("abcdefghij", k=chosen.randint(2, 9)) for _ in range(lines)]
        source = "".join(" ".join(text) + " k\n" for text in texts)
        (folder / f"{split}.de").write_text(source)
        (folder / f"{split}.en").write_text("".join(" ".join(text).upper() + "\n" for text in texts))
    arguments = f"-s de -t en --joined-dictionary --destdir {folder}/bin --workers 1"
    for split in ("train", "valid", "test"):
        arguments += f" --{split}pref {folder}/{split}"
    preprocess.main(options.get_preprocessing_parser().parse_args(arguments.split()))
    return folder / "bin"


class Lines(logging.Handler):
    """What fairseq's progress bar logs, by the name that it takes on for it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, list[dict]] = {"train_inner": [], "valid": []}

    def emit(self, record: logging.LogRecord) -> None:
        if record.name in self.lines:
            self.lines[record.name].append(json.loads(record.getMessage()))


@contextlib.contextmanager
def logged():
    logger, handler = logging.getLogger("fairseq.logging.progress_bar"), Lines()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


@functools.cache
def composed(which: str, arguments: str):
    """fairseq's configuration of a command line; hydra takes seconds for one."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    parser = {"train": options.get_training_parser, "generate": options.get_generation_parser}[which]()
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, input_args=arguments.split()))


def configured(which: str, arguments: str, changes: dict):
    """The same with some of its values changed, each named as section.option."""
    config = copy.deepcopy(composed(which, arguments))
    for name, value in changes.items():
        section, _, option = name.partition(".")
        config[section][option] = value
    return config


def train(data: Path, output: Path, updates: int, arguments: str, **changes) -> list[float]:
    """fairseq-train; the loss of each update."""
    from fairseq.logging import metrics
    from fairseq_cli.train import main

    metrics.reset()
    changes |= {"checkpoint.save_dir": str(output), "optimization.max_update": updates}
    with logged() as lines:
        main(configured("train", f"{data} {RECIPE} {arguments}", changes))
    assert "--disable-validation" in arguments or lines["valid"]
    assert all(math.isfinite(float(line["valid_loss"])) for line in lines["valid"])
    return [float(line["loss"]) for line in lines["train_inner"]]


def generate(data: Path, checkpoint: Path, arguments: str = "") -> list[tuple[str, float]]:
    """fairseq-generate with beam 5 on the test set; hypotheses and their scores, in the test set's order."""
    from fairseq_cli.generate import main

    given = f"{data} --path PATH --beam 5 --cpu --max-tokens 400 --num-workers 0 --max-len-b 12 {arguments}"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(configured("generate", given, {"common_eval.path": str(checkpoint)}))
    found = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", printed.getvalue(), re.MULTILINE)
    assert len(found) == 24
    return [(text, float(score)) for _, score, text in sorted(found, key=lambda hypothesis: int(hypothesis[0]))]


def parameters(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a checkpoint, but for fairseq's own constants (some of them uninitialised)."""
    saved = torch.load(checkpoint, weights_only=True)["model"]
    return {name: value for name, value in saved.items() if not name.endswith(("version", "_float_tensor"))}


def test_layernorm_and_postnorm_are_fairseqs_transformer(data, tmp_path):
    common = f"{SIZES} --dropout 0 --disable-validation"
    stock = f"--arch transformer {common} --criterion label_smoothed_cross_entropy --label-smoothing 0.1"
    ours = f"--arch nfrs_transformer {common} --criterion {SMOOTHED}"
    train(data, tmp_path / "begin", 1, stock, **{"optimization.lr": [1e-30]})
    resets = ["reset_optimizer", "reset_dataloader", "reset_meters", "reset_lr_scheduler"]
    begin = {"checkpoint.restore_file": str(tmp_path / "begin" / "checkpoint_last.pt")}
    begin |= {f"checkpoint.{name}": True for name in resets}
    theirs = train(data, tmp_path / "stock", 60, stock, **begin)
    losses = train(data, tmp_path / "ours", 60, ours, **begin)
    assert len(losses) == 60 and losses[-1] < 0.9 * losses[0]
    assert max(abs(a - b) for a, b in zip(losses, theirs)) <= 0.0015
    last = [tmp_path / which / "checkpoint_last.pt" for which in ("stock", "ours")]
    expected, found = (generate(data, path) for path in last)
    assert [text for text, _ in found] == [text for text, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-3)
    # As many numbers as fairseq trains: its encoder layers also keep a second copy of their matrices.
    copies = re.compile(r"encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)$")
    sizes = [{name: value.numel() for name, value in parameters(path).items()} for path in last]
    assert sum(size for name, size in sizes[0].items() if not copies.search(name)) == sum(sizes[1].values())


COMBINATIONS = [(norm, residual) for norm in NORMS for residual in ("postnorm", "prenorm")]
COMBINATIONS += [("layernorm", scheme) for scheme in SCHEMES if ("layernorm", scheme) not in COMBINATIONS]


@pytest.mark.parametrize(("norm", "residual"), COMBINATIONS)
def test_trains_resumes_validates_and_generates(norm, residual, data, tmp_path):
    model = f"--arch nfrs_transformer {SIZES} --norm layernorm --residual postnorm --criterion {SMOOTHED}"
    named = {"model.norm": norm, "model.residual": residual}
    whole = train(data, tmp_path / "whole", 20, model, **named)
    assert len(whole) == 20 and all(map(math.isfinite, whole))
    assert sum(whole[-5:]) < 0.97 * sum(whole[:5])
    halves = [loss for updates in (11, 20) for loss in train(data, tmp_path / "halves", updates, model, **named)]
    assert halves == whole
    last = [parameters(tmp_path / which / "checkpoint_last.pt") for which in ("whole", "halves")]
    assert last[0].keys() == last[1].keys()
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])
    assert all(math.isfinite(score) for _, score in generate(data, tmp_path / "whole" / "checkpoint_last.pt"))


def built(data: Path, arguments: str, **changes):
    """The task and a fresh model in evaluation mode."""
    from fairseq import tasks

    config = configured("train", f"{data} {RECIPE} --arch nfrs_transformer {SIZES} {arguments}", changes)
    task = tasks.setup_task(config.task)
    torch.manual_seed(1)
    return task, task.build_model(config.model).eval()


def batch(pad_left: bool = True):
    """Source and target input of three sentences, padded with 1 on either side."""
    sources, targets = [[5, 6, 7, 8, 9, 2], [4, 7, 2], [11, 5, 4, 2]], [[2, 9, 8, 7], [2, 5], [2, 6, 6]]

    def padded(rows: list[list[int]], left: bool):
        width = max(map(len, rows))
        return torch.tensor([[1] * (width - len(r)) * left + r + [1] * (width - len(r)) * (not left) for r in rows])

    return padded(sources, pad_left), padded(targets, False)


def perturbed(model):
    """Gains away from their first values, so that every one of them counts."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("residual", SCHEMES)
def test_steps_of_decoding_are_the_whole(residual, data):
    changes = {"model.residual": residual, "model.norm": "layernorm"}
    _, model = built(data, "--norm scalenorm --residual postnorm", **changes)
    source, target = batch()
    model = perturbed(model)
    memory = model.encoder(source, None)
    whole = model.decoder(target, memory)[0]
    state: dict = {}
    for length in range(1, 5):
        step = model.decoder(target[:, :length], memory, incremental_state=state)[0][:, 0]
        is_real = target[:, length - 1] != 1
        torch.testing.assert_close(step[is_real], whole[is_real, length - 1], atol=1e-5, rtol=1e-4)
        if length == 2:  # the sentences change places, as beams do
            order = torch.tensor([2, 0, 1])
            model.decoder.reorder_incremental_state_scripting(state, order)
            for name in [name for name in state[next(iter(state))] if ".memory." in name]:
                del state[next(iter(state))][name]  # kept as long as beams stay within their sentence
            memory = model.encoder.reorder_encoder_out(memory, order)
            target, whole = target[order], whole[order]


@pytest.mark.parametrize("pad_left", [True, False])
def test_padding_changes_nothing(pad_left, data):
    _, model = built(data, "--norm scalenorm --residual prenorm")
    source, target = batch(pad_left)
    together = model(source, None, target)[0]
    for i in range(3):
        alone = model(source[i][source[i] != 1][None], None, target[i][target[i] != 1][None])[0]
        torch.testing.assert_close(together[i, : alone.shape[1]], alone[0], atol=1e-5, rtol=1e-4)


def test_the_kernels_run(data):
    from normformer_rs import _core

    _, model = built(data, "--norm scalenorm --residual prenorm")
    source, target = batch()
    before = _core.operator_counts()
    model(source, None, target)
    after = _core.operator_counts()
    ran = {name for name in after if after[name][0] > before.get(name, (0, 0))[0]}
    assert {"attention", "relu_dropout", "scale_norm", "scale_norm_residual"} <= ran
    assert all(after[name][1] == before.get(name, (0, 0))[1] for name in after)


def test_branchnorm_is_told_the_update(data):
    _, model = built(data, "--norm layernorm --residual branchnorm --branchnorm-steps 10")
    assert model.state_dict()["encoder.t"].tolist() == [1]
    source, target = batch()
    first = model(source, None, target)[0]
    model.set_num_updates(4)  # fairseq's word for: four were made
    assert [model.state_dict()[f"{side}.t"].tolist() for side in ("encoder", "decoder")] == [[5], [5]]
    assert (model(source, None, target)[0] - first).abs().max() > 1e-3


def test_admin_takes_its_gains_from_the_first_batch(data):
    _, model = built(data, "--norm layernorm --residual admin --dropout 0.1")
    source, target = batch()
    names = [name for name in model.state_dict() if name.endswith("residual_scale1")]
    assert len(names) == 4
    model(source, None, target)
    assert all((model.state_dict()[name] == 1).all() for name in names)
    model.train()
    model(source, None, target)
    gains = {name: model.state_dict()[name].clone() for name in names}
    assert (gains["encoder.layers.1.residual_scale1"] > 1.05).all() and model.state_dict()["is_profiled"]
    model(source, None, target)
    assert all(torch.equal(model.state_dict()[name], gains[name]) for name in names)
    _, half = built(data, "--norm layernorm --residual admin --dropout 0.1")
    with pytest.raises(nf.InputError, match=r"in f32; got torch\.bfloat16"):
        half.bfloat16().train()(source, None, target)


def test_first_values_are_the_packages(data):
    _, model = built(data, "--norm layernorm --residual prenorm --init smallinit --encoder-embed-dim 64")
    weight = model.encoder.layers[0].linear1.weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (64 + 48)), rel=0.06)
    query = model.decoder.layers[1].multihead_attn.in_proj_weight[:64]
    assert query.std().item() == pytest.approx(math.sqrt(2 / (5 * 64)), rel=0.06)
    assert not model.encoder.embed_tokens.weight[1].any()
    assert model.decoder.output_projection.weight is model.encoder.embed_tokens.weight


def test_fixnorm_and_word_dropout(data):
    _, model = built(data, "--norm scalenorm --residual prenorm --fixnorm --word-dropout 0.5 --dropout 0")
    assert model.encoder.embed_tokens.weight.abs().max() < 0.0101
    source, target = batch()
    before = model(source, None, target)[0]
    model.encoder.embed_tokens.weight.data *= torch.rand(len(model.encoder.dictionary), 1) + 0.5
    torch.testing.assert_close(model(source, None, target)[0], before, atol=1e-4, rtol=1e-4)
    g, features = model.decoder.norm.weight, model.decoder(target, model.encoder(source), features_only=True)[0]
    torch.testing.assert_close(features[0, 0].norm(), g[0].abs())
    assert (before.abs() <= g.abs() * 1.0001).all()  # a cosine times g
    model.train()
    tokens = torch.full((4000,), 7)
    found = model.encoder.embed(tokens, None)
    lost = (found - model.encoder.embed(torch.tensor([7]), None)).abs().sum(1) > 1e-6
    assert min(lost.float().mean(), 1 - lost.float().mean()) > 0.4


def test_vocabulary_mask_and_its_loss(data):
    task, model = built(data, "--norm layernorm --residual postnorm --vocab-mask --dropout 0")
    mask, dictionary = model.decoder.vocab_mask, task.target_dictionary
    seen = {dictionary[i] for i in range(len(dictionary)) if mask[i]}
    assert seen == {*"ABCDEFGHIJ", "</s>", "<unk>"} and "k" in dictionary
    source, target = batch()
    output = model(source, None, target)
    p = model.get_normalized_probs(output, log_probs=False)
    assert not p[..., ~mask].any() and torch.allclose(p.sum(-1), torch.ones(()))
    wanted = target.masked_fill(target.ne(1), dictionary.index("B"))
    for smoothing in ("fairseq", "twt"):
        loss = criterion(task, smoothing)
        log_p = output[0].masked_fill(~mask, -math.inf).log_softmax(-1)
        nll = -log_p[..., dictionary.index("B")][target.ne(1)].sum()
        uniform = -log_p[..., mask].sum(-1)[target.ne(1)].sum()
        each = 0.1 / (int(mask.sum()) - 1) if smoothing == "fairseq" else 0.1 / int(mask.sum())
        own = 0.9 - each if smoothing == "fairseq" else 0.9
        found = loss.compute_loss(model, output, {"target": wanted})
        torch.testing.assert_close(found, (own * nll + each * uniform, nll), rtol=1e-5, atol=1e-4)
    with pytest.raises(nf.InputError, match="--criterion nfrs_label_smoothed_cross_entropy"):
        model.train().get_normalized_probs(output, log_probs=True)


def criterion(task, smoothing: str):
    from normformer_rs.fairseq_plugin.criterion import FusedLabelSmoothedCrossEntropy

    return FusedLabelSmoothedCrossEntropy(task, False, 0.1, smoothing)


def test_vocabulary_mask_leaves_out_padding(data, monkeypatch):
    monkeypatch.setattr(binarised.Binarised, "types", lambda self: numpy.arange(8))  # "<s>" in a text is BOS to fairseq
    _, model = built(data, "--norm layernorm --residual postnorm --vocab-mask")
    assert model.decoder.vocab_mask[:9].tolist() == [False, False, True, True, True, True, True, True, False]


def test_the_loss_is_fairseqs(data):
    from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion

    task, model = built(data, "--norm layernorm --residual postnorm --dropout 0")
    source, target = batch()
    net_input = {"src_tokens": source, "src_lengths": None, "prev_output_tokens": target}
    sample = {"net_input": net_input, "target": target, "ntokens": 9}
    stock = LabelSmoothedCrossEntropyCriterion(task, False, 0.1, report_accuracy=True)
    results = []
    for loss_of in (stock, criterion(task, "fairseq")):
        model.zero_grad()
        loss_of.report_accuracy = True
        loss, size, log = loss_of(model, sample)
        loss.backward()
        results.append(
            (loss, model.decoder.layers[0].linear1.weight.grad.clone(), log["n_correct"], log["total"], size)
        )
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class FakeOptimizer:
    """What a schedule needs of an optimizer."""

    lr = 0.0

    def set_lr(self, lr: float) -> None:
        self.lr = lr

    def get_lr(self) -> float:
        return self.lr


def schedule(name: str, **options):
    from argparse import Namespace

    from fairseq.optim import FairseqOptimizer
    from fairseq.optim.lr_scheduler import LR_SCHEDULER_REGISTRY

    kind = LR_SCHEDULER_REGISTRY[name]
    optimizer = type("Optimizer", (FakeOptimizer, FairseqOptimizer), {"__init__": lambda self: None})()
    common = {"warmup_updates": 4000, "warmup_init_lr": 0.0, "maximize_best_checkpoint_metric": False, "val_decay": 0.8}
    return kind(Namespace(**{**common, "lr_scale": None, "lr_width": 512, "lr": [1e-3], **options}), optimizer)


def test_schedules(fairseq):
    twt = schedule("nfrs_inverse_sqrt", lr_scale=2.0)
    peak = 2 / math.sqrt(512 * 4000)
    assert [twt.step_update(n - 1) for n in (4000, 2000, 16000)] == pytest.approx([peak, peak / 2, peak / 2])
    given = schedule("nfrs_inverse_sqrt", lr=[5e-3], warmup_updates=2000)
    assert [given.step_update(n - 1) for n in (1000, 2000, 8000)] == pytest.approx([2.5e-3, 5e-3, 2.5e-3])
    assert schedule("nfrs_inverse_sqrt", warmup_updates=0).step_update(9) == 1e-3
    decay = schedule("nfrs_val_decay", lr=[1.0], warmup_updates=10, maximize_best_checkpoint_metric=True)
    assert decay.step_update(4) == pytest.approx(0.5)
    for made, score, factor in [(5, 3.0, 1), (6, 4.0, 1), (7, 5.0, 1), (8, 1.0, 1), (20, 0.5, 0.8), (21, 0.7, 0.8)]:
        decay.step_update(made)
        decay.step(1, score)
        assert decay.step_update(20) == pytest.approx(factor), made
    again = schedule("nfrs_val_decay", lr=[1.0], warmup_updates=10, maximize_best_checkpoint_metric=True)
    again.load_state_dict(decay.state_dict())
    assert again.step_update(20) == pytest.approx(0.8) and again.scores == decay.scores
    losses = schedule("nfrs_val_decay", lr=[1.0], warmup_updates=0)
    for loss in (3.0, 3.0, 3.0, 4.0):
        losses.step(1, loss)
    assert losses.step_update(0) == pytest.approx(0.8)


def flags_of_help() -> str:
    from fairseq import options

    parser = options.get_training_parser()
    from fairseq.models import ARCH_MODEL_REGISTRY

    ARCH_MODEL_REGISTRY["nfrs_transformer_tiny"].add_args(parser)
    return " ".join(parser.format_help().split())


def test_flags_name_everything(fairseq):
    text = flags_of_help()
    for kind, flags in (("norms", ["--norm", "--encoder-norm", "--decoder-norm"]), ("residuals", ["--residual"])):
        for flag in flags:
            assert f"{flag} {{{','.join(entry['name'] for entry in tables()[kind])}}}" in text
    for field in nf.TransformerConfig.FIELDS:
        name = field.name.replace("_", "-")
        known = {"architecture", "vocab-size", "d-model", "d-ff", "heads", "positions", "tie-embeddings"}
        assert name in known or f"--{name} " in text or f"--no-{name} " in text, name


BAD = {
    "--norm scalnorm": "invalid choice: 'scalnorm'",
    "--residual post-norm": "invalid choice: 'post-norm'",
    "--encoder-normalize-before": "together mean --residual prenorm",
    "--residual deepnorm --encoder-normalize-before --decoder-normalize-before": "together mean --residual prenorm",
    "--adaptive-softmax-cutoff 5,10": "--adaptive-softmax-cutoff has no place",
    "--decoder-embed-dim 64": "equally wide",
    "--residual prenorm --branchnorm-steps 10": "an option of branchnorm",
    "--encoder-attention-heads 5": "must divide the width 32; got 5",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_flags_are_one_line(arguments, data, tmp_path, capsys):
    # --share-all-embeddings would have fairseq complain first of widths that differ
    recipe = RECIPE.replace("--share-all-embeddings", "")
    given = f"train {data} {recipe} {SIZES} --arch nfrs_transformer --save-dir {tmp_path} --max-update 1 {arguments}"
    with pytest.raises(SystemExit) as stopped:
        cli.main(["fairseq", *given.split()])
    assert stopped.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert BAD[arguments] in last and "error" in last


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """A command in a process of its own."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | environment
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, env=env, timeout=300)


def losses_of(done: subprocess.CompletedProcess) -> list[float]:
    """The loss of each update that a fairseq-train printed."""
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"\| train_inner \| (\{.*\})$", done.stdout + done.stderr, re.MULTILINE)
    return [float(json.loads(line)["loss"]) for line in found]


def test_user_dir(capsys):
    assert cli.main(["fairseq-user-dir"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert folder.name == "fairseq_plugin" and (folder / "__init__.py").is_file()
    # fairseq imports it by itself, before or after this package's own import: one set of modules, one path of imports
    for first in ("import fairseq", "import normformer_rs.fairseq_plugin"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", USER_DIR.format(first=first, folder=folder)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr


USER_DIR = """
import runpy  # the patches alone, as on a Python that needs none
compat = runpy.run_path("{folder}/compat.py")
compat["allow_dataclass_defaults"](); compat["give_finders_find_module"]()
{first}
import sys, fairseq.utils
from types import SimpleNamespace
fairseq.utils.import_user_module(SimpleNamespace(user_dir="{folder}"))
from fairseq.models import ARCH_MODEL_REGISTRY
assert ARCH_MODEL_REGISTRY["nfrs_transformer_tiny"].__module__ == "normformer_rs.fairseq_plugin.model"
assert "text" not in sys.modules and not any(path.endswith("/normformer_rs") for path in sys.path), sys.path
"""


@pytest.mark.parametrize("module", ["normformer_rs", "normformer_rs.fairseq_plugin"])
def test_the_wrapper_runs_fairseqs_commands(module, data, tmp_path):
    name = [module, "fairseq"] if module == "normformer_rs" else [module]
    done = command(*name, "train", "--help")
    assert done.returncode == 0 and "--save-dir" in done.stdout
    done = command(*name, "train", "--arch", "nfrs_transformer_tiny", "--help")
    assert done.returncode == 0 and "--residual {prenorm,postnorm," in done.stdout and "--save-dir" in done.stdout
    done = command(*name, "trian")
    *_, last = done.stderr.splitlines()
    assert done.returncode == 2 and 'did you mean "train"?' in last and "Traceback" not in done.stderr


def test_commands_after_training(data, tmp_path):
    train(data, tmp_path, 3, f"--arch nfrs_transformer {SIZES} --criterion {SMOOTHED} --residual prenorm")
    last = str(tmp_path / "checkpoint_last.pt")
    plugin = "normformer_rs.fairseq_plugin"
    done = command(plugin, "validate", str(data), "--path", last, "--cpu", "--batch-size", "8", "--task", "translation")
    assert done.returncode == 0 and re.search(r"loss \d", done.stdout + done.stderr), done.stderr[-2000:]
    (tmp_path / "source").write_text("a b c k\n")
    interactive = [str(data), "--path", last, "--cpu", "--beam", "2", "--input", str(tmp_path / "source")]
    done = command(plugin, "interactive", *interactive, "--print-alignment")
    assert done.returncode == 0 and "H-0" in done.stdout and "A-0" in done.stdout, done.stderr[-2000:]
    (tmp_path / "reference").write_text("A B C\n")
    both = ["--sys", str(tmp_path / "reference"), "--ref", str(tmp_path / "reference")]
    done = command(plugin, "score", *both)
    assert done.returncode == 0 and "BLEU4 = " in done.stdout


@pytest.mark.parametrize(
    "flags", ["--bf16", "--amp", "--update-freq 2", "--checkpoint-activations", "--layernorm-embedding"]
)
def test_trains_with_fairseqs_flags(flags, data, tmp_path):
    model = f"--arch nfrs_transformer {SIZES} --norm scalenorm --residual prenorm --criterion {SMOOTHED}"
    losses = train(data, tmp_path, 6, f"{model} {flags}")
    assert len(losses) == 6 and all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    if flags == "--checkpoint-activations":
        assert losses == pytest.approx(train(data, tmp_path / "kept", 6, model), abs=0.002)


def test_two_processes(data, tmp_path):
    """As torchrun starts them. Both halves of each batch make one update, on both sides the same."""
    model = f"--arch nfrs_transformer {SIZES} --norm layernorm --residual admin --criterion {SMOOTHED}"
    given = f"{data} {RECIPE} {model} --save-dir {tmp_path}/out --max-update 4 --disable-validation"
    given += " --distributed-backend gloo --ddp-backend legacy_ddp"  # c10d wants GPUs here
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def start(rank: int) -> subprocess.CompletedProcess:
        launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(rank)}
        return command("normformer_rs", "fairseq", "train", *given.split(), **launched)

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(start, range(2)))
    losses = losses_of(done[0])
    assert done[1].returncode == 0, done[1].stderr[-3000:]
    assert len(losses) == 4 and all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    state = parameters(tmp_path / "out" / "checkpoint_last.pt")
    assert state["is_profiled"] and (state["encoder.layers.1.residual_scale2"] > 1.05).all()


SPAWN = """
import multiprocessing, sys, types
def cli_main():
    import fairseq.utils
    worker = multiprocessing.get_context("spawn").Process(target=fairseq.utils.set_torch_seed, args=(1,))
    worker.start(); worker.join(); print("worker", worker.exitcode)
sys.modules["fairseq_cli.train"] = types.SimpleNamespace(cli_main=cli_main)
sys.argv = ["normformer-rs", "fairseq", "train"]
from normformer_rs.cli import main
main(sys.argv[1:])
"""


def test_spawned_workers_are_patched(tmp_path):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SPAWN], capture_output=True, text=True, timeout=200)
    assert "worker 0" in done.stdout, done.stderr[-3000:]


def test_hydra(data, tmp_path):
    given = f"task=translation task.data={data} model=nfrs_transformer_tiny model.norm=scalenorm model.residual=subln "
    given += "model.share_all_embeddings=true model.encoder_layers=2 model.decoder_layers=2 common.cpu=true "
    given += "criterion=nfrs_label_smoothed_cross_entropy criterion.label_smoothing=0.1 criterion.smoothing=twt "
    given += "optimizer=adam optimization.lr=[0.01] optimization.max_update=4 lr_scheduler=nfrs_inverse_sqrt "
    given += "lr_scheduler.warmup_updates=10 dataset.max_tokens=300 dataset.num_workers=0 common.log_interval=1 "
    given += f"common.log_format=json dataset.disable_validation=true checkpoint.save_dir={tmp_path}/out "
    given += f"hydra.run.dir={tmp_path}/run hydra.sweep.dir={tmp_path}/sweep"
    done = command("normformer_rs", "fairseq", "hydra-train", *given.split())
    assert done.returncode == 0, done.stderr[-3000:]
    saved = torch.load(tmp_path / "out" / "checkpoint_last.pt", weights_only=True)
    model = saved["cfg"]["model"]
    assert (model["norm"], model["residual"], model["encoder_embed_dim"]) == ("scalenorm", "subln", 128)
    assert "encoder.layers.1.inner_norm.weight" in saved["model"]
    done = command("normformer_rs", "fairseq", "hydra-train", *given.replace("=scalenorm", "=scalnorm").split())
    assert done.returncode != 0 and "scalnorm" in done.stderr


def test_language_model(fairseq, tmp_path):
    from fairseq import options
    from fairseq_cli import preprocess

    chosen = random.Random(0)
    for split, lines in (("train", 150), ("valid", 20)):
        (tmp_path / split).write_text(
            "".join(" ".join("abcabcabc"[: chosen.randint(2, 9)]) + "\n" for _ in range(lines))
        )
    given = (
        f"--only-source --trainpref {tmp_path}/train --validpref {tmp_path}/valid --destdir {tmp_path}/bin --workers 1"
    )
    preprocess.main(options.get_preprocessing_parser().parse_args(given.split()))
    model = "--task language_modeling --arch nfrs_transformer_lm --norm rmsnorm --residual deepnorm --vocab-mask "
    model += "--decoder-layers 2 --decoder-embed-dim 32 --decoder-ffn-embed-dim 48 --decoder-attention-heads 4 "
    model += f"--share-decoder-input-output-embed --tokens-per-sample 32 --criterion {SMOOTHED}"
    recipe = RECIPE.replace("--share-all-embeddings", "")
    done = command(
        "normformer_rs.fairseq_plugin",
        "train",
        *f"{tmp_path}/bin {recipe} {model} --save-dir {tmp_path}/out --max-update 12".split(),
    )
    losses = losses_of(done)
    assert len(losses) == 12 and losses[-1] < 0.8 * losses[0]
    last = f"{tmp_path}/out/checkpoint_last.pt"
    assert {name.split(".")[0] for name in parameters(Path(last))} == {"decoder"}
    given = f"{tmp_path}/bin --path {last} --cpu --gen-subset valid --tokens-per-sample 32 --num-workers 0"
    done = command("normformer_rs.fairseq_plugin", "eval-lm", *given.split())
    perplexity = re.search(r"Perplexity: ([\d.]+)", done.stdout + done.stderr)
    assert perplexity and 1 < float(perplexity[1]) < 8, done.stderr[-2000:]


def test_reads_binarised_folders(data, tmp_path):
    from fairseq.data import Dictionary
    from fairseq.data.indexed_dataset import MMapIndexedDataset

    prefix = binarised.find(data, "train", "en", "de")
    assert prefix.name == "train.de-en.de"
    ours, theirs = binarised.Binarised(prefix), MMapIndexedDataset(str(prefix))
    assert len(ours) == len(theirs) == 200
    assert all(ours[i].tolist() == theirs[i].tolist() for i in range(200))
    assert ours.types().tolist() == sorted({token for i in range(200) for token in theirs[i].tolist()})
    pieces, dictionary = binarised.read_dictionary(data / "dict.de.txt"), Dictionary.load(str(data / "dict.de.txt"))
    assert pieces == dictionary.symbols


def damaged(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]


DAMAGE = {
    "not an index": ("idx", lambda index: damaged(index, 0, b"X")),
    "version 2": ("idx", lambda index: damaged(index, 9, b"\2")),
    "number type 77": ("idx", lambda index: damaged(index, 17, bytes([77]))),
    "sentences need": ("idx", lambda index: damaged(index, 18, b"\xff" * 8)),
    "is damaged": ("idx", lambda index: index[:-3]),
    "contradict": ("idx", lambda index: damaged(index, 26, b"\x7f")),
    "numbers need": ("bin", lambda tokens: tokens[:-1]),
    "no such file": ("bin", lambda tokens: None),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damaged_folders_are_refused(message, data, tmp_path):
    for kind in ("bin", "idx"):
        content = (data / f"train.de-en.de.{kind}").read_bytes()
        if kind == DAMAGE[message][0]:
            content = DAMAGE[message][1](content)
        if content is not None:
            (tmp_path / f"train.{kind}").write_bytes(content)
    with pytest.raises(nf.InputError, match=message):
        binarised.Binarised(tmp_path / "train")


CONVERTED = {
    "nfrs": "--arch nfrs_transformer --norm scalenorm --residual prenorm --fixnorm --vocab-mask --decoder-start bos",
    "admin": "--arch nfrs_transformer --norm layernorm --residual admin --output-bias --decoder-start bos",
    "stock": "--arch transformer",
}


@pytest.mark.parametrize("which", CONVERTED)
def test_converts_both_ways(which, data, tmp_path):
    loss = SMOOTHED if which != "stock" else "cross_entropy"
    train(data, tmp_path / "out", 60, f"{CONVERTED[which]} {SIZES} --criterion {loss} --disable-validation")
    last, run, back = tmp_path / "out" / "checkpoint_last.pt", tmp_path / "run", tmp_path / "back.pt"
    assert cli.main(["convert", "--from", str(last), "--to", str(run)]) == 0
    ours = nf.Transformer.from_checkpoint(run)
    from fairseq import checkpoint_utils

    (theirs,), _ = checkpoint_utils.load_model_ensemble([str(last)], arg_overrides={"decoder_start": "eos"})
    source, target = batch()
    logits = theirs.eval()(source, None, target)[0]
    torch.testing.assert_close(ours(source, target)[target != 1], logits[target != 1], atol=1e-4, rtol=1e-4)
    assert cli.main(["convert", "--from", str(run), "--to", str(back)]) == 0
    first, second = (parameters(path) for path in (last, back))
    assert which == "stock" or {n: v.tolist() for n, v in second.items() if n != "is_profiled"} == {
        n: v.tolist() for n, v in first.items() if n != "is_profiled"
    }
    if which == "stock":  # its decoder begins with EOS, this package's with BOS: translations differ
        return
    lines = (data.parent / "test.de").read_text().splitlines()
    found = nf.translate(run, lines, nf.SearchConfig(beam=5, rule="fairseq", max_length=12))
    for path in (last, back):
        expected = generate(data, path)
        pairs = [(a[0], (b_text, b_score)) for a, (b_text, b_score) in zip(found, expected)]
        same = [a.text == b[0] or abs(a.score - b[1] * math.log(2)) < 1e-4 for a, b in pairs]
        assert all(same) and sum(a.text == b[0] for a, b in pairs) >= 23


def test_conversion_refuses(data, tmp_path):
    def error(*arguments: str) -> str:
        with pytest.raises(nf.InputError) as raised:
            convert.from_fairseq(*arguments)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert "no such file" in error(tmp_path / "none.pt", tmp_path / "run")
    torch.save({"model": {}, "args": Path("x")}, tmp_path / "code.pt")
    assert "--trust" in error(tmp_path / "code.pt", tmp_path / "run")
    (tmp_path / "text.pt").write_text("nothing")
    assert "text.pt" in error(tmp_path / "text.pt", tmp_path / "run")
    torch.save({"model": {}, "cfg": {"model": {"_name": "lstm"}, "task": {}}}, tmp_path / "lstm.pt")
    assert '"lstm"' in error(tmp_path / "lstm.pt", tmp_path / "run")
    (tmp_path / "there").mkdir()
    assert "exists already" in error(tmp_path / "lstm.pt", tmp_path / "there")


def test_fairseq_missing_is_said(tmp_path):
    (tmp_path / "fairseq.py").write_text("raise ModuleNotFoundError('No module named \\'fairseq\\'', name='fairseq')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = command("normformer_rs", "fairseq", "train", PYTHONPATH=path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "pip install normformer_rs[fairseq]" in done.stderr and "pip before 24.1" in done.stderr
