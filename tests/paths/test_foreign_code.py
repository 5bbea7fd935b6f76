"""Nothing in a downloaded folder is run: every loader is given code there, and runs none of it."""

import builtins
import json
import pickle
import zipfile
from unittest.mock import Mock

import pytest

import accelerated
from accelerated.data.named_sets import table_source
from accelerated.lab.systems.roberta import load_roberta
from accelerated.program.errors import InputError
from reference import check
from tests.helpers.programs import evaluate, train

pytest.importorskip("transformers", reason="decoders need the package transformers: .[decoders]")
tokenizers = pytest.importorskip("tokenizers")  # it comes with transformers
pytest.importorskip("datasets", reason="hf:FOLDER needs the package datasets: .[datasets]")

SIZES = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 16, "max_position_embeddings": 24}
CLASSES = ("AutoConfig", "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoTokenizer")
LOADERS = {
    "--init": lambda folder: train(f"--init {folder} --out {folder}/run"),
    "--resume": lambda folder: train("--resume", folder),
    "--tokenizer": lambda folder: train(f"--tokenizer {folder} --out {folder}/run"),
    "--data": lambda folder: train(f"--data {folder} --steps 1 --out {folder}/run"),
    "--data hf:": lambda folder: list(table_source(f"hf:{folder}").texts()),
    "eval.py": lambda folder: evaluate("score", folder),
    "load": accelerated.load,
    "a RoBERTa": lambda folder: load_roberta(folder, False, 0),
    "reference.check": lambda folder: check.load(folder / "model.safetensors"),
}


class Program:
    """What its pickle runs when it is read."""

    def __init__(self, line):
        self.line = line

    def __reduce__(self):
        return exec, (self.line,)


def plant(folder, kind):
    """Write a program into each file of a folder that a loader may look at; returns its mark."""
    folder.mkdir()
    mark = folder / "it ran"
    line = f"open({str(mark)!r}, 'w', encoding='utf-8').close()"
    for name in ("code.py", f"{folder.name}.py", "conftest.py", "sitecustomize.py"):
        (folder / name).write_text(f"{line}\nclass A: pass\n", "utf-8")
    names = dict.fromkeys(CLASSES, "code.A")
    described = {"model_type": kind, "auto_map": names, "custom_pipelines": {"a": "code"}} | SIZES
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps(described), "utf-8")
    pickled = pickle.dumps(Program(line))
    for name in ["pytorch_model.bin", "model.safetensors", "vocab.json", "train.pkl"]:
        (folder / name).write_bytes(pickled)
    learned = tokenizers.ByteLevelBPETokenizer()  # a right one
    learned.train_from_iterator(["a text, and a text"], 260)
    learned.save(str(folder / "tokenizer.json"))
    with zipfile.ZipFile(folder / "checkpoint.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
    (folder / "best.pt").write_bytes((folder / "checkpoint.pt").read_bytes())
    return mark


@pytest.mark.parametrize("kind", ["llama", "roberta", "its own"])
@pytest.mark.parametrize("loader", LOADERS)
def test_a_folder_with_code_runs_none_and_asks_nothing(tmp_path, monkeypatch, loader, kind):
    """Some loaders read what is no program there; the others refuse it in a line."""
    monkeypatch.chdir(tmp_path)
    asked = Mock(return_value="y")  # what a user would say
    monkeypatch.setattr(builtins, "input", asked)
    folder = tmp_path / "planted"
    mark = plant(folder, kind)
    with pytest.raises((InputError, check.CheckError)) as caught:
        LOADERS[loader](folder)
    assert "\n" not in str(caught.value)
    assert not mark.exists(), "a program of the folder was run"
    assert not asked.called
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert mark.exists(), "its program does not run if it is unpickled without care"
