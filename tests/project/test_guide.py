"""CONTRIBUTING's guide works: its steps make a norm, a scheme and operators in a copy of the sources."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from normformer_rs import nn
from normformer_rs.nn.norm_table import COLUMN_OPTIONS
from normformer_rs.surgery import swap_norms

ROOT = Path(__file__).parents[2]

USE = """
import sys
import pytest
import torch
import normformer_rs as nfrs
from normformer_rs.nn import MaxNorm, PeakNorm, TransformerEncoderLayer, norm_class
from normformer_rs.schemes import Learned, ResidualSpec, gate, norm, times
from normformer_rs.surgery import swap_norms, swap_residuals
import reference as ref

assert norm_class("maxnorm") is MaxNorm
assert repr(MaxNorm(8)) == "MaxNorm((8,), eps=1e-05, elementwise_affine=True)"
x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
own = MaxNorm(8, dtype=torch.float64)
torch.nn.init.constant_(own.scale, 0.5)
expected = ref.apply_norm("maxnorm", x, own.weight, inside={"scale": own.scale})
torch.testing.assert_close(own(x), expected)
torch.testing.assert_close(own(x), MaxNorm(8, eps=0.0, elementwise_affine=False, dtype=torch.float64)(x) / 0.5)
assert torch.autograd.gradcheck(own, (x,)) and torch.compile(own, fullgraph=True, backend="eager")(x).shape == x.shape
assert own(x.bfloat16()).dtype == torch.bfloat16
with pytest.raises(ValueError, match="MaxNorm|8"):
    own(x[:, :7])
with pytest.raises(ValueError, match="did you mean .*maxnorm"):
    nfrs.TransformerConfig(norm="maxnrom")
peak = PeakNorm(8, alpha=0.5)
assert norm_class("peaknorm") is PeakNorm and repr(peak) == "PeakNorm(8, eps=1e-05, alpha=0.5, elementwise_affine=True)"
for size, largest in ((2.0, 4.0), (1.0, 2.0), (1.0, 1.0)):
    torch.testing.assert_close(peak(torch.full((3, 8), size)), torch.full((3, 8), size) / (size**2 + 1e-5) ** 0.5)
    assert torch.equal(peak.state_dict()["running_peak"], torch.full((8,), largest))
assert "peak_norm.cu" in nfrs._core.cuda_programs()
with pytest.raises(ValueError, match="alpha must lie in"):
    PeakNorm(8, alpha=1.0)
config = nfrs.TransformerConfig(vocab_size=9, d_model=8, d_ff=16, heads=2, norm="peaknorm", peaknorm_alpha=0.0)
loop, ids = nfrs.Transformer(config, seed=1), torch.randint(4, 9, (2, 5))
loop.train()(ids, ids).sum().backward()
peaks = {name: value for name, value in loop.named_buffers() if name.endswith("running_peak")}
assert len(peaks) > 4 and not any((value == 1).all() for value in peaks.values())
layer = torch.nn.TransformerEncoderLayer(8, 2, 16)
swap_norms(layer, "maxnorm")
assert isinstance(layer.norm1, MaxNorm)
layer = TransformerEncoderLayer(8, 2, 16, norm="maxnorm", residual="damped", damped_start=0.25)
assert layer(torch.randn(4, 2, 8)).shape == (4, 2, 8)
assert [c.item() for name, c in layer.named_parameters() if "damping" in name] == [0.25, 0.25]
with pytest.raises(ValueError, match="damped_start must lie in"):
    TransformerEncoderLayer(8, 2, 16, residual="damped", damped_start=1.0)
with pytest.raises(ValueError, match="damped_start = 0.25 is an option of damped, and this model has"):
    nfrs.Transformer(nfrs.TransformerConfig(vocab_size=9, damped_start=0.25))


class Gated(nfrs.Scheme):
    name = "gated"

    def __init__(self, change):
        self.change = change

    def around(self, place):
        return ResidualSpec(before=norm(), skip=self.change)


gates, halves = Gated(gate(Learned("stream_gate", 0.0))), Gated(times(0.5))  # σ(0) = ½
shape = {"vocab_size": 9, "d_model": 8, "d_ff": 16, "heads": 2, "dropout": 0.0}
models = [nfrs.Transformer(nfrs.TransformerConfig(residual=each, **shape), seed=1).double() for each in (gates, halves)]
ids = torch.randint(4, 9, (2, 5))
torch.testing.assert_close(models[0](ids, ids), models[1](ids, ids), rtol=0, atol=0)
models[0](ids, ids).square().sum().backward()
assert dict(models[0].named_parameters())["encoder.layers.0.stream_gate1"].grad.abs() > 0
layers = [TransformerEncoderLayer(8, 2, 16, 0.0, residual=each, encoder_layers=1) for each in (gates, halves)]
layers[1].load_state_dict(layers[0].state_dict(), strict=False)
x = torch.randn(4, 2, 8)
torch.testing.assert_close(layers[0](x), layers[1](x), rtol=0, atol=0)
with pytest.raises(ValueError, match="of shape .3., expected one of"):
    TransformerEncoderLayer(8, 2, 16, residual=Gated(gate(Learned("stream_gate", 0.0, 3))))
