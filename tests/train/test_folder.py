"""A run's folder: one writer, nothing lost, damage named."""

import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from train_support import events, fit, losses, weights

import normformer_rs as nfrs
from normformer_rs import cli
from normformer_rs.loop import training as loop

pytestmark = pytest.mark.usefixtures("one_thread")
SAVING = {"updates": 8, "evaluate_every": 2, "keep": 3, "max_tokens": 100}


def files(folder):
    return {
        path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file() and "tensorboard" not in str(path)
    }


def fit_bpe(output, corpus, training, **options):
    trainer = nfrs.Trainer(
        nfrs.TransformerConfig(d_model=16, d_ff=24, heads=2, encoder_layers=1, decoder_layers=1, dropout=0.0),
        nfrs.TrainingConfig(**{"lr": 1e-2, "schedule": "constant", "warmup": 0, **training}),
        nfrs.DataConfig(**corpus, bpe_operations=3),
    )
    return trainer.fit(output, progress=False, **options)


@pytest.fixture
def letters(corpus):
    """The corpus with its words written together, so that there is something to merge."""
    for path in corpus.values():
        Path(path).write_text(Path(path).read_text().replace(" ", ""))
    return corpus


def dead_process():
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


def test_a_second_writer_is_refused_by_name(tmp_path, corpus, monkeypatch):
    """New, --overwrite, --resume and average, while readers read; the first run is not disturbed."""
    run, refused, read = tmp_path / "run", [], []

    class Busy(loop._Observer):
        def updated(self, event):
            super().updated(event)
            if event["update"] != 3:
                return
            before = files(run)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(loop, "_Observer", Busy.__base__)
                for start in ({}, {"resume": True}, {"overwrite": True}):
                    with pytest.raises(nfrs.InputError) as error:
                        fit(run, corpus, training=SAVING, **start)
                    refused.append(str(error.value))
            with pytest.raises(nfrs.InputError) as error:
                nfrs.average(run, last=1)
            refused.append(str(error.value))
            read.extend(nfrs.translate(run, ["1 2"], checkpoint="last"))
            assert files(run) == before

    monkeypatch.setattr(loop, "_Observer", Busy)
    fit(run, corpus, training=SAVING)
    assert len(refused) == 4 and len(read) == 1
    owner = f"{run} is in use by process {os.getpid()} on {socket.gethostname()} since 2"
    assert all(text.startswith(owner) and "choose another output" in text for text in refused), refused
    assert [*losses(run)] == [*range(1, 9)] and not (run / ".lock").exists()
    assert Path(nfrs.average(run, last=1)).name == "average"


@pytest.mark.full
def test_a_run_that_was_stopped_while_it_began_begins_again(tmp_path, letters):
    """At any of its first files; what a killed process left unfinished goes, and the user's own files stay."""
    fit_bpe(tmp_path / "whole", letters, SAVING)
    whole = weights(tmp_path / "whole")
    names = ["checksums.txt", "vocabulary.txt", "bpe.codes", "target_types.txt"]
    for number in range(len(names) + 1):
        run = tmp_path / f"run-{number}"
        run.mkdir()
        for name in names[:number]:
            shutil.copy(tmp_path / "whole" / name, run / name)
        (run / ".lock").write_text("{")
        (run / f".vocabulary.txt.tmp-{dead_process()}").write_text("half")
        (run / f".config.json.tmp-{dead_process()}").write_text("half")
        (run / "notes").write_text("mine")
        with pytest.raises(nfrs.InputError, match="no run to resume: leave out --resume"):
            fit_bpe(run, letters, SAVING, resume=True)
        fit_bpe(run, letters, SAVING)
        assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(run).items())
        assert not [path for path in run.iterdir() if path.name.startswith(".")] and (run / "notes").exists()
    # Another run begins there without the codes of the first.
    run = tmp_path / "other"
    run.mkdir()
    for name in names:
        shutil.copy(tmp_path / "whole" / name, run / name)
    fit(run, letters, training=SAVING)
    assert not (run / "bpe.codes").exists()


