"""Attention by SDPA, a GPU's path, equals the plain path on a CPU, in whole models.

Then where it is called, and how.
"""

import sys
from unittest.mock import Mock

import pytest
import torch
from torch.nn import functional

from accelerated.attention import content, relative_shift, signed_distance, sliding_window
from accelerated.attention.relative_shift import AttentionInputs
from tests.helpers.comparison import TOLERANCE, assert_agree
from tests.helpers.rollouts import both_sides, check_rollout, random_segments
from tests.helpers.variants import ONE_OF_EACH, PAPERS, over, pairs

SDPA = functional.scaled_dot_product_attention
THROUGH_SDPA = ONE_OF_EACH + pairs(  # variants that differ in how their attentions reach SDPA
    block_recurrent="fixed-dual-feedback states-outnumber-window",
    compressive="""
        transformer-xl no-memory nothing-remembered simplified-attention_reconstruction
        authors-attention
    """,
    memformer="encoder-decoder-xl decoder-only-xl",
    pretrained_recurrence="several-vectors one-token",
)


def drawn(**shapes):
    """{name: normal random numbers}."""
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def sliding_inputs(*offset):
    """What sliding attention takes of two windows of 8, with an offset of this shape."""
    rows = (2, 3, 24, 16)
    return drawn(query=(2, 3, 16, 16), keys=rows, values=rows, offset=offset)


def relative_inputs():
    """What relative attention takes of 8 queries, with 5 keys before them."""
    return drawn(
        query=(2, 3, 8, 4),
        key=(2, 3, 13, 4),
        value=(2, 3, 13, 4),
        distance_key=(3, 13, 4),
        content_bias=(3, 4),
        distance_bias=(3, 4),
    )


@pytest.fixture
def calls(monkeypatch):
    """SDPA, which notes the arguments of its calls."""
    noted = Mock(wraps=SDPA)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    return noted


@pytest.fixture
def as_on_a_gpu(monkeypatch, calls):
    """Let a CPU take a GPU's paths; returns SDPA, which notes its calls."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("accelerated."):
            continue
        if hasattr(module, "takes_sdpa"):
            monkeypatch.setattr(module, "takes_sdpa", lambda query, key: key.shape[-2] > 1)
    return calls


@over(THROUGH_SDPA)
def test_a_model_on_a_gpus_paths_equals_its_reference(paper, name, as_on_a_gpu):
    """Logits, states, losses and gradients over segments; a document starts in the second."""
    sides = both_sides(paper, name)
    check_rollout(paper, sides, random_segments(paper, name, sides.rng), name)
    needs_the_weights = (paper, name) == ("memformer", "decoder-only")  # simplified positions
    if PAPERS[paper].has_softmax:
        assert as_on_a_gpu.called or needs_the_weights, "no attention went through SDPA"


def test_an_offset_takes_the_querys_type(as_on_a_gpu):
    """A GPU's kernel refuses another type; a CPU's does not."""
    inputs = {name: x.float() for name, x in sliding_inputs(3, 8, 16).items()}
    rough = [x.bfloat16() if name != "offset" else x for name, x in inputs.items()]
    out = sliding_window.sliding_attention_sdpa(*rough)
    assert out.dtype == torch.bfloat16
    assert [x.dtype for x in as_on_a_gpu.call_args.args[:4]] == [torch.bfloat16] * 4
    expected = sliding_window.sliding_attention_plain(*inputs.values())
    assert_agree(expected, out.float(), TOLERANCE["cuda", torch.bfloat16])


def on(device, inputs):
    return [x.to(device) for x in inputs.values()]


def rates(calls):
    """The rates of dropout of SDPA's calls since they were last asked for: its fifth argument."""
    found = [call.args[4] for call in calls.call_args_list]
    calls.reset_mock()
    return found


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_attention_is_one_call_off_the_cpu(rate, calls):
    """The device meta stands for a GPU. Only the plain path has the weights that usage needs."""
    sliding = on("meta", sliding_inputs(3, 23))
    sliding_window.sliding_attention(*sliding, rate)
    assert rates(calls) == [rate]
    relative = on("meta", relative_inputs())
    _, usage = relative_shift.relative_attention(AttentionInputs(*relative), rate)
    assert usage is None
    assert rates(calls) == [rate]
    signed_distance.transformer_xl_attention(AttentionInputs(*relative), 8, None, rate)
    assert rates(calls) == [rate]
    query, key, value, _, bias, _ = relative
    content.content_attention(query, key, value, dropout=rate)
    assert rates(calls) == [rate]
    sliding_window.scaled_attention(query, key, value, bias[:, 0])  # it has no dropout
    assert rates(calls) == [0.0]

    _, usage = relative_shift.relative_attention(AttentionInputs(*relative), rate, measure=True)
    assert usage.shape == (2, 13)
    assert rates(calls) == [], "SDPA was called, though the attention is to be measured"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_key_takes_the_plain_path(device, calls):
    query, key, value, _, bias, _ = on(device, relative_inputs())
    one_key = key[:, :, :1]
    one_value = value[:, :, :1]
    content.content_attention(query, one_key, one_value)
    sliding_window.scaled_attention(query, one_key, one_value, bias[:, 0])
    assert not rates(calls), "of one key the gradient of query and key must be exactly zero"


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_usage_is_the_mean_weight_in_float32(dropout):
    """Before weights are dropped."""
    inputs = relative_inputs().values()
    _, usage = relative_shift.relative_attention(AttentionInputs(*inputs), dropout, measure=True)
    _, expected = relative_shift.relative_attention_plain(AttentionInputs(*inputs), measure=True)
    assert usage.shape == (2, 13)
    torch.testing.assert_close(usage, expected)
    rough = AttentionInputs(*(x.bfloat16() for x in inputs))
    _, usage = relative_shift.relative_attention(rough, dropout, measure=True)
    assert usage.dtype == torch.float32, "a mean in bfloat16 makes unequal usages equal"
