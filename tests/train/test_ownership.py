"""A run touches nothing that it cannot prove to be a run's, and opens nothing through a link."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from train_support import fit, losses, weights

import normformer_rs as nfrs

pytestmark = pytest.mark.usefixtures("one_thread")
SAVING = {"updates": 8, "evaluate_every": 2, "keep": 1, "max_tokens": 100}


def content(folder):
    """Every file, folder and link below, with what it holds."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        is_file = path.is_file() and not path.is_symlink()
        found[path] = os.readlink(path) if path.is_symlink() else path.read_bytes() if is_file else None
    return found


def strangers(folder):
    """Files and folders of somebody else's, each under a name that runs write."""
    options = json.dumps({"model": {}, "training": {}, "data": {}})
    files = {"config.json": options, "vocabulary.txt": "mine", "bpe.codes": "mine", "target_types.txt": "mine"}
    log = '{"event": "request finished", "level": "info"}\n'
    files |= {"checksums.txt": "mine", "log.jsonl": log, "curves.png": "mine"}
    files |= {f"checkpoints/{name}/thesis.txt": "mine" for name in ("best", "last", "average", "update-00000002")}
    files |= {"checkpoints/update-00000003/state.json": '{"kind": "another program\'s"}'}
    for name, text in files.items():
        yield name.split("/thesis")[0].split("/state")[0], folder / name, text


@pytest.mark.parametrize("start", [{}, {"overwrite": True}])
def test_a_strangers_files_are_refused_and_stay(tmp_path, corpus, start):
    for number, (shown, path, text) in enumerate(strangers(Path("."))):
        output = tmp_path / f"output-{number}"
        (output / path).parent.mkdir(parents=True)
        (output / path).write_text(text)
        before = content(output)
        with pytest.raises(nfrs.InputError, match=rf"holds {shown}, which no run wrote.*choose another output"):
            fit(output, corpus, training=SAVING, **start)
        assert content(output) == before


@pytest.mark.full
def test_overwrite_removes_what_the_run_wrote_and_nothing_else(tmp_path, corpus):
    run = tmp_path / "run"
    fit(run, corpus, training=SAVING)
    nfrs.average(run, last=1)
    kept = {"notes.txt": "mine", "checkpoints/notes.txt": "mine", ".bashrc.tmp-1": "another program's"}
    kept |= {"checkpoints/update-8/notes.txt": "no run names a checkpoint so"}
    for name, text in kept.items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(text)
    fit(run, corpus, training={**SAVING, "updates": 2}, overwrite=True)
    assert {name: (run / name).read_text() for name in kept} == kept
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert names == {"update-00000002", "best", "last", "notes.txt", "update-8"}
    assert [*losses(run)] == [1, 2]


@pytest.mark.parametrize("name", ["vocabulary.txt", "checkpoints/best", "checkpoints/update-00000006"])
@pytest.mark.one_in(test=3, all=2)
def test_overwrite_of_a_run_with_a_strangers_file_in_it_removes_nothing(tmp_path, corpus, name):
    run = tmp_path / "run"
    fit(run, corpus, training=SAVING)
    path = run / name
    if name == "vocabulary.txt":  # a run of which nobody says any more what it wrote
        (run / "checksums.txt").unlink()
    else:
        path.unlink(missing_ok=True)
        path.mkdir()
        (path / "thesis.txt").write_text("mine")
    before = content(run)
    with pytest.raises(nfrs.InputError, match=r"which no run wrote"):
        fit(run, corpus, training=SAVING, overwrite=True)
    assert content(run) == before


def test_average_replaces_only_an_average(tmp_path, corpus):
    run = tmp_path / "run"
    fit(run, corpus, training=SAVING)
    average = run / "checkpoints" / "average"
    average.mkdir()
    (average / "thesis.txt").write_text("mine")
    with pytest.raises(nfrs.InputError, match="was not written by `average`"):
        nfrs.average(run, last=1)
    assert (average / "thesis.txt").read_text() == "mine"
    shutil.rmtree(average)
    for _ in range(2):
        assert Path(nfrs.average(run, last=1)).name == "average"


@pytest.mark.parametrize("name", [".lock", "log.jsonl", "tensorboard", "config.json", "vocabulary.txt"])
@pytest.mark.one_in(test=5, all=4)
def test_nothing_is_opened_through_a_link(tmp_path, corpus, name):
    pytest.importorskip("tensorboard")
    run, target = tmp_path / "run", tmp_path / "target"
    fit(run, corpus, training={**SAVING, "updates": 2}, tensorboard=False)
    (run / name).rename(target) if (run / name).exists() else target.mkdir() if "." not in name else target.write_text(
        ""
    )
    (run / name).symlink_to(target)
    before = content(tmp_path)
    with pytest.raises(nfrs.InputError, match=rf"{name} is a symbolic link|holds no model"):
        fit(run, corpus, training=SAVING, resume=True)
    assert content(tmp_path) == before


