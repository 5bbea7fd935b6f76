"""Text to token ids and back: bytes, byte-level BPE (tiktoken's, a file of ranks, or learned), sentencepiece models, words.

Recordings are read as mu-law bytes.

A rank is a BPE token's id and its place in the order of merges. train.py chooses a tokenizer. It has
    vocabulary      ids are 0 .. vocabulary - 1
    dtype           NumPy's smallest type that holds them
    token_bytes     (V,) number of text bytes that each id stands for
    fingerprint     a hash that changes if an id means something else
    spells_text     whether its tokens stand for text
    encode(text)    str or bytes to an array of ids
    decode(ids)     to the same bytes that were encoded, whatever they are; of sentencepiece and words to the text as normalised
    save(run)       write what the run folder must hold of it, if it has no name
    last_cut(text)  the last position to cut text without changing its tokens; 0 if there is none
"""

import base64
import binascii
import codecs
import difflib
import hashlib
import itertools
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import tiktoken

from accelerated.data.config import ENCODINGS, MU_LAW, PIECES, RANKS, VOCABULARY, DataConfig, is_sentencepiece
from accelerated.data.sources import Source, decoded, naming_all_undecodable
from accelerated.program.errors import InputError, optional_package
from accelerated.program.files import written_whole
from accelerated.program.progress import Progress

ADDRESS = "https://openaipublic.blob.core.windows.net/"  # tiktoken names its cached files by the hash of their addresses
FILES = {  # {encoding: its files} if they are not encodings/NAME.tiktoken
    "gpt2": ("gpt-2/encodings/main/vocab.bpe", "gpt-2/encodings/main/encoder.json"),
    "p50k_edit": ("encodings/p50k_base.tiktoken",),
    "o200k_harmony": ("encodings/o200k_base.tiktoken",),
}
WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""  # GPT-2's; no token crosses them
AFTER_A_WORD = re.compile(r".*[^\W\d_](?=[\s。，、；：？！])", re.DOTALL)  # all ENCODINGS end a piece there
BEFORE_A_WORD = re.compile(rb".*\S(?=[ \n]+\S)", re.DOTALL)
BLANK = "▁"  # in a piece of sentencepiece
NOT_UTF8 = re.compile("([\udc80-\udcff])")  # a byte that is not UTF-8, as errors="surrogateescape" decodes it
LINE_END, UNKNOWN = "\n", "<unk>"  # entries of every closed vocabulary
WORD = re.compile(r"\n|\S+")
LEARNING_PIECE = 1 << 16  # bytes; the package tokenizers takes 256 pieces at a time
LONGEST_PIECE = 8 << 20  # bytes; longer text without a place to cut is cut between any two characters


class ByteTokenizer:
    """Bytes as token ids 0..255."""

    name = fingerprint = "bytes"
    spells_text = True
    vocabulary = 256
    dtype = np.uint8
    token_bytes = np.ones(256, dtype=np.int64)

    def encode(self, text: str | bytes) -> np.ndarray:
        """Convert text to a uint8 array of ids."""
        return np.frombuffer(text.encode() if isinstance(text, str) else text, dtype=np.uint8)

    def decode(self, ids: np.ndarray) -> bytes:
        """Convert ids to bytes."""
        return np.asarray(ids, dtype=np.uint8).tobytes()

    def last_cut(self, text: bytes) -> int:
        """The end of the last whole character."""
        return whole_characters(text)


class MuLawTokenizer(ByteTokenizer):
    """The mu-law values of a recording's samples; program/recordings.py makes them."""

    name = fingerprint = MU_LAW
    spells_text = False

    def last_cut(self, text: bytes) -> int:
        """Its end: samples can be cut anywhere."""
        return len(text)


