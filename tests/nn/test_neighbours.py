"""Layers beside other code: nothing of the package changes other modules of the process, and nothing but a constructor
or an explicit call draws weights."""

import copy
import pickle
import random
import subprocess
import sys
import warnings

import pytest
import torch
from nn_support import OPTIONS, RESIDUALS
from torch import nn

from normformer_rs import nn as nfnn

D, HEADS, FF, DEPTH = 8, 2, 12, 3
BETWEEN = {"dlcl", "denseformer", "resi-dual", "attnres", "mhc", "hyper-connections", "mhc-lite", "peri-ln", "r-fixup"}
BETWEEN |= {"value-residual", "x0-lambdas"}
MORE = [("postnorm*1/4,prenorm", {}), ("prenorm", {"init": "ds-init"}), ("deepnorm", {"init": "torch"})]
CASES = [*((name, OPTIONS.get(name, {})) for name in RESIDUALS), *MORE]


def layer_of(residual, options, **place):
    return nfnn.TransformerEncoderLayer(D, HEADS, FF, 0.0, batch_first=True, residual=residual, **options, **place)


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers


def state(modules):
    return [t.detach().clone() for m in modules for t in (*m.parameters(), *m.buffers())]


# Steps that write no weights. Each gets the modules, layers or one stack, and returns those to go on with.


def into_list(modules, _):
    Model(nn.ModuleList(modules))
    return modules


def into_slice(modules, rng):
    layers = nn.ModuleList(modules[0].layers if hasattr(modules[0], "layers") else modules)
    model = nn.Module()
    model.layers, model.early = layers, layers[: rng.randrange(1, DEPTH + 1)]
    model.probe = nn.Sequential(*layers[rng.randrange(DEPTH) :])
    return modules


def into_wrapper(modules, _):
    model = nn.Sequential(nn.Identity(), nn.Sequential(*modules), nn.ModuleDict({"a": nn.ModuleList(modules)}))
    model.append(Model(nn.Sequential(*modules)))
    return modules


def into_torchs_stack(modules, _):
    """torch.nn's stacks hold deep copies."""
    before, stack = state(modules[:1]), nn.TransformerEncoder(modules[0], 2, enable_nested_tensor=False)
    for layer in stack.layers:
        assert all(map(torch.equal, before, state([layer])))
    return modules


def shallow(modules, _):
    return [*map(copy.copy, modules)]


def deep(modules, _):
    return [*map(copy.deepcopy, modules)]


def pickled(modules, _):
    return pickle.loads(pickle.dumps(modules))


# Steps that write.


def fused_step(modules, _):
    parameters = [*nn.ModuleList(modules).parameters()]
    for p in parameters:
        p.grad = torch.randn_like(p)
    torch.optim.AdamW(parameters, 1e-2, fused=True).step()


def data(modules, rng):
    parameter = rng.choice([*nn.ModuleList(modules).parameters()])
    parameter.data.add_(0.01 * torch.randn_like(parameter))
    parameter.detach().numpy()[...] *= 1.01


def load(modules, _):
    for module in modules:
        module.load_state_dict({k: v + 0.01 if v.is_floating_point() else v for k, v in module.state_dict().items()})


KEEPS = (into_list, into_slice, into_wrapper, into_torchs_stack, shallow, deep, pickled)
WRITES = (fused_step, data, load)


