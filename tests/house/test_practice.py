"""Practice: right answers are accepted, planted wrong ones are refused, with their symptom.

answers/NAME.txt has an answer for each task of a file, as a reader might write it. The blocks of
NAME_planted.txt say what is to be written instead, and what must then be told.
"""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from docs.practice import judging
from docs.practice.__main__ import main
from docs.practice.symptoms import drawing
from docs.practice.tasks import blocks, changed
from reference import gradients
from tests.conftest import ROOT

ANSWERS = Path(__file__).parent / "answers"
TASKS = [(file, task) for file in judging.FILES for task in judging.tasks_of(file)]
ids = [task.name for _, task in TASKS]
PLANTED = [
    (file, mistake) for file in judging.FILES for mistake in blocks(ANSWERS / f"{file}_planted.txt")
]


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


@pytest.mark.parametrize("file,task", TASKS, ids=ids)
def test_a_right_answer_is_accepted(file, task):
    assert judging.judge(task, answered(file, task.name)).lines == ()


def test_chapters_have_the_tasks_at_the_ends_of_their_sections():
    chapters = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    commands = " ".join(re.findall(r"^python -m docs.practice --in mine (.*)$", chapters, re.M))
    assert not [task.name for _, task in TASKS if task.name not in commands.split()]


@pytest.mark.parametrize("file,planted", PLANTED, ids=lambda value: getattr(value, "task", value))
def test_a_wrong_answer_is_refused_with_its_symptom(file, planted, monkeypatch):
    monkeypatch.setattr(judging, "SECONDS", 1.0)
    (task,) = (task for task in judging.tasks_of(file) if task.name == planted.task)
    verdict = judging.judge(task, answered(file, planted.task, planted.old, planted.new))
    assert verdict.status == "wrong"
    assert planted.sentence in verdict.lines[0]


def test_a_reader_that_has_gone_is_no_error():
    """As in: python -m docs.practice | head."""
    command = [sys.executable, "-m", "docs.practice", "transformer"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_a_folder_of_ones_own_is_made_judged_and_run_by_pytest_without_torch(tmp_path, capsys):
    """One right answer, one that ends Python, one file that cannot be read; the rest not begun."""
    mine = tmp_path / "mine"
    assert main(["--copy", str(mine)]) == 0
    assert main(["--copy", str(mine)]) == 2
    assert main(["--copy", str(mine / "memformer.py" / "x")]) == 2
    assert "Not a directory; give another" in capsys.readouterr().err
    shutil.copy(ANSWERS / "memformer.txt", mine / "memformer.py")
    broken = (mine / "memformer.py").read_text().replace("e = encode", "exit(0); e = encode")
    (mine / "memformer.py").write_text(broken)
    capsys.readouterr()
    assert main(["--in", str(mine), "memformer"]) == 1
    printed = capsys.readouterr().out
    assert "memformer: 6 of 7 done" in printed
    assert "it raises SystemExit: 0 in line" in printed
    assert main(["--in", str(mine), "slot_scors"]) == 2
    assert "the nearest is slot_scores" in capsys.readouterr().err

    (mine / "memformer.py").write_text("def slot_scores(:\n")
    program = "import sys; sys.modules['torch'] = None; import pytest; sys.exit(pytest.main())"
    command = [sys.executable, "-c", program, mine, "-p", "no:cacheprovider"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "memformer.py cannot be read: SyntaxError" in found.stdout
    assert found.returncode == 1


def test_masks_are_drawn_beside_each_other():
    right = np.tri(2, 3, dtype=bool)
    assert [*drawing(~right, right)] == ["yours  right", ".xx    x..", "..x    xx."]


BREAK = re.compile(
    r"^`(reference/[\w/]+\.py)`, `(\w+)`:\n\n```diff\n- (.*?)\n\+ (.*?)\n```\n\nRun `(.*?)`"
    r".*?```text\n(.*?)```",
    re.M | re.S,
)
BROKEN = BREAK.findall((ROOT / "docs" / "break_it.md").read_text())


def words_of(text):
    return " ".join(re.sub(r"^E ", "", text, flags=re.M).split())


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
        for folder in ("reference", "accelerated", "tests"):
            shutil.copytree(ROOT / folder, tmp_path / folder)
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        source = (tmp_path / path).read_text()
        assert source.count(old) == 1
        (tmp_path / path).write_text(source.replace(old, new))
        run = [sys.executable, "-m", *command.split(), "-x"]
        printed = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True).stdout
    for part in re.split(r"\n  look|(?<=[a-z])\n(?=[AF])", said):
        assert words_of(part) in words_of(printed)


def test_the_page_breaks_twenty_lines():
    assert len(BROKEN) == 20
