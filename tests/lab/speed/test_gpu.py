"""The table `agreement`, at small sizes on a CPU."""

import pytest
import torch

from accelerated.lab.speed import __main__ as bench
from accelerated.lab.speed import agreement
from accelerated.models import NAMES, presets_of

PRESENT = agreement.model_results


@pytest.fixture(autouse=True)
def small(monkeypatch):
    torch.set_default_dtype(torch.float32)
    for model in NAMES:
        facts = presets_of(model).SPEED
        sizes = facts["sizes"] | facts["small"] | {"width": 32, "feed_forward": 32}
        monkeypatch.setattr(presets_of(model), "SPEED", facts | {"sizes": sizes, "small": {}})


def compared(capsys):
    """The rows of the table that was printed."""
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    return [line[2:-2].split(" | ") for line in lines[2:]]


def test_every_model_agrees(capsys):
    bench.main(["agreement", "--device", "cpu"])
    rows = compared(capsys)
    assert {(row[0], row[1]) for row in rows} == {(model, dtype) for model in NAMES for dtype in ("float32", "bfloat16")}
    for model in NAMES:
        assert {"logits", "generation", "gradients"} <= {row[2] for row in rows if row[:2] == [model, "float32"]}
        assert any(row[2].startswith("state: ") for row in rows if row[0] == model)
    assert all(row[5] == "ok" and float(row[3]) <= float(row[4]) for row in rows)


def test_a_disagreement_is_a_row_and_the_exit_code(capsys, monkeypatch):
    """Logits by a twentieth, gradients that point elsewhere or are NaN, and a model that raises."""

    def results(model, device, dtype):
        found = PRESENT(model, device, dtype)
        if dtype == torch.float64:
            return found
        if model == "memformer":
            raise RuntimeError("device | lost\nmore")
        if model == "compressive":
            return found | {"logits": found["logits"] * 1.05}
        changes = {"memorizing": found["gradients"].flip(0), "block_recurrent": found["gradients"] * float("nan")}
        return found | {"gradients": changes.get(model, found["gradients"])}

    monkeypatch.setattr(agreement, "model_results", results)
    with pytest.raises(SystemExit) as stopped:
        bench.main(["agreement", "--device", "cpu"])
    failed = [tuple(row[:3]) for row in compared(capsys) if row[-1] == "FAIL"]
    gradients = {"float32": "gradients", "bfloat16": "gradients, 1 - cosine"}
    assert stopped.value.code == 1 and failed == [
        (model, dtype, what)
        for dtype in ("float32", "bfloat16")
        for model, what in (
            ("block_recurrent", gradients[dtype]),
            ("compressive", "logits"),
            ("memformer", "RuntimeError: device / lost"),
            ("memorizing", gradients[dtype]),
        )
    ]


def test_nothing_but_numbers_agrees():
    expected = torch.ones(3)
    for value, error in ((1.5, 0.5), (float("nan"), float("inf")), (float("inf"), float("inf"))):
        assert agreement.relative_error(expected, torch.tensor([1.0, value, 1.0])) == error
    assert agreement.relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert agreement.relative_error(torch.zeros(2), expected[:2]) > 1
