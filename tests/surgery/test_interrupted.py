"""An interrupt at any line of a swap or of an undo leaves the model as it was, or as it should be."""

import copy
import functools
import random
import signal
import warnings

import pytest
import torch
from surgery_support import FF, HEADS, D, hugging_face, torchs_encoder
from torch import nn
from whole_state import LOST, Interrupted, differences, keyboard, memory, sigint, whole_state

import normformer_rs as nfrs
from normformer_rs import nn as nfnn
from normformer_rs import surgery
from normformer_rs.surgery import Linear, Part, fold_admin, fold_norms, swap_norms, swap_residuals, whole

pytestmark = pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor", "ignore:.* look trained", "ignore:.*no optimizer"
)


class Block(nn.Module):
    """Somebody's own pre-norm block."""

    def __init__(self):
        super().__init__()
        self.ln1, self.ln2, self.n = nn.LayerNorm(D), nn.LayerNorm(D), HEADS
        self.attn, self.mlp = nn.Linear(D, D), nn.Sequential(nn.Linear(D, FF), nn.ReLU(), nn.Linear(FF, D))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Stepping(Block):
    """Known by a subclass with a forward of its own."""


class ConvertedStepping(Stepping):
    def parts(self):
        return [*PARTS]

    def heads(self):
        return self.n

    def forward(self, x):
        x = self.residual.step(0, x, self.attn)
        return self.residual.step(1, x, self.mlp)


PARTS = (
    Part("self-attention", "ln1", (Linear("attn", ("output",)),)),
    Part("feed-forward", "ln2", (Linear("mlp.0", ("fc1",)), Linear("mlp.2", ("fc2",)))),
)


class Stacked(nn.Module):
    """Embeds tokens, and runs blocks and a norm; a buffer counts its calls in training."""

    def __init__(self, kind):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(11, D), nn.LayerNorm(D), nn.Linear(D, 11)
        self.blocks = nn.ModuleList(kind() for _ in range(2))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, tokens):
        self.calls += 1
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


TOKENS = torch.arange(8).view(2, 4)


def stacked(kind):
    surgery.register_block(Stepping, ConvertedStepping)
    return Stacked(kind).eval()


def encoder(**options):
    model = torchs_encoder(**options).eval()
    model.layers[0].norm1.register_forward_hook(print)
    model.layers[1].norm2.weight.no_decay = True
    return model


def hooked():
    model = encoder()
    model.layers[1].norm1.weight.register_hook(torch.clone)
    return model


def residuals(to, **options):
    return lambda model, optimizer: swap_residuals(model, to, optimizer=optimizer, **{"init": "scheme", **options})


def norms(to, **options):
    return lambda model, optimizer: swap_norms(model, to, optimizer=optimizer, **options)


def folded(model, _):
    return fold_norms(model, example=None if isinstance(model, nn.TransformerEncoder) else {"tokens": TOKENS})


EXAMPLE = {"example": {"tokens": TOKENS}}
CASES = {
    "norms": (hooked, norms("rmsnorm")),
    "norms with statistics": (encoder, norms("powernorm")),
    "residuals of torch.nn": (encoder, residuals("deepnorm")),
    "residuals without norms": (torchs_encoder, residuals("t-fixup")),
    "residuals by a run": (lambda: stacked(Block), residuals("deepnorm", **EXAMPLE)),
    "streams by a run": (lambda: stacked(Block), residuals("hyper-connections", **EXAMPLE)),
    "no norms by a run": (lambda: stacked(Block), residuals("rezero", init=None, **EXAMPLE)),
    "own forward": (lambda: stacked(Stepping), residuals("sandwich", **EXAMPLE)),
    "folded": (lambda: encoder(norm_first=True), folded),
    "folded by a run": (lambda: stacked(Block), folded),
    "exact": (lambda: stacked(Block), norms("rmsnorm", exact=True, **EXAMPLE)),
    "nested": (encoder, norms("scalenorm"), residuals("deepnorm"), norms("rmsnorm")),
    "refused late": (torchs_encoder, lambda model, _: swap_residuals(model, "t-fixup", optimizer=strange())),
    "Hugging Face": (lambda: hugging_face("gpt2").eval(), norms("rmsnorm"), residuals("deepnorm")),
}


def strange():
    """An optimizer of other parameters."""
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)


def prepared(name):
    """A model, its optimizer with state, and its swaps."""
    make, *swaps = CASES[name]
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.named_parameters(), 1e-3)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return model, optimizer, swaps


def made(model, optimizer, swaps):
    """The tables of swaps; a refusal ends them."""
    tables = []
    for swap in swaps:
        try:
            tables.append(swap(model, optimizer))
        except nfrs.InputError:
            break
    return tables


def undone(tables):
    for table in reversed(tables):
        table.undo()


