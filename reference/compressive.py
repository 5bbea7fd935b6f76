"""Compressive Transformer (Rae, Potapenko, Jayakumar, Hillier, Lillicrap, 2019), forward and backward in NumPy.

A Transformer-XL keeps the last M inputs of every layer as memory and forgets what falls out of it. The Compressive Transformer
compresses what falls out, c rows into one, and keeps C of those as well. Attention reads [compressed memory | memory | segment].
The task loss trains the Transformer; a loss of its own trains the compression, and no gradient passes from one to the other.
`forward` takes (tokens, state) to (logits, next state), `backward` the gradient of the next state to that of the incoming one.
`auxiliary_forward` and `auxiliary_backward` are the compression loss, differentiated apart. C = 0 is Transformer-XL, exactly.

Glossary: code symbol, meaning, paper symbol, shape
    tokens             token ids of one segment of N tokens           x            (B, N)
    segment            N, tokens in a segment                         n_s
    memory             M, rows of memory per layer                    n_m
    compressed_memory  C, rows of compressed memory per layer         n_cm
    compression_rate   rows that are compressed into one              c
    h                  a layer's input                                h^(i)        (B, N, D)
    state.memory       inputs of the last M positions, per layer      m_t          (B, L, M, D)
    state.compressed   compressed older inputs, per layer             cm_t         (B, L, C, D)
    seen               what attention reads: [compressed | memory | h]             (B, K, D), K = C + M + N
    evicted            the N rows that fall out of memory             old_mem      (B, N, D)
    new                evicted, compressed                            new_cm       (B, N/c, D)
    COMPRESSIONS       the compression functions                      f_c
    distance_key       parameter; sinusoids of distances through it   W_R          (HE, D); (H, K, E)
    content_bias, distance_bias    Transformer-XL's global biases     u, v         (H, E)
    decoder            what reconstructs evicted from new             g            (cD, D)

B batch (lanes), D width, H heads, E head width, F feed-forward width, V vocabulary, L layers.

Departures and decisions (the paper decides; where it is silent, its authors' code, github.com/google-deepmind/sonnet, branch v1,
sonnet/python/modules/nets/transformer.py; where that is silent too, Transformer-XL)
     1. Post-norm, as Algorithm 1, lines 7 and 12; the authors' code normalises a sublayer's input by default.
     2. Memory holds a layer's input with the gradient stopped, as in Transformer-XL.
     3. A document starts with zeros in both memories (Algorithm 1, lines 1-2), and they are not masked: they take softmax mass.
     4. evicted is the first N rows of concat(memory, h), and memory the rest. Algorithm 1, l.8 takes memory[:N], the same for
        M >= N; this (authors' code too) holds for every M, 0 included. Where M < N, some of the segment's own rows are evicted,
        and both most-used and attention reconstruction let all its queries count; the code takes the last M queries.
     5. Line 11 writes cm_t where it means cm_{t+1}.
     6. Relative positions are Transformer-XL's, one distance i - j over [compressed | memory | segment], where a compressed row
        counts as one position; u, v and W_R are each layer's own. The authors' code gives compressed memory a W_R and a v of its
        own, and measures distances to it as if memory were not in between. Both biases stand inside the 1/sqrt(E), as in
        Transformer-XL; the authors' code adds them to scaled queries.
     7. The compressions have no bias (authors' code), so zeros compress to zeros. c must divide N; the paper takes the floor.
     8. Dilated convolutions: for each rate a kernel of 2 and a ReLU, then the strided convolution (authors' code, where rates
        1, 2, 4 are an example), padded on the left so that N/c rows come out (the code pads nothing).
     9. Most-used: a row's usage is its attention weight when it is evicted, averaged over heads and queries, before dropout.
        The N/c most used rows stay, in their order in time; of equals the older stays. No code of the authors is public.
    10. Both losses are mean squares, not the norms that the paper writes, whose gradient at zero difference is not a number.
        Attention is compared per head before the output projection, with 1/sqrt(E), without mask and u (authors' code). They are
        summed over layers (Algorithm 2, l.8), where the code takes the mean. g is a transposed convolution (authors' code).
    11. "bptt" (Table 5) has no auxiliary loss: the gradient of later segments reaches the compression through compressed memory.
        What is compressed, and memory itself, stay stopped.
    12. The feed-forward layers have biases (authors' code), attention's projections none (Transformer-XL; the authors' output
        projection has one). Weights start truncated normal with variance 1/fan_in, as in all papers here (the code: 2/sqrt(L)
        times that), u and v at N(0, 0.02^2) (Transformer-XL's code). LayerNorm's epsilon is 1e-6 (the code: 1e-5).
    13. Dropout: on the attention matrix, after attention's output projection and after the feed-forward (the code has it on the
        sinusoids and inside the feed-forward as well). It acts only when `forward` is given a random generator.
    14. Embedding and output are tied, N(0, 1); logits are divided by sqrt(D).
    15. Training: gradients of the two objectives are limited to their norm apart, and those of a late update (5.5.1) averaged.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

NORM_EPSILON = 1e-6  # under the square root of layer_norm


@dataclass(frozen=True)
class Config:
    """Sizes and variants of the model; impossible combinations raise ValueError naming the field.

    Fields:
        vocabulary: V, number of token ids
        width: D, model width, even
        layers: L, number of layers
        heads: H, attention heads
        head_width: E, width of a head
        feed_forward: F, width of the feed-forward hidden layer
        segment: N, tokens in a segment (n_s)
        memory: M, past positions that each layer remembers as they were (n_m)
        compressed_memory: C, compressed memories of each layer (n_cm); 0 gives Transformer-XL
        compression_rate: c, memories compressed into one; divides the segment
        compression: how, one of conv, dilated_conv, max_pooling, mean_pooling, most_used (section 3.2)
        compression_loss: what trains it, attention_reconstruction, auto_encoding, bptt (the task loss) or none
        dilations: rates of dilated_conv's layers
        dropout: dropout rate in training, 0 to below 1
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
    dropout: float = 0.0

    def __post_init__(self):
        for name in ("vocabulary", "width", "layers", "heads", "head_width", "feed_forward", "segment", "compression_rate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("memory", "compressed_memory"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if self.width % 2:
            raise ValueError(f"width {self.width} is odd; the sinusoids of the distances need an even one")
        if self.compressed_memory and self.segment % self.compression_rate:
            fits = [rate for rate in range(1, self.segment + 1) if self.segment % rate == 0]
            nearest = min(fits, key=lambda rate: abs(rate - self.compression_rate))
            raise ValueError(f"compression_rate {self.compression_rate} does not divide segment {self.segment}; {nearest} does")
        if self.compression not in COMPRESSIONS:
            raise ValueError(f"compression is {self.compression!r}; it must be one of {', '.join(COMPRESSIONS)}")
        if self.compression_loss not in COMPRESSION_LOSSES:
            raise ValueError(f"compression_loss is {self.compression_loss!r}; it must be one of {', '.join(COMPRESSION_LOSSES)}")
        if any(rate < 1 for rate in self.dilations):
            raise ValueError(f"dilations are {self.dilations}; each must be at least 1")
        if tuple(sorted(set(self.dilations))) != self.dilations:
            raise ValueError(f"dilations {self.dilations} must be a tuple, ascending, each rate once")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be at least 0 and below 1")

    @property
    def temporal_range(self):
        """The paper's temporal range in tokens, l (n_m + c n_cm) (3.3).

        It leaves out the segments: a row of memory was itself made by a token that looked back from its own segment's start, so
        that up to a segment more per layer can count.
        """
        return self.layers * (self.memory + self.compression_rate * self.compressed_memory)


class State(NamedTuple):
    """What a segment hands to the next one; axis 0 of every field is the lane."""

    memory: np.ndarray  # (B, L, M, D)
    compressed: np.ndarray  # (B, L, C, D)


def truncated_normal(rng, shape, deviation):
    """Normal cut at two sigma, rescaled so that its standard deviation is `deviation` after the cut (0.8796 of the uncut)."""
    draw = rng.standard_normal(shape)
    while (outside := np.abs(draw) > 2).any():
        draw[outside] = rng.standard_normal(int(outside.sum()))
    return draw * (deviation / 0.8796256610342398)


def init_linear(rng, fan_out, fan_in):
    return truncated_normal(rng, (fan_out, fan_in), fan_in**-0.5)


def init_norm(width):
    return {"scale": np.ones(width), "bias": np.zeros(width)}


def init_compression(config, rng):
    """Parameters of f_c, and of g under the auto-encoding loss; none without compressed memory."""
    p, d, c = {}, config.width, config.compression_rate
    if config.compressed_memory == 0:
        return p
    if config.compression == "dilated_conv":
        p |= {f"dilated_{rate}": init_linear(rng, d, 2 * d) for rate in config.dilations}
    if config.compression in ("conv", "dilated_conv"):
        p["weight"] = init_linear(rng, d, c * d)
    if config.compression_loss == "auto_encoding":
        p["decoder"] = init_linear(rng, c * d, d)
    return p


def init_layer(config, rng):
    d, h, e = config.width, config.heads, config.head_width
    p = {name: init_linear(rng, h * e, d) for name in ("query", "key", "value", "distance_key")}
    p |= {name: rng.normal(0, 0.02, (h, e)) for name in ("content_bias", "distance_bias")}
    p["output"] = init_linear(rng, d, h * e)
    p |= prefixed("norm.", init_norm(d))
    p |= {"mlp_hidden": init_linear(rng, config.feed_forward, d), "mlp_hidden_bias": np.zeros(config.feed_forward)}
    p |= {"mlp_output": init_linear(rng, d, config.feed_forward), "mlp_output_bias": np.zeros(d)}
    p |= prefixed("mlp_norm.", init_norm(d))
    return p | prefixed("compression.", init_compression(config, rng))


def init_params(config, rng):
    """All parameters as {dotted name: float64 array}; matrices are (out, in)."""
    params = {"embedding": rng.normal(0, 1, (config.vocabulary, config.width))}
    for layer in range(config.layers):
        params |= prefixed(f"layers.{layer}.", init_layer(config, rng))
    return params


def prefixed(prefix, tree):
    """{name: a} -> {prefix + name: a}."""
    return {prefix + name: array for name, array in tree.items()}


def subtree(params, prefix):
    """The parameters below prefix, by their names without it."""
    return {name[len(prefix) :]: array for name, array in params.items() if name.startswith(prefix)}


def add_into(total, part):
    """Sum a dict of gradients into another; total is ours to change."""
    for name, array in part.items():
        total[name] = total[name] + array if name in total else array


def initial_state(params, config, batch):
    """What a document starts with: zeros (Alg. 1, l.1-2)."""
    return State(*(np.zeros((batch, config.layers, n, config.width)) for n in (config.memory, config.compressed_memory)))


def linear_forward(x, weight):
    """y = x W^T for x (..., in) and weight (out, in)."""
    return x @ weight.T, (x, weight)


# y = x W^T: dx = dy W, dW = dy^T x over all rows
def linear_backward(dy, cache):
    x, weight = cache
    dweight = dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])  # (out, in)
    return dy @ weight, dweight


