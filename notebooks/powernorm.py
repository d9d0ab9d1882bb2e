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
# # PowerNorm, padding and statistics
#
# BatchNorm, PN-V and PowerNorm divide by statistics of the batch or of the steps before. This notebook looks at what
# padding does to them, at how far a batch's statistics are from the running ones, and at PowerNorm's warm-up.

# %%
import torch
import transformers
from matplotlib import pyplot

import normformer_rs as nfrs
from normformer_rs import analysis
from normformer_rs import nn as nfnn

torch.manual_seed(0)
for entry in nfrs.tables()["norms"]:
    if entry["form"] == "columns":
        print(f"{entry['name']:12} {entry['equation']}")

# %% [markdown]
# ## Padding stays out
#
# True marks padding. It enters no statistic, and leaves as 0.

# %%
x = torch.randn(2, 6, 4)
mask = torch.tensor([[False] * 6, [False] * 3 + [True] * 3])
x[mask] = 1000.0
norm = nfnn.PowerNormV(4, alpha=0.0)
y = norm(x, padding_mask=mask)
print("running ψ² with the mask   ", norm.running_phi)
print("mean square of real tokens ", x[~mask].square().mean(0))
print("at padding                 ", y[mask].unique())
norm(x)
print("running ψ² without the mask", norm.running_phi)

# %% [markdown]
# ## In a model of Hugging Face
#
# A swapped model reads `attention_mask` by itself. More padding changes nothing:

# %%
shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
still = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=100, **shape, **still))
print(nfrs.swap_norms(model, "powernorm-v"))
tokens = torch.randint(5, 100, (3, 8))
seen = torch.ones_like(tokens)
first = model.train()(input_ids=tokens, attention_mask=seen).logits
longer = torch.nn.functional.pad(tokens, (0, 5), value=0)
second = model(input_ids=longer, attention_mask=torch.nn.functional.pad(seen, (0, 5))).logits[:, :8]
print("largest difference:", (first - second).abs().max().item())

# %% [markdown]
# ## How far a batch is from the running statistics
#
# PowerNorm's authors find that batch statistics of text fluctuate (Shen et al. 2020, Fig 2 to 4).
# `analysis.statistics` measures it, here in an encoder that learns to copy. Look at whether the distances settle.


# %%
def distances(name, updates=60):
    """‖σ²_B − σ²‖/d, or ‖ψ²_B − ψ²‖/d, of the first norm at each update."""
    torch.manual_seed(0)
    layer = nfnn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, residual="prenorm", norm=name)
    encoder = torch.nn.Sequential(
        torch.nn.Embedding(50, 32), nfnn.TransformerEncoder(layer, 2), torch.nn.Linear(32, 50)
    )
    optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3)
    found = []
    for _ in range(updates):
        tokens = (50 * torch.rand(16, 10) ** 3).long()
        optimizer.zero_grad()
        with analysis.statistics(encoder) as seen:
            torch.nn.functional.cross_entropy(encoder(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        first = next(iter(seen.values()))
        found.append(first.variance if name == "batchnorm" else first.power)
    return found


for name in ("batchnorm", "powernorm-v"):
    pyplot.semilogy(distances(name), label=name)
pyplot.title("distance of the batch's statistic from the running one, first norm")
pyplot.xlabel("update")
pyplot.legend(frameon=False)
pyplot.show()

# %% [markdown]
# The distances begin large, because running statistics begin at 1, and then fluctuate from batch to batch. What divides
# by the batch's statistic in training meets another one in evaluation.
#
# ## PowerNorm's warm-up
#
# For its first `warmup_iters` training forwards PowerNorm computes PN-V; then it divides by the running ψ² of the step
# before, and its gradient is an approximation. `powernorm_warmup` in a configuration is the same number.

# %%
norm, twin = nfnn.PowerNorm(8, warmup_iters=3), nfnn.PowerNormV(8)
for step in range(1, 6):
    x = step * torch.randn(64, 8)
    same = torch.allclose(norm(x), twin(x), atol=1e-6)
    print(f"forward {step}: {'as PN-V' if same else 'by the running ψ²'}")