@pytest.mark.full
def test_a_flipped_bit_is_named_and_nothing_goes_on(tmp_path, letters, capsys):
    run = tmp_path / "run"
    fit_bpe(run, letters, SAVING)
    flags = ["train", "--output", str(run), "--resume", "--updates", "10", "--no-progress"]
    for name in ("vocabulary.txt", "bpe.codes", "target_types.txt", "config.json", "checksums.txt"):
        whole = (run / name).read_bytes()
        (run / name).write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
        before = files(run)
        for work in (
            lambda: fit_bpe(run, letters, {**SAVING, "updates": 10}, resume=True),
            lambda: nfrs.translate(run, ["12"]),
            lambda: nfrs.evaluate_loss(run, letters["valid_source"], letters["valid_target"]),
            lambda: nfrs.average(run, last=1),
        ):
            with pytest.raises(nfrs.InputError, match=f"{name} is damaged: .*restore it from a copy"):
                work()
        assert cli.main(flags) == 2
        assert f"{name} is damaged" in capsys.readouterr().err
        assert files(run) == before
        (run / name).write_bytes(whole)
    (run / "bpe.codes").rename(tmp_path / "codes")
    with pytest.raises(nfrs.InputError, match=r"bpe\.codes is damaged: it is missing"):
        fit_bpe(run, letters, {**SAVING, "updates": 10}, resume=True)
    (tmp_path / "codes").rename(run / "bpe.codes")
    (run / "checksums.txt").unlink()  # then nothing is compared
    fit_bpe(run, letters, {**SAVING, "updates": 10}, resume=True)
    assert max(losses(run)) == 10


