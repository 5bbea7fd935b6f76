"""Memformer: the paper's claims, for the reference and the accelerated model."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelerated.memformer as fast
from accelerated.data.tasks import TaskConfig, mask_spans
from accelerated.memformer import Memformer
from reference import memformer as ref
from tests.helpers.comparison import assert_agree
from tests.helpers.rollouts import both_sides
from tests.helpers.variants import PAPERS, random_task, shaken

PAPER = PAPERS["memformer"]
SMALL, variant = PAPER.small, PAPER.variant
random_params, to_torch = PAPER.random_params, PAPER.to_torch


# Definitions


def random_writer(rng, slots):
    config = dataclasses.replace(SMALL, slots=slots)
    return config, shaken(ref.init_writer(config, rng), rng)


def both_writes(p, config, memory, encoded):
    """The next slots by the reference and by the accelerated writer."""
    writer = fast.Writer(config.width, config.heads, config.head_width)
    writer.load_state_dict({name: torch.tensor(value) for name, value in p.items()})
    actual = writer(torch.tensor(memory), torch.tensor(encoded), None)
    return ref.slot_attention_forward(p, config, memory, encoded, None)[0], actual.detach().numpy()


@given(slots=st.integers(2, 5), changed=st.integers(0, 4), seed=st.integers(0, 2**31))
def test_slots_never_mix(slots, changed, seed):
    """A change in one slot changes only that slot's next content; the others stay equal bit for bit."""
    rng = np.random.default_rng(seed)
    config, p = random_writer(rng, slots)
    memory, encoded = rng.standard_normal((1, slots, 10)), rng.standard_normal((1, 6, 10))
    other = memory.copy()
    other[0, changed % slots] += rng.standard_normal(10)
    for before, after in zip(both_writes(p, config, memory, encoded), both_writes(p, config, other, encoded), strict=True):
        same = (before == after).all(-1)[0]
        assert same.sum() == slots - 1 and not same[changed % slots]


def test_a_slot_that_attends_only_to_itself_does_not_change():
    """Bit for bit, in each of thirty lanes (section 2.2.3)."""
    rng = np.random.default_rng(0)
    config, p = random_writer(rng, slots=4)
    memory, encoded = rng.standard_normal((30, 4, 10)), rng.standard_normal((30, 6, 10))
    for new in both_writes(p | {"retention": np.full(2, 1000.0)}, config, memory, encoded):
        assert (new == memory).all()
    for new in both_writes(p | {"retention": np.full(2, 1.0)}, config, memory, encoded):
        assert not (new == memory).any()


def by_equations(params, config, reading, memory, prompt, kind=0, readable=None):
    """The decoder starts with the task's token; row i predicts token i + 1 in continuation and token i in other tasks."""
    encoded, memory, _ = ref.encoder_forward(params, config, reading, memory[:, 0], readable, None)
    prompt = np.concatenate([np.full((2, 1), 11 + 2 + kind), prompt], axis=1)
    hidden, _ = ref.decoder_forward(params, config, prompt, encoded, readable, None)
    rows = hidden[:, :-1] if kind else hidden[:, 1:]
    return {"logits": rows @ params["embedding"][:11].T / math.sqrt(10), "memory": memory[:, None]}


def test_the_model_is_equations_5_to_7():
    """M_t = Encoder(s_t, M_{t-1}); s_{t+1} is predicted from the encoded s_t; computed segment by segment."""
    config, rng = SMALL, np.random.default_rng(0)
    params = random_params(config, rng)
    model, state = PAPER.model_with(params, config), ref.initial_state(params, config, 2)
    memory, reading = np.tile(params["initial_memory"][0], (2, 1, 1, 1)), np.full((2, 6), config.special("begin"))
    carried = model.initial_state(2)
    for tokens in rng.integers(11, size=(3, 2, 6)):
        expected = by_equations(params, config, reading, memory, tokens) | {"previous": tokens}
        memory, reading = expected["memory"], tokens
        logits, state, _ = ref.forward(params, config, tokens, state)
        actual, carried, _ = model(torch.tensor(tokens), carried)
        assert_agree(expected, {"logits": logits} | state._asdict(), 1e-12)
        assert_agree(expected, {"logits": actual} | carried._asdict(), 1e-11)


