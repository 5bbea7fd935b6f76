"""The pages that Python plays on in the reader's browser: in a real one, against Python outside."""

from pathlib import Path

import pytest

from tests.house.browser import BROWSER, Around, answer_of

pytest.importorskip(
    "docs.book.site",
    reason="the book needs the extra docs: latex2mathml, markdown-it-py and Pygments",
)
from docs.book import runtime, serve, try_one  # noqa: E402  (after the check of what they import)

HERE = Path(__file__).parent
MISSING = runtime.missing()
PARTS = str(runtime.parts_folder())
in_a_browser = pytest.mark.skipif(
    not BROWSER or bool(MISSING),
    reason="needs a browser (apt-get install chromium) and Python's parts (python -m docs.book)",
)
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """Python's parts are those of the user, though tests have a cache folder of their own."""
    monkeypatch.setenv("PALIMPSEST_PYTHON", PARTS)


class Handler(Around, serve.Handler):
    """Serves the book, and the page around its pages."""


def checked(check: str, folder: Path, seconds: float = 300, options: tuple = ()) -> dict:
    """What the function `check` of JavaScript found, with the helpers of live.js."""
    script = (HERE / "live.js").read_text() + f"\nasync function check() {{ {check} }}"
    around = f"<!doctype html><body><script>{script}</script>"
    found = answer_of(Handler, around, folder / "profile", seconds, options)
    assert "failed" not in found, f"{found['failed']}; the page says: {found['text']}"
    assert not found["errors"], found["errors"]
    return found


READ = """
const began = performance.now();
const inside = await opened("try_one", WIDTH);
await until("Python starts", () => inside.document.body.innerText.includes("Python is there"));
const started = performance.now() - began;
set(named(inside, "tokens before the facts"), 8);
set(named(inside, "tokens after the facts"), 7);
const reading = performance.now();
buttonOf(inside, "Read").click();
await until("the answers", () => told(inside, "tryOne.sides.every(side => side.isDone) && !tryOne.isReading"));
const seconds = (performance.now() - reading) / 1000;
const sides = told(inside, "tryOne.sides.map(({ weights, found, tokens, segments }) => ({ file: weights.value, found, tokens, segments }))");
const { scrollWidth } = inside.document.documentElement;
return { started, seconds, sides, made: told(inside, "tryOne.made"), rows: inside.document.querySelectorAll(".sides tr").length, scrollWidth };
"""


@in_a_browser
@pytest.mark.parametrize("width", [393, 1440])
def test_try_one_answers_as_numpy_does_outside(width, tmp_path):
    """It types facts, reads 2,048 tokens before and 1,024 after, and finds NumPy's probabilities."""
    found = checked(READ.replace("WIDTH", str(width)), tmp_path)
    assert found["scrollWidth"] <= width
    print(found["started"], found["seconds"], found["sides"][0]["segments"])
    for number, side in enumerate(found["sides"]):
        outside = try_one.begin(number, files=[side["file"]], **found["made"])
        assert outside["tokens"] == side["tokens"]
        answers = try_one.read(number, 1000)["answers"]
        assert len(answers) == len(side["found"]) == 4
        for mine, known in zip(side["found"], answers, strict=True):
            assert mine["answer"] == known["answer"]
            for name in ("probability", "of right", "left"):
                assert mine[name] == pytest.approx(known[name], rel=1e-9), name
    assert found["rows"] == 10  # two tables of four answers
