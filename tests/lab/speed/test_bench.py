"""The bench prints its tables, at tiny sizes, and takes times and memory as it says."""

import argparse
import dataclasses
import re
from functools import partial

import pytest
import torch

from accelerated.lab.speed import __main__ as bench
from accelerated.lab.speed import packages, steps, timing
from accelerated.lab.speed.timing import measured, print_measured
from accelerated.lab.speed.variants import MEASURED, Variant
from accelerated.models import presets_of
from accelerated.replay import BACKPROP
from tests.helpers.variants import PAPERS

CPU = torch.device("cpu")
PEAK_MEMORY = timing.peak_memory  # which `tiny` replaces


def rows_of_steps(model):
    """The rows of its table: itself, what it is compared with, and a product."""
    facts = presets_of(model).BENCHMARK
    beside = [facts["baseline"][0]] if "baseline" in facts else []
    if facts.get("backprop", "through_time") != "through_time":
        beside = ["the same through_time", *beside]
    return [model, *beside, "one large product"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    torch.set_default_dtype(torch.float32)
    for model in MEASURED:
        facts = presets_of(model).BENCHMARK | {
            "sizes": dataclasses.asdict(PAPERS[model].small),
            "small": {},
            "segments": 1,
            "horizons": (1, 2),
            "lanes": {"cpu": 2},
        }
        if model == "memformer":
            facts["replayed"] = {"one model": {}, "another": {}}
        monkeypatch.setattr(presets_of(model), "BENCHMARK", facts)

    def small_product(device, dtype):
        return Variant(lambda: torch.ones(2, 2) @ torch.ones(2, 2), 16)

    def without_profiler(step, device):  # which is slow
        step()
        return 1_000_000

    monkeypatch.setattr(steps, "large_product", small_product)
    monkeypatch.setattr(steps, "POSITIONS", (10, 100))
    monkeypatch.setattr(steps, "TOKENS", 4)
    monkeypatch.setattr(timing, "peak_memory", without_profiler)


def tables(capsys, *argv):
    """[(head of the first column, the rows of cells)] of all tables that a command prints."""
    bench.main([*argv, "--device", "cpu"])
    blocks = re.findall(r"(?:^\|.*\n)+", capsys.readouterr().out, re.M)
    found = []
    for block in blocks:
        head, _, *rows = [line.strip("| ").split(" | ") for line in block.splitlines()]
        found.append((head[0], rows))
    return found


# {command: (head of the first column, names of the rows) of each table}
PRINTED = {f"steps --model {model}": [("a step of", rows_of_steps(model))] for model in MEASURED}
TWO_HORIZONS = [("horizon 1", [*BACKPROP]), ("horizon 2", [*BACKPROP])]
PRINTED["horizons --model memformer compressive"] = TWO_HORIZONS * 3  # Memformer has two models
PRINTED["horizons --model compressive --horizons 3"] = [("horizon 3", [*BACKPROP])]
GENERATION = ("pretrained_recurrence, 4 tokens", ["after 10", "after 100"])
PRINTED["generation --model pretrained_recurrence"] = [GENERATION]


@pytest.mark.parametrize("command", PRINTED)
def test_a_command_prints_its_tables_for_every_model_that_is_named(command, capsys):
    printed = tables(capsys, *command.split(), "--repeats", "2")
    names = [(head, [row[0] for row in rows]) for head, rows in printed]
    assert names == PRINTED[command]


def test_the_type_that_is_asked_for_is_measured(monkeypatch):
    given = []
    monkeypatch.setitem(bench.TABLES, "steps", given.append)
    for dtype in ("float32", "bfloat16"):
        bench.main(["steps", "--model", "compressive", "--device", "cpu", "--dtype", dtype])
    assert [options.dtype for options in given] == ["float32", "bfloat16"]


@pytest.mark.parametrize("model", packages.PACKAGES)
def test_a_step_of_a_public_package_stands_beside_ours(model, capsys, monkeypatch):
    """Each at sizes that both can have."""
    package, _ = packages.PACKAGES[model]
    pytest.importorskip(package, reason=f"needs {package} (docs/public.md)")
    config = presets_of(model).Config
    both = {"width": 16, "heads": 2, "head_width": 8, "feed_forward": 32, "memory": 8, "window": 4}
    names = {field.name for field in dataclasses.fields(config)}
    sizes = presets_of(model).BENCHMARK["sizes"] | {
        name: value for name, value in both.items() if name in names
    }
    monkeypatch.setitem(presets_of(model).BENCHMARK, "sizes", sizes)
    [(head, rows)] = tables(capsys, "packages", "--model", model, "--repeats", "2")
    assert head == f"a step of {model}"
    assert [row[0] for row in rows] == ["ours", package]


def test_a_package_that_is_not_installed_takes_one_line(capsys, monkeypatch):
    monkeypatch.setitem(packages.PACKAGES, "memformer", ("no_such_package", packages.memformer))
    bench.main(["packages", "--model", "memorizing", "memformer", "--device", "cpu"])
    _, _, memorizing, _, memformer, *_ = capsys.readouterr().out.split("\n")
    assert memorizing == "memorizing: no package is timed beside it"
    assert memformer.startswith("memformer: no_such_package is not installed")


def options(**changes):
    return argparse.Namespace(**{"device": CPU, "repeats": 1} | changes)


def test_variants_take_as_many_turns_as_are_asked_for():
    """One after another, so that a noisy machine slows all of them; the first are warm-ups."""
    turns = []
    makers = {name: partial(Variant, partial(turns.append, name)) for name in "ab"}
    found = measured(makers, options(repeats=3))
    assert "".join(turns).endswith("aabb" + 3 * "ab"), turns
    assert [len(own.seconds) for own in found.values()] == [3, 3]


def test_rows_compare_pair_by_pair(monkeypatch, capsys):
    spent = {"a": [1.0, 4.0, 9.0], "b": [2.0, 2.0, 3.0]}
    peaks = iter([2e6, 3e6])
    monkeypatch.setattr(timing, "time_in_turn", lambda *given: spent)
    monkeypatch.setattr(timing, "peak_memory", lambda *given: next(peaks))
    makers = dict.fromkeys("ab", lambda: Variant(lambda: None, 6e9))
    print_measured("a step of", measured(makers, options()))
    assert capsys.readouterr().out.splitlines()[2:4] == [
        "| a | 4,000.0 (1,000.0..9,000.0) | 1.000 (1.000..1.000) | 2.0 | 1.00 | 2 |",
        "| b | 2,000.0 (2,000.0..3,000.0) | 2.000 (0.500..3.000) | 3.0 | 1.50 | 3 |",
    ]


def test_peak_memory_is_the_most_that_is_held_at_once():
    def step():
        torch.empty(1_000_000)  # freed at once
        torch.empty(500_000)

    assert PEAK_MEMORY(step, CPU) == pytest.approx(4e6, rel=1e-3)


def test_a_turn_is_timed_from_its_beginning_to_its_end(monkeypatch):
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    calls = dict.fromkeys("ab", lambda: next(clock))  # a call takes as long as a look at the clock
    assert timing.time_in_turn(calls, 9, CPU)["b"] == [20] * 9


BASELINES = {  # {model: fields of TEST_CONFIG that its baseline changes}
    "block_recurrent": {"layers": 3 + 1, "recurrent_layers": ()},
    "compressive": {"memory": 12 + 5, "compressed_memory": 0},
    "memorizing": {"memory": 0},
    "pretrained_recurrence": {"vectors": 0},
}


@pytest.mark.parametrize("model", BASELINES)
def test_a_baseline_is_as_large_as_its_name_says(model):
    facts = presets_of(model)
    _, changes = facts.BENCHMARK["baseline"]
    assert changes(facts.TEST_CONFIG) == BASELINES[model]
