"""Models of this package written again with PyTorch's own modules and operations, for TorchScript and other tools."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import nn as nfnn
from . import plain
from .errors import InputError
from .model import Transformer
from .nn.attention import BEFORE_PRODUCTS, is_of_joined_heads
from .nn.declaration import only_norm, GROWING, Change, Gain, StreamStep, Sublayer
from .nn.layers import Layer
from .nn.mixing import DepthAttention, HyperConnection, Mixing
from .nn.norms import FIXNORM_EPS, BiasedRMSNorm, FixedScaleNorm, RowNorm
from .nn.parts import Learned, NormAt
from .nn.running import RunningNorm
from .nn.stacks import Stack

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def to_torch(model: nn.Module) -> nn.Module:
    """A copy of the model in PyTorch's own modules and operations, with equal outputs in evaluation.

    Norms become torch.nn.LayerNorm and RMSNorm where those compute the same, and small modules elsewhere; layers and
    stacks become torch.nn's where the scheme is prenorm or postnorm, and plain ones elsewhere. `torch.jit.script`,
    `torch.jit.trace`, `torch.export` and `torch.onnx.export` take the copy, and a saved TorchScript file of it needs
    PyTorch alone.

    >>> import torch
    >>> from normformer_rs.surgery import swap_norms
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8)).eval()
    >>> _ = swap_norms(model, "scalenorm")
    >>> scripted = torch.jit.script(to_torch(model))
    >>> x = torch.ones(2, 4)
    >>> torch.allclose(scripted(x), model(x))
    True

    Running statistics and branchnorm's α_t are constant in the copy, and a norm with statistics raises RuntimeError in
    training mode. Padding masks reach attention, not norms: outputs at padding differ. A Residual takes x alone. Hooks
    of this package are left out.

    Errors: InputError, with the module's name, for other hooks on what is rewritten, and for modules that have no plain
    form: subclasses of this package's, and `normformer_rs.Transformer`, which Rust computes.
    """
    made = _Writer().write(copy.deepcopy(model), "")
    for name, module in made.named_modules():
        own = next((kind for kind in type(module).__mro__ if _is_ours(kind)), None)
        if own is not None:
            raise InputError(f"{_said(name)}: {_REASONS.get(own, _NO_FORM).format(type(module).__name__)}")
        _drop_own_hooks(module)
    return made


_NO_FORM = "{} has no form in torch's own operations: replace it before to_torch"
_REASONS: dict[type, str] = {
    Transformer: "normformer_rs.{} is one call into Rust: give to_torch a model around normformer_rs.nn.Transformer; "
    "its encoder and decoder load these weights by the same names",
}


def _said(name: str) -> str:
    return name or "the model"


def _is_ours(kind: type) -> bool:
    package = __name__.partition(".")[0]
    return kind.__module__.startswith(f"{package}.") and not kind.__module__.startswith(plain.__name__)


def _drop_own_hooks(module: nn.Module) -> None:
    for hooks in _HOOKS:
        for key, hook in [*getattr(module, hooks).items()]:
            if str(getattr(hook, "__module__", "")).startswith(__name__.split(".")[0] + "."):
                del getattr(module, hooks)[key]


Grown = Callable[[int], Tensor | None]


class _Writer:
    """Rewrites a tree of modules from its leaves up; a module under two names stays one."""

    def __init__(self) -> None:
        self.made: dict[nn.Module, nn.Module] = {}

    def write(self, module: nn.Module, name: str, grown: Grown | None = None) -> nn.Module:
        """The plain module that replaces `module`. `grown`: α_t, by layer, of the stack that it stands in."""
        if module in self.made:
            return self.made[module]
        if isinstance(module, Stack):
            grown = module.alpha
        for leaf, child in [*module._modules.items()]:
            if child is not None:
                module._modules[leaf] = self.write(child, f"{name}.{leaf}".lstrip("."), grown)
        new = self._one(module, grown)
        if new is not module:
            _drop_own_hooks(module)
            if any(getattr(module, hooks) for hooks in _HOOKS):
                raise InputError(
                    f"{_said(name)}: {type(module).__name__} has hooks, which to_torch cannot keep: remove them"
                )
            new.train(module.training)
        self.made[module] = new
        return new

    def _one(self, module: Any, grown: Grown | None) -> nn.Module:
        """The plain form of one module, whose children are rewritten already."""
        if type(module) in _NORMS:
            return _NORMS[type(module)](module)
        if type(module) is nfnn.MultiheadAttention and not module.inside and module.scale is None:
            return _torchs_attention(module)
        if type(module) in (nfnn.TransformerEncoderLayer, nfnn.TransformerDecoderLayer):
            alpha_t = (grown or module.alpha)(module.place.layer)
            return _torchs_layer(module) or _plain_layer(module, alpha_t)
        if type(module) is nn.TransformerEncoderLayer and not _has_layer_norms(module):
            return _plain_torchs_layer(module)
        if type(module) in (nfnn.TransformerEncoder, nfnn.TransformerDecoder):
            return _torchs_stack(module) or _plain_stack(module)
        if type(module) is nn.TransformerEncoder and any(isinstance(x, plain.EncoderLayer) for x in module.layers):
            return plain.Encoder([*module.layers], _through(module), [], plain.One(), module.norm or nn.Identity())
        if type(module) is nfnn.Transformer:
            return _torchs_transformer(module)
        if type(module) is nfnn.Residual:
            around = _around(module, module.declared, module.dropout, module.alpha(module.place.layer))
            return plain.Residual(around, module.sublayer)
        return module


# Norms.


def _eps(norm: RowNorm) -> float:
    like = torch.empty(0) if norm.weight is None else norm.weight
    return norm.eps_for(like)


def _layer_norm(norm: nfnn.LayerNorm) -> nn.Module:
    new = nn.LayerNorm([*norm.normalized_shape], _eps(norm), elementwise_affine=False)
    new.weight, new.bias, new.elementwise_affine = norm.weight, norm.bias, norm.elementwise_affine
    return new


def _rms_norm(norm: nfnn.RMSNorm) -> nn.Module:
    if norm.zero_centred or norm.cast != "after" or norm.eps_place != "inside" or norm.part != 1:
        how = (norm.zero_centred, norm.cast, norm.eps_place == "outside", norm.measured())
        return plain.ConventionalRMSNorm(norm.weight, [*norm.normalized_shape], _eps(norm), *how)
    new = nn.RMSNorm([*norm.normalized_shape], _eps(norm), elementwise_affine=False)
    new.weight, new.elementwise_affine = norm.weight, norm.elementwise_affine
    return new


def _biased_rms_norm(norm: Any) -> nn.Module:
    if norm.bias is None:
        return _rms_norm(norm)
    return plain.BiasedRMSNorm(norm.weight, norm.bias, [*norm.normalized_shape], _eps(norm))


def _lp_norm(norm: Any) -> nn.Module:
    return plain.LpNorm(norm.weight, norm.gain(), getattr(norm, "p", 2.0), len(norm.normalized_shape), _eps(norm))


def _running_norm(norm: RunningNorm) -> nn.Module:
    return plain.RunningNorm(*norm.frozen(), norm.weight, norm.bias, norm.eps, norm.groups)


_NORMS: dict[type, Callable[[Any], nn.Module]] = {
    nfnn.LayerNorm: _layer_norm,
    nfnn.RMSNorm: _rms_norm,
    BiasedRMSNorm: _biased_rms_norm,
    nfnn.ScaleNorm: _lp_norm,
    FixedScaleNorm: _lp_norm,
    nfnn.LpNorm: _lp_norm,
    nfnn.L2Norm: lambda norm: plain.LpNorm(None, 1.0, 2.0, len(norm.normalized_shape), norm.eps),
    nfnn.Derf: lambda norm: plain.Derf(norm.alpha, norm.s, norm.weight, norm.bias),
    nfnn.DyT: lambda norm: plain.DyT(norm.alpha, norm.weight, norm.bias),
    nfnn.BatchNorm: _running_norm,
    nfnn.PowerNormV: _running_norm,
    nfnn.PowerNorm: _running_norm,
    nfnn.GroupScaling: lambda module: plain.GroupScaling(module.groups),
    nfnn.FixNormEmbedding: lambda module: plain.FixNormEmbedding(module.weight, module.scale, FIXNORM_EPS),
}


# Layers and stacks as torch.nn has them; None where it has none.


def _torchs_attention(attention: Any) -> nn.MultiheadAttention:
    attention.__class__ = nn.MultiheadAttention
    attention.__dict__.pop("inside", None)
    attention.__dict__.pop("scale", None)
    return attention


def _has_layer_norms(layer: nn.Module) -> bool:
    """All its norms are LayerNorms with weight and bias: torch.nn's encoder layer, compiled, reads both."""
    norms = [child for name, child in layer.named_children() if name.startswith("norm")]
    return all(type(norm) is nn.LayerNorm and norm.weight is not None and norm.bias is not None for norm in norms)


