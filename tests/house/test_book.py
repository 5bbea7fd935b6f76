"""The book: all functions and formulas are on its pages, in a real browser too, and the numbers
shown are a real run's.
"""

import base64
import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from docs.excerpts import definitions
from reference.gradients import read_case
from reference.rollout import rollout_forward
from tests.house.browser import BROWSER, measured

BOOK = pytest.importorskip(
    "docs.book.site",
    reason="the book needs the extra docs: latex2mathml, markdown-it-py and Pygments",
)
default_case = pytest.importorskip("docs.book.method").default_case
METHODS = BOOK.METHODS  # the models that have a chapter
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(
    400
)  # building takes 40 s on two quiet cores, and other tests run beside it
methods = pytest.mark.parametrize("method", METHODS)
MEANINGS = {  # {chapter: (a symbol of its text, its meaning)}
    "block_recurrent": ("c_t", "states before block t"),
    "compressive": ("y_i", "what a head's attention returns"),
    "memformer": ("M_t", "slots before step t"),
    "memorizing": (r"\alpha", "learned scale of attention"),
    "pretrained_recurrence": ("z_t", "pooled vector of window t"),
}


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
    return json.loads(re.search(r'json" id="book-data">(.*?)</script>', page.read_text(), re.S)[1])


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
    case = read_case(method, default_case(method))
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
        assert len(text) <= 2.5e6, page.name
        assert "default-src 'none'" in text
        if not page.name.startswith("file_"):
            assert not re.search(loads, re.sub(r"<pre>.*?</pre>", "", text, flags=re.S)), page.name


def test_every_page_of_docs_is_in_the_menu():
    pages = {path for paths in BOOK.menu().values() for path in paths}
    left = {ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - pages
    assert not left, f"no group of MENU in docs/book/site.py has {sorted(map(str, left))}"


def test_no_link_is_dead(book):
    """A link leads to a page that is there, and to an anchor or a function of it."""
    texts = {page.name: page.read_text() for page in book.glob("*.html")}
    anchors = {}
    for name, text in texts.items():
        functions = data_of(book / name).get("functions", {})
        anchors[name] = {"", *re.findall(r'\bid="([^"]+)"', text), *functions}
    dead = []
    count = 0
    for name, text in texts.items():
        for address in re.findall(
            r'<a [^>]*href="([^"]*)"', text.partition('json" id="book-data"')[0]
        ):
            if "://" in address or address.startswith("mailto:"):
                continue
            page, _, anchor = address.partition("#")
            count += 1
            if anchor not in anchors.get(page or name, set()):
                dead.append(f"{name}: {address}")
    assert count > 1000
    assert not dead, f"{len(dead)} of {count} links are dead: {dead[:20]}"


def test_a_missing_package_is_named_in_one_line():
    hide = "import sys, importlib.util as u; f = u.find_spec; "
    hide += "u.find_spec = lambda n: None if n in ('latex2mathml', 'pygments') else f(n); "
    run = "from docs.book.__main__ import main; sys.exit(main(['--out', 'x']))"
    done = subprocess.run([sys.executable, "-c", hide + run], cwd=ROOT, capture_output=True)
    assert done.returncode == 2
    said = done.stderr.decode().splitlines()
    assert said == [
        "the book needs latex2mathml Pygments, which is not here: pip install latex2mathml Pygments"
    ]


def test_the_book_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import docs.book.site"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@methods
def test_every_section_names_its_function(method):
    """<!-- panel: NAME --> under a heading is what the code panel shows there."""
    page = (ROOT / "docs" / f"{method}.md").read_text()
    page = re.sub(r"^```.*?^```", "", page, flags=re.M | re.S)  # a comment in code is no heading
    names = definitions(ROOT / "reference" / f"{method}.py")
    sections = re.findall(r"^##+ (.+)\n+(?:<!-- panel: (\w+) -->)?", page, re.M)
    without = [title for title, name in sections if not name]
    assert not without, f"docs/{method}.md: no <!-- panel: NAME --> under {without}"
    unknown = [name for _, name in sections if name not in names]
    assert not unknown, f"reference/{method}.py has no {unknown}, which docs/{method}.md names"


@methods
def test_a_symbol_of_the_text_leads_to_its_meaning(method):
    """The page explains a symbol by the row of the table Symbols whose number it has."""
    symbol, meaning = MEANINGS[method]
    article = BOOK.page_text(ROOT / "docs" / f"{method}.md", BOOK.pages(), {}).article
    text, _, after = article.partition('<table class="symbols">')
    formula = rf'aria-label="{re.escape(symbol)}"><math[^>]*>(?:<mrow>)?<\w+ data-s="(\d+)"'
    numbers = {int(number) for number in re.findall(formula, text)}
    assert len(numbers) == 1, f"docs/{method}.md: {symbol} leads to rows {numbers} of Symbols"
    table = after.partition("</table>")[0]
    row = re.findall(r"<tr>.*?</tr>", table.partition("<tbody>")[2], re.S)[numbers.pop()]
    assert meaning in html.unescape(row), f"docs/{method}.md: {symbol} leads to another row: {row}"


def text_pages():
    """The pages of the menu that have no code panel."""
    names = [BOOK.pages()[path] for paths in BOOK.menu().values() for path in paths]
    stems = [name.removesuffix(".html") for name in names]
    return [stem for stem in stems if stem not in METHODS]


@pytest.mark.skipif(
    not BROWSER, reason="looking at pages needs a browser: apt-get install chromium"
)
@pytest.mark.parametrize(
    "pages",
    [*([method] for method in METHODS), text_pages()],
    ids=[*METHODS, "text"],
)
def test_in_a_browser_nothing_is_cut_and_the_panel_follows_the_text(book, pages, tmp_path):
    """At each width: formulas and code fit, anchors open, the panel shows what sections name."""
    for found in measured(book, pages, tmp_path / "profile", seconds=300):
        where = f"{found['page']}.html, {found['width']} pixels wide"
        assert "error" not in found, f"{where}: {found['error']}"
        assert not found["cut_formulas"], f"{where}: cut formulas"
        assert not found["cut_code"], f"{where}: cut code"
        assert not found["hidden"], where
        assert not found["anchors"], f"{where}: a page opens at another place than its anchor"
        assert not found["symbols"], f"{where}: symbols that are explained to a pointer alone"
        assert not found["turned"], f"{where}: turning from text to code and back"
        assert not found["scrolled"]["wrong"], f"{where}: the panel shows another function"
        if found["page"] in METHODS:
            data = data_of(book / f"{found['page']}.html")
            fields = data["values"][data["states"][0][0]]["parts"].values()
            largest = [np.abs(array_of(data, number)).max() or 1 for number in fields]
            if found["width"] >= 1440:
                assert found["largest"] == pytest.approx(largest, rel=1e-3), where
