"""The fairseq plug-in inside fairseq: against its own Transformer, and every norm and residual scheme trained."""

import copy
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from fairseq_support import MARKS, RECIPE, SIZES, SMOOTHED, batch, configured, generate, own_values, parameters, train

import normformer_rs as nfrs
import reference as ref
from normformer_rs.config import tables
from normformer_rs.formats.convert import to_canonical

pytestmark = MARKS


NORMS = [entry["name"] for entry in tables()["norms"]]
SCHEMES = [entry["name"] for entry in tables()["residuals"]]


@pytest.mark.full
def test_layernorm_and_postnorm_are_fairseqs_transformer(data, tmp_path):
    common = f"{SIZES} --dropout 0 --disable-validation"
    stock = f"--arch transformer {common} --criterion label_smoothed_cross_entropy --label-smoothing 0.1"
    ours = f"--arch nfrs_transformer {common} --criterion {SMOOTHED}"
    train(data, tmp_path / "begin", 1, stock, **{"optimization.lr": [1e-30]})
    resets = ["reset_optimizer", "reset_dataloader", "reset_meters", "reset_lr_scheduler"]
    begin = {"checkpoint.restore_file": str(tmp_path / "begin" / "checkpoint_last.pt")}
    begin |= {f"checkpoint.{name}": True for name in resets}
    theirs = train(data, tmp_path / "stock", 60, stock, **begin)
    losses = train(data, tmp_path / "ours", 60, ours, **begin)
    assert len(losses) == 60 and losses[-1] < 0.9 * losses[0]
    assert losses == theirs  # to the three decimals that fairseq logs
    last = [tmp_path / which / "checkpoint_last.pt" for which in ("stock", "ours")]
    expected, found = (generate(data, path) for path in last)
    assert [text for text, _ in found] == [text for text, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-3)
    # As many numbers as fairseq trains: its encoder layers also keep a second copy of their matrices.
    copies = re.compile(r"encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)$")
    sizes = [{name: value.numel() for name, value in parameters(path).items()} for path in last]
    assert sum(size for name, size in sizes[0].items() if not copies.search(name)) == sum(sizes[1].values())


@pytest.mark.full
def test_inverse_sqrt_resumes(data, tmp_path):
    """λ/√d·n/n_w^1.5 at update n of the warm-up, d being the model's."""
    model = f"--arch nfrs_transformer {SIZES} --criterion {SMOOTHED} --lr-scheduler nfrs_inverse_sqrt --lr-scale 0.2"
    model += " --warmup-updates 20"
    whole = train(data, tmp_path / "whole", 14, model)
    saved = torch.load(tmp_path / "whole" / "checkpoint_last.pt", weights_only=True)
    rate = saved["last_optimizer_state"]["param_groups"][0]["lr"]
    assert rate == pytest.approx(0.2 / math.sqrt(32) * 15 / 20**1.5)
    halves = [loss for updates in (6, 14) for loss in train(data, tmp_path / "halves", updates, model)]
    assert halves == whole


COMBINATIONS = [(norm, residual) for norm in NORMS for residual in ("postnorm", "prenorm")]
COMBINATIONS += [("layernorm", scheme) for scheme in SCHEMES if ("layernorm", scheme) not in COMBINATIONS]


@pytest.mark.parametrize(("norm", "residual"), COMBINATIONS)
@pytest.mark.one_in(test=54, all=53)
def test_trains_resumes_validates_and_generates(norm, residual, data, tmp_path):
    model = f"--arch nfrs_transformer {SIZES} --norm layernorm --residual postnorm --criterion {SMOOTHED}"
    named = {"model.norm": norm, "model.residual": residual}
    whole = train(data, tmp_path / "whole", 20, model, **named)
    assert len(whole) == 20 and all(map(math.isfinite, whole))
    assert sum(whole[-5:]) < 0.97 * sum(whole[:5])
    halves = [loss for updates in (11, 20) for loss in train(data, tmp_path / "halves", updates, model, **named)]
    assert halves == whole
    last = [parameters(tmp_path / which / "checkpoint_last.pt") for which in ("whole", "halves")]
    assert last[0].keys() == last[1].keys()
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])
    assert all(math.isfinite(score) for _, score in generate(data, tmp_path / "whole" / "checkpoint_last.pt"))