def layer_norm_forward(x, scale, bias):
    """Zero mean and unit variance over the last axis, then scale and bias."""
    centred = x - x.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + NORM_EPSILON)
    normal = centred * inverse
    return normal * scale + bias, (normal, inverse, scale)


# n = (x - mean x) / deviation: dx = (dn - mean(dn) - n mean(n dn)) / deviation
def layer_norm_backward(dy, cache):
    normal, inverse, scale = cache
    dnormal = dy * scale
    dx = inverse * (dnormal - dnormal.mean(-1, keepdims=True) - normal * (dnormal * normal).mean(-1, keepdims=True))
    sum_axes = tuple(range(dy.ndim - 1))
    return dx, {"scale": (dy * normal).sum(sum_axes), "bias": dy.sum(sum_axes)}


def softmax_forward(scores):
    """Softmax over the last axis; -inf scores get exactly zero."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights, weights


# w = softmax(s): ds = w (dw - w·dw)
def softmax_backward(dweights, weights):
    return weights * (dweights - (dweights * weights).sum(-1, keepdims=True))


def dropout_forward(x, rate, rng):
    """Inverted dropout; rng None (evaluation) or rate 0 passes x through."""
    if rng is None or rate == 0:
        return x, None
    dropout_mask = (rng.random(x.shape) >= rate) / (1 - rate)
    return x * dropout_mask, dropout_mask


def dropout_backward(dy, dropout_mask):
    return dy if dropout_mask is None else dy * dropout_mask


def split_heads(x, heads):
    """(B, N, H*E) -> (B, H, N, E)"""
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)


def merge_heads(x):
    """(B, H, N, E) -> (B, N, H*E), the adjoint of split_heads."""
    batch, heads, length, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, heads * width)


def distance_sinusoids(length, width):
    """Row t stands for the distance K - 1 - t, so that rows run, like keys, from far to near; (K, D) for K = length."""
    distance = np.arange(length - 1, -1, -1.0)
    frequency = 10_000.0 ** (-np.arange(0, width, 2) / width)  # (D/2,)
    angle = distance[:, None] * frequency
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)


def relative_shift_forward(by_distance):
    """Scores by distance -> scores by key: out[i, j] = by_distance[i, j + N - 1 - i], both (B, H, N, K).

    Query i stands at place K - N + i among the keys, so its distance to key j is K - N + i - j, which is column N - 1 - i + j:
    out's row i is row i moved left by N - 1 - i. With a zero put before each row, rows are K + 1 long; cut the same numbers into
    rows of length K, leaving out the first N, and each row starts one number earlier in its old row than the row above. What
    moves in on the right from the next row belongs to keys after the query, which the mask hides.
    """
    batch, heads, n, _ = by_distance.shape
    padded = np.concatenate([np.zeros((batch, heads, n, 1)), by_distance], axis=-1)  # (B, H, N, K + 1)
    return padded.reshape(batch, heads, -1)[:, :, n:].reshape(by_distance.shape), None


def relative_shift_backward(dout, cache):
    """The adjoint: the same numbers put back. The first N - 1 of row 0 went nowhere, and the hidden ones must arrive as zeros."""
    batch, heads, n, k = dout.shape
    flat = np.concatenate([np.zeros((batch, heads, n)), dout.reshape(batch, heads, -1)], axis=-1)
    return flat.reshape(batch, heads, n, k + 1)[..., 1:]


def causal_mask(n, k):
    """Query i of N sees the K - N keys before the segment and the segment's own up to itself, (N, K)."""
    return np.arange(k)[None, :] <= np.arange(n)[:, None] + k - n


