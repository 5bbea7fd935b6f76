"""Block-Recurrent Transformer, the reference: gradients against finite differences, operations against their definitions."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import block_recurrent as ref
from tests.helpers.comparison import assert_agree, named
from tests.helpers.definitions import slow_bucket
from tests.helpers.gradients import check_directions, check_operation, draw, flat
from tests.helpers.variants import PAPERS

PAPER = PAPERS["block_recurrent"]
SMALL, VARIANTS, variant = PAPER.small, PAPER.variants, PAPER.variant
random_state = PAPER.random_state


# Gradients


def test_head_projections_gradient():
    names = ("key", "value", "query")

    def forward(x, **p):
        projected, caches = ref.head_projections_forward(p, names, 2, x)
        return np.stack([projected[name] for name in names]), caches

    def backward(dout, caches):
        return flat(ref.head_projections_backward(dict(zip(names, dout, strict=True)), caches), ["x"])

    check_operation(forward, backward, {"x": draw(2, 3, 5)} | {name: draw(6, 5) for name in names}, "head_projections")


def test_queries_and_keys_have_unit_length_and_values_have_not():
    projected, _ = ref.head_projections_forward(
        {name: draw(6, 5) for name in ("key", "value")}, ("key", "value"), 2, draw(2, 4, 5)
    )
    assert np.allclose((projected["key"] ** 2).sum(-1), 1, atol=1e-4)
    assert not np.isclose((projected["value"] ** 2).sum(-1), 1).any()


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_attention_gradient(rate):
    mask = np.array([[1, 0, 1, 1], [0, 1, 1, 0], [1, 1, 1, 1]], bool)
    check_operation(
        lambda query, key, value, scale, bias: ref.attention_forward(
            query, key, value, scale, bias, mask, rate, np.random.default_rng(8)
        ),
        lambda dout, cache: dict(
            zip(("query", "key", "value", "scale", "bias"), ref.attention_backward(dout, cache), strict=True)
        ),
        {
            "query": draw(1, 2, 3, 5),
            "key": draw(1, 2, 4, 5),
            "value": draw(1, 2, 4, 5),
            "scale": draw(2),
            "bias": draw(2, 3, 4),
        },
        "attention",
    )


def test_position_bias_gradient():
    check_operation(
        lambda table: ref.position_bias_forward(table, 4, 5),
        lambda dout, cache: {"table": ref.position_bias_backward(dout, cache)},
        {"table": draw(2, 6)},
        "position_bias",
    )


def test_sliding_attention_gradient():
    p = {"scale": draw(2), "position_bias": draw(2, 6)}
    inputs = {"query": draw(1, 2, 8, 5), "keys": draw(1, 2, 12, 5), "values": draw(1, 2, 12, 5)} | p

    def forward(query, keys, values, scale, position_bias):
        return ref.sliding_attention_forward({"scale": scale, "position_bias": position_bias}, SMALL, query, keys, values, None)

    def backward(dout, cache):
        dkeys, dvalues = np.zeros((1, 2, 12, 5)), np.zeros((1, 2, 12, 5))
        dquery, dparams = ref.sliding_attention_backward(dout, cache, dkeys, dvalues)
        return {"query": dquery, "keys": dkeys, "values": dvalues} | dparams

    check_operation(forward, backward, inputs, "sliding_attention")


@pytest.mark.parametrize("kind", ["fixed", "lstm"])
def test_gate_gradient(kind):
    p = ref.init_gate(dataclasses.replace(SMALL, gate=kind), np.random.default_rng(1), 5)
    check_operation(
        lambda carry, hidden, **params: ref.GATES[kind][0](params, carry, hidden),
        lambda dout, cache: flat(ref.GATES[kind][1](dout, cache), ["carry", "hidden"]),
        {"carry": draw(2, 3, 6), "hidden": draw(2, 3, 5)} | p,
        f"{kind} gate",
    )


@pytest.mark.parametrize("kind,configuration", list(itertools.product(["fixed", "lstm"], ["dual", "single", "skip"])))
def test_gating_gradient(kind, configuration):
    config = dataclasses.replace(SMALL, gate=kind, configuration=configuration)
    recurrence = ref.init_recurrence(config, np.random.default_rng(1))
    p = {name: value for name, value in recurrence.items() if name.startswith(("attention_gate", "mlp"))}
    dotted = {name.replace(".", "__"): value for name, value in p.items()}

    def forward(states, attended, **params):
        return ref.gating_forward({k.replace("__", "."): v for k, v in params.items()}, config, states, attended)

    def backward(dout, cache):
        dstates, dattended, grads = ref.gating_backward(config, dout, cache)
        assert grads.keys() == p.keys()
        return {"states": dstates, "attended": dattended} | {k.replace(".", "__"): v for k, v in grads.items()}

    check_operation(forward, backward, {"states": draw(1, 3, 6), "attended": draw(1, 3, 20)} | dotted, configuration)


def test_state_projection_gradient():
    p = ref.init_recurrence(SMALL, np.random.default_rng(1))
    names = ("ids", "norm.scale", "norm.bias", "key", "value", "query", "cross_query")
    dotted = {name.replace(".", "__"): p[name] for name in names}

    def forward(states, **params):
        projected, cache = ref.state_projection_forward({k.replace("__", "."): v for k, v in params.items()}, SMALL, states)
        return np.stack([projected[name] for name in ("key", "value", "query", "cross_query")]), cache

    def backward(dout, cache):
        dprojected = dict(zip(("key", "value", "query", "cross_query"), dout, strict=True))
        dstates, grads = ref.state_projection_backward(dprojected, cache)
        return {"states": dstates} | {k.replace(".", "__"): v for k, v in grads.items()}

    check_operation(forward, backward, {"states": draw(2, 3, 6)} | dotted, "state_projection")


@pytest.mark.parametrize("name", VARIANTS)
def test_model_gradient(name):
    """Random directions through every parameter and every field of the incoming state, next state's gradient included."""
    config, rng = variant(name), np.random.default_rng(5)
    params, state = ref.init_params(config, rng), random_state(config, rng, 2)
    tokens = rng.integers(config.vocabulary, size=(2, config.segment))
    logits, next_state, cache = ref.forward(params, config, tokens, state)
    dlogits = rng.standard_normal(logits.shape)
    dnext = ref.State(*(rng.standard_normal(field.shape) for field in next_state))
    grads, dstate = ref.backward(params, config, cache, dlogits, dnext)
    assert grads.keys() == params.keys()
    grads |= named("state", dstate)

    def objective(inputs):
        fields = (inputs[f"state.{field}"] for field in ref.State._fields)
        logits, after, _ = ref.forward(inputs, config, tokens, ref.State(*fields))
        return (logits * dlogits).sum() + sum((a * b).sum() for a, b in zip(after, dnext, strict=True))

    inputs = params | named("state", state)
    moving = {k: v for k, v in inputs.items() if v.size and not k.endswith("state.initial")}
    check_directions(lambda shifted: objective(inputs | shifted), moving, grads, rng, name)
    assert all(not grads[k].any() for k in params if k.endswith("state.initial")), "nothing started from it"


