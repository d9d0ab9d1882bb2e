"""fairseq's commands and flags with the plug-in, each in a process of its own."""

import argparse
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
from fairseq_support import MARKS, RECIPE, SIZES, SMOOTHED, command, execute, losses_of, parameters, stock, train

import normformer_rs as nfrs
from normformer_rs import cli
from normformer_rs.config import ATTENTION, LANGUAGE_MODELS, tables

pytestmark = MARKS


def flags_of_help() -> str:
    from fairseq import options

    parser = options.get_training_parser()
    from fairseq.models import ARCH_MODEL_REGISTRY

    ARCH_MODEL_REGISTRY["nfrs_transformer_tiny"].add_args(parser)
    return " ".join(parser.format_help().split())


def test_flags_name_everything(fairseq):
    text = flags_of_help()
    norms = ", ".join(entry["name"] for table in ("norms", "families") for entry in tables()[table])
    assert text.replace(" ", "").count(f"One of {norms}; or file.py:Class".replace(" ", "")) == 3
    residuals = f"One of {', '.join(entry['name'] for entry in tables()['residuals'])}. Default: postnorm"
    assert residuals.replace(" ", "") in text.replace(" ", "")  # argparse breaks lines at hyphens, too
    # A parametrisation changes the optimizer's groups, which are fairseq's own.
    for field in (field for field in nfrs.TransformerConfig.FIELDS if field.group != "parametrisation"):
        name = field.name.replace("_", "-")
        known = {"architecture", "vocab-size", "d-model", "d-ff", "heads", "positions", "tie-embeddings"}
        known |= {option.replace("_", "-") for option in (*LANGUAGE_MODELS, *ATTENTION)}
        assert name in known or f"--{name} " in text or f"--no-{name} " in text, name


BAD = {
    "--norm scalnorm": 'unknown norm "scalnorm" (did you mean "scalenorm"?)',
    "--residual post-norm": 'unknown residual "post-norm" (did you mean "postnorm"?)',
    "--residual dlcl*1,prenorm": "dlcl changes more than single layers, so it must have all of them",
    "--encoder-normalize-before": "together mean --residual prenorm",
    "--residual deepnorm --encoder-normalize-before --decoder-normalize-before": "together mean --residual prenorm",
    "--adaptive-softmax-cutoff 5,10": "--adaptive-softmax-cutoff has no place",
    "--decoder-embed-dim 64": "equally wide",
    "--residual prenorm --branchnorm-steps 10": "an option of branchnorm",
    "--residual rezero --encoder-norm rmsnorm": 'residual "rezero" has no norms',
    "--residual dlcl --encoder-layerdrop 0.1": "needs every layer's output: leave --layerdrop out",
    "--residual admin --decoder-layerdrop 0.1": "needs every layer's output: leave --layerdrop out",
    "--word-dropout 1": "--word-dropout must be at least 0 and below 1; got 1.0",
    "--encoder-layers 0": "--encoder-layers must be at least 1; got 0",
    "--norm rmsnorm --scalenorm-fixed-g": "an option of --norm scalenorm; got rmsnorm",
    "--encoder-attention-heads 5": "must divide the width 32; got 5",
}


@pytest.mark.parametrize("arguments", BAD)
@pytest.mark.one_in(all=15)
def test_bad_flags_are_one_line(arguments, data, capsys):
    # --share-all-embeddings would have fairseq complain first of widths that differ
    recipe = RECIPE.replace("--share-all-embeddings", "")
    recipe += f" --arch nfrs_transformer --save-dir {data.parent}/none --max-update 1"
    given = f"train {data} {recipe} {SIZES} {arguments}"
    with pytest.raises(SystemExit) as stopped:
        cli.main(["fairseq", *given.split()])
    assert stopped.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert BAD[arguments] in last and "error" in last


@pytest.mark.full
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
@pytest.mark.one_in(all=2)
def test_the_wrapper_runs_fairseqs_commands(module, data, tmp_path):
    name = [module, "fairseq"] if module == "normformer_rs" else [module]
    done = command(*name, "train", "--help")
    assert done.returncode == 0 and "--save-dir" in done.stdout
    done = command(*name, "train", "--arch", "nfrs_transformer_tiny", "--help")
    help = " ".join(done.stdout.split())
    assert done.returncode == 0 and "One of prenorm, postnorm, deepnorm," in help and "--save-dir" in help
    done = command(*name, "train")
    *_, last = done.stderr.splitlines()
    assert done.returncode == 2 and last.startswith("usage: normformer-rs fairseq train DATA --arch ")
    assert "Traceback" not in done.stderr
    done = command(*name, "trian")
    *_, last = done.stderr.splitlines()
    assert done.returncode == 2 and 'did you mean "train"?' in last and "Traceback" not in done.stderr


