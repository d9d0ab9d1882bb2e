"""The plans of `reproduce` at the authors' scale agree with the table of facts, or deviate as it says."""

import dataclasses
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

import normformer_rs as nfrs
from normformer_rs.config import split
from normformer_rs.reproduce import REPRODUCTIONS, Row, Scale, command
from normformer_rs.reproduce.corpora import CORPORA
from normformer_rs.reproduce.facts import deviations, facts
from normformer_rs.scores import score

ENTRIES = {name: entry for name, entry in REPRODUCTIONS.items() if "paper" in entry.scales}
STARTS = {scheme["name"]: scheme["init"] for scheme in nfrs.tables()["residuals"]}
WITHOUT_A_FACT = {
    "*": {
        *("residual", "norm", "encoder_norm", "fixnorm"),  # the rows' own names
        *("positions", "decoder_start", "vocab_mask", "count_from_zero", "weight_decay_of", "rule"),  # fairseq's ways
        *("architecture", "no_bpe", "log_statistics", "precision", "seed"),
    },
    "twt-table6": {"beam", "alpha", "updates"},  # 0 updates: epochs end it
    "pn-table2": {"updates"},
    "brn-*": {"attention_dropout", "activation_dropout"},
    "brn-table3": {"bpe_operations"},
    "brn-fig[1359]": {"layers"},
    "brn-fig3": {"evaluate_every"},
}
"""Options that entries set and no paper or release states, by names of entries."""


def settings(row: Row, scale: Scale) -> dict[str, Any]:
    """Everything that a run of the row is made by, defaults included."""
    corpus = CORPORA[row.corpus]
    kinds = nfrs.TransformerConfig, nfrs.TrainingConfig, nfrs.DataConfig
    parts = split({**corpus.options, **row.options}, *kinds)
    configs = [kind(**part) for kind, part in zip(kinds, parts)] + [nfrs.SearchConfig(**row.search)]
    found = {field.name: getattr(config, field.name) for config in configs for field in dataclasses.fields(config)}
    follows = {
        "init": STARTS[found["residual"]],
        "attention_dropout": found["dropout"],
        "activation_dropout": found["dropout"],
        "decoder_norm": found["norm"],
        "alpha": {"google": 0.6, "fairseq": 1.0}[found["rule"]],
    }
    found |= {name: value for name, value in follows.items() if found[name] is None}
    if found["encoder_layers"] == found["decoder_layers"]:
        found["layers"] = found["encoder_layers"]
    return {**found, **scale._asdict(), **score.__kwdefaults__, **corpus._asdict()}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_plan_is_the_papers_or_deviates_as_declared(name):
    entry, scale = ENTRIES[name], ENTRIES[name].scales["paper"]
    wrong = set()
    for row in scale.rows:
        ours = settings(row, scale)
        for fact in facts():
            if fact.is_about(entry, row):
                found, wanted = ours.get(fact.option, "none"), fact.ours if fact.why else fact.value
                if found != wanted:
                    wrong.add(f"{fact.option} of {', '.join(row.key.values())}: {found}, not {wanted} ({fact.where})")
    assert not wrong, "\n".join(sorted(wrong))


@pytest.mark.parametrize("name", ENTRIES)
def test_each_option_that_an_entry_sets_has_a_fact(name):
    entry, scale = ENTRIES[name], ENTRIES[name].scales["paper"]
    options = {option for row in scale.rows for option in (*CORPORA[row.corpus].options, *row.options)}
    if "bleu" in scale.shown.measures:
        options |= {option for row in scale.rows for option in row.search}
    else:
        options.discard("keep")
    stated = {fact.option for fact in facts() if any(fact.is_about(entry, row) for row in scale.rows)}
    unstated = {option for pattern, found in WITHOUT_A_FACT.items() if fnmatchcase(name, pattern) for option in found}
    if "layers" in stated | unstated:
        options -= {"encoder_layers", "decoder_layers"}
    assert options <= stated | unstated


def test_a_line_is_a_fact_of_some_row_or_a_deviation_with_its_reason():
    for fact in facts():
        assert any(fact.is_about(entry, row) for entry in ENTRIES.values() for row in entry.scales["paper"].rows), fact
        assert fact.where and (fact.ours == "") == (fact.why == "") and fact.ours != fact.value, fact


def test_a_plan_prints_its_deviations():
    plan = command.plan(ENTRIES["pn-table1"], "paper", Path("data")).splitlines()
    at = plan.index("  deviations from the paper:")
    line = "    dropout (iwslt14): 0.3 here, 0.0 in the paper (App A.1): the release's train-iwslt14.sh has 0.3"
    assert line in plan[at : at + 1 + len(deviations(ENTRIES["pn-table1"]))]
    assert plan[at + 1 + len(deviations(ENTRIES["pn-table1"]))].startswith("  options of all 14 runs: ")
    for scale in ("check", "here"):
        assert "deviations" not in command.plan(ENTRIES["pn-table1"], scale, Path("data"))
