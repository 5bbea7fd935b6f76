"""Settings of all tests: deterministic examples, float64 by default, two threads unless OMP_NUM_THREADS is set."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).parent.parent

settings.register_profile("deterministic", deadline=None, derandomize=True, max_examples=25, print_blob=True)
settings.load_profile("deterministic")
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))


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
