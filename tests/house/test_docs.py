"""README and docs: their code runs, formulas parse, what they name exists, and links lead
somewhere.
"""

import contextlib
import importlib.util
import io
import itertools
import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch

from accelerated.evaluation.options import parse
from accelerated.lab.speed.__main__ import parse_options as parse_bench
from accelerated.lab.systems.hotpotqa import parse_options as parse_hotpotqa
from accelerated.lab.tables.__main__ import TABLES
from accelerated.lab.tables.__main__ import parse_options as parse_experiment
from accelerated.models import NAMES
from accelerated.training.options import parse as parse_training
from docs.excerpts import (
    EXCERPT,
    TOUR,
    address,
    definitions,
    reference_of_pages,
    with_address,
    with_excerpts,
)
from tests.conftest import ROOT
from tests.helpers.programs import TINY, train, words
from tests.helpers.texts import write
from tests.tools import reach

PAGES = [ROOT / "README.md", ROOT / "tests" / "README.md", ROOT / "docs" / "book" / "front.md"]
PAGES += [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs").glob("[dr]*/*.md"))]
RUN_ALONE = ("block_recurrent", "compressive")
FORMULA = re.compile(r"^```math\n(.*?)^```$|\$`(.+?)`\$", re.M | re.S)
# What GitHub, KaTeX and latex2mathml all typeset
COMMANDS = """
    frac sqrt sum prod int mathrm mathbf mathcal operatorname text hat bar tilde dot top left right
    begin end quad qquad
    odot cdot times partial nabla exp log ln max min sin cos tanh lfloor rfloor lceil rceil lvert
    rvert lVert rVert mid
    le ge lt gt ne leq geq neq approx equiv sim propto in notin subset to mapsto infty pm ldots
    cdots vdots ddots circ ast
    alpha beta gamma delta epsilon varepsilon eta theta lambda mu nu pi rho sigma tau phi psi omega
    Delta Sigma ell ll gg
    underbrace overbrace Rightarrow Leftrightarrow rightarrow leftarrow oplus star
"""
EXTRAS = re.findall(
    r"^(\w+) = \[",
    (ROOT / "pyproject.toml").read_text().partition("optional-dependencies]")[2],
    re.M,
)
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def prose(page):
    """A page without its code blocks and formulas."""
    return re.sub(r"^```.*?^```$|\$`.*?`\$", "", page.read_text(), flags=re.M | re.S)


def train_what_is_opened(page, folder):
    """Train the runs that a page opens from Python: by the command that it has for them, or else a
    small one.
    """
    (folder / "book.txt").write_text("a page that was scraped and written again. " * 400)
    for run in set(re.findall(r'accelerated.load\("(\w\S*?)"', page.read_text())):
        of_page = (shlex.split(line)[2:] for line in commands(page) if f"--out {run}" in line)
        usual = words(*TINY, f"--data book.txt --steps 2 --out {run}")
        train(*next(of_page, usual))


@pages
def test_python_blocks_run_and_print_what_is_shown(page, tmp_path, monkeypatch):
    """All blocks of a page share their names, except in a chapter whose blocks run alone.

    There one that uses an earlier one's names says so: needs `NAME`. A text block right after a
    python block is what that prints.
    """
    monkeypatch.chdir(ROOT)
    if "accelerated.load(" in page.read_text():
        monkeypatch.chdir(tmp_path)
        torch.set_default_dtype(torch.float32)
        train_what_is_opened(page, tmp_path)
    source = EXCERPT.sub(lambda match: "\n" * match[0].count("\n"), page.read_text())
    names = {"__name__": page.stem}
    end = 0
    for match in re.finditer(
        r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", source, re.M | re.S
    ):
        code, shown = match.groups()
        needs_earlier = re.search(r"\bneeds\s(`|<code>)", source[end : match.start()])
        end = match.end()
        if page.stem in RUN_ALONE and not needs_earlier:
            names = {"__name__": page.stem}
        line = source[: match.start()].count("\n") + 1
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile("\n" * line + code, page, "exec"), names)
        assert shown is None or printed.getvalue() == shown, (
            f"line {line} prints\n{printed.getvalue()}"
        )


def test_the_recipe_of_a_decoder_of_transformers():
    """docs/library.md's block that is marked as py: not everybody has the package."""
    torch.set_default_dtype(torch.float32)
    page = (ROOT / "docs" / "library.md").read_text()
    [code] = re.findall(r"^```py\n(.*?)^```$", page, re.M | re.S)
    exec(code, {})


def test_the_tours_cells_run(tmp_path, monkeypatch):
    """docs/tour.ipynb, trained for two steps. It finds its clone from docs/."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(ROOT / "docs")
    names = {}
    for cell in json.loads((ROOT / "docs" / "tour.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            exec(source.replace("--steps 300", "--steps 2"), names)
            monkeypatch.chdir(tmp_path)
            assert cell["outputs"] or "print" not in source, "store the outputs of this cell"
    assert names["clone"] == ROOT
    assert names["result"].tokens == 16 * names["settings"].recall.questions


def test_the_tour_has_its_pictures_and_the_projects_address():
    """One that is set gives the notebook a clone and a badge; none leaves it as it is."""
    tour = TOUR.read_text()
    assert tour == with_address(tour, address()), "python -m docs.excerpts"
    given = with_address(tour, "https://github.com/someone/memories")
    assert 'CLONE = \\"https://github.com/someone/memories\\"' in given
    assert "colab-badge.svg)](https://colab.research.google.com/github/someone/memories/" in given
    assert with_address(given, "") == with_address(tour, "")
    for cell in json.loads(tour)["cells"]:
        named = re.findall(r"\(attachment:(.*?)\)", "".join(cell["source"]))
        assert named == [*cell.get("attachments", [])]


@pages
def test_code_that_is_named_exists(page):
    """`file.py::name`, `path/file.py`, and in a chapter, its results and its answers, functions of
    the reference or of its variants.
    """
    text = page.read_text()
    named = re.findall(r"([a-zA-Z_0-9./]+\.py)::(\w+)", text)
    if page.stem in NAMES:
        functions = re.findall(r"`([a-z_0-9]+_(?:forward|backward))`", text)
        defined = definitions(ROOT / "reference" / f"{page.stem}.py")
        assert not {*functions} - {*defined}, "no function of the reference or of its variants"
    for file, name in named:
        defined = rf"^ *(def|class) {name}\b|^{name} = "
        assert re.search(defined, (ROOT / file).read_text(), re.M), f"{file}::{name}"
    paths = re.findall(r"`((?:accelerated|reference|tests|docs)/[\w./]+)`", text)
    assert not [path for path in paths if not (ROOT / path).exists()]


def anchors(page):
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def links(page):
    """[(path, anchor)] of a page's links and pictures inside the project."""
    text = prose(page)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    targets += re.findall(r"^\[\w+\]: (\S+)", text, re.M)
    split = [target.partition("#") for target in targets if "://" not in target]
    return [((page.parent / path).resolve() if path else page, anchor) for path, _, anchor in split]


@pages
def test_lines_are_short(page):
    """Except those of a reference's code."""
    lines = EXCERPT.sub("", page.read_text()).splitlines()
    longest = max(lines, key=len)
    assert len(longest) <= 120, longest


def word_count(text):
    """Its words beside code, tables and addresses; a formula is one."""
    text = re.sub(r"^```.*?^```$|^\|.*?$|^\[\w+\]:.*?$", "", text, flags=re.M | re.S)
    return len(FORMULA.sub("formula", text).split())


def test_readme_is_short():
    """Below 600 words, without code, tables and addresses."""
    count = word_count((ROOT / "README.md").read_text())
    assert count < 600, f"README has {count} words"


@pages
def test_links_lead_somewhere(page):
    for to, anchor in links(page):
        assert to.exists(), to
        assert not anchor or anchor in anchors(to), f"{to.name}#{anchor}"


def commands(page):
    """Command lines of a page: its bash blocks, and code in its text that begins like one."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", page.read_text(), re.M | re.S)
    lines = [line for code in blocks for line in code.replace("\\\n", " ").splitlines()]
    for code in re.findall(r"`([^`\n]+)`", prose(page)):
        if re.match(r"(python|torchrun|pytest|pip) \S|(train|eval)\.py .*--", code):
            lines.append(code)
        elif re.match(r"[a-z]+ RUN", code):
            lines.append(f"python eval.py {code}")
    for line in lines:
        line = re.sub(r'"\$\([^)]*\)"', "text", line.partition(" #")[0])
        loop = re.fullmatch(r"for (\w+) in (\S+).*?; do (.*); done", line)
        if loop:
            name, first, body = loop.groups()
            line = body.replace(f"${name}", first)
        yield from (part.strip() for part in line.split(" && ") if part.strip())


def make_what_is_read(words):
    """Make the texts, prompts, tokenizers, folders of texts and runs that a command names."""
    for option, word in itertools.pairwise(words):
        is_text = option == "--prompt-file" or (option == "--data" and word.endswith(".txt"))
        is_folder = option == "--data" and word.endswith("/")
        is_run = option != "--out" and word.startswith(("RUN", "runs/"))
        if option == "--tokenizer" and (ROOT / word).is_file():
            write(Path(), {word: (ROOT / word).read_bytes()})
        elif is_text:
            write(Path(), {word: b"some text " * 99})
        elif is_folder or is_run:
            Path(word).mkdir(parents=True, exist_ok=True)


def check_training(words):
    """Parse a train.py command line.

    A run or a GPT-2 that it begins with is replaced by its model.
    """
    for option in {"--resume", "--init"} & set(words):
        at = words.index(option)
        gpt2 = [] if "--preset" in words or "runs/" in words[at + 1] else ["--preset", "gpt2"]
        model = next((name for name in NAMES if name in words[at + 1]), None)
        words[at : at + 2] = (
            ["--model", model] if model else ["--model", "pretrained_recurrence", *gpt2]
        )
    make_what_is_read(words)
    parse_training(words)


PARSERS = {  # {module that is run: what reads its command line}
    "accelerated.lab.systems.hotpotqa": parse_hotpotqa,
    "accelerated.lab.speed": parse_bench,
    "accelerated.lab.tables": parse_experiment,
}


def check_command(line):
    """Parse a command line, or see that the modules and files which it names are there."""
    words = [word for word in shlex.split(line) if word != "."]
    if "train.py" in words:
        check_training(words[words.index("train.py") + 1 :])
    elif "eval.py" in words:
        words = [word.removesuffix("...") for word in words[words.index("eval.py") + 1 :]]
        make_what_is_read(words)
        parse(words)
    elif words[:2] == ["python", "-m"]:
        table = next(iter(TABLES))
        module, *options = [word.replace("NAME", table) for word in words[2:]]
        assert importlib.util.find_spec(module), line
        if module in PARSERS:
            PARSERS[module](options)
    elif words[0] in ("python", "pytest"):
        files = [word.partition("::")[0] for word in words[1:] if not word.startswith("../")]
        files = [file for file in files if file.startswith("tests/") or file.endswith(".py")]
        for file in files:
            assert (ROOT / file).exists(), f"{file} is missing, of the command: {line}"
    for extras in re.findall(r"\.\[([\w,]+)\]", line):
        assert set(extras.split(",")) <= set(EXTRAS), line


@pages
def test_commands_would_be_accepted(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for line in commands(page):
        try:
            check_command(line)
        except SystemExit as end:
            assert not end.code, f"{line}: {capsys.readouterr().err}"  # 0 after --help


def test_commands_of_the_page_of_a_gpu_would_be_accepted():
    page = (ROOT / ".ci" / "gpu").read_text()
    page = page.replace("$bench", "accelerated.lab.speed").replace("$models", " ".join(NAMES))
    for command in re.findall(r'^  \[\w+\]="(.*)"$', page, re.M):
        check_command(f"python -m {command}")


def test_pictures_are_those_that_figures_draws_and_are_shown_in_a_page(tmp_path, monkeypatch):
    """Compared is how many lines there are, and what texts: places differ between versions."""

    def shapes(picture):
        return re.findall("<path|>.*</text>", picture.read_text())

    new = tmp_path / "figures"
    kept = ROOT / "docs" / "figures"
    new.mkdir()
    for draw in runpy.run_path(str(ROOT / "docs" / "figures.py"))["PICTURES"]:
        monkeypatch.setitem(draw.__globals__, "HERE", tmp_path)
        draw()
    for path in new.iterdir():
        assert shapes(path) == shapes(kept / path.name), f"{path.name}: python -m docs.figures"
    assert {path.name for path in kept.iterdir() if path.suffix != ".json"} <= {
        target.name for page in PAGES for target, _ in links(page)
    }


@pages
def test_formulas_are_typeset(page):
    """Each one parses, has only commands that every typesetter knows, and stands in no other block
    of code.
    """
    convert = pytest.importorskip(
        "latex2mathml.converter", reason="formulas need the extra docs: latex2mathml"
    ).convert
    for formula in (block or inline for block, inline in FORMULA.findall(page.read_text())):
        assert set(re.findall(r"\\([a-zA-Z]+)", formula)) <= set(COMMANDS.split()), formula
        assert formula.isascii()
        assert "<merror" not in convert(formula)
        assert "\\" not in convert(formula), formula
    outside = FORMULA.sub("", page.read_text())
    assert "$$" not in outside and "$`" not in outside


@pytest.mark.parametrize("page,reference", reference_of_pages().items(), ids=lambda path: path.stem)
def test_excerpts_are_the_references_code(page, reference):
    text = page.read_text()
    assert EXCERPT.search(text)
    assert text == with_excerpts(text, reference), "python -m docs.excerpts"


@pytest.mark.parametrize("paper", reach.ROWS)
def test_the_page_of_trust_has_the_tables_of_what_each_loss_trains(paper):
    """Those that test_reach.py measures."""
    assert reach.reach_table(paper) in (ROOT / "docs" / "trust.md").read_text()


def pages_of(name):
    """The text of a model's chapter, and that of its details if they are a page of their own."""
    page = ROOT / "docs" / f"{name}.md"
    assert page.exists(), f"docs/{name}.md is missing: a paper owes a chapter"
    details = ROOT / "docs" / "details" / f"{name}.md"
    return page.read_text(), details.read_text() if details.exists() else ""


@pytest.mark.parametrize("name", NAMES)
def test_a_chapter_is_an_evening(name):
    """At most 2,500 words beside code, tables and formulas, once its details are a page."""
    chapter, details = pages_of(name)
    count = word_count(chapter)
    assert count <= 2500 or not details, f"docs/{name}.md has {count} words"


@pytest.mark.parametrize("name", NAMES)
def test_every_exercise_has_an_answer_that_runs(name):
    """An exercise is followed by its folded answer, which asserts something."""
    exercise = (
        r"^\*\*Exercise \d+\.\*\*.*?^<details><summary>Answer</summary>\n\n(.*?)\n\n</details>$"
    )
    text = "\n".join(pages_of(name))
    answers = re.findall(exercise, text, re.M | re.S)
    assert len(answers) == text.count("\n**Exercise ") >= 5
    for number, answer in enumerate(answers, 1):
        assert "```python" in answer, f"the answer of exercise {number} has no code"
        assert "assert" in answer, f"the answer of exercise {number} asserts nothing"
