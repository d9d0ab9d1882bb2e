"""What holds for every operator that is declared: its schema, and each way in which PyTorch calls an operator."""

import pytest
import schemas
import torch
from operators_support import OF_X
from torch.autograd import forward_ad

OPS = torch.ops.normformer_rs
EPS = 1e-5


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def step(x, f, weight):
    return OPS.layer_norm_residual(x, f, None, None, weight, None, EPS, 0.0, None, 0)


def test_schemas_are_a_contract():
    """Programs, exported graphs and checkpoints of others call by them: change none, add at the end with a default.

    `python tests/operators/schemas.py` writes down those of new operators.
    """
    wanted, found = schemas.kept(), schemas.registered()
    assert wanted <= found
    assert found <= wanted, "run: python tests/operators/schemas.py"


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.one_in(all=2)
def test_no_shape_of_rows_compiles_anew(backend):
    torch._dynamo.reset()
    weight, counts = leaf(16), torch._dynamo.utils.counters

    def f(x, g):
        y = OPS.rms_norm(torch.relu(x), weight, None, EPS)[0]
        x_plus, z, _ = step(x, g, weight)
        return (y.tanh() + OPS.relu_dropout(z * x_plus, 0.0, None, 0)).sum()

    counts.clear()
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for shape in ((4, 3, 16), (7, 3, 16), (2, 9, 16), (31, 5, 16)):
            x, g = leaf(*shape), leaf(*shape)
            found = torch.autograd.grad(compiled(x, g), [x, g, weight])
            wanted = torch.autograd.grad(f(x, g), [x, g, weight])
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert counts["stats"]["unique_graphs"] == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # compiled autograd reads it
@pytest.mark.full
def test_compiled_autograd():
    x, weight = leaf(4, 6), leaf(6)

    def loss():
        batch = OPS.batch_norm(x, weight, train=True)[0]
        return (step(x, x * 2, weight)[1].sin() + OPS.relu_dropout(x, 0.0, None, 0) * batch).sum()

    wanted = torch.autograd.grad(loss(), [x, weight])
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True)):
            for _ in range(2):
                torch.testing.assert_close(torch.autograd.grad(loss(), [x, weight]), wanted)


@pytest.mark.parametrize(
    "f",
    [
        *OF_X.values(),
        lambda x: step(x, x.sin(), None)[1],
        lambda x: OPS.batch_norm(x, train=True)[0],
        lambda x: OPS.label_smoothed_cross_entropy(x, torch.tensor([0, 2, 1]), None, 0.9, 0.01, -1)[0],
    ],
    ids=[*OF_X, "step", "batch_norm", "cross_entropy"],
)
@pytest.mark.one_in(test=2)
def test_forward_mode(f):
    x, tangent = (torch.randn(3, 8, dtype=torch.float64) for _ in range(2))
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(f(forward_ad.make_dual(x, tangent))).tangent
    jacobian = torch.autograd.functional.jacobian(f, x)
    torch.testing.assert_close(found, torch.tensordot(jacobian, tangent, dims=2))


@pytest.mark.parametrize("op", OF_X)
@pytest.mark.one_in(test=3)
def test_gradients_of_either_order(op):
    x = leaf(2, 8, dtype=torch.float64)
    assert torch.autograd.gradcheck(OF_X[op], x) and torch.autograd.gradgradcheck(OF_X[op], x)


def test_nodes_are_called_after_their_operator():
    y = OPS.layer_norm(leaf(2, 3), None, None, EPS)[0]
    assert y.grad_fn.name() == "layer_normBackward"


def test_what_a_node_keeps():
    """Of relu_dropout the result alone: the input is the largest activation of a feed-forward block."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        x = leaf(2, 3)
        y = OPS.relu_dropout(x, 0.0, None, 0)
    assert [t.data_ptr() for t in kept] == [y.data_ptr()] != [x.data_ptr()]
