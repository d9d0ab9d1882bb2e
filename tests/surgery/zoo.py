"""A zoo of small models written by others, of random weights: each builder gives a model and what to call it with.

`MODELS` is for every day, `UNSEEN` is kept aside as a blind test, and `KNOWN` says what a model's blocks compute.
Nothing is downloaded and nothing drops out. `LIBRARY` says where a model comes from, None for those written here; its
builder raises ImportError where that library is missing.
"""

import dataclasses
import importlib
import warnings
from functools import partial

import torch
from block_models import FF, HEADS, D, move
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

LAYERS = 3
# for whichever of these names a config has
SIZES = {
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim"], D),
    **dict.fromkeys(["decoder_hidden_size", "encoder_hidden_size", "projection_dim", "dim", "emb_dim"], D),
    **dict.fromkeys(["num_hidden_layers", "num_layers", "n_layer", "n_layers"], LAYERS),
    **dict.fromkeys(["encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"], 2),
    **dict.fromkeys(["encoder_num_hidden_layers", "decoder_num_hidden_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "num_heads", "n_head", "n_heads"], HEADS),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], HEADS),
    **dict.fromkeys(["encoder_num_attention_heads", "decoder_num_attention_heads"], HEADS),
    **dict.fromkeys(["num_encoder_attention_heads", "num_decoder_attention_heads"], HEADS),
    **dict.fromkeys(["intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"], FF),
    **dict.fromkeys(["decoder_intermediate_size", "d_inner", "dff"], FF),
    **dict.fromkeys(["max_position_embeddings", "n_positions"], 32),
    **dict.fromkeys(["max_target_positions", "max_2d_position_embeddings"], 32),
    **dict.fromkeys(["head_dim", "d_kv", "kv_lora_rank", "q_lora_rank", "mamba_d_head"], 8),
    **dict.fromkeys(["num_mel_bins", "max_source_positions", "classifier_proj_size"], 8),
    **dict.fromkeys(["qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "mamba_n_heads", "rotary_dim"], 4),
    **dict.fromkeys(["mamba_d_state", "state_size", "sliding_window", "patch_size", "num_conv_pos_embeddings"], 4),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], D),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "attention_window"], 4),
    **dict.fromkeys(["num_experts_per_tok", "num_key_value_heads", "decoder_start_token_id", "eos_token_id"], 2),
    **dict.fromkeys(["num_conv_pos_embedding_groups", "num_frames", "num_codebooks"], 2),
    **dict.fromkeys(["n_group", "topk_group", "first_k_dense_replace", "bos_token_id"], 1),
    **dict.fromkeys(["forced_eos_token_id", "forced_bos_token_id"]),
    **dict.fromkeys(["vocab_size", "n_words", "src_vocab_size", "tgt_vocab_size"], 40),
    **dict.fromkeys(["use_cache", "apply_spec_augment"], False),
    **dict.fromkeys(["router_jitter_noise", "input_jitter_noise"], 0.0),
    "pad_token_id": 0,
    "image_size": 8,
    "conv_dim": (8, 8),
    "conv_kernel": (3, 3),
    "conv_stride": (2, 2),
}


def configure(kind, given):
    """A small config of the class without dropout, with what is given, in its sub-configs too."""
    import transformers

    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    config = {name: size for name, size in SIZES.items() if name in fields}
    config |= {name: type(d)(0) for name, d in fields.items() if "drop" in name and type(d) in (int, float)}
    config |= given
    for name, sub in kind.sub_configs.items():
        value = given.get(name, {})
        if isinstance(value, tuple):
            sub, value = getattr(transformers, value[0]), value[1]
        if dataclasses.is_dataclass(sub):
            config[name] = configure(sub, value)
    return kind(**config)


def hugging_face(name, inputs, given):
    """The transformers model of that name."""
    import transformers

    kind = getattr(transformers, name)
    torch.manual_seed(0)
    config = configure(kind.config_class, given)
    config._experts_implementation = "eager"  # the default one has no float64
    return move(kind(config)), inputs()


