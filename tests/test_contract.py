"""What every model must do, in every variant: follow accelerated/protocol.py and equal its reference."""

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accelerated.generation.any_model import Stream
from accelerated.generation.token_by_token import stepper_of
from accelerated.protocol import computing_in, detach, keep_lanes
from tests.helpers.comparison import LADDER, assert_agree, named
from tests.helpers.rollouts import (
    both_sides,
    check_rollout,
    dropout_from,
    filled,
    random_segments,
    rows_of_state,
)
from tests.helpers.variants import (
    EVERY_VARIANT,
    MORE_KINDS,
    ONE_OF_EACH,
    PAPERS,
    listed,
    over,
    variant,
)

MODEL_FILES = Path(__file__).parent / "models"


def random_tokens(config, rng, lanes=2):
    return rng.integers(config.vocabulary, size=(lanes, config.segment))


# The two sides


def test_every_model_has_the_references_config():
    for name, paper in PAPERS.items():
        config = paper.reference.Config
        assert paper.module.Config is config, f"accelerated/{name}.py has another Config"
        assert type(paper.model(paper.small).config) is config, f"{name} keeps another config"


def test_a_file_of_tests_models_belongs_to_a_model():
    for path in MODEL_FILES.glob("*.py"):
        assert path.stem in PAPERS, f"no model has the name of tests/models/{path.name}"


@over(EVERY_VARIANT)
def test_a_seed_gives_the_references_weights_by_name(paper, name):
    config = variant(paper, name)
    params = PAPERS[paper].reference.init_params(config, np.random.default_rng(9))
    assert_agree(params, dict(PAPERS[paper].model(config, seed=9).state_dict()), 1e-15)


@over(EVERY_VARIANT)
def test_accelerated_equals_reference(paper, name, monkeypatch):
    """Logits, states, losses and gradients over segments, with a document start in the second; then five steps.

    Every parameter gets gradient, except key biases and a compression without a loss.
    """
    monkeypatch.setattr("accelerated.attention.on_a_cpu.TILE", 3)
    config, rng, params, state, _, _ = both_sides(paper, name)
    rows = check_rollout(paper, config, params, random_segments(paper, name, rng), state, name)
    silent = {n for n in params if not rows[f"grad/{n}"].any()}
    untrained = getattr(config, "compression_loss", None) == "none"
    expected = {n for n in params if "key_bias" in n or (untrained and ".compression." in n)}
    assert silent == expected or name in PAPERS[paper].no_choice


@over(EVERY_VARIANT)
def test_dropout_acts_where_the_reference_has_it(paper, name, monkeypatch):
    """With the reference's random numbers instead of torch's: logits, state and auxiliary losses in training mode.

    In evaluation mode it acts nowhere: not in a Stepper either.
    """
    config, rng, params, state, model, torch_state = both_sides(paper, name, dropout=0.3)
    ref, tokens = PAPERS[paper].reference, random_tokens(config, rng)
    logits, after, cache = ref.forward(params, config, tokens, state, np.random.default_rng(7))
    losses = (
        ref.auxiliary_forward(params, config, cache)[0] if hasattr(ref, "auxiliary_forward") else {}
    )
    expected = (
        {"logits": logits} | named("state", after) | {k: np.array(v) for k, v in losses.items()}
    )
    without = PAPERS[paper].model_with(params, dataclasses.replace(config, dropout=0.0))
    tokens = torch.tensor(tokens)
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "dropout", dropout_from(np.random.default_rng(7)))
        output = model.train()(tokens, torch_state)
    actual = {"logits": output.logits} | named("state", output.state) | output.auxiliary
    assert_agree(filled(expected), filled(actual), LADDER)
    with torch.no_grad():
        plain, found = without.eval()(tokens, torch_state), model.eval()(tokens, torch_state)
        steps = [read_on(each, tokens[:, :1], torch_state)[0] for each in (without, model)]
    assert (
        torch.equal(plain.logits, found.logits)
        and torch.equal(*steps)
        and not torch.equal(plain.logits, output.logits)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain.state, found.state, strict=True))


# Reading


