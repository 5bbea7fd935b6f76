"""What the tests promise of themselves: profiles that reach every property, no network, skips that say what runs them."""

import pkgutil
import re
import socket
from pathlib import Path

import pytest
from hypothesis import settings

from tests.conftest import examples

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("profile,counts", [("ci", (12, 150)), ("dev", (12, 150)), ("thorough", (2000, 2000))])
def test_a_profile_decides_how_many_examples_a_property_gets(profile, counts, request):
    chosen = settings.get_current_profile_name()
    request.addfinalizer(lambda: settings.load_profile(chosen))
    settings.load_profile(profile)
    assert tuple(examples(count).max_examples for count in (12, 150)) == counts
    assert settings.default.derandomize == (profile == "ci") and settings.default.print_blob


def test_no_property_sets_its_number_of_examples_past_the_profile():
    assert [path.name for path in TESTS.rglob("*.py") if re.search(r"\bmax_examples=", path.read_text())] == ["conftest.py"]


@pytest.mark.parametrize("address", [("example.org", 80), ("192.0.2.1", 9)])
def test_other_machines_are_refused_and_the_loopback_address_is_not(address):
    with pytest.raises(pytest.fail.Exception, match="needs no network"):
        socket.create_connection(address)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        assert connection.getpeername() == server.getsockname()


def test_no_wheel_is_made_of_a_clone():
    dist = pytest.importorskip("setuptools.dist", reason="pip needs setuptools to build")
    assert "tests.tools.wheel.NoWheel" in (TESTS.parent / "pyproject.toml").read_text()
    with pytest.raises(SystemExit, match="not a package"):
        pkgutil.resolve_name("tests.tools.wheel.NoWheel")(dist.Distribution()).run()


def test_every_skip_says_what_would_run_it():
    text = "\n".join(path.read_text() for path in TESTS.rglob("*.py"))
    calls = re.findall(r"pytest\.(?:mark\.)?(?:importor)?skip(?:if)?\(.*", text)
    assert len(calls) > 10 and not [call for call in calls if not re.search("need|run |Linux", call)]
