"""What the tests promise of themselves: profiles that reach every property, no network, skips that say what runs them."""

import ast
import re
import socket
from pathlib import Path

import pytest
from hypothesis import settings

from tests.conftest import examples

TESTS = Path(__file__).parents[1]
FILES = {path.relative_to(TESTS).as_posix(): path.read_text() for path in sorted(TESTS.rglob("*.py"))}


@pytest.mark.parametrize("profile,counts", [("ci", (12, 150)), ("dev", (12, 150)), ("thorough", (2000, 2000))])
def test_a_profile_decides_how_many_examples_a_property_gets(profile, counts, request):
    chosen = settings.get_current_profile_name()
    request.addfinalizer(lambda: settings.load_profile(chosen))
    settings.load_profile(profile)
    assert tuple(examples(count).max_examples for count in (12, 150)) == counts
    assert settings.default.derandomize == (profile == "ci") and settings.default.print_blob


def test_no_property_sets_its_number_of_examples_past_the_profile():
    assert [file for file, text in FILES.items() if re.search(r"\bmax_examples=", text)] == ["conftest.py"]


@pytest.mark.parametrize("address", [("example.org", 80), ("192.0.2.1", 9)])
def test_other_machines_are_refused_and_the_loopback_address_is_not(address):
    with pytest.raises(pytest.fail.Exception, match="needs no network"):
        socket.create_connection(address)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        assert connection.getpeername() == server.getsockname()


def test_every_skip_says_what_would_run_it():
    trees = [ast.parse(text) for text in FILES.values() if "skip" in text]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    skips = [node for node in calls if ast.unparse(node.func) in ("pytest.skip", "pytest.importorskip", "pytest.mark.skipif")]
    said = [" ".join(map(ast.unparse, [*node.args, *(keyword.value for keyword in node.keywords)])) for node in skips]
    assert len(said) > 10 and not [words for words in said if not re.search("need|run |Linux", words)]
