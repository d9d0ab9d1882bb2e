"""Turns a folder of parallel text that is split into subwords already into fairseq's binary form.

    python fairseq_data.py CORPUS OUT --python FAIRSEQ/bin/python

CORPUS holds train.en.gz, train.de.gz, valid.en.gz and valid.de.gz. fairseq_worker.py tells how FAIRSEQ is made.
"""

import argparse
import gzip
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FAIRSEQ = [sys.executable, "-m", "normformer_rs", "fairseq"]
"""The command that runs fairseq's commands with the plug-in, on any version of Python."""


def prepare(corpus_dir, out_dir, preprocess, source="en", target="de", test=None):
    """Runs `fairseq-preprocess` with one joint dictionary and returns `out_dir` as a `Path`.

    `corpus_dir` holds SPLIT.LANGUAGE.gz for train, valid and, where one is named, the test set `test`; `preprocess` is
    the command, word by word; `out_dir` is created whole or not at all, and one that exists already is returned as it
    is. Raises FileNotFoundError for a missing corpus file and, when fairseq fails, subprocess.CalledProcessError; what
    fairseq says is on stderr.
    """
    corpus_dir, out_dir = Path(corpus_dir), Path(out_dir)
    if out_dir.exists():
        return out_dir
    splits = {"train": "train", "valid": "valid"} | ({"test": test} if test else {})
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir.parent) as scratch:
        text, binary = Path(scratch, "text"), Path(scratch, "binary")
        text.mkdir()
        for split, theirs in splits.items():
            for language in (source, target):
                name = f"{split}.{language}"
                with gzip.open(corpus_dir / f"{theirs}.{language}.gz") as packed, open(text / name, "wb") as plain:
                    shutil.copyfileobj(packed, plain)
        command = [*preprocess, "--joined-dictionary"]
        command += ["--source-lang", source, "--target-lang", target, "--destdir", binary]
        for split in splits:
            command += [f"--{split}pref", text / split]
        subprocess.run(command, check=True, stdout=sys.stderr)
        binary.rename(out_dir)
    return out_dir


def main():
    parser = argparse.ArgumentParser(description="Prepare a corpus for fairseq_worker.py.")
    parser.add_argument("corpus_dir")
    parser.add_argument("out_dir")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has fairseq")
    parser.add_argument("--source", default="en")
    parser.add_argument("--target", default="de")
    parser.add_argument("--test", metavar="NAME", help="the test set's name, such as test.2016")
    arguments = parser.parse_args()
    preprocess = [arguments.python, "-m", "fairseq_cli.preprocess"]
    languages = (arguments.source, arguments.target)
    print(prepare(arguments.corpus_dir, arguments.out_dir, preprocess, *languages, test=arguments.test))


if __name__ == "__main__":
    main()
