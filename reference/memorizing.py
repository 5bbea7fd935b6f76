"""Memorizing Transformer (Wu, Rabe, Hutchins, Szegedy, 2022) in NumPy.

A Transformer-XL whose attention reaches N tokens back, and forgets. One layer therefore keeps the
keys and values of the last M tokens as they were. Each of its queries looks up the K nearest of
those keys, attends to them, and a gate per head mixes the result with the layer's local attention.
No gradient flows into the memory, so it can be long. `forward` maps (tokens, state) to (logits,
next state). `backward` maps the gradient of the next state to that of the incoming state. `params`
are all parameters, {dotted name: array}, and `p` those of one part, without its prefix. A first
reading ends with the model. Decisions are numbered in docs/decisions/memorizing.md.

Glossary: code symbol, meaning, paper symbol, shape
    tokens         token ids of one segment; below, their vectors are x         (B, N); x: (B, N, D)
    keys, values   of the previous segment, then of this one          K, V      (B, H, 2N, E)
    query          of local attention and of the lookup alike         Q         (B, H, N, E)
    memory_keys    of the last M tokens before this segment           K_m       (B, H, M, E)
    memory_values  their values                                                 (B, H, M, E)
    nearest        indices of each query's K nearest keys in memory             (B, H, N, K)
    local          what a query takes from the last N tokens          V_c       (B, H, N, E)
    found          what it takes from memory                          V_m       (B, H, N, E)
    g              how much of `found` a head takes                   g         (H,)

B batch (lanes), N tokens in a segment, M tokens in memory, K retrieved keys, D width, H heads, E
head width, F feed-forward width, V vocabulary, L layers. Config counts layers from 1, as the papers
do; indices of arrays count from 0.
"""

import importlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


# ----------------------------------------------------------------------------
# configuration: sizes, and what a segment hands to the next one
@dataclass(frozen=True)
class Config:
    """Sizes of the model; impossible combinations raise ValueError naming the field.

    Fields:
        vocabulary: V, number of token ids
        width: D, model width
        layers: L, number of layers
        heads: H, attention heads
        head_width: E, width of a head
        feed_forward: F, width of the feed-forward hidden layer
        segment: N, tokens in a segment, and how many tokens back local attention reaches
        memory_layer: the layer that looks up its memory, counted from 1
        memory: M, tokens whose keys and values the memory keeps; 0 for a Transformer-XL
        retrieved: K, nearest keys that a query attends to
        buckets: T5 relative position buckets of local attention
        max_distance: from this distance on, all positions share the last bucket
        attention_scale: starting value of the learned scales of query-key normalised attention
        dropout: dropout rate in training, 0 to below 1
        output_dropout: whether entries are dropped before the output too (decision 11: as released)
    """

    vocabulary: int = 256
    width: int = 128
    layers: int = 4
    heads: int = 4
    head_width: int = 32
    feed_forward: int = 512
    segment: int = 64
    memory_layer: int = 3
    memory: int = 1024
    retrieved: int = 16
    buckets: int = 32
    max_distance: int = 128
    attention_scale: float = 10.0
    dropout: float = 0.05
    output_dropout: bool = False

    def __post_init__(self):
        check_config(self)


class State(NamedTuple):
    """What a segment hands to the next one; axis 0 of every field is the lane.

    No gradient flows into the memory, whose newest row is the last.
    """

    keys: np.ndarray  # (B, L, H, N, E), the previous segment's, unit length
    values: np.ndarray  # (B, L, H, N, E)
    memory_keys: np.ndarray  # (B, H, M, E), the memory layer's
    memory_values: np.ndarray  # (B, H, M, E)


# ----------------------------------------------------------------------------
# the method: each query looks up its nearest keys, and a gate mixes what it finds with what is near
def nearest_keys(query, memory_keys, retrieved):
    """Indices (B, H, N, K) of the K keys in memory most similar to each query, in any order.

    query (B, H, N, E), memory_keys (B, H, M, E), and retrieved is K.
    """
    similarity = query @ memory_keys.mT  # (B, H, N, M), decision 7: exact search
    # decision 6: empty rows, whose keys are 0, come last
    filled = memory_keys.any(-1)[:, :, None]  # (B, H, 1, M)
    distance = np.where(filled, -similarity, np.inf)
    nearest_first = np.argpartition(distance, retrieved - 1, axis=-1)
    return nearest_first[..., :retrieved]


