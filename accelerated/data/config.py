"""The settings of what a model reads, and checks of --data that read nothing.

Importing it takes no time.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from accelerated.program.errors import InputError, optional_package

HUB = "hf:"  # prefix of the name of a set of the Hugging Face hub
ON_THE_HUB = {  # the papers' sets that are read from there
    "wikitext-103": "Salesforce/wikitext:wikitext-103-v1",
    "wikitext-103-raw": "Salesforce/wikitext:wikitext-103-raw-v1",
    "pg19": "emozilla/pg19",  # deepmind/pg19 itself is a script, which datasets 4 refuses
}
CORPORA = ("stdlib", "recall", "enwik8", *ON_THE_HUB)
TASKS = ("continuation", "infilling", "recall")
CONTINUATION = TASKS.index("continuation")
ENCODINGS = {  # {name of a tokenizer: number of ids}; all except the first are tiktoken's
    "bytes": 256,
    "gpt2": 50257,
    "cl100k_base": 100277,
    "o200k_base": 200019,
}
LEAST = {"training_documents": 1, "train_bpe": 257, "train_words": 3}  # or 0, which is none


@dataclass(frozen=True)
class DataConfig:
    """Which text a model reads, and as which tokens.

    Fields:
        data: stdlib (the source of Python's standard library), recall (a synthetic task), enwik8,
            wikitext-103, wikitext-103-raw (without <unk>) or pg19, a text file
            in UTF-8, or a folder of them; its subfolders train/, valid/ and test/ are the splits.
            With the extra datasets also hf:OWNER/NAME (a set of the Hugging Face hub), or hf:FOLDER
            of .jsonl, .csv or .parquet
        text_column: the column of hf:... that holds the text
        tokenizer: bytes, an encoding of tiktoken (gpt2, cl100k_base, o200k_base), a file of BPE
            ranks in tiktoken's format, or a tokenizer of the package tokenizers (its .json, or a
            vocab.json with merges.txt beside it)
        train_bpe: learn a byte-level BPE of this many tokens (at least 257) from the training
            split; 0 to use --tokenizer
        train_words: read words: a closed vocabulary of this many (at least 3), the most frequent of
            the training split, with the line's end and <unk>, which stands for all others; 0 to use
            --tokenizer
        carry_over_documents: carry memory from each document to the next: a split is read as one
            text, cut into one part per lane (see --batch), and memory is reset only where a part
            begins
        training_documents: read only the first N documents of the training split; 0 for all
    """

    data: str = "stdlib"
    text_column: str = "text"
    tokenizer: str = "bytes"
    train_bpe: int = 0
    train_words: int = 0
    carry_over_documents: bool = False
    training_documents: int = 0

    def __post_init__(self):
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value != 0 and value < least:
                raise ValueError(f"{name} is {value}; it must be 0 or at least {least}")

    @property
    def tokenizer_file(self) -> str:
        """The file of a run folder that holds its tokenizer; empty if the tokenizer has a name."""
        if self.train_words or self.tokenizer.endswith(".json"):
            return "tokenizer.json"
        is_named = self.tokenizer in ENCODINGS and not self.train_bpe
        return "" if is_named else "tokenizer.tiktoken"


@dataclass(frozen=True)
class TaskConfig:
    """Which tasks a model is trained on; an impossible value raises a ValueError that names it.

    Fields:
        infilling: fraction of lanes that fill in masked spans; lanes are drawn anew in every
            iteration
        recall: fraction of lanes that recall the segment before the one that the encoder reads; the
            others continue the text
        masked_only: whether infilling predicts the masked tokens alone, not the whole segment
    """

    infilling: float = 0.0
    recall: float = 0.0
    masked_only: bool = False

    def __post_init__(self):
        for name in ("infilling", "recall"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie in 0..1")
        if self.infilling + self.recall > 1:
            raise ValueError(
                f"recall is {self.recall}; "
                f"it must not add up to more than 1 with infilling {self.infilling}"
            )

    @property
    def fractions(self) -> tuple[float, float, float]:
        """Fractions of lanes, in the order of TASKS."""
        continuation = max(0.0, 1 - self.infilling - self.recall)
        return (continuation, self.infilling, self.recall)

    @property
    def continuation_alone(self) -> bool:
        """Whether all lanes always continue the text."""
        return self.infilling == self.recall == 0


def default_data_dir() -> Path:
    """The default of --data-dir, in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "palimpsest"


def is_opened_by_datasets(data: str) -> bool:
    """Whether the package datasets opens what --data names."""
    return data.startswith(HUB) or data in ON_THE_HUB


def check_data(config: DataConfig) -> None:
    """Raise InputError unless data names a corpus or a path, and the package it needs is there."""
    data = config.data
    is_set = data in CORPORA or data.removeprefix(HUB) not in (data, "")
    if not (is_set or os.path.isfile(data) or os.path.isdir(data)):
        raise InputError(
            f"--data {data}: no such file or folder; give one, or one of {', '.join(CORPORA)}"
        )
    if config.text_column != "text" and not data.startswith(HUB):
        raise InputError(f"--text-column goes with --data hf:..., not {data}; leave it out")
    if is_opened_by_datasets(data):
        optional_package("datasets", f"--data {data} needs", "datasets")
