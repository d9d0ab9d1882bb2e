"""Readings of a block's stream in every spelling: right by hand, in values and gradients, or refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from whole_state import whole_state

from normformer_rs import InputError, swap_residuals

D, T = 8, 5


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradient * s * (1 + x * (1 - s))


READINGS = {
    "mT": lambda b, x: b.mix(x.mT).tanh().mT,
    "T of one row": lambda b, x: torch.stack([b.mix(one.T).tanh().T for one in x]),
    "H": lambda b, x: torch.stack([b.mix(one.H).tanh().H for one in x]),
    "real": lambda b, x: b.up(x.real).tanh(),
    "data": lambda b, x: b.up(x.data).tanh(),
    "detach": lambda b, x: b.up(x.detach()).tanh(),
    "view": lambda b, x: b.up(x.view(2, 1, T, D)).tanh().view(2, T, D),
    "unbind": lambda b, x: torch.stack([b.up(row).tanh() for row in x.unbind(1)], 1),
    "list": lambda b, x: b.up(torch.cat([x, x], 1)[:, :T]).tanh(),
    "autograd.Function": lambda b, x: b.up(x) * Swish.apply(x),
    "checkpoint": lambda b, x: checkpoint(lambda t: b.up(t).tanh(), x, use_reentrant=False),
    "two checkpoints": lambda b, x: (
        checkpoint(lambda t: b.up(t).tanh(), x, use_reentrant=False)
        * checkpoint(lambda t: b.up(t).sigmoid(), x, use_reentrant=False)
    ),
}
BY_HAND = {
    "checkpoint": lambda b, x: b.up(x).tanh(),
    "two checkpoints": lambda b, x: b.up(x).tanh() * b.up(x).sigmoid(),
}
BY_HAND["autograd.Function"] = lambda b, x: b.up(x) * F.silu(x)


def through_numpy(block, x):
    return block.up(torch.from_numpy(x.detach().numpy() * 1.0)).tanh()


class PostNorm(nn.Module):
    reading = ""

    def __init__(self):
        super().__init__()
        self.n1, self.n2, self.up, self.down = nn.LayerNorm(D), nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)
        self.mix = nn.Linear(T, T)

    def forward(self, x):
        read = READINGS.get(self.reading, through_numpy)
        x = self.n1(x + read(self, x))
        return self.n2(x + self.down(x).tanh())


def model_of(kind, **attributes):
    torch.manual_seed(0)
    made = type(kind.__name__, (kind,), attributes)
    return nn.Sequential(made(), made()).double()


def gradients(model, outputs, x):
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad((outputs * torch.arange(D).cos()).sum(), [x, *parameters], allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip([x, *parameters], found)]


def input_():
    return (3 * torch.randn(2, T, D, dtype=torch.float64)).requires_grad_()


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.one_in(test=2)
def test_a_reading_of_the_stream_reads_through_the_schemes_norm(reading):
    model, x = model_of(PostNorm, reading=reading), input_()
    swap_residuals(model, "prenorm", init=None, example=x.detach())
    read, want = BY_HAND.get(reading, READINGS[reading]), x
    for block in model:
        want = want + read(block, block.n1(want))
        want = want + block.down(block.n2(want)).tanh()
    want = model.stack_residual.norm(want) if hasattr(model, "stack_residual") else end_of(model)(want)
    got = model(x)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    for a, b in zip(gradients(model, got, x), gradients(model, want, x)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def end_of(model):
    """The norm that prenorm has after the stack."""
    return next(m for name, m in model.named_modules() if name.endswith("stack.norm"))


class Keeps(PostNorm):
    def forward(self, x):
        self.seen = x
        x = self.n1(x + self.up(x).tanh())
        self.between = [x]
        return self.n2(x + self.down(x).tanh())


def test_a_block_keeps_its_x():
    model, x = model_of(Keeps), input_()
    swap_residuals(model, "prenorm", init=None, example=x.detach())
    first = model[0]
    model(x)
    between = x + first.up(first.n1(x)).tanh()
    assert torch.equal(first.seen * 1.0, x) and torch.equal(first.seen.mT, x.mT)
    torch.testing.assert_close(torch.cat(first.between), between)


# Refused, and nothing changes.


class AsFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.n, self.f = nn.Parameter(torch.ones(D)), nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x):
        return x + self.f(self.norm(x))


NORMS = {
    "layer_norm": lambda b, x: F.layer_norm(x, (D,), b.gain),
    "rms_norm": lambda b, x: torch.rms_norm(x, (D,), b.gain),
    "forward": lambda b, x: b.n.forward(x),
    "by hand": lambda b, x: b.gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
    "centred by hand": lambda b, x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-6).sqrt(),
    "length": lambda b, x: x / x.norm(dim=-1, keepdim=True),
    "normalize": lambda b, x: F.normalize(x, dim=-1),
}


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.f1, self.n2, self.f2 = nn.LayerNorm(D), nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x):
        x = x + checkpoint(lambda t: self.f1(self.n1(t)).tanh(), x, use_reentrant=True)
        return x + self.f2(self.n2(x)).tanh()


class NoiseInTraining(Reentrant):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        if self.training:
            x = x + 0.1 * torch.randn_like(x)
        x = x + self.drop(self.f1(self.n1(x)))
        return x + self.drop(self.f2(self.n2(x)))


class HalfInTraining(Reentrant):
    """Half of the batch goes through the first sublayer, as in DINOv2."""

    def forward(self, x):
        if self.training:
            x = torch.index_add(x, 0, torch.tensor([0]), self.f1(self.n1(x[:1])))
        else:
            x = x + self.f1(self.n1(x))
        return x + self.f2(self.n2(x))


REFUSED = {
    f"norm as a function: {name}": (AsFunction, {"norm": norm}, r"readings\.py:\d+ norms")
    for name, norm in NORMS.items()
}
REFUSED["numpy"] = PostNorm, {"reading": "numpy"}, "not computed from the stream"
REFUSED["noise in training"] = NoiseInTraining, {}, "in training mode|more often"
REFUSED["half in training"] = HalfInTraining, {}, "training mode|another way"


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_stream_cannot_account_for_is_refused(case):
    kind, attributes, said = REFUSED[case]
    model, x = model_of(kind, **attributes).train(), input_().detach()
    before = whole_state(model)
    with pytest.raises(InputError, match=said):
        swap_residuals(model, "prenorm", init=None, example=x)
    assert whole_state(model) == before


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_keeps_its_gradients_or_is_refused():
    model, x = model_of(Reentrant), input_()
    before = whole_state(model)
    with pytest.raises(InputError, match="within a reentrant checkpoint, and gradients would be lost"):
        swap_residuals(model, "prenorm", init=None, example=x.detach())
    assert whole_state(model) == before and x.grad is None


def test_the_proof_leaves_gradients_and_hooks_alone():
    model, x, called = model_of(PostNorm, reading="view"), input_(), []
    for p in model.parameters():
        p.grad = torch.ones_like(p)
        p.register_hook(called.append)
    swap_residuals(model, "prenorm", init=None, example=x).undo()
    assert not called and x.grad is None and all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


# Recomputation, and layers that are left out.


class Plain(Reentrant):
    def forward(self, x):
        x = x + self.f1(self.n1(x)).tanh()
        return x + self.f2(self.n2(x)).tanh()


class Shared(nn.Module):
    checkpoints = None

    def __init__(self):
        super().__init__()
        self.blocks, self.norm = nn.ModuleList([Plain()]), nn.LayerNorm(D)

    def forward(self, x):
        for _ in range(3):
            if self.checkpoints is None:
                x = self.blocks[0](x)
            else:
                x = checkpoint(self.blocks[0], x, use_reentrant=self.checkpoints)
        return self.norm(x)


@pytest.mark.parametrize("scheme", ["dlcl", "denseformer", "resi-dual", "peri-ln"])
def test_a_shared_block_is_recomputed_as_the_layer_that_it_was(scheme):
    torch.manual_seed(0)
    model, x, found = Shared().double(), input_(), []
    swap_residuals(model, scheme, init=None, example=x.detach())
    for model.checkpoints in (None, False):
        found.append(gradients(model, model(x), x))
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    model.checkpoints = True
    with pytest.raises(InputError, match="use_reentrant=False"):
        model(x).sum().backward()


class Shortened(nn.Module):
    checkpoints = None

    def __init__(self):
        super().__init__()
        self.blocks, self.norm = nn.ModuleList([Plain(), Plain(), Plain()]), nn.LayerNorm(D)

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.checkpoints is None else checkpoint(block, x, use_reentrant=self.checkpoints)
        return self.norm(x)


@pytest.mark.parametrize("scheme", ["peri-ln", "resi-dual", "denseformer"])
def test_a_stack_that_lost_its_first_block_is_recomputed_or_refused(scheme):
    """peri-ln norms the stack's input, which a reentrant checkpoint does not show."""
    torch.manual_seed(0)
    model, x, found = Shortened().double(), input_(), []
    swap_residuals(model, scheme, init=None, example=x.detach())
    del model.blocks[0]
    for model.checkpoints in (None, False, *([] if scheme == "peri-ln" else [True])):
        y = model(x)
        model.zero_grad()
        y.sin().sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for grads in found[1:]:
        torch.testing.assert_close(grads, found[0], rtol=1e-9, atol=1e-9)
    model.checkpoints = True
    if scheme == "peri-ln":
        with pytest.raises(InputError, match=r"without its first.*use_reentrant=False"):
            model(x).sum().backward()


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Plain()])

    def forward(self, x):
        return self.blocks[0](x)


