"""What full back-propagation and memory replay hold, step by step, in one rollout.

It is one of the Memformer reference. docs/book/__main__.py uses it.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import numpy as np

from docs.book.record import Values, functions_of, parts_of, snapshot
from docs.book.text import code_html
from reference import memformer as reference
from reference.gradients import function_of

SEGMENTS = 6
LANES = 2
CONFIG = reference.Config(
    vocabulary=11,
    width=12,
    heads=2,
    head_width=5,
    feed_forward=20,
    encoder_layers=1,
    decoder_layers=1,
    segment=8,
    slots=4,
)
METHODS = {"through_time": "Full back-propagation", "memory_replay": "Memory replay"}
STEPS = {"advance": "memory alone", "segment_forward": "forward", "segment_backward": "backward"}


def arrays_in(value: object) -> Iterator[np.ndarray]:
    """The arrays of a value and of its parts; a view as the array that owns its memory."""
    if isinstance(value, np.ndarray):
        yield value if value.base is None else value.base
    for part in (parts_of(value) or {}).values():
        yield from arrays_in(part)


def bytes_of(parts: dict[int, object], apart: set[int]) -> dict[int, int]:
    """{number: bytes of the arrays in a part}, each array once, without those in `apart`.

    They are added to it.
    """
    sizes = {}
    for number, part in parts.items():
        sizes[number] = 0
        for array in arrays_in(part):
            if id(array) not in apart:
                apart.add(id(array))
                sizes[number] += array.nbytes
    return sizes


class Watch:
    """A profile function: notes what each step of a method did, and what the method held after it.

    It knows the method's own rules: memory replay forgets a state and a cache as soon as they were
    used.
    """

    def __init__(
        self, method: Callable, values: Values, params: dict, segments: list, state: tuple
    ):
        self.method = method
        self.replays = method is reference.memory_replay
        self.values = values
        self.given = {id(array) for array in arrays_in([params, segments])}
        self.backward = len(segments)  # the segments before it are still to be gone back through
        self.states = {0: state} if self.replays else {}  # {segment: the state before it}
        self.caches = {}  # {segment: its cache}
        self.steps = []

    def __call__(self, frame: FrameType, event: str, result: object) -> None:
        """At the return of a function that the method calls, note what it made."""
        what = STEPS.get(frame.f_code.co_name)
        caller = frame.f_back
        if event != "return" or not what or caller.f_code is not self.method.__code__:
            return
        if what == "backward":
            self.backward -= 1
            segment = self.backward
            gradient = self.values.keep(snapshot(result[1].memory))  # handed to the segment before
            if self.replays:
                del self.states[segment]
        else:
            segment = caller.f_locals["t"]
            gradient = -1
        if what == "memory alone":
            self.states[segment + 1] = result
        if what == "forward":
            self.caches[segment] = result[2]

        apart = {*self.given}
        states = bytes_of(self.states, apart)
        caches = bytes_of(self.caches, apart)
        step = {"what": what, "segment": segment, "line": caller.f_lineno, "gradient": gradient}
        held = sum(states.values()) + sum(caches.values())
        self.steps.append(step | {"states": states, "caches": caches, "bytes": held})
        if self.replays and what == "backward":
            del self.caches[segment]


def steps_of(method: Callable, values: Values, params: dict, *given: object) -> list[dict]:
    """What each step of a method did, and what was held after it."""
    watch = Watch(method, values, params, *given)
    sys.setprofile(watch)
    try:
        method(params, CONFIG, *given)
    finally:
        sys.setprofile(None)
    return watch.steps


def rollout() -> tuple[dict, list, tuple]:
    """Parameters, the segments of a document in each lane, the state before them."""
    rng = np.random.default_rng(0)
    params = reference.init_params(CONFIG, rng)
    text = rng.integers(CONFIG.vocabulary, size=(LANES, SEGMENTS * CONFIG.segment + 1))
    tokens = np.split(text[:, :-1], SEGMENTS, axis=1)
    targets = np.split(text[:, 1:], SEGMENTS, axis=1)
    segments = [*zip(tokens, targets, strict=True)]
    return params, segments, reference.initial_state(params, CONFIG, LANES)


def replay_data() -> dict:
    """All that the page on replay shows beside its text."""
    functions = functions_of(Path(reference.__file__))
    given = rollout()
    values = Values()
    methods = []
    for name, title in METHODS.items():
        steps = steps_of(function_of(reference, name), values, *given)
        function = functions[name]
        code = code_html(function.source)
        methods.append({"title": title, "line": function.first, "code": code, "steps": steps})
    return {
        "kind": "replay",
        "segments": SEGMENTS,
        "methods": methods,
        "values": values.shown,
    }
