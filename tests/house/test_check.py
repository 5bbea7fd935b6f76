"""The porters' tools: `python -m reference.<paper> --check`, `python -m reference.check`, and what
the vectors notice.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from docs.practice.tasks import blocks, changed
from reference import check, gradients
from tests.conftest import ROOT
from tests.helpers.programs import refusal
from tests.helpers.variants import PAPERS
from tests.tools.vectors import CATALOGUE, FOLDER, computed

ANSWERS = Path(__file__).parent / "answers"
MISTAKES = json.loads(CATALOGUE.read_text())


# Gradients by finite differences


@pytest.mark.parametrize("paper", PAPERS)
def test_a_right_reference_passes_and_is_left_as_it_was(paper, capsys):
    """All its cases; what the paper stops is held meanwhile, in tables too."""
    reference = PAPERS[paper].reference
    before = dict(vars(reference))
    assert (FOLDER / paper).exists(), (
        f"tests/tools/cases.txt has no case of {paper}: a paper owes vectors"
    )
    assert gradients.main(paper, ["--check"]) == 0
    *rows, verdict = capsys.readouterr().out.splitlines()
    assert verdict.startswith(f"All {len(rows)} cases of {paper} are right")
    assert before == vars(reference)
    case = gradients.read_case(paper, gradients.case_names(paper)[0])
    calls = gradients.Calls(reference)
    gradients.gradients_of(case, calls)
    assert gradients.guilty(case, calls)[-1] == "backward", "a right function is said to be wrong"


FAULTS = [*blocks(ANSWERS / "faults.txt")]


@pytest.fixture
def said_of(monkeypatch, capsys):
    """said_of(paper, case, function, old, new): what --check prints of a reference so changed."""

    def run(paper, case, *change):
        wrong = changed(PAPERS[paper].reference, *change)
        monkeypatch.setitem(sys.modules, f"reference.{paper}", wrong)
        assert gradients.main(paper, ["--check", "--case", case]) == 1
        return capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.task)
def test_a_wrong_backward_is_named_with_its_file(fault, said_of):
    """One line of a backward function is wrong: the verdict comes first, then that function."""
    paper, case, function = fault.task.split()
    verdict, *lines = said_of(paper, case, function, fault.old, fault.new)
    assert verdict.startswith(f"WRONG: {paper}, case {case}: ")
    accused = [line.split()[2] for line in lines if line.startswith("  look at")]
    assert accused[0] == function, f"it accuses {accused[0]}, and the fault is in {function}"


def test_the_worst_entry_of_the_wrong_gradient_nearest_to_the_loss_is_shown(said_of):
    """Entry 4 of every norm's scale is wrong; the last norm is the nearest."""
    change = ("layer_norm_backward", "dscale = ", "dscale = (np.arange(6) == 4) + ")
    _, worst, *_ = said_of("pretrained_recurrence", "mean", *change)
    assert worst.startswith("  grad/final_norm.scale at [4] is "), worst


def test_a_reference_that_raises_is_wrong(said_of):
    """A gradient of another shape is a fault, and not the end of the program."""
    change = ("affine_backward", "return dx, grads", "return dx[..., 1:], grads")
    verdict, *_ = said_of("pretrained_recurrence", "mean", *change)
    assert re.match(r"WRONG: pretrained_recurrence, case mean: \w+ raises \w+: ", verdict)


def test_without_vectors_there_is_nothing_to_check(monkeypatch, tmp_path):
    monkeypatch.setattr(gradients, "VECTORS", tmp_path)
    assert "run this in a clone" in refusal(gradients.main, "memformer", ["--check"])


# A port's results


@pytest.fixture
def judged(tmp_path, capsys):
    """judged(paper, {case: rows}, options): (exit code, printed lines) of a port's whole folder.

    Or of the one file in it that is named.
    """

    def run(paper, cases, options="", file=""):
        for case, rows in cases.items():
            save_file(rows, tmp_path / f"{case}.safetensors")
        capsys.readouterr()
        folders = [str(FOLDER / paper / file), str(tmp_path / file)]
        code = check.main([*folders, *options.split()])
        return code, capsys.readouterr().out.splitlines()

    return run


def rows_of(case):
    """{name: array} of a case of the vectors."""
    rows, _ = check.load(FOLDER / f"{case}.safetensors")
    return rows


@pytest.mark.parametrize(
    "name,change,says",
    [
        ("0/logits", lambda row: row + 1e-7 * np.abs(row).max(), "0/logits: 1.0e-07 at"),
        ("0/logits", lambda row: np.where(row == row.max(), np.nan, row), "0/logits: 1 of"),
        ("grad/decoder.norm.bias", None, "grad/decoder.norm.bias: missing, shape (4,)"),
        ("inner/slot_scores", lambda row: row[..., ::-1].copy(), "only inner/ values are wrong"),
    ],
)
def test_one_wrong_tensor_is_named(name, change, says, judged):
    rows = rows_of("memformer/all-tasks")
    right = rows.pop(name)
    if change:
        rows[name] = np.asarray(change(right))
    code, printed = judged("memformer", {"all-tasks": rows}, file="all-tasks.safetensors")
    assert code == 1
    at = next(number for number, line in enumerate(printed) if "is not done" in line)
    first, hint = printed[at + 1 : at + 3]
    assert re.match(r"all-tasks: 1 of \d+ tensors fail", printed[at - 2])
    assert first.startswith(f"begin with all-tasks.safetensors, {name}: ")
    assert says in "\n".join(printed[at:])
    assert hint.startswith("look at: ")
    assert sum("FAIL" in line for line in printed) == 1


