"""The norms that a scheme adds to a block of another library: which they are, and in which mode they begin."""

import pytest
import torch
import torch.distributed as dist
from surgery_support import torchs_encoder
from torch import nn

import normformer_rs as nfrs
from normformer_rs.errors import InputError
from normformer_rs.nn.own import OwnNorm
from normformer_rs.surgery import swap_norms, swap_residuals


class OwnNormOfNumbers(nfrs.Norm):
    """One that no trial call could take for the table's."""

    name = "half-way"
    parameters = {"weight": nfrs.norms.Parameter()}  # noqa: RUF012

    def normalize(self, x, weight):
        return weight * x / (1 + x.norm(dim=-1, keepdim=True))


def added(model):
    """sandwich's norms behind the branches."""
    return [module for name, module in model.named_modules() if "post_norm" in name]


@pytest.mark.parametrize("order", ["norms first", "residuals first"])
def test_they_have_the_options_of_the_blocks_norms(order):
    model = torchs_encoder()
    steps = [lambda: swap_norms(model, "lpnorm", p=3.0), lambda: swap_residuals(model, "sandwich")]
    for step in steps if order == "norms first" else steps[::-1]:
        step()
    assert {m.p for m in model.modules() if isinstance(m, nfrs.nn.LpNorm)} == {3.0} and len(added(model)) == 4
    model = torchs_encoder()
    swap_norms(model, "rmsnorm", zero_centred=True, cast="before")
    swap_residuals(model, "sandwich")
    assert {(norm.zero_centred, norm.cast, norm.weight[0].item()) for norm in added(model)} == {(True, "before", 0.0)}


def test_the_table_tells_a_last_norm_that_was_added_from_one_that_was_removed():
    model = torchs_encoder()
    assert swap_residuals(model, "sandwich")[-1].note == "last norm added"
    model = nn.TransformerEncoder(torchs_encoder().layers[0], 2, nn.LayerNorm(model.layers[0].norm1.weight.numel()))
    assert swap_residuals(model, "deepnorm")[-1].note == "last norm removed"


def test_they_have_the_blocks_epsilon():
    model = torchs_encoder()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-3
    swap_residuals(model, "sandwich", init=None)
    assert added(model) and {norm.eps for norm in added(model)} == {1e-3}


def test_they_are_the_users_own_after_a_swap_to_such():
    model = torchs_encoder()
    swap_norms(model, OwnNormOfNumbers)
    swap_residuals(model, "sandwich", init=None)
    assert added(model) and all(isinstance(norm, OwnNorm) and norm.norm.name == "half-way" for norm in added(model))


@pytest.mark.parametrize("scheme", ["sandwich", "peri-ln", "resi-dual"])
def test_they_begin_in_the_models_mode(scheme):
    model = torchs_encoder().eval()
    swaps = swap_residuals(model, scheme, init=None)
    assert not any(module.training for module in model.modules())
    swaps.undo()
    swap_residuals(model.train(), scheme, init=None)
    assert all(module.training for module in model.modules() if [*module.parameters()])


def test_a_file_and_a_class_name_a_norm(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "import normformer_rs as nfrs\nclass Half(nfrs.Norm):\n    name = 'half'\n"
        "    parameters = {'weight': nfrs.norms.Parameter()}\n"
        "    def normalize(self, x, weight):\n        return weight * x / 2\n"
    )
    model = torchs_encoder()
    swap_norms(model, f"{path}:Half")
    assert {m.norm.name for m in model.modules() if isinstance(m, OwnNorm)} == {"half"}


def test_what_is_no_initialisation_of_norms_is_said():
    with pytest.raises(InputError, match=r'unknown init "None".* one of match, default'):
        swap_norms(torchs_encoder(), "rmsnorm", init=None)


def test_a_table_after_training_says_what_came_back():
    model = torchs_encoder()
    swaps = swap_norms(model, "rmsnorm")
    with torch.no_grad():
        next(model.parameters()).add_(1)
    assert {row.note for row in swaps.undo()} == {"trained since: what the swap replaced or drew is as before it, "
                                                  "the rest as learned"}  # fmt: skip


@pytest.mark.parametrize("kind", ["swapped", "module"])
@pytest.mark.parametrize("way", ["autocast", "ddp", "compile"])
@pytest.mark.one_in(test=3)
def test_a_norm_of_ones_own_under_torchs_tools(kind, way, tmp_path):
    """Outputs and all gradients in training are those of the plain model; in bf16 within its rounding."""
    torch.manual_seed(0)
    if kind == "swapped":
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True), 2)
        swap_norms(model, OwnNormOfNumbers)
        swap_residuals(model, "sandwich", init=None)
    else:
        options = {"norm": OwnNormOfNumbers, "residual": "sandwich", "batch_first": True}
        layer = nfrs.nn.TransformerEncoderLayer(16, 4, 32, 0.0, **options)
        model = nfrs.nn.TransformerEncoder(layer, 2)
    x = torch.randn(2, 5, 16)

    def found(run):
        model.zero_grad()
        y = run(x)
        y.float().square().sum().backward()
        return [y.detach().float(), *(p.grad.clone() for p in model.parameters())]

    plain, tolerance = found(model), 1e-5
    if way == "compile":
        got = found(torch.compile(model))
    elif way == "autocast":
        tolerance = 3e-2
        with torch.autocast("cpu", torch.bfloat16):
            got = found(model)
    else:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
        try:
            got = found(nn.parallel.DistributedDataParallel(model))
        finally:
            dist.destroy_process_group()
    for a, b in zip(got, plain, strict=True):
        assert (a - b).norm() <= tolerance * b.norm() + 1e-6
