"""The settings of what a model reads, and checks of --data that read nothing; importing it takes no time."""

import codecs
import difflib
import importlib.util
import math
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path

from accelerated.program.errors import InputError, check_choice, option_name

DATASETS = ("enwik8", "wikitext-103", "wikitext-103-raw", "pg19")  # named_sets.py opens them
CORPORA = ("stdlib", "recall", *DATASETS)
HUB = "hf:"  # prefix of the name of a set of the Hugging Face hub
MU_LAW = "mu-law"  # the tokenizer of recordings
TASKS = ("continuation", "infilling", "recall")
ENCODINGS = {  # {name of a tokenizer: number of ids}; all except the first two are tiktoken's
    "bytes": 256, MU_LAW: 256, "gpt2": 50257, "r50k_base": 50257, "p50k_base": 50281, "p50k_edit": 50284, "cl100k_base": 100277,
    "o200k_base": 200019, "o200k_harmony": 201088,
}  # fmt: skip
RANKS = "tokenizer.tiktoken"  # file in a run folder with the ranks of a learned tokenizer or of one read from a file
PIECES = "tokenizer.model"  # the same of a sentencepiece model
VOCABULARY = "tokenizer.words"  # the same of a closed vocabulary of words
SUFFIXES = re.compile(r"(\.[^.,/\s]+(,\.[^.,/\s]+)*)?")
OF_TEXTS = ("training_documents", "validation_tokens")  # options that read a part of the texts
OF_FILES = ("encoding", "skip_undecodable", "suffixes", "unpacked_limit")  # options that only say how files are read


@dataclass(frozen=True)
class DataConfig:
    """Which text a model reads, and as which tokens.

    Fields:
        data: stdlib (the source of Python's standard library), recall (a synthetic task), enwik8, wikitext-103, wikitext-103-raw
            (without <unk>) or pg19 (downloaded if absent), hf:OWNER/NAME (a set of the Hugging Face hub; needs the extra
            datasets), a text file, a .jsonl (field `text`), .gz or .zip, or a folder of these; its subfolders train/, valid/ and
            test/ are the splits. Or a recording of speech (.wav), or with --tokenizer mu-law a folder of recordings
        documents: what one document of a folder is: files (each file), or folders (each subfolder, such as a repository)
        tokenizer: bytes, an encoding of tiktoken (gpt2, cl100k_base, ...), a file of BPE ranks in tiktoken's format, or
            a sentencepiece model such as T5's (.model); of recordings mu-law, whose tokens are samples
        train_bpe: learn a byte-level BPE of this many tokens (at least 257) from the training split; 0 to use --tokenizer
        train_words: read words: a closed vocabulary of this many (at least 3), the most frequent of the training split, with the
            line's end and <unk>, which stands for all others; 0 to use --tokenizer
        carry_over_documents: carry memory from each document to the next: a split is read as one text, cut into one part per
            lane (see --batch), and memory is reset only where a part begins
        training_documents: read only so many documents of the training split, the first ones; 0 for all
        validation_tokens: read only so many tokens of each validation document, the first ones; 0 for all
        encoding: of text files, such as latin-1 or utf-16; a .jsonl is always UTF-8
        skip_undecodable: leave out files that are not in --encoding, and say how many
        suffixes: which files of a folder or .zip to read, such as .rs,.go, instead of the usual ones
        unpacked_limit: gigabytes (10^9 bytes) that a .gz or .zip may unpack to, archives inside it included
    """

    data: str = "stdlib"
    documents: str = "files"
    tokenizer: str = "bytes"
    train_bpe: int = 0
    train_words: int = 0
    carry_over_documents: bool = False
    training_documents: int = 0
    validation_tokens: int = 0
    encoding: str = "utf-8"
    skip_undecodable: bool = False
    suffixes: str = ""
    unpacked_limit: float = 20.0

    def __post_init__(self):
        check_choice("documents", self.documents, ("files", "folders"))
        if not is_text_encoding(self.encoding):
            raise ValueError(f"encoding is {self.encoding!r}; it must be a text encoding of Python, such as utf-8 or latin-1")
        if not SUFFIXES.fullmatch(self.suffixes):
            raise ValueError(f"suffixes is {self.suffixes!r}; it must be suffixes joined by commas, such as .rs,.go")
        if not self.unpacked_limit > 0:
            raise ValueError(f"unpacked_limit is {self.unpacked_limit}; it must be above 0 gigabytes")
        if self.training_documents < 0:
            raise ValueError(f"training_documents is {self.training_documents}; it must be at least 1, or 0 for all")
        if self.validation_tokens < 0 or self.validation_tokens == 1:
            raise ValueError(f"validation_tokens is {self.validation_tokens}; it must be at least 2, or 0 for all")
        if self.train_bpe and self.train_bpe < 257:
            raise ValueError(f"train_bpe is {self.train_bpe}; it must be 0 or at least 257")
        if self.train_words and self.train_words < 3:
            raise ValueError(f"train_words is {self.train_words}; it must be 0 or at least 3")
        if self.tokenizer == MU_LAW and (self.encoding != "utf-8" or self.skip_undecodable):
            raise ValueError(f"tokenizer is {MU_LAW}, which reads recordings; encoding and skip_undecodable are for text")

    @property
    def tokenizer_file(self) -> str:
        """The file of a run folder that holds its tokenizer; empty if the tokenizer has a name."""
        if self.train_words:
            return VOCABULARY
        if self.tokenizer in ENCODINGS and not self.train_bpe:
            return ""
        return PIECES if is_sentencepiece(self.tokenizer) else RANKS