# A port's cases and their wrong tensors => what it is told
BEGINNINGS = (ANSWERS / "beginnings.txt").read_text().splitlines()


@pytest.mark.parametrize("row", [row for row in BEGINNINGS if row[0] != "#"])
def test_where_to_begin_is_the_earliest_wrong_value_of_the_case_that_says_most(row, judged):
    """Each is a row of answers/beginnings.txt, which says how a row is written."""
    cases, words = row.split(" => ")
    paper, *cases = cases.split()
    written = {}
    for each in cases:
        case, *names = each.split(",")
        written[case] = rows_of(f"{paper}/{case}")
        for name in names:
            right = written[case].pop(name.lstrip("-"), np.zeros(2))
            written[case] |= {} if name.startswith("-") else {name: np.asarray(right + 1)}
    code, lines = judged(paper, written)
    printed = "\n".join(lines)
    assert code == 1
    assert re.search(re.escape(words).replace(r"\.\.\.", ".*"), printed, re.S), printed


KNOWN = "a known mistake that begins there: "


def test_known_mistakes_are_shown(judged):
    """A mistake is known by its tensor and error: another error there is not that mistake."""
    rows = rows_of("memformer/recall")
    flag = "logits-off-by-one"
    [mistake] = [each for each in MISTAKES if each["flag"] == flag]
    texts = (mistake[name] for name in ("function", "old", "new"))
    wrong = computed("memformer", "recall", changed(PAPERS["memformer"].reference, *texts))
    single = {name: row.astype(np.float32) for name, row in wrong.items() if row.dtype.kind == "f"}
    for found, last in (
        (wrong, f"{KNOWN}{flag} (docs/mistakes.md)"),
        (single, f"{KNOWN}{flag} (docs/mistakes.md)"),
        ({"0/logits": rows["0/logits"] + 1}, "look at: decoder.norm(x) M^T / sqrt(D); rows 1 .. N"),
    ):
        code, lines = judged("memformer", {"recall": rows | found})
        assert code == 1
        assert lines[-1].startswith(last)


def test_each_tensor_of_the_vectors_has_a_stage_and_a_hint_of_its_own_direction(monkeypatch):
    """What is said of a gradient is no hint of the forward pass, nor the other way round."""
    monkeypatch.chdir(FOLDER / "memorizing")
    logits = check.Row("0/logits", 1.0, 0.0, "wrong")
    assert check.hint_of(Path("retrieval.safetensors"), logits), "its folder is not found"
    hints = json.loads((FOLDER / "hints.json").read_text())
    pairs = [pair for listed in hints.values() for pair in listed]
    forward = {words for pattern, words in pairs if "grad" not in pattern}
    for path in FOLDER.rglob("*.safetensors"):
        for name in check.wanted(check.load(path)[0], ""):
            hint = check.hint_of(path, check.Row(name, 1.0, 0.0, "wrong"))
            assert hint and check.stage_of(name) in check.STAGES
            assert ("grad" in name) != (hint in forward), f"{path.stem}, {name}: {hint}"


def test_stages_are_compared_one_after_another_and_strict_asks_for_all_cases(judged):
    """A port without gradients has done stage 3; what is wrong later does not count."""
    rows = rows_of("memorizing/retrieval")
    written = {name: row for name, row in rows.items() if "grad" not in name}
    cases = {"retrieval": written | {"sgd/embedding": np.zeros(2)}}
    code, lines = judged("memorizing", cases, "--stage state")
    assert (code, lines[-1]) == (0, "all agree: vectors 1, memorizing, level state")
    code, lines = judged("memorizing", cases, "--stage state --strict")
    assert code == 1 and lines[-1].startswith("--strict asks for all cases: write the 3 ")
    code, lines = judged("memorizing", cases, "--stage steps")
    assert code == 1
    assert "begin with retrieval.safetensors, sgd/embedding: shape" in "\n".join(lines)


def test_a_machine_is_given_the_verdict(judged):
    """One JSON object; what people read is on standard error."""
    rows = rows_of("memorizing/retrieval")
    code, [line] = judged("memorizing", {"retrieval": rows}, "--json")
    right = {"agrees": True, "version": 1, "cases": 1, "missing": 3, "level": "steps"}
    assert (code, json.loads(line)) == (0, right | {"begin_with": None})
    rows["0/logits"] = rows["0/logits"] * np.nan
    code, [line] = judged("memorizing", {"retrieval": rows}, "--json")
    verdict = json.loads(line)
    assert (code, verdict["agrees"], verdict["begin_with"]["error"]) == (1, False, None)
    assert verdict["begin_with"]["tensor"] == "0/logits"
    file = "retrieval.safetensors"
    code, [line] = judged("memorizing", {"retrieval": rows}, "--json", file)
    assert (code, json.loads(line)["begin_with"]["file"]) == (1, file)