p, g, m = torch.ones(3), torch.tensor([1.0, -2.0, 0.0]), torch.zeros(3)
nfrs._core.step_by_rule('{"optimizer": "signum"}', p, g, [m], 0.1)
torch.testing.assert_close((p, m), (torch.tensor([0.9, 1.1, 1.0]), 0.1 * g))
swap_residuals(torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16), 2), "damped")
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


CALL = """
import sys
import torch
import fuzz
import normformer_rs as nfrs

OPS = torch.ops.normformer_rs
x = torch.randn(3, 8, requires_grad=True)
torch.testing.assert_close(OPS.relu_norm(x), OPS.rms_norm(x.relu(), None, None, 1e-5)[0])
y = OPS.relu_squared(x)
torch.testing.assert_close(y, x.relu().square())
torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 2 * x.relu())
assert y.grad_fn.name() == "relu_squaredBackward" and nfrs._core.operator_counts()["relu_squared"] == (1, 0)
assert "relu_squared.cu" in nfrs._core.cuda_programs()
for op in fuzz.OPS_BY_NAME.keys() - {"relu_norm", "relu_squared", "relu_squared_backward"}:
    del fuzz.OPS_BY_NAME[op]
told = [fuzz.call(0, n) for n in range(300)]
assert not [line for line in told if line.startswith(("wrong", "panic"))], told
assert told.count("accepted") > 100
"""
OPERATORS = ("relu_norm", "relu_squared", "peak_norm")


def follow(guide: str, tree: Path) -> int:
    """Makes the guide's files and applies its changes; how many steps there were."""
    steps = re.findall(r"^( *)```(rust|cuda|diff) (\S+)\n(.*?)^ *```", guide, re.M | re.S)
    for indent, kind, name, block in steps:
        block = textwrap.indent(block, "") if not indent else re.sub(rf"^{indent}", "", block, flags=re.M)
        path = tree / name
        if kind != "diff":
            assert not path.exists(), f"the guide makes {name}, which is there already"
            path.parent.mkdir(exist_ok=True)
            path.write_text(block)
            continue
        lines = block.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        text = path.read_text()
        assert text.count(before) == 1, (
            f"the guide changes {name} at\n{before}which is there {text.count(before)} times"
        )
        path.write_text(text.replace(before, after))
    return len(steps)


def copied(tree: Path, *names: str) -> str:
    """Follows the guide in a copy of these files and folders; returns the guide."""
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(ROOT / name, tree / name)
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    assert follow(guide, tree) >= 40
    return guide


@pytest.fixture
def checkout():
    if not (ROOT / "Cargo.toml").exists():
        pytest.skip("needs a checkout")


@pytest.mark.usefixtures("checkout")
def test_every_step_fits_the_sources(tmp_path):
    copied(tmp_path / "tree", "src", "python", "tests", "pyproject.toml")
    for path in (tmp_path / "tree").rglob("*.py"):
        compile(path.read_text(), path, "exec")
    # The twin of the norm with state, which needs no build.
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", "peaknorm"]
    command += [str(tmp_path / "tree" / "tests/reference/test_reference_norms.py")]
    done = subprocess.run(command, cwd=tmp_path / "tree", capture_output=True, text=True)
    assert re.search(r"^[4-9] passed", done.stdout, re.M), done.stdout[-3000:] + done.stderr[-3000:]


def test_a_norm_with_state_takes_three_files():
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## A norm with state\n")[2].partition("\n## ")[0]
    made = set(re.findall(r"^ *```(?:rust|cuda|diff) (\S+)$", section, re.M))
    product = {name for name in made if not name.startswith("tests/")}
    assert "takes three product\nfiles" in section
    assert product == {"src/norm/peak_norm.rs", "src/norm/peak_norm.cu", "src/norm/mod.rs"}
    keywords = re.findall(r"`(\w+)`", section.partition("and the keywords ")[2].partition(" with ")[0])
    assert keywords == [*COLUMN_OPTIONS]


