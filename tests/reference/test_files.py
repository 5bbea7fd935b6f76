"""Each reference file stands alone, and what stands in several of them is the same."""

import ast
import collections
import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent
EVERY = [path for path in sorted((ROOT / "reference").glob("*.py")) if "\nclass Config:" in path.read_text()]
REFERENCES = [path for path in EVERY if path.stem != "roberta"]  # which has no chapter of its own


def imported_modules(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_imports_are_numpy_and_the_standard_library(path):
    """RoBERTa, which belongs to one of the papers, takes what every Transformer has from that paper's file."""
    own = {"reference.pretrained_recurrence"} if path.stem == "roberta" else set()
    for module in set(imported_modules(ast.parse(path.read_text()))) - own:
        assert module.split(".")[0] in sys.stdlib_module_names | {"numpy"}, f"{path.name} imports {module}"


def test_functions_of_one_name_are_the_same_in_every_reference():
    """Compared without docstrings; `forward`, `backward` and what a paper defines for itself may differ."""
    own = {"forward", "backward", "initial_state", "initial_state_backward", "init_params", "init_layer"}
    own |= {"layer_forward", "layer_backward", "loss_and_gradients", "demonstrate", "check_config", "stopped"}
    bodies = collections.defaultdict(dict)
    for path in EVERY:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name not in own:
                if isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
                    node.body = node.body[1:]
                bodies[node.name][path.name] = ast.dump(node)
    for name, found in bodies.items():
        assert len(set(found.values())) == 1, f"{name} differs between {', '.join(found)}"


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_every_forward_stands_directly_before_its_backward(path):
    names = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    for name in names:
        if name.endswith("_forward"):
            partner = name.removesuffix("forward") + "backward"
            assert names[names.index(name) + 1] == partner, f"{partner} should follow {name}"


SECTIONS = ["configuration", "the method", "the model", "through segments", "demonstration"]  # a first reading's, in this order
SECTIONS += ["what every Transformer has", "variants", "starting values", "checks"]
LINES = {
    "block_recurrent": 811,
    "compressive": 894,
    "memformer": 967,
    "memorizing": 590,
    "pretrained_recurrence": 732,
    "roberta": 487,
}
FORMULAS = {  # backward functions with their mathematics above them
    "block_recurrent": 18,
    "compressive": 23,
    "memformer": 13,
    "memorizing": 13,
    "pretrained_recurrence": 13,
    "roberta": 7,
}
OBVIOUS = {"forward", "backward", "layer", "model", "dropout", "norm", "mlp", "gelu_mlp", "initial_state", "token_projection"}
FIRST = 250  # lines, in which the whole idea stands


def sections_of(path):
    """{title: (first line, last line, what its heading says)}, lines from 1."""
    lines = path.read_text().splitlines()
    starts = [number for number, line in enumerate(lines, 1) if line == "# " + "-" * 76]
    titles = [lines[number].removeprefix("# ").partition(": ") for number in starts]
    ends = [*(number - 1 for number in starts[1:]), len(lines)]
    return {title: (start, end, words) for start, end, (title, _, words) in zip(starts, ends, titles, strict=True)}


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_a_reference_has_the_idea_first_and_says_what_a_first_reading_skips(path):
    sections = sections_of(path)
    absent = {"variants"} if path in REFERENCES else {"what every Transformer has"}
    assert list(sections) == [title for title in SECTIONS if title in sections] and set(SECTIONS) - set(sections) <= absent
    for title in SECTIONS[5:]:
        assert title not in sections or "first reading" in sections[title][2], title
    *_, last = ast.parse(path.read_text()).body
    assert isinstance(last, ast.If) and "__main__" in ast.unparse(last.test)


def operation(name):
    """What a function computes, forward or backward; merge_heads is the backward of split_heads."""
    return "heads" if name in ("split_heads", "merge_heads") else name.removesuffix("_forward").removesuffix("_backward")


@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: path.stem)
def test_the_whole_idea_stands_in_the_first_250_lines(path):
    """Config, State and the method end there, and the method calls at most five operations that are explained later."""
    tree, (start, end, _) = ast.parse(path.read_text()), sections_of(path)["the method"]
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert max(end, defined["Config"].end_lineno, defined["State"].end_lineno) <= FIRST
    method = [node for node in defined.values() if start < node.lineno <= end and isinstance(node, ast.FunctionDef)]
    assert sum(node.name.endswith("_backward") for node in method) > 2
    names = {node.id for function in method for node in ast.walk(function) if isinstance(node, ast.Name)}
    later = {operation(name) for name in names & set(defined) if defined[name].lineno > FIRST}
    assert len(later) <= 5, f"explained later: {', '.join(sorted(later))}"


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_a_config_only_calls_its_checks_which_stand_last(path):
    tree, (start, *_) = ast.parse(path.read_text()), sections_of(path)["checks"]
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    (checks,) = (node for node in defined["Config"].body if getattr(node, "name", "") == "__post_init__")
    (called,) = checks.body
    assert defined[called.value.func.id].lineno > start


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_a_reference_grows_no_longer(path):
    assert len(path.read_text().splitlines()) <= LINES[path.stem]


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_the_backward_of_an_operation_has_its_mathematics_above_it(path):
    """Of the section `what every Transformer has`, where a backward is a formula; others, where it is no chain of calls."""
    source = path.read_text()
    start, end, _ = sections_of(path).get("what every Transformer has", (0, 0, ""))
    found = [
        (name, bool(re.match("# .+: .*d", above))) for above, name in re.findall(r"(.*)\ndef ([a-z_0-9]+)_backward\(", source)
    ]
    operations = re.findall(r"\ndef ([a-z_0-9]+)_backward\(", "\n".join(source.splitlines()[start:end]))
    assert len(operations) > 3 or path not in REFERENCES
    assert not [name for name, explained in found if name in operations and not explained and name not in OBVIOUS]
    assert sum(explained for _, explained in found) >= FORMULAS[path.stem]


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_caches_of_more_than_five_fields_have_names(path):
    tree = ast.parse(path.read_text())
    indexed = [node for node in ast.walk(tree) if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)]
    assert not [node.lineno for node in indexed if "cache" in ast.unparse(node.value) and isinstance(node.slice.value, int)]
    forwards = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.endswith("forward")]
    tuples = [node.value for forward in forwards for node in ast.walk(forward) if isinstance(node, ast.Return | ast.Assign)]
    tuples = [part for value in tuples if isinstance(value, ast.Tuple) for part in (value, *value.elts)]
    assert not [part.lineno for part in tuples if isinstance(part, ast.Tuple) and len(part.elts) > 5]


