"""The blocks that `swap_residuals` knows, and those that it refuses, by their classes' names: no library is
imported."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from ..errors import InputError
from .spec import BlockSpec, Head, Linear, Part, Stack, at, attention, feed_forward


class Family(NamedTuple):
    """Models with blocks alike.

    Attributes:
        name: their usual name.
        scheme: their own; a swap into it with init=None changes no output.
        blocks: each class, by module and name, and its declaration: a `BlockSpec`, or one of the same methods.
        stacks: classes around them with a norm after the last block.
        heads: classes of models around those, where one linear layer reads that norm.
    """

    name: str
    scheme: str
    blocks: Mapping[str, Any]
    stacks: Mapping[str, Stack] = {}
    heads: Mapping[str, Head] = {}


def _of_transformers(
    name: str,
    scheme: str,
    model: str,
    blocks: Mapping[str, Any],
    heads: Mapping[str, Head] | None = None,
    **stacks: str | Stack,
) -> Family:
    """A family of transformers.models.{model}. `stacks`: the norm's name, or all that is declared."""
    module = f"transformers.models.{model}.modeling_{model}."
    ends = {kind: Stack(what) if isinstance(what, str) else what for kind, what in stacks.items()}
    named: Any = ({module + kind: what for kind, what in given.items()} for given in (blocks, ends, heads or {}))
    return Family(name, scheme, *named)


LLAMA = BlockSpec(
    (
        Part(
            "self-attention",
            "input_layernorm",
            attention("self_attn", "self_attn.o_proj", "q_proj k_proj v_proj"),
        ),
        Part(
            "feed-forward",
            "post_attention_layernorm",
            feed_forward("mlp.gate_proj mlp.up_proj", "mlp.down_proj"),
        ),
    ),
    heads="self_attn.config.num_attention_heads",
)
DISTILBERT = BlockSpec(
    (
        Part(
            "self-attention",
            "sa_layer_norm",
            attention("attention", "attention.out_lin", "q_lin k_lin v_lin"),
        ),
        Part(
            "feed-forward",
            "output_layer_norm",
            feed_forward("ffn.lin1", "ffn.lin2"),
            "ffn.dropout",
        ),
    ),
    heads="attention.n_heads",
)


def _bart_attention(kind: str, path: str) -> Part:
    linears = attention(path, f"{path}.out_proj", "q_proj k_proj v_proj")
    return Part(kind, f"{path}_layer_norm", linears, "dropout")


