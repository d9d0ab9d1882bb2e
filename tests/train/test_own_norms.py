"""A norm that its user declares in Python: the same as the table's where it has one, in every place."""

import contextlib
import copy
import json
import subprocess
import sys
from typing import ClassVar

import pytest
import torch
from torch import nn
from train_support import TINY, fit, losses, weights

import normformer_rs as nfrs
from mutations import mutations
from normformer_rs import norms
from normformer_rs.errors import InputError
from normformer_rs.norms import Norm, Parameter
from normformer_rs.schemes import Normal


class OwnScaleNorm(Norm):
    name = "own-scalenorm"
    parameters, options = {"weight": Parameter(lambda width: width**0.5, shape="one")}, {"eps": 1e-5}

    def normalize(self, x, weight, eps):
        return weight * x / x.norm(dim=-1, keepdim=True).clamp_min(eps)


class NgptNorm(Norm):
    """(s·√d)⊙x/‖x‖, s = 1/√d at the start; zero-centred by half of it, to use both numbers."""

    name = "ngpt-like"
    parameters: ClassVar = {
        "weight": Parameter(lambda width: width**-0.5 - 0.25, offset=0.25, factor=4.0),
        "shift": Parameter(0.0),
    }

    def normalize(self, x, weight, shift):
        return weight * x / x.norm(dim=-1, keepdim=True) + shift


class OwnGatedNorm(Norm):
    """gated-rmsnorm: matrices whose size an option says, drawn from N(0, 0.02²)."""

    name = "own-gated"
    parameters: ClassVar = {
        "weight": Parameter(),
        "gate_down": Parameter(Normal(0.02), ("rank", "width")),
        "gate_up": Parameter(Normal(0.02), ("width", "rank")),
    }
    options: ClassVar = {"eps": 1e-5, "rank": 16}

    def normalize(self, x, weight, down, up, eps, rank):
        n = weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        return n * torch.sigmoid(nn.functional.silu(n @ down.T) @ up.T)


def config(norm, **options):
    return nfrs.TransformerConfig(**{"vocab_size": 11, **TINY, "norm": norm, **options})


@pytest.mark.parametrize("residual", ["prenorm", "postnorm", "sandwich", "hybridnorm"])
def test_logits_and_gradients_are_scalenorms(residual):
    source, target = torch.randint(4, 11, (2, 5)), torch.randint(4, 11, (2, 4))
    found = []
    for norm in (OwnScaleNorm(), "scalenorm"):
        model = nfrs.Transformer(config(norm, residual=residual), seed=3).double()
        logits = model(source, target)
        found.append([logits, *torch.autograd.grad(logits.square().sum(), [*model.parameters()])])
    for own, table in zip(*found, strict=True):
        torch.testing.assert_close(own, table, rtol=1e-12, atol=1e-12)


