"""What every model must do, in every variant: follow accelerated/protocol.py, equal its reference.

The models are found: see tests/helpers/variants.py.
"""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accelerated.generation.any_model import Stream, stepper_of
from accelerated.memory_replay import detach
from accelerated.protocol import computing_in, keep_lanes, require_gradient
from tests.helpers.comparison import LADDER, assert_agree, named
from tests.helpers.reading import read_on
from tests.helpers.rollouts import (
    both_sides,
    check_rollout,
    dropout_from,
    gradients,
    random_rows,
    random_segments,
)
from tests.helpers.variants import (
    EVERY_VARIANT,
    MORE_KINDS,
    ONE_OF_EACH,
    PAPERS,
    listed,
    over,
    pairs,
    variant,
)
from tests.start_here.strategies import Setting, by_numpy, logits_by_segments
from tests.start_here.test_mrbp import rows_of_training


def random_tokens(config, rng):
    return rng.integers(config.vocabulary, size=(2, config.segment))


# The two sides


def test_every_model_has_the_references_config():
    for name, paper in PAPERS.items():
        config = paper.reference.Config
        assert paper.module.Config is config, f"accelerated/{name}.py has another Config"
        assert type(paper.model(paper.small).config) is config, f"{name} keeps another config"


@over(EVERY_VARIANT)
def test_a_seed_gives_the_references_weights_by_name(paper, name):
    config = variant(paper, name)
    params = PAPERS[paper].reference.init_params(config, np.random.default_rng(9))
    model = PAPERS[paper].model(config, seed=9)
    assert_agree(params, dict(model.state_dict()), 1e-15, "weights by a seed")


@over(EVERY_VARIANT)
def test_accelerated_equals_reference(paper, name):
    """Logits, states, losses and gradients over segments; a document starts in the second.

    Every parameter gets gradient, except key biases and a compression without a loss. Weights after
    five steps: training/test_loop.py.
    """
    sides = both_sides(paper, name)
    rows = check_rollout(paper, sides, random_segments(paper, name, sides.rng), name)

    has_untrained_compression = getattr(sides.config, "compression_loss", None) == "none"
    if name in PAPERS[paper].no_choice:
        return
    for parameter in sides.params:
        silent = "key_bias" in parameter
        if has_untrained_compression:
            silent = silent or ".compression." in parameter
        found = not rows[f"gradient of {parameter}"].any()
        assert found == silent, f"{parameter} gets {'no' if found else 'a'} gradient"


WITH_A_LOSS = [
    one for one in ONE_OF_EACH if hasattr(PAPERS[one[0]].reference, "loss_and_gradients")
]


@over(WITH_A_LOSS)
def test_a_references_loss_of_a_document_is_that_of_a_rollout(paper, name):
    """With its gradients, which pass from segment to segment as far as the paper lets them."""
    config, rng, params, *_ = both_sides(paper, name)
    ref = PAPERS[paper].reference
    rows = random_rows(config, rng, begins=[0])
    setting = Setting(ref, config, params, ref.initial_state(params, config, 2), None, rng)
    expected = rows_of_training(by_numpy(setting, rows), len(rows))
    document = [ref.Window(*row[:3]) if hasattr(ref, "Window") else row[:2] for row in rows]
    loss, *others = ref.loss_and_gradients(params, config, document)
    [grads] = [each for each in others if isinstance(each, dict)]
    found = {"loss": loss} | {f"gradient of {key}": grad for key, grad in grads.items()}
    title = f"loss_and_gradients of reference/{paper}.py"
    assert_agree({key: expected[key] for key in found}, found, 1e-12, title)


# Wherever the code of a variant drops something
DROPPING = [*MORE_KINDS, *listed("other_types")]
DROPPING += pairs(
    block_recurrent="output-dropout",
    compressive="authors-by-layer-most-used",
    memorizing="output-dropout transformer-xl",
)


