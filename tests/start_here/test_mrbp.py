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
`memory_replay` below are the two methods on a model of three matrices. Then come the Memformers, in
NumPy and in PyTorch. All numbers are float64 (tests/conftest.py makes it torch's default).
"""

import weakref

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from accelerated import replay
from accelerated.data.lanes import Segment
from accelerated.memformer import Memformer, State
from reference import memformer as ref
from reference.rollout import Segment as NumpySegment

# No two sizes are equal, so that no axis is taken for another
V = 11  # vocabulary
B = 8  # lanes: documents side by side
D = 6  # width
N = 4  # tokens of a segment
SIZES = {
    "vocabulary": V,
    "width": D,
    "segment": N,
    "slots": 9,
    "decoder_layers": 1,
    "heads": 2,
    "head_width": 12,
    "feed_forward": 7,
}
RELATIVE = 1e-9  # tolerances; float64 rounds at 1e-16
ABSOLUTE = 1e-12


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
    return {name: leaf.grad for name, leaf in leaves.items()}


@given(seed=st.integers(0, 2**31), segments=st.integers(2, 4))
def test_algorithm_1_has_the_gradients_of_full_bptt(seed, segments):
    """Section 2.4: the gradients of the losses and of the next memories are all that BPTT has."""
    torch.manual_seed(seed)
    arrays, rollout = small_setting(segments)
    expected = gradients_by(full_bptt, arrays, rollout)
    found = gradients_by(memory_replay, arrays, rollout)
    compare("Algorithm 1", found, expected)


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
# Memformer
SHARES = st.sampled_from([0.0, 0.3, 1.0])
over_random_rollouts = given(
    seed=st.integers(0, 2**31),
    encoder_layers=st.integers(0, 1),  # 0 is the decoder-only model
    lanes=st.sampled_from([1, B]),
    segments=st.integers(1, 3),
    starting=SHARES,  # the share of lanes in which a segment starts a new document
    scored=SHARES,  # the share of tokens whose loss counts
)

over_random_documents = given(
    seed=st.integers(0, 2**31),
    encoder_layers=st.integers(0, 1),
    lanes=st.sampled_from([1, B]),
    segments=st.integers(1, 3),
    starting=st.just(0.0),  # Algorithm 1 as the paper prints it: one document in each lane
    scored=st.just(1.0),
)


def setting(seed, encoder_layers, lanes, segments, starting, scored, dropout=0.0):
    """(PyTorch's model, its parameters in NumPy, a random rollout, a state in mid-document)."""
    config = ref.Config(**SIZES, encoder_layers=encoder_layers, dropout=dropout)
    model = Memformer(config, seed)
    params = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}

    rng = np.random.default_rng(seed)
    rollout = []
    for _ in range(segments):
        tokens, targets = rng.integers(V, size=(2, lanes, N))
        is_scored = rng.random((lanes, N)) < scored
        starts = rng.random(lanes) < starting
        rollout.append(NumpySegment(tokens, targets, is_scored, starts))

    start = ref.initial_state(params, config, lanes)
    state = ref.advance(params, config, rng.integers(V, size=(lanes, N)), start)
    return model, params, rollout, state


def in_torch(segment):
    """The same segment of tensors. Neither has a task: every lane continues its text."""
    return Segment(
        tokens=torch.tensor(segment.tokens),
        targets=torch.tensor(segment.targets),
        scored=torch.tensor(segment.scored),
        starts=torch.tensor(segment.starts),
    )


def by_autograd(model, rollout, state):
    """Full BPTT as above: {name: gradient}, with the mean loss and the last memory."""
    first_memory = torch.tensor(state.memory, requires_grad=True)
    carried = State(first_memory, torch.tensor(state.previous))
    total = 0.0
    for segment in map(in_torch, rollout):
        starts = segment.starts
        initial = model.initial_state(len(starts))  # which a new document reads, in its lane
        memory = torch.where(starts[:, None, None, None], initial.memory, carried.memory)
        previous = torch.where(starts[:, None], initial.previous, carried.previous)
        logits, carried, _ = model(segment.tokens, State(memory, previous))
        scored = segment.scored
        total = total + cross_entropy(logits[scored], segment.targets[scored], reduction="sum")

    scored_tokens = sum(int(segment.scored.sum()) for segment in rollout)
    loss = total / max(1, scored_tokens)
    leaves = {"the first memory": first_memory} | dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, grads, strict=True)) | {"loss": loss, "last memory": carried.memory}


