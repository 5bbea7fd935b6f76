"""Apple's GPU, which has no float64: nothing that runs on a device makes a tensor of it, and its generator is kept.

No such GPU was at hand. The CPU stands in for it, on the branches that any GPU takes. Exempt are the host's parts: a model's
constants, which are made before it is moved, and NumPy.
"""

import pytest
import torch
from scripts import COMPRESSIVE, MEMFORMER, MEMORIZING, TINY, WINDOWED, evaluate, train
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import eval as evaluation_script
import train as training_script
from accelerated import replay
from accelerated.attention import content, relative_shift, signed_distance, sliding_window
from accelerated.evaluation.options import REPORTS
from accelerated.program.errors import InputError
from accelerated.training import process

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


def on(monkeypatch, cuda=False, mps=False, processes=1):
    """Pretend that torch finds these GPUs, in one of so many processes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(cuda))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setenv("WORLD_SIZE", str(processes))


@pytest.mark.parametrize(
    "found,given,expected",
    [
        ({}, ["auto"], "cpu"),
        ({"mps": True}, ["auto"], "mps"),
        ({"mps": True, "cuda": True}, ["auto"], "cuda"),
        ({"mps": True}, ["cpu"], "cpu"),
        ({"mps": True, "cuda": True}, ["mps"], "mps"),
        ({"mps": True}, ["mps", "bfloat16"], "mps"),
        ({"mps": True}, ["auto", "float64"], "cpu"),
        ({"mps": True, "processes": 2}, ["auto"], "cpu"),
        ({"cuda": True}, ["auto", "float64"], "cuda"),
    ],
)
def test_auto_takes_cuda_then_mps_then_the_cpu(monkeypatch, found, given, expected):
    on(monkeypatch, **found)
    assert process.choose_device(*given).type == expected


@pytest.mark.parametrize(
    "found,given,words",
    [
        ({}, ["mps"], "--device mps: torch finds no GPU of Apple's here; use --device cpu"),
        ({"cuda": True}, ["mps"], "torch finds no GPU of Apple's"),
        ({"mps": True}, ["cuda"], "--device cuda: torch finds no GPU"),
        ({"mps": True}, ["mps", "float64"], "--device mps: Apple's GPU has no float64; use --device cpu"),
        ({"mps": True, "processes": 2}, ["mps"], "--device mps: several processes cannot train on Apple's GPU"),
    ],
)
def test_what_apples_gpu_cannot_do_is_refused_in_one_line(monkeypatch, found, given, words):
    on(monkeypatch, **found)
    with pytest.raises(InputError, match=words) as caught:
        process.choose_device(*given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("available,options", [(False, []), (True, ["--dtype", "float64"])])
def test_train_and_eval_refuse_it_before_they_read(text, tmp_path, monkeypatch, available, options):
    run = tmp_path / "run"
    train(*TINY, "--data", text, "--steps", 1, "--sample", 0, "--validation-segments", 1, *options, "--out", run)
    on(monkeypatch, mps=available)
    words = "Apple's GPU has no float64" if available else "torch finds no GPU of Apple's"
    with pytest.raises(InputError, match=words):
        train(*TINY, "--data", text, "--device", "mps", *options, "--out", tmp_path / "other")
    with pytest.raises(InputError, match=words):
        evaluate(run, "--device", "mps")
    assert not (tmp_path / "other").exists()


@pytest.fixture
def apples_generator(monkeypatch):
    """A generator that torch.mps seems to have."""
    generator = torch.Generator()
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda device="mps": generator.get_state())
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda state, device="mps": generator.set_state(state))
    monkeypatch.setattr(torch.mps, "manual_seed", generator.manual_seed)
    return generator


def test_a_segments_seed_is_apples_generators_too(apples_generator):
    def draw():
        return torch.rand(3, generator=apples_generator)

    expected = (torch.manual_seed(1), draw(), draw())[1:]
    torch.manual_seed(1)
    drawn = [draw()]
    for _ in range(2):
        with replay.seeded(5, torch.device("mps")):
            drawn.append(draw())
    drawn.append(draw())
    assert torch.equal(drawn[0], expected[0]) and torch.equal(drawn[3], expected[1])
    assert torch.equal(drawn[1], drawn[2]) and not torch.equal(drawn[0], drawn[1])


def test_checkpointed_layers_with_dropout_are_refused_there(text, tmp_path, monkeypatch):
    """torch's checkpoint would draw other random numbers when it computes a layer again."""
    monkeypatch.setattr(process, "hindrance_on_mps", lambda dtype: None)
    options = (*TINY, "--data", text, "--device", "mps", "--checkpoint-layers", "--out", tmp_path / "run")
    with pytest.raises(InputError, match="--checkpoint-layers needs --dropout 0 on mps"):
        train(*options, "--dropout", 0.1)
