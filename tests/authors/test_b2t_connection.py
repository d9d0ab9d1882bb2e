"""The bottom-to-top connection and its initialisation against its authors' fork of fairseq, in f64."""

from authors_fairseq import arguments, assert_same_first_values, assert_same_models, fork, our_model, their_stacks

AUTHORS = "takase/b2t_connection", "c8e2ad4ed0b137bf267272419dbf71771dff9f64"
PATHS = ["models/fairseq_encoder", "modules/multihead_attention", "modules/transformer_layer", "models/transformer"]
PATHS = [f"fairseq/{path}.py" for path in PATHS]
CHANGES = {PATHS[1]: {'hasattr(F, "multi_head_attention_forward")': "False"}}  # the authors' own attention
UNUSED = ["sampling_method", "enc_replace_rate", "dec_replace_rate", "decay_val", "ordinary_sinpos"]
UNUSED += ["represent_length_by_lrpe", "represent_length_by_ldpe", "no_layer_norm"]  # of the authors' other papers


def models(width, words):
    args = arguments(width, (3, 2), words, residual_bottom_to_top=True, **dict.fromkeys(UNUSED, 0))
    return our_model(args, "b2t"), their_stacks(fork(*AUTHORS, PATHS, CHANGES), args)


def test_logits_and_gradients():
    assert_same_models(*models(8, 11))


def test_first_values():
    assert_same_first_values(*models(128, 500))