@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: path.stem)
def test_every_decision_is_listed_once_and_cited_where_it_acts(path):
    chapter = (ROOT / "docs" / f"{path.stem}.md").read_text()
    listed = chapter.partition("\n## Departures and decisions\n")[2].partition("\n## ")[0]
    items = re.split(r"^(\d+)\. ", listed, flags=re.M)[1:]
    numbers, texts = [int(number) for number in items[::2]], items[1::2]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 9
    assert all("   Ours:" in text or " Ours:" in text for text in texts)
    source = re.sub(r"\n *(# )?", " ", path.read_text())
    assert not re.findall(r"decisions? \d+\b(?!: [^\s).;]+ \w).{20}", source), "a citation says in three words what is decided"
    cited = {int(number) for number in re.findall(r"decision (\d+): ", source)}
    elsewhere = {
        number for number, text in zip(numbers, texts, strict=True) if re.search(r"`(accelerated/|train\.py|eval\.py)", text)
    }
    assert cited <= set(numbers) and set(numbers) <= cited | elsewhere, f"cited nowhere: {set(numbers) - cited - elsewhere}"


@pytest.mark.parametrize(
    "module,faults",
    [
        ("block_recurrent", {"sigmoid": np.tanh}),  # its derivative is another
        (
            "compressive",
            {
                "relative_shift_backward": lambda dout, cache: dout,
                "content_attention_backward": lambda dout, cache: (0 * cache[1], 0 * cache[1]),  # the compression's own loss
            },
        ),
        (
            "memformer",
            {
                "softmax_backward": lambda dweights, weights: weights * dweights,
                "segment_rng": lambda seed, t: None if seed is None else np.random.default_rng(),  # no replay of dropout
            },
        ),
        ("memorizing", {"sigmoid": np.tanh}),
        ("roberta", {"exact_gelu_backward": lambda dy, cache: dy * (cache[0] > 0)}),
        (
            "pretrained_recurrence",
            {
                "gelu_backward": lambda dy, cache: dy * (cache[0] > 0),
                "segment_rng": lambda seed, t: None if seed is None else np.random.default_rng(),  # no replay of dropout
            },
        ),
    ],
)
def test_the_demonstration_runs_and_notices_faults(module, faults, capsys, monkeypatch):
    module = importlib.import_module(f"reference.{module}")
    module.demonstrate()
    printed = capsys.readouterr().out
    assert "Largest relative error" in printed and ("cleared" in printed or "disjoint" in printed)
    for name, broken in faults.items():
        with monkeypatch.context() as patch:
            patch.setattr(module, name, broken)
            if name == "segment_rng":  # noticed by what comes after the finite differences, which take long
                patch.setattr(module, "check_gradients", lambda *given: 0.0)
            with pytest.raises(SystemExit):
                module.demonstrate()
