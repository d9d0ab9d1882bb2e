"""The fairseq plug-in: against fairseq's own Transformer, and every norm and residual scheme through its commands."""

import contextlib
import copy
import functools
import gzip
import io
import itertools
import json
import logging
import math
import os
import random
import re
import shlex
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import normformer_rs as nf
from conftest import REQUIRED
from normformer_rs import cli, convert
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
    folder, chosen = tmp_path_factory.mktemp("data"), random.Random(0)
    for split, lines in (("train", 200), ("valid", 24), ("test", 24)):
        texts = [chosen.choices("abcdefghij", k=chosen.randint(2, 9)) for _ in range(lines)]
        source = "".join(" ".join(text) + " k\n" for text in texts)
        (folder / f"{split}.de").write_text(source)
        (folder / f"{split}.en").write_text("".join(" ".join(text).upper() + "\n" for text in texts))
    return preprocess(folder, folder / "bin")


def preprocess(text: Path, output: Path, arguments: str = "", joined: bool = True) -> Path:
    """fairseq-preprocess."""
    from fairseq import options
    from fairseq_cli import preprocess

    arguments += f" -s de -t en --destdir {output} --workers 1" + " --joined-dictionary" * joined
    for split in ("train", "valid", "test"):
        arguments += f" --{split}pref {text}/{split}"
    preprocess.main(options.get_preprocessing_parser().parse_args(arguments.split()))
    return output


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


def generate(data: Path, checkpoint: Path, arguments: str = "", lines: int = 24) -> list[tuple[str, float]]:
    """fairseq-generate with beam 5 on the test set; hypotheses and their scores, in the test set's order."""
    from fairseq_cli.generate import main

    given = f"{data} --path PATH --beam 5 --cpu --max-tokens 400 --num-workers 0 --max-len-b 12 {arguments}"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(configured("generate", given, {"common_eval.path": str(checkpoint)}))
    found = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", printed.getvalue(), re.MULTILINE)
    assert len(found) == lines
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


STATISTICS = {
    "batchnorm": "",
    "powernorm-v": "",
    "powernorm": "--powernorm-warmup 6",
    "powernorm, release": "--powernorm-mode release --powernorm-warmup 6 --groupscaling 4",
}


@pytest.mark.parametrize("norm", STATISTICS)
def test_statistics_come_from_real_tokens_and_stay(norm, data, tmp_path):
    """In training, over resuming, and in decoding; padding enters none."""
    given = f"--encoder-norm {norm.partition(',')[0]} --decoder-norm layernorm --residual prenorm {STATISTICS[norm]}"
    _, model = built(data, f"{given} --dropout 0")
    padded, target = batch()
    wide = torch.cat((torch.ones(3, 4, dtype=torch.long), padded), 1)
    twin = copy.deepcopy(model)
    for _ in range(2):
        outputs = [twin.train()(wide, None, target)[0], model.train()(padded, None, target)[0]]
        torch.testing.assert_close(outputs[0][target != 1], outputs[1][target != 1], atol=1e-5, rtol=1e-4)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(twin.state_dict()[name], value, msg=name)

    arguments = f"--arch nfrs_transformer {SIZES} --criterion {SMOOTHED} {given}"
    whole = train(data, tmp_path / "whole", 14, arguments)
    halves = [loss for updates in (5, 14) for loss in train(data, tmp_path / "halves", updates, arguments)]
    assert halves == whole and whole[-1] < whole[0]
    last = [parameters(tmp_path / which / "checkpoint_last.pt") for which in ("whole", "halves")]
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])
    kept = {name: value for name, value in last[0].items() if "running_" in name}
    assert len(kept) >= 5 and all((value.flatten() != value.flatten()[0]).any() for value in kept.values())
    counters = [value.item() for name, value in last[0].items() if name.endswith("iters")]
    assert counters == ([14] * 5 if norm.startswith("powernorm,") or norm == "powernorm" else [])
    assert all(math.isfinite(score) for _, score in generate(data, tmp_path / "whole" / "checkpoint_last.pt"))


