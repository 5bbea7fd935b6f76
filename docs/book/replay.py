"""What full back-propagation and memory replay hold, step by step, in one rollout of the Memformer reference. For docs.book."""

import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from reference import memformer as reference

SEGMENTS, LANES = 6, 2
CONFIG = reference.Config(
    vocabulary=11, width=12, heads=2, head_width=5, feed_forward=20, encoder_layers=1, decoder_layers=1, segment=8, slots=4
)
METHODS = {"Full back-propagation": "through_time", "Memory replay": "memory_replay"}
STEPS = {"advance": "memory alone", "segment_forward": "forward", "segment_backward": "backward"}
HELD = ("caches", "cache", "replay_buffer", "state")  # variables of both methods that hold arrays from step to step


class Step(NamedTuple):
    """What one step of a method did, and what the method holds after it."""

    what: str  # a value of STEPS
    segment: int
    line: int  # of the file, where the method called it
    states: dict[int, int]  # {segment: bytes of the state before it} that are held
    caches: dict[int, int]  # {segment: bytes of its cache}
    gradient: np.ndarray | None  # of memory, handed to the segment before


def arrays_in(value: object) -> Iterator[np.ndarray]:
    """The arrays of a value, with those inside its parts; a view as the array that owns its memory."""
    if isinstance(value, np.ndarray):
        yield value if value.base is None else value.base
    elif isinstance(value, dict):
        yield from (array for part in value.values() for array in arrays_in(part))
    elif isinstance(value, (tuple, list)):
        yield from (array for part in value for array in arrays_in(part))


def size_of(value: object, apart: set[int]) -> int:
    """Bytes of the arrays in a value, each once, without those in `apart`; they are added to it."""
    found = {id(array): array.nbytes for array in arrays_in(value) if id(array) not in apart}
    apart |= found.keys()
    return sum(found.values())


class Watch:
    """Records the steps of a method of the reference while it runs."""

    def __init__(self, method: Callable, params: dict, segments: list):
        self.code, self.segments, self.steps = method.__code__, segments, []
        self.given = {id(array) for array in arrays_in([params, segments])}
        self.states, self.caches = {}, {}
        self.running = None

    def run(self, method: Callable, *arguments: object) -> tuple:
        """The result of the method."""
        sys.setprofile(self.step)
        try:
            return method(*arguments)
        finally:
            sys.setprofile(None)

    def step(self, frame: object, event: str, result: object):
        """At the return of a function that the method calls, note what it made; held is what the method refers to."""
        name, above = frame.f_code.co_name, frame.f_back
        if event != "return" or name not in STEPS or above.f_code is not self.code:
            return
        segment = above.f_locals["t"] if name != "segment_backward" else self.number_of(frame.f_locals["cache"])
        gradient = None
        if name == "advance":
            self.states[segment + 1] = result
        elif name == "segment_forward":
            self.caches[segment] = result[2]
        else:
            gradient = result[1].memory.copy()
        if name == "segment_backward" and "replay_buffer" in above.f_locals:  # replay pops a state and lets its cache go
            self.states.pop(segment, None)
        self.note(STEPS[name], segment, above.f_lineno, gradient)
        if name == "segment_backward" and "replay_buffer" in above.f_locals:
            self.caches.pop(segment)

    def number_of(self, cache: tuple) -> int:
        """The segment that a cache is of."""
        return next(number for number, segment in enumerate(self.segments) if segment is cache[0])

    def note(self, what: str, segment: int, line: int, gradient: np.ndarray | None):
        """Add a step, with the bytes of what is held."""
        apart = set(self.given)
        states = {number: size_of(state, apart) for number, state in self.states.items()}
        caches = {number: size_of(cache, apart) for number, cache in self.caches.items()}
        self.steps.append(Step(what, segment, line, states, caches, gradient))


def rollout() -> tuple[dict, list, tuple]:
    """Parameters, segments of which lane 1 starts a document in the middle, and the state before them."""
    rng = np.random.default_rng(0)
    params = reference.init_params(CONFIG, rng)
    text = rng.integers(CONFIG.vocabulary, size=(LANES, SEGMENTS * CONFIG.segment + 1))
    segments = reference.rollout_of(CONFIG, text, rng)
    starts = [np.array([k == 0, k in (0, SEGMENTS // 2)]) for k in range(SEGMENTS)]
    segments = [segment._replace(task=None, starts=start) for segment, start in zip(segments, starts, strict=True)]
    segments = [s._replace(targets=text[:, k * CONFIG.segment + 1 :][:, : CONFIG.segment]) for k, s in enumerate(segments)]
    return params, segments, reference.initial_state(params, CONFIG, LANES)


def both() -> tuple[dict[str, list[Step]], float]:
    """The steps of both methods by their names on the page, and how far apart their gradients are, relative to the largest."""
    params, segments, state = rollout()
    steps, grads = {}, []
    for title, name in METHODS.items():
        method = getattr(reference, name)
        watch = Watch(method, params, segments)
        if name == "memory_replay":
            watch.states[0] = state
        grads.append(watch.run(method, params, CONFIG, segments, state)[1])
        steps[title] = watch.steps
    exact, replayed = grads
    apart = max(np.abs(exact[name] - replayed[name]).max() / np.abs(grad).max() for name, grad in exact.items() if grad.any())
    return steps, float(apart)
