"""Block-Recurrent Transformer (Hutchins, Schlag, Wu, Dyer, Neyshabur, 2022), forward and backward in NumPy.

A Transformer reads a document in blocks of W tokens. Attention slides over the previous W tokens, so it forgets. One layer
therefore also keeps S state vectors: tokens read them with cross-attention, and a gate rewrites them after each block.
`forward` maps (tokens, state) to (logits, next state). `backward` maps the gradient of the next state to that of the incoming
state, so segments chain into back-propagation through time.

Glossary: code symbol, meaning, paper symbol, shape
    tokens          token ids of one segment; below, their vectors are x             (B, N); x: (B, N, D)
    states          state vectors of a layer (State: of all R layers)    c_t         (B, S, D), (B, R, S, D)
    keys, values    of the previous block, then of the segment's tokens  K_e, V_e    (B, H, W + N, E)
    query           vertical self-attention (token to token)             Q_e^v       (B, H, N, E)
    cross_query     vertical cross-attention (token to state)            Q_s^v       (B, H, N, E)
    and below a recurrent layer's `state.`, projected from its states:
    key, value      read by tokens and by states                         K_s, V_s    (B, H, S, E)
    query           horizontal self-attention (state to state)           Q_s^h       (B, H, S, E)
    cross_query     horizontal cross-attention (state to token)          Q_e^h       (B, H, S, E)
    attended        [self; cross] attention, heads concatenated                      (B, S, 2HE)
    hidden          a gate's input: attended, or an MLP's hidden layer   h_t         (B, S, 2HE or F)
    z               what the gate may write                              z_t         (B, S, D)

B batch (lanes), N tokens in a segment, W window and block, S states, D width, H heads, E head width, F feed-forward width,
V vocabulary, L layers, R recurrent layers, K keys. Layers are counted from 1, as in the paper; arrays and the names of parameters
from 0. Decisions are numbered in docs/decisions/block_recurrent.md.
"""

import runpy
import sys
from dataclasses import dataclass, replace
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
        segment: N, tokens in a segment, a multiple of the window (equal to it: Transformer-XL style)
        recurrent_layers: recurrent layers, counted from 1; none gives the Slide baseline
        states: S, recurrent state vectors
        gate: the gate on the states, fixed (Eqs. 1-3) or lstm (Eqs. 4-7)
        configuration: which residuals have a gate: dual, single or skip (section 3.6)
        feedback: let every layer read the state that the previous block left (section 3.7)
        buckets: T5 relative position buckets
        max_distance: from this distance on, all positions share the last bucket
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
        check_config(self)


class State(NamedTuple):
    """What a segment hands to the next one; axis 0 of every field is the lane."""

    states: np.ndarray  # (B, R, S, D)
    keys: np.ndarray  # (B, L, H, W, E), the last block's, unit length
    values: np.ndarray  # (B, L, H, W, E)


# ----------------------------------------------------------------------------
# the method: a layer whose states are read by each block's tokens, then rewritten through a gate; start here
def recurrence_forward(p, config, cross_query, cross_scale, keys, values, states):
    """Run the cell over all blocks (3.2): what tokens read of the states (B, H, N, E), the states after the last, caches."""
    outs, caches = [], []
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


# c_{t+1} = update(c_t), y_t = read(c_t): dc_t = update'(dc_{t+1}) + read'(dy_t), from the last block to the first
def recurrence_backward(config, dout, dstates, caches, dkeys, dvalues):
    """Adds to dkeys, dvalues; returns dcross_query, dcross_scale, dstates, and the gradients of the state's parameters."""
    grads, dcross_query, dcross_scale = {}, np.zeros_like(dout), 0.0
    blocks = blocks_of(dout.shape[2], config.window)
    for (own, tile), (projection_cache, read_cache, update_cache) in zip(
        reversed(blocks), reversed(caches), strict=True
    ):
        dcarry, dprojected, dkey, dvalue, dupdate = state_update_backward(
            config, dstates, update_cache
        )
        dkeys[:, :, tile] += dkey
        dvalues[:, :, tile] += dvalue
        dcross_query[:, :, own], dstate_key, dstate_value, dscale, _ = attention_backward(
            dout[:, :, own], read_cache
        )
        dcross_scale = dcross_scale + dscale
        add_into(
            dprojected, {"key": dstate_key, "value": dstate_value}
        )  # K_s and V_s serve both directions
        dinput, dprojection = state_projection_backward(dprojected, projection_cache)
        dstates = dcarry + dinput
        add_into(grads, dupdate | dprojection)
    return dcross_query, dcross_scale, dstates, grads


def state_update_forward(p, config, states, projected, keys, values):
    """The horizontal direction on one block: states see each other and the tile's 2W tokens, then pass the gate (3.2)."""
    to_states, self_cache = attention_forward(
        projected["query"], projected["key"], projected["value"], p["scale"]
    )
    to_tokens, cross_cache = attention_forward(
        projected["cross_query"], keys, values, p["cross_scale"]
    )  # decision 8: no mask
    attended = np.concatenate(
        [merge_heads(to_states), merge_heads(to_tokens)], axis=-1
    )  # (B, S, 2HE)
    # decision 10: the raw states are carried. In the skip configuration gating is the gate alone, by default the fixed one
    next_states, gating_cache = gating_forward(p, config, states, attended)
    return next_states, (self_cache, cross_cache, gating_cache)


