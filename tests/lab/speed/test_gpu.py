"""The page of `python -m accelerated.lab.speed gpu`, at tiny sizes on a CPU: all sections and rows, failures as rows."""

import dataclasses
import re

import pytest
import torch
from variants import PAPERS

from accelerated.attention import content
from accelerated.lab.speed import __main__ as bench
from accelerated.lab.speed import agreement, gpu, steps, timing
from accelerated.lab.speed.timing import Variant
from accelerated.program.errors import InputError
from accelerated.training.settings import COMPILERS

CPU = torch.device("cpu")
TINY = {name: paper.small for name, paper in PAPERS.items()}
SETTING = gpu.Setting(CPU, TINY, gpu.paper_setting(CPU).small, dict.fromkeys(TINY, 4), (5, 12), 2, 60.0)


@pytest.fixture
def setting(monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(gpu, "REPEATS", 1)
    monkeypatch.setattr(timing, "peak_memory", lambda step, device: step() is None or 1)  # a profiler is slow
    for model in TINY:
        monkeypatch.setitem(timing.SEGMENTS, model, 1)
    both = {layers: dataclasses.replace(TINY["memformer"], encoder_layers=layers) for layers in (2, 0)}
    monkeypatch.setattr(gpu.horizons, "configs_to_compare", lambda model, config: both)
    monkeypatch.setattr(steps.importlib.util, "find_spec", lambda package: None)
    monkeypatch.setattr(timing, "matmul_rate", lambda device, dtype: 1e12)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    return SETTING


@pytest.fixture
def with_a_gpu(monkeypatch, setting):
    """Let the command take the CPU for a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "choose_device", lambda name: CPU)
    monkeypatch.setattr(gpu, "paper_setting", lambda device: setting)


def rows_of(page, title):
    """The cells of a section's table rows, without heads."""
    section = page.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    heads = {n for n, row in enumerate(rows) if row[0] == "---"}
    return [row for n, row in enumerate(rows) if n not in heads and n + 1 not in heads]


def check_markdown(page):
    """Lines of at most 120 characters, and in each table as many cells in every row."""
    assert max(map(len, page.splitlines())) <= 120
    for block in re.findall(r"(?:^\|.*\n)+", page, re.M):
        lines = block.splitlines()
        assert len({line.count("|") for line in lines}) == 1 and set(lines[1]) <= set("|- "), block
        assert f"\n\n{block}" in page or page.startswith(block), "a table begins after an empty line"


def test_the_page(with_a_gpu, tmp_path, capsys):
    path = tmp_path / "speed.md"
    bench.main(["gpu", "--out", str(path)])
    page = path.read_text()
    check_markdown(page)
    assert "0 rows of agreement fail" in capsys.readouterr().out
    for fact in (torch.__version__, "`python -m accelerated.lab.speed gpu --out FILE.md`", "| card | cpu |"):
        assert fact in page
    titles = re.findall(r"^## (.*)$", page, re.M)
    assert titles == ["Agreement with the CPU", *gpu.SECTIONS]
    compared = rows_of(page, titles[0])
    assert {row[0] for row in compared} == {*TINY, *(f"{name} attention" for name in agreement.attentions(CPU))}
    assert {(row[0], row[1]) for row in compared} == {(row[0], dtype) for row in compared for dtype in ("float32", "bfloat16")}
    for name in TINY:
        assert {"logits", "generation", "gradients"} <= {row[2] for row in compared if row[0] == name and row[1] == "float32"}
    assert all(row[-1] == "ok" and float(row[3]) <= float(row[4]) for row in compared)
    assert len(rows_of(page, "A training step")) == sum(len(steps.makers_of(SETTING.options(model))) for model in TINY)
    assert [row[0] for row in rows_of(page, "The Block-Recurrent paper's Table 1")] == list(gpu.TABLE_1)
    assert [row[0] for row in rows_of(page, "Memformer's Table 3")] == [*gpu.TABLE_3] * 2
    assert [row[0] for row in rows_of(page, "Generation")] == list(TINY)
    assert [row[:2] for row in rows_of(page, "torch.compile")] == [[m, way] for m in TINY for way in COMPILERS]
    assert not re.search("Error: |no time", page)


def test_a_disagreement_is_a_row_and_the_exit_code(with_a_gpu, monkeypatch, tmp_path):
    """One attention by half, a model that raises; the page is written all the same."""
    monkeypatch.setattr(gpu, "SECTIONS", {})
    right, models = content.content_attention, agreement.model_results

    def wrong(*inputs, causal=False):
        return right(*inputs, causal=causal) * (1.05 if causal and inputs[0].dtype != torch.float64 else 1)

    def raising(model, config, device, dtype):
        if dtype != torch.float64 and model == "memformer":
            raise RuntimeError("device | lost\nmore")
        return models(model, config, device, dtype)

    monkeypatch.setattr(content, "content_attention", wrong)
    monkeypatch.setattr(agreement, "model_results", raising)
    with pytest.raises(SystemExit) as stopped:
        bench.main(["gpu", "--out", str(tmp_path / "speed.md")])
    page = (tmp_path / "speed.md").read_text()
    check_markdown(page)
    failed = [row for row in rows_of(page, "Agreement with the CPU") if row[-1] == "FAIL"]
    assert stopped.value.code == 1 and {(row[0], row[2]) for row in failed} == {
        ("causal attention", "output"), ("causal attention", "gradients"), ("memformer", "RuntimeError: device / lost"),
    }  # fmt: skip


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nothing_but_numbers_agrees(value):
    expected = torch.ones(3)
    assert agreement.relative_error(expected, torch.tensor([1.0, 1.5, 1.0])) == 0.5
    assert agreement.relative_error(expected, torch.tensor([1.0, value, 1.0])) == float("inf")
    assert (
        agreement.relative_error(torch.zeros(2), torch.zeros(2)) == 0
        and agreement.relative_error(torch.zeros(2), expected[:2]) > 1
    )


def test_a_variant_that_fails_is_a_row(setting, monkeypatch):
    """While it is made and while it runs; the others are timed. After the deadline nothing more is made."""

    def out_of_memory():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB\nsecond line")

    good = lambda: Variant("", lambda: torch.zeros(1000))  # noqa: E731
    steps = iter([torch.zeros] * 3)  # its first, that of its peak, and a warm-up
    later = lambda: next(steps)(1000) if steps.__length_hint__() else out_of_memory()  # noqa: E731
    makers = {"made": out_of_memory, "good": good, "run": lambda: Variant("", out_of_memory), "later": lambda: Variant("", later)}
    found = gpu.measured(makers, setting, 0.1)
    assert list(found) == list(makers)
    assert found["good"].seconds and found["good"].peak == 1 and not found["good"].error
    for name in ("made", "run", "later"):
        assert found[name].error == "OutOfMemoryError: CUDA out of memory. Tried to allocate 3 GiB"[:60]
        assert not found[name].seconds
    assert gpu.measured(makers, setting, 0.0)["good"].error == "no time was left"
    assert gpu.ratio(found["made"], found["good"]) == "-"


def test_a_compiled_step_has_one_segment(setting, monkeypatch):
    """A CUDA graph of a segment cannot be used again before its backward pass."""
    counts, draw = [], timing.random_segments
    monkeypatch.setattr(timing, "random_segments", lambda *sizes: counts.append(sizes[3]) or draw(*sizes))
    monkeypatch.setattr(
        gpu, "measured", lambda makers, *_: {n: make() and gpu.Measured([1.0], 0, 0) for n, make in makers.items()}
    )
    assert list(gpu.compiled(setting)) and set(counts) == {1} and len(counts) == len(TINY) * len(COMPILERS)


def test_the_time_budget_ends_the_repeats(monkeypatch):
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    variants = [Variant(name, lambda: None) for name in "ab"]
    assert [len(timing.time_in_turn(variants, 9, CPU, budget)["b"]) for budget in (-1, 60, float("inf"))] == [1, 2, 9]


def test_table_1_is_the_papers():
    """Sizes of the paper's section 4.1, from the preset."""
    base = gpu.paper_setting(CPU).configs["block_recurrent"]
    for name in gpu.TABLE_1:
        c = gpu.config_of_table_1(name, base)
        kind, *rest = name.split(":")
        assert c.layers == (13 if name == "Slide:13L" else 12) and c.feedback == (kind == "Feedback")
        assert (c.window, c.segment) == ((int(rest[0]), int(rest[0])) if kind == "XL" else (512, 4096))
        assert bool(c.recurrent_layers) == (kind in ("Rec", "Feedback"))
        if c.recurrent_layers:
            assert [c.gate, c.configuration] == rest
    assert base.dropout == 0.05 and base.vocabulary == 32_000


def test_without_a_gpu_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="torch finds none"):
        bench.main(["gpu", "--out", str(tmp_path / "speed.md")])
    assert not list(tmp_path.iterdir())


def test_a_file_is_not_overwritten(with_a_gpu, tmp_path, monkeypatch):
    """--out is checked before anything is measured."""
    path = tmp_path / "speed.md"
    path.write_text("mine")
    monkeypatch.setattr(gpu, "write_page", lambda *given: pytest.fail("measured"))
    for out, words in ((path, "exists already"), (tmp_path / "none" / "speed.md", "cannot write"), (tmp_path, "exists already")):
        with pytest.raises(InputError, match=words):
            bench.main(["gpu", "--out", str(out)])
    assert path.read_text() == "mine"


def test_what_was_measured_before_an_interruption_is_kept(with_a_gpu, tmp_path, monkeypatch):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "agreement", lambda setting: (["all agree"], 0))
    monkeypatch.setattr(gpu, "SECTIONS", {"First": lambda setting: ["one"], "Second": interrupted})
    with pytest.raises(KeyboardInterrupt):
        bench.main(["gpu", "--out", str(tmp_path / "speed.md")])
    page = (tmp_path / "speed.md").read_text()
    check_markdown(page)
    assert page.endswith("all agree\n\n## First\n\none\n")


def test_the_command_needs_a_name(capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["gpu"])
    assert stopped.value.code == 2 and "--out" in capsys.readouterr().err
