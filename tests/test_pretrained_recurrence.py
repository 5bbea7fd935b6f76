"""Recurrence added to GPT-2: the reference against finite differences and definitions, the accelerated against it."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from agreement import assert_agree, named
from gradients import check_directions, check_operation, dotted, draw, flat, movable, nested
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import (
    check_causality,
    check_evaluation,
    check_gpu,
    check_length_refused,
    check_rollout,
    dropout_from,
    filled,
)
from test_corpus import documents_of
from tolerances import TOLERANCE

import accelerated.pretrained_recurrence as fast
from accelerated import replay
from accelerated.data.lanes import Lanes
from accelerated.data.windows import cut
from accelerated.evaluation.generation import GREEDY, continue_in_new_window, continue_text, read_prompt
from accelerated.pretrained_recurrence import PretrainedRecurrence
from reference import pretrained_recurrence as ref

LADDER_TOLERANCE = 1e-9  # float64, relative; the worst measured is 1e-13

SMALL = ref.Config(
    vocabulary=11,
    width=10,
    layers=3,
    heads=2,
    feed_forward=7,
    max_positions=9,
    segment=6,
    overlap=2,
    module_width=5,
)
VARIANTS = {
    "overlapping": {},
    "disjoint": {"overlap": 0},
    "all-but-one-shared": {"overlap": 5},
    "plain": {"vectors": 0},
    "several-vectors": {"vectors": 4},
    "at-every-layer": {"insertion_layers": (1, 2, 3)},
    "at-the-last-layer": {"insertion_layers": (3,), "vectors": 2},
    "max": {"pooling": "max"},
    "fixed-key": {"pooling": "attention"},
    "advance": {"pool": "advance"},
    "advance-fixed-key": {"pool": "advance", "pooling": "attention", "overlap": 1},
    "pooled-after-the-norm": {"pool_final_norm": True},
    "linear-module": {"module_layers": 0},
    "one-token": {"segment": 1, "overlap": 0},
    "one-layer-one-head": {"layers": 1, "insertion_layers": (1,), "heads": 1, "width": 5},
}
RECURRENT = [name for name, change in VARIANTS.items() if change.get("vectors") != 0]


def variant(name):
    return dataclasses.replace(SMALL, **VARIANTS[name])


def random_params(config, rng):
    """Parameters with nothing at zero or one, so that no term hides."""
    params = ref.init_params(config, rng)
    return {name: value + 0.3 * rng.standard_normal(value.shape) for name, value in params.items()}


def random_state(config, rng, batch):
    """A state in mid-document, but in the last of several lanes."""
    if config.vectors == 0:
        return ref.initial_state({}, config, batch)
    return ref.State(rng.standard_normal((batch, config.width)), np.arange(batch) < max(1, batch - 1))


def to_torch(state):
    return fast.State(*(torch.tensor(field) for field in state))


def loaded(config, params):
    """The accelerated model with these parameters."""
    model = PretrainedRecurrence(config)
    model.load_state_dict({name: torch.tensor(value) for name, value in params.items()})
    return model


# Rung 1: every operation's backward against its full Jacobian


def test_gelu_gradient():
    check_operation(ref.gelu_forward, lambda dout, cache: {"x": ref.gelu_backward(dout, cache)}, {"x": draw(3, 4)}, "gelu")


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_masked_attention_gradient(rate):
    seen = ref.visible_keys(4, 2, np.array([True, False]))
    inputs = {"query": draw(2, 3, 4, 5), "key": draw(2, 3, 6, 5), "value": draw(2, 3, 6, 5)}
    check_operation(
        lambda query, key, value: ref.masked_attention_forward(query, key, value, seen, rate, np.random.default_rng(8)),
        lambda dout, cache: dict(zip(inputs, ref.masked_attention_backward(dout, cache), strict=True)),
        inputs,
        "attention",
    )


def layer_inputs(config):
    """A layer's parameters, shaken, but key biases apart."""
    p = {name: value + 0.3 * draw(*value.shape) for name, value in ref.init_layer(config, np.random.default_rng(1)).items()}
    return nested(movable(p)), nested({name: value for name, value in p.items() if name not in movable(p)})


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("vectors", [0, 2])
def test_layer_gradient(vectors, dropout):
    """Attention to inserted vectors, in one lane absent, and feed-forward."""
    config = dataclasses.replace(SMALL, width=6, dropout=dropout)
    moving, fixed = layer_inputs(config)
    arrays, present = {"x": draw(2, 3, 6)} | ({"inserted": draw(2, vectors, 6)} if vectors else {}), np.array([True, False])

    def forward(x, inserted=None, **p):
        return ref.layer_forward(dotted(p | fixed), config, x, inserted, present, np.random.default_rng(8))

    def backward(dout, cache):
        dx, dinserted, grads = ref.layer_backward(config, dout, cache)
        assert nested(grads).keys() == (moving | fixed).keys() and dinserted.shape == (2, vectors, 6)
        return {"x": dx, "inserted": dinserted} | nested(grads)

    check_operation(forward, backward, arrays | moving, "layer")


