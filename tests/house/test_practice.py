"""Practice: right answers are accepted, planted wrong ones are refused, with their symptom.

answers/NAME.txt has an answer for each task of a file, as a reader might write it. The blocks of
NAME_planted.txt say what is to be written instead, and what must then be told.
"""

import doctest
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from docs.practice import answering, judging
from docs.practice.__main__ import main
from docs.practice.tasks import FILES, blocks, changed, hints_of, tasks_of
from reference import gradients
from tests.conftest import ROOT
from tests.helpers.copies import copy_of_the_project

ANSWERS = Path(__file__).parent / "answers"
TASKS = [(file, task) for file in FILES for task in tasks_of(file)]
ids = [task.name for _, task in TASKS]
PLANTED = [(file, mistake) for file in FILES for mistake in blocks(ANSWERS / f"{file}_planted.txt")]


def answered(file, name, old="", new=""):
    """The answer of a task, with one text instead of another."""
    text = (ANSWERS / f"{file}.txt").read_text()
    [own] = re.findall(rf"^def {name}\(.*?(?=\n\n\n|\Z)", text, re.M | re.S)
    assert old in own, f"{name} has no {old!r}"
    if old:
        text = text.replace(own, own.replace(old, new))
    names = {}
    exec(compile(text, file, "exec"), names)
    return names[name]


def asking(task, answer):
    """What judging.judge asks, in this process."""

    def ask(sizes, seed):
        given = task.given(np.random.default_rng(seed), sizes)
        return answering.results_of(task, answer, given)

    return ask


@pytest.mark.parametrize("file,task", TASKS, ids=ids)
def test_a_right_answer_is_accepted(file, task):
    assert judging.judge(task, asking(task, answered(file, task.name))).lines == ()


def test_chapters_have_the_tasks_at_the_ends_of_their_sections():
    chapters = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    commands = " ".join(re.findall(r"^python -m docs.practice --in mine (.*)$", chapters, re.M))
    assert not [task.name for _, task in TASKS if task.name not in commands.split()]


@pytest.mark.parametrize("file", FILES)
def test_each_task_has_an_example_that_is_right_and_three_hints(file, capsys):
    """But for one task whose inputs are functions of the judge."""
    right = {}
    exec((ANSWERS / f"{file}.txt").read_text(), right)
    begin = importlib.import_module(f"docs.practice.begin.{file}")
    without = []
    for task in tasks_of(file):
        text = getattr(begin, task.name).__doc__
        assert "Hint" not in text
        may_be_0 = any(smallest == 0 for smallest, _ in task.sizes.values())
        assert may_be_0 == ("may be" in text), f"{task.name} should say which sizes may be 0"
        found = doctest.DocTestParser().get_doctest(text, dict(right), task.name, None, 0)
        assert not doctest.DocTestRunner().run(found).failed, capsys.readouterr().out
        if not found.examples:
            without.append(task.name)
        assert len(hints_of(file, task.name)) == 3
    assert set(without) <= {"memory_replay"}


def test_hints_are_given_one_by_one(capsys):
    assert main(["--hint", "slot_scores"]) == 0
    first = capsys.readouterr().out
    assert first.endswith("more: python -m docs.practice --hint slot_scores 2\n")
    assert main(["--hint", "memformer.slot_scores", "3"]) == 0
    assert "sqrt(E)" in capsys.readouterr().out.replace(first, "")


@pytest.mark.parametrize("file,planted", PLANTED, ids=lambda value: getattr(value, "task", value))
def test_a_wrong_answer_is_refused_with_its_symptom(file, planted):
    (task,) = (task for task in tasks_of(file) if task.name == planted.task)
    answer = answered(file, planted.task, planted.old, planted.new)
    verdict = judging.judge(task, asking(task, answer))
    assert verdict.status == "wrong"
    assert planted.sentence in verdict.lines[0]
    if len(verdict.lines) > 1:  # else it was not compared
        assert f"--hint {planted.task} " in verdict.lines[-1]


# What a file does, what is said of it, and its text in the place of causal_mask's answer
HOSTILE = [*blocks(ANSWERS / "hostile.txt")]


