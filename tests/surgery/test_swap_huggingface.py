"""Residual schemes swapped into models of Hugging Face: masks, first values, files, generation."""

import warnings

import pytest
import torch
from surgery_support import (
    HUGGING_FACE,
    D,
    build,
    hugging_face,
    run,
)

from normformer_rs import nn as nfnn
from normformer_rs.surgery import load_swapped, swap_norms, swap_residuals

pytestmark = pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor", "ignore:The PyTorch API of nested tensors", "ignore:admin.s gains"
)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.one_in(all=2)
def test_cross_attention_and_masks_of_hugging_face(name):
    """Decoders that attend to an encoder's output, with padding on both sides: the converted blocks change nothing."""
    torch.manual_seed(0)
    config = hugging_face(name).config
    config.is_decoder = config.add_cross_attention = True
    transformers = pytest.importorskip("transformers")
    model = {"bert": transformers.BertLMHeadModel, "gpt2": transformers.GPT2LMHeadModel}[name](config).eval()
    tokens, memory = torch.arange(3, 11).repeat(2, 1), torch.randn(2, 5, D)
    mask, memory_mask = torch.ones(2, 8), torch.ones(2, 5)
    mask[0, 6:], memory_mask[1, 3:] = 0, 0
    given = {"attention_mask": mask, "encoder_hidden_states": memory, "encoder_attention_mask": memory_mask}
    before = model(input_ids=tokens, **given).logits
    done = swap_residuals(model, "prenorm" if name == "gpt2" else "postnorm", init=None)
    torch.testing.assert_close(model(input_ids=tokens, **given).logits, before, rtol=1e-5, atol=1e-6)
    done.undo()
    swap_residuals(model, "subln")
    model(input_ids=tokens, **given).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["marian", "t5"])
@pytest.mark.one_in(test=2)
def test_profiling_begins_anew_with_each_stack(name):
    model = hugging_face(name)
    swap_residuals(model, "admin")
    tokens = torch.randint(3, 40, (4, 7))
    nfnn.profile(model, input_ids=tokens, labels=tokens)
    for side in (model.get_encoder(), model.get_decoder()):
        blocks = [m for m in side.modules() if hasattr(m, "residual")]
        gains = [p for n, p in blocks[0].residual.named_parameters() if "residual_scale" in n]
        assert torch.allclose(gains[0], torch.ones(1)) and not torch.allclose(gains[1], torch.ones(1)), gains


@pytest.mark.parametrize("name", HUGGING_FACE)
@pytest.mark.one_in(test=5, all=4)
def test_the_schemes_first_values(name):
    """deepnorm's on every linear layer of a block, whichever way round it keeps its matrix."""
    torch.manual_seed(0)
    transformers = pytest.importorskip("transformers")
    model = hugging_face(name)
    config = model.config
    for key in ("hidden_size", "n_embd", "d_model"):
        if key in config.to_dict():
            setattr(config, key, 128)
    for key in ("intermediate_size", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"):
        if key in config.to_dict():
            setattr(config, key, 512)
    if name.startswith("t5"):
        config.d_kv = 32
    model = type(model)(config)
    assert transformers
    swap_residuals(model, "deepnorm")
    both = name.startswith(("t5", "marian"))
    for path, module in model.named_modules():
        if not hasattr(module, "residual"):
            continue
        beta = {"enc": 0.87 * (2**4 * 2) ** (-1 / 16), "dec": (12 * 2) ** -0.25, "one": (8 * 2) ** -0.25}
        beta = beta["one" if not both else "dec" if "decoder" in path else "enc"]
        for part in module.residual.parts:
            for linear in part.linears:
                layer = module.get_submodule(linear.path)
                weight = layer.weight.T if type(layer).__name__ == "Conv1D" else layer.weight
                for role, block in zip(linear.roles, weight.chunk(len(linear.roles))):
                    fan_out, fan_in = block.shape
                    gain = (1.0 if role in ("query", "key", "gate") else beta) * (
                        32**-0.5 if role == "query" and name[:2] == "t5" else 1
                    )
                    expected = gain * (2 / (fan_in + fan_out)) ** 0.5
                    assert abs(block.std().item() / expected - 1) < 5 / (2 * block.numel()) ** 0.5, (path, linear)
                if getattr(layer, "bias", None) is not None:
                    assert not layer.bias.any()


@pytest.mark.parametrize(
    "residual,norm",
    [("deepnorm", "scalenorm"), ("branchnorm", "rmsnorm"), ("sandwich", "scalenorm"), ("rezero", None)],
)
@pytest.mark.parametrize("name", HUGGING_FACE)
@pytest.mark.one_in(test=20, all=19)
def test_saved_and_loaded_by_hugging_face(name, residual, norm, tmp_path):
    """A function that swaps as the saved model was: every name is found, also beside a name of the table."""

    def swap(model, init="scheme"):
        swap_residuals(model, residual, init=init)
        if norm is not None:
            swap_norms(model, norm)
        return model

    model = swap(build(name)).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:  # Marian's positions are constants, not saved
                p.add_(0.1 * torch.randn_like(p))
    nfnn.set_num_updates(model, 7)
    model.save_pretrained(tmp_path)
    loaded, report = load_swapped(tmp_path, swap=lambda model: swap(model, None), output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert torch.equal(run(loaded.eval())[0], run(model)[0])


@pytest.mark.full
def test_generation_attentions_and_checkpointing_of_hugging_face():
    for name in HUGGING_FACE:
        model = build(name)
        swap_residuals(model, "deepnorm")
        tokens = torch.arange(3, 8).repeat(2, 1)
        if name != "bert":
            cached, plain = (
                model.eval().generate(tokens, max_new_tokens=4, do_sample=False, use_cache=use) for use in (True, False)
            )
            assert torch.equal(cached, plain)
        model.train()
        for module in model.modules():
            for rate in ("p", "dropout", "activation_dropout", "attention_dropout"):
                if isinstance(getattr(module, rate, None), float):
                    setattr(module, rate, 0.0)
        loss = run(model)[1]
        loss.backward()
        expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.gradient_checkpointing_enable({"use_reentrant": False})
            run(model)[1].backward()
        for n, p in model.named_parameters():
            torch.testing.assert_close(p.grad, expected.get(n), rtol=1e-4, atol=1e-5)
