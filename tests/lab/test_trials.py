"""Trials are trained once, and resumed if they were interrupted; an error begins no other."""

import sys
import time
from pathlib import Path

import pytest

from accelerated.lab.trials import Trial, Workshop
from tests.helpers.programs import Rehearsal, refusal


def test_what_is_finished_is_not_trained_again_and_what_was_interrupted_is_resumed(tmp_path):
    shop = Rehearsal(tmp_path)
    interrupted = Trial("c", "--width 7")
    trials = [Trial("a", "--width 8"), Trial("a", "--width 8", 1)]
    trials += [Trial("b", "--width 8"), Trial("b", "--width 9")]
    shop.train(trials)
    assert len(shop.calls) == 3
    assert Path(shop.calls[0][0]).exists(), "rows with the same options share a run"
    folder = shop.folder(trials[1])
    words = ["--width", "8", "--seed", "1", "--sample", "0", "--out", str(folder)]
    assert shop.calls[1][1:] == words
    shop.folder(interrupted).mkdir()
    (shop.folder(interrupted) / "checkpoint.pt").touch()
    shop.train([*trials, interrupted])
    assert [call[1:] for call in shop.calls[3:]] == [["--resume", str(shop.folder(interrupted))]]


def test_a_run_that_was_stopped_or_cannot_begin_is_no_finished_run(tmp_path, monkeypatch):
    shop = Rehearsal(tmp_path, fails={"--widht": "train.py: unknown option --widht"})
    trial = Trial("a", "--widht 8")
    words = "ended with code 2: train.py: unknown option --widht"
    assert refusal(shop.train, [trial]).endswith(words)
    monkeypatch.setattr(shop, "run", lambda command: (0, "stopped and saved\n", ""))
    assert "was stopped before its end; give the same command again" in refusal(shop.train, [trial])


def test_questions_are_asked_once(tmp_path):
    shop = Rehearsal(tmp_path)
    trial = Trial("a", "--width 8")
    shop.fails["eval.py"] = "eval.py: no"
    words = "--json ended with code 2: eval.py: no"
    assert refusal(shop.evaluate, [(trial, "score")]).endswith(words)
    shop.fails.clear()
    shop.calls.clear()
    questions = ("score --split test", "score --split test", "score")
    answers = shop.evaluate([(trial, words) for words in questions])
    folder = str(shop.folder(trial))
    assert [call[1:] for call in shop.calls] == [
        ["score", folder, "--split", "test", "--json"],
        ["score", folder, "--json"],
    ]
    assert answers[trial, "score"]["asked"] == ["score", folder, "--json"]


def test_an_answer_is_what_a_program_prints_and_an_error_the_last_line_it_says(
    tmp_path, monkeypatch
):
    """Programs share the cores."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    run = Workshop(tmp_path, 3).run
    program = "import os; print(os.environ['OMP_NUM_THREADS'])"
    assert run([sys.executable, "-c", program]) == (0, "2\n", "2")
    program = "import sys; print(1); print('a\\neval.py: no', file=sys.stderr); sys.exit(2)"
    assert run([sys.executable, "-c", program]) == (2, "1\n", "eval.py: no")


def test_nothing_begins_after_an_error(tmp_path):
    """What runs by then ends first."""
    begun = []

    def work(number):
        begun.append(number)
        if number == 0:
            raise KeyboardInterrupt
        time.sleep(0.3)

    with pytest.raises(KeyboardInterrupt):
        Workshop(tmp_path, 2).in_parallel(work, range(20))
    assert len(begun) < 20


def test_of_options_with_the_same_name_the_last_counts_whatever_their_order(tmp_path):
    shop = Rehearsal(tmp_path)
    folder = shop.folder(Trial("", "--a 1 --flag --b 3"))
    assert folder == shop.folder(Trial("", "--flag --b 2 --b 3 --a 1"))
    assert folder != shop.folder(Trial("", "--a 3 --flag --b 1"))
