"""Marks that other libraries keep on modules and parameters: successors get them, or a swap is refused by name."""

import functools
import types

import pytest
import torch
from surgery_support import HEADS, D, assert_same, build, hugging_face, run, state_of, torchs_encoder
from torch import nn

from normformer_rs import nn as nfnn
from normformer_rs.surgery import fold_admin, fold_norms, swap_norms, swap_residuals

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested tensors")
SWAPS = {
    "norms": lambda model, **more: swap_norms(model, "rmsnorm", **more),
    "residuals": lambda model, **more: swap_residuals(model, "sandwich", init=None, **more),
}


def gemma():
    transformers = pytest.importorskip("transformers")
    config = transformers.GemmaConfig(
        vocab_size=40,
        hidden_size=D,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=4,
        intermediate_size=32,
    )
    return transformers.GemmaForCausalLM(config)


# transformers' marks of initialised modules


@pytest.mark.parametrize("to", ["rmsnorm", "rmsnorm:gemma", "layernorm", "scalenorm", "batchnorm", "sandwich"])
@pytest.mark.one_in(test=2)
def test_init_weights_keeps_a_swapped_models_values(to):
    """A wrapper's post_init() calls init_weights(), which a model that is initialised ignores."""
    torch.manual_seed(0)
    model = gemma().eval()
    done = swap_residuals(model, to, init=None) if to == "sandwich" else swap_norms(model, to)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3)  # a training
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model.init_weights()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    done.undo()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model.init_weights()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_a_loaded_models_parameters_stay_marked(tmp_path):
    """from_pretrained marks parameters; a class that applies its _init_weights by itself looks at them alone."""
    model = gemma()
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path)
    swap_norms(model, "rmsnorm")
    swap_residuals(model, "sandwich", init=None)
    assert [p for p in model.parameters() if not getattr(p, "_is_hf_initialized", False)] == []
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model.apply(model._init_weights)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_a_model_that_is_not_initialised_is_initialised():
    """A swap in a class's constructor, before its post_init()."""
    model = gemma()
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    swap_norms(model, "rmsnorm")
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    model.init_weights()
    assert model.model.norm.weight.unique().tolist() != [3.0]


# Hooks and attributes of parameters


@pytest.mark.parametrize("swap", SWAPS)
def test_torchs_optimizer_in_the_backward_pass_is_refused(swap):
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = hugging_face("gpt2")
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    state = state_of(model)
    with pytest.raises(ValueError, match=r"transformer\.h\.0\.[a-z_.0-9]+ has an optimizer in the backward pass"):
        SWAPS[swap](model)
    assert_same(state_of(model), state)


@pytest.mark.parametrize("swap", SWAPS)
def test_an_optimizer_in_the_backward_pass_is_refused(swap):
    model = hugging_face("gpt2")
    first = "transformer.h.0.ln_1.weight"
    handles = [p.register_post_accumulate_grad_hook(lambda p: None) for p in model.parameters()]
    state, kinds = state_of(model), [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=r"transformer\.h\.0\.[a-z_.0-9]+ has a hook of register_post_accumulate"):
        SWAPS[swap](model)
    assert_same(state_of(model), state)
    assert [type(m) for m in model.modules()] == kinds
    for handle in handles:
        handle.remove()
    done = SWAPS[swap](model)
    if swap == "norms":
        handle = model.get_parameter(first).register_post_accumulate_grad_hook(lambda p: None)
        with pytest.raises(ValueError, match=f"{first} has a hook of register_post_accumulate"):
            done.undo()
        assert type(model.transformer.h[0].ln_1) is nfnn.RMSNorm
        handle.remove()
    done.undo()
    assert_same(state_of(model), state)


def test_gradient_hooks_and_attributes_go_over():
    model = hugging_face("gpt2")
    norm = model.transformer.ln_f
    handle = norm.weight.register_hook(lambda g: g * 0)
    norm.weight._no_weight_decay, norm.weight.partition_dim, norm.weight.infshape = True, -1, object()
    infshape = norm.weight.infshape
    norm.bias.sequence_parallel = True
    done = swap_norms(model, "rmsnorm")
    new = model.transformer.ln_f.weight
    assert new._no_weight_decay is True and new.partition_dim == -1 and new.infshape is infshape
    run(model)[1].backward()
    assert new.grad.abs().sum() == 0 and model.transformer.h[0].ln_1.weight.grad.abs().sum() > 0
    handle.remove()
    new.grad = None
    run(model)[1].backward()
    assert new.grad.abs().sum() > 0

    new.register_hook(lambda g: g * 0)
    new.lr_scale = 2.0
    done.undo()
    assert model.transformer.ln_f is norm and norm.weight.lr_scale == 2.0 and norm.bias.sequence_parallel
    run(model)[1].backward()
    assert norm.weight.grad.abs().sum() == 0


