"""t of growing schemes and running statistics in averages of weights, by the ways in which libraries take them."""

import copy
import io
import itertools
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_avg_fn

import normformer_rs as nfrs
from normformer_rs import nn as nfnn

D, STEPS = 8, 6


def layer(**options):
    return nfnn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True, **options)


GROWING = {
    "branchnorm": lambda: nfnn.TransformerEncoder(layer(residual="branchnorm", branchnorm_steps=40), 2),
    "prores": lambda: nfnn.TransformerEncoder(layer(residual="prores", prores_steps=20), 2),
    "residual": lambda: nfnn.Residual(nn.Linear(D, D), D, scheme="branchnorm", branchnorm_steps=40),
    "alone": lambda: nn.Sequential(layer(residual="branchnorm", branchnorm_steps=40, encoder_layers=1)),
}
NORMS = {
    name: lambda name=name: nn.Sequential(nn.Linear(D, D), nfnn.norm_class(name)(D), nn.Linear(D, D))
    for name in ("powernorm", "powernorm-v", "batchnorm", "prepbn")
}


def tensors(model):
    return itertools.chain(model.parameters(), model.buffers())


class ByTorch:
    def __init__(self, model, **how):
        self.average = AveragedModel(model, **how)
        self.update, self.module = self.average.update_parameters, self.average.module


class ByHand:
    """A deep copy; `update` averages tensors as its subclass says."""

    def __init__(self, model):
        self.module = copy.deepcopy(model).requires_grad_(False)


class Parameters(ByHand):
    def update(self, model):
        with torch.no_grad():
            for mine, its in zip(self.module.parameters(), model.parameters()):
                mine.lerp_(its, 0.1)


class Data(ByHand):
    """Past version counters, floating point alone, as ema-pytorch does."""

    def update(self, model):
        for mine, its in zip(tensors(self.module), tensors(model)):
            if mine.is_floating_point():
                mine.data.lerp_(its.data, 0.1)


class States(ByHand):
    """Every tensor of the state, as timm's ModelEmaV2 does."""

    def update(self, model):
        with torch.no_grad():
            for mine, its in zip(self.module.state_dict().values(), model.state_dict().values()):
                mine.copy_(0.9 * mine + 0.1 * its)


class Shadow:
    """Of parameters, put into the model for an evaluation, as torch_ema and diffusers do."""

    def __init__(self, model):
        self.module, self.shadow = model, [p.detach().clone() for p in model.parameters()]

    def update(self, model):
        for mine, its in zip(self.shadow, model.parameters()):
            mine.lerp_(its.detach(), 0.1)

    def swap(self):
        for mine, its in zip(self.shadow, self.module.parameters()):
            mine[:], its.data[:] = its.data.clone(), mine.clone()


