"""Residual schemes swapped into models that somebody else wrote."""

import copy
import pickle
import warnings

import pytest
import torch
from surgery_support import (
    BETWEEN_LAYERS,
    FF,
    HEADS,
    HUGGING_FACE,
    MODELS,
    RESIDUALS,
    ROTATED,
    D,
    assert_same,
    build,
    hugging_face,
    run,
    state_of,
    torchs_encoder,
    torchs_transformer,
    train,
)
from torch import nn

import normformer_rs as nfrs
from normformer_rs import nn as nfnn
from normformer_rs import surgery
from normformer_rs.nn.step_hooks import PATIENCE
from normformer_rs.surgery import swap_norms, swap_residuals

pytestmark = pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor", "ignore:The PyTorch API of nested tensors", "ignore:admin.s gains"
)


def test_a_swapped_model_without_biases_gets_none():
    model = torchs_encoder(bias=False)
    swap_residuals(model, "subln")
    assert not [name for name, _ in model.named_parameters() if "bias" in name]


def test_reset_parameters_after_a_swap_draws_the_schemes_values():
    layer = nn.TransformerEncoderLayer(64, HEADS, 256, batch_first=True)
    model = nn.TransformerEncoder(layer, 18)
    swap_residuals(model, "deepnorm")
    before = model.layers[0].linear1.weight.std().item()
    model.reset_parameters()
    assert model.layers[0].linear1.weight.std().item() == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_schemes_on_rotated_queries_are_refused(name):
    model = build(name)
    state = state_of(model)
    for residual in ROTATED:
        with pytest.raises(
            nfrs.InputError, match=f"{residual} acts at rotated_query of attention, which .* does not expose"
        ):
            swap_residuals(model, residual)
    assert_same(state_of(model), state)


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(test=224, all=223)
def test_residuals_swap_train_and_return(name, residual):
    if residual in ROTATED and name in HUGGING_FACE:
        return
    model = build(name).eval()
    before, state, kinds = run(model)[0], state_of(model), [type(m) for m in model.modules()]
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    done = swap_residuals(model, residual, optimizer=optimizer)
    owned = {id(p) for g in optimizer.param_groups for p in g["params"]}
    assert owned == {id(p) for p in model.parameters()} and not model.training
    assert len(swap_residuals(model, residual)) == 0, "idempotent"
    assert not torch.equal(run(model)[0], before)
    assert "bit-equal" in done.undo()[0].note
    assert torch.equal(run(model)[0], before)
    assert_same(state_of(model), state)
    assert [type(m) for m in model.modules()] == kinds
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}

    options = {"branchnorm": {"branchnorm_steps": 8}, "prores": {"prores_steps": 40}}.get(residual, {})
    swap_residuals(model, residual, optimizer=optimizer, **options)
    losses = train(model, optimizer, 12)
    assert min(losses[-3:]) < losses[0]
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing
    if residual in ("branchnorm", "prores"):
        assert {b.item() for n, b in model.named_buffers() if n.endswith(".t")} == {13}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(test=7, all=3)
