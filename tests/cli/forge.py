"""Runs with forged or damaged files, and every command that reads them, in a process of its own.

`python forge.py RUNS SCRATCH FIRST COUNT FILE…` damages each FILE of a copy of the runs in COUNT ways, seeded by their
numbers from FIRST on, and runs a command on each. A line of JSON tells each outcome. A process that takes more than a
GiB or twenty seconds of processor time dies, and its last line names the case.
"""

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = ("ein", "mann", "zwei", "frauen", "lachen", "laut", "und", "gehen")
CHECKPOINT = "checkpoints/update-00000004"
FILES = {
    "config": "config.json",
    "log": "log.jsonl",
    "vocabulary": "vocabulary.txt",
    "merges": "bpe.codes",
    "target types": "target_types.txt",
    "checksums": "checksums.txt",
    "checkpoint's config": f"{CHECKPOINT}/config.json",
    "state": f"{CHECKPOINT}/state.json",
    "model": f"{CHECKPOINT}/model.safetensors",
    "optimizer": f"{CHECKPOINT}/optimizer.safetensors",
    "kernel verdicts": "kernels/a.verdicts",
    "verdict": "verdict.json",
}
COMMON = ("resume", "translate", "evaluate", "average", "convert", "figures", "model", "export", "generate")
COMMANDS = {
    "log": ("plot", "resume", "history", "figures", "logged figures"),
    "config": ("plot", *COMMON, "depth figure", "stream figure"),
    "kernel verdicts": ("doctor",),
    "verdict": ("verdict",),
    "target types": COMMON[:-2],
}
"""The commands that read a file; of others: COMMON."""


