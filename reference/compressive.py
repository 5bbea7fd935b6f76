"""Compressive Transformer (Rae, Potapenko, Jayakumar, Hillier, Lillicrap, 2019) in NumPy.

A Transformer-XL keeps the last M inputs of every layer as memory and forgets older ones. The
Compressive Transformer compresses what leaves memory, c rows into one, and keeps C compressed rows
as well. Attention reads [compressed memory | memory | segment]. The task loss trains the
Transformer and a loss of its own trains the compression; no gradient passes from one to the other.
`forward` maps (tokens, state) to (logits, next state), and `backward` the gradient of the next
state to that of the incoming state. `auxiliary_forward` and `auxiliary_backward` are the
compression losses. `params` are all parameters, {dotted name: array}, and `p` those of one part,
without its prefix. A first reading ends with the model. Decisions are numbered in
docs/decisions/compressive.md. Transformer-XL (C = 0), other compressions and losses, and the
authors' code: reference/variants/compressive.py.

Glossary: code symbol, meaning, paper symbol, shape
    tokens             token ids of one segment of N tokens           x        (B, N)
    segment, memory, compressed_memory    N, M, C: how many rows      n_s, n_m, n_cm
    compression_rate   rows that are compressed into one              c
    h                  a layer's input                                h^(i)    (B, N, D)
    state.memory       inputs of the last M positions, per layer      m_t      (B, L, M, D)
    state.compressed   compressed older inputs, per layer             cm_t     (B, L, C, D)
    source             [compressed | memory | h], K = C + M + N rows           (B, K, D)
    evicted            the N rows that fall out of memory             old_mem  (B, N, D)
    new                evicted, compressed by f_c                     new_cm   (B, floor(N/c), D)
    distance_key       parameter; sinusoids of distances through it   W_R      (HE, D); (H, K, E)
    content_bias, distance_bias    Transformer-XL's global biases     u, v     (H, E)

B batch (lanes), D width, H heads, E head width, F feed-forward width, V vocabulary, L layers. All
rows count from 0.
"""

import importlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np


# ----------------------------------------------------------------------------
# configuration: sizes and variants, and what a segment hands to the next one
@dataclass(frozen=True)
class Config:
    """Sizes and variants of the model; impossible combinations raise ValueError naming the field.

    Fields:
        vocabulary: V, number of token ids
        width: D, model width, even with transformer_xl positions
        layers: L, number of layers
        heads: H, attention heads
        head_width: E, width of a head
        feed_forward: F, width of the feed-forward hidden layer
        segment: N, tokens in a segment (n_s)
        memory: M, past positions whose uncompressed inputs each layer keeps (n_m)
        compressed_memory: C, compressed rows that each layer keeps (n_cm); 0 gives Transformer-XL
        compression_rate: c, rows that are compressed into one; the newest N mod c of a segment are
            cut off
        compression: compression function, one of conv, dilated_conv, max_pooling, mean_pooling,
            most_used (section 3.2)
        compression_loss: loss that trains the compression, attention_reconstruction or
            auto_encoding (mean squares), either of them with _norm appended (norms; Alg. 2, l.8),
            bptt (the task loss) or none
        dilations: one for each of dilated_conv's layers
        positions: relative positions, transformer_xl or simplified (Memformer's Eqs. 2-4)
        max_distance: distance at and beyond which the simplified positions are the same
        dropout: dropout rate in training, 0 to below 1
        cutoffs: first id of each tail, a band of rarer words, of adaptive inputs and softmax; none
            for one tied embedding
        div_value: factor by which each tail's embedding is narrower than the one before it
        memories: memory rows of each layer, at most M, the first layer first; after these,
            optionally, compressed rows of each layer, at most C; none for M and C in every layer
        authors_code: follow the authors' code where the paper is silent: rows, distances, padding,
            initial values and dropout
    """

    vocabulary: int = 256
    width: int = 128
    layers: int = 4
    heads: int = 4
    head_width: int = 32
    feed_forward: int = 512
    segment: int = 128
    memory: int = 128
    compressed_memory: int = 128
    compression_rate: int = 4
    compression: str = "conv"
    compression_loss: str = "attention_reconstruction"
    dilations: tuple[int, ...] = (1, 2, 4)
    positions: str = "transformer_xl"
    max_distance: int = 64
    dropout: float = 0.0
    cutoffs: tuple[int, ...] = ()
    div_value: int = 4
    memories: tuple[int, ...] = ()
    authors_code: bool = False

    def __post_init__(self):
        check_config(self)

    @property
    def operations(self):
        """The published operations, or those of the variant that the config asks for."""
        return operations_of(self)

    @property
    def new_rows(self):
        """How many rows the N evicted rows become."""
        return (self.segment - self.operations.rows_left_out(self)) // self.compression_rate

    def rows_of(self, layer):
        """(M, C) of a layer, counted from 0."""
        own = self.operations.layer_config(self, layer)
        return own.memory, own.compressed_memory

    @property
    def temporal_range(self):
        """The paper's temporal range in tokens, l (n_m + c n_cm), without the segments (3.3)."""
        rows = [self.rows_of(layer) for layer in range(self.layers)]
        return sum(memory + self.compression_rate * compressed for memory, compressed in rows)