def relative_attention_forward(query, key, value, distance_key, content_bias, distance_bias, rate=0.0, rng=None):
    """softmax(((q + u).k_j + (q + v).r_{i-j}) / sqrt(E)) v, causal; the cache's weights are those before dropout.

    query (B, H, N, E), key and value (B, H, K, E), distance_key (H, K, E) of the rows of distance_sinusoids, biases (H, E).
    """
    content_query = query + content_bias[:, None]
    distance_query = query + distance_bias[:, None]
    by_distance = distance_query @ distance_key.swapaxes(-1, -2)  # (B, H, N, K)
    scores = content_query @ key.swapaxes(-1, -2) + relative_shift_forward(by_distance)[0]
    mask = causal_mask(*scores.shape[-2:])
    weights, _ = softmax_forward(np.where(mask, scores * query.shape[-1] ** -0.5, -np.inf))
    dropped, keep = dropout_forward(weights, rate, rng)
    return dropped @ value, (content_query, distance_query, key, value, distance_key, weights, dropped, keep)


def relative_attention_backward(dout, cache):
    """Gradients of query, key, value, distance_key, content_bias and distance_bias."""
    content_query, distance_query, key, value, distance_key, weights, dropped, keep = cache
    dvalue = dropped.swapaxes(-1, -2) @ dout
    dweights = dropout_backward(dout @ value.swapaxes(-1, -2), keep)
    dscores = softmax_backward(dweights, weights) * dout.shape[-1] ** -0.5  # exactly zero where masked
    dby_distance = relative_shift_backward(dscores, None)
    dcontent, ddistance = dscores @ key, dby_distance @ distance_key  # (B, H, N, E)
    dkey = dscores.swapaxes(-1, -2) @ content_query
    ddistance_key = (dby_distance.swapaxes(-1, -2) @ distance_query).sum(0)  # (H, K, E)
    return dcontent + ddistance, dkey, dvalue, ddistance_key, dcontent.sum((0, 2)), ddistance.sum((0, 2))


