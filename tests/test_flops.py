"""What a token costs: the paper's tables to the digit, and the exact count against torch's counter."""

import dataclasses

import pytest
import torch
from test_corpus import documents_of
from test_pretrained_recurrence import SMALL, VARIANTS, variant

from accelerated.attention.content import content_attention_plain
from accelerated.bench.__main__ import counted_flops
from accelerated.evaluation.overlap import counted_flops_per_token, paper_flops, window_flops
from accelerated.pretrained_recurrence import PretrainedRecurrence
from accelerated.training.settings import GPT2_SIZES, preset_settings

TABLES = {0: "1.75", 5: "1.78", 10: "1.81", 30: "1.94", 50: "2.10", 75: "2.33", 100: "2.62", 150: "3.50", 200: "5.25"}


@pytest.mark.parametrize("overlap,printed", TABLES.items())
def test_the_papers_flops_per_token(overlap, printed):
    """All nine values of Tables 1 and 2, as printed, x 10^8."""
    for vectors in (0, 1):  # the paper has the same for its recurrent models
        config = dataclasses.replace(
            preset_settings("pretrained_recurrence", "gpt2").model_config, overlap=overlap, vectors=vectors
        )
        assert f"{paper_flops(config):.2e}" == f"{printed}e+08"


@pytest.mark.parametrize("length", [6, 4, 1])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_count_is_that_of_torchs_counter(name, length, monkeypatch):
    """On the plain path: the counter knows nothing of torch's own attention on the CPU."""
    monkeypatch.setattr("accelerated.pretrained_recurrence.content_attention", content_attention_plain)
    config = variant(name)
    model, length = PretrainedRecurrence(config).eval(), min(length, config.segment)
    tokens, state = torch.zeros(1, length, dtype=torch.long), model.initial_state(1)
    assert window_flops(config, length) == counted_flops(lambda: model(tokens, state))


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
