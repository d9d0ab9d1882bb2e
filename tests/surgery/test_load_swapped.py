"""`load_swapped`: what Hugging Face's `save_pretrained` wrote of a swapped model comes back to the bit."""

import contextlib
import copy
import gc
import json
import pickle
import shutil
import subprocess
import sys
import types
import weakref
from pathlib import Path

import pytest
import torch
from block_models import FAMILIES, build, inputs, move
from test_blocks import outputs
from torch import nn

import normformer_rs as nfrs
from mutations import mutations
from normformer_rs import InputError, load_swapped, swap_norms, swap_residuals

transformers = pytest.importorskip("transformers")
HUGGING_FACE = [name for name in FAMILIES if name != "timm"]
SCHEMES = ("deepnorm", "sandwich", "rezero", "resi-dual", "mhc", "hybridnorm")


def same(name, model, other):
    given = inputs(name)
    for a, b in zip(outputs(model.eval(), given), outputs(other.eval(), given), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", HUGGING_FACE)
@pytest.mark.one_in(test=26, all=25)
def test_swapped_models_come_back(name, tmp_path):
    scheme = SCHEMES[HUGGING_FACE.index(name) % len(SCHEMES)]
    model = build(name)
    swap_norms(model, "scalenorm")
    swap_residuals(model, scheme)
    move(model).save_pretrained(tmp_path)
    loaded = load_swapped(tmp_path)
    assert type(loaded) is type(model)
    same(name, model, loaded)
    again = load_swapped(tmp_path, type(model), dtype=torch.float64)
    assert next(again.parameters()).dtype == torch.float64
    with pytest.raises(OSError, match=r"load-with-normformer_rs\.load_swapped"):
        type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize("change", ["options", "depth", "own", "fold", "exact", "filter"])
@pytest.mark.one_in(test=3)
def test_how_it_was_swapped(change, tmp_path):
    model = build("GPT2")
    if change == "options":
        swap_residuals(model, "layerscale", layerscale_init=0.3)
    elif change == "depth":
        swap_residuals(model, "deepnorm", depth=50)
    elif change == "own":
        swap_residuals(model, OwnScheme(0.5))
    elif change == "fold":
        nfrs.fold_norms(model)
    elif change == "exact":
        swap_norms(model.eval(), "rmsnorm", exact=True)
    else:
        swap_norms(model, "rmsnorm", filter=lambda name, _: "ln_f" not in name)
    move(model).save_pretrained(tmp_path)
    same("GPT2", model, load_swapped(tmp_path))


class OwnScheme(nfrs.Scheme):
    name = "halved"

    def __init__(self, beta):
        self.beta = beta

    def around(self, place):
        return nfrs.schemes.ResidualSpec(before=[nfrs.schemes.norm()], beta=self.beta)


def test_norms_without_biases_are_told_apart(tmp_path):
    """LayerNorm without bias has the keys of RMSNorm."""
    model = transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
        )
    )  # fmt: skip
    swap_norms(model, "rmsnorm")
    model.save_pretrained(tmp_path)
    assert "swapped_norms.norm_is_rmsnorm" in model.state_dict()
    tokens = torch.arange(3, 12)[None]
    assert torch.equal(load_swapped(tmp_path)(tokens).logits, model.eval()(tokens).logits)


def test_what_cannot_be_loaded(tmp_path):
    model = build("Llama")
    model.save_pretrained(tmp_path / "stock")
    with pytest.raises(InputError, match=r"config\.json names no swaps.*from_pretrained"):
        load_swapped(tmp_path / "stock")
    swap_norms(model, lambda width: nn.LayerNorm(width))
    model.save_pretrained(tmp_path / "own")
    with pytest.raises(InputError, match="a class of one's own"):
        load_swapped(tmp_path / "own")
    loaded = load_swapped(tmp_path / "own", swap=lambda m: swap_norms(m, lambda width: nn.LayerNorm(width)))
    same("Llama", model, loaded)


# Another class, and files that are damaged or a stranger's.


def bert(kind="BertForMaskedLM"):
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return getattr(transformers, kind)(transformers.BertConfig(**shape, intermediate_size=24)).eval()