def test_mix_gradient():
    check_operation(
        ref.mix_forward,
        lambda dout, cache: dict(zip(("layer_scores", "outputs"), ref.mix_backward(dout, cache), strict=True)),
        {"layer_scores": draw(3), "outputs": draw(3, 2, 4, 5)},
        "mix",
    )


@pytest.mark.parametrize("pool", ref.POOLS)
@pytest.mark.parametrize("pooling", ref.POOLINGS)
@pytest.mark.parametrize("length", [6, 3])
def test_pool_gradient(pooling, pool, length):
    config = dataclasses.replace(SMALL, pooling=pooling, pool=pool)
    inputs = {"outputs": draw(3, 2, length, 10), "layer_scores": draw(3)}
    inputs |= {"fixed_key": draw(10)} if pooling == "attention" else {}
    check_operation(
        lambda outputs, **p: ref.pool_forward(p, config, outputs),
        lambda dout, cache: flat(ref.pool_backward(config, dout, cache), ["outputs"]),
        inputs,
        pooling,
    )


@pytest.mark.parametrize("vectors,layers", [(1, 3), (2, 1), (3, 0)])
def test_module_gradient(vectors, layers):
    config = dataclasses.replace(SMALL, width=4, vectors=vectors, module_layers=layers)
    p = ref.init_module(config, np.random.default_rng(0))
    p = {name: value + 0.3 * draw(*value.shape) for name, value in p.items() if name != "layer_scores"}
    check_operation(
        lambda pooled, **p: ref.module_forward(p, config, pooled),
        lambda dout, cache: flat(ref.module_backward(dout, cache), ["pooled"]),
        {"pooled": draw(2, 4)} | p,
        "module",
    )


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_model_gradient(name, short, dropout):
    """Random directions through every parameter and the incoming z, of the logits and of the next z."""
    config, rng = dataclasses.replace(variant(name), dropout=dropout), np.random.default_rng(6)
    params, state = random_params(config, rng), random_state(config, rng, 3)
    tokens = rng.integers(config.vocabulary, size=(3, max(1, config.segment - (2 if short else 0))))

    def run(inputs):
        read = state._replace(pooled=inputs["state.pooled"])
        return ref.forward(inputs, config, tokens, read, np.random.default_rng(8) if dropout else None)

    inputs = params | {"state.pooled": state.pooled}
    logits, after, cache = run(inputs)
    dlogits, dnext = rng.standard_normal(logits.shape), ref.State(rng.standard_normal(after.pooled.shape), None)
    grads, dstate = ref.backward(params, config, cache, dlogits, dnext)
    assert grads.keys() == params.keys() and not dstate.present.any()

    def objective(shifted):
        logits, after, _ = run(inputs | shifted)
        return (logits * dlogits).sum() + (after.pooled * dnext.pooled).sum()

    check_directions(objective, filled(movable(inputs)), grads | {"state.pooled": dstate.pooled}, rng, name)
    alone, _ = ref.backward(params, config, cache, dlogits)  # the next state's gradient is optional
    zero, _ = ref.backward(params, config, cache, dlogits, ref.State(np.zeros_like(after.pooled), None))
    assert_agree(zero, alone, 1e-15, "no next state")


def test_key_biases_have_exactly_no_gradient():
    """They add the same to all scores of a query, h_prev's too, which softmax does not notice: on both sides."""
    config, rng = SMALL, np.random.default_rng(5)
    params, state = random_params(config, rng), random_state(config, rng, 2)
    tokens = rng.integers(config.vocabulary, size=(2, config.segment))
    logits, _, cache = ref.forward(params, config, tokens, state)
    grads, _ = ref.backward(params, config, cache, rng.standard_normal(logits.shape))
    biases = [name for name in params if name.endswith("key_bias")]
    assert len(biases) == 3 and not any(grads[name].any() for name in biases)
    shifted, _, _ = ref.forward(params | {name: params[name] + 1.0 for name in biases}, config, tokens, state)
    assert np.allclose(shifted, logits, rtol=0, atol=1e-11)
    model = loaded(config, params)
    model(torch.tensor(tokens), to_torch(state)).logits.square().sum().backward()
    assert all(p.grad is None for name, p in model.named_parameters() if name in biases)


