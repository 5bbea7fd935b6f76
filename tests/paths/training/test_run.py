"""Opening a run: what cannot work is refused before training, and checkpoints of earlier releases continue."""

import dataclasses
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from accelerated.evaluation.score import Score
from accelerated.models import NAMES
from accelerated.training import opening
from accelerated.training.options import parse
from accelerated.training.run import Run
from accelerated.training.settings import preset_settings, settings_contents, settings_from
from tests.helpers.programs import TINY, WINDOWED, refusal, saved, train

CHECKPOINTS = Path(__file__).parent / "checkpoints"


@pytest.mark.parametrize("model", NAMES)
def test_a_checkpoint_of_an_early_release_continues_as_it_did_then(tmp_path, model):
    """An early release wrote the checkpoint at step 3 and the parameters at step 6; a later one, of memorizing."""
    run = tmp_path / "run"
    shutil.copytree(CHECKPOINTS / model, run)
    expected = torch.load(run / "expected.pt", weights_only=True)
    train("--resume", run, "--steps", 6)
    parameters = saved(run)["parameters"]
    assert parameters.keys() == expected.keys()
    for name, value in expected.items():
        assert (parameters[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


IMPOSSIBLE = [  # (options, what this machine is like besides, words of the refusal)
    (["--out", "file/deep"], {}, "cannot write file/deep: Not a directory; give another --out"),
    (
        ["--compile", "inductor", "--device", "cpu"],
        {"PATH": "", "CXX": "no"},
        "needs a C++ compiler on a CPU, and there is none",
    ),
    (
        ["--compile", "cudagraphs", "--device", "cpu"],
        {},
        "--compile cudagraphs needs --device cuda, and this is cpu",
    ),
    (
        ["--horizon", 10**12],
        {},
        "or a step of 48,000,000,000,000 tokens, does not fit into memory; give smaller ones",
    ),
    (
        ["--batch", 4, "--accumulate", 4],
        {"WORLD_SIZE": "2"},
        "--accumulate 4 does not divide each process's 2 lanes",
    ),
    (["--batch", 3], {"WORLD_SIZE": "2"}, "--batch 3 cannot be divided by 2 processes"),
    (
        ["--width", 10**9],
        {},
        "a model of these sizes, or a step of 48 tokens, does not fit into memory; give smaller ones",
    ),
    (["--train-words", 300], {"tokenizers": None}, "--train-words needs the package tokenizers; "),
]


@pytest.mark.parametrize(
    "options,environment,words", IMPOSSIBLE, ids=[words[:40] for *_, words in IMPOSSIBLE]
)
def test_what_this_machine_cannot_do_is_refused_before_data_is_read(
    tmp_path, monkeypatch, options, environment, words
):
    monkeypatch.setattr(opening, "load_data", lambda *_: pytest.fail("data was read"))
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("in the way")
    for name, value in environment.items():
        monkeypatch.setitem(sys.modules, name, None) if value is None else monkeypatch.setenv(
            name, value
        )
    assert words in refusal(train, *TINY, "--data", "stdlib", "--out", "run", *options)


def test_epochs_are_the_steps_that_read_that_part_of_all_windows(capsys):
    """Overlapping windows are more; a resumed run whose step is not below that is refused."""
    documents = [SimpleNamespace(inputs=range(predictions)) for predictions in (25, 8, 0)]
    resumed = SimpleNamespace(resumed={"step": 4}, folder="run")
    for overlap, epochs, steps in (
        (0, 2.0, 3),
        (0, 1.3, 2),
        (0, 0.1, 1),
        (3, 2.0, 3),
        (3, 2.4, 4),
    ):  # 5 or 6 windows of 8
        options = [
            *WINDOWED,
            "--horizon",
            2,
            "--batch",
            2,
            "--overlap",
            overlap,
            "--epochs",
            epochs,
        ]
        settings, _ = parse([str(option) for option in options])
        found = opening.with_steps(settings, documents, SimpleNamespace(resumed=None)).training
        assert (found.steps, found.epochs) == (steps, 0.0), (overlap, epochs)
        said = f"--epochs {epochs:g} of {6 if overlap else 5} segments in 2 x 2 a step"
        assert capsys.readouterr().out.startswith(f"{said}: {steps} step")
        line = refusal(opening.with_steps, settings, documents, resumed)
        assert re.match(f"{said} are {steps} steps?, and run is at step 4; give more", line)


def test_the_last_lines_say_how_much_was_read_and_of_recall_what_was_right():
    data = SimpleNamespace(data=SimpleNamespace(data="recall"), recall=SimpleNamespace(values=10))
    run = SimpleNamespace(validation_share=0.25, settings=data)
    assert Run.last_lines(run, Score(6.0, 4, 3, 4), Score(6.0, 4, 1, 4)).endswith(
        "cleared each segment\nright answers: 75.0% with the memory, 25.0% with it cleared (chance 10%)"
    )
    assert "validation on 4 tokens (25% of the split): " in Run.last_lines(
        run, Score(6.0, 4, 3, 4), None
    )


def test_a_run_validates_ten_times_unless_it_is_said_otherwise():
    """At most, and after its last step; what a preset, an option or an early run has is kept."""
    book = preset_settings("memformer", "tiny")
    for steps, asked, every in (
        (700, -1, 70),
        (701, -1, 71),
        (4, -1, 1),
        (0, -1, 0),
        (700, 0, 0),
        (700, 9, 9),
    ):
        training = dataclasses.replace(book.training, steps=steps, validate_every=asked)
        found = opening.with_steps(
            book._replace(training=training), [], SimpleNamespace(resumed=None)
        )
        assert found.training.validate_every == every, (steps, asked)
    contents = settings_contents(book)
    assert book.training.validate_every == -1 and settings_from(contents, "run") == book
    del contents["training_config"]["validate_every"]
    assert settings_from(contents, "run").training.validate_every == 0, "as an early release did"
