"""`load_swapped`: what Hugging Face's `save_pretrained` wrote of a swapped model comes back to the bit."""

import pytest
import torch
from block_models import FAMILIES, build, inputs, move
from test_blocks import outputs
from torch import nn

import normformer_rs as nfrs
from normformer_rs import InputError, load_swapped, swap_norms, swap_residuals

transformers = pytest.importorskip("transformers")
HUGGING_FACE = [name for name in FAMILIES if name != "timm"]
SCHEMES = ("deepnorm", "sandwich", "rezero", "resi-dual", "mhc", "hybridnorm")


def same(name, model, other):
    given = inputs(name)
    for a, b in zip(outputs(model.eval(), given), outputs(other.eval(), given), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_swapped_models_come_back(name, tmp_path):
    scheme = SCHEMES[HUGGING_FACE.index(name) % len(SCHEMES)]
    model = build(name)
    swap_norms(model, "scalenorm")
    swap_residuals(model, scheme)
    move(model).save_pretrained(tmp_path)
    loaded = load_swapped(tmp_path)
    assert type(loaded) is type(model)
    same(name, model, loaded)
    again = load_swapped(tmp_path, type(model), dtype=torch.float64)
    assert next(again.parameters()).dtype == torch.float64
    _, report = type(model).from_pretrained(tmp_path, output_loading_info=True, ignore_mismatched_sizes=True)
    assert any("norm_is_scalenorm" in key for key in report["unexpected_keys"])


@pytest.mark.parametrize("change", ["options", "depth", "own", "fold", "exact", "filter"])
def test_how_it_was_swapped(change, tmp_path):
    model = build("GPT2")
    if change == "options":
        swap_residuals(model, "layerscale", layerscale_init=0.3)
    elif change == "depth":
        swap_residuals(model, "deepnorm", depth=50)
    elif change == "own":
        swap_residuals(model, OwnScheme(0.5))
    elif change == "fold":
        nfrs.fold_norms(model)
    elif change == "exact":
        swap_norms(model.eval(), "rmsnorm", exact=True)
    else:
        swap_norms(model, "rmsnorm", filter=lambda name, _: "ln_f" not in name)
    move(model).save_pretrained(tmp_path)
    same("GPT2", model, load_swapped(tmp_path))


class OwnScheme(nfrs.Scheme):
    name = "halved"

    def __init__(self, beta):
        self.beta = beta

    def around(self, place):
        return nfrs.schemes.ResidualSpec(before=[nfrs.schemes.norm()], beta=self.beta)


def test_norms_without_biases_are_told_apart(tmp_path):
    """LayerNorm without bias has the keys of RMSNorm."""
    model = transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
        )
    )  # fmt: skip
    swap_norms(model, "rmsnorm")
    model.save_pretrained(tmp_path)
    _, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert [*report["unexpected_keys"]] == ["swapped_norms.norm_is_rmsnorm"]
    tokens = torch.arange(3, 12)[None]
    assert torch.equal(load_swapped(tmp_path)(tokens).logits, model.eval()(tokens).logits)


def test_what_cannot_be_loaded(tmp_path):
    model = build("Llama")
    model.save_pretrained(tmp_path / "stock")
    with pytest.raises(InputError, match=r"config\.json names no swaps.*from_pretrained"):
        load_swapped(tmp_path / "stock")
    swap_norms(model, lambda width: nn.LayerNorm(width))
    model.save_pretrained(tmp_path / "own")
    with pytest.raises(InputError, match="a class of one's own"):
        load_swapped(tmp_path / "own")
    loaded = load_swapped(tmp_path / "own", swap=lambda m: swap_norms(m, lambda width: nn.LayerNorm(width)))
    same("Llama", model, loaded)