class Swapped(ByTorch):
    """An average with buffers, put into the model for an evaluation, as Lightning's WeightAveraging does."""

    def __init__(self, model):
        super().__init__(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        self.copy, self.module = self.module, model

    def swap(self):
        for mine, its in zip(tensors(self.copy), tensors(self.module)):
            kept = mine.data.clone()
            mine.data.copy_(its.data), its.data.copy_(kept)


WAYS = {
    "ema": lambda m: ByTorch(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "ema with buffers": lambda m: ByTorch(m, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
    "swa": lambda m: ByTorch(m, avg_fn=get_swa_avg_fn()),
    "swa by a function with buffers": lambda m: ByTorch(
        m, avg_fn=lambda a, b, n: a + ((b - a) / (n + 1)).to(a.dtype), multi_avg_fn=None, use_buffers=True
    ),
    "parameters": Parameters,
    "data": Data,
    "states": States,
    "shadow": Shadow,
    "swapped": Swapped,
}


def trained(model, *averages, steps=STEPS):
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    for _ in range(steps):
        optimizer.zero_grad()
        model.train()(torch.randn(4, 3, D)).square().mean().backward()
        optimizer.step()
        for average in averages:
            average.update(model)
    return model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", GROWING)
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.one_in(test=3, all=3)
def test_an_average_of_a_growing_scheme_has_the_models_t(kind, way):
    torch.manual_seed(0)
    model = GROWING[kind]()
    average = WAYS[way](model)
    trained(model, average)
    x = torch.randn(4, 3, D)
    if hasattr(average, "swap"):
        average.swap()
    y = average.module.eval()(x)
    nfnn.set_num_updates(average.module, STEPS + 1)
    torch.testing.assert_close(average.module(x), y, rtol=0, atol=0)
    if hasattr(average, "swap"):
        average.swap()
        trained(model, steps=1)
        assert {int(b) for b in model.buffers()} == {STEPS + 2}


@pytest.mark.parametrize("way", ["ema with buffers", "parameters", "data", "states"])
def test_the_state_and_copies_of_an_average_have_the_models_t(way):
    model = GROWING["branchnorm"]()
    average = WAYS[way](model)
    trained(model, average)
    twins = copy.deepcopy(average.module), pickle.loads(pickle.dumps(average.module)), average.module.double()
    saved = io.BytesIO()
    torch.save(average.module.state_dict(), saved)
    saved.seek(0)
    assert torch.load(saved)["t"].item() == STEPS + 1
    for twin in twins:
        twin.eval()(torch.randn(4, 3, D, dtype=twin.layers[0].linear1.weight.dtype))
    assert [twin.t.item() for twin in twins] == [STEPS + 1] * 3


def test_the_cores_model_has_its_t_in_averages():
    shape = {"d_model": D, "d_ff": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    model = nfrs.Transformer(nfrs.TransformerConfig(vocab_size=9, residual="branchnorm", **shape))
    ids, average = torch.tensor([[5, 6, 2]]), Parameters(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(ids, ids).sum().backward()
        optimizer.step()
        average.update(model)
    average.module.eval()(ids, ids)
    assert [average.module.encoder.t.item(), average.module.decoder.t.item()] == [4, 4]


def test_copies_that_are_no_averages_keep_their_t():
    model = trained(GROWING["branchnorm"](), steps=3)
    snapshot, half, loaded, own, rival = (copy.deepcopy(model).eval() for _ in range(5))
    half.half()
    trained(model, steps=2)
    loaded.load_state_dict(model.state_dict())
    trained(own, steps=4)
    trained(model, steps=2)
    with torch.no_grad():
        rival.layers[0].self_attn.in_proj_weight.add_(1)
    nfnn.set_num_updates(rival, 50)
    x = torch.randn(4, 3, D)
    for m in (snapshot, loaded, own.eval(), rival):
        m(x)
    half(x.half())
    assert [m.t.item() for m in (snapshot, half, loaded, own, rival, model)] == [4, 4, 6, 8, 50, 8]


def test_templates_of_layers_hand_on_no_t():
    template = layer(residual="branchnorm", branchnorm_steps=40, encoder_layers=1)
    twin = copy.deepcopy(template)
    for p in twin.parameters():
        nn.init.normal_(p)
    twin.t.fill_(30)  # as loaders of checkpoints write it
    twin.eval()(torch.randn(4, 3, D))
    assert twin.t.item() == 30


@pytest.mark.parametrize("way", ["ema", "ema with buffers", "parameters", "data", "states"])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.one_in(test=2, all=3)
def test_an_average_of_running_norms_has_statistics(name, way):
    torch.manual_seed(0)
    model = NORMS[name]()
    average = WAYS[way](model)
    trained(model, average)
    average.module.eval()(torch.randn(4, 3, D))
    mine, its = dict(average.module.named_buffers()), dict(model.named_buffers())
    for key in its:
        first = dict(NORMS[name]().named_buffers())[key]
        moved = (its[key] - first).abs().max()
        if its[key].is_floating_point():  # the model's, or their average
            assert (mine[key] - its[key]).abs().max() < 0.9 * moved or moved == 0, key
        else:
            assert torch.equal(mine[key], its[key]), key
    if way in ("ema", "parameters"):
        assert all(torch.equal(mine[key], its[key]) for key in its)


def test_a_merged_state_has_a_whole_t_or_is_refused():
    one, other, model = (trained(GROWING["branchnorm"](), steps=2) for _ in range(3))

    def mean(*states, weights):
        return {k: sum(w * s[k] for w, s in zip(weights, states)) for k in states[0]}

    model.load_state_dict(mean(one.state_dict(), other.state_dict(), weights=(0.7, 0.3)))
    assert model.t.item() == 3
    trained(one, steps=1)
    with pytest.raises(nfrs.InputError, match=r"t must be the number of an update.*3\.5"):
        model.load_state_dict(mean(one.state_dict(), other.state_dict(), weights=(0.5, 0.5)))


@pytest.mark.parametrize("writes", [1, 3])
@pytest.mark.filterwarnings("error::UserWarning")
def test_writes_between_steps_are_no_updates(writes):
    model = GROWING["branchnorm"]()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(12):
        for _ in range(writes):  # sharpness-aware, adversarial
            model(torch.randn(4, 3, D)).sum().backward()
            with torch.no_grad():
                [p.add_(0.05 * p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            [p.clamp_(-1, 1) for p in model.parameters()]
    assert model.t.item() == 13


def test_a_loop_without_an_optimizer_is_warned_once():
    model = GROWING["branchnorm"]()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(30):
            model(torch.randn(4, 3, D)).sum().backward()
            for p in model.parameters():
                p.data.sub_(0.001 * p.grad)  # moves no version counter
    assert len(said) == 1 and "set_num_updates" in str(said[0].message)
