"""Forward and backward of every scheme and norm on the meta device and in 16 bits."""

import pytest
import torch
from torch import nn

import normformer_rs as nfrs
from normformer_rs import nn as nfnn

D = 8
SCHEMES = [entry["name"] for entry in nfrs.tables()["residuals"]]
NORMS = [*(e["name"] for e in nfrs.tables()["norms"]), *(e["name"] for e in nfrs.tables()["families"])]


def model_of(scheme, kind, **factory):
    options = {"batch_first": True, "residual": scheme, **factory}
    if kind == "encoder":
        return nfnn.TransformerEncoder(nfnn.TransformerEncoderLayer(D, 2, 16, 0.1, **options), 2)
    return nfnn.Transformer(D, 2, 2, 2, 16, 0.1, **options)


def norm_of(name, **factory):
    return nfnn.norm_class(name)(D, **({"part": 0.5} if name == "rmsnorm:partial" else {}), **factory)


def inputs(kind, **factory):
    x = torch.randn(2, 3, D, **factory).requires_grad_()
    return (x,) if kind == "encoder" else (x, torch.randn(2, 4, D, **factory))


@pytest.mark.parametrize("kind", ["encoder", "whole"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.one_in(test=32, all=21)
def test_a_scheme_runs_without_numbers(scheme, kind):
    model, given = model_of(scheme, kind, device="meta"), inputs(kind, device="meta")
    for mode in (True, False):
        y = model.train(mode)(*given)
        assert y.is_meta and y.shape == given[-1].shape
    y.sum().backward()
    assert given[0].grad.is_meta and all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_runs_without_numbers(name):
    norm, (x,) = norm_of(name, device="meta"), inputs("encoder", device="meta")
    for mode in (True, False):
        y = norm.train(mode)(x)
        y.sum().backward()
        assert y.shape == x.shape and y.is_meta and x.grad.is_meta


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.one_in(test=6, all=3)
def test_a_scheme_runs_in_16_bits(scheme, dtype):
    torch.manual_seed(0)
    model = model_of(scheme, "encoder").to(dtype)
    (x,) = inputs("encoder", dtype=dtype)
    for mode in (True, False):
        y = model.train(mode)(x)
        assert y.dtype == dtype and y.isfinite().all()
    y.sum().backward()
    assert x.grad.isfinite().all() and all(p.grad is None or p.grad.dtype == p.dtype for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.one_in(test=3, all=3)
def test_a_norm_runs_in_16_bits(name, dtype):
    norm, (x,) = norm_of(name).to(dtype), inputs("encoder", dtype=dtype)
    for mode in (True, False):
        y = norm.train(mode)(x)
        y.sum().backward()
        assert y.dtype == x.grad.dtype == dtype and y.isfinite().all() and x.grad.isfinite().all()


@pytest.mark.parametrize("name", NORMS)
def test_widths_are_numbers_or_sequences(name):
    own = {"part": 0.5} if name == "rmsnorm:partial" else {}
    x, found = torch.randn(4, D), []
    for width in (D, torch.Size([D]), (D,), [D], torch.tensor(D)):
        torch.manual_seed(0)
        found.append(nfnn.norm_class(name)(width, **own).eval()(x))
    assert all(torch.equal(y, found[0]) for y in found)
    for wrong in ((), "8", 8.0, (8.5,)):
        with pytest.raises((TypeError, nfrs.InputError)):
            nfnn.norm_class(name)(wrong, **own)


@pytest.mark.parametrize("name", ["batchnorm", "powernorm", "powernorm-v", "repbn", "prepbn"])
def test_a_norm_over_one_dimension_refuses_several_by_name(name):
    with pytest.raises(nfrs.InputError, match=r"num_features must be one width.*\(2, 8\)"):
        nfnn.norm_class(name)((2, 8))


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("way", ["eager", "compiled", "exported"])
@pytest.mark.one_in(test=12, all=7)
def test_results_are_contiguous(name, way):
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm_of(name).eval()

        def forward(self, x):
            return self.norm(x.transpose(0, 1)).view(-1, D)

    model, x = Rows(), torch.randn(4, 3, D)
    torch._dynamo.reset()
    want = model.norm(x.transpose(0, 1).contiguous()).reshape(-1, D)
    run = {
        "eager": lambda: model(x),
        "compiled": lambda: torch.compile(model, backend="aot_eager", fullgraph=True)(x),
        "exported": lambda: torch.export.export(model, (x,)).module()(x),
    }[way]
    torch.testing.assert_close(run(), want, rtol=1e-5, atol=1e-5)
