"""The synthetic corpus of `--data recall`, for any model: documents that can be answered from memory alone. corpus.py deals it.

(Memformer's training task `--task-recall`, which repeats a segment of any text, is another thing: see tasks.py.)

A document opens with (key, value) pairs and later asks for the values, past the reach of attention.

A document reads, in bytes,  B4Ay=-:.,...?A:,?B;-...  : each key once with its value, then punctuation as filler, at least
`distance` of it before the first question. A question is ? and a key; the answer is expected at the key, and only there is a
prediction scored. The answer itself never stands in the input, so no later question can be answered by copying an earlier
answer: the pairs in the opening are the only source. Every key has ten values of its own, as colours answer one question and
cities another; a reader who has forgotten the opening is right one time in ten.
"""

from dataclasses import dataclass

import numpy as np

from accelerated.data.windows import SPLITS, Document, Documents


def symbols(text: bytes) -> np.ndarray:
    """The codes of ASCII text, (n,)."""
    return np.frombuffer(text, np.uint8)


KEYS = symbols(b"ABCD")
VALUES = np.stack([symbols(text) for text in (b"0123456789", b"abcdefghij", b"klmnopqrst", b"KLMNOPQRST")])  # by key
FILLER = symbols(b".,:;-+=*/()<>_!&")
ASK = ord("?")
CHANCE = 1 / VALUES.shape[1]


@dataclass(frozen=True)
class RecallConfig:
    """The sizes of `--data recall`; impossible ones raise ValueError naming the field.

    Fields:
        pairs: (key, value) pairs that open a document, 1 to 4
        questions: questions a document asks; many teach in minutes, two hardly at all
        distance: filler between the last pair and the first question, in tokens
        spacing: tokens from one question to the next, at least 2
        documents: training documents; 64 more are made for each other split
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
    """One document of config.length tokens; asked positions alone are scored."""
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
    """Documents of one split, each made when it is read, from the seed, the split and its number alone."""

    def __init__(self, config: RecallConfig, split: str, seed: int = 0):
        self.config, self.split, self.seed = config, split, seed
        self.lengths = np.full(len(self), config.length)

    def __len__(self):
        return self.config.documents if self.split == "train" else 64

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(index)
        rng = np.random.default_rng([self.seed, SPLITS.index(self.split), index])
        return recall_document(self.config, rng, f"{self.split}-{index}")


def recall_splits(config: RecallConfig, seed: int = 0) -> dict[str, RecallDocuments]:
    """The documents of every split."""
    return {split: RecallDocuments(config, split, seed) for split in SPLITS}