class State(NamedTuple):
    """What a segment hands to the next one; axis 0 of every field is the lane."""

    memory: np.ndarray  # (B, L, M, D)
    compressed: np.ndarray  # (B, L, C, D)


# ----------------------------------------------------------------------------
# the method: what leaves memory is compressed, and a loss of its own trains the compression
def remember_forward(p, config, h, memory, compressed, weights):
    """Alg. 1, l.8-11: the next memory (B, M, D) and the next compressed memory (B, C, D).

    h (B, N, D) is the layer's input, weights (B, H, N, K) are this segment's attention, p are the
    compression's parameters. Also returns (evicted, new) and the cache.
    """
    n = h.shape[1]
    compressed_rows = compressed.shape[1]  # C
    # stop: memory and evicted rows are detached (decision 2: inputs without gradient)
    queue = np.concatenate([memory, h], axis=1)
    evicted = queue[:, :n].copy()  # l.8; decision 4: right for every M
    next_memory = queue[:, n:].copy()  # l.10

    # of keys C to C + N - 1 (decision 9: usage at eviction)
    usage = weights[..., compressed_rows : compressed_rows + n].mean((1, 2))  # (B, N)
    new, cache = config.operations.conv_forward(p, config, evicted, usage)  # l.9
    compressed_queue = np.concatenate([compressed, new], axis=1)
    next_compressed = compressed_queue[:, new.shape[1] :]  # l.11 (decision 5: it means cm_{t+1})
    return next_memory, next_compressed, (evicted, new), cache


def remember_backward(config, dnext_compressed, cache):
    """Gradients of the incoming compressed memory and of the compression's parameters: none."""
    # stop: the Transformer optimizes "the task objective", the compression network "the
    # compression objective" (3.2)
    return np.zeros_like(dnext_compressed), {}


def conv_forward(p, config, evicted, usage):
    """Convolution with kernel and stride c (decision 7: no bias anywhere)."""
    groups, n = groups_forward(evicted, config.compression_rate)
    flat = groups.reshape(*groups.shape[:2], -1)  # c rows end to end
    new, linear_cache = linear_forward(flat, p["weight"])  # (B, N/c, cD) to (B, N/c, D)
    return new, (linear_cache, groups.shape, n)


# y = W x, x the c rows end to end: dx = W^T dy, dW = sum of dy x^T
def conv_backward(dnew, cache):
    linear_cache, shape, n = cache
    dflat, dweight = linear_backward(dnew, linear_cache)
    return groups_backward(dflat.reshape(shape), n), {"weight": dweight}


def groups_forward(rows, c):
    """Every c rows of (B, n, D) as a group, (B, n/c, c, D), and n (decision 7: rounded down)."""
    batch, n, d = rows.shape
    count = n // c
    return rows[:, : count * c].reshape(batch, count, c, d), n


# groups are copies of rows: drow = dgroup at its place, 0 for what was cut off
def groups_backward(dgroups, n):
    """The rows (B, n, D) of the groups put back in their places, and zeros after them."""
    batch, count, c, d = dgroups.shape
    rows = dgroups.reshape(batch, count * c, d)
    cut_off = n - count * c
    return np.pad(rows, ((0, 0), (0, cut_off), (0, 0)))


