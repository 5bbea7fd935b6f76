"""Text to token ids and back: bytes, byte-level BPE, tokenizers of other libraries, words.

A rank is a BPE token's id and its place in the order of merges. train.py chooses a tokenizer.
Importing this file imports neither torch nor tiktoken.
"""

from __future__ import annotations

import base64
import codecs
import hashlib
import re
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, SupportsInt

import numpy as np

from accelerated.data.config import ENCODINGS, DataConfig
from accelerated.data.sources import Source, Text
from accelerated.program.errors import InputError, optional_package
from accelerated.program.files import written_whole

if TYPE_CHECKING:
    import tiktoken

# Of GPT-2; no token crosses the pieces
GPT2_PIECES = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
# In every closed vocabulary; <unk> stands for all other words
LINE_END = "\n"
UNKNOWN = "<unk>"
WORD = r"\n|\S+"
SINGLE_BYTES = [bytes([byte]) for byte in range(256)]
LEARNING_PIECE = 1 << 16  # bytes; the package tokenizers takes 256 pieces at a time
ADVICE = f"give a file of tiktoken ranks, a tokenizer.json, or one of {', '.join(ENCODINGS)}"
OFFLINE = (
    "fetch its files on a machine with a network, "
    "and set TIKTOKEN_CACHE_DIR to a copy of its folder"
)
DAMAGED = "it is damaged or missing; restore it from a copy of the run"
NO_RANKS = (
    "it is no list of tokens in base64, all 256 bytes among them, with ranks 0, 1, 2 ..., each once"
)


class Tokenizer(ABC):
    """Token ids that each stand for a spelling."""

    def __init__(
        self, name: str, spellings: list[bytes], content: bytes = b"", fingerprint: str = ""
    ):
        self.name = name  # what --tokenizer calls it, or the file it was read from
        self.vocabulary = len(spellings)  # V; ids are 0 .. V - 1
        self.dtype = np.uint16 if self.vocabulary <= 1 << 16 else np.uint32  # holds all ids
        self.spellings = spellings  # V of them
        self.token_bytes = np.array([len(spelling) for spelling in spellings])  # (V,)
        # a hash that changes if an id means something else
        self.fingerprint = fingerprint or hashlib.sha256(content).hexdigest()
        self.content = content  # what a run folder keeps of a tokenizer without a name

    @abstractmethod
    def encode(self, text: str | bytes) -> np.ndarray:
        """Convert text to an array of ids (n,)."""

    def decode(self, ids: Iterable[SupportsInt]) -> bytes:
        """Convert ids, numbers or one-element tensors, to the text that was encoded.

        A tokenizer that normalises text returns it as normalised.
        """
        return b"".join(self.spellings[int(token)] for token in ids)

    def save(self, path: Path) -> None:
        """Write the content to a file of a run folder, as DataConfig.tokenizer_file names it."""
        with written_whole(path, "give another --out") as temporary:
            temporary.write_bytes(self.content)


class ByteTokenizer(Tokenizer):
    """The bytes of text as token ids 0..255."""

    def __init__(self):
        super().__init__("bytes", SINGLE_BYTES, fingerprint="bytes")
        self.dtype = np.uint8

    def encode(self, text: str | bytes) -> np.ndarray:
        """Convert text to a uint8 array of ids."""
        content = text.encode() if isinstance(text, str) else text
        return np.frombuffer(content, dtype=np.uint8)


class BpeTokenizer(Tokenizer):
    """Byte-level BPE by a tiktoken encoding; text never becomes a special token."""

    def __init__(self, name: str, encoding: tiktoken.Encoding):
        self.encoding = encoding
        spelled = {rank: token for token, rank in encoding._mergeable_ranks.items()}
        spelled |= {number: token.encode() for token, number in encoding._special_tokens.items()}
        # Some encodings leave ids unused
        spellings = [spelled.get(token, b"") for token in range(encoding.n_vocab)]
        lines = []
        for rank, spelling in enumerate(spellings):
            lines.append(b"%b %d\n" % (base64.b64encode(spelling), rank))
        ranks = b"".join(lines)
        fingerprint = hashlib.sha256(ranks + encoding._pat_str.encode()).hexdigest()
        super().__init__(name, spellings, ranks, fingerprint)

    def encode(self, text: str | bytes) -> np.ndarray:
        """Convert text to an array of ids, as_string if it is bytes."""
        ids = self.encoding.encode_to_numpy(as_string(text), disallowed_special=())
        return ids.astype(self.dtype)


