"""What the properties of this folder share: drawn models, the plainest BPTT, a comparison.

Nothing here lists a model or a variant. The models are the files in accelerated/presets. A config
is drawn field by field: a Config refuses values that cannot work, and its refusal of "?" lists the
choices of a text field. So a new model, and a new variant, are drawn as soon as they exist. No two
sizes of a model are equal, unless they are 0, so that swapped axes show.
"""

import dataclasses
import importlib
import inspect
import re
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from accelerated.data import lanes
from accelerated.models import model_class, presets_of
from reference.rollout import Segment, count_scored, rollout_backward, rollout_forward

LARGEST = 13  # of all sizes
DEEPEST = 3  # layers
# Of others it is 1. LayerNorm makes a width of 1 constant. Unit length makes a key of width 1 its
# sign: near 0 it jumps, and gradients grow beyond what float64 can compare
LEAST = {"vocabulary": 5, "width": 4, "head_width": 2}
SEEDS = st.integers(0, 2**32 - 1)
NOISE = 0.3  # added to all starting values, so that no term is zero and hidden


# ----------------------------------------------------------------------------
# configs
def choices(config: Any, field: str) -> list[str]:
    """What a field of text may be, as the Config's own refusal lists it."""
    try:
        dataclasses.replace(config, **{field: "?"})
    except ValueError as refusal:
        _, listed = str(refusal).split("it must be ")
        return re.findall(r"\w+", re.sub(r"\b(one of|or)\b", "", listed))
    raise AssertionError(f"{type(config).__module__} takes any text for {field}")


def sizes_of(config: Any) -> dict:
    """{field: size} of a config's axes; a switch is none, nor how many layers there are."""
    numbers = {name: value for name, value in vars(config).items() if type(value) is int}
    return {name: size for name, size in numbers.items() if "layer" not in name}


def accepted(config: Any, field: str, values: Any) -> list:
    """Those configs with another value of a field that the Config does not refuse."""
    found = []
    for value in values:
        try:
            found.append(dataclasses.replace(config, **{field: value}))
        except ValueError:
            continue
    return found


def values_to_try(config: Any, field: str, rng: np.random.Generator) -> list:
    """Values of a field, of which the Config may refuse some."""
    value = getattr(config, field)
    if isinstance(value, bool):
        return [False, True]
    if isinstance(value, str):
        return choices(config, field)
    if isinstance(value, int):
        if "layer" in field:
            return [*range(DEEPEST + 1)]
        others = [size for name, size in sizes_of(config).items() if name != field]
        sizes = range(LEAST.get(field, 1), LARGEST + 1)
        return [0, *(size for size in sizes if size not in others)]
    if isinstance(value, tuple):
        layers = getattr(config, "layers", DEEPEST)
        numbers = rng.integers(5, size=rng.choice([0, 1, 2, layers, 2 * layers])).tolist()
        return [tuple(numbers), tuple(sorted({*numbers} - {0}))]
    return [value]  # a rate or a scale


@st.composite
def configs(draw, name, **fixed):
    """Configs of a model in any of its variants; `fixed` fields stay as they are given.

    Hypothesis draws what is a choice. Sizes come from a seed, so that a few examples have many.
    """
    config = presets_of(name).TEST_CONFIG
    rng = np.random.default_rng(draw(SEEDS))
    for field in rng.permutation([*vars(config)]).tolist():
        found = accepted(config, field, values_to_try(config, field, rng))
        if isinstance(getattr(config, field), (bool, str)):
            config = draw(st.sampled_from(found))
        elif found:
            config = found[rng.integers(len(found))]
    return dataclasses.replace(config, **fixed)