def make(folder: Path) -> None:
    """A translation model's run and a language model's, and the files beside them."""
    import normformer_rs as nfrs
    from normformer_rs.reproduce.runs import judge

    generator = random.Random(5)
    texts = {}
    for part, count in (("train", 30), ("valid", 6)):
        lines = [[generator.choice(WORDS) for _ in range(generator.randint(2, 5))] for _ in range(count)]
        for side, step in (("source", 1), ("target", -1)):
            path = folder / f"{part}.{side}"
            path.write_text("".join(" ".join(word[::step] for word in line) + "\n" for line in lines))
            texts[f"{part}_{side}"] = str(path)
    sizes = {"d_model": 8, "d_ff": 8, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    once = {"updates": 4, "evaluate_every": 2, "warmup": 2, "lr": 1e-3, "log_layers": 1, "log_statistics": 1}
    alone = {name: path for name, path in texts.items() if name.endswith("target")}
    for name, model, training, data in (
        (
            "translation",
            {"norm": "scalenorm", "positions": "fairseq"},
            {"criterion": "bleu", "vocab_mask": True},
            texts,
        ),
        (
            "language",
            {"architecture": "decoder-only", "norm": "rmsnorm", "positions": "rotary", "activation": "swiglu"},
            {},
            alone,
        ),
    ):
        run = folder / name
        trainer = nfrs.Trainer(
            nfrs.TransformerConfig(**sizes, **model),
            nfrs.TrainingConfig(**once, **training),
            nfrs.DataConfig(**data, bpe_operations=20),
        )
        trainer.fit(run, progress=False, tensorboard=False, curves=False)
        (run / "verdict.json").write_text(json.dumps({**judge(run, True), "has_ended": True}) + "\n")
        (run / "curves.png").write_text("somebody's own: a resumed run draws none")
        (run / "kernels").mkdir(mode=0o700)
        kernels = [
            f"H100, driver 13.0\tdyt.cu\t-DK_VEC=4\t{name}\tright\n" for name in ("rows_forward", "rows_backward")
        ]
        (run / "kernels/a.verdicts").write_text("".join(kernels))
        (run / "kernels/a.verdicts").chmod(0o600)


# ---- damage ----

NUMBERS = ("0", "-1", "1e308", "-1e308", "1e400", "-0.0", "2147483648", str(2**63), str(2**64), str(-(2**63)),
           "9" * 400, "9" * 5000, "NaN", "Infinity", "-Infinity", "0.1", "1e-320", "01", "1e18")  # fmt: skip
OTHERS = ("null", "true", '""', '"x"', '"none"', '"\\ud800"', '"\\u0000"', '"a\\nb"', '"/etc/passwd"', '"../../.."',
          "[]", "[1, 2]", "[[1]]", "{}", '{"a": 1}', '{"a": {"b": null}}', '"inf"', "[" * 100_000, '{"a":' * 50_000,
          "[" * 200 + "]" * 200, '"' + "x" * 1_000_000 + '"', "[" + "1," * 300_000 + "1]")  # fmt: skip
PIECES = (
    *NUMBERS,
    b"\xff\xfe",
    b"\0" * 100,
    b"\xed\xa0\x80",
    "\u2028",
    "\r",
    "\t",
    " ",
    "x" * 2_000_000,
    "@@",
    "</w>",
    "a$_$b",
)


def damage_bytes(data: bytes, draw: random.Random) -> bytes:
    """Damage that needs to know nothing of a file."""
    at, end = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    flipped = bytearray(data)
    for _ in range(draw.choice((1, 2, 8))):
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return draw.choice((
        lambda: bytes(flipped),
        lambda: data[:at],
        lambda: data[at:],
        lambda: data[:at] + data[end:],
        lambda: data[:end] + data[at:],
        lambda: data[:at] + draw.choice((b"\xff", b"\xed\xa0\x80", b"\0", b"\xc3")) + data[at:],
        lambda: b"",
        lambda: bytes(len(data)),
        lambda: b"\xef\xbb\xbf" + data,
        lambda: data.decode("utf-8", "ignore").encode("utf-16"),
        lambda: data + data,
        lambda: data * (20_000_000 // len(data)),
        lambda: data + b" " * 20_000_000,
        lambda: draw.randbytes(4096),
    ))()  # fmt: skip


def damage_lines(data: bytes, draw: random.Random) -> bytes:
    """A line that comes twice, elsewhere or not at all, or a word of it that is another."""
    lines = data.removesuffix(b"\n").split(b"\n")
    place, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    words = lines[place].split(b" ")
    piece = draw.choice(PIECES)
    words[draw.randrange(len(words))] = piece if isinstance(piece, bytes) else piece.encode()
    changed = draw.choice((
        lambda: [*lines[:place], *lines[place + 1 :]],
        lambda: [*lines[:place], lines[other], *lines[place:]],
        lambda: [*lines[:place], lines[other], *lines[place + 1 :]],
        lambda: [*lines[:place], b" ".join(words), *lines[place + 1 :]],
        lambda: [*lines[:place], b" ".join(words), *lines[place + 1 :]],
        lambda: [*lines[:place], b"", *lines[place:]],
        lambda: [*lines[:place], lines[place] + b" 1", *lines[place + 1 :]],
        lambda: [*lines[:place], lines[place] * 3, *lines[place + 1 :]],
        lambda: lines[::-1],
        lambda: lines[:place],
    ))()  # fmt: skip
    return b"\n".join(changed) + b"\n"


def damage_json(data: bytes, draw: random.Random) -> bytes:
    """A value that is another, a name that is missing, unknown, or there twice."""
    whole = json.loads(data)
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in [*value] if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            places.append((value, key))
            walk(value[key])

    walk(whole)
    if not places:
        return data
    holder, key = draw.choice(places)
    mark = "the forged value"
    raw = draw.choice(NUMBERS if draw.random() < 0.5 else OTHERS)
    how = draw.choice(("replace",) * 6 + ("remove", "rename", "add", "twice", "nest", "whole"))
    if how == "replace":
        holder[key] = mark
    elif how == "remove":
        del holder[key]
    elif how == "nest":
        holder[key] = [holder[key]] if draw.random() < 0.5 else {"x": holder[key]}
    elif how == "whole":
        whole = mark
    elif isinstance(holder, dict):
        value = holder.pop(key) if how == "rename" else mark
        holder[f"{key}_" if how != "twice" else "once more"] = value
    else:
        holder.append(mark)
    text = json.dumps(whole, indent=draw.choice((None, 2)))
    return text.replace(f'"{mark}"', raw).replace('"once more"', json.dumps(key)).encode() + b"\n"


def damage_log(data: bytes, draw: random.Random) -> bytes:
    """A few events that are others."""
    lines = data.removesuffix(b"\n").split(b"\n")
    for _ in range(draw.choice((1, 1, 3))):
        place = draw.randrange(len(lines))
        with contextlib.suppress(ValueError, RecursionError):  # damaged already
            lines[place] = damage_json(lines[place], draw).removesuffix(b"\n")
    return b"\n".join(lines) + b"\n"


def damage_arrays(data: bytes, draw: random.Random) -> bytes:
    """Another header: an array's type, shape or place, or the header's own length."""
    length = int.from_bytes(data[:8], "little")
    header, arrays = data[8 : 8 + length], data[8 + length :]
    if draw.random() < 0.2:
        length = draw.choice((0, 1, 7, length - 1, length + 1, 2**31, 2**32, 2**63, 2**64 - 1, 100_000_001))
        return length.to_bytes(8, "little") + header + arrays
    header = damage_json(header, draw)
    return len(header).to_bytes(8, "little") + header + arrays


OWN: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "json": damage_json, "jsonl": damage_log, "safetensors": damage_arrays,
}  # fmt: skip


def damage(path: Path, draw: random.Random) -> None:
    """Damages the file; once in twenty times something else lies in its place."""
    data = path.read_bytes()
    if draw.random() < 0.05:
        path.unlink()
        draw.choice((lambda: path.mkdir(), lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero"),
                     lambda: path.symlink_to(path.name), lambda: None))()  # fmt: skip
        return
    of_its_own = OWN.get(path.suffix.removeprefix("."), damage_lines)
    how = of_its_own if draw.random() < 0.7 else draw.choice((damage_bytes, damage_lines))
    with path.open("r+b") as file:  # its owner and mode stay
        file.truncate()
        file.write(how(data, draw))


def listed_again(run: Path) -> None:
    """Makes all checksums right, so that the damage reaches what reads behind them."""

    def is_file(path: Path) -> bool:
        return path.is_file() and not path.is_symlink()

    state = run / CHECKPOINT / "state.json"
    if is_file(state):
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            body, _, _ = state.read_bytes().rpartition(b'  "crc32": ')
            listed = json.loads(body.rstrip().rstrip(b",") + b"}")
            text = body.decode()
            for name, digest in listed["files"].items():
                file = run / CHECKPOINT / name
                if is_file(file):
                    found = file.read_bytes()
                    for part, value in (("bytes", len(found)), ("crc32", zlib.crc32(found))):
                        text = text.replace(f'"{part}": {digest[part]}', f'"{part}": {value}')
            body = text.encode()
            state.write_bytes(body + f'  "crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode())
    lines = (run / "checksums.txt").read_bytes().split(b"\n")[:-2] if is_file(run / "checksums.txt") else []
    there = {path.name.encode(): path for path in run.iterdir() if is_file(path)}
    for place, line in enumerate(lines):
        name = line.rpartition(b" ")[2]
        if line.count(b" ") == 2 and name in there:
            found = there[name].read_bytes()
            lines[place] = f"{zlib.crc32(found):08x} {len(found)} ".encode() + name
    if lines:
        text = b"".join(line + b"\n" for line in lines)
        (run / "checksums.txt").write_bytes(text + f"{zlib.crc32(text):08x} of the lines above\n".encode())


# ---- commands ----


def call(command: str, run: Path, texts: Path, checkpoint: str) -> int:
    """Runs a command, or the Python calls of that name; its exit code."""
    import normformer_rs as nfrs
    from normformer_rs import cli, figures
    from normformer_rs.reproduce.runs import read_verdict

    is_alone = run.name == "language"
    source = [] if is_alone else ["--source", str(texts / "valid.source")]
    model = ["--model", str(run), "--checkpoint", checkpoint]
    chosen = [] if checkpoint == "last" else ["--from-checkpoint", checkpoint]
    picture = str(run / "figure.png")
    words = {
        "plot": ["plot", str(run)],
        "resume": ["train", "--output", str(run), "--resume", "--updates", "5", "--no-progress", *chosen],
        "translate": ["translate", *model, "--input", str(texts / "valid.source")],
        "generate": ["generate", *model, "--prompt", "nie", "--max-length", "5"],
        "evaluate": ["evaluate", *model, "--reference", str(texts / "valid.target"), *source],
        "average": ["average", "--model", str(run), "--last", "2"],
        "convert": ["convert", "--from", str(run), "--checkpoint", checkpoint, "--to", str(run / "x.pt")],
        "export": ["export", *model, "--output", str(run / "exported")],
        "doctor": ["doctor"],
    }
    calls: dict[str, Callable[[], Any]] = {
        "history": lambda: nfrs.History.read(run)._repr_html_(),
        "figures": lambda: figures.singular_values(run, path=picture, checkpoint=checkpoint),
        "logged figures": lambda: (figures.changes(run, path=picture), figures.gradient_norms(run, path=picture)),
        "depth figure": lambda: figures.bleu_by_depth(run, path=picture),
        "stream figure": lambda: figures.stream(run, path=picture, checkpoint=checkpoint),
        "model": lambda: nfrs.Transformer.from_checkpoint(run, checkpoint),
        "verdict": lambda: read_verdict(run / "verdict.json"),
    }
    if command in words:
        return cli.main(words[command])
    try:
        calls[command]()
        return 0
    except (nfrs.InputError, OSError) as error:
        cli.report(error)
        return 2


def case(runs: Path, scratch: Path, file: str, number: int, command: str = "") -> dict[str, Any]:
    """Damages a file and runs a command: the case, its exit code, what it wrote to standard error, seconds, and MiB.

    `command`: run this one, on a whole run.
    """
    draw = random.Random(f"{file} {number}")
    is_whole = command != ""
    command = command or COMMANDS.get(file, COMMON)[number % len(COMMANDS.get(file, COMMON))]
    is_alone = command in ("generate", "export")
    if command not in ("generate", "export", "translate", "depth figure"):
        is_alone = file != "target types" and draw.random() < 0.3
    run = scratch / ("language" if is_alone else "translation")
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(runs / run.name, run, symlinks=True)
    is_fixed = draw.random() < 0.5
    checkpoint = draw.choice(("last", "4"))  # "last" passes over a damaged one
    if not is_whole:
        damage(run / FILES[file], draw)
        if is_fixed:
            listed_again(run)
    os.environ["NORMFORMER_RS_CACHE"] = str(run / "kernels")
    found = {
        "file": file,
        "number": number,
        "command": command,
        "run": run.name,
        "checkpoint": checkpoint,
        "listed": is_fixed,
        "whole": is_whole,
    }
    print(json.dumps(found), flush=True)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        kept = [os.dup(1), os.dup(2)]
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        start = time.process_time()
        Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
        signal.setitimer(signal.ITIMER_PROF, 20)
        try:
            code = call(command, run, runs, checkpoint)
        except BaseException:
            traceback.print_exc()
            code = 1
        signal.setitimer(signal.ITIMER_PROF, 0)
        seconds = time.process_time() - start
        sys.stdout.flush()
        sys.stderr.flush()
        for number_of, stream in enumerate(kept, 1):
            os.dup2(stream, number_of)
            os.close(stream)
        err.seek(0)
        said = err.read().decode("utf-8", "replace")
    peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2]
    largest = int(peak.split()[0]) >> 10
    return {**found, "code": code, "said": said, "seconds": round(seconds, 3), "largest": largest}


def main(runs: str, scratch: str, first: str, count: str, *files: str) -> None:
    import torch

    torch.set_num_threads(1)
    # Each command on a whole run first: imports and first calls take time and memory.
    for command in dict.fromkeys(command for file in files for command in COMMANDS.get(file, COMMON)):
        print(json.dumps(case(Path(runs), Path(scratch), "", 0, command)), flush=True)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for file in files:
        for number in range(int(first), int(first) + int(count)):
            print(json.dumps(case(Path(runs), Path(scratch), file, number)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
