"""What the tests promise of themselves: profiles that reach every property, no network."""

import socket

import pytest
from hypothesis import settings

from tests.conftest import examples


@pytest.mark.parametrize("profile,counts", [("ci", (12, 150)), ("dev", (12, 150)), ("thorough", (2000, 2000))])
def test_a_profile_decides_how_many_examples_a_property_gets(profile, counts, request):
    chosen = settings.get_current_profile_name()
    request.addfinalizer(lambda: settings.load_profile(chosen))
    settings.load_profile(profile)
    assert tuple(examples(count).max_examples for count in (12, 150)) == counts
    assert settings.default.derandomize == (profile == "ci") and settings.default.print_blob


def test_other_machines_are_refused_and_the_loopback_address_is_not():
    with pytest.raises(pytest.fail.Exception, match="needs no network"):
        socket.create_connection(("example.org", 80))
    with socket.socket() as one, pytest.raises(pytest.fail.Exception, match="needs no network"):
        one.connect(("192.0.2.1", 9))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        assert connection.getpeername() == server.getsockname()