@pytest.mark.parametrize("kind", ["a link", "a file"])
@pytest.mark.one_in(all=2)
def test_a_picture_that_no_run_has_drawn_stays(tmp_path, corpus, caplog, kind):
    pytest.importorskip("matplotlib")
    run, target = tmp_path / "run", tmp_path / "target.png"
    fit(run, corpus, training={**SAVING, "updates": 2}, curves=False)
    target.write_text("mine")
    if kind == "a link":
        (run / "curves.png").symlink_to(target)
    else:
        (run / "curves.png").write_text("mine")
    fit(run, corpus, training=SAVING, resume=True)
    assert target.read_text() == (run / "curves.png").read_text() == "mine"
    assert "curves.png is not a picture that a run has drawn" in caplog.text
    (run / "curves.png").unlink()
    for _ in range(2):
        fit(run, corpus, training=SAVING, resume=True)
        assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_a_users_file_in_a_checkpoint_keeps_it(tmp_path, corpus):
    """As `translate --output RUN/checkpoints/best/out.txt` leaves it."""
    run = tmp_path / "run"
    fit(run, corpus, training={**SAVING, "updates": 2})
    note = (run / "checkpoints" / "best").resolve() / "out.txt"
    note.write_text("mine")
    fit(run, corpus, training=SAVING, resume=True)
    assert note.read_text() == "mine"
    before = content(run)
    with pytest.raises(nfrs.InputError, match=r"holds checkpoints/update-00000002, which no run wrote"):
        fit(run, corpus, training=SAVING, overwrite=True)
    assert content(run) == before


@pytest.mark.parametrize("start", [{}, {"overwrite": True}, {"resume": True}])
@pytest.mark.one_in(all=3)
def test_checkpoints_that_are_no_folder_are_refused_before_the_work(tmp_path, corpus, start):
    run = tmp_path / "run"
    if start:
        fit(run, corpus, training=SAVING)
        shutil.move(run / "checkpoints", tmp_path / "disk")
    else:
        run.mkdir()
    (run / "checkpoints").symlink_to(tmp_path / "unmounted")
    before = content(run)
    with pytest.raises(nfrs.InputError, match="is no folder that can be read"):
        fit(run, corpus, training=SAVING, **start)
    assert content(run) == before


@pytest.mark.full
def test_checkpoints_may_be_a_link_to_another_disk(tmp_path, corpus):
    run, disk = tmp_path / "run", tmp_path / "disk"
    disk.mkdir()
    run.mkdir()
    (run / "checkpoints").symlink_to(disk)
    fit(tmp_path / "whole", corpus, training=SAVING)
    fit(run, corpus, training={**SAVING, "updates": 4})
    fit(run, corpus, training=SAVING, resume=True)
    assert weights_equal(run, tmp_path / "whole")
    nfrs.average(run, last=1)
    fit(run, corpus, training=SAVING, overwrite=True)
    assert weights_equal(run, tmp_path / "whole") and (run / "checkpoints").is_symlink()
    assert sorted(path.name for path in disk.iterdir()) == sorted(
        path.name for path in (tmp_path / "whole" / "checkpoints").iterdir()
    )


def weights_equal(run, other):
    pairs = [(weights(run, name), weights(other, name)) for name in ("best", "last")]
    return all(torch.equal(a[name], b[name]) for a, b in pairs for name in b)


def copied(run, folder, how):
    if how == "cp -rL":
        subprocess.run(["cp", "-rL", run, folder], check=True)
    elif how == "no links":
        shutil.copytree(run, folder, symlinks=True)
        for name in ("best", "last"):
            (folder / "checkpoints" / name).unlink()
    else:
        archive = folder.with_suffix(".zip")
        with zipfile.ZipFile(archive, "w") as packed:
            for parent, _, names in os.walk(run, followlinks=True):
                for name in names:
                    packed.write(Path(parent, name), Path(parent, name).relative_to(run))
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(folder)


@pytest.mark.parametrize("how", ["cp -rL", "zip", "no links"])
@pytest.mark.one_in(all=3)
def test_a_copy_translates_and_goes_on_to_the_same_bits(tmp_path, corpus, how):
    for path in (corpus["valid_target"],):  # BLEU is 0 throughout: the first evaluation is the best
        Path(path).write_text(Path(path).read_text().upper())
    fit(tmp_path / "whole", corpus, training=SAVING)
    fit(tmp_path / "run", corpus, training={**SAVING, "updates": 4})
    assert (tmp_path / "whole" / "checkpoints" / "best").resolve().name == "update-00000002"
    copied(tmp_path / "run", tmp_path / "copy", how)
    asked = [nfrs.translate(tmp_path / run, ["1 2 3"], checkpoint="best") for run in ("run", "copy")]
    assert asked[0] == asked[1]
    fit(tmp_path / "copy", corpus, training=SAVING, resume=True)
    assert losses(tmp_path / "copy") == losses(tmp_path / "whole")
    assert weights_equal(tmp_path / "copy", tmp_path / "whole")
    kept = [{path.name for path in (tmp_path / run / "checkpoints").iterdir()} for run in ("copy", "whole")]
    assert kept[0] == kept[1]