def drive(seed):
    """A random sequence of steps on layers placed by a call, or on a stack of ours; then their outputs are held against
    freshly built ones that were told the places and have the weights."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    residual, options = rng.choice(CASES)
    in_stack = residual in BETWEEN or rng.random() < 0.3
    if in_stack:
        modules = [nfnn.TransformerEncoder(layer_of(residual, options), DEPTH)]
    else:
        modules = [layer_of(residual, options) for _ in range(DEPTH)]
        nfnn.place_layers(modules, init=True)
    for _ in range(rng.randrange(3, 9)):
        step = rng.choice((*KEEPS, *WRITES))
        if step in WRITES:
            step(modules, rng)
            continue
        if in_stack and step is into_torchs_stack:
            continue
        before, old = state(modules), modules
        modules = step(modules, rng)
        for kept in (old, modules):
            assert all(map(torch.equal, before, state(kept))), (seed, residual, step.__name__)
    x = torch.randn(2, 3, D)
    for i, module in enumerate(modules):
        if in_stack:
            told = nfnn.TransformerEncoder(layer_of(residual, options), DEPTH)
        else:
            told = layer_of(residual, options, layer=i, encoder_layers=DEPTH)
        told.load_state_dict(module.state_dict())
        assert torch.equal(module(x), told(x)), (seed, residual, i)


SEEDS = [
    range(8),
    pytest.param(range(8, 68), marks=pytest.mark.full),
    pytest.param(range(68, 2068), marks=pytest.mark.long),
]


@pytest.mark.parametrize("seeds", SEEDS, ids=["8", "60", "2000"])
@pytest.mark.one_in(test=3, all=2)
def test_weights_places_and_gains_stay(seeds):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # t where no optimizer made the update, gains that nobody profiled
        for seed in seeds:
            drive(seed)


# The process.

UNCHANGED = """
import builtins, importlib, pkgutil, sys
import torch
HEAVY = {heavy}
names = ["torch._dynamo", "torch.nn.modules.module", "torch.nn.init", "torch.nn.functional", "torch._ops"]
names += ["transformers.modeling_utils", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2"] * HEAVY
modules = [torch, *map(importlib.import_module, names)]
classes = [c for module in (torch.nn, torch.optim, *modules) for c in vars(module).values() if isinstance(c, type)]
classes += [torch.nn.Module, torch.Tensor, torch.nn.Parameter, torch.optim.Optimizer]

def seen():
    hooks = {{k: [*v.items()] for k, v in vars(torch.nn.modules.module).items() if isinstance(v, dict) and "hook" in k}}
    functions = {{(m.__name__, k): v for m in modules for k, v in vars(m).items() if callable(v)}}
    methods = {{(c, k): v for c in dict.fromkeys(classes) for k, v in vars(c).items() if callable(v)}}
    process = [*sys.meta_path], [*sys.path_hooks], builtins.__import__, sys.excepthook, torch.get_default_dtype()
    return hooks, functions, methods, process, torch.random.get_rng_state().tolist()

def same(was):
    now = seen()
    assert now[0] == was[0] and now[3] == was[3], (now[0], now[3])
    for old, new in zip(was[1:3], now[1:3]):
        changed = [name for name, value in old.items() if new.get(name) is not value]
        assert not changed, changed
    return now

was = seen()
import normformer_rs as nfrs
for name in nfrs.__all__:
    getattr(nfrs, name)
for package in (nfrs.nn, nfrs.surgery):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(found.name)
assert same(was)[4] == was[4]
from normformer_rs import nn as nfnn
made = []
for name in nfnn.__all__:
    kind = getattr(nfnn, name)
    if name in ("TransformerEncoder", "TransformerDecoder"):
        for scheme in ("deepnorm", "mhc", "branchnorm", "admin"):
            made.append(kind(getattr(nfnn, name + "Layer")(8, 2, 12, residual=scheme), 2))
    elif name == "Transformer":
        made.append(kind(8, 2, 1, 1, 12, residual="dlcl"))
    elif name == "Residual":
        made.append(kind(torch.nn.Linear(8, 8), 8, scheme="branchnorm"))
    elif isinstance(kind, type):
        arguments = {{"MultiheadAttention": (8, 2), "FixNormEmbedding": (5, 8), "GroupScaling": (2,)}}
        layer = name.endswith("Layer")
        made.append(kind(8, 2, 12, residual="deepnorm") if layer else kind(*arguments.get(name, (8,))))
config = nfrs.TransformerConfig(vocab_size=10, d_model=8, d_ff=12, heads=2, architecture="decoder-only")
made.append(nfrs.Transformer(config))
model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2)
nfrs.swap_norms(model, "rmsnorm")
nfrs.swap_residuals(model, "deepnorm")
torch.optim.AdamW(model.parameters()).step()
assert len(made) > 20
same(was)
from torch.optim import optimizer
hooks = [*optimizer._global_optimizer_pre_hooks.values(), *optimizer._global_optimizer_post_hooks.values()]
owners = {{hook.__wrapped__.__module__ if hasattr(hook, "__wrapped__") else hook.__module__ for hook in hooks}}
assert owners <= {{"normformer_rs.nn.step_hooks", "normformer_rs.surgery.optimizers"}}, owners
del made, model
same(was)
"""


@pytest.mark.parametrize("heavy", [0, pytest.param(1, marks=pytest.mark.full)], ids=["torch", "transformers"])
@pytest.mark.one_in(all=2)
def test_the_process_stays_as_it_was(heavy):
    """No hook on modules, no import hook, no patch, after importing everything and making one of each kind."""
    if heavy:
        pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, "-c", UNCHANGED.format(heavy=heavy)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


TOOLS = """
import copy, os, sys, tempfile, warnings
import torch
import torch.distributed as dist
from torch import nn
warnings.simplefilter("ignore")
folder = tempfile.TemporaryDirectory()
dist.init_process_group("gloo", init_method=f"file://{folder.name}/meet", rank=0, world_size=1)
x = torch.randn(3, 8)