@pytest.mark.full
def test_commands_after_training(data, tmp_path):
    train(data, tmp_path, 3, f"--arch nfrs_transformer {SIZES} --criterion {SMOOTHED} --residual prenorm")
    last = str(tmp_path / "checkpoint_last.pt")
    done = stock("validate", str(data), "--path", last, "--cpu", "--batch-size", "8", "--task", "translation")
    assert done.returncode == 0 and re.search(r"loss \d", done.stdout + done.stderr), done.stderr[-2000:]
    done = stock("generate", str(data), "--path", last, "--cpu", "--batch-size", "8", "--beam", "2")
    assert done.returncode == 0 and "H-23" in done.stdout, done.stderr[-2000:]
    scored = [str(data), "--path", last, "--cpu", "--batch-size", "8", "--score-reference", "--print-alignment", "hard"]
    done = stock("generate", *scored)
    assert done.returncode == 0 and re.search(r"^A-23\t\d+-\d+ ", done.stdout, re.MULTILINE), done.stderr[-2000:]
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
@pytest.mark.long
def test_the_command_of_transformers_without_tears(flags, data, tmp_path):
    theirs = shlex.split(APPENDIX_C.replace("\\\n", " "))
    given = f"--arch nfrs_transformer_wmt_en_de {flags} --cpu --max-update 1 --no-save --num-workers 0 --log-interval 1"
    given += " --log-format json"
    done = stock("train", str(data), *theirs, *given.split())
    (loss,) = losses_of(done)
    assert math.isfinite(loss)
    assert "ScaleNorm((512,)" in done.stdout + done.stderr if flags else "LayerNorm((512,)" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "flags",
    [
        "--bf16",
        "--fp16",
        "--amp",
        "--update-freq 2",
        "--checkpoint-activations",
        "--layernorm-embedding",
        "--num-batch-buckets 2",
    ],
)
@pytest.mark.one_in(test=7, all=6)
def test_trains_with_fairseqs_flags(flags, data, tmp_path):
    model = f"--arch nfrs_transformer {SIZES} --norm scalenorm --residual prenorm --criterion {SMOOTHED}"
    losses = train(data, tmp_path, 6, f"{model} {flags}")
    assert len(losses) == 6 and all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    if flags == "--checkpoint-activations":
        assert losses == pytest.approx(train(data, tmp_path / "kept", 6, model), abs=0.002)


# A rank of a training that leaves its parameters in the folder that SAVE_DIR names, when it would save a checkpoint.
RANK = """
import os, torch
from normformer_rs.fairseq_plugin.command import main
from fairseq.trainer import Trainer
save = Trainer.consolidate_optimizer
def leave(trainer):
    torch.save(trainer.model.state_dict(), os.environ["SAVE_DIR"] + "/rank" + os.environ["RANK"])
    save(trainer)
Trainer.consolidate_optimizer = leave
raise SystemExit(main())
"""


@pytest.mark.full
def test_two_processes(data, tmp_path):
    """As torchrun starts them. Both halves of each batch make one update, on both sides the same, also when resumed."""
    model = f"--arch nfrs_transformer {SIZES} --norm layernorm --residual admin --criterion {SMOOTHED}"
    given = f"{data} {RECIPE} {model} --save-dir {tmp_path} --disable-validation"
    given += " --distributed-backend gloo --ddp-backend legacy_ddp"  # c10d wants GPUs here

    def losses_until(updates: int) -> list[float]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])

        def start(rank: int) -> subprocess.CompletedProcess:
            launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(rank)}
            arguments = ["train", *given.split(), "--max-update", str(updates)]
            return execute(sys.executable, "-c", RANK, *arguments, SAVE_DIR=str(tmp_path), **launched)

        with ThreadPoolExecutor(2) as pool:
            done = list(pool.map(start, range(2)))
        assert done[1].returncode == 0, done[1].stderr[-3000:]
        return losses_of(done[0])

    losses = losses_until(4)
    assert len(losses) == 4 and all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    state = parameters(tmp_path / "checkpoint_last.pt")
    assert state["is_profiled"] and (state["encoder.layers.1.residual_scale2"] > 1.05).all()
    assert len(losses_until(6)) == 2
    first, second = (torch.load(tmp_path / f"rank{rank}") for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first if not name.endswith("_float_tensor"))
    assert not torch.equal(first["decoder.layers.1.linear1.weight"], state["decoder.layers.1.linear1.weight"])


SPAWN = """
import multiprocessing, sys, types
def cli_main():
    import fairseq.utils
    worker = multiprocessing.get_context("spawn").Process(target=fairseq.utils.set_torch_seed, args=(1,))
    worker.start(); worker.join(); print("worker", worker.exitcode)
sys.modules["fairseq_cli.train"] = types.SimpleNamespace(cli_main=cli_main)
flags = "--arch nfrs_transformer --optimizer adam --max-tokens 100"
sys.argv = ["normformer-rs", "fairseq", "train", "DATA", *flags.split()]
from normformer_rs.cli import main
main(sys.argv[1:])
"""


@pytest.mark.full
def test_spawned_workers_are_patched(tmp_path):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SPAWN], capture_output=True, text=True, timeout=200)
    assert "worker 0" in done.stdout, done.stderr[-3000:]


