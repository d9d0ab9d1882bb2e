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
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REQUIRED

import normformer_rs as nf
from normformer_rs import cli
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