def elsewhere(module, name, inputs, given):
    """A model of another library."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = getattr(importlib.import_module(module), name)
        torch.manual_seed(0)
        model = kind(**{key: value() if callable(value) else value for key, value in given.items()})
    for part in model.modules():
        if hasattr(part, "dropout_prob"):  # of diffusers' labels
            part.dropout_prob = 0.0
    return move(model), inputs()


def written(make, inputs):
    """A model written here."""
    torch.manual_seed(0)
    return move(make()), inputs()


def merged(parts, given):
    return {name: value for part in (*parts, given) for name, value in part.items()}


def hf(name, remark, inputs=None, *parts, **given):
    """A row: a builder, a remark and a library."""
    return partial(hugging_face, name, inputs or text, merged(parts, given)), remark, "transformers"


def other(module, name, remark, inputs, *parts, **given):
    """A row of another library; what is given as a function is called, to import lazily."""
    return partial(elsewhere, module, name, inputs, merged(parts, given)), remark, module.partition(".")[0]


def own(make, remark, inputs=None):
    """A row of a model written here."""
    return partial(written, make, inputs or tokens), remark, None


def rand(*shape):
    torch.manual_seed(2)
    return torch.randn(*shape)


def ids(length=8):
    torch.manual_seed(2)
    return torch.randint(3, 40, (2, length))


def tokens():
    return {"tokens": ids()}


def only(length=8):
    """Tokens without a mask."""
    return {"input_ids": ids(length)}


def text():
    """The second sequence ends in padding."""
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": ids(), "attention_mask": mask}


def seq2seq():
    return text() | {"decoder_input_ids": ids(7)}


def pixels(size=8, name="pixel_values", frames=()):
    return {name: rand(2, *frames, 3, size, size)}


def video():
    return pixels(frames=(2,))


def both():
    """A text and an image."""
    return text() | pixels()


def seen(front=0):
    """A text whose tokens 39 stand for the four patches of an image."""
    return {"input_ids": torch.tensor([[5] * front + [39] * 4 + [6, 7, 8]] * 2)} | pixels()


def audio():
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, 28:] = 0
    return {"input_values": rand(2, 40), "attention_mask": mask}


def unmasked():
    return {"input_values": rand(2, 40)}


def mel(*shape, **more):
    return {"input_features": rand(2, *shape)} | more


def spoken(*shape, name="input_features"):
    return {name: rand(2, *shape), "decoder_input_ids": ids(7)}


def series():
    given = {"past_values": rand(2, 15), "past_time_features": rand(2, 15, 1), "past_observed_mask": torch.ones(2, 15)}
    return given | {"future_values": rand(2, 4), "future_time_features": rand(2, 4, 1)}


def latents(text=True, **more):
    """Of a diffusion model."""
    given = {"hidden_states": rand(2, 4, 8, 8), "timestep": torch.tensor([3, 7])}
    return given | ({"encoder_hidden_states": rand(2, 5, 12)} if text else {}) | more


T5 = {"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0, "num_layers": 2}
MLA = {"num_key_value_heads": HEADS}  # latent attention
DELTA = dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim"], 4)
DELTA |= dict.fromkeys(["linear_num_key_heads", "linear_num_value_heads"], 2)
SWIN = {"image_size": 32, "embed_dim": D, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
PYRAMID = {"num_encoder_blocks": 2, "depths": [2, 2], "hidden_sizes": [D, 2 * D], "num_attention_heads": [2, 4]}
PYRAMID |= {"patch_sizes": [7, 3], "strides": [4, 2], "sr_ratios": [2, 1], "mlp_ratios": [2, 2]}
PVT = PYRAMID | {"patch_sizes": [4, 2], "sequence_reduction_ratios": [2, 1]}
CONVNEXT = {"num_stages": 2, "depths": [2, 2], "hidden_sizes": [D, 2 * D]}
FOCAL = {"image_size": 32, "embed_dim": D, "hidden_sizes": [D, 2 * D], "depths": [2, 2]}
FOCAL |= {"focal_levels": [2, 2], "focal_windows": [3, 3]}
CVT = {"patch_sizes": [7, 3], "patch_stride": [4, 2], "patch_padding": [2, 1], "embed_dim": [D, 2 * D]}
CVT |= {"num_heads": [2, 4], "depth": [2, 2], "mlp_ratio": [2.0, 2.0], "qkv_bias": [True] * 2}
CVT |= {"cls_token": [False, True], "qkv_projection_method": ["dw_bn"] * 2, "kernel_qkv": [3, 3]}
CVT |= {"padding_kv": [1, 1], "stride_kv": [2, 2], "padding_q": [1, 1], "stride_q": [1, 1]}
CVT |= {"attention_drop_rate": [0.0] * 2, "drop_rate": [0.0] * 2, "drop_path_rate": [0.0] * 2}
STABLE = {"do_stable_layer_norm": True, "feat_extract_norm": "layer"}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}
DETR = {"backbone_config": ("ResNetConfig", RESNET | {"out_features": ["stage2"]}), "num_queries": 5}
FORECAST = {"prediction_length": 4, "context_length": 8, "num_time_features": 1}
ZAMBA = {"layer_types": ["mamba", "mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 5, "n_mamba_heads": 4}
ZAMBA |= {"attention_hidden_size": FF, "num_key_value_heads": HEADS}

DECODERS = {
    "Llama": hf("LlamaForCausalLM", "prenorm"),
    "Mistral": hf("MistralForCausalLM", "prenorm"),
    "Ministral": hf("MinistralForCausalLM", "prenorm"),
    "Qwen2": hf("Qwen2ForCausalLM", "prenorm"),
    "Qwen3": hf("Qwen3ForCausalLM", "prenorm"),
    "Gemma": hf("GemmaForCausalLM", "prenorm"),
    "Gemma2": hf("Gemma2ForCausalLM", "sandwich"),
    "Gemma3": hf("Gemma3ForCausalLM", "sandwich"),
    "VaultGemma": hf("VaultGemmaForCausalLM", "prenorm"),
    "Phi": hf("PhiForCausalLM", "parallel"),
    "Phi3": hf("Phi3ForCausalLM", "prenorm"),
    "OLMo": hf("OlmoForCausalLM", "prenorm"),
    "OLMo2": hf("Olmo2ForCausalLM", "x + N(F(x))"),
    "OLMo3": hf("Olmo3ForCausalLM", "x + N(F(x))"),
    "Cohere": hf("CohereForCausalLM", "parallel"),
    "Cohere2": hf("Cohere2ForCausalLM", "parallel"),
    "GPT": hf("OpenAIGPTLMHeadModel", "postnorm"),
    "GPT2": hf("GPT2LMHeadModel", "prenorm"),
    "GPTJ": hf("GPTJForCausalLM", "parallel"),
    "GPTNeo": hf("GPTNeoForCausalLM", "prenorm", attention_types=[[["global", "local", "global"], 1]], window_size=4),
    "GPTNeoX": hf("GPTNeoXForCausalLM", "parallel, two norms"),
    "GPTNeoX, sequential": hf("GPTNeoXForCausalLM", "prenorm", use_parallel_residual=False),
    "GPTNeoX, Japanese": hf("GPTNeoXJapaneseForCausalLM", "prenorm, the sum in a function"),
    "GPTBigCode": hf("GPTBigCodeForCausalLM", "prenorm"),
    "GPT-OSS": hf("GptOssForCausalLM", "prenorm, experts"),
    "Falcon": hf("FalconForCausalLM", "parallel"),
    "Falcon, new": hf("FalconForCausalLM", "parallel, two norms", new_decoder_architecture=True, num_kv_heads=2),
    "Falcon, sequential": hf("FalconForCausalLM", "prenorm", parallel_attn=False, alibi=True),
    "StableLM": hf("StableLmForCausalLM", "prenorm"),
    "StableLM, parallel": hf("StableLmForCausalLM", "parallel", use_parallel_residual=True),
    "Starcoder2": hf("Starcoder2ForCausalLM", "prenorm"),
    "BLOOM": hf("BloomForCausalLM", "prenorm, the sum within the branches"),
    "MPT": hf("MptForCausalLM", "prenorm, the second sum within the feed-forward"),
    "OPT": hf("OPTForCausalLM", "prenorm"),
    "OPT, post-norm": hf("OPTForCausalLM", "postnorm", do_layer_norm_before=False),
    "BioGPT": hf("BioGptForCausalLM", "prenorm"),
    "Granite": hf("GraniteForCausalLM", "prenorm with multiplier", residual_multiplier=0.5),
    "GraniteMoe": hf("GraniteMoeForCausalLM", "prenorm with multiplier, experts", residual_multiplier=0.5),
    "Mixtral": hf("MixtralForCausalLM", "prenorm, experts"),
    "Qwen2Moe": hf("Qwen2MoeForCausalLM", "prenorm, experts"),
    "Qwen3Moe": hf("Qwen3MoeForCausalLM", "prenorm, experts"),
    "Qwen3.5": hf("Qwen3_5ForCausalLM", "prenorm", **DELTA),
    "Qwen3Next": hf("Qwen3NextForCausalLM", "prenorm, experts", **DELTA),
    "OLMoE": hf("OlmoeForCausalLM", "prenorm, experts"),
    "FlexOLMo": hf("FlexOlmoForCausalLM", "x + N(F(x)), experts"),
    "DeepSeekV2": hf("DeepseekV2ForCausalLM", "prenorm, experts", **MLA),
    "DeepSeekV3": hf("DeepseekV3ForCausalLM", "prenorm, experts", **MLA),
    "DBRX": hf(
        "DbrxForCausalLM",
        "prenorm, experts, a block in two modules",
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": D, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "Mistral4": hf("Mistral4ForCausalLM", "prenorm, experts", **MLA),
    "Gemma4": hf(
        "Gemma4ForCausalLM",
        "sandwich, and a gated third branch",
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=40,
    ),
    "GraniteMoeHybrid": hf(
        "GraniteMoeHybridForCausalLM",
        "prenorm with multiplier, experts",
        residual_multiplier=0.5,
        mamba_n_groups=1,
        layer_types=["mamba", "attention", "mamba"],
    ),
    "NemotronH": hf(
        "NemotronHForCausalLM",
        "prenorm, one branch a block, experts",
        text,
        {"conv_kernel": 4, "layers_block_type": ["mamba", "attention", "moe"], "ssm_state_size": 4, "n_groups": 1},
        {"mamba_num_heads": 4, "mamba_head_dim": 8, "chunk_size": 4, "moe_shared_expert_intermediate_size": D},
    ),
    "HyperCLOVA X": hf(
        "HyperCLOVAXForCausalLM", "sandwich with multiplier", residual_multiplier=0.5, use_post_norm=True
    ),
    "Jais2": hf("Jais2ForCausalLM", "prenorm"),
    "PhiMoE": hf("PhimoeForCausalLM", "prenorm, experts"),
    "Jamba": hf("JambaForCausalLM", "prenorm, experts"),
    "Mamba": hf("MambaForCausalLM", "prenorm, one branch a block", conv_kernel=4, residual_in_fp32=False),
    "Mamba2": hf(
        "Mamba2ForCausalLM",
        "prenorm, one branch a block",
        text,
        {"head_dim": 8, "n_groups": 2, "chunk_size": 4, "conv_kernel": 4, "residual_in_fp32": False},
    ),
    "FalconMamba": hf("FalconMambaForCausalLM", "prenorm, one branch a block", conv_kernel=4, residual_in_fp32=False),
    "RWKV": hf("RwkvForCausalLM", "prenorm"),
    "RecurrentGemma": hf("RecurrentGemmaForCausalLM", "prenorm", lru_width=D, attention_window_size=4),
    "GLM": hf("GlmForCausalLM", "prenorm"),
    "GLM4": hf("Glm4ForCausalLM", "sandwich"),
    "GLM4-MoE": hf("Glm4MoeForCausalLM", "prenorm, experts"),
    "Nemotron": hf("NemotronForCausalLM", "prenorm"),
    "Persimmon": hf("PersimmonForCausalLM", "prenorm"),
    "Exaone4": hf("Exaone4ForCausalLM", "x + N(F(x))"),
    "SmolLM3": hf("SmolLM3ForCausalLM", "prenorm"),
    "Ernie4.5": hf("Ernie4_5ForCausalLM", "prenorm"),
    "DiffLlama": hf("DiffLlamaForCausalLM", "prenorm"),
    "Bamba": hf("BambaForCausalLM", "prenorm"),
    "Zamba2": hf(
        "Zamba2ForCausalLM",
        "x + F(N(x + G(x))), G shared by layers",
        text,
        {**ZAMBA, "hybrid_layer_ids": [2, 4], "num_mem_blocks": 1, "mamba_headdim": 8, "mamba_ngroups": 1},
        {"chunk_size": 4, "attention_head_dim": 8, "adapter_rank": 4},
    ),
    "HunYuan": hf("HunYuanDenseV1ForCausalLM", "prenorm"),
    "Arcee": hf("ArceeForCausalLM", "prenorm"),
    "Apertus": hf("ApertusForCausalLM", "prenorm"),
    "Seed-OSS": hf("SeedOssForCausalLM", "prenorm"),
    "Dots1": hf("Dots1ForCausalLM", "prenorm, experts", n_shared_experts=1),
    "MiniMax": hf("MiniMaxForCausalLM", "N(x) + F(N(x)), experts"),
    "MiniMaxM2": hf("MiniMaxM2ForCausalLM", "prenorm, experts"),
    "LFM2": hf("Lfm2ForCausalLM", "prenorm"),
    "BitNet": hf("BitNetForCausalLM", "prenorm, norms within the branches"),
    "Doge": hf("DogeForCausalLM", "prenorm with a learned scale of x"),
    "Llama4": hf("Llama4ForCausalLM", "prenorm, experts"),
    "AFMoE": hf("AfmoeForCausalLM", "sandwich, experts"),
    "CTRL": hf("CTRLLMHeadModel", "prenorm"),
    "TrOCR": hf("TrOCRForCausalLM", "postnorm"),
    "Musicgen": hf("MusicgenForCausalLM", "prenorm", lambda: {"input_ids": ids().repeat(2, 1)}),
    "Bark": hf("BarkSemanticModel", "prenorm", only, input_vocab_size=40, output_vocab_size=40, block_size=32),
    "ImageGPT": hf("ImageGPTModel", "prenorm", only),
    "ModernBERT, decoder": hf("ModernBertDecoderForCausalLM", "prenorm"),
}
ENCODERS = {
    "BERT": hf("BertForMaskedLM", "postnorm"),
    "BERT, decoder": hf("BertLMHeadModel", "postnorm", is_decoder=True),
    "RoBERTa": hf("RobertaForMaskedLM", "postnorm"),
    "XLM-R": hf("XLMRobertaForMaskedLM", "postnorm"),
    "XLM-R XL": hf("XLMRobertaXLForMaskedLM", "prenorm, the sum in another module"),
    "X-MOD": hf("XmodForMaskedLM", "postnorm, adapters before the second sum", languages=["en"], default_language="en"),
    "ELECTRA": hf("ElectraForMaskedLM", "postnorm"),
    "ALBERT": hf("AlbertForMaskedLM", "postnorm, one block for all layers"),
    "DistilBERT": hf("DistilBertForMaskedLM", "postnorm"),
    "DeBERTa": hf("DebertaForMaskedLM", "postnorm", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "DeBERTa-v2": hf("DebertaV2ForMaskedLM", "postnorm", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "MPNet": hf("MPNetForMaskedLM", "postnorm"),
    "Funnel": hf("FunnelForMaskedLM", "postnorm, pooled queries", block_sizes=[2, 2], d_head=4),
    "ConvBERT": hf("ConvBertForMaskedLM", "postnorm"),
    "SqueezeBERT": hf("SqueezeBertForMaskedLM", "postnorm, channels first"),
    "MobileBERT": hf(
        "MobileBertForMaskedLM",
        "postnorm with bottlenecks, a scale and a shift for a norm",
        intra_bottleneck_size=8,
        embedding_size=8,
    ),
    "ModernBERT": hf("ModernBertForMaskedLM", "prenorm", cls_token_id=1, sep_token_id=2),
    "NomicBERT": hf("NomicBertForMaskedLM", "postnorm"),
    "RoFormer": hf("RoFormerForMaskedLM", "postnorm"),
    "Nystromformer": hf("NystromformerForMaskedLM", "postnorm", num_landmarks=8, segment_means_seq_len=8),
    "YOSO": hf("YosoForMaskedLM", "postnorm"),
    "Longformer": hf("LongformerForMaskedLM", "postnorm"),
    "BigBird": hf("BigBirdForMaskedLM", "postnorm", attention_type="original_full", sep_token_id=2),
    "FNet": hf("FNetForMaskedLM", "postnorm", only),
    "ESM": hf("EsmForMaskedLM", "prenorm, the sum in another module"),
    "ESM-C": hf("EsmcForMaskedLM", "prenorm with multiplier", num_key_value_heads=4, head_dim=4),
    "XLNet": hf("XLNetLMHeadModel", "postnorm, sequence first"),
    "XLM": hf("XLMWithLMHeadModel", "postnorm, all blocks in the model"),
    "Flaubert": hf("FlaubertWithLMHeadModel", "postnorm, all blocks in the model"),
    "LayoutLM": hf("LayoutLMForMaskedLM", "postnorm"),
    "LUKE": hf("LukeForMaskedLM", "postnorm", entity_vocab_size=8, entity_emb_size=8),
    "TAPAS": hf("TapasForMaskedLM", "postnorm"),
    "MegatronBERT": hf("MegatronBertForMaskedLM", "prenorm, the sum in another module"),
    "I-BERT": hf("IBertForMaskedLM", "postnorm, the sum in a quantizer"),
    "RoBERTa-PreLayerNorm": hf("RobertaPreLayerNormForMaskedLM", "prenorm, the sum in another module"),
    "Data2VecText": hf("Data2VecTextForMaskedLM", "postnorm"),
    "ERNIE": hf("ErnieForMaskedLM", "postnorm"),
    "CamemBERT": hf("CamembertForMaskedLM", "postnorm"),
    "Splinter": hf("SplinterModel", "postnorm"),
    "DPR": hf("DPRQuestionEncoder", "postnorm"),
    "BertGeneration": hf("BertGenerationEncoder", "postnorm"),
    "BROS": hf("BrosModel", "postnorm", lambda: text() | {"bbox": rand(2, 8, 8)}, hidden_size=64),
    "Perceiver": hf(
        "PerceiverForMaskedLM",
        "prenorm, a norm within the attention",
        text,
        {"num_latents": 6, "d_latents": D, "num_blocks": 1, "num_self_attends_per_block": LAYERS},
        {"num_self_attention_heads": 4, "num_cross_attention_heads": 4, "qk_channels": D, "v_channels": D},
    ),
    "Reformer": hf(
        "ReformerForMaskedLM",
        "prenorm, two streams",
        text,
        {"axial_pos_embds": False, "is_decoder": False, "attn_layers": ["local"] * LAYERS, "feed_forward_size": FF},
        {"attention_head_size": 8, "local_attn_chunk_length": 4},
    ),
    "EuroBERT": hf("EuroBertForMaskedLM", "prenorm"),
    "GTE": hf("GteForMaskedLM", "postnorm"),
}
SEQ2SEQ = {
    "T5": hf("T5ForConditionalGeneration", "prenorm", seq2seq, **T5),
    "mT5": hf("MT5ForConditionalGeneration", "prenorm", seq2seq, **T5),
    "UMT5": hf("UMT5ForConditionalGeneration", "prenorm", seq2seq, **T5),
    "LongT5": hf("LongT5ForConditionalGeneration", "prenorm", seq2seq, **T5, local_radius=3),
    "Switch": hf(
        "SwitchTransformersForConditionalGeneration",
        "prenorm, experts",
        seq2seq,
        {"num_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    ),
    "T5Gemma": hf("T5GemmaForConditionalGeneration", "sandwich", seq2seq, decoder={"is_decoder": True}),
    "BART": hf("BartForConditionalGeneration", "postnorm", seq2seq),
    "mBART": hf("MBartForConditionalGeneration", "prenorm", seq2seq),
    "Marian": hf("MarianMTModel", "postnorm", seq2seq),
    "Pegasus": hf("PegasusForConditionalGeneration", "prenorm", seq2seq),
    "PegasusX": hf(
        "PegasusXForConditionalGeneration", "prenorm, encoder: two streams", seq2seq, num_global_tokens=2, block_size=4
    ),
    "Blenderbot": hf("BlenderbotForConditionalGeneration", "prenorm", seq2seq),
    "BlenderbotSmall": hf("BlenderbotSmallForConditionalGeneration", "postnorm", seq2seq),
    "M2M100": hf("M2M100ForConditionalGeneration", "prenorm", seq2seq),
    "MVP": hf("MvpForConditionalGeneration", "postnorm", seq2seq),
    "PLBart": hf("PLBartForConditionalGeneration", "postnorm", seq2seq),
    "LED": hf(
        "LEDForConditionalGeneration",
        "postnorm",
        seq2seq,
        max_encoder_position_embeddings=32,
        max_decoder_position_embeddings=32,
    ),
    "BigBirdPegasus": hf("BigBirdPegasusForConditionalGeneration", "prenorm", seq2seq, attention_type="original_full"),
    "ProphetNet": hf("ProphetNetForConditionalGeneration", "postnorm", lambda: only() | {"decoder_input_ids": ids(7)}),
    "Whisper": hf("WhisperForConditionalGeneration", "prenorm", partial(spoken, 8, 16)),
    "Speech2Text": hf(
        "Speech2TextForConditionalGeneration",
        "prenorm",
        partial(spoken, 32, 8),
        conv_channels=D,
        conv_kernel_sizes=(3, 3),
        input_feat_per_channel=8,
        max_source_positions=32,
    ),
    "Moonshine": hf("MoonshineForConditionalGeneration", "prenorm", partial(spoken, 1000, name="input_values")),
    "SeamlessM4T": hf(
        "SeamlessM4TForTextToText",
        "prenorm",
        seq2seq,
        **dict.fromkeys(["t2u_encoder_layers", "t2u_decoder_layers"], 1),
        **dict.fromkeys(["t2u_encoder_ffn_dim", "t2u_decoder_ffn_dim"], FF),
        t2u_vocab_size=40,
    ),
}
VISION = {
    "ViT": hf("ViTModel", "prenorm", pixels),
    "DeiT": hf("DeiTModel", "prenorm", pixels),
    "BEiT": hf("BeitModel", "prenorm with layer scale", pixels, use_relative_position_bias=True),
    "Data2VecVision": hf("Data2VecVisionModel", "prenorm with layer scale", pixels),
    "DINOv2": hf("Dinov2Model", "prenorm with layer scale", pixels),
    "DINOv2, registers": hf("Dinov2WithRegistersModel", "prenorm with layer scale", pixels, use_swiglu_ffn=True),
    "DINOv3": hf("DINOv3ViTModel", "prenorm with layer scale", pixels, pos_embed_rescale=None),
    "I-JEPA": hf("IJepaModel", "prenorm", pixels),
    "ViT-MSN": hf("ViTMSNModel", "prenorm", pixels),
    "ViT-MAE": hf("ViTMAEForPreTraining", "prenorm", lambda: pixels() | {"noise": rand(2, 4)}),
    "YOLOS": hf(
        "YolosModel", "prenorm, the second sum in another module", pixels, num_detection_tokens=2, image_size=[8, 8]
    ),
    "SigLIP, vision": hf("SiglipVisionModel", "prenorm", pixels),
    "AIMv2, vision": hf("Aimv2VisionModel", "prenorm", pixels),
    "DPT": hf("DPTModel", "prenorm, the second sum in another module", pixels),
    "Swin": hf("SwinModel", "prenorm", partial(pixels, 32), **SWIN),
    "Swinv2": hf("Swinv2Model", "x + N(F(x))", partial(pixels, 32), **SWIN, pretrained_window_sizes=[0, 0]),
    "DonutSwin": hf("DonutSwinModel", "prenorm", partial(pixels, 32), **SWIN),
    "PVT": hf("PvtModel", "prenorm", partial(pixels, 16), image_size=16, **PVT),
    "SegFormer": hf("SegformerModel", "prenorm", partial(pixels, 16), **PYRAMID),
    "PoolFormer": hf(
        "PoolFormerModel",
        "prenorm with layer scale, GroupNorm",
        partial(pixels, 16),
        **CONVNEXT,
        num_encoder_blocks=2,
        patch_sizes=[7, 3],
        strides=[4, 2],
        padding=[2, 1],
    ),
    "ConvNext": hf("ConvNextModel", "convolution with layer scale, its norm within", partial(pixels, 16), **CONVNEXT),
    "ConvNextV2": hf("ConvNextV2Model", "convolution, its norm within", partial(pixels, 16), **CONVNEXT),
    "CvT": hf("CvtModel", "prenorm, the second sum in another module", partial(pixels, 16), **CVT),
    "VideoMAE": hf("VideoMAEModel", "prenorm, the second sum in another module", video),
    "TimeSformer": hf("TimesformerModel", "prenorm, three branches", video),
    "ViViT": hf("VivitModel", "prenorm", video, tubelet_size=[2, 4, 4]),
    "MobileViT": hf(
        "MobileViTModel",
        "prenorm, within convolutions, the second sum in another module",
        partial(pixels, 32),
        image_size=32,
        patch_size=2,
        hidden_sizes=[D] * 3,
        neck_hidden_sizes=[8] * 3 + [D] * 4,
    ),
    "ViTDet": hf(
        "VitDetModel",
        "prenorm, channels last, some with a convolution after",
        pixels,
        pretrain_image_size=8,
        window_size=2,
        window_block_indices=[0],
        residual_block_indices=[1],
    ),
    "SAM, vision": hf(
        "SamVisionModel", "prenorm", pixels, output_channels=8, window_size=2, global_attn_indexes=[1], mlp_dim=FF
    ),
    "Pixtral": hf("PixtralVisionModel", "prenorm", pixels),
    "InternVL, vision": hf(
        "InternVLVisionModel", "prenorm with layer scale", pixels, image_size=[8, 8], patch_size=[4, 4]
    ),
    "DETR": hf("DetrModel", "postnorm", partial(pixels, 32), **DETR),
    "Deformable DETR": hf(
        "DeformableDetrModel", "postnorm", partial(pixels, 32), **DETR, num_feature_levels=1, d_model=32
    ),
    "Conditional DETR": hf("ConditionalDetrModel", "postnorm", partial(pixels, 32), **DETR),
}
AUDIO = {
    "Wav2Vec2": hf("Wav2Vec2Model", "postnorm", audio),
    "Wav2Vec2, stable": hf("Wav2Vec2Model", "prenorm", audio, **STABLE),
    "HuBERT": hf("HubertModel", "postnorm", audio),
    "HuBERT, stable": hf("HubertModel", "prenorm", audio, **STABLE),
    "WavLM": hf("WavLMModel", "postnorm", unmasked),
    "WavLM, stable": hf("WavLMModel", "prenorm", unmasked, **STABLE),
    "UniSpeech": hf("UniSpeechModel", "postnorm", audio),
    "UniSpeechSat, stable": hf("UniSpeechSatModel", "prenorm", audio, **STABLE),
    "SEW": hf("SEWModel", "postnorm", audio, squeeze_factor=1),
    "Data2VecAudio": hf(
        "Data2VecAudioModel", "postnorm", audio, conv_pos_kernel_size=3, num_conv_pos_embeddings=2, mask_time_prob=0.0
    ),
    "Wav2Vec2-Conformer": hf("Wav2Vec2ConformerModel", "macaron", audio, conv_depthwise_kernel_size=3),
    "AST": hf(
        "ASTModel",
        "prenorm",
        lambda: {"input_values": rand(2, 12, 8)},
        max_length=12,
        frequency_stride=4,
        time_stride=4,
    ),
    "Qwen2Audio, encoder": hf("Qwen2AudioEncoder", "prenorm", partial(mel, 8, 16)),
    "CLAP, audio": hf(
        "ClapAudioModel",
        "prenorm",
        lambda: {"input_features": rand(2, 1, 32, 16)},
        {"spec_size": 32, "num_mel_bins": 16, "window_size": 2, "depths": [2, 2], "num_attention_heads": [2, 4]},
        {"patch_embeds_hidden_size": D, "hidden_size": 2 * D},
    ),
}
MULTIMODAL = {
    "CLIP": hf("CLIPModel", "prenorm", both),
    "ChineseCLIP": hf("ChineseCLIPModel", "text: postnorm, vision: prenorm", both),
    "AltCLIP": hf("AltCLIPModel", "text: postnorm, vision: prenorm", both),
    "CLIPSeg": hf(
        "CLIPSegForImageSegmentation", "prenorm, decoder: postnorm", both, extract_layers=[0, 1], reduce_dim=D
    ),
    "SigLIP": hf("SiglipModel", "prenorm", both),
    "AIMv2": hf("Aimv2Model", "prenorm", both),
    "OWL-ViT": hf("OwlViTModel", "prenorm", both),
    "BLIP": hf("BlipModel", "text: postnorm, vision: prenorm", both),
    "Q-Former": hf(
        "Blip2QFormerModel", "postnorm", lambda: {"query_embeds": rand(2, 4, D), "encoder_hidden_states": rand(2, 5, D)}
    ),
    "LXMERT": hf(
        "LxmertModel",
        "postnorm, cross layers called twice",
        lambda: text() | {"visual_feats": rand(2, 4, 6), "visual_pos": rand(2, 4, 4)},
        visual_feat_dim=6,
        **dict.fromkeys(["l_layers", "x_layers", "r_layers"], 2),
    ),
    "VisualBERT": hf(
        "VisualBertModel", "postnorm", lambda: text() | {"visual_embeds": rand(2, 4, 6)}, visual_embedding_dim=6
    ),
    "FLAVA": hf("FlavaModel", "prenorm, the second sum in another module", both),
    "GIT": hf("GitForCausalLM", "text: postnorm, vision: prenorm", both),
    "BridgeTower": hf(
        "BridgeTowerModel",
        "text: postnorm, vision: prenorm",
        lambda: both() | {"pixel_mask": torch.ones(2, 8, 8, dtype=torch.long)},
        {"hidden_size": 64, "text_config": {"hidden_size": 64}, "vision_config": {"hidden_size": 64}},
        num_hidden_layers=2,
    ),
    "LLaVA": hf(
        "LlavaForConditionalGeneration",
        "prenorm",
        partial(seen, 1),
        {"text_config": ("LlamaConfig", {}), "vision_config": ("CLIPVisionConfig", {}), "image_token_index": 39},
    ),
    "PaliGemma": hf(
        "PaliGemmaForConditionalGeneration",
        "prenorm",
        lambda: seen() | {"token_type_ids": torch.zeros(2, 7, dtype=torch.long)},
        {"text_config": ("GemmaConfig", {}), "vision_config": ("SiglipVisionConfig", {}), "image_token_index": 39},
    ),
    "Chameleon": hf(
        "ChameleonForConditionalGeneration",
        "prenorm",
        vocabulary_map={"<image>": 39, "IMGIMGA": 38},
        vq_config={"base_channels": 32, "embed_dim": 8, "num_embeddings": 8, "channel_multiplier": [1]}
        | {"num_res_blocks": 1, "latent_channels": 8, "resolution": 8},
    ),
    "IDEFICS": hf(
        "IdeficsModel",
        "prenorm, cross-attention with tanh gates",
        lambda: text() | {"pixel_values": rand(2, 1, 3, 8, 8), "image_attention_mask": torch.ones(2, 8, 1)},
        vision_config={"embed_dim": D},
        cross_layer_interval=1,
    ),
    "LayoutLMv3": hf(
        "LayoutLMv3Model",
        "postnorm",
        lambda: only() | {"bbox": torch.zeros(2, 8, 4, dtype=torch.long)} | pixels(),
        coordinate_size=3,
        shape_size=2,
        input_size=8,
    ),
}
SERIES = {
    "TimeSeriesTransformer": hf("TimeSeriesTransformerModel", "postnorm", series, **FORECAST),
    "Informer": hf("InformerModel", "postnorm", series, **FORECAST, distil=False, attention_type="full"),
    "PatchTST": hf(
        "PatchTSTModel",
        "prenorm, BatchNorm",
        lambda: {"past_values": rand(2, 32, 2)},
        num_input_channels=2,
        patch_length=4,
        patch_stride=4,
    ),
    "PatchTST, post-norm": hf(
        "PatchTSTModel",
        "postnorm, three branches",
        lambda: {"past_values": rand(2, 32, 2)},
        {"num_input_channels": 2, "patch_length": 4, "patch_stride": 4},
        {"pre_norm": False, "norm_type": "layernorm", "channel_attention": True},
    ),
    "DecisionTransformer": hf(
        "DecisionTransformerModel",
        "prenorm",
        lambda: {"states": rand(2, 3, 5), "actions": rand(2, 3, 4), "rewards": rand(2, 3, 1)}
        | {"returns_to_go": rand(2, 3, 1), "timesteps": torch.arange(3).repeat(2, 1)}
        | {"attention_mask": torch.ones(2, 3, dtype=torch.long)},
        {"state_dim": 5, "act_dim": 4, "max_ep_len": 16},
    ),
}


class Attention(nn.Module):
    """Of a sequence to itself or to another."""

    def __init__(self, causal=False):
        super().__init__()
        self.q, self.kv, self.out, self.causal = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D), causal

    def forward(self, x, memory=None):
        keys, values = self.kv(x if memory is None else memory).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.q(x), keys, values))
        return self.out(scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))


def mlp():
    return nn.Sequential(nn.Linear(D, FF), nn.GELU(), nn.Linear(FF, D))


class Stack(nn.Module):
    """An embedding, blocks of a kind, a norm and a head."""

    def __init__(self, block, **options):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(40, D), nn.LayerNorm(D), nn.Linear(D, 40)
        self.layers = nn.ModuleList(block(**options) for _ in range(LAYERS))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def stack(block, **options):
    return partial(Stack, block, **options)


class TwoTexts(nn.Module):
    """An encoder that reads two texts, one after the other."""

    def __init__(self, make):
        super().__init__()
        self.encoder = make()

    def forward(self, tokens):
        return self.encoder(tokens) * self.encoder(tokens.flip(1)).sin()


class TwoLists(Stack):
    """The blocks are in two lists, one after the other."""

    def __init__(self):
        super().__init__(NanoGPT)
        self.layers, self.upper = self.layers[:2], self.layers[2:]

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in (*self.layers, *self.upper):
            x = layer(x)
        return self.head(self.norm(x))


class UnevenTexts(Stack):
    """One block, which runs three times on a text and once on another."""

    def __init__(self):
        super().__init__(NanoGPT)
        self.layers = self.layers[:1]

    def forward(self, tokens):
        block, x, z = self.layers[0], self.embed(tokens), self.embed(tokens.flip(1))
        return self.head(self.norm(block(block(block(x)))) * self.norm(block(z)).sin())


class RunsTwice(nn.Module):
    """A stack of one block that reads its own output."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(40, D), nn.LayerNorm(D), nn.Linear(D, 40)
        self.layers = nn.Sequential(nn.Sequential(NanoGPT()))

    def forward(self, tokens):
        return self.head(self.norm(self.layers(self.layers(self.embed(tokens)))))


