"""Compressive Transformer (Rae, Potapenko, Jayakumar, Hillier, Lillicrap, 2019) in NumPy.

A Transformer-XL keeps the last M inputs of every layer as memory and forgets older ones. The
Compressive Transformer compresses what leaves memory, c rows into one, and keeps C compressed rows
as well. Attention reads [compressed memory | memory | segment]. The task loss trains the
Transformer and a loss of its own trains the compression; no gradient passes from one to the other.
`forward` maps (tokens, state) to (logits, next state), and `backward` the gradient of the next
state to that of the incoming state. `auxiliary_forward` and `auxiliary_backward` are the
compression losses. With C = 0 this is exactly Transformer-XL. `params` are all parameters, {dotted
name: array}, and `p` those of one part, without its prefix. A first reading ends with the
demonstration. Decisions are numbered in docs/decisions/compressive.md.

Glossary: code symbol, meaning, paper symbol, shape
    tokens             token ids of one segment of N tokens           x        (B, N)
    segment, memory, compressed_memory    N, M, C: how many rows      n_s, n_m, n_cm
    compression_rate   rows that are compressed into one              c
    h                  a layer's input                                h^(i)    (B, N, D)
    state.memory       inputs of the last M positions, per layer      m_t      (B, L, M, D)
    state.compressed   compressed older inputs, per layer             cm_t     (B, L, C, D)
    source             [compressed | memory | h], K = C + M + N rows           (B, K, D)
    evicted            the N rows that fall out of memory             old_mem  (B, N, D)
    new                evicted, compressed                            new_cm   (B, floor(N/c), D)
    COMPRESSIONS       the compression functions                      f_c
    distance_key       parameter; sinusoids of distances through it   W_R      (HE, D); (H, K, E)
    content_bias, distance_bias    Transformer-XL's global biases     u, v     (H, E)

B batch (lanes), D width, H heads, E head width, F feed-forward width, V vocabulary, L layers. All
rows count from 0.
"""