@pytest.mark.parametrize("harm", ["missing", "damaged", "two"])
@pytest.mark.one_in(all=3)
def test_a_run_goes_on_from_the_newest_whole_checkpoint(tmp_path, corpus, caplog, harm):
    run = tmp_path / "run"
    fit(tmp_path / "whole", corpus, training={**SAVING, "updates": 12})
    fit(run, corpus, training=SAVING)
    last = (run / "checkpoints" / "last").resolve()
    if harm == "missing":
        shutil.rmtree(last)
    else:
        for folder in (last, last.with_name("update-00000006"))[: 2 if harm == "two" else 1]:
            (folder / "optimizer.safetensors").write_bytes(b"")
    with caplog.at_level("WARNING", "normformer_rs"):
        fit(run, corpus, training={**SAVING, "updates": 12}, resume=True)
    at = 4 if harm == "two" else 6
    assert events(run, "started")[-1]["update"] == at
    said = [event["text"] for event in events(run, "message") if event["level"] == "warning"]
    assert said == [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"update-{at:08}" in said[-1] and any("update-00000008" in text for text in said)
    assert losses(run) == losses(tmp_path / "whole")
    assert all(torch.equal(tensor, weights(run)[name]) for name, tensor in weights(tmp_path / "whole").items())


@pytest.mark.full
def test_the_checkpoint_to_go_on_from_is_chosen(tmp_path, corpus):
    run = tmp_path / "run"
    fit(run, corpus, training=SAVING)
    more = {**SAVING, "updates": 9}
    for chosen, update in ((6, 6), ("update-00000008-2", 8), ("best", None), ("last", None)):
        link = run / "checkpoints" / str(chosen)
        update = update or json.loads((link / "state.json").read_text())["update"]
        fit(run, corpus, training=more, resume=True, from_checkpoint=chosen)
        assert events(run, "started")[-1]["update"] == update
    for chosen in ("bst", "77", str(tmp_path)):
        with pytest.raises(nfrs.InputError, match=r"there is no checkpoint .* has update-"):
            fit(run, corpus, training=more, resume=True, from_checkpoint=chosen)
    with pytest.raises(nfrs.InputError, match="give resume"):
        fit(run, corpus, training=more, from_checkpoint=4)
    for folder in (run / "checkpoints").glob("update-*"):
        (folder / "model.safetensors").write_bytes(b"")
    for work in (lambda: fit(run, corpus, training=more, resume=True), lambda: nfrs.translate(run, ["1"])):
        with pytest.raises(nfrs.InputError, match=r"is damaged: .*--from-checkpoint"):
            work()


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.one_in(test=2)
def test_a_run_without_its_checkpoints_does_not_begin_anew(tmp_path, corpus, ctrl_c, stopped):
    run = tmp_path / "run"
    if stopped:  # before its first evaluation: only the log tells that something was saved
        ctrl_c(1)
        with pytest.raises(nfrs.Interrupted):
            fit(run, corpus, training=SAVING)
    else:
        fit(run, corpus, training=SAVING)
    shutil.rmtree(run / "checkpoints")
    before = files(run)
    with pytest.raises(nfrs.InputError, match=r"checkpoints holds no checkpoint, and log.jsonl says .*--overwrite"):
        fit(run, corpus, training=SAVING, resume=True)
    assert files(run) == before


@pytest.mark.full
def test_a_run_that_had_saved_nothing_says_that_it_begins(tmp_path, corpus):
    """A kill after the first evaluation, before its checkpoint; then a kill of the run that began again."""
    run = tmp_path / "run"
    fit(run, corpus, training=SAVING)
    whole, log = losses(run), run / "log.jsonl"
    for last in ("evaluated", "started"):
        lines = log.read_text().splitlines()
        end = [json.loads(line)["event"] for line in lines].index(last, 1)
        log.write_text("".join(line + "\n" for line in lines[: end + 1]))
        shutil.rmtree(run / "checkpoints")
        fit(run, corpus, training=SAVING, resume=True)
        said = [event["text"] for event in events(run, "message") if event["level"] == "warning"]
        assert "had saved no checkpoint" in said[-1] and losses(run) == whole


def train(run, corpus, updates, limit=None):
    """The command line; `limit`: bytes that a file may have."""
    options = {"d-model": 16, "d-ff": 24, "heads": 2, "encoder-layers": 1, "decoder-layers": 1, "updates": updates}
    options |= {"max-tokens": 100, "evaluate-every": 4, "keep": 2, "warmup": 2, "lr": 1e-2, "seed": 3}
    options |= {name.replace("_", "-"): path for name, path in corpus.items()}
    words = [sys.executable, "-m", "normformer_rs", "train", "--no-bpe", "--no-progress", "--output", str(run)]
    words += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += ["--resume"] if (run / "config.json").exists() else []

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        words, env=environment, preexec_fn=None if limit is None else limited, capture_output=True, text=True
    )


def ended_for(done, run, cause):
    """The file that the run's one line of error names."""
    assert done.returncode == 4 and "Traceback" not in done.stderr, (done.returncode, done.stderr)
    (line,) = [line for line in done.stderr.splitlines() if "error:" in line]
    named = re.search(rf"{run}/(\S+): .*{cause}", line)
    assert named, line
    return named[1]


def assert_is_whole(run, whole):
    assert events(run, "updated")[-1]["update"] == 12
    assert all(torch.equal(tensor, weights(run)[name]) for name, tensor in weights(whole).items())
    assert not [path for path in run.rglob(".*") if path.is_file()]


@pytest.mark.long
def test_files_that_may_not_grow(tmp_path, corpus):
    """`ulimit -f`: a readable end at any file, and the folder goes on to the weights of an uninterrupted run."""
    whole = tmp_path / "whole"
    assert train(whole, corpus, 12).returncode == 0
    sizes = {path.name: path.stat().st_size for path in (whole / "checkpoints" / "last").iterdir()}
    named = []
    for number, limit in enumerate((1, 300, sizes["model.safetensors"] - 1, sizes["optimizer.safetensors"] - 1)):
        run = tmp_path / f"run-{number}"
        named.append(ended_for(train(run, corpus, 12, limit), run, "File too large"))
        assert train(run, corpus, 12).returncode == 0
        assert_is_whole(run, whole)
    assert len({*named}) == 4 and named[2].endswith("model.safetensors"), named
    # After a checkpoint, which stays.
    run = tmp_path / "later"
    assert train(run, corpus, 4).returncode == 0
    before = files(run / "checkpoints")
    ended_for(train(run, corpus, 12, sizes["model.safetensors"] - 1), run, "File too large")
    assert before.items() <= files(run / "checkpoints").items()
    assert train(run, corpus, 12).returncode == 0
    assert_is_whole(run, whole)


