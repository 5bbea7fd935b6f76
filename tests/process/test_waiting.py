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
from accelerated.data.sources import Text

ROOT = Path(__file__).parent.parent.parent
BEGIN = """
from accelerated.program import progress
from accelerated.program.errors import run_program
progress.SECONDS = 0.001
from tests.helpers.texts import small_encoding
from accelerated.data.config import DataConfig
from accelerated.data.corpus import tokenised
from accelerated.data.sources import source_of_path
from accelerated.data.tokenizers import BpeTokenizer, train_bpe
source = source_of_path(DataConfig("book.txt"))
run_program("train.py", lambda: """
CALLS = {
    "learning 20,000 tokens": "train_bpe(source, 20_000))",
    "tokenising": "tokenised(source, BpeTokenizer('small', small_encoding()), 'cache'))",
}


@pytest.mark.parametrize("shown", CALLS)
def test_learning_and_tokenising_show_their_progress_and_end_when_interrupted(tmp_path, monkeypatch, shown):
    """The text is 12 MB in which every word is another, so that its tokens take a while to learn."""
    pytest.importorskip("tokenizers", reason="learning needs the extra bpe: pip install -e '.[bpe]'")
    letters = random.Random(0).randbytes(5_400_000).hex()
    (tmp_path / "book.txt").write_text(" ".join(letters[i : i + 9] for i in range(0, len(letters), 9)))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-c", BEGIN + CALLS[shown]]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        printed = next(line for line in process.stderr if shown in line)
        began = time.perf_counter()
        process.send_signal(signal.SIGINT)
        printed += process.stderr.read()
        code, seconds = process.wait(), time.perf_counter() - began
    assert code == 130 and seconds < 3.0 and printed.endswith("\ntrain.py: interrupted\n") and "Traceback" not in printed
    assert shown != "tokenising" or (" of 12.0M" in printed and " left" in printed)
    assert {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()} <= {".lock"}


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
        bar = SimpleNamespace(update=lambda size: signal.raise_signal(signal.SIGINT))
        list(token_cache.encoded(iter(texts), tokenizer, bar))
    assert time.perf_counter() - began < 4.0
    answered.set()
