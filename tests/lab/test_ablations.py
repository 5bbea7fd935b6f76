"""Each ablation changes the one thing that it names; as published a model is trained as train.py does."""

import json
import math

import pytest
import torch

from accelerated import block_recurrent, compressive
from accelerated.lab import ablations
from tests.helpers.programs import as_json, train
from tests.helpers.texts import documents_of

SIZES = {
    "vocabulary": 7,
    "width": 8,
    "layers": 2,
    "heads": 2,
    "head_width": 4,
    "feed_forward": 8,
    "dropout": 0.0,
}
COMPRESSIVE = SIZES | {
    "segment": 4,
    "memory": 4,
    "compressed_memory": 4,
    "compression_rate": 2,
    "compression": "conv",
}
agree = torch.testing.assert_close


def published_and_changed(model_class, config, change):
    """A model as published and the same one changed, in float64."""
    published = model_class(config)
    changed = model_class(config)
    change(changed)
    return published, changed.double()


def test_the_compression_loss_is_the_same_times_a_weight_and_trains_the_whole_model():
    losses, gradients, tokens = [], [], torch.arange(8).remainder(7).view(2, 4)
    fields = COMPRESSIVE | {"compression_loss": "attention_reconstruction"}
    config = compressive.Config(**fields)
    for model in published_and_changed(
        compressive.Compressive, config, lambda model: ablations.mix_losses(model, weight=3.0)
    ):
        losses.append(
            model.read(tokens.flip(1), model.read(tokens, model.initial_state(2)).state).auxiliary
        )
        sum(losses[-1].values()).backward()
        gradients.append(
            {
                name: p.grad
                for name, p in model.named_parameters()
                if p.grad is not None and p.grad.any()
            }
        )
    agree({name: 3 * loss for name, loss in losses[0].items()}, losses[1])
    alone, every = gradients
    assert alone and all(".compression." in name for name in alone)
    assert {
        "embedding",
        "layers.1.query",
        "layers.0.key",
        "layers.1.value",
    } <= every.keys() - alone.keys()
    agree(
        {name: every[name] for name in alone},
        {name: 3 * gradient for name, gradient in alone.items()},
    )


def test_the_papers_loss_is_the_norm_of_each_lanes_difference():
    x, y = torch.randn(2, 3, 4, 5, requires_grad=True), torch.randn(2, 3, 4, 5)
    agree(
        ablations.MixedNorm.difference(x, y),
        torch.stack([(a - b).norm() for a, b in zip(x, y, strict=True)]).mean(),
    )
    ablations.MixedNorm.difference(x, x.detach()).backward()
    assert not x.grad.any(), "of equal ones it is 0, not NaN"
    fields = COMPRESSIVE | {"vocabulary": 256, "compression_loss": "attention_reconstruction"}
    model = compressive.Compressive(compressive.Config(**fields))
    square = ablations.target_square(model, documents_of([60]))
    ablations.ABLATIONS["compression-loss"].ways["norm-x0.1"](model)
    assert all(type(layer) is ablations.MixedNorm and layer.weight == 0.1 for layer in model.layers)
    assert ablations.target_square(model, documents_of([60])) == square > 0, (
        "neither norms nor weights are in it"
    )


def test_without_normalization_scores_are_dot_products():
    fields = SIZES | {"window": 4, "segment": 8, "states": 3, "recurrent_layers": ()}
    published, changed = published_and_changed(
        block_recurrent.BlockRecurrent,
        block_recurrent.Config(**fields),
        ablations.drop_normalization,
    )
    x, layer = torch.randn(2, 4, 8), changed.layers[0]
    key, query, cross, value = layer.project(x)
    for name, found in {"key": key, "query": query * 2, "value": value}.items():  # sqrt(E) is 2
        agree(found, (layer.norm(x) @ getattr(layer, name).T).view(2, 4, 2, 4).transpose(1, 2))
    assert cross is None and (layer.scale == 1).all() and (published.layers[0].scale == 10).all()
    agree(published.layers[0].project(x)[0].norm(dim=-1), torch.ones(2, 2, 4), atol=1e-5, rtol=0)


@pytest.fixture
def small(monkeypatch, text):
    """The ablations with models that train in a moment."""
    common = f"--data {text} --width 8 --heads 2 --head-width 4 --feed-forward 8 --layers 2 --steps 4 --warmup 1"
    compressive = (
        "--model compressive --segment 8 --memory 8 --compressed-memory 4 --compression-rate 2"
    )
    recurrent = "--model block_recurrent --window 8 --segment 16 --states 3 --recurrent-layers none"
    for name, words in {"normalization": recurrent, "compression-loss": compressive}.items():
        changed = ablations.ABLATIONS[name]._replace(
            options=f"{common} --batch 2 --dropout 0 {words}"
        )
        monkeypatch.setitem(ablations.ABLATIONS, name, changed)
    monkeypatch.setattr(ablations, "EVERY", 2)
    torch.set_default_dtype(torch.float32)  # as the command has it


@pytest.mark.parametrize("name", ablations.ABLATIONS)
def test_as_published_it_is_trained_as_train_py_does_and_changed_otherwise(
    small, tmp_path, capsys, name
):
    published, *_, last = ablations.ABLATIONS[name].ways
    run, changed = (ablations.trained(f"{name}-{way}-0.018", 3) for way in (published, last))
    assert len(run.get("targets", ())) == (2 if name == "compression-loss" else 0)
    given = [
        "--learning-rate",
        0.018,
        "--seed",
        3,
        "--sample",
        0,
        "--log-every",
        1,
        "--out",
        tmp_path / "run",
    ]
    train(*ablations.ABLATIONS[name].options.split(), *given)
    score = as_json(capsys, "score", tmp_path / "run", "--split", "test")
    assert (
        run["bits_per_byte"]
        == pytest.approx(score["bits_per_byte"], abs=1e-9)
        != changed["bits_per_byte"]
    )
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    norms = [line["gradient_norm"] for line in lines if "gradient_norm" in line][2:]
    assert run["largest_norm"] == pytest.approx(max(norms), rel=1e-4)
    assert run["median_norm"] == pytest.approx(sum(norms) / 2, rel=1e-4), (
        "of the two last of four steps"
    )


def test_a_run_that_diverges_has_no_score(small, monkeypatch):
    norms = iter([2.0, 4.0, math.inf])
    monkeypatch.setattr(
        ablations.optimization, "average_and_clip", lambda *given: torch.tensor(next(norms))
    )
    run = ablations.trained("normalization-as-projected-0.054", 0)
    assert (
        run["bits_per_byte"] is None
        and run["largest_norm"] == 4.0
        and "diverged" in ablations.said(run)
    )
