"""Settings of all tests: the same examples each time, float64 by default, one thread, no network."""

import os
import signal
import socket
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.helpers import profiles  # noqa: F401 (registers Hypothesis' profiles)

TESTS = Path(__file__).parent
ROOT = TESTS.parent
MARKED = ("paths", "compile", "process", "house", "lab")  # folders, each of which is a marker
PROOF = f"not ({' or '.join(MARKED)})"  # what pyproject.toml runs by default
HERE = (None, "", "localhost", "127.0.0.1", "::1")

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it runs in the background ignore Ctrl-C
settings.load_profile("ci")
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))  # of processes that tests start, too


def pytest_configure(config):
    """A file or folder that the command line names runs whole."""
    if config.option.markexpr == PROOF and config.args_source == pytest.Config.ArgsSource.ARGS:
        config.option.markexpr = ""


def pytest_ignore_collect(collection_path, config):
    """Import nothing of the marked folders for the proof."""
    return (config.option.markexpr == PROOF and collection_path.parent == TESTS and collection_path.name in MARKED) or None


def pytest_collection_modifyitems(items):
    """Mark each test by its folder."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in MARKED:
            item.add_marker(folder)


@pytest.fixture(autouse=True, scope="session")
def loopback_alone():
    """Fail a test that asks for another machine's address or connects to it."""
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def check(host):
        if host not in HERE:
            pytest.fail(f"a test needs no network, and this one asks for {host}")

    def connecting(self, address):
        check(address[0] if isinstance(address, tuple) else None)
        return connect(self, address)

    def looking_up(host, *given, **options):
        check(host.decode() if isinstance(host, bytes) else host)
        return look_up(host, *given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connecting)
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
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def text(tmp_path):
    """A file to read: a module of this project."""
    path = tmp_path / "book.txt"
    path.write_bytes((ROOT / "reference" / "block_recurrent.py").read_bytes())
    return path
