"""Block-Recurrent Transformer (Hutchins, Schlag, Wu, Dyer, Neyshabur, 2022) in NumPy.

A Transformer reads a document in blocks of W tokens. Attention slides over the previous W tokens,
so it forgets. One layer therefore also keeps S state vectors: tokens read them with
cross-attention, and a gate rewrites them after each block. `forward` maps (tokens, state) to
(logits, next state). `backward` maps the gradient of the next state to that of the incoming state,
so segments chain into back-propagation through time. `params` are all parameters, {dotted name:
array}, and `p` those of one part, without its prefix. Variants: reference/variants/.

Glossary: code symbol, meaning, paper symbol, shape
    tokens        token ids of one segment; below, their vectors are x          (B, N); x: (B, N, D)
    states        state vectors of a layer; in State (B, R, S, D)      c_t       (B, S, D)
    keys, values  of the previous block, then of the segment's tokens  K_e, V_e  (B, H, W + N, E)
    query         vertical self-attention (token to token)             Q_e^v     (B, H, N, E)
    cross_query   vertical cross-attention (token to state)            Q_s^v     (B, H, N, E)
    and below a recurrent layer's `state.`, projected from its states:
    key, value    read by tokens and by states                         K_s, V_s  (B, H, S, E)
    query         horizontal self-attention (state to state)           Q_s^h     (B, H, S, E)
    cross_query   horizontal cross-attention (state to token)          Q_e^h     (B, H, S, E)
    attended      [self; cross] attention, heads concatenated                    (B, S, 2HE)
    hidden        a gate's input: attended, or an MLP's hidden layer   h_t       (B, S, 2HE or F)
    z             what the gate may write                              z_t       (B, S, D)

B batch (lanes), N tokens in a segment, W window and block, S states, D width, H heads, E head
width, F feed-forward width, V vocabulary, L layers, R recurrent layers, K keys. Layers are counted
from 1, arrays and parameters' names from 0. Decisions: docs/decisions/block_recurrent.md.
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
        width: D, model width
        layers: L, number of layers
        heads: H, attention heads
        head_width: E, width of a head
        feed_forward: F, width of the feed-forward hidden layer
        window: W, tokens that attention reaches back, and tokens in a block
        segment: N, tokens in a segment, a multiple of the window (equal to it: Transformer-XL)
        recurrent_layers: recurrent layers, counted from 1; none gives the Slide baseline
        states: S, recurrent state vectors
        gate: the gate on the states, fixed (Eqs. 1-3) or lstm (Eqs. 4-7)
        configuration: which residuals have a gate: dual, single or skip (section 3.6)
        feedback: let every layer read the state that the previous block left (section 3.7)
        buckets: T5 relative position buckets
        max_distance: from this distance on, all positions share the last bucket
        attention_scale: starting value of the learned scales of query-key normalised attention
        dropout: dropout rate in training, 0 to below 1
        output_dropout: whether entries are dropped before the output too (decision 13: as released)
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
    output_dropout: bool = False

    def __post_init__(self):
        check_config(self)

    @property
    def operations(self):
        """The published operations, or those of the variant that the config asks for."""
        return operations_of(self)


class State(NamedTuple):
    """What a segment hands to the next one; axis 0 of every field is the lane."""

    states: np.ndarray  # (B, R, S, D)
    keys: np.ndarray  # (B, L, H, W, E), the last block's, unit length
    values: np.ndarray  # (B, L, H, W, E)


# ----------------------------------------------------------------------------
# the method: a layer's states, which each block's tokens read, then rewrite through a gate
def recurrence_forward(p, config, cross_query, cross_scale, keys, values, states):
    """What tokens read of the states, (B, H, N, E), block by block, and the last states (3.2)."""
    outs = []
    caches = []
    for own, tile in blocks_of(cross_query.shape[2], config.window):
        projected, projection_cache = state_projection_forward(p, config, states)
        # decision 9: tokens read the states before this block's update
        out, read_cache = attention_forward(
            cross_query[:, :, own], projected["key"], projected["value"], cross_scale
        )
        states, update_cache = state_update_forward(
            p, config, states, projected, keys[:, :, tile], values[:, :, tile]
        )
        outs.append(out)
        caches.append((projection_cache, read_cache, update_cache))
    return np.concatenate(outs, axis=2), states, caches


# c_{t+1} = update(c_t), y_t = read(c_t): dc_t = update'(dc_{t+1}) + read'(dy_t), last block first
def recurrence_backward(config, dout, dstates, caches, dkeys, dvalues):
    """Adds to dkeys, dvalues; returns dcross_query, dcross_scale, dstates, the cell's gradients."""
    grads = {}
    dcross_query = np.zeros_like(dout)
    dcross_scale = 0.0
    blocks = blocks_of(dout.shape[2], config.window)
    for t in reversed(range(len(blocks))):
        own, tile = blocks[t]
        projection_cache, read_cache, update_cache = caches[t]

        dcarry, dprojected, dkey, dvalue, dupdate = state_update_backward(
            config, dstates, update_cache
        )
        dkeys[:, :, tile] += dkey
        dvalues[:, :, tile] += dvalue

        dquery, dstate_key, dstate_value, dscale, _ = attention_backward(
            dout[:, :, own], read_cache
        )
        dcross_query[:, :, own] = dquery
        dcross_scale = dcross_scale + dscale

        # K_s and V_s serve both directions
        add_into(dprojected, {"key": dstate_key, "value": dstate_value})
        dinput, dprojection = state_projection_backward(dprojected, projection_cache)
        dstates = dcarry + dinput
        add_into(grads, dupdate)
        add_into(grads, dprojection)
    return dcross_query, dcross_scale, dstates, grads


