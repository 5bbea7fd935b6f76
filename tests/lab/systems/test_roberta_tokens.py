"""RoBERTa's ids are those of transformers' RobertaTokenizer, for a small vocabulary whose ids are in another order."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data.tokenizers import byte_of_symbol, tokenizer_of_ranks
from accelerated.lab.systems.roberta_tokens import SPECIALS, of_bpe, published_tokenizer
from accelerated.program.errors import InputError

MERGES = ["t h", "th e", "Ġ the", "Ġ t", "e r", "1 2", "Ã ©", "Ġ c", "Ġc af", "a f"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with vocab.json and merges.txt as RoBERTa's are: special tokens first and last, the others in any order."""
    path, tokens = tmp_path_factory.mktemp("roberta"), [*byte_of_symbol(), *(merge.replace(" ", "") for merge in MERGES)]
    random.Random(3).shuffle(tokens)
    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", *tokens, "<mask>"]
    (path / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(vocabulary)}), encoding="utf-8")
    (path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def theirs(folder):
    transformers = pytest.importorskip("transformers", reason="needs the package transformers, to compare with")
    return transformers.RobertaTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))


@given(text=st.text(st.sampled_from("the café 12.\n\t'sr漢"), max_size=20))
def test_ids_are_those_of_transformers(folder, theirs, text):
    ours = published_tokenizer(folder)
    ids, ends = ours.ends(text)
    assert ids.tolist() == theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text).tolist()
    spelled = text.encode()
    pieces = [spelled[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    assert b"".join(pieces) == spelled and [ours.encode(p.decode(errors="surrogateescape")).size for p in pieces].count(0) == 0


def test_special_tokens_are_those_of_transformers(folder, theirs):
    ours = published_tokenizer(folder)
    found = [theirs.convert_tokens_to_ids(name) for name in SPECIALS]
    assert [ours.cls, ours.pad, ours.sep, ours.mask] == found == [0, 1, 2, ours.vocabulary - 1]
    assert ours.vocabulary == len(theirs) == 256 + len(MERGES) + 5


def test_files_that_are_not_robertas_are_refused(folder, tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*vocab\.json: No such file or directory; give a folder with RoBERTa's"):
        published_tokenizer(tmp_path)
    merges = (folder / "merges.txt").read_text(encoding="utf-8")
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    for changed, tokens in (
        (merges, {name: number for name, number in vocabulary.items() if name != "the"}), (merges, ["a"]),
        (merges + "t r e\n", vocabulary), (merges + "x 漢\n", vocabulary), (merges, vocabulary | {"<mask>": "last"}),
        (merges, {name: number for name, number in vocabulary.items() if name != "<mask>"}),
    ):  # fmt: skip
        (tmp_path / "merges.txt").write_text(changed, encoding="utf-8")
        (tmp_path / "vocab.json").write_text(json.dumps(tokens), encoding="utf-8")
        with pytest.raises(InputError, match=r"vocab\.json and merges\.txt are not RoBERTa's \(.*\); give a folder with"):
            published_tokenizer(tmp_path)


def test_a_learned_bpe_has_special_tokens_around_it():
    ours = of_bpe(tokenizer_of_ranks("bpe", {bytes([byte]): byte for byte in range(256)} | {b"ab": 256}))
    assert ours.encode("abc").tolist() == [3 + 256, 3 + ord("c")] and ours.vocabulary == 261
    assert (ours.cls, ours.pad, ours.sep, ours.mask) == (0, 1, 2, 260) and len(ours.ids) == 257
