"""Swapped models of the zoo against a second route, in f64: outputs, and the gradients of all parameters."""

import copy
import functools

import pytest
import torch
from test_zoo import build, quiet, swap  # noqa: F401  a fixture
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import MODELS, UNSEEN

import normformer_rs as nfrs
from normformer_rs import InputError
from normformer_rs.surgery.block_residual import BlockResidual
from normformer_rs.surgery.proof import OwnForm
from normformer_rs.surgery.record import tensors_in
from normformer_rs.surgery.second_route import Recomputed
from normformer_rs.surgery.stack_residual import StackResidual

pytestmark = pytest.mark.filterwarnings("ignore")
SCHEMES = [entry["name"] for entry in nfrs.tables()["residuals"]]
NAMES = [*MODELS, *UNSEEN]
ERROR = 1e-9
FAR = 1e4
"""Numbers from here on are masks."""


class InDouble(TorchDispatchMode):
    """Conversions to shorter types give f64: many models norm in f32."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in (torch.float32, torch.float16, torch.bfloat16):
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def drawn(parameters, size):
    """Adds random numbers, so that no gain is 1 and no two are alike."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in parameters:
            p.add_(size * torch.randn(p.shape, generator=generator, dtype=p.dtype))


def run(call):
    """The outputs, with gradients of one weighted sum of them."""
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(1)
    with InDouble():
        found = [t for t in tensors_in(call()) if t.is_floating_point()]
    weighted = [t * torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in found if t.requires_grad]
    sum(t.where(t.abs() < FAR, 0).sum() for t in weighted).backward()
    return found


def gap(x, y, least):
    """The largest difference, relative to the largest number, or to `least`."""
    there = torch.isfinite(y) & (y.abs() < FAR)
    return ((x - y)[there].abs().max() / y[there].abs().max().clamp_min(least)).item() if there.any() else 0.0


def compare(name, scheme, spoil=None):
    """The largest differences of outputs and gradients; None: the swap is refused, or the blocks are torch.nn's, which
    become layers of `normformer_rs.nn`."""
    model, inputs = build(name)
    drawn([p for p in model.parameters() if p.dim() == 1], 0.1)
    base = copy.deepcopy(model)
    try:
        swap(model, scheme, inputs)
    except InputError:
        return None
    made = [m for m in model.modules() if isinstance(m, BlockResidual | StackResidual)]
    if not made:
        return None
    drawn([p for m in made for p in m.parameters()], 0.3)
    model.double(), base.double()  # Switch makes its routers float32 as it runs
    for m in made:
        if m.growth is not None:
            m.t.fill_(7)
    now = dict(model.named_parameters())
    with torch.no_grad():
        for path, p in base.named_parameters():
            p.copy_(now.get(path, p))  # r-fixup holds biases at zero
    expected = run(lambda: Recomputed(base, model).run(lambda one: one(**inputs)))
    ours = {path: p.grad for path, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for path, p in base.named_parameters():
        if p.grad is not None and (path not in now or now[path].requires_grad):
            ours[path] = ours.get(path, 0) + p.grad
    if spoil is not None:
        spoil(made)
    outputs = run(lambda: model(**inputs))
    assert [t.shape for t in outputs] == [t.shape for t in expected]
    gradients = {path: p.grad for path, p in model.named_parameters() if p.grad is not None}
    top = max((g.abs().max().item() for g in ours.values() if g.numel()), default=0.0)
    gaps = [0.0]
    for path in ours.keys() | gradients.keys():
        pair = gradients.get(path), ours.get(path)
        g, e = (torch.zeros_like(next(p for p in pair if p is not None)) if one is None else one for one in pair)
        gaps.append(gap(g, e, top * 1e-2) if g.numel() else 0.0)
    return max(gap(x, y, 1e-3) for x, y in zip(outputs, expected)), max(gaps)


def check(name, schemes):
    for scheme in schemes:
        found = compare(name, scheme)
        assert found is None or max(found) < ERROR, (scheme, found)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.one_in(test=60, all=12)
def test_a_swap_is_what_a_second_route_computes(name):
    """Two schemes for each model, in turn."""
    turn = NAMES.index(name)
    check(name, [SCHEMES[(turn + i * 13) % len(SCHEMES)] for i in range(2)])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.long
def test_every_scheme_is_what_a_second_route_computes(name):
    check(name, SCHEMES)


@pytest.mark.parametrize("scheme", ["subln", "hybridnorm"])
def test_a_schemes_own_norms_in_a_sublayer_are_no_hidden_ones(scheme):
    """OLMo2 has no norm before its sublayers; the scheme's norms inside make them independent of their input's size."""
    assert max(compare("OLMo2", scheme)) < ERROR


def test_a_number_on_the_branch_goes_before_the_scheme_norms_it():
    """Granite multiplies its branches by a number."""
    assert max(compare("Granite", "sandwich")) < ERROR


def test_a_sublayer_that_reads_past_its_norm_gets_the_schemes_input_through_it():
    """The last layer's bias takes the shape of the stream."""
    assert max(compare("GPTNeoX, Japanese", "r-fixup")) < ERROR


def test_a_norm_that_runs_before_the_blocks_and_after_them():
    """NanoChat norms its embeddings with its last norm: no early end, and no scheme without a last norm."""
    assert max(compare("NanoChat", "peri-ln")) < ERROR
    assert compare("NanoChat", "r-fixup") is None


def test_a_list_that_runs_once_for_each_layer_has_no_end():
    """ALBERT calls its list of one block for each layer: a norm after the stack would run after every layer."""
    assert max(compare("ALBERT", "deepnorm")) < ERROR
    for scheme in ("prenorm", "resi-dual", "denseformer"):
        assert compare("ALBERT", scheme) is None


@pytest.mark.parametrize("name", ["two texts", "two texts, two lists", "two texts, one loop", "two texts, one block"])
def test_an_encoder_of_two_texts_has_the_depth_of_one(name):
    model, inputs = build(name)
    swap(model, "deepnorm", inputs)
    depths = {m.place.depth for m in model.modules() if isinstance(m, BlockResidual)}
    assert depths == {1 if "one block" in name else 3}
    assert max(compare(name, "deepnorm")) < ERROR
    assert len({m for m in model.modules() if isinstance(m, StackResidual)}) == 1
    assert "one" not in name or compare(name, "admin") is None  # the second text would set its gains anew
    for scheme in ("peri-ln", "denseformer", "mhc"):  # they have a begin, an end, or streams
        found = compare(name, scheme)
        assert found is None if "one" in name else max(found) < ERROR, scheme


def test_a_block_that_runs_more_often_on_one_text_is_refused():
    model, inputs = build("two texts, uneven")
    with pytest.raises(InputError, match="4 calls in one run belong to 2 passes of different lengths"):
        swap(model, "deepnorm", inputs)


def test_a_stream_added_to_its_branch_in_place():
    assert max(compare("in place, onto the branch", "deepnorm")) < ERROR


def refused(monkeypatch, name, scheme, owner, method, wrong, **options):
    """The message of a swap during which `wrong(original, *args)` stands for a method of the swapped blocks. It stays
    away in the identity swap, which comes before."""
    model, inputs = build(name)
    before, kinds = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    right = getattr(owner, method)

    def spoilt(self, *args):
        is_own = isinstance(self.place.config.residual, OwnForm)
        return right(self, *args) if is_own else wrong(functools.partial(right, self), *args)

    monkeypatch.setattr(owner, method, spoilt)
    with pytest.raises(InputError, match="does not compute the scheme's equations") as refusal:
        nfrs.swap_residuals(model, scheme, init=None, example=inputs, **options)
    assert [type(m) for m in model.modules()] == kinds
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())
    return str(refusal.value)