@pytest.mark.parametrize(
    ("put", "said"),
    [
        (lambda p: p.register_hook(lambda g: g), "a gradient hook"),
        (lambda p: setattr(p, "main_grad", torch.zeros(D)), "the attribute main_grad, a Tensor"),
        (lambda p: setattr(p, "infshape", object()), "infshape"),
    ],
)
def test_what_cannot_go_over_is_refused_by_name(put, said):
    """A single gain in place of a vector: a hook or a shape meant for the vector does not fit it."""
    model = hugging_face("gpt2")
    put(model.transformer.h[1].ln_2.weight)
    state = state_of(model)
    with pytest.raises(ValueError, match=rf"transformer\.h\.1\.ln_2\.weight has .*{said}"):
        swap_norms(model, "scalenorm")
    assert_same(state_of(model), state)


def test_new_parameters_get_the_norms_marks():
    """What has no predecessor: the bias of a layernorm that was an rmsnorm, and the norms and gains of a scheme."""
    model = hugging_face("t5")
    for module in model.modules():
        if type(module).__name__ == "T5LayerNorm":
            module.weight.sequence_parallel = True
    swap_norms(model, lambda width: nn.LayerNorm(width))
    done = swap_residuals(model, "sandwich", init=None)
    norms = [m for m in model.modules() if type(m) is nn.LayerNorm or "residual" in type(m).__name__.lower()]
    new = [p for m in norms for p in m.parameters()]
    assert len(new) > 20 and all(p.sequence_parallel for p in new)
    assert not any(hasattr(m.weight, "sequence_parallel") for m in model.modules() if type(m) is nn.Linear)
    done.undo()


# Modules


def test_hooks_and_attributes_of_modules_go_over():
    model = torchs_encoder(norm_first=True)
    norm, calls = model.layers[0].norm1, []
    for register in (norm.register_forward_hook, norm.register_forward_pre_hook, norm.register_full_backward_hook):
        register(lambda *_: calls.append(1))
    norm.register_state_dict_post_hook(lambda *_: calls.append(1))
    norm._fsdp_wrap, norm.layer_id, norm.owner = False, 3, model.layers[0].linear1
    done = swap_norms(model, "rmsnorm")
    calls.clear()  # the swap's runs
    new = model.layers[0].norm1
    assert (new._fsdp_wrap, new.layer_id) == (False, 3) and not hasattr(new, "owner") and new.eps == norm.eps
    model(torch.randn(2, 3, D, requires_grad=True)).sum().backward()
    model.state_dict()
    assert len(calls) == 4
    new.layer_id = 4
    done.undo()
    assert norm.layer_id == 4
    model(torch.randn(2, 3, D, requires_grad=True)).sum().backward()
    assert len(calls) == 7


@pytest.mark.parametrize(
    ("name", "path", "scheme"),
    [
        ("gpt2", "transformer.h.0.ln_1", "rezero"),
        ("encoder", "model.layers.1.norm2", "rezero"),
    ],
)
def test_hooks_on_a_module_that_is_not_called_any_more_are_refused(name, path, scheme):
    model = build(name)
    state = state_of(model)
    handle = model.get_submodule(path).register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=f"^{path}, a .*, has hooks, and the block does not call it with {scheme}"):
        swap_residuals(model, scheme)
    assert_same(state_of(model), state)
    handle.remove()
    swap_residuals(model, scheme)


def test_hooks_of_the_norm_after_the_blocks_are_called_in_its_place():
    model, calls = hugging_face("gpt2").eval(), []
    model.transformer.ln_f.register_forward_hook(lambda *_: calls.append(1))
    done = swap_residuals(model, "deepnorm", init=None)
    assert type(model.transformer.ln_f) is nn.Identity
    calls.clear()  # the run that finds the blocks
    run(model)
    assert len(calls) == 1
    done.undo()
    run(model)
    assert len(calls) == 2


def test_a_forward_in_the_instance():
    """A method of the module counts, as kernels' libraries put it there; a function over another one hides it."""
    model = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8), nn.LayerNorm(8))
    model[0].forward = types.MethodType(
        lambda self, x: nn.functional.rms_norm(x, (8,), self.weight) + self.bias, model[0]
    )
    inner = model[1].forward
    model[1].forward = lambda x: 2 * inner(x)
    done = swap_norms(model, "scalenorm")
    assert [row.name for row in done if row.new == "ScaleNorm"] == ["0", "2"]
    assert next(row.note for row in done if row.name == "1").endswith(
        "has a forward of its own, which was put into the instance"
    )

    model = hugging_face("gpt2")
    block, before = model.transformer.h[1], state_of(model)
    block.forward = functools.partial(block.forward)
    with pytest.raises(ValueError, match=r"transformer\.h\.1, a GPT2Block, has a forward of its own"):
        swap_residuals(model, "sandwich")
    assert_same(state_of(model), before)
    model = torchs_encoder()
    model.layers[0].self_attn.forward = functools.partial(model.layers[0].self_attn.forward)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn, a MultiheadAttention, has a forward of its own"):
        swap_residuals(model, "sandwich")


# accelerate


