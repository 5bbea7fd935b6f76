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
FILE = FOLDER / "compressive" / "conv-bptt.safetensors"
MISTAKES = json.loads(CATALOGUE.read_text())


# Gradients by finite differences


@pytest.mark.parametrize("paper", PAPERS)
def test_a_right_reference_passes_and_is_left_as_it_was(paper, capsys):
    """All its cases; what the paper stops is held meanwhile, in tables too."""
    reference = PAPERS[paper].reference
    before = dict(vars(reference))
    assert (FOLDER / paper).exists(), "a paper owes vectors"
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
def checked(tmp_path, capsys):
    """checked(case, rows, *options): (exit code, printed lines) of a port that wrote these."""

    def run(case, rows, *options):
        vectors = FOLDER / f"{case}.safetensors"
        theirs = tmp_path / vectors.name
        save_file(rows, theirs)
        capsys.readouterr()
        code = check.main([str(vectors), str(theirs), *options])
        return code, capsys.readouterr().out.splitlines()

    return run


@pytest.fixture
def judged(tmp_path, capsys):
    """judged(paper, {case: rows}, options): (exit code, printed lines) of a port's whole folder."""

    def run(paper, cases, options=""):
        for case, rows in cases.items():
            save_file(rows, tmp_path / f"{case}.safetensors")
        capsys.readouterr()
        code = check.main([str(FOLDER / paper), str(tmp_path), *options.split()])
        return code, capsys.readouterr().out.splitlines()

    return run


def rows_of(case):
    """{name: array} of a case of the vectors."""
    rows, _ = check.load(FOLDER / f"{case}.safetensors")
    return rows


@pytest.mark.parametrize(
    "name,change,says",
    [
        (
            "0/logits",
            lambda row: row + 1e-7 * np.abs(row).max(),
            "0/logits: 1.0e-07 at",
        ),
        (
            "0/logits",
            lambda row: np.where(row == row.max(), np.nan, row),
            "0/logits: 1 of",
        ),
        (
            "1/next.memory",
            lambda row: row.swapaxes(0, 1),
            "1/next.memory: shape (1, 3, 5, 4)",
        ),
        ("1/next.previous", lambda row: row + 1, "at most 0e+00"),
        ("grad/decoder.norm.bias", None, "grad/decoder.norm.bias: missing, shape (4,)"),
        ("grad/encoder.layers.0.read.key_bias", lambda row: row + 1e-6, "expected exactly zero"),
        ("2/loss", lambda row: row.astype(np.float32) * 1.02, "at most 1e-03"),
        ("inner/slot_scores", lambda row: row[..., ::-1].copy(), "only inner/ values are wrong"),
    ],
    ids=["too far off", "NaN", "shape", "integers", "missing", "not zero", "float32", "inside"],
)
def test_one_wrong_tensor_is_named(name, change, says, checked):
    rows = rows_of("memformer/all-tasks")
    right = rows.pop(name)
    if change:
        rows[name] = np.asarray(change(right))
    code, printed = checked("memformer/all-tasks", rows)
    assert code == 1
    at = next(number for number, line in enumerate(printed) if "is not done" in line)
    first, hint = printed[at + 1 : at + 3]
    assert re.match(r"all-tasks: 1 of \d+ tensors fail", printed[at - 2])
    assert first.startswith(f"begin with all-tasks.safetensors, {name}: ")
    assert says in "\n".join(printed[at:])
    assert hint.startswith("look at: ")
    assert sum("FAIL" in line for line in printed) == 1


def test_what_is_wrong_comes_before_what_is_missing_and_in_the_order_of_computation(checked):
    rows = rows_of("compressive/conv-bptt")
    del rows["0/logits"]
    wrong = ["1/loss", "1/grad_state/compressed", "grad/layers.1.query", "grad/layers.0.query"]
    wrong += ["grad/embedding", "sgd/embedding"]
    for name in wrong:
        rows[name] = np.asarray(rows[name] + 1)
    _, lines = checked("compressive/conv-bptt", rows)
    assert "begin with conv-bptt.safetensors, 1/loss: " in "\n".join(lines)
    assert [line.split()[0] for line in lines if line.endswith("FAIL")] == ["0/logits", *wrong]


def wrong_in(paper, tensors):
    """{case: rows} of a paper, in which one tensor of each case is wrong."""
    cases = {}
    for case, tensor in tensors.items():
        rows = rows_of(f"{paper}/{case}")
        cases[case] = rows | {tensor: np.asarray(rows.get(tensor, np.zeros(2)) + 1)}
    return cases


