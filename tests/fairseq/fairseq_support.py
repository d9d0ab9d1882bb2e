"""What the tests of the fairseq plug-in share; importing it skips a module where fairseq is not installed."""

import contextlib
import copy
import io
import json
import logging
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import normformer_rs as nfrs
from environment import REQUIRED
from normformer_rs._optional import available

if not available("fairseq"):
    if "fairseq" in REQUIRED:
        raise ImportError("NORMFORMER_RS_REQUIRE names fairseq, which is not installed: make fairseq")
    pytest.skip("fairseq is not installed: make fairseq", allow_module_level=True)

# fairseq and hydra 1.0 warn of much that is not this package's to change.
MARKS = [pytest.mark.fairseq, pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


SIZES = "--encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 32 --encoder-ffn-embed-dim 48 "
SIZES += "--encoder-attention-heads 4 --decoder-attention-heads 4"
SMOOTHED = "nfrs_label_smoothed_cross_entropy --label-smoothing 0.1"
RECIPE = "--optimizer adam --clip-norm 1.0 --lr 0.01 --lr-scheduler inverse_sqrt --warmup-updates 10 --max-tokens 300 "
RECIPE += "--cpu --num-workers 0 --log-interval 1 --log-format json --no-epoch-checkpoints --share-all-embeddings"


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


def compose_once() -> None:
    """Has hydra, which takes seconds, compose each command line once in a process; the model's values are set after."""
    from fairseq.dataclass import utils
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    compose, parser = utils.compose, OverridesParser.create()
    known: dict[tuple[str, ...], tuple[list[str], Any]] = {}

    def with_the_models_values(name: str, overrides: list[str], strict: bool):
        others = tuple(value for value in overrides if not value.startswith("model."))
        if others not in known:
            known[others] = overrides, compose(name, overrides=overrides, strict=strict)
        composed_of, config = known[others]
        config = copy.deepcopy(config)
        for value in parser.parse_overrides(sorted({*overrides} - {*composed_of})):
            OmegaConf.update(config, value.key_or_group, value.value())
        return config

    utils.compose = with_the_models_values


def configured(which: str, arguments: str, changes: dict):
    """fairseq's configuration of a command line, with some of its values changed, each named as section.option."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    parser = {"train": options.get_training_parser, "generate": options.get_generation_parser}[which]()
    config = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, input_args=arguments.split()))
    for name, value in changes.items():
        section, _, option = name.partition(".")
        setattr(config[section], option, value)
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
    """The parameters and buffers of a checkpoint, but for fairseq's own constants."""
    return own_values(torch.load(checkpoint, weights_only=True)["model"])


def own_values(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's state without fairseq's own constants, some of which are never set: they may be NaN, unequal to
    themselves."""
    return {name: value for name, value in state.items() if not name.endswith(("version", "_float_tensor"))}


def batch(pad_left: bool = True):
    """Source and target input of three sentences, padded with 1 on either side."""
    sources, targets = [[5, 6, 7, 8, 9, 2], [4, 7, 2], [11, 5, 4, 2]], [[2, 9, 8, 7], [2, 5], [2, 6, 6]]

    def padded(rows: list[list[int]], left: bool):
        width = max(map(len, rows))
        return torch.tensor([[1] * (width - len(r)) * left + r + [1] * (width - len(r)) * (not left) for r in rows])

    return padded(sources, pad_left), padded(targets, False)


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """A Python module's command in a process of its own."""
    return execute(sys.executable, "-m", *arguments, **environment)


def stock(which: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """fairseq-WHICH as users have it: its own with --user-dir on Python 3.10, on later ones the wrapper's."""
    if sys.version_info >= (3, 11):
        return command("normformer_rs", "fairseq", which, *arguments, **environment)
    program, plugin = (
        Path(sys.executable).with_name(f"fairseq-{which}"),
        Path(nfrs.__file__).with_name("fairseq_plugin"),
    )
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
