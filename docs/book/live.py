"""What the pages ask Python in the reader's browser; page/worker.js calls it there."""

import importlib
import json

from docs.book.values import as_json


def alive() -> None:
    """Say that an answer is on its way; the worker puts its own function here."""


def call(module: str, name: str, given: str) -> str:
    """JSON of what a function of docs.book returns, called with the JSON of its arguments."""
    function = getattr(importlib.import_module(module), name)
    return as_json(function(**json.loads(given)))