import runpy
import sys
from dataclasses import dataclass
from itertools import pairwise
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
        compression_loss: loss that trains the compression, attention_reconstruction,
            auto_encoding (mean squares), these with _norm at the end (Alg. 2, l.8), bptt (the task
            loss) or none
        dilations: one for each of dilated_conv's layers
        positions: relative positions, transformer_xl or simplified (Memformer's Eqs. 2-4)
        max_distance: distance at and beyond which the simplified positions are the same
        dropout: dropout rate in training, 0 to below 1
        cutoffs: first ids of the tails of adaptive inputs and softmax, whose words are rarer; none
            for one tied embedding
        div_value: by how much each tail's embedding is narrower than the one before it
        memories: how many of the M rows each layer has, the first layer first; then, if these are
            not all either, how many of the C rows; none for all in every layer
        authors_code: where the paper is silent, what its authors' code does with rows,
            distances, padding, beginnings and dropout
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
    def bands(self):
        """(first id, first id beyond) of the words of `embedding` and of each tail."""
        return list(pairwise((0, *self.cutoffs, self.vocabulary)))

    def rows_of(self, layer):
        """(M, C) of a layer, counted from 0 (decision 21: sizes by layer)."""
        memory = self.memories[layer] if self.memories else self.memory
        if len(self.memories) > self.layers:
            return memory, self.memories[self.layers + layer]
        return memory, self.compressed_memory

    @property
    def new_rows(self):
        """How many rows the N evicted rows become: floor(N / c)."""
        rows = self.segment
        if self.authors_code and self.compression == "dilated_conv":
            rows -= sum(self.dilations)  # decision 8: not padded
        return rows // self.compression_rate

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
    compression's parameters. Also returns (evicted, new) and the cache, both None if C = 0.
    """
    n = h.shape[1]
    compressed_rows = compressed.shape[1]  # C
    # stop: memory and what is evicted are data (decision 2: inputs without gradient)
    queue = np.concatenate([memory, h], axis=1)
    evicted = queue[:, :n].copy()  # l.8; decision 4: right for every M
    next_memory = queue[:, n:].copy()  # l.10
    if compressed_rows == 0:
        return next_memory, compressed, None, None

    # of keys C to C + N - 1 (decision 9: usage at eviction)
    usage = weights[..., compressed_rows : compressed_rows + n].mean((1, 2))  # (B, N)
    compress, _ = COMPRESSIONS[config.compression]
    new, cache = compress(p, config, evicted, usage)  # l.9
    compressed_queue = np.concatenate([compressed, new], axis=1)
    next_compressed = compressed_queue[:, new.shape[1] :]  # l.11 (decision 5: it means cm_{t+1})
    return next_memory, next_compressed, (evicted, new), cache


# cm' = the last C rows of [cm; f_c(evicted)]: [dcm; dnew] = [0; dcm'], and evicted is data
def remember_backward(config, dnext_compressed, cache):
    """Gradients of the incoming compressed memory and of the compression's parameters."""
    if cache is None or config.compression_loss != "bptt":
        # stop: the Transformer optimizes "the task objective", the compression network "the
        # compression objective" (3.2)
        return np.zeros_like(dnext_compressed), {}
    batch, compressed_rows, d = dnext_compressed.shape
    oldest = np.zeros((batch, config.new_rows, d))  # rows that fell out
    dqueue = np.concatenate([oldest, dnext_compressed], axis=1)
    dcompressed = dqueue[:, :compressed_rows]
    dnew = dqueue[:, compressed_rows:]
    _, compress_backward = COMPRESSIONS[config.compression]
    _, grads = compress_backward(dnew, cache)  # decision 11: evicted is data
    return dcompressed, grads


def conv_forward(p, config, evicted, usage):
    """Convolution with kernel and stride c (decision 7: no bias anywhere)."""
    groups, n = groups_forward(evicted, config.compression_rate)
    flat = groups.reshape(*groups.shape[:2], -1)  # c rows end to end
    new, linear_cache = linear_forward(flat, p["weight"])  # (B, N/c, cD) to (B, N/c, D)
    return new, (linear_cache, groups.shape, n)


# y = W x, x the c rows end to end: dx = W^T dy, dW = sum of dy x^T
def conv_backward(dnew, cache):
    """Gradients of evicted and of the weight."""
    linear_cache, shape, n = cache
    dflat, dweight = linear_backward(dnew, linear_cache)
    return groups_backward(dflat.reshape(shape), n), {"weight": dweight}


def groups_forward(rows, c):
    """Every c of the rows (B, n, D) as a group (B, n/c, c, D), and n.

    The newest n mod c rows are cut off (decision 7: rounded down).
    """
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
    """The loss of one layer: what attention finds in new, less what it finds in evicted (Alg. 2).

    By default it is the mean square over lanes, heads, queries, E (decision 10: mean squares per
    head).
    """
    # stop: h, evicted and the attention parameters are data (l.3-5); l.7 is in remember_forward
    query, _ = project_heads_forward(h, p["query"], config.heads)
    evicted_key, _ = project_heads_forward(evicted, p["key"], config.heads)
    evicted_value, _ = project_heads_forward(evicted, p["value"], config.heads)
    target, _ = content_attention_forward(query, evicted_key, evicted_value)  # l.6

    key, key_cache = project_heads_forward(new, p["key"], config.heads)
    value, value_cache = project_heads_forward(new, p["value"], config.heads)
    out, attention_cache = content_attention_forward(query, key, value)  # l.6
    difference = out - target
    loss, error_cache = error_forward(config, difference)  # l.8
    return loss, (error_cache, attention_cache, key_cache, value_cache)


# loss = error(y - target), y = attention over new: dy = error', dnew = dk W_k + dx W_x
def attention_reconstruction_backward(dloss, cache):
    """Gradient of new; none of the attention parameters."""
    error_cache, attention_cache, key_cache, value_cache = cache
    dout = error_backward(dloss, error_cache)
    dkey, dvalue = content_attention_backward(dout, attention_cache)
    dnew_by_key, _ = project_heads_backward(dkey, key_cache)
    dnew_by_value, _ = project_heads_backward(dvalue, value_cache)
    return dnew_by_key + dnew_by_value, {}


# ----------------------------------------------------------------------------
# the model: the whole of it first, then a layer and Transformer-XL's attention
def initial_state(params, config, batch):
    """What a document starts with: zeros (Alg. 1, l.1-2; decision 3: zeros are read)."""
    memory = np.zeros((batch, config.layers, config.memory, config.width))
    compressed = np.zeros((batch, config.layers, config.compressed_memory, config.width))
    return State(memory, compressed)


def forward(params, config, tokens, state, rng=None):
    """Read one segment: (logits, next state, cache for `backward` and `auxiliary_forward`).

    tokens (B, N) of ids below V, N = config.segment; another N raises ValueError. rng turns dropout
    on. Position i of the logits (B, N, V) predicts token i + 1; with cutoffs they are
    log-probabilities (decision 19: taken as logits).
    """
    if tokens.shape[1] != config.segment:
        raise ValueError(
            f"a segment of {tokens.shape[1]} tokens is not one of {config.segment}; pad it"
        )
    # (B, N, D), Alg. 1, l.3
    h, embedding_cache = adaptive_embedding_forward(params, config, tokens)
    sinusoids = sinusoids_of(config, rng)
    next_state = State(*map(np.zeros_like, state))
    caches = []
    for layer in range(config.layers):
        p = subtree(params, f"layers.{layer}.")
        memory_rows, compressed_rows = config.rows_of(layer)
        # before it are rows that the layer has not
        first = config.compressed_memory - compressed_rows
        memory = state.memory[:, layer, config.memory - memory_rows :]
        compressed = state.compressed[:, layer, first:]
        remembered = (compressed, memory)  # l.5
        y, weights, layer_cache = layer_forward(p, config, h, remembered, rng, sinusoids)

        compression = subtree(p, "compression.")
        next_memory, next_compressed, pair, compression_cache = remember_forward(
            compression, config, h, memory, compressed, weights
        )
        next_state.memory[:, layer, config.memory - memory_rows :] = next_memory
        next_state.compressed[:, layer, first:] = next_compressed
        caches.append((layer_cache, compression_cache, h, pair))
        h = y

    x = h * config.width**-0.5  # decision 14: logits divided by root D
    if config.cutoffs:
        logits, output_cache = adaptive_softmax_forward(params, config, x)
    else:
        logits, output_cache = linear_forward(x, params["embedding"])
    return logits, next_state, (embedding_cache, caches, output_cache)


def backward(params, config, cache, dlogits, dnext_state=None):
    """Gradients of the parameters and of the incoming state.

    dlogits and dnext_state are those of the logits and of the next state. dnext_state None stops
    the gradient at the segment's end. dnext_state.memory is not read: memory is written without
    gradient.
    """
    embedding_cache, caches, output_cache = cache
    dstate = initial_state(params, config, len(dlogits))
    if dnext_state is None:
        dnext_state = State(*map(np.zeros_like, dstate))

    if config.cutoffs:
        dx, grads = adaptive_softmax_backward(config, dlogits, output_cache)
    else:
        dx, dembedding = linear_backward(dlogits, output_cache)
        grads = {"embedding": dembedding}
    dh = dx * config.width**-0.5
    for layer in reversed(range(config.layers)):
        layer_cache, compression_cache, _, _ = caches[layer]
        memory_rows, compressed_rows = config.rows_of(layer)
        # before it are rows that the layer has not
        first = config.compressed_memory - compressed_rows
        dcompressed, dcompression = remember_backward(
            config, dnext_state.compressed[:, layer, first:], compression_cache
        )
        dh, (dcompressed_read, dmemory), dlayer = layer_backward(config, dh, layer_cache)
        dstate.compressed[:, layer, first:] = dcompressed_read + dcompressed
        dstate.memory[:, layer, config.memory - memory_rows :] = dmemory
        grads |= prefixed(f"layers.{layer}.", dlayer)
        grads |= prefixed(f"layers.{layer}.compression.", dcompression)
    # the tied embedding's second gradient
    add_into(grads, adaptive_embedding_backward(config, dh, embedding_cache))

    # zero for what nothing reached, such as the compression under a loss of its own
    grads = {name: grads.get(name, np.zeros_like(value)) for name, value in params.items()}
    return grads, dstate


def auxiliary_forward(params, config, cache):
    """{name: loss} of every layer's compression, whose sum trains it (Alg. 2, l.1-2), and caches.

    cache is forward's. Both are empty if the compression has no loss of its own.
    """
    _, layer_caches, _ = cache
    losses = {}
    caches = []
    for layer, (_, compression_cache, h, pair) in enumerate(layer_caches):
        if pair is None or config.compression_loss in ("bptt", "none"):
            continue  # no compressed memory, or no loss of its own
        p = subtree(params, f"layers.{layer}.")
        if config.compression_loss.startswith("auto_encoding"):
            loss, loss_cache = auto_encoding_forward(p, config, h, *pair)
        else:
            loss, loss_cache = attention_reconstruction_forward(p, config, h, *pair)
        losses[f"layers.{layer}.compression"] = loss
        caches.append((layer, compression_cache, loss_cache))
    return losses, caches


def auxiliary_backward(config, dloss, caches):
    """Gradients of the summed auxiliary losses: of the compression's parameters alone."""
    _, compress_backward = COMPRESSIONS[config.compression]
    grads = {}
    for layer, compression_cache, loss_cache in caches:
        if config.compression_loss.startswith("auto_encoding"):
            dnew, dloss_params = auto_encoding_backward(dloss, loss_cache)
        else:
            dnew, dloss_params = attention_reconstruction_backward(dloss, loss_cache)
        _, dparams = compress_backward(dnew, compression_cache)  # stop: evicted is data
        grads |= prefixed(f"layers.{layer}.compression.", dparams | dloss_params)
    return grads


def layer_forward(p, config, h, remembered, rng, sinusoids):
    """The next layer's input, weights (B, H, N, K) and the cache (decision 1: norm after skip).

    h (B, N, D) is the layer's input, remembered its compressed memory (B, C, D) and memory
    (B, M, D). sinusoids are those of `sinusoids_of`.
    """
    # Alg. 1, l.6
    attended, weights, attend_cache = attend_forward(p, config, h, remembered, rng, sinusoids)
    epsilon = 1e-5 if config.authors_code else NORM_EPSILON  # decision 12: its epsilon
    a, norm_cache = layer_norm_forward(p, "norm", attended + h, epsilon)  # l.7
    mixed, mlp_cache = mlp_forward(p, config, a, rng)
    y, mlp_norm_cache = layer_norm_forward(p, "mlp_norm", mixed + a, epsilon)  # l.12
    return y, weights, (attend_cache, norm_cache, mlp_cache, mlp_norm_cache)


# a = norm(attend(h) + h), y = norm(mlp(a) + a):
# dt = norm'(dy), ds = norm'(dt + mlp'(dt)), dh = ds + attend'(ds)
def layer_backward(config, dy, cache):
    """Gradients of h, of remembered and of the parameters."""
    attend_cache, norm_cache, mlp_cache, mlp_norm_cache = cache
    dmlp_sum, dmlp_norm = layer_norm_backward(dy, mlp_norm_cache)
    da, grads = mlp_backward(dmlp_sum, mlp_cache)
    dattend_sum, dnorm = layer_norm_backward(dmlp_sum + da, norm_cache)
    dh, dremembered, dattend = attend_backward(config, dattend_sum, attend_cache)
    return dattend_sum + dh, dremembered, grads | dattend | dnorm | dmlp_norm


def attend_forward(p, config, h, remembered, rng, sinusoids):
    """multihead_attention(h, mem) (Alg. 1, l.6) of h (B, N, D); weights (B, H, N, K); the cache."""
    source = np.concatenate([*remembered, h], axis=1)  # (B, K, D)
    query, query_cache = project_heads_forward(h, p["query"], config.heads)
    key, key_cache = project_heads_forward(source, p["key"], config.heads)
    value, value_cache = project_heads_forward(source, p["value"], config.heads)
    compressed = remembered[0].shape[1]  # C
    bias_scale = config.head_width**0.5 if config.authors_code else 1.0  # decision 6: not divided
    count = source.shape[1]
    own = None
    own_cache = None
    if config.authors_code and compressed:  # as if memory were not in between
        count = count - compressed
        own_p = subtree(p, "compressed_")
        own_key, own_cache = distance_keys_forward(
            own_p, config, compressed + h.shape[1], sinusoids[1]
        )
        own = (own_key, own_p["distance_bias"] * bias_scale)
    # (H, K, E)
    distance_key, distance_cache = distance_keys_forward(p, config, count, sinusoids[0])

    simplified = config.positions == "simplified"
    if simplified:
        # decision 17: simplified positions, a bias of the query in the place of u and of v
        key = key + p["key_bias"][:, None]
        value = value + p["value_bias"][:, None]
        biases = (p["query_bias"], p["query_bias"])
    else:
        biases = (p["content_bias"] * bias_scale, p["distance_bias"] * bias_scale)
    attended, weights, attention_cache = relative_attention_forward(
        query,
        key,
        value,
        distance_key,
        *biases,
        rate=config.dropout,
        rng=rng,
        in_values=simplified,
        own=own,
    )

    out, output_cache = linear_forward(merge_heads(attended), p["output"])
    if config.authors_code:
        out = out + p["output_bias"]  # decision 12: a bias
    out, dropout_mask = dropout(out, config.dropout, rng)  # decision 13: where dropout is
    projection_caches = (query_cache, key_cache, value_cache, distance_cache, own_cache)
    cache = (projection_caches, attention_cache, output_cache, dropout_mask, bias_scale, compressed)
    return out, weights, cache


# source = [remembered; h], q = h W_q^T, k = source W_k^T, x = source W_x^T:
# dsource = dk W_k + dx W_x + [0; dq W_q]
def attend_backward(config, dout, cache):
    """dh (B, N, D), those of compressed memory and memory, and the parameters' gradients."""
    projection_caches, attention_cache, output_cache, dropout_mask, bias_scale, compressed = cache
    query_cache, key_cache, value_cache, distance_cache, own_cache = projection_caches
    dout = dout * dropout_mask
    dattended, doutput = linear_backward(dout, output_cache)
    dquery, dkey, dvalue, ddistance_key, dbiases = relative_attention_backward(
        split_heads(dattended, config.heads), attention_cache
    )
    # remembered rows count in the weights' gradient
    dh, dquery_weight = project_heads_backward(dquery, query_cache)
    dsource_by_key, dkey_weight = project_heads_backward(dkey, key_cache)
    dsource_by_value, dvalue_weight = project_heads_backward(dvalue, value_cache)
    grads = {"query": dquery_weight, "key": dkey_weight, "value": dvalue_weight, "output": doutput}
    grads |= distance_keys_backward(config, ddistance_key, distance_cache)

    dcontent_bias = dbiases["content_bias"] * bias_scale
    ddistance_bias = dbiases["distance_bias"] * bias_scale
    if config.positions == "simplified":
        grads["query_bias"] = dcontent_bias + ddistance_bias
        # softmax cancels q·b_k, which all keys share: exactly zero, not the sum's rounding
        grads["key_bias"] = np.zeros_like(dcontent_bias)
        grads["value_bias"] = dvalue.sum((0, 2))
    else:
        grads |= {"content_bias": dcontent_bias, "distance_bias": ddistance_bias}
    if config.authors_code:
        grads["output_bias"] = dout.sum((0, 1))
    if own_cache is not None:
        down_key, down_bias = dbiases["own"]
        grads |= prefixed("compressed_", distance_keys_backward(config, down_key, own_cache))
        grads["compressed_distance_bias"] = down_bias * bias_scale

    dsource = dsource_by_key + dsource_by_value
    before = dsource.shape[1] - dh.shape[1]  # C + M
    dremembered = (dsource[:, :compressed], dsource[:, compressed:before])
    return dh + dsource[:, before:], dremembered, grads


def relative_attention_forward(
    query,
    key,
    value,
    distance_key,
    content_bias,
    distance_bias,
    rate=0.0,
    rng=None,
    in_values=False,
    own=None,
):
    """softmax(((q + u)·k_j + (q + v)·r_{i-j}) / sqrt(E)) x_j, (B, H, N, E) (Transformer-XL).

    Query i sees the keys j of [compressed | memory | segment] up to itself. query (B, H, N, E), key
    and value x (B, H, K, E), distance_key r (H, K, E) from far to near, biases u and v (H, E).
    i - j counts a compressed row as one (decision 6: one distance throughout). in_values: the value
    is x_j + r_{i-j}. own: distance_key and distance_bias of the compressed rows, if not those.
    Returns the weights too.
    """
    content_query = query + content_bias[:, None]  # for Transformer-XL's terms a and c
    by_key, distance_cache = distance_scores_forward(query, distance_key, distance_bias)  # b and d
    own_cache = None
    if own is not None:
        by_own, own_cache = distance_scores_forward(query, *own)  # by [compressed | segment]
        compressed = key.shape[2] - by_key.shape[3]
        by_key = np.concatenate([by_own[..., :compressed], by_key], axis=-1)
    scores = content_query @ key.mT + by_key
    n, k = scores.shape[-2:]
    masked = np.where(causal_mask(n, k), scores * query.shape[-1] ** -0.5, -np.inf)
    weights, _ = softmax_forward(masked)
    dropped, dropout_mask = dropout(weights, rate, rng)  # decision 13: where dropout is
    out = dropped @ value  # (B, H, N, E)
    if in_values:
        # Memformer's Eq. 4: the shift put back turns weights by key into weights by distance
        out += relative_shift_backward(dropped, None) @ distance_key
    attention_cache = (content_query, key, value, weights, dropped, dropout_mask, in_values)
    return out, weights, (attention_cache, distance_cache, own_cache)


# s = (q + u) k^T + shift((q + v) r^T), w = softmax(s / sqrt(E)), y = w x:
# dx = w^T dy, dw = dy x^T, dk = ds^T (q + u), dq = ds k + that by distance
# y = w x + shift'(w) r, if r is in the values: dw = dy x^T + shift(dy r^T), dr gets shift'(w)^T dy
def relative_attention_backward(dout, cache):
    """Gradients of query, key, value and distance_key, and {name: gradient} of the two biases."""
    attention_cache, distance_cache, own_cache = cache
    content_query, key, value, weights, dropped, dropout_mask, in_values = attention_cache
    _, distance_key = distance_cache
    dvalue = dropped.mT @ dout
    ddropped = dout @ value.mT  # (B, H, N, K)
    if in_values:
        ddropped += relative_shift_forward(dout @ distance_key.mT)[0]
    dweights = ddropped * dropout_mask
    dscores = softmax_backward(dweights, weights) * dout.shape[-1] ** -0.5  # 0 where masked

    dcontent = dscores @ key  # of q + u, (B, H, N, E)
    dkey = dscores.mT @ content_query
    compressed = key.shape[2] - distance_key.shape[1]  # C with own distances, else 0
    ddistance, ddistance_key, ddistance_bias = distance_scores_backward(
        dscores[..., compressed:], distance_cache
    )
    if in_values:
        weights_by_distance = relative_shift_backward(dropped, None)
        ddistance_key += (weights_by_distance.mT @ dout).sum(0)
    dquery = dcontent + ddistance
    dbiases = {"content_bias": dcontent.sum((0, 2)), "distance_bias": ddistance_bias}
    if own_cache is not None:
        not_read = (0, dscores.shape[2])  # the segment's columns
        by_own = np.pad(dscores[..., :compressed], ((0, 0), (0, 0), (0, 0), not_read))
        dquery_by_own, *dbiases["own"] = distance_scores_backward(by_own, own_cache)
        dquery = dquery + dquery_by_own
    return dquery, dkey, dvalue, ddistance_key, dbiases


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
    """The same numbers put back; dout must be zero wherever the mask hides.

    Otherwise some would land in the next row.
    """
    batch, heads, n, k = dout.shape
    zeros = np.zeros((batch, heads, n))
    flat = np.concatenate([zeros, dout.reshape(batch, heads, -1)], axis=-1)
    return flat.reshape(batch, heads, n, k + 1)[..., 1:]


# ----------------------------------------------------------------------------
# through segments: a whole document, forwards and then backwards
def loss_and_gradients(params, config, segments, given=None):
    """Mean loss of segments [(tokens, targets)], compression loss, their sum's gradients, states.

    states are those that the segments read: given, or each left by the segment before.
    """
    total = 0.0
    count = 0
    compression = 0.0
    states = []
    caches = []
    state = initial_state(params, config, len(segments[0][0]))
    for number, (tokens, targets) in enumerate(segments):
        if given is not None:
            state = given[number]
        states.append(state)
        logits, state, cache = forward(params, config, tokens, state)
        scored = np.ones(targets.shape, bool)
        loss, loss_cache = cross_entropy_forward(logits, targets, scored)
        losses, auxiliary_cache = auxiliary_forward(params, config, cache)
        total += loss
        count += targets.size
        compression += sum(losses.values())
        caches.append((cache, loss_cache, auxiliary_cache))

    grads = {}
    dstate = None
    for cache, loss_cache, auxiliary_cache in reversed(caches):
        dlogits = cross_entropy_backward(1 / count, loss_cache)
        dparams, dstate = backward(params, config, cache, dlogits, dstate)
        add_into(grads, dparams)
        add_into(grads, auxiliary_backward(config, 1.0, auxiliary_cache))
    return total / count, compression, grads, states


# ----------------------------------------------------------------------------
# demonstration: gradients against finite differences, then a tiny text
def stopped(config):
    """{function: what is data to it}, for --check.

    The next compressed memory, a result, is data to the task loss, except under bptt.
    """
    remember = ("h", "memory", "weights")
    if config.compression_loss != "bptt":
        remember += ("return.1",)
    return {"remember_forward": remember, "attention_reconstruction_forward": ("p", "h")}


def check_gradients(loss, params, grads, rng):
    """Compare grads with finite differences of loss(params), each along a random direction.

    Exits with an error if they differ; else prints the largest relative error.
    """
    step = 1e-6
    worst = 0.0
    for name, grad in grads.items():
        direction = rng.standard_normal(grad.shape)
        above = loss(params | {name: params[name] + step * direction})
        below = loss(params | {name: params[name] - step * direction})
        numeric = (above - below) / (2 * step)
        analytic = (grad * direction).sum()
        size = max(abs(numeric), abs(analytic), 1e-4)  # a difference is rounded to 1e-9 or so
        error = abs(numeric - analytic) / size
        if not error < 1e-4:
            raise SystemExit(
                f"WRONG: the gradient of {name} is {analytic:+.6e} by hand and {numeric:+.6e} by "
                "differences; --check says which function to look at"
            )
        worst = max(worst, error)

    print(
        f"Largest relative error {worst:.1e}: the hand-written backward pass is the "
        "forward pass's derivative.\n"
    )


def bits_per_token(params, config, segment, state):
    """Mean loss of a segment (tokens, targets) that is read with this state, in bits."""
    tokens, targets = segment
    logits, _, _ = forward(params, config, tokens, state)
    nats, _ = cross_entropy_forward(logits, targets, np.ones(targets.shape, bool))
    return nats / targets.size / np.log(2)


def check_both_losses(params, config, segments, rng):
    """Check the gradients of each loss, by the parameters that it trains."""
    # states are data, so they are held
    _, _, grads, held = loss_and_gradients(params, config, segments)
    compression = {name: grad for name, grad in grads.items() if ".compression." in name}
    task = {name: grad for name, grad in grads.items() if name not in compression}

    def losses(moved):
        return loss_and_gradients(moved, config, segments, held)

    print("The task loss, by the parameters that it trains:")
    check_gradients(lambda moved: losses(moved)[0], params, task, rng)
    print("The compression loss, by the parameters that it trains:")
    check_gradients(lambda moved: losses(moved)[1], params, compression, rng)


def segments_of(config, document):
    """[(tokens, targets)] of a document (B, n + 1): the target of a token is the next one."""
    tokens = document[:, :-1]
    targets = document[:, 1:]
    segments = []
    for start in range(0, tokens.shape[1], config.segment):
        here = slice(start, start + config.segment)
        segments.append((tokens[:, here], targets[:, here]))
    return segments


def demonstrate():
    """Check gradients against finite differences, then fit a tiny batch; prints what it shows."""
    rng = np.random.default_rng(0)
    config = Config(
        vocabulary=11,
        width=12,
        layers=2,
        heads=2,
        head_width=5,
        feed_forward=20,
        segment=6,
        memory=6,
        compressed_memory=6,
        compression_rate=3,
    )
    params = init_params(config, rng)
    document = rng.integers(config.vocabulary, size=(2, 25))
    segments = segments_of(config, document)

    print(
        "Compressive Transformer, convolution trained by attention reconstruction; "
        f"four segments of {config.segment} tokens."
    )
    check_both_losses(params, config, segments, rng)
    print(
        "Fitting these 48 predictions of random tokens by the gradients' signs "
        "(there is nothing to learn but the text):"
    )
    states = []
    for step in range(1, 201):
        loss, compression, grads, states = loss_and_gradients(params, config, segments)
        rate = 0.02 * 0.98**step
        params = {name: params[name] - rate * np.sign(grad) for name, grad in grads.items()}
        if step in (1, 10, 50, 200):
            bits = loss / np.log(2)
            print(
                f"  step {step:3d}: {bits:.3f} bits per token, compression loss {compression:.4f}"
            )

    carried = states[-1]
    fresh = initial_state(params, config, 2)
    starts = {
        "both memories carried": carried,
        "compressed memory cleared": carried._replace(compressed=fresh.compressed),
        "both cleared": fresh,
    }
    for label, state in starts.items():
        bits = bits_per_token(params, config, segments[-1], state)
        print(f"Fourth segment, {label}: {bits:.3f} bits per token")


# ----------------------------------------------------------------------------
# what every Transformer has: attention, positions, heads, norm, softmax, feed-forward; known before
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
    return np.arange(k)[None, :] <= np.arange(n)[:, None] + k - n


def distance_sinusoids(length, width):
    """Rows (K, D), K = length, of the distances K - 1, ..., 1, 0: from far to near, like keys."""
    distance = np.arange(length - 1, -1, -1.0)[:, None]
    angle = distance * 10_000.0 ** (-np.arange(0, width, 2) / width)  # (K, D/2)
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)


