"""Settings of all tests: same examples each time, float64 by default, one thread, no network.

torch is imported by what needs it: the process that only hands tests to others (-n) starts sooner.
"""

import importlib.util
import inspect
import multiprocessing
import os
import re
import signal
import socket
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import engine

TESTS = Path(__file__).parent
ROOT = TESTS.parent
MARKED = {  # {folder: its marker}
    "paths": "interfaces",
    "compile": "compile",
    "process": "process",
    "house": "repository",
    "lab": "lab",
}
MODELS = {path.stem for path in (ROOT / "reference").glob("*.py")}
PROOF = f"not ({' or '.join(MARKED.values())})"  # what pyproject.toml runs by default
EXTRAS = (  # modules that an extra brings
    "matplotlib",
    "datasets",
    "tokenizers",
    "safetensors",
    "transformers",
)
OURS = ("reference", "accelerated", "train", "eval")  # packages that tests are of
HERE = (None, "", "localhost", "127.0.0.1", "::1")

# A shell lets what it runs in the background ignore Ctrl-C, and nohup that the terminal goes away
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# What a profile does not say is Hypothesis' default, which is another where the variable CI is set
USUAL = 25
LIKE = {"deadline": None, "print_blob": True}
# The default: the same examples each time
settings.register_profile("ci", max_examples=USUAL, derandomize=True, **LIKE)
# Others each time; a failure prints its blob
settings.register_profile("dev", max_examples=USUAL, derandomize=False, **LIKE)
LONG = {"suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("thorough", max_examples=2000, derandomize=False, **LONG, **LIKE)
engine.MAX_SHRINKING_SECONDS = 5  # for a smaller example of a failure; its default is 300
settings.load_profile("ci")  # pytest --hypothesis-profile=NAME comes after this choice

# Else the package datasets counts every set that it opens, by a request
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported


def examples(count: int) -> settings:
    """The settings of a property that needs another number of examples than USUAL.

    The profile `thorough` gives it as many as any other.
    """
    chosen = settings.default.max_examples
    return settings(max_examples=count if chosen == USUAL else chosen)


def pytest_configure(config):
    """A file or folder that the command line names runs whole; a run's files are its own."""
    if not config.option.basetemp:
        folder = tempfile.TemporaryDirectory(prefix="palimpsest-tests-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        config.option.basetemp = os.path.join(folder.name, "tests")
    if config.option.markexpr == PROOF and config.args_source == pytest.Config.ArgsSource.ARGS:
        config.option.markexpr = ""


def pytest_ignore_collect(collection_path, config):
    """Import nothing of the marked folders for the proof."""
    is_marked = collection_path.parent == TESTS and collection_path.name in MARKED
    if is_marked and config.option.markexpr == PROOF:
        return True
    return None  # as usual


def pytest_collection_modifyitems(items):
    """Mark each test by its folder."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in MARKED:
            item.add_marker(MARKED[folder])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Skip a test that fails for want of a package which an extra brings."""
    try:
        return (yield)
    except BaseException as error:
        found = re.search(r"(?:needs? the package |No module named ')([\w-]+)", str(error))
        module = found[1] if found else None
        if module not in EXTRAS or importlib.util.find_spec(module):
            raise
        pytest.skip(f"needs {module}: pip install -e '.[all]'")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Add a section to a failure's report: what the test claims, what failed, where to look.

    What failed is the last statement in a test file; where to look are the functions under test.
    """
    report = yield
    if report.failed and report.when == "call":
        places = []
        raised = []  # by functions of ours
        for each in call.excinfo.traceback:
            path = Path(each.path)
            module = each.frame.f_globals.get("__name__", "")
            if TESTS in path.parents and path.name.startswith("test_"):
                places.append(each)  # not a helper that compares
            elif module.partition(".")[0] in OURS:
                raised.append(f"{module}.{each.name}, where this was raised")
        failed = " ".join(str(places[-1].statement).split()) if places else ""
        claim = inspect.getdoc(item.obj) or item.originalname.replace("_", " ")
        given = item.callspec.params.values() if hasattr(item, "callspec") else ()
        papers = [value for value in given if isinstance(value, str) and value in MODELS]
        models = [f"{side}/{paper}.py" for paper in papers for side in ("accelerated", "reference")]
        named = [*raised[:-3:-1], *models, *under_test(item.obj, given)]
        accused = "\n".join(f"  look at {name}" for name in named)
        said = f"{claim}\n  this does not hold: {failed}\n{accused}"
        report.sections.append(("what it claims, and what may be wrong", said))
    return report


def under_test(test, given=()) -> list[str]:
    """The functions of ours that a test is given or names, by itself or in its file's helpers."""
    from torch.utils._pytree import tree_leaves

    drawn = getattr(test, "hypothesis", None)  # a property's function is inside Hypothesis' own
    waiting = [drawn.inner_test if drawn else inspect.unwrap(test)]
    named = functions_in(tree_leaves(list(given)))
    for function in waiting:  # which grows
        for value in named_by(function.__code__, function.__globals__):
            is_a_helper = value.__module__ == function.__module__ and inspect.isfunction(value)
            if is_a_helper and value not in waiting:
                waiting.append(value)
            named.append(value)
    ours = [value for value in named if (value.__module__ or "").partition(".")[0] in OURS]
    return [*dict.fromkeys(f"{value.__module__}.{value.__qualname__}" for value in ours)][:8]


def named_by(code, names) -> list:
    """The values of the names in a function's code, and of its modules' and classes' attributes."""
    values = [names[name] for name in code.co_names if name in names]
    for owner in tuple(values):
        if inspect.ismodule(owner) or inspect.isclass(owner):
            values += [getattr(owner, name) for name in code.co_names if hasattr(owner, name)]
    for inner in filter(inspect.iscode, code.co_consts):
        values += named_by(inner, names)
    return functions_in(values)


def functions_in(values) -> list:
    return [value for value in values if inspect.isfunction(value) or inspect.isclass(value)]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """A test that fails leaves no process running."""
    for process in multiprocessing.active_children():
        process.kill()


@pytest.fixture(autouse=True, scope="session")
def loopback_alone():
    """Fail a test that asks for another machine's address, as every connection does."""
    look_up = socket.getaddrinfo

    def looking_up(host, *given, **options):
        name = host.decode() if isinstance(host, bytes) else host
        if name not in HERE:
            pytest.fail(f"a test needs no network, and this one asks for {name}")
        return look_up(host, *given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", looking_up)
        yield


@pytest.fixture(autouse=True, scope="session")
def data_dir(tmp_path_factory):
    """Keep tokenised texts in a folder of this session, not in the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", os.fspath(folder))
        yield folder / "palimpsest"


@pytest.fixture(autouse=True)
def double_precision():
    """Build models in float64 unless a test sets another dtype."""
    import torch

    torch.set_default_dtype(torch.float64)
    torch.default_generator.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def own_handler():
    """Programs set a handler of SIGINT, which would end a later test; put the old one back."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def text(tmp_path):
    """A file to read: the beginning of a module of this project."""
    path = tmp_path / "book.txt"
    content = (ROOT / "reference" / "block_recurrent.py").read_text("utf-8")
    path.write_text(content[:12_000], "utf-8")
    return path


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A run of each model, trained for two steps; tests leave them as they are."""
    from tests.helpers.programs import trained_runs  # here: it imports much

    return trained_runs(tmp_path_factory.mktemp("runs"))
