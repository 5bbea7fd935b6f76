"""The table of overlaps: its rows, and FLOPs per token."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from accelerated.attention.content import content_attention_plain
from accelerated.data.windows import cut
from accelerated.evaluation.overlap import (
    counted_flops_per_token,
    differences,
    model_name,
    overlap_table,
    paper_flops,
    report,
    window_flops,
)
from accelerated.evaluation.score import TrainedRun
from accelerated.presets.pretrained_recurrence import GPT2_SIZES
from accelerated.pretrained_recurrence import PretrainedRecurrence
from accelerated.training.settings import preset_settings
from tests.helpers.texts import BYTES, documents_of
from tests.helpers.variants import PAPERS, PRETRAINED_RECURRENCE_VARIANTS, variant

SMALL = PAPERS["pretrained_recurrence"].small
BITS_PER_NAT = 1 / (math.log(2) * 40)  # per byte of a text of 40 bytes


def row(run, config=SMALL, notes=(), nats=20.0, words=4):
    perplexity = math.exp(nats / words) if words else math.nan
    split = {"word_perplexity": perplexity, "words": words, "bits_per_byte": nats * BITS_PER_NAT, "nats": nats, "tokens": 50}
    flops = {"flops_per_token": 1.75e8, "counted_flops_per_token": 1.9e8}
    return {"run": run, "config": dataclasses.asdict(config), "notes": notes, "splits": {"valid": split, "test": split}} | flops


def test_a_row_has_perplexity_per_word_bits_per_byte_and_log_probability_of_every_split():
    header, line = overlap_table([row("runs/a", notes=("trained with overlap 0", "memory cleared"))])
    words = " ".join(header.split())
    columns = "ppl/word bits/byte log p, nats"
    assert words == f"model overlap valid {columns} test {columns} FLOPs/token counted run"
    assert line.split()[:3] == ["recurrent,", "window", "6"] and line.split()[3] == "2"
    assert line.split()[4:7] == line.split()[7:10] == ["148.41", "0.7213", "-20.0"]
    assert line.split()[10:13] == ["1.75e+08", "1.90e+08", "runs/a"] and line.endswith("(trained with overlap 0, memory cleared)")


def test_a_text_without_words_has_no_perplexity_per_word():
    assert overlap_table([row("a", words=0)])[1].split()[4] == "-"


def test_differences_from_training():
    other = dataclasses.replace(SMALL, segment=4, overlap=0, pool="advance")
    assert differences(other, SMALL) == ["trained with segment 6", "trained with overlap 2", "trained with pool all"]
    assert differences(SMALL, SMALL) == []
    plain = dataclasses.replace(SMALL, vectors=0)
    assert differences(dataclasses.replace(plain, overlap=0, pool="advance"), plain) == []
    assert differences(dataclasses.replace(plain, segment=5), plain) == ["trained with segment 6"]


@pytest.mark.parametrize(
    "vectors,name", [(0, "GPT-2, window 6"), (1, "recurrent, window 6"), (3, "recurrent, window 6, 3 vectors")]
)
def test_model_names(vectors, name):
    assert model_name({"vectors": vectors, "segment": 6}) == name


TABLES = {0: "1.75", 5: "1.78", 10: "1.81", 30: "1.94", 50: "2.10", 75: "2.33", 100: "2.62", 150: "3.50", 200: "5.25"}


@pytest.mark.parametrize("overlap,printed", TABLES.items())
def test_the_papers_flops_per_token(overlap, printed):
    """All nine values of Tables 1 and 2, x 10^8."""
    for vectors in (0, 1):  # the paper prints the same for its recurrent models
        config = dataclasses.replace(
            preset_settings("pretrained_recurrence", "gpt2").model_config, overlap=overlap, vectors=vectors
        )
        assert f"{paper_flops(config):.2e}" == f"{printed}e+08"


@pytest.mark.parametrize("length", [6, 4, 1])
@pytest.mark.parametrize("name", PRETRAINED_RECURRENCE_VARIANTS)
def test_the_count_is_that_of_torchs_counter(name, length, monkeypatch):
    """On the plain path, because the counter does not count torch's SDPA on the CPU."""
    monkeypatch.setattr("accelerated.pretrained_recurrence.content_attention", content_attention_plain)
    config = variant("pretrained_recurrence", name)
    model, length = PretrainedRecurrence(config).eval(), min(length, config.segment)
    tokens, state = torch.zeros(1, length, dtype=torch.long), model.initial_state(1)
    with FlopCounterMode(display=False) as counter:
        model(tokens, state)
    assert window_flops(config, length) == counter.get_total_flops()


