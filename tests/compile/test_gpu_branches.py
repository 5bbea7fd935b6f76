"""What a GPU takes in training and in reports, run on the CPU: the branches that any GPU takes
work, and make no float64.

Exempt are the host's parts: a model's constants, which are made before it is moved, and NumPy.
"""

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import eval as evaluation_script
import train as training_script
from accelerated import replay
from accelerated.attention import content, relative_shift, signed_distance, sliding_window
from accelerated.evaluation.options import REPORTS
from accelerated.generation.any_model import stepper_of
from accelerated.protocol import computing_in
from tests.helpers.comparison import TOLERANCE, assert_agree, named
from tests.helpers.programs import (
    COMPRESSIVE,
    MEMFORMER,
    MEMORIZING,
    TINY,
    WINDOWED,
    evaluate,
    train,
    words,
)
from tests.helpers.variants import EVERY_VARIANT, PAPERS, over, variant

REPLAY = words("--backprop memory_replay --optimizer adam --dtype bfloat16")
ADAMW = words("--backprop through_time --optimizer adamw --clip 0.1")
RUNS = {
    "block_recurrent": [*TINY, *REPLAY],
    "compressive": [*COMPRESSIVE, *ADAMW, "--checkpoint-layers"],
    "memformer": [*MEMFORMER, *REPLAY],
    "memorizing": words(
        *MEMORIZING,
        "--backprop checkpointed --optimizer adafactor --accumulate 3 --update-every 2",
    ),
    "pretrained_recurrence": [*WINDOWED, *ADAMW],
}
OPTIONS = {
    "range": "--segments 2",
    "overlap": "--overlaps 0,2",
    "dynamic": "--learning-rate 0.01",
    "sample": "--tokens 20 --top-p 0.9",
}


