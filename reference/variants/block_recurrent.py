"""Variants of Block-Recurrent Transformers: gates with an MLP, the LSTM gate, feedback.

`reference/block_recurrent.py` has the method. For a config that asks for one of these,
`operations_of` replaces some of the paper's functions by functions of the same signature:

    gate            lstm: gates that depend on what was attended to (Eqs. 4-7)
    configuration   dual or single: the states pass an MLP, too (3.6)
    feedback        every layer reads the states that the block before left (3.7)
    output_dropout  entries are dropped before the output layer (decision 13: as released)
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from reference import block_recurrent as paper


# ----------------------------------------------------------------------------
# the LSTM gate
def lstm_gate_forward(p, carry, hidden):
    """Input and forget gates that depend on hidden (3.4); -1 and +1 bias them to remember (3.5)."""
    z_linear, z_cache = paper.linear_forward(hidden, p["weight_z"])
    i_linear, i_cache = paper.linear_forward(hidden, p["weight_i"])
    f_linear, f_cache = paper.linear_forward(hidden, p["weight_f"])
    z = np.tanh(z_linear + p["bias_z"])  # Eq. 4
    i = paper.sigmoid(i_linear + p["bias_i"] - 1)  # Eq. 5
    f = paper.sigmoid(f_linear + p["bias_f"] + 1)  # Eq. 6
    out = carry * f + z * i  # Eq. 7
    return out, (z_cache, i_cache, f_cache, carry, z, i, f)


# c' = c f + z i: dc = dc' f; through tanh and sigmoids dc' i (1 - z²) for z,
# dc' z i (1 - i) for i, dc' c f (1 - f) for f
def lstm_gate_backward(dout, cache):
    """Gradients of the carry, of hidden and of the parameters."""
    z_cache, i_cache, f_cache, carry, z, i, f = cache
    dcarry = dout * f
    dz_linear = dout * i * (1 - z**2)
    di_linear = dout * z * i * (1 - i)
    df_linear = dout * carry * f * (1 - f)

    grads = {}
    dhidden_z, grads["weight_z"] = paper.linear_backward(dz_linear, z_cache)
    grads["bias_z"] = dz_linear.sum((0, 1))
    dhidden_i, grads["weight_i"] = paper.linear_backward(di_linear, i_cache)
    grads["bias_i"] = di_linear.sum((0, 1))
    dhidden_f, grads["weight_f"] = paper.linear_backward(df_linear, f_cache)
    grads["bias_f"] = df_linear.sum((0, 1))
    return dcarry, dhidden_z + dhidden_i + dhidden_f, grads


def init_lstm_gate(config, rng, fan_in):
    """Section 3.5: biases N(0, 0.1^2), weights cut normal (decision 3: variance 0.1 / fan_in)."""
    gate = {}
    for name in "zif":
        gate[f"weight_{name}"] = paper.init_linear(rng, config.width, fan_in, 0.1**0.5)
    for name in "zif":
        gate[f"bias_{name}"] = rng.normal(0, 0.1, config.width)
    return gate


class Gate(NamedTuple):
    """A gate's functions."""

    forward: Callable
    backward: Callable
    init: Callable


GATES = ("fixed", "lstm")


def gate_of(config):
    """The Gate that config names; the paper's functions are looked up at each call."""
    if config.gate == "fixed":
        return Gate(paper.fixed_gate_forward, paper.fixed_gate_backward, paper.init_gate)
    return Gate(lstm_gate_forward, lstm_gate_backward, init_lstm_gate)


# ----------------------------------------------------------------------------
# configurations: the gate alone (skip), an MLP with a gate (single), one after the other (dual)
def skip_gating_forward(p, config, states, attended):
    """The next states, by either gate."""
    gate = gate_of(config)
    return gate.forward(paper.subtree(p, "attention_gate."), states, attended)


def skip_gating_backward(config, dnext_states, cache):
    """Gradients of states, attended and the parameters."""
    gate = gate_of(config)
    dstates, dattended, dgate = gate.backward(dnext_states, cache)
    return dstates, dattended, paper.prefixed("attention_gate.", dgate)


def gated_mlp_forward(p, config, carry, x):
    """The carry (B, S, D) after relu(W x), whose output layer is the gate's matrix (3.4)."""
    gate = gate_of(config)
    before, hidden_cache = paper.linear_forward(x, p["mlp_hidden"])
    hidden = np.maximum(before, 0)  # (B, S, F)
    out, gate_cache = gate.forward(paper.subtree(p, "mlp_gate."), carry, hidden)
    return out, (hidden_cache, hidden, gate_cache)