def _torchs_layer(layer: Any) -> nn.Module | None:
    sublayers: Iterable[Sublayer] = layer.place.sublayers
    is_bare = all(
        s.alpha == s.beta == s.scale == 1.0
        and not (s.skip or s.branch or s.inside or s.streams or s.mixing)
        and (only_norm(s.before) is None) != (only_norm(s.after) is None)
        for s in sublayers
    )
    sides = {bool(s.before) for s in sublayers}
    functions = (F.relu, F.gelu)
    is_bare &= layer.place.declared.attention is None
    if not is_bare or len(sides) > 1 or layer.activation not in functions or not _has_layer_norms(layer):
        return None
    norm_first, attention = sides.pop(), layer.self_attn
    arguments = (attention.embed_dim, attention.num_heads, layer.linear1.out_features, 0.0, layer.activation)
    options = {"batch_first": attention.batch_first, "norm_first": norm_first, "device": "meta"}
    kind = nn.TransformerEncoderLayer if len(layer.kinds) == 2 else nn.TransformerDecoderLayer
    new = kind(*arguments, **options)
    for i, sublayer in enumerate(sublayers):
        at: Any = only_norm(sublayer.before or sublayer.after)
        new._modules[f"norm{i + 1}"] = layer._modules[at.name]
    for name in new._modules:
        if not name.startswith("norm"):
            new._modules[name] = layer._modules[name]
    return new


