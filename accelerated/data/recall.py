"""The synthetic corpus of `--data recall`, for any model: questions that only a memory can answer.

A document has facts, then filler, then questions, out of attention's reach. A fact is a key and its
value; a question is ? and a key. The answer is the prediction at the question's last byte; only
answers are scored. Answers never appear in the input, so the facts are their only source. Keys
share their values, so a memory must associate: which value was told is not enough, it must know of
which key.

    B3A8C3D1=-:.,...?A:,?B;-        four facts, filler, two questions

With `--recall-anew` each document draws its keys and values from one alphabet: a byte is a key here
and a value there. A fact then begins with @, for only this mark tells it from noise. It may stand
anywhere, its key may be told again with another value, and filler may have signs of facts. A
question asks for the value that was told last.

    -;=@b3@1a.=@b0-31;,-?b:,?1      two facts, of which one is told again; two signs in the filler
"""

from dataclasses import dataclass

import numpy as np

from accelerated.data.windows import SPLITS, Document, Documents

FILLER = np.frombuffer(b".,:;-+=*/()<>_!&", np.uint8)
ASK = ord("?")
TELL = ord("@")  # before a fact whose key and value are drawn anew
FIRST_KEYS = b"ABCDEFGHIJUVWXYZ"
FIRST_VALUES = b"0123456789abcdefghijklmnopqrstKLMNOPQRST"
OTHERS = sorted(set(range(256)) - {ASK, *FILLER.tolist(), *FIRST_KEYS, *FIRST_VALUES})
# All bytes that facts may use: values are taken from the front, keys from the back
SYMBOLS = np.array([*FIRST_VALUES, *OTHERS, *reversed(FIRST_KEYS)], np.uint8)
ALPHABET = SYMBOLS[SYMBOLS != TELL]  # keys and values that are drawn anew, from the front
SIZES = {"train": 100_000, "valid": 64, "test": 64}  # documents in each split
LEAST = {"pairs": 1, "values": 2, "questions": 1, "spacing": 2}  # of others it is 0
NEED_ANEW = ("begin", "rewrites", "distractors")


@dataclass(frozen=True)
class RecallConfig:
    """The sizes of `--data recall`; an impossible value raises a ValueError that names it.

    Fields:
        pairs: facts of a document, one for each key
        vary_pairs: let each training document draw its number of facts, up to that one, evenly on a
            logarithmic scale
        values: values that a key can have
        own_values: give each key values of its own: a first rung, membership without association
        questions: questions in a document; a model learns from many in minutes, from two hardly at
            all
        distance: tokens of filler between the last pair and the first question
        vary_distance: let each training document draw its distance, up to that one, evenly on a
            logarithmic scale
        spacing: tokens from one question to the next, at least 2
        anew: draw the keys and values of each document from one alphabet, of as many bytes as there
            are pairs and values together; facts then begin with @
        begin: tokens of filler before the facts; each training document draws up to that many. It
            needs anew, as the next two do
        rewrites: how many times a key is told again, with another value, in the filler between
            facts and questions; each training document draws up to that many, as far as there is
            room
        distractors: share of the filler that is keys and values instead
    """

    pairs: int = 4
    vary_pairs: bool = False
    values: int = 10
    own_values: bool = False
    questions: int = 24
    distance: int = 88
    vary_distance: bool = False
    spacing: int = 4
    anew: bool = False
    begin: int = 0
    rewrites: int = 0
    distractors: float = 0.0

    def __post_init__(self):
        for name, value in vars(self).items():
            least = LEAST.get(name, 0)
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        sets = self.pairs if self.own_values else 1  # of values
        needed = self.pairs + sets * self.values  # bytes for the keys and values
        symbols = ALPHABET if self.anew else SYMBOLS
        if needed > len(symbols):
            raise ValueError(
                f"pairs is {self.pairs}: with {self.values} values they need {needed} "
                f"of {len(symbols)} bytes; give fewer of either"
            )
        if self.anew and self.own_values:
            raise ValueError("own_values is true, but with anew no key has any; leave one out")
        for name in NEED_ANEW:
            if getattr(self, name) and not self.anew:
                raise ValueError(f"{name} is {getattr(self, name)}; it needs anew, so give both")
        if not self.distractors <= 1:
            raise ValueError(f"distractors is {self.distractors}; it must lie in 0..1")
        if self.rewrites > self.distance // self.fact:
            raise ValueError(
                f"rewrites is {self.rewrites}: each takes {self.fact} tokens of a distance of "
                f"{self.distance}; give fewer, or more distance"
            )

    @property
    def fact(self) -> int:
        """Tokens of a fact."""
        return 3 if self.anew else 2

    @property
    def opening(self) -> int:
        """Tokens of facts before the filler."""
        return self.fact * self.pairs

    @property
    def chance(self) -> float:
        """The share of right answers of a guess."""
        return 1 / self.values

    @property
    def length(self) -> int:
        """Tokens in a document."""
        return self.begin + self.opening + self.distance + self.questions * self.spacing