def built(data: Path, arguments: str, **changes):
    """The task and a fresh model in evaluation mode."""
    from fairseq import tasks

    config = configured("train", f"{data} {RECIPE} --arch nfrs_transformer {SIZES} {arguments}", changes)
    task = tasks.setup_task(config.task)
    torch.manual_seed(1)
    return task, task.build_model(config.model).eval()


def perturbed(model):
    """Gains away from their first values, so that every one of them counts."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


STATISTICS = {
    "batchnorm": "",
    "prepbn": "--prepbn-steps 6",
    "powernorm-v": "",
    "powernorm": "--powernorm-warmup 6",
    "powernorm, release": "--powernorm-mode release --powernorm-warmup 6 --groupscaling 4",
}


@pytest.mark.parametrize("norm", STATISTICS)
@pytest.mark.one_in(all=4)
def test_statistics_come_from_real_tokens_and_stay(norm, data, tmp_path):
    """In training, over resuming, and in decoding; padding enters none."""
    given = f"--encoder-norm {norm.partition(',')[0]} --decoder-norm layernorm --residual prenorm {STATISTICS[norm]}"
    _, model = built(data, f"{given} --dropout 0")
    padded, target = batch()
    wide = torch.cat((torch.ones(3, 4, dtype=torch.long), padded), 1)
    twin = copy.deepcopy(model)
    for _ in range(2):
        outputs = [twin.train()(wide, None, target)[0], model.train()(padded, None, target)[0]]
        torch.testing.assert_close(outputs[0][target != 1], outputs[1][target != 1], atol=1e-5, rtol=1e-4)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(twin.state_dict()[name], value, msg=name)

    arguments = f"--arch nfrs_transformer {SIZES} --criterion {SMOOTHED} {given}"
    whole = train(data, tmp_path / "whole", 14, arguments)
    halves = [loss for updates in (5, 14) for loss in train(data, tmp_path / "halves", updates, arguments)]
    assert halves == whole and whole[-1] < whole[0]
    last = [parameters(tmp_path / which / "checkpoint_last.pt") for which in ("whole", "halves")]
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])
    kept = {name: value for name, value in last[0].items() if "running_" in name}
    assert len(kept) >= 5 and all((value.flatten() != value.flatten()[0]).any() for value in kept.values())
    counters = [value.item() for name, value in last[0].items() if name.endswith("iters")]
    assert counters == ([14] * 5 if norm.startswith("powernorm,") or norm == "powernorm" else [])
    assert all(math.isfinite(score) for _, score in generate(data, tmp_path / "whole" / "checkpoint_last.pt"))


@pytest.mark.parametrize("norm", STATISTICS)
@pytest.mark.one_in(test=4, all=2)
def test_steps_of_decoding_use_running_statistics(norm, data):
    _, model = built(data, f"--norm {norm.partition(',')[0]} --residual prenorm {STATISTICS[norm]} --dropout 0")
    source, target = batch()
    with torch.no_grad():
        for _ in range(8):
            model.train()(source, None, target)
        before = copy.deepcopy(own_values(model.eval().state_dict()))
        memory, state = model.encoder(source, None), {}
        whole = model.decoder(target, memory)[0]
        for length in range(1, 5):
            step = model.decoder(target[:, :length], memory, incremental_state=state)[0][:, 0]
            is_real = target[:, length - 1] != 1
            torch.testing.assert_close(step[is_real], whole[is_real, length - 1], atol=1e-5, rtol=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in own_values(model.state_dict()).items())


WITH_OPTIONS = ["postnorm*1/2,prenorm", "prenorm --qk-norm", "prenorm --qk-l2norm 72"]
WITH_OPTIONS += ["attnres --attnres-form normed --attnres-queries 3", "mhc --mhc-mixing channel --mhc-rank 3"]


@pytest.mark.parametrize("residual", [*SCHEMES, *WITH_OPTIONS])
@pytest.mark.one_in(test=13, all=7)
def test_steps_of_decoding_are_the_whole(residual, data):
    scheme, _, flag = residual.partition(" ")
    changes = {"model.residual": scheme, "model.norm": "layernorm"}
    _, model = built(data, f"--norm scalenorm --residual postnorm {flag}", **changes)
    source, target = batch()
    model = perturbed(model)
    memory = model.encoder(source, None)
    whole, seen = model.decoder(target, memory)
    state: dict = {}
    for length in range(1, 5):
        step, stepped = model.decoder(target[:, :length], memory, incremental_state=state)
        is_real = target[:, length - 1] != 1
        for one, all_ in ((step, whole), (stepped["attn"][0], seen["attn"][0])):
            torch.testing.assert_close(one[is_real, 0], all_[is_real, length - 1], atol=1e-5, rtol=1e-4)
        if length == 2:  # the sentences change places, as beams do
            order = torch.tensor([2, 0, 1])
            model.decoder.reorder_incremental_state_scripting(state, order)
            for name in [name for name in state[next(iter(state))] if ".memory." in name]:
                del state[next(iter(state))][name]  # kept as long as beams stay within their sentence
            memory = model.encoder.reorder_encoder_out(memory, order)
            target, whole, seen["attn"] = target[order], whole[order], [seen["attn"][0][order]]


@pytest.mark.parametrize("pad_left", [True, False])
def test_padding_changes_nothing(pad_left, data):
    _, model = built(data, "--norm scalenorm --residual prenorm")
    source, target = batch(pad_left)
    together = model(source, None, target)[0]
    for i in range(3):
        alone = model(source[i][source[i] != 1][None], None, target[i][target[i] != 1][None])[0]
        torch.testing.assert_close(together[i, : alone.shape[1]], alone[0], atol=1e-5, rtol=1e-4)


def test_the_kernels_run(data):
    from normformer_rs import _core

    _, model = built(data, "--norm scalenorm --residual prenorm")
    source, target = batch()
    before = _core.operator_counts()
    model(source, None, target)
    after = _core.operator_counts()
    ran = {name for name in after if after[name][0] > before.get(name, (0, 0))[0]}
    assert {"attention", "relu_dropout", "scale_norm", "scale_norm_residual"} <= ran
    assert all(after[name][1] == before.get(name, (0, 0))[1] for name in after)


def test_branchnorm_is_told_the_update(data):
    _, model = built(data, "--norm layernorm --residual branchnorm --branchnorm-steps 10")
    assert model.state_dict()["encoder.t"].tolist() == [1]
    source, target = batch()
    first = model(source, None, target)[0]
    model.set_num_updates(4)  # fairseq's word for: four were made
    assert [model.state_dict()[f"{side}.t"].tolist() for side in ("encoder", "decoder")] == [[5], [5]]
    assert (model(source, None, target)[0] - first).abs().max() > 1e-3


def test_admin_takes_its_gains_from_the_first_batch(data):
    _, model = built(data, "--norm layernorm --residual admin --dropout 0.1")
    source, target = batch()
    names = [name for name in model.state_dict() if name.endswith("residual_scale1")]
    assert len(names) == 4
    model(source, None, target)
    assert all((model.state_dict()[name] == 1).all() for name in names)
    model.train()
    model(source, None, target)
    gains = {name: model.state_dict()[name].clone() for name in names}
    assert (gains["encoder.layers.1.residual_scale1"] > 1.05).all() and model.state_dict()["is_profiled"]
    model(source, None, target)
    assert all(torch.equal(model.state_dict()[name], gains[name]) for name in names)


@pytest.mark.parametrize("pad_left", [True, False])
@pytest.mark.parametrize("norm", ["layernorm", "powernorm"])
def test_admins_gains_count_padding(norm, pad_left, data):
    """But no norm does."""
    _, model = built(data, f"--norm {norm} --residual admin --dropout 0")
    source, target = batch(pad_left)
    config = model.decoder.place.config
    state = {name: value.double() for name, value in to_canonical(model.state_dict(), config.tie_embeddings).items()}
    expected = ref.profile_admin(state, config.asdict(), source, target, ref.Dropout())
    model.train()(source, None, target)
    found = to_canonical(model.state_dict(), config.tie_embeddings)
    assert len(expected) == 10
    for name, gain in expected.items():
        torch.testing.assert_close(found[name].double(), gain.expand_as(found[name]), rtol=1e-5, atol=0, msg=name)


def test_padding_enters_no_norm_of_embeddings(data):
    """While admin's first gains are taken padding has rows; batchnorm's statistics are of the others all the same."""
    _, model = built(data, "--norm batchnorm --residual admin --dropout 0 --layernorm-embedding")
    source, target = batch()
    seen = []
    model.encoder.layernorm_embedding.register_forward_hook(lambda _m, _i, y: seen.append(y))
    model.train()(source, None, target)
    profiled, trained = seen
    real = int((source != 1).sum())
    assert len(profiled) == source.numel() and len(trained) == real
    torch.testing.assert_close(profiled[:real], trained, atol=1e-5, rtol=1e-4)
    assert not profiled[real:].any()


def test_profiling_leaves_statistics_alone(data):
    _, model = built(data, "--norm powernorm --residual admin --dropout 0.1")
    source, target = batch()
    model.train()(source, None, target)
    counted = {int(t) for name, t in model.state_dict().items() if name.endswith("iters")}
    assert counted == {1}


def test_a_languages_tag_stays_where_bos_begins(data):
    task, model = built(data, "--norm layernorm --decoder-start bos")
    source, target = batch()
    tagged, other = target.clone(), target.clone()
    tagged[:, 0], other[:, 0] = 6, 7
    bos = target.masked_fill(target.eq(2), task.target_dictionary.bos())
    logits = [model(source, None, tokens)[0] for tokens in (target, bos, tagged, other)]
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[2], logits[3])
    memory = model.encoder(source)
    for tokens, whole in zip((target, tagged), (logits[0], logits[2])):
        first = model.decoder(tokens[:, :1], encoder_out=memory, incremental_state={})[0]
        torch.testing.assert_close(first[:, 0], whole[:, 0])
    target[-1] = 1
    assert model(source, None, target)[0].isfinite().all()


@pytest.mark.full
def test_words_outside_the_target_vocabulary_may_be_forced(data, tmp_path):
    flags = f"--arch nfrs_transformer {SIZES} --criterion {SMOOTHED} --vocab-mask"
    train(data, tmp_path, 2, flags)
    folder = shutil.copytree(data, tmp_path / "forced")
    for ending in ("bin", "idx"):  # the forced words are those of the other language
        (folder / f"test.de-en.en.{ending}").write_bytes((data / f"test.de-en.de.{ending}").read_bytes())
    found = generate(folder, tmp_path / "checkpoint_last.pt", "--prefix-size 2")
    assert all(len(text.split()) >= 2 and text[0].islower() for text, _ in found)


@pytest.mark.parametrize("flags", ["--norm layernorm", "--residual branchnorm", "--norm powernorm --vocab-mask"])
@pytest.mark.one_in(all=3)
def test_averages_over_time(flags, data, tmp_path):
    given = f"--arch nfrs_transformer {SIZES} --criterion {SMOOTHED} {flags} --store-ema --ema-decay 0.5"
    for updates in (2, 3):
        train(data, tmp_path, updates, given)
    saved = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    ema, model = saved["extra_state"]["ema"], saved["model"]
    assert ema.keys() == model.keys()
    whole = [name for name, t in model.items() if not t.is_floating_point()]
    assert all(torch.equal(ema[name], model[name]) for name in whole)
    assert not torch.equal(ema["encoder.embed_tokens.weight"], model["encoder.embed_tokens.weight"])


REFUSED_AT_THE_START = {
    f"--residual admin --bf16 --criterion {SMOOTHED}": r"in f32; got torch\.bfloat16: use --amp",
    "--vocab-mask --criterion cross_entropy": "--vocab-mask needs --criterion nfrs_label_smoothed_cross_entropy",
    "--criterion label_smoothed_cross_entropy_with_alignment": "attention weights, which these",
}


@pytest.mark.parametrize("arguments", REFUSED_AT_THE_START)
@pytest.mark.one_in(all=3)
def test_what_only_training_knows_is_refused_before_the_first_update(arguments, data, tmp_path):
    with pytest.raises(nfrs.InputError, match=REFUSED_AT_THE_START[arguments]):
        train(data, tmp_path, 1, f"--arch nfrs_transformer {SIZES} --disable-validation {arguments}")
    assert not list(tmp_path.iterdir())


def test_first_values_are_the_packages(data):
    _, model = built(data, "--norm layernorm --residual prenorm --init smallinit --encoder-embed-dim 64")
    weight = model.encoder.layers[0].linear1.weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (64 + 48)), rel=0.06)
    query = model.decoder.layers[1].multihead_attn.in_proj_weight[:64]
    assert query.std().item() == pytest.approx(math.sqrt(2 / (5 * 64)), rel=0.06)
    assert not model.encoder.embed_tokens.weight[1].any()
    assert model.decoder.output_projection.weight is model.encoder.embed_tokens.weight


def test_pretrained_vectors_stay(data, tmp_path):
    (tmp_path / "vectors").write_text("1 32\na " + " ".join(["3"] * 32) + "\n")
    task, model = built(data, f"--norm layernorm --encoder-embed-path {tmp_path}/vectors")
    number = task.source_dictionary.index("a")
    assert (model.encoder.embed_tokens.weight[number] == 3).all()
    assert model.encoder.embed_tokens.weight[number + 1].std() < 0.5


def test_layers_keep_their_places_under_layerdrop(data):
    """fairseq's list of layers, walked in training mode, leaves some out."""
    _, model = built(data, "--norm layernorm --residual postnorm --encoder-layerdrop 0.9 --decoder-layerdrop 0.9")
    for side in (model.encoder, model.decoder):
        assert [layer.place.layer for layer in side._modules["layers"].children()] == [0, 1]