def attention_reconstruction_forward(p, config, h, evicted, new):
    """Loss of one layer: error of attention over new against attention over evicted (Alg. 2).

    It is the mean square over lanes, heads, queries, E (decision 10: mean squares per head).
    """
    # stop: h, evicted and the attention parameters are detached (l.3-5); l.7: remember_forward
    query, _ = project_heads_forward(h, p["query"], config.heads)
    evicted_key, _ = project_heads_forward(evicted, p["key"], config.heads)
    evicted_value, _ = project_heads_forward(evicted, p["value"], config.heads)
    target, _ = content_attention_forward(query, evicted_key, evicted_value)  # l.6

    key, key_cache = project_heads_forward(new, p["key"], config.heads)
    value, value_cache = project_heads_forward(new, p["value"], config.heads)
    out, attention_cache = content_attention_forward(query, key, value)  # l.6
    difference = out - target
    loss, error_cache = config.operations.error_forward(difference)  # l.8
    return loss, (error_cache, attention_cache, key_cache, value_cache, config)


# loss = error(y - target), y = attention over new: dy = error', dnew = dk W_k + dx W_x
def attention_reconstruction_backward(dloss, cache):
    """Gradient of new; none of the attention parameters."""
    error_cache, attention_cache, key_cache, value_cache, config = cache
    dout = config.operations.error_backward(dloss, error_cache)
    dkey, dvalue = content_attention_backward(dout, attention_cache)
    dnew_by_key, _ = project_heads_backward(dkey, key_cache)
    dnew_by_value, _ = project_heads_backward(dvalue, value_cache)
    return dnew_by_key + dnew_by_value, {}


# ----------------------------------------------------------------------------
# the model: the whole of it first, then a layer and Transformer-XL's attention
def forward(params, config, tokens, state, rng=None):
    """Read one segment: (logits, next state, cache for `backward` and `auxiliary_forward`).

    tokens (B, N) of ids below V, N = config.segment; rng turns dropout on. Position i of the logits
    (B, N, V) predicts token i + 1. Raises ValueError if N is not the segment length.
    """
    if tokens.shape[1] != config.segment:
        raise ValueError(
            f"a segment of {tokens.shape[1]} tokens is not one of {config.segment}; pad it"
        )
    # (B, N, D), Alg. 1, l.3
    h, embedding_cache = config.operations.embedding_forward(params, config, tokens)
    h, next_state, caches = config.operations.all_layers_forward(params, config, h, state, rng)
    x = h * config.width**-0.5  # decision 14: logits divided by root D
    logits, logits_cache = config.operations.logits_forward(params, config, x)
    return logits, next_state, (embedding_cache, caches, logits_cache)


def backward(params, config, cache, dlogits, dnext_state=None):
    """Gradients of the parameters and of the incoming state.

    dnext_state None stops the gradient at the segment's end; dnext_state.memory is not read, as
    memory is detached.
    """
    embedding_cache, caches, logits_cache = cache
    if dnext_state is None:
        dnext_state = initial_state(params, config, len(dlogits))

    dx, grads = config.operations.logits_backward(config, dlogits, logits_cache)
    dh = dx * config.width**-0.5
    dh, dstate, dlayers = all_layers_backward(config, dh, dnext_state, caches)
    grads |= dlayers
    # the tied embedding's second gradient
    add_into(grads, config.operations.embedding_backward(config, dh, embedding_cache))

    # zero for what nothing reached, such as the compression under a loss of its own
    grads = {name: grads.get(name, np.zeros_like(value)) for name, value in params.items()}
    return grads, dstate


def layer_state(config, state, layer):
    """A layer's memory (B, M, D) and compressed memory (B, C, D), as views of the state."""
    return State(state.memory[:, layer], state.compressed[:, layer])


def all_layers_forward(params, config, h, state, rng):
    """The last layer's output (B, N, D), the next state, and the cache of each layer."""
    operations = config.operations
    next_state = State(*map(np.zeros_like, state))
    caches = []
    for layer in range(config.layers):
        own = operations.layer_config(config, layer)  # config itself, as all layers are alike
        p = subtree(params, f"layers.{layer}.")
        memory, compressed = operations.layer_state(config, state, layer)
        remembered = (compressed, memory)  # l.5
        y, weights, layer_cache = operations.layer_forward(p, config, h, remembered, rng)

        compression = subtree(p, "compression.")
        next_memory, next_compressed, (evicted, new), compression_cache = remember_forward(
            compression, own, h, memory, compressed, weights
        )
        after = operations.layer_state(config, next_state, layer)
        after.memory[:] = next_memory
        after.compressed[:] = next_compressed
        caches.append((layer_cache, compression_cache, h, evicted, new))
        h = y
    return h, next_state, caches


