"""Opening a run: what cannot work is refused before training, and checkpoints of earlier releases continue."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

import train as training_script
from accelerated.models import NAMES
from accelerated.program.errors import InputError
from accelerated.training import folder, opening, process
from tests.helpers.programs import COMPRESSIVE, MEMFORMER, MEMORIZING, TINY, WINDOWED, saved, train

CHECKPOINTS = Path(__file__).parent / "checkpoints"


@pytest.mark.parametrize("model", NAMES)
def test_a_checkpoint_of_an_early_release_continues_as_it_did_then(tmp_path, model):
    """An early release that had the model wrote the checkpoint at step 3, and the expected parameters at step 6.

    Those of memorizing were written when empty rows of the memory began to come last.
    """
    run = tmp_path / "run"
    shutil.copytree(CHECKPOINTS / model, run)
    expected = torch.load(run / "expected.pt", weights_only=True)
    train("--resume", run, "--steps", 6)
    parameters = saved(run)["parameters"]
    assert parameters.keys() == expected.keys()
    for name, value in expected.items():
        assert (parameters[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


@pytest.mark.parametrize(
    "options,wastes",
    [
        ([*COMPRESSIVE, "--horizon", 1], False),
        ([*COMPRESSIVE, "--horizon", 2], True),
        ([*COMPRESSIVE, "--horizon", 2, "--compression-loss", "bptt"], False),
        ([*WINDOWED, "--horizon", 3], False),
        ([*WINDOWED, "--horizon", 3, "--vectors", 0], True),
    ],
)
def test_a_horizon_through_which_no_gradient_passes_gives_a_warning(tmp_path, capsys, options, wastes):
    recall = ["--data", "recall", "--recall-distance", 128, "--steps", 1, "--batch", 2, "--sample", 0]
    train(*options, *recall, "--validation-segments", 1, "--out", tmp_path / "run")
    words = f"--horizon {options[options.index('--horizon') + 1]} only takes memory: no gradient passes between segments"
    printed = capsys.readouterr().err
    assert f"warning: {words}" in printed if wastes else "--horizon" not in printed


def refused(monkeypatch, *argv):
    """Return the message that refuses to train; it must be one line, before any data is read."""
    monkeypatch.setattr(opening, "load_data", lambda *_: pytest.fail("data was read"))
    with pytest.raises(InputError) as caught:
        train(*argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_this_machine_cannot_do_is_refused_before_data_is_read(tmp_path, monkeypatch):
    options, run = [*TINY, "--data", "stdlib"], tmp_path / "run"
    (tmp_path / "file").write_text("in the way")
    message = refused(monkeypatch, *options, "--out", tmp_path / "file" / "deep")
    assert re.match("cannot write .*file/deep: Not a directory; give another --out", message)
    with monkeypatch.context() as patch:
        patch.setattr(opening.shutil, "which", lambda name: None)
        message = refused(patch, *options, "--compile", "inductor", "--device", "cpu", "--out", run)
        assert "--compile inductor needs a C++ compiler on a CPU, and there is none" in message
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tokenizers", None)
        assert "--train-bpe needs the package tokenizers" in refused(patch, *options, "--train-bpe", 300, "--out", run)
    message = refused(monkeypatch, *options, "--batch", 3, "--accumulate", 2, "--out", run)
    assert "--accumulate 2 does not divide each process's 3 lanes" in message
    message = refused(monkeypatch, "--init", tmp_path / "nowhere", "--data", "stdlib", "--out", run)
    assert "no such file; expected GPT-2 in safetensors" in message
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        message = refused(patch, *options, "--batch", 4, "--accumulate", 4, "--out", run)
        assert "--accumulate 4 does not divide each process's 2 lanes" in message
        assert "--batch 3 cannot be divided by 2 processes" in refused(patch, *options, "--out", run)
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left behind"


def test_a_text_that_cannot_be_read_leaves_no_empty_run(text, tmp_path):
    text.write_bytes(b"\xff" * 999)
    with pytest.raises(InputError, match="is not UTF-8 text"):
        train("--data", text, *TINY, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name,stays", [("tokenizer.model", False), ("tokenizer.tiktoken", False), ("somebody's.txt", True)])
def test_a_run_that_cannot_begin_takes_its_tokenizer_along(tmp_path, name, stays):
    run = tmp_path / "run"
    run.mkdir()
    (run / ".lock").touch()
    (run / name).touch()
    folder.remove_new_run(run)
    assert run.exists() == stays


def test_two_runs_without_out_take_two_folders(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        train("--data", text, *TINY, "--steps", 1, "--sample", 0, "--validation-segments", 1)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["block_recurrent-book-1", "block_recurrent-book-2"]


def test_a_gpus_peak_memory_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(process, "peak_memory", lambda device: "peak memory: much")
    recall = ["--data", "recall", "--recall-distance", 8, "--validation-segments", 1]
    train(*TINY, *recall, "--steps", 1, "--sample", 0, "--out", tmp_path / "run")
    assert "peak memory: much\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options", [TINY, COMPRESSIVE, MEMFORMER, MEMORIZING, WINDOWED], ids=["tiny", "compressive", "slots", "rows", "windowed"]
)
def test_groups_of_lanes_write_into_one_state(tmp_path, monkeypatch, options):
    """No second state of all lanes exists, which for a long memory may take more than all else; a resumed run's is its own."""
    found, forward_and_backward = [], training_script.forward_and_backward

    def watched(run, *given):
        places = [[field.untyped_storage().data_ptr() for field in run.state if field.numel()]]
        loss = forward_and_backward(run, *given)
        places.append([field.untyped_storage().data_ptr() for field in run.state if field.numel()])
        found.append(places)
        return loss

    monkeypatch.setattr(training_script, "forward_and_backward", watched)
    options = [*options, "--data", "recall", "--recall-distance", 128, "--sample", 0, "--validation-segments", 1]
    train(*options, "--accumulate", 3, "--steps", 1, "--out", tmp_path / "run")
    train("--resume", tmp_path / "run", "--steps", 2)
    assert len(found) == 2
    for before, after in found:
        assert before == after and len(set(before)) == len(before)
