"""Tokenizers: any bytes survive; ranks and the package tokenizers' own are read and saved; BPE is learned; errors are a line."""

import functools
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tiktoken_ext.openai_public
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data import tokenizers as tokenizer
from accelerated.data.config import ENCODINGS, DataConfig
from accelerated.data.sources import source_of_path
from accelerated.data.tokenizers import BpeTokenizer, ByteTokenizer, open_tokenizer, show_ranks, train_bpe
from accelerated.program.errors import InputError
from accelerated.training.options import vocabulary_of
from tests.helpers.texts import small_encoding


@pytest.fixture(scope="module")
def gpt2():
    return BpeTokenizer("small", small_encoding())


@given(text=st.binary(max_size=60))
def test_any_bytes_survive(gpt2, text):
    for tokens in (ByteTokenizer(), gpt2):
        ids = tokens.encode(text)
        assert tokens.decode(ids) == text and tokens.token_bytes[ids].sum() == len(text)


@given(text=st.text(max_size=30))
def test_text_is_its_utf_8(gpt2, text):
    assert gpt2.encode(text).tolist() == gpt2.encode(text.encode()).tolist() == gpt2.encoding.encode_ordinary(text)


def test_gpt2_tokens(gpt2):
    ids = gpt2.encode("the anthem thé")
    assert gpt2.decode(ids) == "the anthem thé".encode() and len(ids) < len("the anthem thé".encode())
    assert ids.dtype == np.uint16 and gpt2.token_bytes[gpt2.encode(" the")].tolist() == [4]
    assert vocabulary_of(DataConfig(tokenizer="gpt2")) == 50257
    assert gpt2.encode("<|endoftext|>").max() < gpt2.encoding.n_vocab - 1, "text is never a special token"


def test_bytes_that_are_not_utf_8_are_tokens_of_their_own(gpt2):
    """Each becomes the token of that byte; the text between them is encoded without them."""
    ids = gpt2.encode(b"the\xff\xfe the\xc3\xa9\xc3").tolist()
    assert ids == [*gpt2.encode("the").tolist(), 255, 254, *gpt2.encode(" the\xe9").tolist(), 0xC3]