def all_layers_backward(config, dh, dnext_state, caches):
    operations = config.operations
    dstate = State(*map(np.zeros_like, dnext_state))
    grads = {}
    for layer in reversed(range(config.layers)):
        layer_cache, compression_cache, *_ = caches[layer]
        _, dnext_compressed = operations.layer_state(config, dnext_state, layer)
        dcompressed, dcompression = operations.remember_backward(
            config, dnext_compressed, compression_cache
        )
        dh, (dcompressed_read, dmemory), dlayer = layer_backward(config, dh, layer_cache)
        dbefore = operations.layer_state(config, dstate, layer)
        dbefore.compressed[:] = dcompressed_read + dcompressed
        dbefore.memory[:] = dmemory
        grads |= prefixed(f"layers.{layer}.", dlayer)
        grads |= prefixed(f"layers.{layer}.compression.", dcompression)
    return dh, dstate, grads


def auxiliary_forward(params, config, cache):
    """{name: loss} of each layer's compression (Alg. 2, l.1-2) from forward's cache, and caches."""
    _, layer_caches, _ = cache
    losses = {}
    caches = []
    for layer in config.operations.trained_layers(config):
        _, compression_cache, h, evicted, new = layer_caches[layer]
        p = subtree(params, f"layers.{layer}.")
        loss, loss_cache = config.operations.attention_reconstruction_forward(
            p, config, h, evicted, new
        )
        losses[f"layers.{layer}.compression"] = loss
        caches.append((layer, compression_cache, loss_cache))
    return losses, caches


def auxiliary_backward(config, dloss, caches):
    """Gradients of the summed auxiliary losses: of the compression's parameters alone."""
    grads = {}
    for layer, compression_cache, loss_cache in caches:
        dnew, dloss_params = config.operations.attention_reconstruction_backward(dloss, loss_cache)
        # stop: evicted is data
        _, dparams = config.operations.conv_backward(dnew, compression_cache)
        grads |= prefixed(f"layers.{layer}.compression.", dparams | dloss_params)
    return grads


def embedding_forward(params, config, tokens):
    """Rows (B, N, D) of tokens (B, N)."""
    return params["embedding"][tokens], tokens


# h = e_id: de_id = sum of dh over the places of id
def embedding_backward(config, dh, tokens):
    dembedding = np.zeros((config.vocabulary, config.width))
    np.add.at(dembedding, tokens, dh)
    return {"embedding": dembedding}


def logits_forward(params, config, x):
    """Logits (B, N, V) of x (B, N, D), by the inputs' rows (decision 14: tied with inputs)."""
    return linear_forward(x, params["embedding"])


def logits_backward(config, dlogits, cache):
    dx, dembedding = linear_backward(dlogits, cache)
    return dx, {"embedding": dembedding}


def layer_forward(p, config, h, remembered, rng):
    """The next layer's input, weights (B, H, N, K) and the cache (decision 1: norm after skip).

    remembered: the layer's compressed memory (B, C, D) and memory (B, M, D).
    """
    # Alg. 1, l.6
    attended, weights, attend_cache = config.operations.attend_forward(
        p, config, h, remembered, rng
    )
    a, norm_cache = layer_norm_forward(p, "norm", attended + h)  # l.7
    mixed, mlp_cache = mlp_forward(p, config, a, rng)
    y, mlp_norm_cache = layer_norm_forward(p, "mlp_norm", mixed + a)  # l.12
    return y, weights, (attend_cache, norm_cache, mlp_cache, mlp_norm_cache)