# c' = gating(c, [self; cross]): dc and d[self; cross] from the gates; each half then goes back through its own attention
def state_update_backward(config, dnext_states, cache):
    """Returns dstates (the carry's part), {name: dprojected}, dkeys and dvalues of the tile, and parameter gradients."""
    self_cache, cross_cache, gating_cache = cache
    dstates, dattended, grads = gating_backward(config, dnext_states, gating_cache)
    dto_states, dto_tokens = np.split(dattended, 2, axis=-1)
    dquery, dkey, dvalue, grads["scale"], _ = attention_backward(
        split_heads(dto_states, config.heads), self_cache
    )
    dcross_query, dkeys, dvalues, grads["cross_scale"], _ = attention_backward(
        split_heads(dto_tokens, config.heads), cross_cache
    )
    return (
        dstates,
        {"query": dquery, "key": dkey, "value": dvalue, "cross_query": dcross_query},
        dkeys,
        dvalues,
        grads,
    )


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def fixed_gate_forward(p, carry, hidden):
    """A learned, constant mixture of the carry (B, S, D) and a candidate from hidden (3.4)."""
    projected, linear_cache = linear_forward(hidden, p["weight_z"])
    z = projected + p["bias_z"]  # Eq. 1; decision 2: no tanh here
    g = sigmoid(p["bias_g"])  # Eq. 2, (D,)
    return carry * g + z * (1 - g), (linear_cache, carry, z, g)  # Eq. 3


# c' = c g + z (1 - g), g = sigmoid(b): dc = dc' g, dz = dc' (1 - g), db = g (1 - g) Σ dc' (c - z)
def fixed_gate_backward(dout, cache):
    linear_cache, carry, z, g = cache
    dz = dout * (1 - g)
    dhidden, dweight = linear_backward(dz, linear_cache)
    dg = (dout * (carry - z)).sum((0, 1))
    return (
        dout * g,
        dhidden,
        {"weight_z": dweight, "bias_z": dz.sum((0, 1)), "bias_g": dg * g * (1 - g)},
    )


def state_projection_forward(p, config, states):
    """Unit keys and queries, and values, of norm(states) + state IDs (3.3): {name: (B, H, S, E)}."""
    normed, norm_cache = layer_norm_forward(p, "norm", states)
    identified = normed + p["ids"]  # (B, S, D)
    projected, caches = head_projections_forward(
        p, ("key", "value", "query", "cross_query"), config.heads, identified
    )
    return projected, (norm_cache, caches)


# x = norm(c) + ids: dids = dx summed over lanes, dc = norm'(dx)
def state_projection_backward(dprojected, cache):
    """dstates and parameter gradients, from the gradients of any of the four projections."""
    norm_cache, caches = cache
    didentified, grads = head_projections_backward(dprojected, caches)
    dstates, dnorm = layer_norm_backward(didentified, norm_cache)
    return dstates, grads | {"ids": didentified.sum(0)} | dnorm


def blocks_of(length, window):
    """For each block, the slice of its tokens in the segment, and of its tile: the keys of the previous block and its own."""
    return [(slice(at, at + window), slice(at, at + 2 * window)) for at in range(0, length, window)]


def split_heads(x, heads):
    """(B, N, H*E) -> (B, H, N, E)"""
    batch, length, width = x.shape
    by_head = x.reshape(batch, length, heads, width // heads)  # (B, N, H, E)
    return by_head.transpose(0, 2, 1, 3)


def merge_heads(x):
    """(B, H, N, E) -> (B, N, H*E), the adjoint of split_heads."""
    batch, heads, length, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, heads * width)


def prefixed(prefix, tree):
    """{name: a} -> {prefix + name: a}."""
    return {prefix + name: array for name, array in tree.items()}


def add_into(total, part):
    """Sum a dict of gradients into another; total is ours to change."""
    for name, array in part.items():
        total[name] = total[name] + array if name in total else array


# ----------------------------------------------------------------------------
# the model: blocks of tokens through the layers, whose attention slides over the previous W tokens; read it next
def initial_state(params, config, batch):
    """What a document starts with: the learned states, and keys and values of zero (decision 7: unmasked zeros before)."""
    shape = (batch, config.layers, config.heads, config.window, config.head_width)
    states = np.zeros((batch, len(config.recurrent_layers), config.states, config.width))
    for r, layer in enumerate(config.recurrent_layers):
        states[:, r] = params[f"layers.{layer - 1}.state.initial"]
    return State(states, np.zeros(shape), np.zeros(shape))


def initial_state_backward(config, dstate):
    """Gradient of the learned initial states, summed over lanes; set dstate to zero in lanes that do not start a document."""
    return {
        f"layers.{layer - 1}.state.initial": dstate.states[:, r].sum(0)
        for r, layer in enumerate(config.recurrent_layers)
    }


def forward(params, config, tokens, state, rng=None):
    """Logits (B, N, V), where position i predicts token i + 1, the next state, and the cache for `backward`.

    tokens (B, N) of ids below V; state from `initial_state` or from the previous segment; rng turns dropout on. Raises ValueError
    if N is not a positive multiple of the window.
    """
    n, w = tokens.shape[1], config.window
    if n == 0 or n % w:
        raise ValueError(
            f"a segment of {n} tokens is not a positive multiple of window {w}; pad it"
        )
    x = params["embedding"][tokens]  # (B, N, D)
    spans = (
        [own for own, _ in blocks_of(n, w)] if config.feedback else [slice(0, n)]
    )  # decision 12: feedback, block by block
    outs, caches = [], []
    for span in spans:
        y, state, cache = stack_forward(params, config, x[:, span], state, rng)
        outs.append(y)
        caches.append(cache)
    normed, norm_cache = layer_norm_forward(params, "final_norm", np.concatenate(outs, axis=1))
    logits, output_cache = linear_forward(
        normed * config.width**-0.5, params["embedding"]
    )  # decision 13: divided by sqrt(D)
    return logits, state, (tokens, spans, caches, norm_cache, output_cache)