def attend_forward(p, config, h, remembered, rng):
    """multihead_attention(h, mem) (Alg. 1, l.6) of h (B, N, D) over seen = [remembered | h]: out, weights (B, H, N, K), cache."""
    seen = np.concatenate([remembered, h], axis=1)  # (B, K, D)
    query, query_cache = linear_forward(h, p["query"])
    key, key_cache = linear_forward(seen, p["key"])
    value, value_cache = linear_forward(seen, p["value"])
    distance_key, distance_cache = linear_forward(distance_sinusoids(seen.shape[1], config.width)[None], p["distance_key"])
    heads = [split_heads(x, config.heads) for x in (query, key, value, distance_key)]
    attended, attention_cache = relative_attention_forward(
        *heads[:3], heads[3][0], p["content_bias"], p["distance_bias"], config.dropout, rng
    )
    out, output_cache = linear_forward(merge_heads(attended), p["output"])
    out, keep = dropout_forward(out, config.dropout, rng)
    weights = attention_cache[5]
    return out, weights, (query_cache, key_cache, value_cache, distance_cache, attention_cache, output_cache, keep)


def attend_backward(config, dout, cache):
    """dh (B, N, D), dremembered (B, C + M, D) and the parameters' gradients."""
    query_cache, key_cache, value_cache, distance_cache, attention_cache, output_cache, keep = cache
    dattended, doutput = linear_backward(dropout_backward(dout, keep), output_cache)
    dquery, dkey, dvalue, ddistance_key, du, dv = relative_attention_backward(
        split_heads(dattended, config.heads), attention_cache
    )
    dh, dquery_weight = linear_backward(merge_heads(dquery), query_cache)
    dseen_key, dkey_weight = linear_backward(merge_heads(dkey), key_cache)  # memories count in the weights' gradient
    dseen_value, dvalue_weight = linear_backward(merge_heads(dvalue), value_cache)
    _, ddistance_weight = linear_backward(merge_heads(ddistance_key[None]), distance_cache)
    dseen = dseen_key + dseen_value
    before = dseen.shape[1] - dh.shape[1]  # C + M
    grads = {"query": dquery_weight, "key": dkey_weight, "value": dvalue_weight, "distance_key": ddistance_weight}
    grads |= {"content_bias": du, "distance_bias": dv, "output": doutput}
    return dh + dseen[:, before:], dseen[:, :before], grads


def mlp_forward(p, config, x, rng):
    """dropout(W_2 relu(W_1 x + b_1) + b_2)"""
    before, hidden_cache = linear_forward(x, p["mlp_hidden"])
    hidden = np.maximum(before + p["mlp_hidden_bias"], 0)  # (B, N, F)
    out, output_cache = linear_forward(hidden, p["mlp_output"])
    out, keep = dropout_forward(out + p["mlp_output_bias"], config.dropout, rng)
    return out, (hidden_cache, hidden, output_cache, keep)


def mlp_backward(dout, cache):
    hidden_cache, hidden, output_cache, keep = cache
    dout = dropout_backward(dout, keep)
    dhidden, doutput = linear_backward(dout, output_cache)
    dbefore = dhidden * (hidden > 0)
    dx, dweight = linear_backward(dbefore, hidden_cache)
    biases = {"mlp_hidden_bias": dbefore.sum((0, 1)), "mlp_output_bias": dout.sum((0, 1))}
    return dx, {"mlp_hidden": dweight, "mlp_output": doutput} | biases


