"""Compressive Transformer: what leaves the memory is compressed, and what trains the compression.

Section 3, Figure 1 and Algorithm 1. Two queues stand behind a segment of N tokens:

    compressed memory  <--  every 3 rows become 1  <--  memory  <--  the segment's N rows
    the oldest leave,                                   the oldest N leave
    for good

Each layer has both, and its tokens attend to all of it. The tests show, for NumPy and PyTorch in
float64: how rows are compressed, that both memories are queues, and which loss trains what.
"""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from accelerated import compressive as fast
from reference import compressive as ref
from reference.variants import compressive as variants
from tests.start_here.strategies import compare

# No two sizes are equal, so that no axis is taken for another
B = 6  # lanes: documents side by side
N = 12  # tokens of a segment
D = 8  # width
V = 13  # vocabulary
RATE = 3  # how many rows become one, the paper's c
GAPS = (1, 2, 4)  # of the dilated convolutions
SIZES = {
    "vocabulary": V,
    "width": D,
    "segment": N,
    "compression_rate": RATE,
    "dilations": GAPS,
    "heads": 2,
    "head_width": 5,
    "feed_forward": 7,
}
TOLERANCE = 1e-12
# What a failure means
OTHERWISE = "old rows would be compressed otherwise than section 3.2 says"
LOST = "a row is lost, stays too long or stands in another place"


# ----------------------------------------------------------------------------
# the compressions of section 3.2: each makes N / rate rows, rounded down, of one lane's rows (N, D)
def max_pooling(p, config, rows, usage):
    return [part.max(axis=0) for part in every_rate_rows(config, rows)]


def mean_pooling(p, config, rows, usage):
    return [part.mean(axis=0) for part in every_rate_rows(config, rows)]


def conv(p, config, rows, usage):
    """A convolution with kernel and stride c: a part's rows, side by side, times a matrix."""
    return [p["weight"] @ part.reshape(-1) for part in every_rate_rows(config, rows)]


def dilated_conv(p, config, rows, usage):
    """Before that, layers in which a row sees itself and the row `gap` earlier, or else zeros.

    In the authors' code rows that have no earlier one are left out.
    """
    for gap in GAPS:
        if config.authors_code:
            pairs = zip(rows[:-gap], rows[gap:], strict=True)
        else:
            pairs = zip([np.zeros(D)] * gap + [*rows[:-gap]], rows, strict=True)
        weight = p[f"dilated_{gap}"]
        rows = np.stack([np.maximum(weight @ np.concatenate(pair), 0) for pair in pairs])
    return conv(p, config, rows, usage)