@pytest.mark.parametrize("answer", HOSTILE, ids=lambda answer: answer.task)
def test_a_hostile_answer_is_refused_and_the_next_one_is_judged(answer, tmp_path, monkeypatch):
    """It is never done, nothing is raised here, and it ends in time."""
    monkeypatch.setattr(judging, "SECONDS", 1.0)
    text = (ANSWERS / "transformer.txt").read_text()
    hostile = f"\n\ndef causal_mask(n, k):\n    {answer.new}\n"
    file = tmp_path / "transformer.py"
    file.write_text(text + hostile)
    refused, *others = judging.judge_file(file)
    assert refused.status == "wrong" and answer.sentence in refused.lines[0], refused
    assert [verdict.status for verdict in others] == ["done"] * len(others)


def test_a_folder_of_ones_own_is_made_and_judged_without_torch(tmp_path, capsys):
    """One answer that ends Python, one file that cannot be read."""
    mine = tmp_path / "mine"
    assert main(["--copy", str(mine)]) == 0
    shutil.copy(ANSWERS / "memformer.txt", mine / "memformer.py")
    broken = (mine / "memformer.py").read_text().replace("e = encode", "exit(0); e = encode")
    (mine / "memformer.py").write_text(broken)
    capsys.readouterr()
    assert main(["--in", str(mine), "memformer"]) == 1
    printed = capsys.readouterr().out
    assert "memformer: 8 of 9 done" in printed
    assert "it raises SystemExit: 0 in line" in printed

    (mine / "memformer.py").write_text("def slot_scores(:\n")
    program = "import sys; sys.modules['torch'] = None; from docs.practice.__main__ import main; "
    command = [sys.executable, "-c", f"{program}sys.exit(main())", "--in", mine, "memformer"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "memformer.py cannot be read: SyntaxError" in found.stdout
    assert found.returncode == 1

    command[2] = command[2].replace("torch", "hypothesis")
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 2 and "pip install hypothesis" in found.stderr


BREAK = re.compile(
    r"^`(reference/[\w/]+\.py)`, `(\w+)`:\n\n```diff\n- (.*?)\n\+ (.*?)\n```\n\nRun `(.*?)`"
    r".*?```text\n(.*?)```",
    re.M | re.S,
)
BROKEN = BREAK.findall((ROOT / "docs" / "break_it.md").read_text())


BY_DIFFERENCES = re.compile(r"[+-]\d\.\d+e[+-]\d+(?= by differences)")


def words_of(text):
    """Its words; of a finite difference four digits, as the rest is a processor's rounding."""
    words = " ".join(re.sub(r"^E ", "", text, flags=re.M).split())
    return BY_DIFFERENCES.sub(lambda number: f"{float(number[0]):+.3e}", words)


@pytest.mark.parametrize("path,function,old,new,command,said", BROKEN, ids=[b[1] for b in BROKEN])
def test_what_breaks_says_what_the_page_shows(
    path, function, old, new, command, said, tmp_path, monkeypatch, capsys
):
    """docs/break_it.md, in this process if it is --check, or else in a copy."""
    name = Path(path).stem
    reference = importlib.import_module(f"reference.{name}")
    if "--check" in command:
        module = changed(reference, function, old, new)
        monkeypatch.setitem(sys.modules, reference.__name__, module)
        assert gradients.main(name, command.split()[3:]) == 1
        printed = capsys.readouterr().out
    else:
        copy_of_the_project(tmp_path)
        source = (tmp_path / path).read_text()
        assert source.count(old) == 1
        (tmp_path / path).write_text(source.replace(old, new))
        run = [sys.executable, "-m", *command.split(), "-x"]
        printed = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True).stdout
        # Of the example that Hypothesis has shrunk to in its time, and so a machine's own
        said, printed = (re.sub(r"-?\d+(\.\d+)?", "#", text) for text in (said, printed))
    for part in re.split(r"\n  look|(?<=[a-z])\n(?=[AF])", said):
        assert words_of(part) in words_of(printed)


def test_the_page_breaks_twenty_lines():
    assert len(BROKEN) == 20
