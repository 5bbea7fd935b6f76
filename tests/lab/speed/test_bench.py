"""The bench prints its tables, at tiny sizes."""

import dataclasses
import importlib.util
import re

import pytest
import torch

from accelerated.block_recurrent import BlockRecurrent
from accelerated.compressive import Compressive
from accelerated.lab.speed import __main__ as bench
from accelerated.lab.speed import generation, horizons, timing
from accelerated.lab.speed.timing import SEGMENTS, SIZES, matmul_rate
from accelerated.memformer import Memformer
from accelerated.memorizing import Memorizing
from accelerated.pretrained_recurrence import PretrainedRecurrence
from accelerated.program.errors import InputError

TINY = {
    "block_recurrent": BlockRecurrent.Config(
        width=8, layers=1, heads=2, head_width=4, feed_forward=8, window=2, segment=4, recurrent_layers=(1,), states=2
    ),
    "compressive": Compressive.Config(
        width=8, layers=1, heads=2, head_width=4, feed_forward=8, segment=4, memory=4, compressed_memory=2, compression_rate=2
    ),
    "memformer": Memformer.Config(
        width=8, encoder_layers=1, decoder_layers=1, heads=2, head_width=4, feed_forward=8, segment=4, slots=2
    ),
    "memorizing": Memorizing.Config(
        width=8, layers=1, heads=2, head_width=4, feed_forward=8, segment=4, memory_layer=1, memory=8, retrieved=2
    ),
    "pretrained_recurrence": PretrainedRecurrence.Config(
        width=8, layers=2, heads=2, feed_forward=8, max_positions=8, segment=4, module_width=4
    ),
}
BASELINES = {
    "block_recurrent": ("block-recurrent 1L fixed:skip", "slide 2L"),
    "compressive": ("compressive 1L conv", "transformer-xl 1L, memory 6"),
    "memformer": ("memformer 1+1L memory_replay", "memformer 1+1L through_time"),
    "memorizing": ("memorizing 1L, 2 of 8", "transformer-xl 1L"),
    "pretrained_recurrence": ("GPT-2 2L with recurrence", "plain GPT-2 2L"),
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    torch.set_default_dtype(torch.float32)
    for model, config in TINY.items():
        monkeypatch.setitem(SIZES, model, config)
    monkeypatch.setattr(timing, "matmul_rate", lambda device, dtype: 1e6)
    monkeypatch.setattr(horizons, "HORIZONS", (1, 2))
    monkeypatch.setattr(horizons, "WINDOWS", (1, 2))
    monkeypatch.setitem(SEGMENTS, "memformer", 2)


def run(table, *argv):
    bench.main([table, "--device", "cpu", "--batch", "2", "--repeats", "1", *argv])


def test_memformers_two_models_are_the_papers_sizes():
    layers = [(c.encoder_layers, c.decoder_layers) for c in horizons.configs_to_compare("memformer", TINY["memformer"]).values()]
    assert layers == [(4, 8), (0, 12)]


@pytest.mark.parametrize("model", TINY)
def test_horizons(model, capsys, monkeypatch):
    both = {layers: dataclasses.replace(TINY["memformer"], encoder_layers=layers) for layers in (1, 0)}
    compared = horizons.configs_to_compare
    monkeypatch.setattr(horizons, "configs_to_compare", lambda *given: both if model == "memformer" else compared(*given))
    run("horizons", "--model", model)
    rows = re.findall(r"^(\d+) +(\w+) +\d+ ", capsys.readouterr().out, re.M)
    methods = ["through_time", "checkpointed", "memory_replay"]
    titles = 2 if model == "memformer" else 1
    assert rows == [(horizon, method) for _ in range(titles) for horizon in "12" for method in methods]


@pytest.mark.parametrize("model", TINY)
def test_steps(model, capsys):
    run("steps", "--model", model)
    printed = capsys.readouterr().out
    name, baseline = BASELINES[model]
    rows = {line.split("   ")[0].strip(): line.split() for line in printed.splitlines()}
    assert name in rows and baseline in rows and f"time of {name} / {baseline}: " in printed
    assert rows[name][-1].endswith("%") and float(rows[name][-1][:-1]) > 0, "share of the rate of matrix products"
    if model == "memformer":
        assert "L encoder 1, L decoder 1" in printed and "S slots 2" in printed
    if model == "pretrained_recurrence":
        assert ("transformers" in printed) == bool(importlib.util.find_spec("transformers"))


def test_the_default_is_steps_of_block_recurrent(capsys):
    bench.main(["--device", "cpu", "--batch", "2", "--repeats", "1"])
    assert "block-recurrent 1L" in capsys.readouterr().out


def test_generation(capsys, monkeypatch):
    monkeypatch.setattr(generation, "POSITIONS", (10, 100))
    monkeypatch.setattr(generation, "NAMES", ("block_recurrent",))
    bench.main(["generation", "--repeats", "1"])
    printed = capsys.readouterr().out
    assert re.search(r"^model +ms after 10 +ms after 100 +ratio$", printed, re.M)
    assert re.search(r"^block_recurrent( +\d+\.\d+ \(\d+\.\d+\.\.\d+\.\d+\)){3}$", printed, re.M)


@pytest.mark.parametrize(
    "argv,words",
    [(["steps", "--repeats", "0"], "--repeats 0 and --batch 4 must"), (["--batch", "0"], "--repeats 9 and --batch 0 must be")],
)
def test_impossible_numbers_are_refused(argv, words):
    with pytest.raises(InputError, match=words):
        bench.main(argv)


@pytest.mark.parametrize("argv,words", [(["step"], "steps"), (["generation", "--model", "memformer"], "--model")])
def test_unknown_tables_and_options_are_refused_in_one_line(argv, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(argv)
    printed = capsys.readouterr().err
    assert stopped.value.code == 2 and printed.count("\n") == 1 and words in printed


def test_peak_memory_counts_what_is_held_at_once():
    def step(keep):
        held = [torch.zeros(250_000) for _ in range(3 if keep else 1)]  # 1 MB each
        for _ in range(4):
            torch.zeros(250_000)
        return held

    device = torch.device("cpu")
    one, three = (timing.peak_memory(lambda keep=keep: step(keep), device) for keep in (False, True))
    assert 2e6 <= one < 2.1e6 and 4e6 <= three < 4.1e6


def test_paired_ratios_divide_pair_by_pair():
    assert timing.paired_ratios([1.0, 4.0, 9.0], [2.0, 2.0, 3.0]) == [0.5, 2.0, 3.0]


def test_the_rate_of_matrix_products_counts_their_operations(monkeypatch):
    monkeypatch.setattr(timing, "seconds", lambda function, device: 0.5)
    assert matmul_rate(torch.device("cpu"), torch.float32, size=8, repeats=3) == 2 * 8**3 / 0.5


def test_spread_is_median_and_range():
    assert timing.spread([3.0, 1.0, 8.0], ".1f") == "3.0 (1.0..8.0)"