# M the embedding: logits = norm(y) M^T / sqrt(D), x = M[tokens]: dM = dlogits^T norm(y) / sqrt(D) + dx at the tokens' rows
def backward(params, config, cache, dlogits, dnext_state=None):
    """Gradients of the parameters and of the incoming state, from those of the logits and of the next state.

    dnext_state None stops the gradient at the segment's end (decision 14: none across segments): "the final set of state vectors
    from the last block are stored in a non-differentiable cache" (3.2).
    """
    tokens, spans, caches, norm_cache, output_cache = cache
    if dnext_state is None:
        dnext_state = State(
            *(np.zeros_like(field) for field in initial_state(params, config, len(tokens)))
        )
    dnormed, dembedding = linear_backward(dlogits, output_cache)
    dy, dnorm = layer_norm_backward(dnormed * config.width**-0.5, norm_cache)
    grads = {"embedding": dembedding} | dnorm
    dx, dstate = np.zeros_like(dy), dnext_state
    for span, span_cache in zip(reversed(spans), reversed(caches), strict=True):
        dx[:, span], dstate, dstack = stack_backward(config, dy[:, span], dstate, span_cache)
        add_into(grads, dstack)
    np.add.at(dembedding, tokens, dx)  # the tied embedding's second gradient
    for name in initial_state_backward(config, dstate):
        grads[name] = np.zeros_like(
            params[name]
        )  # they act through `state`: see initial_state_backward
    return grads, dstate


def stack_forward(params, config, x, state, rng):
    """All layers over the blocks of x (B, N, D); with feedback x is one block (3.7). Returns y, the next State, the cache."""
    shared, shared_cache = None, None
    if (
        config.feedback
    ):  # decision 12: the recurrent layer's own matrices project what the previous block left
        owner = subtree(params, f"layers.{config.recurrent_layers[0] - 1}.state.")
        projected, shared_cache = state_projection_forward(owner, config, state.states[:, 0])
        shared = (projected["key"], projected["value"])
    states, lasts, caches = [], [], []
    for layer in range(config.layers):
        own = (
            state.states[:, len(states)] if layer + 1 in config.recurrent_layers else None
        )  # (B, S, D)
        previous = (state.keys[:, layer], state.values[:, layer])
        x, last, own, cache = layer_forward(
            subtree(params, f"layers.{layer}."), config, x, previous, own, shared, rng
        )
        lasts.append(last)
        caches.append(cache)
        if own is not None:
            states.append(own)
    states = np.stack(states, axis=1) if states else state.states  # (B, R, S, D)
    keys, values = (
        np.stack(field, axis=1) for field in zip(*lasts, strict=True)
    )  # (B, L, H, W, E)
    return x, State(states, keys, values), (caches, shared_cache)


# under feedback the other layers all read one K_s, V_s: dK_s, dV_s = sums over those layers, then back through the projections
def stack_backward(config, dy, dnext, cache):
    """dx, the incoming State's gradient, and the gradients of all layers' parameters."""
    caches, shared_cache = cache
    grads, dshared = {}, {}
    dstate = State(*(np.zeros_like(field) for field in dnext))
    for layer in reversed(range(config.layers)):
        r = (
            config.recurrent_layers.index(layer + 1)
            if layer + 1 in config.recurrent_layers
            else None
        )
        dlast = (dnext.keys[:, layer], dnext.values[:, layer])
        dnext_states = None if r is None else dnext.states[:, r]
        dy, dprevious, dstates, dread, dlayer = layer_backward(
            config, dy, dlast, dnext_states, caches[layer]
        )
        dstate.keys[:, layer], dstate.values[:, layer] = dprevious
        if r is not None:
            dstate.states[:, r] = dstates
        add_into(dshared, dread)
        grads |= prefixed(f"layers.{layer}.", dlayer)
    if dshared:
        dstates, downer = state_projection_backward(dshared, shared_cache)
        dstate.states[:, 0] += dstates
        add_into(grads, prefixed(f"layers.{config.recurrent_layers[0] - 1}.state.", downer))
    return dy, dstate, grads


def layer_forward(p, config, x, previous, states, shared, rng):
    """y (B, N, D), last, next states (or None), cache. previous, last: a block's keys and values; shared: K_s, V_s."""
    projected, projection_cache = token_projection_forward(p, config, x, rng)
    previous_keys, previous_values = previous  # (B, H, W, E)
    keys = np.concatenate([previous_keys, projected["key"]], axis=2)  # (B, H, W + N, E)
    values = np.concatenate([previous_values, projected["value"]], axis=2)
    attended, self_cache = sliding_attention_forward(
        p, config, projected["query"], keys, values, rng
    )
    attended, cross_cache = merge_heads(attended), None  # (B, N, HE)
    if states is not None:
        cell, query = subtree(p, "state."), projected["cross_query"]
        cross, states, cross_cache = recurrence_forward(
            cell, config, query, p["cross_scale"], keys, values, states
        )
    elif shared is not None:  # feedback: read another layer's states
        cross, cross_cache = attention_forward(projected["cross_query"], *shared, p["cross_scale"])
    if cross_cache is not None:
        attended = np.concatenate([attended, merge_heads(cross)], axis=-1)  # (B, N, 2HE)
    out, output_cache = linear_forward(attended, p["output"])
    y, mlp_cache = token_mlp_forward(p, config, x + out, rng)
    last = (keys[:, :, -config.window :], values[:, :, -config.window :])
    return y, last, states, (projection_cache, self_cache, cross_cache, output_cache, mlp_cache)