class TwoTextsInOneLoop(Stack):
    """The same, if nothing is called once for each text."""

    def __init__(self, layers):
        super().__init__(NanoGPT)
        self.layers = self.layers[:layers]

    def forward(self, tokens):
        read = []
        for x in (self.embed(tokens), self.embed(tokens.flip(1))):
            for layer in self.layers:
                x = layer(x)
            read.append(self.norm(x))
        return self.head(read[0] * read[1].sin())


class NanoGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(D), Attention(True), nn.LayerNorm(D), mlp()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class Torchtune(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = Attention(True), mlp()
        self.sa_norm, self.mlp_norm = nn.RMSNorm(D), nn.RMSNorm(D)
        self.sa_scale, self.mlp_scale = nn.Identity(), nn.Identity()

    def forward(self, x):
        h = self.sa_norm(x)
        attn_out = self.attn(h)
        h = self.sa_scale(attn_out) + x
        mlp_out = self.mlp(self.mlp_norm(h))
        out = h + self.mlp_scale(mlp_out)
        return out


class LitGPT(nn.Module):
    def __init__(self, parallel=False, shared=False, post=False):
        super().__init__()
        self.norm_1, self.attn, self.mlp = nn.LayerNorm(D), Attention(True), mlp()
        self.norm_2 = None if shared else nn.LayerNorm(D)
        self.post_attention_norm = nn.RMSNorm(D) if post else nn.Identity()
        self.post_mlp_norm = nn.RMSNorm(D) if post else nn.Identity()
        self.parallel_residual = parallel

    def forward(self, x):
        x_normed = self.norm_1(x)
        attention_output = self.post_attention_norm(self.attn(x_normed))
        if self.parallel_residual:
            if self.norm_2 is not None:
                x_normed = self.norm_2(x)
            x = attention_output + x
        else:
            x = attention_output + x
            x_normed = self.norm_2(x)
        return self.post_mlp_norm(self.mlp(x_normed)) + x


class SublayerConnection(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(D), nn.Dropout(0.0)

    def forward(self, x, sublayer):
        return x + self.dropout(sublayer(self.norm(x)))


class Annotated(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.feed_forward = Attention(), mlp()
        self.sublayer = nn.ModuleList(SublayerConnection() for _ in range(2))

    def forward(self, x):
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x))
        return self.sublayer[1](x, self.feed_forward)


class Residual(nn.Module):
    def forward(self, x, residual):
        return x + residual


class GainedNorm(nn.Module):
    """A norm with its gain around torch's."""

    def __init__(self):
        super().__init__()
        self.ln, self.gamma = nn.LayerNorm(D, elementwise_affine=False), nn.Parameter(torch.ones(D))

    def forward(self, x):
        return self.ln(x) * self.gamma


class XTransformers(nn.Module):
    """All blocks in one list. `norm`: of a decoder that gets the embeddings."""

    def __init__(self, post=False, norm=None):
        super().__init__()
        self.embed = nn.Embedding(40, D) if norm is None else None
        self.head = nn.Linear(D, 40) if norm is None else nn.Identity()
        self.final_norm = nn.Identity() if post and norm else nn.LayerNorm(D)
        norm = norm or partial(nn.LayerNorm, D)
        self.post, self.layers = post, nn.ModuleList()
        for kind in "af" * LAYERS:
            block = Attention(True) if kind == "a" else mlp()
            self.layers.append(nn.ModuleList([norm(), block, Residual()]))

    def forward(self, tokens):
        x = tokens if self.embed is None else self.embed(tokens)
        for norm, block, residual_fn in self.layers:
            residual = x
            if not self.post:
                x = norm(x)
            out = block(x)
            x = residual_fn(out, residual)
            if self.post:
                x = norm(x)
        return self.head(self.final_norm(x))


class Fairseq(nn.Module):
    """Time first, with dropout modules."""

    def __init__(self, normalize_before):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(D, HEADS)
        self.fc1, self.fc2 = nn.Linear(D, FF), nn.Linear(FF, D)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.dropout_module, self.activation_dropout_module = nn.Dropout(0.0), nn.Dropout(0.0)
        self.normalize_before = normalize_before

    def residual_connection(self, x, residual):
        return residual + x

    def forward(self, x):
        x = x.transpose(0, 1)
        residual = x
        if self.normalize_before:
            x = self.self_attn_layer_norm(x)
        x, _ = self.self_attn(query=x, key=x, value=x, need_weights=False)
        x = self.dropout_module(x)
        x = self.residual_connection(x, residual)
        if not self.normalize_before:
            x = self.self_attn_layer_norm(x)
        residual = x
        if self.normalize_before:
            x = self.final_layer_norm(x)
        x = nn.functional.relu(self.fc1(x))
        x = self.activation_dropout_module(x)
        x = self.fc2(x)
        x = self.dropout_module(x)
        x = self.residual_connection(x, residual)
        if not self.normalize_before:
            x = self.final_layer_norm(x)
        return x.transpose(0, 1)


class GPTJ(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.mlp = nn.LayerNorm(D), Attention(True), mlp()

    def forward(self, x):
        residual = x
        x = self.ln_1(x)
        return self.attn(x) + self.mlp(x) + residual


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.depthwise, self.down = (
            nn.Linear(D, 2 * D),
            nn.Conv1d(D, D, 3, padding=1, groups=D),
            nn.Linear(D, D),
        )

    def forward(self, x):
        x = nn.functional.glu(self.up(x))
        return self.down(nn.functional.silu(self.depthwise(x.transpose(1, 2)).transpose(1, 2)))


class Conformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ffn1, self.self_attn, self.conv_module, self.ffn2 = mlp(), Attention(), Convolution(), mlp()
        self.norm_ff1, self.norm_attn, self.norm_conv = nn.LayerNorm(D), nn.LayerNorm(D), nn.LayerNorm(D)
        self.norm_ff2, self.norm_final = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x):
        residual = x
        x = residual + 0.5 * self.ffn1(self.norm_ff1(x))
        x = x + self.self_attn(self.norm_attn(x))
        x = x + self.conv_module(self.norm_conv(x))
        x = x + 0.5 * self.ffn2(self.norm_ff2(x))
        return self.norm_final(x)


class DetrBlock(nn.Module):
    """Positions join queries and keys, not values."""

    def __init__(self):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(D, HEADS, batch_first=True)
        self.linear1, self.linear2, self.pos = nn.Linear(D, FF), nn.Linear(FF, D), nn.Parameter(torch.randn(8, D))
        self.norm1, self.norm2, self.dropout1, self.dropout2 = (
            *(nn.LayerNorm(D) for _ in "12"),
            *[nn.Dropout(0.0)] * 2,
        )

    def forward(self, x):
        q = k = x + self.pos
        x2 = self.self_attn(q, k, value=x)[0]
        x = self.norm1(x + self.dropout1(x2))
        x2 = self.linear2(self.linear1(x).relu())
        return self.norm2(x + self.dropout2(x2))


class CaiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(D), Attention(), nn.LayerNorm(D), mlp()
        self.gamma_1, self.gamma_2 = nn.Parameter(0.1 * torch.ones(D)), nn.Parameter(0.1 * torch.ones(D))
        self.drop_path = nn.Identity()

    def forward(self, x):
        x = x + self.drop_path(self.gamma_1 * self.attn(self.norm1(x)))
        x = x + self.drop_path(self.gamma_2 * self.mlp(self.norm2(x)))
        return x


class Torch(nn.Module):
    """PyTorch's own layers."""

    def __init__(self, norm_first, decoder=False):
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first}
        self.embed, self.head = nn.Embedding(40, D), nn.Linear(D, 40)
        if decoder:
            self.layers = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, HEADS, FF, **options), LAYERS)
        else:
            layer = nn.TransformerEncoderLayer(D, HEADS, FF, **options)
            self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(D), enable_nested_tensor=False)
        self.register_buffer("memory", torch.arange(3, 9).repeat(2, 1) if decoder else None)

    def forward(self, tokens):
        memory = () if self.memory is None else (self.embed(self.memory),)
        return self.head(self.layers(self.embed(tokens), *memory))