# a = norm(attend(h) + h), y = norm(mlp(a) + a):
# dt = norm'(dy), ds = norm'(dt + mlp'(dt)), dh = ds + attend'(ds)
def layer_backward(config, dy, cache):
    attend_cache, norm_cache, mlp_cache, mlp_norm_cache = cache
    dmlp_sum, dmlp_norm = layer_norm_backward(dy, mlp_norm_cache)
    da, grads = mlp_backward(dmlp_sum, mlp_cache)
    dattend_sum, dnorm = layer_norm_backward(dmlp_sum + da, norm_cache)
    dh, dremembered, dattend = config.operations.attend_backward(config, dattend_sum, attend_cache)
    return dattend_sum + dh, dremembered, grads | dattend | dnorm | dmlp_norm


def attend_forward(p, config, h, remembered, rng):
    """multihead_attention(h, mem) (Alg. 1, l.6) of h (B, N, D), weights (B, H, N, K), the cache."""
    query, key, value, projections_cache = all_projections_forward(p, config, h, remembered)
    # (H, K, E)
    distance_key, distance_cache = distance_keys_forward(p, config, key.shape[2])
    biases = (p["content_bias"], p["distance_bias"])
    attended, weights, attention_cache = relative_attention_forward(
        query, key, value, distance_key, *biases, rate=config.dropout, rng=rng
    )
    out, output_cache = linear_forward(merge_heads(attended), p["output"])
    out, dropout_mask = dropout(out, config.dropout, rng)  # decision 13: where dropout is
    cache = (projections_cache, distance_cache, attention_cache, output_cache, dropout_mask)
    return out, weights, cache


# attend(h) = W_o y, y of all heads: dy = W_o^T dout, then what y's parts pass on
def attend_backward(config, dout, cache):
    projections_cache, distance_cache, attention_cache, output_cache, dropout_mask = cache
    dattended, doutput = linear_backward(dout * dropout_mask, output_cache)
    dquery, dkey, dvalue, ddistance_key, dbiases = relative_attention_backward(
        split_heads(dattended, config.heads), attention_cache
    )
    dh, dremembered, grads = all_projections_backward(dquery, dkey, dvalue, projections_cache)
    grads |= distance_keys_backward(config, ddistance_key, distance_cache)
    grads |= dbiases
    grads["output"] = doutput
    return dh, dremembered, grads


def all_projections_forward(p, config, h, remembered):
    """Query (B, H, N, E) of h; key and value (B, H, K, E) of [compressed | memory | h]."""
    source = np.concatenate([*remembered, h], axis=1)  # (B, K, D)
    query, query_cache = project_heads_forward(h, p["query"], config.heads)
    key, key_cache = project_heads_forward(source, p["key"], config.heads)
    value, value_cache = project_heads_forward(source, p["value"], config.heads)
    compressed_rows = remembered[0].shape[1]  # C
    return query, key, value, (query_cache, key_cache, value_cache, compressed_rows)


# source = [remembered; h], q = h W_q^T, k = source W_k^T, x = source W_x^T:
# dsource = dk W_k + dx W_x + [0; dq W_q]
def all_projections_backward(dquery, dkey, dvalue, cache):
    """dh (B, N, D), those of compressed memory and memory, and the weights' gradients."""
    query_cache, key_cache, value_cache, compressed_rows = cache
    # remembered rows count in the weights' gradient
    dh, dquery_weight = project_heads_backward(dquery, query_cache)
    dsource_by_key, dkey_weight = project_heads_backward(dkey, key_cache)
    dsource_by_value, dvalue_weight = project_heads_backward(dvalue, value_cache)
    grads = {"query": dquery_weight, "key": dkey_weight, "value": dvalue_weight}

    dsource = dsource_by_key + dsource_by_value
    before = dsource.shape[1] - dh.shape[1]  # C + M
    dremembered = (dsource[:, :compressed_rows], dsource[:, compressed_rows:before])
    return dh + dsource[:, before:], dremembered, grads