def states(model):
    with torch.no_grad():
        return getattr(model, "bert", model).eval()(torch.arange(3, 12)[None]).last_hidden_state


@pytest.mark.parametrize("saved", ["BertForMaskedLM", "BertModel"])
@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertModel", "BertForSequenceClassification"])
@pytest.mark.one_in(test=3, all=2)
def test_another_class_of_the_family_has_the_same_norms(saved, kind, tmp_path):
    model = bert(saved)
    swap_norms(model, "rmsnorm")
    move(model).save_pretrained(tmp_path)
    loses_head = saved == "BertForMaskedLM" != kind
    with pytest.warns(UserWarning, match=r"no cls\.predictions.*the head") if loses_head else contextlib.nullcontext():
        loaded = load_swapped(tmp_path, getattr(transformers, kind))
    assert torch.equal(states(loaded), states(model))


@pytest.mark.parametrize("saved", ["LlamaForCausalLM", "LlamaModel"])
@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification"])
@pytest.mark.one_in(test=6, all=5)
def test_another_class_folds_the_norms_that_were_folded(saved, kind, tmp_path):
    """Where a class returns the last norm, this keeps its gain, and where a head reads it, the head has it."""
    model = getattr(transformers, saved)(config()).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    nfrs.fold_norms(model)
    model.save_pretrained(tmp_path)
    loaded = load_swapped(tmp_path, getattr(transformers, kind), dtype=torch.float64)
    tokens = torch.arange(1, 13).view(2, 6)
    states = [getattr(one, "model", one)(tokens).last_hidden_state for one in (model, loaded)]
    torch.testing.assert_close(*states, rtol=0, atol=1e-6)


def test_a_classifier_without_a_padding_token_is_swapped_and_loaded(tmp_path):
    """It takes a single row."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, **sizes))
    swap_residuals(model, "layerscale", layerscale_init=0.3, init=None)
    model.save_pretrained(tmp_path)
    loaded = load_swapped(tmp_path, transformers.LlamaForSequenceClassification)
    assert loaded.config.pad_token_id is None
    fresh = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(vocab_size=40, **sizes)).eval()
    fresh.load_state_dict({**model.state_dict(), "score.weight": loaded.score.weight}, strict=False)
    tokens = torch.tensor([[5, 6, 7]])
    assert not torch.equal(fresh(tokens).logits, loaded(tokens).logits)  # the stock blocks have no factors
    swap_residuals(fresh, "layerscale", layerscale_init=0.3, init=None)
    assert torch.equal(fresh(tokens).logits, loaded(tokens).logits)


def test_auto_classes_choose_the_class(tmp_path):
    model = bert()
    swap_norms(model, "rmsnorm")
    swap_residuals(model, "deepnorm")
    move(model).save_pretrained(tmp_path)
    for kind, name in (("AutoModelForMaskedLM", "BertForMaskedLM"), ("AutoModelForCausalLM", "BertLMHeadModel")):
        loaded = load_swapped(tmp_path, getattr(transformers, kind))
        assert type(loaded).__name__ == name and torch.equal(states(loaded), states(model))
    with pytest.raises(InputError, match="AutoModelForSpeechSeq2Seq has no class for a BertConfig"):
        load_swapped(tmp_path, transformers.AutoModelForSpeechSeq2Seq)
    with pytest.raises(InputError, match="kind must be a class of transformers' models"):
        load_swapped(tmp_path, nn.Linear)


# transformers' own Auto classes.

SWAPS = {
    "deepnorm": lambda model: swap_residuals(model, "deepnorm"),
    "own scheme": lambda model: swap_residuals(model, OwnScheme(0.5)),
    "mhc": lambda model: swap_residuals(model, "mhc"),
    "options": lambda model: swap_residuals(model, "layerscale", layerscale_init=0.3),
    "depth": lambda model: swap_residuals(model, "deepnorm", depth=50),
    "dyt": lambda model: swap_norms(model, "dyt"),
    "some norms": lambda model: swap_norms(model, "scalenorm", filter=lambda name, _: "ln_1" in name),
    "both": lambda model: (swap_norms(model, "rmsnorm"), swap_residuals(model, "sandwich")),
    "folded and swapped": lambda model: (nfrs.fold_norms(model.eval()), swap_norms(model, "rmsnorm")),
}
ALONE = """
import sys, transformers
for folder in sys.argv[1:]:
    try:
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    except ValueError as error:
        assert "normformer_rs" in str(error), error
    else:
        sys.exit(f"{folder} was loaded")