def most_used(p, config, rows, usage):
    """The rows that most attention went to, in their order in time; of equals the older ones."""
    by_usage = sorted(range(N), key=lambda i: (-usage[i], i))
    return rows[sorted(by_usage[: N // config.compression_rate])]


def every_rate_rows(config, rows):
    """Rows 0 to c - 1, c to 2c - 1, and so on; if fewer than c are left, they are cut off."""
    c = config.compression_rate
    return [rows[at : at + c] for at in range(0, len(rows) - c + 1, c)]


LOOPS = {loop.__name__: loop for loop in (max_pooling, mean_pooling, conv, dilated_conv, most_used)}


@pytest.mark.parametrize("kind", variants.COMPRESSIONS)
@given(seed=st.integers(0, 2**32 - 1), rate=st.integers(1, N), authors=st.booleans())
def test_every_compression_is_its_loop(kind, seed, rate, authors):
    """Section 3.2: f_c makes floor(N / c) compressed rows of the N rows that leave the memory."""
    is_unpadded = authors and kind == "dilated_conv"
    assume(rate <= N - is_unpadded * sum(GAPS))
    options = {"compression_rate": rate, "authors_code": authors, "compression_loss": "none"}
    config = ref.Config(**SIZES | options, compression=kind)
    rng = np.random.default_rng(seed)
    p = config.operations.init_conv(config, rng)
    evicted = rng.standard_normal((B, N, D))
    usage = rng.integers(4, size=(B, N)) / 4  # mean attention to each row; some have the same
    loop = LOOPS[kind]
    expected = np.stack([loop(p, config, evicted[lane], usage[lane]) for lane in range(B)])
    assert expected.shape[1] == config.new_rows

    by_numpy, _ = config.operations.conv_forward(p, config, evicted, usage)
    compare(f"NumPy's {kind}", by_numpy, expected, TOLERANCE, OTHERWISE)
    module = fast.COMPRESSIONS[kind](config)
    module.load_state_dict({name: torch.tensor(array) for name, array in p.items()})
    by_torch = module(torch.tensor(evicted), torch.tensor(usage))
    compare(f"PyTorch's {kind}", by_torch, expected, TOLERANCE, OTHERWISE)


# ----------------------------------------------------------------------------
# the memories of Algorithm 1
def one_layer(**options):
    """(config, PyTorch's model, its parameters in NumPy). Its layer reads the embedding itself."""
    config = ref.Config(**SIZES, **options, layers=1)
    model = fast.Compressive(config)
    params = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    return config, model, params


@given(
    seed=st.integers(0, 2**32 - 1),
    memory_rows=st.sampled_from([0, 1, 7, 12, 17, 30]),  # a segment adds 12
    compressed_rows=st.sampled_from([1, 3, 4, 9]),  # and 4
)
def test_memories_are_queues(seed, memory_rows, compressed_rows):
    """Algorithm 1, lines 1-2 and 8-11: new rows enter at the end, the oldest leave at the front."""
    config, model, params = one_layer(
        memory=memory_rows, compressed_memory=compressed_rows, compression="mean_pooling"
    )
    text = np.random.default_rng(seed).integers(V, size=(3, B, N))  # three segments
    memory = np.zeros((B, memory_rows, D))  # line 1
    compressed = np.zeros((B, compressed_rows, D))  # line 2
    state = ref.initial_state(params, config, B)
    torch_state = model.initial_state(B)

    for number, tokens in enumerate(text):
        queue = np.concatenate([memory, params["embedding"][tokens]], axis=1)
        leaving = queue[:, :N]  # line 8
        memory = queue[:, N:]  # line 10
        means = leaving.reshape(B, N // RATE, RATE, D).mean(axis=2)  # line 9
        compressed = np.concatenate([compressed, means], axis=1)[:, -compressed_rows:]  # line 11

        _, state, _ = ref.forward(params, config, tokens, state)
        torch_state = model.advance(torch.tensor(tokens), torch_state)
        for side, found in (("NumPy", state), ("PyTorch", torch_state)):
            after = f"after segment {number} {side}'s"
            compare(f"{after} memory", found.memory[:, 0], memory, TOLERANCE, LOST)
            compare(
                f"{after} compressed memory", found.compressed[:, 0], compressed, TOLERANCE, LOST
            )


# ----------------------------------------------------------------------------
# the losses of section 3.2
def gradients_in_numpy(config, params, text):
    """[{name: gradient}] of the second segment's task loss, and of its compression loss.

    Any function of the logits can be the task loss: here it is half of their squares.
    """
    _, state, first = ref.forward(params, config, text[0], ref.initial_state(params, config, B))
    logits, _, second = ref.forward(params, config, text[1], state)
    task, dstate = ref.backward(params, config, second, logits)
    through_state, _ = ref.backward(params, config, first, np.zeros_like(logits), dstate)
    ref.add_into(task, through_state)

    _, auxiliary_cache = ref.auxiliary_forward(params, config, second)
    own = ref.auxiliary_backward(config, 1.0, auxiliary_cache)
    return [task, own]


def gradients_in_pytorch(model, text):
    """The same, by autograd."""
    first = model(torch.tensor(text[0]), model.initial_state(B))
    logits, _, losses = model(torch.tensor(text[1]), first.state)
    names, parameters = zip(*model.named_parameters(), strict=True)
    task = logits.square().sum() / 2
    own = sum(losses.values()) + 0.0 * task  # a graph even if there are none
    gradients = []
    for loss in (task, own):
        grads = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
        gradients.append(dict(zip(names, grads, strict=True)))
    return gradients


@pytest.mark.parametrize("loss", variants.COMPRESSION_LOSSES)
def test_a_compression_loss_trains_the_compression_alone_and_the_task_loss_all_the_rest(loss):
    """Section 3.2: gradients of the compression losses are stopped from passing into the network.

    The task loss reaches the compression only under BPTT: through the compressed memory that the
    first segment has written and the second one reads.
    """
    config, model, params = one_layer(memory=7, compressed_memory=5, compression_loss=loss)
    text = np.random.default_rng(0).integers(V, size=(2, B, N))
    compression = {name for name in params if ".compression." in name}
    of_task = params.keys() if loss == "bptt" else params.keys() - compression
    of_compression = compression if loss in variants.AUXILIARY else set()

    task, own = gradients_in_numpy(config, params, text)
    check_trained("NumPy's task loss", task, params, of_task)
    check_trained(f"NumPy's {loss} loss", own, params, of_compression)
    task, own = gradients_in_pytorch(model, text)
    check_trained("PyTorch's task loss", task, params, of_task)
    check_trained(f"PyTorch's {loss} loss", own, params, of_compression)


def check_trained(loss, gradients, params, expected):
    """Fail, naming the parameter, unless exactly the expected ones have a gradient other than 0."""
    for name in params:
        is_trained = name in gradients and bool((gradients[name] != 0).any())
        if name in expected:
            assert is_trained, f"{loss} gives {name} no gradient, so it would never learn from it"
        else:
            assert not is_trained, f"{loss} trains {name}; by section 3.2 its gradient stops before"