_BART_SELF = _bart_attention("self-attention", "self_attn")
_BART_CROSS = _bart_attention("cross-attention", "encoder_attn")
_BART_FEED = Part(
    "feed-forward",
    "final_layer_norm",
    feed_forward("fc1", "fc2"),
    "dropout",
)
BART_ENCODER = BlockSpec((_BART_SELF, _BART_FEED), "self_attn.num_heads")
BART_DECODER = BlockSpec((_BART_SELF, _BART_CROSS, _BART_FEED), "self_attn.num_heads")
OPT = BlockSpec(
    (_BART_SELF, _BART_FEED),
    "self_attn.num_heads",
    norm_first="do_layer_norm_before",
)
VIT = BlockSpec(
    (
        Part(
            "self-attention",
            "layernorm_before",
            attention("attention", "attention.o_proj", "q_proj k_proj v_proj"),
            "dropout",
        ),
        Part("feed-forward", "layernorm_after", feed_forward("mlp.fc1", "mlp.fc2"), "dropout"),
    ),
    heads="attention.num_attention_heads",
)
CLIP = BlockSpec(
    (
        Part(
            "self-attention",
            "layer_norm1",
            attention("self_attn", "self_attn.out_proj", "q_proj k_proj v_proj"),
        ),
        Part("feed-forward", "layer_norm2", feed_forward("mlp.fc1", "mlp.fc2")),
    ),
    heads="self_attn.num_heads",
)
WAV2VEC2 = BlockSpec(
    (
        Part(
            "self-attention",
            "layer_norm",
            attention("attention", "attention.out_proj", "q_proj k_proj v_proj"),
            "dropout",
        ),
        Part(
            "feed-forward",
            "final_layer_norm",
            feed_forward("feed_forward.intermediate_dense", "feed_forward.output_dense"),
            "feed_forward.output_dropout",
        ),
    ),
    heads="attention.num_heads",
)
_NEOX_HEADS = "attention.config.num_attention_heads"
GPT_NEOX = BlockSpec(
    (
        Part(
            "self-attention",
            "input_layernorm",
            (
                Linear(
                    "attention.query_key_value",
                    ("query", "key", "value"),
                    groups=_NEOX_HEADS,
                ),
                Linear("attention.dense", ("output",)),
            ),
            "post_attention_dropout",
        ),
        Part(
            "feed-forward",
            "post_attention_layernorm",
            feed_forward("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
            "post_mlp_dropout",
        ),
    ),
    heads=_NEOX_HEADS,
)
TIMM = BlockSpec(
    (
        Part(
            "self-attention",
            "norm1",
            (Linear("attn.qkv", ("query", "key", "value")), Linear("attn.proj", ("output",))),
            "drop_path1",
        ),
        Part("feed-forward", "norm2", feed_forward("mlp.fc1", "mlp.fc2"), "drop_path2"),
    ),
    heads="attn.num_heads",
)


def _bert_block(feed_forward_norm: str, norm: str, norm_first: bool) -> BlockSpec:
    attentions = (
        Part(
            kind,
            f"{path}.{norm}",
            attention(f"{path}.self", f"{path}.output.dense", "query key value"),
            f"{path}.output.dropout",
        )
        for kind, path in (("self-attention", "attention"), ("cross-attention", "crossattention"))
    )
    linears = feed_forward("intermediate.dense", "output.dense")
    last = Part("feed-forward", feed_forward_norm, linears, "output.dropout")
    return BlockSpec((*attentions, last), "attention.self.num_attention_heads", norm_first=norm_first)


BERT = _bert_block("output.LayerNorm", "output.LayerNorm", norm_first=False)
ROBERTA_PRE_LAYER_NORM = _bert_block("intermediate.LayerNorm", "LayerNorm", norm_first=True)
GPT2 = BlockSpec(
    (
        Part(
            "self-attention",
            "ln_1",
            (Linear("attn.c_attn", ("query", "key", "value")), Linear("attn.c_proj", ("output",))),
            "attn.resid_dropout",
        ),
        Part(
            "cross-attention",
            "ln_cross_attn",
            (
                Linear("crossattention.q_attn", ("query",)),
                Linear("crossattention.c_attn", ("key", "value")),
                Linear("crossattention.c_proj", ("output",)),
            ),
            "crossattention.resid_dropout",
        ),
        Part("feed-forward", "ln_2", feed_forward("mlp.c_fc", "mlp.c_proj"), "mlp.dropout"),
    ),
    heads="attn.num_heads",
)


class _T5:
    """T5's block: its sublayers are a list, of which a decoder's has three."""

    heads, norm_first = "layer", None

    def parts_of(self, block: Any) -> list[Part]:
        # T5 does not divide scores by √d_kv; smaller queries do it instead.
        factor = block.layer[0].SelfAttention.key_value_proj_dim ** -0.5
        found = []
        for i, (kind, name) in enumerate((("self-attention", "SelfAttention"), ("cross-attention", "EncDecAttention"))):
            if i < len(block.layer) - 1:
                path = f"layer.{i}.{name}"
                linears = attention(path, f"{path}.o", "q k v", factor)
                found.append(Part(kind, f"layer.{i}.layer_norm", linears, f"layer.{i}.dropout"))
        path = f"layer.{len(block.layer) - 1}"
        inner = f"{path}.DenseReluDense"
        gated = hasattr(block.layer[-1].DenseReluDense, "wi_0")
        linears = feed_forward(f"{inner}.wi_0 {inner}.wi_1" if gated else f"{inner}.wi", f"{inner}.wo")
        return [*found, Part("feed-forward", f"{path}.layer_norm", linears, f"{path}.dropout")]

    def heads_of(self, block: Any) -> int:
        return block.layer[0].SelfAttention.n_heads

    def check(self, block: nn.Module) -> None:
        """A block of another form has no such attributes."""


T5 = _T5()


def _llama(name: str) -> Family:
    blocks = {f"{name}DecoderLayer": LLAMA}
    heads = {f"{name}ForCausalLM": Head("model", "lm_head")}
    return _of_transformers(name, "prenorm", name.lower(), blocks, heads, **{f"{name}Model": "norm"})


def _bert(name: str, classes: str, model: str) -> Family:
    return _of_transformers(name, "postnorm", model, {f"{classes}Layer": BERT})


def _bart(name: str, scheme: str, classes: str, model: str) -> Family:
    blocks = {f"{classes}EncoderLayer": BART_ENCODER, f"{classes}DecoderLayer": BART_DECODER}
    ends = {f"{classes}{side}": "layer_norm" for side in ("Encoder", "Decoder")} if scheme == "prenorm" else {}
    return _of_transformers(name, scheme, model, blocks, None, **ends)


_CLIP_TEXT = Stack("final_layer_norm", ("embeddings.token_embedding", "embeddings.position_embedding"))
_CLIP_VISION = Stack(
    "post_layernorm",
    ("embeddings.class_embedding", "embeddings.patch_embedding", "embeddings.position_embedding"),
)


FAMILIES = (
    _bert("BERT", "Bert", "bert"),
    _bert("RoBERTa", "Roberta", "roberta"),
    _bert("XLM-RoBERTa", "XLMRoberta", "xlm_roberta"),
    _bert("ELECTRA", "Electra", "electra"),
    _of_transformers("DistilBERT", "postnorm", "distilbert", {"TransformerBlock": DISTILBERT}),
    _of_transformers(
        "RoBERTa-PreLayerNorm",
        "prenorm",
        "roberta_prelayernorm",
        {"RobertaPreLayerNormLayer": ROBERTA_PRE_LAYER_NORM},
        {
            f"RobertaPreLayerNormFor{task}LM": Head("roberta_prelayernorm", "lm_head.dense")
            for task in ("Masked", "Causal")
        },
        RobertaPreLayerNormModel=Stack("LayerNorm", ("embeddings.LayerNorm",), ("pooler",)),
    ),
    _of_transformers(
        "GPT-2",
        "prenorm",
        "gpt2",
        {"GPT2Block": GPT2},
        {"GPT2LMHeadModel": Head("transformer", "lm_head")},
        GPT2Model=Stack("ln_f", ("wte", "wpe")),
    ),
    *(_llama(name) for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma")),
    _of_transformers(
        "OPT",
        "prenorm; OPT-350m postnorm",
        "opt",
        {"OPTDecoderLayer": OPT},
        {"OPTForCausalLM": Head("model.decoder", "model.decoder.project_out|lm_head")},
        OPTDecoder=Stack("final_layer_norm", ("project_in|embed_tokens", "embed_positions"), ("project_out",)),
    ),
    _of_transformers(
        "GPT-NeoX with `use_parallel_residual=False`",
        "prenorm",
        "gpt_neox",
        {"GPTNeoXLayer": GPT_NEOX},
        {"GPTNeoXForCausalLM": Head("gpt_neox", "lm_head|embed_out")},
        GPTNeoXModel=Stack("final_layer_norm", ("embed_in",)),
    ),
    _of_transformers("T5", "prenorm", "t5", {"T5Block": T5}, None, T5Stack="final_layer_norm"),
    _bart("BART", "postnorm", "Bart", "bart"),
    _bart("Marian", "postnorm", "Marian", "marian"),
    _bart("mBART", "prenorm", "MBart", "mbart"),
    _bart("Pegasus", "prenorm", "Pegasus", "pegasus"),
    _bart("M2M-100, NLLB", "prenorm", "M2M100", "m2m_100"),
    _bart("Whisper", "prenorm", "Whisper", "whisper"),
    _of_transformers(
        "ViT",
        "prenorm",
        "vit",
        {"ViTLayer": VIT},
        {"ViTForImageClassification": Head("vit", "classifier")},
        ViTModel=Stack(
            "layernorm",
            (
                "embeddings.patch_embeddings.projection",
                "embeddings.cls_token",
                "embeddings.mask_token",
                "embeddings.position_embeddings",
            ),
            ("pooler",),
        ),
    ),
    _of_transformers(
        "CLIP, both encoders",
        "prenorm",
        "clip",
        {"CLIPEncoderLayer": CLIP},
        CLIPTextModel=_CLIP_TEXT,
        CLIPTextTransformer=_CLIP_TEXT,
        CLIPVisionModel=_CLIP_VISION,
        CLIPVisionTransformer=_CLIP_VISION,
    ),
    _of_transformers(
        "wav2vec 2.0",
        "postnorm; with `do_stable_layer_norm` prenorm",
        "wav2vec2",
        {
            "Wav2Vec2EncoderLayer": WAV2VEC2._replace(norm_first=False),
            "Wav2Vec2EncoderLayerStableLayerNorm": WAV2VEC2._replace(norm_first=True),
        },
        Wav2Vec2EncoderStableLayerNorm="layer_norm",
    ),
    Family(
        "ViT of timm",
        "prenorm",
        {"timm.models.vision_transformer.Block": TIMM},
        {
            "timm.models.vision_transformer.VisionTransformer": Stack(
                "norm", ("patch_embed.proj", "cls_token", "reg_token", "pos_embed"), ("fc_norm", "head")
            )
        },
        {"timm.models.vision_transformer.VisionTransformer": Head("", "head")},
    ),
)
BLOCKS = {kind: how for family in FAMILIES for kind, how in family.blocks.items()}
STACKS = {kind: stack for family in FAMILIES for kind, stack in family.stacks.items()}
HEADS = {kind: head for family in FAMILIES for kind, head in family.heads.items()}
_SCHEMES = {kind: family.scheme for family in FAMILIES for kind in family.blocks}

_SANDWICH = "has a norm on both sides of each branch, x + N(F(N(x))) (sandwich)"
_PARALLEL = "has parallel sublayers that read the same input, x + A(N(x)) + F(N(x))"
_REORDERED = "has its norms on the branches, x + N(F(x))"


def _always(_: Any) -> bool:
    return True


REFUSED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        ("Gemma2DecoderLayer", "Gemma3DecoderLayer", "Gemma3nTextDecoderLayer", "Glm4DecoderLayer"),
        (_SANDWICH, _always),
    ),
    **dict.fromkeys(
        ("GPTJBlock", "CodeGenBlock", "PhiDecoderLayer", "CohereDecoderLayer", "Cohere2DecoderLayer"),
        (_PARALLEL, _always),
    ),
    "FalconDecoderLayer": (_PARALLEL, lambda block: not hasattr(block, "post_attention_layernorm")),
    **dict.fromkeys(("GPTNeoXLayer", "StableLmDecoderLayer"), (_PARALLEL, lambda block: block.use_parallel_residual)),
    **dict.fromkeys(("ParallelScalingBlock", "ParallelThingsBlock"), (_PARALLEL, _always)),
    **dict.fromkeys(("Olmo2DecoderLayer", "Olmo3DecoderLayer", "ResPostBlock"), (_REORDERED, _always)),
}
"""Classes of blocks with another scheme: what it is, and whether this block has it."""


