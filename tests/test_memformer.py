"""Memformer: the paper's claims, for the reference and the accelerated model."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelerated.memformer as fast
from accelerated.data.tasks import mask_spans
from reference import memformer as ref
from tests.helpers.comparison import assert_agree, check_directions, named
from tests.helpers.rollouts import both_sides, filled, random_segments, reference_segments
from tests.helpers.variants import PAPERS, shaken
from tests.models.memformer import random_task

PAPER = PAPERS["memformer"]
SMALL, VARIANTS, variant = PAPER.small, PAPER.variants, PAPER.variant
random_params, random_state, to_torch = PAPER.random_params, PAPER.random_state, PAPER.to_torch


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
    for before, after in zip(
        both_writes(p, config, memory, encoded), both_writes(p, config, other, encoded), strict=True
    ):
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
    """The decoder reads [task's token, prompt]. Row i predicts prompt[i]; continuation drops the first row, a task the last."""
    encoded, memory, _ = ref.encoder_forward(params, config, reading, memory[:, 0], readable, None)
    asked = np.concatenate(
        [np.full((2, 1), 11 + 2 + kind), prompt], axis=1
    )  # ids: 11 of text, begin, mask, the tasks
    hidden, _ = ref.decoder_forward(params, config, asked, encoded, readable, None)
    rows = hidden[:, :-1] if kind else hidden[:, 1:]
    return {"logits": rows @ params["embedding"][:11].T / math.sqrt(10), "memory": memory[:, None]}


def test_the_model_is_equations_5_to_7():
    """M_t = Encoder(s_t, M_{t-1}); s_{t+1} is predicted from the encoded s_t; computed segment by segment."""
    config, rng = SMALL, np.random.default_rng(0)
    params = random_params(config, rng)
    model, state = PAPER.model_with(params, config), ref.initial_state(params, config, 2)
    memory, reading = (
        np.tile(params["initial_memory"][0], (2, 1, 1, 1)),
        np.full((2, 6), 11),
    )  # which begins a document
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
    expected = by_equations(
        params, config, task.reading, state.memory, task.prompt, kind, task.readable
    ) | {"previous": tokens}
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
    (a, after_a, _), (b, after_b, _) = (
        ref.forward(params, config, tokens, state, None, t) for t in tasks
    )
    assert (a == b).all() and (after_a.memory == after_b.memory).all()
    first, second = (model(torch.tensor(tokens), torch_state, to_torch(t)) for t in tasks)
    assert torch.equal(first.logits, second.logits) and torch.equal(
        first.state.memory, second.state.memory
    )
    shown = ref.forward(
        params, config, tokens, state, None, task._replace(readable=np.ones((2, 6), bool))
    )
    assert not (shown[0] == a).all() and not (shown[1].memory == after_a.memory).all()


def test_the_decoder_only_model_refuses_tasks():
    config, _, params, _, model, _ = both_sides("memformer", "decoder-only")
    task = random_task(config, np.random.default_rng(0), [0])
    for read in (ref.forward, ref.advance):
        with pytest.raises(ValueError, match="no tasks but continuation"):
            read(
                params,
                config,
                np.zeros((1, 6), int),
                ref.initial_state(params, config, 1),
                None,
                task,
            )
    for read in (model, model.advance):
        with pytest.raises(ValueError, match="no tasks but continuation"):
            read(torch.zeros(1, 6, dtype=torch.long), model.initial_state(1), to_torch(task))


def test_the_references_tasks_are_the_lanes_tasks():
    """Infilling and recall of the reference, field by field, agree with those of accelerated/data/tasks.py."""
    rng = np.random.default_rng(0)
    previous, earlier = rng.integers(11, size=(2, 3, 6))
    filled_in, recalled = (
        ref.infilling(SMALL, previous, 0.5, 2.0, np.random.default_rng(1)),
        ref.recall(previous, earlier),
    )
    again = np.random.default_rng(1)
    for lane in range(3):
        text = mask_spans(previous[lane], 12, again, 0.5, 2.0).tolist()
        assert filled_in.reading[lane][filled_in.readable[lane]].tolist() == text
        assert filled_in.readable[lane].tolist() == [place < len(text) for place in range(6)]
    assert (filled_in.kind == 1).all() and (filled_in.prompt == previous).all()
    assert (recalled.kind == 2).all() and (recalled.prompt == earlier).all()
    assert (recalled.reading == previous).all() and recalled.readable.all()


# Order, norms, residuals and projections of the layers, written again; attention, heads and masks are the reference's


def oracle_norm(p, name, x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * p[
        f"{name}.scale"
    ] + p[f"{name}.bias"]


def oracle_attention(p, prefix, x, keyed, distances=None):
    """What heads of 3 find in keyed (K, D), by content alone or also by distance; it is causal if distances begin at 0."""
    rows = (("query", x), ("key", keyed), ("value", keyed))
    heads = [
        ref.split_heads((each @ p[f"{prefix}{name}"].T + p[f"{prefix}{name}_bias"])[None], 2)
        for name, each in rows
    ]
    if distances is None:
        out, _ = ref.masked_attention_forward(*heads, np.ones((1, 1, 1, 1), bool), 0.0, None)
    else:
        mask, positions = (
            ref.self_attention_mask(6, len(keyed) - 6, distances[0] == 0, None),
            p[f"{prefix}positions"],
        )
        out, _ = ref.simplified_attention_forward(
            {"positions": positions}, *heads, np.array(distances), mask, 0.0, None
        )
    return ref.merge_heads(out)[0] @ p[f"{prefix}output"].T + p[f"{prefix}output_bias"]


def oracle_mlp(p, x):
    hidden = np.maximum(oracle_norm(p, "mlp_norm", x) @ p["mlp_hidden"].T + p["mlp_hidden_bias"], 0)
    return hidden @ p["mlp_output"].T + p["mlp_output_bias"]


def test_layers_are_figures_1_and_2():
    """Order, norms and residuals of an encoder layer (2a), a decoder layer and a layer with memory (1b)."""
    rng = np.random.default_rng(0)
    x, memory, source = (rng.standard_normal((rows, 10)) for rows in (6, 4, 6))
    params, alone = random_params(SMALL, rng), random_params(variant("decoder-only"), rng)

    p = ref.subtree(params, "encoder.layers.1.")
    normal = oracle_norm(p, "attention.norm", x)
    y = x + oracle_attention(p, "attention.", normal, normal, range(-5, 6))
    y = y + oracle_attention(
        p, "read.", oracle_norm(p, "read.norm", y), oracle_norm(p, "read.memory_norm", memory)
    )
    expected = {"encoder layer": y + oracle_mlp(p, y)}
    actual = {
        "encoder layer": ref.encoder_layer_forward(p, SMALL, x[None], memory[None], None, None)[0][
            0
        ]
    }

    p = ref.subtree(params, "decoder.layers.2.")
    normal = oracle_norm(p, "attention.norm", x)
    y = x + oracle_attention(p, "attention.", normal, normal, range(7))
    y = y + oracle_attention(p, "cross.", oracle_norm(p, "cross.norm", y), source)
    expected["decoder layer"] = y + oracle_mlp(p, y)
    actual["decoder layer"] = ref.decoder_layer_forward(
        p, SMALL, x[None], source[None], None, None
    )[0][0]

    p, config = ref.subtree(alone, "decoder.layers.1."), variant("decoder-only")
    normal = oracle_norm(p, "attention.norm", x)
    keyed = np.concatenate([oracle_norm(p, "attention.memory_norm", memory), normal])
    y = x + oracle_attention(p, "attention.", normal, keyed, range(6))
    expected["memory layer"] = y + oracle_mlp(p, y)
    expected["memory"], _ = ref.slot_attention_forward(
        ref.subtree(p, "writer."), config, memory[None], expected["memory layer"][None], None
    )
    out, actual["memory"], _ = ref.memory_layer_forward(p, config, x[None], memory[None], None)
    assert_agree(expected, actual | {"memory layer": out[0]}, 1e-10)


# Memory replay in NumPy


def test_every_segment_has_random_numbers_of_its_own():
    draws = [ref.segment_rng(seed, t).random() for seed, t in ((1, 0), (1, 1), (2, 0), (1, 0))]
    assert draws[0] == draws[3] and len(set(draws)) == 3 and ref.segment_rng(None, 0) is None


@given(
    name=st.sampled_from(sorted(VARIANTS)),
    horizon=st.integers(1, 3),
    dropout=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**31),
)
def test_numpy_memory_replay_equals_back_propagation_through_time(name, horizon, dropout, seed):
    """Loss, every gradient, the gradient of the state that the rollout began with, and the next state."""
    config, rng = dataclasses.replace(variant(name), dropout=dropout), np.random.default_rng(seed)
    params, state, rows = (
        random_params(config, rng),
        random_state(config, rng, 2),
        random_segments("memformer", name, rng),
    )
    segments = reference_segments(rows[:horizon], rng.random((horizon, 2)) < 0.3)
    rows = []
    for method in (ref.through_time, ref.memory_replay):
        loss, grads, dstate, after = method(params, config, segments, state, seed)
        rows.append(
            filled(
                {"loss": np.array([loss])}
                | grads
                | named("gradient", dstate)
                | named("state", after)
            )
        )
    assert_agree(*rows, 1e-12, name)


@pytest.mark.parametrize("name", ["encoder-decoder", "decoder-only"])
def test_numpy_rollouts_have_the_gradients_of_their_loss(name):
    """Both methods' one loss, against finite differences, with dropout, document starts and tasks inside."""
    config, rng = dataclasses.replace(variant(name), dropout=0.3), np.random.default_rng(3)
    params, state, rows = (
        random_params(config, rng),
        random_state(config, rng, 2),
        random_segments("memformer", name, rng),
    )
    segments = reference_segments(rows[:3], rng.random((3, 2)) < 0.3)
    assert any(segment.starts.any() for segment in segments)
    _, grads, dstate, _ = ref.memory_replay(params, config, segments, state, seed=4)

    def objective(inputs):
        return ref.through_time(
            inputs, config, segments, state._replace(memory=inputs["state.memory"]), seed=4
        )[0]

    inputs = params | {"state.memory": state.memory}
    check_directions(objective, inputs, grads | {"state.memory": dstate.memory}, rng, name)


# Configs


@pytest.mark.parametrize("reach", [3, 5, 6, 50])
def test_distances_have_rows_as_far_as_they_occur(
    reach,
):  # of N = 6: the encoder has -5..5, the decoder of N + 1 rows 0..6
    config = dataclasses.replace(SMALL, max_distance=reach)
    assert (
        len(config.distances(False)) == 2 * min(reach, 5) + 1
        and len(config.distances(True)) == min(reach, 6) + 1
    )
    alone = dataclasses.replace(config, encoder_layers=0)  # its decoder has no task's token
    assert len(alone.distances(True)) == min(reach, 5) + 1


def test_parameters_of_table_2():
    """One self-attention of width 512 with 8 heads of 64: 1.05M parameters simplified, 1.32M in Transformer-XL's scheme."""
    config = ref.Config(width=512, heads=8, head_width=64, segment=64)
    counts = {}
    for positions in ref.POSITIONS:
        p = ref.init_attention(
            dataclasses.replace(config, positions=positions), np.random.default_rng(0), True, False
        )
        counts[positions] = sum(v.size for name, v in p.items() if not name.startswith("norm"))
    assert counts["simplified"] == pytest.approx(1.05e6, rel=0.01) and counts[
        "transformer_xl"
    ] == pytest.approx(1.32e6, rel=0.01)
