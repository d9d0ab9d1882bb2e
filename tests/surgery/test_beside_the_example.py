"""What an example cannot show is refused, or is an error of the call that shows it; what it can show is right."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from normformer_rs import InputError, schemes
from normformer_rs.surgery import proof, swap_residuals
from normformer_rs.surgery.blocks import structure_of

D = 8


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Pre-norm, with two feed-forwards."""

    def __init__(self, feed_forward=None):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.f1, self.f2 = FeedForward(), feed_forward or FeedForward()

    def forward(self, x):
        x = x + self.f1(self.n1(x))
        return x + self.f2(self.n2(x))


class Model(nn.Module):
    def __init__(self, kind=Block, depth=2):
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(kind() for _ in range(depth)), nn.LayerNorm(D)

    def stack(self, x, *rest):
        for block in self.blocks:
            x = block(x, *rest)
        return x

    def forward(self, x, *rest):
        return self.norm(self.stack(x, *rest))


def numbers(*shape):
    return torch.randn(*(shape or (2, 5, D)), dtype=torch.float64)


def built(of, **options):
    """A model of that class, or with blocks of it."""
    torch.manual_seed(0)
    return (of(**options) if issubclass(of, Model) else Model(of, **options)).double().eval()


def refused(model, scheme, match, *example):
    state, kinds = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    with pytest.raises(InputError, match=match):
        swap_residuals(model, scheme, init=None, example=example or (numbers(),))
    assert [type(m) for m in model.modules()] == kinds
    assert all(torch.equal(t, state[key]) for key, t in model.state_dict().items())


def swapped(model, scheme, *example):
    swap_residuals(model, scheme, init=None, example=example or (numbers(),))
    return model


def mean_square(x):
    return x.pow(2).mean(-1, keepdim=True) + 1e-6