@over(DROPPING)
def test_dropout_acts_where_the_reference_has_it(paper, name, monkeypatch):
    """In training, with the reference's random numbers: what is read, and all gradients.

    Any numbers can be the gradients of the logits and the next state: here these are their own. In
    evaluation nothing is dropped, by a Stepper neither.
    """
    ref = PAPERS[paper].reference
    sides = both_sides(paper, name, dropout=0.3)
    tokens = random_tokens(sides.config, sides.rng)
    read = torch.tensor(tokens)
    expected = read_with_dropout(ref, sides, tokens, np.random.default_rng(7))
    state = require_gradient(sides.torch_state)
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "dropout", dropout_from(np.random.default_rng(7)))
        logits, after, auxiliary = sides.model(read, state)
    carried = [field for field in (logits, *after) if field.requires_grad]
    torch.autograd.backward(carried, [field.detach() for field in carried])
    actual = {"logits": logits} | named("state", after) | auxiliary | gradients(sides.model)
    for field, value in state._asdict().items():
        actual[f"gradient of {field}"] = 0 * value if value.grad is None else value.grad
    assert_agree(expected, actual, LADDER, "with dropout")

    logits, after, _ = ref.forward(sides.params, sides.config, tokens, sides.state)
    assert (logits != expected["logits"]).any(), "the reference drops nothing in training"
    expected = {"logits": logits, "a Stepper's": logits[:, :1]} | named("state", after)
    model = sides.model.eval()
    with torch.no_grad():
        logits, after, _ = model(read, sides.torch_state)
        by_steps, _ = read_on(model, read[:, :1], sides.torch_state)
    found = {"logits": logits, "a Stepper's": by_steps} | named("state", after)
    assert_agree(expected, found, LADDER, "in evaluation, in which nothing is dropped")


def read_with_dropout(ref, sides, tokens, rng):
    """{name: array} of the reference's logits, next state, auxiliary losses and gradients."""
    logits, after, cache = ref.forward(sides.params, sides.config, tokens, sides.state, rng)
    rows = {"logits": logits} | named("state", after)
    if hasattr(ref, "auxiliary_forward"):
        losses, _ = ref.auxiliary_forward(sides.params, sides.config, cache)
        rows |= {name: np.array(loss) for name, loss in losses.items()}
    grads, dstate = ref.backward(sides.params, sides.config, cache, logits, after)
    return rows | grads | named("gradient of", dstate, " ")


# Reading


def read_whole(model, tokens, state):
    """Scored logits of tokens (B, n), segment by segment; windows may overlap.

    `advance` must return the same states.
    """

    def read(segment, before):
        output = model(segment, before)
        advanced = model.advance(segment, before)
        assert_agree(named("state", output.state), named("state", advanced), 1e-12, "advance")
        return output

    return logits_by_segments(read, model.config, tokens, state)


# Variants that a Stepper or `advance` reads otherwise; start_here/test_generation.py draws all
READING = [*MORE_KINDS, *listed("other_types")]
READING += pairs(
    block_recurrent="two-recurrent feedback-of-two xl states-outnumber-window",
    compressive="short-memory nothing-remembered memory-by-layer",
    memformer="encoder-decoder-clipped encoder-decoder-biased decoder-only-biased",
    pretrained_recurrence="disjoint all-but-one-shared at-every-layer advance",
)


@over(READING)
@torch.no_grad()
def test_step_and_advance_equal_forward(paper, name):
    """From mid-document into a third segment. Other places: start_here/test_generation.py."""
    config, rng, _, _, model, state = both_sides(paper, name)
    stride = config.segment - getattr(config, "overlap", 0)
    tokens = torch.tensor(rng.integers(config.vocabulary, size=(2, config.segment + 2 * stride)))
    before = copy.deepcopy(state)
    expected = read_whole(model, tokens, state)
    count = config.segment + stride + 1
    logits, streams = read_on(model, tokens[:, :count], state)
    stepper = type(stepper_of(model))
    who = f"{stepper.__module__}.{stepper.__qualname__}, by lane, token and word"
    assert_agree(expected[:, :count], logits, 1e-11, who)

    shapes = {tuple(field.shape for field in tree_leaves(stream.rows)) for stream in streams}
    assert len(shapes) == 1, "a token costs more in a longer text: a stream's rows grow"
    assert not logits.requires_grad, "generation keeps a graph"
    for old, new in zip(before, state, strict=True):
        assert torch.equal(old, new), "reading changes the state that it is given"


