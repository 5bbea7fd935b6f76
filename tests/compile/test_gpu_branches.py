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
from accelerated import block_recurrent, replay
from accelerated.attention import content, relative_shift, signed_distance, sliding_window
from accelerated.evaluation.options import REPORTS
from accelerated.generation.token_by_token import stepper_of
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
)
from tests.helpers.rollouts import filled
from tests.helpers.variants import EVERY_VARIANT, PAPERS, over, variant

REPLAY = ["--backprop", "memory_replay", "--optimizer", "adam", "--dtype", "bfloat16"]
RUNS = {
    "block_recurrent": [*TINY, *REPLAY],
    "compressive": [
        *COMPRESSIVE,
        "--backprop",
        "through_time",
        "--optimizer",
        "adamw",
        "--clip",
        0.1,
        "--checkpoint-layers",
    ],
    "memformer": [*MEMFORMER, *REPLAY],
    "memorizing": [
        *MEMORIZING,
        "--backprop",
        "checkpointed",
        "--optimizer",
        "adafactor",
        "--accumulate",
        3,
        "--update-every",
        2,
    ],
    "pretrained_recurrence": [
        *WINDOWED,
        "--backprop",
        "through_time",
        "--optimizer",
        "adamw",
        "--clip",
        0.1,
    ],
}
OPTIONS = {
    "range": ["--segments", 2],
    "slots": ["--segments", 2],
    "overlap": ["--overlaps", "0,2"],
    "dynamic": ["--learning-rate", 0.01],
    "sample": ["--tokens", 20, "--top-p", 0.9],
}


class NoDoubles(TorchDispatchMode):
    """Refuses operations that take or return a tensor of float64."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor) and tensor.dtype in (
                torch.float64,
                torch.complex128,
            ):
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
    monkeypatch.setattr(replay, "on_host", lambda tensor: False)
    for module in (block_recurrent, content, relative_shift, sliding_window, signed_distance):
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
    calls, function_at = [], evaluation_script.function_at
    for name in ("train", "report", "sample"):
        monkeypatch.setattr(
            training_script, name, without_doubles(getattr(training_script, name), name, calls)
        )
    monkeypatch.setattr(
        evaluation_script,
        "function_at",
        lambda place: without_doubles(function_at(place), place, calls),
    )
    options = [
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
    ]
    train(*RUNS[model], "--data", text, *options, "--out", tmp_path / "run")
    assert calls == ["train", "report", "sample"]
    places = {"export": [tmp_path / "exported"], "view": ["--out", tmp_path / "page.html"]}
    for name, report in REPORTS.items():
        if report.model in (None, model) and name != "topics":  # which samples as `sample` does
            evaluate(name, tmp_path / "run", *places.get(name, OPTIONS.get(name, [])))
            assert report.function in calls, name


@over(EVERY_VARIANT)
def test_offsets_have_dense_rows(paper, name, monkeypatch, on_a_gpus_branches):
    """SDPA's fused kernels take no others; the one that is left would save all scores."""
    attend, model = (
        functional.scaled_dot_product_attention,
        PAPERS[paper].model(variant(paper, name)),
    )

    def watched(query, key, value, offset=None, *others, **options):
        assert all(x.stride(-1) == 1 for x in (query, key, value, offset) if x is not None)
        return attend(query, key, value, offset, *others, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    for dtype in (torch.float32, torch.float64):  # one of them is the parameters'
        with computing_in(model, dtype):
            model.read(
                torch.zeros(2, model.config.segment, dtype=torch.long), model.initial_state(2)
            )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@over(EVERY_VARIANT)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_gpu_gives_what_the_cpu_gives(paper, name, kind):
    """Logits, states, losses and gradients, and a Stepper's; bfloat16 is compared with float32 on
    the CPU.
    """
    torch.set_default_dtype(torch.float32)
    config, rows = dataclasses.replace(variant(paper, name), dropout=0.0), {}
    tokens = torch.tensor(
        np.random.default_rng(5).integers(config.vocabulary, size=(2, config.segment))
    )
    for device in ("cpu", "cuda"):
        model = PAPERS[paper].model(config, seed=9).to(device)
        with computing_in(model, kind if device == "cuda" else torch.float32):
            state = model.advance(tokens.to(device), model.initial_state(2))
            output = model(tokens.to(device), state)
            objective = output.logits.float().square().sum() + sum(output.auxiliary.values())
            stepper = stepper_of(model, capture=False)
            stream = stepper.start(output.state)
            _, stream = stepper.step(tokens[:, 0].to(device), stream)
            found = {
                "logits": output.logits,
                "step": stepper.step(tokens[:, -1].to(device), stream)[0],
            }
        objective.backward()
        found |= {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found |= {name: loss[None] for name, loss in output.auxiliary.items()}
        rows[device] = filled(found | named("state", output.state))
    assert_agree(rows["cpu"], rows["cuda"], TOLERANCE["cuda", kind], name)