def test_model_gradient_with_dropout():
    config = dataclasses.replace(SMALL, dropout=0.3)
    params, rng = ref.init_params(config, np.random.default_rng(5)), np.random.default_rng(6)
    tokens, state = rng.integers(config.vocabulary, size=(2, 12)), random_state(config, rng, 2)
    logits, _, cache = ref.forward(params, config, tokens, state, np.random.default_rng(7))
    dlogits = rng.standard_normal(logits.shape)
    grads, _ = ref.backward(params, config, cache, dlogits)
    moving = {k: v for k, v in params.items() if not k.endswith("state.initial")}

    def objective(shifted):
        return (ref.forward(params | shifted, config, tokens, state, np.random.default_rng(7))[0] * dlogits).sum()

    check_directions(objective, moving, grads, rng, "dropout")


def test_initial_state_gradient_sums_over_lanes():
    config, rng = variant("two-recurrent"), np.random.default_rng(5)
    params = ref.init_params(config, rng)
    dstate = random_state(config, rng, 3)
    moving = {k: v for k, v in params.items() if k.endswith("state.initial")}
    assert len(moving) == 2

    def objective(shifted):
        return sum((a * b).sum() for a, b in zip(ref.initial_state(shifted, config, 3), dstate, strict=True))

    check_directions(objective, moving, ref.initial_state_backward(config, dstate), rng, "initial_state")


