"""Gated DeltaNet (Yang, Kautz, Hatamizadeh, 2024) in NumPy.

Each head of each layer has a matrix S that answers a key with a value. A token lets it fade, looks
up what it answers to the token's key, and adds what is missing to the token's value. So an old key
gets a new value, and other keys keep theirs. `forward` maps (tokens, state) to (logits, next
state). `backward` maps the gradient of the next state to that of the incoming state. `params` are
all parameters, {dotted name: array}, and `p` those of one part, without its prefix. A first reading
ends with the model. Decisions are numbered in docs/decisions/gated_deltanet.md.

Glossary: code symbol, meaning, paper symbol, shape
    tokens         token ids of one segment; their vectors are x                (B, N); x: (B, N, D)
    query          reads the matrix                                     q        (B, H, N, E)
    key            what a value is stored under, unit length            k        (B, H, N, E)
    value          what the matrix should answer to the key             v        (B, H, N, P)
    strength       how much of the missing part is written, 0 to 1      beta     (B, H, N, 1)
    decay          what is left of the matrix from token to token       alpha    (B, H, N, 1)
    matrix         the memory of a head; transposed in the paper        S        (B, H, E, P)
    read           what the matrix answers to the query                 o        (B, H, N, P)
    mixed          queries, keys and values of all heads side by side            (B, N, C)
    missing        what the faded matrix lacks to answer the key with the value  (B, H, P, 1)

B batch (lanes), N tokens in a segment, D width, H heads, E width of a head's keys, P width of its
values, C = H (2E + P), F feed-forward width, V vocabulary, L layers.
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
        heads: H, matrices of a layer
        head_width: E, width of a head's keys and queries
        value_width: P, width of a head's values
        feed_forward: F, width of the feed-forward hidden layer
        segment: N, tokens in a segment
        dropout: dropout rate in training, 0 to below 1
    """

    vocabulary: int = 256
    width: int = 128
    layers: int = 4
    heads: int = 4
    head_width: int = 32
    value_width: int = 32
    feed_forward: int = 256
    segment: int = 64
    dropout: float = 0.0

    def __post_init__(self):
        check_config(self)


class State(NamedTuple):
    """What a segment hands to the next one; axis 0 of both fields is the lane.

    Gradient flows through both (decision 9: whole state).
    """

    matrices: np.ndarray  # (B, L, H, E, P)
    inputs: np.ndarray  # (B, L, 3, C), the last ones of each layer's convolution


# ----------------------------------------------------------------------------
# the method: a token changes the matrix by what it answers wrongly, and asks it
def delta_rule_forward(query, key, value, strength, decay, matrix):
    """Read (B, H, N, P) by each query, and the matrix after the segment (Equation 10).

    Shapes are those of the glossary; matrix is the one before the segment.
    """
    read = []
    steps = []
    for q, k, v, b, a in zip(*map(columns, (query, key, value, strength, decay)), strict=True):
        before = matrix
        faded = a * matrix
        missing = v - faded.mT @ k  # (B, H, P, 1)
        matrix = faded + k @ (b * missing).mT
        read.append(matrix.mT @ q)
        steps.append((q, k, b, a, before, missing, matrix))
    return np.stack(read, axis=2)[..., 0], matrix, steps


# F = a S, m = v - F^T k, w = b m, S' = F + k w^T, y = S'^T q, from the last token to the first:
# dS' += q dy^T, dq = S' dy, dw = dS'^T k, db = m·dw, dv = dm = b dw,
# dF = dS' - k dm^T, dk = dS' w - F dm, da = S·dF, dS = a dF
def delta_rule_backward(dread, dlast, steps):
    """Gradients of query, key, value, strength, decay and matrix."""
    grads = []
    dmatrix = dlast
    for dy, step in zip(columns(dread)[::-1], steps[::-1], strict=True):
        q, k, b, a, before, missing, after = step
        dmatrix = dmatrix + q @ dy.mT
        dwritten = dmatrix.mT @ k  # (B, H, P, 1)
        dmissing = b * dwritten
        dfaded = dmatrix - k @ dmissing.mT
        dk = dmatrix @ (b * missing) - a * before @ dmissing
        db = (dwritten * missing).sum(2, keepdims=True)
        da = (dfaded * before).sum((2, 3), keepdims=True)
        grads.append((after @ dy, dk, dmissing, db, da))
        dmatrix = a * dfaded
    rows = [np.stack(each[::-1], axis=2)[..., 0] for each in zip(*grads, strict=True)]
    return *rows, dmatrix


def columns(rows):
    """Each token's row of rows (B, H, N, E) as a column, (N, B, H, E, 1)."""
    return np.moveaxis(rows[..., None], 2, 0)


