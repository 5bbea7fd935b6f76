"""Variants of the Compressive Transformer, and Transformer-XL.

`reference/compressive.py` has the method. For a config that asks for one of these, `operations_of`
replaces some of the paper's functions by functions of the same signature:

    compressed_memory  0: Transformer-XL, in which nothing is compressed
    compression        max and mean pooling, dilated convolution, most used (3.2)
    compression_loss   auto-encoding (3.2), norms (Alg. 2, l.8), the task loss (bptt), none
    positions          simplified: Memformer's Eqs. 2-4
    cutoffs            adaptive inputs and softmax (Appendix B)
    memories           rows by layer (6)
    authors_code       what the authors' code does where the paper is silent
"""

import dataclasses
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from reference import compressive as paper


# ----------------------------------------------------------------------------
# compressions: other functions f_c (3.2)
def max_pooling_forward(p, config, evicted, usage):
    """Element-wise maximum of every c rows; of equal values the first gets the gradient.

    usage (B, N), which every compression takes, is read only by most_used (3.2).
    """
    groups, n = paper.groups_forward(evicted, config.compression_rate)  # (B, N/c, c, D)
    largest = groups.argmax(2)[:, :, None]  # (B, N/c, 1, D)
    new = np.take_along_axis(groups, largest, 2)[:, :, 0]
    return new, (groups.shape, n, largest)


# y = max over r of x_r: dx_r = dy at the row of the maximum, 0 elsewhere
def max_pooling_backward(dnew, cache):
    """Gradient of evicted; there are no parameters."""
    shape, n, largest = cache
    dgroups = np.zeros(shape)
    np.put_along_axis(dgroups, largest, dnew[:, :, None], 2)
    return paper.groups_backward(dgroups, n), {}


def mean_pooling_forward(p, config, evicted, usage):
    """The mean of c rows."""
    groups, n = paper.groups_forward(evicted, config.compression_rate)  # (B, N/c, c, D)
    return groups.mean(2), (groups.shape, n)


# y = sum over r of x_r / c: dx_r = dy / c
def mean_pooling_backward(dnew, cache):
    """Gradient of evicted; there are no parameters."""
    shape, n = cache
    dgroups = np.broadcast_to(dnew[:, :, None], shape) / shape[2]
    return paper.groups_backward(dgroups, n), {}


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
    new, conv_cache = paper.conv_forward(p, config, x, usage)
    return new, (caches, conv_cache)


# y = conv(b(a(x))) for layers a and b: dx = a'(b'(conv'(dy)))
def dilated_conv_backward(dnew, cache):
    """Gradients of evicted and of the parameters."""
    caches, conv_cache = cache
    dx, grads = paper.conv_backward(dnew, conv_cache)
    for dilation, first, layer_cache in reversed(caches):
        dx = np.pad(dx, ((0, 0), (first, 0), (0, 0)))
        dx, grads[f"dilated_{dilation}"] = dilated_layer_backward(dx, layer_cache)
    return dx, grads


def dilated_layer_forward(x, weight, dilation):
    """relu(W [x_{i-dilation}; x_i]), with zeros before the first row."""
    padded = np.pad(x, ((0, 0), (dilation, 0), (0, 0)))
    earlier = padded[:, : x.shape[1]]
    before, linear_cache = paper.linear_forward(np.concatenate([earlier, x], axis=-1), weight)
    return np.maximum(before, 0), (linear_cache, before > 0, dilation)


# y_i = relu(W [x_{i-r}; x_i]), [a_i; b_i] = W^T (dy_i where y_i > 0): dx_i = b_i + a_{i+r}
def dilated_layer_backward(dy, cache):
    """Gradients of x and of the weight."""
    linear_cache, positive, dilation = cache
    dpair, dweight = paper.linear_backward(dy * positive, linear_cache)
    dearlier, dx = np.split(dpair, 2, axis=-1)
    kept = max(0, dx.shape[1] - dilation)
    dx[:, :kept] += dearlier[:, dilation:]
    return dx, dweight