class Within(nn.Module):
    """The norm comes first in the branch itself."""

    def __init__(self, branch):
        super().__init__()
        self.norm, self.branch = nn.LayerNorm(D), branch

    def forward(self, x):
        return self.branch(self.norm(x))


class Lucidrains(nn.Module):
    """All blocks in one list of pairs, each branch with its norm."""

    def __init__(self, embeds=True):
        super().__init__()
        self.norm, self.embed = nn.LayerNorm(D), nn.Embedding(40, D) if embeds else nn.Identity()
        self.layers = nn.ModuleList(nn.ModuleList([Within(Attention()), Within(mlp())]) for _ in range(LAYERS))
        self.head = nn.Linear(D, 40) if embeds else nn.Identity()

    def forward(self, tokens):
        x = self.embed(tokens)
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.head(self.norm(x))


class Around(nn.Module):
    """An embedding, a module whose forward runs through all layers, and a head."""

    def __init__(self, loop, **options):
        super().__init__()
        self.embed, self.loop, self.head = nn.Embedding(40, D), loop(**options), nn.Linear(D, 40)

    def forward(self, tokens):
        return self.head(self.loop(self.embed(tokens)))


class Add(nn.Module):
    """Residual(PreNorm(branch)), as older code has it."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x, **kwargs):
        return self.fn(x, **kwargs) + x


class Wrapped(nn.Sequential):
    def __init__(self):
        super().__init__(Add(Within(Attention())), Add(Within(mlp())))


class Dropping(NanoGPT):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + nn.functional.dropout(self.mlp(self.ln_2(x)), 0.0, self.training)


class InPlace(NanoGPT):
    """Writes into its input, and thus has no gradient."""

    def forward(self, x):
        x += self.attn(self.ln_1(x))
        x += self.mlp(self.ln_2(x))
        return x


class OntoBranch(NanoGPT):
    def forward(self, x):
        h = self.attn(self.ln_1(x))
        h += x
        out = self.mlp(self.ln_2(h))
        out.add_(h)
        return out


class Tuples(NanoGPT):
    """Takes a tuple and returns one."""

    def forward(self, x):
        x, count = x if isinstance(x, tuple) else (x, 0)
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return (x, count + 1)


class TupleStack(Stack):
    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[0]))


class PostNorm(NanoGPT):
    def forward(self, x):
        x = self.ln_1(x + self.attn(x))
        return self.ln_2(x + self.mlp(x))


class DeepNorm(NanoGPT):
    def forward(self, x):
        x = self.ln_1(1.5 * x + self.attn(x))
        return self.ln_2(1.5 * x + self.mlp(x))


class Cross(NanoGPT):
    """A decoder's block; what it attends to comes as a keyword."""

    def __init__(self):
        super().__init__()
        self.ln_x, self.cross, self.memory = nn.LayerNorm(D), Attention(), nn.Parameter(torch.randn(2, 5, D))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.cross(self.ln_x(x), memory=self.memory)
        return x + self.mlp(self.ln_2(x))