def test_without_a_change_the_blocks_compute_what_they_did(name):
    """The scheme that a model has already, weights kept: the same outputs, by way of the converted blocks."""
    model = build(name).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    before = run(model)[0]
    ends = {n: m for n, m in model.named_modules() if n in ("model.encoder.norm", "model.decoder.norm")}
    swap_residuals(model, "prenorm" if name[:2] in ("gp", "t5") else "postnorm", init=None)
    for end, norm in ends.items():  # torch.nn.Transformer's post-norm stacks have a norm more than the equation
        model.get_submodule(end.removesuffix(".norm")).norm = norm
    torch.testing.assert_close(run(model)[0], before, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_end_norms_follow_the_scheme():
    """prenorm ends in a norm, deepnorm's last sublayer does: the stack's own goes, or one is added."""
    for name, end in (("gpt2", "transformer.ln_f"), ("t5", "decoder.final_layer_norm")):
        model = hugging_face(name)
        norm = model.get_submodule(end)
        done = swap_residuals(model, "deepnorm")
        assert end in repr(done)
        assert type(model.get_submodule(end)) is nn.Identity
        done.undo()
        swap_residuals(model, "sandwich")
        assert model.get_submodule(end) is norm
    model = hugging_face("bert")
    swap_residuals(model, "prenorm")
    assert type(model.bert.encoder.stack_residual.norm) is nfnn.LayerNorm
    model = torchs_transformer()
    swap_residuals(model, "rezero")
    assert model.encoder.norm is model.decoder.norm is None


def test_the_embeddings_norm_stands_before_the_first_block_alone():
    model = hugging_face("gpt2").eval()
    swap_residuals(model, "peri-ln", init=None)
    assert type(model.transformer.stack_residual.embedding_norm) is nfnn.LayerNorm
    tokens = torch.tensor([[5, 6, 7]])
    seen = []
    for factor in (100, 3):  # layernorm forgets the scale of its rows, but for ε
        with torch.no_grad():
            for table in (model.transformer.wte, model.transformer.wpe):
                table.weight *= factor
        seen.append(model.transformer(tokens).last_hidden_state)
    torch.testing.assert_close(*seen, rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_schemes_on_torchs_transformer_are_the_packages():
    """Converted from torch.nn, or built with the scheme: from the same weights the same outputs."""
    for residual in RESIDUALS:
        model = torchs_transformer().eval()
        swap_residuals(model, residual)
        built = nfnn.Transformer(D, HEADS, 2, 3, FF, 0.1, batch_first=True, residual=residual).eval()
        state = {k: v for k, v in model.state_dict().items() if "bias" not in k or residual != "r-fixup"}
        built.load_state_dict(state, strict=True)
        x, y = torch.randn(2, 5, D), torch.randn(2, 4, D)
        torch.testing.assert_close(model(x, y), built(x, y), rtol=1e-5, atol=1e-6)
        constants = [s.alpha for stack in (model.encoder, model.decoder) for s in stack.layers[0].place.sublayers]
        assert constants == [
            s.alpha for stack in (built.encoder, built.decoder) for s in stack.layers[0].place.sublayers
        ]


def test_layers_swap_to_schemes_of_their_own():
    model = torchs_transformer().eval()
    swap_residuals(model, "sandwich*1,prenorm")
    kinds = [hasattr(layer, "post_norm1") for layer in (*model.encoder.layers, *model.decoder.layers)]
    assert kinds == [True, False, True, False, False] and model.encoder.norm is not None
    model = hugging_face("bert")
    swap_residuals(model, "sandwich*1,prenorm")
    assert [hasattr(block.residual, "post_norm1") for block in model.bert.encoder.layer] == [True, False]
    with pytest.raises(ValueError, match="did you mean"):
        swap_residuals(model, "sandwhich*1,prenorm")


def test_norms_on_queries_and_keys_need_attention_that_shows_them():
    model, x, y = torchs_transformer().eval(), torch.randn(2, 5, D), torch.randn(2, 4, D)
    before = model(x, y)
    done = swap_residuals(model, "postnorm", qk_norm=True, init=None)
    assert type(model.encoder.layers[0].self_attn.q_norm) is nfnn.LayerNorm
    assert not torch.equal(model(x, y), before)
    done.undo()
    assert torch.equal(model(x, y), before)
    for option in ({"qk_norm": True}, {"qk_l2norm": 72}):
        model_of_bert = hugging_face("bert").eval()
        before = run(model_of_bert)[0]
        swap_residuals(model_of_bert, "postnorm", init=None, **option)
        assert not torch.equal(run(model_of_bert)[0], before)
    swap_residuals(model, "postnorm", qk_l2norm=72, init=None)
    assert model.decoder.layers[2].multihead_attn.qk_scale.item() == pytest.approx(12.319672120946995)


def test_norms_that_a_model_has_keep_their_weights():
    for model in (torchs_transformer(), hugging_face("gpt2")):
        with pytest.raises(ValueError, match="keeps its norms as they are: leave the options out"):
            swap_residuals(model, "ln-scaling", ln_scaling_mode="weight")


def test_depth_is_what_the_constants_count():
    model = hugging_face("bert")
    swap_residuals(model, "deepnorm", depth=50)
    assert model.bert.encoder.layer[0].residual.sublayers[0].alpha == pytest.approx(100**0.25)
    model = hugging_face("marian")
    swap_residuals(model, "deepnorm", depth=(6, 6))
    assert model.model.encoder.layers[0].residual.sublayers[0].alpha == pytest.approx(1.4179, abs=1e-4)
    assert model.model.decoder.layers[1].residual.sublayers[2].alpha == pytest.approx(2.0598, abs=1e-4)
    model = torchs_transformer()
    swap_residuals(model, "admin-const", depth=6)
    assert model.encoder.layers[0].place.sublayers[0].alpha == pytest.approx(2.017, abs=1e-3)


def test_blocks_that_differ_are_groups_of_their_own():
    """An encoder's and a decoder's layer beside each other; the decoder keeps its attention to the encoder."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.TransformerEncoderLayer(D, HEADS, FF, batch_first=True)
            self.dec = nn.TransformerDecoderLayer(D, HEADS, FF, batch_first=True)

        def forward(self, x):
            return self.dec(torch.ones_like(x), self.enc(x))

    model, x = Model().eval(), torch.randn(2, 5, D)
    expected = model(x)
    print(swaps := swap_residuals(model, "postnorm", init=None))
    assert [row.name for row in swaps][:2] == ["enc", "dec"]
    torch.testing.assert_close(model(x), expected)


def test_layers_of_other_inner_widths_are_one_stack():
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, HEADS, FF, batch_first=True), 3)
    stack.layers[1].linear1, stack.layers[1].linear2 = nn.Linear(D, 2 * FF), nn.Linear(2 * FF, D)
    swap_residuals(stack, "deepnorm")
    assert [(layer.place.layer, layer.place.depth) for layer in stack.layers] == [(0, 3), (1, 3), (2, 3)]


def test_branchnorm_says_that_t_stays_and_follows_a_later_optimizer():
    model, tokens = hugging_face("bert"), torch.randint(3, 40, (2, 5))
    swap_residuals(model, "branchnorm")

    def backward():
        model(input_ids=tokens, labels=tokens).loss.backward()

    def by_hand():
        backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)

    by_hand()
    with pytest.warns(UserWarning, match="has not moved"):
        for _ in range(PATIENCE):
            by_hand()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    held = [m for m in model.modules() if getattr(m, "growth", None) is not None]
    swap_residuals(model, "branchnorm", optimizer=optimizer)  # nothing to do
    for _ in range(2):
        backward(), optimizer.step()
    assert held and all(int(m.t) == 3 for m in held)
    twin = copy.deepcopy(model)
    torch.optim.SGD(twin.parameters(), 1e-3).step()
    assert all(int(m.t) == 4 for m in twin.modules() if getattr(m, "growth", None) is not None)
    assert all(int(m.t) == 3 for m in held)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(test=7, all=6)
def test_converted_models_copy_and_pickle(name):
    model = build(name)
    for residual in ("branchnorm", "subln"):
        done = swap_residuals(model, residual)
        model.eval()
        expected = run(model)[0]
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(run(twin)[0], expected)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.5)
            assert torch.equal(run(twin)[0], expected), "the copy stands alone"
            with torch.no_grad():
                for p in model.parameters():
                    p.div_(1.5)
        done.undo()


def test_both_swaps_and_admins_profile():
    model = build("bert")
    swap_residuals(model, "admin")
    swap_norms(model, "scalenorm")
    tokens = torch.arange(3, 11).repeat(2, 1)
    assert nfnn.profile(model, input_ids=tokens) == 4
    gains = [p for n, p in model.named_parameters() if "residual_scale" in n]
    assert len(gains) == 4 and all((p == p[0]).all() for p in gains) and gains[0][0] == 1 and gains[3][0] > 1


def test_layers_outside_a_stack():
    model = nn.ModuleList(nn.TransformerEncoderLayer(D, HEADS, FF, batch_first=True) for _ in range(3))
    done = swap_residuals(model, "prenorm")
    assert "add it yourself" in repr(done) and type(model[2]) is nfnn.TransformerEncoderLayer
    x = torch.randn(2, 3, D)
    for layer in model:
        x = layer(x)
    done.undo()
    assert type(model[2]) is nn.TransformerEncoderLayer


def test_a_lightning_module(tmp_path):
    """Swapped in `configure_model`, trained by Lightning's loop, taken back bit-equal where it has not been trained."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.task, self.losses = build("encoder"), []

        def training_step(self, batch, _):
            loss = run(self.task)[1]
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-2)

    module = Module()
    module.eval()
    before = run(module.task)[0]
    done = [swap_residuals(module, "deepnorm"), swap_norms(module, "scalenorm")]
    for swap in reversed(done):
        swap.undo()
    assert torch.equal(run(module.task)[0], before)
    swap_residuals(module, "deepnorm"), swap_norms(module, "scalenorm")
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(max_steps=12, accelerator="cpu", default_root_dir=tmp_path, **quiet)
        trainer.fit(module, torch.utils.data.DataLoader(range(12), batch_size=1))
    assert len(module.losses) == 12 and min(module.losses[-3:]) < module.losses[0]


@pytest.mark.parametrize("wrap", ["compile", "checkpoint"])
def test_wrapped_layers_are_one_stack(wrap):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = torchs_encoder()
    depth = len(model.layers)
    for i, layer in enumerate(model.layers):
        model.layers[i] = torch.compile(layer, backend="eager") if wrap == "compile" else checkpoint_wrapper(layer)
    swap_residuals(model, "deepnorm")
    assert [layer.place.depth for layer in model.layers] == [depth] * depth
    assert [layer.place.layer for layer in model.layers] == [*range(depth)]


def test_a_frozen_model_gets_new_gains():
    model = torchs_encoder().requires_grad_(False)
    swap_residuals(model, "layerscale", init=None)
    assert [name for name, p in model.named_parameters() if p.requires_grad]


def test_weights_that_something_else_makes_are_not_drawn():
    model = torchs_encoder()
    nn.utils.parametrizations.weight_norm(model.layers[0].linear1)
    state = state_of(model)
    with pytest.raises(ValueError, match=r"linear1 of a .* has no weight of its own"):
        swap_residuals(model, "deepnorm")
    assert_same(state_of(model), state)
    swap_residuals(model, "deepnorm", init=None)
    admin = nfnn.TransformerEncoder(nfnn.TransformerEncoderLayer(D, HEADS, FF, 0.0, residual="admin"), 2).eval()
    nn.utils.parametrizations.weight_norm(admin.layers[0].linear1)
    state = state_of(admin)
    with pytest.raises(ValueError, match="has no weight of its own"):
        surgery.fold_admin(admin)
    assert_same(state_of(admin), state)


def test_shared_and_foreign_layers_count_but_are_not_connected():
    model = torchs_encoder()
    depth = len(model.layers)
    model.layers[1] = model.layers[0]
    for to in ("branchnorm", *BETWEEN_LAYERS):
        with pytest.raises(ValueError, match=rf"each layer of layers differently, but only . of its {depth} layers"):
            swap_residuals(model, to)
    swap_residuals(model, "deepnorm")
    assert model.layers[0].place.depth == depth


def test_what_stands_beside_the_layers_is_no_layer():
    model = nn.Sequential(nn.Linear(D, D), *torchs_encoder().layers, nn.Linear(D, 3))
    swap_residuals(model, "deepnorm")
    assert [layer.place.depth for layer in model[1:-1]] == [2, 2]