def sinusoids_of(config, rng):
    """The authors' sinusoids (K, D) of all keys, and (C + N, D) of compressed memory's own.

    They are dropped once for all layers (decision 13: where dropout is). Ours are None here.
    """
    if not config.authors_code:
        return None, None
    own_rows = config.compressed_memory + config.segment
    sinusoids = distance_sinusoids(own_rows + config.memory, config.width)
    of_keys, _ = dropout(sinusoids, config.dropout, rng)
    of_compressed, _ = dropout(sinusoids[-own_rows:], config.dropout, rng)
    return of_keys, of_compressed


def distance_keys_forward(p, config, length, dropped=None):
    """r (H, K, E) of the distances K - 1, ..., 1, 0: W_R times sinusoids, or rows of R.

    dropped: these sinusoids, or more, after dropout.

    The rows of R are those of simplified positions (decision 17: shared by heads).
    """
    if config.positions == "simplified":
        rows = np.minimum(np.arange(length - 1, -1, -1), config.max_distance)  # (K,)
        shape = (config.heads, length, config.head_width)
        return np.broadcast_to(p["positions"][rows], shape), rows
    sinusoids = distance_sinusoids(length, config.width)  # (K, D)
    if dropped is not None:
        sinusoids = dropped[-length:]
    distance_key, cache = project_heads_forward(sinusoids[None], p["distance_key"], config.heads)
    return distance_key[0], cache