def layer_forward(p, config, h, remembered, rng):
    """Algorithm 1, lines 6, 7, 12: the next layer's input from h (B, N, D) and remembered (B, C + M, D); attention weights."""
    attended, weights, attend_cache = attend_forward(p, config, h, remembered, rng)
    a, norm_cache = layer_norm_forward(attended + h, p["norm.scale"], p["norm.bias"])
    mixed, mlp_cache = mlp_forward(p, config, a, rng)
    y, mlp_norm_cache = layer_norm_forward(mixed + a, p["mlp_norm.scale"], p["mlp_norm.bias"])
    return y, weights, (attend_cache, norm_cache, mlp_cache, mlp_norm_cache)


def layer_backward(config, dy, cache):
    attend_cache, norm_cache, mlp_cache, mlp_norm_cache = cache
    dsum, dmlp_norm = layer_norm_backward(dy, mlp_norm_cache)
    dmixed, grads = mlp_backward(dsum, mlp_cache)
    dsum, dnorm = layer_norm_backward(dsum + dmixed, norm_cache)
    dh, dremembered, dattend = attend_backward(config, dsum, attend_cache)
    return dsum + dh, dremembered, grads | dattend | prefixed("norm.", dnorm) | prefixed("mlp_norm.", dmlp_norm)


def chunks(rows, rate):
    """(B, N, D) -> (B, N/c, c, D)"""
    return rows.reshape(rows.shape[0], -1, rate, rows.shape[2])


def max_pooling_forward(p, config, evicted, usage):
    """The largest of c rows, feature by feature; of equals the first."""
    parts = chunks(evicted, config.compression_rate)
    at = parts.argmax(2)[:, :, None]  # (B, N/c, 1, D)
    return np.take_along_axis(parts, at, 2)[:, :, 0], (parts.shape, at)


def max_pooling_backward(dnew, cache):
    shape, at = cache
    dparts = np.zeros(shape)
    np.put_along_axis(dparts, at, dnew[:, :, None], 2)
    return dparts.reshape(shape[0], -1, shape[3]), {}


def mean_pooling_forward(p, config, evicted, usage):
    """The mean of c rows."""
    return chunks(evicted, config.compression_rate).mean(2), config.compression_rate


def mean_pooling_backward(dnew, rate):
    return np.repeat(dnew, rate, axis=1) / rate, {}


def conv_forward(p, config, evicted, usage):
    """One-dimensional convolution with kernel and stride c: each c rows, end to end, through one matrix (D, cD)."""
    batch, _, d = evicted.shape
    new, cache = linear_forward(evicted.reshape(batch, -1, config.compression_rate * d), p["weight"])
    return new, (cache, evicted.shape)


def conv_backward(dnew, cache):
    linear_cache, shape = cache
    dflat, dweight = linear_backward(dnew, linear_cache)
    return dflat.reshape(shape), {"weight": dweight}


def dilated_layer_forward(x, weight, rate):
    """relu(W [x_{i-rate}; x_i]), zeros before the first row."""
    earlier = np.zeros_like(x)
    earlier[:, rate:] = x[:, : max(0, x.shape[1] - rate)]
    before, cache = linear_forward(np.concatenate([earlier, x], axis=-1), weight)
    return np.maximum(before, 0), (cache, before > 0, rate)


def dilated_layer_backward(dy, cache):
    linear_cache, positive, rate = cache
    dpair, dweight = linear_backward(dy * positive, linear_cache)
    dearlier, dx = np.split(dpair, 2, axis=-1)
    dx[:, : max(0, dx.shape[1] - rate)] += dearlier[:, rate:]
    return dx, dweight


def dilated_conv_forward(p, config, evicted, usage):
    """A layer for each dilation rate, then the strided convolution."""
    x, caches = evicted, []
    for rate in config.dilations:
        x, cache = dilated_layer_forward(x, p[f"dilated_{rate}"], rate)
        caches.append((rate, cache))
    new, cache = conv_forward(p, config, x, usage)
    return new, (caches, cache)


def dilated_conv_backward(dnew, cache):
    caches, conv_cache = cache
    dx, grads = conv_backward(dnew, conv_cache)
    for rate, layer_cache in reversed(caches):
        dx, grads[f"dilated_{rate}"] = dilated_layer_backward(dx, layer_cache)
    return dx, grads


def most_used_forward(p, config, evicted, usage):
    """The N/c rows with the largest usage (B, N), in their order in time; of equals the older."""
    kept = evicted.shape[1] // config.compression_rate
    most = np.argsort(-usage, axis=1, kind="stable")[:, :kept]
    at = np.sort(most, axis=1)[:, :, None]  # (B, N/c, 1)
    return np.take_along_axis(evicted, at, 1), (evicted.shape, at)


