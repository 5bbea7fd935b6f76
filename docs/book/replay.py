"""What full back-propagation and memory replay hold, step by step, in one rollout of the Memformer reference. For docs.book."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import numpy as np

from docs.book.record import Values, functions_of, parts_of
from docs.book.text import code_html
from reference import memformer as reference

SEGMENTS, LANES = 6, 2
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
    """The arrays of a value, with those inside its parts; a view as the array that owns its memory."""
    if isinstance(value, np.ndarray):
        yield value if value.base is None else value.base
    for part in (parts_of(value) or {}).values():
        yield from arrays_in(part)


def bytes_of(parts: dict[int, object], apart: set[int]) -> dict[int, int]:
    """{number: bytes of the arrays in a part}, each array once, without those in `apart`; they are added to it."""
    sizes = {}
    for number, part in parts.items():
        found = {id(array): array.nbytes for array in arrays_in(part) if id(array) not in apart}
        apart |= found.keys()
        sizes[number] = sum(found.values())
    return sizes


def steps_of(
    method: Callable, values: Values, params: dict, segments: list, state: tuple
) -> tuple[list[dict], dict]:
    """What each step of a method did and what the method held after it, and the method's gradients."""
    replays, steps = method is reference.memory_replay, []
    states, caches = {0: state} if replays else {}, {}  # of the segments: before it, of it

    def note(frame: FrameType, event: str, result: object):
        """The profile function: at the return of a function that the method calls, note what it made."""
        what, caller = STEPS.get(frame.f_code.co_name), frame.f_back
        if event != "return" or not what or caller.f_code is not method.__code__:
            return
        segment, gradient = caller.f_locals["t"], -1
        if what == "memory alone":
            states[segment + 1] = result
        elif what == "forward":
            caches[segment] = result[2]
        else:
            segment = next(
                number for number, each in enumerate(segments) if each is frame.f_locals["cache"][0]
            )
            gradient = values.keep(result[1].memory)  # handed to the segment before
            if replays:
                del states[segment]
        apart = {id(array) for array in arrays_in([params, segments])}
        step = {"what": what, "segment": segment, "line": caller.f_lineno, "gradient": gradient}
        step |= {"states": bytes_of(states, apart), "caches": bytes_of(caches, apart)}
        steps.append(step | {"bytes": sum([*step["states"].values(), *step["caches"].values()])})
        if replays and what == "backward":
            del caches[segment]

    sys.setprofile(note)
    try:
        return steps, method(params, CONFIG, segments, state)[1]
    finally:
        sys.setprofile(None)


def rollout() -> tuple[dict, list, tuple]:
    """Parameters, segments of which lane 1 starts a document in the middle, and the state before them."""
    rng = np.random.default_rng(0)
    params = reference.init_params(CONFIG, rng)
    text = rng.integers(CONFIG.vocabulary, size=(LANES, SEGMENTS * CONFIG.segment + 1))
    segments = []
    for k, segment in enumerate(reference.rollout_of(CONFIG, text, rng)):
        targets = text[:, k * CONFIG.segment + 1 :][:, : CONFIG.segment]
        segments.append(
            segment._replace(
                task=None, targets=targets, starts=np.array([k == 0, k in (0, SEGMENTS // 2)])
            )
        )
    return params, segments, reference.initial_state(params, CONFIG, LANES)


def replay_data() -> dict:
    """All that the page on replay shows beside its text."""
    functions, given, values = functions_of(Path(reference.__file__)), rollout(), Values()
    methods, grads = [], []
    for name, title in METHODS.items():
        steps, found = steps_of(getattr(reference, name), values, *given)
        code = code_html(functions[name].source)
        methods.append(
            {"title": title, "line": functions[name].first, "code": code, "steps": steps}
        )
        grads.append(found)
    exact, replayed = grads
    apart = max(
        np.abs(exact[name] - replayed[name]).max() / np.abs(grad).max()
        for name, grad in exact.items()
        if grad.any()
    )
    return {
        "kind": "replay",
        "segments": SEGMENTS,
        "methods": methods,
        "apart": float(apart),
        "values": values.shown,
    }
