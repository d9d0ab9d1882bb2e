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
# # A norm of your own in ten minutes
#
# First in PyTorch, to try it in a model that exists; then in Rust's table, so that the training loop, every residual
# scheme, fairseq and the modules have it.

# %%
import torch
import transformers

import normformer_rs as nf
from normformer_rs import nn as nfnn
from normformer_rs.surgery import register_norm, swap_norms

# %% [markdown]
# ## In PyTorch
#
# MaxNorm: y = γ⊙x/max(max|x|, ε) over the last dimension. Any class whose constructor takes the width will do.


# %%
class MaxNorm(torch.nn.Module):
    """y = γ⊙x/max(max|x|, ε)."""

    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return self.weight * x / x.abs().amax(-1, keepdim=True).clamp_min(self.eps)


x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
print("gradient right:", torch.autograd.gradcheck(MaxNorm(8).double(), (x,)))

# %% [markdown]
# ## In a model
#
# `swap_norms` takes a class as well as a name.

# %%
shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=100, **shape))
swaps = swap_norms(model, MaxNorm)
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
# ## The way back, and other swaps of it
#
# A norm of yours can be exchanged again. Its kind is told once, because calls with numbers cannot recognise an equation
# that the package does not know: its gain is taken over.

# %%
register_norm(MaxNorm, lambda norm: (norm.weight.numel(), "rmsnorm"))
swap_norms(model, "scalenorm")

# %% [markdown]
# ## In Rust's table
#
# One entry declares the norm: parameters, options, and x̂ in tch calls. No kernel is needed. This is the whole file
# `src/norm/max_norm.rs`:
#
# ```rust
# pub static SPEC: Spec = Spec {
#     name: "maxnorm",
#     module: "MaxNorm",
#     equation: "y = γ⊙x/max(s·max|x|, ε) over the last dimension, one learned s = 1",
#     source: "an example",
#     parameters: &[Parameter::one("scale", 1.0), WEIGHT],
#     buffers: &[],
#     options: &[EPS],
#     form: Form::Composed(|x, inside, options| {
#         let largest = x.f_abs()?.f_amax([-1i64].as_slice(), true)?;
#         Ok(x.f_div(&largest.f_mul(&inside[0])?.f_clamp_min(options[0])?)?)
#     }),
# };
# ```
#
# Two lines in `src/norm/mod.rs` and `make build` later it is `--norm maxnorm` in every command and
# `normformer_rs.nn.MaxNorm`, and has its page here. CONTRIBUTING, "Adding a norm", has each step; a test follows them
# on a copy of the sources.
#
# The shipped norm of this kind is `dyt`:

# %%
entry = next(entry for entry in nf.tables()["norms"] if entry["name"] == "dyt")
print(entry["form"], "·", entry["equation"])
print(nfnn.DyT(8))