def test_arguments_are_not_changed():
    rng = np.random.default_rng(5)
    for name in ("overlapping", "pooled-after-the-norm", "plain", "max"):
        config = variant(name)
        params, state = random_params(config, rng), random_state(config, rng, 2)
        tokens = rng.integers(config.vocabulary, size=(2, config.segment))
        before = {k: v.copy() for k, v in (params | named("s", state)).items()}
        logits, after, cache = ref.forward(params, config, tokens, state)
        dlogits, dnext = rng.standard_normal(logits.shape), ref.State(rng.standard_normal(after.pooled.shape), after.present)
        kept = [dlogits.copy(), dnext.pooled.copy()]
        ref.backward(params, config, cache, dlogits, dnext)
        assert all((before[k] == v).all() for k, v in (params | named("s", state)).items())
        assert (kept[0] == dlogits).all() and (kept[1] == dnext.pooled).all()


# Rung 2: accelerated against reference


def both_models(name, seed=9):
    config = variant(name)
    params, model = ref.init_params(config, np.random.default_rng(seed)), PretrainedRecurrence(config, seed=seed).train()
    return config, params, model


@pytest.mark.parametrize("name", VARIANTS)
def test_accelerated_equals_reference(name):
    """Logits, states and gradients over three windows with a document start in the second, then five steps."""
    config, params, model = both_models(name)
    assert_agree(params, dict(model.state_dict()), 1e-15, "initialisation")
    state = random_state(config, np.random.default_rng(5), 2)
    check_rollout(ref, params, model, config, state, to_torch, LADDER_TOLERANCE, name)


@pytest.mark.parametrize("name", VARIANTS)
def test_accelerated_equals_reference_away_from_the_start(name):
    """The same with weights that hide nothing, and a short last window."""
    config, rng = variant(name), np.random.default_rng(7)
    params, state = random_params(config, rng), random_state(config, rng, 2)
    segments = []
    for length in (config.segment, config.segment, max(1, config.segment - 2)):
        tokens, targets = rng.integers(config.vocabulary, size=(2, 2, length))
        segments.append((tokens, targets, rng.random(tokens.shape) < 0.7))
    model = loaded(config, params).train()
    check_rollout(ref, params, model, config, state, to_torch, LADDER_TOLERANCE, name, segments)


@pytest.mark.parametrize("name", VARIANTS)
def test_dropout_acts_where_the_reference_has_it(monkeypatch, name):
    """With the reference's random numbers in place of torch's, training mode gives the reference's logits and state."""
    config = dataclasses.replace(variant(name), dropout=0.3)
    model = PretrainedRecurrence(config, seed=9).train()
    monkeypatch.setattr(torch.nn.functional, "dropout", dropout_from(np.random.default_rng(7)))
    tokens = np.random.default_rng(1).integers(11, size=(2, config.segment))
    state = random_state(config, np.random.default_rng(2), 2)
    params = ref.init_params(config, np.random.default_rng(9))
    expected, after, _ = ref.forward(params, config, tokens, state, np.random.default_rng(7))
    output = model(torch.tensor(tokens), to_torch(state))
    rows = filled({"logits": output.logits} | named("state", output.state))
    assert_agree(filled({"logits": expected} | named("state", after)), rows, LADDER_TOLERANCE, "dropout")


@settings(max_examples=15)
@given(name=st.sampled_from(sorted(VARIANTS)), count=st.integers(1, 30), lanes=st.integers(1, 2), seed=st.integers(0, 99))
def test_step_equals_the_predictions_that_count(name, count, lanes, seed):
    """Token by token from a document's start: each logit is that of the window that scores it, whatever the overlap."""
    config, rng = variant(name), np.random.default_rng(seed)
    params = random_params(config, rng)
    document = rng.integers(config.vocabulary, size=(lanes, count + 1))
    model, state, expected = loaded(config, params).eval(), ref.initial_state(params, config, lanes), []
    for window in ref.windows_of(config, document):
        logits, state, _ = ref.forward(params, config, window.tokens, state)
        expected.append(logits[:, window.scored[0]])
    stream, actual = model.initial_state(lanes), []
    with torch.no_grad():
        for token in torch.tensor(document[:, :-1]).unbind(1):
            logits, stream = model.step(token, stream)
            actual.append(logits)
    assert_agree({"logits": np.concatenate(expected, 1)}, {"logits": torch.stack(actual, 1)}, LADDER_TOLERANCE)


@pytest.mark.parametrize("name", ["overlapping", "disjoint", "plain", "advance"])
def test_a_stream_can_begin_in_mid_document(name):
    config, params, model = both_models(name)
    rng = np.random.default_rng(3)
    state, tokens = random_state(config, rng, 2), rng.integers(11, size=(2, 5))
    stream, rows = to_torch(state), []
    for token in torch.tensor(tokens).unbind(1):
        logits, stream = model.eval().step(token, stream)
        rows.append(logits)
    assert_agree({"logits": ref.forward(params, config, tokens, state)[0]}, {"logits": torch.stack(rows, 1)}, LADDER_TOLERANCE)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("length", [1, 4, 6, 7, 8, 11, 19])
