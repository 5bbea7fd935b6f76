"""The JavaScript of the book: one form, no build step. Node parses what each page runs."""

import re
import shutil
import subprocess

import pytest

from docs.excerpts import ROOT

BOOK = pytest.importorskip(
    "docs.book.site",
    reason="the book needs the extra docs: latex2mathml, markdown-it-py and Pygments",
)
FILES = sorted((ROOT / "docs" / "book" / "page").glob("*.js"))
MOST = 1_500  # lines in all
NODE = shutil.which("node")


def test_all_of_it_is_short():
    assert sum(len(path.read_text().splitlines()) for path in FILES) <= MOST


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_has_the_one_form(path):
    """128 columns, two spaces an indent, ===, const or let, double quotes, a title comment."""
    lines = path.read_text().splitlines()
    assert lines[0].startswith("// ")
    for number, line in enumerate(lines, 1):
        where = f"{path.name}:{number}"
        assert len(line) <= 128 and re.fullmatch(r"(  )*(\S([^\t]*\S)?)?", line), where
        banned = re.search(r" == | != |var |eval\(|innerHTML \+=", line.split("//")[0])
        assert not banned, f"{where}: {banned}"


@pytest.mark.skipif(not NODE, reason="parsing the scripts needs Node: apt-get install nodejs")
@pytest.mark.parametrize("data", [BOOK.NOTHING, "{whole}"])
def test_the_scripts_of_a_page_go_together(data, tmp_path):
    """No two of a page give one name to two things: such a page would run nothing."""
    scripts = {BOOK.scripts_for(path, data) for path in BOOK.pages()}
    for number, script in enumerate(sorted(scripts)):
        path = tmp_path / f"{number}.js"
        path.write_text(f'"use strict";\n{script}')
        done = subprocess.run([NODE, "--check", path], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:2000]
