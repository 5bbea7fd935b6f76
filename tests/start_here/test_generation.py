"""Generation predicts what reading predicts, and may go back.

A segment can be read at once, or token by token as in generation, each of which must then see what
the same token sees in a segment. A generator keeps rows of what it has read, so going back and
reading another text must leave no trace of the first one.
"""

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from accelerated.generation.any_model import stepper_of
from accelerated.models import NAMES
from tests.conftest import examples
from tests.start_here.strategies import compare, largest, logits_by_segments, settings_of

TOLERANCE = 1e-9  # float64
MEANING = "generation would continue another text than the one that was read"


@pytest.mark.parametrize("name", NAMES)
@examples(5)
@given(data=st.data())
@torch.no_grad()
def test_generation_equals_reading(name, data):
    """Over three segments that follow each other, whose windows may overlap."""
    setting = data.draw(settings_of(name))
    note(f"{setting.config}")
    model = setting.model.eval()
    stepper = stepper_of(model)
    overlap = getattr(setting.config, "overlap", 0)
    length = setting.config.segment
    count = length + 2 * (length - overlap)
    lanes = len(setting.state[0])
    tokens, others = torch.tensor(
        setting.rng.integers(setting.config.vocabulary, size=(2, lanes, count))
    )
    goes_back_at = data.draw(st.integers(0, count - 1), label="goes back to")
    goes_on_for = data.draw(st.integers(1, length + 1), label="tokens of another text before")

    state = setting.in_torch(setting.state)
    expected = logits_by_segments(model, setting.config, tokens, state)
    stream = stepper.start(state)
    for place, token in enumerate(tokens.unbind(1)):
        if place == goes_back_at:
            other_stream = stream
            for other in others[:, place : place + goes_on_for].unbind(1):
                _, other_stream = stepper.step(other, other_stream)  # which is forgotten
        logits, stream = stepper.step(token, stream)
        when = " after going back" if place >= goes_back_at else ""
        what = f"{name}: token {place}'s logits by lane and word{when}"
        right = expected[:, place]
        compare(what, logits, right, TOLERANCE * (1 + largest(right)), MEANING)
