"""The pages that Python plays on in the reader's browser: in a real one, against Python outside."""

import json
from pathlib import Path

import numpy as np
import pytest

from docs.excerpts import ROOT, excerpt
from docs.practice.tasks import blocks
from reference.check import load
from tests.house.browser import BROWSER, Around, answer_of, needs_a_browser

pytest.importorskip(
    "docs.book.site",
    reason="the book needs the extra docs: latex2mathml, markdown-it-py and Pygments",
)
from docs.book import edit, runtime, serve, try_one

HERE = Path(__file__).parent
PARTS = str(runtime.parts_folder())
in_a_browser = pytest.mark.skipif(
    not BROWSER or bool(runtime.missing()),
    reason="needs a browser (apt-get install chromium) and Python's parts (python -m docs.book)",
)
pytestmark = pytest.mark.timeout(600)
SUGGESTIONS = list(blocks(ROOT / "docs" / "book" / "suggestions.txt"))


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """Python's parts are those of the user, though tests have a cache folder of their own."""
    monkeypatch.setenv("PALIMPSEST_PYTHON", PARTS)


class Handler(Around, serve.Handler):
    """Serves the book, and the page around its pages."""


def checked(folder, check, *given, options=()):
    """What a function of live.js found; there is no error on the page's console."""
    call = f"{check}({', '.join(map(json.dumps, given))})"
    script = (HERE / "live.js").read_text().replace("CHECK", call)
    around = f"<!doctype html><body><script>{script}</script>"
    found = answer_of(Handler, around, folder / "profile", 500, options)
    assert "failed" not in found, f"{found['failed']}; the page says: {found['text']}"
    assert not found["errors"], found["errors"]
    return found


def same_answers(mine, known, tolerance=1e-9):
    """Answers are the same, and their probabilities to a relative tolerance."""
    assert [each["answer"] for each in mine] == [each["answer"] for each in known]
    for one, other in zip(mine, known, strict=True):
        for name in ("probability", "of right"):
            assert one[name] == pytest.approx(other[name], rel=tolerance), name


def growth_of_rounding(side, made):
    """The largest relative change of a probability by a rounding of the weights, of 1e-14."""
    found = []
    for size in (0.0, 1e-14):
        try_one.begin(0, files=[side["file"]], **made)
        session = try_one.SESSIONS[0]
        rng = np.random.default_rng(0)
        for name, array in session.params.items():
            session.params[name] = array * (1 + size * rng.standard_normal(array.shape))
        found.append([each["of right"] for each in try_one.read(0, 1000)["answers"]])
    known, moved = np.array(found)
    return float(np.abs(moved / known - 1).max())


@in_a_browser
@pytest.mark.parametrize(
    "width,still,length,distractors", [(393, True, 7, "0"), (1440, False, 6, "0.2")]
)
def test_try_one_answers_as_numpy_does_outside(width, still, length, distractors, tmp_path):
    """On a phone and a screen, with and without animation; every control has a name and focus.

    Twice 1,024 tokens are read, or twice 512 with distractors, which make roundings grow faster.
    """
    options = ["--force-prefers-reduced-motion"] if still else []
    found = checked(tmp_path, "tryOne", width, length, distractors, options=options)
    assert found["scrollWidth"] <= width
    assert not found["mute"]
    assert found["rows"] == 10  # two tables of four answers
    assert "horizon of 16 stops before the fact" in found["backward"]
    assert (found["draws"] <= 4) == still
    for side in found["sides"]:
        begun = try_one.begin(0, files=[side["file"]], **found["made"])
        assert begun["tokens"] == side["tokens"]
        answers = try_one.read(0, 1000)["answers"]
        # up to 65 segments, through which a rounding grows: see growth_of_rounding
        tolerance = 1e-9 + 10 * growth_of_rounding(side, found["made"])
        assert tolerance < 1e-4
        same_answers(side["found"], answers, tolerance)