def drawn_up_to(largest: int, rng: np.random.Generator) -> int:
    """1 to `largest`, evenly on a logarithmic scale."""
    return int((largest + 1) ** rng.random())


def drawn_facts(
    config: RecallConfig, pairs: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(pairs, 2) keys and their values, and the values (V,) that keys of this document can have.

    If keys have values of their own, these are those of the first one.
    """
    if config.anew:
        drawn = rng.permutation(ALPHABET[: config.pairs + config.values])
        keys = drawn[:pairs]
        values = drawn[config.pairs :]
        return np.stack([keys, rng.choice(values, pairs)], 1), values
    every = np.arange(pairs)
    first = every * config.values if config.own_values else np.zeros_like(every)
    drawn = rng.integers(config.values, size=pairs)
    keys = SYMBOLS[::-1][:pairs]
    return np.stack([keys, SYMBOLS[first + drawn]], 1), SYMBOLS[: config.values]


def marked(config: RecallConfig, facts: np.ndarray) -> np.ndarray:
    """The tokens that tell facts (n, 2), one after another."""
    if config.anew:
        facts = np.insert(facts, 0, TELL, axis=1)
    return facts.flatten()


def put_distractors(config: RecallConfig, inputs: np.ndarray, rng: np.random.Generator) -> None:
    """Replace the share of filler tokens in inputs (n,) by bytes of the alphabet, in place."""
    noise = rng.random(len(inputs)) < config.distractors
    inputs[noise] = rng.choice(ALPHABET[: config.pairs + config.values], noise.sum())


def tell_again(
    config: RecallConfig,
    filler: np.ndarray,
    facts: np.ndarray,
    values: np.ndarray,
    count: int,
    rng: np.random.Generator,
) -> None:
    """Tell `count` times in filler (n,) a key of facts (pairs, 2) with another value, in place."""
    room = len(filler) - (config.fact - 1) * count
    places = np.sort(rng.choice(room, count, replace=False))
    for number, place in enumerate(places.tolist()):
        key = rng.integers(len(facts))
        facts[key, 1] = rng.choice(values[values != facts[key, 1]])
        at = place + (config.fact - 1) * number
        filler[at : at + config.fact] = marked(config, facts[key : key + 1])


def recall_document(
    config: RecallConfig, rng: np.random.Generator, name: str, training: bool = False
) -> Document:
    """One document of config.length tokens; only answers are scored.

    In training its facts, where they begin, how often they are told again and its distance may
    vary: from near questions a model learns to keep facts for far ones.
    """
    pairs = drawn_up_to(config.pairs, rng) if training and config.vary_pairs else config.pairs
    facts, values = drawn_facts(config, pairs, rng)
    told = marked(config, facts[rng.permutation(pairs)])
    inputs = rng.choice(FILLER, config.length)
    if config.distractors:
        put_distractors(config, inputs, rng)

    begin = config.begin
    if training and begin:
        begin = int(rng.integers(begin + 1))
    opened = begin + config.opening
    inputs[opened - len(told) : opened] = told

    distance = config.distance
    if training and config.vary_distance:
        distance = drawn_up_to(config.distance + 1, rng) - 1
    first = opened + distance
    rewrites = config.rewrites
    if training and rewrites:
        rewrites = min(int(rng.integers(rewrites + 1)), distance // config.fact)
    if rewrites:
        tell_again(config, inputs[opened:first], facts, values, rewrites, rng)

    asked = rng.integers(pairs, size=config.questions)
    at = first + config.spacing * np.arange(config.questions)
    inputs[at] = ASK
    inputs[at + 1] = facts[asked, 0]
    targets = np.zeros_like(inputs)
    targets[at + 1] = facts[asked, 1]
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
