"""Modules of this package in a PreTrainedModel of the user's, whose post_init() initialises what is not marked."""

import copy

import pytest
import torch
from torch import nn

import normformer_rs as nfrs
from normformer_rs import nn as nfnn

transformers = pytest.importorskip("transformers")
D = 16
SCHEMES = [entry["name"] for entry in nfrs.tables()["residuals"]]
NORMS = [*(e["name"] for e in nfrs.tables()["norms"]), *(e["name"] for e in nfrs.tables()["families"])]


class Config(transformers.PretrainedConfig):
    model_type = "mine"

    def __init__(self, scheme="prenorm", norm="layernorm", **rest):
        super().__init__(**rest)
        self.scheme, self.norm = scheme, norm


class Mine(transformers.PreTrainedModel):
    config_class = Config

    def __init__(self, config, finish=True):
        super().__init__(config)
        own = {"part": 0.5} if config.norm == "rmsnorm:partial" else {}
        self.norm = nfnn.norm_class(config.norm)(D, **own)
        layer = nfnn.TransformerEncoderLayer(D, 2, 32, 0.0, batch_first=True, residual=config.scheme)
        self.encoder, self.head = nfnn.TransformerEncoder(layer, 2), nn.Linear(D, D)
        self.table = nfnn.FixNormEmbedding(20, D)
        if finish:
            self.post_init()

    def forward(self, ids):
        return self.head(self.encoder(self.norm(self.table(ids))))


class Unguarded(Mine):
    """Writes by itself, as older models do."""

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(0, 1)
        for p in module.parameters(recurse=False):
            p.data.add_(1)


def built(finish, kind=Mine, **options):
    torch.manual_seed(0)
    return kind(Config(**options), finish)


@pytest.mark.parametrize("kind", [Mine, Unguarded])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.one_in(test=6, all=3)
def test_post_init_leaves_initial_values_of_schemes(scheme, kind):
    want, model = built(False, kind, scheme=scheme), built(True, kind, scheme=scheme)
    changed = [n for (n, p), q in zip(model.named_parameters(), want.parameters()) if not torch.equal(p, q)]
    assert all(name.startswith("head.") for name in changed) and changed


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.one_in(test=2)
def test_post_init_leaves_initial_values_of_norms(name):
    want, model = built(False, Unguarded, norm=name), built(True, Unguarded, norm=name)
    for p, q in zip(model.norm.parameters(), want.norm.parameters()):
        assert torch.equal(p, q)
    again = copy.deepcopy(model)
    again.init_weights()
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), model.parameters()))


def test_post_init_initialises_layers_without_a_scheme_as_torchs():
    class Plain(Mine):
        def __init__(self, config):
            super().__init__(config, False)
            self.encoder = nfnn.TransformerEncoder(nfnn.TransformerEncoderLayer(D, 2, 32, batch_first=True), 2)
            self.post_init()

    model = Plain(Config())
    assert model.encoder.layers[1].linear1.weight.std().item() == pytest.approx(0.02, rel=0.15)


@pytest.mark.parametrize("scheme", ["deepnorm", "mhc", "dlcl"])
def test_saved_models_load_and_missing_parts_are_initialised(scheme, tmp_path):
    model, ids = built(True, scheme=scheme).eval(), torch.randint(0, 20, (2, 5))
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(Mine.from_pretrained(tmp_path).eval()(ids), model(ids), rtol=0, atol=0)

    class Wider(Mine):
        def __init__(self, config):
            super().__init__(config, False)
            self.more = nfnn.Residual(nn.Linear(D, D), D, scheme="prenorm", norm="rmsnorm")
            self.post_init()

    wider = Wider.from_pretrained(tmp_path)
    assert all(p.isfinite().all() and p.abs().max() < 10 for p in wider.more.parameters())
    assert torch.equal(
        wider.more.norm1.weight if hasattr(wider.more, "norm1") else wider.more.norm2.weight, torch.ones(D)
    )


def test_a_model_made_without_numbers_is_initialised_later():
    with torch.device("meta"):
        model = built(False, scheme="deepnorm", norm="rmsnorm:gemma")
    assert not getattr(model.norm, "_is_hf_initialized", False)
    model.to_empty(device="cpu")
    for module in (model.encoder, model.norm, model.table, model.head):
        module.reset_parameters()
    want = built(False, scheme="deepnorm", norm="rmsnorm:gemma")
    assert torch.equal(model.norm.weight, want.norm.weight)
    for p, q in zip(model.encoder.parameters(), want.encoder.parameters()):
        assert p.numel() < 200 or (p.std() / q.std()).item() == pytest.approx(1, abs=0.2)