def test_flops_per_token_are_those_of_windows_run_over_tokens_scored():
    """Documents of 15 and 3 tokens at T = 6, o = 2: windows of 6, 6 and 6, and of 2; 16 tokens are scored."""
    expected = (3 * window_flops(SMALL, 6) + window_flops(SMALL, 2)) / 16
    assert counted_flops_per_token(SMALL, documents_of([15, 3, 1])) == pytest.approx(expected, rel=1e-15)


def test_presets_have_the_published_sizes():
    """Parameters of GPT-2: 124, 355, 774 and 1558 million."""
    for name, millions in (("gpt2", 124), ("gpt2-medium", 355), ("gpt2-large", 774), ("gpt2-xl", 1558)):
        c = preset_settings("pretrained_recurrence", name).model_config
        layer = 12 * c.width**2 + 13 * c.width
        size = (50257 + c.max_positions) * c.width + c.layers * layer + 2 * c.width
        assert round(size / 1e6) == millions and (c.layers, c.width) == GPT2_SIZES[name]
        assert (c.heads, c.feed_forward, c.max_positions, c.segment) == (c.width // 64, 4 * c.width, 1024, 300)
        assert (c.insertion_layers, c.module_layers, c.module_width, c.vectors) == ((2,), 3, 200, 1)


def test_the_report_has_a_row_for_each_run_and_overlap_with_the_score_of_its_windows():
    """Windows are read one by one here; the paper's and the counted FLOPs stand beside them."""
    config = dataclasses.replace(SMALL, vocabulary=256)
    params = PAPERS["pretrained_recurrence"].random_params(config, np.random.default_rng(3))
    model, documents = PAPERS["pretrained_recurrence"].model_with(params, config).eval(), documents_of([15, 3, 1])
    run = TrainedRun("runs/a", model, SimpleNamespace(model_config=config), {}, BYTES, 2, "data", {"test": documents})
    record, lines = report([run], SimpleNamespace(overlaps=(0, 2, 5, 0), clear_memory=False))
    assert [row["config"]["overlap"] for row in record["rows"]] == [0, 2, 5] and len(lines) == 2 + 3
    for row in record["rows"]:
        other, nats = dataclasses.replace(config, overlap=row["config"]["overlap"]), 0.0
        reader = PAPERS["pretrained_recurrence"].model_with(params, other).eval()
        for document in documents:
            state = reader.initial_state(1)
            for w in cut(len(document.inputs) + 1, other.segment, other.overlap):
                logits, state, _ = reader(torch.tensor(document.inputs[w.start : w.stop].astype(int))[None], state)
                logs, targets = logits[0].log_softmax(-1), document.targets[w.start : w.stop].astype(int)
                nats -= sum(logs[place, targets[place]].item() for place in range(w.first - 1 - w.start, w.stop - w.start))
        assert row["splits"]["test"]["nats"] == pytest.approx(nats, rel=1e-9) and row["splits"]["test"]["tokens"] == 16
        assert row["counted_flops_per_token"] == counted_flops_per_token(other, documents)
        assert row["notes"] == ([f"trained with overlap {config.overlap}"] if other.overlap != config.overlap else [])