def test_prompts_and_continuations(name, length):
    """A prompt of any length is read as by step alone; a greedy continuation in a new window is the reference's (5.3)."""
    config, params, model = both_models(name)
    prompt = torch.randint(11, (2, length))
    stream = model.eval().initial_state(2)
    with torch.no_grad():
        for token in prompt.unbind(1):
            logits, stream = model.step(token, stream)
    assert torch.allclose(read_prompt(model, prompt)[0], logits, rtol=0, atol=1e-12)
    count = config.segment + 1 - max(1, config.overlap)
    expected = ref.greedy_continuation(params, config, prompt.numpy(), count)
    assert expected.shape == (2, count)
    actual = torch.stack(list(continue_in_new_window(model, prompt, count, GREEDY)), 1)
    assert (actual.numpy() == expected).all()


def test_a_new_window_knows_of_its_context_by_the_vector_alone():
    """Where windows are disjoint, contexts with the same last token differ by z alone; plain GPT-2 cannot tell them apart."""
    for name in ("disjoint", "plain"):
        config, rng = dataclasses.replace(variant(name), overlap=0), np.random.default_rng(1)
        loud = ("layers.1.value", "layers.1.output")  # so that what is inserted changes the most probable token
        params = {key: value * 8 if key in loud else value for key, value in random_params(config, rng).items()}
        model = loaded(config, params).eval()
        contexts = rng.integers(11, size=(40, 6))
        contexts[:, -1] = 3
        texts = torch.stack(list(continue_in_new_window(model, torch.tensor(contexts), 5, GREEDY)), 1)
        assert (texts.unique(dim=0).shape[0] > 1) == (name == "disjoint")
        model.train()
        list(continue_text(model, torch.tensor(contexts), 2))
        assert model.training


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", VARIANTS)
def test_gpu_equals_cpu(name):
    check_gpu(PretrainedRecurrence, variant(name), TOLERANCE["cuda", torch.float32], name)


# Definitions


def test_gelu_is_gpt2s():
    x = np.linspace(-4, 4, 81)
    expected = torch.nn.functional.gelu(torch.tensor(x), approximate="tanh")
    assert_agree({"y": expected}, {"y": ref.gelu_forward(x)[0]}, 1e-14)


@given(batch=st.integers(1, 3), length=st.integers(1, 5), vectors=st.integers(0, 3), seed=st.integers(0, 99))
def test_attention_is_over_inserted_vectors_and_earlier_tokens(batch, length, vectors, seed):
    """One query and one head at a time (Figure 2): h_prev is normed, a key and a value, and nothing else."""
    rng = np.random.default_rng(seed)
    config, present = SMALL, rng.random(batch) < 0.6
    p = {name: value + 0.3 * rng.standard_normal(value.shape) for name, value in ref.init_layer(config, rng).items()}
    x, inserted = rng.standard_normal((batch, length, 10)), rng.standard_normal((batch, vectors, 10))

    def norm(row):
        row = row - row.mean()
        return row / math.sqrt((row**2).mean() + 1e-5) * p["norm.scale"] + p["norm.bias"]

    expected = np.zeros_like(x)
    for b, i in np.ndindex(batch, length):
        rows = [norm(row) for row in ([*inserted[b]] if present[b] else []) + [*x[b, : i + 1]]]
        heads = []
        for own in (slice(0, 5), slice(5, 10)):
            query = (p["query"] @ norm(x[b, i]) + p["query_bias"])[own]
            exps = [math.exp(query @ (p["key"] @ row + p["key_bias"])[own] / math.sqrt(5)) for row in rows]
            values = [(p["value"] @ row + p["value_bias"])[own] for row in rows]
            heads.append(sum(e * v for e, v in zip(exps, values, strict=True)) / sum(exps))
        expected[b, i] = x[b, i] + p["output"] @ np.concatenate(heads) + p["output_bias"]
    out, _ = ref.window_attention_forward(p, config, x, inserted if vectors else None, present, None)
    assert_agree({"out": expected}, {"out": out}, 1e-11)