def _torchs_stack(stack: Any) -> nn.Module | None:
    kind, of = (nn.TransformerEncoder, nn.TransformerEncoderLayer)
    if type(stack) is nfnn.TransformerDecoder:
        kind, of = nn.TransformerDecoder, nn.TransformerDecoderLayer  # type: ignore[assignment]
    has_own_way = stack.begin or stack.end or stack.streams or stack.mixing or "combine" in stack._modules
    if has_own_way or not all(type(layer) is of for layer in stack.layers):
        return None
    options = {"enable_nested_tensor": False} if kind is nn.TransformerEncoder else {}
    new = kind(stack.layers[0], 0, stack.norm, **options)  # type: ignore[arg-type]
    new.layers, new.num_layers = nn.ModuleList(stack.layers), len(stack.layers)
    return new


def _torchs_transformer(model: Any) -> nn.Module:
    empty = nn.Identity()  # because the constructor draws every matrix anew
    new = nn.Transformer(
        model.d_model, model.nhead, batch_first=model.batch_first, custom_encoder=empty, custom_decoder=empty
    )
    new.encoder, new.decoder = model.encoder, model.decoder
    return new


# Plain ones.


def _around(owner: Any, sublayer: Sublayer, dropout: nn.Module, grown: Tensor | None) -> nn.Module:
    def gains(step: Sublayer | StreamStep) -> tuple[Tensor | None, Tensor | None]:
        return _gain(owner, step.alpha, grown), _gain(owner, step.beta, grown)

    before, amid, after = (_norm(owner, at) for at in (sublayer.before, sublayer.amid, sublayer.after))
    mixing = sublayer.mixing
    if isinstance(mixing, HyperConnection):
        sizes = (mixing.streams, mixing.iterations)
        return plain.HyperAround(before, dropout, sublayer.scale, *sizes, _learned(owner, mixing))
    if isinstance(mixing, DepthAttention):
        return plain.DepthAround(before, dropout, sublayer.scale, mixing.begins_block, _learned(owner, mixing))
    alpha, beta = gains(sublayer)
    steps: list[nn.Module] = [plain.StreamStep(*gains(step)) for step in sublayer.streams]
    return plain.Around(before, amid, after, alpha, beta, dropout, steps, sublayer.scale, sublayer.adds_bottom)


def _learned(owner: nn.Module, mixing: Mixing) -> list[Tensor]:
    return [getattr(owner, what.name) for what in mixing.parameters()]


def _mixing(stack: Any) -> nn.Module:
    mixing = stack.mixing
    if mixing is None:
        return plain.One()
    learned = _learned(stack, mixing)
    return plain.DepthEnd(learned) if isinstance(mixing, DepthAttention) else plain.HyperEnd(mixing.streams, learned)


def _norm(owner: Any, at: NormAt | None) -> nn.Module:
    return nn.Identity() if at is None else getattr(owner, at.name)


def _gain(owner: nn.Module, declared: Gain, grown: Tensor | None) -> Tensor | None:
    if isinstance(declared, Learned):
        return getattr(owner, declared.name)
    if declared == GROWING:
        return grown
    like = next(owner.parameters())
    wide = torch.promote_types(like.dtype, torch.float32)
    return None if declared == 1.0 else torch.full((1,), declared, dtype=wide, device=like.device)  # type: ignore[arg-type]