def relative_attention_forward(
    query, key, value, distance_key, content_bias, distance_bias, rate=0.0, rng=None
):
    """softmax(((q + u)·k_j + (q + v)·r_{i-j}) / sqrt(E)) x_j (Transformer-XL), and weights.

    Query i sees the keys j of [compressed | memory | segment] up to itself. query (B, H, N, E), key
    and value x (B, H, K, E), distance_key r (H, K, E) from far to near, biases u and v (H, E).
    i - j counts a compressed row as one (decision 6: one distance throughout).
    """
    content_query = query + content_bias[:, None]  # for Transformer-XL's terms a and c
    by_key, distance_cache = distance_scores_forward(query, distance_key, distance_bias)  # b and d
    weights, weights_cache = attention_weights_forward(content_query, key, by_key)
    dropped, dropout_mask = dropout(weights, rate, rng)  # decision 13: where dropout is
    out = dropped @ value  # (B, H, N, E)
    return out, weights, (value, dropped, dropout_mask, weights_cache, distance_cache)


# y = w x: dx = w^T dy, dw = dy x^T; q is in both scores: dq = that by content + that by distance
def relative_attention_backward(dout, cache):
    value, dropped, dropout_mask, weights_cache, distance_cache = cache
    dvalue = dropped.mT @ dout
    dweights = dout @ value.mT * dropout_mask  # (B, H, N, K)
    dcontent, dkey, dby_key = attention_weights_backward(dweights, weights_cache)
    ddistance, ddistance_key, ddistance_bias = distance_scores_backward(dby_key, distance_cache)
    dquery = dcontent + ddistance
    dbiases = {"content_bias": dcontent.sum((0, 2)), "distance_bias": ddistance_bias}
    return dquery, dkey, dvalue, ddistance_key, dbiases


def attention_weights_forward(content_query, key, by_key):
    """softmax((q_i·k_j + s_ij) / sqrt(E)), (B, H, N, K), of scores s by distance (B, H, N, K)."""
    scores = content_query @ key.mT + by_key
    n, k = scores.shape[-2:]
    scale = content_query.shape[-1] ** -0.5
    weights, _ = softmax_forward(np.where(causal_mask(n, k), scores * scale, -np.inf))
    return weights, (content_query, key, weights)


# t = q k^T + s, w = softmax(t / sqrt(E)): ds = dt = softmax'(dw) / sqrt(E), dq = dt k, dk = dt^T q
def attention_weights_backward(dweights, cache):
    """Gradients of content_query, of key and of by_key, which is 0 where the mask hides."""
    content_query, key, weights = cache
    dscores = softmax_backward(dweights, weights) * key.shape[-1] ** -0.5
    return dscores @ key, dscores.mT @ content_query, dscores


def distance_scores_forward(query, distance_key, distance_bias):
    """(q + v)·r_{i-j} by key, (B, H, N, K): query (B, H, N, E), r (H, K, E), v (H, E)."""
    distance_query = query + distance_bias[:, None]
    by_distance = distance_query @ distance_key.mT  # (B, H, N, K)
    by_key, _ = relative_shift_forward(by_distance)
    return by_key, (distance_query, distance_key)


# t = (q + v) r^T, s = shift(t): dt = shift'(ds), dq = dt r, dr = dt^T (q + v), dv = sum of dq
def distance_scores_backward(dby_key, cache):
    """Gradients of query, distance_key and distance_bias."""
    distance_query, distance_key = cache
    dby_distance = relative_shift_backward(dby_key, None)
    dquery = dby_distance @ distance_key
    ddistance_key = (dby_distance.mT @ distance_query).sum(0)  # (H, K, E)
    return dquery, ddistance_key, dquery.sum((0, 2))


def relative_shift_forward(by_distance):
    """Scores by key from scores by distance, (B, H, N, K).

    Row i moves left by N - 1 - i, as query i is at place K - N + i.
    """
    batch, heads, n, _ = by_distance.shape
    zeros = np.zeros((batch, heads, n, 1))
    padded = np.concatenate([zeros, by_distance], axis=-1)  # (B, H, N, K + 1)
    flat = padded.reshape(batch, heads, -1)
    return flat[:, :, n:].reshape(by_distance.shape), None  # cut anew from place N


# out[i, j] = x[i, j + N - 1 - i]: dx[i, n] = dout[i, n - N + 1 + i] of column n,
# and 0 if no key has its distance
def relative_shift_backward(dout, cache):
    """The shift undone. dout must be zero where the mask hides a key, or it lands elsewhere."""
    batch, heads, n, k = dout.shape
    zeros = np.zeros((batch, heads, n))
    flat = np.concatenate([zeros, dout.reshape(batch, heads, -1)], axis=-1)
    return flat.reshape(batch, heads, n, k + 1)[..., 1:]


