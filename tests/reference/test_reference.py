"""Tests the oracle against independent sources: torch.nn, published vectors, definitions and brute force."""

import itertools
import math

import pytest
import torch
from torch import nn

import reference as ref

SCHEMES = ("postnorm", "prenorm")
per_norm_and_scheme = pytest.mark.parametrize(("norm", "residual"), list(itertools.product(ref.ROW_NORMS, SCHEMES)))
RATES = ref.Dropout(0.1, 0.2, 0.3, 0.4, seed=2**40 + 7, update=3)
SOURCE = ref.pad([[5, 6, 7, 8, 2], [9, 4, 2], [11, 2]])
INPUT = ref.pad([[0, 9, 8], [0, 5, 6, 7, 4], [0, 10, 4]])
TARGET = ref.pad([[9, 8, 2], [5, 6, 7, 4, 2], [10, 4, 2]])


pytestmark = pytest.mark.usefixtures("one_thread")


def test_philox_gives_random123s_known_answers():
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], (0xA4093822, 0x299F31D0)
    for counter, key, answer in (
        ([0] * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([2**32 - 1] * 4, (2**32 - 1, 2**32 - 1), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (*pi, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ):
        assert " ".join(f"{word:08x}" for word in ref.philox4x32(counter, key)) == answer


def test_chacha_gives_strombergsons_known_answers():
    """The answers are TC1 and TC2 with 256 bits and 8 rounds in draft-strombergson-chacha-test-vectors."""
    zero, one = bytes(32), b"\1" + bytes(31)
    for key, block, answer in (
        (zero, 0, "3e00ef2f895f40d6"),
        (zero, 1, "d2aefa0deaa5c151"),
        (one, 0, "cf5ee9a0494aa961"),
    ):
        words = ref.chacha8(key, block)
        assert b"".join(word.to_bytes(4, "little") for word in words[:2]).hex() == answer


def test_dropout_masks():
    keep = ref.dropout_keep(seed=5 << 32 | 1, update=2**32 + 9, micro_batch=3, site=4, rows=700, cols=100, p=0.3)
    words = ref.philox4x32([13 // 8, 2, 4 | 3 << 16, 9], (1, 5))
    number = int(words[(13 % 8) // 2]) >> 16 * (13 % 2) & 0xFFFF
    assert keep[2, 13].item() == (number >= 19661)
    assert abs(keep.double().mean() - 0.7) < 0.01 and ref.dropout_keep(1, 1, 0, 0, 3, 9, 0.0).all()
    assert ref.dropout_scale(0.5) == 2.0 and ref.dropout_threshold(1.0) == 65535


@pytest.mark.parametrize("shape", [(3, 7), (2, 1), (0, 5)])
def test_norms(shape):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    w, b = (torch.randn(shape[-1], dtype=torch.float64, requires_grad=True) for _ in range(2))
    g = torch.tensor([1.7], dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(ref.layer_norm(x, w, b), nn.functional.layer_norm(x, shape[-1:], w, b))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        a, v = x.detach().to(dtype), w.detach().to(dtype)
        torch.testing.assert_close(ref.rms_norm(a, v, None), nn.functional.rms_norm(a, shape[-1:], v))
    step = lambda x, w: ref.residual_step(x, 2 * x + 1, x > 0, 2.0, 0.5, 3.0, "rmsnorm", w)  # noqa: E731
    calls = {ref.layer_norm: (x, w, b), ref.rms_norm: (x, w), ref.scale_norm: (x, g), ref.fixnorm: (x,), step: (x, w)}
    assert all(torch.autograd.gradcheck(call, inputs) for call, inputs in calls.items())


def test_scale_norm_gradient_is_the_papers_on_both_sides_of_the_clamp():
    eps, g = 1e-2, torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    x = torch.tensor([[3.0, 4.0], [3e-3, 4e-3], [0.0, 0.0], [0.6 * eps, 0.8 * eps]], dtype=torch.float64)
    dy = torch.randn(4, 2, dtype=torch.float64)
    dx, dg = torch.autograd.grad(ref.scale_norm(x.requires_grad_(), g, eps), (x, g), dy)
    u = x.detach() / (n := x.detach().norm(dim=-1, keepdim=True)).clamp(min=eps)
    along = (u * dy).sum(-1, keepdim=True)
    theirs = torch.where(n > eps, g / n * (dy - u * along), g / eps * dy), along.sum().view(1)
    torch.testing.assert_close((dx, dg), theirs)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("residual", SCHEMES)
def test_transformer_equals_torch(residual):
    config = {"residual": residual, "tie_embeddings": "decoder", "output_bias": True}
    state = {name: value.requires_grad_() for name, value in ref.random_state(config).items()}
    model = nn.Transformer(16, 2, 2, 2, 32, 0.0, batch_first=True, norm_first=residual == "prenorm").double()
    if residual == "postnorm":
        model.encoder.norm = model.decoder.norm = None
    model.load_state_dict({name: value for name, value in state.items() if name.startswith(("encoder", "decoder"))})
    no_source, no_target, positions = SOURCE == ref.PAD, INPUT == ref.PAD, ref.sinusoids(torch.arange(5), 16, "twt")
    source, target = (state[f"{side}_embedding.weight"] for side in ("source", "target"))
    inputs = 4 * source[SOURCE] + positions, 4 * target[INPUT] + positions
    x = model(*inputs, None, ~ref.causal_mask(5), None, no_source, no_target, no_source)
    theirs = x @ target.T + state["output_projection.bias"]
    ours, real = ref.forward(state, config, SOURCE, INPUT), ~no_target
    torch.testing.assert_close(ours[real], theirs[real], rtol=1e-12, atol=1e-12)
    names, theirs_parameters = zip(*model.named_parameters())
    grads = torch.autograd.grad(ours[real].square().sum(), [state[name] for name in names])
    torch.testing.assert_close(grads, torch.autograd.grad(theirs[real].square().sum(), theirs_parameters))


@per_norm_and_scheme
@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder-only"])
@pytest.mark.one_in(test=2)
def test_padding_changes_nothing_even_under_dropout(norm, residual, architecture):
    config = {"norm": norm, "residual": residual, "architecture": architecture, "fixnorm": True, "positions": "fairseq"}
    state, source = ref.random_state(config), None if architecture == "decoder-only" else SOURCE
    wide_source, wide_input = (t if t is None else nn.functional.pad(t, (2, 3), value=ref.PAD) for t in (source, INPUT))
    plain, wide = (ref.forward(state, config, *t, RATES) for t in ((source, INPUT), (wide_source, wide_input)))
    torch.testing.assert_close(ref.pack(plain, INPUT != ref.PAD), ref.pack(wide, wide_input != ref.PAD))
    assert not torch.allclose(plain, ref.forward(state, config, source, INPUT), rtol=0.01)


@pytest.mark.one_in(test=3, all=3)
def test_cross_entropy():
    logits, mask = torch.randn(3, 5, 12, dtype=torch.float64), torch.arange(12) >= 2
    inside = torch.where(TARGET == ref.PAD, -100, TARGET - 2)
    # Label smoothing moves the mass ε from the target to other words. Under twt, as in torch, a share of 1/|V_t| = 1/10
    # returns to the target, under fairseq none. So fairseq's ε = 0.09 gives the same loss as torch's ε = 0.1.
    for formula, ours, epsilon in (("twt", 0.0, 0.0), ("twt", 0.1, 0.1), ("fairseq", 0.09, 0.1)):
        loss, nll = ref.label_smoothed_cross_entropy(logits, TARGET, ours, formula, mask)
        theirs = nn.functional.cross_entropy(logits[..., 2:].mT, inside, reduction="sum", label_smoothing=epsilon)
        torch.testing.assert_close(loss, theirs)
        assert epsilon > 0 or nll == loss


@per_norm_and_scheme
@pytest.mark.one_in(test=9, all=6)
def test_training_lowers_the_loss_and_accumulation_is_exact(norm, residual):
    config = {"norm": norm, "residual": residual, "fixnorm": norm.startswith("scale"), "vocab_size": 12}
    state, adam, losses = ref.random_state(config), ref.Adam(weight_decay=1e-4), []
    whole = ref.Batch(SOURCE, INPUT, TARGET)
    parts = [ref.Batch(SOURCE[i : i + 1], INPUT[i : i + 1], TARGET[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(*(ref.train_step(state, config, b, ref.Adam(), 0.0).grads for b in ([whole], parts)))
    for n in range(1, 9):
        step = ref.train_step(state, config, [whole], adam, ref.inverse_sqrt_peak(n, 0.02, 3), max_norm=1.0)
        state, losses = step.state, [*losses, step.loss]
    # l2norm has no gain: rows keep length 1, so logits stay small and the loss falls more slowly
    assert losses[-1] < (0.9 if norm == "l2norm" else 0.8) * losses[0]


def test_schedules():
    assert ref.inverse_sqrt_lambda(4000, 512, 4000) == pytest.approx(1 / math.sqrt(512 * 4000))
    assert ref.inverse_sqrt_peak(1, 1.0, 10, 0.1, count_from_zero=True) == 0.1
    assert ref.inverse_sqrt_peak(40, 1.0, 10) == 0.5 and ref.t_fixup_decay(12000, 1.0) == 0.5
    decay = ref.ValDecay(1.0, warmup_updates=4)  # evaluations 3 (still warming up), 4 and 8 are below the three before
    for n, bleu in enumerate([9, 8, 7, 6, 5, 5, 5, 5, 4]):
        decay.evaluated(n, bleu)
    assert decay.peak == pytest.approx(0.8**2) and decay.learning_rate(2) == decay.peak / 2


@pytest.mark.parametrize("rule", ref.RULES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.one_in(test=6, all=3)
def test_search(rule, seed):
    state, config, source = ref.random_state({"vocab_size": 6}, seed), {"vocab_size": 6}, [4, 5, 3, 2]
    one = ref.beam_search(state, config, source, 1, rule=rule, max_length=9)
    assert one == [ref.greedy(state, config, source, rule=rule, max_length=9)]
    # a beam that is wider than the number of sequences finds every sequence of at most two words and EOS
    found = ref.beam_search(state, config, source, 60, rule=rule, max_length=2 if rule == "fairseq" else 3)
    for h in found:
        log_p = ref.log_probabilities(state, config, torch.tensor([source]), torch.tensor([(0, *h.tokens[:-1])]))
        assert h.log_probability == pytest.approx(log_p[0, range(len(h.tokens)), list(h.tokens)].sum().item())
    assert sum(h.finished for h in found) == 3 + 9 and found == sorted(found, key=lambda h: -h.score)