def most_used_forward(p, config, evicted, usage):
    """The N/c rows with the largest usage (B, N); ties go to the older row.

    They stay in temporal order (decision 9: order in time).
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


def no_compression_forward(p, config, evicted, usage):
    """No rows, (B, 0, D): Transformer-XL."""
    return evicted[:, :0], evicted.shape


def no_compression_backward(dnew, shape):
    """Gradient of evicted, all zero; there are no parameters."""
    return np.zeros(shape), {}


# ----------------------------------------------------------------------------
# losses of the compression: auto-encoding, norms, and the task loss
def auto_encoding_forward(p, config, h, evicted, new):
    """Error of g(new) - evicted, g a transposed convolution of kernel and stride c (3.2).

    It is the mean square over all numbers (decision 10: mean squares). Rows that are in no group
    are decoded as zeros.
    """
    c = config.compression_rate
    flat, linear_cache = paper.linear_forward(new, p["compression.decoder"])  # (B, N/c, cD)
    groups = flat.reshape(*flat.shape[:2], c, -1)
    decoded = paper.groups_backward(groups, evicted.shape[1])
    loss, error_cache = config.operations.error_forward(decoded - evicted)  # stop: evicted is data
    return loss, (config, error_cache, linear_cache)


# loss = error(G new - evicted): dnew = G^T e and dG = sum of e new^T, for e = error'
def auto_encoding_backward(dloss, cache):
    """Gradients of new and of g."""
    config, error_cache, linear_cache = cache
    derror = config.operations.error_backward(dloss, error_cache)
    dgroups, _ = paper.groups_forward(derror, config.compression_rate)
    dflat = dgroups.reshape(*dgroups.shape[:2], -1)
    dnew, ddecoder = paper.linear_backward(dflat, linear_cache)
    return dnew, {"decoder": ddecoder}


def norm_error_forward(difference):
    """Mean over lanes of the norm of a difference (B, ...) (Alg. 2, l.8)."""
    axes = tuple(range(1, difference.ndim))
    norms = np.sqrt((difference**2).sum(axes, keepdims=True))  # (B, 1, ...)
    return norms.mean(), (difference, norms)


# loss = |x|: dx = x / |x|, over the lanes,
# and 0 at x = 0, where it has no derivative (decision 10: zero there)
def norm_error_backward(dloss, cache):
    """Gradient of the difference."""
    difference, norms = cache
    return dloss * difference / (np.where(norms > 0, norms, 1.0) * len(norms))


# cm' = the last C rows of [cm; f_c(evicted)]: [dcm; dnew] = [0; dcm'], and evicted is data
def remember_bptt_backward(config, dnext_compressed, cache):
    """Gradients of the incoming compressed memory and of the compression's parameters."""
    batch, compressed_rows, d = dnext_compressed.shape
    if compressed_rows == 0:
        return dnext_compressed, {}
    oldest = np.zeros((batch, config.new_rows, d))  # rows that fell out
    dqueue = np.concatenate([oldest, dnext_compressed], axis=1)
    dcompressed = dqueue[:, :compressed_rows]
    dnew = dqueue[:, compressed_rows:]
    # decision 11: evicted is data
    _, grads = config.operations.conv_backward(dnew, cache)
    return dcompressed, grads


# ----------------------------------------------------------------------------
# simplified positions: a row of R for each distance, in keys and in values (Memformer's Eqs. 2-4)
POSITION_DEVIATION = 1.0  # of R (decision 17: learned better so)


def simplified_attend_forward(p, config, h, remembered, rng):
    """As the paper's attend, with a bias of the query in the place of u and of v.

    decision 17: simplified positions.
    """
    query, key, value, projections_cache = paper.all_projections_forward(p, config, h, remembered)
    distance_key, rows = distance_rows_forward(p, config, key.shape[2])  # (H, K, E)
    key = key + p["key_bias"][:, None]
    value = value + p["value_bias"][:, None]
    attended, weights, attention_cache = attention_to_positions_forward(
        query, key, value, distance_key, p["query_bias"], rate=config.dropout, rng=rng
    )
    out, output_cache = paper.linear_forward(paper.merge_heads(attended), p["output"])
    out, dropout_mask = paper.dropout(out, config.dropout, rng)
    return out, weights, (projections_cache, rows, attention_cache, output_cache, dropout_mask)