@pytest.mark.parametrize("norm", STATISTICS)
def test_steps_of_decoding_use_running_statistics(norm, data):
    _, model = built(data, f"--norm {norm.partition(',')[0]} --residual prenorm {STATISTICS[norm]} --dropout 0")
    source, target = batch()
    with torch.no_grad():
        for _ in range(8):
            model.train()(source, None, target)
        before = copy.deepcopy(model.eval().state_dict())
        memory, state = model.encoder(source, None), {}
        whole = model.decoder(target, memory)[0]
        for length in range(1, 5):
            step = model.decoder(target[:, :length], memory, incremental_state=state)[0][:, 0]
            is_real = target[:, length - 1] != 1
            torch.testing.assert_close(step[is_real], whole[is_real, length - 1], atol=1e-5, rtol=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


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
    common = {"warmup_updates": 4000, "warmup_init_lr": 0.0, "maximize_best_checkpoint_metric": False}
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
    assert again.step_update(20) == pytest.approx(0.8)
    with pytest.raises(nf.InputError, match="--reset-lr-scheduler"):
        again.load_state_dict({"best": 1.0})
    with pytest.raises(nf.InputError, match="warmup must be at least 0, got -1"):
        schedule("nfrs_val_decay", warmup_updates=-1)
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
    "--residual rezero --encoder-norm rmsnorm": 'residual "rezero" has no norms',
    "--residual dlcl --encoder-layerdrop 0.1": "needs every layer's output: leave --layerdrop out",
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
    """A Python module's command in a process of its own."""
    return execute(sys.executable, "-m", *arguments, **environment)


def stock(which: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """fairseq-WHICH as users have it: its own with --user-dir on Python 3.10, on later ones the wrapper's."""
    if sys.version_info >= (3, 11):
        return command("normformer_rs", "fairseq", which, *arguments, **environment)
    program, plugin = Path(sys.executable).with_name(f"fairseq-{which}"), Path(nf.__file__).with_name("fairseq_plugin")
    given = [] if which == "score" else ["--user-dir", str(plugin)]
    return execute(str(program), *arguments, *given, **environment)


def execute(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | environment
    return subprocess.run(arguments, capture_output=True, text=True, env=env, timeout=300)


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
    done = stock("validate", str(data), "--path", last, "--cpu", "--batch-size", "8", "--task", "translation")
    assert done.returncode == 0 and re.search(r"loss \d", done.stdout + done.stderr), done.stderr[-2000:]
    done = stock("generate", str(data), "--path", last, "--cpu", "--batch-size", "8", "--beam", "2")
    assert done.returncode == 0 and "H-23" in done.stdout, done.stderr[-2000:]
    (tmp_path / "source").write_text("a b c k\n")
    interactive = [str(data), "--path", last, "--cpu", "--beam", "2", "--input", str(tmp_path / "source")]
    done = stock("interactive", *interactive, "--print-alignment")
    assert done.returncode == 0 and "H-0" in done.stdout and "A-0" in done.stdout, done.stderr[-2000:]
    (tmp_path / "reference").write_text("A B C\n")
    done = stock("score", "--sys", str(tmp_path / "reference"), "--ref", str(tmp_path / "reference"))
    assert done.returncode == 0 and "BLEU4 = " in done.stdout


# Transformers without Tears, appendix C, word for word; what comes after it is this package's and the test's.
APPENDIX_C = r"""
--arch transformer_wmt_en_de \
--share-all-embeddings \
--optimizer adam \
--adam-betas '(0.9, 0.98)' \
--clip-norm 1.0 \
--lr 0.001 \
--lr-scheduler inverse_sqrt \
--warmup-updates 4000 \
--warmup-init-lr 1e-07 \
--dropout 0.1 \
--weight-decay 0.0 \
--criterion label_smoothed_cross_entropy \
--label-smoothing 0.1 \
--max-tokens 8192 \
--update-freq 10 \
--attention-dropout 0.1 \
--activation-dropout 0.1 \
--max-epoch 40
"""


@pytest.mark.parametrize(
    "flags", ["", "--encoder-normalize-before --decoder-normalize-before --norm scalenorm --fixnorm"]
)
def test_the_command_of_transformers_without_tears(flags, data, tmp_path):
    theirs = shlex.split(APPENDIX_C.replace("\\\n", " "))
    given = f"--arch nfrs_transformer_wmt_en_de {flags} --cpu --max-update 1 --no-save --num-workers 0 --log-interval 1"
    given += " --log-format json"
    done = stock("train", str(data), *theirs, *given.split())
    (loss,) = losses_of(done)
    assert math.isfinite(loss)
    assert "ScaleNorm((512,)" in done.stdout + done.stderr if flags else "LayerNorm((512,)" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "flags", ["--bf16", "--fp16", "--amp", "--update-freq 2", "--checkpoint-activations", "--layernorm-embedding"]
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
        return stock("train", *given.split(), **launched)

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
    losses = losses_of(
        stock("train", *f"{tmp_path}/bin {recipe} {model} --save-dir {tmp_path}/out --max-update 12".split())
    )
    assert len(losses) == 12 and losses[-1] < 0.8 * losses[0]
    last = f"{tmp_path}/out/checkpoint_last.pt"
    assert {name.split(".")[0] for name in parameters(Path(last))} == {"decoder"}
    assert cli.main(["convert", "--from", last, "--to", f"{tmp_path}/run"]) == 0
    assert cli.main(["convert", "--from", f"{tmp_path}/run", "--to", f"{tmp_path}/back.pt"]) == 0
    measured = nf.evaluate_loss(tmp_path / "run", None, tmp_path / "valid")
    assert 1 < measured.perplexity < 8
    for path in (last, tmp_path / "back.pt"):
        given = f"{tmp_path}/bin --path {path} --cpu --gen-subset valid --tokens-per-sample 32 --num-workers 0"
        done = stock("eval-lm", *given.split())
        found = re.search(r"Loss \(base 2\): ([\d.]+)", done.stdout + done.stderr)
        assert found and float(found[1]) * math.log(2) == pytest.approx(measured.nll, abs=1e-3), done.stderr[-2000:]


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


def fit(output: Path, data: nf.DataConfig) -> list[float]:
    """The losses of a short run of the Rust loop."""
    model = nf.TransformerConfig(d_model=32, d_ff=48, heads=4, encoder_layers=1, decoder_layers=1)
    training = nf.TrainingConfig(updates=12, max_tokens=300, lr=1e-2, warmup=5, evaluate_every=12, vocab_mask=True)
    history = nf.Trainer(model, training, data).fit(output, progress=False, curves=False, tensorboard=False)
    return [*history.loss, *history.evaluations.loss, *history.evaluations.bleu]


def test_the_loop_reads_binarised_folders(data, twin, tmp_path, capfd):
    text = fit(tmp_path / "text", nf.DataConfig(**files_of(data.parent), no_bpe=True))
    assert fit(tmp_path / "bin", nf.DataConfig(data_bin=str(twin))) == text
    files = [tmp_path / run / name for name in ("vocabulary.txt", "target_types.txt") for run in ("text", "bin")]
    assert files[0].read_text() == files[1].read_text() and files[2].read_text() == files[3].read_text()
    lines = (data.parent / "test.de").read_text().splitlines()
    expected = nf.translate(tmp_path / "text", lines)
    assert nf.translate(tmp_path / "bin", nf.Binarised(twin)) == expected
    assert nf.translate(tmp_path / "bin", nf.Binarised(data)) == expected  # numbered otherwise: known by their pieces
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
    (tmp_path / "train.de-en.de.idx").write_bytes(content[:18] + b"\xff" * 7 + content[25:])
    assert "it is damaged" in error(*train, "--data-bin", str(tmp_path))


CONVERTED = {
    "nfrs": "--arch nfrs_transformer --norm scalenorm --residual prenorm --fixnorm --vocab-mask",
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
    found = nf.translate(run, nf.Binarised(data), nf.SearchConfig(beam=5, rule="fairseq", max_length=12))
    for path in (last, back):
        assert_same_but_for_ties(found, generate(data, path))


def assert_same_but_for_ties(found: list, expected: list[tuple[str, float]]) -> None:
    """99.5% of the lines are the same; the others score the same to 1e-4."""
    pairs = [(best.text, best.score, text, score * math.log(2)) for (best, *_), (text, score) in zip(found, expected)]
    others = [pair for pair in pairs if pair[0] != pair[2]]
    assert len(found) == len(expected) and len(others) <= 0.005 * len(pairs), others
    assert all(abs(ours - theirs) < 1e-4 for _, ours, _, theirs in others), others


@pytest.mark.data
@pytest.mark.parametrize("which", ["stock", "nfrs"])
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
    losses = train(binarised, tmp_path / "out", 150, f"{model} {loss} --dropout 0.1 --max-tokens 2000")
    assert losses[-1] < 0.8 * losses[0]
    last = tmp_path / "out" / "checkpoint_last.pt"
    convert.from_fairseq(last, tmp_path / "run")
    search = nf.SearchConfig(beam=5, rule="fairseq", max_length=40)  # what was hardly trained hardly ends
    found = nf.translate(tmp_path / "run", nf.Binarised(binarised), search)
    assert len({best.text for best, *_ in found}) > 500
    arguments = "--max-tokens 4000 --max-len-b 40 --post-process subword_nmt"
    assert_same_but_for_ties(found, generate(binarised, last, arguments, lines=1000))


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
    with pytest.raises(nf.InputError, match="version 2 of the nfrs architectures"):
        convert.from_fairseq(last, tmp_path / "run")


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
    flags = {"_name": "transformer_tiny", "encoder_embed_dim": 32, "encoder_layers": 1, "activation_fn": "gelu"}
    flags |= {"encoder_ffn_embed_dim": 48, "encoder_attention_heads": 4, "decoder_layers": 1, "dropout": 0.0}
    flags |= {"attention_dropout": 0.0, "activation_dropout": 0.0, "share_all_embeddings": True}
    flags |= {f"{side}_normalize_before": False for side in ("encoder", "decoder")}
    task = {"data": str(data), "source_lang": "de", "target_lang": "en"}
    state = {"decoder.embed_tokens.weight": torch.zeros(9, 32)}
    for change, message in {
        "activation_fn": "--activation-fn gelu: here models have ReLU",
        "layernorm_embedding": "--layernorm-embedding True: here models have",
        "": "embedding.weight must have shape [32, 32], the given one has [9, 32]",
    }.items():
        changed = {**flags, "activation_fn": "relu", **({change: flags.get(change, True)} if change else {})}
        torch.save({"model": state, "cfg": {"model": changed, "task": task}}, tmp_path / "other.pt")
        assert message in error(tmp_path / "other.pt", tmp_path / "run")
        assert not (tmp_path / "run").exists()
    (tmp_path / "there").mkdir()
    assert "exists already" in error(tmp_path / "lstm.pt", tmp_path / "there")


def test_fairseq_missing_is_said(tmp_path):
    (tmp_path / "fairseq.py").write_text("raise ModuleNotFoundError('No module named \\'fairseq\\'', name='fairseq')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = command("normformer_rs", "fairseq", "train", PYTHONPATH=path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "pip install normformer_rs[fairseq]" in done.stderr and "pip before 24.1" in done.stderr
