"""Adding a model means its own files and one word: a copy of one gets another name, and the scripts
and tools take it.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers.programs import MEMORIZING

ROOT = Path(__file__).parents[2]
NAMES = '"pretrained_recurrence")'  # ends the tuple of names in accelerated/models.py


def test_a_model_is_its_own_files_and_one_word(tmp_path):
    for folder in ("accelerated", "reference"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for script in ("train.py", "eval.py"):
        shutil.copy(ROOT / script, tmp_path)
    for model in tmp_path.rglob("memorizing.py"):
        text = model.read_text().replace("memorizing", "toy").replace("Memorizing", "Toy")
        model.with_name("toy.py").write_text(text)
    shutil.copytree(ROOT / "docs" / "vectors" / "memorizing", tmp_path / "docs" / "vectors" / "toy")
    models = tmp_path / "accelerated" / "models.py"
    models.write_text(models.read_text().replace(NAMES, '"pretrained_recurrence", "toy")'))
    (tmp_path / "text.txt").write_text("a text that a toy can read " * 400)

    def run(*words):
        return subprocess.check_output([sys.executable, *map(str, words)], cwd=tmp_path, text=True)

    small = [
        *MEMORIZING[2:],
        "--data",
        "text.txt",
        "--steps",
        3,
        "--sample",
        40,
    ]  # without --model memorizing
    assert "bits per byte" in run("train.py", "--model", "toy", "--out", "run", *small)
    assert "bits per byte" in run("eval.py", "score", "run")
    assert "all are the objective's derivatives" in run("-m", "reference.toy", "--check")
