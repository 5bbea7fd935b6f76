"""Opening a run: what cannot work is refused before training, and checkpoints of earlier releases continue."""

import dataclasses
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from accelerated.models import NAMES, model_class
from accelerated.training import folder, opening
from accelerated.training.options import parse
from accelerated.training.settings import preset_settings, settings_contents, settings_from
from tests.helpers.programs import COMPRESSIVE, MEMFORMER, TINY, WINDOWED, refusal, saved, train
from tests.helpers.texts import documents_of

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


HORIZON = "warning: --horizon {} only takes memory: no gradient passes between segments"
WARMUP = "warning: --warmup 40 is longer than --steps 10: the learning rate ends at 25% of --learning-rate"
PASSES = "warning: the training split is read 10.2 times and no validation chooses a checkpoint; give --validate-every"
WARNED = {  # {options: what is said}; a step of Memformer's reads 3 x 2 x 8 of the 240 tokens
    (*COMPRESSIVE, "--horizon", 1, "--warmup", 4, "--steps", 4): [],
    (*COMPRESSIVE, "--horizon", 2, "--warmup", 40, "--steps", 10): [HORIZON.format(2), WARMUP],
    (*COMPRESSIVE, "--horizon", 2, "--compression-loss", "bptt", "--steps", 4): [],
    (*WINDOWED, "--horizon", 3, "--steps", 4): [],
    (*WINDOWED, "--horizon", 3, "--vectors", 0, "--steps", 4): [HORIZON.format(3)],
    (*MEMFORMER, "--horizon", 2, "--steps", 51): [PASSES],
    (*MEMFORMER, "--horizon", 2, "--steps", 50): [],
    (*MEMFORMER, "--horizon", 2, "--steps", 51, "--validate-every", 5): [],
}


def test_settings_that_waste_work_give_a_warning(capsys):
    """A horizon through which no gradient passes, a warm-up that never ends, more than ten passes without validation."""
    for options, said in WARNED.items():
        settings = parse([str(option) for option in options])[0]
        model = model_class(settings.model)(settings.model_config, 0)
        corpus = SimpleNamespace(splits={"train": documents_of([241])})
        opening.warn(SimpleNamespace(settings=settings, model=model, corpus=corpus))
        printed = capsys.readouterr().err
        assert printed.count("warning") == len(said) and all(line in printed for line in said), options
        assert model.training


def test_it_is_said_how_much_a_run_reads():
    """Predictions of each split, and passes through those of training: 4 steps of 2 lanes of 3 segments of 8 tokens."""
    settings = parse([str(option) for option in [*MEMFORMER, "--batch", 2, "--horizon", 3, "--segment", 8, "--steps", 4]])[0]
    splits = {"train": documents_of([41, 41, 1]), "valid": documents_of([11]), "test": documents_of([6, 6])}
    said = opening.how_much_is_read(SimpleNamespace(settings=settings, corpus=SimpleNamespace(splits=splits)))
    assert said == "tokens: train 80, valid 10, test 10; 4 steps read 192, 2.4 passes"


@pytest.mark.parametrize(
    "sizes",
    [
        "--width 10000000",  # by counting: it would be drawn for minutes
        "--head-width 1000000000000000000",  # torch counts too far
        "--model compressive --memory 1000000000000",  # of the state
    ],
)
def test_a_size_that_cannot_be_allocated_is_named(text, tmp_path, sizes):
    line = refusal(train, *sizes.split(), "--data", text, "--batch", 1, "--segment", 16, "--out", tmp_path / "run")
    *_, option, size = sizes.split()
    assert f"not fit into memory; the largest, beside its default, is {option} {size}; give a smaller one" in line
    assert not (tmp_path / "run").exists()


def test_another_error_is_not_called_a_lack_of_memory():
    with (
        pytest.raises(RuntimeError, match="a mistake of ours"),
        opening.sizes_named(preset_settings(NAMES[0], "tiny").model_config),
    ):
        raise RuntimeError("a mistake of ours")


def test_two_runs_that_start_at_once_take_two_numbers(text, tmp_path, monkeypatch):
    """Both have read their options before either makes its folder. One that was asked for is not renamed."""
    monkeypatch.chdir(tmp_path)
    starts = [parse(["--data", str(text)])[1] for _ in range(2)]
    with opening.own_folder(starts[0]), opening.own_folder(starts[1]):
        assert [start.folder.name for start in starts] == ["block_recurrent-book-1", "block_recurrent-book-2"]
        assert all((start.folder / ".lock").exists() for start in starts)
    named = parse(["--data", str(text), "--out", "runs/mine"])[1]
    for _ in range(2):
        with opening.own_folder(named):
            assert named.folder.name == "mine"


