"""b2t in other libraries' blocks: each call of a block adds its own input."""

import copy
import threading

import pytest
import torch
from surgery_support import HUGGING_FACE, build, hugging_face, run
from torch import nn
from torch.utils.checkpoint import checkpoint

from normformer_rs.surgery import swap_residuals

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")


def blocks_of(model):
    return [m for m in model.modules() if hasattr(m, "residual")]


@pytest.mark.parametrize("name", HUGGING_FACE)
@pytest.mark.one_in(test=5, all=2)
def test_threads_do_not_mix(name):
    """Two threads whose calls of the same block alternate: one is halted inside, until the other is through."""
    model = build(name).eval()
    swap_residuals(model, "b2t")
    inputs = [torch.randint(3, 40, (2, n)) for n in (8, 8)]
    want = [model(input_ids=x, labels=x).logits for x in inputs]
    inside, goes_on = threading.Event(), threading.Event()
    slow = threading.Thread(target=lambda: got.append(model(input_ids=inputs[0], labels=inputs[0]).logits))

    def halt(*_):
        if threading.current_thread() is slow and not inside.is_set():
            inside.set()
            assert goes_on.wait(60)

    last = blocks_of(model)[-1]
    last.get_submodule(last.residual.parts[-1].linears[0].path).register_forward_pre_hook(halt)
    got = []
    slow.start()
    assert inside.wait(60)
    other = model(input_ids=inputs[1], labels=inputs[1]).logits
    goes_on.set()
    slow.join()
    assert torch.equal(other, want[1]) and torch.equal(got[0], want[0])


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_an_exception_leaves_nothing_behind(name):
    model = build(name).eval()
    swap_residuals(model, "b2t")
    before = run(model)[0]
    last = blocks_of(model)[-1]
    handle = last.get_submodule(last.residual.parts[-1].linears[0].path).register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(model)
    handle.remove()
    assert not [v for m in model.modules() for v in vars(m).values() if isinstance(v, torch.Tensor)]
    assert torch.equal(run(model)[0], before)
    copy.deepcopy(model)


class Inner(nn.Module):
    """A pre-norm block that may run another module, itself for example, in its feed-forward."""

    def __init__(self):
        super().__init__()
        self.heads, self.ln1, self.ln2 = 1, nn.LayerNorm(8), nn.LayerNorm(8)
        self.attn, self.mlp = nn.Linear(8, 8), MLP()

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.within = nn.Linear(8, 16), nn.Linear(16, 8), None

    def forward(self, x):
        y = self.fc2(self.fc1(x).relu())
        within, self.within = self.within, None
        if within is not None:
            try:
                y = y + within[0](x)
            finally:
                self.within = within
        return y


def test_a_block_inside_itself_adds_its_own_input():
    """The block calls itself in its last sublayer: N(x₀ + x + F(x)) with the outer x₀."""
    torch.manual_seed(0)
    model = nn.Sequential(Inner(), Inner()).double()
    swap_residuals(model, "b2t", example=torch.randn(2, 3, 8, dtype=torch.float64))
    block, plain = model
    plain.load_state_dict(block.state_dict())
    block.mlp.within = (block,)

    def by_hand(x, f):
        y = block.ln1(x + block.attn(x))
        return block.ln2(x + y + f(y))

    def feed_forward(y):
        return block.mlp.fc2(block.mlp.fc1(y).relu())

    x = torch.randn(2, 3, 8, dtype=torch.float64)
    want = by_hand(x, lambda y: feed_forward(y) + by_hand(y, feed_forward))
    torch.testing.assert_close(block(x), want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(block.forward(x), want, rtol=1e-12, atol=1e-12)  # past the hooks

    def fails(*_):
        raise ZeroDivisionError

    handle = block.attn.register_forward_hook(lambda *_: fails() if within else within.append(1))
    within = []  # the inner call raises, and the block goes on without it
    guarded = block.mlp.within[0]
    block.mlp.within = (lambda y: _or_zero(guarded, y),)
    torch.testing.assert_close(block(x), by_hand_without(block, x), rtol=1e-12, atol=1e-12)
    handle.remove()


def _or_zero(block, y):
    try:
        return block(y)
    except ZeroDivisionError:
        return torch.zeros_like(y)


def by_hand_without(block, x):
    y = block.ln1(x + nn.functional.linear(x, block.attn.weight, block.attn.bias))
    return block.ln2(x + y + block.mlp.fc2(block.mlp.fc1(y).relu()))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_adds_the_same_input(use_reentrant):
    torch.manual_seed(0)
    model = nn.Sequential(Inner(), Inner()).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    swap_residuals(model, "b2t", example=x)
    grads = []
    for run_block in (
        lambda b, y: b(y),
        lambda b, y: checkpoint(b, y, use_reentrant=use_reentrant),
    ):
        y = x
        for block in model:
            y = run_block(block, y)
        grads.append(torch.autograd.grad(y.square().sum(), [x, *model.parameters()]) if not use_reentrant else None)
        if use_reentrant:  # its backward pass takes no inputs
            model.zero_grad()
            x.grad = None
            y.square().sum().backward()
            grads[-1] = [x.grad, *(p.grad for p in model.parameters())]
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scheme", ["b2t", "dlcl", "denseformer"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.one_in(all=6)
def test_compiled_blocks_add_their_input(name, scheme):
    model = build(name).eval()
    swap_residuals(model, scheme)
    before = run(model)[0]
    for block in blocks_of(model):
        block.compile(backend="eager", fullgraph=True)
    # Each block's input is wider than the one before.
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        torch.testing.assert_close(run(model)[0], before, rtol=1e-5, atol=1e-6)


def test_a_part_of_a_block_is_refused():
    """BERT may run its feed-forward in chunks of the sequence, which the stream does not follow."""
    model = hugging_face("bert").eval()
    swap_residuals(model, "b2t")
    for block in blocks_of(model):
        block.chunk_size_feed_forward = 4
    with pytest.raises(ValueError, match="on another tensor than its residual stream, unlike in the run"):
        run(model)
