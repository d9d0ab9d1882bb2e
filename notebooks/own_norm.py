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
# # A norm and a scheme of your own in ten minutes
#
# Each is a class in Python. A model that exists, modules, the training loop in Rust and fairseq take it where they take
# a name.

# %%
import tempfile
from pathlib import Path

import torch
import transformers

import normformer_rs as nfrs
from normformer_rs import nn as nfnn
from normformer_rs.norms import Parameter
from normformer_rs.schemes import Learned, ResidualSpec, StackSpec, keep, mix, norm

# %% [markdown]
# ## A norm
#
# MaxNorm: y = γ⊙x/max(s·max|x|, ε) over the last dimension, with one learned s.


# %%
class MaxNorm(nfrs.Norm):
    name, equation = "maxnorm", "y = γ⊙x/max(s·max|x|, ε)"
    parameters = {"weight": Parameter(), "scale": Parameter(shape="one")}
    options = {"eps": 1e-5}

    def normalize(self, x, weight, scale, eps):
        return weight * x / (scale * x.abs().amax(-1, keepdim=True)).clamp_min(eps)


x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
print("gradient right:", torch.autograd.gradcheck(MaxNorm()(8, dtype=torch.float64), (x,)))

# %% [markdown]
# ## In a model that exists

# %%
shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=100, **shape))
swaps = nfrs.swap_norms(model, MaxNorm)
swaps

# %%
tokens = torch.randint(100, (8, 16))
optimizer = torch.optim.AdamW(nfnn.parameter_groups(model, weight_decay=0.01), lr=1e-2)
for update in range(20):
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    if update % 5 == 0:
        print(f"update {update}: loss {loss.item():.3f}")

# %% [markdown]
# ## A scheme
#
# This scheme is PreNorm, and each later self-attention mixes the values of the first layer into its own. `keep` leaves
# a tensor under a name, `mix` reads it.


# %%
class FirstValues(nfrs.Scheme):
    name, init = "first-values", "smallinit"

    def around(self, place):
        return ResidualSpec(before=norm())

    def inside(self, place):
        if place.sublayer != "self-attention":
            return {}
        own, first = Learned("value_scale", 0.5), Learned("first_value_scale", 0.5)
        return {"value": mix("values", own, first) if place.layer else keep("values")}

    def stack(self, place):
        return StackSpec(end=norm())


layer = nfnn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm=MaxNorm(), residual=FirstValues())
encoder = nfnn.TransformerEncoder(layer, 3)
print(encoder(torch.randn(2, 5, 64)).shape)
print([name for name, _ in encoder.named_parameters() if "value_scale" in name])

# %% [markdown]
# ## Both in the training loop
#
# The loop in Rust builds what the scheme declares, and calls the norm's function through PyTorch's dispatcher.

# %% tags=["nbval-ignore-output"]
folder = Path(tempfile.mkdtemp())
words = ["one", "two", "three", "four", "five", "six"]
for part, count in (("train", 60), ("valid", 10)):
    lines = [[words[(i * 7 + j * j) % 6] for j in range(1 + i % 5)] for i in range(count)]
    (folder / f"{part}.source").write_text("".join(" ".join(line) + "\n" for line in lines))
    (folder / f"{part}.target").write_text("".join(" ".join(reversed(line)) + "\n" for line in lines))
sizes = {"d_model": 32, "d_ff": 64, "heads": 4, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}
config = nfrs.TransformerConfig(norm=MaxNorm(), residual=FirstValues(), **sizes)
training = nfrs.TrainingConfig(updates=60, max_tokens=400, lr=3e-3, warmup=10, evaluate_every=30)
names = {
    f"{part}_{side}": str(folder / f"{part}.{side}") for part in ("train", "valid") for side in ("source", "target")
}
history = nfrs.Trainer(config, training, nfrs.DataConfig(**names, no_bpe=True)).fit(folder / "run", progress=False)
print(nfrs.translate(folder / "run", ["one two three"]))

# %% [markdown]
# The run keeps what the scheme declares, and the norm's numbers and name: a norm's function is yours to import.

# %%
read = nfrs.Transformer.from_checkpoint(folder / "run", "best").config
print(read.residual, read.norm)

# %% [markdown]
# The page "Your own norm, your own scheme" has everything that either may say. One that will be used often can go into
# Rust's table: CONTRIBUTING, "Adding a norm" and "Adding a residual scheme", has each step.