FORMULAS = {
    "** -0.5": lambda x: x * mean_square(x) ** -0.5,
    "pow": lambda x: x * torch.pow(mean_square(x), -0.5),
    "linalg": lambda x: x / (torch.linalg.norm(x, dim=-1, keepdim=True) + 1e-6),
    "multiply": lambda x: torch.multiply(x, torch.rsqrt(mean_square(x))),
    "subtract": lambda x: torch.subtract(x, x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-6).sqrt(),
    "native": lambda x: torch.native_layer_norm(x, [D], None, None, 1e-5)[0],
    "einsum": lambda x: x * torch.rsqrt(torch.einsum("...d,...d->...", x, x)[..., None] + 1e-6),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_norm_by_a_formula_is_refused_however_it_is_written(name):
    class Formula(Block):
        def forward(self, x):
            x = x + self.f1(FORMULAS[name](x))
            return x + self.f2(FORMULAS[name](x))

    refused(built(Formula), "postnorm", "norms|gives the same branch for twice its input")


class OverColumns(Block):
    def forward(self, x):
        x = x + self.f1(self.n1(x.flip(1)).flip(1))
        return x + self.f2(self.n2(torch.cat([x, x], 1))[:, : x.shape[1]])


def test_a_norm_module_that_reads_a_rearranged_stream_is_refused():
    refused(built(OverColumns), "prenorm", "norms a part or a rearrangement|gives the same branch")


class ChannelsFirst(Block):
    def forward(self, x):
        x = x + self.f1(x.transpose(1, 2)).transpose(1, 2)
        return x + self.f2(x.transpose(1, 2)).transpose(1, 2)


def test_a_stream_of_unclear_width_is_refused():
    class Images(Model):
        def forward(self, x):
            return self.stack(x).mean(-1)

    refused(built(Images, kind=ChannelsFirst), "postnorm", "which dimension is the stream's width", numbers(2, D, 5))


def test_a_call_that_shows_no_output_proves_nothing():
    class Silent(Model):
        def forward(self, x):
            self.result = super().forward(x)

    refused(built(Silent), "dlcl", "returned no floating-point tensor")

    @dataclass
    class Output:
        hidden: torch.Tensor

    class Packed(Model):
        def forward(self, x):
            h = self.stack(x)
            return Output(self.norm(h + 0.1 * self.blocks[0].n1(h)))

    model, x = built(Packed), numbers()
    want = model(x).hidden
    torch.testing.assert_close(swapped(model, "prenorm")(x).hidden, want, rtol=1e-9, atol=1e-9)


def test_dropout_between_blocks_takes_no_scheme_with_several_tensors():
    class Dropping(Model):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def stack(self, x):
            for block in self.blocks:
                x = self.drop(block(x))
            return x

    refused(built(Dropping), "denseformer", "Dropout acts on the hidden state between blocks")
    swapped(built(Dropping), "prenorm")


def test_a_shared_feed_forward_takes_no_scheme_that_acts_in_it():
    shared = FeedForward()
    refused(Model(lambda: Block(shared)).double().eval(), "normformer", "share a Linear")
    swapped(Model(lambda: Block(shared)).double().eval(), "sandwich")


class NormsAnother(Model):
    def forward(self, x, other):
        return self.norm(self.stack(x)), self.norm(other)


class TwoHeads(Model):
    def __init__(self):
        super().__init__()
        self.other = nn.LayerNorm(D)

    def forward(self, x):
        x = self.stack(x)
        return self.norm(x), self.other(x)


class AnotherBlock(Model):
    def __init__(self):
        super().__init__()
        self.last = Block()

    def forward(self, x):
        return self.norm(self.last(self.stack(x)))


def test_a_last_norm_with_other_uses_is_not_removed():
    refused(built(NormsAnother), "postnorm", "also calls it on another tensor", numbers(), numbers())
    refused(built(TwoHeads), "postnorm", "norms the output of that stack, too")
    x, other = numbers(), numbers()
    model = built(NormsAnother)
    want = model.norm(other)
    assert torch.equal(swapped(model, "peri-ln", x, other)(x, other)[1], want)


def test_the_norm_of_a_block_behind_the_list_is_not_the_stacks():
    model = built(AnotherBlock)
    swapped(model, "postnorm")
    assert type(model.last.n1) is nn.LayerNorm and type(model.norm) is nn.LayerNorm


class Gated(Block):
    """Reads more if it gets a second tensor."""

    def forward(self, x, how=None):
        h = self.n1(x)
        if how == "raw":
            h = h * x.sigmoid()
        if how == "cat":
            h = self.n1(torch.cat([x, x], 1))[:, x.shape[1] :]
        if how == "write":
            x[:, 0] = 0
        x = x + self.f1(h)
        return x + self.f2(self.n2(x))


def test_a_call_that_reads_the_stream_itself_gets_it():
    model, x = built(Gated), numbers()
    want = model(x, "raw")
    torch.testing.assert_close(swapped(model, "prenorm", x)(x, "raw"), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("how, match", [("cat", "on another tensor than its residual"), ("write", "writes into its")])
def test_a_call_that_does_more_than_the_example_is_an_error(how, match):
    model = swapped(built(Gated), "postnorm")
    with pytest.raises(InputError, match=match):
        model(numbers(), how)


class MaskedNorm(nn.LayerNorm):
    def forward(self, x, mask=None):
        return super().forward(x) if mask is None else super().forward(x) * mask


class Masked(Block):
    def __init__(self):
        super().__init__()
        self.n1 = MaskedNorm(D)

    def forward(self, x, mask=None):
        x = x + self.f1(self.n1(x, mask))
        return x + self.f2(self.n2(x))


def test_a_norm_that_gets_a_second_tensor_is_an_error():
    model = swapped(built(Masked), "prenorm")
    with pytest.raises(InputError, match="gives its MaskedNorm a second tensor"):
        model(numbers(), torch.ones(2, 5, 1, dtype=torch.float64))


class Cached(Block):
    def forward(self, x, cache=None):
        h = self.n1(x)
        if cache is not None:
            cache["n"] = cache.get("n", 0) + h.shape[1]
            cache.setdefault("seen", []).append(h)
        return super().forward(x)


def test_a_dictionary_among_the_arguments_stays_the_callers():
    model, cache = swapped(built(Cached), "prenorm"), {}
    model(numbers(), cache)
    assert cache["n"] == 10 and len(cache["seen"]) == 2


class Logs(Block):
    def __init__(self):
        super().__init__()
        self.log, self.table = [], {}

    def forward(self, x):
        self.log.append(x.mean().item())
        self.table[len(self.table)] = 1
        return super().forward(x)


@pytest.mark.parametrize("scheme", ["prenorm", "value-residual"])
def test_lists_and_dictionaries_of_modules_stay_as_they_were(scheme):
    model = built(Logs)
    try:
        swapped(model, scheme)
    except InputError:
        assert scheme == "value-residual"
    assert all(block.log == [] and block.table == {} for block in model.blocks)


def test_a_second_pass_in_one_call_begins_anew():
    class Twice(Model):
        def forward(self, x, other=None):
            first = super().forward(x)
            return first if other is None else (first, super().forward(other))

    x, other = numbers(), numbers()
    model = swapped(built(Twice), "peri-ln", x)
    torch.testing.assert_close(model(x, other)[1], model(other), rtol=1e-12, atol=1e-12)


def test_a_factor_of_evaluation_alone_is_refused():
    class Survives(Block):
        def forward(self, x):
            if self.training:
                return super().forward(x)
            x = x + 0.8 * self.f1(self.n1(x))
            return x + 0.8 * self.f2(self.n2(x))

    refused(built(Survives), "postnorm", r"has another factor than 0\.8")


class Clamped(Block):
    def forward(self, x):
        x = (x + self.f1(self.n1(x))).clamp(-2, 2)
        return x + self.f2(self.n2(x))


@pytest.mark.parametrize("scheme", ["hyper-connections", "mhc", "attnres"])
def test_an_unread_clamp_changes_what_a_mixture_reads(scheme):
    """The example shows the clamp's effect to one of two models, so that its proof has seen it."""
    x = numbers()
    found = [swapped(built(Clamped), scheme, scale * x)(9 * x) for scale in (0.1, 9)]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


class Keywords(Block):
    def forward(self, **options):
        return super().forward(options["x"])


def test_a_stream_among_keywords_is_one_argument():
    class Named(Model):
        def stack(self, x):
            for block in self.blocks:
                x = block(x=x)
            return x

    model, x = built(Named, kind=Keywords), numbers()
    want = swapped(built(Model), "postnorm")(x)
    assert [part.norm for part in structure_of(swapped(model, "postnorm").blocks[0]).parts] == ["n1", "n2"]
    assert structure_of(model.blocks[0]).twin is None
    torch.testing.assert_close(model(x), want)


def test_an_unread_clamp_changes_what_follows():
    model, x = built(Clamped), numbers()
    want = model(9 * x)
    torch.testing.assert_close(swapped(model, "prenorm", 0.1 * x)(9 * x), want, rtol=1e-9, atol=1e-9)


def test_lists_that_take_turns_after_a_reshape_share_their_stream():
    class Turns(Model):
        def __init__(self):
            super().__init__()
            self.others = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            for block, other in zip(self.blocks, self.others):
                x = other(block(x).reshape(1, -1, D)).reshape(x.shape)
            return self.norm(x)

    refused(built(Turns), "deepnorm", "whose layers are not alike")


def test_layers_that_take_some_positions_have_no_common_begin():
    class Routed(Model):
        def forward(self, x):
            x = self.blocks[0](x)
            return self.norm(torch.cat([x[:, :2], self.blocks[1](x[:, 2:])], 1))

    refused(built(Routed), "peri-ln", "between its blocks the model reads")
    swapped(built(Routed), "sandwich")


class Recomputing(Block):
    def __init__(self):
        super().__init__()
        self.n3, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)

    def attend(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, D // 2)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x):
        h = self.n3(x)
        x = x + (checkpoint(self.attend, h, use_reentrant=False) if self.training else self.attend(h))
        return x + self.f2(self.n2(x))


def test_values_of_earlier_layers_are_gone_where_a_part_is_recomputed():
    refused(built(Recomputing), "value-residual", "computes a part again in the backward pass")


class Steps(Block):
    def step(self, x):
        x = x + self.f1(self.n1(x))
        return x + self.f2(self.n2(x))


class Decodes(Model):
    """Has two ways through its blocks beside their forward."""

    def decode(self, x):
        for block in self.blocks:
            x = block.step(x)
        return self.norm(x)

    def peep(self, x):
        return self.blocks[0].f1(self.blocks[0].n1(x))


@pytest.mark.parametrize("scheme, norm", [("postnorm", "LayerNorm"), ("rezero", "Identity"), ("prenorm", "LayerNorm")])
def test_another_method_of_a_block_is_an_error(scheme, norm):
    model, x = swapped(built(Decodes, kind=Steps), scheme), numbers()
    model(x)
    with pytest.raises(InputError, match=rf"step\(\) of Steps calls a swapped block's {norm} outside"):
        model.decode(x)


def test_a_removed_norm_is_not_called_by_other_modules():
    model, x = built(Decodes, kind=Steps), numbers()
    want = model.blocks[0].f1(model.blocks[0].n1(x))
    swapped(model, "prenorm")
    torch.testing.assert_close(model.peep(x), want)
    with pytest.raises(InputError, match=r"peep\(\) of Decodes calls a swapped block's Identity"):
        swapped(built(Decodes, kind=Steps), "rezero").peep(x)


class ByThis(Steps):
    def step(this, x):
        return super().step(x) if x is None else this.n2(x + this.f1(this.n1(x)))


def test_a_methods_first_argument_has_any_name():
    model = swapped(built(Decodes, kind=ByThis), "postnorm")
    with pytest.raises(InputError, match=r"step\(\) of ByThis calls a swapped block's LayerNorm outside"):
        model.decode(numbers())


class Peeps(Decodes):
    """Shows what the first block's norm gives, beside its result, and norms another tensor by the last norm."""

    def forward(self, x):
        return super().forward(x), self.embedded(x)

    def embedded(self, x):
        return self.norm(self.blocks[0].look(x))


class Looks(Block):
    def look(self, x):
        return self.n1(x)


@pytest.mark.parametrize("scheme", ["prenorm", "sandwich", "deepnorm"])
def test_norms_that_the_example_shows_outside_their_block_stay_callable(scheme):
    model, x = built(Peeps, kind=Looks), numbers()
    if scheme == "deepnorm":
        refused(model, scheme, r"blocks\.0\.n1 also norms a tensor that is not on the residual stream")
        return
    want = model.norm(model.blocks[0].n1(x))
    swapped(model, scheme)
    torch.testing.assert_close(model(x)[1], want)


class OneForward(Model):
    """A forward that runs through all layers, and a method that calls its last norm."""

    def forward(self, x):
        for block in self.blocks:
            x = x + block.f1(block.n1(x))
            x = x + block.f2(block.n2(x))
        return self.norm(x)

    def project(self, x):
        return self.norm(x)


@pytest.mark.parametrize("scheme", ["prenorm", "sandwich"])
def test_the_last_norm_of_a_loop_is_callable(scheme):
    model, x = built(OneForward), numbers()
    want = model.norm(x)
    torch.testing.assert_close(swapped(model, scheme).project(x), want)


class LosesGradients(Block):
    """Loses the gradients of a matrix once it is swapped, as a fault of a swap would."""

    def forward(self, x):
        f = self.f1
        weight = f.up.weight.detach() if hasattr(self, "residual") else f.up.weight
        x = x + f.down(F.gelu(F.linear(self.n1(x), weight, f.up.bias)))
        return x + self.f2(self.n2(x))


class Checkpointed(Model):
    def stack(self, x, *rest):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("how", ["f64", "checkpoints", "bf16", "autocast"])
def test_gradients_of_large_matrices_are_compared_once_at_least(how, monkeypatch):
    monkeypatch.setattr(proof, "_MANY", 100)  # the matrices have 128 numbers
    model, x = built(Checkpointed if how == "checkpoints" else Model, kind=LosesGradients), numbers()
    if how == "bf16":
        model, x = model.bfloat16(), x.bfloat16()
    if how == "autocast":
        model, x = model.float(), x.float()
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    refused(model, "sandwich", "its gradients differ by", x)


@pytest.mark.parametrize("times", [torch.mul, torch.multiply, torch.div, torch.divide, torch.true_divide])
def test_a_branchs_factor_is_found_however_it_is_written(times):
    class Scaled(Block):
        def forward(self, x):
            x = x + times(self.f1(self.n1(x)), other=0.5)
            return x + times(self.f2(self.n2(x)), 0.5)

    model = built(Model, kind=Scaled)
    assert [part.beta for part in structure_of(swapped(model, "postnorm").blocks[0]).parts] == [
        2.0 if "div" in times.__name__ else 0.5
    ] * 2


class ScaledStream(Block):
    """Multiplies its stream by a number that is given by keyword, and by a tensor where it only reads it."""

    def forward(self, x):
        gate = torch.mul(x, other=x.sigmoid()).mean()
        x = torch.mul(x, other=2.0) + self.f1(self.n1(x)) * gate
        return torch.multiply(x, other=2.0) + self.f2(self.n2(x))


def test_a_streams_factor_may_be_a_keyword():
    model = swapped(built(Model, kind=ScaledStream), "sandwich")
    assert [part.alpha for part in structure_of(model.blocks[0]).parts] == [2.0, 2.0]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (2, D // 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class PostNorm(Block):
    def __init__(self):
        super().__init__()
        self.f1 = Attention()

    def forward(self, x):
        x = self.n1(x + self.f1(x))
        return self.n2(x + self.f2(x))


class KeepsOutput(schemes.Scheme):
    """Adds attention's output to the branch of the feed-forward."""

    name = "keeps-output"

    def around(self, place):
        return schemes.ResidualSpec(before=[schemes.norm()], branch=[schemes.mix("o")] if place.index == 1 else [])

    def inside(self, place):
        return {"after_output": [schemes.keep("o")]} if place.index == 0 else {}

    def stack(self, place):
        return schemes.StackSpec(end=[schemes.norm()])


def test_tensors_kept_inside_a_sublayer_may_be_mixed_in_outside():
    model = swapped(built(Model, kind=PostNorm), KeepsOutput())
    assert type(model.blocks[0].residual.place.config.residual) is KeepsOutput


class ByKeyword(FeedForward):
    def forward(self, x):
        h = F.linear(x, weight=self.up.weight, bias=self.up.bias)
        return F.linear(input=F.gelu(h), bias=self.down.bias, weight=self.down.weight)


def test_linear_layers_by_keyword_run_on_the_meta_device():
    with torch.device("meta"):
        model = Model(lambda: Block(ByKeyword()))
    swap_residuals(model, "deepnorm", init=None, example=torch.zeros(2, 5, D))
    assert structure_of(model.blocks[0]).parts[1].norm == "n2"