@pytest.mark.parametrize("shares", [(0, 1), pytest.param((0.1, 3), marks=pytest.mark.long)])
@pytest.mark.full
def test_a_full_disk(tmp_path, corpus, shares):
    """A real one, of a few pages, in a namespace of the test's own. `shares`: sizes, in checkpoints."""
    isolated = ["unshare", "--user", "--map-root-user", "--mount"]
    can_mount = [*isolated, "mount", "-t", "tmpfs", "none", str(tmp_path)]
    if not shutil.which("unshare") or subprocess.run(can_mount, capture_output=True).returncode:
        pytest.skip("no namespaces in which a file system can be mounted")
    whole, disk = tmp_path / "whole", tmp_path / "disk"
    assert train(whole, corpus, 12).returncode == 0
    disk.mkdir()
    used = sum(path.stat().st_size for path in (whole / "checkpoints" / "last").iterdir())
    program = """
        import json, os, pickle, shutil, subprocess, sys
        from pathlib import Path
        import test_folder
        disk, corpus, kilobytes, result = Path(sys.argv[1]), json.loads(sys.argv[2]), *sys.argv[3:]
        mount = lambda size, *more: subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}k" + "".join(more), "none", str(disk)], check=True)
        mount(kilobytes)
        first = test_folder.train(disk / "run", corpus, 12)
        mount(65536, ",remount")
        second = test_folder.train(disk / "run", corpus, 12)
        shutil.copytree(disk / "run", result, symlinks=True)
        print(json.dumps([[done.returncode, done.stderr] for done in (first, second)]))
    """
    named = set()
    for kilobytes in (max(8, int(share * used) // 1024) for share in shares):
        result = tmp_path / f"run-{kilobytes}"
        words = [*isolated, sys.executable, "-c", textwrap.dedent(program)]
        words += [str(disk), json.dumps(corpus), str(kilobytes), str(result)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        first, second = (subprocess.CompletedProcess([], code, "", said) for code, said in json.loads(done.stdout))
        named.add(ended_for(first, disk / "run", "No space left"))
        assert second.returncode == 0, second.stderr
        assert_is_whole(result, whole)
    assert len(named) > 1, named


@pytest.mark.parametrize("stage", ["learning", "reading", "dry run"])
def test_ctrl_c_while_data_are_prepared_leaves_nothing(tmp_path, stage):
    """The signal comes while Rust is at work, for seconds, and Python's handler runs when it is asked for."""
    generator = random.Random(1)
    text = "".join(generator.choices("abcdefghij ", k=200_000)) * 40
    (tmp_path / "text").write_text("".join(text[i : i + 99] + "\n" for i in range(0, len(text), 99)))
    text = str(tmp_path / "text")
    cut = {"no_bpe": True} if stage == "reading" else {"bpe_operations": 3000}
    data = nfrs.DataConfig(train_target=text, valid_target=text, **cut)
    model = nfrs.TransformerConfig(architecture="decoder-only", d_model=16, d_ff=24, heads=2, decoder_layers=1)
    trainer = nfrs.Trainer(model, nfrs.TrainingConfig(updates=1), data)

    def rings(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, rings)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(nfrs.Interrupted, match="was stopped" if stage == "dry run" else "nothing was written"):
            if stage == "dry run":
                trainer.dry_run()
            else:
                trainer.fit(tmp_path / "runs" / "run", progress=False)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not (tmp_path / "runs").exists()