class AdaLN(nn.Module):
    """As in DiT: shifts, scales and gates from a condition."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(D, elementwise_affine=False) for _ in "12")
        self.attn, self.mlp, self.ada = Attention(), mlp(), nn.Sequential(nn.SiLU(), nn.Linear(D, 6 * D))
        self.condition = nn.Parameter(torch.randn(2, 1, D))

    def forward(self, x):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(self.condition).chunk(6, -1)
        x = x + gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.channels = nn.LayerNorm(D), nn.LayerNorm(D), mlp()
        self.tokens = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Checkpointed(NanoGPT):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


class NormFormer(NanoGPT):
    """A norm after the heads and one within the feed-forward."""

    def __init__(self):
        super().__init__()
        self.post, self.middle = nn.LayerNorm(D), nn.LayerNorm(FF)

    def forward(self, x):
        x = x + self.post(self.attn(self.ln_1(x)))
        up, act, down = self.mlp
        return x + down(self.middle(act(up(self.ln_2(x)))))


class ReZero(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp, self.resweight = Attention(True), mlp(), nn.Parameter(torch.tensor(0.1))

    def forward(self, x):
        x = x + self.resweight * self.attn(x)
        return x + self.resweight * self.mlp(x)


class Gated(NanoGPT):
    """As in GTrXL, with the highway gate."""

    def __init__(self):
        super().__init__()
        self.gate1, self.gate2 = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        gate = self.gate1(x).sigmoid()
        x = gate * x + (1 - gate) * self.attn(self.ln_1(x))
        gate = self.gate2(x).sigmoid()
        return gate * x + (1 - gate) * self.mlp(self.ln_2(x))


class Lerp(NanoGPT):
    def forward(self, x):
        x = x.lerp(self.ln_1(self.attn(x)), 0.3)
        return torch.lerp(x, self.ln_2(self.mlp(x)), 0.3)


class Functional(NanoGPT):
    def forward(self, x):
        h = torch.add(x, self.attn(self.ln_1(x)), alpha=0.7)
        return torch.add(self.mlp(nn.functional.layer_norm(h, (D,), self.ln_2.weight, self.ln_2.bias)), h)


class PreLast(NanoGPT):
    """Each block hands on its sum and the last branch apart, as fused-norm code does."""

    def forward(self, x):
        hidden, residual = x if isinstance(x, tuple) else (x, torch.zeros_like(x))
        residual = hidden + residual
        hidden = self.attn(self.ln_1(residual))
        residual = hidden + residual
        return self.mlp(self.ln_2(residual)), residual


class PreLastStack(Stack):
    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[0] + x[1]))


class UNet(nn.Module):
    """Skips from early blocks to late ones."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(40, D), nn.LayerNorm(D), nn.Linear(D, 40)
        self.down, self.up = (nn.ModuleList(NanoGPT() for _ in range(2)) for _ in "du")
        self.skip = nn.ModuleList(nn.Linear(2 * D, D) for _ in range(2))

    def forward(self, tokens):
        x, kept = self.embed(tokens), []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        for layer, skip in zip(self.up, self.skip):
            x = layer(skip(torch.cat([x, kept.pop()], -1)))
        return self.head(self.norm(x))


