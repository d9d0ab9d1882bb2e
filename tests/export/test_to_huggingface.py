"""Language models as folders of Hugging Face: the classes there load them and compute the same."""

import importlib
import json
import re

import pytest
import torch

import normformer_rs as nfrs
from normformer_rs import cli

transformers = pytest.importorskip("transformers")

SHAPE = {"architecture": "decoder-only", "vocab_size": 37, "d_model": 16, "d_ff": 24, "heads": 4, "decoder_layers": 3}
LLAMA = {"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu"}
GATED = {**LLAMA, "qk_norm": True, "output_gate": "element", "linear_biases": False}
GEMMA2 = {**LLAMA, "residual": "sandwich", "activation": "geglu", "linear_biases": False}
GPT2 = {"positions": "learned", "max_positions": 20, "activation": "gelu"}
GRANITE = {"input_alpha": 3.0, "output_alpha": 0.25, "residual_multiplier": 0.4, "attention_multiplier": 0.1}
MODELS = [
    ("LlamaForCausalLM", LLAMA),
    ("LlamaForCausalLM", {**LLAMA, "linear_biases": False, "kv_heads": 2, "scale_embeddings": False}),
    ("LlamaForCausalLM", {**LLAMA, "activation": "geglu", "kv_heads": 1, "rope_theta": 500.0, "norm_eps": 1e-3}),
    ("LlamaForCausalLM", {**LLAMA, "tie_embeddings": "none", "scale_embeddings": False}),
    ("LlamaForCausalLM", {**LLAMA, "tie_embeddings": "decoder", "decoder_start": "eos"}),
    ("Qwen3ForCausalLM", {**LLAMA, "qk_norm": True, "linear_biases": False, "kv_heads": 2}),
    ("Olmo2ForCausalLM", {**LLAMA, "residual": "olmo2", "linear_biases": False, "kv_heads": 2}),
    ("LlamaForCausalLM", {**LLAMA, "norm": "rmsnorm:llama"}),
    ("LlamaForCausalLM", {**LLAMA, "norm": "rmsnorm:llama", "norm_eps": 1e-3}),
    ("Qwen3ForCausalLM", {**LLAMA, "norm": "rmsnorm:llama", "qk_norm": True, "linear_biases": False}),
    ("Olmo2ForCausalLM", {**LLAMA, "norm": "rmsnorm:olmo", "residual": "olmo2", "linear_biases": False}),
    ("Qwen3NextForCausalLM", {**GATED, "kv_heads": 2}),
    ("Qwen3NextForCausalLM", {**GATED, "norm": "rmsnorm:gemma", "activation": "geglu", "scale_embeddings": False}),
    ("HunYuanDenseV1ForCausalLM", {**GATED, "output_gate": None, "qk_norm_after_rotation": True, "kv_heads": 2}),
    ("Gemma2ForCausalLM", {**GEMMA2, "score_softcap": 0.5, "logit_softcap": 2.0, "kv_heads": 2}),
    ("Gemma2ForCausalLM", {**GEMMA2, "norm": "rmsnorm:gemma", "logit_softcap": 0.7, "scale_embeddings": False}),
    ("Gemma2ForCausalLM", {**GEMMA2, "tie_embeddings": "none", "score_softcap": 0.3}),
    ("GraniteSWAForCausalLM", {**LLAMA, "sinks": True, "kv_heads": 2}),
    ("GraniteSWAForCausalLM", {**LLAMA, "sinks": True, "linear_biases": False, "scale_embeddings": False}),
    ("GraniteSWAForCausalLM", {**LLAMA, "sinks": True, "residual_multiplier": 0.4, "input_alpha": 3.0}),
    ("GraniteForCausalLM", {**LLAMA, **GRANITE, "kv_heads": 2}),
    ("GraniteForCausalLM", {**LLAMA, **GRANITE, "linear_biases": False, "tie_embeddings": "none"}),
    ("GraniteForCausalLM", {**LLAMA, "output_alpha": 0.5, "scale_embeddings": False}),
    ("GPT2LMHeadModel", GPT2),
    ("GPT2LMHeadModel", {**GPT2, "scale_embeddings": False, "linear_biases": False}),
    ("GPT2LMHeadModel", {**GPT2, "activation": "relu", "tie_embeddings": "none", "norm_eps": 1e-3, "kv_heads": 4}),
    ("GPTNeoXForCausalLM", {"positions": "rotary", "activation": "gelu"}),
    ("GPTNeoXForCausalLM", {"positions": "rotary", "activation": "silu", "linear_biases": False, "rope_theta": 50.0}),
    ("GPTNeoXForCausalLM", {"positions": "rotary", "activation": "relu2"}),
]


def built(**options):
    """A model away from its first values, where norms' weights are 1 and biases 0."""
    model = nfrs.Transformer(nfrs.TransformerConfig(**{**SHAPE, **options}), seed=3).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


def loaded(folder, **options):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()