@pytest.mark.parametrize("error", [OSError("no network"), ValueError("Hash mismatch"), ConnectionError("refused")])
def test_an_encoding_that_cannot_be_fetched_is_refused_with_advice(monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    with pytest.raises(InputError) as caught:
        open_tokenizer("gpt2")
    message = str(caught.value)
    assert message == (
        f"--tokenizer gpt2: tiktoken cannot fetch its files ({error}); fetch them on a machine with a network, and set "
        "TIKTOKEN_CACHE_DIR to a copy of its folder"
    )


def ranks_of(encoding):
    return {encoding.decode_single_token_bytes(token): token for token in range(encoding.n_vocab - 1)}  # without special


def test_a_ranks_file_is_the_encoding(tmp_path, gpt2):
    path = tmp_path / "small.tiktoken"
    path.write_bytes(show_ranks(list(ranks_of(small_encoding()))))
    assert path.read_bytes().startswith(b"AA== 0\nAQ== 1\n") and path.read_bytes().endswith(b"w6k= 260\n")
    tokens = open_tokenizer(str(path))
    text = "the anthem thé <|endoftext|>".encode()
    assert tokens.encode(text).tolist() == gpt2.encode(text).tolist() and tokens.decode(tokens.encode(text)) == text
    assert tokens.vocabulary == vocabulary_of(DataConfig(tokenizer=str(path))) == 261 and tokens.dtype == np.uint16
    assert tokens.fingerprint == tokenizer.tokenizer_of_ranks("other name", ranks_of(small_encoding())).fingerprint
    swapped = ranks_of(small_encoding()) | {b"th": 258, b" the": 256}
    assert tokens.fingerprint != tokenizer.tokenizer_of_ranks("small", swapped).fingerprint


def test_a_run_keeps_its_ranks(tmp_path, gpt2):
    learned = tokenizer.tokenizer_of_ranks("bpe", ranks_of(small_encoding()))
    learned.save(tmp_path)
    kept = tokenizer.run_tokenizer(tmp_path, DataConfig(train_bpe=261))
    assert kept.fingerprint == learned.fingerprint and kept.spellings == learned.spellings
    assert tokenizer.run_tokenizer(tmp_path, DataConfig()).name == "bytes"
    with pytest.raises(InputError, match=r"cannot write .*; give another --out"):
        learned.save(tmp_path / "nowhere")


def test_a_flipped_bit_of_a_runs_ranks_is_noticed(tmp_path):
    """By the file's form, or else by the fingerprint, which a checkpoint keeps."""
    learned = tokenizer.tokenizer_of_ranks("bpe", ranks_of(small_encoding()))
    learned.save(tmp_path)
    path, run = tmp_path / tokenizer.RANKS, DataConfig(train_bpe=261)
    right, rng = path.read_bytes(), random.Random(0)
    for bit in (0, 8 * len(right) - 1, *(rng.randrange(8 * len(right)) for _ in range(100))):
        content = bytearray(right)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        try:
            assert tokenizer.run_tokenizer(tmp_path, run).fingerprint != learned.fingerprint, bit
        except InputError as error:
            assert str(error).startswith(str(path)) and str(error).endswith("restore it from a copy of the run")


def test_a_runs_ranks_have_one_form(tmp_path):
    """A file that --tokenizer names may have any that tiktoken reads."""
    lines = show_ranks(list(ranks_of(small_encoding()))).splitlines(keepends=True)
    for other in (b"".join(reversed(lines)), b"".join(lines) + b"\n", b"".join(lines)[:-1], b"".join(lines).replace(b" ", b"  ")):
        (tmp_path / tokenizer.RANKS).write_bytes(other)
        assert open_tokenizer(str(tmp_path / tokenizer.RANKS)).vocabulary == 261
        with pytest.raises(InputError, match="is not as it was written; it is damaged or missing; restore it"):
            tokenizer.run_tokenizer(tmp_path, DataConfig(train_bpe=261))
    with pytest.raises(InputError, match=r"cannot read .*nowhere.*No such file.*; restore it from a copy of the run"):
        tokenizer.run_tokenizer(tmp_path / "nowhere", DataConfig(train_bpe=261))


NO_LIST, GAPS = "it is no list of tokens in base64, each with its rank", "its tokens lack .* or their ranks are not 0, 1, 2"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        *((line, NO_LIST) for line in (b"<html>", b"eHl6 2 3", b"eHl6 five", b"!! 261")),
        *((line, GAPS) for line in (b"eHl6 300", b"eHl6 5", b"dGg= 261")),
    ],
)
def test_other_files_than_ranks_are_refused(tmp_path, line, words):
    """The last ones have a gap, a rank twice, and a token twice."""
    path = tmp_path / "ranks"
    path.write_bytes(show_ranks(list(ranks_of(small_encoding()))) + line + b"\n")
    with pytest.raises(
        InputError, match=f"cannot be used: {words}.*; give a file of tiktoken ranks, a tokenizer.json, or one of bytes"
    ) as caught:
        open_tokenizer(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_ranks_need_every_byte(tmp_path):
    ranks = ranks_of(small_encoding())
    without = [token for token in ranks if token != b"\x80"]
    (tmp_path / "ranks").write_bytes(show_ranks(without))
    with pytest.raises(InputError, match="its tokens lack one of the 256 bytes"):
        open_tokenizer(str(tmp_path / "ranks"))
    with pytest.raises(InputError, match=r"cannot read cl100k: No such file .*; give a file .* or one of bytes, mu-law, gpt2, "):
        open_tokenizer("cl100k")
    with pytest.raises(InputError, match=r"cannot read .*: Is a directory; give a file "):
        open_tokenizer("")


def test_encodings_have_as_many_ids_as_our_table_says():
    """The vocabulary must be known before anything is fetched; tiktoken 0.14's own counts."""
    for name, constructor in tiktoken_ext.openai_public.ENCODING_CONSTRUCTORS.items():
        if name in ENCODINGS:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tiktoken_ext.openai_public, "load_tiktoken_bpe", lambda *a, **k: {})
                patch.setattr(tiktoken_ext.openai_public, "data_gym_to_mergeable_bpe_ranks", lambda *a, **k: {})
                described = constructor()
            special = max(described["special_tokens"].values())
            assert ENCODINGS[name] == described.get("explicit_n_vocab", special + 1), name
    assert ENCODINGS.keys() - {"bytes", "mu-law"} == tiktoken_ext.openai_public.ENCODING_CONSTRUCTORS.keys()