# ----------------------------------------------------------------------------
# through segments: what a document starts with
def initial_state(params, config, batch):
    """What a document starts with: zeros (Alg. 1, l.1-2; decision 3: zeros are read)."""
    memory = np.zeros((batch, config.layers, config.memory, config.width))
    compressed = np.zeros((batch, config.layers, config.compressed_memory, config.width))
    return State(memory, compressed)


# ----------------------------------------------------------------------------
# what every Transformer has: attention, positions, norm, softmax, feed-forward; skip if familiar
NORM_EPSILON = 1e-6  # under the square root of layer_norm (decision 12: epsilon is 1e-6)


def content_attention_forward(query, key, value):
    """softmax(q·k / sqrt(E)) v without mask and positions (Alg. 2, l.6)."""
    weights, _ = softmax_forward(query @ key.mT * query.shape[-1] ** -0.5)
    return weights @ value, (query, value, weights)


# s = q k^T / sqrt(E), w = softmax(s), y = w v: dv = w^T dy, ds = softmax'(dy v^T),
# dk = ds^T q / sqrt(E)
def content_attention_backward(dout, cache):
    """Gradients of key and value; the query is data."""
    query, value, weights = cache
    dweights = dout @ value.mT
    dscores = softmax_backward(dweights, weights) * query.shape[-1] ** -0.5
    dkey = dscores.mT @ query
    dvalue = weights.mT @ dout
    return dkey, dvalue


def causal_mask(n, k):
    """(N, K): query i sees the K - N keys before the segment and the segment's up to itself."""
    return np.arange(k) <= np.arange(n)[:, None] + k - n


def distance_sinusoids(length, width):
    """Rows (K, D), K = length, of the distances K - 1, ..., 1, 0: from far to near, like keys."""
    distance = np.arange(length - 1, -1, -1.0)[:, None]
    angle = distance * 10_000.0 ** (-np.arange(0, width, 2) / width)  # (K, D/2)
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)


def distance_keys_forward(p, config, length):
    """r (H, K, E) of the distances K - 1, ..., 1, 0: W_R times sinusoids."""
    sinusoids = distance_sinusoids(length, config.width)  # (K, D)
    distance_key, cache = project_heads_forward(sinusoids[None], p["distance_key"], config.heads)
    return distance_key[0], cache


# r_t = W_R R_t: dW_R = sum of dr_t R_t^T
def distance_keys_backward(config, ddistance_key, cache):
    _, dweight = project_heads_backward(ddistance_key[None], cache)
    return {"distance_key": dweight}


def error_forward(difference):
    """Mean square of a difference (Alg. 2, l.8; decision 10: mean squares)."""
    return (difference**2).mean(), difference


# loss = mean(x^2): dx = 2 x / size
def error_backward(dloss, cache):
    difference = cache
    return dloss * 2 * difference / difference.size


def project_heads_forward(x, weight, heads):
    """x (B, n, D) through weight (HE, D), taken apart into heads (B, H, n, E)."""
    y, cache = linear_forward(x, weight)
    return split_heads(y, heads), cache


# y = heads of x W^T: dx = merge(dy) W, dW = merge(dy)^T x
def project_heads_backward(dy, cache):
    return linear_backward(merge_heads(dy), cache)


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


def mlp_forward(p, config, x, rng):
    """dropout(W_2 relu(W_1 x + b_1) + b_2)"""
    before, hidden_cache = linear_forward(x, p["mlp_hidden"])
    hidden = np.maximum(before + p["mlp_hidden_bias"], 0)  # (B, N, F)
    out, output_cache = linear_forward(hidden, p["mlp_output"])
    out, dropout_mask = dropout(out + p["mlp_output_bias"], config.dropout, rng)
    return out, (hidden_cache, hidden > 0, output_cache, dropout_mask)


