"""The porters' tools: `python -m reference.<paper> --check`, `python -m reference.check`, and what
the vectors notice.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from docs.practice.tasks import changed
from reference import check, gradients
from tests.helpers.variants import PAPERS
from tests.tools.vectors import FOLDER, computed

ROOT = Path(__file__).parents[2]
ANSWERS = Path(__file__).parent / "answers"
FILE = FOLDER / "compressive" / "conv-bptt.safetensors"


# Gradients by finite differences


@pytest.mark.parametrize("paper", PAPERS)
def test_a_right_reference_passes_and_is_left_as_it_was(paper, capsys):
    """All its cases; what the paper stops is held meanwhile, in tables too."""
    reference = PAPERS[paper].reference
    before = vars(reference) | {"AUXILIARY": dict(getattr(reference, "AUXILIARY", {}))}
    assert gradients.main(paper, ["--check"]) == 0
    *rows, verdict = capsys.readouterr().out.splitlines()
    assert verdict.startswith(f"All {len(rows)} cases of {paper} are right")
    assert before == {"AUXILIARY": {}} | vars(reference)
    case = gradients.read_case(paper, gradients.case_names(paper)[0])
    calls = gradients.Calls(reference)
    gradients.gradients_of(case, calls)
    assert gradients.guilty(case, calls)[-1] == "backward", "a right function is said to be wrong"


FAULTS = [block.split("\n") for block in (ANSWERS / "faults.txt").read_text().strip().split("\n\n")]


@pytest.mark.parametrize("head,old,new", FAULTS)
def test_a_wrong_backward_is_named_with_its_file(head, old, new, capsys, monkeypatch):
    """One line of a backward function is wrong: the verdict comes first, then that function."""
    paper, case, function = head.split()
    wrong = changed(PAPERS[paper].reference, function, old[2:], new[2:])
    monkeypatch.setitem(sys.modules, f"reference.{paper}", wrong)
    assert gradients.main(paper, ["--check", "--case", case]) == 1
    verdict, *lines = capsys.readouterr().out.splitlines()
    assert verdict.startswith(f"WRONG: {paper}, case {case}: ")
    accused = [line.split()[2] for line in lines if line.startswith("  look at")]
    assert accused[0] == function


def test_unknown_cases_are_one_line_and_exit_code_2(capsys, monkeypatch, tmp_path):
    assert gradients.main("memformer", ["--check", "--case", "recal"]) == 2
    assert "(nearest: recall)" in capsys.readouterr().err
    monkeypatch.setattr(gradients, "VECTORS", tmp_path)
    assert gradients.main("memformer", ["--check"]) == 2
    assert "run this in a clone" in capsys.readouterr().err


# A port's results


@pytest.fixture
def checked(tmp_path, capsys):
    """A function: (exit code, what is printed) for a port that wrote a case's rows after
    change(rows).
    """

    def run(case, change):
        path = FOLDER / f"{case}.safetensors"
        mine = tmp_path / "mine"
        rows, _ = check.load(path)
        save_file(change(rows), mine)
        return check.main([str(path), str(mine)]), capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    "name,change,says",
    [
        (
            "0/logits",
            lambda row: row + 1e-7 * np.abs(row).max(),
            "the first that is wrong: 1.0e-07 at",
        ),
        (
            "0/logits",
            lambda row: np.where(row == row.max(), np.nan, row),
            "the first that is wrong: 1 of",
        ),
        (
            "1/next.memory",
            lambda row: row.swapaxes(0, 1),
            "the first that is wrong: shape (1, 3, 5, 4)",
        ),
        ("1/next.previous", lambda row: row + 1, "must be equal"),
        ("grad/decoder.norm.bias", None, "the first that is missing: missing, shape (4,)"),
        ("grad/encoder.layers.0.read.key_bias", lambda row: row + 1e-6, "expected exactly zero"),
        ("2/loss", lambda row: row.astype(np.float32) * 1.02, "times the tolerance"),
        ("inner/slot_scores", lambda row: row[..., ::-1].copy(), "only inner/ values are wrong"),
    ],
    ids=["too far off", "NaN", "shape", "integers", "missing", "not zero", "float32", "inside"],
)
def test_one_wrong_tensor_is_named(name, change, says, checked):
    def with_one_wrong(rows):
        right = rows.pop(name)
        return rows | ({name: np.asarray(change(right))} if change else {})

    code, printed = checked("memformer/all-tasks", with_one_wrong)
    assert code == 1
    assert f"begin with {name}, " in printed
    assert says in printed
    assert printed.count("FAIL") == 1 and "look at: " in printed
    assert re.match(r"memformer all-tasks: (\d+) of (\d+) tensors agree", printed)


def test_what_is_wrong_comes_before_what_is_missing_and_in_the_order_of_computation(checked):
    wrong = (
        "1/loss",
        "1/grad_state/compressed",
        "grad/layers.1.query",
        "grad/layers.0.query",
        "grad/embedding",
        "sgd/embedding",
    )

    def change(rows):
        del rows["0/logits"]
        return rows | {name: np.asarray(rows[name] + 1) for name in wrong}

    _, printed = checked("compressive/conv-bptt", change)
    lines = printed.splitlines()
    assert "1 missing" in lines[0] and "begin with 1/loss" in lines[1]
    assert [line.split()[0] for line in lines if line.endswith("FAIL")] == ["0/logits", *wrong]


def test_of_a_folder_failures_are_shown_and_the_case_with_the_earliest_wrong_value_is_named(
    tmp_path, capsys
):
    """Not the first by its name, of which only the logits are wrong."""
    for name, wrong in {
        "attention": "0/logits",
        "max": "inner/mixed",
        "mean": "inner/weights",
        "plain": "logit",
    }.items():
        rows, _ = check.load(FOLDER / "pretrained_recurrence" / f"{name}.safetensors")
        save_file(
            rows | {wrong: rows.get(wrong, np.zeros(2)) + 1}, tmp_path / f"{name}.safetensors"
        )
    folders = [str(FOLDER / "pretrained_recurrence"), str(tmp_path)]
    assert check.main(folders) == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if "cases agree" in line)
    cases, stage, first, hint = lines[at : at + 4]
    assert "plain: not in the vectors: logit" in lines
    assert cases.startswith("1 of 4 cases agree; 6 are not in")
    assert stage == "stage 2 of 6, logits, is not done"
    assert first.startswith("begin with mean.safetensors, inner/weights: ")
    assert hint.startswith("look at: 1 / sqrt(E)")


def test_stages_are_compared_one_after_another_and_strict_asks_for_all_cases(tmp_path, capsys):
    """A port without gradients has done stage 2; what is wrong later does not count."""
    path = FOLDER / "memorizing" / "retrieval.safetensors"
    rows, _ = check.load(path)
    written = {name: row for name, row in rows.items() if "grad" not in name}
    save_file(written | {"sgd/embedding": np.zeros(2)}, tmp_path / path.name)
    command = [str(path.parent), str(tmp_path)]
    assert check.main([*command, "--stage", "state"]) == 0
    assert capsys.readouterr().out.endswith("\nstage 3 of 6 done: state\n")
    assert check.main([*command, "--stage", "state", "--strict"]) == 1
    capsys.readouterr()
    theirs = tmp_path / "recall.safetensors"
    path = FOLDER / "memformer" / theirs.name
    rows, _ = check.load(path)
    again = {f"replay/{name}": row for name, row in rows.items() if name.startswith("grad")}
    for changes, code in (({}, 1), (again, 0), (again | {"replay/advance": np.array(0)}, 1)):
        kept = {name: row for name, row in rows.items() if changes or "replay" not in name}
        save_file(kept | changes, theirs)
        assert check.main([str(path), str(theirs), "--stage", "replay"]) == code
    capsys.readouterr()
    assert check.main([*command, "--stage", "steps"]) == 1
    assert "begin with retrieval.safetensors, sgd/embedding: shape" in capsys.readouterr().out


def test_operators_come_first_and_may_be_left_out(tmp_path, capsys):
    """Of a function that is wrong its formula is named; a case has no operators."""
    path = FOLDER / "operators" / "memorizing.safetensors"
    rows, _ = check.load(path)
    wrong = {"operator/unit_norm/dx": rows["operator/unit_norm/dx"] * 2}
    written = {name: row for name, row in rows.items() if "layer_norm" not in name}
    command = [str(path.parent), str(tmp_path), "--stage", "operators"]
    save_file(written, tmp_path / path.name)
    assert check.main(command[:2]) == 0
    assert capsys.readouterr().out.endswith("\nstage 1 of 6 done: operators\n"), "and no other"
    save_file(written | wrong, tmp_path / path.name)
    capsys.readouterr()
    assert check.main(command) == 1
    stage, first, hint = capsys.readouterr().out.splitlines()[-3:]
    assert stage == "stage 1 of 6, operators, is not done"
    assert first.startswith("begin with memorizing.safetensors, operator/unit_norm/dx: 1.0e+00 at")
    assert hint == "look at: the formula above NAME_backward in reference/PAPER.py"
    assert check.main([str(FILE), str(FILE), "--stage", "operators"]) == 2
    assert "for nothing up to the stage operators" in capsys.readouterr().err


def test_a_bfloat16_file_is_read_with_a_tolerance_of_its_own(tmp_path):
    header = b'{"x":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}'
    content = len(header).to_bytes(8, "little") + header + bytes([0x80, 0x3F, 0x40, 0xC0])
    (tmp_path / "x").write_bytes(content)
    array = check.load(tmp_path / "x")[0]["x"]
    assert array.tolist() == [1.0, -3.0]
    assert check.tolerance_of(array.dtype) == check.TOLERANCES["BF16"]


@pytest.mark.parametrize(
    "vectors,theirs,says",
    [
        (FILE, "missing", "missing: no such file"),
        (FILE, "text", "text is no safetensors file"),
        (FILE, "longer", "2 bytes are left after the last tensor"),
        (FILE.parent, "", "has none of the files of"),
        ("mine", FILE, "give VECTORS before THEIRS"),
        (FOLDER, "", "give a paper's folder"),
    ],
)
def test_what_cannot_be_compared_is_one_line_and_exit_code_2(
    vectors, theirs, says, tmp_path, capsys
):
    (tmp_path / "text").write_text("no tensors")
    (tmp_path / "longer").write_bytes(FILE.read_bytes() + b"..")
    save_file({"0/logits": np.zeros(3)}, tmp_path / "mine")
    assert check.main([str(tmp_path / vectors), str(tmp_path / theirs)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("reference.check: ")
    assert says in error


def test_gradients_are_checked_with_numpy_alone():
    others = ("torch", "safetensors", "tqdm", "tiktoken", "filelock")
    program = (
        f"import sys; sys.modules |= dict.fromkeys({others}); "
        "from reference.gradients import main; "
        "sys.exit(main('pretrained_recurrence', ['--check']))"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True).returncode
        == 0
    )


@pytest.mark.parametrize("reads", [True, False])
def test_a_copy_of_the_checker_works_alone_and_ends_quietly_if_nobody_reads(reads, tmp_path):
    shutil.copy(ROOT / "reference" / "check.py", tmp_path)
    program = "import sys; sys.modules['reference'] = None; import check; sys.exit(check.main())"
    command = [sys.executable, "-c", program, FOLDER / "memformer", FOLDER / "memformer"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    if not reads:
        process.stdout.close()
    printed, error = process.communicate()
    assert (process.returncode, error) == (0 if reads else 1, "")
    assert not reads or "12 of 12 cases agree; 0 are not in" in printed


# Wrong conventions


def read_wrong():
    """(rule, paper, case, first, old, new) of each block of wrong_conventions.txt, whose lines
    after the head begin with - or +.

    A port that breaks the rule is wrong in that case of docs/vectors, and `first` is the tensor
    that the checker has to name.
    """
    for block in (
        (ROOT / "tests" / "tools" / "wrong_conventions.txt").read_text().strip().split("\n\n")
    ):
        head, *lines = block.splitlines()
        rule, _, words = head.partition(": ")
        old, new = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
        yield rule, *words.split(), old, new


WRONG = [*read_wrong()]


@pytest.mark.parametrize(
    "rule,paper,case,first,old,new", WRONG, ids=[f"{paper}: {rule}" for rule, paper, *_ in WRONG]
)
def test_a_broken_rule_is_noticed_and_named(rule, paper, case, first, old, new):
    """By the case that is for it; the first tensor that is wrong is the one next to the mistake."""
    expected, _ = check.load(FOLDER / paper / f"{case}.safetensors")
    found = computed(paper, case, changed(PAPERS[paper].reference, "", old, new), steps=False)
    rows = check.compare(expected, found)
    failing = [
        row.name for row in rows if not row.passes and not row.name.startswith(("sgd/", "adamw/"))
    ]
    assert failing[:1] == [first]
