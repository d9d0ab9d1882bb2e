"""Blocks that write in place, add what they only read, reorder, broadcast or return other containers: right, or
refused."""

from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normformer_rs import InputError
from normformer_rs.surgery import swap_residuals

D = 8


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2, self.n3 = (nn.LayerNorm(D) for _ in range(3))
        self.l1, self.l2, self.l3 = (nn.Linear(D, D) for _ in range(3))
        self.pos = nn.Parameter(torch.randn(1, 5, D))


class Stack(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(kind() for _ in range(2)), nn.LayerNorm(D)

    def forward(self, x, *rest):
        for block in self.blocks:
            x = block(x, *rest)
            x = x if isinstance(x, torch.Tensor) else x["h"] if isinstance(x, dict) else x[0]
        return self.norm(x)


def made(kind, scheme, *example):
    torch.manual_seed(0)
    model = Stack(kind).double().eval()
    swap_residuals(model, scheme, init=None, example=example)
    return model


def rezeroed(model, functions, x):
    """x + a·F(x) by hand, a = ½."""
    for block in model.blocks:
        nn.init.constant_(block.residual.branch_scale, 0.5)
    with torch.no_grad():
        got, want = model(x), x
        for block in model.blocks:
            for function in functions:
                want = want + 0.5 * function(block, want)
    return got, want


class InPlace(Base):
    def forward(self, x):
        x = x + self.l1(F.relu(self.n1(x), inplace=True))
        return x + self.l2(self.n2(x).relu_())


class ReadingAddition(Base):
    def forward(self, x):
        h = self.n1(x)
        x = x + self.l1(h + self.pos.expand_as(h)) * torch.sigmoid(h)
        return x + self.l2(self.n2(x))


class Reordered(Base):
    def forward(self, x):
        h = self.n1(x).permute(1, 0, 2).cumsum(0).permute(1, 0, 2)
        x = x + self.l1(h)
        return x + self.l2(self.n2(x)[:, torch.arange(x.shape[1]).flip(0)].cumsum(1))


CASES = {
    "in place": (InPlace, [lambda b, x: b.l1(x.relu()), lambda b, x: b.l2(x.relu())]),
    "an addition that reads": (
        ReadingAddition,
        [lambda b, x: b.l1(x + b.pos) * torch.sigmoid(x), lambda b, x: b.l2(x)],
    ),
    "reordered": (Reordered, [lambda b, x: b.l1(x.cumsum(1)), lambda b, x: b.l2(x.flip(1).cumsum(1))]),
}


@pytest.mark.parametrize("batch", [2, 5])
@pytest.mark.parametrize("case", CASES)
def test_without_norms(case, batch):
    kind, functions = CASES[case]
    x = torch.randn(batch, 5, D, dtype=torch.float64)
    torch.testing.assert_close(*rezeroed(made(kind, "rezero", x), functions, x), rtol=1e-9, atol=1e-9)


class Broadcast(Base):
    def forward(self, x):
        q = x + self.pos
        x = self.n1(x + self.l1(torch.sigmoid(self.l3(q)) * x))
        return self.n2(x + self.l2(x))


@pytest.mark.parametrize("first", [1, 2])
def test_a_batch_of_one_is_a_row_of_two(first):
    x = torch.randn(2, 5, D, dtype=torch.float64)
    model = made(Broadcast, "deepnorm", x[:first])
    torch.testing.assert_close(torch.cat([model(x[:1]), model(x[1:])]), model(x), rtol=1e-9, atol=1e-9)


Pair = namedtuple("Pair", "h aux")


class Named(Base):
    def body(self, x):
        x = x + self.l1(self.n1(x))
        return x + self.l2(self.n2(x))

    def forward(self, x):
        return Pair(self.body(x), x.mean())


class Mapped(Named):
    def forward(self, x):
        return {"h": self.body(x)}


class Bare(Named):
    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize("scheme", ["postnorm", "resi-dual", "denseformer", "mhc"])
@pytest.mark.one_in(test=2)
def test_what_blocks_return(scheme):
    x = torch.randn(2, 5, D, dtype=torch.float64)
    want = made(Bare, scheme, x)(x)
    for kind in (Named, Mapped):
        got = made(kind, scheme, x)(x)
        assert type(got) is torch.Tensor and torch.equal(got, want)


class Between(Stack):
    """Its output has the mean of each block's hidden state, whatever the width of that."""

    def forward(self, x):
        means = []
        for block in self.blocks:
            x = block(x)
            means.append(x.mean(-1, keepdim=True))
        return self.norm(x) + sum(means)


@pytest.mark.parametrize("scheme", ["dlcl", "mhc"])
def test_a_model_that_reads_between_its_blocks_is_refused(scheme):
    """The identity swap runs, and its numbers tell: nothing else in this model refuses schemes with wider states."""
    x, model = torch.randn(2, 5, D, dtype=torch.float64), Between(Bare).double().eval()
    before = model(x)
    with pytest.raises(InputError, match=r"between its blocks the model reads .* its outputs differ by"):
        swap_residuals(model, scheme, init=None, example=x)
    assert torch.equal(model(x), before)


class Dropped(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.l, self.drop = nn.Linear(D, D), drop

    def forward(self, x):
        return self.drop(self.l(x))


class OneDropout(Base):
    def __init__(self):
        super().__init__()
        drop = nn.Dropout(0.5)
        self.a, self.m = Dropped(drop), Dropped(drop)

    def forward(self, x):
        x = x + self.a(self.n1(x))
        return x + self.m(self.n2(x))


def test_one_dropout_under_two_names_drops_once():
    x = torch.zeros(64, 5, D, dtype=torch.float64)
    model = made(OneDropout, "prenorm", x).train()
    block = model.blocks[0]
    with torch.no_grad():
        for part in (block.a, block.m):
            nn.init.zeros_(part.l.weight), nn.init.ones_(part.l.bias)
    for _ in range(2):
        y = block(x)
        assert {*y.unique().tolist()} == {0.0, 2.0, 4.0} and abs((y == 0).double().mean().item() - 0.25) < 0.05


class Decoder(Base):
    def __init__(self):
        super().__init__()
        self.key = nn.Linear(D, D)

    def forward(self, x, memory=None):
        x = self.n1(x + self.l1(x))
        if memory is not None:
            x = self.n2(x + self.l3(torch.sigmoid(x) * self.key(memory)))
        return self.n3(x + self.l2(x + self.pos).tanh())


def test_additions_are_told_apart_where_a_sublayer_is_left_out():
    x, memory = torch.randn(2, 2, 5, D, dtype=torch.float64)
    torch.manual_seed(0)
    plain = Stack(Decoder).double().eval()
    model = made(Decoder, "postnorm", x, memory)
    for block, other in zip(plain.blocks, model.blocks, strict=True):
        block.load_state_dict({k: v for k, v in other.state_dict().items() if "residual" not in k})
    for rest in ((memory,), ()):
        hidden = x
        for block in plain.blocks:
            hidden = block(hidden, *rest)
        got = x
        for block in model.blocks:
            got = block(got, *rest)
        torch.testing.assert_close(got, hidden, rtol=1e-5, atol=1e-5)


class Detached(Base):
    def forward(self, x):
        x = x + self.l1(self.n1(x.detach()))
        return x + self.l2(self.n2(x))


def test_a_norm_of_a_detached_stream_is_the_branchs_own_and_refused():
    with pytest.raises(InputError, match="norms a part or a rearrangement of the residual"):
        made(Detached, "prenorm", torch.randn(2, 5, D, dtype=torch.float64))


def test_an_interruption_leaves_the_model_as_it_was():
    for stop in range(1, 9):
        model, calls = Stack(Bare), []

        def run(m, calls=calls, stop=stop):
            calls.append(1)
            if len(calls) == stop:
                raise KeyboardInterrupt
            return m(torch.randn(2, 5, D))

        kinds, keys = [type(m) for m in model.modules()], [*model.state_dict()]
        try:
            swap_residuals(model, "resi-dual", example=run)
        except KeyboardInterrupt:
            assert [type(m) for m in model.modules()] == kinds and [*model.state_dict()] == keys
        else:
            assert len(calls) < stop


class Counting(Bare):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x):
        self.n += 1
        return super().forward(x)


def test_buffers_stay_as_they_were():
    x = torch.randn(2, 5, D, dtype=torch.float64)
    assert made(Counting, "postnorm", x).blocks[0].n == 0
