"""What every model must do, in every variant: follow accelerated/protocol.py and equal its reference."""

import copy
import dataclasses
import inspect

import numpy as np
import pytest
import torch

from accelerated.models import NAMES, model_class
from accelerated.protocol import computing_in, detach, keep_lanes
from tests.helpers.comparison import LADDER, TOLERANCE, assert_agree, named
from tests.helpers.rollouts import (
    check_back_propagation,
    check_rollout,
    dropout_from,
    filled,
    random_segments,
    rows_of_state,
    torch_segments,
)
from tests.helpers.variants import (
    EVERY_VARIANT,
    ONE_OF_EACH,
    PAPERS,
    over,
    random_task,
    variant,
)

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def both_sides(paper, name, lanes=2, seed=5, dropout=0.0):
    """Return (config, rng, params, state of arrays, the model in evaluation mode, its state), with random weights."""
    config, rng = dataclasses.replace(variant(paper, name), dropout=dropout), np.random.default_rng(seed)
    params, state = PAPERS[paper].random_params(config, rng), PAPERS[paper].random_state(config, rng, lanes)
    return config, rng, params, state, PAPERS[paper].model_with(params, config).eval(), PAPERS[paper].to_torch(state)


def random_tokens(config, rng, lanes=2):
    return rng.integers(config.vocabulary, size=(lanes, config.segment))


# The two sides


def test_every_model_is_in_both_folders_and_among_the_variants():
    assert set(NAMES) == PAPERS.keys()
    for name, paper in PAPERS.items():
        assert model_class(name) is paper.model and paper.model.Config is paper.reference.Config
        assert type(paper.model(paper.small).config) is paper.reference.Config


@over(EVERY_VARIANT)
def test_a_seed_gives_the_references_weights_by_name(paper, name):
    config = variant(paper, name)
    params = PAPERS[paper].reference.init_params(config, np.random.default_rng(9))
    assert_agree(params, dict(PAPERS[paper].model(config, seed=9).state_dict()), 1e-15)


@over(EVERY_VARIANT)
def test_accelerated_equals_reference(paper, name, monkeypatch):
    """Logits, states, losses and gradients over segments, with a document start in the second; then five steps."""
    monkeypatch.setattr("accelerated.attention.on_a_cpu.TILE", 3)
    config, rng, params, state, _, _ = both_sides(paper, name)
    check_rollout(paper, config, params, random_segments(paper, name, rng), state, name)


@over(EVERY_VARIANT)
def test_dropout_acts_where_the_reference_has_it(paper, name, monkeypatch):
    """With the reference's random numbers instead of torch's: logits, state and auxiliary losses in training mode."""
    config, rng, params, state, model, _ = both_sides(paper, name, dropout=0.3)
    ref, tokens = PAPERS[paper].reference, random_tokens(config, rng)
    monkeypatch.setattr(torch.nn.functional, "dropout", dropout_from(np.random.default_rng(7)))
    logits, after, cache = ref.forward(params, config, tokens, state, np.random.default_rng(7))
    losses = ref.auxiliary_forward(params, config, cache)[0] if hasattr(ref, "auxiliary_forward") else {}
    expected = {"logits": logits} | named("state", after) | {k: np.array(v) for k, v in losses.items()}
    output = model.train()(torch.tensor(tokens), PAPERS[paper].to_torch(state))
    actual = {"logits": output.logits} | named("state", output.state) | output.auxiliary
    assert_agree(filled(expected), filled(actual), LADDER)


@over(EVERY_VARIANT)
def test_evaluation_has_no_dropout(paper, name):
    """Training has. Checks logits, every field of the next state, and a step."""
    config, rng, params, _, model, state = both_sides(paper, name)
    dropping = PAPERS[paper].model_with(params, dataclasses.replace(config, dropout=0.3))
    tokens = torch.tensor(random_tokens(config, rng))
    with torch.no_grad():
        assert not torch.equal(dropping(tokens, state).logits, model(tokens, state).logits)
        dropping.eval()
        expected, actual = model(tokens, state), dropping(tokens, state)
        steps = [each.step(tokens[:, 0], state)[0] for each in (model, dropping)]
    assert torch.equal(expected.logits, actual.logits) and torch.equal(*steps)
    assert all(torch.equal(a, b) for a, b in zip(expected.state, actual.state, strict=True))


@over(EVERY_VARIANT)
def test_the_three_ways_of_back_propagation_agree(paper, name):
    """With dropout, tasks if the model reads them, and document starts inside: loss, gradients, next state."""
    _, rng, _, _, model, state = both_sides(paper, name, dropout=0.3)
    segments = random_segments(paper, name, rng)
    starts = [rng.random(2) < 0.4 for _ in segments]
    check_back_propagation(model, torch_segments(paper, segments, starts), state)