@pytest.mark.parametrize("norms", ["--norm scalenorm", "--encoder-norm rmsnorm --decoder-norm scalenorm"])
@pytest.mark.one_in(test=2)
def test_a_flag_fixes_scalenorms_g(norms, data):
    _, flag = built(data, f"--residual prenorm {norms} --scalenorm-fixed-g")
    _, name = built(data, f"--residual prenorm {norms.replace('scalenorm', 'scalenorm-fixed')}")
    assert flag.state_dict().keys() == name.state_dict().keys()
    assert not any("decoder.layers" in name and "norm" in name for name in flag.state_dict())


def test_fixnorm_and_word_dropout(data):
    _, model = built(data, "--norm scalenorm --residual prenorm --fixnorm --word-dropout 0.5 --dropout 0")
    assert model.encoder.embed_tokens.weight.abs().max() < 0.0101
    source, target = batch()
    before = model(source, None, target)[0]
    model.encoder.embed_tokens.weight.data *= torch.rand(len(model.encoder.dictionary), 1) + 0.5
    torch.testing.assert_close(model(source, None, target)[0], before, atol=1e-4, rtol=1e-4)
    g, features = model.decoder.norm.weight, model.decoder(target, model.encoder(source), features_only=True)[0]
    torch.testing.assert_close(features[0, 0].norm(), g[0].abs())
    assert (before.abs() <= g.abs() * 1.0001).all()  # a cosine times g
    model.train()
    tokens = torch.full((4000,), 7)
    found = model.encoder.embed(tokens, None, None)
    lost = (found - model.encoder.embed(torch.tensor([7]), None, None)).abs().sum(1) > 1e-6
    assert min(lost.float().mean(), 1 - lost.float().mean()) > 0.4