def retrieval_forward(query, memory_keys, memory_values, scale, retrieved):
    """softmax((q·k) scale) v over each query's K nearest keys in memory, (B, H, N, E).

    The similarity is q·k alone (decision 8: no positions here).
    """
    nearest = nearest_keys(query, memory_keys, retrieved)[..., None]  # (B, H, N, K, 1)
    key = np.take_along_axis(memory_keys[:, :, None], nearest, axis=3)  # (B, H, N, K, E)
    value = np.take_along_axis(memory_values[:, :, None], nearest, axis=3)
    similarity = (key * query[..., None, :]).sum(-1)  # (B, H, N, K)
    scores = similarity * scale[:, None, None]  # decision 3: local attention's scale
    weights, _ = softmax_forward(scores)
    found = (weights[..., None] * value).sum(-2)  # (B, H, N, E)
    return found, (key, value, scale, similarity, weights)


# u = q·k, w = softmax(α u), φ = Σ w v: ds = softmax'(dφ·v), dα = Σ ds u, dq = α Σ ds k;
# nothing for the memory's k and v
def retrieval_backward(dfound, cache):
    """Gradients of query and scale (H,); the lookup is "non-differentiable".

    Nothing goes to the keys and values (decision 10: memory is data).
    """
    key, value, scale, similarity, weights = cache
    dweights = (value * dfound[..., None, :]).sum(-1)  # (B, H, N, K)
    dscores = softmax_backward(dweights, weights)
    dscale = (dscores * similarity).sum((0, 2, 3))
    dquery = (dscores[..., None] * key).sum(-2) * scale[:, None, None]  # (B, H, N, E)
    return dquery, dscale


def memory_gate_forward(local, found, bias):
    """A learned mixture of what was near and what was found, by g = sigmoid(bias) of each head."""
    g = sigmoid(bias)[:, None, None]  # (H, 1, 1), decision 9: one per head
    mixed = found * g + local * (1 - g)
    return mixed, (local, found, g)


# y = φ g + λ (1 - g), g = sigmoid(b): dφ = dy g, dλ = dy (1 - g), db = g (1 - g) Σ dy (φ - λ)
def memory_gate_backward(dmixed, cache):
    local, found, g = cache
    dlocal = dmixed * (1 - g)
    dfound = dmixed * g
    dg = (dmixed * (found - local)).sum((0, 2, 3))  # (H,)
    dbias = dg * (g * (1 - g))[:, 0, 0]
    return dlocal, dfound, dbias


def remember(memory, rows):
    """The last M of memory (B, H, M, E) and of the segment's rows (B, H, N, E), newest last."""
    queue = np.concatenate([memory, rows], axis=2)
    return queue[:, :, rows.shape[2] :]


def local_attention_forward(p, config, query, keys, values, rng):
    """Each query (B, H, N, E) attends to the N tokens before it, of keys, values (B, H, 2N, E)."""
    # decision 4: T5's biases
    bias, bias_cache = position_bias_forward(
        p["position_bias"], config.segment, config.max_distance
    )
    mask = tile_mask(config.segment)
    # decision 11: dropout here
    out, attention_cache = attention_forward(
        query, keys, values, p["scale"], bias, mask, config.dropout, rng
    )
    return out, (attention_cache, bias_cache)


def local_attention_backward(dout, cache):
    attention_cache, bias_cache = cache
    dquery, dkeys, dvalues, dscale, dbias = attention_backward(dout, attention_cache)
    dtable = position_bias_backward(dbias, bias_cache)
    return dquery, dkeys, dvalues, {"scale": dscale, "position_bias": dtable}