NO_CHOICE = [  # they have a softmax over a single entry, which has no gradient
    ("memformer", "one-token"),
    ("memformer", "one-slot"),
    ("pretrained_recurrence", "one-token"),
    ("pretrained_recurrence", "one-layer-one-head"),
]


@over([pair for pair in EVERY_VARIANT if pair not in NO_CHOICE])
def test_every_parameter_gets_gradient_from_a_rollout(paper, name):
    """Over four segments from a document's start; except key biases, and a compression without a loss."""
    config, rng, _, _, model, _ = both_sides(paper, name)
    tasks = [(), *([random_task(config, rng, [kind, kind])] for kind in range(3))] if name in PAPERS[paper].tasks else [()] * 4
    state, objective = model.initial_state(2), 0.0
    for task in tasks:
        tokens = torch.tensor(random_tokens(config, rng))
        logits, state, auxiliary = model(tokens, state, *(PAPERS[paper].to_torch(each) for each in task))
        objective = objective + logits.log_softmax(-1)[..., 0].sum() + sum(auxiliary.values())
    objective.backward()
    silent = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    untrained = getattr(config, "compression_loss", None) == "none"
    assert silent == {n for n, _ in model.named_parameters() if "key_bias" in n or (untrained and ".compression." in n)}


# Reading


@over(EVERY_VARIANT)
def test_later_tokens_change_no_earlier_logit(paper, name):
    """Other tokens from a position on change the logits there, but not before it, on both sides: padding is never seen."""
    config, rng, params, state, model, torch_state = both_sides(paper, name, lanes=1)
    tokens, ref = random_tokens(config, rng, 1), PAPERS[paper].reference
    read = lambda rows: model(torch.tensor(rows), torch_state).logits.detach().numpy()  # noqa: E731
    expected, actual = ref.forward(params, config, tokens, state)[0], read(tokens)
    for at in {0, config.segment // 2, config.segment - 1}:
        other = tokens.copy()
        other[:, at:] = (other[:, at:] + 1 + rng.integers(config.vocabulary - 1, size=other[:, at:].shape)) % config.vocabulary
        logits, torch_logits = ref.forward(params, config, other, state)[0], read(other)
        assert (logits[:, :at] == expected[:, :at]).all() and not np.isclose(logits[:, at], expected[:, at]).all()
        assert np.allclose(torch_logits[:, :at], actual[:, :at], rtol=0, atol=1e-12)
        assert not np.isclose(torch_logits[:, at], actual[:, at]).all()


def read_whole(model, tokens, state):
    """Scored logits of tokens (B, n), segment by segment (windows may overlap), and the state after each segment."""
    config, logits, states = model.config, [], []
    overlap = getattr(config, "overlap", 0)
    for start in range(0, tokens.shape[1] - overlap, config.segment - overlap):
        segment = tokens[:, start : start + config.segment]
        output = model(segment, state)
        assert_agree(rows_of_state(output.state), rows_of_state(model.advance(segment, state)), 1e-12, "advance")
        state = output.state
        logits.append(output.logits if start == 0 else output.logits[:, overlap:])
        states.append(state)
    return torch.cat(logits, 1), states


@over(EVERY_VARIANT)
@torch.no_grad()
def test_step_and_advance_equal_forward(paper, name):
    """From a state in mid-document, over three segments; and `step` from a state that forward returned."""
    config, rng, _, _, model, state = both_sides(paper, name)
    stride = config.segment - getattr(config, "overlap", 0)
    tokens = torch.tensor(rng.integers(config.vocabulary, size=(2, config.segment + 2 * stride)))
    _, states = read_whole(model, tokens, state)
    for rest, stream in ((tokens, state), (tokens[:, stride:], states[0])):
        expected, _ = read_whole(model, rest, stream)
        actual = []
        for token in rest.unbind(1):
            logits, stream = model.step(token, stream)
            actual.append(logits)
        assert_agree({"logits": expected}, {"logits": torch.stack(actual, 1)}, 1e-11)


# Dtypes and devices


def tensors_in(stream):
    """All tensors of a state or a stream, at any depth."""
    if isinstance(stream, torch.Tensor):
        return [stream]
    return [tensor for part in stream or () for tensor in tensors_in(part)] if isinstance(stream, tuple | list) else []


@over(EVERY_VARIANT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_dtypes_are_kept(paper, name, dtype):
    """One compute type; recurrent states, memory slots, losses and parameters' gradients in float32; all values are finite."""
    torch.set_default_dtype(torch.float32)
    model, tokens = PAPERS[paper].model(variant(paper, name)), torch.zeros(2, variant(paper, name).segment, dtype=torch.long)
    with computing_in(model, dtype):
        state = model.initial_state(2)
        advanced, first = model.advance(tokens, state), model(tokens, state)
        output = model(tokens, first.state)
        (output.logits.sum() + sum(output.auxiliary.values())).backward()
        logits, stream = model.eval().step(tokens[:, 0], detach(output.state))
    long_lived = {"block_recurrent": {"states"}, "memformer": {"memory"}}.get(paper, set())
    kinds = {field: torch.float32 if field in long_lived else dtype for field in state._fields}
    for carried in (state, advanced, first.state, output.state):
        floating = {n: field.dtype for n, field in carried._asdict().items() if field.is_floating_point()}
        assert floating == {name: kinds[name] for name in floating}
    assert {output.logits.dtype, logits.dtype} == {dtype}
    assert {loss.dtype for loss in output.auxiliary.values()} <= {torch.float32}
    assert {t.dtype for t in tensors_in(stream) if t.is_floating_point()} <= {dtype, torch.float32}
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert {grad.dtype for grad in grads} == {torch.float32}
    assert all(tensor.isfinite().all() for tensor in (output.logits, logits, *output.state, *grads))


@over([each for each in ONE_OF_EACH if each[0] not in ("block_recurrent", "memorizing")])
def test_the_biases_of_matrices_begin_at_zero(paper, name):
    """The Block-Recurrent and the Memorizing Transformer's matrices have none."""
    config = variant(paper, name)
    params = PAPERS[paper].reference.init_params(config, np.random.default_rng(0))
    biases = [params[matrix + "_bias"] for matrix in params if matrix + "_bias" in params]
    assert len(biases) >= 4 and not any(bias.any() for bias in biases)


@over(EVERY_VARIANT)
def test_a_model_can_be_made_on_the_meta_device(paper, name):
    """It then takes no memory, has all names and shapes, and returns outputs with the right shapes."""
    config = variant(paper, name)
    params = PAPERS[paper].reference.init_params(config, np.random.default_rng(0))
    with torch.device("meta"):
        model = PAPERS[paper].model(config)
        state = model.initial_state(2)
        output = model(torch.zeros(2, config.segment, dtype=torch.long), state)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == {n: value.shape for n, value in params.items()}
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers(), *state, output.logits))
    assert output.logits.shape == (2, config.segment, config.vocabulary)
    assert [f.shape for f in output.state] == [f.shape for f in state] == list(model.state_shapes(2))


