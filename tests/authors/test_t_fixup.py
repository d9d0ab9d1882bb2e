"""T-Fixup and its initialisation against its authors' fork of fairseq, in f64."""

from authors_fairseq import arguments, assert_same_first_values, assert_same_models, fork, our_model, their_stacks

AUTHORS = "layer6ai-labs/T-Fixup", "b17e166d9f60671a92c3f39e24c9b8c93995e5a3"
PATHS = ["modules/multihead_attention", "modules/transformer_layer", "models/transformer"]
PATHS = [f"fairseq/{path}.py" for path in PATHS]
CHANGES = {PATHS[0]: {'hasattr(F, "multi_head_attention_forward")': "False"}}  # the authors' own attention


def models(width, words):
    """The authors' decoder has norms that it never calls; they go."""
    args = arguments(width, (3, 2), words, dont_use_layernorm=True, Tfixup=True)
    theirs = their_stacks(fork(*AUTHORS, PATHS, CHANGES), args)
    for layer in theirs["decoder"].layers:
        layer.encoder_attn_layer_norm = None
    return our_model(args, "t-fixup"), theirs


def test_logits_and_gradients():
    assert_same_models(*models(8, 11))


def test_first_values():
    """Matrices and embeddings. The authors draw the biases of q, k and v as nn.Linear does; ours are 0."""
    assert_same_first_values(*models(128, 500), biases=False)