# tokens and states read K_e, in its own tile and in the next one: dK_e = the sum of all four, then back through W_k
def layer_backward(config, dy, dlast, dstates, cache):
    """Gradients of x, previous, states (None unless recurrent), shared {name: gradient} and parameters."""
    projection_cache, self_cache, cross_cache, output_cache, mlp_cache = cache
    w = config.window
    dx, grads = token_mlp_backward(dy, mlp_cache)
    dattended, grads["output"] = linear_backward(dx, output_cache)
    dkeys, dvalues = (
        np.pad(dpart, ((0, 0), (0, 0), (dy.shape[1], 0), (0, 0))) for dpart in dlast
    )  # (B, H, W + N, E)
    dprojected, dshared = {}, {}
    if cross_cache is not None:
        dattended, dcross = np.split(dattended, 2, axis=-1)
        dcross = split_heads(dcross, config.heads)
        if dstates is not None:
            recurrence = recurrence_backward(config, dcross, dstates, cross_cache, dkeys, dvalues)
            dprojected["cross_query"], grads["cross_scale"], dstates, dcell = recurrence
            grads |= prefixed("state.", dcell)
        else:
            dprojected["cross_query"], dkey, dvalue, grads["cross_scale"], _ = attention_backward(
                dcross, cross_cache
            )
            dshared = {"key": dkey, "value": dvalue}
    dprojected["query"], dself = sliding_attention_backward(
        split_heads(dattended, config.heads), self_cache, dkeys, dvalues
    )
    dprojected |= {"key": dkeys[:, :, w:], "value": dvalues[:, :, w:]}
    dinput, dprojection = token_projection_backward(dprojected, projection_cache)
    return (
        dx + dinput,
        (dkeys[:, :, :w], dvalues[:, :, :w]),
        dstates,
        dshared,
        grads | dself | dprojection,
    )


def token_projection_forward(p, config, x, rng):
    """norm, dropout, then unit key and queries, and value, of tokens x (B, N, D): {name: (B, H, N, E)}."""
    normed, norm_cache = layer_norm_forward(p, "norm", x)  # decision 1: no RMS norm
    normed, dropout_mask = dropout_forward(
        normed, config.dropout, rng
    )  # decision 11: dropout for tokens
    names = [name for name in ("key", "value", "query", "cross_query") if name in p]
    projected, caches = head_projections_forward(p, names, config.heads, normed)
    return projected, (norm_cache, dropout_mask, caches)


def token_projection_backward(dprojected, cache):
    norm_cache, dropout_mask, caches = cache
    dnormed, grads = head_projections_backward(dprojected, caches)
    dx, dnorm = layer_norm_backward(dropout_backward(dnormed, dropout_mask), norm_cache)
    return dx, grads | dnorm


def token_mlp_forward(p, config, x, rng):
    """x + dropout(W_2 relu(W_1 norm(x)))"""
    normed, norm_cache = layer_norm_forward(p, "mlp_norm", x)
    hidden, hidden_cache = linear_forward(normed, p["mlp_hidden"])
    hidden = np.maximum(hidden, 0)  # (B, N, F)
    out, output_cache = linear_forward(hidden, p["mlp_output"])
    out, dropout_mask = dropout_forward(out, config.dropout, rng)  # decision 11: dropout for tokens
    return x + out, (norm_cache, hidden_cache, hidden, output_cache, dropout_mask)


# y = x + f(norm(x)): dx = dy + norm'(f'(dy)); relu passes the gradient if hidden > 0
def token_mlp_backward(dy, cache):
    norm_cache, hidden_cache, hidden, output_cache, dropout_mask = cache
    dhidden, doutput = linear_backward(dropout_backward(dy, dropout_mask), output_cache)
    dnormed, dweight = linear_backward(dhidden * (hidden > 0), hidden_cache)
    dx, dnorm = layer_norm_backward(dnormed, norm_cache)
    return dy + dx, {"mlp_hidden": dweight, "mlp_output": doutput} | dnorm


def tile_distance(window):
    """i - j for the W queries of a block against the 2W keys of the previous and the same block (Figure 2)."""
    return np.arange(window)[:, None] + window - np.arange(2 * window)[None, :]  # (W, 2W)


def tile_mask(window):
    """True where a token sees a key: the W tokens before it, 1 <= i - j <= W (3.1)."""
    distance = tile_distance(window)
    return (distance >= 1) & (distance <= window)  # decision 4: not itself


def sliding_attention_forward(p, config, query, keys, values, rng):
    """Each block of query (B, H, N, E) attends to its 2W keys of (B, H, W + N, E): tiles of W x 2W (3.1, Figure 2)."""
    mask = tile_mask(config.window)
    # decision 6: one table a layer, for this attention alone
    bias, bias_cache = position_bias_forward(
        p["position_bias"], config.window, config.max_distance
    )  # (H, W, 2W)
    outs, caches = [], []
    for own, tile in blocks_of(query.shape[2], config.window):
        inputs = query[:, :, own], keys[:, :, tile], values[:, :, tile]
        out, cache = attention_forward(
            *inputs, p["scale"], bias, mask, config.dropout, rng
        )  # decision 11: dropout for tokens
        outs.append(out)
        caches.append(cache)
    return np.concatenate(outs, axis=2), (caches, bias_cache)