def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ModuleDict({"a": nn.Linear(8, 8)})["a"], nn.LayerNorm(8))

def compiled_autograd(model):
    torch._dynamo.config.compiled_autograd = True
    y = torch.compile(model, backend="eager")(x)
    torch.compile(lambda: y.sum().backward(), backend="eager")()
    torch._dynamo.config.compiled_autograd = False
    return lambda x: next(model.parameters()).grad

def fsdp1(model):
    from torch.distributed.fsdp import FullyShardedDataParallel
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))

def fsdp2(model):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))

def wrapper(name):
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
    return getattr(checkpoint_wrapper, name)

def per_sample(model):
    from opacus import GradSampleModule
    return GradSampleModule(model)

def accelerated(model):
    import accelerate
    return accelerate.Accelerator(cpu=True).prepare(model)

def fabric(model):
    from lightning.fabric import Fabric
    return Fabric(accelerator="cpu", devices=1).setup(model)

def lora(model):
    import peft
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"]))

def quantised(model):
    from torchao.quantization import int8_weight_only, quantize_
    quantize_(model, int8_weight_only())
    return model

def tensors(model):
    from tensordict import TensorDict
    with TensorDict.from_module(model).to_module(model):
        y = model(x)
    return lambda x: y

def averaged(model):
    made = torch.optim.swa_utils.AveragedModel(model)
    made.update_parameters(model)
    return made

tools = {
    "compile": lambda m: torch.compile(m, backend="eager"), "compiled autograd": compiled_autograd, "FSDP1": fsdp1,
    "FSDP2": fsdp2, "DDP": nn.parallel.DistributedDataParallel,
    "checkpoint": lambda m: wrapper("checkpoint_wrapper")(m),
    "offload": lambda m: wrapper("offload_wrapper")(m), "AveragedModel": averaged, "opacus": per_sample,
    "accelerate": accelerated, "Fabric": fabric, "peft": lora, "torchao": quantised, "TensorDict": tensors,
}

def tried():
    found = {}
    for name, tool in tools.items():
        torch._dynamo.reset()
        try:
            y = tool(plain())(x)
            found[name] = (getattr(y, "full_tensor", lambda: y)()).detach().tolist()
        except ImportError as missing:
            found[name] = f"missing: {missing.name}"
    return found

before = tried()
from normformer_rs import nn as nfnn
import normformer_rs as nfrs
for scheme in ("deepnorm", "mhc", "branchnorm", "admin", None):
    stack = nfnn.TransformerEncoder(nfnn.TransformerEncoderLayer(8, 2, 12, batch_first=True, residual=scheme), 2)
layer = nfnn.TransformerDecoderLayer(8, 2, 12)
nfnn.Transformer(8, 2, 1, 1, 12), nfnn.Residual(nn.Linear(8, 8), 8), nfnn.RMSNorm(8), nfnn.BatchNorm(8)
nfnn.MultiheadAttention(8, 2), nfnn.FixNormEmbedding(4, 8)
nfrs.swap_norms(nn.Sequential(nn.LayerNorm(8)), "rmsnorm")
del layer
after = tried()
print(sorted(name for name, y in before.items() if isinstance(y, list)))
assert after == before, {name: y for name, y in after.items() if y != before[name]}
assert sum(isinstance(y, list) for y in before.values()) >= 8, before
for name in ("compile", "FSDP1", "checkpoint", "offload", "AveragedModel"):  # and with ours inside
    tools[name](nn.Sequential(nn.Linear(8, 8), nfnn.ScaleNorm(8)))(x)
torch._dynamo.reset()
assert torch.compile(nn.Sequential(nn.Linear(8, 8), stack), backend="eager")(torch.randn(2, 3, 8)).isfinite().all()
dist.destroy_process_group()
"""


@pytest.mark.full
def test_other_tools_wrap_torchs_models_as_before():
    done = subprocess.run([sys.executable, "-c", TOOLS], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