def test_of_a_folder_failures_are_shown_and_the_case_with_the_earliest_wrong_value_is_named(judged):
    """Not the first by its name, of which only the logits are wrong."""
    wrong = {"attention": "0/logits", "max": "inner/mixed", "mean": "inner/weights"}
    wrong |= {"plain": "logit"}
    code, lines = judged("pretrained_recurrence", wrong_in("pretrained_recurrence", wrong))
    assert code == 1
    at = next(number for number, line in enumerate(lines) if "cases agree" in line)
    cases, stage, first, hint = lines[at : at + 4]
    assert "plain: not in the vectors: logit" in lines
    assert cases.startswith("1 of 4 cases agree; 6 are not in")
    assert stage == "stage 2 of 6, logits, is not done"
    assert first.startswith("begin with mean.safetensors, inner/weights: ")
    assert hint.startswith("look at: softmax(scores) v")


def test_lanes_and_the_size_of_a_difference_say_what_a_name_cannot():
    """Of a start in the wrong lane, of a state that all lanes lost, and of float32."""
    words = {
        (1e-7, (0, 1, 2)): "an operation in float32, or an epsilon in another place?; ",
        (0.5, (1,)): "lane 1 alone is wrong, where a document starts in segment 1; ",
        (0.5, (0, 2)): "lane 1 alone is right, which starts a document; ",
        (0.5, (0,)): "",
    }
    computed = "the last M rows of [memory; h], of each layer's input"
    for (size, lanes), said in words.items():
        expected = np.ones((3, 2))
        actual = expected.copy()
        actual[[*lanes]] += size
        row = check.compared("1/next.memory", expected, actual)
        assert check.hint_of(FILE, row) == said + computed, (size, lanes)


RIGHT = np.arange(1.0, 25).reshape(2, 3, 4) % 7


