"""Trials are trained once, resumed when they were interrupted, tuned alike, and stopped together."""

import math
import sys
import time

import pytest

from accelerated.lab.trials import LOG, Trial, Workshop, ended, join, settled, validation
from accelerated.program.errors import InputError
from accelerated.training.log import read_metrics
from tests.helpers.programs import Rehearsal


def test_what_is_finished_is_not_trained_again(tmp_path):
    shop = Rehearsal(tmp_path)
    trials = [Trial("a", "--width 8"), Trial("a", "--width 8", 1), Trial("b", "--width 8"), Trial("b", "--width 9")]
    assert shop.folder(trials[3]) == shop.folder(Trial("c", "--width 8 --width 9")) != shop.folder(trials[0])
    shop.train(trials)
    assert len(shop.calls) == 3, "rows with the same options share a run"
    shop.train(trials)
    Rehearsal(tmp_path).train(trials)
    assert len(shop.calls) == 3
    assert shop.calls[1][1:] == [
        *["--width", "8", "--seed", "1", "--keep", "1", "--sample", "0", "--out"],
        str(shop.folder(trials[1])),
    ]
    assert (shop.folder(trials[1]) / "output.txt").read_text() == "trained\n"


def test_what_was_interrupted_is_resumed(tmp_path):
    shop, trial = Rehearsal(tmp_path), Trial("a", "--width 8")
    shop.folder(trial).mkdir()
    (shop.folder(trial) / "checkpoint.pt").touch()
    shop.train([trial])
    assert [call[1:] for call in shop.calls] == [["--resume", str(shop.folder(trial))]]


def test_a_run_that_diverged_has_infinite_loss_and_is_not_tried_again(tmp_path):
    shop = Rehearsal(tmp_path, fails={"--rate 9": "train.py: the loss is nan at step 3; x; try a lower --learning-rate"})
    trial = Trial("a", "--rate 9")
    shop.train([trial])
    shop.train([trial])
    assert len(shop.calls) == 1 and validation(read_metrics(shop.folder(trial))) == math.inf
    shop.evaluate([(trial, "score")])
    assert len(shop.calls) == 1 and shop.diverged(trial), "there is nothing to evaluate"


def test_a_run_that_somebody_stopped_is_no_finished_run(tmp_path, monkeypatch):
    shop, trial = Rehearsal(tmp_path), Trial("a", "--width 8")
    monkeypatch.setattr(shop, "run", lambda command: (0, "stopped and saved\n", ""))
    with pytest.raises(InputError, match="was stopped before its end; give the same command again"):
        shop.train([trial])


def test_a_run_that_cannot_begin_ends_with_its_line(tmp_path):
    shop = Rehearsal(tmp_path, fails={"--widht": "train.py: unknown option --widht"})
    with pytest.raises(InputError, match=r"--widht 8.* ended with code 2: train\.py: unknown option --widht"):
        shop.train([Trial("a", "--widht 8")])
    assert not ended(read_metrics(shop.folder(Trial("a", "--widht 8"))))


def test_questions_are_answered_once_and_kept_with_the_run(tmp_path):
    shop, trial = Rehearsal(tmp_path), Trial("a", "--width 8")
    shop.train([trial])
    questions = [(trial, "score --split test"), (trial, "score --split test"), (trial, LOG), (trial, "score")]
    shop.evaluate(questions)
    shop.evaluate(questions)
    shop.evaluate([(Trial("another row", "--width 9 --width 8"), "score")])
    asked = [call for call in shop.calls if call[0].endswith("eval.py")]
    assert [call[1:] for call in asked] == [
        ["score", str(shop.folder(trial)), "--split", "test", "--json"],
        ["score", str(shop.folder(trial)), "--json"],
    ]
    assert shop.answer(trial, "score")["asked"] == asked[1][1:]
    assert [record["step"] for record in shop.answer(trial, LOG)] == [1, 5]


def test_a_question_that_fails_leaves_no_answer(tmp_path):
    shop, trial = Rehearsal(tmp_path, fails={"eval.py": "eval.py: no"}), Trial("a", "--width 8")
    shop.train([trial])
    with pytest.raises(InputError, match=r"eval\.py score .* --json ended with code 2: eval\.py: no"):
        shop.evaluate([(trial, "score")])
    assert not list(shop.folder(trial).glob("eval-*"))


@pytest.mark.parametrize("code", [0, 2])
def test_an_answer_is_what_a_program_prints_and_an_error_the_last_line_it_says(tmp_path, code):
    program = f"import sys; print('{{}}', flush=True); print('a\\neval.py: no', file=sys.stderr); sys.exit({code})"
    assert Workshop(tmp_path, 1).run([sys.executable, "-c", program]) == (code, "{}\n", "eval.py: no")
    assert Workshop(tmp_path, 1).run([sys.executable, "-c", "print(1); print(2)"]) == (0, "1\n2\n", "2")


def test_an_error_stops_the_others_by_one_signal(tmp_path):
    """Each child notes the signals that it gets; train.py saves at the first."""
    shop = Workshop(tmp_path, 3, say=lambda line: None)
    noted = (
        "import pathlib, signal, sys, time; signal.signal(signal.SIGINT, lambda *_: open(sys.argv[1], 'a').write('x') and None)\n"
    )
    child = (
        noted
        + "pathlib.Path(sys.argv[1]).touch()\nwhile not pathlib.Path(sys.argv[1]).read_text(): time.sleep(0.02)\ntime.sleep(0.3)"
    )
    files = [tmp_path / "one", tmp_path / "two"]

    def fail():
        while not all(file.exists() for file in files):
            time.sleep(0.02)
        raise KeyboardInterrupt

    begun = time.monotonic()
    calls = [(shop.run, [sys.executable, "-c", child, str(file)]) for file in files]
    with pytest.raises(KeyboardInterrupt):
        shop.in_parallel([*calls, (fail,), *[(shop.run, [sys.executable, "-c", "0"])] * 3])
    assert [file.read_text() for file in files] == ["x", "x"] and time.monotonic() - begun < 30
    assert not shop.children and shop.run(["no such program"]) == (1, "", ""), "nothing begins after that"


def test_children_share_the_cores_and_are_out_of_reach_of_ctrl_c(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    shop = Workshop(tmp_path, 3)
    code, output, _ = shop.run(
        [sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'], os.getsid(0) == os.getpid())"]
    )
    assert (code, output.split()) == (0, ["2", "True"])
    assert Workshop(tmp_path, 9).environment["OMP_NUM_THREADS"] == "1", "more jobs than cores"


def test_no_more_than_jobs_run_at_a_time(tmp_path):
    shop, now, most = Workshop(tmp_path, 2, say=lambda line: None), [], []

    def work():
        now.append(1)
        most.append(len(now))
        time.sleep(0.02)
        now.pop()

    shop.in_parallel([(work,)] * 8)
    assert max(most) == 2 and len(most) == 8


def test_of_options_with_the_same_name_the_last_counts_whatever_their_order(tmp_path):
    assert settled("--a 1 --flag --b x,y --a 2") == {"--a": ["2"], "--flag": [], "--b": ["x,y"]}
    shop = Rehearsal(tmp_path)
    same = {shop.folder(Trial("", options)) for options in ("--a 1 --flag --b 3", "--flag --b 2 --b 3 --a 1")}
    assert len(same) == 1 and shop.folder(Trial("", "--a 3 --flag --b 1")) not in same


def test_options_are_joined_by_one_space():
    assert join("--a 1", "", "--b 2") == "--a 1 --b 2"