# r_t = W_R R_t: dW_R = sum of dr_t R_t^T; or r_t = R_row(t) in all heads:
# dR_row = sum of dr_t over heads and its distances
def distance_keys_backward(config, ddistance_key, cache):
    """{name: gradient} of W_R or of R."""
    if config.positions == "simplified":
        rows = cache
        dpositions = np.zeros((config.max_distance + 1, config.head_width))
        np.add.at(dpositions, rows, ddistance_key.sum(0))
        return {"positions": dpositions}
    _, dweight = project_heads_backward(ddistance_key[None], cache)
    return {"distance_key": dweight}


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
    """Gradients of x (..., in) and of the weight (out, in)."""
    x, weight = cache
    dx = dy @ weight
    rows = tuple(range(dy.ndim - 1))  # all axes but the last
    dweight = np.tensordot(dy, x, (rows, rows))
    return dx, dweight


def layer_norm_forward(p, name, x, epsilon=NORM_EPSILON):
    """Zero mean and unit variance over the last axis of x, then scale and bias of that name."""
    centred = x - x.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    standard = centred * inverse
    scale = p[f"{name}.scale"]
    y = standard * scale + p[f"{name}.bias"]
    return y, (name, standard, inverse, scale)


# n = (x - mean x) / deviation: dx = (dn - mean(dn) - n mean(n dn)) / deviation
def layer_norm_backward(dy, cache):
    """Gradients of x, and of the scale and the bias by name."""
    name, standard, inverse, scale = cache
    dstandard = dy * scale
    mean = dstandard.mean(-1, keepdims=True)
    correlation = (dstandard * standard).mean(-1, keepdims=True)
    dx = inverse * (dstandard - mean - standard * correlation)

    sum_axes = tuple(range(dy.ndim - 1))  # all but the last
    dscale = (dy * standard).sum(sum_axes)
    dbias = dy.sum(sum_axes)
    return dx, {f"{name}.scale": dscale, f"{name}.bias": dbias}