# tile t reads the keys of blocks t - 1 and t: dkeys of a block = what its own tile sends back + what the next tile sends back
def sliding_attention_backward(dout, cache, dkeys, dvalues):
    """Adds to dkeys, dvalues (B, H, W + N, E); returns dquery and the gradients of scale and position_bias."""
    caches, bias_cache = cache
    dquery, dscale, dbias = np.zeros_like(dout), 0.0, 0.0
    for (own, tile), tile_cache in zip(
        blocks_of(dout.shape[2], dout.shape[2] // len(caches)), caches, strict=True
    ):
        dquery[:, :, own], dkey, dvalue, dscale_tile, dbias_tile = attention_backward(
            dout[:, :, own], tile_cache
        )
        dkeys[:, :, tile] += dkey
        dvalues[:, :, tile] += dvalue
        dscale, dbias = dscale + dscale_tile, dbias + dbias_tile
    return dquery, {"scale": dscale, "position_bias": position_bias_backward(dbias, bias_cache)}


# ----------------------------------------------------------------------------
# through segments: a document's loss, back-propagated through all of it
def loss_and_gradients(params, config, segments):
    """Mean loss over a document cut into segments [(tokens, targets)], and its gradients through all of them."""
    total, count, caches = 0.0, 0, []
    state = initial_state(params, config, len(segments[0][0]))
    for tokens, targets in segments:
        logits, state, cache = forward(params, config, tokens, state)
        loss, loss_cache = cross_entropy_forward(logits, targets, np.ones(targets.shape, bool))
        total, count = total + loss, count + targets.size
        caches.append((cache, loss_cache))
    grads, dstate = {}, None
    for cache, loss_cache in reversed(
        caches
    ):  # decision 14: an extension, with the gradient passed on between segments
        dparams, dstate = backward(
            params, config, cache, cross_entropy_backward(1 / count, loss_cache), dstate
        )
        add_into(grads, dparams)
    add_into(grads, initial_state_backward(config, dstate))
    return total / count, grads


# ----------------------------------------------------------------------------
# demonstration: gradients against finite differences, then a text learned by heart
def check_gradients(loss, params, grads, rng):
    """Compare grads with finite differences of loss(params), each along a random direction.

    Prints the largest relative error; exits with an error if they differ.
    """
    step = 1e-6
    errors = []
    for name, grad in grads.items():
        direction = rng.standard_normal(grad.shape)
        above = loss(params | {name: params[name] + step * direction})
        below = loss(params | {name: params[name] - step * direction})
        numeric = (above - below) / (2 * step)
        analytic = (grad * direction).sum()
        size = max(abs(numeric), abs(analytic), 1e-4)  # a difference is rounded to 1e-9 or so
        errors.append(abs(numeric - analytic) / size)

    worst = np.max(errors)  # NaN if one of them is
    print(
        f"Largest relative error {worst:.1e}: the hand-written backward pass is the "
        "forward pass's derivative.\n"
    )
    if not worst < 1e-4:
        raise SystemExit("gradients disagree with finite differences")


def demonstrate():
    """Check gradients against finite differences, then fit a tiny batch; prints what it shows."""
    rng = np.random.default_rng(0)
    config = Config(
        11,
        width=12,
        layers=3,
        heads=2,
        head_width=5,
        feed_forward=20,
        window=4,
        segment=12,
        states=3,
    )
    config = replace(config, recurrent_layers=(2,), buckets=6, max_distance=5, dropout=0.0)
    params = init_params(config, rng)
    document = rng.integers(config.vocabulary, size=(2, 25))
    segments = [(document[:, at : at + 12], document[:, at + 1 : at + 13]) for at in (0, 12)]
    print(
        "Block-Recurrent Transformer, fixed gate, skip configuration; two segments of three blocks, back-propagated as one."
    )
    _, grads = loss_and_gradients(params, config, segments)
    check_gradients(
        lambda moved: loss_and_gradients(moved, config, segments)[0], params, grads, rng
    )
    print(
        "Fitting these 48 predictions of random tokens by the gradients' signs (there is nothing to learn but the text):"
    )
    for step in range(1, 151):
        loss, grads = loss_and_gradients(params, config, segments)
        params = {
            name: params[name] - 0.02 * 0.98**step * np.sign(grad) for name, grad in grads.items()
        }
        if step in (1, 10, 50, 150):
            print(
                f"  step {step:3d}: {loss / np.log(2):.3f} bits per token (uniform: {np.log2(config.vocabulary):.3f})"
            )
    fresh = initial_state(params, config, 2)
    _, state, _ = forward(params, config, segments[0][0], fresh)
    cleared = state._replace(states=fresh.states)
    for label, start in (
        ("state and cached block carried", state),
        ("states cleared", cleared),
        ("both cleared", fresh),
    ):
        logits, _, _ = forward(params, config, segments[1][0], start)
        nats, _ = cross_entropy_forward(logits, segments[1][1], np.ones((2, 12), bool))
        print(f"Second segment, {label}: {nats / 24 / np.log(2):.3f} bits per token")


# ----------------------------------------------------------------------------
# what every Transformer has: attention and its projections, norms, softmax, dropout; a first reading takes it as known
NORM_EPSILON = 1e-6  # under the square roots of layer_norm and unit_norm


def attention_forward(query, key, value, scale, bias=0.0, mask=None, rate=0.0, rng=None):
    """softmax((q·k + bias) scale) v: query (B, H, N, E), key, value (B, H, K, E), scale (H,), bias (H, N, K), mask (N, K)."""
    similarity = query @ key.swapaxes(-1, -2) + bias  # (B, H, N, K)
    scores = similarity * scale[:, None, None]  # decision 5: learned scale, no 1/sqrt(E)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights, _ = softmax_forward(scores)
    dropped, dropout_mask = dropout_forward(weights, rate, rng)
    return dropped @ value, (
        (query, key, value, scale),
        (similarity, weights, dropped, dropout_mask),
    )


# u = q k^T + b, w = softmax(α u), y = w v: dv = w^T dy, ds = softmax'(dy v^T), dα = Σ ds u, du = α ds, dq = du k, dk = du^T q
def attention_backward(dout, cache):
    """Gradients of query, key, value, scale (H,) and the bias (H, N, K)."""
    (query, key, value, scale), (similarity, weights, dropped, dropout_mask) = cache
    dvalue = dropped.swapaxes(-1, -2) @ dout
    dweights = dropout_backward(dout @ value.swapaxes(-1, -2), dropout_mask)
    dscores = softmax_backward(
        dweights, weights
    )  # exactly zero where masked, since the weights are
    dscale = (dscores * similarity).sum((0, 2, 3))
    dsimilarity = dscores * scale[:, None, None]
    return (
        dsimilarity @ key,
        dsimilarity.swapaxes(-1, -2) @ query,
        dvalue,
        dscale,
        dsimilarity.sum(0),
    )


def head_projections_forward(p, names, heads, x):
    """{name: x W^T split into heads, (B, H, N, E)}; keys and queries are brought to unit length."""
    projected, caches = {}, {}
    for name in names:
        out, linear_cache = linear_forward(x, p[name])
        out, norm_cache = split_heads(out, heads), None
        if name != "value":
            out, norm_cache = unit_norm_forward(out)
        projected[name], caches[name] = out, (linear_cache, norm_cache)
    return projected, caches


# u = x W^T, y = u / |u| per head: du = (dy - y (y·dy)) / |u|, dx = sum of du W over the names, dW = du^T x
def head_projections_backward(dprojected, caches):
    """dx, summed over the projections that have a gradient, and {name: dW}."""
    dx, grads = 0.0, {}
    for name, dout in dprojected.items():
        linear_cache, norm_cache = caches[name]
        dlinear = dout if norm_cache is None else unit_norm_backward(dout, norm_cache)
        dx_of_name, grads[name] = linear_backward(merge_heads(dlinear), linear_cache)
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
    return inverse * (dunit - unit * (dunit * unit).sum(-1, keepdims=True))


def position_bucket(distance, buckets, max_distance):
    """T5's causal buckets: one for each distance below buckets/2, then logarithmic up to max_distance."""
    exact = buckets // 2
    distance = np.maximum(distance, 0)
    ratio = np.log(np.maximum(distance, exact) / exact) / np.log(max_distance / exact)
    coarse = np.minimum(exact + (ratio * (buckets - exact)).astype(int), buckets - 1)
    return np.where(distance < exact, distance, coarse)


def position_bias_forward(table, window, max_distance):
    """Bias of every query-key pair of a tile from the table (H, buckets)."""
    bucket = position_bucket(tile_distance(window), table.shape[1], max_distance)  # (W, 2W)
    return table[:, bucket], (bucket, table)  # (H, W, 2W)


# bias_ij = table[bucket(i - j)]: dtable[b] = sum of dbias_ij over all pairs i, j in bucket b
def position_bias_backward(dbias, cache):
    bucket, table = cache
    dtable = np.zeros_like(table)
    for b in range(table.shape[1]):
        dtable[:, b] = dbias[:, bucket == b].sum(-1)
    return dtable


def layer_norm_forward(p, name, x):
    """Zero mean and unit variance over the last axis of x, then scale and bias of that name."""
    centred = x - x.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + NORM_EPSILON)
    normal = centred * inverse
    scale = p[f"{name}.scale"]
    y = normal * scale + p[f"{name}.bias"]
    return y, (name, normal, inverse, scale)


