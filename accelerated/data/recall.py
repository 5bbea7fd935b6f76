"""The synthetic corpus of `--data recall`, for any model: questions that only a memory can answer. corpus.py opens it.

(It has nothing to do with Memformer's training task `--task-recall`, which repeats a segment of any text: see tasks.py.)

A document begins with (key, value) pairs and asks for the values later, out of attention's reach. Its bytes look like
B4Ay=-:.,...?A:,?B;-...  : each key once with its value, then punctuation as filler, `distance` bytes before the first question.
A question is ? and a key. The answer is the prediction at the key; only answers are scored. Answers never appear in the input,
so the beginning is their only source. Each key has ten possible values, which no other key has, so a guess is right one time
in ten.
"""

from dataclasses import dataclass

import numpy as np

from accelerated.data.windows import SPLITS, Document, Documents

KEYS = np.frombuffer(b"ABCD", np.uint8)
VALUES = np.frombuffer(b"0123456789abcdefghijklmnopqrstKLMNOPQRST", np.uint8).reshape(4, 10)  # ten for each key
FILLER = np.frombuffer(b".,:;-+=*/()<>_!&", np.uint8)
ASK = ord("?")
CHANCE = 1 / VALUES.shape[1]


@dataclass(frozen=True)
class RecallConfig:
    """The sizes of `--data recall`; an impossible value raises a ValueError that names the field.

    Fields:
        pairs: (key, value) pairs at the beginning of a document, 1 to 4
        questions: questions in a document; a model learns from many in minutes, from two hardly at all
        distance: tokens of filler between the last pair and the first question
        spacing: tokens from one question to the next, at least 2
        documents: training documents; each other split has 64
    """

    pairs: int = 4
    questions: int = 24
    distance: int = 88
    spacing: int = 4
    documents: int = 100_000

    def __post_init__(self):
        if not 1 <= self.pairs <= len(KEYS):
            raise ValueError(f"pairs is {self.pairs}; it must lie in 1..{len(KEYS)}")
        for name, least in (("questions", 1), ("distance", 0), ("spacing", 2), ("documents", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")

    @property
    def length(self) -> int:
        """Tokens in a document."""
        return 2 * self.pairs + self.distance + self.questions * self.spacing


def recall_document(config: RecallConfig, rng: np.random.Generator, name: str) -> Document:
    """One document of config.length tokens; only answers are scored."""
    drawn = rng.integers(VALUES.shape[1], size=config.pairs)
    answers = VALUES[np.arange(config.pairs), drawn]
    order = rng.permutation(config.pairs)
    inputs = rng.choice(FILLER, config.length)
    inputs[0 : 2 * config.pairs : 2], inputs[1 : 2 * config.pairs : 2] = KEYS[order], answers[order]
    asked = rng.integers(config.pairs, size=config.questions)
    at = 2 * config.pairs + config.distance + config.spacing * np.arange(config.questions)
    inputs[at], inputs[at + 1] = ASK, KEYS[asked]
    targets, scored = np.zeros_like(inputs), np.zeros(config.length, bool)
    targets[at + 1], scored[at + 1] = answers[asked], True
    return Document(name, inputs, targets, scored)


class RecallDocuments(Documents):
    """The documents of one split; each is generated when it is read, from its split and number alone."""

    def __init__(self, config: RecallConfig, split: str):
        self.config, self.split = config, split
        self.lengths = np.full(config.documents if split == "train" else 64, config.length)

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(index)
        rng = np.random.default_rng([0, SPLITS.index(self.split), index])  # 0 is the seed
        return recall_document(self.config, rng, f"{self.split}-{index}")
