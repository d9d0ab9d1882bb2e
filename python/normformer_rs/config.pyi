"""Made by `python -m normformer_rs._stubs --write` out of the lists of options in Rust; do not edit."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from .norms import Norm
from .schemes import Scheme

_C = TypeVar("_C", bound=Config)

class Field(NamedTuple):
    name: str
    kind: str
    optional: bool
    default: Any
    choices: tuple[str, ...]
    help: str
    group: str
    per_layer: bool = False
    def check(self, value: Any) -> Any: ...

class Config:
    FIELDS: ClassVar[tuple[Field, ...]]
    def __init__(self, **options: Any) -> None: ...
    def asdict(self) -> dict[str, Any]: ...
    def replace(self: _C, **options: Any) -> _C: ...
    def to_json(self, kinds: tuple[str, ...] | None = None) -> str: ...
    @classmethod
    def from_dict(cls: type[_C], options: Mapping[str, Any], *, trust: bool = False) -> _C: ...
    @classmethod
    def from_json(cls: type[_C], text: str, *, trust: bool = False) -> _C: ...

_Architecture = Literal["encoder-decoder", "decoder-only"]
_Attention = Literal["multi-head", "tensorized"]
_OutputGate = Literal["head", "element"]
_Activation = Literal["relu", "gelu", "silu", "relu2", "swiglu", "geglu"]
_Norm = Literal[
    "layernorm",
    "rmsnorm",
    "scalenorm",
    "scalenorm-fixed",
    "lpnorm",
    "batchnorm",
    "powernorm-v",
    "powernorm",
    "repbn",
    "prepbn",
    "dyt",
    "derf",
    "l2norm",
    "gated-rmsnorm",
    "rmsnorm:llama",
    "rmsnorm:olmo",
    "rmsnorm:gemma",
    "rmsnorm:gemma4",
    "rmsnorm:deepseek-v4",
    "rmsnorm:nanochat",
    "rmsnorm:original",
    "rmsnorm:partial",
]
_RmsnormCast = Literal["after", "before", "scale"]
_RmsnormEpsPlace = Literal["inside", "outside"]
_PowernormMode = Literal["paper", "release"]
_RepbnStart = Literal["ones", "zeros"]
_PrepbnRow = Literal["layernorm", "rmsnorm"]
_Residual = Literal[
    "prenorm",
    "postnorm",
    "deepnorm",
    "branchnorm",
    "rezero",
    "r-fixup",
    "t-fixup",
    "admin",
    "admin-const",
    "dlcl",
    "normformer",
    "subln",
    "sandwich",
    "layerscale",
    "resi-dual",
    "hybridnorm",
    "hybridnorm-star",
    "peri-ln",
    "olmo2",
    "ln-scaling",
    "mix-ln",
    "denseformer",
    "attnres",
    "mhc",
    "hyper-connections",
    "prores",
    "b2t",
    "gpas",
    "value-residual",
    "x0-lambdas",
    "depth-scaled",
    "variance-gate",
    "keel",
    "mhc-lite",
    "ngpt",
]
_QkNormOver = Literal["head", "all-heads"]
_VNorm = Literal["weighted", "unweighted"]
_Init = Literal[
    "xavier",
    "smallinit",
    "fairseq",
    "fairseq-0.12.2",
    "deepnorm",
    "subln",
    "ds-init",
    "t-fixup",
    "r-fixup",
    "gpt2",
    "normal",
    "llama-depth",
    "fan-in",
    "b2t",
]
_BranchnormGrowth = Literal["linear", "exp", "sigmoid"]
_RFixupMode = Literal["release", "paper"]
_DlclNorm = Literal["pre", "post"]
_NormformerMode = Literal["paper", "fairseq"]
_LnScalingMode = Literal["constant", "weight"]
_AttnresForm = Literal["plain", "normed"]
_MhcMixing = Literal["sinkhorn", "none", "channel"]
_MhcEnd = Literal["gates", "mean"]
_ProresScheme = Literal["prenorm", "postnorm", "deepnorm", "sandwich", "ln-scaling"]
_GpasScheme = Literal["prenorm", "postnorm", "deepnorm", "sandwich", "ln-scaling", "mix-ln"]
_Parametrisation = Literal["standard", "mup", "depth-mup", "completep", "u-mup"]
_AttentionScale = Literal["inverse-sqrt", "inverse"]
_Positions = Literal["twt", "fairseq", "learned", "rotary", "none"]
_DecoderStart = Literal["bos", "eos"]
_TieEmbeddings = Literal["all", "decoder", "none"]
_Schedule = Literal["inverse-sqrt", "val-decay", "no-warmup", "t-fixup", "constant", "cosine", "linear", "wsd"]
_Optimizer = Literal["adam", "muon", "normuon", "lion"]
_MuonScale = Literal["rms", "spectral"]
_AdamForm = Literal["fairseq", "torch"]
_WeightDecayOf = Literal["matrices", "all"]
_Smoothing = Literal["fairseq", "twt"]
_Criterion = Literal["bleu", "loss"]
_EvaluationTokenize = Literal["none", "13a", "zh", "char"]
_Precision = Literal["f32", "bf16"]
_Rule = Literal["google", "fairseq"]

@dataclass(frozen=True)
class TransformerConfig(Config):
    """A Transformer."""

    architecture: _Architecture
    vocab_size: int
    d_model: int
    d_ff: int
    heads: int
    kv_heads: int | None
    attention: _Attention
    tensorized_rank: int
    tensorized_segment: int
    output_gate: _OutputGate | None
    sinks: bool
    score_softcap: float | None
    value_embeddings: bool
    smear: bool
    activation: _Activation
    linear_biases: bool
    encoder_layers: int
    decoder_layers: int
    norm: _Norm | Norm | str
    encoder_norm: _Norm | Norm | str | None
    decoder_norm: _Norm | Norm | str | None
    norm_eps: float | None
    rmsnorm_weight: bool
    rmsnorm_zero_centred: bool
    rmsnorm_cast: _RmsnormCast
    rmsnorm_eps_place: _RmsnormEpsPlace
    rmsnorm_part: float
    lpnorm_p: float
    batchnorm_alpha: float
    groupscaling: int
    powernorm_alpha_fwd: float
    powernorm_alpha_bwd: float
    powernorm_warmup: int
    powernorm_mode: _PowernormMode
    powernorm_sync: bool
    repbn_start: _RepbnStart
    prepbn_steps: int
    prepbn_warm: int
    prepbn_row: _PrepbnRow
    gated_rmsnorm_rank: int
    residual: _Residual | Scheme | str
    qk_norm: bool
    qk_norm_over: _QkNormOver
    qk_norm_after_rotation: bool
    qk_norm_weight: bool
    qk_norm_scale: float
    v_norm: _VNorm | None
    qk_l2norm: int | None
    init: _Init | None
    branchnorm_steps: int
    branchnorm_growth: _BranchnormGrowth
    r_fixup_mode: _RFixupMode
    dlcl_norm: _DlclNorm
    normformer_head_scale: bool
    normformer_attention_norm: bool
    normformer_ffn_norm: bool
    normformer_residual_scale: bool
    normformer_mode: _NormformerMode
    layerscale_init: float
    peri_ln_embedding_norm: bool
    ln_scaling_mode: _LnScalingMode
    mix_ln_part: float
    attnres_block: int
    attnres_form: _AttnresForm
    attnres_queries: int
    mhc_streams: int
    mhc_iterations: int
    mhc_mixing: _MhcMixing
    mhc_magnitude: float
    mhc_rank: int
    mhc_end: _MhcEnd
    hyper_connections_streams: int
    hyper_connections_dynamic: bool
    prores_steps: int
    prores_scheme: _ProresScheme
    gpas_scheme: _GpasScheme
    value_residual_start: float
    value_residual_learned: bool
    x0_lambdas_backout: bool
    variance_gate_temperature: float
    keel_alpha: float
    mhc_lite_streams: int
    ds_init_alpha: float
    ds_init_mode: _PowernormMode
    init_std: float
    fixnorm: bool
    parametrisation: _Parametrisation
    base_width: int | None
    base_depth: int | None
    depth_alpha: float | None
    input_alpha: float
    output_alpha: float
    residual_multiplier: float
    attention_multiplier: float | None
    attention_scale: _AttentionScale | None
    attention_length: int | None
    attn_softmax_alpha: float
    ffn_act_alpha: float
    res_alpha: float
    res_attn_ratio: float
    positions: _Positions
    max_positions: int
    rope_theta: float
    scale_embeddings: bool
    decoder_start: _DecoderStart
    tie_embeddings: _TieEmbeddings
    output_bias: bool
    logit_scale: bool
    logit_softcap: float | None
    dropout: float
    embedding_dropout: float | None
    attention_dropout: float | None
    activation_dropout: float | None
    def __init__(
        self,
        *,
        architecture: _Architecture = ...,
        vocab_size: int = ...,
        d_model: int = ...,
        d_ff: int = ...,
        heads: int = ...,
        kv_heads: int | None = ...,
        attention: _Attention = ...,
        tensorized_rank: int = ...,
        tensorized_segment: int = ...,
        output_gate: _OutputGate | None = ...,
        sinks: bool = ...,
        score_softcap: float | None = ...,
        value_embeddings: bool = ...,
        smear: bool = ...,
        activation: _Activation = ...,
        linear_biases: bool = ...,
        encoder_layers: int = ...,
        decoder_layers: int = ...,
        norm: _Norm | Norm | str = ...,
        encoder_norm: _Norm | Norm | str | None = ...,
        decoder_norm: _Norm | Norm | str | None = ...,
        norm_eps: float | None = ...,
        rmsnorm_weight: bool = ...,
        rmsnorm_zero_centred: bool = ...,
        rmsnorm_cast: _RmsnormCast = ...,
        rmsnorm_eps_place: _RmsnormEpsPlace = ...,
        rmsnorm_part: float = ...,
        lpnorm_p: float = ...,
        batchnorm_alpha: float = ...,
        groupscaling: int = ...,
        powernorm_alpha_fwd: float = ...,
        powernorm_alpha_bwd: float = ...,
        powernorm_warmup: int = ...,
        powernorm_mode: _PowernormMode = ...,
        powernorm_sync: bool = ...,
        repbn_start: _RepbnStart = ...,
        prepbn_steps: int = ...,
        prepbn_warm: int = ...,
        prepbn_row: _PrepbnRow = ...,
        gated_rmsnorm_rank: int = ...,
        residual: _Residual | Scheme | str = ...,
        qk_norm: bool = ...,
        qk_norm_over: _QkNormOver = ...,
        qk_norm_after_rotation: bool = ...,
        qk_norm_weight: bool = ...,
        qk_norm_scale: float = ...,
        v_norm: _VNorm | None = ...,
        qk_l2norm: int | None = ...,
        init: _Init | None = ...,
        branchnorm_steps: int = ...,
        branchnorm_growth: _BranchnormGrowth = ...,
        r_fixup_mode: _RFixupMode = ...,
        dlcl_norm: _DlclNorm = ...,
        normformer_head_scale: bool = ...,
        normformer_attention_norm: bool = ...,
        normformer_ffn_norm: bool = ...,
        normformer_residual_scale: bool = ...,
        normformer_mode: _NormformerMode = ...,
        layerscale_init: float = ...,
        peri_ln_embedding_norm: bool = ...,
        ln_scaling_mode: _LnScalingMode = ...,
        mix_ln_part: float = ...,
        attnres_block: int = ...,
        attnres_form: _AttnresForm = ...,
        attnres_queries: int = ...,
        mhc_streams: int = ...,
        mhc_iterations: int = ...,
        mhc_mixing: _MhcMixing = ...,
        mhc_magnitude: float = ...,
        mhc_rank: int = ...,
        mhc_end: _MhcEnd = ...,
        hyper_connections_streams: int = ...,
        hyper_connections_dynamic: bool = ...,
        prores_steps: int = ...,
        prores_scheme: _ProresScheme = ...,
        gpas_scheme: _GpasScheme = ...,
        value_residual_start: float = ...,
        value_residual_learned: bool = ...,
        x0_lambdas_backout: bool = ...,
        variance_gate_temperature: float = ...,
        keel_alpha: float = ...,
        mhc_lite_streams: int = ...,
        ds_init_alpha: float = ...,
        ds_init_mode: _PowernormMode = ...,
        init_std: float = ...,
        fixnorm: bool = ...,
        parametrisation: _Parametrisation = ...,
        base_width: int | None = ...,
        base_depth: int | None = ...,
        depth_alpha: float | None = ...,
        input_alpha: float = ...,
        output_alpha: float = ...,
        residual_multiplier: float = ...,
        attention_multiplier: float | None = ...,
        attention_scale: _AttentionScale | None = ...,
        attention_length: int | None = ...,
        attn_softmax_alpha: float = ...,
        ffn_act_alpha: float = ...,
        res_alpha: float = ...,
        res_attn_ratio: float = ...,
        positions: _Positions = ...,
        max_positions: int = ...,
        rope_theta: float = ...,
        scale_embeddings: bool = ...,
        decoder_start: _DecoderStart = ...,
        tie_embeddings: _TieEmbeddings = ...,
        output_bias: bool = ...,
        logit_scale: bool = ...,
        logit_softcap: float | None = ...,
        dropout: float = ...,
        embedding_dropout: float | None = ...,
        attention_dropout: float | None = ...,
        activation_dropout: float | None = ...,
    ) -> None: ...

@dataclass(frozen=True)
class TrainingConfig(Config):
    """A training run."""

    updates: int
    epochs: int
    max_tokens: int
    accumulate: int
    schedule: _Schedule
    lr: float | None
    lr_scale: float
    lr_multiplier: float
    warmup: int
    warmup_share: float | None
    lr_end: float
    decay_share: float
    warmup_init_lr: float
    lr_decay_rule: _RFixupMode
    lr_decay_factor: float
    lr_decay_patience: int
    count_from_zero: bool
    min_lr: float
    optimizer: _Optimizer
    muon_momentum: float
    muon_nesterov: bool
    muon_scale: _MuonScale
    muon_lr_multiplier: float
    muon_on_sphere: bool
    normuon_beta2: float
    beta1: float
    beta2: float
    adam_eps: float
    adam_form: _AdamForm
    weight_decay: float
    weight_decay_of: _WeightDecayOf
    unit_matrices: bool
    clip_norm: float
    qk_clip: float
    label_smoothing: float
    smoothing: _Smoothing
    z_loss: float
    vocab_mask: bool
    word_dropout: float
    evaluate_every: int
    criterion: _Criterion
    patience: int
    keep: int
    log_layers: int
    log_statistics: int
    evaluation_beam: int
    evaluation_tokenize: _EvaluationTokenize
    activation_checkpointing: bool
    precision: _Precision
    moments: _Precision
    device: str
    cuda_graphs: bool
    seed: int
    def __init__(
        self,
        *,
        updates: int = ...,
        epochs: int = ...,
        max_tokens: int = ...,
        accumulate: int = ...,
        schedule: _Schedule = ...,
        lr: float | None = ...,
        lr_scale: float = ...,
        lr_multiplier: float = ...,
        warmup: int = ...,
        warmup_share: float | None = ...,
        lr_end: float = ...,
        decay_share: float = ...,
        warmup_init_lr: float = ...,
        lr_decay_rule: _RFixupMode = ...,
        lr_decay_factor: float = ...,
        lr_decay_patience: int = ...,
        count_from_zero: bool = ...,
        min_lr: float = ...,
        optimizer: _Optimizer = ...,
        muon_momentum: float = ...,
        muon_nesterov: bool = ...,
        muon_scale: _MuonScale = ...,
        muon_lr_multiplier: float = ...,
        muon_on_sphere: bool = ...,
        normuon_beta2: float = ...,
        beta1: float = ...,
        beta2: float = ...,
        adam_eps: float = ...,
        adam_form: _AdamForm = ...,
        weight_decay: float = ...,
        weight_decay_of: _WeightDecayOf = ...,
        unit_matrices: bool = ...,
        clip_norm: float = ...,
        qk_clip: float = ...,
        label_smoothing: float = ...,
        smoothing: _Smoothing = ...,
        z_loss: float = ...,
        vocab_mask: bool = ...,
        word_dropout: float = ...,
        evaluate_every: int = ...,
        criterion: _Criterion = ...,
        patience: int = ...,
        keep: int = ...,
        log_layers: int = ...,
        log_statistics: int = ...,
        evaluation_beam: int = ...,
        evaluation_tokenize: _EvaluationTokenize = ...,
        activation_checkpointing: bool = ...,
        precision: _Precision = ...,
        moments: _Precision = ...,
        device: str = ...,
        cuda_graphs: bool = ...,
        seed: int = ...,
    ) -> None: ...

@dataclass(frozen=True)
class DataConfig(Config):
    """The text of a training run, and how it is cut into pieces."""

    train_source: str | None
    train_target: str
    valid_source: str | None
    valid_target: str
    bpe_operations: int | None
    bpe_codes: str | None
    no_bpe: bool
    data_bin: str | None
    source_lang: str | None
    target_lang: str | None
    skip_long: bool
    segment_length: int
    def __init__(
        self,
        *,
        train_source: str | None = ...,
        train_target: str = ...,
        valid_source: str | None = ...,
        valid_target: str = ...,
        bpe_operations: int | None = ...,
        bpe_codes: str | None = ...,
        no_bpe: bool = ...,
        data_bin: str | None = ...,
        source_lang: str | None = ...,
        target_lang: str | None = ...,
        skip_long: bool = ...,
        segment_length: int = ...,
    ) -> None: ...

@dataclass(frozen=True)
class SearchConfig(Config):
    """How translations are searched."""

    beam: int
    rule: _Rule
    alpha: float | None
    n_best: int
    max_length: int | None
    def __init__(
        self,
        *,
        beam: int = ...,
        rule: _Rule = ...,
        alpha: float | None = ...,
        n_best: int = ...,
        max_length: int | None = ...,
    ) -> None: ...

@dataclass(frozen=True)
class GenerationConfig(Config):
    """How a language model continues a text."""

    temperature: float
    top_k: int | None
    top_p: float
    max_length: int
    sentences: int
    samples: int
    context: int | None
    seed: int
    def __init__(
        self,
        *,
        temperature: float = ...,
        top_k: int | None = ...,
        top_p: float = ...,
        max_length: int = ...,
        sentences: int = ...,
        samples: int = ...,
        context: int | None = ...,
        seed: int = ...,
    ) -> None: ...

ENTRIES: dict[str, list[dict[str, Any]]]
LANGUAGE_MODELS: tuple[str, ...]
ATTENTION: tuple[str, ...]
PARAMETRISATION: tuple[str, ...]
__version__: str

def readable(name: str, text: str) -> str: ...
def speaking_flags() -> AbstractContextManager[None]: ...

OWN: dict[str, str]

def closest(got: str, choices: Iterable[str]) -> str: ...
def unknown(what: str, got: str, choices: Iterable[str]) -> str: ...
def split(options: Mapping[str, Any], *kinds: type[Config]) -> list[dict[str, Any]]: ...
def tables() -> dict[str, list[dict[str, Any]]]: ...
