"""What `init = "fairseq-0.12.2"` draws against what fairseq itself starts from."""

import argparse

import pytest
import torch
from fairseq_support import MARKS

import normformer_rs as nfrs
from normformer_rs.formats.convert import to_canonical

pytestmark = MARKS


def test_the_start_is_fairseqs(fairseq):
    """Every role's standard deviation within 1 % at d 512; biases, of fewer numbers, within what their number tells."""
    from fairseq.data import Dictionary
    from fairseq.models.transformer import TransformerModel
    from fairseq.models.transformer.transformer_legacy import base_architecture

    dictionary = Dictionary()
    for word in range(2000):
        dictionary.add_symbol(str(word))
    flags = argparse.Namespace(encoder_layers=1, decoder_layers=1)
    base_architecture(flags)
    flags.max_source_positions = flags.max_target_positions = 64
    task = argparse.Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    torch.manual_seed(1)
    theirs = to_canonical(TransformerModel.build_model(flags, task).state_dict(), "none")
    shape = {"d_model": 512, "d_ff": 2048, "heads": 8, "encoder_layers": 1, "decoder_layers": 1}
    config = nfrs.TransformerConfig(
        vocab_size=len(dictionary), **shape, residual="postnorm", init="fairseq-0.12.2", tie_embeddings="none"
    )
    ours = nfrs.Transformer(config, seed=1).state_dict()
    drawn = {name for name, value in theirs.items() if value.is_floating_point() and value.std() > 0}
    assert drawn == {name for name, value in ours.items() if value.is_floating_point() and value.std() > 0}
    for name in drawn:
        for one, other in zip(*(t[name].chunk(3) if "in_proj" in name else [t[name]] for t in (ours, theirs))):
            allowed = max(0.01, 8 / (2 * other.numel()) ** 0.5)
            assert one.std().item() == pytest.approx(other.std().item(), rel=allowed), name
            ends = [t.abs().max().item() for t in (one, other)]
            assert ends[0] == pytest.approx(ends[1], rel=0.25), name
