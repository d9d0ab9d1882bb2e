"""The Transformer as a `torch.nn.Module`; Rust computes it."""

import textwrap
from collections.abc import Callable, Iterator
from os import PathLike, fspath
from typing import Any

import torch
from torch import Tensor, nn

from .. import _core
from ..config import TransformerConfig
from ..declarations.norm import options_here
from ..errors import InputError
from ..nn.averages import Steered, Steering
from ..nn.step_hooks import first_trained, follow_steps

PAD = 1
"""The id of padding."""
EXPORT = (
    "normformer_rs.Transformer is one call into Rust, which torch.export cannot see into: export a model around "
    "normformer_rs.nn.Transformer; its encoder and decoder load these weights by the same names"
)
_SHOWN = ("vocab_size", "d_model", "d_ff", "heads", "encoder_layers", "decoder_layers", "norm", "residual")
"""The options that `repr` always shows; others are shown if they are not at their defaults."""


class Transformer(Steered):
    """An encoder-decoder or decoder-only Transformer.

    Parameters have torch.nn.Transformer's names (`encoder.layers.0.self_attn.in_proj_weight`, …) and are initialised as
    `config.init` says. They are ordinary parameters: `state_dict`, `.to()`, `deepcopy`, pickle and optimizers work as
    for any module.

    Args:
        config: the model; `config.vocab_size` must be given.
        seed: the seed of the initial values; None to draw one from torch's generator, so that `torch.manual_seed` fixes
            them.
        precision: "bf16" for bf16 products whatever the parameters are; "f32" for products in the parameters' type.
        device: the parameters' device; None for torch's default device.

    Errors: InputError if options contradict each other.
    """

    config: TransformerConfig
    precision: str
    _heard: Callable[[str, str, int, list[Tensor]], None] | None = None
    """Called with what each pass computes: the event ("pass" as it begins), the parameter's or norm's name, a row, and
    tensors."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        seed: int | None = None,
        precision: str = "f32",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config, self.precision = config, precision
        self._options = options_here(config)  # computed once, because a user's own scheme is called for every layer
        if seed is None:
            seed = int(torch.randint(2**63 - 1, (), device="cpu"))
        if not 0 <= seed < 2**64:
            raise InputError(f"seed must lie in [0, 2⁶⁴), got {seed}")
        device = torch.get_default_device() if device is None else device
        for name, tensor in _core.parameters(self._options, seed, str(device)):
            self._place(name, tensor)
        self._follow()

    def _place(self, name: str, tensor: Tensor) -> None:
        """Registers a tensor under its dotted name, as a parameter or a buffer, and creates the missing containers."""
        *path, leaf = name.split(".")
        module: nn.Module = self
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]  # type: ignore[assignment]
        if tensor.requires_grad:
            module.register_parameter(leaf, nn.Parameter(tensor.detach()))
        else:
            module.register_buffer(leaf, tensor)

    def forward(self, source: Tensor | None, target_input: Tensor) -> Tensor:
        """Returns the logits (B, T, V) of the next target token.

        Args:
            source: (B, S) token ids, padded with 1 on either side; None for a decoder-only model.
            target_input: (B, T) token ids, padded with 1: the target shifted right.

        Logits at padding have no meaning. In training mode dropout masks follow one draw from torch's generator.
        Errors: InputError under torch.export.
        """
        if torch.compiler.is_exporting():
            raise InputError(EXPORT)
        self.take_over()  # a copy with averaged weights gets the step counters of the model that trains
        names, tensors, precision = self._tensors()
        seed = self._draw(tensors[0].device) if self.training else None
        if self._heard is not None:
            self._heard("pass", "", 0, [])  # says that a pass begins; this event has no name, row or tensors
        return _core.forward(self._options, names, tensors, source, target_input, seed, precision, self._heard)

    def profile(self, source: Tensor | None, target_input: Tensor) -> None:
        """Sets the gains that the residual scheme computes from one training batch, with dropout, before training
        begins.

        ω_i = r, r ← √(Var(ω_i x_i) + Var f_i) down each stack from r = 1 (Liu et al. 2020). The Rust loop does this
        itself before its first update. Errors: InputError if the scheme has no such gains.
        """
        names, tensors, precision = self._tensors()
        seed = self._draw(tensors[0].device)
        _core.profile(self._options, names, tensors, source, target_input, seed, precision)

    def set_num_updates(self, update: int) -> None:
        """Sets the step counters t of growing schemes (branchnorm) and fading norms (prepbn) to `update`, the number of
        the next update; the first is 1. Steps of torch's optimizers advance t automatically."""
        for part in self._growing():
            part.t.fill_(update)
        self.told()  # the counters fit the weights, so an average of the weights may use them

    def followed(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yields (parameter, t) for each stack or norm with a step counter t: each optimizer step on the parameter adds
        one to t. The parameter is a trained one of the stack or norm, or else of the whole model."""
        for part in self._growing():
            own, of_model = first_trained(part.parameters()), first_trained(self.parameters())
            parameter = of_model if own is None else own
            if parameter is not None:
                yield parameter, part.t

    def steering(self) -> Steering:
        """Returns (parameter, t) for each stack or norm with a step counter t. The parameter is its first matrix, or
        else its first parameter."""
        pairs = []
        for part in self._growing():
            parameters = list(part.parameters())
            if parameters:
                pairs.append((next((p for p in parameters if p.dim() > 1), parameters[0]), part.t))
        return pairs

    def _growing(self) -> list[Any]:
        """Returns the modules with a step counter t: stacks of growing schemes, and fading norms."""
        return [part for part in self.modules() if "t" in part._buffers]

    def _follow(self) -> None:
        """Makes the step counters, if there are any, advance with each step of one of torch's optimizers."""
        if self._growing():
            self.remember_copies()
            follow_steps(self)

    def __getstate__(self) -> dict[str, Any]:
        # `_heard` listens to this object alone, not to its copies.
        return {name: value for name, value in self.__dict__.items() if name != "_heard"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._options = options_here(self.config)
        self._follow()

    def _parts(self) -> dict[str, tuple[str, str]]:
        """Returns, by the parameter's name, its role in a parametrisation ("hidden-matrix", …) and what its products
        are summed over ("nothing", "depth", …)."""
        names, tensors, _ = self._tensors()
        return _core.parameter_parts(self._options, names, tensors)

    def _unit_multipliers(self) -> dict[str, tuple[float, float, float]]:
        """Returns each parameter's multipliers of rate, weight decay and ε under u-mup."""
        names, tensors, _ = self._tensors()
        return _core.unit_multipliers(self._options, names, tensors)

    def _unit_dimensions(self) -> dict[str, int]:
        """Returns, for each matrix whose vectors `unit_matrices` keeps at length one, the dimension along which these
        vectors lie."""
        names, tensors, _ = self._tensors()
        return _core.unit_dimensions(self._options, names, tensors)

    def _tensors(self) -> tuple[list[str], list[Tensor], str]:
        """Returns the names and values of all parameters and buffers, and the precision of matrix products."""
        named = dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers(remove_duplicate=False))
        names, tensors = list(named), list(named.values())
        return names, tensors, _precision(tensors[0].dtype) if self.precision == "f32" else self.precision

    @staticmethod
    def _draw(device: torch.device) -> Tensor:
        """Returns the int64 tensor (seed, update, micro-batch) from which dropout masks are drawn. Here only the seed
        is set, from torch's generator; the other two are 0."""
        seed = torch.zeros(3, dtype=torch.int64, device=device)
        seed[0].random_(0, 2**63 - 1)
        return seed

    def extra_repr(self) -> str:
        """Lists the model's shape, norm and residual scheme, and the options that are not at their defaults, one per
        line."""
        lines = []
        for field in self.config.FIELDS:
            value = getattr(self.config, field.name)
            if field.name in _SHOWN or value != field.default:
                lines.append(f"{field.name}={value!r},")
        return "\n".join([*lines, f"precision={self.precision!r}"])

    def __repr__(self) -> str:
        # The options describe the model better than torch's list of submodules, which are empty containers here.
        return f"{type(self).__name__}(\n" + textwrap.indent(self.extra_repr(), "  ") + "\n)"

    @classmethod
    def from_checkpoint(
        cls,
        directory: str | PathLike[str],
        checkpoint: str | int = "best",
        *,
        precision: str = "f32",
        device: torch.device | str | None = None,
    ) -> "Transformer":
        """Loads the model that a run has saved in `directory`, in evaluation mode.

        Args:
            directory: the `output` of training.
            checkpoint: best, last, average, an update's number, or a name in `directory`/checkpoints.

        Errors: InputError if there is none, if it is damaged, or if its weights are another model's.
        """
        config, state = load_run(directory, checkpoint)
        model = cls(config, seed=0, precision=precision, device=device)
        model.load_state_dict(state)
        return model.eval()


def _precision(dtype: torch.dtype) -> str:
    """Returns the extension module's name for a floating-point type: f32, f64 or bf16."""
    names = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16"}
    if dtype not in names:
        raise InputError(f"parameters must be float32, float64 or bfloat16; got {dtype}: use .to(torch.float32)")
    return names[dtype]


def load_run(directory: str | PathLike[str], checkpoint: str | int) -> tuple[TransformerConfig, dict[str, Tensor]]:
    """Loads the options and tensors of a run's checkpoint, by its name or its update's number.

    Errors: InputError that lists the existing checkpoints, or says what is damaged. An option that names code, such as
    file.py:Class, counts as damage, because no run writes one.
    """
    options, named = _core.load_model(fspath(directory), str(checkpoint))
    return TransformerConfig.from_json(options), dict(named)