def state_update_forward(p, config, states, projected, keys, values):
    """The next states (B, S, D): the horizontal direction on one block (3.2).

    The states attend to each other and to the tile's 2W tokens; a gate decides what is written.
    """
    to_states, self_cache = attention_forward(
        projected["query"], projected["key"], projected["value"], p["scale"]
    )
    # decision 8: no mask
    to_tokens, cross_cache = attention_forward(
        projected["cross_query"], keys, values, p["cross_scale"]
    )
    halves = [merge_heads(to_states), merge_heads(to_tokens)]
    attended = np.concatenate(halves, axis=-1)  # (B, S, 2HE)
    # decision 10: the raw states are carried
    next_states, gating_cache = config.operations.gating_forward(p, config, states, attended)
    return next_states, (self_cache, cross_cache, gating_cache)


# c' = gating(c, [self; cross]): dc and d[self; cross] by the gates; each half by its attention
def state_update_backward(config, dnext_states, cache):
    self_cache, cross_cache, gating_cache = cache
    dstates, dattended, grads = config.operations.gating_backward(
        config, dnext_states, gating_cache
    )
    dto_states, dto_tokens = np.split(dattended, 2, axis=-1)

    dquery, dkey, dvalue, grads["scale"], _ = attention_backward(
        split_heads(dto_states, config.heads), self_cache
    )
    dcross_query, dkeys, dvalues, grads["cross_scale"], _ = attention_backward(
        split_heads(dto_tokens, config.heads), cross_cache
    )
    dprojected = {"query": dquery, "key": dkey, "value": dvalue, "cross_query": dcross_query}
    return dstates, dprojected, dkeys, dvalues, grads


def gating_forward(p, config, states, attended):
    """The next states, by one gate: the skip configuration, which has no MLP (3.6)."""
    return fixed_gate_forward(subtree(p, "attention_gate."), states, attended)


def gating_backward(config, dnext_states, cache):
    dstates, dattended, dgate = fixed_gate_backward(dnext_states, cache)
    return dstates, dattended, prefixed("attention_gate.", dgate)


