"""HotpotQA's files and RoBERTa's are read as they are published, or refused in one line."""

import dataclasses
import json
import random

import pytest
import torch
from comparison import assert_agree
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data.tokenizers import byte_of_symbol
from accelerated.lab import experiment
from accelerated.lab.systems import published, questions, reader, two_hops
from accelerated.lab.systems.published import load_published, published_config, read_questions
from accelerated.lab.systems.roberta import Roberta
from accelerated.lab.systems.two_hops import Question
from accelerated.program.errors import InputError

MERGES = ["t h", "th e", "Ġ the", "Ġ t", "e r", "1 2", "Ã ©", "Ġ c", "Ġc af", "a f"]
ENTRY = {
    "_id": "5a8b57f25542995d1e6f1371",
    "question": "Were Scott Derrickson and Ed Wood of the same nationality?",
    "answer": "yes",
    "supporting_facts": [["Scott Derrickson", 0], ["Ed Wood", 0]],
    "context": [["Ed Wood", ["Ed Wood is a film.", " It is of 1994."]], ["Scott Derrickson", ["He is an American director."]]],
    "type": "comparison",
    "level": "hard",
}


def written(tmp_path, *entries):
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps(list(entries)))
    return path


def test_a_file_is_read_as_it_is(tmp_path):
    context = (("Ed Wood", ("Ed Wood is a film.", " It is of 1994.")), ("Scott Derrickson", ("He is an American director.",)))
    facts = (("Scott Derrickson", 0), ("Ed Wood", 0))
    assert read_questions(written(tmp_path, ENTRY)) == [Question(ENTRY["question"], context, "yes", facts)]


