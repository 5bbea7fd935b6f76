"""What a GPU takes in training and in reports, run on the CPU: the branches that any GPU takes work, and make no float64.

Exempt are the host's parts: a model's constants, which are made before it is moved, and NumPy.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import eval as evaluation_script
import train as training_script
from accelerated import replay
from accelerated.attention import content, relative_shift, signed_distance, sliding_window
from accelerated.evaluation.options import REPORTS
from tests.helpers.programs import COMPRESSIVE, MEMFORMER, MEMORIZING, TINY, WINDOWED, evaluate, train

SCRIPTS = {
    "block_recurrent": TINY,
    "compressive": COMPRESSIVE,
    "memformer": MEMFORMER,
    "memorizing": MEMORIZING,
    "pretrained_recurrence": WINDOWED,
}
REPORTS_OF = {
    "compression": ["compressive"],
    "overlap": ["pretrained_recurrence"],
    "attention": ["compressive"],
    "dynamic": ["block_recurrent", "compressive"],
    "topics": ["pretrained_recurrence"],
}
OPTIONS_OF = {
    "range": ["--segments", 2],
    "overlap": ["--overlaps", "0,2"],
    "dynamic": ["--learning-rate", 0.01],
    "attention": ["--sequences", 3],
    "topics": ["--contexts", 4, "--tokens", 5],
    "sample": ["--tokens", 20, "--top-p", 0.9],
}


class NoDoubles(TorchDispatchMode):
    """Refuses operations that take or return a tensor of float64."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.float64, torch.complex128):
                raise AssertionError(f"{function} takes or returns {tensor.dtype}")
        return result


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.double(),
        lambda x: torch.tensor(0.5, dtype=torch.float64),
        lambda x: x.sum(dtype=torch.float64),
        lambda x: x + torch.from_numpy(x.double().numpy()),
        lambda x: torch.zeros(2).double(),
        lambda x: x.to(torch.complex128),
    ],
)
def test_doubles_are_refused(make):
    torch.set_default_dtype(torch.float32)
    with NoDoubles(), pytest.raises(AssertionError, match="takes or returns"):
        make(torch.randn(4) * 0.5)


@pytest.fixture
def without_doubles(monkeypatch):
    """A function (owner, name, ...) that lets the named functions run only without doubles and on a GPU's branches."""
    calls = []

    def watch(owner, *names):
        for name in names:
            function = getattr(owner, name)

            def watched(*given, name=name, function=function, **options):
                calls.append(name)
                with NoDoubles():
                    return function(*given, **options)

            monkeypatch.setattr(owner, name, watched)
        return calls

    monkeypatch.setattr(replay, "on_host", lambda tensor: False)
    for module in (content, relative_shift, sliding_window, signed_distance):
        monkeypatch.setattr(module, "takes_sdpa", lambda query, key: key.shape[-2] > 1)
    return watch


def options_of(model, text, run):
    return [
        *SCRIPTS[model],
        "--data",
        text,
        "--steps",
        2,
        "--horizon",
        2,
        "--dropout",
        0.2,
        "--validation-segments",
        2,
        "--sample",
        12,
        "--out",
        run,
    ]


@pytest.mark.parametrize("model", SCRIPTS)
@pytest.mark.parametrize(
    "method,others",
    [
        ("through_time", ["--optimizer", "adamw", "--clip", 0.1, "--checkpoint-layers"]),
        ("checkpointed", ["--optimizer", "adafactor", "--accumulate", 3, "--update-every", 2]),
        ("memory_replay", ["--optimizer", "adam", "--dtype", "bfloat16"]),
    ],
)
def test_training_validation_and_sampling_make_no_doubles(text, tmp_path, model, method, others, without_doubles):
    """Of what train.py does after the run has been built, all."""
    calls = without_doubles(training_script, "train", "report", "sample")
    train(*options_of(model, text, tmp_path / "run"), "--backprop", method, *others)
    assert calls == ["train", "report", "sample"]


@pytest.mark.parametrize("model", SCRIPTS)
def test_reports_make_no_doubles(text, tmp_path, monkeypatch, model, without_doubles):
    """All of eval.py's reports that this model has."""
    text.write_bytes(text.read_bytes()[:2400])  # a few segments in each split
    train(*options_of(model, text, tmp_path / "run"), "--sample", 0)
    function_at, watched = evaluation_script.function_at, []

    def watching(place):
        function = function_at(place)

        def run(*given):
            watched.append(place)
            with NoDoubles():
                return function(*given)

        return run

    monkeypatch.setattr(evaluation_script, "function_at", watching)
    for name, report in REPORTS.items():
        if model not in REPORTS_OF.get(name, SCRIPTS):
            continue
        watched.clear()
        written = {"export": [tmp_path / "exported"], "view": ["--out", tmp_path / "page.html"]}
        evaluate(name, tmp_path / "run", *written.get(name, OPTIONS_OF.get(name, [])))
        assert report.function in watched, name