def _changes(owner: Any, changes: Iterable[Change], heads: bool = False) -> nn.Module:
    """The changes at one point; `heads`: of queries, keys or values (B, heads, T, d_head)."""
    kinds: dict[str, Callable[[Any], nn.Module]] = {"shift": plain.Shift, "scale": plain.Scale}
    kinds |= {"head_scale": plain.HeadScale, "norm": lambda norm: norm}

    def plain_of(change: Change) -> nn.Module:
        if change.kind == "times":
            return plain.Times(change.what)
        if change.kind == "unit":
            return plain.LpNorm(None, 1.0, 2.0, 1, change.what)
        new = kinds[change.kind](getattr(owner, change.what.name))
        return plain.JoinedHeads(new) if heads and is_of_joined_heads(change, owner.head_dim) else new

    made = [plain_of(change) for change in changes]
    return made[0] if len(made) == 1 else nn.Sequential(*made) if made else nn.Identity()


def _attention(attention: Any) -> nn.Module:
    """`attention` is this package's with changes inside, or torch.nn's."""
    inside = getattr(attention, "inside", {})
    if not attention._qkv_same_embed_dim or attention.bias_k is not None or attention.add_zero_attn:
        return plain.TorchAttention(attention)
    points = ("input", "query", "key", "value", "after_heads", "after_output")
    changes = {point: _changes(attention, inside.get(point, ()), point in BEFORE_PRODUCTS) for point in points}
    projections = (attention.in_proj_weight, attention.in_proj_bias, attention.out_proj)
    shape = (attention.num_heads, attention.dropout, attention.batch_first)
    return plain.Attention(*projections, *shape, changes, getattr(attention, "scale", None))


def _feed_forward(layer: Any, changes: tuple[nn.Module, nn.Module, nn.Module]) -> nn.Module:
    activation = layer.activation
    if not isinstance(activation, nn.Module):
        activation = plain.Activation(activation)
    return plain.FeedForward(layer.linear1, activation, layer.dropout, layer.linear2, changes)


def _plain_layer(layer: Layer, grown: Tensor | None) -> nn.Module:
    arounds = [
        _around(layer, sublayer, getattr(layer, f"dropout{i + 1}"), grown)
        for i, sublayer in enumerate(layer.place.sublayers)
    ]
    inside = layer.place.sublayers[-1].inside
    input, before, amid = (_changes(layer, inside.get(p, ())) for p in ("input", "before_activation", "amid"))
    attentions = [_attention(getattr(layer, name)) for name in layer.attentions]
    kind: Any = plain.EncoderLayer if len(attentions) == 1 else plain.DecoderLayer
    return kind(arounds, *attentions, _feed_forward(layer, (input, before, amid)))


def _plain_torchs_layer(layer: Any) -> nn.Module:
    """torch.nn's encoder layer with norms other than LayerNorm. Compiled, the original would compute LayerNorms."""
    arounds, identity = [], nn.Identity()
    for norm, dropout in ((layer.norm1, layer.dropout1), (layer.norm2, layer.dropout2)):
        before, after = (norm, identity) if layer.norm_first else (identity, norm)
        arounds.append(plain.Around(before, identity, after, None, None, dropout))
    changes = (identity, identity, identity)
    return plain.EncoderLayer(arounds, _attention(layer.self_attn), _feed_forward(layer, changes))


def _through(stack: Any) -> list[nn.Module]:
    return [plain.Through() for _ in range(len(stack.layers) + 1)]


def _plain_stack(stack: Any) -> nn.Module:
    end = [_changes(stack, stack.end)] if stack.end else []
    end += [] if stack.norm is None else [stack.norm]
    combine, sums = stack._modules.get("combine"), _through(stack)
    if combine is not None:
        norms = [combine.norms[str(row)] if str(row) in combine.norms else nn.Identity() for row in range(len(sums))]
        sums = [plain.Sum(combine.weight, row, norm, combine.on_sums) for row, norm in enumerate(norms)]
        if combine.skips_first:
            sums[0] = plain.Remember()
    kind = plain.Encoder if type(stack) is nfnn.TransformerEncoder else plain.Decoder
    streams = [_norm(stack, at) for at in stack.streams]
    return kind([*stack.layers], sums, streams, _mixing(stack), nn.Sequential(*end), _changes(stack, stack.begin))