# Definitions


@given(
    window=st.integers(1, 5), blocks=st.integers(1, 3), heads=st.integers(1, 3), width=st.integers(1, 4), seed=st.integers(0, 99)
)
def test_sliding_attention_equals_direct_indexing(window, blocks, heads, width, seed):
    """Each token by itself, over the W keys before it, indexed in the whole sequence with no tiles."""
    rng, length = np.random.default_rng(seed), window * blocks
    config = dataclasses.replace(SMALL, window=window, segment=length, heads=heads)
    p = {"scale": rng.standard_normal(heads) + 2, "position_bias": rng.standard_normal((heads, 6))}
    query, keys, values = (rng.standard_normal((2, heads, n, width)) for n in (length, window + length, window + length))
    expected = np.zeros((2, heads, length, width))
    for b, h, i in np.ndindex(2, heads, length):
        weights, total = [], 0.0
        for j in range(i, i + window):  # key j stands window tokens earlier than its index
            distance = i + window - j
            bias = p["position_bias"][h, slow_bucket(distance, 6, 5)]
            weights.append(math.exp((query[b, h, i] @ keys[b, h, j] + bias) * p["scale"][h]))
            total += weights[-1]
        expected[b, h, i] = sum(w / total * values[b, h, j] for w, j in zip(weights, range(i, i + window), strict=True))
    actual, _ = ref.sliding_attention_forward(p, config, query, keys, values, None)
    assert_agree({"out": expected}, {"out": actual}, 1e-10)


def test_position_buckets_of_t5():
    """32 buckets to distance 128: exact to 15, then 16 and 17 share, then ever wider; negative distances are bucket 0."""
    bucket = ref.position_bucket(np.array([-3, 0, 1, 15, 16, 17, 18, 19, 31, 32, 64, 127, 128, 10_000]), 32, 128)
    assert bucket.tolist() == [0, 0, 1, 15, 16, 16, 16, 17, 21, 21, 26, 31, 31, 31]


def softmax_mix(weights_of, values):
    """Sum of values weighted by exp(weights_of) over their total, in a loop."""
    exps = [math.exp(w) for w in weights_of]
    return sum(e / sum(exps) * v for e, v in zip(exps, values, strict=True))


def test_state_update_equals_direct_attention():
    """One head and one state at a time: S states and all 2W token keys, no mask, no bias, then the fixed gate (3.2, 3.4)."""
    config = dataclasses.replace(SMALL, recurrent_layers=(2,))
    p = ref.init_recurrence(config, np.random.default_rng(2)) | {
        "scale": np.array([2.0, 3.0]),
        "cross_scale": np.array([4.0, 5.0]),
    }
    rng = np.random.default_rng(3)
    states, (keys, values) = rng.standard_normal((1, 3, 6)), rng.standard_normal((2, 1, 2, 8, 5))
    seen = [ref.layer_norm_forward(p, "norm", c)[0] + identity for c, identity in zip(states[0], p["ids"], strict=True)]
    head = lambda name, x, h: (p[name] @ x).reshape(2, 5)[h]  # noqa: E731
    unit = lambda x: x / math.sqrt((x**2).sum() + ref.NORM_EPSILON)  # noqa: E731
    expected = np.zeros((1, 3, 6))
    for s in range(3):
        own, cross = [], []
        for h in range(2):
            query, cross_query = unit(head("query", seen[s], h)), unit(head("cross_query", seen[s], h))
            own.append(
                softmax_mix([query @ unit(head("key", x, h)) * p["scale"][h] for x in seen], [head("value", x, h) for x in seen])
            )
            cross.append(softmax_mix([cross_query @ key * p["cross_scale"][h] for key in keys[0, h]], values[0, h]))
        z = p["attention_gate.weight_z"] @ np.concatenate([*own, *cross]) + p["attention_gate.bias_z"]
        g = 1 / (1 + np.exp(-p["attention_gate.bias_g"]))
        expected[0, s] = states[0, s] * g + z * (1 - g)
    projected, _ = ref.state_projection_forward(p, config, states)
    actual, _ = ref.state_update_forward(p, config, states, projected, keys, values)
    assert_agree({"next states": expected}, {"next states": actual}, 1e-12)