def softmax_forward(scores):
    """Softmax over the last axis; -inf scores get exactly zero."""
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    weights = exponentials / exponentials.sum(-1, keepdims=True)
    return weights, weights  # which are the cache too


# w = softmax(s): ds = w (dw - w·dw)
def softmax_backward(dweights, weights):
    mean = (dweights * weights).sum(-1, keepdims=True)
    return weights * (dweights - mean)


def dropout(x, rate, rng):
    """(x with random entries dropped and the others enlarged, what each is multiplied by).

    The gradient of x is multiplied by the same. rng None (evaluation) or rate 0 passes x through.
    """
    if rng is None or rate == 0:
        return x, 1.0
    kept = rng.random(x.shape) >= rate
    dropout_mask = kept / (1 - rate)
    return x * dropout_mask, dropout_mask


def mlp_forward(p, config, x, rng):
    """dropout(W_2 relu(W_1 x + b_1) + b_2); authors_code drops after the relu too."""
    before, hidden_cache = linear_forward(x, p["mlp_hidden"])
    hidden = np.maximum(before + p["mlp_hidden_bias"], 0)  # (B, N, F)
    rate = config.dropout if config.authors_code else 0.0
    dropped, hidden_mask = dropout(hidden, rate, rng)
    out, output_cache = linear_forward(dropped, p["mlp_output"])
    out, dropout_mask = dropout(out + p["mlp_output_bias"], config.dropout, rng)
    return out, (hidden_cache, hidden, hidden_mask, output_cache, dropout_mask)


