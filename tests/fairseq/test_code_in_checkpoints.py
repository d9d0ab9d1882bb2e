"""A checkpoint's options name no code that runs, unless the user's command line has the text or says --trust."""

import argparse
import sys

import pytest
from fairseq_support import MARKS

from normformer_rs import InputError

pytestmark = MARKS
SIZES = {"embed_dim": 8, "ffn_embed_dim": 8, "layers": 1, "attention_heads": 2}


def flags(**options):
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in SIZES.items()}
    return argparse.Namespace(**sizes, word_dropout=0.0, **options)


@pytest.mark.parametrize("name", ["norm", "encoder_norm", "decoder_norm", "residual"])
def test_only_the_command_line_may_name_code(fairseq, monkeypatch, name):
    from normformer_rs.fairseq_plugin.options import plain

    option, text = f"--{name.replace('_', '-')}", "ck/mine.py:Mine"
    monkeypatch.delenv("NORMFORMER_RS_TRUST", raising=False)
    for words in ([], ["data", "--path", "ck/best.pt"], ["--path", f"x{text}"]):
        monkeypatch.setattr(sys, "argv", ["fairseq-generate", *words])
        with pytest.raises(InputError, match="names Python code"):
            plain(flags(**{name: text}))
    for words in (
        [option, text],
        [f"{option}={text}"],
        [f"model.{name}={text}"],
        ["--model-overrides", f"{{{name!r}: {text!r}}}"],
    ):
        monkeypatch.setattr(sys, "argv", ["fairseq-train", *words])
        assert getattr(plain(flags(**{name: text})), name) == text
    monkeypatch.setattr(sys, "argv", ["fairseq-generate"])
    monkeypatch.setenv("NORMFORMER_RS_TRUST", "1")
    assert getattr(plain(flags(**{name: text})), name) == text


def test_trust_is_the_plug_ins_word(fairseq, monkeypatch):
    from normformer_rs.fairseq_plugin import command

    seen = []
    monkeypatch.setattr(command, "check", lambda name, words: seen.append(words))
    monkeypatch.setattr(command.importlib, "import_module", lambda _: argparse.Namespace(cli_main=lambda: None))
    monkeypatch.setenv("NORMFORMER_RS_TRUST", "0")
    monkeypatch.setattr(sys, "argv", ["command", "generate", "data", "--trust", "--path", "x.pt"])
    assert command.main() == 0 and seen == [["data", "--path", "x.pt"]]
    assert command.os.environ["NORMFORMER_RS_TRUST"] == "1"