def hooked(model, wanted, calls):
    accelerate = pytest.importorskip("accelerate")

    class Hook(accelerate.hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append(type(module).__name__)
            return args, kwargs

    for module in model.modules():
        if wanted(module):
            accelerate.hooks.add_hook_to_module(module, Hook())
    return accelerate


def test_accelerates_hooks_go_over():
    model, calls = hugging_face("gpt2").eval(), []
    accelerate = hooked(model, lambda m: type(m) is nn.LayerNorm, calls)
    before = run(model)[0]
    assert calls == ["LayerNorm"] * 5
    done = swap_norms(model, "rmsnorm")
    calls.clear()
    run(model)
    assert calls == ["RMSNorm"] * 5
    norm = model.transformer.ln_f
    accelerate.hooks.remove_hook_from_module(norm)
    assert "_hf_hook" not in vars(norm) and norm.forward.__func__ is type(norm).forward
    calls.clear()
    done.undo()
    assert torch.equal(run(model)[0], before) and calls == ["LayerNorm"] * 4


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "encoder"])
@pytest.mark.one_in(test=4, all=3)
def test_a_block_with_accelerates_hook_runs_the_scheme(name):
    """accelerate keeps the original class's forward; the hook must go around the scheme's."""
    torch.manual_seed(0)
    plain, model, calls = build(name).eval(), build(name).eval(), []
    plain.load_state_dict(model.state_dict())
    hooked(model, lambda m: next(m.parameters(recurse=True), None) is not None, calls)
    before = run(model)[0]
    options = {"init": None}
    swap_residuals(plain, "sandwich", **options)
    done = swap_residuals(model, "sandwich", **options)
    calls.clear()
    assert torch.equal(run(model)[0], run(plain)[0]) and len(calls) > 10
    done.undo()
    assert torch.equal(run(model)[0], before)
    pytest.importorskip("accelerate").hooks.remove_hook_from_submodules(model)  # leaves bound forwards in instances
    swap_residuals(model, "sandwich", **options)
    assert torch.equal(run(model)[0], run(plain)[0])


@pytest.mark.parametrize("name", ["gpt2", "bert", "encoder"])
def test_accelerates_hook_that_came_after_a_swap_outlives_its_undo(name):
    model, calls = build(name).eval(), []
    before = run(model)[0]
    done = [swap_norms(model, "rmsnorm"), swap_residuals(model, "sandwich", init=None)]
    hooked(model, lambda m: next(m.parameters(recurse=True), None) is not None, calls)
    run(model)
    assert len(calls) > 10
    while done:
        done.pop().undo()
    calls.clear()
    assert torch.equal(run(model)[0], before)
    assert calls.count("LayerNorm") >= 4 and len(calls) > 10


@pytest.mark.parametrize("swap", ["norms", "residuals", "exact", "fold", "undo"])
@pytest.mark.one_in(test=2)
def test_an_offloaded_model_is_refused(swap):
    accelerate = pytest.importorskip("accelerate")
    model = hugging_face("gpt2").eval()
    done = swap_norms(model, "rmsnorm") if swap == "undo" else None
    before = run(model)[0]
    accelerate.cpu_offload(model, torch.device("cpu"))
    swaps = SWAPS | {
        "exact": lambda m: swap_norms(m, "rmsnorm", exact=True),
        "fold": fold_norms,
        "undo": lambda _: done.undo(),
    }
    with pytest.raises(ValueError, match=r"^accelerate offloads transformer\.wte and loads its weights"):
        swaps[swap](model)
    assert torch.equal(run(model)[0], before)
    accelerate.hooks.remove_hook_from_submodules(model)
    swaps[swap](model)


def test_fold_admin_refuses_an_offloaded_model():
    accelerate = pytest.importorskip("accelerate")
    model = hugging_face("gpt2").eval()
    swap_residuals(model, "admin")
    accelerate.cpu_offload(model, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"^accelerate offloads"):
        fold_admin(model)


def test_parameters_that_a_runtime_keeps_are_refused():
    model = hugging_face("gpt2")
    model.transformer.h[0].ln_1.weight.ds_id = 3
    with pytest.raises(ValueError, match=r"^transformer\.h\.0\.ln_1\.weight is DeepSpeed's"):
        swap_norms(model, "rmsnorm")


SCRIPTED = {
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))),
    "traced": lambda: torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(2, 8)),
    "without a norm": lambda: torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU())),
}


@pytest.mark.parametrize("kind", SCRIPTED)
def test_scripted_children_are_passed_over(kind):
    """Their norms stay, and the table says so; the others are swapped and folded."""

    def made():
        torch.manual_seed(0)
        return nn.Sequential(SCRIPTED[kind](), nn.LayerNorm(8), nn.Linear(8, 8)).eval()

    x, model = torch.randn(2, 8), made()
    report = swap_norms(model, "rmsnorm")
    assert type(model[1]) is nfnn.RMSNorm and model(x).isfinite().all()
    assert ("0.1" in str(report) and "compiled by torch.jit" in str(report)) == (kind != "without a norm")
    model = made()
    y = model(x)
    fold_norms(model, example=x)
    torch.testing.assert_close(model(x), y)