@dataclass(frozen=True)
class TaskConfig:
    """Which tasks a model is trained on; an impossible value raises a ValueError that names the field.

    Fields:
        infilling: fraction of lanes that fill in masked spans; lanes are drawn anew in every iteration
        recall: fraction of lanes that recall the segment before the one that the encoder reads; the others continue the text
        masked: fraction of a segment's tokens that infilling masks
        span: mean length of a masked span in tokens (Poisson distribution)
    """

    infilling: float = 0.0
    recall: float = 0.0
    masked: float = 0.3
    span: float = 3.5

    def __post_init__(self):
        for name in ("infilling", "recall"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie in 0..1")
        if self.infilling + self.recall > 1:
            raise ValueError(f"infilling {self.infilling} and recall {self.recall} add up to more than 1; make one smaller")
        if not 0 < self.masked < 1:
            raise ValueError(
                f"masked is {self.masked}; it must be above 0, which masks nothing, and below 1, which masks everything"
            )
        if not 0.1 <= self.span < math.inf:
            raise ValueError(f"span is {self.span}; it must be at least 0.1 and finite")

    @property
    def shares(self) -> tuple[float, float, float]:
        """Fractions of lanes, in the order of TASKS."""
        return (max(0.0, 1 - self.infilling - self.recall), self.infilling, self.recall)

    @property
    def continuation_alone(self) -> bool:
        """Whether all lanes always continue the text."""
        return self.infilling == self.recall == 0

    def budget(self, length: int) -> int:
        """How many tokens infilling masks in a text of that length."""
        return round(self.masked * length)


def is_sentencepiece(tokenizer: str) -> bool:
    """Whether --tokenizer names the file of a sentencepiece model."""
    return tokenizer.lower().endswith(".model")


def default_data_dir() -> Path:
    """The default of --data-dir, in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "palimpsest"


def is_text_encoding(name: str) -> bool:
    """Whether Python has a codec of that name that decodes text piece by piece."""
    try:
        codecs.getincrementaldecoder(name)
        return "a".encode(name).decode(name) == "a"  # an error for hex, base64 and other codecs of bytes
    except (LookupError, ValueError):
        return False


def check_data(config: DataConfig) -> None:
    """Raise InputError unless data names a corpus or an existing path, and the other fields say something about it."""
    data = config.data
    if data.startswith(HUB):
        if importlib.util.find_spec("datasets") is None:
            raise InputError(f"--data {data} needs the package datasets; install the extra: pip install -e '.[datasets]'")
    elif data not in CORPORA and not os.path.exists(data):
        near = difflib.get_close_matches(data, CORPORA, n=1)
        advice = f"did you mean {near[0]}?" if near else f"give a file, a folder, or one of {', '.join(CORPORA)}"
        raise InputError(f"--data {data}: no such file or folder; {advice}")
    named = data in CORPORA or data.startswith(HUB)
    if named and config.tokenizer == MU_LAW:
        raise InputError(f"--tokenizer {MU_LAW} reads recordings, and --data {data} is text; give a .wav or a folder of them")
    if config.documents == "folders" and (named or not os.path.isdir(data)):
        raise InputError(f"--documents folders needs a folder of folders as --data, not {data}; give one, or --documents files")
    defaults = {field.name: field.default for field in fields(config)}
    for name in OF_TEXTS if data == "recall" else ():
        if getattr(config, name):
            raise InputError(f"{option_name(name)} is for texts, and --data recall is made as it is read; leave it out")
    for name in OF_FILES:
        if named and getattr(config, name) != defaults[name]:
            raise InputError(f"{option_name(name)} says how files are read, and --data {data} has its own way; leave it out")


def check_carry_over(data: str, carry_over: bool) -> None:
    """Raise InputError for --carry-over-documents with --data recall: each document there has questions of its own."""
    if data == "recall" and carry_over:
        raise InputError(
            "--carry-over-documents joins documents into one text, and each document of --data recall has questions of its own; "
            "leave one of them out"
        )