# as the paper's; k = source W_k^T + b_k, x = source W_x^T + b_x
def simplified_attend_backward(config, dout, cache):
    """dh (B, N, D), those of compressed memory and memory, and the parameters' gradients."""
    projections_cache, rows, attention_cache, output_cache, dropout_mask = cache
    dattended, doutput = paper.linear_backward(dout * dropout_mask, output_cache)
    dattended = paper.split_heads(dattended, config.heads)
    dquery, dkey, dvalue, ddistance_key, dquery_bias = attention_to_positions_backward(
        dattended, attention_cache
    )
    dh, dremembered, grads = paper.all_projections_backward(dquery, dkey, dvalue, projections_cache)
    grads |= distance_rows_backward(config, ddistance_key, rows)
    grads["query_bias"] = dquery_bias
    # softmax cancels q·b_k, which all keys share: exactly zero, not the sum's rounding
    grads["key_bias"] = np.zeros_like(dquery_bias)
    grads["value_bias"] = dvalue.sum((0, 2))
    grads["output"] = doutput
    return dh, dremembered, grads


def attention_to_positions_forward(query, key, value, distance_key, query_bias, rate, rng):
    """softmax((q + b)·(k_j + r_{i-j}) / sqrt(E)) (x_j + r_{i-j}), (B, H, N, E), and the weights."""
    by_key, distance_cache = paper.distance_scores_forward(query, distance_key, query_bias)
    content_query = query + query_bias[:, None]
    weights, weights_cache = paper.attention_weights_forward(content_query, key, by_key)
    dropped, dropout_mask = paper.dropout(weights, rate, rng)
    # Memformer's Eq. 4: the shift put back turns weights by key into weights by distance
    by_distance = paper.relative_shift_backward(dropped, None)
    out = dropped @ value + by_distance @ distance_key
    cache = (value, distance_key, dropped, by_distance, dropout_mask, weights_cache, distance_cache)
    return out, weights, cache


# y = w x + shift'(w) r: dw = dy x^T + shift(dy r^T), dr gets shift'(w)^T dy
def attention_to_positions_backward(dout, cache):
    """Gradients of query, key, value, distance_key and query_bias."""
    value, distance_key, dropped, by_distance, dropout_mask, weights_cache, distance_cache = cache
    by_position, _ = paper.relative_shift_forward(dout @ distance_key.mT)
    dweights = (dout @ value.mT + by_position) * dropout_mask
    dcontent, dkey, dby_key = paper.attention_weights_backward(dweights, weights_cache)
    ddistance, ddistance_key, dbias = paper.distance_scores_backward(dby_key, distance_cache)
    ddistance_key = ddistance_key + (by_distance.mT @ dout).sum(0)
    dvalue = dropped.mT @ dout
    return dcontent + ddistance, dkey, dvalue, ddistance_key, dcontent.sum((0, 2)) + dbias


def distance_rows_forward(p, config, length):
    """r (H, K, E) of the distances K - 1, ..., 1, 0: rows of R (decision 17: shared by heads)."""
    rows = np.minimum(np.arange(length - 1, -1, -1), config.max_distance)  # (K,)
    shape = (config.heads, length, config.head_width)
    return np.broadcast_to(p["positions"][rows], shape), rows


# r_t = R_row(t) in all heads: dR_row = sum of dr_t over heads and its distances
def distance_rows_backward(config, ddistance_key, rows):
    """{name: gradient} of R."""
    dpositions = np.zeros((config.max_distance + 1, config.head_width))
    np.add.at(dpositions, rows, ddistance_key.sum(0))
    return {"positions": dpositions}