def test_a_swap_whose_blocks_compute_another_scheme_is_refused(monkeypatch):
    wrong = [
        ("_closed", lambda right, i, streams, f, *rest: right(i, streams, f * 1.001, *rest), "outputs differ"),
        ("_closed", lambda right, i, streams, f, *rest: right(i, streams, bent(f), *rest), "gradients differ"),
        ("read", lambda right, i, streams, norm: right(i, streams, norm) + (0.01 if i else 0), "outputs differ"),
    ]
    for method, change, message in wrong:
        with monkeypatch.context() as patch:
            assert message in refused(patch, "GPT2", "deepnorm", BlockResidual, method, change)
        with monkeypatch.context() as patch:  # a stack of more layers than there are blocks
            assert message in refused(patch, "GPT2", "deepnorm", BlockResidual, method, change, depth=24)


def bent(f):
    """f, with another gradient."""
    return f + (f - f.detach()) * 0.01


def test_a_swap_whose_stack_ends_wrong_is_refused(monkeypatch):
    def wrong(right, streams):
        return right(streams).flip(-1)

    assert "outputs differ" in refused(monkeypatch, "GPT2", "dlcl", StackResidual, "_finish", wrong)


def test_rounding_of_single_precision_is_no_refusal():
    """MobileViT's batch norms over two rows of a batch divide by small spreads: in f32 gradients differ by 2e-4."""
    model, inputs = MODELS["MobileViT"]()
    assert len(nfrs.swap_residuals(model, "deepnorm", init=None, example=inputs))


def test_the_proof_leaves_parameters_and_buffers_alone():
    model, inputs = build("GPT2")
    held = {name: (t, t._version) for name, t in (*model.named_parameters(), *model.named_buffers())}
    swap(model, "branchnorm", inputs)
    now = dict((*model.named_parameters(), *model.named_buffers()))
    assert all(now[name] is t and t._version == version for name, (t, version) in held.items() if name in now)
    assert {m.t.item() for m in model.modules() if getattr(m, "growth", None) is not None} == {1}


def test_a_wrong_factor_is_seen():
    def spoil(made):
        made[0].sublayers = tuple(s._replace(alpha=s.alpha * 1.0001) for s in made[0].sublayers)

    assert max(compare("GPT2", "deepnorm")) < ERROR
    assert max(compare("GPT2", "deepnorm", spoil)) > 1e-6