def whole_characters(text: bytes) -> int:
    """Length of text in bytes, without a UTF-8 character that its end cuts off."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    decoder.decode(text[-4:])
    cut_off, _ = decoder.getstate()
    return len(text) - len(cut_off)


class SpelledTokenizer:
    """Ids that each stand for a spelling. BPE, sentencepiece and words each name their file and have contents()."""

    spells_text = True
    file: str  # in the run folder

    def __init__(self, name: str, spellings: list[bytes], fingerprint: str):
        self.name, self.spellings, self.fingerprint = name, spellings, fingerprint
        self.vocabulary = len(spellings)
        self.dtype = np.uint16 if self.vocabulary <= 1 << 16 else np.uint32
        self.token_bytes = np.array([len(text) for text in spellings])

    def decode(self, ids: np.ndarray) -> bytes:
        """Convert ids to bytes."""
        return b"".join(self.spellings[int(token)] for token in ids)

    def save(self, run: Path) -> None:
        """Write the file to a run folder."""
        with written_whole(Path(run) / self.file, "give another --out") as path:
            path.write_bytes(self.contents())


class BpeTokenizer(SpelledTokenizer):
    """Byte-level BPE by a tiktoken encoding; text never becomes a special token."""

    file = RANKS

    def __init__(self, name: str, encoding: tiktoken.Encoding):
        self.encoding = encoding
        spellings = [self._spelling(token) for token in range(encoding.n_vocab)]
        spelled = hashlib.sha256(b"\0".join(base64.b64encode(text) for text in spellings))
        super().__init__(name, spellings, hashlib.sha256(spelled.digest() + encoding._pat_str.encode()).hexdigest())

    def _spelling(self, token):
        try:
            return self.encoding.decode_single_token_bytes(token)
        except KeyError:  # some encodings leave ids unused before their special tokens
            return b""

    def encode(self, text: str | bytes) -> np.ndarray:
        """Convert text to an array of ids; each byte that is not UTF-8 becomes one token."""
        text = text if isinstance(text, str) else text.decode(errors="surrogateescape")
        ids = [
            np.array([self.encoding.encode_single_token(part.encode(errors="surrogateescape"))])
            if NOT_UTF8.match(part)
            else self.encoding.encode_to_numpy(part, disallowed_special=())
            for part in NOT_UTF8.split(text)
        ]
        return np.concatenate([np.empty(0, np.int64), *ids]).astype(self.dtype)

    def contents(self) -> bytes:
        """A file of ranks."""
        return show_ranks(self.spellings)

    def last_cut(self, text: bytes) -> int:
        """The end of the last whole word: tiktoken always starts a new piece there."""
        known = text[: whole_characters(text)].decode(errors="surrogateescape")
        if ends := AFTER_A_WORD.match(known):
            return len(known[: ends.end()].encode(errors="surrogateescape"))
        return whole_characters(text) if len(text) >= LONGEST_PIECE else 0


def sentencepiece_package() -> ModuleType:
    """The package sentencepiece; raises InputError if it is not installed."""
    return optional_package("sentencepiece", "a .model needs", "pieces")


class SentencePieceTokenizer(SpelledTokenizer):
    """The pieces of a sentencepiece model, such as T5's for PG-19; needs the extra pieces.

    It normalises text as its model says: T5's makes all white space one blank, and has one token for unknown characters.
    """

    file = PIECES

    def __init__(self, name: str, model: bytes):
        package = sentencepiece_package()
        self.model = model
        try:
            self.processor = package.SentencePieceProcessor(model_proto=model)
            tokens = range(len(self.processor))  # an empty file has none, and says so only now
        except RuntimeError:
            raise InputError(f"--tokenizer {name} is damaged or not a sentencepiece model; give another file") from None
        super().__init__(name, [self._spelling(token) for token in tokens], hashlib.sha256(model).hexdigest())
        self.can_be_cut = self._can_be_cut()

    def _can_be_cut(self):
        """Whether tokens stay the same if text is cut before white space."""
        pieces = (self.processor.id_to_piece(token) for token in range(self.vocabulary))
        parts = ("a", " b", "\nc", "  d", "\n\n e")
        apart = [token for part in parts for token in self.encode(part)]
        return not any(BLANK in piece.lstrip(BLANK) for piece in pieces) and self.encode("".join(parts)).tolist() == apart

    def _spelling(self, token):
        piece, model = self.processor.id_to_piece(token), self.processor
        if model.is_byte(token):
            return bytes([int(piece[1:-1], 16)])  # <0xE2>
        if model.is_control(token) or model.is_unused(token):
            return b""
        return "\N{REPLACEMENT CHARACTER}".encode() if model.is_unknown(token) else piece.replace(BLANK, " ").encode()

    def encode(self, text: str | bytes) -> np.ndarray:
        """Convert text to an array of ids; bytes that are not UTF-8 are read as replacement characters."""
        text = text if isinstance(text, str) else text.decode(errors="replace")
        return np.array(self.processor.encode(text), self.dtype)

    def last_cut(self, text: bytes) -> int:
        """The start of the last white space, where the model begins a new piece."""
        found = BEFORE_A_WORD.match(text) if self.can_be_cut else None
        if found:
            return found.end()
        return whole_characters(text) if len(text) >= LONGEST_PIECE else 0

    def contents(self) -> bytes:
        """The model's file."""
        return self.model


