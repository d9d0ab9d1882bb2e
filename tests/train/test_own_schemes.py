"""A residual scheme that its user declares in Python: the same as the table's, in every place, and refused by name."""

import contextlib
import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from train_support import TINY, fit, losses, weights

import normformer_rs as nfrs
from mutations import mutations
from normformer_rs.errors import InputError
from normformer_rs.schemes import (
    GROWING,
    Change,
    Combine,
    Growth,
    HyperConnection,
    Joint,
    Learned,
    Norm,
    Normal,
    ResidualSpec,
    Scheme,
    StackSpec,
    StreamStep,
    damp_forward,
    head_scale,
    keep,
    mix,
    norm,
    scale,
    sigmoid,
)


class DeepNorm(Scheme):
    name, init = "own-deepnorm", "deepnorm"

    def around(self, place):
        alpha = place.constant(
            lambda n, m: 0.81 * (n**4 * m) ** (1 / 16), lambda n, m: (3 * m) ** 0.25, lambda depth: (2 * depth) ** 0.25
        )
        return ResidualSpec(alpha=alpha, after=norm())


class ResiDual(Scheme):
    name, init = "own-resi-dual", "fairseq-0.12.2"

    def around(self, place):
        return ResidualSpec(after=norm(), streams=[StreamStep()])

    def stack(self, place):
        return StackSpec(streams=[Norm("dual_norm")])


class Mhc(Scheme):
    name = "own-mhc"

    def connection(self, place, own, names):
        n = 4
        near = [0.0] * n if own is None else [1.0 if i == own % n else -1.0 for i in range(n)]
        bias = near if own is None else [*near, *near, *(0.0 if i == j else -8.0 for i in range(n) for j in range(n))]
        weight, factor, shift = names
        gates = Joint(
            Learned(weight, 0.0, (len(bias), n * place.d_model), sums_over="width"),
            Learned(factor, 0.01, 1 if own is None else 3),
            Learned(shift, bias, len(bias)),
        )
        return HyperConnection(n, gates)

    def around(self, place):
        names = ("hyper_weight", "hyper_scale", "hyper_bias")
        return ResidualSpec(before=norm(), mixing=self.connection(place, place.number, names))

    def stack(self, place):
        names = ("end_hyper_weight", "end_hyper_scale", "end_hyper_bias")
        return StackSpec(mixing=self.connection(place, None, names), end=norm())


class ValueResidual(Scheme):
    name, init = "own-value-residual", "smallinit"

    def around(self, place):
        return ResidualSpec(before=norm())

    def inside(self, place):
        if place.sublayer != "self-attention":
            return {}
        own, first = Learned("value_scale", 0.5), Learned("first_value_scale", 0.5)
        return {"value": mix("first_values", own, first) if place.layer else keep("first_values")}

    def stack(self, place):
        return StackSpec(end=norm())


class ProRes(Scheme):
    name, init = "own-prores", "smallinit"

    def around(self, place):
        return ResidualSpec(before=norm(), beta=GROWING)

    def stack(self, place):
        return StackSpec(growth=Growth(5, by_layer=True), end=norm())


class Dense(Scheme):
    name = "own-denseformer"

    def around(self, place):
        return ResidualSpec(before=norm())

    def stack(self, place):
        size = place.layers + 1
        identity = [float(i == j) for i in range(size) for j in range(size)]
        return StackSpec(
            combine=Combine(Learned("combine.weight", identity, (size, size), sums_over="depth"), skips_first=True),
            end=norm(),
        )


SAME = [
    (DeepNorm(), {"residual": "deepnorm"}),
    (ResiDual(), {"residual": "resi-dual"}),
    (Mhc(), {"residual": "mhc"}),
    (ValueResidual(), {"residual": "value-residual"}),
    (ProRes(), {"residual": "prores", "prores_steps": 5}),
    (Dense(), {"residual": "denseformer"}),
]
ids = [scheme.name for scheme, _ in SAME]


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder-only"])
@pytest.mark.parametrize(("own", "table"), SAME, ids=ids)
def test_it_declares_what_the_table_does(own, table, architecture):
    depths = {"encoder_layers": 3} if architecture == "encoder-decoder" else {}
    shape = {"vocab_size": 11, "d_model": 8, "d_ff": 12, "heads": 2, "decoder_layers": 2, "architecture": architecture}
    one, other = (nfrs.TransformerConfig(**shape, **depths, **by) for by in ({"residual": own}, table))
    for stack in ("encoder", "decoder") if depths else ("decoder",):
        found = [json.loads(nfrs._core.declare(config.to_json(), stack)) for config in (one, other)]
        assert found[0] == found[1]