def test_matrices_are_the_tables(tmp_path, corpus):
    """Drawn alike, trained alike; a run of it is read again, and modules of both have equal parameters."""
    source, target = torch.randint(4, 11, (2, 5)), torch.randint(4, 11, (2, 4))
    own, table = (nfrs.Transformer(config(norm), seed=3) for norm in (OwnGatedNorm(rank=3), "gated-rmsnorm"))
    assert own.state_dict()["encoder.layers.0.norm1.gate_down"].shape == (3, TINY["d_model"])
    table = nfrs.Transformer(config("gated-rmsnorm", gated_rmsnorm_rank=3), seed=3)
    for name, value in own.state_dict().items():
        assert torch.equal(value, table.state_dict()[name]), name
    found = []
    for model in (own.double(), table.double()):
        logits = model(source, target)
        found.append([logits, *torch.autograd.grad(logits.square().sum(), [*model.parameters()])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    fit(tmp_path / "own", corpus, {"norm": OwnGatedNorm(rank=3)}, {"updates": 2})
    back = nfrs.Transformer.from_checkpoint(tmp_path / "own")
    assert torch.equal(back.state_dict()["decoder.norm.gate_up"], weights(tmp_path / "own")["decoder.norm.gate_up"])
    module = OwnGatedNorm(rank=3)(8)
    assert [tuple(p.shape) for p in module.parameters()] == [(8,), (3, 8), (8, 3)] and module.gate_up.std() < 0.05
    with pytest.raises(InputError, match=r"gate_down has the shape \(.rank.,\); valid"):
        type("Wrong", (OwnGatedNorm,), {"parameters": {"gate_down": Parameter(shape=("rank",))}})()(8)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.one_in(all=2)
def test_ten_losses_are_scalenorms(tmp_path, corpus, recompute):
    training = {"activation_checkpointing": recompute, "lr": 1e-3}
    for name, norm in (("own", OwnScaleNorm()), ("table", "scalenorm")):
        fit(tmp_path / name, corpus, {"norm": norm}, training)
    own, table = losses(tmp_path / "own"), losses(tmp_path / "table")
    assert own.keys() == table.keys() and len(own) == 10
    assert [own[k] for k in own] == pytest.approx([table[k] for k in table], rel=2e-5)


@pytest.mark.full
def test_a_transformed_parameter_trains_and_comes_back(tmp_path, corpus):
    fit(tmp_path / "run", corpus, {"norm": NgptNorm()}, {"updates": 3})
    saved = json.loads((tmp_path / "run" / "config.json").read_text())["model"]["norm"]
    assert saved["name"] == "ngpt-like" and saved["parameters"][0]["factor"] == 4.0
    model = nfrs.Transformer.from_checkpoint(tmp_path / "run", "last")
    assert model.config.norm == NgptNorm()
    fresh = nfrs.Transformer(config(NgptNorm()))
    start = dict(fresh.named_parameters())["encoder.layers.0.norm1.weight"]
    assert torch.equal(start, torch.full((16,), 16**-0.5 - 0.25)) and "decoder.norm.shift" in weights(tmp_path / "run")
    assert len(nfrs.translate(tmp_path / "run", ["1 2"])) == 1


def test_another_class_of_the_name_leaves_models_as_they_are(tmp_path, corpus):
    fit(tmp_path / "run", corpus, {"norm": NgptNorm()}, {"updates": 1})
    model = nfrs.Transformer(config(NgptNorm()), seed=1)
    tokens = torch.randint(4, 11, (2, 5))
    before = model(tokens, tokens)

    class Other(Norm):
        name, parameters = NgptNorm.name, {"weight": Parameter()}

        def normalize(self, x, weight):
            return weight * x

    assert torch.equal(model(tokens, tokens), before)
    assert type(nfrs.Transformer.from_checkpoint(tmp_path / "run", "last").config.norm) is NgptNorm
    assert type(nfrs.Transformer(config(Other())).config.norm) is Other
    data = {**json.loads((tmp_path / "run" / "config.json").read_text())["model"]["norm"], "options": {"eps": 1e-5}}
    with pytest.raises(InputError, match="learns weight, shift and has the options eps"):
        norms.declared(data)


FAILS = """
from normformer_rs.norms import Norm, Parameter
class Fails(Norm):
    name, parameters = "fails", {"weight": Parameter()}
    def normalize(self, x, weight):
        raise ValueError("mine alone")
"""


@pytest.mark.full
def test_a_norm_that_raises_ends_a_run_with_its_message(tmp_path, corpus):
    """The process ends, too: the exception is dropped while the interpreter still runs, whose lock that needs."""
    (tmp_path / "fails.py").write_text(FAILS)
    data = [word for key, value in corpus.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    sizes = "--d-model 16 --d-ff 24 --heads 2 --encoder-layers 1 --decoder-layers 1 --updates 2 --no-bpe --no-progress"
    words = [sys.executable, "-m", "normformer_rs", "train", *data, *sizes.split(), "--output", tmp_path / "run"]
    words += ["--norm", f"{tmp_path / 'fails.py'}:Fails"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "mine alone" in done.stderr, done.stderr


def test_modules_and_swaps():
    x = torch.randn(2, 5, 16)
    made = []
    for norm in (OwnScaleNorm(), "scalenorm"):
        torch.manual_seed(0)
        layer = nfrs.nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True, norm=norm, residual="sandwich")
        made.append(nfrs.nn.TransformerEncoder(layer, 2)(x))
    torch.testing.assert_close(*made)
    model = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    swaps = nfrs.swap_norms(model, OwnScaleNorm)
    assert len(swaps) >= 2 and isinstance(model.norm1, nfrs.nn.norm_class(OwnScaleNorm())(16).__class__)
    swaps.undo()
    assert type(model.norm1) is nn.LayerNorm


def test_a_module_resets_exports_and_refuses():
    module = NgptNorm()(16)
    with torch.no_grad():
        module.weight.fill_(torch.nan)
    module.reset_parameters()
    x = torch.randn(3, 16)
    torch.testing.assert_close(module(x), 4 * 16**-0.5 * x / x.norm(dim=-1, keepdim=True))
    program = torch.export.export(module, (x,))
    assert torch.equal(program.module()(x), module(x))
    with pytest.raises(InputError, match=r"x must end in \(16,\)"):
        module(torch.ones(3, 4))


FILE = """
import normformer_rs as nfrs

class Mine(nfrs.Norm):
    name, parameters = "mine", {"weight": nfrs.norms.Parameter()}

    def normalize(self, x, weight):
        return weight * x / (1 + x.abs().mean(-1, keepdim=True))
"""


@pytest.mark.full
def test_the_command_line_takes_a_file_and_says_when_it_is_missing(tmp_path, corpus):
    (tmp_path / "mine.py").write_text(FILE)
    command = [sys.executable, "-m", "normformer_rs", "train", "--output", str(tmp_path / "run"), "--no-progress"]
    for name, value in {**corpus, **TINY, "updates": 2, "norm": f"{tmp_path / 'mine.py'}:Mine"}.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    done = subprocess.run([*command, "--no-bpe"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for code in ("Transformer.from_checkpoint({run!r}, 'last')", "translate({run!r}, ['1'])"):
        code = "import normformer_rs as nfrs; nfrs." + code.format(run=str(tmp_path / "run"))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode != 0 and "import the module that declares it" in done.stderr, done.stderr


def declare(**body):
    return type("Mine", (Norm,), {"name": "mine", "normalize": lambda self, x, *p: x, **body})()


@pytest.mark.parametrize(
    ("norm", "why"),
    [
        (declare(name="layernorm"), "the name is one of this package's"),
        (declare(name="a b"), "made of letters"),
        (declare(parameters={"a b": Parameter()}), "is no parameter's name"),
        (declare(parameters={f"p{i}": Parameter() for i in range(9)}), "at most 8"),
        (declare(parameters={"p": Parameter(shape="column")}), "has the shape 'column'"),
        (declare(parameters={"p": Parameter(factor=0.0)}), "a factor of 0"),
        (declare(normalize=lambda self, x: x[..., :1]), "must give y of x's shape"),
    ],
)
def test_wrong_declarations_are_refused(norm, why):
    with pytest.raises((InputError, RuntimeError)) as e:
        nfrs.Transformer(config(norm))(torch.tensor([[5]]), torch.tensor([[5]]))
    assert why in str(e.value)


def test_wrong_options_are_refused():
    with pytest.raises(InputError, match="has no option 'p'; it has eps"):
        OwnScaleNorm(p=3)
    with pytest.raises(InputError, match="eps must be a finite number"):
        OwnScaleNorm(eps="small")
    assert OwnScaleNorm(eps=0.1) != OwnScaleNorm() and repr(OwnScaleNorm(eps=0.1)) == "OwnScaleNorm(eps=0.1)"


# A class is itself.


def scaled(factor, name="namesake", module=__name__):
    """A class of the name whose formula has this factor."""

    def normalize(self, x, weight, eps):
        return factor * weight * x / (x.abs().amax(-1, keepdim=True) + eps)

    body = {"name": name, "parameters": {"weight": Parameter()}, "options": {"eps": 1e-5}, "normalize": normalize}
    return type("Namesake", (Norm,), {**body, "__module__": module})


def logits(model):
    tokens = torch.arange(4, 9)[None]
    with torch.no_grad():
        return model.eval()(tokens, tokens)


def test_a_model_keeps_its_class_and_a_later_one_its_own():
    one, other = scaled(1.0), None
    model = nfrs.Transformer(config(one()), seed=1)
    before = logits(model)
    other = scaled(100.0)
    assert torch.equal(logits(model), before)
    assert torch.equal(logits(nfrs.Transformer(config(one()), seed=1)), before)
    assert not torch.equal(logits(nfrs.Transformer(config(other()), seed=1)), before)
    copied = copy.deepcopy(model)
    assert torch.equal(logits(copied), before) and type(copied.config.norm) is one
    x = torch.randn(2, 16)
    torch.testing.assert_close(other()(16)(x), 100 * one()(16)(x))


@pytest.mark.full
def test_files_name_no_class_and_the_user_says_which(tmp_path, corpus):
    one = scaled(1.0, "of-two")
    fit(tmp_path / "run", corpus, {"norm": one()}, {"updates": 1})
    text = (tmp_path / "run" / "config.json").read_text()
    assert json.loads(text)["model"]["norm"]["source"] == "" and "\\u001f" not in text
    before = logits(nfrs.Transformer.from_checkpoint(tmp_path / "run", "last"))
    other = scaled(100.0, "of-two")
    with pytest.raises(InputError, match=r"may be one of 2 classes, .*using\(Namesake\)"):
        nfrs.Transformer.from_checkpoint(tmp_path / "run", "last")
    with norms.using(one):
        assert torch.equal(logits(nfrs.Transformer.from_checkpoint(tmp_path / "run", "last")), before)
        assert len(nfrs.translate(tmp_path / "run", ["1 2"])) == 1
    with norms.using(other):
        assert type(nfrs.Transformer.from_checkpoint(tmp_path / "run", "last").config.norm) is other
    with pytest.raises((InputError, RuntimeError), match="may be one of 2 classes"):
        nfrs.translate(tmp_path / "run", ["1 2"])
    fit(tmp_path / "again", corpus, {"norm": one()}, {"updates": 1})
    assert losses(tmp_path / "again") == losses(tmp_path / "run")


def test_a_class_that_nothing_holds_is_gone():
    one = scaled(1.0, "short-lived")
    data = one().declare(config("layernorm"))
    assert type(norms.declared(data)) is one
    scaled(3.0, "short-lived")(eps=1.0)
    assert type(norms.declared(data)) is one


def test_classes_that_compute_the_same_are_one():
    first = OwnScaleNorm

    class Smaller(OwnScaleNorm):
        options: ClassVar = {"eps": 1e-3}

    data = OwnScaleNorm(eps=1e-3).declare(config("layernorm"))
    assert norms.declared(data).given == {"eps": 1e-3} and first is OwnScaleNorm

    class Changed(OwnScaleNorm):
        def normalize(self, x, weight, eps):
            return 2 * weight * x

    with pytest.raises(InputError, match="may be one of 2 classes"):
        norms.declared(data)
    assert Smaller is not Changed


def test_one_model_has_one_class_of_a_name():
    one, other = scaled(1.0, "twice"), scaled(2.0, "twice")
    with pytest.raises(InputError, match=r"two classes of one model.*are called 'twice'"):
        nfrs.Transformer(config(one(), encoder_norm=other()))
    sizes = {"encoder_layers": 1, "decoder_layers": 1}
    layer = nfrs.nn.TransformerEncoderLayer(16, 2, 24, norm=one(eps=0.5), encoder_norm=one(eps=0.25), **sizes)
    assert layer.norm1.norm.given == {"eps": 0.25}


WRONG = {
    "start": {"parameters": {"p": Parameter(start="1.0")}},
    "start of a function": {"parameters": {"p": Parameter(start=lambda width: None)}},
    "huge": {"parameters": {"p": Parameter(start=10**400)}},
    "beyond float32": {"parameters": {"p": Parameter(start=1e300)}},
    "a std beyond float32": {"parameters": {"p": Parameter(Normal(1e300))}},
    "shape": {"parameters": {"p": Parameter(shape=None)}},
    "sides": {"parameters": {"p": Parameter(shape=(2, "x"))}},
    "a huge side": {"parameters": {"p": Parameter(shape=(10**12, "width"))}},
    "offset": {"parameters": {"p": Parameter(offset=None)}},
    "factor": {"parameters": {"p": Parameter(factor="x")}},
    "std": {"parameters": {"p": Parameter(Normal("x"))}},
    "parameters": {"parameters": ["weight"]},
    "a parameter": {"parameters": {"p": 1.0}},
    "options": {"options": ["eps"]},
    "an option": {"options": {"eps": "1e-5"}},
    "source": {"source": None},
}


@pytest.mark.parametrize("what", WRONG)
def test_every_wrong_field_is_refused_in_modules_loop_and_swaps(what):
    norm = type("Wrong", (Norm,), {"name": "wrong", "normalize": lambda self, x, *p, **o: x, **WRONG[what]})
    for make in (
        lambda: norm()(16),
        lambda: nfrs.Transformer(config(norm())),
        lambda: nfrs.swap_norms(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), norm),
    ):
        with pytest.raises(InputError):
            make()


@pytest.mark.parametrize(("seed", "count"), [(1, 100), pytest.param(2, 300, marks=pytest.mark.long)])
def test_declarations_that_are_mutated_are_taken_or_refused(seed, count):
    whole = json.loads(config(OwnGatedNorm(rank=3)).to_json())
    for norm in mutations(whole["norm"], seed, count):
        with contextlib.suppress(InputError):
            read = nfrs.TransformerConfig.from_json(json.dumps({**whole, "norm": norm}))
            nfrs.Transformer(read, seed=1)