# c' = gate(c, η), η = relu(W x): dx = W^T (dη where η > 0)
def gated_mlp_backward(config, dout, cache):
    """Gradients of carry, x and the parameters."""
    gate = gate_of(config)
    hidden_cache, hidden, gate_cache = cache
    dcarry, dhidden, dgate = gate.backward(dout, gate_cache)
    dbefore = dhidden * (hidden > 0)
    dx, dweight = paper.linear_backward(dbefore, hidden_cache)
    return dcarry, dx, {"mlp_hidden": dweight} | paper.prefixed("mlp_gate.", dgate)


def dual_gating_forward(p, config, states, attended):
    """The next states, by a gate for each residual (Figure 1)."""
    middle, gate_cache = skip_gating_forward(p, config, states, attended)
    normed, norm_cache = paper.layer_norm_forward(p, "mlp_norm", middle)
    out, mlp_cache = gated_mlp_forward(p, config, middle, normed)
    return out, (gate_cache, norm_cache, mlp_cache)


# m = gate(c, h), c' = mlp(m, norm(m)): dm = the carry's part + norm'(the MLP's), dc from dm
def dual_gating_backward(config, dnext_states, cache):
    """Gradients of states, attended and the parameters."""
    gate_cache, norm_cache, mlp_cache = cache
    dmiddle, dnormed, grads = gated_mlp_backward(config, dnext_states, mlp_cache)
    dmiddle_normed, dnorm = paper.layer_norm_backward(dnormed, norm_cache)
    dstates, dattended, dgate = skip_gating_backward(config, dmiddle + dmiddle_normed, gate_cache)
    return dstates, dattended, grads | dnorm | dgate


def init_skip_gating(config, rng):
    """Parameters of the gate alone."""
    attended = 2 * config.heads * config.head_width
    gate = gate_of(config).init(config, rng, attended)
    return paper.prefixed("attention_gate.", gate)


def init_single_gating(config, rng):
    """Parameters of the MLP that reads what was attended to, and of its gate."""
    return init_gated_mlp(config, rng, 2 * config.heads * config.head_width)


def init_dual_gating(config, rng):
    """Parameters of the gate, and of an MLP behind it."""
    p = init_skip_gating(config, rng) | paper.init_norm("mlp_norm", config.width)
    return p | init_gated_mlp(config, rng, config.width)


def init_gated_mlp(config, rng, fan_in):
    """Parameters of an MLP whose output layer is a gate's matrix."""
    p = {"mlp_hidden": paper.init_linear(rng, config.feed_forward, fan_in)}
    gate = gate_of(config).init(config, rng, config.feed_forward)
    return p | paper.prefixed("mlp_gate.", gate)


# ----------------------------------------------------------------------------
# feedback: block by block, layers without states read what the last recurrent one left
def feedback_stack_forward(params, config, x, state, rng):
    """All layers over x (B, N, D), block by block (decision 12: feedback, block by block)."""
    outs = []
    caches = []
    for own, _ in paper.blocks_of(x.shape[1], config.window):
        y, state, cache = feedback_block_forward(params, config, x[:, own], state, rng)
        outs.append(y)
        caches.append(cache)
    return np.concatenate(outs, axis=1), state, caches


def feedback_stack_backward(config, dy, dnext, caches):
    """Gradients of x, of the incoming State and of all layers' parameters."""
    dx = np.zeros_like(dy)
    grads = {}
    blocks = paper.blocks_of(dy.shape[1], config.window)
    for t in reversed(range(len(blocks))):
        own, _ = blocks[t]
        dx[:, own], dnext, dblock = feedback_block_backward(config, dy[:, own], dnext, caches[t])
        paper.add_into(grads, dblock)
    return dx, dnext, grads


def feedback_block_forward(params, config, x, state, rng):
    """All layers over one block x (B, W, D) (3.7)."""
    # decision 12: the last recurrent layer's own matrices project what the block before left
    owner = paper.subtree(params, owner_of(config))
    projected, projection_cache = paper.state_projection_forward(owner, config, state.states[:, -1])
    shared = {f"shared_{name}": projected[name] for name in ("key", "value")}  # (B, H, S, E)
    for layer in range(config.layers):
        params = params | paper.prefixed(f"layers.{layer}.state.", shared)
    y, next_state, caches = paper.stack_forward(params, config, x, state, rng)
    return y, next_state, (projection_cache, caches)


