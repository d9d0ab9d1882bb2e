# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A fairseq recipe, to a run in Rust and back
#
# fairseq preprocesses text and trains one of the package's architectures. The checkpoint becomes a run of this package,
# translates here, and goes back to fairseq as a `.pt`. Then the loop in Rust trains on the same folder. fairseq has to
# be there: `make fairseq`, or `pip install "pip<24.1" && pip install ".[fairseq]"` in the checkout. The text is made
# on the spot.

# %%
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import normformer_rs as nfrs
from normformer_rs import demo

folder = Path(tempfile.mkdtemp())
corpus = demo.corpus()
demo.write_corpus(folder / "text", corpus)


def run(command, show=6, only=""):
    """What a terminal would run: the last lines that it says, of those that begin with `only`."""
    print("$", command)
    words = [word.format(folder=folder) for word in command.split()]
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, env={**os.environ, "PYTHONWARNINGS": "ignore"}
    )
    said = (done.stdout + done.stderr).replace(str(folder), "FOLDER").splitlines()
    print("\n".join([line[:150] for line in said if line.startswith(only)][-show:]))
    done.check_returncode()


# %% [markdown]
# ## Preprocess
#
# The words are the pieces here; real text is split by BPE first. Models of this package have one vocabulary, hence
# `--joined-dictionary`. `normformer_rs fairseq` is what `normformer-rs fairseq` runs.

# %%
run(
    "normformer_rs fairseq preprocess --source-lang en --target-lang vi --joined-dictionary --workers 1 "
    "--trainpref {folder}/text/train --validpref {folder}/text/valid --testpref {folder}/text/test "
    "--destdir {folder}/data",
    show=2,
)

# %% [markdown]
# ## Train with fairseq
#
# Any flag of a recipe stays; `--arch`, `--norm`, `--residual` and `--init` are the package's.

# %% tags=["nbval-ignore-output"]
run(
    "normformer_rs fairseq train {folder}/data --arch nfrs_transformer_tiny --norm scalenorm --residual prenorm "
    "--fixnorm --share-all-embeddings --encoder-layers 2 --decoder-layers 2 --dropout 0.1 "
    "--criterion nfrs_label_smoothed_cross_entropy --label-smoothing 0.1 --optimizer adam --clip-norm 1.0 --lr 0.003 "
    "--lr-scheduler inverse_sqrt --warmup-updates 50 --max-tokens 2000 --max-update 150 --cpu --num-workers 0 "
    "--no-epoch-checkpoints --log-format simple --log-interval 50 --save-dir {folder}/checkpoints",
    show=8,
)

# %% [markdown]
# ## To a run of this package
#
# 150 updates are few: the model has learned the language, and not yet the numbers.

# %% tags=["nbval-ignore-output"]
run("normformer_rs convert --from {folder}/checkpoints/checkpoint_best.pt --to {folder}/run --data {folder}/data")
lines = [pair.english for pair in corpus.test[:3]]
for line, found in zip(lines, nfrs.translate(folder / "run", lines, nfrs.SearchConfig(beam=4))):
    print(f"{line}\n  → {found[0].text}")

# %% [markdown]
# ## And back
#
# fairseq generates with what was converted twice.

# %% tags=["nbval-ignore-output"]
run("normformer_rs convert --from {folder}/run --to {folder}/back.pt")
run("normformer_rs fairseq generate {folder}/data --path {folder}/back.pt --beam 4 --cpu --num-workers 0", only="H-")

# %% [markdown]
# ## The same folder in Rust
#
# `data_bin` is fairseq's folder; nothing is preprocessed again. Look at the validation loss: it should fall as it did
# under fairseq.

# %%
model = nfrs.TransformerConfig(**demo.MODEL, positions="fairseq", decoder_start="eos")
training = nfrs.TrainingConfig(
    updates=150, max_tokens=2000, lr=3e-3, warmup=50, clip_norm=1.0, evaluate_every=50, keep=1
)
history = nfrs.Trainer(model, training, nfrs.DataConfig(data_bin=str(folder / "data"))).fit(
    folder / "rust", progress=False
)
history

# %% [markdown]
# The loss falls over the three evaluations. The two loops read the same batches in another order, so that their numbers
# are alike and not equal.
