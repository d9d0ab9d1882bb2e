"""`log_layers`: each layer's gradient norm and the gains, as the oracle and the modules have them."""

import numpy as np
import pytest
import torch
from train_support import TINY, events, fit, whole_batch

import normformer_rs as nfrs
import reference as ref
from normformer_rs import analysis, cli
from normformer_rs.nn.training import learned_gains

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("residual", ["prenorm", "dlcl", "rezero"])
@pytest.mark.one_in(test=3, all=2)
def test_the_first_update_has_the_oracles_norms(tmp_path, corpus, residual):
    """One batch holds the whole corpus; seed 1 fixes the first weights."""
    model = {"norm": "layernorm" if residual == "rezero" else "scalenorm", "residual": residual}
    fit(tmp_path / "run", corpus, model, {"log_layers": 1, "updates": 1, "clip_norm": 0.1})
    batch, mask = whole_batch(tmp_path / "run", corpus)
    first = nfrs.Transformer(nfrs.TransformerConfig(**TINY, **model, vocab_size=len(mask)), seed=1)
    state = {k: v.double() for k, v in first.named_parameters()} | dict(first.named_buffers())
    options = {k: v for k, v in {**TINY, **model, "vocab_size": len(mask)}.items() if k != "dropout"}
    step = ref.train_step(state, options, [batch], ref.Adam(betas=(0.9, 0.98)), 1e-3, vocabulary_mask=mask)
    for name, parameter in first.named_parameters():
        parameter.grad = step.grads[name].float()
    (update,) = events(tmp_path / "run", "updated")
    expected = analysis.gradient_norms(first)
    assert update["layers"]["gradients"] == pytest.approx(expected, rel=1e-4, abs=1e-7)
    squares = sum(norm**2 for norm in update["layers"]["gradients"].values())
    assert squares**0.5 == pytest.approx(update["grad_norm"], rel=1e-9)
    gains = {name: p.double().mean().item() for name, p in learned_gains(first).items() if not name.endswith("bias")}
    assert update["layers"]["gains"] == pytest.approx(gains, rel=1e-12)


@pytest.mark.full
def test_history_has_them_at_every_nth_update(tmp_path, corpus):
    history = fit(tmp_path / "run", corpus, {"norm": "scalenorm", "encoder_layers": 11}, {"log_layers": 4})
    logged = [4, 8]
    kinds = {name.partition("/")[0] for name in history.layers}
    assert kinds == {"gradient", "gain"}
    for values in history.layers.values():
        assert list(history.update[np.isfinite(values)]) == logged and len(values) == 10
    names = [name for name in history.layers if name.startswith("gradient/encoder.layers.")]
    assert names == [f"gradient/encoder.layers.{i}" for i in range(11)]
    norms = np.array([values for name, values in history.layers.items() if name.startswith("gradient/")])
    assert np.sqrt((norms[:, 3] ** 2).sum()) == pytest.approx(history.grad_norm[3], rel=1e-9)
    assert not np.isclose(history.layers["gain/encoder.norm.weight"][3], history.layers["gain/encoder.norm.weight"][7])
    frame = history.to_pandas()
    assert frame["gradient/decoder"].notna().sum() == 2
    assert len(frame) == 10 and history.layers.keys() <= set(frame.columns)


@pytest.mark.full
def test_without_it_nothing_is_logged_and_no_bit_changes(tmp_path, corpus):
    runs = {every: fit(tmp_path / str(every), corpus, {}, {"log_layers": every}) for every in (0, 3)}
    assert runs[0].layers == {} and not any("layers" in event for event in events(tmp_path / "0", "updated"))
    assert np.array_equal(runs[0].loss, runs[3].loss)


@pytest.mark.full
def test_callbacks_and_tensorboard_have_them(tmp_path, corpus):
    seen = []
    fit(tmp_path / "run", corpus, {}, {"log_layers": 5}, callbacks=[lambda event, values: seen.append((event, values))])
    found = [values["layers"]["gradients"] for event, values in seen if "layers" in values]
    assert len(found) == 2 and all(found)
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    written = event_accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    written.Reload()
    scalars = written.Scalars("gradient/encoder.layers.0")
    assert [scalar.step for scalar in scalars] == [5, 10]
    assert scalars[0].value == pytest.approx(found[0]["encoder.layers.0"], rel=1e-6)


def test_the_flag(capsys):
    assert cli._parser().parse_args(["train", "--log-layers", "7"]).log_layers == "7"
    with pytest.raises(nfrs.InputError, match="log_layers must be at least 0, got -1"):
        nfrs.Trainer(nfrs.TransformerConfig(), nfrs.TrainingConfig(log_layers=-1), nfrs.DataConfig()).dry_run()
    assert torch.is_grad_enabled()