def test_states_read_both_blocks_and_tokens_read_states_before_their_update():
    """The next state depends on the layer's previous block; a block's logits on the incoming state, not on its own update."""
    params, rng = ref.init_params(SMALL, np.random.default_rng(0)), np.random.default_rng(1)
    tokens, state = rng.integers(11, size=(1, 4)), random_state(SMALL, rng, 1)
    logits, after, _ = ref.forward(params, SMALL, tokens, state)
    moved = state._replace(values=state.values + np.array([0, 1, 0])[:, None, None, None])  # layer 2's alone, the recurrent one
    assert not np.isclose(ref.forward(params, SMALL, tokens, moved)[1].states, after.states).all()
    gate = "layers.1.state.attention_gate.bias_z"
    changed, changed_after, _ = ref.forward(params | {gate: params[gate] + 1}, SMALL, tokens, state)
    assert (changed == logits).all() and not np.isclose(changed_after.states, after.states).any()


def test_feedback_lets_the_first_layer_read_the_last_blocks_state():
    """With feedback the keys of layer 2, below which only layer 1 stands, depend on the states; without, they do not."""
    for feedback in (True, False):
        config = dataclasses.replace(SMALL, feedback=feedback, recurrent_layers=(3,), segment=4)
        params, rng = ref.init_params(config, np.random.default_rng(0)), np.random.default_rng(1)
        tokens, state = rng.integers(11, size=(1, 4)), random_state(config, rng, 1)
        keys = [
            ref.forward(params, config, tokens, state._replace(states=state.states + shift))[1].keys[:, 1]
            for shift in (0, rng.random((3, 6)))
        ]
        assert np.allclose(*keys) is not feedback


def test_initialisation_follows_the_paper():
    config = dataclasses.replace(SMALL, width=400, head_width=40, feed_forward=300, states=60, gate="lstm", configuration="dual")
    params = ref.init_params(config, np.random.default_rng(0))
    state = ref.subtree(params, "layers.1.state.")
    for name, fan_in in (("attention_gate", 160), ("mlp_gate", 300)):
        for matrix in "zif":
            weight, bias = state[f"{name}.weight_{matrix}"], state[f"{name}.bias_{matrix}"]
            assert weight.std() == pytest.approx((0.1 / fan_in) ** 0.5, rel=0.02)
            assert np.abs(weight).max() < 2.3 * (0.1 / fan_in) ** 0.5, "not truncated"
            assert bias.std() == pytest.approx(0.1, rel=0.15)
    assert state["ids"].std() == pytest.approx(1, rel=0.02)
    assert state["initial"].std() == pytest.approx(0.1, rel=0.02)
    assert params["embedding"].std() == pytest.approx(1, rel=0.05)
    assert params["layers.0.key"].std() == pytest.approx(400**-0.5, rel=0.02)
    assert params["layers.0.mlp_output"].std() == pytest.approx(300**-0.5, rel=0.02)
    wide = ref.init_layer(dataclasses.replace(SMALL, heads=50, buckets=64, max_distance=128), np.random.default_rng(0), 0)
    assert wide["position_bias"].std() == pytest.approx(64**-0.5, rel=0.05)
    scales = [v for k, v in params.items() if k.endswith("scale") and "norm" not in k]
    assert len(scales) == 6 and all((scale == config.attention_scale).all() for scale in scales)


def test_logits_are_divided_by_the_root_of_the_width():
    params = ref.init_params(SMALL, np.random.default_rng(0))
    params["final_norm.scale"], params["final_norm.bias"] = np.zeros(6), np.arange(6.0)
    logits, _, _ = ref.forward(params, SMALL, np.zeros((1, 12), int), ref.initial_state(params, SMALL, 1))
    assert np.allclose(logits[0, 3], params["embedding"] @ np.arange(6.0) / math.sqrt(6))


