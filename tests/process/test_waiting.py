"""Who waits for tokens sees how far they are, and Ctrl-C ends the wait at once and leaves nothing half-written."""

import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from accelerated.data import corpus as token_cache
from accelerated.data.corpus import encoded
from accelerated.data.sources import Text

ROOT = Path(__file__).parent.parent.parent
BEGIN = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
from accelerated.program import progress
from accelerated.program.errors import run_program
progress.SECONDS = 0.001
from tests.helpers.texts import small_encoding
from accelerated.data.config import DataConfig
from accelerated.data.corpus import tokenised
from accelerated.data.sources import source_of_path
from accelerated.data.tokenizers import BpeTokenizer, train_bpe
source = source_of_path(DataConfig({book!r}))
"""
LEARN = "run_program('train.py', lambda: train_bpe(source, 20_000))"
TOKENISE = "run_program('train.py', lambda: tokenised(source, BpeTokenizer('small', small_encoding()), {cache!r}))"


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """A text of 12 MB in which every word is another, so that its tokens take a while to learn."""
    letters, path = random.Random(0).randbytes(5_400_000).hex(), tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text(" ".join(letters[i : i + 9] for i in range(0, len(letters), 9)))
    return path


def interrupted(program, shown):
    """Run a program, interrupt it once it prints the words, and return (exit code, seconds until it ended, what it printed)."""
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as process:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if shown in line:
                break
        began = time.perf_counter()
        process.send_signal(signal.SIGINT)
        lines += process.stderr.read().splitlines(keepends=True)
        return process.wait(), time.perf_counter() - began, lines


def test_learning_shows_its_progress_and_answers_an_interrupt(book):
    pytest.importorskip("tokenizers", reason="learning needs the extra bpe: pip install -e '.[bpe]'")
    code, seconds, lines = interrupted(BEGIN.format(root=str(ROOT), book=str(book)) + LEARN, "learning 20,000 tokens")
    assert code == 130 and seconds < 3.0 and lines[-1] == "train.py: interrupted\n" and "Traceback" not in "".join(lines)


def test_tokenising_shows_its_progress_and_leaves_nothing_when_interrupted(book, tmp_path):
    program = BEGIN.format(root=str(ROOT), book=str(book)) + TOKENISE.format(cache=str(tmp_path / "cache"))
    code, seconds, lines = interrupted(program, "tokenising")
    assert code == 130 and seconds < 3.0 and lines[-1] == "train.py: interrupted\n" and "Traceback" not in "".join(lines)
    assert " of 12.0M" in "".join(lines) and " left" in "".join(lines)
    assert [path.name for path in (tmp_path / "cache" / "tokens").glob("*/*")] == [".lock"]


def test_an_interrupt_does_not_wait_for_pieces_that_are_being_encoded(monkeypatch):
    """The second piece is begun before the interrupt, and encoded only after it has been answered."""
    begun, answered, texts = threading.Event(), threading.Event(), [("train", Text("x", ()))]

    def encode(piece):
        if piece == b"first":
            return begun.wait(5.0)
        begun.set()
        return answered.wait(5.0)

    monkeypatch.setattr(token_cache.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(token_cache, "pieces_of", lambda text, whole: iter([b"first", b"second"]))
    tokenizer = SimpleNamespace(encode=encode, takes_pieces=True)
    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        for _ in encoded(iter(texts), tokenizer, SimpleNamespace(update=lambda size: signal.raise_signal(signal.SIGINT))):
            pass
    assert time.perf_counter() - began < 4.0
    answered.set()