def test_vocabulary_mask_and_its_loss(data):
    from normformer_rs.fairseq_plugin.vocabulary import target_types

    task, model = built(data, "--norm layernorm --residual postnorm --vocab-mask --dropout 0")
    mask, dictionary = model.decoder.vocab_mask, task.target_dictionary
    assert mask.all() and mask.dtype != torch.bool  # fairseq's averages of checkpoints divide it
    mask.copy_(target_types(task, "train"))
    mask = mask.bool()
    seen = {dictionary[i] for i in range(len(dictionary)) if mask[i]}
    assert seen == {*"ABCDEFGHIJ", "</s>", "<unk>"} and "k" in dictionary
    source, target = batch()
    output = model(source, None, target)
    p = model.get_normalized_probs(output, log_probs=False)
    assert not p[..., ~mask].any() and torch.allclose(p.sum(-1), torch.ones(()))
    wanted = target.masked_fill(target.ne(1), dictionary.index("B"))
    for smoothing in ("fairseq", "twt"):
        loss = criterion(task, smoothing)
        log_p = output[0].masked_fill(~mask, -math.inf).log_softmax(-1)
        nll = -log_p[..., dictionary.index("B")][target.ne(1)].sum()
        uniform = -log_p[..., mask].sum(-1)[target.ne(1)].sum()
        each = 0.1 / (int(mask.sum()) - 1) if smoothing == "fairseq" else 0.1 / int(mask.sum())
        own = 0.9 - each if smoothing == "fairseq" else 0.9
        found = loss.compute_loss(model, output, {"target": wanted})
        torch.testing.assert_close(found, (own * nll + each * uniform, nll), rtol=1e-5, atol=1e-4)
    # Outside V_t: UNK in evaluation, refused in training; never what is thought most likely.
    other, loss = wanted.masked_fill(target.ne(1), dictionary.index("k")), criterion(task, "fairseq")
    as_unknown = loss.compute_loss(model, output, {"target": target.masked_fill(target.ne(1), dictionary.unk())})
    torch.testing.assert_close(loss.compute_loss(model, output, {"target": other}), as_unknown)
    output[0][..., dictionary.index("k")], output[0][..., dictionary.index("B")] = 9.0, 8.0
    correct, total = loss.compute_accuracy(model, output, {"target": wanted})
    assert correct == total == target.ne(1).sum()
    inputs = {"src_tokens": source, "src_lengths": None, "prev_output_tokens": target}
    sample = {"net_input": inputs, "target": wanted, "ntokens": int(target.ne(1).sum())}
    logs = [loss(model.train(), sample | {"target": found})[2] for found in (wanted, other)]
    assert [int(log["outside"]) for log in logs] == [0, int(target.ne(1).sum())]
    with pytest.raises(nfrs.InputError, match="targets that were not there"):
        loss.reduce_metrics(logs)
    model.decoder.vocab_mask.fill_(1)  # counted again
    found = loss.compute_loss(model, output, {"target": wanted})[0]
    model.decoder.vocab_mask = None
    torch.testing.assert_close(loss.compute_loss(model, output, {"target": wanted})[0], found)