# ----------------------------------------------------------------------------
# the model: the whole of it first, then a layer
def forward(params, config, tokens, state, rng=None):
    """Logits (B, N, V), the next state, and the cache for `backward`.

    tokens (B, N) of ids below V, N = config.segment; rng turns dropout on. Position i of the logits
    predicts token i + 1. Raises ValueError if N is not the segment length.
    """
    if tokens.shape[1] != config.segment:
        raise ValueError(
            f"a segment of {tokens.shape[1]} tokens is not one of {config.segment}; pad it"
        )
    x = params["embedding"][tokens]  # (B, N, D)
    keys = np.zeros_like(state.keys)
    values = np.zeros_like(state.values)
    memory = (state.memory_keys, state.memory_values)
    caches = []
    for layer in range(config.layers):
        p = subtree(params, f"layers.{layer}.")
        previous = np.stack([state.keys[:, layer], state.values[:, layer]])
        x, last, cache = layer_forward(p, config, x, previous, memory, rng)
        keys[:, layer], values[:, layer] = last
        caches.append(cache)
    normed, norm_cache = layer_norm_forward(params, "final_norm", x)
    rate = config.dropout if config.output_dropout else 0.0
    dropped, dropout_mask = dropout(normed, rate, rng)
    scaled = dropped * config.width**-0.5  # decision 12: tied and scaled
    logits, output_cache = linear_forward(scaled, params["embedding"])

    # decision 5: after the segment
    memory_keys = remember(state.memory_keys, keys[:, config.memory_layer - 1])
    memory_values = remember(state.memory_values, values[:, config.memory_layer - 1])
    next_state = State(keys, values, memory_keys, memory_values)
    return logits, next_state, (tokens, caches, norm_cache, dropout_mask, output_cache)


# M the embedding: logits = norm(y) M^T / sqrt(D), x = M[tokens]:
# dM = dlogits^T norm(y) / sqrt(D) + dx at the tokens' rows
def backward(params, config, cache, dlogits, dnext_state=None):
    """Gradients of the parameters and of the incoming state; the memory's is always zero.

    dnext_state None stops the gradient at the segment's end (decision 10: as at horizon 1).
    """
    tokens, caches, norm_cache, dropout_mask, output_cache = cache
    fresh = initial_state(params, config, len(tokens))
    dstate = State(*map(np.zeros_like, fresh))
    if dnext_state is None:
        dnext_state = fresh  # zeros

    dscaled, dembedding = linear_backward(dlogits, output_cache)
    dnormed = dscaled * config.width**-0.5 * dropout_mask
    dx, grads = layer_norm_backward(dnormed, norm_cache)
    for layer in reversed(range(config.layers)):
        dlast = np.stack([dnext_state.keys[:, layer], dnext_state.values[:, layer]])
        dx, dprevious, dlayer = layer_backward(config, dx, dlast, caches[layer])
        dstate.keys[:, layer], dstate.values[:, layer] = dprevious
        grads |= prefixed(f"layers.{layer}.", dlayer)
    np.add.at(dembedding, tokens, dx)  # the tied embedding's second gradient
    return grads | {"embedding": dembedding}, dstate


def layer_forward(p, config, x, previous, memory, rng):
    """y (B, N, D), the segment's keys and values (2, B, H, N, E), and the cache.

    previous: the last segment's keys and values. memory: keys and values (B, H, M, E), which the
    memory layer reads.
    """
    projected, projection_cache = projection_forward(p, config, x, rng)
    query = projected["query"]
    own = np.stack([projected["key"], projected["value"]])
    keys, values = np.concatenate([previous, own], axis=3)  # (B, H, 2N, E)
    attended, local_cache = local_attention_forward(p, config, query, keys, values, rng)

    memory_cache = None
    if "memory_gate" in p:
        memory_keys, memory_values = memory
        found, retrieval_cache = retrieval_forward(
            query, memory_keys, memory_values, p["scale"], config.retrieved
        )
        attended, gate_cache = memory_gate_forward(attended, found, p["memory_gate"])
        memory_cache = (retrieval_cache, gate_cache)

    out, output_cache = linear_forward(merge_heads(attended), p["output"])
    y, mlp_cache = token_mlp_forward(p, config, x + out, rng)
    return y, own, (projection_cache, local_cache, memory_cache, output_cache, mlp_cache)


