"""The command of Table 3 tunes on seed 0 alone, continues, reads HotpotQA's files, and says what came out."""

import json
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch

from accelerated.data.tokenizers import byte_of_symbol, tokenizer_of_ranks
from accelerated.lab import experiment
from accelerated.lab.systems import question_runs as questions
from accelerated.lab.systems import reader, two_hops
from accelerated.lab.systems.roberta import Roberta
from accelerated.lab.systems.roberta_tokens import of_bpe
from accelerated.program.errors import InputError

RESULTS = Path(__file__).parents[2] / "docs" / "results"
TOKENIZER = of_bpe(tokenizer_of_ranks("bpe", {bytes([byte]): byte for byte in range(256)}))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setattr(experiment.torch, "set_num_threads", lambda count: None)  # of this whole process
    pytest.importorskip("matplotlib", reason="drawing needs the extra plot: matplotlib")


@pytest.fixture
def asked(monkeypatch):
    """Models that are trained at once: recurrent ones are always right, disjoint ones near hops at rate 0.002."""
    calls, given = [], [reader.cut(question, TOKENIZER, 40) for question in two_hops.drawn(60, ["A line."], 0)]

    def trained(task, row, seed, rate):
        calls.append((row, seed, rate))
        return row, rate

    def answered(task, model, asked):
        row, rate = model
        distances = [int(example.question.name) % 4 for example in asked]
        rows = [[d, example.question.answer not in ("yes", "no"), int(row == "recurrent" or (d == 0 and rate == 0.002))]
                for d, example in zip(distances, asked, strict=True)]  # fmt: skip
        score = 100 * statistics.mean(right for _, _, right in rows)
        return {"f1": score + 1, "exact match": score}, rows

    task = questions.Task(None, 0, [], {"valid": given[:20], "test": given}, 4, (0.001, 0.002))
    monkeypatch.setattr(questions, "trained", trained)
    monkeypatch.setattr(questions, "answered", answered)
    monkeypatch.setattr(questions, "generated", lambda: task)
    return calls


def test_seed_0_chooses_the_rate_and_the_page_says_what_came_out(asked, tmp_path, capsys):
    questions.main(["--seeds", "0", "--out", str(tmp_path)])
    questions.main(["--out", str(tmp_path)])
    tuning = [(row, 0, rate) for row in ("disjoint", "recurrent") for rate in (0.001, 0.002)]
    later = [(row, seed, rate) for seed in (1, 2) for row, rate in (("disjoint", 0.002), ("recurrent", 0.001))]
    assert asked == tuning + later, "a tie goes to the earlier rate"
    page = (tmp_path / "pretrained_recurrence-3.md").read_text()
    assert "| disjoint | 0, 1, 2 | 26.0 | 25.0 | 100 | 0 |" in page
    assert "| recurrent | 0, 1, 2 | 101.0 | 100.0 | 100 | 100 | 100 |" in page
    assert "of disjoint is 0.002. Exact match on validation in seed 0: 0.0 at rate 0.001, 25.0 at rate 0.002." in page.replace(
        "\n", " "
    )
    assert max(map(len, page.splitlines())) <= 120 and "](pretrained_recurrence-3.svg)" in page
    assert (tmp_path / "pretrained_recurrence-3.svg").read_text().startswith("<?xml")
    assert "recurrent, seed 2: F1 101.0, exact match 100.0, rate 0.001" in capsys.readouterr().out


def test_input_that_cannot_work_is_one_line(asked, tmp_path):
    for words, line in (
        (["--seeds", "1"], r"3\.json has no rate for disjoint, which seed 0 chooses; train seed 0 first"),
        (["--rows", "both"], "--rows is 'both'; it must be one of disjoint, recurrent"),
        (["--train", "a", "--dev", "b"], "--train is one of --train, --dev and --roberta; give all three, or none"),
        (["--roberta", "b"], "--roberta is one of"),
    ):
        with pytest.raises(InputError, match=line):
            questions.main([*words, "--out", str(tmp_path)])
    assert not asked and not list(tmp_path.glob("*.md"))


def test_both_rows_begin_with_the_same_pretrained_weights(monkeypatch, tmp_path):
    monkeypatch.setattr(questions, "SIZES", questions.SIZES | {"width": 8, "heads": 2, "segment": 8, "module_width": 8})
    monkeypatch.setattr(questions, "PRETRAINING", reader.Training(2, 2, 0.01))
    fresh = questions.small_model(False, 0, TOKENIZER.vocabulary)
    deviation = fresh.layers[0].query.std().item()
    assert 0.8 < deviation / (0.02 * (768 / 8) ** 0.5) < 1.2 and 0.018 < fresh.positions.square().mean().sqrt() < 0.022
    weights = questions.pretrained(TOKENIZER, np.arange(99) % 7)
    assert any(not torch.equal(value, fresh.state_dict()[name]) for name, value in weights.items())
    for recurrent in (False, True):
        model = questions.loaded(weights, recurrent, 5, TOKENIZER.vocabulary)
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items() if name in weights)
        assert {name.split(".")[0] for name in model.state_dict().keys() - weights.keys()} == ({"module"} if recurrent else set())
    modules = [questions.loaded(weights, True, seed, TOKENIZER.vocabulary).module.inserted for seed in (1, 1, 2)]
    assert torch.equal(modules[0], modules[1]) and not torch.equal(modules[0], modules[2])


