"""The book: all functions and formulas are on its pages, in a real browser too, and the numbers
shown are a real run's.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from docs.excerpts import definitions
from reference.gradients import read_case
from reference.rollout import rollout_forward

BOOK = pytest.importorskip(
    "docs.book.__main__",
    reason="the book needs the extra docs: latex2mathml, markdown-it-py and Pygments",
)
METHODS = BOOK.METHODS  # the models that have a chapter
ROOT = Path(__file__).parents[2]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.timeout(
    400
)  # building takes 40 s on two quiet cores, and other tests run beside it
methods = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """The folder of the whole book, built as a reader would."""
    together = (
        "PYTEST_XDIST_WORKER" in os.environ
    )  # all workers read the one that the first of them builds
    folder = (
        tmp_path_factory.getbasetemp().parent / "book"
        if together
        else tmp_path_factory.mktemp("book")
    )
    built = folder.with_suffix(".built")
    with FileLock(folder.with_suffix(".lock")):
        if not built.exists():
            command = [sys.executable, "-m", "docs.book", "--out", folder]
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=350)
            built.touch()
    return folder


def data_of(page):
    """What a page's script shows."""
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.S)[1])


def array_of(data, number):
    """An array of a page."""
    value = data["values"][number]
    return np.frombuffer(base64.b64decode(value["data"]), np.float32).reshape(value["shape"])


@methods
def test_every_function_is_on_its_methods_page(book, method):
    assert set(data_of(book / f"{method}.html")["functions"]) == set(
        definitions(ROOT / "reference" / f"{method}.py")
    )


@methods
def test_values_are_those_of_the_reference(book, method):
    data = data_of(book / f"{method}.html")
    case = read_case(method, BOOK.default_case(method))
    rows, _, _ = rollout_forward(
        case.reference, case.params, case.config, case.segments, case.state
    )
    last = max(
        at
        for at, (path, _) in enumerate(data["functions"]["forward"]["places"])
        if path == "logits"
    )
    for segment in range(len(case.segments)):
        of_segment = [
            call
            for call in data["calls"]
            if (call["function"], call["segment"]) == ("forward", segment)
        ]
        shown = array_of(data, of_segment[-1]["held"][last])
        np.testing.assert_array_equal(shown, np.float32(rows[f"{segment}/logits"]))
        for name, number in data["values"][data["states"][segment][1]]["parts"].items():
            np.testing.assert_array_equal(
                array_of(data, number), np.float32(rows[f"{segment}/next.{name}"])
            )
    assert any(segment.starts.any() for segment in case.segments[1:]), (
        "a document starts in the middle"
    )


@methods
def test_finite_differences_equal_the_gradients_beside_them(book, method):
    data = data_of(book / f"{method}.html")
    pairs = []
    for name, (_, entries) in (
        beside for call in data["calls"] for beside in call["beside"].items()
    ):
        gradient = array_of(data, int(name.rpartition(":")[2])).ravel()
        pairs += [(gradient[flat], numeric) for flat, numeric in entries]
    by_hand, numeric = np.transpose(pairs)
    assert len(pairs) > 100
    np.testing.assert_allclose(by_hand, numeric, rtol=1e-4, atol=1e-5)


def test_pages_are_small_and_load_nothing(book):
    address = r"(?:src|href)=\"(?:https?:)?//[^\"]*\.(?:js|css|woff2?)"
    loads = address + r"|@import|\bfetch\(|XMLHttpRequest|import\("
    for page in book.iterdir():
        text = page.read_text()
        assert len(text) <= 3e6
        assert "default-src 'none'" in text
        assert not re.search(loads, text), page.name


@pytest.mark.skipif(
    not BROWSER, reason="looking at pages needs a browser: apt-get install chromium"
)
@pytest.mark.parametrize("page", [*METHODS, "replay", "index"])
def test_a_browser_shows_formulas_code_and_numbers(book, page, tmp_path):
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=3000",
        "--dump-dom",
    ]
    command = [BROWSER, *options, f"--user-data-dir={tmp_path}", book / f"{page}.html"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=100).stdout
    article = re.search(r"<article>(.*)</article>", shown, re.S)[1]
    plain = re.sub(r"<(code|pre)\b.*?</\1>|<math.*?</math>", "", article, flags=re.S)
    assert "$`" not in plain
    assert "$$" not in plain
    assert "\\frac" not in plain
    if page in METHODS:
        data = data_of(book / f"{page}.html")
        fields = data["values"][data["states"][0][0]]["parts"].values()
        largest = [np.abs(array_of(data, number)).max() or 1 for number in fields]
        found = re.findall(r"largest ([\d.e+-]+)", shown)[: len(largest)]
        assert [float(text) for text in found] == pytest.approx(largest, rel=1e-3)
        assert '<pre id="code">' in shown and 'class="has"' in shown
    if page == "replay":
        assert "step 1 of" in shown and "KiB; peak so far" in shown
