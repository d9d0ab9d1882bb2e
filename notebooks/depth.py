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
# # Compare residual schemes at depth
#
# The same deep Transformer is trained with several schemes by the loop in Rust, without warm-up. Losses, gradient norms
# and learned gains are laid over each other. The text is made on the spot (`pip install ".[notebooks]"` in the
# checkout brings what this needs).

# %%
import tempfile
from pathlib import Path

import torch
from IPython.display import Image, display

import normformer_rs as nfrs
from normformer_rs import analysis, demo

folder = Path(tempfile.mkdtemp())
data = demo.write_corpus(folder / "text")

# %% [markdown]
# ## The runs
#
# 12 layers on either side, 100 updates each, at a constant rate. Everything but the scheme and the initialisation that
# goes with it is the same.

# %%
shape = {"d_model": 32, "d_ff": 64, "heads": 4, "encoder_layers": 12, "decoder_layers": 12, "norm": "scalenorm"}
training = nfrs.TrainingConfig(
    updates=100, max_tokens=1000, schedule="constant", lr=2e-3, warmup=0, evaluate_every=50, keep=1
)
schemes = ("prenorm", "postnorm", "deepnorm", "rezero")
runs = {}
for scheme in schemes:
    model = nfrs.TransformerConfig(**shape, dropout=0.1, residual=scheme)
    runs[scheme] = nfrs.Trainer(model, training, data).fit(folder / scheme, progress=False, curves=False)
    last = runs[scheme].evaluations
    print(f"{scheme:10} validation loss {last.loss[-1]:.3f}, BLEU {last.bleu[-1]:.1f}")

# %% [markdown]
# ## Losses, gradient norms
#
# Look at which losses fall from the first updates on, and at whether any gradient norm is larger than the others.
# `normformer-rs plot RUN …` draws the same from a terminal.

# %%
display(Image(filename=str(nfrs.plot(*runs.values(), path=folder / "runs.png"))))

# %% [markdown]
# Without warm-up postnorm's loss stays at 3, and its gradient norms do not tell: prenorm's are as large. The other
# three learn; rezero's gradients are the largest at first. A hundred updates say how fast a scheme begins, not where it
# ends.
#
# One run alone, with its numbers: a `History` in a notebook shows its evaluations and its picture. Look at the learning
# rate, which is constant, and at the two evaluations.

# %%
runs["deepnorm"]

# %% [markdown]
# Both evaluations of deepnorm are better than the one before.
#
# ## Gradient norms by layer
#
# Each trained model reads one batch; its gradient is taken apart by layer. Look at the slope: does the gradient that
# reaches the first layer differ from the last layer's?

# %%
from matplotlib import pyplot

source, target_input = torch.tensor([[5, 6, 7, 8, 2]]), torch.tensor([[0, 8, 9, 10]])
labels = torch.tensor([8, 9, 10, 2])
figure, axis = pyplot.subplots(figsize=(7, 3.4), layout="constrained")
for scheme in schemes:
    model = nfrs.Transformer.from_checkpoint(folder / scheme, "last").eval()
    torch.nn.functional.cross_entropy(model(source, target_input)[0], labels).backward()
    norms = analysis.gradient_norms(model)
    layers = [value for name, value in norms.items() if name.startswith("encoder.layers.")]
    axis.semilogy(range(1, len(layers) + 1), layers, "o-", markersize=3, label=scheme)
axis.set(title="gradient norm of each encoder layer after training", xlabel="layer")
axis.legend(frameon=False)
pyplot.show()

# %% [markdown]
# prenorm's and rezero's lines are flat: all layers learn at one pace. postnorm's falls by a factor of a thousand
# towards the first layer, deepnorm's by a hundred: their gradients vanish on the way down.
#
# ## Learned gains
#
# ScaleNorm's one number g by depth, which starts at √32 = 5.66; rezero has no norm.

# %%
for scheme in schemes[:3]:
    model = nfrs.Transformer.from_checkpoint(folder / scheme, "last")
    found = [gain for gain in analysis.gains(model) if gain.kind == "encoder.layers.*.norm1"]
    print(f"{scheme:10}", *(f"{gain.g:5.2f}" for gain in found))
