"""Block-Recurrent Transformer (Hutchins, Schlag, Wu, Dyer, Neyshabur, 2022), forward and backward in NumPy.

A Transformer reads a document in blocks of W tokens. Attention slides over the last W tokens, so it forgets; one layer
therefore also keeps S state vectors, which it reads with cross-attention and rewrites through a gate after each block.
`forward` takes (tokens, state) to (logits, next state), and `backward` takes the gradient with respect to the next state to the
one with respect to the incoming state, so segments chain into back-propagation through time.

Glossary: code symbol, meaning, paper symbol, shape
    tokens        token ids of one segment of N tokens               x              (B, N)
    states        state vectors of a layer (State: of all R layers)  c_t            (B, S, D), (B, R, S, D)
    key, value    projections of the segment's tokens                               (B, H, N, E)
    keys, values  with the block before, for both directions         K_e, V_e       (B, H, W + N, E)
    query         vertical self-attention (token to token)           Q_e^v          (B, H, N, E)
    cross_query   vertical cross-attention (token to state)          Q_s^v          (B, H, N, E)
    state.key, state.value    projections of states, shared          K_s, V_s       (B, H, S, E)
    state.query               horizontal self-attention (state to state)    Q_s^h   (B, H, S, E)
    state.cross_query         horizontal cross-attention (state to token)   Q_e^h   (B, H, S, E)
    attended      [self; cross] attention, heads concatenated                       (B, S, 2HE)
    hidden        a gate's input: attended, or an MLP's hidden layer h_t            (B, S, 2HE or F)
    z             what the gate may write                            z_t            (B, S, D)

B batch (lanes), N tokens in a segment, W window and block, S states, D width, H heads, E head width, F feed-forward width,
V vocabulary, L layers, R recurrent layers.

Departures and decisions (the paper decides; where it is silent, its authors' code, github.com/google-research/meliad)
     1. LayerNorm with scale and bias, as the paper says; the authors' code has a scale-only RMS norm.
     2. Projections and feed-forward are bias-free (authors' code), starting truncated normal with variance 1/fan_in; the
        gates keep the biases of Eqs. 1-7, of which the code drops b^(z). Tanh on z follows the equations: with the LSTM
        gate (4), not with the fixed one (1). The code applies it exactly in the single configuration, whatever the gate.
     3. All gate weights, W^(z) among them, start at variance 0.1/fan_in (3.5); the code gives W^(z) variance 1/fan_in.
     4. Attention covers exactly the W previous tokens, 1 <= i - j <= W; a token does not attend to itself (authors' code).
     5. Queries and keys have unit length per head, no 1/sqrt(E); a learned scale per head multiplies (q.k + bias). The
        scale starts at `attention_scale`: 10 learns at once under Adam; 1 is the authors' code, under Adafactor.
     6. The T5 bias is one table per layer, on vertical self-attention only; it starts at N(0, 1/buckets) (authors' code).
     7. At a document's start the previous block's keys and values are zeros, unmasked: they take softmax mass.
     8. Horizontal cross-attention sees all 2W keys of the previous and current block: no mask, no bias, no dropout.
     9. Tokens read the state as it was before their own block's update, which keeps the model causal.
    10. The gate carries the raw state; the projections read norm(state) + state IDs. IDs start N(0, 1), the learned
        initial state N(0, 0.1^2).
    11. Dropout: after the tokens' pre-attention norm, on the token self-attention matrix, after the tokens' feed-forward;
        none on states. It acts only when `forward` is given a random generator.
    12. Feedback: the stack runs block by block, every other layer reads K_s, V_s of the state left by the previous block,
        with its own cross_query, scale and wider output. It needs exactly one recurrent layer: the paper defines no other.
    13. Embedding and output are tied, N(0, 1); logits are divided by sqrt(D) (authors' code).
    14. The state is cached across segments without gradient (3.1, 3.2): pass dnext_state=None. Passing the gradient on
        (horizon > 1) is an extension.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

NORM_EPSILON = 1e-6  # under the square roots of layer_norm and unit_norm


@dataclass(frozen=True)
class Config:
    """Sizes and variants of the model; impossible combinations raise ValueError naming the field.

    Fields:
        vocabulary: V, number of token ids
        width: D, model width
        layers: L, number of layers
        heads: H, attention heads
        head_width: E, width of a head
        feed_forward: F, width of the feed-forward hidden layer
        window: W, tokens that attention reaches back, and tokens in a block
        segment: N, tokens in a segment, a multiple of the window (equal to it: Transformer-XL style)
        recurrent_layers: recurrent layers, counted from 1; none gives the Slide baseline
        states: S, recurrent state vectors
        gate: the gate on the states, fixed (Eqs. 1-3) or lstm (Eqs. 4-7)
        configuration: where the gates stand, dual, single or skip (section 3.6)
        feedback: let every layer read the state that the previous block left (section 3.7)
        buckets: T5 relative position buckets
        max_distance: distance at and beyond which all positions use the last bucket
        attention_scale: starting value of the learned scales of query-key normalised attention
        dropout: dropout rate in training, 0 to below 1
    """

    vocabulary: int = 256
    width: int = 128
    layers: int = 4
    heads: int = 4
    head_width: int = 32
    feed_forward: int = 512
    window: int = 64
    segment: int = 512
    recurrent_layers: tuple[int, ...] = (3,)
    states: int = 64
    gate: str = "fixed"
    configuration: str = "skip"
    feedback: bool = False
    buckets: int = 32
    max_distance: int = 128
    attention_scale: float = 10.0
    dropout: float = 0.05

    def __post_init__(self):
        for name in ("vocabulary", "width", "layers", "heads", "head_width", "feed_forward", "window", "segment", "states"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.segment % self.window:
            nearest = max(1, round(self.segment / self.window)) * self.window
            raise ValueError(f"segment {self.segment} is not a multiple of window {self.window}; the nearest is {nearest}")
        if any(not 1 <= layer <= self.layers for layer in self.recurrent_layers):
            raise ValueError(f"recurrent_layers names {self.recurrent_layers}; they must lie in 1..{self.layers}")
        if tuple(sorted(set(self.recurrent_layers))) != self.recurrent_layers:
            raise ValueError(f"recurrent_layers {self.recurrent_layers} must be a tuple, ascending, each layer once")
        if self.gate not in ("fixed", "lstm"):
            raise ValueError(f"gate is {self.gate!r}; it must be 'fixed' or 'lstm'")
        if self.configuration not in ("dual", "single", "skip"):
            raise ValueError(f"configuration is {self.configuration!r}; it must be 'dual', 'single' or 'skip'")
        if self.feedback and len(self.recurrent_layers) != 1:
            raise ValueError(f"feedback needs exactly one recurrent layer; recurrent_layers is {self.recurrent_layers}")
        if self.buckets < 2 or self.buckets % 2:
            raise ValueError(f"buckets is {self.buckets}; it must be even and at least 2")
        if self.max_distance <= self.buckets // 2:
            raise ValueError(f"max_distance {self.max_distance} must exceed half of buckets {self.buckets}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be at least 0 and below 1")
        if not 0 < self.attention_scale < np.inf:
            raise ValueError(f"attention_scale is {self.attention_scale}; it must be positive and finite")


class State(NamedTuple):
    """What a segment hands to the next one; axis 0 of every field is the lane."""

    states: np.ndarray  # (B, R, S, D)
    keys: np.ndarray  # (B, L, H, W, E), the last block's, unit length
    values: np.ndarray  # (B, L, H, W, E)


def reads_state(config, layer):
    """Whether layer (from 0) cross-attends to the recurrent state."""
    return config.feedback or layer + 1 in config.recurrent_layers


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


def init_gate(config, rng, fan_in):
    """Section 3.5: gate biases N(0, 0.1^2), gate weights truncated normal with variance 0.1/fan_in."""
    matrices = {"fixed": "z", "lstm": "zif"}[config.gate]
    gate = {f"weight_{m}": truncated_normal(rng, (config.width, fan_in), (0.1 / fan_in) ** 0.5) for m in matrices}
    biases = {"fixed": "zg", "lstm": "zif"}[config.gate]
    return gate | {f"bias_{m}": rng.normal(0, 0.1, config.width) for m in biases}


def init_recurrence(config, rng):
    """Parameters of the horizontal direction of one recurrent layer."""
    d, he = config.width, config.heads * config.head_width
    p = {"initial": rng.normal(0, 0.1, (config.states, d)), "ids": rng.normal(0, 1, (config.states, d))}
    p |= prefixed("norm.", init_norm(d))
    p |= {name: init_linear(rng, he, d) for name in ("key", "value", "query", "cross_query")}
    p |= {name: np.full(config.heads, config.attention_scale) for name in ("scale", "cross_scale")}
    if config.configuration != "single":
        p |= prefixed("attention_gate.", init_gate(config, rng, 2 * he))
    if config.configuration == "dual":
        p |= prefixed("mlp_norm.", init_norm(d))
    if config.configuration != "skip":
        p["mlp_hidden"] = init_linear(rng, config.feed_forward, 2 * he if config.configuration == "single" else d)
        p |= prefixed("mlp_gate.", init_gate(config, rng, config.feed_forward))
    return p


def init_layer(config, rng, layer):
    d, h, he = config.width, config.heads, config.heads * config.head_width
    p = prefixed("norm.", init_norm(d))
    p |= {name: init_linear(rng, he, d) for name in ("key", "value", "query")}
    p["scale"] = np.full(h, config.attention_scale)
    p["position_bias"] = rng.normal(0, config.buckets**-0.5, (h, config.buckets))
    if reads_state(config, layer):
        p |= {"cross_query": init_linear(rng, he, d), "cross_scale": np.full(h, config.attention_scale)}
    p["output"] = init_linear(rng, d, 2 * he if reads_state(config, layer) else he)
    p |= prefixed("mlp_norm.", init_norm(d))
    p |= {"mlp_hidden": init_linear(rng, config.feed_forward, d), "mlp_output": init_linear(rng, d, config.feed_forward)}
    if layer + 1 in config.recurrent_layers:
        p |= prefixed("state.", init_recurrence(config, rng))
    return p


def init_params(config, rng):
    """All parameters as {dotted name: float64 array}; matrices are (out, in)."""
    params = {"embedding": rng.normal(0, 1, (config.vocabulary, config.width))}
    for layer in range(config.layers):
        params |= prefixed(f"layers.{layer}.", init_layer(config, rng, layer))
    return params | prefixed("final_norm.", init_norm(config.width))


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
    """What a document starts with: the learned states, and zero keys and values (decision 7)."""
    shape = (batch, config.layers, config.heads, config.window, config.head_width)
    states = np.zeros((batch, len(config.recurrent_layers), config.states, config.width))
    for r, layer in enumerate(config.recurrent_layers):
        states[:, r] = params[f"layers.{layer - 1}.state.initial"]
    return State(states, np.zeros(shape), np.zeros(shape))


def initial_state_backward(config, dstate):
    """Gradient into the learned initial states, summed over lanes: zero dstate in lanes that did not start."""
    return {f"layers.{layer - 1}.state.initial": dstate.states[:, r].sum(0) for r, layer in enumerate(config.recurrent_layers)}


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


def unit_norm_forward(x):
    """Unit length over the last axis: query-key normalisation (3.3)."""
    inverse = 1 / np.sqrt((x**2).sum(-1, keepdims=True) + NORM_EPSILON)
    unit = x * inverse
    return unit, (unit, inverse)


# y = x / |x|: dx = (dy - y (y·dy)) / |x|
def unit_norm_backward(dunit, cache):
    unit, inverse = cache
    return inverse * (dunit - unit * (dunit * unit).sum(-1, keepdims=True))


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


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def split_heads(x, heads):
    """(B, N, H*E) -> (B, H, N, E)"""
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)


def merge_heads(x):
    """(B, H, N, E) -> (B, N, H*E), the adjoint of split_heads."""
    batch, heads, length, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, heads * width)


def head_projection_forward(x, weight, heads, normalise):
    """Project to heads; keys and queries are then brought to unit length."""
    projected, linear_cache = linear_forward(x, weight)
    out = split_heads(projected, heads)  # (B, H, N, E)
    if not normalise:
        return out, (linear_cache, None)
    out, norm_cache = unit_norm_forward(out)
    return out, (linear_cache, norm_cache)


def head_projection_backward(dout, cache):
    linear_cache, norm_cache = cache
    if norm_cache is not None:
        dout = unit_norm_backward(dout, norm_cache)
    return linear_backward(merge_heads(dout), linear_cache)


def attention_forward(query, key, value, scale, bias=0.0, mask=None, rate=0.0, rng=None):
    """softmax((q.k + bias) scale) v: query (B, H, N, E), key, value (B, H, K, E), scale (H,), bias (H, N, K), mask (N, K)."""
    similarity = query @ key.swapaxes(-1, -2) + bias  # (B, H, N, K)
    scores = similarity * scale[:, None, None]
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights, _ = softmax_forward(scores)
    dropped, keep = dropout_forward(weights, rate, rng)
    return dropped @ value, (query, key, value, scale, similarity, weights, dropped, keep)


def attention_backward(dout, cache):
    """Gradients of query, key, value, scale (H,) and the bias (H, N, K)."""
    query, key, value, scale, similarity, weights, dropped, keep = cache
    dvalue = dropped.swapaxes(-1, -2) @ dout
    dweights = dropout_backward(dout @ value.swapaxes(-1, -2), keep)
    dscores = softmax_backward(dweights, weights)  # exactly zero where masked, since the weights are
    dscale = (dscores * similarity).sum((0, 2, 3))
    dsimilarity = dscores * scale[:, None, None]
    return dsimilarity @ key, dsimilarity.swapaxes(-1, -2) @ query, dvalue, dscale, dsimilarity.sum(0)


def tile_distance(window):
    """i - j for the W queries of a block against the 2W keys of the previous and the same block (Figure 2)."""
    return np.arange(window)[:, None] + window - np.arange(2 * window)[None, :]  # (W, 2W)


def tile_mask(window):
    """A token sees exactly the W tokens before it: 1 <= i - j <= W (3.1)."""
    distance = tile_distance(window)
    return (distance >= 1) & (distance <= window)


def position_bucket(distance, buckets, max_distance):
    """T5's causal buckets: one per distance up to half of them, then logarithmic up to max_distance."""
    exact = buckets // 2
    distance = np.maximum(distance, 0)
    ratio = np.log(np.maximum(distance, exact) / exact) / np.log(max_distance / exact)
    coarse = np.minimum(exact + (ratio * (buckets - exact)).astype(int), buckets - 1)
    return np.where(distance < exact, distance, coarse)


