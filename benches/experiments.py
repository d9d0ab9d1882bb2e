"""The papers' comparisons on Multi30k and tinyshakespeare, one run after another, resumable.

    python benches/experiments.py NAME --data DATA --runs RUNS [--results FOLDER]

NAME is ladder, table5, norms, depth18, depth50, french, shakespeare or bf16. DATA holds multi30k, multi30k-bpe-en-de
and tinyshakespeare (docs/data.md says where to get them); RUNS gets one folder a run. A run that is finished is not
made again, one that was stopped goes on. The table goes to standard output and, row by row, to FOLDER/NAME.csv; rows
that are there already are taken from it, so that a table can be made over several days and machines. The depth runs'
first gradient norms go to FOLDER/NAME-gradients.csv, and their picture to FOLDER/NAME.png (benches/figures.py).

A run "diverged" when its loss stopped being finite, or its training NLL over the last 50 updates is at least 0.95 times
the entropy of the target's unigrams; it "trains" when its validation NLL is at most 0.75 times that entropy.

TwT is Nguyen & Salazar 2019, PN Shen et al. 2020, BrN Liu et al. 2023 (docs/spec.md §7.1).
"""

import argparse
import csv
import gzip
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import figures
import numpy as np

import normformer_rs as nf
from normformer_rs.scores import score

Options = dict[str, Any]
Row = dict[str, Any]
Experiment = Iterator[tuple[Row, Callable[[], Row]]]  # what a row is of, and how the rest of it is measured
TINY: Options = {"d_model": 128, "d_ff": 256, "heads": 4, "encoder_layers": 4, "decoder_layers": 4, "dropout": 0.3}
TINY |= {"attention_dropout": 0.0, "activation_dropout": 0.0}
RECIPE: Options = {"lr": 5e-3, "warmup": 2000, "max_tokens": 4096, "updates": 2500, "evaluate_every": 250, "keep": 5}
RECIPE |= {"precision": "bf16"}  # products; parameters, moments, statistics and the residual stream are f32
TEST = "multi30k-bpe-en-de/test.2016"
RESIDUALS = [entry["name"] for entry in nf.tables()["residuals"]]


class Runs:
    """Training runs in one folder."""

    def __init__(self, data: Path, folder: Path) -> None:
        self.data, self.folder = data, folder

    def path(self, name: str) -> Path:
        """A data file, unpacked into the folder of the runs for those who read it as lines."""
        return self.data / name

    def lines(self, name: str) -> list[str]:
        return gzip.decompress(self.path(name).read_bytes()).decode().splitlines()

    def german(self) -> Options:
        files = {f"{part}_{side}": f"multi30k-bpe-en-de/{part}.{language}.gz" for part in ("train", "valid")
                 for side, language in (("source", "en"), ("target", "de"))}  # fmt: skip
        return {key: str(self.path(name)) for key, name in files.items()} | {"no_bpe": True}

    def train(self, name: str, model: Options, training: Options, data: Options) -> tuple[Path, Row]:
        """The folder of the run and its verdict."""
        output = self.folder / name
        verdict = output / "verdict.json"
        if not verdict.exists():
            print(f"{name} …", file=sys.stderr, flush=True)
            configs = nf.TransformerConfig(**model), nf.TrainingConfig(**training), nf.DataConfig(**data)
            has_diverged = False
            try:
                nf.Trainer(*configs).fit(output, resume=(output / "config.json").exists(), curves=False)
            except nf.DivergedError as error:
                has_diverged = True
                print(f"{name}: {error}", file=sys.stderr)
            verdict.write_text(json.dumps(judge(output, has_diverged)))
        return output, json.loads(verdict.read_text())

    def bleu(
        self, output: Path, test: str, tokenize: str, precision: str = "f32"
    ) -> tuple[float, list[str], list[str]]:
        """BLEU of the average of the kept checkpoints at beam 5 with fairseq's rule; hypotheses; references."""
        source, target = (self.lines(f"{test}.{language}.gz") for language in self.languages(output))
        references = [nf._core.join_line(line) for line in target]
        saved = output / f"{Path(test).name}.hypotheses"
        if not saved.exists():
            nf.average(output, last=min(len(nf.History.read(output).evaluations.update), 10))
            search = nf.SearchConfig(beam=5, rule="fairseq")
            found = nf.translate(output, source, search, checkpoint="average")
            saved.write_text("".join(best[0].text + "\n" for best in found))
        hypotheses = saved.read_text().splitlines()
        return score(hypotheses, references, tokenize=tokenize).bleu, hypotheses, references

    @staticmethod
    def languages(output: Path) -> tuple[str, str]:
        data = json.loads((output / "config.json").read_text())["data"]
        return data["train_source"].split(".")[-2], data["train_target"].split(".")[-2]


