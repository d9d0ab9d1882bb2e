"""Coordinate checks, which measure the size of activations after a few updates, at several widths or depths."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .._optional import require
from ..config import TransformerConfig
from ..errors import InputError
from ..loop.model import Transformer
from ..loop.parametrisation import last_stack, param_groups
from ..pictures.curves import literal
from .observed import observe

PLACES = ("embedding", "first layer", "middle layer", "last layer", "logits", "scores", "mixing scores")
Made = tuple[nn.Module, Callable[[], Tensor]]
"""A model, and a function that runs it on its batch and returns the loss."""
_GRID = {"color": "#e4e4e4", "linewidth": 0.8}


@dataclass(frozen=True)
class CoordinateCheck:
    """The mean |x| at seven places of models that differ in one size."""

    over: str
    """The size that differs, "width" or "depth"."""
    values: tuple[int, ...]
    """The widths, or the layers of each stack."""
    sizes: NDArray[np.float64]
    """(values, updates + 1, 7): before training and after each update, the geometric mean over seeds of the mean |x|
    of the decoder's input, of its first, middle and last layer's output, of the logits, of the scores before
    attention's softmax, and of the scores from which a connection's weights are computed; 0 if a model has none."""
    parametrisation: str

    def slopes(self, update: int = -1) -> dict[str, float]:
        """Returns, for each place, the slope of log size against log width or depth after that update (0: before the
        first); it is 0 if sizes do not depend on it. Places that the models lack, or with a size of 0, are left out."""
        x = np.log(self.values)
        sizes_by_place = {place: self.sizes[:, update, i] for i, place in enumerate(PLACES)}
        # polyfit returns the slope first, then the intercept.
        return {place: float(np.polyfit(x, np.log(sizes), 1)[0])
                for place, sizes in sizes_by_place.items() if sizes.all()}  # fmt: skip

    def save(self, path: str | PathLike[str]) -> None:
        """Saves a picture: a panel for each place, a line for each update, both axes logarithmic.

        Errors: ImportError without matplotlib.
        """
        require("matplotlib", "the picture of a coordinate check")
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        updates, slopes = self.sizes.shape[1], self.slopes()
        figure = Figure(figsize=(2.6 * len(slopes), 3.4), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes: Any = figure.subplots(1, len(slopes))
        for axis, place in zip(axes, slopes):
            i = PLACES.index(place)
            shown = [update for update in range(updates) if self.sizes[:, update, i].all()]
            for update in shown:
                # Later updates are darker. The palest 15 % of the colours are left out, because they are hard to see.
                color = colormaps["viridis"](0.85 * (1 - update / max(updates - 1, 1)))
                axis.plot(self.values, self.sizes[:, update, i], "o-", color=color, markersize=3, label=str(update))
            axis.set_xscale("log", base=2)
            axis.set_yscale("log", base=10)
            low, high = self.sizes[:, shown, i].min(), self.sizes[:, shown, i].max()
            # There is a margin of a fifth beyond the values. The axis spans at least a decade (3.2² ≈ 10), so that flat
            # lines look flat.
            middle = (low * high) ** 0.5
            axis.set_ylim(min(low / 1.2, middle / 3.2), max(high * 1.2, middle * 3.2))
            axis.set_xticks(self.values, [str(value) for value in self.values])
            axis.set_title(f"{place}   slope {slopes[place]:+.2f}", loc="left", fontsize=9)
            axis.set_xlabel(self.over)
            axis.grid(True, **_GRID)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel("mean |x|")
        axes[0].legend(frameon=False, fontsize=8, title="updates", title_fontsize=8)
        title = f"{self.parametrisation}   coordinate check over {self.over}"
        figure.suptitle(title, fontsize=11, x=0.01, ha="left", weight="bold")
        literal(figure).savefig(fspath(path))


def coordinate_check(
    config: TransformerConfig | Callable[[int, int], Made],
    *,
    widths: Sequence[int] = (),
    depths: Sequence[int] = (),
    updates: int = 3,
    lr: float = 1e-2,
    weight_decay: float = 0.0,
    eps: float = 1e-8,
    seeds: Sequence[int] = (1, 2, 3),
    sentences: int = 4,
    length: int = 16,
    muon_scale: str | None = None,
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
) -> CoordinateCheck:
    """Trains models of several widths, or depths, for a few updates on one batch, and measures sizes.

    Under a correct parametrisation, activations keep their size at every width (Yang et al. 2022, App D.1) and depth
    (Dey et al. 2025, Fig 7): `slopes` are near 0. Logits may shrink with width at first, and their slope then
    approaches 0 from below.

    >>> import normformer_rs as nfrs
    >>> from normformer_rs import analysis
    >>> shape = {"d_model": 8, "d_ff": 16, "heads": 2, "decoder_layers": 1, "architecture": "decoder-only"}
    >>> config = nfrs.TransformerConfig(vocab_size=20, **shape, parametrisation="mup", base_width=8)
    >>> check = analysis.coordinate_check(config, widths=(8, 16), updates=1, seeds=(1,))
    >>> check.over, check.values, check.sizes.shape
    ('width', (8, 16), (2, 2, 7))

    Any other model is made by a function of its size and a seed, which also returns its loss. Here the embedding's
    size falls with the width, and AdamW then moves each layer by more in wide models:

    >>> from torch import nn
    >>> def make(width, seed):
    ...     torch.manual_seed(seed)
    ...     layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, norm_first=True, batch_first=True)
    ...     model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(4, 8, width)
    ...     return model, lambda: (model(x) - 1).square().mean()
    >>> slopes = analysis.coordinate_check(make, widths=(16, 32, 64), seeds=(1, 2)).slopes()
    >>> [*slopes], slopes["last layer"] > 0.1
    (['embedding', 'first layer', 'middle layer', 'last layer', 'logits'], True)

    Args:
        config: a model; its dropout is turned off, and its batch is one of random tokens. A width changes d_ff in
            proportion and the number of heads so that d_head stays; a depth changes the layers of both stacks. Or a
            function of size and seed that returns a model of any class, without dropout, and a function without
            arguments that runs this model on its batch and returns the loss. The check then measures the model's last
            list of blocks, and its output (the output's `logits`, if there are any).
        widths, depths: at least two sizes, for one of the two.
        updates: the number of AdamW's updates, β = (0.9, 0.98), with `param_groups(model, lr, weight_decay=…, eps=…)`.
        groups: a function that returns the groups of parameters instead; `lr`, `weight_decay` and `eps` are not used.
        seeds: the seeds of models and batches.
        sentences, length: the size of the batch of random tokens.
        muon_scale: "spectral" or "rms" trains the matrices of layers by `torch.optim.Muon` with this scale of its steps
            and the same learning rate, and the other parameters by AdamW; None: AdamW trains all.

    Returns sizes, slopes and a picture (`save`). Errors: InputError for sizes that do not fit, and for a model without
    a list of blocks.
    """
    if bool(widths) == bool(depths) or len(widths or depths) < 2:
        raise InputError(f"give two or more widths or two or more depths, not both; got {widths!r} and {depths!r}")
    over, values = ("width", widths) if widths else ("depth", depths)
    if len({*values}) < len(values):
        raise InputError(f"{over}s must be different numbers; got {values!r}")
    if not seeds:
        raise InputError("seeds must be one or more numbers; got none")
    group_options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "eps": eps}
    if muon_scale is not None:
        group_options |= {"optimizer": "muon", "muon_scale": muon_scale}
    # The picture calls the parametrisation by this name.
    name = config.parametrisation if isinstance(config, TransformerConfig) else "groups" if groups else "standard"

    def log_sizes(value: int, seed: int) -> NDArray[np.float64]:
        """Returns the logarithms of the sizes of one model, (updates + 1, 7)."""
        if isinstance(config, TransformerConfig):
            model, loss, sizes = _own(_sized(config, over, value), seed, (sentences, length))
        else:
            model, loss = config(value, seed)
            sizes = _of_blocks(model, loss)
        parameter_groups = param_groups(model, **group_options) if groups is None else groups(model)
        return _trained(model, loss, sizes, _optimizers(parameter_groups, muon_scale), updates)

    # The exponential of the logarithms' mean is the geometric mean over seeds.
    sizes = [np.mean([log_sizes(value, seed) for seed in seeds], axis=0) for value in values]
    return CoordinateCheck(over, tuple(values), np.exp(np.stack(sizes)), name)


def _sized(config: TransformerConfig, over: str, value: int) -> TransformerConfig:
    """Returns the configuration without dropout, and with the size `value` of what `over` names: "width" or "depth".
    Errors: InputError for a width that does not fit."""
    rates = dict.fromkeys(("dropout", "embedding_dropout", "attention_dropout", "activation_dropout"), 0.0)
    if config.attention == "tensorized":  # this kind of attention has no dropout
        del rates["attention_dropout"]
    if over == "depth":
        return config.replace(**rates, encoder_layers=value, decoder_layers=value)
    d_head = config.d_model // config.heads
    if value % d_head or value * config.d_ff % config.d_model:
        raise InputError(
            f"widths must be multiples of d_head = {d_head} that leave d_ff/d_model = {config.d_ff}/{config.d_model} "
            f"as it is; got {value}"
        )
    d_ff = value * config.d_ff // config.d_model
    return config.replace(**rates, d_model=value, d_ff=d_ff, heads=value // d_head)


def _own(
    config: TransformerConfig, seed: int, shape: tuple[int, int]
) -> tuple[nn.Module, Callable[[], Tensor], Callable[[], NDArray[np.float64]]]:
    """Returns a model of this package, a function that returns its loss on a batch of random tokens, and one that
    returns the seven sizes of `PLACES` on that batch. `shape` is the batch's (sentences, length)."""
    model = Transformer(config, seed=seed, device="cpu").train()
    generator = torch.Generator().manual_seed(seed)
    # Ids below 4 belong to special tokens.
    source, target_input, target = (torch.randint(4, config.vocab_size, shape, generator=generator) for _ in range(3))
    encoder_input = source if config.architecture == "encoder-decoder" else None

    def loss() -> Tensor:
        return nn.functional.cross_entropy(model(encoder_input, target_input).flatten(0, 1), target.flatten())

    return model, loss, lambda: _sizes(model, encoder_input, target_input)


def _of_blocks(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], NDArray[np.float64]]:
    """Returns a function that runs the loss and returns the seven sizes: of the input and the outputs of the last list
    of blocks, and of the model's output; 0 for both kinds of scores."""
    blocks = last_stack(model)

    def sizes() -> NDArray[np.float64]:
        """Runs the loss once, and returns the seven sizes of its last pass through the blocks."""
        # In the order of the last pass: the size of the first block's input, and that of each block's output.
        block_sizes: list[float] = []
        logits = [0.0]  # one number, in a list that the hook `ended` can write to

        def entered(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            """Stores the size of the first block's input."""
            # A shared first block also runs later in a pass. A pass begins only if no size is stored yet, or those of a
            # whole pass.
            if len(block_sizes) in (0, len(blocks) + 1):
                block_sizes[:] = [_size(args or tuple(kwargs.values()))]

        def left(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            """Stores the size of a block's output."""
            block_sizes.append(_size(output))

        def ended(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            """Stores the size of the model's output."""
            logits[0] = _size(getattr(output, "logits", output))

        handles = [blocks[0].register_forward_pre_hook(entered, with_kwargs=True), model.register_forward_hook(ended)]
        handles += [block.register_forward_hook(left) for block in dict.fromkeys(blocks)]
        try:
            with torch.no_grad():
                loss()
        finally:
            for handle in handles:
                handle.remove()
        if len(block_sizes) < 2:
            raise InputError(f"the loss did not run the blocks of {type(model).__name__}: expected it to run the model")
        last = len(block_sizes) - 1
        # The order is that of `PLACES`. Only this package's own models report scores, so both kinds are 0 here.
        return np.array(
            [block_sizes[0], block_sizes[1], block_sizes[(last + 1) // 2], block_sizes[last], logits[0], 0.0, 0.0]
        )

    return sizes


def _size(output: Any) -> float:
    """Returns the mean |x| of a tensor, or of the first tensor in a tuple or a dictionary."""
    if isinstance(output, dict):
        output = tuple(output.values())
    if not isinstance(output, Tensor):
        output = next(item for item in output if isinstance(item, Tensor))
    return float(output.detach().abs().double().mean())


def _trained(
    model: nn.Module,
    loss: Callable[[], Tensor],
    sizes: Callable[[], NDArray[np.float64]],
    optimizers: list[torch.optim.Optimizer],
    updates: int,
) -> NDArray[np.float64]:
    """Trains the model for some updates. `loss` and `sizes` run it on its batch. Returns the logarithms of the sizes
    before training and after each update, (updates + 1, 7)."""
    measured = [sizes()]
    for _ in range(updates):
        model.zero_grad()
        loss().backward()
        for optimizer in optimizers:
            optimizer.step()
        measured.append(sizes())
    with np.errstate(divide="ignore"):  # the logarithm of a size of 0 is −∞
        return np.log(measured)


def _optimizers(groups: list[dict[str, Any]], muon_scale: str | None) -> list[torch.optim.Optimizer]:
    """Returns AdamW, and Muon for the groups that name it. Errors: InputError if `muon_scale` does not go with them."""
    of_muon = [group for group in groups if group.get("optimizer") == "muon"]
    others = [group for group in groups if group.get("optimizer") != "muon"]
    # torch.optim.Muon calls the two scales by these names.
    torch_names = {"spectral": "original", "rms": "match_rms_adamw"}
    if of_muon and muon_scale not in torch_names:
        raise InputError(f'the groups name Muon: expected muon_scale="rms" or "spectral", got {muon_scale!r}')
    if muon_scale is not None and not of_muon:
        raise InputError(f'no group names Muon, so muon_scale = "{muon_scale}" would do nothing: leave it out')
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, betas=(0.9, 0.98))]
    if of_muon:
        optimizers.append(torch.optim.Muon(of_muon, adjust_lr_fn=torch_names[str(muon_scale)]))
    return optimizers


@torch.no_grad()
def _sizes(model: Transformer, source: Tensor | None, target_input: Tensor) -> NDArray[np.float64]:
    """Returns the seven sizes of this package's model, in the order of `PLACES`."""
    seen = observe(model, source, target_input)["decoder"]
    # outputs[0] is the size of the decoder's input, outputs[i] that of the output of layer i − 1.
    outputs, last = seen.sizes, len(seen.sizes) - 1
    logits = model(source, target_input).abs().mean().item()
    scores = [float(kind.mean()) if len(kind) else 0.0 for kind in (seen.scores, seen.mixing)]
    return np.array([outputs[0], outputs[1], outputs[(last + 1) // 2], outputs[last], logits, *scores])