def position_bias_forward(table, window, max_distance):
    """Bias of every query-key pair of a tile from the table (H, buckets)."""
    bucket = position_bucket(tile_distance(window), table.shape[1], max_distance)  # (W, 2W)
    return table[:, bucket], (bucket, table)  # (H, W, 2W)


def position_bias_backward(dbias, cache):
    bucket, table = cache
    dtable = np.zeros_like(table)
    for b in range(table.shape[1]):
        dtable[:, b] = dbias[:, bucket == b].sum(-1)
    return dtable


def block_slice(block, window):
    """Block's own tokens in the segment."""
    return slice(block * window, (block + 1) * window)


def tile_slice(block, window):
    """Previous and own block of `block` in keys that begin with the previous segment's last block."""
    return slice(block * window, (block + 2) * window)


def sliding_attention_forward(p, config, query, keys, values, rng):
    """Each block of query (B, H, N, E) attends to its 2W keys of (B, H, W + N, E): tiles of W x 2W (3.1, Figure 2)."""
    w, mask = config.window, tile_mask(config.window)
    bias, bias_cache = position_bias_forward(p["position_bias"], w, config.max_distance)
    outs, caches = [], []
    for block in range(query.shape[2] // w):
        near = tile_slice(block, w)
        tile = attention_forward(
            query[:, :, block_slice(block, w)], keys[:, :, near], values[:, :, near], p["scale"], bias, mask, config.dropout, rng
        )
        outs.append(tile[0])
        caches.append(tile[1])
    return np.concatenate(outs, axis=2), (caches, bias_cache)


def sliding_attention_backward(dout, cache, dkeys, dvalues):
    """Adds to dkeys, dvalues (B, H, W + N, E); returns dquery and the gradients of scale and position_bias."""
    caches, bias_cache = cache
    dquery, dscale, dbias = np.empty_like(dout), 0.0, 0.0
    w = dout.shape[2] // len(caches)
    for block, tile_cache in enumerate(caches):
        own, near = block_slice(block, w), tile_slice(block, w)
        dquery[:, :, own], dkey, dvalue, dscale_tile, dbias_tile = attention_backward(dout[:, :, own], tile_cache)
        dkeys[:, :, near] += dkey
        dvalues[:, :, near] += dvalue
        dscale, dbias = dscale + dscale_tile, dbias + dbias_tile
    return dquery, {"scale": dscale, "position_bias": position_bias_backward(dbias, bias_cache)}


def fixed_gate_forward(p, carry, hidden):
    """A learned, constant mixture of the carry and the candidate."""
    projected, linear_cache = linear_forward(hidden, p["weight_z"])
    z = projected + p["bias_z"]  # Eq. 1
    g = sigmoid(p["bias_g"])  # Eq. 2
    return carry * g + z * (1 - g), (linear_cache, carry, z, g)  # Eq. 3


def fixed_gate_backward(dout, cache):
    linear_cache, carry, z, g = cache
    dz = dout * (1 - g)
    dhidden, dweight = linear_backward(dz, linear_cache)
    dg = (dout * (carry - z)).sum((0, 1))
    return dout * g, dhidden, {"weight_z": dweight, "bias_z": dz.sum((0, 1)), "bias_g": dg * g * (1 - g)}


def lstm_gate_forward(p, carry, hidden):
    """Input and forget gates that depend on the hidden layer; -1 and +1 bias them to remember (3.5)."""
    linear = {m: linear_forward(hidden, p[f"weight_{m}"]) for m in "zif"}
    z = np.tanh(linear["z"][0] + p["bias_z"])  # Eq. 4
    i = sigmoid(linear["i"][0] + p["bias_i"] - 1)  # Eq. 5
    f = sigmoid(linear["f"][0] + p["bias_f"] + 1)  # Eq. 6
    return carry * f + z * i, ({m: linear[m][1] for m in "zif"}, carry, z, i, f)  # Eq. 7


def lstm_gate_backward(dout, cache):
    linear_caches, carry, z, i, f = cache
    before = {"z": dout * i * (1 - z**2), "i": dout * z * i * (1 - i), "f": dout * carry * f * (1 - f)}
    dhidden, grads = 0.0, {}
    for m, dm in before.items():
        dhidden_m, grads[f"weight_{m}"] = linear_backward(dm, linear_caches[m])
        dhidden = dhidden + dhidden_m
        grads[f"bias_{m}"] = dm.sum((0, 1))
    return dout * f, dhidden, grads


GATES = {"fixed": (fixed_gate_forward, fixed_gate_backward), "lstm": (lstm_gate_forward, lstm_gate_backward)}


def state_projection_forward(p, config, states):
    """Unit keys and queries, and values, of norm(states) + state IDs (3.3): {name: (B, H, S, E)}."""
    normed, norm_cache = layer_norm_forward(states, p["norm.scale"], p["norm.bias"])
    identified = normed + p["ids"]  # (B, S, D)
    names = ("key", "value", "query", "cross_query")
    done = {name: head_projection_forward(identified, p[name], config.heads, name != "value") for name in names}
    return {name: done[name][0] for name in names}, (norm_cache, {name: done[name][1] for name in names})


def state_projection_backward(dprojected, cache):
    """Takes gradients of any of the four projections; returns dstates and parameter gradients."""
    norm_cache, caches = cache
    didentified, grads = 0.0, {}
    for name, dout in dprojected.items():
        dx, grads[name] = head_projection_backward(dout, caches[name])
        didentified = didentified + dx
    dstates, dnorm = layer_norm_backward(didentified, norm_cache)
    return dstates, grads | {"ids": didentified.sum(0)} | prefixed("norm.", dnorm)


def state_mlp_forward(p, config, carry, x):
    """relu hidden layer whose output layer is the gate's candidate (3.4)."""
    before, linear_cache = linear_forward(x, p["mlp_hidden"])
    hidden = np.maximum(before, 0)
    out, gate_cache = GATES[config.gate][0](subtree(p, "mlp_gate."), carry, hidden)
    return out, (linear_cache, hidden, gate_cache)


def state_mlp_backward(config, dout, cache):
    linear_cache, hidden, gate_cache = cache
    dcarry, dhidden, dgate = GATES[config.gate][1](dout, gate_cache)
    dx, dweight = linear_backward(dhidden * (hidden > 0), linear_cache)
    return dcarry, dx, {"mlp_hidden": dweight} | prefixed("mlp_gate.", dgate)


def gating_forward(p, config, states, attended):
    """From states (B, S, D) and attended (B, S, 2HE) to the next states, by gate configuration (3.6)."""
    if config.configuration == "single":  # attention feeds the MLP directly
        out, mlp_cache = state_mlp_forward(p, config, states, attended)
        return out, (None, None, mlp_cache)
    middle, gate_cache = GATES[config.gate][0](subtree(p, "attention_gate."), states, attended)
    if config.configuration == "skip":  # no MLP
        return middle, (gate_cache, None, None)
    normed, norm_cache = layer_norm_forward(middle, p["mlp_norm.scale"], p["mlp_norm.bias"])
    out, mlp_cache = state_mlp_forward(p, config, middle, normed)  # dual: a gate for each residual (Figure 1)
    return out, (gate_cache, norm_cache, mlp_cache)


def gating_backward(config, dout, cache):
    gate_cache, norm_cache, mlp_cache = cache
    if config.configuration == "single":
        return state_mlp_backward(config, dout, mlp_cache)
    grads = {}
    if config.configuration == "dual":
        dmiddle, dnormed, grads = state_mlp_backward(config, dout, mlp_cache)
        dnorm_input, dnorm = layer_norm_backward(dnormed, norm_cache)
        dout = dmiddle + dnorm_input
        grads |= prefixed("mlp_norm.", dnorm)
    dstates, dattended, dgate = GATES[config.gate][1](dout, gate_cache)
    return dstates, dattended, grads | prefixed("attention_gate.", dgate)


def state_update_forward(p, config, states, projected, keys, values):
    """The horizontal direction on one block: states see each other and the 2W tokens, then pass the gate (3.2)."""
    own, own_cache = attention_forward(projected["query"], projected["key"], projected["value"], p["scale"])
    cross, cross_cache = attention_forward(projected["cross_query"], keys, values, p["cross_scale"])
    attended = np.concatenate([merge_heads(own), merge_heads(cross)], axis=-1)  # (B, S, 2HE)
    next_states, gating_cache = gating_forward(p, config, states, attended)
    return next_states, (own_cache, cross_cache, gating_cache)


def state_update_backward(config, dnext_states, cache):
    """Returns dstates (the carry), {name: dprojected}, dkeys and dvalues of the tile, parameter gradients."""
    own_cache, cross_cache, gating_cache = cache
    dstates, dattended, grads = gating_backward(config, dnext_states, gating_cache)
    down, dcross = np.split(dattended, 2, axis=-1)
    dquery, dkey, dvalue, grads["scale"], _ = attention_backward(split_heads(down, config.heads), own_cache)
    dcross_query, dkeys, dvalues, grads["cross_scale"], _ = attention_backward(split_heads(dcross, config.heads), cross_cache)
    dprojected = {"query": dquery, "key": dkey, "value": dvalue, "cross_query": dcross_query}
    return dstates, dprojected, dkeys, dvalues, grads


def recurrence_forward(p, config, cross_query, cross_scale, keys, values, states):
    """Run the cell over the blocks: tokens read the state (vertical), then the state reads the tokens (horizontal)."""
    w, outs, caches = config.window, [], []
    for block in range(cross_query.shape[2] // w):
        near = tile_slice(block, w)
        projected, projection_cache = state_projection_forward(p, config, states)
        read, read_cache = attention_forward(
            cross_query[:, :, block_slice(block, w)], projected["key"], projected["value"], cross_scale
        )
        states, update_cache = state_update_forward(p, config, states, projected, keys[:, :, near], values[:, :, near])
        outs.append(read)
        caches.append((projection_cache, read_cache, update_cache))
    return np.concatenate(outs, axis=2), states, caches


def recurrence_backward(config, dout, dstates, caches, dkeys, dvalues):
    """Adds to dkeys, dvalues; returns dcross_query, dcross_scale, dstates, and the gradients of the state's parameters."""
    w, grads, dcross_query, dcross_scale = config.window, {}, np.empty_like(dout), 0.0
    for block in reversed(range(len(caches))):
        projection_cache, read_cache, update_cache = caches[block]
        own, near = block_slice(block, w), tile_slice(block, w)
        dcarry, dprojected, dkey, dvalue, dupdate = state_update_backward(config, dstates, update_cache)
        dkeys[:, :, near] += dkey
        dvalues[:, :, near] += dvalue
        dcross_query[:, :, own], dstate_key, dstate_value, dscale, _ = attention_backward(dout[:, :, own], read_cache)
        dprojected["key"] = dprojected["key"] + dstate_key  # K_s and V_s serve both directions
        dprojected["value"] = dprojected["value"] + dstate_value
        dinput, dprojection = state_projection_backward(dprojected, projection_cache)
        dstates = dcarry + dinput
        dcross_scale = dcross_scale + dscale
        add_into(grads, dupdate)
        add_into(grads, dprojection)
    return dcross_query, dcross_scale, dstates, grads


def token_projection_forward(p, config, x, rng):
    """norm, dropout, then unit key and queries, and value, of tokens x (B, N, D): {name: (B, H, N, E)}."""
    normed, norm_cache = layer_norm_forward(x, p["norm.scale"], p["norm.bias"])
    normed, keep = dropout_forward(normed, config.dropout, rng)
    names = [name for name in ("key", "value", "query", "cross_query") if name in p]
    done = {name: head_projection_forward(normed, p[name], config.heads, name != "value") for name in names}
    return {name: done[name][0] for name in names}, (norm_cache, keep, {name: done[name][1] for name in names})


def token_projection_backward(dprojected, cache):
    norm_cache, keep, caches = cache
    dnormed, grads = 0.0, {}
    for name, dout in dprojected.items():
        dx, grads[name] = head_projection_backward(dout, caches[name])
        dnormed = dnormed + dx
    dx, dnorm = layer_norm_backward(dropout_backward(dnormed, keep), norm_cache)
    return dx, grads | prefixed("norm.", dnorm)


def token_mlp_forward(p, config, x, rng):
    """x + dropout(W_2 relu(W_1 norm(x)))"""
    normed, norm_cache = layer_norm_forward(x, p["mlp_norm.scale"], p["mlp_norm.bias"])
    before, hidden_cache = linear_forward(normed, p["mlp_hidden"])
    hidden = np.maximum(before, 0)  # (B, N, F)
    out, output_cache = linear_forward(hidden, p["mlp_output"])
    out, keep = dropout_forward(out, config.dropout, rng)
    return x + out, (norm_cache, hidden_cache, hidden, output_cache, keep)


def token_mlp_backward(dy, cache):
    norm_cache, hidden_cache, hidden, output_cache, keep = cache
    dhidden, doutput = linear_backward(dropout_backward(dy, keep), output_cache)
    dnormed, dweight = linear_backward(dhidden * (hidden > 0), hidden_cache)
    dx, dnorm = layer_norm_backward(dnormed, norm_cache)
    return dy + dx, {"mlp_hidden": dweight, "mlp_output": doutput} | prefixed("mlp_norm.", dnorm)


def layer_forward(p, config, x, previous, states, shared, rng):
    """One layer over blocks of tokens x (B, N, D).

    previous is the pair of keys and values (B, H, W, E) of the block before. A recurrent layer has states (B, S, D), any
    other None; under feedback the others read the pair `shared` (K_s, V_s), else None.
    Returns the output, the last block's (keys, values), the next states, and the cache.
    """
    projected, projection_cache = token_projection_forward(p, config, x, rng)
    keys = np.concatenate([previous[0], projected["key"]], axis=2)  # (B, H, W + N, E)
    values = np.concatenate([previous[1], projected["value"]], axis=2)
    attended, self_cache = sliding_attention_forward(p, config, projected["query"], keys, values, rng)
    attended, cross_cache = merge_heads(attended), None
    if states is not None:
        cross, states, cross_cache = recurrence_forward(
            subtree(p, "state."), config, projected["cross_query"], p["cross_scale"], keys, values, states
        )
    elif shared is not None:
        cross, cross_cache = attention_forward(projected["cross_query"], *shared, p["cross_scale"])
    if cross_cache is not None:
        attended = np.concatenate([attended, merge_heads(cross)], axis=-1)  # (B, N, 2HE)
    out, output_cache = linear_forward(attended, p["output"])
    y, mlp_cache = token_mlp_forward(p, config, x + out, rng)
    last = (keys[:, :, -config.window :], values[:, :, -config.window :])
    return y, last, states, (projection_cache, self_cache, cross_cache, output_cache, mlp_cache, keys.shape)


def layer_backward(config, dy, dlast, dstates, cache):
    """dlast: gradient of the last block's (keys, values); dstates: of the next states, None unless recurrent.

    Returns dx, the gradients of previous, states and shared (None where there were none), and the parameters' gradients.
    """
    projection_cache, self_cache, cross_cache, output_cache, mlp_cache, keys_shape = cache
    dx, grads = token_mlp_backward(dy, mlp_cache)
    dattended, grads["output"] = linear_backward(dx, output_cache)
    dkeys, dvalues = np.zeros(keys_shape), np.zeros(keys_shape)
    dkeys[:, :, -config.window :] += dlast[0]
    dvalues[:, :, -config.window :] += dlast[1]
    dprojected, dshared = {}, None
    if cross_cache is not None:
        dattended, dcross = np.split(dattended, 2, axis=-1)
        dcross = split_heads(dcross, config.heads)
        if dstates is not None:
            dprojected["cross_query"], grads["cross_scale"], dstates, dstate_params = recurrence_backward(
                config, dcross, dstates, cross_cache, dkeys, dvalues
            )
            grads |= prefixed("state.", dstate_params)
        else:
            dprojected["cross_query"], *dshared, grads["cross_scale"], _ = attention_backward(dcross, cross_cache)
    dprojected["query"], dself = sliding_attention_backward(split_heads(dattended, config.heads), self_cache, dkeys, dvalues)
    dprojected |= {"key": dkeys[:, :, config.window :], "value": dvalues[:, :, config.window :]}
    dinput, dprojection = token_projection_backward(dprojected, projection_cache)
    dprevious = (dkeys[:, :, : config.window], dvalues[:, :, : config.window])
    return dx + dinput, dprevious, dstates, dshared, grads | dself | dprojection


def stack_forward(params, config, x, state, rng):
    """All layers over the blocks of x (B, N, D); with feedback x is one block (3.7)."""
    shared, shared_cache = None, None
    if config.feedback:
        owner = subtree(params, f"layers.{config.recurrent_layers[0] - 1}.state.")
        projected, shared_cache = state_projection_forward(owner, config, state.states[:, 0])
        shared = (projected["key"], projected["value"])
    states, keys, values, caches = [], [], [], []
    for layer in range(config.layers):
        recurrent = layer + 1 in config.recurrent_layers
        own = state.states[:, config.recurrent_layers.index(layer + 1)] if recurrent else None
        previous = (state.keys[:, layer], state.values[:, layer])
        x, last, next_states, cache = layer_forward(subtree(params, f"layers.{layer}."), config, x, previous, own, shared, rng)
        keys.append(last[0])
        values.append(last[1])
        caches.append(cache)
        if recurrent:
            states.append(next_states)
    states = np.stack(states, axis=1) if states else state.states  # (B, R, S, D)
    return x, State(states, np.stack(keys, axis=1), np.stack(values, axis=1)), (caches, shared_cache)


def stack_backward(config, dy, dnext, cache):
    caches, shared_cache = cache
    grads, dstate = {}, State(*(np.zeros_like(field) for field in dnext))
    dshared_key, dshared_value = 0.0, 0.0
    for layer in reversed(range(config.layers)):
        r = config.recurrent_layers.index(layer + 1) if layer + 1 in config.recurrent_layers else None
        dlast = (dnext.keys[:, layer], dnext.values[:, layer])
        dnext_states = None if r is None else dnext.states[:, r]
        dy, dprevious, dstates, dshared, dlayer = layer_backward(config, dy, dlast, dnext_states, caches[layer])
        dstate.keys[:, layer], dstate.values[:, layer] = dprevious
        if r is not None:
            dstate.states[:, r] = dstates
        if dshared is not None:
            dshared_key, dshared_value = dshared_key + dshared[0], dshared_value + dshared[1]
        grads |= prefixed(f"layers.{layer}.", dlayer)
    if shared_cache is not None and config.layers > 1:
        dstates, downer = state_projection_backward({"key": dshared_key, "value": dshared_value}, shared_cache)
        dstate.states[:, 0] += dstates
        add_into(grads, prefixed(f"layers.{config.recurrent_layers[0] - 1}.state.", downer))
    return dy, dstate, grads


def forward(params, config, tokens, state, rng=None):
    """Read one segment.

    tokens (B, N) of ids below V, N a multiple of the window; state from `initial_state` or the segment before; rng turns
    dropout on. Returns logits (B, N, V), where position i predicts token i + 1, the next state, and the cache for `backward`.
    Raises ValueError if N is not a positive multiple of the window.
    """
    n, w = tokens.shape[1], config.window
    if n == 0 or n % w:
        raise ValueError(f"a segment of {n} tokens is not a positive multiple of window {w}; pad it")
    x = params["embedding"][tokens]  # (B, N, D)
    spans = [block_slice(block, w) for block in range(n // w)] if config.feedback else [slice(0, n)]
    outs, caches = [], []
    for span in spans:
        y, state, cache = stack_forward(params, config, x[:, span], state, rng)
        outs.append(y)
        caches.append(cache)
    normed, norm_cache = layer_norm_forward(np.concatenate(outs, axis=1), params["final_norm.scale"], params["final_norm.bias"])
    logits, output_cache = linear_forward(normed * config.width**-0.5, params["embedding"])  # (B, N, V)
    return logits, state, (tokens, spans, caches, norm_cache, output_cache)


def backward(params, config, cache, dlogits, dnext_state=None):
    """Gradients of the parameters and of the incoming state, from those of the logits and of the next state.

    dnext_state None stops the gradient at the segment's end: "the final set of state vectors from the last block are stored
    in a non-differentiable cache" (3.2).
    """
    tokens, spans, caches, norm_cache, output_cache = cache
    if dnext_state is None:
        zero = initial_state(params, config, len(tokens))
        dnext_state = State(*(np.zeros_like(field) for field in zero))
    dnormed, dembedding = linear_backward(dlogits, output_cache)
    dy, dnorm = layer_norm_backward(dnormed * config.width**-0.5, norm_cache)
    grads, dx, dstate = prefixed("final_norm.", dnorm), np.empty_like(dy), dnext_state
    for span, span_cache in zip(reversed(spans), reversed(caches), strict=True):
        dx[:, span], dstate, dstack = stack_backward(config, dy[:, span], dstate, span_cache)
        add_into(grads, dstack)
    np.add.at(dembedding, tokens, dx)  # the tied embedding's second gradient
    add_into(grads, {"embedding": dembedding})
    for name in initial_state_backward(config, dstate):
        grads[name] = np.zeros_like(params[name])  # reached only by lanes that start here: see initial_state_backward
    return grads, dstate


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
    """Mean loss over a document cut into segments [(tokens, targets)], and its gradients through all of them."""
    state, caches, total, count = initial_state(params, config, len(segments[0][0])), [], 0.0, 0
    for tokens, targets in segments:
        logits, state, cache = forward(params, config, tokens, state)
        loss, loss_cache = cross_entropy_forward(logits, targets, np.ones(targets.shape, bool))
        total, count = total + loss, count + targets.size
        caches.append((cache, loss_cache))
    grads, dstate = {}, None
    for cache, loss_cache in reversed(caches):
        dparams, dstate = backward(params, config, cache, cross_entropy_backward(1 / count, loss_cache), dstate)
        add_into(grads, dparams)
    add_into(grads, initial_state_backward(config, dstate))
    return total / count, grads


def demonstrate():
    """Check gradients against finite differences, then fit a tiny batch; prints what it shows."""
    rng = np.random.default_rng(0)
    config = Config(
        vocabulary=11, width=12, layers=3, heads=2, head_width=5, feed_forward=20, window=4, segment=12,
        recurrent_layers=(2,), states=3, buckets=6, max_distance=5, dropout=0.0,
    )  # fmt: skip
    params = init_params(config, rng)
    document = rng.integers(config.vocabulary, size=(2, 25))
    segments = [(document[:, at : at + 12], document[:, at + 1 : at + 13]) for at in (0, 12)]
    loss, grads = loss_and_gradients(params, config, segments)
    print("Block-Recurrent Transformer, fixed gate, skip configuration; two segments of three blocks, back-propagated as one.")
    print(f"{'parameter':<38}{'shape':<10} analytic  numeric   relative error")
    worst = 0.0
    for name, value in params.items():
        direction = rng.standard_normal(value.shape)
        shifted = [loss_and_gradients(params | {name: value + h * direction}, config, segments)[0] for h in (1e-5, -1e-5)]
        numeric, analytic = (shifted[0] - shifted[1]) / 2e-5, (grads[name] * direction).sum()
        error = abs(numeric - analytic) / max(abs(numeric), abs(analytic), 1e-6)
        worst = max(worst, error)
        print(f"{name:<38}{'x'.join(map(str, value.shape)):<10}{analytic:+.6f} {numeric:+.6f} {error:.1e}")
    print(f"Largest relative error {worst:.1e}: the backward pass written by hand is the derivative of the forward pass.\n")
    if not worst < 1e-4:
        raise SystemExit("gradients disagree with finite differences")
    print("Gradient descent on these 48 predictions of random tokens (there is nothing to learn but the text itself):")
    moments = {name: (np.zeros_like(value), np.zeros_like(value)) for name, value in params.items()}
    for step in range(1, 151):
        loss, grads = loss_and_gradients(params, config, segments)
        for name, grad in grads.items():  # Adam
            first, second = moments[name]
            moments[name] = first, second = 0.9 * first + 0.1 * grad, 0.99 * second + 0.01 * grad**2
            params[name] = params[name] - 0.01 * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.99**step)) + 1e-8)
        if step in (1, 10, 50, 150):
            print(f"  step {step:3d}: {loss / np.log(2):.3f} bits per token (uniform: {np.log2(config.vocabulary):.3f})")
    fresh, state = initial_state(params, config, 2), forward(params, config, segments[0][0], initial_state(params, config, 2))[1]
    starts = {
        "state and cached block carried": state,
        "states cleared": state._replace(states=fresh.states),
        "both cleared": fresh,
    }
    for label, start in starts.items():
        logits = forward(params, config, segments[1][0], start)[0]
        nats, _ = cross_entropy_forward(logits, segments[1][1], np.ones((2, 12), bool))
        print(f"Second segment, {label}: {nats / 24 / np.log(2):.3f} bits per token")


if __name__ == "__main__":
    demonstrate()