@pytest.mark.long
def test_hydra(data, tmp_path):
    given = f"task=translation task.data={data} model=nfrs_transformer_tiny model.norm=scalenorm model.residual=subln "
    given += "model.decoder_norm=layernorm model.scalenorm_fixed_g=true common.bf16=true "
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
    weight = saved["model"]["decoder.layers.1.inner_norm.weight"]
    assert torch.equal(weight, weight.bfloat16().float())
    assert "encoder.layers.1.inner_norm.weight" not in saved["model"]  # its g is fixed
    done = command("normformer_rs", "fairseq", "hydra-train", *given.replace("=scalenorm", "=scalnorm").split())
    assert done.returncode != 0 and "scalnorm" in done.stderr


def test_hydra_twins_are_their_architectures(fairseq):
    from hydra.core.config_store import ConfigStore

    from normformer_rs.fairseq_plugin.options import SHAPES, shape

    for name in SHAPES:
        flags = argparse.Namespace()
        shape(name, flags)
        node = ConfigStore.instance().load(f"model/{name}.yaml").node
        assert {key: node[key] for key in vars(flags)} == vars(flags), name


@pytest.mark.parametrize(
    "arch, given, expected",
    [
        ("tiny", "--encoder-embed-dim 64", {"embed_dim": 64, "ffn_embed_dim": 256, "layers": 4, "attention_heads": 4}),
        ("tiny", "--encoder-ffn-embed-dim 96", {"embed_dim": 128, "ffn_embed_dim": 96, "layers": 4}),
        ("tiny", "--encoder-layers 2", {"layers": 4}),  # as in fairseq, these do not follow
        ("iwslt_de_en", "--encoder-embed-dim 64", {"embed_dim": 64, "ffn_embed_dim": 1024, "attention_heads": 4}),
        ("wmt_en_de", "--encoder-ffn-embed-dim 96", {"embed_dim": 512, "ffn_embed_dim": 96}),
        ("wmt_en_de_big", "--encoder-embed-dim 64", {"embed_dim": 64, "ffn_embed_dim": 4096}),
        ("wmt_en_de_big", "", {"embed_dim": 1024, "ffn_embed_dim": 4096, "attention_heads": 16}),
    ],
)
@pytest.mark.one_in(all=7)
def test_the_decoder_follows_the_encoder(fairseq, arch, given, expected):
    """From the command line's flags, and from hydra's."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    from normformer_rs.fairseq_plugin.options import plain

    parser = options.get_training_parser()
    words = ["DATA", "--arch", f"nfrs_transformer_{arch}", *given.split()]
    node = OmegaConf.create(ConfigStore.instance().load(f"model/nfrs_transformer_{arch}.yaml").node)
    for flag, value in zip(given.split()[::2], given.split()[1::2]):
        node[flag[2:].replace("-", "_")] = int(value)
    parsed = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, words)).model
    for flags in (parsed, node):
        made = vars(plain(flags))
        assert {name: made[f"decoder_{name}"] for name in expected} == expected


@pytest.mark.full
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
    model += f"--share-decoder-input-output-embed --tokens-per-sample 64 --sample-break-mode eos --criterion {SMOOTHED}"
    recipe = RECIPE.replace("--share-all-embeddings", "")
    losses = losses_of(
        stock("train", *f"{tmp_path}/bin {recipe} {model} --save-dir {tmp_path}/out --max-update 12".split())
    )
    assert len(losses) == 12 and losses[-1] < 0.8 * losses[0]
    last = f"{tmp_path}/out/checkpoint_last.pt"
    assert {name.split(".")[0] for name in parameters(Path(last))} == {"decoder"}
    assert cli.main(["convert", "--from", last, "--to", f"{tmp_path}/run"]) == 0
    assert cli.main(["convert", "--from", f"{tmp_path}/run", "--to", f"{tmp_path}/back.pt"]) == 0
    measured = nfrs.evaluate_loss(tmp_path / "run", None, tmp_path / "valid")
    assert 1 < measured.perplexity < 8
    for path in (last, tmp_path / "back.pt"):
        given = f"{tmp_path}/bin --path {path} --cpu --gen-subset valid --tokens-per-sample 64 --num-workers 0"
        done = stock("eval-lm", *given.split())
        found = re.search(r"Loss \(base 2\): ([\d.]+)", done.stdout + done.stderr)
        assert found and float(found[1]) * math.log(2) == pytest.approx(measured.nll, abs=1e-3), done.stderr[-2000:]


@pytest.mark.full
def test_fairseq_missing_is_said(tmp_path):
    (tmp_path / "fairseq.py").write_text("raise ModuleNotFoundError('No module named \\'fairseq\\'', name='fairseq')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = command("normformer_rs", "fairseq", "train", "--help", PYTHONPATH=path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert 'pip install "fairseq==0.12.2"' in done.stderr and 'pip install "pip<24.1"' in done.stderr