# Types


class OneType(TorchDispatchMode):
    """Refuses products of matrices in other types than these."""

    PRODUCTS = (
        torch.ops.aten.mm,
        torch.ops.aten.addmm,
        torch.ops.aten.bmm,
        torch.ops.aten.baddbmm,
    )

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # else each operation passes through a wrapper, which takes longer

    def __init__(self, *dtypes):
        super().__init__()
        self.dtypes = dtypes

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in self.PRODUCTS:
            found = {x.dtype for x in args if isinstance(x, torch.Tensor)}
            assert len(found) == 1, f"{function} multiplies {found}"
            assert found <= {*self.dtypes}, f"{function} multiplies {found} in {self.dtypes}"
        return function(*args, **(kwargs or {}))


TYPED = [(*each, torch.float32, 1e-4) for each in ONE_OF_EACH]
TYPED += [(*each, torch.bfloat16, 0.1) for each in [*MORE_KINDS, *listed("other_types")]]


@pytest.mark.parametrize("paper,name,dtype,tolerance", TYPED)
def test_types_are_kept(paper, name, dtype, tolerance):
    """All products are in one type; all values are finite.

    Recurrent states, memory slots, losses and gradients have float32. A Stepper reads as `forward`
    does within the type's rounding, and its rows of keys and values have the type.
    """
    torch.set_default_dtype(torch.float32)
    config = dataclasses.replace(variant(paper, name), dropout=0.0)
    model = PAPERS[paper].model(config)
    tokens = torch.tensor(random_tokens(config, np.random.default_rng(5)))
    types = (dtype, torch.float32) if PAPERS[paper].solves else (dtype,)
    with OneType(*types), computing_in(model, dtype):
        initial = model.initial_state(2)
        advanced = model.advance(tokens, initial)
        first = model(tokens, initial)
        output = model(tokens, first.state)
        (output.logits.sum() + sum(output.auxiliary.values())).backward()
        logits, streams = read_on(model, tokens, detach(first.state))
    assert_agree(output.logits, logits, tolerance, str(dtype))

    states = [initial, advanced, first.state, output.state, *(stream.state for stream in streams)]
    kinds = types_of_fields(paper, initial, dtype)
    for state in states:
        for field, value in state._asdict().items():
            if value.is_floating_point():
                assert value.dtype == kinds[field], f"{field} of a state is {value.dtype}"

    assert output.logits.dtype == logits.dtype == dtype
    for name, loss in output.auxiliary.items():
        assert loss.dtype == torch.float32, f"the loss {name} is {loss.dtype}"
    for kind in ("keys", "values"):
        for rows in getattr(streams[-1].rows, kind, ()):
            assert rows.dtype == dtype, f"{kind} of a stream are {rows.dtype}"
    grads = gradients(model)
    for name, grad in grads.items():
        assert grad.dtype == torch.float32, f"the gradient of {name} is not float32"
    for name, value in {"logits": output.logits, **output.state._asdict(), **grads}.items():
        assert value.isfinite().all(), f"{name} is not finite"


def types_of_fields(paper, initial, dtype):
    """{field of a state: the type that it should have}."""
    long_lived = PAPERS[paper].long_lived
    if long_lived is None:  # nothing is said of this model
        return {field: value.dtype for field, value in initial._asdict().items()}
    return {field: torch.float32 if field in long_lived else dtype for field in initial._fields}


# Arguments