@pytest.mark.parametrize(
    "actual,says",
    [
        (0 * RIGHT, "all of it is zero"),
        (-RIGHT / 2, "-0.5 times what is expected"),
        (RIGHT[:, ::-1], "the same numbers in another order of axis 1"),
        (RIGHT + np.arange(4), "off by the same in every row"),
        (np.maximum(RIGHT, 1), "3 that should be exactly zero are not"),
        (RIGHT * (RIGHT > 1), "4 are zero and should not be"),
        (RIGHT + RIGHT**2, "at most 1e-09"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_the_numbers_of_a_wrong_tensor_say_of_themselves(actual, says):
    """A factor, an order, a bias, a mask; of what is none of these nothing is said."""
    row = check.compared("0/logits", RIGHT, actual)
    assert row.words.endswith(says), row.words


EARLIEST = [  # (paper, {case: its wrong tensor}): the first case is named, not the larger file
    # several-layers has more tensors than mean, which alone has the steps inside a layer
    ("pretrained_recurrence", {"mean": "inner/mixed", "several-layers": "inner/mixed"}),
    # Forwards the first segment, backwards the last
    ("compressive", {"mean_pooling-none": "1/loss", "conv-bptt": "2/loss"}),
    (
        "compressive",
        {"mean_pooling-none": "1/grad_state/compressed", "conv-bptt": "grad/layers.0.query"},
    ),
    # Keys that are handed on wrong are in feedback's logits too, as its next block reads them
    ("block_recurrent", {"lstm-dual": "0/next.keys", "feedback": "0/logits"}),
]


@pytest.mark.parametrize("paper, wrong", EARLIEST)
def test_of_two_cases_the_one_that_says_more_is_named(paper, wrong, judged):
    code, lines = judged(paper, wrong_in(paper, wrong))
    case = next(iter(wrong))
    assert code == 1
    expected = f"begin with {case}.safetensors, {wrong[case]}: "
    assert any(line.startswith(expected) for line in lines), lines


def test_a_learned_state_comes_after_the_gradient_by_the_state(checked):
    """It is a part of that gradient: of the lanes that start."""
    rows = rows_of("memformer/all-tasks")
    for name in ("1/grad/initial_memory", "1/grad_state/memory"):
        rows[name] = rows[name] + 1
    _, lines = checked("memformer/all-tasks", rows)
    assert "begin with all-tasks.safetensors, 1/grad_state/memory: " in "\n".join(lines)


KNOWN = "a known mistake that begins there: "


def test_known_mistakes_and_unknown_names_are_shown(judged, checked):
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
    code, lines = checked("memformer/recall", rows | {"logit": np.zeros(2)}, "--stage", "logits")
    assert code == 0
    assert "recall: not in the vectors: logit" in lines


def test_a_mistake_that_is_off_as_much_as_a_known_one_is_not_called_by_its_name():
    """Distances without a sign and reversed ones; a memory that keeps the oldest, and none."""
    for sentence, flag, case in (
        ("rows for distances without a sign", "direction-of-distance", "memformer/all-tasks"),
        ("memory that keeps the oldest", "memory-never-written", "memorizing/retrieval"),
    ):
        [rule] = [each for each in WRONG if each.task == sentence]
        [known] = [each for each in MISTAKES if each["flag"] == flag]
        paper, name = case.split("/")
        expected = rows_of(case)
        for mistake, flags in ((rule, []), (known, [flag])):
            texts = ("", rule.old, rule.new)
            if mistake is known:
                texts = (known["function"], known["old"], known["new"])
            wrong = changed(PAPERS[paper].reference, *texts)
            found = computed(paper, name, wrong, steps=False, backwards=False)
            rows = check.compare(expected, expected | found)
            assert check.first_wrong(rows).name == known["cases"][name][0]
            assert check.flags_of(FOLDER / f"{case}.safetensors", rows) == flags


def test_each_tensor_of_the_vectors_has_a_stage_and_a_hint_of_its_own_direction():
    """What is said of a gradient is no hint of the forward pass, nor the other way round."""
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
    assert judged("memorizing", cases, "--stage state --strict")[0] == 1
    code, lines = judged("memorizing", cases, "--stage steps")
    assert code == 1
    assert "begin with retrieval.safetensors, sgd/embedding: shape" in "\n".join(lines)


def test_a_machine_is_given_the_verdict(tmp_path, capsys, judged):
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
    one = [str(path / "retrieval.safetensors") for path in (FOLDER / "memorizing", tmp_path)]
    assert check.main(["--json", *one]) == 1
    assert json.loads(capsys.readouterr().out)["begin_with"]["file"] == "retrieval.safetensors"


def test_replay_is_asked_for_by_its_stage_alone(checked):
    """How often what is called, and the same gradients again."""
    rows = rows_of("memformer/recall")
    without = {name: row for name, row in rows.items() if "replay" not in name}
    again = {f"replay/{name}": row for name, row in rows.items() if name.startswith("grad")}
    assert checked("memformer/recall", without)[0] == 0
    for written, code in (
        (without, 1),
        (rows | again, 0),
        (rows | again | {"replay/advance": np.array(0)}, 1),
    ):
        assert checked("memformer/recall", written, "--stage", "replay")[0] == code


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
    line = refusal(check.main, [str(FILE), str(FILE), "--stage", "operators"])
    assert "for nothing up to the stage operators" in line


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_port_is_judged_by_the_type_that_it_wrote(dtype, checked):
    """Within the tolerance of its own type it agrees, beyond it does not."""
    rows = rows_of("memorizing/retrieval")
    right = rows["0/logits"]
    tolerance = check.TOLERANCES[np.dtype(dtype).name]
    for factor, code in ((0.5, 0), (3, 1)):
        off = right + factor * tolerance * np.abs(right).max()
        rows["0/logits"] = off.astype(dtype)
        assert checked("memorizing/retrieval", rows)[0] == code, factor


@pytest.mark.parametrize(
    "vectors,theirs,says",
    [
        (FILE, "missing", "missing: no such file"),
        (FILE, "text", "text is no safetensors file"),
        (FILE.parent, "", "has none of the files of"),
        ("mine", FILE, "give VECTORS before THEIRS"),
        (FOLDER, "", "give a paper's folder"),
    ],
    ids=lambda given: str(given)[-20:],
)
def test_what_cannot_be_compared_is_one_line_and_exit_code_2(vectors, theirs, says, tmp_path):
    (tmp_path / "text").write_text("no tensors")
    save_file({"0/logits": np.zeros(3)}, tmp_path / "mine")
    line = refusal(check.main, [str(tmp_path / vectors), str(tmp_path / theirs)])
    assert line.startswith("reference.check: ")
    assert says in line


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
# told what stands behind |
WRONG = [*blocks(ROOT / "tests" / "tools" / "wrong_conventions.txt")]


@pytest.mark.parametrize("rule", WRONG, ids=lambda rule: f"{rule.sentence.split()[0]}: {rule.task}")
def test_a_broken_rule_is_noticed_and_named(rule):
    """By the case that is for it; the first tensor that is wrong is the one next to the mistake."""
    where, _, says = rule.sentence.partition(" | ")
    paper, case, first, *function = where.split()
    path = FOLDER / paper / f"{case}.safetensors"
    expected, _ = check.load(path)
    wrong = changed(PAPERS[paper].reference, "".join(function), rule.old, rule.new)
    found = computed(paper, case, wrong, steps=False, backwards="grad" in first)
    rows = check.compare(expected, expected | found)
    assert check.first_wrong(rows).name == first
    assert says in check.hint_of(path, check.first_wrong(rows))


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
