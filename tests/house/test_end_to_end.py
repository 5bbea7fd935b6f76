"""docs/ports/end_to_end.py: a reference repeats the training run from its files alone."""

import importlib
import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from docs.ports import end_to_end
from reference import check
from reference.gradients import fields_of, segment_of
from reference.memformer import subtree
from reference.rollout import count_scored, rollout_backward, rollout_forward
from tests.helpers import programs
from tests.helpers.optimizers import adamw, clipped, norm_of

SMALL = {
    "block_recurrent": programs.TINY,
    "compressive": programs.COMPRESSIVE,
    "memformer": programs.MEMFORMER,
    "memorizing": programs.MEMORIZING,
    "pretrained_recurrence": programs.WINDOWED,
}
TOLERANCE = 1e-9
LANES = "--horizon 2 --steps 200 --learning-rate 0.01"


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """A folder of short texts: lanes start documents inside the ten steps."""
    return programs.write_texts(tmp_path_factory.mktemp("texts") / "texts")


@pytest.fixture(scope="module", params=SMALL)
def written(request, tmp_path_factory, documents):
    """The folder that the command wrote for a model of small sizes."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    own = f"--model {request.param} --data {documents} --out {folder}"
    end_to_end.main(programs.words(*SMALL[request.param], LANES, own))
    return folder


def read(path):
    """What a file and its .json give."""
    rows, _ = check.load(path.with_suffix(".safetensors"))
    about = json.loads(path.with_suffix(".json").read_text())
    reference = importlib.import_module(f"reference.{about['paper']}")
    config = reference.Config(**fields_of(json.dumps(about["config"])))
    params = subtree(rows, "given/param/")
    count = sum(name.endswith("/tokens") for name in rows)
    segments = [segment_of(reference, subtree(rows, f"given/{k}/")) for k in range(count)]
    fresh = reference.initial_state(params, config, 1)
    state = fresh._replace(**subtree(rows, "given/state/"))
    return SimpleNamespace(**locals())


def test_the_reference_repeats_ten_steps_from_the_file_alone(written):
    """The state is carried from step to step, lanes start documents, gradients are clipped.

    If no lane starts, the learned initial state has no gradient, and AdamW leaves it alone.
    """
    steps = read(written / "steps")
    assert any(segment.starts.any() for segment in steps.segments[1:])
    settings = steps.about["steps"]["adamw"]
    horizon = settings["horizon"]
    params = steps.params
    state = steps.state
    moments = {}
    updates = Counter()
    losses = []
    norms = []
    for step, rate in enumerate(settings["rates"]):
        segments = steps.segments[step * horizon : (step + 1) * horizon]
        given = (steps.reference, params, steps.config)
        rows, caches, state = rollout_forward(*given, segments, state)
        grads, _ = rollout_backward(*given, caches)
        if not any(segment.starts.any() for segment in segments):
            grads = {name: row for name, row in grads.items() if "initial" not in name}
        losses.append(sum(rows[f"{k}/loss"] for k in range(horizon)) / count_scored(segments))
        norms.append(norm_of(grads.values()))
        grads = clipped(grads, settings["clip"], settings["clipped apart"])
        of_adamw = {"rate": rate} | {name: settings[name] for name in ("beta1", "beta2", "epsilon")}
        for name in grads:
            updates[name] += 1
            own = {name: params[name]}
            decay = settings["decay of matrices"] * (params[name].ndim > 1)
            given = (own, grads, moments, updates[name], of_adamw | {"decay": decay})
            updated, moments = adamw(*given)
            params = params | updated
    np.testing.assert_allclose(steps.rows["adamw/loss"], losses, TOLERANCE)
    np.testing.assert_allclose(steps.rows["adamw/gradient_norm"], norms, TOLERANCE)
    assert len(losses) == 10


def test_the_reference_reads_and_continues_the_text_as_the_trained_model_does(written):
    trained = read(written / "trained")
    text = trained.rows["given/text"]
    gives = trained.about["trained"]
    logits = logits_of(trained, text[:-1])
    chosen = logits[range(len(logits)), text[1:]]
    nats = (np.logaddexp.reduce(logits, axis=1) - chosen).sum()
    assert gives["nats"] == pytest.approx(nats, rel=TOLERANCE)
    bits = nats / np.log(2) / len(logits)
    assert gives["bits_per_byte"] == pytest.approx(bits, rel=TOLERANCE)

    tokens = text[: gives["prompt"]]
    for _ in range(end_to_end.CONTINUED):
        tokens = np.append(tokens, logits_of(trained, tokens)[-1].argmax())
    assert gives["continuation"] == tokens[gives["prompt"] :].tolist()


def logits_of(trained, tokens):
    """The logits of tokens (n,), read segment by segment; padding stands after them."""
    segment = trained.config.segment
    state = trained.state
    found = []
    for start in range(0, len(tokens), segment):
        own = tokens[start : start + segment]
        padded = np.pad(own, (0, segment - len(own)))[None]
        given = (trained.params, trained.config, padded, state)
        logits, state, _ = trained.reference.forward(*given)
        found.append(logits[0, : len(own)])
    return np.concatenate(found)