# the query serves both: dq = its part of local'((1 - g) dy) + of retrieval'(g dy); the scale too
def layer_backward(config, dy, dlast, cache):
    projection_cache, local_cache, memory_cache, output_cache, mlp_cache = cache
    dx, grads = token_mlp_backward(dy, mlp_cache)
    dattended, grads["output"] = linear_backward(dx, output_cache)
    dattended = split_heads(dattended, config.heads)

    dquery_found = 0.0
    dscale_found = 0.0
    if memory_cache is not None:
        retrieval_cache, gate_cache = memory_cache
        dattended, dfound, grads["memory_gate"] = memory_gate_backward(dattended, gate_cache)
        dquery_found, dscale_found = retrieval_backward(dfound, retrieval_cache)
    dquery, dkeys, dvalues, dlocal = local_attention_backward(dattended, local_cache)
    dquery = dquery + dquery_found
    dlocal["scale"] = dlocal["scale"] + dscale_found

    n = dy.shape[1]
    dkeys_and_values = np.stack([dkeys, dvalues])  # (2, B, H, 2N, E)
    dkey, dvalue = dkeys_and_values[..., n:, :] + dlast
    dprojected = {"key": dkey, "value": dvalue, "query": dquery}
    dinput, dprojection = projection_backward(dprojected, projection_cache)
    dprevious = dkeys_and_values[..., :n, :]
    return dx + dinput, dprevious, grads | dlocal | dprojection


# ----------------------------------------------------------------------------
# through segments: what a document starts with
def initial_state(params, config, batch):
    """What a document starts with: zero keys and values (decision 6: empty rows)."""
    cache = np.zeros((batch, config.layers, config.heads, config.segment, config.head_width))
    memory = np.zeros((batch, config.heads, config.memory, config.head_width))
    return State(cache, cache, memory, memory)


# ----------------------------------------------------------------------------
# what every Transformer has: attention with T5's positions, norm, MLP; skip if familiar
NORM_EPSILON = 1e-6  # of layer_norm and unit_norm, below the roots (decision 1: epsilon is 1e-6)


def attention_forward(query, key, value, scale, bias=0.0, mask=True, rate=0.0, rng=None):
    """softmax((q·k + bias) scale) v, (B, H, N, E).

    query (B, H, N, E), key and value (B, H, K, E), scale (H,), bias (H, N, K), mask (N, K).
    """
    similarity = query @ key.mT + bias  # (B, H, N, K)
    scores = similarity * scale[:, None, None]  # decision 3: learned scale, no 1/sqrt(E)
    scores = np.where(mask, scores, -np.inf)
    weights, _ = softmax_forward(scores)
    dropped, dropout_mask = dropout(weights, rate, rng)
    out = dropped @ value
    return out, (query, key, value, scale, similarity, weights, dropped, dropout_mask)


# u = q k^T + b, w = softmax(α u), y = w v: dv = w^T dy, ds = softmax'(dy v^T),
# dα = Σ ds u, du = α ds, dq = du k, dk = du^T q
def attention_backward(dout, cache):
    query, key, value, scale, similarity, weights, dropped, dropout_mask = cache
    dvalue = dropped.mT @ dout
    ddropped = dout @ value.mT  # (B, H, N, K)
    dweights = ddropped * dropout_mask
    dscores = softmax_backward(dweights, weights)  # exactly zero where weights are: where masked
    dscale = (dscores * similarity).sum((0, 2, 3))
    dsimilarity = dscores * scale[:, None, None]
    dquery = dsimilarity @ key
    dkey = dsimilarity.mT @ query
    return dquery, dkey, dvalue, dscale, dsimilarity.sum(0)


def tile_mask(window):
    """True where a token sees a key: the W tokens before it, 1 <= i - j <= W."""
    distance = tile_distance(window)
    return (distance >= 1) & (distance <= window)  # decision 2: not the token itself


def tile_distance(window):
    """i - j of the W queries of a block and the 2W keys of its tile (Figure 2), (W, 2W)."""
    query_position = np.arange(window, 2 * window)[:, None]
    key_position = np.arange(2 * window)
    return query_position - key_position


