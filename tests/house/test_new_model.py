"""Adding a model means its own files and one line: a toy is added to a copy of the project, and trained by the scripts."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
TOY = Path(__file__).parent / "a_new_model"
LINE = '"pretrained_recurrence")'  # ends the tuple of names in accelerated/models.py


def with_toy(root: Path) -> None:
    """Copy the project to root, add the toy's three files, and its name in models.py."""
    for folder in ("accelerated", "reference"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for script in ("train.py", "eval.py"):
        shutil.copy(ROOT / script, root)
    for name, place in {"reference": "reference", "accelerated": "accelerated", "presets": "accelerated/presets"}.items():
        shutil.copy(TOY / f"{name}_toy.py", root / place / "toy.py")
    models = root / "accelerated" / "models.py"
    before = models.read_text()
    assert before.count(LINE) == 1
    models.write_text(before.replace(LINE, '"pretrained_recurrence", "toy")'))


def write_case(root: Path, module) -> None:
    """A case of docs/vectors with what --check needs: a config, parameters, a state and three segments of three lanes."""
    safetensors = pytest.importorskip("safetensors.numpy", reason="vectors need safetensors: pip install -e '.[all]'")
    config, rng = module.Config(vocabulary=5, width=3, segment=4), np.random.default_rng(0)
    rows = {f"given/param/{name}": value for name, value in module.init_params(config, rng).items()}
    rows["given/state/memory"] = rng.normal(size=(3, 3))
    for k in range(3):
        rows |= {f"given/{k}/{name}": rng.integers(5, size=(3, 4)) for name in ("tokens", "targets")}
        rows |= {f"given/{k}/scored": rng.random((3, 4)) < 0.8, f"given/{k}/starts": np.array([k == 1, False, False])}
    folder = root / "docs" / "vectors" / "toy"
    folder.mkdir(parents=True)
    fields = {"vocabulary": 5, "width": 3, "segment": 4, "dropout": 0.0}
    safetensors.save_file(rows, folder / "plain.safetensors", {"config": json.dumps(fields)})


def run(root: Path, *words: object) -> str:
    """What a command of the project in root prints; it must succeed."""
    done = subprocess.run([sys.executable, *map(str, words)], cwd=root, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_is_its_own_files_and_one_line(tmp_path, monkeypatch):
    with_toy(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("a text that a toy can read " * 400)
    printed = run(tmp_path, "train.py", "--model", "toy", "--data", text, "--out", "run", "--data-dir", "data", "--sample", 40)
    assert "a running mean of all that was read" in printed
    assert re.search(r"bits per byte: \d\.\d+ with the memory, \d\.\d+ cleared each segment", printed)
    assert "bits per byte" in run(tmp_path, "eval.py", "score", "run", "--data-dir", "data")
    monkeypatch.syspath_prepend(TOY)
    write_case(tmp_path, __import__("reference_toy"))
    assert "all are the objective's derivatives" in run(tmp_path, "-m", "reference.toy", "--check")
