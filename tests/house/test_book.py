"""The book: all functions and formulas are on its pages, in a real browser too, and the numbers
shown are a real run's.
"""

import base64
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest
from filelock import FileLock

from docs.book import values
from docs.book.__main__ import main
from docs.excerpts import definitions
from reference.gradients import read_case
from reference.rollout import rollout_forward
from tests.conftest import ROOT
from tests.house.browser import measured, needs_a_browser

BOOK = pytest.importorskip(
    "docs.book.site",
    reason="the book needs the extra docs: latex2mathml, markdown-it-py and Pygments",
)
default_case = pytest.importorskip("docs.book.method").default_case
METHODS = BOOK.METHODS  # the models that have a chapter
# Building takes 40 s of a core, and other tests run beside it
pytestmark = pytest.mark.timeout(400)
methods = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """The folder of the whole book, built as a reader would."""
    folder = tmp_path_factory.getbasetemp() / "book"
    if "PYTEST_XDIST_WORKER" in os.environ:  # all workers read what the first of them builds
        folder = folder.parents[1] / "book"
    built = folder.with_suffix(".built")
    with FileLock(folder.with_suffix(".lock")):
        if not built.exists():
            command = [sys.executable, "-m", "docs.book", "--no-python", "--out", folder]
            own = os.environ | {"PALIMPSEST_CACHE": str(folder.with_suffix(".values"))}
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=350, env=own)
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


def test_the_replay_is_on_every_page_that_has_its_mark(book):
    """On a chapter beside the values of its code."""
    marked = [path for path in BOOK.pages() if "replay" in BOOK.lives_of(path)]
    assert {path.stem for path in marked} >= {"replay", "memformer"}
    for path in marked:
        page = book / BOOK.pages()[path]
        data = data_of(page)
        assert data["replay"]["methods"] and "startReplay" in page.read_text(), page.name
        assert ("functions" in data) == BOOK.is_chapter(path)


@methods
def test_values_are_those_of_the_reference(book, method):
    """Of the last call of `forward` in each segment, the logits and the next state."""
    data = data_of(book / f"{method}.html")
    case = read_case(method, default_case(method))
    given = (case.reference, case.params, case.config, case.segments, case.state)
    rows, _, _ = rollout_forward(*given)
    places = data["functions"]["forward"]["places"]
    last = max(at for at, path in enumerate(places) if path == "logits")
    held = {
        call["segment"]: call["held"] for call in data["calls"] if call["function"] == "forward"
    }
    for segment in range(len(case.segments)):
        shown = {"logits": held[segment][last]}
        parts = data["values"][data["states"][segment][1]]["parts"]
        shown |= {f"next.{name}": number for name, number in parts.items()}
        for name, number in shown.items():
            expected = np.float32(rows[f"{segment}/{name}"])
            np.testing.assert_array_equal(array_of(data, number), expected, err_msg=name)
    starts = [segment.starts.any() for segment in case.segments[1:]]
    assert any(starts), "a document starts in the middle"