# ----------------------------------------------------------------------------
# models with random weights, in the middle of a document
class Setting(NamedTuple):
    """A model by both sides."""

    reference: ModuleType
    config: Any
    params: dict  # of arrays
    state: tuple  # of arrays, after two segments of a document
    model: Any  # PyTorch's, with the same weights
    rng: np.random.Generator

    def __repr__(self):
        return f"Setting({self.config})"  # without all numbers

    @property
    def reads_tasks(self) -> bool:
        """Whether the model takes a Task: only Memformer's encoder-decoder does."""
        takes_them = "task" in inspect.signature(self.reference.forward).parameters
        return takes_them and self.config.encoder_layers > 0

    def in_torch(self, arrays: tuple) -> Any:
        """A state, segment or task of arrays as one of tensors."""
        return in_torch(arrays, type(self.model.initial_state(1)))


def in_torch(arrays, state_type):
    kinds = {"State": state_type, "Segment": lanes.Segment, "Task": lanes.Task}
    fields = {}
    for field, value in arrays._asdict().items():
        if isinstance(value, tuple):
            fields[field] = in_torch(value, state_type)
        else:
            fields[field] = None if value is None else torch.tensor(value)
    return kinds[type(arrays).__name__](**fields)


@st.composite
def settings_of(draw, name, lanes=None, **fixed):
    """Settings of a model; a number of lanes that is not given is drawn."""
    config = draw(configs(name, **{"dropout": 0.0} | fixed))
    seed = draw(SEEDS)
    lanes = lanes or draw(st.integers(1, 3))
    reference = importlib.import_module(f"reference.{name}")
    rng = np.random.default_rng(seed)
    params = {}
    for key, value in reference.init_params(config, rng).items():
        params[key] = value + NOISE * rng.standard_normal(value.shape)

    state = reference.initial_state(params, config, lanes)
    for _ in range(2):
        tokens = rng.integers(config.vocabulary, size=(lanes, config.segment))
        _, state, _ = reference.forward(params, config, tokens, state)
    model = model_class(name)(config)
    model.load_state_dict({key: torch.tensor(value) for key, value in params.items()})
    return Setting(reference, config, params, state, model, rng)


# ----------------------------------------------------------------------------
# rollouts
@st.composite
def rollouts(draw, setting, segments=3):
    """Segments of the setting's lanes: documents begin in the middle, not all tokens are scored.

    If the model reads tasks, so do some segments, each lane its own.
    """
    lanes = len(setting.state[0])
    begins = draw(st.sampled_from([0.4, 0.0, 1.0]))  # the share of lanes in which one begins
    scored = draw(st.sampled_from([0.7, 0.1, 1.0]))  # the share of tokens whose loss counts
    count = draw(st.integers(1, segments))
    rng = setting.rng
    rollout = []
    for _ in range(count):
        shape = (lanes, setting.config.segment)
        tokens, targets = rng.integers(setting.config.vocabulary, size=(2, *shape))
        task = draw_task(setting, lanes) if setting.reads_tasks and draw(st.booleans()) else None
        is_scored = rng.random(shape) < scored
        rollout.append(Segment(tokens, targets, is_scored, rng.random(lanes) < begins, task))
    return rollout