def fixed_gate_forward(p, carry, hidden):
    """A learned, constant mixture of the carry (B, S, D) and a candidate from hidden (3.4)."""
    projected, linear_cache = linear_forward(hidden, p["weight_z"])
    z = projected + p["bias_z"]  # Eq. 1; decision 2: no tanh here
    g = sigmoid(p["bias_g"])  # Eq. 2, (D,)
    out = carry * g + z * (1 - g)  # Eq. 3
    return out, (linear_cache, carry, z, g)


# c' = c g + z (1 - g), g = sigmoid(b): dc = dc' g, dz = dc' (1 - g), db = g (1 - g) Σ dc' (c - z)
def fixed_gate_backward(dout, cache):
    linear_cache, carry, z, g = cache
    dcarry = dout * g
    dz = dout * (1 - g)
    dg = (dout * (carry - z)).sum((0, 1))
    dhidden, dweight = linear_backward(dz, linear_cache)
    grads = {"weight_z": dweight, "bias_z": dz.sum((0, 1)), "bias_g": dg * g * (1 - g)}
    return dcarry, dhidden, grads


# ----------------------------------------------------------------------------
# the model: the whole of it first, then the stack, its layers and attention that slides over tokens
def forward(params, config, tokens, state, rng=None):
    """Logits (B, N, V), the next state, and the cache for `backward`.

    tokens (B, N) of ids below V; position i of the logits predicts token i + 1. state is from
    `initial_state` or from the previous segment; rng turns dropout on. Raises ValueError if N is
    not a positive multiple of the window.
    """
    n = tokens.shape[1]
    if n == 0 or n % config.window:
        raise ValueError(
            f"a segment of {n} tokens is not a positive multiple of window {config.window}; pad it"
        )
    x = params["embedding"][tokens]  # (B, N, D)
    y, next_state, stack_cache = config.operations.stack_forward(params, config, x, state, rng)
    logits, output_cache = config.operations.output_forward(params, config, y, rng)
    return logits, next_state, (tokens, stack_cache, output_cache)


# M the embedding, x = M[tokens]: dM = dx at the tokens' rows + what the output layer adds
def backward(params, config, cache, dlogits, dnext_state=None):
    """Gradients of the parameters and of the incoming state.

    dnext_state None stops the gradient at the segment's end (decision 14: none across segments):
    "the final set of state vectors from the last block are stored in a non-differentiable cache"
    (3.2).
    """
    tokens, stack_cache, output_cache = cache
    if dnext_state is None:
        fresh = initial_state(params, config, len(tokens))
        dnext_state = State(*map(np.zeros_like, fresh))

    dy, grads = config.operations.output_backward(config, dlogits, output_cache)
    dx, dstate, dstack = config.operations.stack_backward(config, dy, dnext_state, stack_cache)
    grads |= dstack
    np.add.at(grads["embedding"], tokens, dx)  # the tied embedding's second gradient
    for name in initial_state_backward(config, dstate):
        grads[name] = np.zeros_like(params[name])  # they act through state: initial_state_backward
    return grads, dstate


def output_forward(params, config, y, rng):
    """Logits (B, N, V) of the stack's output y (B, N, D), by the tied embedding."""
    normed, norm_cache = layer_norm_forward(params, "final_norm", y)
    scaled = normed * config.width**-0.5  # decision 13: divided by sqrt(D)
    logits, linear_cache = linear_forward(scaled, params["embedding"])
    return logits, (norm_cache, linear_cache)


# logits = norm(y) M^T / sqrt(D): dy = norm'(dlogits M) / sqrt(D), dM = dlogits^T norm(y) / sqrt(D)
def output_backward(config, dlogits, cache):
    norm_cache, linear_cache = cache
    dscaled, dembedding = linear_backward(dlogits, linear_cache)
    dnormed = dscaled * config.width**-0.5
    dy, grads = layer_norm_backward(dnormed, norm_cache)
    return dy, grads | {"embedding": dembedding}