class WordTokenizer(SpelledTokenizer):
    """The words of a closed vocabulary: what stands between white space, and each line's end. All other words are <unk>.

    White space is not kept: every word is spelled with one blank before it, as WikiText's files have it.
    """

    file = VOCABULARY

    def __init__(self, name: str, words: list[str]):
        super().__init__(name, [b" " + word.encode() for word in words], hashlib.sha256(show_words(words)).hexdigest())
        self.words, self.ids = words, {word: number for number, word in enumerate(words)}

    def encode(self, text: str | bytes) -> np.ndarray:
        """Convert text to an array of ids; a word with bytes that are not UTF-8 is unknown."""
        text = text if isinstance(text, str) else text.decode(errors="surrogateescape")
        unknown = self.ids[UNKNOWN]
        return np.array([self.ids.get(word, unknown) for word in WORD.findall(text)], self.dtype)

    def contents(self) -> bytes:
        """A vocabulary's file."""
        return show_words(self.words)

    def last_cut(self, text: bytes) -> int:
        """After the last line's end or blank."""
        found = max(text.rfind(b"\n"), text.rfind(b" ")) + 1
        return whole_characters(text) if found == 0 and len(text) >= LONGEST_PIECE else found


def show_words(words: list[str]) -> bytes:
    """The contents of a vocabulary's file: an entry a line, in the order of ids; the line's end is an empty one."""
    return "".join(word.strip(LINE_END) + "\n" for word in words).encode()


def read_words(content: bytes) -> list[str]:
    """The entries of a vocabulary's file; raises ValueError if it is none."""
    words = [line or LINE_END for line in content.decode().split("\n")[:-1]]
    if show_words(words) != content or len(set(words)) < len(words) or not {LINE_END, UNKNOWN} <= set(words):
        raise ValueError
    return words


def show_ranks(tokens: list[bytes]) -> bytes:
    """The contents of a ranks file, for tokens in the order of their ranks."""
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def tokenizer_of_ranks(name: str, ranks: dict[bytes, int]) -> BpeTokenizer:
    """The tokenizer of {token: rank}; it cuts text into words as GPT-2 does."""
    return BpeTokenizer(name, tiktoken.Encoding("ranks", pat_str=WORDS, mergeable_ranks=ranks, special_tokens={}))