def init_distance_rows(config, rng):
    """R, and the biases of query, key and value."""
    p = {}
    for name in ("query_bias", "key_bias", "value_bias"):
        p[name] = np.zeros((config.heads, config.head_width))
    shape = (config.max_distance + 1, config.head_width)
    p["positions"] = rng.normal(0, POSITION_DEVIATION, shape)
    return p


# ----------------------------------------------------------------------------
# adaptive inputs and softmax: a table for each band of words, the rarer the narrower (Appendix B)
def bands_of(config):
    """(first id, first id beyond) of the words of `embedding` and of each tail."""
    return list(pairwise((0, *config.cutoffs, config.vocabulary)))


def adaptive_embedding_forward(params, config, tokens):
    """Rows (B, N, D) of tokens (B, N): of `embedding`, or of a tail's table, projected.

    They are those of adaptive_softmax_forward (decision 18: one table both ways).
    """
    h = np.zeros((*tokens.shape, config.width))
    caches = []
    for band, (start, stop) in enumerate(bands_of(config)):
        prefix = f"tails.{band - 1}." if band else ""
        inside = (tokens >= start) & (tokens < stop)  # (B, N)
        ids = tokens[inside] - start
        rows = params[prefix + "embedding"][ids]
        cache = None
        if band:
            rows, cache = paper.linear_forward(rows, params[prefix + "projection"])
        h[inside] = rows
        caches.append((prefix, inside, ids, cache))
    return h, caches


# h = P e_id: dP = sum of dh e_id^T, de_id = sum of P^T dh over the places of id;
# de_id = sum of dh without a projection
def adaptive_embedding_backward(config, dh, caches):
    """{name: gradient} of every table and projection."""
    grads = {}
    for (start, stop), (prefix, inside, ids, cache) in zip(bands_of(config), caches, strict=True):
        drows = dh[inside]
        if cache is not None:
            drows, grads[prefix + "projection"] = paper.linear_backward(drows, cache)
        dtable = np.zeros((stop - start, drows.shape[-1]))
        np.add.at(dtable, ids, drows)
        grads[prefix + "embedding"] = dtable
    return grads


def adaptive_softmax_forward(params, config, x):
    """Log-probabilities (B, N, V) of x (B, N, D), by the tables of the inputs.

    A tail's word has log p(cluster) + log p(word | cluster).
    """
    # The head scores the words of `embedding` and the tails' clusters
    _, first = bands_of(config)[0]
    table = np.concatenate([params["embedding"], params["clusters"]])
    scores, head_cache = paper.linear_forward(x, table)
    head, head_logs = log_softmax_forward(scores)  # (B, N, first + tails)
    out = [head[..., :first]]
    caches = []
    for tail in range(len(config.cutoffs)):
        p = paper.subtree(params, f"tails.{tail}.")
        narrow, projection_cache = paper.linear_forward(x, p["projection"].T)
        logits, table_cache = paper.linear_forward(narrow, p["embedding"])
        within, logs = log_softmax_forward(logits)
        out.append(head[..., first + tail, None] + within)
        caches.append((projection_cache, table_cache, logs))
    return np.concatenate(out, axis=-1), (head_cache, head_logs, caches)


# l_w = head_w, or head_c + within_w: dhead_c = sum of dl_w over its words, dwithin = dl;
# x = h / sqrt(D) goes to all tables
def adaptive_softmax_backward(config, dlog_probabilities, cache):
    """Gradients of x and of the parameters."""
    head_cache, head_logs, caches = cache
    dwords, *dtails = [dlog_probabilities[..., start:stop] for start, stop in bands_of(config)]
    dclusters = [dtail.sum(-1, keepdims=True) for dtail in dtails]
    dhead = np.concatenate([dwords, *dclusters], axis=-1)
    dx, dtable = paper.linear_backward(log_softmax_backward(dhead, head_logs), head_cache)
    _, first = bands_of(config)[0]
    grads = {"embedding": dtable[:first], "clusters": dtable[first:]}
    for tail, (projection_cache, table_cache, logs) in enumerate(caches):
        dlogits = log_softmax_backward(dtails[tail], logs)
        dnarrow, grads[f"tails.{tail}.embedding"] = paper.linear_backward(dlogits, table_cache)
        dx_of_tail, dprojection = paper.linear_backward(dnarrow, projection_cache)
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