def stack_forward(params, config, x, state, rng):
    """All layers over x (B, N, D): y (B, N, D), the next State and the cache."""
    states = states_by_layer(config, state)
    next_state = State(*map(np.zeros_like, state))
    next_states = states_by_layer(config, next_state)
    caches = []
    for layer in range(config.layers):
        p = subtree(params, f"layers.{layer}.")
        previous = np.stack([state.keys[:, layer], state.values[:, layer]])
        x, last, after, cache = layer_forward(p, config, x, previous, states[layer], rng)
        next_state.keys[:, layer], next_state.values[:, layer] = last
        if after is not None:
            next_states[layer][:] = after
        caches.append(cache)
    return x, next_state, caches


def stack_backward(config, dy, dnext, caches):
    """Gradients of x, of the incoming State and of all layers' parameters."""
    dafter = states_by_layer(config, dnext)
    dstate = State(*map(np.zeros_like, dnext))
    dstates = states_by_layer(config, dstate)
    grads = {}
    for layer in reversed(range(config.layers)):
        dlast = np.stack([dnext.keys[:, layer], dnext.values[:, layer]])
        dy, dprevious, dbefore, dlayer = layer_backward(
            config, dy, dlast, dafter[layer], caches[layer]
        )
        dstate.keys[:, layer], dstate.values[:, layer] = dprevious
        if dbefore is not None:
            dstates[layer][:] = dbefore
        grads |= prefixed(f"layers.{layer}.", dlayer)
    return dy, dstate, grads


def states_by_layer(config, state):
    """The states (B, S, D) of each layer, as views; None for a layer that is not recurrent."""
    states = [None] * config.layers
    for r, layer in enumerate(config.recurrent_layers):
        states[layer - 1] = state.states[:, r]
    return states


def layer_forward(p, config, x, previous, states, rng):
    """y (B, N, D), the last block's keys and values, the next states, and the cache.

    previous (2, B, H, W, E): keys and values of the block before. states: (B, S, D), or None in a
    layer that is not recurrent.
    """
    projected, projection_cache = token_projection_forward(p, config, x, rng)
    own = np.stack([projected["key"], projected["value"]])
    keys_and_values = np.concatenate([previous, own], axis=3)  # (2, B, H, W + N, E)
    keys, values = keys_and_values
    local, self_cache = sliding_attention_forward(p, config, projected["query"], keys, values, rng)
    attended = merge_heads(local)  # (B, N, HE)

    cross_cache = None
    if "cross_query" in p:
        cell = subtree(p, "state.")
        cross_query = projected["cross_query"]
        cross, states, cross_cache = config.operations.recurrence_forward(
            cell, config, cross_query, p["cross_scale"], keys, values, states
        )
        attended = np.concatenate([attended, merge_heads(cross)], axis=-1)  # (B, N, 2HE)

    out, output_cache = linear_forward(attended, p["output"])
    y, mlp_cache = token_mlp_forward(p, config, x + out, rng)
    last = keys_and_values[..., -config.window :, :]
    return y, last, states, (projection_cache, self_cache, cross_cache, output_cache, mlp_cache)


# tokens and states read K_e, in its own tile and in the next one: dK_e = the sum of all four
def layer_backward(config, dy, dlast, dstates, cache):
    """Gradients of x, previous, states (None if the layer has none) and the parameters."""
    projection_cache, self_cache, cross_cache, output_cache, mlp_cache = cache
    dx, grads = token_mlp_backward(dy, mlp_cache)
    dattended, grads["output"] = linear_backward(dx, output_cache)

    before_last = ((0, 0), (0, 0), (0, 0), (dy.shape[1], 0), (0, 0))
    dkeys_and_values = np.pad(dlast, before_last)  # (2, B, H, W + N, E)
    dkeys, dvalues = dkeys_and_values  # to which each reader adds
    dprojected = {}
    if cross_cache is not None:
        dattended, dcross = np.split(dattended, 2, axis=-1)
        dcross = split_heads(dcross, config.heads)
        dcross_query, grads["cross_scale"], dstates, dcell = config.operations.recurrence_backward(
            config, dcross, dstates, cross_cache, dkeys, dvalues
        )
        dprojected["cross_query"] = dcross_query
        grads |= prefixed("state.", dcell)

    dlocal = split_heads(dattended, config.heads)
    dprojected["query"], dself = sliding_attention_backward(dlocal, self_cache, dkeys, dvalues)
    dprojected["key"], dprojected["value"] = dkeys_and_values[..., config.window :, :]
    dprevious = dkeys_and_values[..., : config.window, :]
    dinput, dprojection = token_projection_backward(dprojected, projection_cache)
    return dx + dinput, dprevious, dstates, grads | dself | dprojection