def most_used_backward(dnew, cache):
    shape, at = cache
    devicted = np.zeros(shape)
    np.put_along_axis(devicted, at, dnew, 1)
    return devicted, {}


COMPRESSIONS = {
    "conv": (conv_forward, conv_backward),
    "dilated_conv": (dilated_conv_forward, dilated_conv_backward),
    "max_pooling": (max_pooling_forward, max_pooling_backward),
    "mean_pooling": (mean_pooling_forward, mean_pooling_backward),
    "most_used": (most_used_forward, most_used_backward),
}
COMPRESSION_LOSSES = ("attention_reconstruction", "auto_encoding", "bptt", "none")


def newest(queue, length):
    """The last `length` rows of queue (B, n, D), none for 0."""
    return queue[:, queue.shape[1] - length :].copy()


def remember_forward(p, config, h, memory, compressed, weights):
    """Algorithm 1, lines 8 to 11: what a layer remembers after its input h (B, N, D), and what it compressed on the way.

    weights (B, H, N, K) are this segment's attention. Returns next memory (B, M, D), next compressed (B, C, D), the pair
    (evicted, new) or None without compressed memory, and the cache.
    """
    n, c = h.shape[1], config.compressed_memory
    queue = np.concatenate([memory, h], axis=1)
    evicted = queue[:, :n].copy()  # l.8
    next_memory = newest(queue, config.memory)  # l.10; stop: remember_backward takes no gradient of it
    if c == 0:
        return next_memory, compressed, None, None
    usage = weights[..., c : c + n].mean((1, 2))  # (B, N): evicted rows stand at C .. C + N of the keys
    new, cache = COMPRESSIONS[config.compression][0](p, config, evicted, usage)  # l.9
    next_compressed = newest(np.concatenate([compressed, new], axis=1), c)  # l.11
    return next_memory, next_compressed, (evicted, new), cache