@needs_a_gpu
@over(EVERY_VARIANT)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_gpu_gives_what_the_cpu_gives(paper, name, kind):
    """Logits, states, losses and gradients, and `step`; bfloat16 is compared with float32 on the CPU."""
    torch.set_default_dtype(torch.float32)
    config, rows = variant(paper, name), {}
    tokens = torch.tensor(random_tokens(config, np.random.default_rng(5)))
    for device in ("cpu", "cuda"):
        model = PAPERS[paper].model(config, seed=9).to(device)
        with computing_in(model, kind if device == "cuda" else torch.float32):
            state = model.advance(tokens.to(device), model.initial_state(2))
            output = model(tokens.to(device), state)
            objective = output.logits.float().square().sum() + sum(output.auxiliary.values())
            _, stream = model.step(tokens[:, 0].to(device), output.state)
            found = {"logits": output.logits, "step": model.step(tokens[:, -1].to(device), stream)[0]}
        objective.backward()
        found |= {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found |= {name: loss[None] for name, loss in output.auxiliary.items()}
        rows[device] = filled(found | named("state", output.state))
    assert_agree(rows["cpu"], rows["cuda"], TOLERANCE["cuda", kind], name)


# Arguments


@over(EVERY_VARIANT)
def test_arguments_are_not_changed(paper, name):
    """By either side; and overwriting a returned state does not change the arguments."""
    config, rng, params, state, model, torch_state = both_sides(paper, name)
    ref, tokens = PAPERS[paper].reference, random_tokens(config, rng)
    logits, after, cache = ref.forward(params, config, tokens, state)
    dlogits = rng.standard_normal(logits.shape)
    dnext = type(after)(*(rng.standard_normal(f.shape) if f.dtype == float else np.zeros_like(f) for f in after))
    given = (params, state, tokens, torch_state, dlogits, dnext)
    before = copy.deepcopy(given)
    ref.backward(params, config, cache, dlogits, dnext)
    with torch.no_grad():
        states = [model(torch.tensor(tokens), torch_state).state, model.advance(torch.tensor(tokens), torch_state)]
        model.step(torch.tensor(tokens)[:, 0], torch_state)
    for state in (after, *states):
        for field in state:
            if "float" in str(field.dtype):  # not token ids, which may share memory with the segment
                field[:] = 0
    same = lambda a, b: (np.asarray(a) == np.asarray(b)).all()  # noqa: E731
    for old, new in zip(before, given, strict=True):
        keys = old if isinstance(old, dict) else range(len(old))
        assert all(same(old[key], new[key]) for key in keys)


@over(ONE_OF_EACH)
def test_segments_of_other_lengths_are_refused_by_both_sides(paper, name):
    ref, config = PAPERS[paper].reference, variant(paper, name)
    params, model = ref.init_params(config, np.random.default_rng(0)), PAPERS[paper].model(config)
    for length, words in PAPERS[paper].wrong_lengths.items():
        with pytest.raises(ValueError, match=words):
            ref.forward(params, config, np.zeros((1, length), int), ref.initial_state(params, config, 1))
        for read in (model, model.advance):
            with pytest.raises(ValueError, match=words):
                read(torch.zeros(1, length, dtype=torch.long), model.initial_state(1))


def refuses(model, tokens, state, words="."):
    """Check that forward, advance and step refuse the state in one line that holds these words."""
    for read, seen in ((model, tokens), (model.advance, tokens), (model.step, tokens[:, 0])):
        with pytest.raises(ValueError, match=words) as refusal:
            read(seen, state)
        assert "\n" not in str(refusal.value)


@over(EVERY_VARIANT)
def test_states_of_other_sizes_are_refused(paper, name):
    """Along every axis of every field; size one is not broadcast. The message has the wrong size."""
    config = variant(paper, name)
    model, tokens = PAPERS[paper].model(config).eval(), torch.zeros(2, config.segment, dtype=torch.long)
    state = detach(model.initial_state(2))
    for field, value in state._asdict().items():
        for axis, size in enumerate(value.shape):
            for other in {size + 1, 1} - {size}:
                shape = (*value.shape[:axis], other, *value.shape[axis + 1 :])
                refuses(model, tokens, state._replace(**{field: value.new_zeros(shape)}), rf"\b{other}\b")
    refuses(model, tokens, keep_lanes(state, slice(1)))
    refuses(model, tokens[:1], state)


@over(ONE_OF_EACH)
def test_states_of_other_models_are_refused(paper, name):
    """Also plain tuples; and a stream inside a segment is only for `step`."""
    config = variant(paper, name)
    model, tokens = PAPERS[paper].model(config).eval(), torch.zeros(2, config.segment, dtype=torch.long)
    for other in PAPERS.values():
        if other is not PAPERS[paper]:
            refuses(model, tokens, other.model(other.small).initial_state(2), "state")
    refuses(model, tokens, tuple(model.initial_state(2)), "state")
    _, stream = model.step(tokens[:, 0], model.initial_state(2))
    for read in (model, model.advance):
        with pytest.raises(ValueError, match="state"):
            read(tokens, stream)


@over(ONE_OF_EACH)
def test_zero_lanes_are_refused(paper, name):
    config = variant(paper, name)
    model = PAPERS[paper].model(config).eval()
    with pytest.raises(ValueError, match="0"):
        model.initial_state(0)
    none = keep_lanes(model.initial_state(1), slice(0))
    refuses(model, torch.zeros(0, config.segment, dtype=torch.long), none, "0")


# Attributes


@over(ONE_OF_EACH)
def test_a_model_has_the_protocols_attributes(paper, name):
    model = PAPERS[paper].model(variant(paper, name))
    assert model.describe() and "\n" not in model.describe()
    assert isinstance(model.attention_reach, int) and model.attention_reach > 0
    assert model.output_matrix().shape == (model.config.vocabulary, model.config.width)
    own = {id(p) for p in model.parameters()}
    assert all(id(p) in own for p in model.auxiliary_parameters())
    arguments = [list(inspect.signature(read).parameters) for read in (model.read, model.advance, model.forward, model.step)]
    assert arguments[0] == arguments[1] and arguments[2:] == [["tokens", "state", "task"], ["token", "state"]]
    assert arguments[0][:2] == ["tokens", "state"] and arguments[0][2:] in ([], ["task"])
    assert list(inspect.signature(type(model)).parameters) == ["config", "seed"]