def tokenizer_of_file(path: str | Path) -> SpelledTokenizer:
    """The tokenizer of a sentencepiece model, or of a ranks file: each line is a token in base64, a space and its rank."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        nearest = difflib.get_close_matches(str(path), ENCODINGS, n=1, cutoff=0.0)[0]
        raise InputError(
            f"cannot read --tokenizer {path}: {error.strerror}; give a file of ranks or one of {', '.join(ENCODINGS)} "
            f"(nearest: {nearest})"
        ) from None
    if is_sentencepiece(str(path)):
        return SentencePieceTokenizer(str(path), content)
    return tokenizer_of_ranks(str(path), read_ranks(content, f"--tokenizer {path}"))


def read_ranks(text: bytes, name: str) -> dict[bytes, int]:
    """The {token: rank} of a ranks file's contents; raises InputError that begins with the name."""
    ranks = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise InputError(f"{name}, line {number}: not a token in base64 and its rank; give a tiktoken file") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise InputError(f"{name}: the ranks of its {len(ranks)} tokens are not 0..{len(ranks) - 1}, each once")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise InputError(f"{name} has no token for byte {missing[0]}; a byte-level BPE has all 256")
    return ranks


def open_tokenizer(name: str) -> ByteTokenizer | SpelledTokenizer:
    """The tokenizer that --tokenizer names: one of ENCODINGS, or a file."""
    if name in ("bytes", MU_LAW):
        return ByteTokenizer() if name == "bytes" else MuLawTokenizer()
    if name not in ENCODINGS:
        return tokenizer_of_file(name)
    try:
        encoding = tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:
        addresses = [ADDRESS + file for file in FILES.get(name, (f"encodings/{name}.tiktoken",))]
        copies = " and ".join(f"{address} as {hashlib.sha1(address.encode()).hexdigest()}" for address in addresses)
        raise InputError(
            f"--tokenizer {name}: tiktoken cannot fetch its files ({type(error).__name__}); put copies of {copies} in a folder "
            f"and set TIKTOKEN_CACHE_DIR to that folder"
        ) from None
    return BpeTokenizer(name, encoding)


def run_tokenizer(run: Path, data: DataConfig) -> ByteTokenizer | SpelledTokenizer:
    """The tokenizer of a run folder with this DataConfig; raises InputError unless the file is in the form in which it was saved.

    A damaged file that is still in that form has another fingerprint than the run's checkpoint says.
    """
    if not data.tokenizer_file:
        return open_tokenizer(data.tokenizer)
    path = Path(run) / data.tokenizer_file
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; restore it from a copy of the run") from None
    if data.tokenizer_file == PIECES:
        sentencepiece_package()
    damaged = InputError(f"{path} is damaged; restore it from a copy of the run")
    try:
        if data.tokenizer_file == VOCABULARY:
            return WordTokenizer(str(path), read_words(content))
        if data.tokenizer_file == PIECES:
            return SentencePieceTokenizer(str(path), content)
        ranks = read_ranks(content, str(path))
    except (InputError, ValueError):
        raise damaged from None
    if show_ranks(sorted(ranks, key=ranks.get)) != content:
        raise damaged
    return tokenizer_of_ranks(str(path), ranks)