def position_bias_forward(table, window, max_distance):
    """Bias (H, W, 2W) of every query-key pair of a tile from the table (H, buckets)."""
    bucket = position_bucket(tile_distance(window), table.shape[1], max_distance)  # (W, 2W)
    return table[:, bucket], (bucket, table)


# bias_ij = table[bucket(i - j)]: dtable[b] = sum of dbias_ij over all pairs i, j in bucket b
def position_bias_backward(dbias, cache):
    bucket, table = cache
    dtable = np.zeros_like(table)
    for b in range(table.shape[1]):
        dtable[:, b] = dbias[:, bucket == b].sum(-1)
    return dtable


def position_bucket(distance, buckets, max_distance):
    """T5's causal buckets: one for each distance below buckets/2, then logarithmic up to max."""
    exact = buckets // 2
    distance = np.maximum(distance, 0)
    ratio = np.log(np.maximum(distance, exact) / exact) / np.log(max_distance / exact)
    coarse = exact + (ratio * (buckets - exact)).astype(int)
    coarse = np.minimum(coarse, buckets - 1)
    return np.where(distance < exact, distance, coarse)


def projection_forward(p, config, x, rng):
    """norm, dropout, then unit key and query, and value, of tokens x: {name: (B, H, N, E)}."""
    normed, norm_cache = layer_norm_forward(p, "norm", x)  # decision 1: before each sublayer
    # decision 11: dropout after norm
    normed, dropout_mask = dropout(normed, config.dropout, rng)
    projected, caches = head_projections_forward(p, ("key", "value", "query"), config.heads, normed)
    return projected, (norm_cache, dropout_mask, caches)


# y = W dropout(norm(x)): dx = norm'(dropout'(W^T dy))
def projection_backward(dprojected, cache):
    norm_cache, dropout_mask, caches = cache
    dnormed, grads = head_projections_backward(dprojected, caches)
    dnormed = dnormed * dropout_mask
    dx, dnorm = layer_norm_backward(dnormed, norm_cache)
    return dx, grads | dnorm


def head_projections_forward(p, names, heads, x):
    """{name: x W^T split into heads, (B, H, N, E)}; keys and queries are brought to unit length."""
    projected = {}
    caches = {}
    for name in names:
        flat, linear_cache = linear_forward(x, p[name])  # (B, N, HE)
        rows = split_heads(flat, heads)
        norm_cache = None
        if name != "value":
            rows, norm_cache = unit_norm_forward(rows)
        projected[name] = rows
        caches[name] = (linear_cache, norm_cache)
    return projected, caches


# u = x W^T, y = u / |u| per head: du = (dy - y (y·dy)) / |u|, dx = sum of du W, dW = du^T x
def head_projections_backward(dprojected, caches):
    """dx, summed over the projections that have a gradient, and {name: dW}."""
    dx = np.zeros(())  # has the shape of x as soon as a part is added
    grads = {}
    for name, drows in dprojected.items():
        linear_cache, norm_cache = caches[name]
        if norm_cache is not None:
            drows = unit_norm_backward(drows, norm_cache)
        dx_of_name, grads[name] = linear_backward(merge_heads(drows), linear_cache)
        dx = dx + dx_of_name
    return dx, grads


def unit_norm_forward(x):
    """Unit length over the last axis: query-key normalisation (decision 3: keys and queries)."""
    inverse = 1 / np.sqrt((x**2).sum(-1, keepdims=True) + NORM_EPSILON)
    unit = x * inverse
    return unit, (unit, inverse)


# y = x / |x|: dx = (dy - y (y·dy)) / |x|
def unit_norm_backward(dunit, cache):
    unit, inverse = cache
    along = (dunit * unit).sum(-1, keepdims=True)
    return inverse * (dunit - unit * along)