def sliding_attention_forward(p, config, query, keys, values, rng):
    """Each block of query (B, H, N, E) attends to its 2W keys of (B, H, W + N, E) (Figure 2)."""
    mask = tile_mask(config.window)
    # decision 6: one table a layer, for this attention alone
    bias, bias_cache = position_bias_forward(
        p["position_bias"], config.window, config.max_distance
    )  # (H, W, 2W)
    outs = []
    caches = []
    for own, tile in blocks_of(query.shape[2], config.window):
        key = keys[:, :, tile]
        value = values[:, :, tile]
        # decision 11: dropout for tokens
        out, cache = attention_forward(
            query[:, :, own], key, value, p["scale"], bias, mask, config.dropout, rng
        )
        outs.append(out)
        caches.append(cache)
    return np.concatenate(outs, axis=2), (caches, bias_cache)


# tile t reads the keys of blocks t - 1 and t: dkeys of a block = its own tile's + the next tile's
def sliding_attention_backward(dout, cache, dkeys, dvalues):
    """Adds to dkeys, dvalues (B, H, W + N, E); returns dquery and the parameters' gradients."""
    caches, bias_cache = cache
    dquery = np.zeros_like(dout)
    dscale = 0.0
    dbias = 0.0
    window = dout.shape[2] // len(caches)
    for (own, tile), tile_cache in zip(blocks_of(dout.shape[2], window), caches, strict=True):
        dquery[:, :, own], dkey, dvalue, dscale_tile, dbias_tile = attention_backward(
            dout[:, :, own], tile_cache
        )
        dkeys[:, :, tile] += dkey
        dvalues[:, :, tile] += dvalue
        dscale = dscale + dscale_tile
        dbias = dbias + dbias_tile
    dtable = position_bias_backward(dbias, bias_cache)
    return dquery, {"scale": dscale, "position_bias": dtable}


def blocks_of(length, window):
    """[(own, tile)]: slices of a block's tokens, and of its keys, which begin a block before it."""
    blocks = []
    for at in range(0, length, window):
        own = slice(at, at + window)
        tile = slice(at, at + 2 * window)  # keys begin one block before the segment
        blocks.append((own, tile))
    return blocks


def tile_mask(window):
    """True where a token sees a key: the W tokens before it, 1 <= i - j <= W (3.1)."""
    distance = tile_distance(window)
    return (distance >= 1) & (distance <= window)  # decision 4: not itself


def tile_distance(window):
    """i - j of the W queries of a block and the 2W keys of its tile (Figure 2), (W, 2W)."""
    query_position = np.arange(window, 2 * window)[:, None]
    key_position = np.arange(2 * window)
    return query_position - key_position


def state_projection_forward(p, config, states):
    """Unit keys and queries, and values, of norm(states) + IDs (3.3): {name: (B, H, S, E)}."""
    normed, norm_cache = layer_norm_forward(p, "norm", states)
    identified = normed + p["ids"]  # (B, S, D)
    names = ("key", "value", "query", "cross_query")
    projected, caches = head_projections_forward(p, names, config.heads, identified)
    return projected, (norm_cache, caches)


# x = norm(c) + ids: dids = dx summed over lanes, dc = norm'(dx)
def state_projection_backward(dprojected, cache):
    """dstates and parameter gradients, from the gradients of any of the four projections."""
    norm_cache, caches = cache
    didentified, grads = head_projections_backward(dprojected, caches)
    grads["ids"] = didentified.sum(0)
    dstates, dnorm = layer_norm_backward(didentified, norm_cache)
    return dstates, grads | dnorm