def init_adaptive_embedding(config, rng):
    """`embedding`, and for each tail a table, a projection and a cluster."""
    d = config.width
    (_, first), *tails = bands_of(config)
    params = {"embedding": rng.normal(0, 1, (first, d))}
    for tail, (start, stop) in enumerate(tails):
        narrow = d // config.div_value ** (tail + 1)  # decision 18: narrower for rarer words
        params[f"tails.{tail}.embedding"] = rng.normal(0, 1, (stop - start, narrow))
        params[f"tails.{tail}.projection"] = paper.init_linear(rng, d, narrow)
    params["clusters"] = rng.normal(0, 1, (len(tails), d))
    return params


# ----------------------------------------------------------------------------
# rows by layer: some may have fewer, or none (6)
def config_of_layer(config, layer):
    """The config of a layer, counted from 0, with its own M and C (decision 21: sizes by layer)."""
    if not config.memories:
        return config
    memory = config.memories[layer]
    compressed = config.compressed_memory
    if len(config.memories) > config.layers:
        compressed = config.memories[config.layers + layer]
    return dataclasses.replace(config, memory=memory, compressed_memory=compressed, memories=())


def last_rows(config, state, layer):
    """Views of a layer's own rows, the last ones of the state; those before them are zeros."""
    memory, compressed = config.rows_of(layer)
    return paper.State(
        state.memory[:, layer, config.memory - memory :],
        state.compressed[:, layer, config.compressed_memory - compressed :],
    )


def layers_with_loss(config):
    """The layers whose compression has a loss of its own: those with compressed rows."""
    if config.compression_loss in ("bptt", "none"):
        return []
    return [layer for layer in range(config.layers) if config.rows_of(layer)[1]]


# ----------------------------------------------------------------------------
# the authors' code: own distances of compressed rows, larger biases, another epsilon and dropout
EPSILON = 1e-5  # under the square root of layer_norm (decision 12: its epsilon)


def authors_layers(params, config, h, state, rng):
    """All layers, each with the sinusoids beside its parameters.

    Those (K, D) of all keys, and those (C + N, D) of compressed memory's own, are dropped once for
    all layers (decision 13: where dropout is).
    """
    own_rows = config.compressed_memory + config.segment
    sinusoids = paper.distance_sinusoids(own_rows + config.memory, config.width)
    of_keys, _ = paper.dropout(sinusoids, config.dropout, rng)
    of_compressed, _ = paper.dropout(sinusoids[-own_rows:], config.dropout, rng)
    shared = {"sinusoids": of_keys, "compressed_sinusoids": of_compressed}
    for layer in range(config.layers):
        params = params | paper.prefixed(f"layers.{layer}.", shared)
    return paper.all_layers_forward(params, config, h, state, rng)


def authors_layer(p, config, h, remembered, rng):
    """As the paper's layer, with their epsilon and a feed-forward of more dropout."""
    attended, weights, attend_cache = authors_attend_forward(p, config, h, remembered, rng)
    a, norm_cache = paper.layer_norm_forward(p, "norm", attended + h, EPSILON)
    mixed, mlp_cache = authors_mlp(p, config, a, rng)
    y, mlp_norm_cache = paper.layer_norm_forward(p, "mlp_norm", mixed + a, EPSILON)
    return y, weights, (attend_cache, norm_cache, mlp_cache, mlp_norm_cache)


def authors_mlp(p, config, x, rng):
    """dropout(W_2 dropout(relu(W_1 x + b_1)) + b_2); mlp_backward is its backward, too."""
    before, hidden_cache = paper.linear_forward(x, p["mlp_hidden"])
    hidden = np.maximum(before + p["mlp_hidden_bias"], 0)  # (B, N, F)
    dropped, hidden_mask = paper.dropout(hidden, config.dropout, rng)
    out, output_cache = paper.linear_forward(dropped, p["mlp_output"])
    out, dropout_mask = paper.dropout(out + p["mlp_output_bias"], config.dropout, rng)
    passes = (hidden > 0) * hidden_mask  # to the relu
    return out, (hidden_cache, passes, output_cache, dropout_mask)