def token_mlp_forward(p, config, x, rng):
    """x + dropout(W_2 relu(W_1 norm(x)))"""
    normed, norm_cache = layer_norm_forward(p, "mlp_norm", x)
    before, hidden_cache = linear_forward(normed, p["mlp_hidden"])
    hidden = np.maximum(before, 0)  # (B, N, F)
    out, output_cache = linear_forward(hidden, p["mlp_output"])
    # decision 11: dropout after the MLP
    out, dropout_mask = dropout(out, config.dropout, rng)
    return x + out, (norm_cache, hidden_cache, hidden, output_cache, dropout_mask)


# y = x + f(norm(x)): dx = dy + norm'(f'(dy)); relu passes the gradient if hidden > 0
def token_mlp_backward(dy, cache):
    norm_cache, hidden_cache, hidden, output_cache, dropout_mask = cache
    dhidden, doutput = linear_backward(dy * dropout_mask, output_cache)
    dnormed, dweight = linear_backward(dhidden * (hidden > 0), hidden_cache)
    dinput, dnorm = layer_norm_backward(dnormed, norm_cache)
    return dy + dinput, {"mlp_hidden": dweight, "mlp_output": doutput} | dnorm


def split_heads(x, heads):
    """(B, N, H*E) -> (B, H, N, E)"""
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).swapaxes(1, 2)


def merge_heads(x):
    """(B, H, N, E) -> (B, N, H*E), the adjoint of split_heads."""
    batch, heads, length, width = x.shape
    return x.swapaxes(1, 2).reshape(batch, length, heads * width)


def linear_forward(x, weight):
    """y = x W^T (..., out) for x (..., in) and weight (out, in)."""
    y = x @ weight.T
    return y, (x, weight)


# y = x W^T: dx = dy W, dW = dy^T x over all rows
def linear_backward(dy, cache):
    x, weight = cache
    dx = dy @ weight
    rows = tuple(range(dy.ndim - 1))  # all axes but the last
    dweight = np.tensordot(dy, x, (rows, rows))
    return dx, dweight


def layer_norm_forward(p, name, x, epsilon=NORM_EPSILON):
    """Normalize the last axis of x to mean 0 and variance 1, then scale and shift it."""
    centred = x - x.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    standard = centred * inverse
    scale = p[f"{name}.scale"]
    y = standard * scale + p[f"{name}.bias"]
    return y, (name, standard, inverse, scale)


# n = (x - mean x) / deviation: dx = (dn - mean(dn) - n mean(n dn)) / deviation
def layer_norm_backward(dy, cache):
    name, standard, inverse, scale = cache
    dstandard = dy * scale
    mean = dstandard.mean(-1, keepdims=True)
    correlation = (dstandard * standard).mean(-1, keepdims=True)
    dx = inverse * (dstandard - mean - standard * correlation)

    dscale = (dy * standard).sum((0, 1))
    dbias = dy.sum((0, 1))
    return dx, {f"{name}.scale": dscale, f"{name}.bias": dbias}


def softmax_forward(scores):
    """Softmax over the last axis; -inf scores get exactly zero."""
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    weights = exponentials / exponentials.sum(-1, keepdims=True)
    return weights, weights  # the cache is the weights themselves


# w = softmax(s): ds = w (dw - w·dw)
def softmax_backward(dweights, weights):
    mean = (dweights * weights).sum(-1, keepdims=True)
    return weights * (dweights - mean)