IMPOSSIBLE = [  # (options, what this machine is like besides, words of the refusal)
    (["--out", "file/deep"], {}, "cannot write file/deep: Not a directory; give another --out"),
    (["--compile", "inductor", "--device", "cpu"], {"PATH": "", "CXX": "no"}, "needs a C++ compiler on a CPU, and there is none"),
    (["--compile", "cudagraphs", "--device", "cpu"], {}, "--compile cudagraphs needs --device cuda, and this is cpu"),
    (["--horizon", 10**12], {}, "a step with --batch 3 and --horizon 1000000000000 reads"),
    (["--batch", 3, "--accumulate", 2], {}, "--accumulate 2 does not divide each process's 3 lanes"),
    (["--batch", 4, "--accumulate", 4], {"WORLD_SIZE": "2"}, "--accumulate 4 does not divide each process's 2 lanes"),
    (["--batch", 3], {"WORLD_SIZE": "2"}, "--batch 3 cannot be divided by 2 processes"),
    (["--train-bpe", 300], {"tokenizers": None}, "--train-bpe needs the package tokenizers; "),
]


@pytest.mark.parametrize("options,environment,words", IMPOSSIBLE, ids=[words[:40] for *_, words in IMPOSSIBLE])
def test_what_this_machine_cannot_do_is_refused_before_data_is_read(tmp_path, monkeypatch, options, environment, words):
    monkeypatch.setattr(opening, "load_data", lambda *_: pytest.fail("data was read"))
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("in the way")
    for name, value in environment.items():
        monkeypatch.setitem(sys.modules, name, None) if value is None else monkeypatch.setenv(name, value)
    assert words in refusal(train, *TINY, "--data", "stdlib", "--out", "run", *options)
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left behind"


def test_a_run_that_cannot_begin_leaves_no_folder(text, tmp_path):
    """It takes its tokenizer along, but nothing that somebody else put there."""
    run = tmp_path / "run"
    text.write_bytes(b"\xff" * 999)
    assert "is not UTF-8 text" in refusal(train, "--data", text, *TINY, "--out", run)
    assert not run.exists()
    for name, stays in (("tokenizer.model", False), ("tokenizer.tiktoken", False), ("somebody's.txt", True)):
        run.mkdir()
        (run / ".lock").touch()
        (run / name).touch()
        folder.remove_new_run(run)
        assert run.exists() == stays, name


def test_epochs_are_the_steps_that_read_that_part_of_all_windows(capsys):
    """Overlapping windows are more; a resumed run whose step is not below that is refused."""
    documents = [SimpleNamespace(inputs=range(predictions)) for predictions in (25, 8, 0)]
    resumed = SimpleNamespace(resumed={"step": 4}, folder="run")
    for overlap, epochs, steps in ((0, 2.0, 3), (0, 1.3, 2), (0, 0.1, 1), (3, 2.0, 3), (3, 2.4, 4)):  # 5 or 6 windows of 8
        settings = parse([str(option) for option in [*WINDOWED, "--overlap", overlap, "--epochs", epochs, "--batch", 2]])[0]
        settings = settings._replace(training=dataclasses.replace(settings.training, horizon=2))
        found = opening.with_steps(settings, documents, SimpleNamespace(resumed=None)).training
        assert (found.steps, found.epochs) == (steps, 0.0), (overlap, epochs)
        said = f"--epochs {epochs:g} of {6 if overlap else 5} segments in 2 x 2 a step"
        assert capsys.readouterr().out.startswith(f"{said}: {steps} step")
        line = refusal(opening.with_steps, settings, documents, resumed)
        assert re.match(f"{said} are {steps} steps?, and run is at step 4; give more", line)


def test_a_run_validates_ten_times_unless_it_is_said_otherwise():
    """At most, and after its last step; what a preset, an option or an early run has is kept."""
    book = preset_settings("memformer", "tiny")
    for steps, asked, every in ((700, -1, 70), (701, -1, 71), (4, -1, 1), (0, -1, 0), (700, 0, 0), (700, 9, 9)):
        training = dataclasses.replace(book.training, steps=steps, validate_every=asked)
        found = opening.with_steps(book._replace(training=training), [], SimpleNamespace(resumed=None))
        assert found.training.validate_every == every, (steps, asked)
    contents = settings_contents(book)
    assert book.training.validate_every == -1 and settings_from(contents, "run") == book
    del contents["training_config"]["validate_every"]
    assert settings_from(contents, "run").training.validate_every == 0, "as an early release did"
