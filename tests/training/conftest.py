"""Presets may name a set that the package datasets opens; here none is opened."""

import sys
from types import ModuleType

import pytest


@pytest.fixture(autouse=True)
def datasets(monkeypatch):
    """In place of the package, whose import takes seconds."""
    monkeypatch.setitem(sys.modules, "datasets", ModuleType("datasets"))
