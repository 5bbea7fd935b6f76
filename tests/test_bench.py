"""The bench prints its tables, at sizes that take no time."""

import importlib.util
import re

import pytest
import torch
from test_corpus import documents_of

from accelerated.bench import __main__ as bench
from accelerated.bench import timing as timing
from accelerated.block_recurrent import BlockRecurrent
from accelerated.compressive import Compressive
from accelerated.errors import InputError
from accelerated.memformer import Memformer
from accelerated.pretrained_recurrence import PretrainedRecurrence

WINDOWED = PretrainedRecurrence.Config(width=8, layers=2, heads=2, feed_forward=8, max_positions=8, segment=4, module_width=4)
TINY = Memformer.Config(width=8, encoder_layers=1, decoder_layers=1, heads=2, head_width=4, feed_forward=8, segment=4, slots=2)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.setitem(bench.SIZES, ("memformer", "cpu"), TINY)
    monkeypatch.setattr(bench, "HORIZONS", (1, 2))
    monkeypatch.setattr(bench, "WINDOWS", (1, 2))
    monkeypatch.setattr(bench, "PEERS", {"memformer": ("no such package", None)})


def run(*argv):
    bench.main(["--model", "memformer", "--device", "cpu", "--batch", "2", "--repeats", "1", *argv])


def test_horizons(capsys):
    run("--table", "horizons")
    rows = re.findall(r"^ +(\d+) (\w+) +\d+ ", capsys.readouterr().out, re.M)
    methods = ["through_time", "checkpointed", "memory_replay"]
    assert rows == [(horizon, method) for _ in range(2) for horizon in "12" for method in methods]


@pytest.mark.parametrize("model,config", [
    ("block_recurrent", BlockRecurrent.Config(width=8, layers=1, heads=2, head_width=4, feed_forward=8, window=2, segment=4,
                                              recurrent_layers=(1,), states=2)),
    ("compressive", Compressive.Config(width=8, layers=1, heads=2, head_width=4, feed_forward=8, segment=4, memory=4,
                                       compressed_memory=2, compression_rate=2)),
    ("pretrained_recurrence", WINDOWED),
])  # fmt: skip
def test_horizons_of_the_other_models(model, config, capsys, monkeypatch):
    monkeypatch.setitem(bench.SIZES, (model, "cpu"), config)
    monkeypatch.setattr(bench, "PEERS", {model: ("no such package", None)})
    bench.main(["--model", model, "--device", "cpu", "--batch", "2", "--repeats", "1", "--table", "horizons"])
    assert len(re.findall(r"^ +(\d+) (\w+) +\d+ ", capsys.readouterr().out, re.M)) == 6


def test_positions(capsys):
    run("--table", "positions")
    printed = capsys.readouterr().out
    parameters = {name: int(count.replace(",", "")) for name, count in re.findall(r"^(\w+) .* ([\d,]+)$", printed, re.M)}
    assert parameters["transformer_xl"] > 1.3e6 and parameters["simplified"] < 1.06e6
    assert "time of simplified / transformer_xl" in printed


def test_steps(capsys):
    run()
    printed = capsys.readouterr().out
    assert "memformer 1+1L memory_replay" in printed and "/ memformer 1+1L through_time" in printed
    assert "L encoder 1, L decoder 1" in printed and "S slots 2" in printed


def test_steps_and_overlaps_of_pretrained_recurrence(capsys, monkeypatch):
    monkeypatch.setitem(bench.SIZES, ("pretrained_recurrence", "cpu"), WINDOWED)
    monkeypatch.setattr(bench, "PEERS", {"pretrained_recurrence": ("transformers", bench.pretrained_recurrence_peer)})
    monkeypatch.setattr(bench, "OVERLAPS", (0, 1, 3, 4))
    monkeypatch.setattr(bench, "random_document", lambda length, vocabulary: documents_of([length // 1000])[0])
    argv = ["--model", "pretrained_recurrence", "--device", "cpu", "--batch", "2", "--repeats", "1"]
    bench.main(argv)
    printed = capsys.readouterr().out
    assert "GPT-2 2L with recurrence" in printed and "/ plain GPT-2 2L" in printed
    assert ("transformers" in printed) == bool(importlib.util.find_spec("transformers"))
    bench.main([*argv, "--table", "overlaps"])
    rows = re.findall(r"^ +(\d+) .* (\S+) +\S+$", capsys.readouterr().out, re.M)
    assert rows == [("0", "1.000"), ("1", "1.333"), ("3", "4.000")]


@pytest.mark.parametrize("argv,words", [(["--table", "step"], "nearest: steps"), (["--repeats", "0"], "must be at least 1")])
def test_what_cannot_work_is_refused(argv, words):
    with pytest.raises(InputError, match=words):
        run(*argv)


def test_peak_memory_counts_what_is_held_at_once():
    def step(keep):
        held = [torch.zeros(250_000) for _ in range(3 if keep else 1)]  # 1 MB each
        for _ in range(4):
            torch.zeros(250_000)
        return held

    device = torch.device("cpu")
    one, three = (timing.peak_memory(lambda keep=keep: step(keep), device) for keep in (False, True))
    assert 2e6 <= one < 2.1e6 and 4e6 <= three < 4.1e6


def test_pairs_are_of_steps_that_took_turns():
    assert timing.paired_ratios([1.0, 4.0, 9.0], [2.0, 2.0, 3.0]) == [0.5, 2.0, 3.0]