OWN = {
    "nanoGPT-like": own(stack(NanoGPT), "prenorm"),
    "torchtune-like": own(stack(Torchtune), "prenorm"),
    "LitGPT-like": own(stack(LitGPT), "prenorm"),
    "LitGPT-like, post norms": own(stack(LitGPT, post=True), "sandwich"),
    "LitGPT-like, parallel": own(stack(LitGPT, parallel=True), "parallel, two norms"),
    "LitGPT-like, parallel, shared": own(stack(LitGPT, parallel=True, shared=True), "parallel"),
    "annotated-like": own(stack(Annotated), "prenorm"),
    "x-transformers-like": own(XTransformers, "prenorm, all blocks in the model"),
    "x-transformers-like, post-norm": own(partial(XTransformers, True), "postnorm, all blocks in the model"),
    "fairseq-like, pre-norm": own(stack(Fairseq, normalize_before=True), "prenorm"),
    "fairseq-like, post-norm": own(stack(Fairseq, normalize_before=False), "postnorm"),
    "GPT-J-like": own(stack(GPTJ), "parallel"),
    "Conformer-like": own(stack(Conformer), "macaron"),
    "DETR-like": own(stack(DetrBlock), "postnorm"),
    "CaiT-like": own(stack(CaiT), "prenorm with layer scale"),
    "nn.TransformerEncoder": own(partial(Torch, False), "postnorm"),
    "nn.TransformerEncoder, pre-norm": own(partial(Torch, True), "prenorm"),
    "nn.TransformerDecoder": own(partial(Torch, False, True), "postnorm"),
    "nn.TransformerDecoder, pre-norm": own(partial(Torch, True, True), "prenorm"),
    "lucidrains-like": own(Lucidrains, "prenorm, all blocks in the model"),
    "lucidrains-like, in a part": own(partial(Around, Lucidrains, embeds=False), "prenorm, one forward"),
    "x-transformers-like, in a part": own(partial(Around, XTransformers, norm=GainedNorm), "prenorm, one forward"),
    "x-transformers-like, post-norm, in a part": own(
        partial(Around, XTransformers, post=True, norm=GainedNorm), "postnorm, one forward"
    ),
    "lucidrains-like, wrapped": own(stack(Wrapped), "prenorm"),
    "with dropout": own(stack(Dropping), "prenorm"),
    "in place": own(stack(InPlace), "prenorm"),
    "in place, onto the branch": own(stack(OntoBranch), "prenorm"),
    "tuples": own(partial(TupleStack, Tuples), "prenorm"),
    "post-norm": own(stack(PostNorm), "postnorm"),
    "DeepNorm-like": own(stack(DeepNorm), "postnorm with multiplier of x"),
    "cross-attention": own(stack(Cross), "prenorm"),
    "DiT-like": own(stack(AdaLN), "adaLN"),
    "Mixer-like": own(stack(Mixer), "prenorm"),
}
VIT = {"img_size": 32, "patch_size": 8, "num_classes": 3, "embed_dim": D, "depth": LAYERS, "num_heads": HEADS}
TIMM_SWIN = {"img_size": 32, "num_classes": 3, "embed_dim": D, "depths": (2, 2), "num_heads": (2, 4)}
TIMM_SWIN |= {"patch_size": 4, "window_size": 4, "drop_path_rate": 0.0}
DIT = {"num_attention_heads": HEADS, "attention_head_dim": 4, "num_layers": LAYERS}
TOWER = {"width": D, "layers": LAYERS}
VIT_PYTORCH = {"image_size": 32, "patch_size": 8, "num_classes": 3, "dim": D, "depth": LAYERS, "heads": HEADS}
VIT_PYTORCH |= {"mlp_dim": FF, "dim_head": 4}


def timm(module, name, remark, size=32, *parts, **given):
    return other(f"timm.models.{module}", name, remark, partial(pixels, size, "x"), *parts, **given)


def load(module, name):
    """A class or function of a library, when it is needed."""
    return lambda: getattr(importlib.import_module(module), name)


def lucid(remark, **options):
    """A decoder of x-transformers."""

    def layers():
        decoder = importlib.import_module("x_transformers").Decoder
        return decoder(dim=D, depth=LAYERS, heads=HEADS, attn_dim_head=4, **options)

    given = {"num_tokens": 40, "max_seq_len": 16, "attn_layers": layers}
    return other("x_transformers", "TransformerWrapper", remark, lambda: {"x": ids()}, **given)


def convnext():
    kind = load("torchvision.models.convnext", "CNBlockConfig")()
    return [kind(D, 2 * D, 2), kind(2 * D, None, 2)]


def clip_text():
    return {"image": rand(2, 3, 8, 8), "text": ids()}


def flux():
    given = {"hidden_states": rand(2, 16, 4), "timestep": torch.tensor([0.3, 0.7]), "pooled_projections": rand(2, 6)}
    return given | {
        "encoder_hidden_states": rand(2, 5, 12),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(5, 3),
    }