def test_target_types_are_those_of_every_shard(data, tmp_path):
    from fairseq.data.indexed_dataset import make_builder

    from normformer_rs.fairseq_plugin.vocabulary import target_types

    task, _ = built(data, "--norm layernorm")
    types = len(task.target_dictionary)

    def write(folder: str, name: str, ids: list[int], kind: str = "mmap"):
        path = str(tmp_path / folder / name)
        (tmp_path / folder).mkdir(exist_ok=True)
        builder = make_builder(f"{path}.bin", kind, types)
        for number in ids:
            builder.add_item(torch.tensor([number, 2]))
        builder.finalize(f"{path}.idx")

    write("one", "train.de-en.en", [5, 1])
    write("one", "train1.en-de.en", [6], "cached")
    write("one", "train3.de-en.en", [7])  # fairseq stops where one is missing
    write("two", "train.de-en.en", [8])
    task.cfg.data = f"{tmp_path}/one:{tmp_path}/two"
    assert target_types(task, "train").nonzero().flatten().tolist() == [2, 3, 5, 6, 8]
    with pytest.raises(nfrs.InputError, match=r"one/train2\.de-en\.en or .*: not there; --vocab-mask"):
        target_types(task, "train2")
    write("two", "train1.de-en.en", [types])
    with pytest.raises(nfrs.InputError, match=r"two/train1\.de-en\.en: holds ids"):
        target_types(task, "train")