# n = (x - mean x) / deviation: dx = (dn - mean(dn) - n mean(n dn)) / deviation
def layer_norm_backward(dy, cache):
    """Gradients of x, and of the scale and the bias by name."""
    name, normal, inverse, scale = cache
    dnormal = dy * scale
    mean = dnormal.mean(-1, keepdims=True)
    correlation = (dnormal * normal).mean(-1, keepdims=True)
    dx = inverse * (dnormal - mean - normal * correlation)

    sum_axes = tuple(range(dy.ndim - 1))  # all but the last
    dscale = (dy * normal).sum(sum_axes)
    dbias = dy.sum(sum_axes)
    return dx, {f"{name}.scale": dscale, f"{name}.bias": dbias}


def linear_forward(x, weight):
    """y = x W^T (..., out) for x (..., in) and weight (out, in)."""
    y = x @ weight.T
    return y, (x, weight)


# y = x W^T: dx = dy W, dW = dy^T x over all rows
def linear_backward(dy, cache):
    """Gradients of x (..., in) and of the weight (out, in)."""
    x, weight = cache
    dx = dy @ weight
    dy_rows = dy.reshape(-1, dy.shape[-1])
    x_rows = x.reshape(-1, x.shape[-1])
    dweight = dy_rows.T @ x_rows
    return dx, dweight


def softmax_forward(scores):
    """Softmax over the last axis; -inf scores get exactly zero."""
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    weights = exponentials / exponentials.sum(-1, keepdims=True)
    return weights, weights  # which are the cache too


# w = softmax(s): ds = w (dw - w·dw)
def softmax_backward(dweights, weights):
    mean = (dweights * weights).sum(-1, keepdims=True)
    return weights * (dweights - mean)


def dropout_forward(x, rate, rng):
    """Inverted dropout; rng None (evaluation) or rate 0 passes x through."""
    if rng is None or rate == 0:
        return x, None
    kept = rng.random(x.shape) >= rate
    dropout_mask = kept / (1 - rate)
    return x * dropout_mask, dropout_mask