@pytest.mark.parametrize("field", ["question", "context", "answer", "supporting_facts"])
def test_a_missing_field_is_named(tmp_path, field):
    path = written(tmp_path, ENTRY, {name: value for name, value in ENTRY.items() if name != field})
    with pytest.raises(InputError, match=rf"hotpot\.json is not a file of HotpotQA \(KeyError\('{field}'\)\); give hotpot_train"):
        read_questions(path)


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "hotpot.json"
    with pytest.raises(InputError, match=r"hotpot\.json is not a file of HotpotQA \(FileNotFoundError.*; give hotpot_train_v1"):
        read_questions(path)
    contents = ["[{", "\xff", "3", "[3]", json.dumps([ENTRY | {"context": [["a"]]}]), json.dumps([ENTRY | {"context": 3}])]
    for content in contents:
        path.write_text(content, encoding="latin-1")
        with pytest.raises(InputError, match="is not a file of HotpotQA"):
            read_questions(path)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """A folder with vocab.json and merges.txt as RoBERTa's are: special tokens first and last, the others in any order."""
    path, tokens = tmp_path_factory.mktemp("roberta"), [*byte_of_symbol(), *(merge.replace(" ", "") for merge in MERGES)]
    random.Random(3).shuffle(tokens)
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *tokens, "<mask>"]
    (path / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}), encoding="utf-8")
    (path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n", encoding="utf-8")
    return path


@given(text=st.text(st.sampled_from("the café 12.\n\t'sr漢"), max_size=20))
def test_ids_are_those_of_transformers(vocabulary, text):
    transformers = pytest.importorskip("transformers", reason="needs the package transformers, to compare with")
    theirs = transformers.RobertaTokenizer(str(vocabulary / "vocab.json"), str(vocabulary / "merges.txt"))
    ours = published.tokenizer(vocabulary)
    ids = ours.encode(text)
    assert ids.tolist() == theirs(text, add_special_tokens=False)["input_ids"]
    ends = ours.bpe.token_bytes[ids].cumsum().tolist()
    pieces = [text.encode()[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    assert pieces == [ours.bpe.spellings[number] for number in ids]
    specials = [theirs.convert_tokens_to_ids(name) for name in ("<s>", "<pad>", "</s>", "<mask>")]
    assert [ours.cls, ours.pad, ours.sep, ours.mask] == specials == [0, 1, 2, len(theirs) - 1]


def test_a_folder_without_them_is_refused(tmp_path, vocabulary):
    with pytest.raises(InputError, match=r"cannot read .*vocab\.json: No such file or directory; give a folder with HotpotQA's"):
        published.tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{")
    with pytest.raises(InputError, match=r"vocab\.json cannot be used: .*; give a folder with HotpotQA's"):
        published.tokenizer(tmp_path)


@pytest.fixture
def roberta(tmp_path):
    """(transformers' masked-LM RoBERTa with random weights, the file that it writes, our Config of its sizes)."""
    transformers = pytest.importorskip("transformers", reason="needs the package transformers, to compare with")
    pytest.importorskip("safetensors", reason="needs the extra gpt2: safetensors")
    torch.manual_seed(0)
    sizes = transformers.RobertaConfig(
        vocab_size=40, hidden_size=12, num_hidden_layers=3, num_attention_heads=3, intermediate_size=20,
        max_position_embeddings=18, type_vocab_size=1, initializer_range=0.3, layer_norm_eps=1e-5,
    )  # fmt: skip
    theirs = transformers.RobertaForMaskedLM(sizes).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "bias" in name or "LayerNorm" in name or "layer_norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path)
    config = Roberta.Config(vocabulary=40, width=12, layers=3, heads=3, feed_forward=20, segment=16, module_width=5, dropout=0.0)
    return theirs, tmp_path / "model.safetensors", config


@pytest.mark.parametrize("recurrent", [True, False])
def test_a_published_file_gives_transformers_outputs(roberta, recurrent):
    """A first window's: with recurrence too, because nothing is inserted. Padding stands behind the text."""
    theirs, path, config = roberta
    model = Roberta(dataclasses.replace(config, recurrent=recurrent)).eval()
    load_published(model, path)
    tokens = torch.randint(2, 40, (2, 16))
    readable = torch.ones(2, 16, dtype=torch.bool)
    tokens[1, 11:], readable[1, 11:] = 1, False  # 1 is RoBERTa's padding
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=readable.long(), output_hidden_states=True)
        x, _ = model(tokens, readable, model.initial_state(2))
        logits = model.masked(x, model.embedding)
    rows = {"outputs": expected.hidden_states[-1][readable], "logits": expected.logits[readable]}
    assert_agree(rows, {"outputs": x[readable], "logits": logits[readable]}, 1e-5)


def test_shorter_windows_take_the_first_positions(roberta):
    _, path, config = roberta
    models = [Roberta(dataclasses.replace(config, segment=segment)) for segment in (16, 10)]
    for model in models:
        load_published(model, path)
    assert torch.equal(models[0].positions[:10], models[1].positions)


def test_a_file_of_the_encoder_alone_is_enough(roberta, tmp_path):
    theirs, _, config = roberta
    theirs.roberta.save_pretrained(tmp_path / "encoder")
    model = Roberta(config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    load_published(model, tmp_path / "encoder" / "model.safetensors")
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.split(".")[0] not in ("masked", "answer", "module")}


def test_weights_of_other_sizes_are_refused(roberta, tmp_path):
    _, path, config = roberta
    for changed, file, line in (
        ({}, tmp_path / "nothing", "nothing is not a RoBERTa of these sizes .*; give a folder with HotpotQA's"),
        ({"vocabulary": 41}, path, r"size mismatch for embedding: .*\[40, 12\].*\[41, 12\]"),
        ({"layers": 4}, path, r"\('encoder.layer.3.attention.self.query.weight'\)"),
    ):
        with pytest.raises(InputError, match=f"(?s){line}"):
            load_published(Roberta(dataclasses.replace(config, **changed)), file)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with small files: a RoBERTa as transformers saves it, and questions."""
    transformers = pytest.importorskip("transformers", reason="needs the package transformers, to make a RoBERTa")
    pytest.importorskip("safetensors", reason="needs the extra gpt2: safetensors")
    pytest.importorskip("matplotlib", reason="drawing needs the extra plot: matplotlib")
    monkeypatch.setattr(experiment.torch, "set_num_threads", lambda count: None)  # of this whole process
    sizes = {"vocab_size": 261, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.RobertaConfig(**sizes, max_position_embeddings=42, type_vocab_size=1)
    folder = tmp_path / "published"
    transformers.RobertaForMaskedLM(config).save_pretrained(folder)
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *byte_of_symbol(), "<mask>"]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    for name, count in ((published.TRAIN, 9), (published.DEV, 5)):
        made = [question._asdict() for question in two_hops.drawn(count, ["A line."], 0, (0, 1))]
        if name == published.TRAIN:
            made[0]["answer"] = "not in the text"
        (folder / name).write_text(json.dumps([entry | {"_id": "1", "type": "bridge", "level": "hard"} for entry in made]))
    return folder


def asked(folder):
    """The command line that asks the questions of a folder."""
    return ["--published", str(folder), "--out", str(folder.parent / "out")]


def test_hotpotqas_files_are_read_with_the_papers_settings(folder, tmp_path, monkeypatch):
    settings, fine_tune = [], reader.fine_tune

    def seen(model, some, pad, *how):
        settings.append((model.config.recurrent, len(some), *how[:-1]))
        return fine_tune(model, some, pad, *how)

    monkeypatch.setattr(reader, "fine_tune", seen)
    assert published.PAPERS == {"rate": 2e-5, "epochs": 4, "questions": 30_000, "batch": 32}
    monkeypatch.setattr(published, "PAPERS", published.PAPERS | {"questions": 9, "batch": 4})
    questions.main([*asked(folder), "--seeds", "1"])
    assert settings == [(recurrent, 8, 4 * 8 // 4, 4, 2e-5, 1) for recurrent in (False, True)]
    record = json.loads((tmp_path / "out" / "pretrained_recurrence-3.json").read_text())
    assert {len(run["answers"]) for runs in record["runs"].values() for run in runs.values()} == {5}
    page = (tmp_path / "out" / "pretrained_recurrence-3.md").read_text()
    assert "python -m accelerated.lab.systems.questions --published FOLDER\n" in page and '"epochs": 4' in page


def test_runs_of_other_files_are_not_taken_for_these(folder, monkeypatch):
    monkeypatch.setattr(published, "PAPERS", published.PAPERS | {"questions": 9, "batch": 4, "epochs": 1})
    questions.main([*asked(folder), "--seeds", "0", "--rows", "disjoint"])
    (folder / published.DEV).write_text((folder / published.DEV).read_text() + "\n")
    with pytest.raises(InputError, match="has runs of other settings"):
        questions.main([*asked(folder), "--seeds", "0"])


def test_a_seed_draws_dropout_too(folder, monkeypatch):
    monkeypatch.setattr(published, "PAPERS", published.PAPERS | {"batch": 4, "rate": 0.01})
    task = published.task(folder)
    first, again, other = (questions.trained(task, "recurrent", seed).embedding for seed in (1, 1, 2))
    assert task.model(True, 1).config.dropout > 0 and torch.equal(first, again) and not torch.equal(first, other)


def test_robertas_sizes_are_those_of_its_file(folder):
    assert published_config(folder) == Roberta.Config(261, 8, 2, 2, 8, 40, module_width=8, dropout=0.1)
    path = folder / "config.json"
    given_ = json.loads(path.read_text())
    contents = {json.dumps(given_ | {"model_type": "bert"}): "it is a bert.*; give a folder with HotpotQA's"}
    contents |= {json.dumps(given_ | {"hidden_size": 9}): "width 9 is not a multiple of heads 2"}
    contents |= {json.dumps({**given_, "vocab_size": None}): "", "{": "", "[]": ""}
    for content, line in contents.items():
        path.write_text(content)
        with pytest.raises(InputError, match=rf"config\.json does not describe a RoBERTa \(.*{line}"):
            questions.main(asked(folder))
    path.unlink()
    with pytest.raises(InputError, match="No such file or directory"):
        questions.main(asked(folder))
