"""Memformer: the paper's claims, for the reference.

tests/test_contract.py shows that the accelerated model computes the same, tasks included.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch

from accelerated.data.tasks import mask_spans
from reference import memformer as ref
from reference.variants import memformer as variants
from tests.helpers.comparison import assert_agree
from tests.helpers.rollouts import both_sides
from tests.helpers.variants import PAPERS
from tests.models.memformer import random_task

PAPER = PAPERS["memformer"]
SMALL = PAPER.small
V = SMALL.vocabulary  # 11
D = SMALL.width  # 10
N = SMALL.segment  # 6


@pytest.mark.parametrize("encoder_layers", [0, 2])
def test_biased_normalisation_reads_slots_on_the_unit_sphere(encoder_layers):
    """m' + v_bias over its length, first v_bias over its own; else the model is the one without."""
    rng = np.random.default_rng(0)
    plain = dataclasses.replace(SMALL, encoder_layers=encoder_layers)
    config = dataclasses.replace(plain, slot_normalization="biased")
    params = PAPER.random_params(config, rng)
    bias = params["slot_bias"]  # v_bias
    same = params | {"initial_memory": bias / np.linalg.norm(bias, axis=-1, keepdims=True)}
    read = ref.initial_state(same, plain, 2)
    state = ref.initial_state(params, config, 2)
    for tokens in rng.integers(V, size=(3, 2, N)):
        expected, written, _ = ref.forward(same, plain, tokens, read)
        logits, state, _ = ref.forward(params, config, tokens, state)
        found = {"logits": logits, "memory": state.memory}
        assert_agree({"logits": expected, "memory": written.memory}, found, 1e-12)
        biased = written.memory + bias
        unit = biased / np.linalg.norm(biased, axis=-1, keepdims=True)
        read = written._replace(memory=unit)


def by_equations(params, config, reading, memory, prompt, kind=0):
    """The decoder reads [task's token, prompt]. Row i predicts prompt[i].

    So continuation drops the first row, and a task the last.
    """
    state = ref.State(memory, reading)
    encoded, after, _ = ref.encoder_forward(params, config, prompt, state, None)
    task_token = np.full((2, 1), V + 2 + kind)  # ids: V of text, begin, mask, the tasks
    asked = np.concatenate([task_token, prompt], axis=1)
    hidden, _ = ref.decoder_forward(params, config, asked, encoded, None)
    rows = hidden[:, :-1] if kind else hidden[:, 1:]
    return {"logits": rows @ params["embedding"][:V].T / math.sqrt(D), "memory": after.memory}


def test_the_model_is_equations_5_to_7():
    """M_t = Encoder(s_t, M_{t-1}); s_{t+1} is predicted from the encoded s_t; by segments."""
    rng = np.random.default_rng(0)
    params = PAPER.random_params(SMALL, rng)
    state = ref.initial_state(params, SMALL, 2)
    memory = np.tile(params["initial_memory"][0], (2, 1, 1, 1))
    reading = np.full((2, N), V)  # begin, before a document's first segment
    for tokens in rng.integers(V, size=(3, 2, N)):
        expected = by_equations(params, SMALL, reading, memory, tokens) | {"previous": tokens}
        memory = expected["memory"]
        reading = tokens
        logits, state, _ = ref.forward(params, SMALL, tokens, state)
        assert_agree(expected, {"logits": logits} | state._asdict(), 1e-12)


# Tasks (2.3)


@pytest.mark.parametrize("kind", range(len(variants.TASKS)), ids=variants.TASKS)
def test_task_tokens_and_rows(kind):
    config, rng, params, state, _, _ = both_sides("memformer", "encoder-decoder")
    tokens = rng.integers(V, size=(2, N))
    task = random_task(config, rng, [kind, kind])
    doing = ref.with_task(config, task)  # attention leaves the padding out
    rest = (task.reading, state.memory, task.prompt, kind)
    expected = by_equations(params, doing, *rest) | {"previous": tokens}
    logits, after, _ = ref.forward(params, config, tokens, state, None, task)
    assert_agree(expected, {"logits": logits} | after._asdict(), 1e-12)


@pytest.mark.parametrize("place", [0, N - 1])
def test_padding_is_never_read(place):
    """Other tokens in the encoder's padding change neither logits nor memory, bit for bit."""
    config, rng, params, state, _, _ = both_sides("memformer", "encoder-decoder")
    tokens = rng.integers(V, size=(2, N))
    readable = np.ones((2, N), bool)
    text = random_task(config, rng, [1, 1])._replace(readable=readable)
    other = text.reading.copy()
    other[:, place] = (other[:, place] + 1) % V
    padded = readable.copy()
    padded[:, place] = False

    def read(**changes):
        task = text._replace(**changes)
        logits, after, _ = ref.forward(params, config, tokens, state, None, task)
        return logits, after.memory

    before = read(readable=padded)
    for old, new in zip(before, read(readable=padded, reading=other), strict=True):
        assert (old == new).all(), f"padding at {place} is read"


def test_the_decoder_only_model_refuses_tasks():
    config, rng, params, state, model, torch_state = both_sides("memformer", "decoder-only")
    task = random_task(config, rng, [0, 0])
    tokens = np.zeros((2, N), int)
    with pytest.raises(ValueError, match="no tasks but continuation"):
        ref.forward(params, config, tokens, state, None, task)
    with pytest.raises(ValueError, match="no tasks but continuation"):
        model(torch.tensor(tokens), torch_state, PAPER.to_torch(task))


def test_the_references_tasks_are_the_lanes_tasks():
    """Its infilling and recall, field by field, agree with those of accelerated/data/tasks.py."""
    rng = np.random.default_rng(0)
    previous, earlier = rng.integers(V, size=(2, 3, N))
    infilled, masked = variants.infilling(SMALL, previous, 0.5, 2.0, np.random.default_rng(1))
    again = np.random.default_rng(1)
    for lane in range(3):
        text, gone = mask_spans(previous[lane], V + 1, again, 0.5, 2.0)  # V + 1 is the mask
        assert infilled.reading[lane, : len(text)].tolist() == text.tolist()
        assert infilled.readable[lane].tolist() == [place < len(text) for place in range(N)]
        assert masked[lane].tolist() == gone.tolist()

    recalled = variants.recall(previous, earlier)
    for task, kind, prompt in ((infilled, 1, previous), (recalled, 2, earlier)):
        assert (task.kind == kind).all(), "the kind of a task"
        assert (task.prompt == prompt).all(), "what a task asks for"
    assert (recalled.reading == previous).all(), "recall reads another segment"
    assert recalled.readable.all()


# Memory replay in NumPy


def test_every_segment_has_random_numbers_of_its_own():
    def draw(seed, t):
        return ref.segment_rng(seed, t).random()

    assert draw(1, 0) == draw(1, 0), "a segment that is computed again drops other entries"
    assert len({draw(1, 0), draw(1, 1), draw(2, 0)}) == 3, "two segments drop the same entries"
    assert ref.segment_rng(None, 0) is None


# Configs


@pytest.mark.parametrize("positions,count", [("simplified", 1.05e6), ("transformer_xl", 1.32e6)])
def test_parameters_of_table_2(positions, count):
    """One self-attention of width 512 with 8 heads of 64."""
    config = ref.Config(width=512, heads=8, head_width=64, segment=64, positions=positions)
    distances = config.distances(causal=True)
    p = config.operations.init_attention(config, np.random.default_rng(0), distances)
    found = sum(value.size for name, value in p.items() if not name.startswith("norm"))
    assert found == pytest.approx(count, rel=0.01), "parameters of a self-attention"