def gates_forward(p, asked, step):
    """Strength and decay of asked, step (B, H, N, 1), which are W_b x and W_a x.

    Strength is sigmoid(W_b x) (decision 5: between 0 and 1). Decay is
    exp(-exp(A) softplus(W_a x + bias)) (decision 6: start of fading).
    """
    rate = np.exp(p["decay_rate"])[:, None, None]
    step = step + p["decay_bias"][:, None, None]
    strength = sigmoid(asked)
    decay = np.exp(-rate * np.logaddexp(0, step))
    return strength, decay, (rate, step, strength, decay)


# s = σ(u): du = ds s (1 - s). a = exp(l), l = -e^A softplus(z): dl = da a, dA = l dl,
# dz = -e^A σ(z) dl
def gates_backward(dstrength, ddecay, cache):
    rate, step, strength, decay = cache
    dasked = dstrength * strength * (1 - strength)
    dlog = ddecay * decay
    dstep = -rate * sigmoid(step) * dlog
    drate = -rate * np.logaddexp(0, step) * dlog
    grads = {"decay_bias": dstep.sum((0, 2, 3)), "decay_rate": drate.sum((0, 2, 3))}
    return dasked, dstep, grads


def convolution_forward(x, taps, before):
    """Each column of x (B, N, C) filtered by its taps (C, 4), and the last three inputs.

    before (B, 3, C) are the three inputs before the segment (decision 2: four taps).
    """
    rows = np.concatenate([before, x], axis=1)  # (B, 3 + N, C)
    windows = np.lib.stride_tricks.sliding_window_view(rows, TAPS, axis=1)  # (B, N, C, 4)
    return (windows * taps).sum(-1), rows[:, x.shape[1] :], (windows, taps)


# y_t = Σ_j f_j r_{t+j}: dr_{t+j} += f_j dy_t, df_j = Σ_t dy_t r_{t+j}
def convolution_backward(dy, dlast, cache):
    """Gradients of x, taps and before."""
    windows, taps = cache
    n = dy.shape[1]
    drows = np.concatenate([np.zeros_like(dy), dlast], axis=1)
    for j in range(TAPS):
        drows[:, j : j + n] += dy * taps[:, j]
    dtaps = (dy[..., None] * windows).sum((0, 1))
    return drows[:, TAPS - 1 :], dtaps, drows[:, : TAPS - 1]


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
    next_state = State(*map(np.zeros_like, state))
    caches = []
    for layer in range(config.layers):
        p = subtree(params, f"layers.{layer}.")
        before = (state.matrices[:, layer], state.inputs[:, layer])
        x, after, cache = layer_forward(p, config, x, before, rng)
        next_state.matrices[:, layer], next_state.inputs[:, layer] = after
        caches.append(cache)
    normed, norm_cache = rms_norm_forward(x, params["final_norm"])
    scaled = normed * config.width**-0.5  # decision 10: tied and scaled
    logits, output_cache = linear_forward(scaled, params["embedding"])
    return logits, next_state, (tokens, caches, norm_cache, output_cache)


# M the embedding: logits = norm(y) M^T / sqrt(D), x = M[tokens]:
# dM = dlogits^T norm(y) / sqrt(D) + dx at the tokens' rows
def backward(params, config, cache, dlogits, dnext_state=None):
    """Gradients of the parameters and of the incoming state. dnext_state None stands for zeros."""
    tokens, caches, norm_cache, output_cache = cache
    dstate = initial_state(params, config, len(tokens))
    if dnext_state is None:
        dnext_state = initial_state(params, config, len(tokens))

    dscaled, dembedding = linear_backward(dlogits, output_cache)
    dx, dnorm = rms_norm_backward(dscaled * config.width**-0.5, norm_cache)
    grads = {"final_norm": dnorm}
    for layer in reversed(range(config.layers)):
        dafter = (dnext_state.matrices[:, layer], dnext_state.inputs[:, layer])
        dx, dbefore, dlayer = layer_backward(config, dx, dafter, caches[layer])
        dstate.matrices[:, layer], dstate.inputs[:, layer] = dbefore
        grads |= prefixed(f"layers.{layer}.", dlayer)
    np.add.at(dembedding, tokens, dx)  # the tied embedding's second gradient
    return grads | {"embedding": dembedding}, dstate


def layer_forward(p, config, x, before, rng):
    """y (B, N, D), the matrices and inputs after the segment, and the cache."""
    normed, norm_cache = rms_norm_forward(x, p["norm"])  # decision 1: before each sublayer
    out, after, mixer_cache = mixer_forward(p, config, normed, before)
    out, dropout_mask = dropout(out, config.dropout, rng)  # decision 11: after each sublayer
    y, mlp_cache = swiglu_forward(p, config, x + out, rng)
    return y, after, (norm_cache, mixer_cache, dropout_mask, mlp_cache)