@given(rows=st.integers(1, 6), seed=st.integers(0, 99), pooling=st.sampled_from(sorted(ref.POOLINGS)))
def test_pooling_is_equation_1(rows, seed, pooling):
    """Written out position by position and layer by layer; the alternatives by their definitions."""
    rng = np.random.default_rng(seed)
    config = dataclasses.replace(SMALL, pooling=pooling)
    outputs, alpha, key = rng.standard_normal((3, 2, rows, 10)), rng.standard_normal(3), rng.standard_normal(10)
    shares = [math.exp(a) / sum(math.exp(other) for other in alpha) for a in alpha]
    mixed = [[sum(shares[l] * outputs[l, b, i] for l in range(3)) for i in range(rows)] for b in range(2)]
    if pooling == "mean":
        expected = [sum(lane) / rows for lane in mixed]
    elif pooling == "max":
        expected = [np.max(lane, axis=0) for lane in mixed]
    else:
        exps = [[math.exp(row @ key / math.sqrt(10)) for row in lane] for lane in mixed]
        expected = [sum(e * row for e, row in zip(es, lane, strict=True)) / sum(es) for es, lane in zip(exps, mixed, strict=True)]
    p = {"layer_scores": alpha, "fixed_key": key}
    assert_agree({"z": np.stack(expected)}, {"z": ref.pool_forward(p, config, outputs)[0]}, 1e-12)


def test_the_gradient_of_the_layer_scores_sums_to_zero():
    """A softmax does not notice what all its inputs have in common: on both sides, and it is no zero vector."""
    config, rng = SMALL, np.random.default_rng(2)
    params = random_params(config, rng)
    windows = ref.windows_of(config, rng.integers(11, size=(2, 19)))
    _, grads, _ = ref.loss_and_gradients(params, config, windows)
    dalpha = grads["module.layer_scores"]
    assert np.abs(dalpha).max() > 1e-6 and abs(dalpha.sum()) < 1e-14 * 3
    model = loaded(config, params)
    state = model.advance(torch.tensor(windows[0].tokens), model.initial_state(2))
    model(torch.tensor(windows[1].tokens), state).logits[..., 3].sum().backward()
    assert abs(model.module.layer_scores.grad.sum()) < 1e-12 < model.module.layer_scores.grad.abs().max()


def test_layer_scores_start_equal_and_the_module_apart_from_gpt2s_scale():
    params = ref.init_params(ref.Config(pooling="attention"), np.random.default_rng(0))
    assert not params["module.layer_scores"].any() and not params["module.fixed_key"].any()
    deviation = {name: params[name].std() for name in params if params[name].ndim == 2}
    expected = {"embedding": 0.02, "positions": 0.01, "layers.0.query": 0.02, "layers.3.mlp_hidden": 0.02}
    expected |= {"layers.1.output": 0.02 / math.sqrt(8), "layers.2.mlp_output": 0.02 / math.sqrt(8)}
    expected |= {"module.hidden_1": 128**-0.5, "module.hidden_2": 200**-0.5, "module.inserted": 200**-0.5}
    for name, value in expected.items():
        assert deviation[name] == pytest.approx(value, rel=0.05), name


# What the state means


@pytest.mark.parametrize("name", RECURRENT)
def test_a_first_window_has_no_slot(name):
    """Its logits are plain GPT-2's, whatever stands in the state; a present zero vector is something else."""
    config, rng = variant(name), np.random.default_rng(4)
    params = random_params(config, rng)
    plain = dataclasses.replace(config, vectors=0)
    gpt2 = {key: value for key, value in params.items() if not key.startswith("module.")}
    tokens = rng.integers(11, size=(1, config.segment))
    expected = ref.forward(gpt2, plain, tokens, ref.initial_state(gpt2, plain, 1))[0]
    states = [ref.State(pooled, np.zeros(1, bool)) for pooled in (np.zeros((1, config.width)), draw(1, config.width))]
    model = loaded(config, params)
    for state in (ref.initial_state(params, config, 1), *states):
        assert_agree({"logits": expected}, {"logits": ref.forward(params, config, tokens, state)[0]}, 1e-13)
        assert_agree({"logits": expected}, {"logits": model(torch.tensor(tokens), to_torch(state)).logits}, 1e-12)
    present = states[0]._replace(present=np.ones(1, bool))
    assert np.abs(ref.forward(params, config, tokens, present)[0] - expected).max() > 1e-4
    assert (model(torch.tensor(tokens), to_torch(present)).logits.detach().numpy() - expected).max() > 1e-4


@pytest.mark.parametrize("name", RECURRENT)
def test_a_document_of_one_window_is_plain_gpt2(name):
    """No longer than the window: the same loss, the same gradients, and none for the module, whose z nobody reads."""
    config, rng = variant(name), np.random.default_rng(4)
    params, plain = random_params(config, rng), dataclasses.replace(config, vectors=0)
    gpt2 = {key: value for key, value in params.items() if not key.startswith("module.")}
    for length in range(2, config.segment + 2):
        document = rng.integers(11, size=(2, length))
        loss, grads, _ = ref.loss_and_gradients(params, config, ref.windows_of(config, document))
        expected, plain_grads, _ = ref.loss_and_gradients(gpt2, plain, ref.windows_of(plain, document))
        assert loss == pytest.approx(expected, rel=1e-13)
        assert_agree(plain_grads, {key: grads[key] for key in gpt2}, 1e-12)
        assert not any(grads[key].any() for key in grads if key.startswith("module."))