class RunsAgain(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack, self.norm = Stack(), nn.LayerNorm(D)

    def forward(self, x):
        return self.norm(self.stack(self.stack(x)))


def test_a_stack_that_reads_its_own_output_has_no_end():
    """Its call does not show whether it is the last one."""
    for scheme in ("peri-ln", "resi-dual", "denseformer", "mhc"):
        with pytest.raises(InputError, match=r"layers differently|around stack\.blocks 2 times for 1 pass of"):
            swap_residuals(RunsAgain(), scheme, init=None, example=input_().detach().float())
    swap_residuals(RunsAgain(), "deepnorm", init=None, example=input_().detach().float())


class Attention(nn.Module):
    num_heads = 2

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (2, -1)).transpose(1, 2) for w in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.attn, self.n2, self.up = nn.LayerNorm(D), Attention(), nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.up(self.n2(x)).tanh()


class Drops(nn.Module):
    dropped = ()
    checkpoints = False

    def __init__(self):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Attends() for _ in range(3)), nn.LayerNorm(D)

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if i not in self.dropped:
                x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.norm(x)


@pytest.mark.parametrize("scheme", ["value-residual", "dlcl", "denseformer", "x0-lambdas", "peri-ln"])
@pytest.mark.parametrize("dropped", [(0,), (1,), (0, 1), (2,)])
@pytest.mark.one_in(test=5, all=4)
def test_layers_that_are_left_out(scheme, dropped):
    torch.manual_seed(0)
    model, x, found = Drops().double(), input_(), []
    swap_residuals(model, scheme, init=None, example=x.detach())
    model.dropped = dropped
    for model.checkpoints in (False, True):
        found.append(gradients(model, model(x), x))
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_the_first_layer_to_run_keeps_the_first_values():
    """λ V + λ V₁ is V where V is V₁ and both λ are ½."""
    torch.manual_seed(0)
    model, x = Drops().double(), input_().detach()
    want = copy.deepcopy(model)
    swap_residuals(model, "value-residual", init=None, example=x)
    model.dropped = want.dropped = (0, 2)
    torch.testing.assert_close(model(x), want(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("how", ["blocks", "compile()", "model"])
@pytest.mark.one_in(all=3)
def test_compiled_blocks_are_swapped_as_plain_ones(how):
    x, plain, model = torch.randn(2, T, D), model_of(Plain).float(), model_of(Plain).float()
    swap_residuals(plain, "deepnorm", init=None, example=x)
    if how == "blocks":
        for i in range(2):
            model[i] = torch.compile(model[i], backend="eager")
    elif how == "compile()":
        model[0].compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    swap_residuals(model, "deepnorm", init=None, example=x)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))


class FailsInTraining(PostNorm):
    def forward(self, x):
        assert not self.training, "no training"
        return PostNorm.forward(self, x)


def test_what_does_not_run_before_the_swap_proves_nothing():
    """Two runs that fail alike are not taken for equal."""
    model = model_of(FailsInTraining, reading=next(iter(READINGS))).eval()
    modules = [*model.modules()]
    with pytest.raises(InputError, match=r"without a swap it fails.*no training.* in training mode"):
        swap_residuals(model, "prenorm", init=None, example=input_().detach())
    assert modules == [*model.modules()] and not any(hasattr(block, "residual") for block in model)
