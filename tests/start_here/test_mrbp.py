"""Memory Replay Back-Propagation gives the gradients of full back-propagation through time (Memformer, 2.4, Algorithm 1).

Full BPTT keeps the activations of all segments. MRBP keeps only the memories, which a first pass computes without gradient. Then
each segment, from the last to the first, is computed again and goes backward from its loss and from its next memory.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from accelerated.data.lanes import Segment
from accelerated.memformer import Memformer
from accelerated.replay import memory_replay, through_time
from reference.memformer import Config

SEEDS, SHARES = st.integers(0, 2**31), st.sampled_from([0.0, 0.3, 1.0])
V, D, B, N = 11, 6, 3, 4  # vocabulary, width, lanes (documents side by side), tokens in a segment
SIZES = {
    "vocabulary": V,
    "width": D,
    "heads": 2,
    "head_width": 5,
    "feed_forward": 7,
    "segment": N,
    "slots": 3,
}


def model(weights, tokens, targets, memory):
    """The loss of a segment, whose tokens (B, N) see memory (B, D), and the next memory, made of old memory and mean token."""
    embedding, keep, write = weights
    x = embedding[tokens]  # (B, N, D)
    logits = torch.tanh(x + memory[:, None]) @ embedding.T  # (B, N, V)
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss, torch.tanh(memory @ keep + x.mean(1) @ write)


def full_bptt(weights, rollout, memory):
    """Autograd through everything: one graph of all segments."""
    total = 0.0
    for tokens, targets in rollout:
        loss, memory = model(weights, tokens, targets, memory)
        total = total + loss
    total.backward()


def mrbp(weights, rollout, memory):
    """Algorithm 1, with the numbers of its lines."""
    replay_buffer = [memory]  # 1-2
    for tokens, targets in rollout[:-1]:  # 3
        with torch.no_grad():
            replay_buffer.append(model(weights, tokens, targets, replay_buffer[-1])[1])  # 4-5
    gradient = torch.zeros_like(memory)  # 7
    for tokens, targets in reversed(rollout):  # 8
        memory = replay_buffer.pop().detach().requires_grad_()
        loss, next_memory = model(weights, tokens, targets, memory)  # 9-10
        loss.backward(retain_graph=True)  # 11
        next_memory.backward(gradient)  # 12
        gradient = memory.grad


@given(seed=SEEDS, segments=st.integers(2, 4))
def test_algorithm_1_gives_the_gradients_of_autograd_through_everything(seed, segments):
    torch.manual_seed(seed)
    start, *weights = (
        torch.randn(shape, dtype=torch.float64) for shape in ((B, D), (V, D), (D, D), (D, D))
    )
    rollout, copies = (
        torch.randint(V, (segments, 2, B, N)),
        [weight.clone().requires_grad_() for weight in weights],
    )
    full_bptt([weight.requires_grad_() for weight in weights], rollout, start)
    mrbp(copies, rollout, start)
    assert all(
        torch.allclose(copy.grad, weight.grad, rtol=1e-9, atol=1e-12)
        for copy, weight in zip(copies, weights, strict=True)
    )


@given(
    seed=SEEDS,
    lanes=st.integers(1, 3),
    segments=st.integers(1, 3),
    starting=SHARES,
    scored=SHARES,
    encoder=st.integers(0, 1),
)
def test_memformer_by_memory_replay_has_the_gradients_of_full_bptt(
    seed, lanes, segments, starting, scored, encoder
):
    """With dropout; documents start within, a share of the tokens is scored, and the rollout goes on from an earlier memory."""
    memformer = Memformer(
        Config(**SIZES, encoder_layers=encoder, decoder_layers=1, dropout=0.2), seed
    ).double()
    torch.manual_seed(seed)
    text, chance = torch.randint(V, (segments, 2, lanes, N)), torch.rand(segments, lanes, N + 1)
    rollout = [
        Segment(*pair, draw[:, 1:] < scored, draw[:, 0] < starting)
        for pair, draw in zip(text, chance, strict=True)
    ]
    state, found = memformer.advance(rollout[0].tokens, memformer.initial_state(lanes)), []
    for method in (through_time, memory_replay):
        memformer.zero_grad()
        torch.manual_seed(seed)  # both drop the same
        loss, _, after = method(memformer, rollout, state)
        found.append(
            [loss, after.memory, *(p.grad for p in memformer.parameters() if p.grad is not None)]
        )
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(*found, strict=True))