# relu passes the gradient if hidden > 0
def mlp_backward(dout, cache):
    """Gradients of x and of the parameters."""
    hidden_cache, hidden, hidden_mask, output_cache, dropout_mask = cache
    dout = dout * dropout_mask
    ddropped, doutput = linear_backward(dout, output_cache)
    dhidden = ddropped * hidden_mask
    dbefore = dhidden * (hidden > 0)
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
    """The parameters below prefix, by their names without it."""
    return {
        name.removeprefix(prefix): array
        for name, array in params.items()
        if name.startswith(prefix)
    }


def add_into(total, part):
    """Sum a dict of gradients into another; total is ours to change."""
    for name, array in part.items():
        total[name] = total.get(name, 0.0) + array


# ----------------------------------------------------------------------------
# variants: other compressions and losses, adaptive inputs and softmax; a first reading skips them
def max_pooling_forward(p, config, evicted, usage):
    """The largest of c rows, feature by feature; of equals the first.

    usage (B, N), which every compression is given, is for most_used alone (3.2).
    """
    groups, n = groups_forward(evicted, config.compression_rate)  # (B, N/c, c, D)
    largest = groups.argmax(2)[:, :, None]  # (B, N/c, 1, D)
    new = np.take_along_axis(groups, largest, 2)[:, :, 0]
    return new, (groups.shape, n, largest)


# y = max over r of x_r: dx_r = dy at the row of the maximum, 0 elsewhere
def max_pooling_backward(dnew, cache):
    """Gradient of evicted; there are no parameters."""
    shape, n, largest = cache
    dgroups = np.zeros(shape)
    np.put_along_axis(dgroups, largest, dnew[:, :, None], 2)
    return groups_backward(dgroups, n), {}


def mean_pooling_forward(p, config, evicted, usage):
    """The mean of c rows."""
    groups, n = groups_forward(evicted, config.compression_rate)  # (B, N/c, c, D)
    return groups.mean(2), (groups.shape, n)


# y = sum over r of x_r / c: dx_r = dy / c
def mean_pooling_backward(dnew, cache):
    """Gradient of evicted; there are no parameters."""
    shape, n = cache
    dgroups = np.broadcast_to(dnew[:, :, None], shape) / shape[2]
    return groups_backward(dgroups, n), {}


def dilated_conv_forward(p, config, evicted, usage):
    """A layer for each dilation, then the convolution (decision 8: ReLU in between)."""
    x = evicted
    caches = []
    for dilation in config.dilations:
        x, cache = dilated_layer_forward(x, p[f"dilated_{dilation}"], dilation)
        # decision 8: rows that read zeros are left out
        first = dilation if config.authors_code else 0
        x = x[:, first:]
        caches.append((dilation, first, cache))
    new, conv_cache = conv_forward(p, config, x, usage)
    return new, (caches, conv_cache)


# y = conv(b(a(x))) for layers a and b: dx = a'(b'(conv'(dy)))
def dilated_conv_backward(dnew, cache):
    """Gradients of evicted and of the parameters."""
    caches, conv_cache = cache
    dx, grads = conv_backward(dnew, conv_cache)
    for dilation, first, layer_cache in reversed(caches):
        dx = np.pad(dx, ((0, 0), (first, 0), (0, 0)))
        dx, grads[f"dilated_{dilation}"] = dilated_layer_backward(dx, layer_cache)
    return dx, grads


def dilated_layer_forward(x, weight, dilation):
    """relu(W [x_{i-dilation}; x_i]), with zeros before the first row."""
    padded = np.pad(x, ((0, 0), (dilation, 0), (0, 0)))
    earlier = padded[:, : x.shape[1]]
    before, linear_cache = linear_forward(np.concatenate([earlier, x], axis=-1), weight)
    return np.maximum(before, 0), (linear_cache, before > 0, dilation)


# y_i = relu(W [x_{i-r}; x_i]), [a_i; b_i] = W^T (dy_i where y_i > 0): dx_i = b_i + a_{i+r}
def dilated_layer_backward(dy, cache):
    """Gradients of x and of the weight."""
    linear_cache, positive, dilation = cache
    dpair, dweight = linear_backward(dy * positive, linear_cache)
    dearlier, dx = np.split(dpair, 2, axis=-1)
    kept = max(0, dx.shape[1] - dilation)
    dx[:, :kept] += dearlier[:, dilation:]
    return dx, dweight


def most_used_forward(p, config, evicted, usage):
    """The N/c rows with the largest usage (B, N); of equals the older.

    They stay in their order in time (decision 9: order in time).
    """
    count = evicted.shape[1] // config.compression_rate
    most = np.argsort(-usage, axis=1, kind="stable")[:, :count]
    kept = np.sort(most, axis=1)[:, :, None]  # (B, N/c, 1)
    return np.take_along_axis(evicted, kept, 1), (evicted.shape, kept)


# y_i = x_kept(i): dx_kept(i) = dy_i, 0 for the others
def most_used_backward(dnew, cache):
    """Gradient of evicted; there are no parameters."""
    shape, kept = cache
    devicted = np.zeros(shape)
    np.put_along_axis(devicted, kept, dnew, 1)
    return devicted, {}


COMPRESSIONS = {
    "conv": (conv_forward, conv_backward),
    "dilated_conv": (dilated_conv_forward, dilated_conv_backward),
    "max_pooling": (max_pooling_forward, max_pooling_backward),
    "mean_pooling": (mean_pooling_forward, mean_pooling_backward),
    "most_used": (most_used_forward, most_used_backward),
}


def error_forward(config, difference):
    """Mean square of a difference (B, ...), or mean over lanes of its norm (Alg. 2, l.8)."""
    if not config.compression_loss.endswith("_norm"):
        return (difference**2).mean(), (difference, None)
    axes = tuple(range(1, difference.ndim))
    norms = np.sqrt((difference**2).sum(axes, keepdims=True))  # (B, 1, ...)
    return norms.mean(), (difference, norms)