def test_a_document_starts_with_zero_keys_that_take_softmax_mass():
    """The first token of a document attends to W zero values, so its attention output is exactly zero."""
    config = dataclasses.replace(SMALL, layers=1, recurrent_layers=())
    params = ref.init_params(config, np.random.default_rng(0))
    state = ref.initial_state(params, config, 1)
    assert not state.keys.any() and not state.values.any()
    without = params | {"layers.0.output": np.zeros_like(params["layers.0.output"])}
    tokens = np.arange(12)[None] % 11
    logits, plain = (ref.forward(p, config, tokens, state)[0] for p in (params, without))
    assert (logits[:, 0] == plain[:, 0]).all() and not np.isclose(logits[:, 1], plain[:, 1]).all()
    p, block = ref.subtree(params, "layers.0."), np.ones((1, 2, 4, 5))
    p["position_bias"] = np.zeros_like(p["position_bias"])
    keys, values = (np.concatenate([start[:, 0], block], axis=2) for start in (state.keys, state.values))
    attended, _ = ref.sliding_attention_forward(p, config, 0 * block, keys, values, None)
    assert np.allclose(attended[0, 0, :, 0], [0, 1 / 4, 2 / 4, 3 / 4]), "of W equal weights, those of the zeros are lost"


@pytest.mark.parametrize(
    "change,words",
    [
        ({"segment": 10}, "segment 10 is not a multiple of window 4"),
        ({"recurrent_layers": (4,)}, "recurrent_layers"),
        ({"recurrent_layers": (0,)}, "recurrent_layers"),
        ({"recurrent_layers": (2, 1)}, "ascending"),
        ({"recurrent_layers": (2, 2)}, "each layer once"),
        ({"gate": "gru"}, "gate is 'gru'"),
        ({"configuration": "triple"}, "configuration is 'triple'"),
        ({"feedback": True, "recurrent_layers": ()}, "exactly one recurrent layer"),
        ({"feedback": True, "recurrent_layers": (1, 2)}, "exactly one recurrent layer"),
        ({"window": 0}, "window is 0"),
        ({"buckets": 5}, "buckets is 5"),
        ({"max_distance": 3}, "max_distance 3"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": -0.1}, "dropout is -0.1"),
        ({"attention_scale": 0.0}, "attention_scale is 0.0"),
        ({"attention_scale": math.inf}, "attention_scale is inf; it must be positive and finite"),
        ({"attention_scale": math.nan}, "attention_scale is nan"),
        ({"states": 0}, "states is 0"),
    ],
)
def test_impossible_configs_are_refused(change, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        dataclasses.replace(SMALL, **change)


def test_two_buckets_are_enough():
    """One for distances up to 1 and one for the others."""
    dataclasses.replace(SMALL, buckets=2, max_distance=2)
    with pytest.raises(ValueError, match="max_distance 1 must exceed half of buckets 2"):
        dataclasses.replace(SMALL, buckets=2, max_distance=1)


# Where gradients stop


def test_unreachable_buckets_get_exactly_zero_gradient():
    """Distances run from 1 to W, so bucket 0 and those past W's get none."""
    config = dataclasses.replace(SMALL, buckets=12, max_distance=30)
    params = ref.init_params(config, np.random.default_rng(0))
    rng = np.random.default_rng(1)
    state, tokens = random_state(config, rng, 2), rng.integers(11, size=(2, 12))
    logits, _, cache = ref.forward(params, config, tokens, state)
    grads, _ = ref.backward(params, config, cache, rng.standard_normal(logits.shape))
    bias = grads["layers.0.position_bias"]
    assert not bias[:, 0].any() and not bias[:, 5:].any() and bias[:, 1:5].all()


def test_last_state_update_gets_no_gradient_within_a_segment():
    """The cached state is not differentiable across segments: the third block's update alone moves nothing."""
    rng = np.random.default_rng(1)
    params, state = ref.init_params(SMALL, rng), random_state(SMALL, rng, 2)
    name = "layers.1.state.attention_gate.bias_z"

    def gradient(blocks, dnext=None):
        tokens = np.random.default_rng(2).integers(11, size=(2, 4 * blocks))
        logits, after, cache = ref.forward(params, SMALL, tokens, state)
        dnext = None if dnext is None else ref.State(*(np.ones_like(field) for field in after))
        return ref.backward(params, SMALL, cache, np.ones_like(logits), dnext)[0][name]

    assert not gradient(1).any()
    assert gradient(2).any() and gradient(3).any()
    assert gradient(1, dnext=True).any()