NO_LINKS = """
#include <errno.h>
int symlink(const char *to, const char *from) { (void)to; (void)from; errno = EPERM; return -1; }
int symlinkat(const char *to, int at, const char *from) { (void)at; return symlink(to, from); }
"""


@pytest.mark.full
def test_a_file_system_without_links(tmp_path, corpus):
    """As exFAT answers: a shim refuses every link, from the first save to the translation."""
    (tmp_path / "shim.c").write_text(NO_LINKS)
    shim = tmp_path / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, tmp_path / "shim.c"], check=True)
    program = """
        import json, sys
        import torch
        torch.set_num_threads(1)
        from train_support import fit
        import normformer_rs as nfrs
        run, corpus, training = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
        fit(run, corpus, training={**training, "updates": 4}, tensorboard=False, curves=False)
        fit(run, corpus, training=training, resume=True, tensorboard=False, curves=False)
        print(json.dumps(nfrs.translate(run, ["1 2 3"], checkpoint="best")))
    """
    words = [
        sys.executable,
        "-c",
        textwrap.dedent(program),
        str(tmp_path / "run"),
        json.dumps(corpus),
        json.dumps(SAVING),
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": str(shim),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not any(path.is_symlink() for path in (tmp_path / "run").rglob("*"))
    fit(tmp_path / "whole", corpus, training=SAVING)
    assert weights_equal(tmp_path / "run", tmp_path / "whole")
    translated = nfrs.translate(tmp_path / "whole", ["1 2 3"], checkpoint="best")
    assert json.loads(done.stdout.splitlines()[-1]) == [[list(h) for h in line] for line in translated]


def test_hostile_folders_are_refused_at_once(tmp_path, corpus):
    """Names that no run writes, pipes, control characters, sizes that are not the weights'."""
    run = tmp_path / "run"
    fit(run, corpus, training={**SAVING, "updates": 2})
    os.mkfifo(tmp_path / "pipe")

    def refused(*, says, work=lambda: nfrs.translate(run, ["1"])):
        with pytest.raises(nfrs.InputError, match=says) as error:
            work()
        assert not any(ord(c) < 32 and c not in "\n\t" for c in str(error.value)), str(error.value)

    whole = (run / "checksums.txt").read_text()
    for name in ("/dev/zero", str(tmp_path / "pipe"), "/etc/passwd", "../run/config.json", "\x1b]0;title\x07"):
        line = f"00000000 5 {name}\n"
        (run / "checksums.txt").write_text(f"{line}{zlib.crc32(line.encode()):08x} of the lines above\n")
        refused(says="it lists .*; a run lists only config.json")
    (run / "checksums.txt").unlink()
    for name in ("config.json", "vocabulary.txt", "target_types.txt", "checkpoints/last/model.safetensors"):
        path = run / name
        text = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        refused(says=f"{path.name} is a pipe")
        path.unlink()
        path.write_bytes(text)
    (run / "checksums.txt").write_text(whole)
    assert nfrs.translate(run, ["1"])


def forge(checkpoint, change):
    """Rewrites a checkpoint's config and state with right checksums, as a malicious author would."""
    config = json.loads((checkpoint / "config.json").read_text())
    state = json.loads((checkpoint / "state.json").read_text())
    change(config, state)
    text = (json.dumps(config) + "\n").encode()
    (checkpoint / "config.json").write_bytes(text)
    state["files"]["config.json"] = {"bytes": len(text), "crc32": zlib.crc32(text)}
    del state["crc32"]
    body = json.dumps(state, indent=2).removesuffix("\n}") + ",\n"
    last = f'  "crc32": "{zlib.crc32(body.encode()):08x}"\n}}\n'
    (checkpoint / "state.json").write_text(body + last)


def test_forged_checkpoints_are_named(tmp_path, corpus):
    run = tmp_path / "run"
    fit(run, corpus, training={**SAVING, "updates": 2})
    checkpoint = (run / "checkpoints" / "last").resolve()
    whole = {path: path.read_bytes() for path in checkpoint.iterdir()}

    def forged(change, work, says):
        forge(checkpoint, change)
        with pytest.raises(nfrs.InputError, match=says):
            work()
        for path, text in whole.items():
            path.write_bytes(text)

    def layers(count):
        def change(config, state):
            config["model"]["decoder_layers"] = count

        return change

    for count, says in ((10**9, "decoder_layers must be at most 10000"), (10**4, "the weights are not those of its")):
        forged(layers(count), lambda: nfrs.Transformer.from_checkpoint(run), says)

    def resumed():
        fit(run, corpus, training=SAVING, resume=True)

    def update(value):
        def change(config, state):
            state["state"]["update"] = value

        return change

    for value in (2**63, None, -1, "two", 10**400):
        forged(update(value), resumed, "update-00000002.*(state|is damaged)")
