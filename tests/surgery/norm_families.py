"""Tiny models of many families, for tests of their norms: one layer or two, random values."""

import pytest
import torch
import torch.nn.functional as F
from surgery_support import Task, torchs_transformer
from torch import Tensor, nn

D, VOCABULARY = 16, 40

_SHAPE = {
    "hidden_size": D,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 4}
_BOTH = {
    "d_model": D,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}
_T5 = {"d_model": D, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
_PICTURE = {"image_size": 8, "patch_size": 4}
_DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8}
_WAV = {
    "conv_dim": [D, D],
    "conv_kernel": [3, 3],
    "conv_stride": [2, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}
TRANSFORMERS: dict[str, tuple[str, dict]] = {
    "bert": ("MaskedLM", {}),
    "roberta": ("MaskedLM", {}),
    "electra": ("MaskedLM", {"embedding_size": D}),
    "distilbert": ("MaskedLM", {"dim": D, "hidden_dim": 32, "n_layers": 1, "n_heads": 4}),
    "albert": ("MaskedLM", {"embedding_size": D}),
    "deberta": ("MaskedLM", _DEBERTA),
    "deberta-v2": ("MaskedLM", _DEBERTA),
    "gpt2": ("CausalLM", {"n_positions": 32}),
    "gpt_neox": ("CausalLM", {}),
    "opt": ("CausalLM", {"ffn_dim": 32, "word_embed_proj_dim": D}),
    "bloom": ("CausalLM", {}),
    "llama": ("CausalLM", _GROUPED),
    "mistral": ("CausalLM", _GROUPED),
    "qwen2": ("CausalLM", _GROUPED),
    "qwen3": ("CausalLM", _GROUPED),
    "gemma": ("CausalLM", _GROUPED),
    "gemma2": ("CausalLM", _GROUPED),
    "gemma3_text": ("CausalLM", _GROUPED),
    "phi": ("CausalLM", {}),
    "falcon": ("CausalLM", {}),
    "olmo": ("CausalLM", {}),
    "cohere": ("CausalLM", _GROUPED),
    "nemotron": ("CausalLM", _GROUPED),
    "t5": ("Seq2SeqLM", _T5),
    "mt5": ("Seq2SeqLM", _T5),
    "bart": ("Seq2SeqLM", _BOTH),
    "mbart": ("Seq2SeqLM", _BOTH),
    "marian": ("Seq2SeqLM", {**_BOTH, "decoder_vocab_size": VOCABULARY}),
    "pegasus": ("Seq2SeqLM", _BOTH),
    "whisper": ("SpeechSeq2Seq", {**_BOTH, "num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 16}),
    "wav2vec2": ("CTC", _WAV),
    "clip": ("", {"text_config": _SHAPE, "vision_config": {**_SHAPE, **_PICTURE}, "projection_dim": D}),
    "vit": ("ImageClassification", _PICTURE),
}


class NanoNorm(nn.Module):
    """nanoGPT's LayerNorm, whose bias is optional."""

    def __init__(self, ndim, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class XNorm(nn.Module):
    """x-transformers' RMSNorm: a unit vector times √d times g, or g + 1."""

    def __init__(self, dim, unit_offset=False):
        super().__init__()
        self.unit_offset, self.scale = unit_offset, dim**0.5
        self.g = nn.Parameter(torch.zeros(dim) if unit_offset else torch.ones(dim))

    def forward(self, x):
        return F.normalize(x, dim=-1) * self.scale * (self.g + float(self.unit_offset))


class Blocks(nn.Module):
    """A language model of pre-norm blocks without attention, with any norms."""

    def __init__(self, make):
        super().__init__()
        self.embedding, self.final = nn.Embedding(VOCABULARY, D), make()
        self.norms = nn.ModuleList(make() for _ in range(2))
        self.linears = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, input_ids: Tensor) -> tuple[Tensor]:
        x = self.embedding(input_ids)
        for norm, linear in zip(self.norms, self.linears):
            x = x + linear(norm(x)).tanh()
        return (self.final(x) @ self.embedding.weight.T,)


OTHERS = {
    "torch.nn": lambda: Task(torchs_transformer()),
    "nanogpt": lambda: Blocks(lambda: NanoNorm(D, bias=False)),
    "nanogpt-bias": lambda: Blocks(lambda: NanoNorm(D, bias=True)),
    "x-transformers": lambda: Blocks(lambda: XNorm(D)),
    "x-transformers-offset": lambda: Blocks(lambda: XNorm(D, unit_offset=True)),
}
FAMILIES = [*OTHERS, *TRANSFORMERS]


def build_family(name: str) -> nn.Module:
    """In evaluation mode, every gain and bias away from where it starts."""
    if name in OTHERS:
        model = OTHERS[name]()
    else:
        transformers = pytest.importorskip("transformers")
        head, more = TRANSFORMERS[name]
        config = transformers.AutoConfig.for_model(name, **{**_SHAPE, **more})
        auto = getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel")
        model = auto.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p), alpha=0.1)
    return model.eval()


def outputs(name: str, model: nn.Module) -> Tensor:
    """On fixed inputs."""
    dtype = next(model.parameters()).dtype
    tokens = torch.arange(3, 11).repeat(2, 1)
    if name in OTHERS:
        return model(tokens)[0]
    generator = torch.Generator().manual_seed(1)

    def noise(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    head = TRANSFORMERS[name][0]
    if head == "Seq2SeqLM":
        given = {"input_ids": tokens, "decoder_input_ids": tokens}
    elif head == "SpeechSeq2Seq":
        given = {"input_features": noise(2, 4, 16), "decoder_input_ids": tokens}
    elif head == "CTC":
        given = {"input_values": noise(2, 64)}
    elif head.endswith("LM"):
        given = {"input_ids": tokens}
    else:
        given = {"pixel_values": noise(2, 3, 8, 8)} | ({"input_ids": tokens} if name == "clip" else {})
    return model(**given)[0]