# relu passes the gradient where hidden > 0
def mlp_backward(dout, cache):
    hidden_cache, passes, output_cache, dropout_mask = cache
    dout = dout * dropout_mask
    dhidden, doutput = linear_backward(dout, output_cache)
    dbefore = dhidden * passes
    dx, dweight = linear_backward(dbefore, hidden_cache)
    grads = {
        "mlp_hidden": dweight,
        "mlp_output": doutput,
        "mlp_hidden_bias": dbefore.sum((0, 1)),
        "mlp_output_bias": dout.sum((0, 1)),
    }
    return dx, grads


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
    operations = config.operations
    params = operations.init_embedding(config, rng)
    for layer in range(config.layers):
        own = operations.layer_config(config, layer)
        params |= prefixed(f"layers.{layer}.", operations.init_layer(own, rng))
    return params


def init_embedding(config, rng):
    """The one table of inputs and output (decision 14: tied with output)."""
    return {"embedding": rng.normal(0, 1, (config.vocabulary, config.width))}


def init_layer(config, rng):
    """Parameters of one layer (decision 12: what has biases)."""
    d = config.width
    he = config.heads * config.head_width
    p = {name: init_linear(rng, he, d) for name in ("query", "key", "value")}
    p |= config.operations.init_positions(config, rng)
    p["output"] = init_linear(rng, d, he)
    p |= init_norm("norm", d)
    p["mlp_hidden"] = init_linear(rng, config.feed_forward, d)
    p["mlp_hidden_bias"] = np.zeros(config.feed_forward)
    p["mlp_output"] = init_linear(rng, d, config.feed_forward)
    p["mlp_output_bias"] = np.zeros(d)
    p |= init_norm("mlp_norm", d)
    return p | prefixed("compression.", config.operations.init_conv(config, rng))


def init_positions(config, rng):
    """W_R, u and v."""
    biases = (config.heads, config.head_width)
    return {
        "distance_key": init_linear(rng, config.heads * config.head_width, config.width),
        "content_bias": rng.normal(0, 0.02, biases),
        "distance_bias": rng.normal(0, 0.02, biases),
    }


def init_conv(config, rng):
    """The matrix of c rows end to end (decision 7: no bias anywhere)."""
    rows = config.compression_rate * config.width
    return {"weight": init_linear(rng, config.width, rows)}


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
# operations and checks: what a variant replaces, what Config refuses; a first reading skips them
# Fields whose defaults are the published method
VARIED = (
    "compression",
    "compression_loss",
    "dilations",
    "positions",
    "cutoffs",
    "memories",
    "authors_code",
)


def layer_config(config, layer):
    """The config of a layer: the model's, as all layers are alike."""
    return config


def trained_layers(config):
    """The layers, counted from 0, whose compression has a loss: all of them."""
    return range(config.layers)


def rows_left_out(config):
    """Evicted rows of a segment that are not compressed: none."""
    return 0


def operations_with(**replaced):
    """A namespace of this file's functions, some of them replaced by a variant's."""
    return SimpleNamespace(**(globals() | replaced))


def operations_of(config):
    """The published operations, or those of the variant that a config asks for."""
    is_default = all(getattr(config, name) == getattr(Config, name) for name in VARIED)
    if is_default and config.compressed_memory > 0:
        return operations_with()
    return importlib.import_module("reference.variants.compressive").operations_of(config)


def stopped(config):
    """{function: arguments that it detaches}, for --check; "return.1" is its second result."""
    remember = ("h", "memory", "weights")
    if config.operations.remember_backward is remember_backward:
        remember += ("return.1",)
    return {"remember_forward": remember, "attention_reconstruction_forward": ("p", "h")}


def check_config(config):
    """Raise ValueError, naming the field, for a config that cannot work."""
    for name, kind in Config.__annotations__.items():
        value = getattr(config, name)
        least = 0 if name in ("memory", "compressed_memory") else 1
        if kind is int and value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    operations_of(config)  # raises ValueError for an unknown variant
    if config.positions == "transformer_xl" and config.width % 2:
        raise ValueError(
            f"width {config.width} is odd; "
            "the sinusoids of transformer_xl positions need an even one"
        )
    least = config.compression_rate + config.operations.rows_left_out(config)
    if config.compressed_memory and config.segment < least:
        raise ValueError(
            f"segment {config.segment} is too short for a compressed row, "
            f"which needs {least} tokens; give a longer segment"
        )
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout is {config.dropout}; it must be at least 0 and below 1")


if __name__ == "__main__":  # a demonstration, or --check [--case NAME]
    raise SystemExit(importlib.import_module("reference.gradients").main("compressive"))