def in_numpy(method, params, config, rollout, state, seed=None):
    """The same by a method of reference/memformer.py; a seed turns dropout on."""
    pairs = [(segment.tokens, segment.targets) for segment in rollout]
    loss, grads, dstate, after = method(params, config, pairs, state, seed)
    assert dstate is not None, (
        f"{method.__name__} returns no gradient of the memory that the rollout begins with, "
        "so back-propagation could not go on into an earlier rollout"
    )
    return grads | {"the first memory": dstate.memory, "loss": loss, "last memory": after.memory}


def in_pytorch(method, model, rollout, state):
    """The same by a method of accelerated/replay.py, which stops at the first memory."""
    segments = [in_torch(segment) for segment in rollout]
    first = State(torch.tensor(state.memory), torch.tensor(state.previous))
    model.zero_grad()
    torch.manual_seed(7)  # from which each segment draws the seed of its dropout
    loss, _, after = method(model, segments, first)
    found = {"loss": loss, "last memory": after.memory}
    for name, parameter in model.named_parameters():
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return found


@over_random_documents
def test_numpys_memory_replay_has_the_gradients_of_full_bptt(**drawn):
    """Algorithm 1 by hand. Full BPTT is PyTorch's autograd through all segments."""
    model, params, rollout, state = setting(**drawn)
    expected = by_autograd(model, rollout, state)
    found = in_numpy(ref.memory_replay, params, model.config, rollout, state)
    compare("memory_replay", found, expected)


@over_random_rollouts
def test_pytorchs_memory_replay_has_the_gradients_of_full_bptt(**drawn):
    """The method that trains. A rollout's gradients stop at its first memory."""
    model, _, rollout, state = setting(**drawn)
    expected = by_autograd(model, rollout, state)
    del expected["the first memory"]
    found = in_pytorch(replay.memory_replay, model, rollout, state)
    compare("memory_replay", found, expected)


@over_random_documents
def test_numpys_replay_drops_the_same_entries_both_times(**drawn):
    """The second computation of a segment is the first one's, with the same dropout."""
    model, params, rollout, state = setting(**drawn, dropout=0.2)
    expected = in_numpy(ref.through_time, params, model.config, rollout, state, seed=1)
    found = in_numpy(ref.memory_replay, params, model.config, rollout, state, seed=1)
    compare("NumPy with dropout", found, expected)


@over_random_rollouts
def test_pytorchs_replay_drops_the_same_entries_both_times(**drawn):
    """Here each segment draws the seed of its dropout."""
    model, _, rollout, state = setting(**drawn, dropout=0.2)
    expected = in_pytorch(replay.through_time, model, rollout, state)
    found = in_pytorch(replay.memory_replay, model, rollout, state)
    compare("PyTorch with dropout", found, expected)


# ----------------------------------------------------------------------------
def compare(who, found, expected):
    """Fail, naming the array, the place and both numbers, unless all arrays are equal.

    They are gradients, except those that are called the loss and the last memory.
    """
    assert found.keys() == expected.keys(), f"{who} has {list(found)}, not {list(expected)}"
    for name in expected:
        ours = torch.as_tensor(found[name]).detach().numpy()
        right = torch.as_tensor(expected[name]).detach().numpy()
        what = name if name in ("loss", "last memory") else f"gradient of {name}"
        assert ours.shape == right.shape, f"{who}: the {what} has shape {ours.shape}"
        excess = np.abs(ours - right) - RELATIVE * np.abs(right) - ABSOLUTE
        at = np.unravel_index(excess.argmax(), excess.shape)  # the place of the worst number
        assert excess[at] <= 0, (
            f"{who}: the {what} at {[*map(int, at)]} is {ours[at]:.6g}, BPTT's {right[at]:.6g}. "
            "Training by it would not learn what full BPTT learns"
        )