def byte_of_symbol() -> dict[str, int]:
    """Return {character: byte} for the alphabet in which `tokenizers` writes bytes; it is GPT-2's.

    Printable Latin-1 characters stand for their own bytes; characters from 256 on stand for the other bytes, in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def symbols_of(tokens: list[bytes]) -> dict[bytes, str]:
    """{token: how `tokenizers` writes it}."""
    symbols = {byte: symbol for symbol, byte in byte_of_symbol().items()}
    return {token: "".join(symbols[byte] for byte in token) for token in tokens}


def merges_of(tokens: list[bytes]) -> list[tuple[bytes, bytes]]:
    """The two parts that each merged token is made of, in the order of the merges; tokens are in the order of their ranks."""
    ranks, merges = {token: rank for rank, token in enumerate(tokens)}, []
    for token in tokens[256:]:
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:  # as the earlier merges would join them
            joined = [ranks.get(left + right, len(tokens)) for left, right in itertools.pairwise(parts)]
            at = joined.index(min(joined))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        merges.append(tuple(parts))
    return merges


def tokenizers_package() -> ModuleType:
    """The `tokenizers` package; raises InputError if it is not installed."""
    return optional_package("tokenizers", "--train-bpe needs", "bpe")


def learn_ranks(pieces: Iterable[str], vocabulary: int) -> dict[bytes, int]:
    """Learn a byte-level BPE with `vocabulary` tokens from pieces of text; returns {token: rank}.

    The 256 bytes come first, then the merged tokens in the order of their merges. Raises InputError if the text has too few
    different words.
    """
    tokenizers = tokenizers_package()
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    symbols = byte_of_symbol()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=list(symbols), special_tokens=[], show_progress=False
    )
    model.train_from_iterator(pieces, trainer)
    by_id = sorted(model.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(symbols[symbol] for symbol in token) for token, _ in by_id]
    merged = [token for token in tokens if len(token) > 1]
    if 256 + len(merged) < vocabulary:
        raise InputError(
            f"--train-bpe {vocabulary}: the training split has words for only {256 + len(merged)} tokens; give at most that"
        )
    return {token: rank for rank, token in enumerate([bytes([byte]) for byte in range(256)] + merged)}


def in_background(work: Callable[[], Any]) -> Future:
    """Begin work() in a thread that does not keep the program alive; returns its Future.

    A library that computes for minutes keeps Ctrl-C from the thread that called it.
    """
    future = Future()

    def run():
        try:
            future.set_result(work())
        except BaseException as error:  # whoever asks for the result gets it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def train_bpe(source: Source, vocabulary: int) -> BpeTokenizer:
    """Learn a tokenizer of `vocabulary` tokens from a source's training split; all splits are checked to be in their encoding."""
    all_read, title = threading.Event(), f"learning {vocabulary:,} tokens"

    def pieces(bar: Progress) -> Iterator[str]:
        for split, text in source.texts():
            for string, size in decoded(text, LEARNING_PIECE):
                bar.update(size)
                if split == "train":
                    yield string
        all_read.set()

    with Progress(f"{title}: reading", source.size, "B") as bar:
        learned = in_background(lambda: learn_ranks(pieces(bar), vocabulary))
        while not (learned.done() or all_read.is_set()):
            wait([learned], 0.1)
    with Progress(f"{title}: merging") as bar:  # the library does not say how far it is
        bar.bar_format = "{desc}, {elapsed} so far"
        while not learned.done():
            wait([learned], 0.1)
            bar.update(0)
    with naming_all_undecodable(source):
        return tokenizer_of_ranks("bpe", learned.result())


def most_frequent(counts: Counter, vocabulary: int) -> list[str]:
    """The entries of a closed vocabulary, most frequent first, as adaptive softmax needs them; equally frequent ones by spelling.

    <unk> is counted with the words that are left out. Raises InputError if there are too few different words.
    """
    words = sorted(counts.keys() - {LINE_END, UNKNOWN}, key=lambda word: (-counts[word], word))
    if len(words) + 2 < vocabulary:
        raise InputError(
            f"--train-words {vocabulary}: the training split has {len(words)} words, {len(words) + 2} with the line's end and "
            f"{UNKNOWN}; give at most that"
        )
    kept, others = words[: vocabulary - 2], words[vocabulary - 2 :]
    counts = counts + Counter({UNKNOWN: sum(counts[word] for word in others)})
    return sorted([LINE_END, UNKNOWN, *kept], key=lambda word: (-counts[word], word))


def train_words(source: Source, vocabulary: int) -> WordTokenizer:
    """Count a closed vocabulary in a source's training split; all splits are checked to be in their encoding."""
    counts = Counter()
    with Progress(f"counting words for {vocabulary:,} tokens", source.size, "B") as bar, naming_all_undecodable(source):
        for split, text in source.texts():
            cut_off = ""  # the word that a piece's end cuts off
            for string, size in decoded(text, LEARNING_PIECE):
                bar.update(size)
                string = cut_off + string
                end = max(string.rfind(" "), string.rfind("\n")) + 1
                cut_off = string[end:]
                if split == "train":
                    counts.update(WORD.findall(string[:end]))
            if split == "train":
                counts.update(WORD.findall(cut_off))
    return WordTokenizer("words", most_frequent(counts, vocabulary))