# y = x + f(norm(x)): dx = dy + norm'(f'(dy))
def layer_backward(config, dy, dafter, cache):
    norm_cache, mixer_cache, dropout_mask, mlp_cache = cache
    dx, grads = swiglu_backward(dy, mlp_cache)
    dnormed, dbefore, dmixer = mixer_backward(config, dx * dropout_mask, dafter, mixer_cache)
    dinput, dnorm = rms_norm_backward(dnormed, norm_cache)
    return dx + dinput, dbefore, grads | dmixer | {"norm": dnorm}


def mixer_forward(p, config, x, before):
    """W_o (norm(read) silu(W_g x)) of tokens x, and what comes after the segment.

    before: the layer's matrices and inputs.
    """
    matrix, inputs = before
    projected, projected_cache = linear_forward(x, p["input"])  # W_q, W_k, W_v, W_g, W_b, W_a
    mixed, opened, asked, step = np.split(projected, ends_of(config), axis=-1)
    filtered, inputs, taps_cache = convolution_forward(mixed, p["taps"], inputs)
    active, active_cache = silu_forward(filtered)
    inner = config.heads * config.head_width
    parts = [*np.split(active, [inner, 2 * inner], axis=-1), asked, step]
    query, key, value, asked, step = [split_heads(part, config.heads) for part in parts]
    # decision 4: the query's scale
    query, query_cache = rms_norm_forward(query, 1 / config.head_width)
    # decision 3: keys and queries
    key, key_cache = rms_norm_forward(key, config.head_width**-0.5)
    strength, decay, gates_cache = gates_forward(p, asked, step)
    read, matrix, rule_cache = delta_rule_forward(query, key, value, strength, decay, matrix)

    normed, norm_cache = rms_norm_forward(read, p["read_norm"])  # decision 7: norm and gate
    gated, gated_cache = silu_gate_forward(opened, merge_heads(normed))  # (B, N, HP)
    out, output_cache = linear_forward(gated, p["output"])
    caches_of_rows = (projected_cache, taps_cache, active_cache, query_cache, key_cache)
    caches = (*caches_of_rows, gates_cache, rule_cache, norm_cache, gated_cache, output_cache)
    return out, (matrix, inputs), caches


# q, k, v, g, b, a are columns of one product: their gradients, side by side, are the product's
def mixer_backward(config, dout, dafter, cache):
    projected_cache, taps_cache, active_cache, query_cache, key_cache, *caches = cache
    gates_cache, rule_cache, norm_cache, gated_cache, output_cache = caches
    dmatrix, dinputs = dafter
    dgated, doutput = linear_backward(dout, output_cache)
    dopened, dnormed = silu_gate_backward(dgated, gated_cache)
    dread, dnorm = rms_norm_backward(split_heads(dnormed, config.heads), norm_cache)

    *drows, dstrength, ddecay, dmatrix = delta_rule_backward(dread, dmatrix, rule_cache)
    dasked, dstep, grads = gates_backward(dstrength, ddecay, gates_cache)
    drows[0], _ = rms_norm_backward(drows[0], query_cache)
    drows[1], _ = rms_norm_backward(drows[1], key_cache)
    dactive = np.concatenate([merge_heads(rows) for rows in drows], axis=-1)
    dfiltered = silu_backward(dactive, active_cache)
    dmixed, dtaps, dinputs = convolution_backward(dfiltered, dinputs, taps_cache)
    dparts = [dmixed, dopened, merge_heads(dasked), merge_heads(dstep)]
    dx, dinput = linear_backward(np.concatenate(dparts, axis=-1), projected_cache)
    grads |= {"input": dinput, "taps": dtaps, "read_norm": dnorm, "output": doutput}
    return dx, (dmatrix, dinputs), grads


def ends_of(config):
    """Where the columns of mixed, of the gate and of strengths end in the projection of x."""
    inner = config.heads * config.value_width
    mixed = 2 * config.heads * config.head_width + inner
    return mixed, mixed + inner, mixed + inner + config.heads


# ----------------------------------------------------------------------------
# through segments: what a document starts with (decision 9: whole state)
def initial_state(params, config, batch):
    """What a document starts with: zeros."""
    c = config
    mixed, _, _ = ends_of(config)
    matrices = np.zeros((batch, c.layers, c.heads, c.head_width, c.value_width))
    return State(matrices, np.zeros((batch, c.layers, TAPS - 1, mixed)))


# ----------------------------------------------------------------------------
# what every Transformer has: norms, MLP, linear layers, loss; skip if familiar
TAPS = 4  # of a convolution
NORM_EPSILON = 1e-6  # of rms_norm, below the root (decision 1: epsilon is 1e-6)


