"""The Multi30k recipe through fairseq: trained, averaged, translated, scored.

    python benches/fairseq_recipe.py stock --data DATA --runs RUNS
    python benches/fairseq_recipe.py prenorm --data DATA --runs RUNS -- --norm scalenorm --residual prenorm --fixnorm

The first name is that of the run; "stock" is fairseq's own `transformer_tiny`, any other the plug-in's
`nfrs_transformer_tiny` with the flags after `--`. DATA holds multi30k-bpe-en-de (docs/data.md says where to get it),
RUNS gets a folder a run. One process makes each update of two batches of 4,096 tokens, the recipe's two GPUs'; at
most 8,000 updates, patience 10. A run that was stopped goes on from fairseq's checkpoint_last.pt when the same command
comes again; fairseq counts patience anew there. One that has ended is only scored. Then the last ten epochs'
checkpoints are averaged, valid and test.2016 translated with beam 5, and tokenised BLEU appended to
benches/results/fairseq-recipe.csv, with what it takes to know the run again; beside it fairseq-recipe-NAME.csv has the
losses of each epoch.
"""

import argparse
import csv
import datetime
import gzip
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from fairseq_data import FAIRSEQ, prepare
from fairseq_worker import RECIPE

from normformer_rs.formats.convert import SAFE
from normformer_rs.scores import score

LAST = 10
FUSED = ["--arch", "nfrs_transformer_tiny", "--criterion", "nfrs_label_smoothed_cross_entropy"]
SETS = {"valid": "valid", "test": "test.2016"}


def fairseq(command: str, *arguments: str, output: Path, mode: str = "w") -> None:
    """Runs fairseq-COMMAND; all its output is written to the file `output`."""
    with open(output, mode) as file:
        subprocess.run([*FAIRSEQ, command, *arguments], check=True, stdout=file, stderr=subprocess.STDOUT)


def average(paths: list[Path], output: Path) -> None:
    """Writes the average of the checkpoints. Floating-point numbers are averaged; counters are those of the newest
    checkpoint, which is the first in `paths`."""
    states = [torch.load(path, weights_only=True, map_location="cpu") for path in paths]
    for name, value in states[0]["model"].items():
        if value.is_floating_point():
            value.copy_(torch.stack([state["model"][name].double() for state in states]).mean(0))
    torch.save(states[0], output)


def epochs(folder: Path) -> list[Path]:
    """Returns the paths of the checkpoints of whole epochs, newest first."""
    found = {
        int(match[1]): path for path in folder.iterdir() if (match := re.match(r"checkpoint(\d+)\.pt$", path.name))
    }
    return [found[epoch] for epoch in sorted(found, reverse=True)]


def bleu(data: Path, corpus: Path, split: str, checkpoint: Path, output: Path) -> Any:
    """Translates a split with beam 5, and returns its tokenised BLEU."""
    arguments = ["--gen-subset", split, "--path", str(checkpoint), "--beam", "5", "--post-process", "subword_nmt"]
    fairseq("generate", str(data), *arguments, "--cpu", "--max-tokens", "8000", output=output)
    found = re.findall(r"^H-(\d+)\t\S+\t(.*)$", output.read_text(encoding="utf-8"), re.MULTILINE)
    hypotheses = [text for _, text in sorted(found, key=lambda hypothesis: int(hypothesis[0]))]
    with gzip.open(corpus / f"{SETS[split]}.de.gz", "rt", encoding="utf-8") as file:
        references = [line.rstrip("\n").replace("@@ ", "") for line in file]
    return score(hypotheses, references, tokenize="none")


def losses(log: Path) -> list[dict[str, str]]:
    """Returns the losses that fairseq logged at the end of each epoch. If an epoch was run twice, after a resume, the
    last line counts."""
    epochs: dict[str, dict[str, str]] = {}
    line = r"\| (train|valid) \| epoch (\d+) \|.*? loss (\S+) \| nll_loss (\S+) .*num_updates (\d+)"
    for part, epoch, loss, nll, updates in re.findall(line, log.read_text(encoding="utf-8")):
        row = epochs.setdefault(epoch, {"epoch": str(int(epoch))})
        row |= {"updates": updates, f"{part}_loss": loss, f"{part}_nll": nll}
    return [epochs[epoch] for epoch in sorted(epochs, key=int)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--updates", type=int, default=8000)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "fairseq-recipe.csv")
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    arguments, flags = parser.parse_args(given[:end]), given[end + 1 :]
    if arguments.name == "stock" and flags:
        parser.error("stock takes no flags of the plug-in")

    corpus, folder = arguments.data / "multi30k-bpe-en-de", arguments.runs / arguments.name
    data = prepare(corpus, arguments.runs / "data-bin", [*FAIRSEQ, "preprocess"], test=SETS["test"])
    folder.mkdir(parents=True, exist_ok=True)
    own = [] if arguments.name == "stock" else [*FUSED, *flags]
    stops = ["--max-update", str(arguments.updates), "--patience", "10", "--keep-last-epochs", str(LAST)]
    size = ["--max-tokens", "4096", "--update-freq", "2", "--save-dir", str(folder)]
    log = folder / "train.log"
    if not (log.exists() and "done training" in log.read_text(encoding="utf-8")):
        fairseq("train", str(data), *RECIPE, *own, *size, *stops, output=log, mode="a")

    torch.serialization.add_safe_globals(SAFE)
    averaged, kept = folder / "average.pt", epochs(folder)[:LAST]
    average(kept, averaged)
    found = {split: bleu(data, corpus, split, averaged, folder / f"{split}.log") for split in SETS}
    updates = torch.load(kept[0], weights_only=True, map_location="cpu")["optimizer_history"][-1]["num_updates"]
    row = {
        "date": datetime.date.today().isoformat(),
        "run": arguments.name,
        "flags": " ".join(own),
        "updates": updates,
        "averaged": len(kept),
        "bleu_valid": f"{found['valid'].bleu:.2f}",
        "bleu_test_2016": f"{found['test'].bleu:.2f}",
        "multi_bleu_test_2016": found["test"].multi_bleu,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cores": os.cpu_count(),
    }
    with open(arguments.results.with_name(f"fairseq-recipe-{arguments.name}.csv"), "w", newline="") as file:
        columns = ["epoch", "updates", "train_loss", "train_nll", "valid_loss", "valid_nll"]
        curve = csv.DictWriter(file, columns, lineterminator="\n")
        curve.writeheader()
        curve.writerows(losses(log))
    is_new = not arguments.results.exists()
    with open(arguments.results, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*row], lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)
    print(row)


if __name__ == "__main__":
    main()