def token_projection_forward(p, config, x, rng):
    """norm, dropout, then unit key and queries, and value, of tokens x: {name: (B, H, N, E)}."""
    normed, norm_cache = layer_norm_forward(p, "norm", x)  # decision 1: no RMS norm
    # decision 11: dropout for tokens
    normed, dropout_mask = dropout(normed, config.dropout, rng)
    names = [name for name in ("key", "value", "query", "cross_query") if name in p]
    projected, caches = head_projections_forward(p, names, config.heads, normed)
    return projected, (norm_cache, dropout_mask, caches)


def token_projection_backward(dprojected, cache):
    norm_cache, dropout_mask, caches = cache
    dnormed, grads = head_projections_backward(dprojected, caches)
    dnormed = dnormed * dropout_mask
    dx, dnorm = layer_norm_backward(dnormed, norm_cache)
    return dx, grads | dnorm


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


# ----------------------------------------------------------------------------
# through segments: what a document starts with
def initial_state(params, config, batch):
    """The learned states; keys and values of zero (decision 7: unmasked zeros before)."""
    states = np.zeros((batch, len(config.recurrent_layers), config.states, config.width))
    for r, layer in enumerate(config.recurrent_layers):
        states[:, r] = params[f"layers.{layer - 1}.state.initial"]
    shape = (batch, config.layers, config.heads, config.window, config.head_width)
    return State(states, np.zeros(shape), np.zeros(shape))


def initial_state_backward(config, dstate):
    """Gradients of the learned states. dstate must be zero in lanes that did not start."""
    grads = {}
    for r, layer in enumerate(config.recurrent_layers):
        grads[f"layers.{layer - 1}.state.initial"] = dstate.states[:, r].sum(0)
    return grads


# ----------------------------------------------------------------------------
# what every Transformer has: attention with T5's positions, projections, norm; skip if familiar
NORM_EPSILON = 1e-6  # under the square roots of layer_norm and unit_norm


def attention_forward(query, key, value, scale, bias=0.0, mask=True, rate=0.0, rng=None):
    """softmax((q·k + bias) scale) v, (B, H, N, E).

    query (B, H, N, E), key and value (B, H, K, E), scale (H,), bias (H, N, K), mask (N, K).
    """
    similarity = query @ key.mT + bias  # (B, H, N, K)
    scores = similarity * scale[:, None, None]  # decision 5: learned scale, no 1/sqrt(E)
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
    """Unit length over the last axis: query-key normalisation (3.3)."""
    inverse = 1 / np.sqrt((x**2).sum(-1, keepdims=True) + NORM_EPSILON)
    unit = x * inverse
    return unit, (unit, inverse)


# y = x / |x|: dx = (dy - y (y·dy)) / |x|
def unit_norm_backward(dunit, cache):
    unit, inverse = cache
    along = (dunit * unit).sum(-1, keepdims=True)
    return inverse * (dunit - unit * along)


def split_heads(x, heads):
    """(B, N, H*E) -> (B, H, N, E)"""
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).swapaxes(1, 2)


def merge_heads(x):
    """(B, H, N, E) -> (B, N, H*E), the adjoint of split_heads."""
    batch, heads, length, width = x.shape
    return x.swapaxes(1, 2).reshape(batch, length, heads * width)


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


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


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
# starting values: how every parameter is drawn; a first reading skips them
def init_params(config, rng):
    """All parameters as {dotted name: float64 array}; matrices are (out, in)."""
    # decision 13: starts at N(0, 1)
    params = {"embedding": rng.normal(0, 1, (config.vocabulary, config.width))}
    for layer in range(config.layers):
        params |= prefixed(f"layers.{layer}.", init_layer(config, rng, layer))
    return params | init_norm("final_norm", config.width)


