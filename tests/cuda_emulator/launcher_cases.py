"""Cases of the launcher on the emulated device: what is launched, recorded, refused, and what runs instead."""

import json
import os
import tempfile
import threading
import warnings
from pathlib import Path

import torch

import normformer_rs as nfrs
import reference as ref
from normformer_rs import _core

from .checks import EPS, NORMS, OPS, on_device
from .column_cases import fresh_buffers


def launches(norm, **options):
    """The kernels that a forward and a backward pass put on the stream."""
    log = Path(os.environ["MOCK_LOG"])
    x, weight = torch.randn(9, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    options |= {"eps": EPS} if norm in NORMS else fresh_buffers(norm, 64)
    with on_device(norm):
        getattr(OPS, norm)(x, weight, None, **options)[0].sum().backward()
    return [line.split()[0] for line in log.read_text().splitlines()]


def proven_launches():
    """The same of layer_norm on the emulated device where kernels are proven, the verdicts that are kept, and the
    warnings. The results are the formula's in any case."""
    x, weight = torch.randn(9, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    dy = torch.randn(9, 64)
    _core.cuda_stand_in(True)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        y = OPS.layer_norm(x, weight, None, EPS)[0]
        found = torch.autograd.grad(y, (x, weight), dy)
    _core.cuda_stand_in(False)
    expected = torch.autograd.grad(torch.nn.functional.layer_norm(x, (64,), weight, None, EPS), (x, weight), dy)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    names = [line.split()[0] for line in Path(os.environ["MOCK_LOG"]).read_text().splitlines()]
    return names, _core.cuda_verdicts(), [str(warning.message) for warning in warned]


def launches_without_rows():
    """Calls of batch_norm and layer_norm on no rows, then on nine; the verdicts that are kept, and the warnings."""
    _core.cuda_stand_in(True)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for rows in (0, 9):
            x = torch.randn(rows, 5, requires_grad=True)
            OPS.batch_norm(x, None, None, train=True)[0].sum().backward()
            OPS.layer_norm(x, None, None, EPS)[0].sum().backward()
    _core.cuda_stand_in(False)
    return _core.cuda_verdicts(), [str(warning.message) for warning in warned]


def training_by_graphs(folder, fails=None):
    """Two updates of one shape of batch, the second recorded and replayed, and the same two without graphs. For torch's
    graphs stands what the CPU can do: what is recorded is done, and nothing when it is replayed. Returns what torch was
    asked, the warnings, and for each graph whether it was freed before any operator ran after the failure; `fails`:
    which of the questions does."""
    asked, warnings, freed, at_failure = [], [], [], []

    def said(name, result=None):
        def call(*arguments, **options):
            asked.append((name, *arguments, *options.items()))
            if name == fails:
                at_failure.append(_core.operator_counts())
                raise RuntimeError("operation not permitted when stream is capturing")
            return result

        return call

    class Graph:
        def __init__(self):
            self.capture_begin, self.capture_end = said("capture_begin"), said("capture_end")
            self.replay = said("replay")

        def __del__(self):
            freed.append(at_failure == [_core.operator_counts()])

    torch._C._CUDAGraph, torch._C._graph_pool_handle = Graph, lambda: (0, 1)
    for name in ("_cuda_synchronize", "_cuda_emptyCache", "_cuda_endAllocateToPool"):
        setattr(torch._C, name, said(name))
    text = Path(folder, "text")
    text.write_text("a b c\nc b\nb b a a c\n")
    data = {f"{part}_{side}": str(text) for part in ("train", "valid") for side in ("source", "target")}
    model = {"d_model": 16, "d_ff": 24, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.2}
    results = []
    for has_graphs in (True, False):
        # An ε that keeps rounding in gradients of nothing (those of key biases) from becoming steps.
        training = {"updates": 2, "max_tokens": 64, "lr": 1e-2, "warmup": 0, "schedule": "constant", "adam_eps": 1e-4}
        configs = (
            nfrs.TransformerConfig(**model, encoder_norm="batchnorm"),
            nfrs.TrainingConfig(**training, cuda_graphs=has_graphs),
            nfrs.DataConfig(**data, no_bpe=True),
        )
        output = Path(folder, str(has_graphs))
        _core.cuda_stand_in(True)
        history = nfrs.Trainer(*configs).fit(output, progress=False, curves=False)
        _core.cuda_stand_in(False)
        log = map(json.loads, (output / "log.jsonl").read_text().splitlines())
        warnings += [event["text"] for event in log if event["event"] == "message" and event["level"] == "warning"]
        results.append((history.loss, nfrs.Transformer.from_checkpoint(output, "last").state_dict()))
    if fails != "capture_end":  # what a device would not have done by then, the CPU has
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
    return asked, warnings, freed


def attention_of_two_threads(folder):
    """Two trainings at once; the first to call torch's attention leaves it while the second is inside. Returns torch's
    switch for cuDNN's attention as the second has it then, and as both leave it."""
    text = Path(folder, "text")
    text.write_text("a b c\nc b\nb b a a c\n")
    data = {f"{part}_{side}": str(text) for part in ("train", "valid") for side in ("source", "target")}
    model = {"d_model": 16, "d_ff": 24, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}
    training = {"updates": 1, "max_tokens": 64, "lr": 1e-2, "warmup": 0, "schedule": "constant", "cuda_graphs": True}
    inside, left = [threading.Event(), threading.Event()], threading.Event()
    enabled, found = torch.backends.cuda.cudnn_sdp_enabled, []

    def train(number, meet):
        def keep(t):  # attention alone keeps tensors of four dimensions, before it returns
            if t.dim() == 4 and not inside[number].is_set():
                assert not enabled()
                inside[number].set()
                meet()
            return t

        configs = nfrs.TransformerConfig(**model), nfrs.TrainingConfig(**training), nfrs.DataConfig(**data, no_bpe=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            nfrs.Trainer(*configs).fit(Path(folder, str(number)), progress=False, curves=False, tensorboard=False)

    def first():
        train(0, lambda: inside[1].wait(60))
        left.set()

    def second():
        left.wait(60)
        found.append(enabled())

    _core.cuda_stand_in(True)
    thread = threading.Thread(target=first)
    thread.start()
    assert inside[0].wait(60)
    train(1, second)
    thread.join()
    _core.cuda_stand_in(False)
    return [*found, enabled()]


def warns_and_falls_back():
    """One warning, with the reason, and the composed formula's result. Returns the warning."""
    x, weight = torch.randn(3, 5), torch.randn(5)
    before = _core.operator_counts()["rms_norm"]
    with tempfile.TemporaryFile("w+") as said:
        os.dup2(said.fileno(), 2)  # libtorch's warnings go there
        _core.cuda_stand_in(True)
        y, *_ = (OPS.rms_norm(x, weight, None, EPS)[0] for _ in range(3))
        _core.cuda_stand_in(False)
        said.seek(0)
        warnings = [line for line in said if "Warning: normformer_rs" in line]
    after = _core.operator_counts()["rms_norm"]
    assert (after[0] - before[0], after[1] - before[1]) == (0, 3)
    torch.testing.assert_close(y, ref.rms_norm(x, weight, EPS))
    assert len(warnings) == 1, warnings
    return warnings[0]


def streams_by_formula():
    """How often the operators of hyper-connections run kernels and formulas on a device, which has no kernels for
    them."""
    names, streams = ("sinkhorn", "mix_streams"), torch.randn(3, 4, 8, requires_grad=True)
    logits = torch.randn(3, 4, 4, requires_grad=True)
    before = [_core.operator_counts()[name] for name in names]
    _core.cuda_stand_in(True)
    OPS.mix_streams(streams, OPS.sinkhorn(logits, 20)).sum().backward()
    _core.cuda_stand_in(False)
    after = [_core.operator_counts()[name] for name in names]
    return [(a[0] - b[0], a[1] - b[1]) for a, b in zip(after, before)]


def refuses():
    """The message of the error where kernels are required."""
    _core.cuda_stand_in(True)
    try:
        OPS.rms_norm(torch.randn(3, 5), torch.randn(5), None, EPS)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("it ran")


def launch_fails():
    """The error of a launch that fails after the device was found ready."""
    x = torch.randn(3, 5)
    with on_device("rms_norm"):
        OPS.rms_norm(x, None, None, EPS)
        os.environ["MOCK_FAIL"] = "cuLaunchKernel"
        try:
            OPS.rms_norm(x, None, None, EPS)
        except RuntimeError as error:
            return str(error)
    raise AssertionError("it ran")


def double_runs_the_formula():
    """f64 has no kernel: the composed formula runs on a GPU, and on the CPU its own kernels."""
    x = torch.randn(3, 5, dtype=torch.float64)
    _core.cuda_stand_in(True)
    y = OPS.rms_norm(x, None, None, EPS)[0]
    _core.cuda_stand_in(False)
    torch.testing.assert_close(y, ref.rms_norm(x, None, EPS))