def test_the_last_windows_vector_has_no_gradient_and_the_others_have():
    """In a rollout of three windows by autograd: z_1 and z_2 are read, z_3 is not."""
    config, params, model = both_models("overlapping")
    windows = ref.windows_of(config, np.random.default_rng(0).integers(11, size=(2, 15)))
    assert len(windows) == 3
    state, pooled, loss = model.initial_state(2), [], 0.0
    for window in windows:
        logits, state, _ = model(torch.tensor(window.tokens), state)
        state.pooled.retain_grad()
        pooled.append(state.pooled)
        loss = loss + logits.log_softmax(-1)[torch.tensor(window.scored)][:, 0].sum()
    loss.backward()
    assert pooled[0].grad.any() and pooled[1].grad.any() and pooled[2].grad is None
    logits, state, cache = ref.forward(params, config, windows[2].tokens, ref.State(pooled[1].detach().numpy(), np.ones(2, bool)))
    grads, dstate = ref.backward(params, config, cache, np.ones_like(logits))
    assert not grads["module.layer_scores"].any() and grads["module.inserted"].any() and dstate.pooled.any()


def test_absent_lanes_get_exactly_no_gradient():
    config, params, model = both_models("several-vectors")
    rng = np.random.default_rng(1)
    tokens, state = rng.integers(11, size=(3, 6)), ref.State(rng.standard_normal((3, 10)), np.array([True, False, True]))
    logits, _, cache = ref.forward(params, config, tokens, state)
    dstate = ref.backward(params, config, cache, rng.standard_normal(logits.shape))[1]
    leaf = to_torch(state)._replace(pooled=torch.tensor(state.pooled, requires_grad=True))
    model(torch.tensor(tokens), leaf).logits.square().sum().backward()
    for grad in (dstate.pooled, leaf.pooled.grad.numpy()):
        assert not grad[1].any() and grad[0].any() and grad[2].any()


def test_information_passes_through_any_number_of_windows():
    """A token of the first window changes the logits of the fifth, by z alone; in plain GPT-2 it does not."""
    for name, reaches in (("disjoint", True), ("plain", False)):
        config, rng = dataclasses.replace(variant(name), overlap=0), np.random.default_rng(3)
        model = loaded(config, random_params(config, rng)).eval()
        document = rng.integers(11, size=(1, 31))
        other = document.copy()
        other[0, 1] = (other[0, 1] + 3) % 11
        ends = []
        for text in (document, other):
            state = model.initial_state(1)
            for window in ref.windows_of(config, text):
                logits, state, _ = model(torch.tensor(window.tokens), state)
            ends.append(logits)
        assert torch.equal(*ends) != reaches


@pytest.mark.parametrize("pool", ref.POOLS)
@pytest.mark.parametrize("overlap", [1, 2, 4])
def test_the_leak_is_where_nothing_is_scored(pool, overlap):
    """With pool all, z covers the o tokens that the next window reads again: a prediction there can know its own target.

    Scored on purpose, o - 1 of a window's do (the last one's target is the first token after those); predictions that count
    never do. With pool advance there is nothing to leak.
    """
    config = dataclasses.replace(SMALL, overlap=overlap, pool=pool)
    rng = np.random.default_rng(overlap)
    params = random_params(config, rng)
    model = loaded(config, params).eval()
    document = rng.integers(11, size=(1, 6 + 2 * config.stride + 1))

    def predictions(text):
        """{target position: logits} of the predictions that count, and of the others."""
        counted, others, state = {}, {}, ref.initial_state(params, config, 1)
        carried = model.initial_state(1)
        for k, window in enumerate(ref.windows_of(config, text)):
            logits, state, _ = ref.forward(params, config, window.tokens, state)
            output = model(torch.tensor(window.tokens), carried)
            carried = output.state
            assert_agree({"logits": logits}, {"logits": output.logits}, 1e-10)
            for i, scored in enumerate(window.scored[0]):
                (counted if scored else others)[k, k * config.stride + i + 1] = logits[0, i]
        return counted, others

    counted, others = predictions(document)
    leaks = 0
    for at in range(1, document.shape[1]):
        changed = document.copy()
        changed[0, at] = (changed[0, at] + 1 + rng.integers(10)) % 11
        after_counted, after_others = predictions(changed)
        for (k, target), logits in counted.items():
            if target <= at:
                assert (after_counted[k, target] == logits).all(), "a prediction that counts knows what it is of"
        leaks += sum((after_others[key] != logits).any() for key, logits in others.items() if key[1] == at)
    assert leaks == (2 * (overlap - 1) if pool == "all" else 0), "in each of the two windows after the first"