@pytest.mark.parametrize("name,options", MODELS, ids=str)
@pytest.mark.one_in(test=3)
def test_the_class_there_computes_the_same(name, options, tmp_path):
    model, tokens = built(**options), torch.randint(4, 37, (3, 20))
    assert nfrs.to_huggingface(model, tmp_path / "model") == name
    theirs = loaded(tmp_path / "model")
    assert type(theirs).__name__ == name
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(None, tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name,family", [("llama", "rmsnorm:llama"), ("olmo2", "rmsnorm:olmo")])
def test_the_norms_there_are_the_families_to_the_bit(name, family):
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    theirs = getattr(module, f"{name.capitalize()}RMSNorm")(48).bfloat16()
    torch.nn.init.normal_(theirs.weight)
    ours = nfrs.nn.norm_class(family)(48, eps=1e-6, dtype=torch.bfloat16)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(64, 48, dtype=torch.bfloat16)
    assert torch.equal(ours(x), theirs(x))


def greedy(logits_of, start, length, forbidden):
    """Tokens that follow, each the likeliest; ends where two are as likely as each other to rounding."""
    tokens = [start]
    while len(tokens) < length:
        logits = logits_of(torch.tensor([tokens]))[0, -1].index_fill(0, torch.tensor(forbidden), float("-inf"))
        best, second = logits.topk(2).values
        if best - second < 1e-9:
            break
        tokens.append(int(logits.argmax()))
    return tokens


@pytest.mark.parametrize("name,options", MODELS, ids=str)
@pytest.mark.one_in(test=5, all=3)
def test_greedy_tokens_are_the_same(name, options, tmp_path):
    model = built(**options).double()
    nfrs.to_huggingface(model, tmp_path / "model")
    theirs = loaded(tmp_path / "model")
    assert theirs.dtype == torch.float64
    start = 2
    settings = theirs.generation_config
    assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (start, 2, 1)
    with torch.no_grad():
        ours = greedy(lambda tokens: model(None, tokens), start, 18, [0, 1])
        assert len(ours) > 4
        found = theirs.generate(torch.tensor([[start]]), do_sample=False, max_length=len(ours), eos_token_id=None)
    assert found[0].tolist() == ours


@pytest.mark.parametrize(
    "options,nearest,named",
    [
        ({**LLAMA, "norm": "scalenorm"}, "LlamaForCausalLM", 'norm = "scalenorm" (there "rmsnorm" or "rmsnorm:llama")'),
        ({**LLAMA, "residual": "deepnorm"}, "LlamaForCausalLM", 'residual = "deepnorm" (there "prenorm")'),
        ({**LLAMA, "fixnorm": True}, "LlamaForCausalLM", "fixnorm = true"),
        ({**LLAMA, "output_bias": True}, "LlamaForCausalLM", "output_bias = true"),
        ({**LLAMA, "positions": "none"}, "LlamaForCausalLM", 'positions = "none"'),
        ({**LLAMA, "attention_scale": "inverse"}, "LlamaForCausalLM", 'attention_scale = "inverse"'),
        ({**LLAMA, "architecture": "encoder-decoder"}, "LlamaForCausalLM", 'architecture = "encoder-decoder"'),
        ({**GPT2, "activation": "swiglu"}, "GPT2LMHeadModel", 'activation = "swiglu"'),
        ({**GATED, "output_gate": "head"}, "Qwen3ForCausalLM", 'output_gate = "head" (there null)'),
        ({**GPT2, "kv_heads": 2}, "GPT2LMHeadModel", "kv_heads = 2 (there null)"),
        ({**GPT2, "decoder_norm": "rmsnorm"}, "GPT2LMHeadModel", 'norm = "rmsnorm"'),
        ({}, "GPT2LMHeadModel", 'positions = "twt" (there "learned")'),
    ],
    ids=str,
)
def test_what_has_no_counterpart_is_named(options, nearest, named, tmp_path):
    with pytest.raises(nfrs.InputError, match=f"{nearest} is nearest, .*{re.escape(named)}"):
        nfrs.to_huggingface(built(**options), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_an_option_of_tomorrow_is_refused(monkeypatch, tmp_path):
    """Whatever this list does not know must be at its default."""
    field = next(field for field in nfrs.TransformerConfig.FIELDS if field.name == "qk_norm")
    model = built(**LLAMA)
    monkeypatch.setattr(nfrs.TransformerConfig, "FIELDS", (*nfrs.TransformerConfig.FIELDS, field))
    object.__setattr__(model.config, "qk_norm", "a new one")
    with pytest.raises(nfrs.InputError, match='qk_norm = "a new one"'):
        nfrs.to_huggingface(model, tmp_path / "model")


@pytest.mark.full
def test_a_run_is_exported(tmp_path, capsys):
    text = "\n".join(["the cat sat on the mat", "a dog ran"] * 30) + "\n"
    (tmp_path / "train.txt").write_text(text)
    (tmp_path / "valid.txt").write_text("rare words are in it\n" + text[:200])
    files = [f"--{part}-target={tmp_path / part}.txt" for part in ("train", "valid")]
    size = (
        "--d-model 16 --d-ff 24 --heads 4 --kv-heads 2 --decoder-layers 2 --updates 6 --bpe-operations 20 --vocab-mask"
    )
    run = tmp_path / "run"
    arguments = ["--preset", "llama-tiny", *size.split(), "--segment-length", "8", "--output", str(run)]
    assert cli.main(["train", *files, *arguments, "--no-progress"]) == 0, capsys.readouterr().err
    out = tmp_path / "out"
    assert cli.main(["export", "--model", str(run), "--output", str(out)]) == 0, capsys.readouterr().err
    assert "LlamaForCausalLM" in capsys.readouterr().err
    theirs, model = loaded(out), nfrs.Transformer.from_checkpoint(run)
    assert theirs.config.max_position_embeddings == 8, "the length of the run's rows"
    tokens = torch.tensor([[0, 5, 6, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(None, tokens), rtol=1e-5, atol=1e-5)
    assert (out / "vocabulary.txt").read_bytes() == (run / "vocabulary.txt").read_bytes()
    assert (out / "bpe.codes").is_file()
    settings = json.loads((out / "generation_config.json").read_text())
    known = nfrs._core.target_vocabulary(str(run))
    assert settings["suppress_tokens"] == [i for i, seen in enumerate(known) if not seen or i < 2]
    assert settings["suppress_tokens"][:2] == [0, 1]
    assert cli.main(["export", "--model", str(run), "--output", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
