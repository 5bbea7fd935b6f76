"""The memory experiment: rows of equal state, what is asked of them, and runs that go on."""

import json
import re

import numpy as np
import pytest
import torch

from accelerated.lab import memory
from tests.helpers.programs import refusal
from tests.helpers.reading import read_alone

ROW = "Block-Recurrent, LSTM gate"


@pytest.fixture
def experiment(monkeypatch, tmp_path):
    """experiment(words) runs the command in short; it returns the record."""
    stages = {name: [(memory.SHORT, 2, 1.0)] for name in memory.STAGES}
    monkeypatch.setattr(memory, "STAGES", stages)
    monkeypatch.setattr(memory, "TESTS", {"near": {"distance": 32}})
    monkeypatch.setattr(memory, "TOLD_AGAIN", {"": (32, 0)})
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)

    def conducted(words):
        folders = ["--out", str(tmp_path), "--weights", str(tmp_path / "weights")]
        memory.main([*folders, *words.split(), "--rows", ROW])
        return json.loads((tmp_path / "memory.json").read_text())

    return conducted


def test_rows_have_equal_bytes_of_state_and_as_many_parameters_as_was_said():
    """As near as sizes allow: Memformer's state has a segment's tokens, too, a byte for each."""
    for row in memory.ROWS:
        about = memory.about(row)
        tokens = memory.SEGMENT if about["model"] == "memformer" else 0
        beyond = about["state_bytes"] - 4 * 8192 - tokens
        assert beyond == (-16 if about["model"] == "gated_deltanet" else 0), row
        assert 9e4 < about["parameters"] < 2e5, row


def test_documents_of_a_stage_are_whole_segments():
    """An update reads whole documents: its gradients span them."""
    for parts in memory.STAGES.values():
        for told, _, _ in parts:
            assert memory.RecallConfig(**memory.TOLD | told).length % memory.SEGMENT == 0


def test_what_is_asked_later_was_told_out_of_attentions_reach():
    documents = memory.documents_of({"rewrites": 1, "distance": 40})
    later = memory.asked_later(documents, 100)
    first = 12 + 40  # facts and filler
    assert (later.inputs[:, :first] == documents.inputs[:, :first]).all()
    between = slice(first, first + 100)
    assert np.isin(later.inputs[:, between], memory.FILLER).all()
    assert not later.scored[:, between].any()
    for field, moved in zip(documents[1:], later[1:], strict=True):
        assert (moved[:, first + 100 :] == field[:, first:]).all()


def test_what_was_told_again_is_found_with_the_value_before():
    documents = memory.documents_of({"rewrites": 1, "distance": 32})
    before, again = memory.values_before(documents.inputs)
    asked_again = documents.scored & again
    others = documents.scored & ~again
    assert 0.2 < asked_again.sum() / documents.scored.sum() < 0.3, "one key of four"
    assert (before[others] == documents.targets[others]).all()
    assert (before[asked_again] != documents.targets[asked_again]).all()
    for lane in range(len(before)):
        assert len({*before[lane][asked_again[lane]].tolist()}) <= 1, "of one key"


@pytest.mark.parametrize("row", memory.ROWS)
def test_predictions_are_those_of_reading_everything(row):
    """Segments without a question are read by the memory path alone."""
    model = memory.make_model(row, 0)
    documents = memory.documents_of({"begin": 70, "distance": 32})
    found = memory.predictions(model, documents)
    for window, logits, _ in read_alone(model, documents.inputs):
        part = slice(window.start, window.stop)
        scored = documents.scored[:, part]
        assert (logits.argmax(-1).numpy()[scored] == found[:, part][scored]).all()
    assert documents.scored.any()


def test_a_run_goes_on_after_its_last_stage_to_the_same_end(experiment, monkeypatch, tmp_path):
    whole = experiment("--seeds 0")["runs"][ROW]["0"]
    assert [stage["stage"] for stage in whole] == list(memory.STAGES)

    path = tmp_path / "memory.json"
    record = json.loads(path.read_text())
    record["runs"] = {row: {} for row in memory.ROWS}
    path.write_text(json.dumps(record))
    train = memory.train
    trained = []

    def interrupted(*words):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(words)
        return train(*words)

    monkeypatch.setattr(memory, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        experiment("--seeds 0")
    monkeypatch.setattr(memory, "train", train)
    again = experiment("--seeds 0")["runs"][ROW]["0"]
    for name in ("stage", "bits", "right"):
        assert [stage[name] for stage in again] == [stage[name] for stage in whole]
    monkeypatch.setattr(memory, "train", lambda *_: pytest.fail("a finished run is trained again"))
    assert experiment("--seeds 0")["runs"][ROW]["0"] == again


def test_a_record_is_of_todays_settings_and_a_row_can_be_added_to_it(monkeypatch, tmp_path):
    before = memory.new_record()
    before["runs"][ROW]["0"] = ["a stage"]
    path = tmp_path / "memory.json"
    path.write_text(json.dumps(before))
    monkeypatch.setitem(memory.ROWS, "another", memory.ROWS[ROW])
    after = memory.record_at(path)
    assert after["runs"] == before["runs"] | {"another": {}}
    assert after["settings"]["rows"]["another"] == before["settings"]["rows"][ROW]
    monkeypatch.setattr(memory, "TESTS", {"near": {"distance": 9}})
    assert "runs of other settings; give another --out" in refusal(memory.record_at, path)


def test_weights_of_seed_0_are_small_and_answer_as_the_model_did(experiment, capsys, tmp_path):
    """Of each stage. The record's shares are those of the weights before rounding to float16."""
    recorded = experiment("--seeds 0")["runs"][ROW]["0"][0]["right"]["near"]
    kept = sorted(tmp_path.glob("weights/*[a-z].safetensors"))
    assert len(kept) == len(memory.STAGES)
    assert max(path.stat().st_size for path in kept) < 500_000
    memory.main(["--ask", str(kept[0].with_name(f"{memory.slug(ROW)}-facts-first.safetensors"))])
    said = capsys.readouterr().out
    share = float(re.search(r"^near +([\d.]+)%$", said, re.M)[1]) / 100
    assert abs(share - recorded) < 0.02, said