# loss = mean(x^2): dx = 2 x / size; loss = |x|: dx = x / |x|, over the lanes,
# and 0 at x = 0, where it has no derivative (decision 10: zero there)
def error_backward(dloss, cache):
    """Gradient of the difference."""
    difference, norms = cache
    if norms is None:
        return dloss * 2 * difference / difference.size
    return dloss * difference / (np.where(norms > 0, norms, 1.0) * len(norms))


def auto_encoding_forward(p, config, h, evicted, new):
    """Error of g(new) - evicted, g a transposed convolution of kernel and stride c (3.2).

    By default it is the mean square over all numbers (decision 10: mean squares). Rows that are in
    no group are decoded as zeros.
    """
    c = config.compression_rate
    flat, linear_cache = linear_forward(new, p["compression.decoder"])  # (B, N/c, cD)
    groups = flat.reshape(*flat.shape[:2], c, -1)
    decoded = groups_backward(groups, evicted.shape[1])
    loss, error_cache = error_forward(config, decoded - evicted)  # stop: evicted is data
    return loss, (error_cache, c, linear_cache)


# loss = error(G new - evicted): dnew = G^T e and dG = sum of e new^T, for e = error'
def auto_encoding_backward(dloss, cache):
    """Gradients of new and of g."""
    error_cache, c, linear_cache = cache
    dgroups, _ = groups_forward(error_backward(dloss, error_cache), c)
    dflat = dgroups.reshape(*dgroups.shape[:2], -1)
    dnew, ddecoder = linear_backward(dflat, linear_cache)
    return dnew, {"decoder": ddecoder}


AUXILIARY = ("attention_reconstruction", "auto_encoding")  # losses of the compression alone (3.2)
COMPRESSION_LOSSES = (*AUXILIARY, "bptt", "none")  # bptt: the task loss
NORMS = tuple(f"{name}_norm" for name in AUXILIARY)  # of the same differences


def adaptive_embedding_forward(params, config, tokens):
    """Rows (B, N, D) of tokens (B, N): of `embedding`, or of a tail's table, projected.

    They are those of adaptive_softmax_forward (decision 18: one table both ways).
    """
    h = np.zeros((*tokens.shape, config.width))
    caches = []
    for band, (start, stop) in enumerate(config.bands):
        prefix = f"tails.{band - 1}." if band else ""
        inside = (tokens >= start) & (tokens < stop)  # (B, N)
        ids = tokens[inside] - start
        rows = params[prefix + "embedding"][ids]
        cache = None
        if band:
            rows, cache = linear_forward(rows, params[prefix + "projection"])
        h[inside] = rows
        caches.append((prefix, inside, ids, cache))
    return h, caches


# h = P e_id: dP = sum of dh e_id^T, de_id = sum of P^T dh over the places of id;
# de_id = sum of dh without a projection
def adaptive_embedding_backward(config, dh, caches):
    """{name: gradient} of every table and projection."""
    grads = {}
    for (start, stop), (prefix, inside, ids, cache) in zip(config.bands, caches, strict=True):
        drows = dh[inside]
        if cache is not None:
            drows, grads[prefix + "projection"] = linear_backward(drows, cache)
        dtable = np.zeros((stop - start, drows.shape[-1]))
        np.add.at(dtable, ids, drows)
        grads[prefix + "embedding"] = dtable
    return grads


def adaptive_softmax_forward(params, config, x):
    """Log-probabilities (B, N, V) of x (B, N, D), by the inputs' tables.

    A tail's are of p(cluster) p(word | cluster).
    """
    first = config.bands[0][1]  # words of `embedding`; the head scores them and the tails' clusters
    table = np.concatenate([params["embedding"], params["clusters"]])
    scores, head_cache = linear_forward(x, table)
    head, head_logs = log_softmax_forward(scores)  # (B, N, first + tails)
    out = [head[..., :first]]
    caches = []
    for tail in range(len(config.cutoffs)):
        p = subtree(params, f"tails.{tail}.")
        narrow, projection_cache = linear_forward(x, p["projection"].T)
        logits, table_cache = linear_forward(narrow, p["embedding"])
        within, logs = log_softmax_forward(logits)
        out.append(head[..., first + tail, None] + within)
        caches.append((projection_cache, table_cache, logs))
    return np.concatenate(out, axis=-1), (head_cache, head_logs, caches)


# l_w = head_w, or head_c + within_w: dhead_c = sum of dl_w over its words, dwithin = dl;
# x = h / sqrt(D) goes to all tables
def adaptive_softmax_backward(config, dlog_probabilities, cache):
    """Gradients of x and of the parameters."""
    head_cache, head_logs, caches = cache
    dwords, *dtails = [dlog_probabilities[..., start:stop] for start, stop in config.bands]
    dclusters = [dtail.sum(-1, keepdims=True) for dtail in dtails]
    dhead = np.concatenate([dwords, *dclusters], axis=-1)
    dx, dtable = linear_backward(log_softmax_backward(dhead, head_logs), head_cache)
    first = config.bands[0][1]
    grads = {"embedding": dtable[:first], "clusters": dtable[first:]}
    for tail, (projection_cache, table_cache, logs) in enumerate(caches):
        dlogits = log_softmax_backward(dtails[tail], logs)
        dnarrow, grads[f"tails.{tail}.embedding"] = linear_backward(dlogits, table_cache)
        dx_of_tail, dprojection = linear_backward(dnarrow, projection_cache)
        grads[f"tails.{tail}.projection"] = dprojection.T
        dx = dx + dx_of_tail
    return dx, grads