def remember_backward(config, dnext_compressed, cache):
    """Gradient of the incoming compressed memory and of the compression's parameters, from that of the next one."""
    if cache is None or config.compression_loss != "bptt":
        # stop: "the Transformer optimizes the task objective and the compression network optimizes the compression
        # objective" (3.2)
        return np.zeros_like(dnext_compressed), {}
    batch, c, d = dnext_compressed.shape
    dropped = np.zeros((batch, config.segment // config.compression_rate, d))  # the oldest rows fell out of the queue
    dqueue = np.concatenate([dropped, dnext_compressed], axis=1)
    _, grads = COMPRESSIONS[config.compression][1](dqueue[:, c:], cache)  # stop: what is compressed is memory, which is data
    return dqueue[:, :c], grads


def forward(params, config, tokens, state, rng=None):
    """Read one segment.

    tokens (B, N) of ids below V, N = config.segment; state from `initial_state` or the segment before; rng turns dropout on.
    Returns logits (B, N, V), where position i predicts token i + 1, the next state, and the cache for `backward` and
    `auxiliary_forward`. Raises ValueError if N is not config.segment.
    """
    if tokens.shape[1] != config.segment:
        raise ValueError(f"a segment of {tokens.shape[1]} tokens is not one of {config.segment}; pad it")
    h, caches, memories, compresseds = params["embedding"][tokens], [], [], []  # Alg. 1, l.3
    for layer in range(config.layers):
        p, memory, compressed = subtree(params, f"layers.{layer}."), state.memory[:, layer], state.compressed[:, layer]
        y, weights, layer_cache = layer_forward(p, config, h, np.concatenate([compressed, memory], axis=1), rng)  # l.5
        next_memory, next_compressed, pair, compression_cache = remember_forward(
            subtree(p, "compression."), config, h, memory, compressed, weights
        )
        memories.append(next_memory)
        compresseds.append(next_compressed)
        caches.append((layer_cache, compression_cache, h, pair))
        h = y
    logits, output_cache = linear_forward(h * config.width**-0.5, params["embedding"])  # (B, N, V)
    return logits, State(np.stack(memories, axis=1), np.stack(compresseds, axis=1)), (tokens, caches, output_cache)


def backward(params, config, cache, dlogits, dnext_state=None):
    """Gradients of the parameters and of the incoming state, from those of the logits and of the next state.

    dnext_state None stops the gradient at the segment's end. dnext_state.memory is not read: memory is written without
    gradient. The compression's own loss is not in here: see auxiliary_backward.
    """
    tokens, caches, output_cache = cache
    dstate = initial_state(params, config, len(tokens))
    dnext_compressed = np.zeros_like(dstate.compressed) if dnext_state is None else dnext_state.compressed
    dh, dembedding = linear_backward(dlogits, output_cache)
    dh, grads = dh * config.width**-0.5, {}
    for layer in reversed(range(config.layers)):
        layer_cache, compression_cache, _, _ = caches[layer]
        dcompressed, dcompression = remember_backward(config, dnext_compressed[:, layer], compression_cache)
        dh, dremembered, dlayer = layer_backward(config, dh, layer_cache)
        dstate.compressed[:, layer] = dremembered[:, : config.compressed_memory] + dcompressed
        dstate.memory[:, layer] = dremembered[:, config.compressed_memory :]
        grads |= prefixed(f"layers.{layer}.", dlayer | prefixed("compression.", dcompression))
    np.add.at(dembedding, tokens, dh)  # the tied embedding's second gradient
    grads["embedding"] = dembedding
    return {name: grads.get(name, np.zeros_like(value)) for name, value in params.items()}, dstate


def content_attention_forward(query, key, value):
    """softmax(q.k / sqrt(E)) v without mask or positions (Alg. 2, l.6)."""
    weights, _ = softmax_forward(query @ key.swapaxes(-1, -2) * query.shape[-1] ** -0.5)
    return weights @ value, (query, value, weights)


def content_attention_backward(dout, cache):
    """Gradients of key and value; the query is data."""
    query, value, weights = cache
    dscores = softmax_backward(dout @ value.swapaxes(-1, -2), weights) * query.shape[-1] ** -0.5
    return dscores.swapaxes(-1, -2) @ query, weights.swapaxes(-1, -2) @ dout


def attention_reconstruction_forward(p, config, h, evicted, new):
    """Algorithm 2 of one layer: how far attention over new falls short of attention over evicted, mean square."""
    # stop: h, evicted and the attention parameters are data here (l.3-5); the backward below goes to `new` alone
    query = split_heads(linear_forward(h, p["query"])[0], config.heads)
    target, _ = content_attention_forward(query, *(split_heads(evicted @ p[name].T, config.heads) for name in ("key", "value")))
    key, key_cache = linear_forward(new, p["key"])
    value, value_cache = linear_forward(new, p["value"])
    out, attention_cache = content_attention_forward(query, split_heads(key, config.heads), split_heads(value, config.heads))
    return ((out - target) ** 2).mean(), (out - target, attention_cache, key_cache, value_cache)


def attention_reconstruction_backward(dloss, cache):
    """Gradient of new; none of the attention parameters."""
    difference, attention_cache, key_cache, value_cache = cache
    dkey, dvalue = content_attention_backward(dloss * 2 * difference / difference.size, attention_cache)
    return linear_backward(merge_heads(dkey), key_cache)[0] + linear_backward(merge_heads(dvalue), value_cache)[0], {}


def auto_encoding_forward(p, config, h, evicted, new):
    """Mean square of evicted - g(new), g a transposed convolution of kernel and stride c (3.2)."""
    flat, cache = linear_forward(new, p["compression.decoder"])  # (B, N/c, cD)
    difference = flat.reshape(evicted.shape) - evicted  # stop: evicted is data
    return (difference**2).mean(), (difference, flat.shape, cache)


def auto_encoding_backward(dloss, cache):
    """Gradients of new and of g."""
    difference, shape, linear_cache = cache
    dnew, ddecoder = linear_backward((dloss * 2 * difference / difference.size).reshape(shape), linear_cache)
    return dnew, {"decoder": ddecoder}


AUXILIARY = {
    "attention_reconstruction": (attention_reconstruction_forward, attention_reconstruction_backward),
    "auto_encoding": (auto_encoding_forward, auto_encoding_backward),
}


def auxiliary_forward(params, config, cache):
    """{name: loss} of every layer's compression, from forward's cache; their sum trains it. Empty where nothing is measured."""
    if config.compressed_memory == 0 or config.compression_loss not in AUXILIARY:
        return {}, []
    losses, caches = {}, []
    for layer, (_, compression_cache, h, pair) in enumerate(cache[1]):
        p = subtree(params, f"layers.{layer}.")
        losses[f"layers.{layer}.compression"], loss_cache = AUXILIARY[config.compression_loss][0](p, config, h, *pair)
        caches.append((compression_cache, loss_cache))
    return losses, caches


def auxiliary_backward(config, dloss, caches):
    """Gradients of the summed auxiliary losses: of the compression's parameters, and of nothing else."""
    grads = {}
    for layer, (compression_cache, loss_cache) in enumerate(caches):
        dnew, dloss_params = AUXILIARY[config.compression_loss][1](dloss, loss_cache)
        _, dparams = COMPRESSIONS[config.compression][1](dnew, compression_cache)  # stop: evicted is data
        grads |= prefixed(f"layers.{layer}.compression.", dparams | dloss_params)
    return grads


def cross_entropy_forward(logits, targets, scored):
    """Summed -log p of targets (B, N) at the scored (B, N) positions, in nats."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))  # (B, N, V)
    of_targets = np.take_along_axis(log_probabilities, targets[..., None], axis=-1)[..., 0]
    return -of_targets[scored].sum(), (log_probabilities, targets, scored)


# loss = -log p_target, p = softmax(logits): dlogits = p - onehot(target)
def cross_entropy_backward(dloss, cache):
    log_probabilities, targets, scored = cache
    one_hot = np.arange(log_probabilities.shape[-1]) == targets[..., None]  # (B, N, V)
    return dloss * (np.exp(log_probabilities) - one_hot) * scored[..., None]


def loss_and_gradients(params, config, segments):
    """Mean loss over a document cut into segments [(tokens, targets)], the gradients of it and of the compression losses.

    Returns (loss, compression loss summed over layers and segments, gradients of their sum, the state each segment read).
    """
    state, caches, states, total, count, compression = initial_state(params, config, len(segments[0][0])), [], [], 0.0, 0, 0.0
    for tokens, targets in segments:
        states.append(state)
        logits, state, cache = forward(params, config, tokens, state)
        loss, loss_cache = cross_entropy_forward(logits, targets, np.ones(targets.shape, bool))
        losses, auxiliary_cache = auxiliary_forward(params, config, cache)
        total, count, compression = total + loss, count + targets.size, compression + sum(losses.values())
        caches.append((cache, loss_cache, auxiliary_cache))
    grads, dstate = {}, None
    for cache, loss_cache, auxiliary_cache in reversed(caches):
        dparams, dstate = backward(params, config, cache, cross_entropy_backward(1 / count, loss_cache), dstate)
        add_into(grads, dparams)
        add_into(grads, auxiliary_backward(config, 1.0, auxiliary_cache))
    return total / count, compression, grads, states


def losses_from(params, config, segments, states):
    """(mean loss, compression loss) of segments that each read its given state: what the gradients above are of."""
    total, compression = 0.0, 0.0
    for (tokens, targets), state in zip(segments, states, strict=True):
        logits, _, cache = forward(params, config, tokens, state)
        total += cross_entropy_forward(logits, targets, np.ones(targets.shape, bool))[0]
        compression += sum(auxiliary_forward(params, config, cache)[0].values())
    return total / sum(targets.size for _, targets in segments), compression


def check_gradients(params, config, segments, rng):
    """Print a row per parameter, its gradient along a random direction against finite differences; returns the largest error.

    The states that segments read stay as they were: they are data. A compression's parameters are held against the compression
    loss, all others against the task loss.
    """
    _, _, grads, states = loss_and_gradients(params, config, segments)
    print(f"{'parameter':<34}{'loss':<13}{'shape':<10} analytic  numeric   relative error")
    worst = 0.0
    for name, value in params.items():
        direction, which = rng.standard_normal(value.shape), int(".compression." in name)
        ends = [losses_from(params | {name: value + h * direction}, config, segments, states)[which] for h in (1e-5, -1e-5)]
        numeric, analytic = (ends[0] - ends[1]) / 2e-5, (grads[name] * direction).sum()
        error = abs(numeric - analytic) / max(abs(numeric), abs(analytic), 1e-6)
        worst = max(worst, error)
        shape, loss = "x".join(map(str, value.shape)), ("task", "compression")[which]
        print(f"{name:<34}{loss:<13}{shape:<10}{analytic:+.6f} {numeric:+.6f} {error:.1e}")
    return worst


def demonstrate():
    """Check gradients against finite differences, then fit a tiny batch; prints what it shows."""
    rng = np.random.default_rng(0)
    config = Config(
        vocabulary=11, width=12, layers=2, heads=2, head_width=5, feed_forward=20, segment=6, memory=6, compressed_memory=6,
        compression_rate=3,
    )  # fmt: skip
    params = init_params(config, rng)
    document = rng.integers(config.vocabulary, size=(2, 25))
    segments = [(document[:, at : at + 6], document[:, at + 1 : at + 7]) for at in range(0, 24, 6)]
    print(f"Compressive Transformer, convolution trained by attention reconstruction; four segments of {config.segment} tokens.")
    worst = check_gradients(params, config, segments, rng)
    print(f"Largest relative error {worst:.1e}: the backward pass written by hand is the derivative of the forward pass.\n")
    if not worst < 1e-4:
        raise SystemExit("gradients disagree with finite differences")
    print("Gradient descent on these 48 predictions of random tokens (there is nothing to learn but the text itself):")
    moments = {name: (np.zeros_like(value), np.zeros_like(value)) for name, value in params.items()}
    for step in range(1, 201):
        loss, compression, grads, states = loss_and_gradients(params, config, segments)
        for name, grad in grads.items():  # Adam
            first, second = moments[name]
            moments[name] = first, second = 0.9 * first + 0.1 * grad, 0.99 * second + 0.01 * grad**2
            params[name] = params[name] - 0.01 * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.99**step)) + 1e-8)
        if step in (1, 10, 50, 200):
            print(f"  step {step:3d}: {loss / np.log(2):.3f} bits per token, compression loss {compression:.4f}")
    fresh, state = initial_state(params, config, 2), states[-1]
    starts = {
        "both memories carried": state,
        "compressed memory cleared": state._replace(compressed=fresh.compressed),
        "both cleared": fresh,
    }
    for label, start in starts.items():
        logits = forward(params, config, segments[-1][0], start)[0]
        nats, _ = cross_entropy_forward(logits, segments[-1][1], np.ones((2, 6), bool))
        print(f"Fourth segment, {label}: {nats / 12 / np.log(2):.3f} bits per token")


if __name__ == "__main__":
    demonstrate()