def is_norm_first(kind: type, spec: BlockSpec | None, block: Any) -> bool:
    """A block of this class is declared to compute x + F(N(x))."""
    declared = None if spec is None else spec.norm_first
    if isinstance(declared, str):
        return bool(at(block, declared))
    return _SCHEMES.get(full_name(kind)) == "prenorm" if declared is None else declared


def refuse_other_schemes(model: nn.Module, by: str = "swap_residuals", takes_parallel: bool = False) -> None:
    """InputError that names a block of a form that `by` cannot take. `takes_parallel`: it takes declared blocks with
    parallel sublayers, each with its own norm."""
    for path, block in model.named_modules():
        name = next((kind.__name__ for kind in type(block).__mro__ if kind.__name__ in REFUSED), None)
        if name is None or not type(block).__module__.startswith(("transformers.", "timm.")):
            continue
        reason, applies = REFUSED[name]
        is_taken = takes_parallel and reason is _PARALLEL and full_name(type(block)) in BLOCKS
        if applies(block) and not is_taken:
            forms = "x + F(N(x)) and N(x + F(x))" if by == "swap_residuals" else "x + F(N(x))"
            raise InputError(
                f"{name} at {path or 'the top'} {reason}; {by} takes over blocks of {forms}, one norm a sublayer: "
                "choose a model with such blocks, or pass the part of yours that has them"
            )


def refuse_old_library() -> None:
    """InputError for transformers before 5, whose blocks return tuples."""
    version = getattr(sys.modules.get("transformers"), "__version__", "5")
    if int(version.partition(".")[0]) < 5:
        raise InputError(f"swap_residuals knows the blocks of transformers 5 and later; got {version}: upgrade it")


def full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# For the documentation.


def table() -> list[tuple[str, list[str], str]]:
    """(family, classes of blocks, own scheme) of all known blocks, torch.nn's first."""
    torchs = ["TransformerEncoderLayer", "TransformerDecoderLayer"]
    known = [(f.name, [kind.rpartition(".")[2] for kind in f.blocks], f.scheme) for f in FAMILIES]
    return [("torch.nn", torchs, "postnorm, or prenorm with `norm_first`"), *known]


def exact() -> list[str]:
    """The families with a declared residual stream, for exact swaps."""
    return [f.name for f in FAMILIES if any(stack.writers for stack in f.stacks.values())]


def refused() -> dict[str, list[str]]:
    """Classes of blocks by the form that no swap takes over."""
    forms: dict[str, list[str]] = {}
    for name, (form, _) in REFUSED.items():
        forms.setdefault(form.partition(" ")[2], []).append(name)
    return forms