@in_a_browser
def test_200_questions_of_each_memory_have_the_answers_of_numpy_outside(tmp_path):
    files = [path.relative_to(ROOT).as_posix() for path in runtime.weights()]
    facts = [["3", "7", ""], ["5", "1", "0"], ["2", "8", ""], ["4", "9", ""]]
    documents = []
    for seed in range(50):
        made = {"facts": facts, "lengths": [seed, 2, 3 * seed], "distractors": 0.1, "seed": seed}
        documents.append(made)
    found = checked(tmp_path, "manyQuestions", files, documents)["answers"]
    assert len(found) == 50 * len(files)
    for number, mine in enumerate(found):
        try_one.begin(0, files=[files[number // 50]], **documents[number % 50])
        same_answers(mine, try_one.read(0, 1000)["answers"])


@in_a_browser
def test_a_changed_line_of_backward_is_named_by_the_check(tmp_path):
    """And the paper's text is right again after a reset."""
    given = ("block_recurrent", "fixed_gate_backward", "dout * g", "np.zeros_like(dout)")
    found = checked(tmp_path, "edit", *given)
    wrong, right = found["verdicts"]
    assert wrong.startswith("WRONG") and "Look at fixed_gate_backward" in wrong
    assert right.startswith("All 33 gradients are right")
    assert found["heats"] >= 2


@in_a_browser
def test_a_task_is_solved_in_the_page_and_an_endless_loop_is_ended(tmp_path):
    """The wrong answer is told its symptom; the standing is kept; the page lives on."""
    text = (HERE / "answers" / "memformer.txt").read_text()
    right = "import numpy as np\n\n\n" + text[text.index("def slot_scores") :]
    wrong = right.replace("query, key) / np.sqrt(E)", "query, key)")
    loops = "def slot_scores(query, self_key, key, readable):\n    while True: pass\n"
    found = checked(tmp_path, "practise", "slot_scores", [wrong, loops, right])
    (symptom, _), (ended, seconds), (done, _) = found["said"]
    assert "the scores of the encodings are not divided by sqrt(E)" in symptom
    assert "it loops" in ended and seconds < 30  # ten on a quiet machine, Python's start included
    assert done.startswith("✓ done")
    assert found["kept"]["memformer.slot_scores"]["status"] == "✓ done"


@needs_a_browser
def test_without_pythons_parts_a_recorded_run_is_shown_and_a_line_says_how_to_get_them(
    tmp_path, monkeypatch
):
    """The run is what `begin` and `read` return; no control promises another."""
    monkeypatch.setenv("PALIMPSEST_PYTHON", str(tmp_path / "none"))
    found = checked(tmp_path, "withoutPython", "try_one")
    assert found["open"] == 0
    assert [side["file"] for side in found["sides"]] == [*try_one.FIRST_FILES]
    for side in found["sides"]:
        assert try_one.begin(0, files=[side["file"]], **try_one.FIRST)["tokens"] == side["tokens"]
        same_answers(side["found"], try_one.read(0, 1000)["answers"])


@needs_a_browser
@pytest.mark.parametrize("width", [393, 1440])
def test_the_toys_begin_with_the_numbers_of_the_text(width, tmp_path):
    """And change when a slider is moved; no chapter is wider than the screen."""
    names = {"compressive": "toy_queue", "block_recurrent": "toy_gate"}
    names |= {"memformer": "toy_share", "pretrained_recurrence": "toy_pooled"}
    found = checked(tmp_path, "toys", [*names.items()], width)["found"]
    assert all(each["moved"] and each["scrollWidth"] <= width for each in found)
    queue, gate, share, pooled = found
    assert queue["cells"][1:4] == [
        ["0", "0, 0", "0", "0, 0", "1, 3"],
        ["1", "1, 3", "2", "0, 2", "5, 7"],
        ["2", "5, 7", "6", "2, 6", "9, 11"],
    ]
    assert [row[-1] for row in gate["cells"][1:]] == ["4 + 2 = 6", "3 + 0 = 3", "1.5 + 1 = 2.5"]
    assert "3: 0.125" in share["bars"]
    assert [row[1:] for row in pooled["cells"][1:]] == [
        ["none", "16", "18.75", "2.75"],
        ["8", "10", "11", "1"],
        ["5", "4", "4", "0"],
    ]


@pytest.mark.parametrize("path", runtime.weights(), ids=lambda path: path.stem)
def test_a_file_of_weights_is_small(path):
    assert path.stat().st_size <= 500_000
    rows, _ = load(path)
    assert {row.dtype for row in rows.values()} == {np.dtype("float16")}


def test_a_part_with_another_sum_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("PALIMPSEST_PYTHON", str(tmp_path))
    runtime.keep("pyodide.mjs", b"something else")
    assert runtime.missing() == [*runtime.PARTS]


@pytest.mark.parametrize("one", SUGGESTIONS, ids=lambda one: f"{one.task}-{one.function}")
def test_what_a_reader_may_try_stands_in_the_function(one):
    """There are three for each chapter."""
    assert one.old in excerpt(ROOT / "reference" / f"{one.task}.py", one.function)
    assert sum(other.task == one.task for other in SUGGESTIONS) == 3
    sentences = [sentence for _, sentence, _ in edit.opened(one.task, "forward")["suggestions"]]
    assert one.sentence in sentences


def test_a_document_is_made_as_it_was_asked_for():
    """Facts stand where they are said to, and a fact that is told again has its last value."""
    (file, *_) = (path.relative_to(ROOT).as_posix() for path in runtime.weights())
    made = {"facts": [["3", "7", "8"], ["5", "1", ""]], "distractors": 0.0, "seed": 0}
    begun = try_one.begin(0, files=[file], lengths=[10, 4, 20], **made)
    text = begun["tokens"]
    assert [text[place : place + 3] for _, place in begun["places"]] == ["@37", "@51", "@38"]
    assert [place for _, place in begun["places"]][:2] == [10, 17]
    assert [(key, right) for key, right, *_ in begun["questions"]] == [("3", "8"), ("5", "1")]
    assert all(text[place - 1 : place + 1] == f"?{key}" for key, _, place, _ in begun["questions"])
    with pytest.raises(ValueError, match="at most 32,768"):
        try_one.begin(0, files=[file], lengths=[32_000, 0, 32_000], **made)