def swiglu_forward(p, config, x, rng):
    """x + dropout(W_2 (silu(g) h)), [g, h] = W_1 norm(x) (decision 8: a SwiGLU)."""
    normed, norm_cache = rms_norm_forward(x, p["mlp_norm"])
    both, hidden_cache = linear_forward(normed, p["mlp_hidden"])
    opened, hidden = np.split(both, 2, axis=-1)  # (B, N, F)
    gated, gated_cache = silu_gate_forward(opened, hidden)
    out, output_cache = linear_forward(gated, p["mlp_output"])
    out, dropout_mask = dropout(out, config.dropout, rng)
    return x + out, (norm_cache, hidden_cache, gated_cache, output_cache, dropout_mask)


# y = x + W_2 (silu(g) h): d = W_2^T dy, dg = silu'(h d), dh = silu(g) d
def swiglu_backward(dy, cache):
    norm_cache, hidden_cache, gated_cache, output_cache, dropout_mask = cache
    dgated, doutput = linear_backward(dy * dropout_mask, output_cache)
    dboth = np.concatenate(silu_gate_backward(dgated, gated_cache), axis=-1)
    dnormed, dhidden = linear_backward(dboth, hidden_cache)
    dx, dnorm = rms_norm_backward(dnormed, norm_cache)
    return dy + dx, {"mlp_norm": dnorm, "mlp_hidden": dhidden, "mlp_output": doutput}


def rms_norm_forward(x, scale):
    """Mean square 1 over the last axis of x, then a scale."""
    inverse = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + NORM_EPSILON)
    standard = x * inverse
    return standard * scale, (standard, inverse, scale)


# n = x / r: dx = (dn - n mean(n dn)) / r
def rms_norm_backward(dy, cache):
    standard, inverse, scale = cache
    dstandard = dy * scale
    along = (dstandard * standard).mean(-1, keepdims=True)
    dscale = (dy * standard).sum(tuple(range(dy.ndim - 1)))
    return inverse * (dstandard - standard * along), dscale


def silu_gate_forward(opened, x):
    """silu(opened) x, a gate."""
    gate, silu_cache = silu_forward(opened)
    return gate * x, (gate, x, silu_cache)


# y = silu(g) x: dg = silu'(x dy), dx = silu(g) dy
def silu_gate_backward(dy, cache):
    """Gradients of opened and x."""
    gate, x, silu_cache = cache
    return silu_backward(dy * x, silu_cache), dy * gate


def silu_forward(x):
    """x sigmoid(x)"""
    return x * sigmoid(x), x


# y = x σ(x): dx = dy σ(x) (1 + x (1 - σ(x)))
def silu_backward(dy, x):
    share = sigmoid(x)
    return dy * share * (1 + x * (1 - share))


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
    # decision 10: tied with output
    params = {"embedding": rng.normal(0, 1, (config.vocabulary, config.width))}
    for layer in range(config.layers):
        params |= prefixed(f"layers.{layer}.", init_layer(config, rng))
    return params | {"final_norm": np.ones(config.width)}


def init_layer(config, rng):
    """Parameters of a layer; its matrices have no biases."""
    d = config.width
    h = config.heads
    f = config.feed_forward
    mixed, gate, _ = ends_of(config)
    p = {"norm": np.ones(d), "input": init_linear(rng, gate + 2 * h, d)}
    p["taps"] = rng.uniform(-0.5, 0.5, (mixed, TAPS))  # decision 2: as torch's convolutions
    step = np.exp(rng.uniform(np.log(0.001), np.log(0.1), h))
    p["decay_bias"] = np.log(np.expm1(step))  # softplus makes it the step again
    p["decay_rate"] = np.log(rng.uniform(0, 16, h))
    p["read_norm"] = np.ones(config.value_width)
    p["output"] = init_linear(rng, d, h * config.value_width)
    p["mlp_norm"] = np.ones(d)
    p["mlp_hidden"] = init_linear(rng, 2 * f, d)
    p["mlp_output"] = init_linear(rng, d, f)
    return p


def init_linear(rng, fan_out, fan_in, gain=1.0):
    """Truncated-normal matrix (out, in), cut at two sigma; standard deviation gain / sqrt(in)."""
    draw = rng.standard_normal((fan_out, fan_in))
    while (outside := np.abs(draw) > 2).any():
        draw[outside] = rng.standard_normal(outside.sum())
    deviation = gain * fan_in**-0.5
    return draw * (deviation / 0.8796256610342398)  # standard deviation of N(0, 1) cut at 2


# ----------------------------------------------------------------------------
# checks: what Config refuses; a first reading skips them
def check_config(config):
    """Raise ValueError, naming the field, for a config that cannot work."""
    for name, kind in Config.__annotations__.items():
        value = getattr(config, name)
        if kind is int and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout is {config.dropout}; it must be at least 0 and below 1")


if __name__ == "__main__":  # a demonstration, or --check [--case NAME]
    raise SystemExit(importlib.import_module("reference.gradients").main("gated_deltanet"))