@pytest.mark.parametrize(("own", "table"), SAME, ids=ids)
@pytest.mark.one_in(all=6)
def test_ten_losses_and_all_weights_are_the_tables(tmp_path, corpus, own, table):
    for name, residual in (("own", {"residual": own}), ("table", table)):
        fit(tmp_path / name, corpus, {"dropout": 0.1, **residual})
    assert losses(tmp_path / "own") == losses(tmp_path / "table")
    own, table = weights(tmp_path / "own"), weights(tmp_path / "table")
    assert own.keys() == table.keys() and all(torch.equal(own[k], table[k]) for k in own)


@pytest.mark.parametrize(("own", "table"), SAME, ids=ids)
def test_modules_are_the_tables(own, table):
    made = []
    for given in ({"residual": own}, table):
        torch.manual_seed(0)
        layer = nfrs.nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0, **given)
        stack = nfrs.nn.TransformerEncoder(layer, 3)
        x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        y = stack(x)
        made.append([y, *torch.autograd.grad(y.square().sum(), [x, *stack.parameters()], allow_unused=True)])
    assert all((a is b is None) or torch.equal(a, b) for a, b in zip(*made, strict=True))


def test_a_swap_takes_it():
    made = []
    for to in (DeepNorm(), "deepnorm"):
        torch.manual_seed(0)
        model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2).eval()
        swaps = nfrs.swap_residuals(model, to, init=None)
        made.append(model(torch.ones(1, 3, 8)))
        assert str(to) in str(swaps)
    assert torch.equal(*made)


@pytest.mark.full
def test_a_run_loads_resumes_and_translates_without_the_class(tmp_path, corpus):
    """config.json holds the data."""
    fit(tmp_path / "run", corpus, {"residual": ValueResidual()}, {"updates": 4})
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model"]["residual"]["name"] == "own-value-residual"
    code = f"""
import normformer_rs as nfrs
model = nfrs.Transformer.from_checkpoint({str(tmp_path / "run")!r}, "last")
print(repr(model.config.residual))
print(len(nfrs.translate({str(tmp_path / "run")!r}, ["1 2 3"])))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("DeclaredScheme('own-value-residual')")


FILE = """
import normformer_rs as nfrs
from normformer_rs.schemes import ResidualSpec, norm

class TwoNorms(nfrs.Scheme):
    name, source, init = "two-norms", "an example", "smallinit"
    def around(self, place):
        return ResidualSpec(before=norm("inner_norm"), alpha=2.0 * place.layers, after=norm())
