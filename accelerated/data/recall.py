"""The synthetic corpus of `--data recall`, for any model: questions that only a memory can answer.

A document has facts, then filler, then questions, out of attention's reach. A fact is a key and its
value; a question is ? and a key. The answer is the prediction at the question's last byte; only
answers are scored. Answers never appear in the input, so the facts are their only source. Each key
has values of its own, and `rewrites` facts change in the filler: the last value counts.

    BdA8CkDM=-:.,...?A:,?B;-        four facts, filler, two questions
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from accelerated.data.windows import SPLITS, Document, Documents

FILLER = np.frombuffer(b".,:;-+=*/()<>_!&", np.uint8)
ASK = ord("?")
FIRST_KEYS = b"ABCDEFGHIJUVWXYZ"
FIRST_VALUES = b"0123456789abcdefghijklmnopqrstKLMNOPQRST"
OTHERS = sorted(set(range(256)) - {ASK, *FILLER.tolist(), *FIRST_KEYS, *FIRST_VALUES})
# All bytes that facts may use: values are taken from the front, keys from the back
SYMBOLS = np.array([*FIRST_VALUES, *OTHERS, *reversed(FIRST_KEYS)], np.uint8)
SIZES = {"train": 100_000, "valid": 64, "test": 64}  # documents in each split
LEAST = {"pairs": 1, "values": 2, "rewrites": 0, "questions": 1, "distance": 0, "spacing": 2}


@dataclass(frozen=True)
class RecallConfig:
    """The sizes of `--data recall`; an impossible value raises a ValueError that names it.

    Fields:
        pairs: facts at the beginning of a document
        vary_pairs: let each training document draw its number of facts, up to that one, evenly on a
            logarithmic scale
        values: values that a key can have; a guess is right with probability 1 / values
        rewrites: how many facts get a new value in the filler
        questions: questions in a document; a model learns from many in minutes, from two hardly at
            all
        distance: tokens of filler between the last pair and the first question; rewritten facts
            stand in it
        vary_distance: let each training document draw its distance, up to that one, evenly on a
            logarithmic scale
        spacing: tokens from one question to the next, at least 2
    """

    pairs: int = 4
    vary_pairs: bool = False
    values: int = 10
    rewrites: int = 0
    questions: int = 24
    distance: int = 88
    vary_distance: bool = False
    spacing: int = 4

    def __post_init__(self):
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        needed = self.pairs * (1 + self.values)  # bytes for the keys and values
        if needed > len(SYMBOLS):
            raise ValueError(
                f"pairs is {self.pairs}: with {self.values} values they need {needed} "
                f"of {len(SYMBOLS)} bytes; give fewer of either"
            )
        in_filler = 2 * self.rewrites  # tokens
        if in_filler > self.distance:
            raise ValueError(
                f"distance is {self.distance}; what stands in the filler needs {in_filler} tokens"
            )

    @property
    def opening(self) -> int:
        """Tokens of facts before the filler."""
        return 2 * self.pairs

    @property
    def length(self) -> int:
        """Tokens in a document."""
        return self.opening + self.distance + self.questions * self.spacing


class Told(NamedTuple):
    """What a document tells: facts, and the answers that follow from them."""

    opening: np.ndarray  # (2 pairs,) the facts at its beginning
    changes: np.ndarray  # (rewrites, 2) those in its filler
    keys: np.ndarray  # (pairs,)
    answers: np.ndarray  # (pairs,) their last values


def tell(config: RecallConfig, pairs: int, rng: np.random.Generator) -> Told:
    """Draw what a document with so many facts tells."""
    keys = SYMBOLS[::-1][:pairs]
    values = SYMBOLS[: pairs * config.values].reshape(pairs, config.values)
    every = np.arange(pairs)
    drawn = rng.integers(config.values, size=pairs)
    facts = np.stack([keys, values[every, drawn]], 1)  # (pairs, 2)
    opening = facts[rng.permutation(pairs)].flatten()

    changed = rng.integers(pairs, size=config.rewrites)
    new = rng.integers(config.values, size=config.rewrites)
    changes = np.stack([keys[changed], values[changed, new]], 1)
    drawn[changed] = new  # of several the last one counts
    return Told(opening, changes, keys, values[every, drawn])


def drawn_up_to(largest: int, rng: np.random.Generator) -> int:
    """1 to `largest`, evenly on a logarithmic scale."""
    return int((largest + 1) ** rng.random())


def drawn_distance(config: RecallConfig, rng: np.random.Generator) -> int:
    """2 x rewrites, which need room, to config.distance, evenly on a logarithmic scale."""
    room = 2 * config.rewrites
    return room + drawn_up_to(config.distance - room + 1, rng) - 1


def recall_document(
    config: RecallConfig, rng: np.random.Generator, name: str, training: bool = False
) -> Document:
    """One document of config.length tokens; only answers are scored.

    In training its facts and its distance may vary: from near questions a model learns to keep
    facts for far ones.
    """
    pairs = drawn_up_to(config.pairs, rng) if training and config.vary_pairs else config.pairs
    told = tell(config, pairs, rng)
    inputs = rng.choice(FILLER, config.length)
    inputs[config.opening - 2 * pairs : config.opening] = told.opening

    distance = drawn_distance(config, rng) if training and config.vary_distance else config.distance
    if config.rewrites:
        free = rng.permutation(distance - config.rewrites)[: config.rewrites]
        places = np.sort(free) + np.arange(config.rewrites)  # none overlap
        inputs[config.opening + places[:, None] + np.arange(2)] = told.changes

    asked = rng.integers(pairs, size=config.questions)
    at = config.opening + distance + config.spacing * np.arange(config.questions)
    inputs[at] = ASK
    inputs[at + 1] = told.keys[asked]
    targets = np.zeros_like(inputs)
    targets[at + 1] = told.answers[asked]
    scored = np.zeros(config.length, bool)
    scored[at + 1] = True
    return Document(name, inputs, targets, scored)


class RecallDocuments(Documents):
    """The documents of one split.

    Each is generated when it is read, from its split and number alone.
    """

    def __init__(self, config: RecallConfig, split: str):
        self.config = config
        self.split = split
        self.lengths = np.full(SIZES[split], config.length)

    def __getitem__(self, index: int) -> Document:
        if not 0 <= index < len(self):
            raise IndexError(index)
        seed = [0, SPLITS.index(self.split), index]
        rng = np.random.default_rng(seed)
        return recall_document(self.config, rng, f"{self.split}-{index}", self.split == "train")
