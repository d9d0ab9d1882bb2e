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
# # Quickstart
#
# Train a Transformer in Rust, watch its curves, and translate with it, from Python, in under two minutes on two cores.
# The text is made on the spot: numbers, ordinals and dates in words, English to Vietnamese
# (num2words makes them; `pip install ".[demo]"` in the checkout brings it).

# %%
import tempfile
from pathlib import Path

import torch

import normformer_rs as nfrs
from normformer_rs import demo

folder = Path(tempfile.mkdtemp())
corpus = demo.corpus()
data = demo.write_corpus(folder / "text", corpus)
print(len(corpus.train), "pairs to train on, for example", corpus.train[-1])

# %% [markdown]
# ## A model
#
# Every option has a default; `help(nfrs.TransformerConfig)` lists them, `nfrs.tables()` the norms, residual schemes and
# initialisations.

# %%
for entry in nfrs.tables()["norms"]:
    print(f"{entry['name']:16} {entry['equation']}")

model = nfrs.TransformerConfig(**{**demo.MODEL, "norm": "scalenorm", "residual": "prenorm"})
training = nfrs.TrainingConfig(**{**demo.TRAINING, "updates": 300, "warmup": 100, "evaluate_every": 100})

# %% [markdown]
# ## Training
#
# The loop runs in Rust; the history comes back as numpy arrays.

# %%
history = nfrs.Trainer(model, training, data).fit(folder / "run")
print(history)
print("validation BLEU", history.evaluations.bleu.round(1))

# %% [markdown]
# ## Curves
#
# `fit` has drawn them to `run/curves.png`. Look at the distance between training and validation loss, and at BLEU.

# %%
try:
    from IPython.display import Image, display

    display(Image(filename=str(history.plot())))
except ImportError:
    print('curves need matplotlib and IPython: pip install "matplotlib>=3.8" ipython')

# %% [markdown]
# Both losses fall together, so the model does not learn its training text by heart. BLEU rises later than the loss
# falls, because a translation has to be right in every word.
#
# ## Translating

# %% tags=["nbval-ignore-output"]
lines = [pair.english for pair in corpus.test[:5]]
for line, translations in zip(lines, nfrs.translate(folder / "run", lines, nfrs.SearchConfig(beam=4))):
    print(f"{line}\n  → {translations[0].text}   ({translations[0].score:.2f})")

# %% [markdown]
# ## The model as a module
#
# `nfrs.Transformer` is an `nn.Module` like any other: parameters, gradients, `state_dict`, optimizers.

# %%
transformer = nfrs.Transformer.from_checkpoint(folder / "run")
print(transformer)
source, target_input = torch.tensor([[5, 6, 7, 2]]), torch.tensor([[0, 8, 9]])
logits = transformer(source, target_input)
logits.logsumexp(-1).sum().backward()
norms = {name: parameter.grad.norm().item() for name, parameter in transformer.named_parameters()}
print("logits", tuple(logits.shape), "largest gradient at", max(norms, key=norms.get))