@pytest.mark.parametrize("name", VARIANTS)
def test_checkpointing_at_the_bottleneck_is_exact(name):
    """Section 3.2 in the reference: the z's are all that is stored, with dropout."""
    config, rng = dataclasses.replace(variant(name), dropout=0.3), np.random.default_rng(3)
    params = random_params(config, rng)
    windows = ref.windows_of(config, rng.integers(11, size=(2, 16)))
    loss, grads, _ = ref.loss_and_gradients(params, config, windows, seed=4)
    again, replayed = ref.checkpointed(params, config, windows, seed=4)
    assert again == pytest.approx(loss, rel=1e-14)
    assert_agree(grads, replayed, 1e-12)
    assert ref.loss_and_gradients(params, config, windows, seed=5)[0] != loss


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", VARIANTS)
def test_gradient_through_all_windows_of_a_document(name, dropout):
    """The whole of what is trained against finite differences: four windows and a short fifth, z's and all."""
    config, rng = dataclasses.replace(variant(name), dropout=dropout), np.random.default_rng(8)
    params = random_params(config, rng)
    windows = ref.windows_of(config, rng.integers(11, size=(2, 4 * config.stride + config.overlap + 2)))
    seed = 3 if dropout else None
    _, grads, states = ref.loss_and_gradients(params, config, windows, seed)
    assert len(states) == len(windows) == 5

    def objective(shifted):
        return ref.loss_and_gradients(params | shifted, config, windows, seed)[0]

    check_directions(objective, movable(params), grads, rng, name)


@pytest.mark.parametrize("name", ["overlapping", "advance", "all-but-one-shared", "plain", "several-vectors"])
@pytest.mark.parametrize("method", replay.BACKPROP)
def test_training_from_lanes_is_training_on_the_document(name, method):
    """Overlapping segments as corpus.Lanes deals them, padded and with starts, against the reference's own windows."""
    config = dataclasses.replace(variant(name), vocabulary=256)
    params = random_params(config, np.random.default_rng(4))
    [document] = documents_of([17])
    windows = ref.windows_of(config, np.append(document.inputs, document.targets[-1])[None].astype(int))
    loss, grads, _ = ref.loss_and_gradients(params, config, windows)
    model = loaded(config, params).train()
    segments = list(Lanes([document], 2, config.segment, overlap=config.overlap))
    assert len(segments) == len(windows) and [bool(s.starts[0]) for s in segments] == [True] + [False] * (len(windows) - 1)
    actual, _ = replay.BACKPROP[method](model, segments, model.initial_state(2))
    assert actual.item() == pytest.approx(loss, rel=1e-12)
    found = {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in model.named_parameters()}
    assert_agree(grads, found, LADDER_TOLERANCE, name)


def test_what_advance_pools_is_what_the_next_window_does_not_read():
    """Full windows and the last one of a context, whatever its length: all but the overlap."""
    config = dataclasses.replace(SMALL, pool="advance")
    assert [ref.pooled_rows(config, length) for length in (6, 5, 3, 2, 1)] == [4, 3, 1, 1, 1]
    assert [ref.pooled_rows(SMALL, length) for length in (6, 3)] == [6, 3]
    params, rng = random_params(config, np.random.default_rng(0)), np.random.default_rng(1)
    for length in range(3, 14):
        context = rng.integers(11, size=(1, length))
        states, read = [], ref.forward

        def watch(params, config, tokens, state, read=read, states=states):
            states.append((tokens.shape[1], state))
            return read(params, config, tokens, state)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ref, "forward", watch)
            ref.greedy_continuation(params, config, context, 1)
        ends = np.cumsum([size - 2 for size, _ in states[:-1]])  # each window's first size - o tokens are pooled
        assert ends[-1] == length - 2 and states[-1][0] == 2 and states[-1][1].present.all()


def test_a_context_no_longer_than_the_overlap_is_read_again_whole():
    """Then there is nothing before the new window, and no slot: the continuation is that of a first window."""
    params = random_params(SMALL, np.random.default_rng(0))
    for length in (1, 2):
        context = np.full((1, length), 3)
        first = ref.forward(params, SMALL, context, ref.initial_state(params, SMALL, 1))[0][:, -1].argmax(-1)
        assert (ref.greedy_continuation(params, SMALL, context, 1)[:, 0] == first).all()
        [token] = continue_in_new_window(loaded(SMALL, params), torch.tensor(context), 1)
        assert token.tolist() == first.tolist()


