"""How a model and its options are shown."""

import inspect

from torch import nn

import normformer_rs as nfrs


def test_a_model_prints_over_several_lines():
    config = nfrs.TransformerConfig(
        vocab_size=20, d_model=16, heads=2, d_ff=16, encoder_layers=1, decoder_layers=1, norm="scalenorm", fixnorm=True
    )
    lines = repr(nn.Sequential(nfrs.Transformer(config))).splitlines()
    assert lines[:4] == ["Sequential(", "  (0): Transformer(", "    vocab_size=20,", "    d_model=16,"]
    assert {"    norm='scalenorm',", "    residual='prenorm',", "    fixnorm=True,"} <= {*lines}
    assert max(map(len, lines)) < 40 and len(lines) < 20


def test_options_have_a_signature():
    kinds = (nfrs.TransformerConfig, nfrs.TrainingConfig, nfrs.DataConfig, nfrs.SearchConfig, nfrs.GenerationConfig)
    for kind in kinds:
        parameters = inspect.signature(kind).parameters
        assert [*parameters] == [field.name for field in kind.FIELDS]
        assert {p.kind for p in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
        assert {name: p.default for name, p in parameters.items()} == kind().asdict()