def judge(output: Path, has_diverged: bool) -> Row:
    """Losses in nats per token, and the verdict."""
    log = map(json.loads, (output / "log.jsonl").read_text().splitlines())
    entropy = next(event for event in log if event["event"] == "started")["unigram_entropy"]
    history = nf.History.read(output)
    train = float(np.mean(history.nll[-50:])) if len(history.nll) else float("nan")
    valid = float(history.evaluations.nll[-1]) if len(history.evaluations.nll) else float("nan")
    if has_diverged or not train < 0.95 * entropy:
        verdict = "diverged"
    else:
        verdict = "trains" if valid <= 0.75 * entropy else "neither"
    return {
        "verdict": verdict,
        "updates": len(history.update),
        "train_nll": round(train, 4),
        "valid_nll": round(valid, 4),
        "unigram_entropy": round(entropy, 4),
        "largest_grad_norm": round(float(np.max(history.grad_norm)), 2) if len(history.grad_norm) else float("nan"),
    }


def ladder(runs: Runs) -> Experiment:
    """TwT Table 3: postnorm + LayerNorm, prenorm, + FixNorm, + ScaleNorm."""
    steps: list[Options] = [
        {"residual": "postnorm", "norm": "layernorm"},
        {"residual": "prenorm", "norm": "layernorm"},
        {"residual": "prenorm", "norm": "layernorm", "fixnorm": True},
        {"residual": "prenorm", "norm": "scalenorm", "fixnorm": True},
    ]
    names = ["+".join([s["residual"], *(["fixnorm"] if s.get("fixnorm") else []), s["norm"]]) for s in steps]

    def run(index: int) -> tuple[float, list[str], list[str], Row]:
        output, verdict = runs.train(f"ladder-{names[index]}", TINY | steps[index], RECIPE, runs.german())
        return (*runs.bleu(output, TEST, "none"), verdict)

    def measure(index: int) -> Row:
        bleu, hypotheses, references, verdict = run(index)
        compared = score(hypotheses, references, run(index - 1)[1], tokenize="none").comparison if index else None
        p = round(compared.p_value, 4) if compared else ""
        return {"bleu_test_2016": round(bleu, 2), "p_against_the_row_before": p, **verdict}

    for index, name in enumerate(names):
        yield {"run": name}, lambda index=index: measure(index)


def table5(runs: Runs) -> Experiment:
    """TwT Table 5: no warm-up, 6+6 layers, Xavier."""
    for residual, lr, seed in itertools.product(("postnorm", "prenorm"), (3e-4, 1e-3, 3e-3), (1, 2)):
        model = TINY | {"encoder_layers": 6, "decoder_layers": 6, "init": "xavier", "residual": residual}
        training = RECIPE | {"schedule": "constant", "warmup": 0, "lr": lr, "seed": seed, "updates": 1000, "keep": 1}
        run = f"table5-{residual}-{lr:g}-{seed}", model, training, runs.german()
        yield {"residual": residual, "lr": lr, "seed": seed}, lambda run=run: runs.train(*run)[1]


def norms(runs: Runs) -> Experiment:
    """PN Table 1's set-up: the encoder's norms swapped, the decoder keeps LayerNorm."""

    def measure(norm: str) -> Row:
        model = TINY | {"residual": "prenorm", "encoder_norm": norm}
        model |= {"powernorm_warmup": RECIPE["warmup"]} if norm == "powernorm" else {}
        # With LayerNorm it is the ladder's run.
        name = "ladder-prenorm+layernorm" if norm == "layernorm" else f"norms-{norm}"
        output, verdict = runs.train(name, model, RECIPE, runs.german())
        bleu, _, _ = runs.bleu(output, TEST, "none")
        return {"bleu_test_2016": round(bleu, 2), **verdict}

    for norm in ("layernorm", "batchnorm", "powernorm-v", "powernorm", "scalenorm", "rmsnorm"):
        yield {"encoder_norm": norm}, lambda norm=norm: measure(norm)


