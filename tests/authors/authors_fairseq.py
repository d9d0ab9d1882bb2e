"""Authors' forks of fairseq: their encoder-decoder models, over a stand-in for what is around a model there."""

import re
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import torch
from authors_support import module
from torch.testing import assert_close

import normformer_rs as nfrs

NAMES = {"decoder(.*)final_layer_norm": r"decoder\1norm3", "final_layer_norm": "norm2", "embed_tokens": "embedding"}
NAMES |= {"self_attn_layer_norm": "norm1", "encoder_attn_layer_norm": "norm2", "encoder_attn": "multihead_attn"}
NAMES |= {r"er\.layer_norm": "er.norm", "q_proj[._]": "in_proj_", r"\.fc(\d)": r".linear\1", "encoder.embedd": "embedd"}
STACKS = ("encoder", "decoder")
EVERY = {"share_all_embeddings": True, "share_decoder_input_output_embed": True, "dropout": 0.0, "fp16": False}
EVERY |= {"encoder_layerdrop": 0, "decoder_layerdrop": 0, "max_source_positions": 9, "max_target_positions": 9}
EVERY |= {"encoder_learned_pos": False, "decoder_learned_pos": False}


class Stack(torch.nn.Module):
    """In place of fairseq's base classes of encoders, decoders and whole models."""

    def __init__(self, *rest):
        super().__init__()


class NoPositions(torch.nn.Module):
    """In place of fairseq's positions: adds nothing."""

    def __init__(self, *rest, **options):
        super().__init__()

    def forward(self, tokens, incremental_state=None):
        return torch.zeros((), dtype=torch.float64)


def fork(
    repository: str, commit: str, paths: list[str], changes: dict[str, dict[str, str]] | None = None
) -> ModuleType:
    """Runs the files in their order, each as a module that the later ones find in fairseq; returns the last.

    `changes`: by path, texts to replace.
    """
    utils = SimpleNamespace(softmax=lambda x, dim, onnx_trace: x.softmax(dim), item=float)
    utils.fill_with_neg_inf = lambda x: x.fill_(-torch.inf)
    utils.get_activation_fn = lambda activation: getattr(torch, activation)
    utils.inspect_grad = utils.get_incremental_state = lambda *_: None
    utils.with_incremental_state = lambda kind: setattr(kind, "get_incremental_state", lambda *_: None) or kind
    modules = MagicMock(LayerNorm=lambda width, export=False: torch.nn.LayerNorm(width))
    for name in ("PositionalEmbedding", "SinusoidalPositionalEmbedding", "LearnedPositionalEmbedding"):
        setattr(modules, name, NoPositions)
    models = SimpleNamespace(register_model=lambda *_: lambda kind: kind)
    models.register_model_architecture = models.register_model
    for name in ("Encoder", "IncrementalDecoder", "EncoderDecoderModel", "LanguageModel", "Model"):
        setattr(models, f"Fairseq{name}", Stack)
    beside = {"fairseq": MagicMock(utils=utils), "fairseq__utils": utils, "fairseq__modules": modules}
    beside |= {"fairseq__models": models, "fairseq__incremental_decoding_utils": utils}
    for path in paths:
        made = module(repository, commit, path, (changes or {}).get(path), **beside)
        name = path.removesuffix(".py").rpartition("fairseq/")[2]
        beside["fairseq__" + name.replace("/", "__")] = made
        modules.configure_mock(**{name: kind for name, kind in vars(made).items() if isinstance(kind, type)})
    return made


def arguments(width: int, layers: tuple[int, int], words: int, **options) -> SimpleNamespace:
    """Returns the arguments of a fork's models, 1.5 times as wide inside as outside and of two heads."""
    sizes = {"embed_dim": width, "ffn_embed_dim": 3 * width // 2, "attention_heads": 2}
    given = {f"{stack}_{name}": size for stack in STACKS for name, size in sizes.items()} | EVERY | options
    given |= {"encoder_layers": layers[0], "decoder_layers": layers[1], "words": words}
    return SimpleNamespace(**given)


def their_stacks(authors: ModuleType, args: SimpleNamespace, kind: str = "Transformer") -> torch.nn.ModuleDict:
    """Returns the authors' encoder and decoder in f64 at their first values. They share a table of words."""
    authors.base_architecture(args)
    table = authors.Embedding(args.words, args.encoder_embed_dim, 1)
    made = {stack: getattr(authors, kind + stack.title())(args, range(args.words), table) for stack in STACKS}
    return torch.nn.ModuleDict(made).double()


def our_model(args: SimpleNamespace, residual: str, **options) -> nfrs.Transformer:
    """Returns our model of the same shape in f64."""
    options |= {"d_model": args.encoder_embed_dim, "d_ff": args.encoder_ffn_embed_dim, "heads": 2, "dropout": 0.0}
    options |= {"encoder_layers": args.encoder_layers, "decoder_layers": args.decoder_layers, "positions": "none"}
    config = nfrs.TransformerConfig(vocab_size=args.words, residual=residual, **options)
    return nfrs.Transformer(config).double()


def in_our_names(tensors: dict, names: dict[str, str] | None = None) -> dict:
    """Returns the authors' parameters, or their gradients, in our names; `names`: those of this fork alone."""
    found = {}
    for theirs, tensor in tensors.items():
        name = theirs
        for old, new in ((names or {}) | NAMES).items():
            name = re.sub(old, new, name)
        if "q_proj" in theirs:
            tensor = torch.cat([tensors[theirs.replace("q_proj", f"{letter}_proj")] for letter in "qkv"])
        if not re.search("[kv]_proj", theirs):
            found[name] = tensor.squeeze(2) if tensor.ndim == 3 else tensor  # dlcl's sums
    return found


def sentences(words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns sources and targets with padding at the end of some."""
    source, target = torch.randint(4, words, (2, 3, 6))
    source[1, 4:] = target[2, 3:] = 1
    return source, target


def assert_same_models(ours, theirs, names=None) -> None:
    """Gives both models the same random weights: logits and the gradients of all parameters must be equal."""
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    ours.load_state_dict(in_our_names(dict(theirs.named_parameters()), names), strict=True)
    source, target = sentences(11)
    real = target != 1
    logits = ours(source, target)[real], theirs["decoder"](target, theirs["encoder"](source, None))[0][real]
    assert_close(*logits, rtol=0, atol=1e-12)
    slope = torch.randn_like(logits[0])
    torch.autograd.backward(logits, [slope, slope])
    found = {name: weight.grad for name, weight in ours.named_parameters()}
    expected = in_our_names({name: weight.grad for name, weight in theirs.named_parameters()}, names)
    assert_close(found, expected, rtol=0, atol=1e-10)


def assert_same_first_values(ours, theirs, names=None, biases=True) -> None:
    """Compares the deciles of first values, a stack's layers together, with six times a decile's own deviation."""
    deciles = torch.arange(1, 10).double() / 10
    found, expected = dict(ours.named_parameters()), in_our_names(dict(theirs.named_parameters()), names)
    assert sorted(found) == sorted(expected)
    for kind in {re.sub(r"\.\d+", "", name) for name in found if biases or not name.endswith("bias")}:
        same = [name for name in found if re.sub(r"\.\d+", "", name) == kind]
        y, first = (torch.cat([values[name].detach().flatten() for name in same]) for values in (found, expected))
        spread = first.std(correction=0).item() / first.numel() ** 0.5
        assert_close(y.quantile(deciles), first.quantile(deciles), rtol=1e-7, atol=6 * spread)