def test_every_page_of_docs_is_in_the_menu():
    pages = {path for paths in BOOK.menu().values() for path in paths}
    left = {ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - pages
    assert not left, f"no group of MENU in docs/book/site.py has {sorted(map(str, left))}"


@pytest.fixture(scope="module")
def places(book):
    """{page: the anchors and functions that a link to it can name}."""
    found = {}
    for page in book.glob("*.html"):
        anchors = re.findall(r'\bid="([^"]+)"', page.read_text())
        found[page.name] = {"", *anchors, *data_of(page).get("functions", {})}
    return found


def test_no_link_is_dead(book, places):
    """A link leads to a page that is there, and to an anchor or a function of it."""
    dead = []
    count = 0
    for name in places:
        text = (book / name).read_text().partition('json" id="book-data"')[0]
        for address in re.findall(r'<a [^>]*href="([^"]*)"', text):
            if "://" in address or address.startswith("mailto:"):
                continue
            page, _, anchor = address.partition("#")
            count += 1
            if anchor not in places.get(page or name, set()):
                dead.append(f"{name}: {address}")
    assert count > 1000
    assert not dead, f"{len(dead)} of {count} links are dead: {dead[:20]}"


def test_what_the_search_box_finds_is_there(book, places):
    """Titles, headings, functions and terms lead to a page and an anchor or a function of it."""
    script = (book / BOOK.INDEX).read_text()
    found = json.loads(script.removeprefix("window.searchEntries = ").removesuffix(";\n"))
    assert len(found) > 500
    names = {name for name, _, _ in found}
    assert {"slot_attention_backward", "fixed_gate_forward", "rollout", "Glossary"} <= names
    for name, _, address in found:
        page, _, anchor = address.partition("#")
        assert anchor in places[page], f"{name} is not at {address}"


def test_no_script_of_a_page_replaces_another_ones_function():
    """All scripts of a page share their names, and the last to be read has its way."""
    owners = {}
    for script in sorted((ROOT / "docs" / "book" / "page").glob("*.js")):
        for name in re.findall(r"^(?:async )?function (\w+)", script.read_text(), re.M):
            before = owners.setdefault(name, script.name)
            assert before == script.name, f"{name}() stands in {before} and in {script.name}"
    assert len(owners) > 50


def test_a_missing_package_is_named_in_one_line():
    hide = "import sys, importlib.util as u; f = u.find_spec; "
    hide += "u.find_spec = lambda n: None if n in ('latex2mathml', 'pygments') else f(n); "
    run = "from docs.book.__main__ import main; sys.exit(main(['--out', 'x']))"
    done = subprocess.run([sys.executable, "-c", hide + run], cwd=ROOT, capture_output=True)
    assert done.returncode == 2
    names = "latex2mathml Pygments"
    said = f"the book needs {names}, which is not here: pip install {names}\n"
    assert done.stderr.decode() == said


def test_the_book_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import docs.book.site"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


FAULTS_OF_A_PAGE = {  # what measure_book.js finds
    "error": "it raises an error",
    "cut_formulas": "cut formulas",
    "cut_code": "cut code",
    "hidden": "something is hidden",
    "anchors": "a page opens at another place than its anchor",
    "symbols": "symbols that are explained to a pointer alone",
    "menu": "links of the menu that cannot be clicked",
    "search": "the search box",
    "turned": "turning from text to code and back",
}


def text_pages():
    """The pages of the menu that have no code panel."""
    names = [BOOK.pages()[path] for paths in BOOK.menu().values() for path in paths]
    stems = [name.removesuffix(".html") for name in names]
    return [stem for stem in stems if stem not in METHODS]


@needs_a_browser
@pytest.mark.parametrize(
    "pages",
    [*([method] for method in METHODS), text_pages()],
    ids=[*METHODS, "text"],
)
def test_in_a_browser_nothing_is_cut_and_the_panel_follows_the_text(book, pages, tmp_path):
    """At each width: formulas and code fit, anchors open, the panel shows what sections name."""
    for found in measured(book, pages, tmp_path / "profile", seconds=300):
        where = f"{found['page']}.html, {found['width']} pixels wide"
        for fault, meaning in FAULTS_OF_A_PAGE.items():
            assert not found.get(fault), f"{where}: {meaning} ({found[fault]})"
        assert not found["scrolled"]["wrong"], f"{where}: the panel shows another function"
        if found["page"] in METHODS and found["width"] >= 1440:
            data = data_of(book / f"{found['page']}.html")
            fields = data["values"][data["states"][0][0]]["parts"].values()
            largest = [np.abs(array_of(data, number)).max() or 1 for number in fields]
            assert found["largest"] == pytest.approx(largest, rel=1e-3), where


def asked(address):
    """(status, text) of a page."""
    try:
        with urllib.request.urlopen(address) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def test_a_served_book_has_its_pages_and_no_other_file(tmp_path, monkeypatch):
    """Values of a chapter that are kept are not recorded again."""
    monkeypatch.setenv("PALIMPSEST_CACHE", str(tmp_path))
    values.file_of.cache_clear()
    values.write_whole(values.file_of("memformer"), b'{"functions":{},"kept":true}')
    values.file_of.cache_clear()
    command = [sys.executable, "-m", "docs.book", "--port", "0", "--no-browser", "--no-python"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        served = re.search(r"http://\S+", process.stdout.readline())[0]
        status, first = asked(served)
        assert status == 200 and "Palimpsest" in first
        assert '"kept":true' in asked(f"{served}memformer.html")[1]
        for name in ("nothing.html", "../pyproject.toml", "%2e%2e/pyproject.toml"):
            assert asked(served + name)[0] == 404
        process.terminate()


def test_a_page_that_is_not_the_books_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "index.html").write_text("mine")
    assert main(["--no-python", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "index.html is there and is no page of the book; give another folder" in error
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
