"""Each ablation changes the one thing that it names, both ways begin alike, and the page says what came out."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from accelerated.block_recurrent import BlockRecurrent, LSTMGate
from accelerated.compressive import Compressive
from accelerated.lab import ablations, experiment
from tests.helpers.programs import evaluate, train

RATES = {name: own.rates[-1] for name, own in ablations.ABLATIONS.items()}
RESULTS = Path(__file__).parents[2] / "docs" / "results"


def pair(model_class, config, change):
    """A model as published and the same one changed, in float64."""
    published, changed = model_class(config).double(), model_class(config).double()
    change(changed)
    return published, changed.double()


def compressive_pair():
    config = Compressive.Config(
        vocabulary=7,
        width=8,
        layers=2,
        heads=2,
        head_width=4,
        feed_forward=8,
        segment=4,
        memory=4,
        compressed_memory=4,
        compression_rate=2,
        compression="conv",
        compression_loss="attention_reconstruction",
        dropout=0.0,
    )
    return pair(Compressive, config, ablations.mix_losses)


def block_recurrent_pair(change, **others):
    config = BlockRecurrent.Config(
        vocabulary=7,
        width=8,
        layers=2,
        heads=2,
        head_width=4,
        feed_forward=8,
        window=4,
        segment=8,
        states=3,
        dropout=0.0,
        **others,
    )
    return pair(BlockRecurrent, config, change)


def auxiliary_gradients(model):
    """{parameter: gradient} of the compression losses of a second segment, alone."""
    tokens = torch.arange(8).remainder(7).view(2, 4)
    state = model.read(tokens, model.initial_state(2)).state
    losses = model.read(tokens.flip(1), state).auxiliary
    sum(losses.values()).backward()
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}


def test_the_compression_loss_is_the_same_and_trains_the_whole_model():
    (alone, own), (mixed, every) = map(auxiliary_gradients, compressive_pair())
    torch.testing.assert_close(alone, mixed)
    assert own and all(".compression." in name for name in own)
    assert {"embedding", "layers.1.query", "layers.0.key", "layers.1.value"} <= every.keys() - own.keys()
    for name, gradient in own.items():
        torch.testing.assert_close(every[name], gradient)


def test_without_normalization_scores_are_dot_products():
    published, changed = block_recurrent_pair(ablations.drop_normalization, recurrent_layers=())
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    layer = changed.layers[0]
    key, query, cross, value = layer.project(x)
    rows = layer.norm(x)
    heads = {name: (rows @ getattr(layer, name).T).view(2, 4, 2, 4).transpose(1, 2) for name in ("key", "query", "value")}
    torch.testing.assert_close(key, heads["key"])
    torch.testing.assert_close(query, heads["query"] / 2)  # sqrt(E) is 2
    torch.testing.assert_close(value, heads["value"])
    assert cross is None and (layer.scale == 1).all() and (published.layers[0].scale == 10).all()
    torch.testing.assert_close(published.layers[0].project(x)[0].norm(dim=-1), torch.ones(2, 2, 4).double(), atol=1e-5, rtol=0)


def cell_and_its_input(gate, change=ablations.add_gate, configuration="dual"):
    published, changed = block_recurrent_pair(change, recurrent_layers=(1,), configuration=configuration, gate=gate)
    cells = [model.layers[0].state for model in (published, changed)]
    states = torch.randn(2, 3, 8, dtype=torch.float64)
    keys, values = torch.randn(2, 2, 2, 8, 4, dtype=torch.float64)
    return *cells, states, keys, values


def updated(cell, states, keys, values):
    return cell.update(states, cell.project(states, cell.matrices()), keys, values)


def keep(gate):
    """Make a fixed gate pass what is carried, whatever it reads."""
    nn.init.constant_(gate.bias_g, 1e3)


@pytest.mark.parametrize(("kept", "left"), [("attention_gate", slice(8, 16)), ("cross_gate", slice(0, 8))])
def test_a_third_gate_with_one_gate_shut_is_the_published_cell_without_that_attention(kept, left):
    published, changed, *given = cell_and_its_input("fixed")
    keep(getattr(changed, kept))
    with torch.no_grad():
        weight = published.attention_gate.weight_z
        ours = torch.zeros_like(weight)
        ours[:, left] = 2**0.5 * weight[:, left]
        weight.copy_(ours)
    torch.testing.assert_close(updated(changed, *given), updated(published, *given))


@pytest.mark.parametrize("gate", ["fixed", "lstm"])
def test_the_second_gate_reads_states_that_the_first_one_changed(gate):
    published, changed, states, keys, values = cell_and_its_input(gate)
    halves = [dict(part.named_parameters()) for part in (changed.attention_gate, changed.cross_gate)]
    for name, whole in published.attention_gate.named_parameters():
        parts = [half[name] for half in halves]
        torch.testing.assert_close(torch.cat(parts, 1) / 2**0.5 if whole.dim() == 2 else parts[0], whole)
    asked = []
    changed.cross_norm.register_forward_hook(lambda module, given, out: asked.append(given[0]))
    updated(changed, states, keys, values)
    projected = changed.project(states, changed.matrices())
    own = ablations.scaled_attention(projected[1], projected[0], projected[3], changed.scale)
    torch.testing.assert_close(asked[0], changed.attention_gate(states, ablations.merge_heads(own)))


def test_gates_without_constants_begin_as_the_published_ones_with_biases_of_another_scale():
    published, changed, *given = cell_and_its_input("lstm", ablations.drop_constants, "single")
    torch.testing.assert_close(updated(changed, *given), updated(published, *given))
    for ours, theirs in zip(gates_of(changed), gates_of(published), strict=True):
        torch.testing.assert_close(ours.bias_i, theirs.bias_i - 1)
        torch.testing.assert_close(ours.bias_f, theirs.bias_f + 1)
        torch.testing.assert_close(ours.bias_z, theirs.bias_z)


def gates_of(cell):
    return [module for module in cell.modules() if isinstance(module, LSTMGate)]


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The ablations with models that train in a moment."""
    letters = np.random.default_rng(0).choice(list("etaoin shrdlu"), size=9000)  # so that no split is as another
    (tmp_path / "text.txt").write_text("".join(letters))
    common = f"--data {tmp_path}/text.txt --width 8 --heads 2 --head-width 4 --feed-forward 8 --layers 2 --steps 4 --warmup 1"
    options = {
        "compression-loss": "--model compressive --segment 8 --memory 8 --compressed-memory 4 --compression-rate 2 --dropout 0",
        "normalization": "--model block_recurrent --recurrent-layers none --window 8 --segment 8 --dropout 0",
        "third-gate": "--model block_recurrent --recurrent-layers 1 --window 8 --segment 16 --states 3 --configuration dual",
        "gates": "--model block_recurrent --recurrent-layers 1 --window 8 --segment 16 --gate lstm --optimizer adafactor",
        "clipping": "--model compressive --segment 8 --memory 8 --compressed-memory 4 --compression-rate 2 --clip 0.1",
    }
    for name, words in options.items():
        monkeypatch.setitem(ablations.ABLATIONS, name, ablations.ABLATIONS[name]._replace(options=f"{common} --batch 2 {words}"))
    monkeypatch.setattr(experiment.torch, "set_num_threads", lambda count: None)
    torch.set_default_dtype(torch.float32)  # as the command has it


