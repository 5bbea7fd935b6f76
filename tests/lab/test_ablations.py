"""Each ablation changes the one thing that it names.

As published a model is trained as train.py does.
"""

import json
import math

import pytest
import torch

from accelerated.lab import ablations
from tests.helpers.programs import as_json, train
from tests.helpers.variants import PAPERS, variant

agree = torch.testing.assert_close


def published_and_changed(paper, config, change):
    """A model as published and the same one changed."""
    published = PAPERS[paper].random_model(config)
    changed = PAPERS[paper].random_model(config)
    change(changed)
    return published, changed


def losses_and_gradients(model):
    """The auxiliary losses of a second segment, and what is not zero of their gradients."""
    tokens = torch.arange(16).remainder(11).view(2, 8)
    state = model.read(tokens, model.initial_state(2)).state
    losses = model.read(tokens.flip(1), state).auxiliary
    sum(losses.values()).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return losses, {name: grad for name, grad in grads.items() if grad.any()}


def test_the_compression_loss_is_the_same_times_a_weight_and_trains_the_whole_model():
    def change(model):
        ablations.mix_losses(model, weight=3.0)

    config = variant("compressive", "conv-attention_reconstruction")
    published, changed = published_and_changed("compressive", config, change)
    losses, alone = losses_and_gradients(published)
    found, every = losses_and_gradients(changed)
    agree(found, {name: 3 * loss for name, loss in losses.items()})
    assert alone
    assert all(".compression." in name for name in alone)
    others = {"embedding", "layers.1.query", "layers.0.key", "layers.1.value"}
    assert others <= every.keys() - alone.keys()
    for name, gradient in alone.items():
        agree(every[name], 3 * gradient)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_the_compression_loss_reaches_its_target(name):
    """Its gradient is its derivative: nothing but the state is held."""
    config = variant("compressive", "conv-attention_reconstruction")
    model = PAPERS["compressive"].random_model(config)
    ablations.mix_losses(model)
    tokens = torch.arange(16).remainder(11).view(2, 8)
    state = model.read(tokens, model.initial_state(2)).state
    matrix = model.get_parameter(f"layers.1.{name}")
    direction = torch.randn_like(matrix)

    def loss_at(step):
        with torch.no_grad():
            matrix.add_(direction, alpha=step)
        loss = sum(model.read(tokens.flip(1), state).auxiliary.values())
        with torch.no_grad():
            matrix.sub_(direction, alpha=step)
        return loss

    loss_at(0.0).backward()
    along = (matrix.grad * direction).sum()
    with torch.no_grad():
        agree(along, (loss_at(1e-6) - loss_at(-1e-6)) / 2e-6, rtol=1e-5, atol=0)


def test_the_papers_loss_is_the_norm_of_each_lanes_difference():
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    y = torch.randn(2, 3, 4, 5)
    norms = torch.stack([(a - b).norm() for a, b in zip(x, y, strict=True)])
    agree(ablations.MixedNorm.difference(x, y), norms.mean())
    ablations.MixedNorm.difference(x, x.detach()).backward()
    assert not x.grad.any(), "of equal ones it is 0, not NaN"


def test_without_normalization_scores_are_dot_products():
    config = PAPERS["block_recurrent"].small  # 2 heads of width 5
    change = ablations.drop_normalization
    published, changed = published_and_changed("block_recurrent", config, change)
    x = torch.randn(2, 4, config.width)
    layer = changed.layers[0]
    key, query, cross, value = layer.project(x)
    assert cross is None
    for name, found in {"key": key, "query": query * 5**0.5, "value": value}.items():
        projected = layer.norm(x) @ getattr(layer, name).T
        agree(found, projected.view(2, 4, 2, 5).transpose(1, 2))
    assert (layer.scale == 1).all()

    key, *_ = published.layers[0].project(x)
    agree(key.norm(dim=-1), torch.ones(2, 2, 4), atol=1e-5, rtol=0)


@pytest.fixture
def small(monkeypatch, text):
    """The ablations with models that train in a moment."""
    sizes = "--width 8 --heads 2 --head-width 4 --feed-forward 8 --layers 2 --dropout 0"
    common = f"--data {text} {sizes} --batch 2 --steps 4 --warmup 1"
    rows = "--segment 8 --memory 8 --compressed-memory 4 --compression-rate 2"
    blocks = "--window 8 --segment 16 --states 3 --recurrent-layers none"
    options = {
        "compression-loss": f"{common} --model compressive {rows}",
        "normalization": f"{common} --model block_recurrent {blocks}",
    }
    for name, words in options.items():
        changed = ablations.ABLATIONS[name]._replace(options=words)
        monkeypatch.setitem(ablations.ABLATIONS, name, changed)
    monkeypatch.setattr(ablations, "EVERY", 2)
    torch.set_default_dtype(torch.float32)  # as the command has it


@pytest.mark.parametrize("name", ablations.ABLATIONS)
def test_as_published_it_is_trained_as_train_py_does_and_changed_otherwise(
    small, tmp_path, capsys, name
):
    published, *_, last = ablations.ABLATIONS[name].ways
    run = ablations.trained(f"{name}-{published}-0.018", 3)
    changed = ablations.trained(f"{name}-{last}-0.018", 3)
    assert len(run.get("targets", ())) == (2 if name == "compression-loss" else 0)

    folder = tmp_path / "run"
    words = f"--learning-rate 0.018 --seed 3 --sample 0 --log-every 1 --out {folder}"
    train(*ablations.ABLATIONS[name].options.split(), *words.split())
    score = as_json(capsys, "score", folder, "--split", "test")["bits_per_byte"]
    assert run["bits_per_byte"] == pytest.approx(score, abs=1e-9)
    assert changed["bits_per_byte"] != pytest.approx(score, abs=1e-9)

    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    norms = [line["gradient_norm"] for line in lines if "gradient_norm" in line]
    later = norms[2:]  # of four steps
    assert run["largest_norm"] == pytest.approx(max(later), rel=1e-4)
    assert run["median_norm"] == pytest.approx(sum(later) / 2, rel=1e-4)


def test_a_run_that_diverges_has_no_score(small, monkeypatch):
    norms = iter([2.0, 4.0, math.inf])

    def clip(*given):
        return torch.tensor(next(norms))

    monkeypatch.setattr(ablations.optimization, "average_and_clip", clip)
    run = ablations.trained("normalization-as-projected-0.054", 0)
    assert run["bits_per_byte"] is None
    assert run["largest_norm"] == 4.0
    assert "diverged" in ablations.said(run)


def test_a_row_is_behind_the_published_one_by_the_difference_of_their_seeds():
    """With its 95% interval, of Student's t; nothing is said if a run diverged or is missing."""
    published = {"0": {"bits_per_byte": 2.0}, "1": {"bits_per_byte": 3.0}}
    changed = {"1": {"bits_per_byte": 3.3}, "0": {"bits_per_byte": 2.1}}
    assert ablations.behind_by(published, changed) == "+0.200 ± 1.271"
    assert ablations.behind_by({}, changed) == ""
    assert ablations.behind_by({"1": published["1"]}, changed) == "+0.300 ± inf", "of one seed"
    changed["0"] = {"bits_per_byte": None}
    assert ablations.behind_by(published, changed) == ""