def draw_task(setting, lanes):
    """A task of its own for each lane. Infilling reads a mask, and padding at the end."""
    config = setting.config
    variants = importlib.import_module(setting.reference.__name__.replace(".", ".variants."))
    kinds = setting.rng.integers(len(variants.TASKS), size=lanes)
    shape = (lanes, config.segment)
    reading, prompt = setting.rng.integers(config.vocabulary, size=(2, *shape))
    readable = np.ones(shape, bool)
    for lane in np.flatnonzero(kinds == variants.TASKS.index("infilling")):
        reading[lane, 0] = config.special("mask")
        readable[lane, 1 + config.segment // 2 :] = False
    return variants.Task(kinds, reading, readable, prompt)


# ----------------------------------------------------------------------------
# full back-propagation through time
def plain_bptt(setting, segments):
    """{name: tensor} of all that a rollout gives, in the order of computation, by autograd.

    One graph holds all segments: their logits, losses and states, and then the gradients of the
    objective, by parameter and by the first state.
    """
    model = setting.model
    first = setting.in_torch(setting.state)
    first = first._make(x.requires_grad_(x.is_floating_point()) for x in first)
    state = first
    rows = {}
    nats = 0.0
    extra = 0.0
    for k, segment in enumerate(map(setting.in_torch, segments)):
        task = [] if segment.task is None else [segment.task]
        begun = beginning(model.initial_state(len(segment.starts)), segment.starts, state)
        logits, state, auxiliary = model(segment.tokens, begun, *task)
        scored = segment.scored
        loss = cross_entropy(logits[scored], segment.targets[scored], reduction="sum")
        rows[f"{k}/logits"] = logits
        rows |= {f"{k}/auxiliary.{key}": value for key, value in auxiliary.items()}
        rows[f"{k}/loss"] = loss
        rows |= {f"{k}/next.{key}": field for key, field in state._asdict().items()}
        nats = nats + loss
        extra = extra + sum(auxiliary.values())

    rows["objective"] = nats / count_scored(segments) + extra / len(segments)
    leaves = {f"gradient of {key}": x for key, x in model.named_parameters()}
    for key, field in first._asdict().items():
        if field.requires_grad:  # token ids and flags have no gradient
            leaves[f"gradient of the first {key}"] = field
    grads = torch.autograd.grad(rows["objective"], [*leaves.values()], materialize_grads=True)
    return rows | dict(zip(leaves, grads, strict=True))


def beginning(initial, starts, carried):
    """The state that a segment reads: the initial one in the lanes where a document begins."""
    fields = []
    for new, old in zip(initial, carried, strict=True):
        chosen = starts.reshape(-1, *[1] * (new.dim() - 1))  # (B, 1, ...), as many axes as a field
        fields.append(torch.where(chosen, new, old))
    return carried._make(fields)


def by_numpy(setting, segments):
    """The same by the reference, whose backward pass is written by hand."""
    reference, config, params, state, *_ = setting
    rows, caches, _ = rollout_forward(reference, params, config, segments, state)
    grads, dstate = rollout_backward(reference, params, config, caches)
    rows |= {f"gradient of {key}": grad for key, grad in grads.items()}
    for key, grad in dstate._asdict().items():
        if grad.dtype.kind == "f":  # token ids and flags have none
            rows[f"gradient of the first {key}"] = grad
    return rows


# ----------------------------------------------------------------------------
# reading
def logits_by_segments(read, config, text, state):
    """Logits (B, n, V) of a text (B, n), each by the first segment that reads it.

    Segments may overlap. read(tokens, state) gives logits, the next state and a third thing.
    """
    overlap = getattr(config, "overlap", 0)
    logits = []
    for start in range(0, text.shape[1] - overlap, config.segment - overlap):
        found, state, _ = read(text[:, start : start + config.segment], state)
        logits.append(found[:, overlap:] if start else found)
    return np.concatenate(logits, axis=1)


# ----------------------------------------------------------------------------
# what a failure says
def compare(what, found, expected, absolute, meaning, relative=0.0):
    """Fail, naming the place and both numbers, unless two arrays or tensors are close.

    They may differ by absolute + relative * |expected|, as in np.testing.assert_allclose.
    """
    found = torch.as_tensor(found).detach().numpy() * 1.0
    expected = torch.as_tensor(expected).detach().numpy() * 1.0
    assert found.shape == expected.shape, f"{what} has shape {found.shape}, not {expected.shape}"
    if not found.size:
        return
    excess = np.abs(found - expected) - relative * np.abs(expected) - absolute
    at = np.unravel_index(excess.argmax(), excess.shape)  # the worst number's place, or a NaN's
    assert excess[at] <= 0, (
        f"{what} at {[*map(int, at)]} is {found[at]:.9g}, expected {expected[at]:.9g}: {meaning}"
    )


def largest(array):
    """The largest size of a number of an array, 0 if it has none."""
    sizes = torch.as_tensor(array).detach().double().abs()
    return float(sizes.max()) if sizes.numel() else 0.0