"""


@pytest.mark.full
def test_the_command_line_takes_a_file_and_a_class(tmp_path, corpus):
    (tmp_path / "mine.py").write_text(FILE)
    command = [sys.executable, "-m", "normformer_rs", "train", "--output", str(tmp_path / "run"), "--no-progress"]
    for name, value in {**corpus, **TINY, "updates": 2, "residual": f"{tmp_path / 'mine.py'}:TwoNorms"}.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    done = subprocess.run([*command, "--no-bpe"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = weights(tmp_path / "run")
    assert "encoder.layers.0.inner_norm1.weight" in names and "decoder.layers.1.norm3.weight" in names


def test_schemes_that_hold_arrays_are_compared_by_their_numbers():
    class Weighted(Scheme):
        def __init__(self, weights):
            self.name, self.weights = "weighted", weights

        def around(self, place):
            return ResidualSpec(beta=float(self.weights[place.index]))

    for made in (torch.tensor, np.array):
        same, equal, other = (Weighted(made([1.0, 0.5, last])) for last in (2.0, 2.0, 3.0))
        assert same == equal and same != other and same != Weighted(None) and same != Weighted(made([1.0]))
        for scheme in (same, equal):
            nfrs.Transformer(nfrs.TransformerConfig(residual=scheme, vocab_size=11, d_model=8, d_ff=12, heads=2))


def test_schemes_are_compared_with_anything():
    class Own(Scheme):
        name = "own"

        def __init__(self, value=1):
            self.value = value

    assert Own() != "prenorm" and Own() != None and Own() != 3 and Own() not in ("prenorm", None, 3)  # noqa: E711
    assert Own() != Scheme and Own([1]) != Own([2]) and Own({"a": np.ones(2)}) == Own({"a": np.ones(2)})
    assert Own([np.ones(2), 1]) == Own([np.ones(2), 1]) != Own([np.ones(2), 2])
    assert len({Own(1), Own(1.0), Own(2), "own", None}) == 4


class At(Scheme):
    """A norm at one point of self-attention."""

    def __init__(self, point):
        self.name, self.point = "at", point

    def inside(self, place):
        return {self.point: norm("head_norm")} if place.sublayer == "self-attention" else {}


@pytest.mark.parametrize("point", ["query", "key"])
def test_modules_rotate_nothing_between_two_points(point):
    def layer(point):
        torch.manual_seed(0)
        layer = nfrs.nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True, residual=At(point)).double()
        with torch.no_grad():
            layer.self_attn.head_norm.weight.copy_(torch.arange(8) / 4)
        return layer

    x = torch.randn(2, 5, 16, dtype=torch.double)
    assert torch.equal(layer(point)(x), layer(f"rotated_{point}")(x))
    assert not torch.allclose(layer(point)(x), layer("value")(x))


def both_ways(scheme):
    """Outputs of two layers of modules and of the loop's model. Weights and inputs are the same at each call."""
    torch.manual_seed(0)
    layer = nfrs.nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True, residual=scheme).double()
    x = torch.randn(2, 5, 8, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    config = nfrs.TransformerConfig(residual=scheme, vocab_size=11, d_model=8, d_ff=12, heads=2, dropout=0.0)
    model = nfrs.Transformer(config, seed=1).double()
    return nfrs.nn.TransformerEncoder(layer, 2)(x), model(torch.tensor([[4, 5, 2]]), torch.tensor([[0, 6, 7]]))


def test_skip_mixes_what_the_branch_has_kept():
    one = declare(ResidualSpec(before=norm(), branch=keep("f"), skip=mix("f", 1.0, 0.5)))
    for ours, plain in zip(both_ways(one), both_ways(declare(ResidualSpec(before=norm(), beta=1.5))), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


def test_points_run_in_their_order_however_they_are_written():
    class Keys(Scheme):
        def __init__(self, points):
            self.name, self.points = "keys", points

        def inside(self, place):
            return dict(self.points) if place.sublayer == "self-attention" else {}

    points = [("query", keep("q")), ("value", mix("q")), ("rotated_key", mix("q", 1.0, 0.5))]
    for ours, other in zip(both_ways(Keys(points)), both_ways(Keys(points[::-1])), strict=True):
        assert torch.equal(ours, other)


@pytest.mark.parametrize("point", ["query", "key"])
@pytest.mark.one_in(all=2)
def test_the_loop_rotates_nothing_where_positions_do_not(tmp_path, corpus, point):
    for at in (point, f"rotated_{point}", "value"):
        fit(tmp_path / at, corpus, {"residual": At(at)}, {"updates": 3})
    assert losses(tmp_path / point) == losses(tmp_path / f"rotated_{point}") != losses(tmp_path / "value")


def declare(spec=None, inside=None, stack=None, layer=(), **about):
    """A scheme of these parts in every place."""
    body = {"name": "mine", "around": lambda self, place: spec or ResidualSpec(), "layer": lambda self, place: layer}
    body |= {"inside": lambda self, place: inside or {}, "stack": lambda self, place: stack or StackSpec()}
    return type("Mine", (Scheme,), {**body, **about})()


def hyper(n=2, rows=8):
    scale, bias = Learned("hyper_scale", 0.01, 3), Learned("hyper_bias", 0.0, rows)
    return HyperConnection(n, Joint(Learned("hyper_weight", 0.0, (rows, n * 8)), scale, bias))


def combine(weight="combine.weight", norms=()):
    """For six layers."""
    return Combine(Learned(weight, 0.0, (7, 7)), norms=[Norm(name) for name in norms])


WRONG = [
    (declare(ResidualSpec(before=norm(width=5))), 'has the norm "norm1" of width 5, and rows there are [8] wide'),
    (declare(ResidualSpec(before=norm(), after=norm())), 'two norms are called "norm1"'),
    (declare(ResidualSpec(beta=Learned("gain", 1.0, 3))), "of shape [3], expected one of [[1], [8]]"),
    (declare(ResidualSpec(beta=Learned("gain", [1.0, 2.0], 8))), "of shape [8] has 2 first values"),
    (
        declare(ResidualSpec(beta=Learned("gain", math.nan))),
        "around().beta: gain1.value is nan: it must be finite",
    ),
    (declare(ResidualSpec(alpha=math.inf)), "Mine.around().alpha is inf: it must be finite"),
    (declare(ResidualSpec(beta=GROWING)), "the stack declares no growth"),
    (declare(ResidualSpec(streams=[StreamStep()])), "it moves 1 streams beside x, and the stack has 0"),
    (declare(ResidualSpec(after=mix("x0"))), 'mixes "x0", which nothing before has kept'),
    (declare(inside={"value": mix("v")}), 'mixes "v", which nothing before has kept'),
    (declare(inside={"value": keep("v"), "query": mix("v")}), 'mixes "v", which nothing before has kept'),
    (declare(ResidualSpec(skip=keep("x"), branch=mix("x"))), 'mixes "x", which nothing before has kept'),
    (declare(ResidualSpec(after=norm("a b"))), "is no name"),
    (declare(ResidualSpec(after=scale(Learned("linear1", 1.0, shared=True)))), "the name of a part of every layer"),
    (declare(ResidualSpec(mixing=hyper())), "must all read of several tensors, or none"),
    (declare(ResidualSpec(beta=sigmoid(Learned("w", 0.0), 0.0))), "temperature must be above 0"),
    (declare(ResidualSpec(alpha=Learned("g", 1.0), beta=Learned("g", 0.0))), '"g1" is declared twice'),
    (declare(stack=StackSpec(begin=norm(), end=norm())), 'two norms are called "norm"'),
    (
        declare(inside={"query": head_scale(Learned("g", 1.0, 2))}),
        "cut into heads, and head_scale acts where they are joined",
    ),
    (declare(inside={"key": scale(Learned("g", 1.0, 3))}), "of shape [3], expected one of [[1], [4], [8]]"),
    (declare(inside={"value": damp_forward(Learned("g", 1.0, 4))}), "of shape [4], expected one of [[1], [8]]"),
    (declare(inside={"hidden": norm()}), "unknown variant `hidden`"),
    (declare(inside={"before_activation": damp_forward(Learned("a", 0.0))}), "it has no point BeforeActivation"),
    (declare(inside={"rotated_key": norm("k_norm")}), "it has no point RotatedKey"),  # cross-attention, feed-forward
    (declare(name="prenorm"), "must be none of this package's"),
    (declare(name="my scheme"), "must be made of letters"),
    (declare(init="nope"), "unknown init"),
    (declare(stack=StackSpec(combine=combine("w"))), '"w" where "combine.weight" must stand'),
    (declare(stack=StackSpec(combine=combine(norms=["combine.norms.2"]))), 'where "combine.norms.1" must stand'),
    (declare(stack=StackSpec(combine=combine(norms=["first"]))), '"first" where "combine.norms.1" must stand'),
    (declare(stack=StackSpec(growth=Growth(-1))), "growth takes at least 0 steps"),
    (declare(stack=StackSpec(growth=Growth(3, "curved"))), "unknown branchnorm_growth"),
]


@pytest.mark.parametrize(("scheme", "why"), WRONG, ids=[why for _, why in WRONG])
def test_wrong_declarations_are_refused_by_what_is_wrong(scheme, why):
    config = nfrs.TransformerConfig(residual=scheme, vocab_size=11, d_model=8, d_ff=12, heads=2)
    with pytest.raises(InputError) as e:
        nfrs.Transformer(config)
    assert why in str(e.value)
    with pytest.raises(InputError):
        nfrs.nn.TransformerEncoderLayer(8, 2, 12, residual=scheme)


@pytest.mark.parametrize(
    ("scheme", "why"),
    [
        (declare(around=lambda self, place: norm()), "Mine.around() must be a ResidualSpec"),
        (declare(layer=lambda self, place: None), 'Mine.layer() must be changes, as norm("norm")'),
        (declare(ResidualSpec(before=["norm"])), "Mine.around().before must be changes"),
        (declare(ResidualSpec(alpha=None)), "Mine.around().alpha must be a number, GROWING"),
        (declare(name=None), "has no name"),
    ],
)
def test_methods_that_return_something_else_are_refused(scheme, why):
    with pytest.raises(InputError) as e:
        nfrs.TransformerConfig(residual=scheme, vocab_size=11).to_json()
    assert why in str(e.value)


def test_data_of_another_size_is_refused(tmp_path):
    config = nfrs.TransformerConfig(residual=DeepNorm(), vocab_size=11, d_model=8, d_ff=12, heads=2, decoder_layers=2)
    read = nfrs.TransformerConfig.from_json(config.to_json())
    assert read.to_json() == config.to_json()
    with pytest.raises(InputError, match="declares 2 layers of the decoder, and this model has 3: declare it again"):
        nfrs.Transformer(read.replace(decoder_layers=3))
    nfrs.Transformer(config.replace(decoder_layers=3))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("none.py:A", "there is no file"),
        ("FILE:Nope", "has no class Nope of normformer_rs.Scheme; it has ['TwoNorms']"),
    ],
)
def test_files_without_the_class_are_refused(tmp_path, text, why):
    (tmp_path / "mine.py").write_text(FILE)
    with pytest.raises(InputError) as e:
        nfrs.TransformerConfig(residual=text.replace("FILE", str(tmp_path / "mine.py")))
    assert why in str(e.value)