@pytest.mark.parametrize("package", [torch.nn, nn])
def test_state_in_modules_takes_none(package):
    (block,) = re.findall(r"^```python\n(class EmaNorm.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S)
    made = {"torch": torch}
    exec(block, made)
    model = package.TransformerEncoder(package.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)
    swap_norms(model, made["EmaNorm"])
    state = {name: value.clone() for name, value in model.named_buffers() if name.endswith("square")}
    x = 3 * torch.randn(2, 5, 8)
    model(x).sum().backward()
    moved = {name: value.clone() for name, value in model.named_buffers() if name.endswith("square")}
    assert len(moved) >= 4 and all(value != state[name] for name, value in moved.items())
    torch.testing.assert_close(model.eval()(x), model(x))
    assert all(value == model.state_dict()[name] for name, value in moved.items())
    norm = made["EmaNorm"](8)
    torch.testing.assert_close(norm(x), x / (1 + 1e-5) ** 0.5)
    torch.testing.assert_close(norm.square, 0.9 + 0.1 * x.square().mean().reshape(1))


@pytest.mark.timeout(1800)  # it builds the package
@pytest.mark.long
@pytest.mark.usefixtures("checkout")
def test_what_the_guide_makes(tmp_path):
    if shutil.which("cargo") is None:
        pytest.skip("needs cargo, to compile the guide's norm")
    tree = tmp_path / "tree"
    files = ("Cargo.toml", "Cargo.lock", "build.rs", "README.md", "pyproject.toml", "_build.py")
    guide = copied(tree, "src", "python", "tests", "docs", ".cargo", *files)
    # The dependencies that `make build` has compiled are taken as they are; our own code is not optimised.
    built = sorted((ROOT / "target").glob("python-*"), key=lambda path: path.stat().st_mtime)
    target = built[-1] if built else tmp_path / "target"
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CARGO_TARGET_DIR": str(target),
        "PYTHONPATH": f"{tree / 'python'}:{tree / 'tests'}:{tree / 'tests' / 'operators'}",
    }
    command = "rustc --quiet --release --features python --lib --crate-type cdylib -- -C opt-level=0 -C debuginfo=0"
    subprocess.run([sys.executable, "_build.py", *command.split()], cwd=tree, env=environment, check=True)
    library = target / "release" / "libnormformer_rs.so"
    suffix = next((ROOT / "python" / "normformer_rs").glob("_core.*.so")).name
    shutil.copy(library, tree / "python" / "normformer_rs" / suffix)
    run = {"cwd": tree, "env": environment, "capture_output": True, "text": True}
    stale = subprocess.run([sys.executable, "-c", "import torch, normformer_rs"], **run)
    assert "python -m normformer_rs._stubs --write" in stale.stderr.splitlines()[-1]
    write, *_ = re.findall(r"`python (-m normformer_rs._stubs --write)`", guide)
    subprocess.run([sys.executable, *write.split()], **run, check=True)
    assert "| `maxnorm` |" in (tree / "docs" / "names.md").read_text()
    # Model, loop and twins for the new names only.
    chosen = [
        f"{tree}/tests/model",
        f"{tree}/tests/norms",
        f"{tree}/tests/train/test_training.py",
        "-k",
        "every_gradient and (maxnorm or damped) or peaknorm",
    ]
    done = subprocess.run([sys.executable, "-c", USE, *chosen], **run, timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"\d+ passed", done.stdout)
    (write,) = re.findall(r"`python (tests/operators/schemas\.py)`,? writes", guide)
    subprocess.run([sys.executable, write], **run, check=True)
    added = {*(tree / "tests/operators/schemas.txt").read_text().splitlines()}
    added -= {*(ROOT / "tests/operators/schemas.txt").read_text().splitlines()}
    assert {schema.split("(")[0].split("::")[1] for schema in added} == {
        *OPERATORS,
        "peak_norm_backward",
        "relu_squared_backward",
    }
    done = subprocess.run([sys.executable, "-c", CALL], **run, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    chosen = [f"{tree}/tests/operators", f"{tree}/tests/cuda/test_cuda.py", "-k", " or ".join((*OPERATORS, "contract"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(command, **run, timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 20, done.stdout[-3000:]
    assert_ten_files(guide, tree)


def assert_ten_files(guide: str, tree: Path) -> None:
    """The guide's count for an operator with kernels is its table's."""
    section = guide.partition("### An operator with kernels\n")[2].partition("### What follows\n")[0]
    table = [line for line in section.splitlines() if line.startswith("| ")][1:]
    files = [name.strip("` ") for line in table for name in line.split("|")[1].split(",")]
    made = set(re.findall(r"^ *```(?:rust|cuda|diff) (\S+)$", section, re.M))
    assert "It takes ten files: eight of code and tests" in section and (len(files), len(made)) == (10, 8)
    assert made <= set(files) and all((tree / name).exists() or name == "CHANGELOG.md" for name in files)
