"""The synthetic corpus of `--data recall`, for any model: questions that only a memory can answer. corpus.py opens it.

A document has facts, then filler, then questions, out of attention's reach. A fact is a key and its value; a question is ? and a
key. The answer is the prediction at the question's last byte; only answers are scored. Answers never appear in the input, so the
facts are their only source. Each key has values of its own, and `rewrites` facts change in the filler: the last value counts.

    BdA8CkDM=-:.,...?A:,?B;-        four facts, filler, two questions
"""

from dataclasses import dataclass, replace

import numpy as np

from accelerated.data.windows import SPLITS, Document, Documents

FILLER = np.frombuffer(b".,:;-+=*/()<>_!&", np.uint8)
ASK = ord("?")
FIRST_KEYS, FIRST_VALUES = b"ABCDEFGHIJUVWXYZ", b"0123456789abcdefghijklmnopqrstKLMNOPQRST"
OTHERS = sorted({*range(256)} - {ASK, *FILLER.tolist(), *FIRST_KEYS, *FIRST_VALUES})
# All bytes that facts may use: values are taken from the front, keys from the back
SYMBOLS = np.array([*FIRST_VALUES, *OTHERS, *reversed(FIRST_KEYS)], np.uint8)
SIZES = {"train": 100_000, "valid": 64, "test": 64}  # documents in each split


@dataclass(frozen=True)
class RecallConfig:
    """The sizes of `--data recall`; an impossible value raises a ValueError that names the field.

    Fields:
        pairs: facts at the beginning of a document
        vary_pairs: let each training document draw its number of facts, up to that one, evenly on a logarithmic scale
        values: values that a key can have; a guess is right with probability 1 / values
        rewrites: how many facts get a new value in the filler
        questions: questions in a document; a model learns from many in minutes, from two hardly at all
        distance: tokens of filler between the last pair and the first question; rewritten facts stand in it
        vary_distance: let each training document draw its distance, up to that one, evenly on a logarithmic scale
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
        least = {
            "pairs": 1,
            "values": 2,
            "rewrites": 0,
            "questions": 1,
            "distance": 0,
            "spacing": 2,
        }
        for name, number in least.items():
            if getattr(self, name) < number:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {number}")
        needed = self.pairs * (1 + self.values)  # bytes for the keys and values
        if needed > len(SYMBOLS):
            words = f"with {self.values} values they need {needed} of {len(SYMBOLS)} bytes; give fewer of either"
            raise ValueError(f"pairs is {self.pairs}: {words}")
        if 2 * self.rewrites > self.distance:
            raise ValueError(
                f"distance is {self.distance}; what stands in the filler needs {2 * self.rewrites} tokens"
            )

    @property
    def opening(self) -> int:
        """Tokens of facts before the filler."""
        return 2 * self.pairs

    @property
    def length(self) -> int:
        """Tokens in a document."""
        return self.opening + self.distance + self.questions * self.spacing


def tell(
    config: RecallConfig, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (the opening's facts (2 pairs,), those in the filler (rewrites, 2), keys (pairs,), their last values (pairs,))."""
    keys = SYMBOLS[::-1][: config.pairs]
    values = SYMBOLS[: config.pairs * config.values].reshape(config.pairs, config.values)
    every, drawn = np.arange(config.pairs), rng.integers(config.values, size=config.pairs)
    opening = np.stack([keys, values[every, drawn]], 1)[rng.permutation(config.pairs)].flatten()
    changed, new = (
        rng.integers(config.pairs, size=config.rewrites),
        rng.integers(config.values, size=config.rewrites),
    )
    drawn[changed] = new  # of several the last one counts
    return opening, np.stack([keys[changed], values[changed, new]], 1), keys, values[every, drawn]


def drawn_up_to(largest: int, rng: np.random.Generator) -> int:
    """1 to `largest`, evenly on a logarithmic scale."""
    return int((largest + 1) ** rng.random())


def recall_document(
    config: RecallConfig, rng: np.random.Generator, name: str, training: bool = False
) -> Document:
    """One document of config.length tokens; only answers are scored. In training its facts and its distance may vary."""
    told = (
        replace(config, pairs=drawn_up_to(config.pairs, rng))
        if training and config.vary_pairs
        else config
    )
    opening, changes, keys, answers = tell(told, rng)
    inputs = rng.choice(FILLER, config.length)
    inputs[config.opening - told.opening : config.opening] = opening
    distance = config.distance
    if (
        training and config.vary_distance
    ):  # from near questions a model learns to keep facts for far ones
        distance = (
            2 * config.rewrites + drawn_up_to(config.distance - 2 * config.rewrites + 1, rng) - 1
        )
    if config.rewrites:
        places = np.sort(
            rng.permutation(distance - config.rewrites)[: config.rewrites]
        ) + np.arange(config.rewrites)
        inputs[config.opening + places[:, None] + np.arange(2)] = changes  # none overlap
    asked = rng.integers(told.pairs, size=config.questions)
    at = config.opening + distance + config.spacing * np.arange(config.questions)
    inputs[at], inputs[at + 1] = ASK, keys[asked]
    targets, scored = np.zeros_like(inputs), np.zeros(config.length, bool)
    targets[at + 1], scored[at + 1] = answers[asked], True
    return Document(name, inputs, targets, scored)


class RecallDocuments(Documents):
    """The documents of one split; each is generated when it is read, from its split and number alone."""

    def __init__(self, config: RecallConfig, split: str):
        self.config, self.split = config, split
        self.lengths = np.full(SIZES[split], config.length)

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(index)
        rng = np.random.default_rng([0, SPLITS.index(self.split), index])  # 0 is the seed
        return recall_document(self.config, rng, f"{self.split}-{index}", self.split == "train")
