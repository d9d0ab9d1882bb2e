"""Swapped models with PEFT's adapters, whose files hold adapters and `modules_to_save` only."""

import copy

import pytest
import torch
from surgery_support import Wrapped, hugging_face, run
from torch import nn

from normformer_rs.surgery import swap_norms, swap_residuals


class Saved(nn.Module):
    """As PEFT wraps modules_to_save: a copy of the module takes its place, and shows its attributes."""

    def __init__(self, module):
        super().__init__()
        self.original_module = module.requires_grad_(False)
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(module).requires_grad_(True)})

    def forward(self, *args, **options):
        return self.modules_to_save["default"](*args, **options)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["modules_to_save"]["default"], name)


Saved.__module__ = "peft.utils.other"


@pytest.mark.parametrize("scheme", ["branchnorm", "prores", "subln", "normformer", "rezero", "b2t"])
@pytest.mark.one_in(test=3)
def test_a_copy_of_a_blocks_residual_takes_its_place(scheme):
    """Its parameters are trained and used, its t grows, and no block is copied with it."""
    torch.manual_seed(0)
    model = hugging_face("gpt2").eval()
    options = {"branchnorm": {"branchnorm_steps": 4}, "prores": {"prores_steps": 4}}.get(scheme, {})
    swap_residuals(model, scheme, init=None, **options)
    alone = copy.deepcopy(model)
    for block in model.transformer.h:
        block.residual = Saved(block.residual)
    assert torch.equal(run(model)[0], run(alone)[0])
    for some in (model, alone):
        optimizer = torch.optim.SGD([p for p in some.parameters() if p.requires_grad], 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            run(some)[1].backward()
            optimizer.step()
    torch.testing.assert_close(run(model)[0], run(alone)[0])
    for mine, its in zip(model.transformer.h, alone.transformer.h):
        saved = mine.residual.modules_to_save["default"]
        assert saved._block[0] is mine
        for name, t in saved.state_dict().items():
            torch.testing.assert_close(t, its.residual.state_dict()[name], msg=name)


class Adapted(Wrapped):
    """As PEFT wraps a linear layer for LoRA."""

    def __init__(self, layer):
        super().__init__(layer)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, layer.out_features, bias=False)})

    def forward(self, x):
        return super().forward(x) + self.lora_B["default"](self.lora_A["default"](x))


Adapted.__module__ = "peft.tuners.lora.layer"


@pytest.mark.filterwarnings("ignore:swap_residuals to .* made modules that training changes")
@pytest.mark.parametrize("scheme", ["hybridnorm", "olmo2", "value-residual", "sandwich"])
def test_a_swap_with_adapters_computes_what_it_does_with_merged_ones(scheme):
    """The norms of queries have a head's width in hybridnorm, though two matrices compute the queries."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    merged = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=30, **shape)).double().eval()
    adapted, tokens = copy.deepcopy(merged), torch.randint(30, (2, 7))
    for block, its in zip(adapted.model.layers, merged.model.layers):
        for owner, other, name in (
            (block.self_attn, its.self_attn, "q_proj"),
            (block.self_attn, its.self_attn, "v_proj"),
            (block.mlp, its.mlp, "down_proj"),
        ):
            layer = Adapted(getattr(owner, name)).double()
            setattr(owner, name, layer)
            with torch.no_grad():
                getattr(other, name).weight.add_(layer.lora_B["default"].weight @ layer.lora_A["default"].weight)
    for model in (adapted, merged):
        done = swap_residuals(model, scheme, init=None, example={"input_ids": tokens})
        assert "default" not in str(done)
        for block in model.model.layers:
            with torch.no_grad():
                for i, p in enumerate(block.residual.parameters()):
                    p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype))
    torch.testing.assert_close(adapted(tokens).logits, merged(tokens).logits, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:swap_residuals to .* made modules that training changes")
@pytest.mark.parametrize("part", ["mlp", "self_attn"])
def test_the_layers_in_a_wrapped_part_stay_apart(part):
    """PEFT's modules_to_save may name a whole feed-forward or attention."""
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=30, **shape))
    for block in model.model.layers:
        setattr(block, part, Saved(getattr(block, part)))
    for scheme in ("deepnorm", "hybridnorm", "value-residual"):
        done = swap_residuals(model, scheme, init="scheme", example={"input_ids": torch.randint(30, (2, 7))})
        assert "q_proj (query, 4 heads), k_proj (key, 4 heads)" in str(done) and "gate_proj (fc1), up_proj" in str(done)
        done.undo()


def test_a_swap_in_a_model_with_adapters_says_what_their_files_leave_out():
    def adapted():
        model = hugging_face("gpt2")
        model.requires_grad_(False)
        model.lm_head = Saved(model.lm_head)
        return model

    said = r"files of PEFT's adapters leave them out: .*modules_to_save=\['ln_1', 'ln_2', 'ln_f'\]"
    with pytest.warns(UserWarning, match=said) as caught:
        swap_norms(adapted(), "powernorm-v")
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=r"modules_to_save=\['residual'\]"):
        swap_residuals(adapted(), "sandwich", init=None)
    swap_norms(adapted(), "rmsnorm")  # frozen gains: the same swap makes them again
    swap_residuals(adapted(), "prenorm", init=None)
    swap_norms(hugging_face("gpt2"), "rmsnorm")


class Adapter(nn.Module):
    """As PEFT wraps a linear layer: LoRA's product is added to the layer's."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))

    @torch.no_grad()
    def merged(self):
        self.base_layer.weight += self.up.weight @ self.down.weight
        return self.base_layer


LINEAR = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
LINEAR += ("intermediate.dense", "output.dense")


@pytest.mark.parametrize("scheme", ["value-residual", "hybridnorm", "olmo2", "subln", "normformer"])
def test_what_a_scheme_does_inside_a_sublayer_is_done_to_the_adapted_layer(scheme):
    torch.manual_seed(0)
    model = hugging_face("bert").eval()
    plain = run(model)[0]
    swap = swap_residuals(model, scheme, init=None)
    swapped = run(model)[0]
    for block in model.bert.encoder.layer:
        for path in LINEAR:
            block.set_submodule(path, Adapter(block.get_submodule(path)))
    adapted = run(model)[0]
    alone = copy.deepcopy(model)
    assert (adapted - swapped).abs().max() > 1e-3
    assert torch.equal(run(alone)[0], adapted)
    for some in (model, alone):
        for block in some.bert.encoder.layer:
            for path in LINEAR:
                block.set_submodule(path, block.get_submodule(path).merged())
        torch.testing.assert_close(run(some)[0], adapted, rtol=1e-4, atol=1e-5)
    for block in model.bert.encoder.layer:
        hooks = [h for m in block.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
        assert len(hooks) >= len(block.residual.points) > 0
    swap.undo()
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert run(model)[0].shape == plain.shape