def depth(layers: int, updates: int, residuals: list[str]) -> Callable[[Runs], Experiment]:
    def experiment(runs: Runs) -> Experiment:
        """BrN Table 1 and Fig 3: deep stacks without warm-up."""
        shape = {"d_model": 64, "d_ff": 128, "encoder_layers": layers, "decoder_layers": layers, "dropout": 0.1}
        for residual, lr in itertools.product(residuals, (5e-4, 2e-3)):
            # T = 4000 would outlast these runs: α reaches 1 after a fifth of them.
            model = TINY | shape | {"residual": residual}
            model |= {"branchnorm_steps": updates // 5} if residual == "branchnorm" else {}
            training = RECIPE | {"schedule": "constant", "warmup": 0, "lr": lr, "updates": updates, "keep": 1}
            training |= {"evaluate_every": updates, "max_tokens": 2048}
            run = f"depth{layers}-{residual}-{lr:g}", model, training, runs.german()
            row = {"layers": f"{layers}+{layers}", "residual": residual, "lr": lr}
            yield row, lambda run=run: {**(result := runs.train(*run))[1], "gradients": gradients(result[0])}

    return experiment


def gradients(output: Path) -> list[float]:
    """The gradient norms of the first 100 updates."""
    return [float(f"{norm:.4g}") for norm in nf.History.read(output).grad_norm[:100]]


def french(runs: Runs) -> Experiment:
    """Raw text, merges learned, detokenised BLEU."""
    files = {f"{part}_{side}": str(runs.path(f"multi30k/{name}.{language}.gz"))
             for part, name in (("train", "train"), ("valid", "val"))
             for side, language in (("source", "en"), ("target", "fr"))}  # fmt: skip

    def measure() -> Row:
        model = TINY | {"residual": "prenorm", "norm": "scalenorm", "fixnorm": True}
        output, verdict = runs.train("french", model, RECIPE, files | {"bpe_operations": 6000})
        _, hypotheses, references = runs.bleu(output, "multi30k/test_2016_flickr", "13a")
        scored = score(hypotheses, references)
        return {"bleu_test_2016": round(scored.bleu, 2), "sacrebleu": scored.sacrebleu, **verdict}

    yield {"pair": "en-fr"}, measure


def shakespeare(runs: Runs) -> Experiment:
    """A language model; the last tenth of the text is held out."""
    folder = runs.folder / "shakespeare-text"
    data = {
        "train_target": str(folder / "train.txt"),
        "valid_target": str(folder / "valid.txt"),
        "bpe_operations": 4000,
    }

    def measure() -> Row:
        folder.mkdir(parents=True, exist_ok=True)
        lines = [line for line in runs.lines("tinyshakespeare/input.txt.gz") if line.strip()]
        cut = len(lines) * 9 // 10
        for part, text in (("train", lines[:cut]), ("valid", lines[cut:])):
            (folder / f"{part}.txt").write_text("\n".join(text) + "\n")
        model = TINY | {"architecture": "decoder-only", "decoder_layers": 4, "norm": "scalenorm", "fixnorm": True}
        training = RECIPE | {"updates": 1500, "warmup": 500, "lr": 3e-3, "label_smoothing": 0.0}
        output, verdict = runs.train("shakespeare", model, training, data)
        best = float(np.min(nf.History.read(output).evaluations.perplexity))
        unigram = float(np.exp(verdict["unigram_entropy"]))
        return {
            "perplexity": round(best, 2),
            "unigram": round(unigram, 2),
            "ratio": round(best / unigram, 4),
            **verdict,
        }

    yield {"text": "tinyshakespeare"}, measure


def bf16(runs: Runs) -> Experiment:
    """Validation loss after 1,000 updates in bf16 against f32's."""

    def measure(precision: str) -> Row:
        model = TINY | {"residual": "prenorm", "norm": "scalenorm", "fixnorm": True}
        training = RECIPE | {"updates": 1000, "precision": precision}
        output, verdict = runs.train(f"precision-{precision}", model, training, runs.german())
        loss = float(nf.History.read(output).evaluations.loss[-1])
        return {"valid_loss": round(loss, 4), **verdict}

    for precision in ("f32", "bf16"):
        yield {"precision": precision}, lambda precision=precision: measure(precision)


DEEP = ["postnorm", "prenorm", "deepnorm", "branchnorm", "subln", "admin"]
EXPERIMENTS: dict[str, Callable[[Runs], Experiment]] = {
    "ladder": ladder,
    "table5": table5,
    "norms": norms,
    "depth18": depth(18, 600, RESIDUALS),
    "depth50": depth(50, 300, DEEP),
    "french": french,
    "shakespeare": shakespeare,
    "bf16": bf16,
}


class Results:
    """The table, as far as it has been made; without a folder it is only printed."""

    def __init__(self, name: str, folder: Path | None) -> None:
        self.name, self.folder = name, folder
        table, curves = self.path(".csv"), self.path("-gradients.csv")
        self.rows: list[Row] = list(csv.DictReader(table.open())) if table and table.exists() else []
        self.curves: dict[tuple[str, str], list[float]] = {}
        if curves and curves.exists():
            for residual, lr, *norms in csv.reader(curves.open()):
                self.curves[residual, lr] = [float(norm) for norm in norms]

    def path(self, ending: str) -> Path | None:
        return self.folder / f"{self.name}{ending}" if self.folder else None

    def find(self, key: Row) -> Row | None:
        return next((row for row in self.rows if all(row.get(k) == str(v) for k, v in key.items())), None)

    def add(self, row: Row) -> None:
        if norms := row.pop("gradients", None):
            self.curves[row["residual"], str(row["lr"])] = norms
        self.rows.append({k: str(v) for k, v in row.items()})
        if table := self.path(".csv"):
            with table.open("w", newline="") as file:
                columns = list(dict.fromkeys(itertools.chain.from_iterable(self.rows)))
                writer = csv.DictWriter(file, columns, lineterminator="\n")
                writer.writeheader()
                writer.writerows(self.rows)
        if self.curves and (curves := self.path("-gradients.csv")):
            with curves.open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([*key, *norms] for key, norms in self.curves.items())
            self.draw()

    def draw(self) -> None:
        """The gradient norm of the first 100 updates, a panel for each scheme (BrN Fig 3)."""
        figures.gradients(self.curves, f"Gradient norms, {self.rows[0]['layers']} layers", self.path(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    results = Results(arguments.experiment, arguments.results)
    for key, measure in EXPERIMENTS[arguments.experiment](Runs(arguments.data, arguments.runs)):
        row = results.find(key)
        if row is None:
            results.add(key | measure())
            row = results.rows[-1]
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