def test_both_ways_of_a_seed_read_the_same_text_from_the_same_start(small, monkeypatch):
    seen = []

    def watched(model, settings, lanes):
        seen.append((model.embedding.clone(), [next(lanes).tokens for _ in range(3)]))
        return iter([1.0] * 4)

    monkeypatch.setattr(ablations, "gradient_norms", watched)
    for name in ablations.ABLATIONS:
        for way in ablations.WAYS:
            ablations.trained(f"{name}-{way}-{RATES[name]}", 5)
        (first, text), (second, other) = seen[-2:]
        assert torch.equal(first, second) and all(map(torch.equal, text, other)), name
        ablations.trained(f"{name}-published-{RATES[name]}", 6)
        assert not torch.equal(first, seen[-1][0]), name


@pytest.mark.parametrize("name", list(ablations.ABLATIONS))
def test_as_published_it_is_trained_as_train_py_does(small, tmp_path, capsys, name):
    own = ablations.ABLATIONS[name]
    run = ablations.trained(f"{name}-published-{RATES[name]}", 3)
    given = {"learning-rate": RATES[name], "seed": 3, "sample": 0, "log-every": 1, "out": tmp_path / "run"}
    train(*own.options.split(), *(word for option, value in given.items() for word in (f"--{option}", value)))
    capsys.readouterr()
    evaluate("score", tmp_path / "run", "--split", "test", "--json")
    assert run["bits_per_byte"] == pytest.approx(json.loads(capsys.readouterr().out)["bits_per_byte"], abs=1e-9)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    norms = [line["gradient_norm"] for line in lines if "gradient_norm" in line]
    assert run["largest_norm"] == pytest.approx(max(norms[2:]), rel=1e-4)
    assert run["median_norm"] == pytest.approx(sum(norms[2:]) / 2, rel=1e-4), "of the two last of four steps"