TIMM_VIT = ("vision_transformer", "VisionTransformer")
LIBRARIES = {
    "timm ViT": timm(*TIMM_VIT, "prenorm", **VIT),
    "timm ViT, layer scale": timm(*TIMM_VIT, "prenorm with layer scale", **VIT, init_values=0.1),
    "timm ViT, post norms": timm(
        *TIMM_VIT, "x + N(F(x))", **VIT, block_fn=load("timm.models.vision_transformer", "ResPostBlock")
    ),
    "timm ViT, parallel": timm(
        *TIMM_VIT, "parallel", **VIT, block_fn=load("timm.models.vision_transformer", "ParallelScalingBlock")
    ),
    "timm ViT, parallel things": timm(
        *TIMM_VIT,
        "prenorm, a sum of two branches",
        **VIT,
        block_fn=load("timm.models.vision_transformer", "ParallelThingsBlock"),
    ),
    "timm CaiT": timm("cait", "Cait", "prenorm with layer scale", **VIT),
    "timm BEiT": timm("beit", "Beit", "prenorm", **VIT),
    "timm EVA": timm("eva", "Eva", "prenorm", **VIT),
    "timm DeiT": timm("deit", "VisionTransformerDistilled", "prenorm", **VIT),
    "timm Swin": timm("swin_transformer", "SwinTransformer", "prenorm", **TIMM_SWIN),
    "timm Swinv2": timm("swin_transformer_v2", "SwinTransformerV2", "x + N(F(x))", **TIMM_SWIN),
    "timm MLP-Mixer": timm(
        "mlp_mixer", "MlpMixer", "prenorm", img_size=32, patch_size=8, num_classes=3, embed_dim=D, num_blocks=LAYERS
    ),
    "timm ConvNeXt": timm(
        "convnext",
        "ConvNeXt",
        "convolution with layer scale, its norm within",
        32,
        {"num_classes": 3, "depths": (2, 2, 1, 1), "dims": (D, D, D, D)},
    ),
    "timm TNT": timm(
        "tnt",
        "TNT",
        "prenorm, blocks of two streams",
        32,
        {"img_size": 32, "patch_size": 8, "num_classes": 3, "embed_dim": D, "depth": LAYERS, "first_stride": 2},
        {"inner_dim": 8, "num_heads_inner": 2, "num_heads_outer": HEADS},
    ),
    "timm FocalNet": timm(
        "focalnet",
        "FocalNet",
        "prenorm",
        32,
        {"num_classes": 3, "embed_dim": D, "depths": (2, 2), "focal_levels": (2, 2), "focal_windows": (3, 3)},
        drop_path_rate=0.0,
    ),
    "diffusers DiT": other(
        "diffusers",
        "DiTTransformer2DModel",
        "adaLN",
        lambda: latents(False, class_labels=torch.tensor([1, 2])),
        {**DIT, "sample_size": 8, "num_embeds_ada_norm": 10},
    ),
    "diffusers SD3": other(
        "diffusers",
        "SD3Transformer2DModel",
        "adaLN, two streams",
        lambda: latents(pooled_projections=rand(2, 6)),
        {**DIT, "sample_size": 8, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 12},
        {"caption_projection_dim": D, "pooled_projection_dim": 6, "pos_embed_max_size": 8},
    ),
    "diffusers Flux": other(
        "diffusers",
        "FluxTransformer2DModel",
        "adaLN, two streams, then parallel",
        flux,
        {"num_attention_heads": 2, "attention_head_dim": D, "num_layers": 2, "num_single_layers": 2},
        {"in_channels": 4, "joint_attention_dim": 12, "pooled_projection_dim": 6, "axes_dims_rope": (4, 6, 6)},
    ),
    "diffusers PixArt": other(
        "diffusers",
        "PixArtTransformer2DModel",
        "adaLN, cross-attention without norm",
        latents,
        {**DIT, "sample_size": 8, "in_channels": 4, "cross_attention_dim": D, "caption_channels": 12},
        use_additional_conditions=False,
    ),
    "diffusers Prior": other(
        "diffusers",
        "PriorTransformer",
        "prenorm",
        lambda: {"hidden_states": rand(2, 6), "timestep": torch.tensor([3, 7]), "proj_embedding": rand(2, 6)}
        | {"encoder_hidden_states": rand(2, 5, 6)},
        {**DIT, "embedding_dim": 6, "num_embeddings": 5},
    ),
    "open_clip CLIP": other(
        "open_clip.model",
        "CLIP",
        "prenorm, vision: with layer scale",
        clip_text,
        {"embed_dim": D, "text_cfg": TOWER | {"context_length": 8, "vocab_size": 40, "heads": HEADS}},
        vision_cfg=TOWER | {"head_width": 4, "patch_size": 4, "image_size": 8, "ls_init_value": 0.1},
    ),
    "x-transformers": lucid("prenorm, all blocks in the model"),
    "x-transformers, post-norm": lucid("postnorm, all blocks in the model", pre_norm=False),
    "x-transformers, sandwich": lucid("sandwich, all blocks in the model", sandwich_norm=True),
    "x-transformers, macaron": lucid("macaron, all blocks in the model", macaron=True),
    "x-transformers, ScaleNorm": lucid("prenorm, all blocks in the model", use_scalenorm=True),
    "vit-pytorch": other("vit_pytorch.vit", "ViT", "prenorm, in the model", partial(pixels, 32, "img"), **VIT_PYTORCH),
    "vit-pytorch, parallel": other(
        "vit_pytorch.parallel_vit", "ViT", "prenorm, a sum of two branches", partial(pixels, 32, "img"), **VIT_PYTORCH
    ),
    "torchvision ViT": other(
        "torchvision.models.vision_transformer",
        "VisionTransformer",
        "prenorm",
        partial(pixels, 16, "x"),
        {"image_size": 16, "patch_size": 8, "num_layers": LAYERS, "num_heads": HEADS},
        {"hidden_dim": D, "mlp_dim": FF, "num_classes": 3},
    ),
    "torchvision Swin": other(
        "torchvision.models.swin_transformer",
        "SwinTransformer",
        "prenorm",
        partial(pixels, 32, "x"),
        {"patch_size": [4, 4], "embed_dim": D, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]},
        {"stochastic_depth_prob": 0.0, "num_classes": 3},
    ),
    "torchvision ConvNeXt": other(
        "torchvision.models.convnext",
        "ConvNeXt",
        "convolution with layer scale, its norm within",
        partial(pixels, 32, "x"),
        {"block_setting": convnext, "num_classes": 3, "layer_scale": 0.1},
    ),
    "torchaudio Conformer": other(
        "torchaudio.models",
        "Conformer",
        "macaron",
        lambda: {"input": rand(2, 9, D), "lengths": torch.tensor([9, 7])},
        {"input_dim": D, "num_heads": HEADS, "ffn_dim": FF, "num_layers": LAYERS, "depthwise_conv_kernel_size": 3},
    ),
}

