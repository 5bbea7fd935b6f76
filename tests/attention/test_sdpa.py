"""Attention by SDPA, a GPU's path, equals the plain path on a CPU: by operation, in whole models,
with dropout; what it saves.
"""

import sys

import pytest
import torch
from torch.nn import functional

from accelerated import block_recurrent
from accelerated.attention import content, relative_shift, signed_distance, sliding_window
from tests.attention.test_paths import relative_inputs, sliding_inputs
from tests.helpers.comparison import TOLERANCE, assert_agree
from tests.helpers.rollouts import both_sides, check_rollout, random_segments
from tests.helpers.variants import ONE_OF_EACH, over, pairs

SDPA = functional.scaled_dot_product_attention
THROUGH_SDPA = ONE_OF_EACH + pairs(  # variants that differ in how their attentions reach SDPA
    block_recurrent="fixed-dual-feedback states-outnumber-window",
    compressive="transformer-xl simplified-attention_reconstruction",
    memformer="encoder-decoder-xl decoder-only-xl",
    pretrained_recurrence="several-vectors one-token",
)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Let a CPU take a GPU's paths; returns a list that grows by the arguments of every call of
    SDPA.
    """
    calls = []
    for name, module in list(sys.modules.items()):
        if name.startswith("accelerated."):
            if hasattr(module, "takes_sdpa"):
                monkeypatch.setattr(module, "takes_sdpa", lambda query, key: key.shape[-2] > 1)
            if hasattr(module, "on_plain_cpu"):
                monkeypatch.setattr(module, "on_plain_cpu", lambda x: False)
    monkeypatch.setattr(
        functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(a) or SDPA(*a, **k)
    )
    return calls


@over(THROUGH_SDPA)
def test_a_model_on_a_gpus_paths_equals_its_reference(paper, name, as_on_a_gpu):
    """Logits, states, losses and gradients over segments, with a document start in the second; then
    five steps.
    """
    config, rng, params, state, _, _ = both_sides(paper, name)
    check_rollout(paper, config, params, random_segments(paper, name, rng), state, name)
    assert as_on_a_gpu or (paper, name) == ("memformer", "decoder-only"), (
        "whose simplified positions need the weights"
    )


def test_an_offset_takes_the_querys_type(as_on_a_gpu):
    """A GPU's kernel refuses another type; a CPU's does not."""
    inputs = {name: x.float() for name, x in sliding_inputs(2, 3, 2, 8, 16).items()}
    rough = [x.bfloat16() if name != "offset" else x for name, x in inputs.items()]
    out = sliding_window.sliding_attention_sdpa(*rough)
    assert (
        out.dtype == torch.bfloat16
        and [x.dtype for x in as_on_a_gpu[0][:4]] == [torch.bfloat16] * 4
    )
    expected = sliding_window.sliding_attention_plain(*inputs.values())
    assert_agree({"out": expected}, {"out": out.float()}, TOLERANCE["cuda", torch.bfloat16])


@pytest.mark.parametrize("offset", [False, True])
def test_the_kernels_are_chosen_in_one_place(offset, monkeypatch):
    """Off a CPU: flash, memory-efficient or math, never cuDNN's, whatever is allowed."""
    flags, backends = [], torch.backends.cuda

    def attend(*arguments, **options):
        flags.append(
            (
                backends.cudnn_sdp_enabled(),
                backends.mem_efficient_sdp_enabled(),
                backends.math_sdp_enabled(),
            )
        )
        return SDPA(*arguments, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attend)
    query = torch.empty(2, 3, 4, 5, device="meta")
    before = backends.cudnn_sdp_enabled()
    content.sdpa(query, query, query, query.new_empty(3, 4, 4) if offset else None)
    assert flags == [(False, True, True)] and backends.cudnn_sdp_enabled() == before


@pytest.mark.parametrize(
    "device,off_cpu", [("cpu", 0), ("meta", 1)]
)  # meta stands for a GPU; off_cpu: calls of SDPA expected
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_the_path_is_that_of_the_device(device, off_cpu, rate, monkeypatch):
    """Off the CPU each attention is one call of SDPA, unless it measures or has one key; on one
    only content_attention may be.
    """
    rates = []  # of dropout, one for each call of SDPA, whose fifth argument it is
    monkeypatch.setattr(
        functional,
        "scaled_dot_product_attention",
        lambda *a, **k: rates.append(a[4]) or SDPA(*a, **k),
    )
    on = lambda inputs: [x.to(device) for x in inputs.values()]  # noqa: E731
    sliding_window.sliding_attention(*on(sliding_inputs(2, 3, 2, 4, 5)), rate)
    query, key, value, _, bias, _ = relative = on(relative_inputs(2, 3, 8, 5, 4))
    usage = relative_shift.relative_attention(*relative, rate)[1]
    signed_distance.transformer_xl_attention(*relative, 8, None, rate)
    assert rates == [rate] * (3 * off_cpu) and usage is None
    block_recurrent.scaled_attention(
        query, key, value, bias[:, 0]
    )  # a scale for each head; it has no dropout
    assert rates == [rate] * (3 * off_cpu) + [0.0] * off_cpu
    rates.clear()
    assert (
        relative_shift.relative_attention(*relative, rate, measure=True)[1].shape == (2, 13)
        and not rates
    )
    content.content_attention(query, key, value, dropout=rate)
    assert rates == (
        [rate] if off_cpu or not rate else []
    )  # on a CPU without dropout alone: with it, it would save no scores
    rates.clear()
    content.content_attention(*(x.bfloat16() for x in (query, key, value)))
    content.content_attention(query, key.clone().requires_grad_(), value)
    assert len(rates) == 2 * off_cpu, (
        "on a CPU SDPA is slower in bfloat16, and if only keys need gradients"
    )
    rates.clear()
    one_key, one_value = key[:, :, :1], value[:, :, :1]
    content.content_attention(query, one_key, one_value)
    block_recurrent.scaled_attention(query, one_key, one_value, bias[:, 0])
    assert not rates, "of one key the gradient of query and key must be exactly zero"