def dropout_backward(dy, dropout_mask):
    return dy if dropout_mask is None else dy * dropout_mask


def cross_entropy_forward(logits, targets, scored):
    """Summed -log p of targets (B, N) at the scored (B, N) positions, in nats."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))  # (B, N, V)
    of_targets = np.take_along_axis(log_probabilities, targets[..., None], axis=-1)[..., 0]
    loss = -of_targets[scored].sum()
    return loss, (log_probabilities, targets, scored)


# loss = -log p_target, p = softmax(logits): dlogits = p - onehot(target)
def cross_entropy_backward(dloss, cache):
    log_probabilities, targets, scored = cache
    one_hot = np.arange(log_probabilities.shape[-1]) == targets[..., None]  # (B, N, V)
    dlogits = dloss * (np.exp(log_probabilities) - one_hot)
    return dlogits * scored[..., None]


def subtree(params, prefix):
    """The parameters below prefix, by their names without it."""
    return {
        name.removeprefix(prefix): array
        for name, array in params.items()
        if name.startswith(prefix)
    }


# ----------------------------------------------------------------------------
# variants: the LSTM gate, gates with an MLP (dual, single); a first reading skips them, and `feedback` and `shared` above
def lstm_gate_forward(p, carry, hidden):
    """Input and forget gates that depend on hidden (3.4); -1 and +1 bias them to remember (3.5)."""
    (z, z_cache), (i, i_cache), (f, f_cache) = (
        linear_forward(hidden, p[f"weight_{name}"]) for name in "zif"
    )
    z = np.tanh(z + p["bias_z"])  # Eq. 4
    i = sigmoid(i + p["bias_i"] - 1)  # Eq. 5
    f = sigmoid(f + p["bias_f"] + 1)  # Eq. 6
    return carry * f + z * i, ({"z": z_cache, "i": i_cache, "f": f_cache}, carry, z, i, f)  # Eq. 7


# c' = c f + z i: dc = dc' f; through tanh and sigmoids dc' i (1 - z²) for z, dc' z i (1 - i) for i, dc' c f (1 - f) for f
def lstm_gate_backward(dout, cache):
    linear_caches, carry, z, i, f = cache
    dlinear = {
        "z": dout * i * (1 - z**2),
        "i": dout * z * i * (1 - i),
        "f": dout * carry * f * (1 - f),
    }
    dhidden, grads = 0.0, {}
    for name, dname in dlinear.items():
        dhidden_of_name, grads[f"weight_{name}"] = linear_backward(dname, linear_caches[name])
        dhidden = dhidden + dhidden_of_name
        grads[f"bias_{name}"] = dname.sum((0, 1))
    return dout * f, dhidden, grads


GATES = {
    "fixed": (fixed_gate_forward, fixed_gate_backward),
    "lstm": (lstm_gate_forward, lstm_gate_backward),
}


def gating_forward(p, config, states, attended):
    """The next states, from states (B, S, D) and attended (B, S, 2HE): through a gate, an MLP with a gate, or both (3.6)."""
    gate_forward, _ = GATES[config.gate]
    carry, x, gate_cache, norm_cache = states, attended, None, None
    if config.configuration != "single":  # single: attention feeds the MLP directly
        carry, gate_cache = gate_forward(subtree(p, "attention_gate."), states, attended)
    if config.configuration == "skip":  # no MLP
        return carry, (gate_cache, None, None, None, None)
    if config.configuration == "dual":  # a gate for each residual (Figure 1)
        x, norm_cache = layer_norm_forward(p, "mlp_norm", carry)
    hidden, hidden_cache = linear_forward(x, p["mlp_hidden"])
    hidden = np.maximum(hidden, 0)  # (B, S, F), whose output layer is the gate's matrix (3.4)
    out, mlp_gate_cache = gate_forward(subtree(p, "mlp_gate."), carry, hidden)
    return out, (gate_cache, norm_cache, hidden_cache, hidden, mlp_gate_cache)


# m = gate(c, h), η = relu(W norm(m)), c' = gate(m, η): dm = its part of gate'(dc') + norm'(W^T (dη where η > 0)), dc from dm
def gating_backward(config, dout, cache):
    """Gradients of states, attended and the parameters."""
    _, gate_backward = GATES[config.gate]
    gate_cache, norm_cache, hidden_cache, hidden, mlp_gate_cache = cache
    dcarry, grads = dout, {}
    if config.configuration != "skip":
        dcarry, dhidden, dgate = gate_backward(dout, mlp_gate_cache)
        dx, dweight = linear_backward(dhidden * (hidden > 0), hidden_cache)
        grads |= {"mlp_hidden": dweight} | prefixed("mlp_gate.", dgate)
    if config.configuration == "single":
        return dcarry, dx, grads
    if config.configuration == "dual":
        dnorm_input, dnorm = layer_norm_backward(dx, norm_cache)
        dcarry = dcarry + dnorm_input
        grads |= dnorm
    dstates, dattended, dgate = gate_backward(dcarry, gate_cache)
    return dstates, dattended, grads | prefixed("attention_gate.", dgate)


# ----------------------------------------------------------------------------
# starting values: how every parameter is drawn; a first reading skips them
def init_params(config, rng):
    """All parameters as {dotted name: float64 array}; matrices are (out, in)."""
    params = {
        "embedding": rng.normal(0, 1, (config.vocabulary, config.width))
    }  # decision 13: starts at N(0, 1)
    for layer in range(config.layers):
        params |= prefixed(f"layers.{layer}.", init_layer(config, rng, layer))
    return params | prefixed("final_norm.", init_norm(config.width))


def init_layer(config, rng, layer):
    """Parameters of a layer, counted from 0 (decision 2: no biases here)."""
    d, h, he = config.width, config.heads, config.heads * config.head_width
    recurrent = layer + 1 in config.recurrent_layers
    reads_state = config.feedback or recurrent
    p = prefixed("norm.", init_norm(d)) | {
        name: init_linear(rng, he, d) for name in ("key", "value", "query")
    }
    p["scale"] = np.full(h, config.attention_scale)  # decision 5: a learned scale
    p["position_bias"] = rng.normal(
        0, config.buckets**-0.5, (h, config.buckets)
    )  # decision 6: variance 1/buckets
    if reads_state:
        p |= {
            "cross_query": init_linear(rng, he, d),
            "cross_scale": np.full(h, config.attention_scale),
        }
    p["output"] = init_linear(rng, d, 2 * he if reads_state else he)
    p |= prefixed("mlp_norm.", init_norm(d))
    p |= {
        "mlp_hidden": init_linear(rng, config.feed_forward, d),
        "mlp_output": init_linear(rng, d, config.feed_forward),
    }
    if recurrent:
        p |= prefixed("state.", init_recurrence(config, rng))
    return p


def init_recurrence(config, rng):
    """Parameters of the horizontal direction of one recurrent layer."""
    d, he = config.width, config.heads * config.head_width
    p = {
        "initial": rng.normal(0, 0.1, (config.states, d)),
        "ids": rng.normal(0, 1, (config.states, d)),
    }
    p |= prefixed("norm.", init_norm(d))
    p |= {name: init_linear(rng, he, d) for name in ("key", "value", "query", "cross_query")}
    p |= {name: np.full(config.heads, config.attention_scale) for name in ("scale", "cross_scale")}
    if config.configuration != "single":
        p |= prefixed("attention_gate.", init_gate(config, rng, 2 * he))
    if config.configuration == "dual":
        p |= prefixed("mlp_norm.", init_norm(d))
    if config.configuration != "skip":
        p["mlp_hidden"] = init_linear(
            rng, config.feed_forward, 2 * he if config.configuration == "single" else d
        )
        p |= prefixed("mlp_gate.", init_gate(config, rng, config.feed_forward))
    return p


def init_gate(config, rng, fan_in):
    """Section 3.5: gate biases N(0, 0.1^2), gate weights truncated normal (decision 3: variance 0.1 / fan_in)."""
    matrices, biases = {"fixed": ("z", "zg"), "lstm": ("zif", "zif")}[config.gate]
    gate = {
        f"weight_{m}": init_linear(rng, config.width, fan_in, (0.1 / fan_in) ** 0.5)
        for m in matrices
    }
    return gate | {f"bias_{m}": rng.normal(0, 0.1, config.width) for m in biases}


def init_linear(rng, fan_out, fan_in, deviation=None):
    """A matrix (out, in) of a normal cut at two sigma; deviation after the cut, or 1 / sqrt(in)."""
    if deviation is None:
        deviation = fan_in**-0.5
    draw = rng.standard_normal((fan_out, fan_in))
    outside = np.abs(draw) > 2
    while outside.any():
        draw[outside] = rng.standard_normal(int(outside.sum()))
        outside = np.abs(draw) > 2
    return draw * (deviation / 0.8796256610342398)  # which the cut leaves of a deviation of 1


def init_norm(width):
    return {"scale": np.ones(width), "bias": np.zeros(width)}


# ----------------------------------------------------------------------------
# checks: what Config refuses; a first reading skips them
def check_config(config):
    """Raise ValueError, naming the field, for a config that cannot work."""
    for name in (
        "vocabulary",
        "width",
        "layers",
        "heads",
        "head_width",
        "feed_forward",
        "window",
        "segment",
        "states",
    ):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least 1")
    n, w, layers, recurrent, kind = (
        config.segment,
        config.window,
        config.layers,
        config.recurrent_layers,
        config.configuration,
    )
    buckets, far, rate, scale = (
        config.buckets,
        config.max_distance,
        config.dropout,
        config.attention_scale,
    )
    refused = {
        f"segment {n} is not a multiple of window {w}; the nearest is {max(1, round(n / w)) * w}": n
        % w,
        f"recurrent_layers names {recurrent}; they must lie in 1..{layers}": any(
            not 1 <= layer <= layers for layer in recurrent
        ),
        f"recurrent_layers {recurrent} must be a tuple, ascending, each layer once": tuple(
            sorted(set(recurrent))
        )
        != recurrent,
        f"gate is {config.gate!r}; it must be 'fixed' or 'lstm'": config.gate not in GATES,
        f"configuration is {kind!r}; it must be 'dual', 'single' or 'skip'": kind
        not in ("dual", "single", "skip"),
        f"feedback needs exactly one recurrent layer; recurrent_layers is {recurrent}": config.feedback
        and len(recurrent) != 1,
        f"buckets is {buckets}; it must be even and at least 2": buckets < 2 or buckets % 2,
        f"max_distance {far} must exceed half of buckets {buckets}": far <= buckets // 2,
        f"dropout is {rate}; it must be at least 0 and below 1": not 0 <= rate < 1,
        f"attention_scale is {scale}; it must be positive and finite": not 0 < scale < np.inf,
    }
    for message, wrong in refused.items():
        if wrong:
            raise ValueError(message)


if __name__ == "__main__":
    if sys.argv[1:]:  # --check [--case NAME] is a program of its own
        sys.argv.insert(1, "block_recurrent")
        runpy.run_module("reference.gradients", run_name="__main__")
    demonstrate()
