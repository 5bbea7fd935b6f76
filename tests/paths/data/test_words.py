"""Closed vocabularies of words: counted in the training split, most frequent first, kept by a run; what is spelled."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data import tokenizers
from accelerated.data.config import VOCABULARY, DataConfig
from accelerated.data.sources import source_of_path
from accelerated.data.tokenizers import WordTokenizer, most_frequent, read_words, run_tokenizer, train_words
from accelerated.program.errors import InputError
from accelerated.training.options import vocabulary_of

WIKITEXT = " \n = The Title = \n \n The cat <unk> the é cat . \n The dog @-@ sat . \n"
TEXTS = st.text(alphabet="ab é<\n\t\xa0", max_size=40)


def of_text(text, vocabulary):
    return WordTokenizer("words", most_frequent(Counter(tokenizers.WORD.findall(text)), vocabulary))


@given(TEXTS, st.integers(2, 9))
def test_a_text_is_its_words_and_line_ends(text, size):
    """Each word of the vocabulary is one id, all others are <unk>; nothing else is lost but the kind of white space."""
    words = {word for line in text.split("\n") for word in line.split()} - {"<unk>"}
    learned = of_text(text, min(size, len(words) + 2))
    expected = [part for line in text.split("\n") for part in (*line.split(), "\n")][:-1]
    shown = [part if part in learned.ids else "<unk>" for part in expected]
    ids = learned.encode(text)
    assert [learned.words[i] for i in ids] == shown and learned.encode(text.encode()).tolist() == ids.tolist()
    assert learned.decode(ids).decode() == "".join(" " + part for part in shown)
    assert learned.token_bytes[ids].sum() == len(learned.decode(ids))


def test_wikitexts_form_is_kept():
    learned = of_text(WIKITEXT, 12)
    assert learned.decode(learned.encode(WIKITEXT)).decode() == WIKITEXT


@given(TEXTS, st.integers(2, 9))
def test_ids_are_in_the_order_of_frequency(text, size):
    """As adaptive softmax needs them. <unk> is counted with what it stands for, equally frequent words are in order."""
    words = {word for line in text.split("\n") for word in line.split()} - {"<unk>"}
    learned = of_text(text, min(size, len(words) + 2))
    counts = Counter(learned.encode(text).tolist())
    order = [(-counts[i], word) for i, word in enumerate(learned.words)]
    assert order == sorted(order) and {"\n", "<unk>"} <= set(learned.words)


@given(TEXTS.filter(bool), st.data())
def test_text_may_be_cut_where_it_says(text, data):
    learned, content = of_text("a b\nab", 4), text.encode()
    content = content[: data.draw(st.integers(0, len(content)))]
    at = learned.last_cut(content)
    cut = [*learned.encode(content[:at]), *learned.encode(content[at:])]
    assert cut == learned.encode(content).tolist() and (at or not set(content) & set(b" \n"))


@pytest.mark.parametrize("piece", [1, 3, 1 << 16])
def test_only_the_training_split_is_counted(tmp_path, monkeypatch, piece):
    """In pieces of any size: no word is cut."""
    monkeypatch.setattr(tokenizers, "LEARNING_PIECE", piece)
    for split, text in (("train", "seven seven eight\nnine"), ("valid", "ten ten ten eleven"), ("test", "two two")):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.txt").write_text(text)
    learned = train_words(source_of_path(DataConfig(str(tmp_path))), 4)
    assert learned.words == ["seven", "\n", "<unk>", "eight"], "<unk> stands for nine"
    assert vocabulary_of(DataConfig(train_words=4)) == learned.vocabulary == 4
    assert train_words(source_of_path(DataConfig(str(tmp_path))), 5).words == ["seven", "\n", "eight", "nine", "<unk>"]
    with pytest.raises(InputError, match=r"--train-words 6: the training split has 3 words, 5 with .*; give at most that"):
        train_words(source_of_path(DataConfig(str(tmp_path))), 6)


def test_a_run_keeps_its_vocabulary(tmp_path):
    data, learned = DataConfig(train_words=12), of_text(WIKITEXT, 12)
    learned.save(tmp_path)
    path = tmp_path / data.tokenizer_file
    kept, content, rng = run_tokenizer(tmp_path, data), path.read_bytes(), random.Random(0)
    assert kept.fingerprint == learned.fingerprint and kept.words == learned.words and path.name == "tokenizer.words"
    assert tokenizers.open_tokenizer(str(path)).fingerprint == learned.fingerprint
    assert DataConfig(tokenizer=str(path)).tokenizer_file == "tokenizer.words"
    for _ in range(40):
        damaged = bytearray(content)
        damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            assert run_tokenizer(tmp_path, data).fingerprint != learned.fingerprint
        except InputError as error:
            assert str(error).endswith("it is damaged or missing; restore it from a copy of the run")


@pytest.mark.parametrize("content", [b"a\n\n", b"<unk>\na\n", b"\n<unk>\na\na\n", b"\xff\n\n<unk>\n"])
def test_what_is_no_vocabulary_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.words").write_bytes(content)
    with pytest.raises(InputError, match=r"cannot be used: .*; it is damaged or missing; restore it from a copy of the run"):
        run_tokenizer(tmp_path, DataConfig(train_words=3))


def test_three_entries_are_the_least():
    with pytest.raises(ValueError, match="train_words is 2; it must be 0 or at least 3"):
        DataConfig(train_words=2)


def test_the_vocabulary_of_wikitext_103_is_learned_and_read_again(tmp_path):
    """267,735 entries: of 32-bit ids, whose file gives the same tokenizer."""
    words = " ".join([*(f"w{number}" for number in range(267_733)), "w7", "w7", "w9"])
    for split, text in (("train", words + "\n"), ("valid", "seven"), ("test", "eight")):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.txt").write_text(text)
    learned = train_words(source_of_path(DataConfig(str(tmp_path))), 267_735)
    assert learned.vocabulary == 267_735 and learned.words[:3] == ["w7", "w9", "\n"] and learned.dtype == np.uint32
    ids = learned.encode("w266000 nobody w7\n")
    assert learned.decode(ids) == b" w266000 <unk> w7 \n" and ids[0] > 1 << 16
    learned.save(tmp_path)
    assert read_words((tmp_path / VOCABULARY).read_bytes()) == learned.words