ASIDE = {
    "CodeGen": hf("CodeGenForCausalLM", "parallel"),
    "Helium": hf("HeliumForCausalLM", "prenorm", head_dim=4),
    "JetMoE": hf("JetMoeForCausalLM", "prenorm, experts", kv_channels=4),
    "HunYuanMoE": hf("HunYuanMoEV1ForCausalLM", "prenorm, experts"),
    "LongCat": hf(
        "LongcatFlashForCausalLM",
        "prenorm, twice in a block, experts beside",
        text,
        {**MLA, "head_dim": 4, "num_layers": 2, "expert_ffn_hidden_size": D, "ffn_hidden_size": FF},
        {"zero_expert_num": 2, "moe_topk": 2},
    ),
    "NanoChat": hf("NanoChatForCausalLM", "prenorm without weights"),
    "xLSTM": hf("xLSTMForCausalLM", "prenorm"),
    "FalconH1": hf(
        "FalconH1ForCausalLM",
        "prenorm, attention and state space side by side",
        text,
        {"mamba_d_ssm": 32, "mamba_n_groups": 1, "mamba_chunk_size": 4},
    ),
    "Gemma3n": hf(
        "Gemma3nForCausalLM",
        "sandwich, several streams",
        text,
        {"num_kv_shared_layers": 0, "layer_types": ["full_attention"] * LAYERS, "intermediate_size": [FF] * LAYERS},
        {"activation_sparsity_pattern": [0.0] * LAYERS, "hidden_size_per_layer_input": 8, "laurel_rank": 4},
        vocab_size_per_layer_input=40,
    ),
    "Zamba": hf(
        "ZambaForCausalLM", "x + F(N(x + G(x))), G shared by layers", **ZAMBA | {"n_mamba_heads": 2, "mamba_dt_rank": 4}
    ),
    "MiniCPM3": hf("MiniCPM3ForCausalLM", "prenorm with multiplier", **MLA),
    "OLMo hybrid": hf("OlmoHybridForCausalLM", "prenorm and x + N(F(x))", **DELTA),
    "HRM": hf("HrmTextForCausalLM", "prenorm, blocks called several times"),
    "CSM": hf("CsmBackboneModel", "prenorm", lambda: {"input_ids": ids()[..., None].repeat(1, 1, 2)}),
    "CPM-Ant": hf(
        "CpmAntForCausalLM",
        "prenorm",
        only,
        {"dim_head": 8, "dim_ff": FF, "segment_types": 4, "prompt_types": 4, "prompt_length": 4},
        position_bias_num_buckets=8,
    ),
    "Moshi": hf("MoshiForCausalLM", "prenorm"),
    "LFM2-MoE": hf(
        "Lfm2MoeForCausalLM", "prenorm, experts", layer_types=["conv", "full_attention", "conv"], num_dense_layers=1
    ),
    "Beam": hf("BeamForCausalLM", "sandwich, the sum scaled by depth"),
    "HY-V4": hf("HYV4ForCausalLM", "prenorm, hyper-connections"),
    "NeoMME": hf("NeoMMEForMaskedLM", "prenorm without weights, with multiplier, mixed with x0", head_dim=D),
    "RemBERT": hf("RemBertForMaskedLM", "postnorm", input_embedding_size=D, output_embedding_size=D),
    "MarkupLM": hf(
        "MarkupLMModel",
        "postnorm",
        text,
        {"xpath_unit_hidden_size": 4, "max_depth": 4, "tag_pad_id": 7, "subs_pad_id": 7},
        {"max_xpath_tag_unit_embeddings": 8, "max_xpath_subs_unit_embeddings": 8},
    ),
    "LiLT": hf("LiltModel", "postnorm, two streams", channel_shrink_ratio=2, hidden_size=24),
    "Jina": hf("JinaEmbeddingsV3ForMaskedLM", "postnorm"),
    "NLLB-MoE": hf(
        "NllbMoeForConditionalGeneration",
        "prenorm, experts",
        seq2seq,
        {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 8},
    ),
    "LongT5, global": hf(
        "LongT5ForConditionalGeneration",
        "prenorm",
        seq2seq,
        {**T5, "local_radius": 3, "global_block_size": 4, "encoder_attention_type": "transient-global"},
    ),
    "UDOP": hf(
        "UdopForConditionalGeneration", "prenorm", lambda: seq2seq() | {"bbox": rand(2, 8, 4).sigmoid()}, num_layers=2
    ),
    "Dia": hf(
        "DiaModel",
        "prenorm",
        lambda: only() | {"decoder_input_ids": ids(7)[..., None].repeat(1, 1, 9)},
        decoder_config={"cross_hidden_size": D, "cross_head_dim": 4}
        | {"cross_num_attention_heads": 4, "cross_num_key_value_heads": 4},
    ),
    "SpeechT5": hf(
        "SpeechT5ForSpeechToText",
        "postnorm",
        lambda: audio() | {"decoder_input_ids": ids(7)},
        max_text_positions=32,
        max_speech_positions=32,
    ),
    "Hiera": hf(
        "HieraModel",
        "prenorm",
        partial(pixels, 32),
        {"image_size": [32, 32], "patch_size": [7, 7], "depths": [2, 2], "num_heads": [2, 4], "embed_dim": D},
        {"num_query_pool": 1, "masked_unit_size": [4, 4], "masked_unit_attention": [True, False]},
    ),
    "FocalNet": hf("FocalNetModel", "prenorm", partial(pixels, 32), **FOCAL),
    "FocalNet, post norms": hf(
        "FocalNetModel",
        "x + N(F(x)) with layer scale",
        partial(pixels, 32),
        {**FOCAL, "use_post_layernorm": True, "use_layerscale": True},
    ),
    "LeViT": hf(
        "LevitModel",
        "x + F(x), BatchNorm within",
        partial(pixels, 64),
        {"image_size": 64, "patch_size": 16, "hidden_sizes": [D] * 3, "num_attention_heads": [2] * 3},
        {"depths": [2, 1, 1], "key_dim": [4] * 3},
    ),
    "V-JEPA2": hf(
        "VJEPA2Model",
        "prenorm",
        lambda: pixels(name="pixel_values_videos", frames=(2,)),
        {"crop_size": 8, "frames_per_clip": 2, "num_pooler_layers": 1},
        {"pred_hidden_size": D, "pred_num_attention_heads": HEADS, "pred_num_hidden_layers": 2},
    ),
    "SwiftFormer": hf(
        "SwiftFormerModel",
        "x + s F(x), the norm within, and convolutions",
        partial(pixels, 64),
        depths=[2] * 4,
        embed_dims=[D, D, 2 * D, 2 * D],
    ),
    "PVTv2": hf("PvtV2Model", "prenorm", partial(pixels, 16), image_size=16, **PYRAMID),
    "Swin2SR": hf(
        "Swin2SRModel",
        "x + N(F(x)), and x + F(x) around each stage",
        pixels,
        **SWIN | {"image_size": 8, "patch_size": 1},
    ),
    "SigLIP2, vision": hf(
        "Siglip2VisionModel",
        "prenorm",
        lambda: {"pixel_values": rand(2, 4, 48), "pixel_attention_mask": torch.ones(2, 4, dtype=torch.long)}
        | {"spatial_shapes": torch.full((2, 2), 2)},
        num_patches=4,
    ),
    "Pix2Struct, vision": hf(
        "Pix2StructVisionModel",
        "prenorm",
        lambda: {"flattened_patches": torch.cat([torch.ones(2, 4, 2), rand(2, 4, 48)], -1)},
        patch_embed_hidden_size=48,
        seq_len=8,
    ),
    "MobileViTv2": hf(
        "MobileViTV2Model",
        "prenorm, within convolutions, GroupNorm",
        partial(pixels, 64),
        {"image_size": 64, "patch_size": 2, "base_attn_unit_dims": [D] * 3, "n_attn_blocks": [2, 2, 1]},
        width_multiplier=0.125,
    ),
    "MGP-STR": hf("MgpstrModel", "prenorm", pixels, image_size=[8, 8], max_token_length=4),
    "Mllama, vision": hf(
        "MllamaVisionModel",
        "prenorm, some with tanh gates",
        lambda: {"pixel_values": rand(1, 1, 1, 3, 8, 8), "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long)}
        | {"aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long)},
        {"num_hidden_layers": 2, "num_global_layers": 2, "attention_heads": HEADS, "max_num_tiles": 1},
        {"intermediate_layers_indices": [0, 1], "supported_aspect_ratios": [[1, 1]], "vision_output_dim": 48},
    ),
    "TableTransformer": hf("TableTransformerModel", "prenorm", partial(pixels, 32), **DETR),
    "Qwen2.5-VL, vision": hf(
        "Qwen2_5_VisionTransformerPretrainedModel",
        "prenorm",
        lambda: {"hidden_states": rand(16, 24), "grid_thw": torch.tensor([[1, 4, 4]])},
        {"depth": 2, "num_heads": 2, "patch_size": 2, "temporal_patch_size": 2, "window_size": 8},
        {"fullatt_block_indexes": [1], "out_hidden_size": D},
    ),
    "SEW-D": hf("SEWDModel", "postnorm", audio, squeeze_factor=1),
    "Wav2Vec2-BERT": hf(
        "Wav2Vec2BertModel", "macaron", partial(mel, 9, 8), feature_projection_input_dim=8, conv_depthwise_kernel_size=3
    ),
    "Parakeet": hf("ParakeetEncoder", "macaron", partial(mel, 33, 8), subsampling_conv_channels=4, conv_kernel_size=3),
    "X-CLIP": hf(
        "XCLIPModel",
        "prenorm, a message token beside",
        lambda: text() | video(),
        {"prompt_num_attention_heads": HEADS, "prompt_layers": 2},
        vision_config={"mit_hidden_size": D, "mit_intermediate_size": FF, "mit_num_hidden_layers": 1}
        | {"mit_num_attention_heads": HEADS},
    ),
    "MetaCLIP2": hf("MetaClip2Model", "prenorm", both),
    "TimesFM": hf(
        "TimesFmModel",
        "prenorm, the feed-forward's norm within",
        lambda: {"past_values": rand(2, 16), "past_values_padding": torch.zeros(2, 16)}
        | {"freq": torch.zeros(2, 1, dtype=torch.long)},
        {"patch_length": 4, "context_length": 16, "horizon_length": 4},
    ),
    "TimesFM2.5": hf(
        "TimesFm2_5Model",
        "sandwich",
        lambda: {"past_values": rand(2, 16), "past_values_padding": torch.zeros(2, 16)},
        {"patch_length": 4, "context_length": 16, "horizon_length": 4},
    ),
    "PatchTSMixer": hf(
        "PatchTSMixerModel", "prenorm, axes swapped", lambda: {"past_values": rand(2, 32, 2)}, num_input_channels=2
    ),
    "NormFormer-like": own(stack(NormFormer), "sandwich, a norm within the feed-forward"),
    "ReZero-like": own(stack(ReZero), "x + alpha F(x), no norm"),
    "gated": own(stack(Gated), "g x + (1 - g) F(N(x))"),
    "nGPT-like": own(stack(Lerp), "x + 0.3 (N(F(x)) - x)"),
    "torch.add": own(stack(Functional), "prenorm with multiplier"),
    "fused-norm-like": own(partial(PreLastStack, PreLast), "prenorm, blocks hand on two tensors"),
    "U-Net-like": own(UNet, "prenorm"),
    "checkpointed": own(stack(Checkpointed), "prenorm"),
    "two texts": own(partial(TwoTexts, stack(NanoGPT)), "prenorm"),
    "two texts, two lists": own(partial(TwoTexts, TwoLists), "prenorm"),
    "two texts, uneven": own(UnevenTexts, "prenorm"),
    "one block, run twice": own(RunsTwice, "prenorm"),
    "two texts, one loop": own(partial(TwoTextsInOneLoop, LAYERS), "prenorm"),
    "two texts, one block": own(partial(TwoTextsInOneLoop, 1), "prenorm"),
    "timm XCiT": timm("xcit", "Xcit", "prenorm with layer scale, three branches", **VIT, eta=0.1),
    "timm MetaFormer": timm(
        "metaformer", "MetaFormer", "prenorm with a scale of x", num_classes=3, depths=(2, 2), dims=(D, 2 * D)
    ),
    "timm PiT": timm(
        "pit",
        "PoolingVisionTransformer",
        "prenorm",
        32,
        {"img_size": 32, "patch_size": 8, "stride": 4, "num_classes": 3, "stem_type": "overlap"},
        {"base_dims": (8, 8), "depth": (2, 2), "heads": (2, 4), "mlp_ratio": 2},
    ),
    "diffusers Sana": other(
        "diffusers",
        "SanaTransformer2DModel",
        "adaLN, cross-attention without norm",
        latents,
        {**DIT, "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 4},
        {"cross_attention_head_dim": 4, "cross_attention_dim": D, "caption_channels": 12},
    ),
    "diffusers Wan": other(
        "diffusers",
        "WanTransformer3DModel",
        "adaLN, cross-attention prenorm",
        lambda: latents(hidden_states=rand(2, 4, 2, 4, 4)),
        {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "in_channels": 4},
        {"out_channels": 4, "text_dim": 12, "freq_dim": D, "ffn_dim": FF},
    ),
    "x-transformers, gated": lucid("prenorm with a GRU gate, all blocks in the model", gate_residual=True),
    "x-transformers, scaled": lucid("prenorm with a scale of x, all blocks in the model", scale_residual=True),
    "torchaudio Emformer": other(
        "torchaudio.models",
        "Emformer",
        "prenorm",
        lambda: {"input": rand(2, 10, D), "lengths": torch.tensor([8, 6])},
        {"input_dim": D, "num_heads": HEADS, "ffn_dim": FF, "num_layers": LAYERS},
        {"segment_length": 4, "right_context_length": 2},
    ),
}

ROWS = DECODERS | ENCODERS | SEQ2SEQ | VISION | AUDIO | MULTIMODAL | SERIES | OWN | LIBRARIES
MODELS = {name: row[0] for name, row in ROWS.items()}
UNSEEN = {name: row[0] for name, row in ASIDE.items()}
KNOWN = {name: row[1] for name, row in (ROWS | ASIDE).items()}
LIBRARY = {name: row[2] for name, row in (ROWS | ASIDE).items()}