def authors_attend_forward(p, config, h, remembered, rng):
    """The paper's attend, with larger u and v, an output bias and compressed rows' own distances.

    These distances do not count the memory in between (decision 6: not divided).
    """
    query, key, value, projections_cache = paper.all_projections_forward(p, config, h, remembered)
    compressed_rows = remembered[0].shape[1]  # C
    recent_rows = key.shape[2] - compressed_rows  # M + N
    by_key, recent_cache = scaled_scores_forward(p, config, query, recent_rows)
    compressed_cache = None
    if compressed_rows:
        own_p = paper.subtree(p, "compressed_")
        by_own, compressed_cache = scaled_scores_forward(
            own_p, config, query, compressed_rows + h.shape[1]
        )
        by_key = np.concatenate([by_own[..., :compressed_rows], by_key], axis=-1)

    content_bias = p["content_bias"] * config.head_width**0.5
    content_query = query + content_bias[:, None]
    weights, weights_cache = paper.attention_weights_forward(content_query, key, by_key)
    dropped, weights_mask = paper.dropout(weights, config.dropout, rng)
    attended = paper.merge_heads(dropped @ value)
    out, output_cache = paper.linear_forward(attended, p["output"])
    out, dropout_mask = paper.dropout(out + p["output_bias"], config.dropout, rng)
    return (
        out,
        weights,
        AuthorsCache(
            projections_cache,
            recent_cache,
            compressed_cache,
            compressed_rows,
            weights_cache,
            value,
            dropped,
            weights_mask,
            output_cache,
            dropout_mask,
        ),
    )


# as the paper's; s = [s by own distances | s by distances], each from q + sqrt(E) v
def authors_attend_backward(config, dout, cache):
    """dh (B, N, D), those of compressed memory and memory, and the parameters' gradients."""
    dout = dout * cache.dropout_mask
    dattended, doutput = paper.linear_backward(dout, cache.output_cache)
    dattended = paper.split_heads(dattended, config.heads)
    dvalue = cache.dropped.mT @ dattended
    dweights = dattended @ cache.value.mT * cache.weights_mask
    dcontent, dkey, dby_key = paper.attention_weights_backward(dweights, cache.weights_cache)

    rows = cache.compressed_rows  # C
    ddistance, grads = scaled_scores_backward(config, dby_key[..., rows:], cache.recent_cache)
    dquery = dcontent + ddistance
    if rows:
        not_read = (0, dby_key.shape[2])  # the segment's columns
        dby_own = np.pad(dby_key[..., :rows], ((0, 0), (0, 0), (0, 0), not_read))
        ddistance, dparams = scaled_scores_backward(config, dby_own, cache.compressed_cache)
        dquery = dquery + ddistance
        grads |= paper.prefixed("compressed_", dparams)
    dh, dremembered, dprojections = paper.all_projections_backward(
        dquery, dkey, dvalue, cache.projections_cache
    )
    grads |= dprojections
    grads["content_bias"] = dcontent.sum((0, 2)) * config.head_width**0.5
    grads["output"] = doutput
    grads["output_bias"] = dout.sum((0, 1))
    return dh, dremembered, grads


class AuthorsCache(NamedTuple):
    """What authors_attend_forward keeps."""

    projections_cache: tuple
    recent_cache: tuple
    compressed_cache: tuple | None
    compressed_rows: int
    weights_cache: tuple
    value: np.ndarray
    dropped: np.ndarray
    weights_mask: np.ndarray | float
    output_cache: tuple
    dropout_mask: np.ndarray | float