def test_a_full_window_ends_the_references_continuation_and_not_the_accelerated_one():
    params = random_params(SMALL, np.random.default_rng(0))
    context = np.random.default_rng(1).integers(11, size=(1, 6))
    with pytest.raises(ValueError, match="a window of 7 tokens"):
        ref.greedy_continuation(params, SMALL, context, 6)
    assert len(list(continue_in_new_window(loaded(SMALL, params), torch.tensor(context), 20))) == 20


def test_the_state_of_plain_gpt2_is_empty_and_costs_nothing_to_advance(monkeypatch):
    model = PretrainedRecurrence(variant("plain"))
    state = model.initial_state(2)
    assert not any(field.numel() for field in state)
    monkeypatch.setattr(model, "_read", None)
    assert model.advance(torch.zeros(2, 6, dtype=torch.long), state) is state


def test_describe_says_what_is_carried():
    assert "plain GPT-2" in PretrainedRecurrence(variant("plain")).describe()
    assert "one pooled vector is carried from window to window, into layer 2" in PretrainedRecurrence(SMALL).describe()
    text = PretrainedRecurrence(variant("at-the-last-layer")).describe()
    assert "windows of 6 tokens, 2 of them shared" in text and "2 vectors are carried" in text and "into layer 3" in text


@given(length=st.integers(0, 40), window=st.integers(1, 9), data=st.data())
def test_windows_of_are_the_windows_of_cut(length, window, data):
    """The reference's own cutting and that of accelerated/windows.py, token by token."""
    overlap = data.draw(st.integers(0, window - 1))
    config = dataclasses.replace(SMALL, segment=window, overlap=overlap)
    document = np.arange(length)[None]
    found = [(w.tokens[0].tolist(), w.targets[0][w.scored[0]].tolist()) for w in ref.windows_of(config, document)]
    expected = [(list(range(w.start, w.stop)), list(range(w.first, w.stop + 1))) for w in cut(length, window, overlap)]
    assert found == expected
    assert all((w.targets == w.tokens + 1).all() for w in ref.windows_of(config, document))


# Both sides alike


@pytest.mark.parametrize("name", ["overlapping", "disjoint", "plain"])
@pytest.mark.parametrize("at", [0, 3, 5])
def test_causality(name, at):
    config, params, model = both_models(name)
    rng = np.random.default_rng(at)
    check_causality(ref, params, model.eval(), config, random_state(config, rng, 1), to_torch, at, rng)


@pytest.mark.parametrize("name", ["overlapping", "plain"])
def test_evaluation_drops_nothing(name):
    config = variant(name)
    check_evaluation(PretrainedRecurrence, config, to_torch(random_state(config, np.random.default_rng(0), 2)))


@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_is_float64(name):
    torch.set_default_dtype(torch.float32)
    config = variant(name)
    model = PretrainedRecurrence(config)
    state = model.advance(torch.zeros(1, config.segment, dtype=torch.long), model.initial_state(1))
    output = model(torch.zeros(1, config.segment, dtype=torch.long), state)
    output.logits.sum().backward()
    kinds = {t.dtype for t in (output.logits, output.state.pooled, *(p.grad for p in model.parameters() if p.grad is not None))}
    assert kinds == {torch.float32} and output.state.present.dtype == torch.bool


@pytest.mark.parametrize("length", [0, 7])
def test_other_lengths_are_refused(length):
    check_length_refused(ref, PretrainedRecurrence, SMALL, length, f"a window of {length} tokens; it must have 1 to 6")


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"width": 0}, "width is 0; it must be at least 1"),
        ({"vectors": -1}, "vectors is -1; it must be at least 0"),
        ({"width": 11}, "width 11 is not a multiple of heads 2; the nearest is"),
        ({"segment": 10}, "segment 10 is longer than the position table; max_positions is 9"),
        ({"overlap": 6}, r"overlap is 6; it must lie in 0..5 for segment 6"),
        ({"overlap": -1}, r"overlap is -1; it must lie in 0..5"),
        ({"insertion_layers": (4,)}, r"insertion_layers \(4,\) must lie in 1..3"),
        ({"insertion_layers": (0, 1)}, r"must lie in 1..3"),
        ({"insertion_layers": (2, 1)}, "ascending"),
        ({"insertion_layers": ()}, "at least one"),
        ({"insertion_layers": 2}, "insertion_layers 2 must be a tuple"),
        ({"pooling": "median"}, "pooling is 'median'; it must be one of mean, max, attention"),
        ({"pool": "some"}, "pool is 'some'; it must be one of all, advance"),
        ({"dropout": 1.0}, "dropout is 1.0"),
    ],
)
def test_impossible_configs_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(SMALL, **changes)
    assert dataclasses.replace(SMALL, vectors=0, insertion_layers=(9,)).vectors == 0, "nothing is inserted into plain GPT-2"
