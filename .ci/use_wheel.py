"""Uses an installed normformer_rs as a newcomer would. Arguments: its version and torch's, which must be there."""

import sys
from importlib.metadata import version
from pathlib import Path

import torch

import normformer_rs as nfrs
from normformer_rs.nn import ScaleNorm
from normformer_rs.surgery import swap_norms


def main() -> None:
    """Checks the versions, swaps the norms of a model, and makes one update. Errors: AssertionError."""
    expected, torch_version = sys.argv[1:]
    assert version("normformer_rs") == expected == nfrs.__version__, (version("normformer_rs"), nfrs.__version__)
    assert Path(nfrs.__file__).is_relative_to(sys.prefix), f"{nfrs.__file__} is not the installed package"
    assert torch.__version__.startswith(torch_version), torch.__version__
    minor = ".".join(torch.__version__.split(".")[:2])
    assert f"torch {minor}." in nfrs._core.BUILT_AGAINST, nfrs._core.BUILT_AGAINST

    torch.manual_seed(0)
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)
    swaps = swap_norms(model, "scalenorm")
    norms = [norm for layer in model.layers for norm in (layer.norm1, layer.norm2)]
    assert all(isinstance(norm, ScaleNorm) for norm in norms), swaps
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(3, 5, 64)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    assert torch.isfinite(loss)
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert (model(x) - x).square().mean() < loss
    python = ".".join(map(str, sys.version_info[:3]))
    print(f"normformer_rs {expected} works on Python {python} with torch {torch.__version__}")


if __name__ == "__main__":
    main()