def scaled_scores_forward(p, config, query, length):
    """(q + sqrt(E) v)·r by key, of keys at the distances length - 1, ..., 1, 0."""
    sinusoids = p["sinusoids"][-length:]
    distance_key, key_cache = paper.project_heads_forward(
        sinusoids[None], p["distance_key"], config.heads
    )
    bias = p["distance_bias"] * config.head_width**0.5
    by_key, scores_cache = paper.distance_scores_forward(query, distance_key[0], bias)
    return by_key, (key_cache, scores_cache)


# b = sqrt(E) v: dv = sqrt(E) db
def scaled_scores_backward(config, dby_key, cache):
    """Gradients of query, and of W_R and v by name."""
    key_cache, scores_cache = cache
    dquery, ddistance_key, dbias = paper.distance_scores_backward(dby_key, scores_cache)
    grads = paper.distance_keys_backward(config, ddistance_key, key_cache)
    grads["distance_bias"] = dbias * config.head_width**0.5
    return dquery, grads


def init_authors_layer(config, rng):
    """As the paper's, with other variances (decision 12: what has biases)."""
    d = config.width
    he = config.heads * config.head_width
    gain = (2 / config.layers**0.5) ** 0.5
    p = {}
    for name in ("query", "key", "value", "distance_key"):
        p[name] = paper.init_linear(rng, he, d, gain)
    p["content_bias"] = init_authors_bias(config, rng)
    p["distance_bias"] = init_authors_bias(config, rng)
    p["output"] = paper.init_linear(rng, d, he, CUT)
    p |= paper.init_norm("norm", d)
    p["mlp_hidden"] = paper.init_linear(rng, config.feed_forward, d, gain)
    p["mlp_hidden_bias"] = np.zeros(config.feed_forward)
    p["mlp_output"] = paper.init_linear(rng, d, config.feed_forward, gain)
    p["mlp_output_bias"] = np.zeros(d)
    p |= paper.init_norm("mlp_norm", d)
    p["output_bias"] = np.zeros(d)
    if config.compressed_memory:
        p["compressed_distance_key"] = paper.init_linear(rng, he, d, gain)
        p["compressed_distance_bias"] = init_authors_bias(config, rng)
    return p | paper.prefixed("compression.", config.operations.init_conv(config, rng))


def init_authors_bias(config, rng):
    """u or v (H, E), uniform, of variance 2 / (H + HE)."""
    shape = (config.heads, config.head_width)
    limit = (6 / (config.heads + config.heads * config.head_width)) ** 0.5
    return rng.uniform(-limit, limit, shape)


# ----------------------------------------------------------------------------
# operations and checks
CUT = 0.8796256610342398  # gain of matrices of deviation 1 / sqrt(in) before the cut of init_linear
COMPRESSIONS = ("conv", "dilated_conv", "max_pooling", "mean_pooling", "most_used")
AUXILIARY = ("attention_reconstruction", "auto_encoding")  # losses of the compression alone (3.2)
COMPRESSION_LOSSES = (*AUXILIARY, "bptt", "none")  # bptt: the task loss
NORMS = tuple(f"{name}_norm" for name in AUXILIARY)  # of the same differences


def operations_of(config):
    """The paper's operations, some replaced by those of the variants that the config asks for.

    Raises ValueError, naming the field, for a variant that is unknown or cannot work.
    """
    check_config(config)
    replaced = {
        "layer_config": config_of_layer,
        "layer_state": last_rows,
        "trained_layers": layers_with_loss,
        "rows_left_out": rows_not_padded,
        "init_conv": init_compression,
    }
    replaced |= with_compression(config) | with_loss(config)
    if config.cutoffs:
        replaced |= {
            "embedding_forward": adaptive_embedding_forward,
            "embedding_backward": adaptive_embedding_backward,
            "logits_forward": adaptive_softmax_forward,
            "logits_backward": adaptive_softmax_backward,
            "init_embedding": init_adaptive_embedding,
        }
    if config.positions == "simplified":
        replaced |= {
            "attend_forward": simplified_attend_forward,
            "attend_backward": simplified_attend_backward,
            "init_positions": init_distance_rows,
        }
    if config.authors_code:
        replaced |= {
            "all_layers_forward": authors_layers,
            "layer_forward": authors_layer,
            "attend_backward": authors_attend_backward,
            "init_layer": init_authors_layer,
        }
    return paper.operations_with(**replaced)