def test_text_is_cut_after_a_word(gpt2):
    assert gpt2.last_cut(b"1234 " * 7) == 0 and gpt2.last_cut("é1".encode() * 20) == 0
    assert gpt2.last_cut(b"ab cd ef") == 5 and gpt2.last_cut("中文。字1".encode()) == 6
    assert gpt2.last_cut("ab cdé e".encode() + "é".encode()[:1]) == 7, "the last character is cut off"
    assert gpt2.last_cut(b"a \xff\xff b c\xff") == 6, "bytes that are not UTF-8 count as one byte each"
    assert ByteTokenizer().last_cut("aé".encode()[:-1]) == 2 and ByteTokenizer("mu-law").spells_text is False


def test_a_bpe_is_learned(tmp_path):
    pytest.importorskip("tokenizers", reason="learning needs the extra bpe: tokenizers")
    (tmp_path / "a.txt").write_bytes("the anthem of the hour, thé; ".encode() * 99)
    source = source_of_path(DataConfig(str(tmp_path / "a.txt")))
    learned = train_bpe(source, 262)
    assert learned.vocabulary == 262 and learned.spellings[:256] == [bytes([byte]) for byte in range(256)]
    assert b"th" in learned.spellings[256:259] and all(len(text) > 1 for text in learned.spellings[256:])
    for text in ("the thé, the hour".encode(), bytes(range(256)) * 2, b"", "中\u0000".encode()):
        assert learned.decode(learned.encode(text)) == text
    assert len(learned.encode("the hour")) < 7
    assert train_bpe(source, 262).fingerprint == learned.fingerprint
    with pytest.raises(InputError, match=r"the training split has words for only 2.. tokens; give at most that"):
        train_bpe(source, 999)


@given(text=st.binary(max_size=60))
def test_any_bytes_survive_learned_tokens(text):
    pytest.importorskip("tokenizers", reason="learning needs the extra bpe: tokenizers")
    ranks = tokenizer.learn_ranks(["the anthem of the hour, thé; " * 9, "\x00\x01é" * 9], 270)
    learned = tokenizer.tokenizer_of_ranks("bpe", ranks)
    ids = learned.encode(text)
    assert learned.decode(ids) == text and learned.token_bytes[ids].sum() == len(text)


def test_only_the_training_split_is_learned_from(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers", reason="learning needs the extra bpe: tokenizers")
    (tmp_path / "a.txt").write_text("aaaa bbbb " * 900 + "zqzqzq " * 100)
    pieces, learn = [], tokenizer.learn_ranks
    monkeypatch.setattr(tokenizer, "learn_ranks", lambda some, size: learn(pieces.append(list(some)) or pieces[0], size))
    train_bpe(source_of_path(DataConfig(str(tmp_path / "a.txt"))), 257)
    assert "".join(pieces[0]).encode() == (tmp_path / "a.txt").read_bytes()[: 9700 * 90 // 100]


def test_the_bytes_alphabet_is_that_of_tokenizers():
    tokenizers = pytest.importorskip("tokenizers", reason="learning needs the extra bpe: tokenizers")
    symbols = tokenizer.byte_of_symbol()
    assert set(symbols) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) and sorted(symbols.values()) == list(range(256))
    text = "aé \n\x00\xadz"
    [(written, _)] = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assert bytes(symbols[symbol] for symbol in written) == text.encode()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match="--train-bpe needs the package tokenizers; install the extra"):
        tokenizer.tokenizers_package()
    with pytest.raises(InputError, match=r"a tokenizer.json needs the package tokenizers; install the extra"):
        tokenizer.PackagedTokenizer("some", b"{}")


