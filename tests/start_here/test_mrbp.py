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

So every segment is computed twice, and the activations of only one exist at a time. `full_bptt` and
`memory_replay` below are the two methods on a model of three matrices. Then comes Memformer in
NumPy, and every model in PyTorch. All numbers are float64 (tests/conftest.py makes it torch's
default).
"""

import weakref

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from accelerated import replay
from accelerated.models import NAMES
from reference import memformer
from tests.conftest import examples
from tests.start_here.strategies import compare, largest, plain_bptt, rollouts, settings_of

# No two sizes are equal, so that no axis is taken for another
V = 11  # vocabulary
B = 8  # lanes: documents side by side
D = 6  # width
N = 4  # tokens of a segment
RELATIVE = 1e-9  # tolerances; float64 rounds at 1e-16
ABSOLUTE = 1e-12
MEANING = "that is BPTT's, and training by another would not learn what full BPTT learns"


# ----------------------------------------------------------------------------
# the two methods, on a model of three matrices
def read_segment(weights, tokens, targets, memory):
    """(loss, next memory) of a segment, whose tokens (B, N) see memory (B, D)."""
    embedding, keep, write = weights
    x = embedding[tokens]  # (B, N, D)
    logits = torch.tanh(x + memory[:, None]) @ embedding.T  # (B, N, V)
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    next_memory = torch.tanh(memory @ keep + x.mean(1) @ write)  # (B, D)
    return loss, next_memory


def full_bptt(weights, rollout, memory):
    """One graph of all segments, and one backward pass through all of it."""
    total = 0.0
    for tokens, targets in rollout:
        loss, memory = read_segment(weights, tokens, targets, memory)
        total = total + loss
    total.backward()


def memory_replay(weights, rollout, first_memory):
    """Algorithm 1, with the numbers of its lines. It leaves the same gradients in .grad."""
    memory = first_memory.detach()
    replay_buffer = [memory]  # 1-2
    with torch.no_grad():
        for tokens, targets in rollout[:-1]:  # 3
            _, memory = read_segment(weights, tokens, targets, memory)  # 4
            replay_buffer.append(memory)  # 5

    gradient = torch.zeros_like(memory)  # 7: no loss depends on the last memory
    for tokens, targets in reversed(rollout):  # 8
        memory = replay_buffer.pop().requires_grad_()
        loss, next_memory = read_segment(weights, tokens, targets, memory)  # 9-10
        loss.backward(retain_graph=True)  # 11
        next_memory.backward(gradient)  # 12
        gradient = memory.grad  # what lines 11 and 12 left: the gradient of M_t
    first_memory.grad = gradient


def small_setting(segments):
    """(weights and first memory by name, rollout), all random."""
    shapes = {"embedding": (V, D), "keep": (D, D), "write": (D, D), "the first memory": (B, D)}
    arrays = {name: torch.randn(shape) for name, shape in shapes.items()}
    rollout = []
    for _ in range(segments):
        tokens, targets = torch.randint(V, (2, B, N))
        rollout.append((tokens, targets))
    return arrays, rollout


def gradients_by(method, arrays, rollout):
    """{name: gradient} of the weights and of the first memory."""
    leaves = {name: array.clone().requires_grad_() for name, array in arrays.items()}
    *weights, memory = leaves.values()
    method(weights, rollout, memory)
    return {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}


@given(seed=st.integers(0, 2**31), segments=st.integers(2, 4))
def test_algorithm_1_has_the_gradients_of_full_bptt(seed, segments):
    """Section 2.4: the gradients of the losses and of the next memories are all that BPTT has."""
    torch.manual_seed(seed)
    arrays, rollout = small_setting(segments)
    expected = gradients_by(full_bptt, arrays, rollout)
    found = gradients_by(memory_replay, arrays, rollout)
    compare_all("Algorithm 1", found, expected)


class Box:
    """What autograd keeps in a tensor's place. It is gone as soon as the tensor is not needed."""

    def __init__(self, tensor):
        self.tensor = tensor


def most_kept(method, segments):
    """The most tensors that autograd keeps at any time for the backward pass."""
    arrays, rollout = small_setting(segments)
    kept = weakref.WeakSet()  # without the boxes that are gone
    counts = []

    def keep(tensor):
        box = Box(tensor.detach())
        kept.add(box)
        counts.append(len(kept))
        return box

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda box: box.tensor):
        gradients_by(method, arrays, rollout)
    return max(counts)


def test_mrbp_keeps_no_more_for_a_longer_rollout():
    """Section 2.4: BPTT stores the activations of all segments, MRBP those of one at a time."""
    bptt_3 = most_kept(full_bptt, 3)
    bptt_12 = most_kept(full_bptt, 12)
    assert bptt_12 == 4 * bptt_3, (
        f"BPTT keeps {bptt_3} tensors for 3 segments and {bptt_12} for 12. It should be 4 times as "
        "many, so this test does not count what a graph keeps"
    )
    mrbp_3 = most_kept(memory_replay, 3)
    mrbp_12 = most_kept(memory_replay, 12)
    assert mrbp_12 == mrbp_3, (
        f"MRBP keeps {mrbp_3} tensors for 3 segments and {mrbp_12} for 12. The graph of a segment "
        "outlives it, and a long rollout will not fit into memory"
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
    """{name: array} by a method of reference/memformer.py; a seed turns dropout on."""
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
    expected = in_numpy(memformer.through_time, setting, rollout, seed=1)
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
    """What a method of training has of all rows of full BPTT over `count` segments."""
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
    for name, right in expected.items():
        absolute = ABSOLUTE * max(1.0, largest(right))
        compare(f"{who}: the {name}", found[name], right, absolute, MEANING, RELATIVE)