def test_only_the_changed_way_has_the_options_that_it_adds(small, monkeypatch):
    limits, real = [], ablations.optimization.average_and_clip
    monkeypatch.setattr(ablations.optimization, "average_and_clip", lambda *given: limits.append(given[2]) or real(*given))
    for way in ablations.WAYS:
        ablations.trained(f"clipping-{way}-0.018", 0)
    assert limits == [0.1] * 4 + [0.0] * 4


def test_a_model_is_trained_with_its_rate_and_without_a_score_if_it_diverges(small, monkeypatch):
    rates, real = [], ablations.optimization.set_learning_rate
    monkeypatch.setattr(
        ablations.optimization, "set_learning_rate", lambda optimizer, rate: rates.append(rate) or real(optimizer, rate)
    )
    run = ablations.trained("normalization-changed-0.054", 0)
    assert 0 < run["bits_per_byte"] < 9 and len(rates) == 4 and max(rates) == 0.054
    assert 0 < run["median_norm"] <= run["largest_norm"]
    norms = iter([2.0, 4.0, math.inf])
    monkeypatch.setattr(ablations.optimization, "average_and_clip", lambda *given: torch.tensor(next(norms)))
    run = ablations.trained("normalization-changed-0.054", 0)
    assert run["bits_per_byte"] is None and run["largest_norm"] == 4.0 and "diverged" in ablations.said(run)


def test_the_page_says_what_came_out(small, monkeypatch, tmp_path, capsys):
    def trained(row, seed):
        score = None if row == "normalization-changed-0.054" else 2 + 0.1 * seed + 0.5 * ("changed" in row)
        return {"bits_per_byte": score, "median_norm": 0.25, "largest_norm": 3.0 + seed, "seconds": 60.0}

    monkeypatch.setattr(ablations, "trained", trained)
    rows = ["third-gate-changed-0.018", "third-gate-published-0.018", "normalization-changed-0.054"]
    ablations.main(["--rows", *rows, "--seeds", "1", "0", "--out", str(tmp_path)])
    page = (tmp_path / "ablations.md").read_text()
    assert "| one after the other | 0.018 | 0, 1 | 2.550 (2.500 .. 2.600) | 0.25 | 3.5 |" in page
    assert page.index("| in parallel | 0.018") < page.index("| one after the other | 0.018")
    assert "| as projected | 0.054 | 0, 1 | 2 of 2 diverged | 0.25 | 3.5 |" in page
    assert max(map(len, page.splitlines())) <= 120
    assert "normalization-changed-0.054, seed 0: diverged, 60 s" in capsys.readouterr().out


def test_every_row_is_of_an_ablation():
    for name, own in ablations.ABLATIONS.items():
        assert [row for row in ablations.ROWS if row.startswith(name)] == [
            f"{name}-{way}-{rate}" for way in ablations.WAYS for rate in own.rates
        ]
        assert "{" not in own.options


def test_the_kept_page_is_that_of_its_record():
    record = json.loads((RESULTS / "ablations.json").read_text())
    assert (RESULTS / "ablations.md").read_text() == ablations.page(record)
    assert record["settings"] == {name: own.options for name, own in ablations.ABLATIONS.items()}
    assert record["runs"].keys() <= ablations.ROWS.keys()
