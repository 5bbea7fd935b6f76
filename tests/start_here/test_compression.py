"""Compressive Transformer: what leaves the memory is compressed, and what trains the compression (3.1, 3.2, Algorithms 1 and 2).

Each compression is a loop. Memory and compressed memory are queues. The two compression losses reach the compression and nothing
else; the task loss reaches all the rest, and the compression only under BPTT. NumPy and PyTorch are compared in float64.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated import compressive as fast
from reference import compressive as ref

B, N, D, RATE = 2, 12, 8, 3  # lanes, tokens of a segment, width, rows that become one
SIZES = {
    "vocabulary": 13,
    "width": D,
    "heads": 2,
    "head_width": 5,
    "feed_forward": 7,
    "segment": N,
    "compression_rate": RATE,
}


def by_loop(kind, p, rows, usage):
    """The compression of rows (N, D) of one lane; usage (N,) is the mean attention to each."""
    if kind == "most_used":  # of equals the older, and all in their order
        return rows[
            sorted(sorted(range(len(rows)), key=lambda i: (-usage[i], i))[: len(rows) // RATE])
        ]
    for gap in (
        (1, 2, 4) if kind == "dilated_conv" else ()
    ):  # each sees a row and the one `gap` before, zero before the first
        pairs = [
            np.concatenate([rows[i - gap] if i >= gap else np.zeros(D), rows[i]])
            for i in range(len(rows))
        ]
        rows = np.stack([np.maximum(p[f"dilated_{gap}"] @ pair, 0) for pair in pairs])
    pools = {"mean_pooling": lambda part: part.mean(0), "max_pooling": lambda part: part.max(0)}
    pool = pools.get(kind, lambda part: p["weight"] @ part.reshape(-1))  # both convolutions
    return np.stack([pool(part) for part in rows.reshape(-1, RATE, D)])


@given(st.sampled_from(sorted(ref.COMPRESSIONS)), st.integers(0, 2**32 - 1))
def test_every_compression_is_its_loop(kind, seed):
    config, rng = (
        ref.Config(**SIZES, compression=kind, compression_loss="none"),
        np.random.default_rng(seed),
    )
    p, module = ref.init_compression(config, rng), fast.COMPRESSIONS[kind](config).double()
    module.load_state_dict({name: torch.tensor(x) for name, x in p.items()})
    evicted, usage = (
        rng.standard_normal((B, N, D)),
        rng.integers(4, size=(B, N)) / 4,
    )  # some are used equally
    expected = np.stack([by_loop(kind, p, *lane) for lane in zip(evicted, usage, strict=True)])
    assert np.allclose(
        ref.COMPRESSIONS[kind][0](p, config, evicted, usage)[0], expected, rtol=0, atol=1e-12
    )
    assert np.allclose(
        module(torch.tensor(evicted), torch.tensor(usage)).detach(), expected, rtol=0, atol=1e-12
    )


@given(
    st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 7, N, 17, 30]), st.sampled_from([1, 3, 4, 9])
)
def test_memories_are_queues(seed, memory, compressed):
    """Shorter, as long and longer than what a segment adds, 12 rows and 4 compressed ones. One layer: its input is known."""
    config = ref.Config(
        **SIZES, layers=1, memory=memory, compressed_memory=compressed, compression="mean_pooling"
    )
    model, text = (
        fast.Compressive(config).double(),
        np.random.default_rng(seed).integers(13, size=(B, 3 * N)),
    )
    params = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    queue = np.concatenate(
        [np.zeros((B, memory, D)), params["embedding"][text]], axis=1
    )  # zeros at first (Alg. 1, l.1-2)
    state, of_torch = ref.initial_state(params, config, B), model.initial_state(B)
    for read in (N, 2 * N, 3 * N):  # tokens so far; as many rows have left the memory at its front
        state = ref.forward(params, config, text[:, read - N : read], state)[1]
        of_torch = model.advance(torch.tensor(text[:, read - N : read]), of_torch)
        evicted, kept = queue[:, :read].reshape(B, -1, RATE, D), queue[:, read : read + memory]
        expected = (
            kept,
            np.concatenate([np.zeros((B, compressed, D)), evicted.mean(2)], axis=1)[
                :, -compressed:
            ],
        )
        for found in (state, [field.detach().numpy() for field in of_torch]):
            assert all(
                np.allclose(a[:, 0], b, rtol=0, atol=1e-12)
                for a, b in zip(found, expected, strict=True)
            )


@pytest.mark.parametrize("loss", ref.COMPRESSION_LOSSES)
def test_a_compression_loss_trains_the_compression_alone_and_the_task_loss_all_the_rest(loss):
    """A loss of the second segment; the first segment wrote the memories that it reads."""
    config = ref.Config(**SIZES, layers=1, memory=7, compressed_memory=5, compression_loss=loss)
    model, text = (
        fast.Compressive(config).double(),
        np.random.default_rng(0).integers(13, size=(2, B, N)),
    )
    params = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    trained_by_task = {name for name in params if ".compression." not in name or loss == "bptt"}
    trained_by_loss = {name for name in params if ".compression." in name and loss in ref.AUXILIARY}

    _, state, first = ref.forward(params, config, text[0], ref.initial_state(params, config, B))
    logits, _, second = ref.forward(params, config, text[1], state)
    task, dstate = ref.backward(params, config, second, logits)
    ref.add_into(
        task, ref.backward(params, config, first, 0 * logits, dstate)[0]
    )  # what goes through the state
    own = ref.auxiliary_backward(config, 1.0, ref.auxiliary_forward(params, config, second)[1])
    logits, _, losses = model(
        torch.tensor(text[1]), model(torch.tensor(text[0]), model.initial_state(B)).state
    )
    cases = (
        (logits.square().sum(), task, trained_by_task),
        (sum(losses.values()), own, trained_by_loss),
    )
    for objective, by_numpy, trained in cases:
        assert {name for name, grad in by_numpy.items() if grad.any()} == trained
        if trained:
            grads = torch.autograd.grad(
                objective, list(model.parameters()), retain_graph=True, allow_unused=True
            )
            assert {
                name
                for name, grad in zip(params, grads, strict=True)
                if grad is not None and grad.any()
            } == trained
