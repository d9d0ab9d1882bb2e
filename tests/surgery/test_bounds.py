"""Numbers from a caller of `swap_residuals` are ones that it can have, or refused at once."""

import numpy as np
import pytest
from surgery_support import torchs_encoder, torchs_transformer

import normformer_rs as nfrs
from normformer_rs.nn.place import in_short
from normformer_rs.surgery import swap_residuals

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:.* look trained")

NO_DEPTH = [10**9, 10_001, -1, 0, 1, 2**70, 10**5000, 2.0, float("inf"), True, "3"]
NO_DEPTH += [(2,), [3] * 10**6, (2**40, 3), (2, True)]


@pytest.mark.parametrize("depth", NO_DEPTH, ids=in_short)
@pytest.mark.parametrize("make", [torchs_encoder, torchs_transformer])
def test_depths_that_no_stack_has(make, depth):
    with pytest.raises(nfrs.InputError, match=r"^depth must ") as refusal:
        swap_residuals(make(), "deepnorm", depth=depth)
    assert len(str(refusal.value)) < 200


def test_depths_that_a_stack_has():
    for make, depth in (
        (torchs_encoder, 7),
        (torchs_encoder, np.int64(7)),
        (torchs_transformer, 7),
        (torchs_transformer, (7, 7)),
        (torchs_transformer, [7, 7]),
    ):
        model = make()
        swap_residuals(model, "deepnorm", depth=depth)
        assert {m.place.depth for m in model.modules() if getattr(m, "place", None) is not None} == {7}
    with pytest.raises(nfrs.InputError, match="depth must be one number: the model has no decoder"):
        swap_residuals(torchs_encoder(), "deepnorm", depth=(7, 7))


@pytest.mark.parametrize("count", [10**9, 2**62, 2**70, 0, -1, 2.5, True])
def test_numbers_of_streams(count):
    for scheme, option in (("hyper-connections", "hyper_connections_streams"), ("mhc", "mhc_streams")):
        with pytest.raises(nfrs.InputError, match=f"{option} must"):
            swap_residuals(torchs_encoder(), scheme, **{option: count})