NONSENSE = {
    "a side": ResidualSpec(alpha=Learned("g", 1.0, 8.0)),
    "a value": ResidualSpec(alpha=Learned("g", None)),
    "a text": ResidualSpec(alpha=Learned("g", "1")),
    "a list": ResidualSpec(alpha=Learned("g", [1.0, None], 2)),
    "huge": ResidualSpec(alpha=10**400),
    "beyond float32": ResidualSpec(alpha=1e300),
    "a value beyond float32": ResidualSpec(alpha=Learned("g", 1e300)),
    "a std beyond float32": ResidualSpec(alpha=Learned("g", Normal(1e300))),
    "a start beyond float32": ResidualSpec(after=norm("n", start=1e300)),
    "one name for a parameter and a norm": ResidualSpec(before=scale(Learned("n", 1.0)), after=norm("n")),
    "a huge side": ResidualSpec(alpha=Learned("g", 1.0, 10**400)),
    "a huge value": ResidualSpec(alpha=Learned("g", 10**400)),
    "a name": ResidualSpec(alpha=Learned(5, 1.0)),
    "growing": ResidualSpec(alpha="grows"),
    "temperature": ResidualSpec(alpha=sigmoid(Learned("g", 1.0), "x")),
    "a curve": ResidualSpec(alpha=sigmoid(5)),
    "times": ResidualSpec(before=Change("times", "x")),
    "unit": ResidualSpec(before=Change("unit", None)),
    "keep": ResidualSpec(before=keep(5)),
    "mix": ResidualSpec(before=Change("mix", 5)),
    "mixed": ResidualSpec(before=mix("x", None)),
    "a change": ResidualSpec(before=Change("nothing", 5)),
    "width": ResidualSpec(before=norm("n", 8.5)),
    "start": ResidualSpec(before=norm("n", start=None)),
    "scale": ResidualSpec(after=scale(5)),
    "streams": ResidualSpec(streams=5),
    "a stream": ResidualSpec(streams=[5]),
    "mixing": ResidualSpec(mixing=5),
    "hyper": ResidualSpec(mixing=HyperConnection("x", 1.0)),
    "gates": ResidualSpec(mixing=HyperConnection(2, Joint(None, None, None))),
}
STACKS = {
    "stack streams": StackSpec(streams=5),
    "stack stream": StackSpec(streams=[5]),
    "combine": StackSpec(combine=5),
    "weight": StackSpec(combine=Combine(5)),
    "norms": StackSpec(combine=Combine(Learned("combine.weight", 0.0, (7, 7)), norms=5)),
    "growth": StackSpec(growth=5),
    "steps": StackSpec(growth=Growth("x")),
    "huge steps": StackSpec(growth=Growth(10**400)),
    "curve": StackSpec(growth=Growth(5, None)),
    "end": StackSpec(end=Change("norm", 5)),
}