def dropout(x, rate, rng):
    """Dropout of x, and the mask that it was multiplied by: 0 or 1 / (1 - rate)."""
    if rng is None or rate == 0:  # rng is None in evaluation
        return x, 1.0
    kept = rng.random(x.shape) >= rate
    dropout_mask = kept / (1 - rate)
    return x * dropout_mask, dropout_mask


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def cross_entropy_forward(logits, targets, scored):
    """Summed -log p of targets (B, N) at the scored (B, N) positions, in nats."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))  # (B, N, V)
    one_hot = np.eye(logits.shape[-1], dtype=bool)[targets]  # (B, N, V)
    loss = -log_probabilities[one_hot & scored[..., None]].sum()
    return loss, (log_probabilities, one_hot, scored)


# loss = -log p_target, p = softmax(logits): dlogits = p - onehot(target)
def cross_entropy_backward(dloss, cache):
    log_probabilities, one_hot, scored = cache
    dlogits = dloss * (np.exp(log_probabilities) - one_hot)
    return dlogits * scored[..., None]


def prefixed(prefix, tree):
    """{name: a} -> {prefix + name: a}."""
    return {prefix + name: array for name, array in tree.items()}


def subtree(params, prefix):
    """The parameters whose names start with prefix, under their names without it."""
    return {n.removeprefix(prefix): a for n, a in params.items() if n.startswith(prefix)}


def add_into(total, part):
    """Add the gradients in part to those in total, in place."""
    for name, array in part.items():
        total[name] = total.get(name, 0.0) + array


# ----------------------------------------------------------------------------
# starting values: of all parameters; a first reading skips them
def init_params(config, rng):
    """All parameters as {dotted name: float64 array}; matrices are (out, in)."""
    # decision 12: tied with output
    params = {"embedding": rng.normal(0, 1, (config.vocabulary, config.width))}
    for layer in range(config.layers):
        params |= prefixed(f"layers.{layer}.", init_layer(config, rng, layer))
    return params | init_norm("final_norm", config.width)


def init_layer(config, rng, layer):
    """Parameters of layer (from 0); its matrices have no biases."""
    d = config.width
    h = config.heads
    he = config.heads * config.head_width
    p = init_norm("norm", d)
    for name in ("key", "value", "query"):
        p[name] = init_linear(rng, he, d)
    p["scale"] = np.full(h, config.attention_scale)  # decision 3: one for each head
    # decision 4: T5's position biases
    p["position_bias"] = rng.normal(0, config.buckets**-0.5, (h, config.buckets))
    if config.memory and layer + 1 == config.memory_layer:
        p["memory_gate"] = np.zeros(h)  # decision 9: half from memory
    p["output"] = init_linear(rng, d, he)
    p |= init_norm("mlp_norm", d)
    p["mlp_hidden"] = init_linear(rng, config.feed_forward, d)
    p["mlp_output"] = init_linear(rng, d, config.feed_forward)
    return p


def init_linear(rng, fan_out, fan_in, gain=1.0):
    """Truncated-normal matrix (out, in), cut at two sigma; standard deviation gain / sqrt(in)."""
    draw = rng.standard_normal((fan_out, fan_in))
    while (outside := np.abs(draw) > 2).any():
        draw[outside] = rng.standard_normal(outside.sum())
    deviation = gain * fan_in**-0.5
    return draw * (deviation / 0.8796256610342398)  # standard deviation of N(0, 1) cut at 2


def init_norm(name, width):
    return {f"{name}.scale": np.ones(width), f"{name}.bias": np.zeros(width)}


# ----------------------------------------------------------------------------
# checks: what Config refuses; a first reading skips them
def check_config(config):
    """Raise ValueError, naming the field, for a config that cannot work."""
    for name, kind in Config.__annotations__.items():
        value = getattr(config, name)
        least = 0 if name == "memory" else 1
        if kind is int and value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    if config.memory_layer > config.layers:
        raise ValueError(
            f"memory_layer is {config.memory_layer}; it must lie in 1..{config.layers}"
        )
    if 0 < config.memory < config.retrieved:
        raise ValueError(
            f"retrieved is {config.retrieved}; it must be at most memory, {config.memory}"
        )
    if config.buckets < 2 or config.buckets % 2:
        raise ValueError(f"buckets is {config.buckets}; it must be even and at least 2")
    if config.max_distance <= config.buckets // 2:
        raise ValueError(
            f"max_distance {config.max_distance} must exceed half of buckets {config.buckets}"
        )
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout is {config.dropout}; it must be at least 0 and below 1")
    if not 0 < config.attention_scale < np.inf:
        raise ValueError(
            f"attention_scale is {config.attention_scale}; it must be positive and finite"
        )


def stopped(config):
    """{function: arguments that it detaches}, for --check: no gradient flows into them."""
    return {"retrieval_forward": ("memory_keys", "memory_values")}


if __name__ == "__main__":  # a demonstration, or --check [--case NAME]
    raise SystemExit(importlib.import_module("reference.gradients").main("memorizing"))
