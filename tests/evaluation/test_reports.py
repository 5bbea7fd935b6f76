"""Reports of eval.py do what their options ask for: what is read, what is said, what is drawn."""

import os
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from accelerated.data.config import DataConfig
from accelerated.data.recall import RecallConfig
from accelerated.evaluation import options, positions, sample, score
from accelerated.evaluation.score import token_nats
from accelerated.generation.continuation import Sampling
from accelerated.program.errors import InputError
from eval import data_config, recall_config
from tests.helpers.programs import refusal, words
from tests.helpers.reading import trained_run
from tests.helpers.texts import documents_of


def run_of(paper, name, lengths=(30, 1, 19), **changes):
    """A TrainedRun and its documents of these lengths."""
    return trained_run(paper, name, documents_of(lengths), **changes)


# score


@pytest.mark.parametrize("clear", [False, True], ids=["carried", "cleared"])
def test_a_score_is_of_the_memory_that_is_asked_for(clear):
    run = run_of("compressive", "conv-bptt")
    run.splits["valid"].whole = False
    record, lines = score.report(run, SimpleNamespace(clear_memory=clear))
    nats = sum(np.nansum(losses) for losses in token_nats(run.model, run.documents, 1, clear))
    assert record["nats"] == pytest.approx(nats, rel=1e-9), "another reading is scored"
    assert record["split_tokens"] == record["tokens"] == 29 + 18, "all except each first token"
    assert f"log-probability     {-nats:,.2f} nats" in lines, "log p is negative: score_lines"
    about = run.about(clear)
    said = [about[name] for name in ("memory_cleared", "whole_split", "carry_over_documents")]
    assert said == [clear, False, False], "whether it is cleared, whole, carried over"
    way = "cleared at every segment" if clear else "carried through each document"
    assert run.memory(clear) == f"memory {way}"


def test_short_documents_that_are_joined_are_parts_of_a_segment_at_the_least():
    run = run_of("compressive", "conv-bptt", (11, 10), lane_count=4, carry_over=True)
    assert [len(part.inputs) for part in run.documents] == [10, 10], "19 tokens, segments of 8"


def test_a_nan_of_the_model_is_refused_and_one_of_nothing_scored_is_not():
    score.check_numbers({"rows": [{"tokens": 0, "bits_per_byte": np.nan}], "nats": 1.0})
    for record in (np.nan, [1.0, np.nan], {"tokens": 3, "rows": [{"bits": np.nan}]}):
        with pytest.raises(InputError, match="predictions are NaN"):
            score.check_numbers(record)


# sample

OTHERS = {"seed": 4, "prompt": b"the abbey ", "temperature": 0.2, "top_p": 0.05}


def sampled(run, **changes):
    """(What `eval.py sample` shows by options: {prompt, continuation}; the options)."""
    usual = {"prompt": None, "prompt_file": None, "tokens": 9, "temperature": 0.8, "top_p": 1.0}
    asked = usual | {"seed": 3, "new_window": False, "json": True} | changes
    record, _ = sample.report(run, SimpleNamespace(**asked))
    return record, asked


@pytest.mark.parametrize("changes", [{}, OTHERS, {"new_window": True}])
def test_a_sample_is_drawn_as_it_is_asked_for(changes, monkeypatch):
    calls = []

    def continued(model, prompt, count, sampling, generator, new_window=False):
        calls.append((bytes(prompt[0].tolist()), count, sampling, generator.initial_seed()))
        calls.append(new_window)
        return iter(torch.tensor([*b"!"]))

    monkeypatch.setattr(sample, "continue_text", continued)
    record, asked = sampled(run_of("pretrained_recurrence", "overlapping"), **changes)
    prompt = asked["prompt"] or b"\n"
    how = Sampling(asked["temperature"], asked["top_p"])
    assert calls == [(prompt, 9, how, asked["seed"]), asked["new_window"]]
    assert record == {"prompt": prompt.decode(), "continuation": "!"}


def test_a_sample_is_printed_after_its_prompt(capsys):
    run = run_of("pretrained_recurrence", "overlapping")
    record, _ = sampled(run, prompt=b"the abbey ")
    sampled(run, prompt=b"the abbey ", json=False)
    assert capsys.readouterr().out == f"the abbey {record['continuation']}\n"


def test_the_most_probable_token_has_no_nucleus():
    assert sample.sampling_of(0, 1.0) == Sampling(0)
    with pytest.raises(InputError, match="--temperature 0 takes the most probable token"):
        sample.sampling_of(0, 0.5)


# options

REFUSED = {  # {options of `eval.py sample RUN`: words of the refusal}
    "--temperature 0.0001": "0 for the most probable token, or at least 0.001",
    "--top-p 0": "above 0 and at most 1",
    "--top-p 1.1": "above 0 and at most 1",
    "--seed -1": "at least 0 and below 2^32",
    "--tokens 0": "at least 1",
}


@pytest.mark.parametrize("given", REFUSED)
def test_numbers_outside_their_range_are_refused(given, tmp_path):
    line = refusal(options.parse, words(f"sample {tmp_path} {given}"))
    assert f"it must be {REFUSED[given]}" in line


def test_small_differences_and_weights_are_not_rounded_to_bfloat16():
    exact = {name for name, report in options.REPORTS.items() if report.exact}
    assert exact == {"attention", "compression", "dynamic", "export"}


def test_other_data_is_read_whole_and_recall_is_asked_as_it_was_trained():
    trained = DataConfig("a", training_documents=5)
    assert data_config(trained, "b").training_documents == 0, "a part of other data is read"
    run = SimpleNamespace(settings=SimpleNamespace(recall=RecallConfig(pairs=7)))
    asked = SimpleNamespace(**{f"recall_{name}": None for name in options.RECALL_SIZES})
    assert recall_config(run, "recall", asked).pairs == 7, "recall is asked by the defaults"


def test_what_is_not_asked_for_is_not_done_and_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("a book")
    name, asked = options.parse([str(tmp_path)])
    assert (name, asked.clear_memory, asked.data) == ("score", False, None)
    _, asked = options.parse(words(f"score {tmp_path} --clear-memory --data book.txt"))
    assert (asked.clear_memory, asked.data) == (True, os.path.abspath("book.txt"))


# positions


def test_a_range_is_drawn_at_its_middle(monkeypatch):
    save_figure = Mock()
    monkeypatch.setattr(positions, "save_figure", save_figure)
    rows = [{"start": 4, "stop": 8, "text_bytes": 3, "bits_per_byte": 1.5}]
    rows.append({"start": 8, "stop": 16, "text_bytes": 0, "bits_per_byte": np.nan})
    positions.draw_positions("a.png", {"memory carried": rows}, 12)
    figure, _ = save_figure.call_args.args
    line, reach = figure.axes[0].get_lines()
    assert line.get_xydata().tolist() == [[6.0, 1.5]], "a range without text is left out"
    assert set(reach.get_xdata()) == {12}