@pytest.mark.parametrize("what", [*NONSENSE, *STACKS, "has_biases", "init", "source"])
def test_nonsense_is_refused_in_modules_loop_and_swaps(what):
    scheme = declare(
        NONSENSE.get(what), stack=STACKS.get(what), **({} if what in {**NONSENSE, **STACKS} else {what: 5})
    )
    layer = {"d_model": 8, "nhead": 2, "dim_feedforward": 12, "batch_first": True}
    with pytest.raises(InputError):
        nfrs.Transformer(nfrs.TransformerConfig(residual=scheme, vocab_size=11, d_model=8, d_ff=12, heads=2))
    with pytest.raises(InputError):
        nfrs.nn.TransformerEncoder(nfrs.nn.TransformerEncoderLayer(**layer, residual=scheme), 2)(torch.ones(1, 3, 8))
    with pytest.raises(InputError):
        model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(**layer), 2)
        nfrs.swap_residuals(model, scheme, init=None)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"alpha": {"constant": 1e300}}, "a gain is 1e300: it must be finite in float32"),
        ({"alpha": {"learned": {"name": "g1", "shape": [1], "value": -1e39}}}, '"g1" starts at numbers'),
        ({"after": [{"times": 1e39}]}, "has the number 1e39: it must be finite in float32"),
        ({"after": [{"norm": {"name": "n1", "width": 8, "start": 1e39}}]}, 'the norm "n1" starts at 1e39'),
    ],
    ids=str,
)
def test_data_beyond_float32_is_refused(told, said):
    plain = declare(ResidualSpec(alpha=2.0))
    whole = json.loads(nfrs.TransformerConfig(residual=plain, vocab_size=11, d_model=8, d_ff=12, heads=2).to_json())
    whole["residual"]["stacks"]["decoder"]["layers"][0]["sublayers"][0]["around"] |= told
    with pytest.raises(InputError, match=re.escape(said)):
        nfrs.Transformer(nfrs.TransformerConfig.from_json(json.dumps(whole)))


