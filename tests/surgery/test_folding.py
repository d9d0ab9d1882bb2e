"""`fold_admin`: admin's gains folded into the weights."""

import copy

import pytest
import torch
from surgery_support import (
    FF,
    HEADS,
    MODELS,
    D,
    build,
    run,
)

import normformer_rs as nfrs
from normformer_rs import nn as nfnn
from normformer_rs import surgery
from normformer_rs.surgery import swap_residuals

pytestmark = pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor", "ignore:The PyTorch API of nested tensors", "ignore:admin.s gains"
)


@pytest.mark.parametrize("name", ["rust", "rust, decoder-only", *MODELS])
@pytest.mark.one_in(test=3, all=2)
def test_admins_gains_fold_into_the_weights(name):
    if name.startswith("rust"):
        shape = {"d_model": D, "heads": HEADS, "d_ff": FF, "encoder_layers": 2, "decoder_layers": 2}
        alone = {"architecture": "decoder-only"} if "only" in name else {}
        model = nfrs.Transformer(nfrs.TransformerConfig(vocab_size=20, residual="admin", **shape | alone))
        tokens = torch.arange(4, 18).reshape(2, 7)
        outputs = lambda: model(None if alone else tokens, tokens)  # noqa: E731
    else:
        model = build(name)
        swap_residuals(model, "admin")
        outputs = lambda: run(model)[0]  # noqa: E731
    gains = [p for n, p in model.named_parameters() if "residual_scale" in n]
    with torch.no_grad():
        for p in gains:
            p.uniform_(0.5, 2)
    model.eval().double()
    expected = outputs()
    stacks = 2 if name in ("rust", "transformer", "t5", "t5-gated", "marian") else 1
    assert surgery.fold_admin(model) == len(gains) - stacks
    assert sum(bool((p == 1).all()) for p in gains) == len(gains) - stacks
    torch.testing.assert_close(outputs(), expected, rtol=1e-9, atol=1e-9)
    assert surgery.fold_admin(model) == len(gains) - stacks  # nothing is left to fold


PARTS = [{"activation": "swiglu"}, {"kv_heads": 1, "activation": "geglu"}, {"output_gate": "head", "kv_heads": 2}]


@pytest.mark.parametrize("options", PARTS, ids=str)
@pytest.mark.parametrize("kind", ["encoder", "decoder", "loop"])
def test_what_a_layer_has_beside_torchs_is_folded_into(kind, options):
    options = {"residual": "admin", "kv_heads": None, **options}
    x, tokens = torch.randn(2, 5, 16).double(), torch.arange(4, 18).reshape(2, 7)
    if kind == "loop":
        shape = {"d_model": 16, "heads": 4, "d_ff": 24, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 20}
        model = nfrs.Transformer(nfrs.TransformerConfig(**shape, dropout=0.0, **options))
    else:
        name = kind.title()
        layer = getattr(nfnn, f"Transformer{name}Layer")(16, 4, 24, 0.0, batch_first=True, **options)
        model = getattr(nfnn, f"Transformer{name}")(layer, 2)
    outputs = {"encoder": lambda: model(x), "decoder": lambda: model(x, x + 1), "loop": lambda: model(tokens, tokens)}
    model.double().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.uniform_(0.5, 2) if "residual_scale" in name else p.add_(torch.randn_like(p) * 0.2)
    expected = outputs[kind]()
    surgery.fold_admin(model)
    torch.testing.assert_close(outputs[kind](), expected, rtol=1e-10, atol=1e-10)


def test_what_cannot_be_folded():
    options = {"architecture": "decoder-only", "value_embeddings": True, "decoder_layers": 2, "d_model": 16, "heads": 4}
    model = nfrs.Transformer(nfrs.TransformerConfig(vocab_size=20, residual="admin", **options))
    with pytest.raises(ValueError, match="gates of value embeddings"):
        surgery.fold_admin(model)
    with pytest.raises(ValueError, match='holds no layer with residual="admin"'):
        surgery.fold_admin(nfnn.Transformer(D, HEADS, 1, 1, FF, residual="deepnorm"))
    model = nfnn.Transformer(D, HEADS, 1, 1, FF, residual="admin", norm="scalenorm")
    with pytest.raises(ValueError, match="ScaleNorm, has no gain for each column"):
        surgery.fold_admin(model)
    model = nfnn.Transformer(D, HEADS, 2, 1, FF, residual="admin")
    model.encoder.layers[0].linear1.weight = model.encoder.layers[1].linear1.weight
    with pytest.raises(ValueError, match="layers share parameters"):
        surgery.fold_admin(model)
    model = nfnn.Transformer(D, HEADS, 1, 1, FF, residual="admin")
    with torch.no_grad():
        model.decoder.layers[0].residual_scale2[3] = 0
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="norm2 has a zero"):
        surgery.fold_admin(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
