"""On a stub of CUDA, which computes nothing (docs/contributing.md): the kernels of steps, and
graphs.
"""

import numpy as np
import pytest
import torch

from accelerated import protocol, replay
from accelerated.generation.token_by_token import stepper_of
from accelerated.protocol import evaluating
from tests.helpers.rollouts import random_segments, torch_segments
from tests.helpers.variants import EVERY_VARIANT, ONE_OF_EACH, PAPERS, over, variant

counters = pytest.importorskip("counters", reason="needs the stub of CUDA")
OF_THE_EMBEDDING = ("embedding_backward", "compute_grad_weight")
ONE_BY_ONE = ("indexing_backward", "ReduceAdd", "tomic", "index_put", *OF_THE_EMBEDDING)


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)


def on_the_stub(paper, name):
    """A model of a variant and a rollout of two lanes in which a document starts."""
    model, segments = (
        PAPERS[paper].model(variant(paper, name)).cuda(),
        random_segments(paper, name, np.random.default_rng(5)),
    )
    starts = [np.array([False, number == 1]) for number in range(len(segments))]
    return model, [
        segment.to(torch.device("cuda")) for segment in torch_segments(paper, segments, starts)
    ]


@over(EVERY_VARIANT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_only_the_tokens_embedding_adds_one_by_one(paper, name, dtype):
    """A table that is read by an index matrix has a gradient that one warp adds up in sequence."""
    model, segments = on_the_stub(paper, name)
    counters.reset()
    with protocol.computing_in(model, dtype):
        try:
            replay.through_time(model, segments, model.initial_state(2))
        except (
            torch.OutOfMemoryError
        ):  # an adaptive softmax asks for a number of rows, and numbers mean nothing here
            pytest.skip("the stub said that a tail has more rows than fit: run it again")
    allowed = (
        (*OF_THE_EMBEDDING, "indexFunc") if name.startswith("adaptive") else OF_THE_EMBEDDING
    )  # a tail's rows, each once
    found = [
        kernel
        for _, kernel in counters.kernels(1000, ONE_BY_ONE)
        if not any(map(kernel.__contains__, allowed))
    ]
    assert counters.counts()["gemm"] and found == []


@over(ONE_OF_EACH)
def test_a_token_is_captured_and_replayed(paper, name):
    model, segments = on_the_stub(paper, name)
    with evaluating(model), torch.no_grad():
        stepper = stepper_of(model)
        token = segments[0].tokens[:, 0]
        stream = stepper.start(model.initial_state(2))
        for _ in range(stepper.length + 2):
            counters.reset()
            logits, stream = stepper.step(token, stream)
    assert logits.shape == (2, model.config.vocabulary) and counters.counts()["graph"] == 1