class PackagedTokenizer(Tokenizer):
    """A tokenizer.json of Hugging Face's tokenizers; text never becomes a special token.

    A byte-level one decodes to the text that was encoded, if that is UTF-8; any other decodes to
    the text as it normalises it.
    """

    def __init__(self, name: str, content: bytes):
        package = tokenizers_package("a tokenizer.json")
        self.model = package.Tokenizer.from_str(content.decode())
        self.model.encode("\ue000")  # raises if the model needs an unknown token and has none
        self.model.encode_special_tokens = True
        self.model.no_padding()
        self.model.no_truncation()
        self.kind = type(self.model.model).__name__

        is_of_bytes = "ByteLevel(" in f"{self.model.pre_tokenizer} {self.model.decoder}"
        symbols = byte_of_symbol() if is_of_bytes else {}
        tokens = {number: token for token, number in self.model.get_vocab().items()}
        spellings = [b""] * (1 + max(tokens))  # of ids that are left unused
        for number, token in tokens.items():
            spellings[number] = spelling_of(token, symbols, self.kind)
        super().__init__(name, spellings, content)

    def encode(self, text: str | bytes) -> np.ndarray:
        """Convert text to an array of ids, as_string if it is bytes."""
        parts = [as_string(text)]
        if self.kind == "WordLevel":  # words cross no line end; it is faster
            parts = parts[0].splitlines(keepends=True)
        ids = []
        for part in parts:
            ids += self.model.encode(part, add_special_tokens=False).ids
        return np.array(ids, self.dtype)


def as_string(text: str | bytes) -> str:
    """The text; bytes that are not UTF-8 become replacement characters."""
    return text if isinstance(text, str) else text.decode(errors="replace")


def spelling_of(token: str, symbols: dict[str, int], kind: str) -> bytes:
    """The bytes that a token of a model of this kind decodes to.

    A WordLevel token is a word, with a blank before it. Others are bytes in the alphabet `symbols`,
    one byte written <0xE2>, or text with ▁ for a blank or </w> at the end of a word.
    """
    if kind == "WordLevel":
        return f" {token}".encode()
    if symbols.keys() >= set(token):
        return bytes(symbols[symbol] for symbol in token)
    if re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").replace("</w>", " ").encode()


def read_ranks(content: bytes) -> dict[bytes, int]:
    """{token: rank} from the contents of a ranks file; raises ValueError if they are not valid.

    (tiktoken's own reader caches a file by its path, and would miss a change.)
    """
    lines = [line.split() for line in content.splitlines() if line]
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    each_once = sorted(ranks.values()) == list(range(len(lines)))
    if each_once and ranks.keys() >= set(SINGLE_BYTES):
        return ranks
    raise ValueError(NO_RANKS)


def tokenizer_of_ranks(name: str, ranks: dict[bytes, int]) -> BpeTokenizer:
    """The tokenizer of {token: rank}; it cuts text into words as GPT-2 does."""
    import tiktoken

    encoding = tiktoken.Encoding(
        "ranks", pat_str=GPT2_PIECES, mergeable_ranks=ranks, special_tokens={}
    )
    return BpeTokenizer(name, encoding)


def tokenizer_of_file(path: str | Path, advice: str = ADVICE) -> Tokenizer:
    """The tokenizer of a file: a .json of the package tokenizers, or else ranks.

    A vocab.json is read with the merges.txt beside it, as GPT-2 and RoBERTa have them. Raises
    InputError if the file cannot be used.
    """
    name = str(path)
    file = Path(path)
    merges = file.parent / "merges.txt"
    try:
        content = file.read_bytes()
        if file.name == "vocab.json" and merges.is_file():
            bpe = tokenizers_package("a vocab.json").ByteLevelBPETokenizer
            content = bpe(name, str(merges), add_prefix_space=False).to_str().encode()
        if name.endswith(".json"):
            return PackagedTokenizer(name, content)
        return tokenizer_of_ranks(name, read_ranks(content))
    except (InputError, KeyboardInterrupt):
        raise
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; {advice}") from None
    except BaseException as error:  # of the package tokenizers: Exception, or a panic
        raise InputError(f"{path} cannot be used: {error}; {advice}") from None


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that --tokenizer names: one of ENCODINGS, or a file."""
    if name == "bytes":
        return ByteTokenizer()
    if name not in ENCODINGS:
        return tokenizer_of_file(name)
    import tiktoken

    try:
        return BpeTokenizer(name, tiktoken.get_encoding(name))
    except (OSError, ValueError) as error:
        raise InputError(
            f"--tokenizer {name}: tiktoken cannot fetch it ({error}); {OFFLINE}"
        ) from None


def run_tokenizer(run: str | Path, data: DataConfig) -> Tokenizer:
    """The tokenizer of a run folder with this DataConfig.

    Its fingerprint shows whether it is the one that was saved. Of a GPT-2, a folder or the file in
    it, the tokenizer is the file that the DataConfig names.
    """
    if not data.tokenizer_file:
        return open_tokenizer(data.tokenizer)
    path = Path(run).absolute()
    folder = path.parent if path.is_file() else path
    own = folder / data.tokenizer_file
    given = Path(data.tokenizer)
    is_of_gpt2 = not own.exists() and given.parent == folder
    return tokenizer_of_file(given if is_of_gpt2 else own, DAMAGED)


def tokenizers_package(what: str = "--train-bpe") -> ModuleType:
    """The package `tokenizers`; raises InputError, which says what needs it, if it is missing."""
    return optional_package("tokenizers", f"{what} needs", "bpe")


def byte_of_symbol() -> dict[str, int]:
    """Return {character: byte} for the alphabet in which `tokenizers` writes bytes; it is GPT-2's.

    Printable Latin-1 characters stand for their own bytes; characters from 256 on stand for the
    other bytes, in order.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {chr(byte): byte for byte in own}
    for byte in sorted(set(range(256)) - set(own)):
        symbols[chr(256 + len(symbols) - len(own))] = byte
    return symbols


