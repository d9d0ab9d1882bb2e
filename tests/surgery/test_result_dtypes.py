"""Dtypes of outputs: a swapped norm returns the one that its predecessor did."""

import copy
import pickle

import pytest
import torch
from torch import nn

import normformer_rs as nfrs
from normformer_rs import nn as nfnn
from normformer_rs.surgery import swap_norms, swap_residuals

KINDS = [*(e["name"] for e in nfrs.tables()["norms"]), *(e["name"] for e in nfrs.tables()["families"])]
HALVES = (torch.float16, torch.bfloat16)


class LikeWeight(nn.Module):
    """T5's: in the weight's type if that is a half."""

    def __init__(self, width=8):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        x = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * (x.to(self.weight.dtype) if self.weight.dtype in HALVES else x)


class Promoted(LikeWeight):
    """Llama's: the product's."""

    def forward(self, x):
        a = x.float()
        return self.weight * (a * torch.rsqrt(a.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class LikeInput(LikeWeight):
    """Gemma's."""

    def forward(self, x):
        a = x.float()
        return (self.weight.float() * (a * torch.rsqrt(a.square().mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.norm, self.linear = kind(), nn.Linear(8, 8)

    def forward(self, x):
        return self.norm(x)


def swapped(kind, to):
    model = Model(kind)
    swap_norms(model, to, **({"part": 0.5} if to == "rmsnorm:partial" else {}))
    return model


@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("kind", [LikeWeight, Promoted, LikeInput])
@pytest.mark.one_in(test=30, all=20)
def test_a_new_norm_returns_the_dtype_that_the_old_one_did(kind, to):
    for weights in (torch.float32, *HALVES):
        stock, new = Model(kind).to(weights).eval(), swapped(kind, to).to(weights).eval()
        for given in (torch.float32, *HALVES):
            x = torch.randn(3, 8, dtype=given)
            y, again = new(x), pickle.loads(pickle.dumps(copy.deepcopy(new)))(x)
            assert y.dtype == again.dtype == stock(x).dtype, (weights, given)
            if to == "rmsnorm":
                torch.testing.assert_close(y, stock(x), rtol=2e-2, atol=2e-2)


def test_compiled_and_differentiated_results_have_the_dtype():
    model, x = swapped(LikeWeight, "rmsnorm").half(), torch.randn(3, 8, requires_grad=True)
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        y = run(x)
        (grad,) = torch.autograd.grad(y.float().square().sum(), x)
        assert (y.dtype, grad.dtype) == (torch.float16, torch.float32)


def test_norms_of_the_package_keep_xs_dtype():
    for name in ("layernorm", "rmsnorm", "batchnorm"):
        model = nn.Sequential(nfnn.norm_class(name)(8), nn.Linear(8, 8))
        swap_norms(model, "scalenorm")
        assert model[0].half()(torch.randn(2, 8)).dtype == torch.float32


@pytest.mark.parametrize(
    ("kind", "dtype", "targets"),
    [("T5", torch.float16, ["rmsnorm", "l2norm", "batchnorm"])]
    + [pytest.param(k, d, KINDS, marks=pytest.mark.full) for k in ("T5", "MT5", "UMT5") for d in HALVES],
)
@pytest.mark.one_in(all=7)
def test_t5_runs_in_halves_with_other_norms(kind, dtype, targets, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = getattr(transformers, f"{kind}Config")(**sizes, decoder_start_token_id=0)
    build = getattr(transformers, f"{kind}ForConditionalGeneration")
    build(config).save_pretrained(tmp_path)
    ids = torch.randint(2, 40, (2, 6))
    stock = build.from_pretrained(tmp_path, dtype=dtype).eval()
    want = stock(input_ids=ids, labels=ids).logits
    for to in targets:
        model = copy.deepcopy(stock)
        swap_norms(model, to, **({"part": 0.5} if to == "rmsnorm:partial" else {}))
        logits = model(input_ids=ids, labels=ids).logits
        assert logits.isfinite().all() and logits.dtype == want.dtype, to
        with torch.autocast("cpu", torch.bfloat16):
            assert model(input_ids=ids, labels=ids).logits.isfinite().all(), to


def test_a_swapped_residual_reads_a_norm_that_returns_another_dtype(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    swap_norms(model, "rmsnorm")
    ids = torch.randint(2, 40, (2, 6))
    want = model(input_ids=ids).logits
    swap_residuals(model, "prenorm", init=None)
    torch.testing.assert_close(model(input_ids=ids).logits, want)
    model.bfloat16()(input_ids=ids)