# Tokenizers of the package tokenizers

TEXT = Path(tokenizer.__file__).read_bytes()[:3000]


@functools.cache
def packaged(kind):
    """The contents of a tokenizer.json of each kind, learned from a source file of ours."""
    package = pytest.importorskip("tokenizers", reason="needs the extra bpe: tokenizers")
    models, before, trainers = package.models, package.pre_tokenizers, package.trainers
    made = {
        "bytes": (models.BPE(), before.ByteLevel(add_prefix_space=False), trainers.BpeTrainer),
        "like T5": (models.Unigram(), before.Sequence([before.WhitespaceSplit(), before.Metaspace()]), trainers.UnigramTrainer),
        "like Llama": (models.BPE(byte_fallback=True), before.Metaspace(), trainers.BpeTrainer),
        "across words": (models.BPE(), None, trainers.BpeTrainer),
        "like BERT": (models.WordPiece(unk_token="[UNK]"), before.BertPreTokenizer(), trainers.WordPieceTrainer),
    }
    model, splitter, trainer = made[kind]
    made = package.Tokenizer(model)
    if splitter:
        made.pre_tokenizer = splitter
    special = {"like BERT": ["[UNK]", "[CLS]"], "like T5": ["<unk>", "</s>"]}.get(kind, ["<|end|>"])
    options = {"unk_token": "<unk>"} if kind == "like T5" else {}
    if kind == "bytes":
        options["initial_alphabet"] = before.ByteLevel.alphabet()
        made.decoder = package.decoders.ByteLevel()
    if kind == "like Llama":
        special += [f"<0x{byte:02X}>" for byte in range(256)]
    made.train_from_iterator(
        TEXT.decode().splitlines(keepends=True), trainer(vocab_size=700, special_tokens=special, show_progress=False, **options)
    )
    if kind == "bytes":
        made.post_processor = package.processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
        made.enable_truncation(5)
    return made.to_str(pretty=kind == "bytes").encode()


def model_of(kind):
    return tokenizer.PackagedTokenizer("some.json", packaged(kind))


@given(text=st.text(max_size=40))
def test_a_packaged_tokenizer_of_bytes_keeps_all_text(text):
    """It adds no token, truncates nothing, and text never becomes a special token."""
    model, text = model_of("bytes"), text + "def f(x):<|end|> é"
    ids = model.encode(text)
    assert model.decode(ids) == text.encode() and model.token_bytes[ids].sum() == len(text.encode())
    assert ids.tolist() == model.encode(text.encode()).tolist() and 0 not in ids and ids.dtype == np.uint16


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("like T5", b" def f(x): return x"), ("like BERT", b" def f ( x ) : return x"), ("like Llama", b" def f(x):\n return  x")],
)
def test_other_tokenizers_spell_the_text_as_they_normalise_it(kind, expected):
    model = model_of(kind)
    assert model.decode(model.encode("def f(x):\n return  x")) == expected
    assert model.token_bytes.tolist() == [len(text) for text in model.spellings]


def test_a_tokenizer_whose_file_leaves_out_the_models_type_is_spelled_the_same():
    """As older ones that are published, such as BERT's."""
    described = json.loads(packaged("like BERT"))
    del described["model"]["type"]
    assert tokenizer.PackagedTokenizer("older.json", json.dumps(described).encode()).spellings == model_of("like BERT").spellings