def criterion(task, smoothing: str, prefix: int = 0):
    from normformer_rs.fairseq_plugin.criterion import FusedLabelSmoothedCrossEntropy

    return FusedLabelSmoothedCrossEntropy(task, False, 0.1, smoothing, prefix)


@pytest.mark.parametrize("prefix", [0, 2])
def test_the_loss_is_fairseqs(prefix, data):
    from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion

    task, model = built(data, "--norm layernorm --residual postnorm --dropout 0")
    source, target = batch()
    net_input = {"src_tokens": source, "src_lengths": None, "prev_output_tokens": target}
    sample = {"net_input": net_input, "target": target, "ntokens": 9}
    stock = LabelSmoothedCrossEntropyCriterion(task, False, 0.1, prefix, report_accuracy=True)
    results = []
    for loss_of in (stock, criterion(task, "fairseq", prefix)):
        model.zero_grad()
        loss_of.report_accuracy = True
        loss, size, log = loss_of(model, sample)
        loss.backward()
        results.append(
            (loss, model.decoder.layers[0].linear1.weight.grad.clone(), log["n_correct"], log["total"], size)
        )
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_val_decay_resumes_at_the_end_of_an_epoch(data, tmp_path):
    """Losses fall; taken for scores to maximise, each is worse than the three before: 0.8 at the fourth and fifth."""
    model = f"--arch nfrs_transformer {SIZES} --criterion {SMOOTHED} --lr-scheduler nfrs_val_decay --warmup-updates 0"
    model += " --maximize-best-checkpoint-metric"
    whole = train(data, tmp_path / "whole", 36, model)
    assert len(train(data, tmp_path / "halves", 28, model)) == 28
    assert train(data, tmp_path / "halves", 36, model) == whole[28:]
    for name in ("whole", "halves"):
        saved = torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=True)
        assert saved["extra_state"]["train_iterator"]["epoch"] == 6
        assert saved["last_optimizer_state"]["param_groups"][0]["lr"] == pytest.approx(0.01 * 0.8**2)


