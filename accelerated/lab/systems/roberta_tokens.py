"""RoBERTa's tokens: GPT-2's byte-level BPE under ids of its own, with <s>, <pad>, </s> and <mask>; reader.py reads by them."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from accelerated.data.tokenizers import BpeTokenizer, byte_of_symbol, tokenizer_of_ranks
from accelerated.program.errors import InputError

SPECIALS = ("<s>", "<pad>", "</s>", "<mask>")  # [CLS], padding, [SEP], a masked token


class RobertaTokenizer(NamedTuple):
    """A byte-level BPE whose rank r has the id ids[r]."""

    bpe: BpeTokenizer
    ids: np.ndarray  # (ranks,)
    vocabulary: int  # ids are below it
    cls: int
    pad: int
    sep: int
    mask: int

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text."""
        return self.ids[self.bpe.encode(text)]

    def ends(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """(ids, where each token ends in the text's UTF-8 bytes), both (tokens,)."""
        ranks = self.bpe.encode(text)
        return self.ids[ranks], self.bpe.token_bytes[ranks].cumsum()


def of_bpe(bpe: BpeTokenizer) -> RobertaTokenizer:
    """The tokenizer of a BPE that was learned here: special tokens first, as in RoBERTa's vocabulary, and <mask> last."""
    count = bpe.vocabulary
    return RobertaTokenizer(bpe, np.arange(3, 3 + count), count + 4, cls=0, pad=1, sep=2, mask=count + 3)


def published_tokenizer(folder: Path) -> RobertaTokenizer:
    """The tokenizer of a folder with RoBERTa's vocab.json and merges.txt; raises InputError if they are not such files.

    merges.txt gives the order of merges, as for GPT-2; the ids in vocab.json are in another order.
    """
    paths = Path(folder) / "vocab.json", Path(folder) / "merges.txt"
    advice = "give a folder with RoBERTa's model.safetensors, config.json, vocab.json and merges.txt"
    try:
        vocabulary, merges = json.loads(paths[0].read_bytes()), paths[1].read_text(encoding="utf-8").split("\n")
        symbols = byte_of_symbol()
        pairs = [line.split(" ") for line in merges if line and not line.startswith("#version")]
        written = [*symbols, *(left + right for left, right in pairs)]
        ranks = {bytes(symbols[symbol] for symbol in token): rank for rank, token in enumerate(written)}
        ids = np.array([vocabulary[token] for token in written])
        specials, count = [vocabulary[name] for name in SPECIALS], 1 + max(vocabulary.values())
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}; {advice}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{paths[0]} and {paths[1].name} are not RoBERTa's ({error!r}); {advice}") from None
    cls, pad, sep, mask = specials
    return RobertaTokenizer(tokenizer_of_ranks(str(folder), ranks), ids, count, cls, pad, sep, mask)