@pytest.fixture
def hotpotqa(tmp_path):
    """Options that name small files: a RoBERTa as transformers saves it, and questions."""
    transformers = pytest.importorskip("transformers", reason="needs the package transformers, to make a RoBERTa")
    pytest.importorskip("safetensors", reason="needs the extra gpt2: safetensors")
    sizes = transformers.RobertaConfig(
        vocab_size=261, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=42, type_vocab_size=1,
    )  # fmt: skip
    transformers.RobertaForMaskedLM(sizes).save_pretrained(tmp_path / "roberta")
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *byte_of_symbol(), "<mask>"]
    (tmp_path / "roberta" / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (tmp_path / "roberta" / "merges.txt").write_text("#version: 0.2\n")
    for split, count in (("train", 9), ("dev", 5)):
        made = [{"_id": question.name} | question._asdict() for question in two_hops.drawn(count, ["A line."], 0, (0, 1))]
        if split == "train":
            made[0]["answer"] = "not in the text"
        (tmp_path / f"{split}.json").write_text(json.dumps([entry | {"type": "bridge", "level": "hard"} for entry in made]))
    names = [str(tmp_path / name) for name in ("train.json", "dev.json", "roberta")]
    return ["--train", names[0], "--dev", names[1], "--roberta", names[2], "--out", str(tmp_path / "out")]


def test_hotpotqas_files_are_read_with_the_papers_settings(hotpotqa, tmp_path, monkeypatch):
    settings, fine_tune = [], reader.fine_tune

    def seen(model, some, pad, training, seed):
        settings.append((model.config.recurrent, len(some), training, seed))
        return fine_tune(model, some, pad, training, seed)

    monkeypatch.setattr(reader, "fine_tune", seen)
    monkeypatch.setattr(questions, "PAPERS", questions.PAPERS | {"questions": 9, "batch": 4})
    questions.main([*hotpotqa, "--seeds", "1"])
    assert settings == [(recurrent, 8, reader.Training(4 * 8 // 4, 4, 2e-5), 1) for recurrent in (False, True)]
    record = json.loads((tmp_path / "out" / "hotpotqa.json").read_text())
    assert {len(run["answers"]) for own in record["runs"].values() for run in own.values()} == {5}
    page = (tmp_path / "out" / "hotpotqa.md").read_text()
    assert "on 8 questions of HotpotQA, and asked 5." in page and "--train FILE --dev FILE --roberta FOLDER" in page
    assert "](hotpotqa.svg)" in page and questions.PAPERS["rate"] == 2e-5 and questions.PAPERS["epochs"] == 4


def test_runs_of_other_files_are_not_taken_for_these(hotpotqa, tmp_path, monkeypatch):
    monkeypatch.setattr(questions, "PAPERS", questions.PAPERS | {"questions": 9, "batch": 4, "epochs": 1})
    questions.main([*hotpotqa, "--seeds", "0", "--rows", "disjoint"])
    (tmp_path / "dev.json").write_text((tmp_path / "dev.json").read_text() + "\n")
    with pytest.raises(InputError, match="has runs of other settings"):
        questions.main([*hotpotqa, "--seeds", "0"])


def test_a_seed_draws_dropout_too(hotpotqa, tmp_path):
    task = questions.hotpotqa(tmp_path / "train.json", tmp_path / "dev.json", tmp_path / "roberta", torch.device("cpu"))
    first, again, other = (questions.trained(task, "recurrent", seed, 0.01).embedding for seed in (1, 1, 2))
    assert task.model(True, 1).config.dropout > 0 and torch.equal(first, again) and not torch.equal(first, other)


def test_a_device_that_is_not_there_is_one_line(hotpotqa, capsys):
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="--device cuda: torch finds no GPU here; use --device cpu or auto"):
            questions.main([*hotpotqa, "--device", "cuda"])
    with pytest.raises(SystemExit):
        questions.main([*hotpotqa, "--device", "gpu"])
    assert capsys.readouterr().err.count("\n") == 1


def test_robertas_sizes_are_those_of_its_file(hotpotqa, tmp_path):
    from accelerated.lab.systems.roberta import published_config

    config = published_config(tmp_path / "roberta")
    assert config == Roberta.Config(261, 8, 2, 2, 8, 40, module_width=8, dropout=0.1)
    path = tmp_path / "roberta" / "config.json"
    given = json.loads(path.read_text())
    for content, line in (
        (json.dumps(given | {"model_type": "bert"}), "config.json is of a bert; give a folder with RoBERTa's model.safetensors"),
        (json.dumps(given | {"hidden_size": 9}), r"does not describe a RoBERTa \(.*width 9 is not a multiple of heads 2"),
        ("{", "does not describe a RoBERTa"), ("[]", "does not describe a RoBERTa"),
    ):  # fmt: skip
        path.write_text(content)
        with pytest.raises(InputError, match=line):
            questions.main(hotpotqa)
    path.unlink()
    with pytest.raises(InputError, match=r"cannot read .*config\.json: No such file or directory; give a folder with RoBERTa's"):
        questions.main(hotpotqa)


def test_the_kept_page_is_that_of_its_record():
    record = json.loads((RESULTS / "pretrained_recurrence-3.json").read_text())
    assert (RESULTS / "pretrained_recurrence-3.md").read_text() == questions.page(record)
    assert list(record["runs"]) == list(questions.ROWS) and record["settings"]["updates"] == [questions.SHORT, questions.LONG]


def test_a_text_of_the_task_has_so_many_windows_and_no_others(monkeypatch):
    drawn = two_hops.drawn(200, ["A.", "Two."], 1)
    every = [len(reader.cut(question, TOKENIZER, questions.SIZES["segment"]).tokens) for question in drawn]
    least, most = min(every) + 2, min(every) + 4
    monkeypatch.setattr(questions, "WINDOWS", (least, most))
    found = [len(example.tokens) for example in questions.task_examples(20, ["A.", "Two."], TOKENIZER, 1)]
    assert len(found) == 20 and {*found} == {least, least + 1, most}
    assert found == [length for length in every if least <= length <= most][:20]