def test_bytes_without_a_token_of_their_own_are_spelled():
    model = model_of("like Llama")
    assert model.decode(model.encode("é漢")).endswith("é漢".encode()) and model.vocabulary == 700


@pytest.mark.parametrize(
    ("kind", "cut"), [("bytes", True), ("like T5", True), ("like BERT", True), ("like Llama", False), ("across words", False)]
)
def test_text_is_cut_only_where_tokens_begin(kind, cut):
    model = model_of(kind)
    cuts = {at: model.last_cut(TEXT[:at]) for at in range(100, 3000, 7)}
    assert any(cuts.values()) == cut and all(end < at for at, end in cuts.items())
    for end in set(cuts.values()):
        assert [*model.encode(TEXT[:end]), *model.encode(TEXT[end:])] == model.encode(TEXT).tolist()


def test_a_run_keeps_its_packaged_tokenizer(tmp_path):
    path, run = tmp_path / "some.json", tmp_path / "run"
    path.write_bytes(packaged("bytes"))
    run.mkdir()
    data, opened = DataConfig(tokenizer=str(path)), open_tokenizer(str(path))
    assert vocabulary_of(data) == opened.vocabulary == 700 and opened.fingerprint != model_of("like T5").fingerprint
    opened.save(run)
    path.unlink()
    kept, rng = tokenizer.run_tokenizer(run, data), random.Random(0)
    assert kept.fingerprint == opened.fingerprint and data.tokenizer_file == "tokenizer.json"
    assert kept.encode(TEXT).tolist() == opened.encode(TEXT).tolist()
    for _ in range(30):
        content = bytearray(packaged("bytes"))
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        (run / "tokenizer.json").write_bytes(content)
        try:
            assert tokenizer.run_tokenizer(run, data).fingerprint != opened.fingerprint
        except InputError as error:
            assert str(error).endswith("it is damaged or missing; restore it from a copy of the run")


def test_a_folder_with_vocabulary_and_merges_is_a_tokenizer(tmp_path):
    """As GPT-2 and RoBERTa are published."""
    described = json.loads(packaged("bytes"))["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(described["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in described["merges"]) + "\n")
    data = DataConfig(tokenizer=str(tmp_path))
    assert data.tokenizer == str(tmp_path / "vocab.json") and data.tokenizer_file == "tokenizer.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path.parent)
        assert DataConfig(tokenizer=tmp_path.name).tokenizer == f"{tmp_path.name}/vocab.json"
        patch.setitem(ENCODINGS, tmp_path.name, 9)
        assert DataConfig(tokenizer=tmp_path.name).tokenizer == tmp_path.name, "it may be named as an encoding"
    opened = open_tokenizer(data.tokenizer)
    assert opened.encode(TEXT).tolist() == model_of("bytes").encode(TEXT).tolist()
    (tmp_path / "run").mkdir()
    opened.save(tmp_path / "run")
    assert tokenizer.run_tokenizer(tmp_path / "run", data).fingerprint == opened.fingerprint


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"model": 3}', b"\xff", json.dumps({"version": "1.0", "model": {"type": "x"}}).encode()]
)
def test_what_is_no_tokenizer_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(
        InputError, match=r"a\.json cannot be used: .*; give a file of tiktoken ranks, a tokenizer\.json, or"
    ) as caught:
        open_tokenizer(str(tmp_path / "a.json"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("vocabulary,merges", [('{"a": 0}', "a b c d"), ("[]", "a b"), ("{", "")])
def test_a_damaged_vocab_json_or_merges_txt_is_one_line(tmp_path, vocabulary, merges):
    pytest.importorskip("tokenizers", reason="needs the extra bpe")
    (tmp_path / "vocab.json").write_text(vocabulary)
    (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(InputError, match=r"vocab\.json cannot be used: "):
        open_tokenizer(str(tmp_path / "vocab.json"))