"""


@pytest.mark.full
def test_auto_classes_load_a_swapped_model_or_refuse_it(tmp_path):
    """With the package to the bit; without it they name the package."""
    for name, swap in SWAPS.items():
        model = build("GPT2")
        swap(model)
        move(model).save_pretrained(tmp_path / name)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert type(loaded) is transformers.GPT2LMHeadModel
        same("GPT2", model, loaded)
        states = transformers.AutoModel.from_pretrained(tmp_path / name, dtype=torch.float64)
        assert type(states) is transformers.GPT2Model and states.dtype == torch.float64
        loaded.save_pretrained(tmp_path / "again")
        assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == "normformer_rs"
        with pytest.raises(OSError, match=r"load-with-normformer_rs\.load_swapped"):
            transformers.GPT2LMHeadModel.from_pretrained(tmp_path / name)
    folders = [str(tmp_path / name) for name in SWAPS]
    ran = subprocess.run([sys.executable, "-c", ALONE, *folders], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("written", ["transformers", "by its owner", "into the template"])
def test_a_swapped_model_is_published_with_its_card(written, monkeypatch):
    """transformers writes a card of its own over that of `save_pretrained`, unless the repository has one."""
    hub, pushed = transformers.utils.hub, {}
    card = hub.ModelCard("---\nlicense: mit\n---\nmy own")
    if written != "by its owner":
        card = hub.ModelCard.from_template(
            hub.ModelCardData(library_name="transformers", tags=["mine"]),
            model_description="This model card has been automatically generated.",
        )
    if written == "into the template":
        card = hub.ModelCard(str(card).replace("## Training Details", "## Training Details\n\nmy own", 1))
        assert "my own" in card.text

    def upload(self, folder, repo_id, **options):
        pushed[repo_id] = {path.name: path.read_text() for path in Path(folder).glob("*.[mj]*")}

    monkeypatch.setattr(hub.PushToHubMixin, "_upload_modified_files", upload)
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *_, **__: card)
    monkeypatch.setattr(hub, "hf_api", lambda: Repositories())
    model = build("GPT2", n_layer=1)
    stock = dict(vars(model))
    done = swap_norms(model, "scalenorm")
    copy.deepcopy(model).push_to_hub("me/swapped")
    gone = weakref.ref(copy.deepcopy(model))
    assert gone() is None  # no cycle keeps it
    files = pushed["me/swapped"]
    assert json.loads(files["config.json"])["model_type"] == "normformer_rs"
    if written == "transformers":
        assert "`swap_norms`: scalenorm" in files["README.md"] and "- normformer_rs\n- mine" in files["README.md"]
    else:
        assert files["README.md"] == str(card)
    done.undo()
    assert vars(model).keys() == stock.keys()
    model.push_to_hub("me/stock")
    assert pushed["me/stock"]["README.md"] == str(card)


class Repositories:
    def create_repo(self, repo_id, **_):
        return types.SimpleNamespace(repo_id=repo_id)


def test_a_saved_swapped_model_says_what_it_is(tmp_path):
    model = build("GPT2", n_layer=1)
    swap_residuals(model, "layerscale", layerscale_init=0.3)
    swap_norms(model, "scalenorm")
    assert model.config.model_type == "gpt2" and model.config.to_dict()["model_type"] == "gpt2"
    model.save_pretrained(tmp_path)
    file = json.loads((tmp_path / "config.json").read_text())
    assert file["model_type"] == "normformer_rs" and file["architectures"] == ["normformer_rs.GPT2LMHeadModel"]
    card = (tmp_path / "README.md").read_text()
    assert "`swap_residuals`: layerscale (layerscale_init=0.3)" in card and "cite('layerscale', 'scalenorm')" in card
    (tmp_path / "alone").mkdir()
    model.config.to_json_file(tmp_path / "alone" / "mine.json")
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["mine.json"]
    (tmp_path / "README.md").write_text("my own")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "my own"
    for copied in (copy.deepcopy(model.config), pickle.loads(pickle.dumps(model.config))):
        assert type(copied) is type(model.config) and copied.to_dict() == model.config.to_dict()
    auto = transformers.AutoConfig.from_pretrained(tmp_path)
    assert auto.to_dict()["normformer_rs"] == model.config.normformer_rs and auto.architectures == ["GPT2LMHeadModel"]
    with pytest.raises(InputError, match="makes no model without its weights"):
        transformers.AutoModelForCausalLM.from_config(auto)


@pytest.mark.parametrize("change", ["exact", "fold"])
def test_a_swap_that_keeps_the_function_stays_a_stock_model(change, tmp_path):
    model = build("GPT2", n_layer=1)
    swap_norms(model.eval(), "rmsnorm", exact=True) if change == "exact" else nfrs.fold_norms(model)
    model.save_pretrained(tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for a, b in zip(outputs(model.eval(), inputs("GPT2")), outputs(stock.eval(), inputs("GPT2")), strict=True):
        torch.testing.assert_close(a, b)


def test_a_fold_that_adds_biases_is_no_stock_model(tmp_path):
    """GPT-2's layers have biases, GPT-J's attention has none."""
    shape = {"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4}
    model = transformers.GPTJForCausalLM(transformers.GPTJConfig(**shape)).eval()
    torch.nn.init.normal_(model.transformer.h[0].ln_1.bias)
    nfrs.fold_norms(model)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "normformer_rs"
    tokens = torch.arange(8)[None]
    assert torch.equal(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, model(tokens).logits)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A swapped model's folder."""
    folder, model = tmp_path_factory.mktemp("swapped"), build("GPT2", n_layer=1)
    swap_norms(model, "gated-rmsnorm", rank=3, eps=1e-6)
    swap_residuals(model, OwnScheme(0.5), init=None)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def forged(saved, tmp_path):
    """Writes other swaps into a swapped model's config.json, and loads it."""
    shutil.copytree(saved, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    whole = json.loads(path.read_text())

    def load(swaps, **options):
        path.write_text(json.dumps({**whole, "normformer_rs": {**whole["normformer_rs"], "swaps": swaps}}))
        return load_swapped(tmp_path / "model", **options)

    return whole["normformer_rs"]["swaps"], load


WRONG = {
    "no list": (5, "must be a list"),
    "a number": ([5], "must be an object with one of swap_norms, swap_residuals, fold_norms"),
    "nothing": ([{}], "must be an object with one of"),
    "two kinds": ([{"swap_norms": "rmsnorm", "fold_norms": True}], "must be an object with one of"),
    "no names": ([{"swap_norms": "rmsnorm"}], "names must be a list"),
    "names null": ([{"swap_norms": "rmsnorm", "names": None}], "names must be a list"),
    "lost names": ([{"swap_norms": "rmsnorm", "names": ["h.7.ln_1"]}], "does not have, the first '.*h.7.ln_1'"),
    "unknown norm": ([{"swap_norms": "nope", "names": []}], "must name a norm of the table"),
    "eps": ([{"swap_norms": "rmsnorm", "names": [], "eps": "x"}], "eps of rmsnorm has a wrong value"),
    "rank": ([{"swap_norms": "gated-rmsnorm", "names": [], "rank": 10**9}], "rank of gated-rmsnorm has a wrong value"),
    "device": ([{"swap_norms": "rmsnorm", "names": [], "device": "meta"}], "rmsnorm has no option 'device'"),
    "exact": ([{"swap_norms": "rmsnorm", "names": [], "exact": 1}], "exact must be true or false"),
    "depth": ([{"swap_residuals": "deepnorm", "depth": 10**9}], "depth must be one or two numbers"),
    "option": ([{"swap_residuals": "deepnorm", "optimizer": "x"}], "a scheme has no option 'optimizer'"),
    "init": ([{"swap_residuals": "deepnorm", "init": "xavier"}], "a scheme has no option 'init'"),
    "scheme": ([{"swap_residuals": 5}], "must name a scheme, or declare one"),
    "fold": ([{"fold_norms": 5}], "fold_norms must be true, and has no options but names"),
    "folded names": ([{"fold_norms": True, "names": 5}], "names must be a list"),
    "many": ([{"fold_norms": True}] * 1001, "at most 1000 swaps"),
}


@pytest.mark.parametrize("what", WRONG)
def test_damaged_swaps_are_refused_by_name(what, forged):
    with pytest.raises(InputError, match=WRONG[what][1]):
        forged[1](WRONG[what][0])


@pytest.mark.parametrize(("seed", "count"), [(1, 12), pytest.param(2, 300, marks=pytest.mark.long)])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.one_in(all=2)
def test_swaps_that_are_mutated_load_or_are_refused(seed, count, forged):
    swaps, load = forged
    for mutant in mutations(swaps, seed, count):
        with contextlib.suppress(InputError):
            load(mutant)


CODE = """
import pathlib
import normformer_rs as nfrs
pathlib.Path(__file__).with_name("ran").touch()
class Mine(nfrs.Norm):
    name, parameters = "of-a-swap", {"weight": nfrs.norms.Parameter()}
    def normalize(self, x, weight):
        return weight * x
"""


def test_a_folder_runs_no_code_unless_it_is_trusted(forged, tmp_path):
    (tmp_path / "mine.py").write_text(CODE)
    text = f"{tmp_path / 'mine.py'}:Mine"
    swaps, load = forged
    for number, swap in enumerate(swaps):
        for key in (*swap, "encoder_norm", "norm", "residual", "extra"):
            with pytest.raises(InputError):
                load([*swaps[:number], {**swap, key: text}, *swaps[number + 1 :]])
    assert not (tmp_path / "ran").exists()
    with pytest.raises(InputError, match=r"swap 1: swap_norms is '.*mine\.py:Mine', which names Python code"):
        load([{"swap_norms": text, "names": swaps[0]["names"]}])
    with pytest.raises(InputError, match="weights are of no model with norm_is_of-a-swap"):  # they are gated-rmsnorm's
        load([{"swap_norms": text, "names": swaps[0]["names"]}], trust=True)
    assert (tmp_path / "ran").exists()


def test_auto_classes_take_either_consent(tmp_path):
    (tmp_path / "mine.py").write_text(CODE.replace("of-a-swap", "of-an-auto-class"))
    model, folder = build("GPT2"), tmp_path / "model"
    swap_norms(model, f"{tmp_path / 'mine.py'}:Mine")
    move(model).save_pretrained(folder)
    with pytest.raises(InputError, match="no code of a file runs without consent"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    for consent in ("trust", "trust_remote_code"):
        same("GPT2", model, transformers.AutoModelForCausalLM.from_pretrained(folder, **{consent: True}))


def test_a_function_must_make_all_swaps_of_the_saved_model(tmp_path):
    model = build("GPT2")
    swap_norms(model, "rmsnorm"), swap_residuals(model, "deepnorm")
    move(model).save_pretrained(tmp_path)

    def norms(new):
        swap_norms(new, "rmsnorm")

    def residuals(new):
        swap_residuals(new, "deepnorm", init=None)

    same("GPT2", model, load_swapped(tmp_path, swap=lambda new: (norms(new), residuals(new))))
    for swap, left in ((norms, "scheme_deepnorm"), (residuals, "norm_is_rmsnorm")):
        with pytest.raises(InputError, match=f"weights have {left}, the mark of a swap that the function"):
            load_swapped(tmp_path, swap=swap)
    with pytest.raises(InputError, match="no model with scheme_sandwich, a swap that the function swap= makes"):
        load_swapped(tmp_path, swap=lambda new: (norms(new), swap_residuals(new, "sandwich", init=None)))


def test_a_function_makes_swaps_of_norms_in_any_order_and_none_is_forgotten(tmp_path):
    def blocks(new):
        swap_norms(new, "rmsnorm", filter=lambda path, _: ".h." in path)

    def last(new):
        swap_norms(new, "scalenorm", filter=lambda path, _: ".h." not in path)

    model = build("GPT2")
    blocks(model), last(model)
    move(model).save_pretrained(tmp_path)
    same("GPT2", model, load_swapped(tmp_path, swap=lambda new: (last(new), blocks(new))))
    with pytest.raises(InputError, match="weights have norm_is_rmsnorm, the mark of a swap that the function"):
        load_swapped(tmp_path, swap=last)


def test_a_function_need_not_swap_what_the_loaded_part_lacks(tmp_path):
    given = inputs("CLIP")
    text = {name: given[name] for name in ("input_ids", "attention_mask")}
    model = build("CLIP")

    def swap_text(part):
        swap_residuals(part, "sandwich", init=None, example=text)

    swap_text(model.text_model)
    swap_residuals(model.vision_model, "peri-ln", init=None, example={"pixel_values": given["pixel_values"]})
    move(model).save_pretrained(tmp_path)
    loaded = load_swapped(
        tmp_path, transformers.CLIPTextModel, swap=lambda new: swap_text(getattr(new, "text_model", new))
    )
    want, found = (part.eval()(**text).last_hidden_state for part in (model.text_model, loaded))
    assert torch.equal(want, found)


def test_a_part_of_a_model_is_marked_though_the_collector_is_frozen(tmp_path):
    model = build("Bert")
    gc.freeze()
    count = gc.get_freeze_count()
    swap_residuals(model.bert, "sandwich")
    assert gc.get_freeze_count() >= count
    model.save_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"load-with-normformer_rs\.load_swapped"):
        type(model).from_pretrained(tmp_path)


# One configuration object for several models.


def config():
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return transformers.LlamaConfig(vocab_size=40, pad_token_id=0, **shape)


def comes_back(model, folder):
    model.save_pretrained(folder)
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(load_swapped(folder)(tokens).logits, model.eval()(tokens).logits)


def is_unmarked(model, folder):
    model.save_pretrained(folder)
    with pytest.raises(InputError, match="names no swaps"):
        load_swapped(folder)


@pytest.mark.full
def test_models_of_one_configuration_have_marks_of_their_own(tmp_path):
    shared = config()
    teacher = transformers.LlamaForCausalLM(shared)
    models = {}
    for scheme in ("deepnorm", "sandwich"):
        models[scheme] = transformers.LlamaForCausalLM(shared)
        swap_residuals(models[scheme], scheme, init=None)
        swap_norms(models[scheme], "scalenorm" if scheme == "deepnorm" else "layernorm")
    for scheme, model in models.items():
        comes_back(model, tmp_path / scheme)
    is_unmarked(teacher, tmp_path / "teacher")
    assert shared is teacher.config and not hasattr(shared, "normformer_rs")


@pytest.mark.full
def test_a_model_of_a_swapped_models_configuration_starts_without_its_marks(tmp_path):
    first = transformers.LlamaForCausalLM(config())
    swap_residuals(first, "deepnorm", init=None)
    second, third = transformers.LlamaForCausalLM(first.config), copy.deepcopy(first)
    swap_norms(second, "scalenorm")
    swap_norms(third, "layernorm")
    for number, model in enumerate((first, second, third)):
        comes_back(model, tmp_path / str(number))
    assert [*second.config.normformer_rs] == ["norm", "swaps"]


@pytest.mark.full
def test_a_part_marks_the_model_around_it_and_undo_takes_it_back(tmp_path):
    shared = config()
    model, other = (transformers.LlamaForCausalLM(shared) for _ in range(2))
    swapped = swap_norms(model.model, "scalenorm")
    again = swap_residuals(model, "deepnorm", init=None)
    assert model.config is model.model.config is model.model.layers[0].self_attn.config
    comes_back(model, tmp_path / "swapped")
    again.undo(), swapped.undo()
    is_unmarked(model, tmp_path / "undone")
    is_unmarked(other, tmp_path / "other")


class Around(nn.Module):
    """A module that holds a model of transformers and is none, as PEFT's models are."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **given):
        return self.inner(**given)


def clip():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    text = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "max_position_embeddings": 16}
    vision = {"image_size": 16, "patch_size": 8}
    torch.manual_seed(0)
    model = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=sizes | text, vision_config=sizes | vision)
    ).eval()
    return model, {"input_ids": torch.tensor([[0, 4, 5, 1]]), "pixel_values": torch.randn(1, 3, 16, 16)}


def equal(model, other, given):
    """But for rounding: convolutions and products depend on where their weights lie in memory."""
    for a, b in zip(outputs(model, given), outputs(other, given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def swapped_in_part(swap):
    """Returns a model with a swapped part, its inputs, the swap's table, and a function that swaps a stock model."""
    model, given = clip()
    table = swap(model.text_model, None)
    return model, given, table, lambda stock: swap(stock.text_model, None)


def swapped_within(swap):
    """Returns the same for a model that was swapped while another module held it."""
    model, given = build("GPT2"), inputs("GPT2")
    table = swap(Around(model), given)
    return model, given, table, lambda stock: swap(stock, given)


@pytest.mark.parametrize("where", [swapped_in_part, swapped_within])
@pytest.mark.parametrize("what", ["scheme", "norms"])
@pytest.mark.one_in(test=4, all=3)
def test_a_swap_of_a_part_or_within_a_module_is_no_stock_model(where, what, tmp_path):
    def swap(model, example):
        if what == "norms":
            return swap_norms(model, "scalenorm", example=example)
        return swap_residuals(model, "layerscale", layerscale_init=0.3, init=None, example=example)

    model, given, table, again = where(swap)
    model.save_pretrained(tmp_path / "swapped")
    with pytest.raises(OSError, match=r"load-with-normformer_rs\.load_swapped"):
        type(model).from_pretrained(tmp_path / "swapped")
    with pytest.raises(InputError, match="a part of the model was swapped, or the model with modules around it"):
        load_swapped(tmp_path / "swapped")
    name = "scalenorm" if what == "norms" else "layerscale"
    assert f"in a part of the model: {name}\n" in (tmp_path / "swapped" / "README.md").read_text()
    loaded = load_swapped(tmp_path / "swapped", swap=again)
    equal(model.eval(), loaded, given)
    table.undo()
    model.save_pretrained(tmp_path / "stock")
    assert "normformer_rs" not in (tmp_path / "stock" / "config.json").read_text()
    stock = type(model).from_pretrained(tmp_path / "stock").eval()
    equal(model, stock, given)


@pytest.mark.full
def test_an_exact_swap_of_a_part_leaves_a_stock_model(tmp_path):
    model, given = clip()
    before = outputs(model, given)
    swap_norms(model.text_model, "rmsnorm", exact=True)
    model.save_pretrained(tmp_path)
    stock = transformers.CLIPModel.from_pretrained(tmp_path).eval()
    for a, b in zip(before, outputs(stock, given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_undo_brings_the_shared_configuration_back_unless_something_was_written():
    model = transformers.LlamaForCausalLM(config())
    shared, swapped = model.config, swap_norms(model.model, "scalenorm")
    assert model.config is model.model.config is not shared
    swapped.undo()
    assert model.config is model.model.config is model.model.layers[0].self_attn.config is shared
    swapped = swap_norms(model, "scalenorm")
    model.config.use_cache = False
    swapped.undo()
    assert shared.use_cache and not model.config.use_cache and not hasattr(model.config, "normformer_rs")


def test_a_swap_that_fails_leaves_the_configuration(monkeypatch):
    model = transformers.LlamaForCausalLM(config())
    before = [vars(module).get("config") for module in model.modules()]
    monkeypatch.setattr("normformer_rs.surgery.norms.mark_norms", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        swap_norms(model.model, "scalenorm")
    assert all(a is b for a, b in zip(before, (vars(module).get("config") for module in model.modules()), strict=True))
    assert not hasattr(model.config, "normformer_rs")


@pytest.mark.full
def test_weights_that_were_not_swapped_as_config_json_says_are_refused(tmp_path):
    first = transformers.LlamaForCausalLM(config())
    swap_residuals(first, "deepnorm", init=None)
    transformers.LlamaForCausalLM(first.config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"weights are of no model with scheme_deepnorm"):
        load_swapped(tmp_path)