def init_layer(config, rng, layer):
    """Parameters of a layer, counted from 0 (decision 2: no biases here)."""
    d = config.width
    h = config.heads
    he = config.heads * config.head_width
    recurrent = layer + 1 in config.recurrent_layers
    reads_states = layer + 1 in config.operations.reading_layers(config)
    p = init_norm("norm", d)
    for name in ("key", "value", "query"):
        p[name] = init_linear(rng, he, d)
    p["scale"] = np.full(h, config.attention_scale)  # decision 5: a learned scale
    # decision 6: variance 1/buckets
    p["position_bias"] = rng.normal(0, config.buckets**-0.5, (h, config.buckets))
    if reads_states:
        p["cross_query"] = init_linear(rng, he, d)
        p["cross_scale"] = np.full(h, config.attention_scale)
    p["output"] = init_linear(rng, d, 2 * he if reads_states else he)
    p |= init_norm("mlp_norm", d)
    p["mlp_hidden"] = init_linear(rng, config.feed_forward, d)
    p["mlp_output"] = init_linear(rng, d, config.feed_forward)
    if recurrent:
        p |= prefixed("state.", init_recurrence(config, rng))
    return p


def reading_layers(config):
    """The layers whose tokens read states, counted from 1: the recurrent ones."""
    return config.recurrent_layers


def init_recurrence(config, rng):
    """Parameters of the horizontal direction of one recurrent layer."""
    d = config.width
    he = config.heads * config.head_width
    p = {"initial": rng.normal(0, 0.1, (config.states, d))}
    p["ids"] = rng.normal(0, 1, (config.states, d))
    p |= init_norm("norm", d)
    for name in ("key", "value", "query", "cross_query"):
        p[name] = init_linear(rng, he, d)
    for name in ("scale", "cross_scale"):
        p[name] = np.full(config.heads, config.attention_scale)
    return p | config.operations.init_gating(config, rng)


def init_gating(config, rng):
    """Parameters of the states' gate."""
    attended = 2 * config.heads * config.head_width
    return prefixed("attention_gate.", init_gate(config, rng, attended))


def init_gate(config, rng, fan_in):
    """Section 3.5: biases N(0, 0.1^2), weights cut normal (decision 3: variance 0.1 / fan_in)."""
    return {
        "weight_z": init_linear(rng, config.width, fan_in, 0.1**0.5),
        "bias_z": rng.normal(0, 0.1, config.width),
        "bias_g": rng.normal(0, 0.1, config.width),
    }


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
VARIED = ("gate", "configuration", "feedback", "output_dropout")


def operations_with(**replaced):
    """A namespace of this file's functions, some of them replaced by a variant's."""
    return SimpleNamespace(**(globals() | replaced))


def operations_of(config):
    """The published operations, or those of the variant that a config asks for."""
    if all(getattr(config, name) == getattr(Config, name) for name in VARIED):
        return operations_with()
    return importlib.import_module("reference.variants.block_recurrent").operations_of(config)


def check_config(config):
    """Raise ValueError, naming the field, for a config that cannot work."""
    for name, kind in Config.__annotations__.items():
        value = getattr(config, name)
        if kind is int and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    n = config.segment
    w = config.window
    if n % w:
        nearest = max(1, round(n / w)) * w
        raise ValueError(f"segment {n} is not a multiple of window {w}; the nearest is {nearest}")
    check_recurrent_layers(config)
    operations_of(config)  # raises ValueError for an unknown variant
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


def check_recurrent_layers(config):
    """Raise ValueError unless they are layers of the model, in ascending order."""
    recurrent = config.recurrent_layers
    if any(not 1 <= layer <= config.layers for layer in recurrent):
        raise ValueError(f"recurrent_layers names {recurrent}; they must lie in 1..{config.layers}")
    if tuple(sorted(set(recurrent))) != recurrent:
        raise ValueError(
            f"recurrent_layers {recurrent} must be a tuple, ascending, each layer once"
        )


if __name__ == "__main__":  # a demonstration, or --check [--case NAME]
    raise SystemExit(importlib.import_module("reference.gradients").main("block_recurrent"))
