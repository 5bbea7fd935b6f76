"""Memory Replay Back-Propagation has the gradients of full back-propagation through time.

Memformer, section 2.4 and Algorithm 1. A document is read segment by segment. Segment t reads the
memory M_t and writes M_{t+1}:

    M_0 --> segment 0 --> M_1 --> segment 1 --> M_2 --> segment 2 --> M_3
                |                     |                     |
              loss 0                loss 1                loss 2

Segment 0 should write what segment 2 will need, so the gradient of loss 2 has to come back to it,
through M_2 and M_1.

Full back-propagation through time (BPTT) keeps the activations of all segments until the backward
pass begins. Memory Replay Back-Propagation (MRBP) keeps only the memories, which are small:

1. A first pass without gradients puts M_0, M_1 and M_2 into the replay buffer.
2. Each segment is computed a second time, from the last to the first. Two gradients go backward
   through segment t, into the weights and into M_t: that of its loss, and that of M_{t+1}, which
   segment t + 1 has just left.

So every segment is computed twice, and the activations of only one exist at a time. The methods are
`memory_replay` of reference/memformer.py, by the lines of Algorithm 1, and those by which every
model is trained, of accelerated/replay.py. Full BPTT is `plain_bptt` of strategies.py: one graph of
all segments. All numbers are float64 (tests/conftest.py makes it torch's default).
"""

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from accelerated import replay
from accelerated.models import NAMES
from reference import memformer
from reference.variants import memformer as variants
from tests.conftest import examples
from tests.start_here.strategies import compare, largest, plain_bptt, rollouts, settings_of

RELATIVE = 1e-9  # tolerances; float64 rounds at 1e-16
ABSOLUTE = 1e-12
# What a failure means
READ = (
    "what was read is not what full BPTT reads: look at where documents begin, at the state that "
    "is handed on, at the sum of losses and its divisor"
)
HANDED = (
    "the same was read, but its gradient is not that of full BPTT: look at the losses that a "
    "segment's objective has, at the gradient that it hands to the one before it, and at what is "
    "detached"
)


# ----------------------------------------------------------------------------
# Memformer in NumPy
def one_document(setting, rollout):
    """The segments as the paper has them: one document in each lane, of which all is scored."""
    rollout = [segment._replace(task=None) for segment in rollout]
    for segment in rollout:
        segment.scored[:] = True
        segment.starts[:] = False
    return rollout


def in_numpy(method, setting, rollout, seed=None):
    """{name: array} by a method for reference/memformer.py; a seed turns dropout on."""
    pairs = [(segment.tokens, segment.targets) for segment in rollout]
    loss, grads, dstate, after = method(setting.params, setting.config, pairs, setting.state, seed)
    assert dstate is not None, (
        f"{method.__name__} returns no gradient of the memory that the rollout begins with, "
        "so back-propagation could not go on into an earlier rollout"
    )
    rows = {
        "loss": loss,
        "last memory": after.memory,
        "gradient of the first memory": dstate.memory,
    }
    return rows | {f"gradient of {name}": grad for name, grad in grads.items()}


@examples(6)
@given(data=st.data())
def test_numpys_memory_replay_has_the_gradients_of_full_bptt(data):
    """Algorithm 1 by hand. Full BPTT is PyTorch's autograd through all segments."""
    setting = data.draw(settings_of("memformer"))
    rollout = one_document(setting, data.draw(rollouts(setting)))
    expected = plain_bptt(setting, rollout)
    found = in_numpy(memformer.memory_replay, setting, rollout)
    expected["loss"] = expected["objective"]
    expected["last memory"] = expected[f"{len(rollout) - 1}/next.memory"]
    compare_all("memory_replay", found, {name: expected[name] for name in found})
    assert set(found) >= {name for name in expected if name.startswith("gradient")}


@examples(5)
@given(data=st.data())
def test_numpys_replay_drops_the_same_entries_both_times(data):
    """The second computation of a segment is the first one's, with the same dropout."""
    setting = data.draw(settings_of("memformer", dropout=0.2))
    rollout = one_document(setting, data.draw(rollouts(setting)))
    expected = in_numpy(variants.through_time, setting, rollout, seed=1)
    found = in_numpy(memformer.memory_replay, setting, rollout, seed=1)
    compare_all("NumPy with dropout", found, expected)


# ----------------------------------------------------------------------------
# every model in PyTorch
@pytest.mark.parametrize("name", NAMES)
@examples(5)
@given(data=st.data())
def test_replay_of_every_model_has_the_gradients_of_full_bptt(name, data):
    """The methods that train: full BPTT itself, checkpointing and memory replay.

    Documents begin in the middle, and some segments have tasks. There are auxiliary losses and
    learned initial states. A rollout's gradients stop at its first state.
    """
    setting = data.draw(settings_of(name))
    rollout = data.draw(rollouts(setting))
    note(f"{setting.config}")
    expected = rows_of_training(plain_bptt(setting, rollout), len(rollout))
    for method in replay.BACKPROP.values():
        compare_all(f"{name} by {method.__name__}", in_pytorch(method, setting, rollout), expected)


def rows_of_training(rows, count):
    """Of all rows of full BPTT over `count` segments, those that a method of replay.py returns."""
    found = {name: row for name, row in rows.items() if name.startswith("gradient of ")}
    found = {
        name: row for name, row in found.items() if not name.startswith("gradient of the first")
    }
    auxiliary = [name.removeprefix("0/") for name in rows if name.startswith("0/auxiliary")]
    for name in auxiliary:
        found[name] = sum(rows[f"{k}/{name}"] for k in range(count)) / count
    found["loss"] = rows["objective"] - sum(found[name] for name in auxiliary)
    for name, row in rows.items():
        if name.startswith(f"{count - 1}/next."):
            found[f"last {name.partition('.')[2]}"] = row
    return found


def in_pytorch(method, setting, rollout):
    """The same by a method of accelerated/replay.py, which leaves gradients in .grad."""
    model = setting.model
    model.zero_grad()
    segments = [setting.in_torch(segment) for segment in rollout]
    loss, auxiliary, after = method(model, segments, setting.in_torch(setting.state))
    rows = {"loss": loss} | {f"last {name}": field for name, field in after._asdict().items()}
    rows |= {f"auxiliary.{name}": value for name, value in auxiliary.items()}
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        rows[f"gradient of {name}"] = grad
    return rows


# ----------------------------------------------------------------------------
def compare_all(who, found, expected):
    """Fail, naming the array, the place and both numbers, unless all arrays are equal."""
    assert found.keys() == expected.keys(), (
        f"{who} and full BPTT do not both have {sorted(found.keys() ^ expected.keys())}"
    )
    for name in sorted(expected, key=lambda name: name.startswith("gradient")):  # these last
        right = expected[name]
        absolute = ABSOLUTE * max(1.0, largest(right))
        meaning = HANDED if name.startswith("gradient") else READ
        compare(f"{who}: the {name}", found[name], right, absolute, meaning, RELATIVE)
