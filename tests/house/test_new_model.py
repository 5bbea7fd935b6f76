"""Adding a model means its own files and one word: a copy of one gets another name, and the scripts and tools take it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers.programs import MEMORIZING

ROOT = Path(__file__).parents[2]
NAMES = '"pretrained_recurrence")'  # ends the tuple of names in accelerated/models.py


def run(root, *words):
    """What a command of the project in root prints; it must succeed."""
    done = subprocess.run([sys.executable, *map(str, words)], cwd=root, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_is_its_own_files_and_one_word(tmp_path):
    for folder in ("accelerated", "reference"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for script in ("train.py", "eval.py"):
        shutil.copy(ROOT / script, tmp_path)
    for folder in ("reference", "accelerated", "accelerated/presets"):
        model = tmp_path / folder / "memorizing.py"
        text = model.read_text().replace("memorizing", "toy").replace("Memorizing", "Toy")
        model.with_name("toy.py").write_text(text)
    shutil.copytree(ROOT / "docs" / "vectors" / "memorizing", tmp_path / "docs" / "vectors" / "toy")
    models = tmp_path / "accelerated" / "models.py"
    models.write_text(models.read_text().replace(NAMES, '"pretrained_recurrence", "toy")'))

    (tmp_path / "text.txt").write_text("a text that a toy can read " * 400)
    small = [*MEMORIZING[2:], "--data", "text.txt", "--steps", 3, "--sample", 40]  # without --model memorizing
    printed = run(tmp_path, "train.py", "--model", "toy", "--out", "run", *small)
    assert re.search(r"bits per byte: \d\.\d+ with the memory, \d\.\d+ cleared each segment", printed)
    assert "bits per byte" in run(tmp_path, "eval.py", "score", "run")
    assert "all are the objective's derivatives" in run(tmp_path, "-m", "reference.toy", "--check")