class FakeOptimizer:
    """What a schedule needs of an optimizer."""

    lr = 0.0

    def set_lr(self, lr: float) -> None:
        self.lr = lr

    def get_lr(self) -> float:
        return self.lr


def schedule(name: str, **options):
    from argparse import Namespace

    from fairseq.optim import FairseqOptimizer
    from fairseq.optim.lr_scheduler import LR_SCHEDULER_REGISTRY

    kind = LR_SCHEDULER_REGISTRY[name]
    optimizer = type("Optimizer", (FakeOptimizer, FairseqOptimizer), {"__init__": lambda self: None})()
    common = {"warmup_updates": 4000, "warmup_init_lr": 0.0, "maximize_best_checkpoint_metric": False}
    common |= {"lr_decay_rule": "release", "lr_decay_factor": 0.8, "lr_decay_patience": 3}
    return kind(Namespace(**{**common, "lr_scale": None, "lr_width": None, "lr": [1e-3], **options}), optimizer)


BAD_SCHEDULES = [
    ("val_decay", {"warmup_updates": -1}, "warmup must be at least 0, got -1"),
    ("val_decay", {"lr": [math.nan]}, "--lr must be greater than 0; got nan"),
    ("val_decay", {"warmup_init_lr": -2.0}, "--warmup-init-lr must be at least 0; got -2"),
    ("val_decay", {"warmup_init_lr": 1e-7, "warmup_updates": 0}, "begins a warm-up: give --warmup-updates"),
    ("val_decay", {"lr_decay_rule": "plateau"}, "lr_decay_rule"),
    ("val_decay", {"lr_decay_patience": 0}, "lr_decay_patience must be at least 1, got 0"),
    ("val_decay", {"lr_decay_factor": 1.0}, r"lr_decay_factor must lie in \(0, 1\), got 1"),
    ("inverse_sqrt", {"lr_scale": 0.0, "lr_width": 512}, "--lr-scale must be greater than 0; got 0"),
    ("inverse_sqrt", {"lr_scale": 1.0, "lr_width": -3}, "--lr-width must be at least 1; got -3"),
    ("inverse_sqrt", {"lr_scale": 1.0, "lr_width": 8, "warmup_init_lr": 1e-7}, "leave --warmup-init-lr out"),
    ("inverse_sqrt", {"lr_width": 512}, "--lr-width is an option of --lr-scale"),
    ("inverse_sqrt", {"lr_scale": 1.0}, "needs --lr-width here"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD_SCHEDULES)
def test_bad_schedules_are_one_line(name, options, message, fairseq):
    with pytest.raises(nfrs.InputError, match=message):
        schedule(f"nfrs_{name}", **options)


def test_schedules(fairseq):
    twt = schedule("nfrs_inverse_sqrt", lr_scale=2.0, lr_width=512, warmup_init_lr=-1)
    peak = 2 / math.sqrt(512 * 4000)
    assert [twt.step_update(n - 1) for n in (4000, 2000, 16000)] == pytest.approx([peak, peak / 2, peak / 2])
    given = schedule("nfrs_inverse_sqrt", lr=[5e-3], warmup_updates=2000)
    assert [given.step_update(n - 1) for n in (1000, 2000, 8000)] == pytest.approx([2.5e-3, 5e-3, 2.5e-3])
    assert schedule("nfrs_inverse_sqrt", warmup_updates=0).step_update(9) == 1e-3
    decay = schedule("nfrs_val_decay", lr=[1.0], warmup_updates=10, maximize_best_checkpoint_metric=True)
    assert decay.step_update(4) == pytest.approx(0.5)
    for made, score, factor in [(5, 3.0, 1), (6, 4.0, 1), (7, 5.0, 1), (8, 1.0, 1), (20, 0.5, 0.8), (21, 0.7, 0.8)]:
        decay.step_update(made)
        decay.step(1, score)
        assert decay.step_update(20) == pytest.approx(factor), made
    rule = {"lr_decay_rule": "paper", "lr_decay_factor": 0.5, "lr_decay_patience": 2}
    flat = schedule("nfrs_val_decay", lr=[1.0], warmup_updates=0, maximize_best_checkpoint_metric=True, **rule)
    for score, rate in [(3.0, 1.0), (3.0, 1.0), (3.0, 0.5), (2.9, 0.5)]:
        flat.step(1, score)
        assert flat.step_update(20) == rate
    again = schedule("nfrs_val_decay", lr=[1.0], warmup_updates=10, maximize_best_checkpoint_metric=True)
    again.load_state_dict(decay.state_dict())
    assert again.step_update(20) == pytest.approx(0.8)
    with pytest.raises(nfrs.InputError, match="--reset-lr-scheduler"):
        again.load_state_dict({"best": 1.0})
    losses = schedule("nfrs_val_decay", lr=[1.0], warmup_updates=0)
    for loss in (3.0, 3.0, 3.0, 4.0):
        losses.step(1, loss)
    assert losses.step_update(0) == pytest.approx(0.8)


OWN = """
import normformer_rs as nfrs
from normformer_rs.schemes import Learned, ResidualSpec, StackSpec, keep, mix, norm

class Mine(nfrs.Scheme):
    name, init = "mine", "smallinit"

    def around(self, place):
        return ResidualSpec(before=norm())

    def inside(self, place):
        if place.sublayer != "self-attention":
            return {}
        own, first = Learned("value_scale", 0.5), Learned("first_value_scale", 0.5)
        return {"value": mix("values", own, first) if place.layer else keep("values")}

    def stack(self, place):
        return StackSpec(end=norm())
"""


@pytest.mark.full
def test_a_scheme_of_ones_own_trains_as_the_tables_and_generates(data, tmp_path, monkeypatch):
    monkeypatch.setenv("NORMFORMER_RS_TRUST", "1")  # the checkpoint names the file
    (tmp_path / "mine.py").write_text(OWN)
    found = {}
    for name, residual in (("own", f"{tmp_path / 'mine.py'}:Mine"), ("table", "value-residual")):
        model = f"--arch nfrs_transformer {SIZES} --residual postnorm --criterion {SMOOTHED}"
        losses = train(data, tmp_path / name, 6, model, **{"model.residual": residual})
        found[name] = losses, generate(data, tmp_path / name / "checkpoint_last.pt")
    assert found["own"] == found["table"]


OWN_NORM = """
import normformer_rs as nfrs

class Mine(nfrs.Norm):
    name = "mine"
    parameters = {"weight": nfrs.norms.Parameter(lambda width: width**0.5, shape="one")}

    def normalize(self, x, weight):
        return weight * x / x.norm(dim=-1, keepdim=True).clamp_min(1e-5)
"""


@pytest.mark.full
def test_a_norm_of_ones_own_trains_as_the_tables(data, tmp_path, monkeypatch):
    monkeypatch.setenv("NORMFORMER_RS_TRUST", "1")  # the checkpoint names the file
    (tmp_path / "mine.py").write_text(OWN_NORM)
    found = []
    for name, norm in (("own", f"{tmp_path / 'mine.py'}:Mine"), ("table", "scalenorm")):
        model = f"--arch nfrs_transformer {SIZES} --residual prenorm --criterion {SMOOTHED}"
        found.append(train(data, tmp_path / name, 6, model, **{"model.norm": norm}))
        generate(data, tmp_path / name / "checkpoint_last.pt")
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
