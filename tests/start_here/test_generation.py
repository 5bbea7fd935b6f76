"""Generation predicts what reading predicts, and may go one step back.

A segment can be read at once, or token by token as in generation, each of which must then see what
the same token sees in a segment. A generator keeps rows of what it has read, so going back and
reading another token must leave no trace of the first one.
"""

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from accelerated.generation.any_model import stepper_of
from accelerated.models import NAMES
from tests.conftest import examples
from tests.start_here.strategies import settings_of

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
    goes_back_at = data.draw(st.integers(0, count - 1), label="goes back at")

    expected = read_by_segments(model, tokens, setting.in_torch(setting.state), overlap)
    stream = stepper.start(setting.in_torch(setting.state))
    for place, token in enumerate(tokens.unbind(1)):
        if place == goes_back_at:
            stepper.step(others[:, place], stream)  # what it returns is forgotten
        logits, stream = stepper.step(token, stream)
        when = " after going one step back" if place >= goes_back_at else ""
        compare(f"{name}: token {place}'s logits{when}", logits, expected[:, place])


def read_by_segments(model, tokens, state, overlap):
    """Logits (B, n, V) of tokens (B, n), each by the first segment that reads it."""
    logits = []
    length = model.config.segment
    for start in range(0, tokens.shape[1] - overlap, length - overlap):
        found, state, _ = model(tokens[:, start : start + length], state)
        logits.append(found[:, overlap:] if start else found)
    return torch.cat(logits, 1)


def compare(what, found, expected):
    """Fail, naming the lane, the word and both numbers, unless the logits (B, V) are equal."""
    apart = (found - expected).abs()
    allowed = TOLERANCE * (1 + expected.abs().max())
    lane, word = divmod(int(apart.argmax()), apart.shape[1])  # a NaN's place, if there is one
    assert apart[lane, word] <= allowed, (
        f"{what} of lane {lane} and word {word} are {found[lane, word]:.9g}, and "
        f"{expected[lane, word]:.9g} if the segment is read at once: {MEANING}"
    )