@over(EVERY_VARIANT)
def test_later_tokens_change_no_earlier_logit(paper, name):
    """Other tokens from a position on change the logits there, but not before it, on both sides: padding is never seen."""
    config, rng, params, state, model, torch_state = both_sides(paper, name, lanes=1)
    tokens, ref = random_tokens(config, rng, 1), PAPERS[paper].reference
    read = lambda rows: model(torch.tensor(rows), torch_state).logits.numpy()  # noqa: E731
    with torch.no_grad():
        expected, actual = ref.forward(params, config, tokens, state)[0], read(tokens)
        for at in {0, config.segment // 2, config.segment - 1}:
            other = tokens.copy()
            other[:, at:] += 1 + rng.integers(config.vocabulary - 1, size=other[:, at:].shape)
            other %= config.vocabulary
            logits, torch_logits = ref.forward(params, config, other, state)[0], read(other)
            assert (logits[:, :at] == expected[:, :at]).all() and not np.isclose(
                logits[:, at], expected[:, at]
            ).all()
            assert np.allclose(torch_logits[:, :at], actual[:, :at], rtol=0, atol=1e-12)
            assert not np.isclose(torch_logits[:, at], actual[:, at]).all()


def read_whole(model, tokens, state):
    """Scored logits of tokens (B, n), segment by segment (windows may overlap), and the state after each segment."""
    config, logits, states = model.config, [], []
    overlap = getattr(config, "overlap", 0)
    for start in range(0, tokens.shape[1] - overlap, config.segment - overlap):
        segment = tokens[:, start : start + config.segment]
        output = model(segment, state)
        assert_agree(
            rows_of_state(output.state),
            rows_of_state(model.advance(segment, state)),
            1e-12,
            "advance",
        )
        state = output.state
        logits.append(output.logits if start == 0 else output.logits[:, overlap:])
        states.append(state)
    return torch.cat(logits, 1), states


def read_on(model, tokens, stream):
    """(logits (B, n, V), streams after each token) of tokens (B, n), n >= 1, read one by one after a State or a Stream."""
    stepper, logits, streams = stepper_of(model), [], []
    if not isinstance(stream, Stream):
        stream = stepper.start(stream)
    for token in tokens.unbind(1):
        found, stream = stepper.step(token, stream)
        logits.append(found)
        streams.append(stream)
    return torch.stack(logits, 1), streams


@over(EVERY_VARIANT)
@torch.no_grad()
def test_step_and_advance_equal_forward(paper, name):
    """Over three segments from mid-document: read_whole asserts it of `advance`; of `step` also from a returned state.

    A stream in the middle of a block can be continued twice: what the first reading wrote leaves no trace in the second.
    """
    config, rng, _, _, model, state = both_sides(paper, name)
    stride, block = (
        config.segment - getattr(config, "overlap", 0),
        getattr(config, "window", config.segment),
    )
    tokens, before = (
        torch.tensor(rng.integers(config.vocabulary, size=(2, config.segment + 2 * stride))),
        copy.deepcopy(state),
    )
    expected, states = read_whole(model, tokens, state)
    logits, streams = read_on(model, tokens, state)
    second = tokens[:, stride : stride + config.segment]
    later, _ = read_on(model, second, states[0])
    assert_agree({"logits": expected}, {"logits": logits}, 1e-11)
    assert_agree(
        {"logits": model(second, states[0]).logits}, {"logits": later}, 1e-11, "a returned state"
    )
    shapes = {tuple(field.shape for field in tree_leaves(stream.rows)) for stream in streams}
    assert len(shapes) == 1, "a token costs the same however long the text"
    half, other = (
        max(1, block // 2),
        torch.tensor(rng.integers(config.vocabulary, size=(2, block + 1))),
    )  # past the block's end
    undisturbed, _ = read_on(model, torch.cat([tokens[:, :half], other], 1), state)
    assert torch.equal(read_on(model, other, streams[half - 1])[0], undisturbed[:, half:])
    assert (
        all(torch.equal(a, b) for a, b in zip(before, state, strict=True))
        and not logits.requires_grad
    )


class OneType(TorchDispatchMode):
    """Refuses products of matrices in another type than this one."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (
            torch.ops.aten.mm,
            torch.ops.aten.addmm,
            torch.ops.aten.bmm,
            torch.ops.aten.baddbmm,
        ):
            assert {x.dtype for x in args if isinstance(x, torch.Tensor)} == {self.dtype}, function
        return function(*args, **(kwargs or {}))


@over([*MORE_KINDS, *listed("other_types")])
def test_types_are_kept(paper, name):
    """All products are in one type; recurrent states, memory slots, losses and gradients have float32; all values are finite.

    A Stepper reads as `forward` does within the type's rounding, and its rows of keys and values have the type.
    """
    torch.set_default_dtype(torch.float32)
    config, rng = dataclasses.replace(variant(paper, name), dropout=0.0), np.random.default_rng(5)
    model, tokens = PAPERS[paper].model(config), torch.tensor(random_tokens(config, rng))
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        model.zero_grad()
        with OneType(dtype), computing_in(model, dtype):
            initial = model.initial_state(2)
            advanced, first = model.advance(tokens, initial), model(tokens, initial)
            output = model(tokens, first.state)
            (output.logits.sum() + sum(output.auxiliary.values())).backward()
            logits, streams = read_on(model, tokens, detach(first.state))
        kinds = dict.fromkeys(initial._fields, dtype)
        if PAPERS[paper].long_lived is None:
            kinds = {name: field.dtype for name, field in initial._asdict().items()}
        else:
            kinds |= dict.fromkeys(PAPERS[paper].long_lived, torch.float32)
        for carried in (
            initial,
            advanced,
            first.state,
            output.state,
            *(stream.state for stream in streams),
        ):
            floating = {
                n: field.dtype
                for n, field in carried._asdict().items()
                if field.is_floating_point()
            }
            assert floating == {name: kinds[name] for name in floating}
        assert {output.logits.dtype, logits.dtype} == {dtype}
        assert {loss.dtype for loss in output.auxiliary.values()} <= {torch.float32}
        assert {
            field.dtype
            for kind in ("keys", "values")
            for field in getattr(streams[-1].rows, kind, ())
        } <= {dtype}
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert {grad.dtype for grad in grads} == {torch.float32}
        assert all(tensor.isfinite().all() for tensor in (output.logits, *output.state, *grads))
        assert_agree({"logits": output.logits}, {"logits": logits}, tolerance, str(dtype))


# Arguments


@over(MORE_KINDS)
def test_arguments_are_not_changed(paper, name):
    """By either side; and overwriting a returned state does not change the arguments."""
    config, rng, params, state, model, torch_state = both_sides(paper, name)
    ref, tokens = PAPERS[paper].reference, random_tokens(config, rng)
    logits, after, cache = ref.forward(params, config, tokens, state)
    dlogits = rng.standard_normal(logits.shape)
    dnext = type(after)(
        *(rng.standard_normal(f.shape) if f.dtype == float else np.zeros_like(f) for f in after)
    )
    given = [*params.values(), *state, tokens, dlogits, *dnext, *torch_state]
    before = copy.deepcopy(given)
    ref.backward(params, config, cache, dlogits, dnext)
    with torch.no_grad():
        states = [
            model(torch.tensor(tokens), torch_state).state,
            model.advance(torch.tensor(tokens), torch_state),
        ]
    for field in (field for returned in (after, *states) for field in returned):
        if "float" in str(field.dtype):  # not token ids, which may share memory with the segment
            field[:] = 0
    assert all(
        (np.asarray(old) == np.asarray(new)).all() for old, new in zip(before, given, strict=True)
    )


@over(ONE_OF_EACH)
def test_segments_of_other_lengths_are_refused_by_both_sides(paper, name):
    ref, config = PAPERS[paper].reference, variant(paper, name)
    params, model = ref.init_params(config, np.random.default_rng(0)), PAPERS[paper].model(config)
    for length, words in PAPERS[paper].wrong_lengths.items():
        with pytest.raises(ValueError, match=words):
            ref.forward(
                params, config, np.zeros((1, length), int), ref.initial_state(params, config, 1)
            )
        for read in (model, model.advance):
            with pytest.raises(ValueError, match=words):
                read(torch.zeros(1, length, dtype=torch.long), model.initial_state(1))


def refuses(model, tokens, state, words="."):
    """Forward, advance and generation refuse the state in one line that holds these words, also in the middle of a segment."""
    stepper = stepper_of(model)
    for read, *given in (
        (model, tokens, state),
        (model.advance, tokens, state),
        (stepper.step, tokens[:, 0], Stream(state, 1, tokens, ())),
    ):
        with pytest.raises(ValueError, match=words) as refusal:
            read(*given)
        assert "\n" not in str(refusal.value)


@over(ONE_OF_EACH)
def test_states_that_do_not_fit_are_refused(paper, name):
    """Of other sizes along any axis (size one is not broadcast), other lanes, none, and other models; a plain tuple."""
    model = PAPERS[paper].model(variant(paper, name)).eval()
    tokens = torch.zeros(2, model.config.segment, dtype=torch.long)
    state = detach(model.initial_state(2))
    for field, value in state._asdict().items():
        for axis, size in enumerate(value.shape):
            for other in {size + 1, 1} - {size}:
                shape = (*value.shape[:axis], other, *value.shape[axis + 1 :])
                refuses(
                    model,
                    tokens,
                    state._replace(**{field: value.new_zeros(shape)}),
                    rf"\b{other}\b",
                )
    refuses(model, tokens, keep_lanes(state, slice(1)))
    refuses(model, tokens[:1], state)
    refuses(model, tokens[:0], keep_lanes(state, slice(0)), "0")
    refuses(model, tokens, tuple(state), "the state is a")
    for read in (model, model.advance):
        with pytest.raises(ValueError, match=r"the state is a any_model\.Stream"):
            read(tokens, Stream(state, 1, tokens, ()))
    with pytest.raises(ValueError, match="0"):
        model.initial_state(0)
    for other in PAPERS.values():
        if other is not PAPERS[paper]:
            refuses(model, tokens, other.model(other.small).initial_state(2), "state")


@over(listed("described"))
def test_a_model_says_how_far_it_looks_back(paper, name):
    model = PAPERS[paper].model(variant(paper, name))
    reach, words = PAPERS[paper].described[name]
    described = model.describe()
    assert words in described, f"{name} should say {words!r}, and says {described!r}"
    assert "\n" not in described
    assert model.attention_reach == reach