@functools.cache
def lines_of(name):
    """How many lines the package runs in the last swap of a case, and in its undoing."""
    made(*prepared(name))  # fills caches
    model, optimizer, swaps = prepared(name)
    made(model, optimizer, swaps[:-1])
    with Interrupted() as there:
        tables = made(model, optimizer, swaps[-1:])
    with Interrupted() as back:
        undone(tables)
    return there.lines, back.lines


def interrupt_swap(name, at, how):
    model, optimizer, swaps = prepared(name)
    first = whole_state(model, optimizer)
    tables = made(model, optimizer, swaps[:-1])
    before = whole_state(model, optimizer)
    is_made = False
    with Interrupted(at, how) as here:
        try:
            tables.append(swaps[-1](model, optimizer))
            is_made = True
        except (KeyboardInterrupt, MemoryError, nfrs.InputError):
            pass
    if not is_made:
        assert differences(before, whole_state(model, optimizer)) == [], here.place
        tables += made(model, optimizer, swaps[-1:])
    assert len(tables) == len(swaps) - (name == "refused late")
    undone(tables)
    assert differences(first, whole_state(model, optimizer), but=LOST) == [], here.place


def interrupt_undo(name, at, how):
    model, optimizer, swaps = prepared(name)
    first = whole_state(model, optimizer)
    tables = made(model, optimizer, swaps[:-1])
    before = whole_state(model, optimizer)
    (last,) = made(model, optimizer, swaps[-1:])
    swapped = whole_state(model, optimizer)
    is_whole = True
    with Interrupted(at, how) as here:
        try:
            last.undo()
        except (KeyboardInterrupt, MemoryError):
            is_whole = differences(swapped, whole_state(model, optimizer)) != []
    if not is_whole:
        last.undo()
    assert differences(before, whole_state(model, optimizer), but=LOST) == [], here.place
    with pytest.raises(nfrs.InputError, match="taken back already"):
        last.undo()
    undone(tables)
    assert differences(first, whole_state(model, optimizer), but=LOST) == [], here.place


HOW = (keyboard, memory, sigint)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(test=7, all=6)
def test_an_interrupt_at_a_line(name):
    there, back = lines_of(name)
    draw = random.Random(name)
    interrupt_swap(name, draw.randrange(1, there), draw.choice(HOW))
    if name != "refused late":
        interrupt_undo(name, draw.randrange(1, back), draw.choice(HOW))


@pytest.mark.parametrize("seed", range(300))
@pytest.mark.one_in(all=150)
def test_interrupts_at_many_lines(seed):
    draw = random.Random(seed)
    name, how = draw.choice([*CASES]), draw.choice(HOW)
    there, back = lines_of(name)
    if name == "refused late" or draw.random() < 0.5:
        interrupt_swap(name, draw.randrange(1, there), how)
    else:
        interrupt_undo(name, draw.randrange(1, back), how)


@pytest.mark.full
def test_interrupts_at_the_end_of_an_undo():
    """From the writing of values on, an undo is completed."""
    _, back = lines_of("residuals of torch.nn")
    for at in range(back - 60, back + 1, 6):
        interrupt_undo("residuals of torch.nn", at, keyboard)


def test_a_second_signal_waits_until_everything_is_back(monkeypatch):
    model, optimizer, _ = prepared("refused late")
    before, put_back, calls = whole_state(model, optimizer), whole._put_back, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 20:
            signal.raise_signal(signal.SIGINT)
        put_back(*args)

    monkeypatch.setattr(whole, "_put_back", interrupted)
    with pytest.raises(KeyboardInterrupt):
        swap_residuals(model, "t-fixup", optimizer=strange())
    assert len(calls) > 20 and differences(before, whole_state(model, optimizer)) == []


def test_admins_gains_fold_wholly_or_not_at_all():
    torch.manual_seed(0)
    model = nfnn.Transformer(D, HEADS, 2, 2, FF, residual="admin")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5)
    before, twin = whole_state(model), copy.deepcopy(model)
    with Interrupted() as here:
        fold_admin(twin)
    draw = random.Random(0)
    for at in (*(draw.randrange(1, here.lines) for _ in range(4)), here.lines):
        with pytest.raises(KeyboardInterrupt), Interrupted(at):
            fold_admin(model)
        assert differences(before, whole_state(model)) == []
    fold_admin(model)
    assert differences(before, whole_state(model))


def trained():
    """A model whose biases look trained."""
    model = torchs_encoder()
    torch.nn.init.normal_(model.layers[0].norm1.weight)
    return model


def test_a_warning_that_is_an_error_leaves_the_model():
    model = trained()
    before = whole_state(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"biases of .* to zero"):
            swap_residuals(model, "r-fixup", init=None)
    assert differences(before, whole_state(model)) == []


def test_a_warning_names_the_callers_line():
    with pytest.warns(UserWarning, match=r"biases of .* to zero") as said:
        swap_residuals(trained(), "r-fixup", init=None)
    assert {one.filename for one in said} == {__file__}
