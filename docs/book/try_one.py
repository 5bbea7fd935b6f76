"""The page "Try one": a document that the visitor makes, read by a memory with trained weights.

The worker in the reader's browser runs it (live.py), and test_live.py outside. A session is one
memory that reads one document, segment by segment, through the reference.
"""

import functools
import importlib
import json
import sys
import time
from collections.abc import Callable
from types import FrameType, SimpleNamespace

import numpy as np

from docs.excerpts import ROOT
from reference.check import load

LONGEST = 32_768  # tokens of a document
HORIZON = 16  # segments that gradients are followed back
SESSIONS: dict[int, SimpleNamespace] = {}  # {side of the page: what reads there}
# what the page begins with
FIRST_FILES = (
    "docs/results/weights/block-recurrent-lstm-gate-facts-first.safetensors",
    "docs/results/weights/memformer-slots-themselves-rewritten.safetensors",
)
FIRST = {
    "facts": [["0", "5", ""], ["1", "7", ""], ["8", "9", ""], ["6", "2", ""]],
    "lengths": [32, 0, 512],
    "distractors": 0.0,
    "seed": 1,  # four documents of eight do better, two worse
}


# ----------------------------------------------------------------------------
# the document
def document(about: dict, facts: list, lengths: list, distractors: float, seed: int) -> tuple:
    """(tokens (1, n), places of the facts, questions).

    facts are [key, value, the value that is told later or ""]; lengths are the tokens of filler
    before the facts, between two, and from the last one to the questions. A place is (key, first
    token); a question is (key, the value told last, its key's token, the last place of its fact).
    Raises ValueError if the document is too long.
    """
    rng = np.random.default_rng(seed)
    before, between, after = lengths
    told = [(key, value) for key, value, _ in facts]
    again = [(key, later) for key, _, later in facts if later]  # in the filler after all the facts
    share = after // (len(again) + 1)
    gaps = [before, *[between] * (len(facts) - 1), *[share] * len(again)]
    text = ""
    places = []
    for gap, (key, value) in zip(gaps, told + again, strict=True):
        text += noise(about, gap, distractors, rng)
        places.append((key, len(text)))
        text += about["tell"] + key + value
    text += noise(about, after - share * len(again), distractors, rng)

    last = dict(places)
    questions = []
    for key, value, later in facts:
        questions.append((key, later or value, len(text) + 1, last[key]))
        text += about["ask"] + key
    if len(text) > LONGEST:
        raise ValueError(f"that are {len(text):,} tokens; at most {LONGEST:,} are read")
    segment = about["config"]["segment"]
    text += noise(about, -len(text) % segment, 0.0, rng)
    return np.frombuffer(text.encode(), np.uint8)[None].astype(int), places, questions


def noise(about: dict, length: int, distractors: float, rng: np.random.Generator) -> str:
    """Filler, a share of which is signs of facts."""
    filler = rng.choice([*about["filler"]], length)
    signs = rng.choice([*about["alphabet"]], length)
    return "".join(np.where(rng.random(length) < distractors, signs, filler))


# ----------------------------------------------------------------------------
# reading
@functools.cache
def model_of(file: str) -> tuple:
    """(reference, config, parameters, what its metadata says) of a file of weights."""
    rows, about = load(ROOT / file)
    about["config"] = json.loads(about["config"])
    fields = {key: tuple(v) if isinstance(v, list) else v for key, v in about["config"].items()}
    reference = importlib.import_module(f"reference.{about['model']}")
    params = {name: row.astype(np.float64) for name, row in rows.items()}
    return reference, reference.Config(**fields), params, about


def ready(files: list) -> dict:
    """Read these weights; who is answered knows that Python is there, and a document is next."""
    for file in files:
        model_of(file)
    return {}


def begin(side: int, files: list, **made: object) -> dict:
    """Begin a session with files[0], weights; returns what the page must know of it."""
    reference, config, params, about = model_of(files[0])
    tokens, places, questions = document(about, **made)
    state = reference.initial_state(params, config, 1)
    SESSIONS[side] = SimpleNamespace(
        reference=reference,
        config=config,
        params=dict(params),
        tokens=tokens,
        places=places,
        questions=questions,
        state=state,
        read=0,  # segments so far
        states={},  # {segment: the state before it} of the last ones
    )
    first = memory_of(state)
    return {
        "segment": config.segment,
        "segments": tokens.shape[1] // config.segment,
        "tokens": bytes(tokens[0].astype(np.uint8)).decode(),
        "places": places,
        "questions": questions,
        "shape": first.shape,
        "memory": first,
    }


@functools.cache
def recorded() -> dict:
    """What the page shows before a visitor reads anything: the first document, read by two models.

    "made" is what `begin` is given for it; each of "sides" has a file, and what `begin` and `read`
    returned.
    """
    sides = []
    for side, file in enumerate(FIRST_FILES):
        begun = begin(side, [file], **FIRST)
        sides.append({"file": file, "begun": begun, "read": read(side, np.inf)})
    return {"made": FIRST, "sides": sides}


def memory_of(state: tuple) -> np.ndarray:
    """What a state remembers, (S, D): its slots or its state vectors."""
    return state[0][0, 0]  # the first field (B, 1, S, D) of both models