def learn_ranks(pieces: Iterable[str], vocabulary: int) -> dict[bytes, int]:
    """Learn a byte-level BPE with `vocabulary` tokens from pieces of text; returns {token: rank}.

    The 256 bytes come first, then the merged tokens in the order of their merges. Raises InputError
    if the text has too few different words.
    """
    symbols = byte_of_symbol()
    model = tokenizers_package().ByteLevelBPETokenizer()
    model.train_from_iterator(pieces, vocabulary, min_frequency=0, show_progress=False)
    written = sorted(model.get_vocab(), key=model.token_to_id)
    merged = [bytes(symbols[symbol] for symbol in token) for token in written if len(token) > 1]
    check_learned("--train-bpe", vocabulary, 256 + len(merged))
    return {token: rank for rank, token in enumerate([*SINGLE_BYTES, *merged])}


def cut_up(text: Text) -> Iterator[bytes]:
    """The text, at most LEARNING_PIECE bytes at a time."""
    for part in text.parts:
        content = part()
        for start in range(0, len(content), LEARNING_PIECE):
            yield content[start : start + LEARNING_PIECE]


def training_pieces(source: Source) -> Iterator[str]:
    """The pieces of each text of a source's training split, without bytes that are not UTF-8."""
    for split, text in source.texts():
        if split == "train":
            yield from codecs.iterdecode(cut_up(text), "utf-8", "ignore")


def train_bpe(source: Source, vocabulary: int) -> BpeTokenizer:
    """Learn a tokenizer of `vocabulary` tokens from a source's training split."""
    # The package does not say how far it is
    print(f"learning {vocabulary:,} tokens", file=sys.stderr)
    # In a thread: it would keep Ctrl-C from the one that calls it
    learned = ThreadPoolExecutor(1).submit(learn_ranks, training_pieces(source), vocabulary)
    return tokenizer_of_ranks("bpe", learned.result())


def train_words(source: Source, vocabulary: int) -> PackagedTokenizer:
    """Count a closed vocabulary in a source's training split.

    The most frequent words come first, as adaptive softmax needs them, and equally frequent ones in
    the order of their spelling. <unk> is counted with the words that are left out. White space is
    not kept: every word is spelled with one blank before it, as WikiText's files have it. Raises
    InputError if there are too few different words.
    """
    package = tokenizers_package("--train-words")
    counts = Counter()
    for split, text in source.texts():
        if split == "train":
            content = text.read().decode(errors="ignore")
            counts.update(found[0] for found in re.finditer(WORD, content))

    def by_frequency(word: str) -> tuple[int, str]:
        return -counts[word], word

    words = sorted(counts.keys() - {LINE_END, UNKNOWN}, key=by_frequency)
    check_learned("--train-words", vocabulary, len(words) + 2)
    kept = words[: vocabulary - 2]
    counts[UNKNOWN] += sum(counts[word] for word in words[vocabulary - 2 :])
    ordered = sorted([LINE_END, UNKNOWN, *kept], key=by_frequency)

    ids = {word: number for number, word in enumerate(ordered)}
    model = package.Tokenizer(package.models.WordLevel(ids, UNKNOWN))
    model.pre_tokenizer = package.pre_tokenizers.Split(package.Regex(WORD), "removed", invert=True)
    return PackagedTokenizer("words", model.to_str().encode())


def check_learned(option: str, vocabulary: int, possible: int) -> None:
    """Raise InputError if a vocabulary is larger than what the training split has."""
    if possible < vocabulary:
        raise InputError(
            f"{option} {vocabulary}: the training split has only {possible} different tokens; "
            "give at most that"
        )