# Tasks (2.3)


@pytest.mark.parametrize("kind", range(3))
def test_task_tokens_and_rows(kind):
    config, rng, params, state, model, torch_state = both_sides("memformer", "encoder-decoder")
    tokens, task = rng.integers(11, size=(2, 6)), random_task(config, rng, [kind, kind])
    expected = by_equations(params, config, task.reading, state.memory, task.prompt, kind, task.readable) | {"previous": tokens}
    logits, after, _ = ref.forward(params, config, tokens, state, None, task)
    output = model(torch.tensor(tokens), torch_state, to_torch(task))
    assert_agree(expected, {"logits": logits} | after._asdict(), 1e-12)
    assert_agree(expected, {"logits": output.logits} | output.state._asdict(), 1e-11)


@pytest.mark.parametrize("place", [0, 5])
def test_padding_is_never_read(place):
    """Other tokens in the encoder's padding change neither logits nor memory, bit for bit."""
    config, rng, params, state, model, torch_state = both_sides("memformer", "encoder-decoder")
    tokens, task = rng.integers(11, size=(2, 6)), random_task(config, rng, [1, 1])
    readable = np.ones((2, 6), bool)
    readable[:, place] = False
    reading = task.reading.copy()
    reading[:, place] = (reading[:, place] + 1) % 11
    tasks = [task._replace(readable=readable), task._replace(readable=readable, reading=reading)]
    (a, after_a, _), (b, after_b, _) = (ref.forward(params, config, tokens, state, None, t) for t in tasks)
    assert (a == b).all() and (after_a.memory == after_b.memory).all()
    first, second = (model(torch.tensor(tokens), torch_state, to_torch(t)) for t in tasks)
    assert torch.equal(first.logits, second.logits) and torch.equal(first.state.memory, second.state.memory)
    shown = ref.forward(params, config, tokens, state, None, task._replace(readable=np.ones((2, 6), bool)))
    assert not (shown[0] == a).all() and not (shown[1].memory == after_a.memory).all()


def test_the_decoder_only_model_refuses_tasks():
    config, _, params, _, model, _ = both_sides("memformer", "decoder-only")
    task = random_task(config, np.random.default_rng(0), [0])
    for read in (ref.forward, ref.advance):
        with pytest.raises(ValueError, match="no tasks but continuation"):
            read(params, config, np.zeros((1, 6), int), ref.initial_state(params, config, 1), None, task)
    for read in (model, model.advance):
        with pytest.raises(ValueError, match="no tasks but continuation"):
            read(torch.zeros(1, 6, dtype=torch.long), model.initial_state(1), to_torch(task))


def test_the_references_tasks_are_the_lanes_tasks():
    """Infilling and recall of the reference, field by field, agree with those of accelerated/data/tasks.py."""
    rng = np.random.default_rng(0)
    previous, earlier = rng.integers(11, size=(2, 3, 6))
    filled_in, recalled = ref.infilling(SMALL, previous, 0.5, 2.0, np.random.default_rng(1)), ref.recall(previous, earlier)
    again = np.random.default_rng(1)
    for lane in range(3):
        text = mask_spans(previous[lane], 12, TaskConfig(masked=0.5, span=2.0), again).tolist()
        assert filled_in.reading[lane][filled_in.readable[lane]].tolist() == text
        assert filled_in.readable[lane].tolist() == [place < len(text) for place in range(6)]
    assert (filled_in.kind == 1).all() and (filled_in.prompt == previous).all()
    assert (recalled.kind == 2).all() and (recalled.prompt == earlier).all()
    assert (recalled.reading == previous).all() and recalled.readable.all()
    document = rng.integers(11, size=(2, 37))
    segments = ref.rollout_of(SMALL, document, rng)
    asked = [document[:, 1:7], document[:, 0:6], document[:, 0:6], document[:, 19:25], document[:, 18:24], document[:, 18:24]]
    assert all((segment.targets == targets).all() for segment, targets in zip(segments, asked, strict=True))
    assert [segment.starts.all() for segment in segments] == [True] + [False] * 5


def test_description():
    assert "4 memory slots (encoder-decoder)" in Memformer(SMALL).describe()
    assert "4 memory slots (decoder-only, in each of its layers)" in Memformer(variant("decoder-only")).describe()
