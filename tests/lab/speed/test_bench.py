"""The bench prints its tables, at tiny sizes, takes times and memory as it says, and notices what a device computes wrongly."""

import argparse
import dataclasses
import re

import pytest
import torch

from accelerated.lab.speed import __main__ as bench
from accelerated.lab.speed import agreement, steps, timing
from accelerated.lab.speed.timing import measured_rows
from accelerated.lab.speed.variants import Variant
from accelerated.models import NAMES, presets_of
from accelerated.replay import BACKPROP
from accelerated.training.settings import COMPILERS
from tests.helpers.variants import PAPERS

CPU = torch.device("cpu")
BASELINES = {
    model: presets_of(model).SPEED.get("baseline", ["the same through_time"])[0] for model in NAMES
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    torch.set_default_dtype(torch.float32)
    for model in NAMES:
        sizes = dataclasses.asdict(PAPERS[model].small)
        facts = presets_of(model).SPEED | {
            "sizes": sizes,
            "small": {},
            "segments": 1,
            "horizons": (1, 2),
            "lanes": {"cpu": 2},
        }
        facts |= {"replayed": {"one model": {}, "another": {}}} if model == "memformer" else {}
        monkeypatch.setattr(presets_of(model), "SPEED", facts)
    monkeypatch.setattr(
        steps,
        "large_product",
        lambda device, dtype: Variant(lambda: torch.ones(2, 2) @ torch.ones(2, 2), 16),
    )
    monkeypatch.setattr(steps, "POSITIONS", (10, 100))
    monkeypatch.setattr(steps, "TOKENS", 4)
    monkeypatch.setattr(
        timing, "peak_memory", lambda step, device: [step(), 1_000_000][1]
    )  # a profiler is slow


def tables(capsys, *argv):
    """[(head of the first column, the rows of cells)] of all tables that a command prints."""
    bench.main([*argv, "--device", "cpu"])
    blocks = re.findall(r"(?:^\|.*\n)+", capsys.readouterr().out, re.M)
    split = [[line.strip("| ").split(" | ") for line in block.splitlines()] for block in blocks]
    return [(head[0], rows) for head, _, *rows in split]


STEPS = {
    f"steps --model {model}": [("a step of", [model, BASELINES[model], "one large product"])]
    for model in NAMES
}
PRINTED = STEPS | {  # {command: (head of the first column, names of the rows) of each table}
    "horizons --model memformer compressive": [(f"horizon {n}", [*BACKPROP]) for n in (1, 2)]
    * 3,  # Memformer has two models
    "generation --model pretrained_recurrence": [
        ("pretrained_recurrence, 4 tokens", ["after 10", "after 100"])
    ],
}


@pytest.mark.parametrize("command", PRINTED)
def test_a_command_prints_its_tables_for_every_model_that_is_named(command, capsys):
    printed = tables(capsys, *command.split(), "--repeats", "2")
    assert [
        (head, [row[0] for row in rows if row[-1] == "2"]) for head, rows in printed
    ] == PRINTED[command]


def test_a_compiled_step_has_one_segment(capsys, monkeypatch):
    """A CUDA graph of a segment cannot be used again before its backward pass."""
    horizons, rollout = [], steps.rollout
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(
        steps, "rollout", lambda *given: horizons.append(given[2]) or rollout(*given)
    )
    [(_, rows)] = tables(capsys, "compile", "--model", "compressive", "--repeats", "2")
    assert [row[0] for row in rows if row[-1] == "2"] == list(COMPILERS) and horizons == [1] * len(
        rows
    )


def options(**changes):
    return argparse.Namespace(**{"device": CPU, "repeats": 1, "seconds": 60.0} | changes)


def test_a_variant_that_fails_is_a_row():
    """While it is made, in its first step or in a later one; the others are timed. After the deadline nothing more is made."""

    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory.\nsecond line")

    calls = iter(range(3))  # its first, that of its peak, and a warm-up
    steps = {"good": lambda: None, "run": fail, "later": lambda: next(calls)}
    makers = {"made": fail} | {
        name: lambda step=step: Variant(step, 5e9) for name, step in steps.items()
    }
    made, good, run, late = measured_rows(makers, options())
    assert (
        made[1] == run[1] == "OutOfMemoryError: CUDA out of memory."
        and late[1] == "StopIteration: "
    )
    assert good[2:5] == ("-", "1.0", "-") and good[-1] == 1, "the first has no time to compare with"
    assert {row[1] for row in measured_rows(makers, options(seconds=-1))} == {"no time was left"}


def test_rows_compare_pair_by_pair(monkeypatch):
    spent, peaks = {"a": [1.0, 4.0, 9.0], "b": [2.0, 2.0, 3.0]}, iter([2e6, 3e6])
    monkeypatch.setattr(timing, "time_in_turn", lambda *given: spent)
    monkeypatch.setattr(timing, "peak_memory", lambda *given: next(peaks))
    first, second = measured_rows(
        {name: lambda: Variant(lambda: None, 6e9) for name in "ab"}, options()
    )
    assert first == (
        "a",
        "4,000.0 (1,000.0..9,000.0)",
        "1.000 (1.000..1.000)",
        "2.0",
        "1.00",
        "2",
        3,
    )
    assert second == (
        "b",
        "2,000.0 (2,000.0..3,000.0)",
        "2.000 (0.500..3.000)",
        "3.0",
        "1.50",
        "3",
        3,
    )


def test_the_time_budget_ends_the_repeats(monkeypatch):
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    calls = dict.fromkeys("ab", lambda: next(clock))  # a call takes as long as a look at the clock
    assert [timing.time_in_turn(calls, 9, CPU, most)["b"] for most in (-1, 120, float("inf"))] == [
        [20] * n for n in (1, 2, 9)
    ]


def test_every_model_agrees(capsys):
    [(_, rows)] = tables(capsys, "agreement")
    compared = {
        "float32": {"logits", "generation", "gradients"},
        "bfloat16": {"logits", "generation", "gradients, 1 - cosine"},
    }
    for dtype, names in compared.items():
        assert all(
            names < {row[2] for row in rows if row[:2] == [model, dtype]} for model in NAMES
        ), "and states"
    assert all(row[5] == "ok" and float(row[3]) <= float(row[4]) for row in rows)


def test_a_disagreement_is_a_row_and_the_exit_code(capsys, monkeypatch):
    """Gradients that are NaN, gradients that point elsewhere, and a model that raises."""
    numbers = torch.arange(1.0, 5)
    wrong = {"block_recurrent": numbers * torch.nan, "memorizing": numbers.flip(0)}

    def results(model, device, dtype):
        if dtype != torch.float64 and model == "memformer":
            raise RuntimeError("device lost")
        return {"gradients": numbers if dtype == torch.float64 else wrong.get(model, numbers)}

    monkeypatch.setattr(agreement, "model_results", results)
    with pytest.raises(SystemExit, match="1"):
        bench.main(["agreement", "--device", "cpu"])
    failed = [
        line.split(" | ")[2]
        for line in capsys.readouterr().out.splitlines()
        if line.endswith("FAIL |")
    ]
    error, cosine = "RuntimeError: device lost", "gradients, 1 - cosine"
    assert failed == ["gradients", error, "gradients", cosine, error, cosine]


@pytest.mark.parametrize(
    "value, error", [(1.5, 0.5), (torch.nan, torch.inf), (torch.inf, torch.inf)]
)
def test_nothing_but_numbers_agrees(value, error):
    assert agreement.relative_error(torch.ones(3), torch.tensor([1.0, value, 1.0])) == error
    assert agreement.relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert agreement.relative_error(torch.zeros(2), torch.ones(2)) > 1