@pytest.mark.parametrize(("seed", "count"), [(1, 100), pytest.param(2, 300, marks=pytest.mark.long)])
@pytest.mark.parametrize("own", [ValueResidual(), Mhc(), Dense()], ids=str)
@pytest.mark.one_in(test=3, all=2)
def test_declarations_that_are_mutated_are_taken_or_refused(own, seed, count):
    shape = {"vocab_size": 11, "d_model": 8, "d_ff": 12, "heads": 2, "encoder_layers": 1, "decoder_layers": 2}
    whole = json.loads(nfrs.TransformerConfig(**shape, residual=own).to_json())
    for scheme in mutations(whole["residual"], seed, count):
        with contextlib.suppress(InputError):
            read = nfrs.TransformerConfig.from_json(json.dumps({**whole, "residual": scheme}))
            nfrs.Transformer(read, seed=1)
            nfrs.nn.TransformerEncoderLayer(8, 2, 12, residual=read.residual)


class NormedInTheEncoder(Scheme):
    """Norms on queries and keys of the encoder alone."""

    name = "normed-in-the-encoder"

    def around(self, place):
        return ResidualSpec(before=norm())

    def inside(self, place):
        is_there = place.stack == "encoder" and place.sublayer == "self-attention"
        return {"query": norm("q_norm"), "key": norm("k_norm")} if is_there else {}


def test_what_a_scheme_does_in_one_stack_is_refused_as_in_both():
    given = {"vocab_size": 20, "d_model": 16, "d_ff": 24, "heads": 4, "residual": NormedInTheEncoder}
    nfrs.Transformer(nfrs.TransformerConfig(**given), seed=1)
    with pytest.raises(nfrs.InputError, match="has norms on queries and keys of its own: leave qk_norm out"):
        nfrs.Transformer(nfrs.TransformerConfig(**given, qk_norm=True), seed=1)
    with pytest.raises(nfrs.InputError, match="has norms on queries and keys"):
        nfrs.Transformer(nfrs.TransformerConfig(**given, norm="batchnorm"), seed=1)