@over(MORE_KINDS)
def test_arguments_are_not_changed(paper, name):
    """By either side; and overwriting a returned state does not change the arguments."""
    config, rng, params, state, model, torch_state = both_sides(paper, name)
    ref = PAPERS[paper].reference
    tokens = random_tokens(config, rng)
    given = [*params.values(), *state, tokens, *torch_state]
    before = copy.deepcopy(given)
    logits, after, cache = ref.forward(params, config, tokens, state)
    arriving = copy.deepcopy([logits, *after])  # any numbers can be the gradients
    dlogits, *dnext = arriving
    given += arriving
    before += copy.deepcopy(arriving)
    ref.backward(params, config, cache, dlogits, after._make(dnext))
    with torch.no_grad():
        read = model(torch.tensor(tokens), torch_state).state
        advanced = model.advance(torch.tensor(tokens), torch_state)
    for field in (*after, *read, *advanced):
        if "float" in str(field.dtype):  # not token ids, which may share memory with the segment
            field[:] = 0
    for old, new in zip(before, given, strict=True):
        assert np.array_equal(old, new), "a model changes what it is given"


@over(MORE_KINDS)
def test_segments_of_other_lengths_are_refused_by_both_sides(paper, name):
    ref = PAPERS[paper].reference
    config = variant(paper, name)
    params = ref.init_params(config, np.random.default_rng(0))
    model = PAPERS[paper].model(config)
    state = ref.initial_state(params, config, 1)
    for length, words in PAPERS[paper].wrong_lengths.items():
        tokens = np.zeros((1, length), int)
        in_torch = torch.tensor(tokens), model.initial_state(1)
        calls = [(ref.forward, params, config, tokens, state)]
        for read, *given in [*calls, (model, *in_torch), (model.advance, *in_torch)]:
            with pytest.raises(ValueError, match=words):
                read(*given)


def refuses(model, tokens, state, words="."):
    """forward, advance and step raise ValueError for the state, in one line that matches words."""
    step = stepper_of(model).step
    stream = Stream(state, 1, tokens, ())
    calls = ((model, tokens, state), (model.advance, tokens, state), (step, tokens[:, 0], stream))
    for read, *given in calls:
        with pytest.raises(ValueError, match=words) as refusal:
            read(*given)
        assert "\n" not in str(refusal.value)


def one_to_refuse(paper, name):
    """(model, tokens of two lanes, its initial state) of a paper's variant."""
    model = PAPERS[paper].model(variant(paper, name)).eval()
    tokens = torch.zeros(2, model.config.segment, dtype=torch.long)
    return model, tokens, detach(model.initial_state(2))


@over(ONE_OF_EACH)
def test_states_of_other_sizes_are_refused(paper, name):
    """Along any axis; size one is not broadcast."""
    model, tokens, state = one_to_refuse(paper, name)
    for field, value in state._asdict().items():
        for axis, size in enumerate(value.shape):
            for other in {size + 1, 1} - {size}:
                shape = (*value.shape[:axis], other, *value.shape[axis + 1 :])
                wrong = state._replace(**{field: value.new_zeros(shape)})
                refuses(model, tokens, wrong, rf"\b{other}\b")


@over(ONE_OF_EACH)
def test_states_of_other_lanes_and_other_kinds_are_refused(paper, name):
    """More lanes, fewer and none; a plain tuple, a Stream, and every other model's state."""
    model, tokens, state = one_to_refuse(paper, name)
    refuses(model, tokens, keep_lanes(state, slice(1)))
    refuses(model, tokens[:1], state)
    refuses(model, tokens[:0], keep_lanes(state, slice(0)), "0")
    with pytest.raises(ValueError, match="0"):
        model.initial_state(0)
    refuses(model, tokens, tuple(state), "the state is")
    with pytest.raises(ValueError, match=r"the state is .*any_model\.Stream"):
        model(tokens, Stream(state, 1, tokens, ()))
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
