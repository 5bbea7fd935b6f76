"""The judge's side of begin/memformer.py: right answers from the reference, inputs.

Nothing here is shown to the reader; memformer.txt has the mistakes.
"""

import weakref

import numpy as np

from docs.practice.tasks import Task, backward_task, normal, normals, ranges
from reference import memformer as reference

SLOT_SIZES = ranges(B=3, H=4, S=6, N=7, E=8)
SCORED = {"query": "B, H, S, E", "self_key": "B, H, S, E", "key": "B, H, N, E"}
WRITTEN = SCORED | {"slots": "B, H, S, E + 1", "value": "B, H, N, E + 1"}


# ----------------------------------------------------------------------------
# writing memory
def slot_scores(query, self_key, key, readable):
    mask = readable[:, None, None]  # (B, 1, 1, N)
    scores, _ = reference.slot_scores_forward(query, self_key, key, mask)
    return scores


def slot_inputs(rng, **sizes):
    """Queries and keys; some tokens are padding."""
    given = normals(rng, sizes, SCORED)
    readable = rng.random((sizes["B"], sizes["N"])) < 0.7
    return given | {"readable": readable}


def slot_attention(scores, slots, value):
    new, _ = reference.slot_mean_forward(scores, slots, value)
    return new


def mean_inputs(rng, **sizes):
    """Scores, now and then large or -inf, and the slots and values that they weigh."""
    large = 1000 * rng.integers(0, 2)
    scores = hidden_scores(rng, **sizes) + large
    shapes = {"slots": "B, H, S, E", "value": "B, H, N, E"}
    return {"scores": scores} | normals(rng, sizes, shapes)


def hidden_scores(rng, B, H, S, N, E):
    """Scores of 1 + N keys, some of which are hidden, never the first."""
    scores = normal(rng, B, H, S, 1 + N)
    scores[..., 1:][rng.random((B, H, S, N)) < 0.2] = -np.inf
    return scores


def slot_attention_backward(dnew, query, self_key, key, slots, value, weights):
    dscores, dslots, dvalue = reference.slot_mean_backward(dnew, (weights, slots, value))
    cache = (query, self_key, key)
    dquery, dself_key, dkey = reference.slot_scores_backward(dscores, cache)
    return dquery, dself_key, dkey, dslots, dvalue


def backward_inputs(rng, **sizes):
    """What the backward needs, with some keys hidden."""
    weights, _ = reference.softmax_forward(hidden_scores(rng, **sizes))
    return normals(rng, sizes, {"dnew": "B, H, S, E + 1"} | WRITTEN) | {"weights": weights}


def retention_backward(dkept, scores):
    weights, _ = reference.softmax_forward(scores)
    own = weights[..., 0]  # (K, S)
    dkept = dkept * own.prod(0)
    dscores = -dkept[:, None] * weights
    dscores[..., 0] += dkept
    return dscores


def plain_write_backward(dnew, slots, encoded):
    dnew, slots, encoded = (each[:, None] for each in (dnew, slots, encoded))  # one head
    scores, _ = reference.slot_scores_forward(slots, slots, encoded, True)
    weights, _ = reference.softmax_forward(scores)
    written = slot_attention_backward(dnew, slots, slots, encoded, slots, encoded, weights)
    dquery, dself_key, dkey, dslots, dvalue = written
    return (dquery + dself_key + dslots)[:, 0], (dkey + dvalue)[:, 0]


# ----------------------------------------------------------------------------
# relative positions
def simplified_attention(query, key, value, positions):
    m = len(positions) // 2
    distances = np.arange(-m, m + 1)
    everything = np.ones((1, 1, 1, 1), bool)
    p = {"positions": positions}
    out, _ = reference.simplified_attention_forward(
        p, query, key, value, distances, everything, 0.0, None
    )
    return out


# ----------------------------------------------------------------------------
# a step and a document
def step(tokens, memory, previous, encode, write, decode):
    encodings = encode(previous, memory)
    next_memory = write(memory, encodings)
    logits = decode(tokens, encodings)
    return logits, next_memory, tokens


def step_inputs(rng, B, N, S, D, V):
    """Tokens, a memory, and three small functions in the places of the networks."""
    vectors = normal(rng, V, D)
    output = normal(rng, D, V)
    mixing = normal(rng, S, N)

    def encode(tokens, memory):
        return vectors[tokens] + np.tanh(memory).sum(1, keepdims=True)

    def write(memory, encodings):
        return np.tanh(0.5 * memory + mixing @ encodings)

    def decode(tokens, encodings):
        return (vectors[tokens] + 2 * encodings.mean(1, keepdims=True)) @ output

    return {
        "tokens": rng.integers(V, size=(B, N)),
        "memory": normal(rng, B, S, D),
        "previous": rng.integers(V, size=(B, N)),
        "encode": encode,
        "write": write,
        "decode": decode,
    }