def with_compression(config):
    """{operation: its function} of the compression."""
    if config.compressed_memory == 0:
        forward, backward = no_compression_forward, no_compression_backward
    else:
        compressions = {
            "conv": (paper.conv_forward, paper.conv_backward),
            "dilated_conv": (dilated_conv_forward, dilated_conv_backward),
            "max_pooling": (max_pooling_forward, max_pooling_backward),
            "mean_pooling": (mean_pooling_forward, mean_pooling_backward),
            "most_used": (most_used_forward, most_used_backward),
        }
        forward, backward = compressions[config.compression]
    return {"conv_forward": forward, "conv_backward": backward}


def with_loss(config):
    """{operation: its function} of what trains the compression."""
    if config.compression_loss == "bptt":
        return {"remember_backward": remember_bptt_backward}
    replaced = {}
    if config.compression_loss.startswith("auto_encoding"):
        replaced |= {
            "attention_reconstruction_forward": auto_encoding_forward,
            "attention_reconstruction_backward": auto_encoding_backward,
        }
    if config.compression_loss.endswith("_norm"):
        replaced |= {"error_forward": norm_error_forward, "error_backward": norm_error_backward}
    return replaced


def rows_not_padded(config):
    """Evicted rows that are not compressed (decision 8: not padded in the authors' code)."""
    unpadded = config.authors_code and config.compression == "dilated_conv"
    return sum(config.dilations) if unpadded else 0


def init_compression(config, rng):
    """Parameters of f_c, and of g under the auto-encoding loss.

    They are matrices alone (decision 7: no bias anywhere).
    """
    if config.compressed_memory == 0:
        return {}
    d = config.width
    gain = CUT if config.authors_code else 1.0
    p = {}
    if config.compression == "dilated_conv":
        for dilation in config.dilations:
            p[f"dilated_{dilation}"] = paper.init_linear(rng, d, 2 * d, gain)
    if config.compression in ("conv", "dilated_conv"):
        p["weight"] = paper.init_linear(rng, d, config.compression_rate * d, gain)
    if config.compression_loss.startswith("auto_encoding"):
        p["decoder"] = paper.init_linear(rng, config.compression_rate * d, d, gain)
    return p


def check_config(config):
    """Raise ValueError, naming the field, for variants that are unknown or cannot work."""
    choices = {
        "compression": COMPRESSIONS,
        "compression_loss": (*COMPRESSION_LOSSES, *NORMS),
        "positions": ("simplified", "transformer_xl"),  # Memformer's Eqs. 2-4, Transformer-XL's
    }
    for name, known in choices.items():
        value = getattr(config, name)
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
    if config.positions == "simplified" and config.authors_code:
        raise ValueError("authors_code needs transformer_xl positions, not simplified ones")
    check_rows(config)
    check_dilations(config)
    check_cutoffs(config)


def check_rows(config):
    """Raise ValueError if `memories` does not fit the number of layers, or exceeds M or C."""
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


def check_dilations(config):
    """Raise ValueError for impossible dilations, or for a loss that cannot be used with them."""
    dilations = config.dilations
    if min(dilations, default=1) < 1:
        raise ValueError(f"dilations are {dilations}; each must be at least 1")
    if tuple(sorted(set(dilations))) != dilations:
        raise ValueError(f"dilations {dilations} must be a tuple, ascending, each rate once")
    if rows_not_padded(config) and config.compression_loss.startswith("auto_encoding"):
        raise ValueError(
            "authors_code has no auto_encoding of dilated_conv, which is not padded; "
            "give another compression_loss"
        )


def check_cutoffs(config):
    """Raise ValueError if a band has no words, or the last tail's embedding has no width."""
    if any(start >= stop for start, stop in bands_of(config)):
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
