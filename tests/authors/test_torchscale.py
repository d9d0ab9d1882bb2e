"""DeepNorm and Sub-LN against their authors' encoders and decoders, torchscale."""

from unittest.mock import MagicMock

import pytest
import torch
from authors_support import module

from normformer_rs import nn

SIZES, DEPTHS = {"embed_dim": 12, "attention_heads": 3, "ffn_embed_dim": 20}, {"encoder": 3, "decoder": 2}
AUTHORS = ("microsoft/torchscale", "4d1e0e82e5adf86dd424f1463192635b73fc8efc")
PACKAGE, SLIP = {"from .": "from torchscale.component."}, {"/ 1.15": "/ 0.87"}
CHANGES = {"multiway_network": {}, "multihead_attention": PACKAGE | {"torch.float32": "torch.float64"}}
CHANGES |= {"feedforward_network": PACKAGE | {"x.float()": "x.double()"}}
UNUSED = ["droppath", "flash_attention", "relative_position_bias", "xpos_relative_position"]
UNUSED += ["xmoe__global_groups", "xmoe__moe_layer", "xmoe__routing"]
NAMES = {"self_attn_layer_norm": "norm1", "encoder_attn_layer_norm": "norm2", "q_proj.": "in_proj_", "ffn.fc": "linear"}
NAMES |= {"inner_attn_ln": "inner_norm", "ffn.ffn_layernorm": "inner_norm", "encoder_attn": "multihead_attn"}
MODELS, SCHEMES = ["encoder", "decoder", "encoder-decoder"], ["deepnorm", "subln"]
pytestmark = [pytest.mark.parametrize("model", MODELS), pytest.mark.parametrize("scheme", SCHEMES)]


def rearrange(x, pattern, h=None):  # what the authors use of einops
    split = {"b l (h d) -> (b h) l d": lambda: x.unflatten(2, (h, -1)).transpose(1, 2).flatten(0, 1)}
    split |= {"(b h) l d -> b l (h d)": lambda: x.unflatten(0, (-1, h)).transpose(1, 2).flatten(2)}
    split |= {"(b h) t s -> b h t s": lambda: x.unflatten(0, (-1, h)), "b h t s -> (b h) t s": lambda: x.flatten(0, 1)}
    return split[pattern]()


def their_model(model, scheme):
    """Returns the authors' stacks, the decoder post-norm under deepnorm and the encoder's beta right (spec.md, 3.6)."""
    torch.manual_seed(0)
    stand_in = MagicMock(rearrange=rearrange)
    beside = {f"torchscale__component__{name}": stand_in for name in UNUSED} | {"einops": stand_in}
    beside |= {"fairscale__nn": stand_in, "torchscale__architecture__utils": stand_in}
    for name, changes in CHANGES.items():
        made = module(*AUTHORS, f"torchscale/component/{name}.py", changes, **beside)
        beside[f"torchscale__component__{name}"] = made
    sizes = {f"{stack}_{name}": size for stack in DEPTHS for name, size in (SIZES | {"layers": DEPTHS[stack]}).items()}
    options = {name: name == scheme for name in SCHEMES} | {"decoder_normalize_before": scheme != "deepnorm"}
    config = module(*AUTHORS, "torchscale/architecture/config.py").EncoderDecoderConfig(**sizes, **options)
    stacks = torch.nn.ModuleDict()
    for stack in model.split("-"):
        authors = module(
            *AUTHORS, f"torchscale/architecture/{stack}.py", SLIP if stack == "encoder" else None, **beside
        )
        stacks[stack] = getattr(authors, stack.title())(config, is_encoder_decoder="-" in model)
    return stacks


def our_model(model, scheme, init=None):
    torch.manual_seed(0)
    given = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "residual": scheme, "init": init}
    if model == "encoder-decoder":
        return nn.Transformer(12, 3, *DEPTHS.values(), 20, **given)
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(*SIZES.values(), **given), DEPTHS[model])
    return torch.nn.ModuleDict({model: stack})


def in_our_names(tensors):
    """Returns the authors' parameters, or their gradients, in our names."""
    ours = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            tensor = torch.cat([tensors[name.replace("q_proj", f"{letter}_proj")] for letter in "qkv"])
        last = "norm3" if name.replace("final_layer_norm", "encoder_attn_layer_norm") in tensors else "norm2"
        for old, new in ({"final_layer_norm": last} | NAMES | {"layer_norm": "norm"}).items():
            name = name.replace(old, new)
        ours[name] = tensor
    return {name: tensor for name, tensor in ours.items() if "k_proj" not in name and "v_proj" not in name}


def test_outputs_and_gradients(model, scheme):
    theirs, ours = their_model(model, scheme).double(), our_model(model, scheme).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ours.load_state_dict(in_our_names(theirs.state_dict()))
    xs = [torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True) for _ in model.split("-")]
    ys = [x.detach().clone().requires_grad_() for x in xs]
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    memory = theirs["encoder"](None, token_embeddings=ys[0]) if "encoder" in model else None
    if model == "encoder":
        outputs = [ours["encoder"](*xs), memory["encoder_out"]]
    else:
        outputs = [ours(*xs, tgt_mask=mask) if memory else ours["decoder"](*xs, mask)]
        outputs += [theirs["decoder"](ys[-1], token_embeddings=ys[-1], encoder_out=memory, features_only=True)[0]]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-11)
    torch.autograd.backward(outputs, [torch.randn_like(outputs[0])] * 2)
    torch.testing.assert_close([x.grad for x in xs], [y.grad for y in ys], rtol=0, atol=1e-11)
    found, expected = ({name: p.grad for name, p in each.named_parameters()} for each in (ours, theirs))
    torch.testing.assert_close(found, in_our_names(expected), rtol=0, atol=1e-11)


def test_factors_of_first_values(model, scheme):
    """Matrices divided by those of the same seed without the scheme: nn.Linear's of the authors, and our Xavier's."""
    ours, plain = (dict(our_model(model, scheme, init).named_parameters()) for init in (None, "xavier"))
    theirs, their_plain = (in_our_names(dict(their_model(model, name).named_parameters())) for name in (scheme, None))
    for name in (name for name, value in ours.items() if value.ndim == 2):
        torch.testing.assert_close(ours[name] / plain[name], theirs[name] / their_plain[name], rtol=0, atol=1e-6)