def test_replay_is_asked_for_by_its_stage_alone(judged):
    """How often what is called, and the same gradients again."""
    rows = rows_of("memformer/recall")
    without = {name: row for name, row in rows.items() if "replay" not in name}
    again = {f"replay/{name}": row for name, row in rows.items() if name.startswith("grad")}
    assert judged("memformer", {"recall": without})[0] == 0
    for written, code in (
        (without, 1),
        (rows | again, 0),
        (rows | again | {"replay/advance": np.array(0)}, 1),
    ):
        assert judged("memformer", {"recall": written}, "--stage replay")[0] == code


def test_operators_come_first_and_may_be_left_out(judged):
    """Of a function that is wrong its formula is named; a case has no operators."""
    rows = rows_of("operators/memorizing")
    written = {name: row for name, row in rows.items() if "layer_norm" not in name}
    code, lines = judged("operators", {"memorizing": written})
    assert (code, lines[-1]) == (0, "all agree: vectors 1, operators, level operators")
    written["operator/unit_norm/dx"] = rows["operator/unit_norm/dx"] * 2
    code, lines = judged("operators", {"memorizing": written}, "--stage operators")
    stage, first, hint = lines[-3:]
    assert (code, stage) == (1, "stage 1 of 6, operators, is not done")
    assert first.startswith("begin with memorizing.safetensors, operator/unit_norm/dx: 1.0e+00 at")
    assert hint == "look at: the formula above NAME_backward in reference/PAPER.py"


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_port_is_judged_by_the_type_that_it_wrote(dtype, judged):
    """Within the tolerance of its own type it agrees, beyond it does not."""
    rows = rows_of("memorizing/retrieval")
    right = rows["0/logits"]
    tolerance = check.TOLERANCES[np.dtype(dtype).name]
    for factor, code in ((0.5, 0), (3, 1)):
        off = right + factor * tolerance * np.abs(right).max()
        rows["0/logits"] = off.astype(dtype)
        assert judged("memorizing", {"retrieval": rows})[0] == code, factor


@pytest.mark.parametrize("reads", [True, False])
def test_a_copy_of_the_checker_works_alone_and_ends_quietly_if_nobody_reads(reads, tmp_path):
    shutil.copy(ROOT / "reference" / "check.py", tmp_path)
    program = "import sys; sys.modules['reference'] = None; import check; sys.exit(check.main())"
    command = [sys.executable, "-c", program, FOLDER / "memformer", FOLDER / "memformer"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, **pipes)
    if not reads:
        process.stdout.close()
    printed, error = process.communicate()
    assert (process.returncode, error) == (0 if reads else 1, "")
    assert not reads or "13 of 13 cases agree; 0 are not in" in printed


# Wrong conventions


# A port that breaks the rule is wrong in that case of docs/vectors, first in that tensor, and is
# told what stands behind |: what its numbers say of themselves (a factor, an order, a mask), which
# lanes are wrong, how it is computed. Behind another | stands the known mistake that this is
WRONG = [*blocks(ROOT / "tests" / "tools" / "wrong_conventions.txt")]


@pytest.mark.parametrize("rule", WRONG, ids=lambda rule: f"{rule.sentence.split()[0]}: {rule.task}")
def test_a_broken_rule_is_noticed_and_named(rule):
    """By the case that is for it; the first tensor that is wrong is the one next to the mistake."""
    where, says, flag = [*rule.sentence.split(" | "), "", ""][:3]
    paper, case, first, *function = where.split()
    path = FOLDER / paper / f"{case}.safetensors"
    expected, _ = check.load(path)
    wrong = changed(PAPERS[paper].reference, "".join(function), rule.old, rule.new)
    found = computed(paper, case, wrong, steps=False, backwards="grad" in first)
    rows = check.compare(expected, expected | found)
    row = check.first_wrong(rows)
    assert row.name == first
    assert says in f"{row.words}; {check.hint_of(path, row)}"
    assert check.flags_of(path, rows) == flag.split(), "mistakes that it is said to be"


# What a reference does not compute: those who port are told of it by other tests
ELSEWHERE = ("operator/.*/d", "operator/", "objective", "sgd/", "adamw/", "replay/[af]", "replay/")


def test_each_hint_is_that_of_a_mistake_which_is_planted():
    """A hint that no mistake begins with might be wrong, and nobody would notice."""
    hints = json.loads((FOLDER / "hints.json").read_text())
    begins = [rule.sentence.split()[:3] for rule in WRONG]
    begins += [
        (each["paper"], case, each["cases"][case][0]) for each in MISTAKES for case in each["cases"]
    ]
    said = {
        check.hint_of(FOLDER / paper / f"{case}.safetensors", check.Row(name, 1.0, 0.0, "wrong"))
        for paper, case, name in begins
    }
    listed = [pair for pairs in hints.values() for pair in pairs]
    unsaid = [pattern for pattern, words in listed if words not in said]
    assert tuple(unsaid) == ELSEWHERE