def log_softmax_forward(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return log_probabilities, log_probabilities


# l = x - log sum exp x: dx = dl - softmax(x) sum of dl
def log_softmax_backward(dlog_probabilities, log_probabilities):
    total = dlog_probabilities.sum(-1, keepdims=True)
    return dlog_probabilities - np.exp(log_probabilities) * total


# ----------------------------------------------------------------------------
# starting values: of all parameters; a first reading skips them
POSITION_DEVIATION = 1.0  # of simplified positions (decision 17: learned better so)


def init_params(config, rng):
    """All parameters as {dotted name: float64 array}; matrices are (out, in)."""
    d = config.width
    # decision 14: tied with output
    params = {"embedding": rng.normal(0, 1, (config.bands[0][1], d))}
    for tail, (start, stop) in enumerate(config.bands[1:]):
        narrow = d // config.div_value ** (tail + 1)  # decision 18: narrower for rarer words
        params[f"tails.{tail}.embedding"] = rng.normal(0, 1, (stop - start, narrow))
        params[f"tails.{tail}.projection"] = init_linear(rng, d, narrow)
    if config.cutoffs:
        params["clusters"] = rng.normal(0, 1, (len(config.cutoffs), d))
    for layer in range(config.layers):
        _, compressed_rows = config.rows_of(layer)
        params |= prefixed(f"layers.{layer}.", init_layer(config, rng, compressed_rows))
    return params


def init_layer(config, rng, compressed_rows):
    """Parameters of one layer with that many compressed rows (decision 12: what has biases)."""
    d = config.width
    e = config.head_width
    he = config.heads * e
    f = config.feed_forward
    gain = (2 / config.layers**0.5) ** 0.5 if config.authors_code else 1.0
    p = {name: init_linear(rng, he, d, gain) for name in ("query", "key", "value")}
    if config.positions == "simplified":
        for name in ("query_bias", "key_bias", "value_bias"):
            p[name] = np.zeros((config.heads, e))
        p["positions"] = rng.normal(0, POSITION_DEVIATION, (config.max_distance + 1, e))
    else:
        p["distance_key"] = init_linear(rng, he, d, gain)
        for name in ("content_bias", "distance_bias"):
            p[name] = init_bias(config, rng)
    p["output"] = init_linear(rng, d, he, gain_of_cut(config))
    p |= init_norm("norm", d)
    p["mlp_hidden"] = init_linear(rng, f, d, gain)
    p["mlp_hidden_bias"] = np.zeros(f)
    p["mlp_output"] = init_linear(rng, d, f, gain)
    p["mlp_output_bias"] = np.zeros(d)
    p |= init_norm("mlp_norm", d)
    if config.authors_code:
        p["output_bias"] = np.zeros(d)
    if config.authors_code and compressed_rows:
        p["compressed_distance_key"] = init_linear(rng, he, d, gain)
        p["compressed_distance_bias"] = init_bias(config, rng)
    if compressed_rows:
        p |= prefixed("compression.", init_compression(config, rng))
    return p


def init_bias(config, rng):
    """u or v (H, E); in the authors' code uniform, of variance 2 / (H + HE)."""
    shape = (config.heads, config.head_width)
    if config.authors_code:
        limit = (6 / (config.heads + config.heads * config.head_width)) ** 0.5
        return rng.uniform(-limit, limit, shape)
    return rng.normal(0, 0.02, shape)


def gain_of_cut(config):
    """The gain of matrices of deviation 1 / sqrt(in), in the authors' code before the cut."""
    return 0.8796256610342398 if config.authors_code else 1.0  # as in init_linear


def init_compression(config, rng):
    """Parameters of f_c, and of g under the auto-encoding loss.

    They are matrices alone (decision 7: no bias anywhere).
    """
    d = config.width
    rows = config.compression_rate * d  # c rows end to end
    gain = gain_of_cut(config)
    p = {}
    if config.compression == "dilated_conv":
        for dilation in config.dilations:
            p[f"dilated_{dilation}"] = init_linear(rng, d, 2 * d, gain)
    if config.compression in ("conv", "dilated_conv"):
        p["weight"] = init_linear(rng, d, rows, gain)
    if config.compression_loss.startswith("auto_encoding"):
        p["decoder"] = init_linear(rng, rows, d, gain)
    return p


def init_linear(rng, fan_out, fan_in, gain=1.0):
    """A matrix (out, in) of a normal cut at two sigma; its deviation is gain / sqrt(in) then."""
    draw = rng.standard_normal((fan_out, fan_in))
    outside = np.abs(draw) > 2
    while outside.any():
        draw[outside] = rng.standard_normal(int(outside.sum()))
        outside = np.abs(draw) > 2
    deviation = gain * fan_in**-0.5
    return draw * (deviation / 0.8796256610342398)  # which the cut leaves of a deviation of 1


def init_norm(name, width):
    return {f"{name}.scale": np.ones(width), f"{name}.bias": np.zeros(width)}


# ----------------------------------------------------------------------------
# checks: sizes that cannot work; a first reading skips them
def check_config(config):
    """Raise ValueError, naming the field, for a config that cannot work."""
    for name, kind in Config.__annotations__.items():
        least = 0 if name in ("memory", "compressed_memory") else 1
        if kind is int and getattr(config, name) < least:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least {least}")
    choices = {
        "compression": COMPRESSIONS,
        "compression_loss": (*COMPRESSION_LOSSES, *NORMS),
        "positions": ("simplified", "transformer_xl"),  # Memformer's Eqs. 2-4, Transformer-XL's
    }
    for name, known in choices.items():
        value = getattr(config, name)
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
    if config.positions == "transformer_xl" and config.width % 2:
        raise ValueError(
            f"width {config.width} is odd; "
            "the sinusoids of transformer_xl positions need an even one"
        )
    if config.positions == "simplified" and config.authors_code:
        raise ValueError("authors_code needs transformer_xl positions, not simplified ones")
    check_rows(config)
    check_compression(config)
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout is {config.dropout}; it must be at least 0 and below 1")
    check_cutoffs(config)


def check_rows(config):
    """Raise ValueError if `memories` are not numbers of as many layers, or too many rows."""
    layers = config.layers
    if len(config.memories) not in (0, layers, 2 * layers):
        raise ValueError(
            f"memories {config.memories} must be {layers} numbers, one for each layer, or twice as "
            "many, those of compressed memory last"
        )
    for name, rows in (
        ("memory", config.memories[:layers]),
        ("compressed_memory", config.memories[layers:]),
    ):
        most = getattr(config, name)
        if rows and (min(rows) < 0 or max(rows) > most):
            raise ValueError(f"memories has {rows}, each must be at least 0, at most {name} {most}")


def check_compression(config):
    """Raise ValueError if a segment makes no compressed row, or for dilations that are none."""
    is_unpadded = config.authors_code and config.compression == "dilated_conv"
    if config.compressed_memory and config.new_rows < 1:
        cut_off = sum(config.dilations) if is_unpadded else 0
        raise ValueError(
            f"segment {config.segment} is too short for a compressed row, "
            f"which needs {config.compression_rate + cut_off} tokens; give a longer segment"
        )
    if is_unpadded and config.compression_loss.startswith("auto_encoding"):
        raise ValueError(
            "authors_code has no auto_encoding of dilated_conv, which is not padded; "
            "give another compression_loss"
        )
    dilations = config.dilations
    if min(dilations, default=1) < 1:
        raise ValueError(f"dilations are {dilations}; each must be at least 1")
    if tuple(sorted(set(dilations))) != dilations:
        raise ValueError(f"dilations {dilations} must be a tuple, ascending, each rate once")


def check_cutoffs(config):
    """Raise ValueError if a band has no words, or the last tail's embedding no width."""
    if any(start >= stop for start, stop in config.bands):
        raise ValueError(
            f"cutoffs {config.cutoffs} must be ascending, above 0 "
            f"and below vocabulary {config.vocabulary}"
        )
    tails = len(config.cutoffs)
    if config.width < config.div_value**tails:
        raise ValueError(
            f"width {config.width} is less than div_value {config.div_value} "
            f"to the power of {tails} tails; give fewer cutoffs or a smaller div_value"
        )


if __name__ == "__main__":
    if sys.argv[1:]:  # --check [--case NAME] is a program of its own
        sys.argv.insert(1, "compressive")
        runpy.run_module("reference.gradients", run_name="__main__")
    else:
        demonstrate()
