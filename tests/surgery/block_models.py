"""Small models of every family whose blocks `swap_residuals` knows: how each is built, and how it runs."""

import pytest
import torch

D, HEADS, FF, LAYERS = 16, 4, 32, 2

TOKENS = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDTHS = {"hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": FF}
ENCODER = WIDTHS | TOKENS | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA = WIDTHS | TOKENS | {"num_key_value_heads": 2, "head_dim": 6}
BART = TOKENS | {
    "d_model": D,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": FF,
    "decoder_ffn_dim": FF,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
    "dropout": 0.0,
    "activation_dropout": 0.0,
    "attention_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
T5 = TOKENS | {
    "d_model": D,
    "d_kv": 6,
    "d_ff": FF,
    "num_layers": LAYERS,
    "num_heads": 3,
    "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
}
GPT2 = TOKENS | {"n_embd": D, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 32}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OPT = WIDTHS | TOKENS | {"ffn_dim": FF, "word_embed_proj_dim": D, "max_position_embeddings": 32, "dropout": 0.0}
NEOX = WIDTHS | TOKENS | {"use_parallel_residual": False, "hidden_dropout": 0.0}
PIXELS = {"image_size": 8, "patch_size": 4, "num_channels": 3}
CLIP_SIDE = WIDTHS | {"attention_dropout": 0.0, "projection_dim": D}
CLIP = {
    "text_config": CLIP_SIDE | TOKENS | {"max_position_embeddings": 32},
    "vision_config": CLIP_SIDE | PIXELS,
    "projection_dim": D,
}
WHISPER = BART | {"num_mel_bins": 5, "max_source_positions": 4, "max_target_positions": 32}
for name in ("max_position_embeddings", "forced_eos_token_id", "forced_bos_token_id"):
    WHISPER.pop(name)
WAV2VEC2 = WIDTHS | {
    "conv_dim": (8, 8),
    "conv_kernel": (3, 3),
    "conv_stride": (2, 2),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
    "apply_spec_augment": False,  # it draws with numpy
    "layerdrop": 0.0,
    "hidden_dropout": 0.0,
    "activation_dropout": 0.0,
    "attention_dropout": 0.0,
    "feat_proj_dropout": 0.0,
}

FAMILIES = {
    "Bert": ("BertForMaskedLM", ENCODER, "postnorm"),
    "Roberta": ("RobertaForMaskedLM", ENCODER, "postnorm"),
    "XLMRoberta": ("XLMRobertaForMaskedLM", ENCODER, "postnorm"),
    "Electra": ("ElectraForMaskedLM", ENCODER, "postnorm"),
    "DistilBert": (
        "DistilBertForMaskedLM",
        TOKENS
        | {"dim": D, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": FF, "dropout": 0.0}
        | {"attention_dropout": 0.0},
        "postnorm",
    ),
    "RobertaPreLayerNorm": ("RobertaPreLayerNormForMaskedLM", ENCODER, "prenorm"),
    "GPT2": ("GPT2LMHeadModel", GPT2, "prenorm"),
    "Llama": ("LlamaForCausalLM", LLAMA, "prenorm"),
    "Mistral": ("MistralForCausalLM", LLAMA, "prenorm"),
    "Qwen2": ("Qwen2ForCausalLM", LLAMA, "prenorm"),
    "Qwen3": ("Qwen3ForCausalLM", LLAMA, "prenorm"),
    "OPT": ("OPTForCausalLM", OPT, "prenorm"),
    "OPT, post-norm": ("OPTForCausalLM", OPT | {"do_layer_norm_before": False}, "postnorm"),
    "GPTNeoX": ("GPTNeoXForCausalLM", NEOX, "prenorm"),
    "T5": ("T5ForConditionalGeneration", T5, "prenorm"),
    "Bart": ("BartForConditionalGeneration", BART, "postnorm"),
    "Marian": ("MarianMTModel", BART | {"decoder_vocab_size": 40}, "postnorm"),
    "MBart": ("MBartForConditionalGeneration", BART, "prenorm"),
    "Pegasus": ("PegasusForConditionalGeneration", BART, "prenorm"),
    "M2M100": ("M2M100ForConditionalGeneration", BART, "prenorm"),
    "Whisper": ("WhisperForConditionalGeneration", WHISPER, "prenorm"),
    "ViT": ("ViTForImageClassification", WIDTHS | PIXELS | {"hidden_dropout_prob": 0.0}, "prenorm"),
    "CLIP": ("CLIPModel", CLIP, "prenorm"),
    "timm": (None, {}, "prenorm"),
    "Gemma": ("GemmaForCausalLM", LLAMA, "prenorm"),
    "Wav2Vec2": ("Wav2Vec2ForSequenceClassification", WAV2VEC2, "postnorm"),
    "Wav2Vec2, stable": (
        "Wav2Vec2ForSequenceClassification",
        WAV2VEC2 | {"do_stable_layer_norm": True, "feat_extract_norm": "layer"},
        "prenorm",
    ),
}
GENERATING = ["GPT2", "Llama", "Mistral", "Qwen2", "Qwen3", "OPT", "OPT, post-norm", "GPTNeoX", "T5", "Bart", "Marian"]
GENERATING += ["MBart", "Pegasus", "M2M100", "Whisper", "Gemma"]


def build(name, **options):
    """A model of the family, its parameters moved off their start, so that norms and biases count."""
    kind, config, _ = FAMILIES[name]
    torch.manual_seed(0)
    if name == "timm":
        timm = pytest.importorskip("timm")
        model = timm.models.vision_transformer.VisionTransformer(
            img_size=8, patch_size=4, embed_dim=D, depth=LAYERS, num_heads=HEADS, mlp_ratio=2, num_classes=3, **options
        )
    else:
        transformers = pytest.importorskip("transformers")
        kind = getattr(transformers, kind)
        model = kind(kind.config_class(**{**config, **options}))
    return model


def move(model):
    """All parameters, norms and biases too, off their first values."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    return model


def inputs(name, dtype=torch.float32):
    """What the model is called with: the second sequence ends in padding."""
    torch.manual_seed(2)
    tokens, mask = torch.randint(3, 40, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    pixels = torch.randn(2, 3, 8, 8, dtype=dtype)
    if name == "timm":
        return {"x": pixels}
    if name == "ViT":
        return {"pixel_values": pixels}
    if name == "CLIP":
        return {"input_ids": tokens, "attention_mask": mask, "pixel_values": pixels}
    if name.startswith("Wav2Vec2"):
        samples = torch.ones(2, 40, dtype=torch.long)
        samples[1, 28:] = 0
        return {"input_values": torch.randn(2, 40, dtype=dtype), "attention_mask": samples}
    if name == "Whisper":
        return {"input_features": torch.randn(2, 5, 8, dtype=dtype), "labels": tokens}
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def outputs(model, given):
    """What the model computes: logits, or similarities of texts and images."""
    out = model(**given)
    return out if isinstance(out, torch.Tensor) else out.logits_per_text if "logits_per_text" in out else out.logits


def loss(model, given):
    """A number to lower."""
    out = outputs(model, given)
    labels = given.get("labels")
    if labels is None:
        labels = torch.arange(len(out))
    return torch.nn.functional.cross_entropy(out.flatten(0, -2), labels.flatten())