def document_start_backward(starts, dread, keep):
    dinitial = 0.0
    dcarried = 0.0
    for first, own in zip(starts[::-1], dread[::-1], strict=True):
        starting = first[:, None, None]
        dstate = own + keep * dcarried
        dinitial = dinitial + np.where(starting, dstate, 0.0).sum(0)
        dcarried = np.where(starting, 0.0, dstate)
    return dinitial, dcarried


def start_inputs(rng, K, B, S, D):
    """Some lanes start."""
    starts = rng.random((K, B)) < 0.4
    return {"starts": starts, "dread": normal(rng, K, B, S, D), "keep": normal(rng, D)}


# ----------------------------------------------------------------------------
# memory replay
def memory_replay(segments, memory, advance, forward, backward):
    memories = [memory]
    for segment in segments[:-1]:
        memories.append(advance(segment, memories[-1]))
    loss = 0.0
    dweight = 0.0
    dmemory = np.zeros_like(memory)
    for segment in reversed(segments):
        before = memories.pop()
        part, _, cache = forward(segment, before)
        more, dmemory = backward(cache, dmemory)
        cache = None
        loss = loss + part
        dweight = dweight + more
    return loss, dweight, dmemory


class Cache:
    """What a forward keeps; the judge counts those alive."""

    def __init__(self, segment, memory, after):
        self.kept = (segment, memory, after)


class Network:
    """M' = tanh(M W + x), loss = sum of M' y."""

    def __init__(self, weight):
        self.weight = weight
        self.alive = weakref.WeakSet()
        self.most_alive = 0

    def advance(self, segment, memory):
        x, _ = segment
        return np.tanh(memory @ self.weight + x)

    def forward(self, segment, memory):
        _, y = segment
        after = self.advance(segment, memory)
        cache = Cache(segment, memory, after)
        self.alive.add(cache)
        self.most_alive = max(self.most_alive, len(self.alive))
        return (after * y).sum(), after, cache

    def backward(self, cache, dnext_memory):
        segment, memory, after = cache.kept
        _, y = segment
        dbefore = (dnext_memory + y) * (1 - after**2)
        dweight = np.einsum("bsd,bse->de", memory, dbefore)
        return dweight, dbefore @ self.weight.T


def replay_inputs(rng, K, B, S, D):
    """K segments (x, y) and a first memory."""
    segments = [(normal(rng, B, S, D), normal(rng, B, S, D)) for _ in range(K)]
    return {"segments": segments, "memory": normal(rng, B, S, D), "weight": normal(rng, D, D)}


def call_with_network(answer, given):
    """The answer's results, and how many caches it kept at once."""
    network = Network(given["weight"])
    returned = answer(
        given["segments"], given["memory"], network.advance, network.forward, network.backward
    )
    return (*returned, network.most_alive) if isinstance(returned, tuple) else returned


CACHES = "it keeps more than one cache at once; memory replay stores memories, and no cache but one"
TASKS = (
    Task(
        slot_scores,
        {"scores": "B, H, S, 1 + N"},
        SLOT_SIZES,
        slot_inputs,
    ),
    Task(
        slot_attention,
        {"new": "B, H, S, D/H"},
        SLOT_SIZES,
        mean_inputs,
    ),
    backward_task(slot_attention_backward, SLOT_SIZES, "", WRITTEN, backward_inputs),
    Task(
        simplified_attention,
        {"out": "B, H, N, E"},
        ranges(B=3, H=4, N=7, E=8, m=4),
        {
            "query": "B, H, N, E",
            "key": "B, H, N, E",
            "value": "B, H, N, E",
            "positions": "2 * m + 1, E",
        },
    ),
    Task(
        step,
        {"logits": "B, N, V", "next memory": "B, S, D", "next previous": "B, N"},
        ranges(B=3, N=5, S=4, D=6, V=(2, 7)),
        step_inputs,
    ),
    Task(
        document_start_backward,
        {"dinitial": "S, D", "dcarried": "B, S, D"},
        ranges(K=4, B=6, S=4, D=5),
        start_inputs,
    ),
    Task(
        memory_replay,
        {"loss": "", "dweight": "D, D", "dmemory": "B, S, D", CACHES: ""},
        ranges(K=5, B=3, S=4, D=6),
        replay_inputs,
        call=call_with_network,
        also=CACHES,
    ),
    backward_task(retention_backward, ranges(K=(0, 4), S=5, N=6), "S", {"scores": "K, S, 1 + N"}),
    backward_task(
        plain_write_backward,
        ranges(B=3, S=4, N=(0, 6), D=5),
        "B, S, D",
        {"slots": "B, S, D", "encoded": "B, N, D"},
    ),
)
