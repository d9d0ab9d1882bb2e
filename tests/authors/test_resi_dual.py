"""ResiDual's layers against their authors' code in f64, over a stand-in for the fairseq layers that they extend."""

from types import SimpleNamespace

import torch
from authors_support import module

from normformer_rs import nn

WHERE = "microsoft/ResiDual", "8682f7510be105a0caf5b98a021e712f44f90ace", "resi_dual/resi_dual_layers.py"
STEP_BY_STEP = ["incremental_state=incremental_state,", "static_kv=True,", "need_head_weights=need_head_weights,\n"]
CHANGES = dict.fromkeys(STEP_BY_STEP, "") | {"self.self_attn._get_input_buffer(incremental_state)": "None"}
SCALES = {"enc_res_input_norm_scale": 1.0, "dec_res_input_norm_scale": 1.0}  # the authors' defaults


class Layer(torch.nn.Module):
    """Its modules are in the order of ours. What it does not have is an option, and None: off."""

    activation_fn = staticmethod(torch.relu)
    dropout_module = activation_dropout_module = staticmethod(lambda x: x)

    def __init__(self, cfg, *rest):
        super().__init__()
        self.cfg = cfg
        for name in cfg.attentions:
            setattr(self, name, torch.nn.MultiheadAttention(8, 2))
        self.fc1, self.fc2 = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)
        for name in [*cfg.attentions, "final"]:
            setattr(self, f"{name}_layer_norm", torch.nn.LayerNorm(8))

    def __getattr__(self, name):
        return self._modules.get(name)


def test_resi_dual():
    """An encoder and a decoder of two layers each, with padding on both sides. The test itself adds x + N(s)."""
    fairseq = SimpleNamespace(TransformerEncoderLayerBase=Layer, TransformerDecoderLayerBase=Layer)
    authors = module(*WHERE, CHANGES, fairseq__modules__transformer_layer=fairseq)
    cfgs = [SimpleNamespace(attentions=names, **SCALES) for names in (["self_attn"], ["self_attn", "encoder_attn"])]
    kinds = zip((authors.ResiDualEncoderLayer, authors.ResiDualDecoderLayer), cfgs)
    encoder, decoder = ([kind(cfg), kind(cfg), torch.nn.LayerNorm(8)] for kind, cfg in kinds)
    theirs = torch.nn.ModuleList([*encoder, *decoder]).double()
    ours = nn.Transformer(8, 2, 2, 2, 12, 0.0, residual="resi-dual").double()
    for p, other in zip(theirs.parameters(), ours.parameters(), strict=True):
        other.data.copy_(torch.nn.init.normal_(p, std=0.5))
    source, target = (torch.randn(6, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    source_pads, target_pads = torch.arange(6) >= torch.tensor([[[6], [4], [5]], [[6], [6], [3]]])
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    y = ours(source, target, None, future, None, source_pads, target_pads, source_pads)[~target_pads.T]
    x = s = source
    for layer in encoder[:2]:
        x, s = layer((x, s), source_pads)
    memory, x, s = x + encoder[2](s), target, target
    for layer in decoder[:2]:
        (x, s), *_ = layer((x, s), memory, source_pads, self_attn_mask=future, self_attn_padding_mask=target_pads)
    expected = (x + decoder[2](s))[~target_pads.T]
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    found = torch.autograd.grad(y.square().sum(), [source, target, *ours.parameters()])
    wanted = torch.autograd.grad(expected.square().sum(), [source, target, *theirs.parameters()])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