# layers without states all read one K_s, V_s: their gradients are summed over those layers
def feedback_block_backward(config, dy, dnext, cache):
    """Gradients of x, of the incoming State and of all layers' parameters."""
    projection_cache, caches = cache
    dx, dstate, grads = paper.stack_backward(config, dy, dnext, caches)
    dshared = {}
    for name in [*grads]:
        _, is_shared, read = name.partition("shared_")
        if is_shared:
            paper.add_into(dshared, {read: grads.pop(name)})
    if dshared:  # empty if every layer is recurrent
        dlast_states, downer = paper.state_projection_backward(dshared, projection_cache)
        dstate.states[:, -1] += dlast_states
        paper.add_into(grads, paper.prefixed(owner_of(config), downer))
    return dx, dstate, grads


def owner_of(config):
    """The prefix of the parameters that project the shared states."""
    return f"layers.{config.recurrent_layers[-1] - 1}.state."


def reading_recurrence_forward(p, config, cross_query, cross_scale, keys, values, states):
    """The recurrence; a layer without states of its own only reads the shared ones."""
    if states is not None:
        return paper.recurrence_forward(p, config, cross_query, cross_scale, keys, values, states)
    out, cache = paper.attention_forward(
        cross_query, p["shared_key"], p["shared_value"], cross_scale
    )
    return out, None, cache


def reading_recurrence_backward(config, dout, dstates, cache, dkeys, dvalues):
    """As `recurrence_backward`; shared keys and values have gradients among the parameters."""
    if dstates is not None:
        return paper.recurrence_backward(config, dout, dstates, cache, dkeys, dvalues)
    dquery, dkey, dvalue, dscale, _ = paper.attention_backward(dout, cache)
    return dquery, dscale, None, {"shared_key": dkey, "shared_value": dvalue}


def every_layer(config):
    """The layers whose tokens read states, counted from 1."""
    return range(1, config.layers + 1)


# ----------------------------------------------------------------------------
# output dropout
def dropped_output_forward(params, config, y, rng):
    """Logits (B, N, V) of y (B, N, D), of which entries are dropped after the norm."""
    normed, norm_cache = paper.layer_norm_forward(params, "final_norm", y)
    dropped, dropout_mask = paper.dropout(normed, config.dropout, rng)
    scaled = dropped * config.width**-0.5
    logits, linear_cache = paper.linear_forward(scaled, params["embedding"])
    return logits, (norm_cache, dropout_mask, linear_cache)


def dropped_output_backward(config, dlogits, cache):
    """Gradients of y and of the parameters."""
    norm_cache, dropout_mask, linear_cache = cache
    dscaled, dembedding = paper.linear_backward(dlogits, linear_cache)
    dnormed = dscaled * config.width**-0.5 * dropout_mask
    dy, grads = paper.layer_norm_backward(dnormed, norm_cache)
    return dy, grads | {"embedding": dembedding}


# ----------------------------------------------------------------------------
# operations
CONFIGURATIONS = {
    "skip": (skip_gating_forward, skip_gating_backward, init_skip_gating),
    "single": (gated_mlp_forward, gated_mlp_backward, init_single_gating),
    "dual": (dual_gating_forward, dual_gating_backward, init_dual_gating),
}


def operations_of(config):
    """The paper's operations, some replaced by those of the variants that the config asks for.

    Raises ValueError, naming the field, for an unknown gate or configuration.
    """
    check_config(config)
    forward, backward, init = CONFIGURATIONS[config.configuration]
    replaced = {"gating_forward": forward, "gating_backward": backward, "init_gating": init}
    if config.feedback:
        replaced |= {
            "recurrence_forward": reading_recurrence_forward,
            "recurrence_backward": reading_recurrence_backward,
            "stack_forward": feedback_stack_forward,
            "stack_backward": feedback_stack_backward,
            "reading_layers": every_layer,
        }
    if config.output_dropout:
        replaced |= {
            "output_forward": dropped_output_forward,
            "output_backward": dropped_output_backward,
        }
    return paper.operations_with(**replaced)


def check_config(config):
    """Raise ValueError, naming the field, for an unknown variant."""
    if config.gate not in GATES:
        raise ValueError(f"gate is {config.gate!r}; it must be 'fixed' or 'lstm'")
    if config.configuration not in CONFIGURATIONS:
        raise ValueError(
            f"configuration is {config.configuration!r}; it must be 'dual', 'single' or 'skip'"
        )
    if config.feedback and not config.recurrent_layers:
        raise ValueError("feedback needs a recurrent layer; recurrent_layers has none")
