"""The kernels of steps, and graphs, on a stub of CUDA, which computes nothing; no clone has it."""

import numpy as np
import pytest
import torch

from accelerated import protocol, replay
from accelerated.generation.any_model import stepper_of
from accelerated.protocol import evaluating
from tests.helpers.rollouts import in_lane_1, random_segments, torch_segments
from tests.helpers.variants import EVERY_VARIANT, ONE_OF_EACH, PAPERS, over, variant

counters = pytest.importorskip("counters", reason="needs the stub of CUDA")
OF_THE_EMBEDDING = ("embedding_backward", "compute_grad_weight")
ONE_BY_ONE = ("indexing_backward", "ReduceAdd", "tomic", "index_put", *OF_THE_EMBEDDING)


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)


def on_the_stub(paper, name):
    """A model of a variant and a rollout of two lanes in which a document starts."""
    model = PAPERS[paper].model(variant(paper, name)).cuda()
    drawn = random_segments(paper, name, np.random.default_rng(5))
    segments = torch_segments(paper, drawn, in_lane_1(drawn))
    return model, [segment.to(torch.device("cuda")) for segment in segments]


@over(EVERY_VARIANT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_only_the_tokens_embedding_adds_one_by_one(paper, name, dtype):
    """A table that is read by an index matrix has a gradient that one warp adds up in sequence."""
    model, segments = on_the_stub(paper, name)
    counters.reset()
    with protocol.computing_in(model, dtype):
        # Nothing can be counted on the stub: how many tokens are scored is said
        replay.through_time(model, segments, model.initial_state(2), divisor=1.0)
    allowed = list(OF_THE_EMBEDDING)
    if name.startswith("adaptive"):
        allowed.append("indexFunc")  # a tail's rows, each once
    found = []
    for _, kernel in counters.kernels(1000, ONE_BY_ONE):
        if not any(part in kernel for part in allowed):
            found.append(kernel)
    assert counters.counts()["gemm"], "the step launched no product of matrices"
    assert found == []


@over(ONE_OF_EACH)
def test_a_token_is_captured_and_replayed(paper, name):
    if paper == "memorizing":
        pytest.skip("it generates as any model does, without a graph")
    model, segments = on_the_stub(paper, name)
    with evaluating(model), torch.no_grad():
        stepper = stepper_of(model)
        token = segments[0].tokens[:, 0]
        stream = stepper.start(model.initial_state(2))
        for _ in range(stepper.length + 2):
            counters.reset()
            logits, stream = stepper.step(token, stream)
    assert logits.shape == (2, model.config.vocabulary)
    assert counters.counts()["graph"] == 1
