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
# # Swap norms and schemes in a Hugging Face model
#
# A GPT-2 of the `transformers` library gets other norms and another residual scheme, is trained, and is taken back.
# The text is made on the spot: numbers and dates in words (`pip install ".[notebooks]"` in the checkout brings what
# this needs). Nothing is downloaded.

# %%
import copy

import torch
import transformers

import normformer_rs as nfrs
from normformer_rs import analysis, demo
from normformer_rs import nn as nfnn

transformers.logging.set_verbosity_error()
torch.manual_seed(1)
lines = [pair.english.split() for pair in demo.corpus().train[:4000]]
words = ["<pad>", "<end>", *sorted({word for line in lines for word in line})]
number = {word: index for index, word in enumerate(words)}
print(len(lines), "lines,", len(words), "words, for example:", " ".join(lines[-1]))

# %% [markdown]
# ## The model as the library makes it
#
# GPT-2 is prenorm with LayerNorm. `n_layer` is 12, so that the residual scheme matters.

# %%
shape = {"vocab_size": len(words), "n_positions": 32, "n_embd": 64, "n_layer": 12, "n_head": 4}
stock = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=1, eos_token_id=1))
print(f"{sum(p.numel() for p in stock.parameters()):,} parameters")

# %% [markdown]
# ## Other norms
#
# `swap_norms` works in place and returns a table of what it did. `filter` chooses: here the first block.

# %%
model = copy.deepcopy(stock)
swaps = nfrs.swap_norms(model, "rmsnorm", filter=lambda name, norm: ".h.0." in name)
swaps

# %% [markdown]
# `undo` brings the old norms back; the outputs are those from before, bit by bit.

# %%
tokens = torch.randint(2, len(words), (2, 9))
swaps.undo()
with torch.no_grad():
    print("equal:", torch.equal(model.eval()(tokens).logits, stock.eval()(tokens).logits))

# %% [markdown]
# ## Another residual scheme
#
# `swap_residuals` draws the blocks' weights anew, as the scheme asks; `init=None` would keep them.

# %%
schemes = {"stock": lambda model: None}
for scheme in ("postnorm", "deepnorm", "rezero"):
    schemes[scheme] = lambda model, scheme=scheme: nfrs.swap_residuals(model, scheme)
schemes["prenorm, scalenorm"] = lambda model: nfrs.swap_norms(model, "scalenorm")
nfrs.swap_residuals(copy.deepcopy(stock), "deepnorm")


# %% [markdown]
# ## Training them
#
# An ordinary loop. `parameter_groups` keeps gains and residual scales out of weight decay.


# %%
def batches(count, size=32):
    """Ids of lines, each ended by <end>, padded; labels are -100 at padding."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        chosen = [lines[i] for i in torch.randint(len(lines), (size,), generator=generator)]
        rows = [torch.tensor([1, *(number[word] for word in line), 1]) for line in chosen]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        yield {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def train(model, updates=60):
    """The losses and the gradient norms of each layer at the first update."""
    optimizer = torch.optim.AdamW(nfnn.parameter_groups(model, weight_decay=0.01), lr=2e-3)
    losses, first = [], None
    for batch in batches(updates):
        optimizer.zero_grad()
        loss = model.train()(**batch).loss
        loss.backward()
        first = first or analysis.gradient_norms(model)
        optimizer.step()
        losses.append(loss.item())
    return losses, first


runs, trained = {}, {}
for name, swap in schemes.items():
    torch.manual_seed(1)
    trained[name] = copy.deepcopy(stock)
    swap(trained[name])
    runs[name] = train(trained[name])
    print(f"{name:20} loss {runs[name][0][0]:.2f} → {sum(runs[name][0][-10:]) / 10:.2f}")

# %% [markdown]
# ## Curves
#
# On the left look at which losses fall. On the right: is the gradient of the first layers as large as that of the last?

# %%
from matplotlib import pyplot

figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
for name, (losses, norms) in runs.items():
    left.plot(losses, label=name)
    layers = [value for key, value in norms.items() if key.startswith("transformer.h.")]
    right.semilogy(range(1, len(layers) + 1), layers, "o--" if "scalenorm" in name else "o-", markersize=3)
left.set(title="loss", xlabel="update", ylabel="nats per word")
right.set(title="gradient norm of each layer at the first update", xlabel="layer")
figure.legend(loc="outside right upper", frameon=False)
pyplot.show()

# %% [markdown]
# deepnorm and the stock model learn fastest in these 60 updates, postnorm and rezero slowest. The stock model's
# gradients are alike in all layers; under postnorm and deepnorm the first layer's is seven times the others'. rezero's
# are a thousandth of the stock model's, because its branches begin at 0.
#
# ## What was learned
#
# The length g of each ScaleNorm, from the first layer to the last.

# %%
gains = analysis.gains(trained["prenorm, scalenorm"])
print([round(gain.g, 2) for gain in gains if gain.kind.endswith("ln_1")])