def read(side: int, seconds: float) -> dict:
    """Read on for about so many seconds; returns the memory, how its slots moved, and answers."""
    session = SESSIONS[side]
    size = session.config.segment
    count = session.tokens.shape[1] // size
    marked = {place // size for _, place in session.places}
    asked = {place // size for _, _, place, _ in session.questions}
    moved = []
    seen = []  # what facts wrote and what questions read
    answers = []
    end = time.monotonic() + seconds
    while session.read < count and (not moved or time.monotonic() < end):
        now = session.read
        session.states[now] = session.state
        session.states.pop(now - HORIZON - 2, None)
        segment = session.tokens[:, now * size : (now + 1) * size]
        before = memory_of(session.state)
        if now in marked | asked:
            weights, logits = read_and_watch(session, segment)
            seen += what_is_seen(session, now, weights)
            answers += answers_in(session, now, logits)
        else:
            session.state = passed_on(session, segment)
        change = memory_of(session.state) - before
        moved.append(np.sqrt((change**2).mean(-1)))
        session.read += 1
    return {
        "read": session.read,
        "memory": memory_of(session.state),
        "moved": np.array(moved),
        "seen": seen,
        "answers": answers,
    }


def passed_on(session: SimpleNamespace, segment: np.ndarray) -> tuple:
    """The state after a segment, by the memory path alone where the model has one."""
    reference = session.reference
    if hasattr(reference, "advance"):
        return reference.advance(session.params, session.config, segment, session.state)
    _, state, _ = reference.forward(session.params, session.config, segment, session.state)
    return state


def read_and_watch(session: SimpleNamespace, segment: np.ndarray) -> tuple[list, np.ndarray]:
    """([(who called softmax, weights (H, N, K))], logits (N, V)) of a segment that is read."""
    weights = []

    def notice(frame: FrameType, event: str, result: object) -> None:
        if event == "return" and frame.f_code.co_name == "softmax_forward":
            weights.append((callers_of(frame), result[0][0]))

    reference = session.reference
    sys.setprofile(notice)
    try:
        logits, session.state, _ = reference.forward(
            session.params, session.config, segment, session.state
        )
    finally:
        sys.setprofile(None)
    return weights, logits[0]


def callers_of(frame: FrameType) -> str:
    """The names of the functions that called this one, the nearest first, up to `forward`."""
    names = []
    while frame.f_back and frame.f_code.co_name != "forward":
        frame = frame.f_back
        names.append(frame.f_code.co_name)
    return " ".join(names)


def of_memformer(weights: list) -> tuple[np.ndarray, np.ndarray]:
    """(how much each token was written into a slot (N, S), how much each token read it).

    A token that is predicted reads a slot through the encodings of the segment before: the
    decoder's attention to these times the encoder's attention to the slots. The last layer of each.
    """
    written = [w for names, w in weights if "slot_" in names][-1]
    read = [w for names, w in weights if "encoder_" in names and "cross_" in names][-1]
    through = [w for names, w in weights if "decoder_" in names and "cross_" in names][-1]
    return written[..., 1:].mean(0).T, through[:, 1:].mean(0) @ read.mean(0)


def of_block_recurrent(weights: list) -> tuple[np.ndarray, np.ndarray]:
    """(how much each token of the block was written into a state (W, S), how much each read it)."""
    horizontal = [w for names, w in weights if "state_update" in names]
    read = [w for names, w in weights if "recurrence" in names and "state_update" not in names][-1]
    written = horizontal[-1]  # after the states' attention to themselves: that to the tokens
    return written[..., -read.shape[1] :].mean(0).T, read.mean(0)


SEEN: dict[str, Callable] = {"memformer": of_memformer, "block_recurrent": of_block_recurrent}


def what_is_seen(session: SimpleNamespace, now: int, weights: list) -> list[dict]:
    """Of the facts and questions of a segment: the key, and attention by slot (S,)."""
    size = session.config.segment
    written, read = SEEN[session.reference.__name__.rpartition(".")[2]](weights)
    found = []
    for key, place in session.places:
        at = place - now * size
        if 0 <= at < size:
            slots = written[at : at + 3].sum(0)
            found.append({"key": key, "what": "written", "slots": slots})
    for key, _, place, _ in session.questions:
        at = place - now * size
        if 0 <= at < size:
            found.append({"key": key, "what": "read", "slots": read[at]})
    return found


def answers_in(session: SimpleNamespace, now: int, logits: np.ndarray) -> list[dict]:
    """The answers to the questions of a segment, each with its probability and the right one's."""
    size = session.config.segment
    found = []
    for number, (key, right, place, _) in enumerate(session.questions):
        at = place - now * size
        if 0 <= at < size:
            shares = np.exp(logits[at] - logits[at].max())
            shares /= shares.sum()
            best = int(shares.argmax())
            answer = {"question": number, "key": key, "right": right, "answer": chr(best)}
            answer |= {"probability": float(shares[best]), "of right": float(shares[ord(right)])}
            found.append(answer)
    return found


# ----------------------------------------------------------------------------
# backward
def back(side: int, question: int) -> dict:
    """The gradient of a question's loss by the memory before each segment, from its own backwards.

    "gradients" is (segments, S), root mean squares of a slot's entries; "first" is the segment of
    the first row. What is computed is each segment's `backward`, from the states that were kept.
    """
    session = SESSIONS[side]
    reference = session.reference
    size = session.config.segment
    _, right, place, fact = session.questions[question]
    last = place // size
    dstate = None
    found = []
    for now in range(last, max(-1, last - HORIZON), -1):
        segment = session.tokens[:, now * size : (now + 1) * size]
        given = (session.params, session.config)
        logits, _, cache = reference.forward(*given, segment, session.states[now])
        dlogits = np.zeros_like(logits)
        if now == last:
            targets = np.full_like(segment, ord(right))
            scored = np.arange(size)[None] == place % size
            _, loss_cache = reference.cross_entropy_forward(logits, targets, scored)
            dlogits = reference.cross_entropy_backward(1.0, loss_cache)
        _, dstate = reference.backward(*given, cache, dlogits, dstate)
        found.append(np.sqrt((memory_of(dstate) ** 2).mean(-1)))
    return {"first": last, "fact": fact // size, "gradients": np.array(found)}