class NoDoubles(TorchDispatchMode):
    """Refuses operations that take or return a tensor of float64."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter((args, kwargs, result)):
            if getattr(tensor, "dtype", None) in (torch.float64, torch.complex128):
                raise AssertionError(f"{function} takes or returns {tensor.dtype}")
        return result


def test_doubles_are_refused():
    for make in (
        torch.Tensor.double,
        lambda x: x.to(torch.complex128),
        lambda x: x.sum(dtype=torch.float64),
    ):
        with NoDoubles(), pytest.raises(AssertionError, match="takes or returns"):
            make(torch.ones(4, dtype=torch.float32))


@pytest.fixture
def on_a_gpus_branches(monkeypatch):
    """Let a CPU take the branches that any GPU takes."""
    monkeypatch.setattr(replay, "on_host", lambda tensor: False)
    for module in (content, relative_shift, sliding_window, signed_distance):
        monkeypatch.setattr(module, "takes_sdpa", lambda query, key: key.shape[-2] > 1)


def without_doubles(function, name, calls):
    """The function, which then makes no doubles and adds its name to calls."""

    def watched(*given, **options):
        calls.append(name)
        with NoDoubles():
            return function(*given, **options)

    return watched


@pytest.mark.parametrize("model", RUNS)
def test_training_and_reports_make_no_doubles(
    text, tmp_path, monkeypatch, model, on_a_gpus_branches
):
    """Of what train.py does after the run has been built, all; then all of eval.py's reports that
    this model has.
    """
    text.write_bytes(text.read_bytes()[:2400])  # a few segments in each split
    calls = []
    function_at = evaluation_script.function_at
    for name in ("train", "report", "sample"):
        function = getattr(training_script, name)
        monkeypatch.setattr(training_script, name, without_doubles(function, name, calls))

    def of_a_report(place):
        return without_doubles(function_at(place), place, calls)

    monkeypatch.setattr(evaluation_script, "function_at", of_a_report)
    options = "--steps 2 --horizon 2 --dropout 0.2 --validation-tokens 48 --sample 12"
    run = tmp_path / "run"
    train(*RUNS[model], options, f"--data {text} --out {run}")
    assert calls == ["train", "report", "sample"]
    own = {"export": f"{tmp_path}/exported", "view": f"--out {tmp_path}/page.html"} | OPTIONS
    for name, report in REPORTS.items():
        if report.model in (None, model):
            evaluate(name, run, own.get(name, ""))
            assert report.function in calls, name


@over(EVERY_VARIANT)
def test_offsets_have_dense_rows(paper, name, monkeypatch, on_a_gpus_branches):
    """SDPA's fused kernels take no others; the one that is left would save all scores."""
    attend = functional.scaled_dot_product_attention
    model = PAPERS[paper].model(variant(paper, name))

    def watched(query, key, value, offset=None, *others, **options):
        given = {"query": query, "key": key, "value": value, "offset": offset}
        for what, x in given.items():
            assert x is None or x.stride(-1) == 1, f"rows of the {what} are not dense"
        return attend(query, key, value, offset, *others, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    for dtype in (torch.float32, torch.float64):  # one of them is the parameters'
        with computing_in(model, dtype):
            model.read(
                torch.zeros(2, model.config.segment, dtype=torch.long), model.initial_state(2)
            )


# A GPU's numbers

LANES = 16
# By how much a GPU's numbers in bfloat16 may be further from float32 than a CPU's are. Of the tiny
# models some are ill-conditioned: a ReLU near zero flips, and the gradients' error is 0.3
FURTHER = 2.0
BESIDES = 0.01


def results(paper, name, device, kind):
    """({name: outputs of a model's second segment and of a step}, {name: gradient})."""
    config = dataclasses.replace(variant(paper, name), dropout=0.0)
    drawn = np.random.default_rng(5).integers(config.vocabulary, size=(LANES, config.segment))
    tokens = torch.tensor(drawn).to(device)
    model = PAPERS[paper].model(config, seed=9).to(device)
    with computing_in(model, kind):
        state = model.advance(tokens, model.initial_state(LANES))
        output = model(tokens, state)
        logits = output.logits.float().flatten(0, 1)
        loss = functional.cross_entropy(logits, tokens.flatten())
        stepper = stepper_of(model, capture=False)
        stream = stepper.start(output.state)
        _, stream = stepper.step(tokens[:, 0], stream)
        step, _ = stepper.step(tokens[:, -1], stream)
    (loss + sum(output.auxiliary.values())).backward()

    found = {"logits": output.logits, "step": step}
    found |= output.auxiliary
    found |= named("state", output.state)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return [
        {each: tensor.detach().float().cpu() for each, tensor in rows.items()}
        for rows in (found, gradients)
    ]


def mean_error(expected, found):
    """The mean over tensors of their relative error, each at most 1.

    A tensor that is rounding beside the others does not count.
    """
    total = torch.cat([tensor.flatten() for tensor in expected.values()]).norm()
    errors = []
    for name, tensor in expected.items():
        if tensor.norm() > 1e-6 * total:
            error = (tensor - found[name]).norm() / tensor.norm()
            errors.append(min(1.0, error.item()))
    return sum(errors) / len(errors)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@over(EVERY_VARIANT)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_gpu_gives_what_the_cpu_gives(paper, name, kind):
    """Logits, states, losses and gradients, and a Stepper's logits.

    In float32 they are a CPU's, in bfloat16 as near to these as a CPU comes. A GPU's branches on a
    CPU: attention/test_sdpa.py.
    """
    torch.set_default_dtype(torch.float32)
    cpu = torch.device("cpu")
    exact = results(paper, name, cpu, torch.float32)
    rough = results(paper, name, cpu, kind)
    found = results(paper, name, torch.device("cuda"), kind)
    for what, *rows in zip(("outputs", "gradients"), exact, rough, found, strict=True):
        expected, of_a_cpu, given = rows
        if kind == torch.float32:
            assert_agree(expected, given, TOLERANCE["cuda", kind], f"{name}, {what}")
            continue
        own = mean_error(expected, of_a_cpu)
        error = mean_error(expected, given)
        message = f"the {what} have a mean error of {error:.3f}, on a CPU of {own:.3f}"
        assert error <= FURTHER * own + BESIDES, message
