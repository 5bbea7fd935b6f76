"""Adding Recurrence to Pretrained Transformers (anonymous, under review for ICLR 2021), in NumPy.

GPT-2 knows nothing of the text before its window. Here the outputs of all its layers over a window
are pooled to one vector z. A small feed-forward network makes h_prev of z, and one layer of the
next window attends to h_prev beside its own tokens. z is all that passes from window to window.
GPT-2 and the new parameters are trained together, by back-propagation through the windows.
`forward` maps (tokens, state) to (logits, next state), `backward` the gradient of the next state to
that of the incoming one. `params` are all parameters, {dotted name: array}, and `p` those of one
part, without its prefix; `grads` and `d..._params` are gradients of parameters by name.

Glossary: code symbol, meaning, paper symbol, shape
    tokens            token ids of one window                        t_1 .. t_T   (B, N)
    x                 a layer's input, then its output               h^(l)        (B, N, D)
    layer_scores      parameter; softmax makes the layers' shares    alpha; w     (L,)
    mixed             the layers' outputs, summed in those shares                 (B, N, D)
    pooled            mixed, pooled over positions: state.pooled     z            (B, D)
    inserted          what the network makes of pooled               h_prev       (B, S, D)
    insertion_layers  the layers that see inserted                   l_ins
    present           whether a window came before                                (B,)

N is T except in a short last window. B batch (lanes, each of which reads one document after
another), D width (the paper's k), H heads, E head width, F feed-forward width, V vocabulary, L
layers, S inserted vectors (1 in the paper). Layers are counted from 1; in parameters' names from 0.
Decisions: docs/decisions/pretrained_recurrence.md. Other poolings: reference/variants/.
"""

import importlib
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np


# ----------------------------------------------------------------------------
# configuration: sizes, and what a window hands to the next one
@dataclass(frozen=True)
class Config:
    """Sizes and variants of the model; impossible combinations raise ValueError naming the field.

    Fields:
        vocabulary: V, number of token ids
        width: D, model width, a multiple of heads
        layers: L, number of layers
        heads: H, attention heads
        feed_forward: F, width of the feed-forward hidden layer
        max_positions: rows of the position embedding; no window can be longer
        segment: T, tokens in a window
        overlap: o, tokens of each window that the previous window has read too, 0 to T - 1
        vectors: S, vectors inserted into the next window; 0 gives plain GPT-2
        insertion_layers: layers at which the vectors are inserted, counted from 1
        pooling: how a window's positions become one vector: mean, max or attention
        pool: positions that are pooled: all, or (advance) those that the next window does not read
        pool_final_norm: pool the last layer's output after the final norm
        module_layers: hidden layers of the network that makes the vectors
        module_width: width of that network's hidden layers
        dropout: dropout rate in training, 0 to below 1
    """

    vocabulary: int = 256
    width: int = 128
    layers: int = 4
    heads: int = 4
    feed_forward: int = 512
    max_positions: int = 256
    segment: int = 64
    overlap: int = 0
    vectors: int = 1
    insertion_layers: tuple[int, ...] = (2,)
    pooling: str = "mean"
    pool: str = "all"
    pool_final_norm: bool = False
    module_layers: int = 3
    module_width: int = 200
    dropout: float = 0.0

    def __post_init__(self):
        check_config(self)

    @property
    def operations(self):
        """The published operations, or those of the variant that the config asks for."""
        return operations_of(self)


class State(NamedTuple):
    """What a window hands to the next one; axis 0 of every field is the lane."""

    pooled: np.ndarray  # (B, D)
    present: np.ndarray  # (B,) bool, false before a document's first window


# ----------------------------------------------------------------------------
# the method: pool a window to z, make h_prev of it, attend to it in the next window; start here
def mix_forward(layer_scores, outputs):
    """Sum (B, N, D) of the layers' outputs (L, B, N, D), weighted by softmax(layer_scores (L,))."""
    shares, _ = softmax_forward(layer_scores)  # w of Eq. 1
    mixed = np.tensordot(shares, outputs, 1)  # Eq. 1's sum over l
    return mixed, (shares, outputs)


# m = sum_l w_l h_l, w = softmax(alpha): dalpha = softmax'(dw), dw_l = h_l·dm, dh_l = w_l dm
def mix_backward(dmixed, cache):
    """Gradients of layer_scores, which sum to zero, and of outputs."""
    shares, outputs = cache
    dshares = np.tensordot(outputs, dmixed, 3)  # (L, B, N, D) and (B, N, D) -> (L,)
    dlayer_scores = softmax_backward(dshares, shares)
    doutputs = shares[:, None, None, None] * dmixed
    return dlayer_scores, doutputs


def pool_forward(params, config, outputs):
    """Eq. 1: the outputs of all layers over a window, (L, B, N, D), as one vector z (B, D)."""
    p = subtree(params, "module.")
    mixed, mix_cache = mix_forward(p["layer_scores"], outputs)  # (B, N, D)
    pooled, pooling_cache = config.operations.mean_over_positions_forward(p, mixed)
    return pooled, (mix_cache, pooling_cache)


# z = pooling(mix(h)): dh = mix'(pooling'(dz))
def pool_backward(config, dpooled, cache):
    mix_cache, pooling_cache = cache
    dmixed, grads = config.operations.mean_over_positions_backward(dpooled, pooling_cache)
    dlayer_scores, doutputs = mix_backward(dmixed, mix_cache)  # (L,), (L, B, N, D)
    grads["layer_scores"] = dlayer_scores
    return doutputs, prefixed("module.", grads)


def module_forward(p, config, pooled):
    """h_prev: z (B, D) through the feed-forward network, (B, S, D) (3.1)."""
    hidden = pooled
    caches = []
    for layer in range(1, config.module_layers + 1):
        before, affine_cache = affine_forward(p, f"hidden_{layer}", hidden)
        hidden, gelu_cache = gelu_forward(before)
        caches.append((affine_cache, gelu_cache))
    flat, output_cache = affine_forward(p, "inserted", hidden)  # (B, SD)
    inserted = flat.reshape(len(pooled), config.vectors, config.width)
    return inserted, (caches, output_cache)


# h_prev = W_out gelu(.. gelu(W_1 z + b_1) ..) + b_out: from the last matrix to the first
def module_backward(dinserted, cache):
    caches, output_cache = cache
    dflat = dinserted.reshape(len(dinserted), -1)
    dhidden, grads = affine_backward(dflat, output_cache)
    for affine_cache, gelu_cache in reversed(caches):
        dbefore = gelu_backward(dhidden, gelu_cache)
        dhidden, dlayer_params = affine_backward(dbefore, affine_cache)
        grads |= dlayer_params
    return dhidden, grads


def window_attention_forward(p, config, x, inserted, present, rng):
    """x (B, N, D) plus what its tokens find in inserted (B, S, D) and in x (Figure 2)."""
    query, key, value, projections_cache = window_projections_forward(p, config, x, inserted)
    mask = window_mask(x.shape[1], inserted.shape[1], present)
    # decision 10: dropout of the weights, those of inserted vectors too
    out, attention_cache = masked_attention_forward(query, key, value, mask, config.dropout, rng)
    out, output_cache = affine_forward(p, "output", merge_heads(out))
    out, dropout_mask = dropout(out, config.dropout, rng)
    return x + out, (projections_cache, attention_cache, output_cache, dropout_mask)


# y = x + W_o attention([h | x]): dx = dy + what its query, key and value pass on
def window_attention_backward(config, dy, cache):
    projections_cache, attention_cache, output_cache, dropout_mask = cache
    dout, grads = affine_backward(dy * dropout_mask, output_cache)
    dout = split_heads(dout, config.heads)
    dquery, dkey, dvalue = masked_attention_backward(dout, attention_cache)
    dx, dinserted, dparams = window_projections_backward(dquery, dkey, dvalue, projections_cache)
    return dy + dx, dinserted, grads | dparams


def window_projections_forward(p, config, x, inserted):
    """Query of x (B, N, D); key and value of inserted (B, S, D) and x, by head (3.1)."""
    # decision 4: before the norm, without position, query and residual
    source = np.concatenate([inserted, x], axis=1)  # (B, S + N, D), "301 inputs, 300 outputs"
    normed, norm_cache = layer_norm_forward(p, "norm", source)
    query, query_cache = affine_forward(p, "query", normed[:, inserted.shape[1] :])
    key, key_cache = affine_forward(p, "key", normed)
    value, value_cache = affine_forward(p, "value", normed)
    by_head = [split_heads(rows, config.heads) for rows in (query, key, value)]
    return *by_head, (norm_cache, query_cache, key_cache, value_cache)


# n = norm([h | x]), q = W_q n_x, k = W_k n, v = W_v n:
# dn = dk W_k + dv W_v, plus dq W_q at x's positions
def window_projections_backward(dquery, dkey, dvalue, cache):
    """Gradients of x (B, N, D), of inserted (B, S, D) and of the parameters."""
    norm_cache, query_cache, key_cache, value_cache = cache
    dby_query, grads = affine_backward(merge_heads(dquery), query_cache)  # (B, N, D)
    dby_key, dkey_params = affine_backward(merge_heads(dkey), key_cache)
    # decision 13: exactly zero for the bias, which softmax cancels
    dkey_params["key_bias"] = np.zeros_like(dkey_params["key_bias"])
    dby_value, dvalue_params = affine_backward(merge_heads(dvalue), value_cache)
    dnormed = dby_key + dby_value  # (B, S + N, D)
    vectors = dnormed.shape[1] - dby_query.shape[1]  # S
    dnormed[:, vectors:] += dby_query
    dsource, dnorm_params = layer_norm_backward(dnormed, norm_cache)
    grads |= dkey_params | dvalue_params | dnorm_params
    return dsource[:, vectors:], dsource[:, :vectors], grads


def window_mask(length, vectors, present):
    """Which of [inserted | tokens] each token sees: no later ones, (B, 1, N, S + N)."""
    batch = len(present)
    mask = np.empty((batch, length, vectors + length), bool)
    # decision 5: nothing inserted in a first window; S is 0 at layers without insertion
    mask[:, :, :vectors] = present.reshape(batch, 1, -1)
    mask[:, :, vectors:] = np.tri(length, dtype=bool)
    return mask[:, None]


# ----------------------------------------------------------------------------
# the model: GPT-2, with a vector more at one layer; read it next
def forward(params, config, tokens, state, rng=None):
    """Read one window: logits (B, N, V), the next state, the cache for `backward`.

    tokens (B, N) are ids below V, 1 <= N <= config.segment, and the previous window, if any, has
    read the first config.overlap of them too. state comes from `initial_state` or the previous
    window; rng turns dropout on. Position i of the logits predicts token i + 1. Raises ValueError
    for another N.
    """
    length = tokens.shape[1]
    if not 1 <= length <= config.segment:
        raise ValueError(
            f"a window of {length} tokens; it must have 1 to {config.segment}, the segment"
        )
    module = subtree(params, "module.")
    # in a first window too, where the mask hides them
    inserted, module_cache = config.operations.module_forward(module, config, state.pooled)

    positions = params["positions"][:length]  # decision 1: positions from 0 in every window
    x = params["embedding"][tokens] + positions
    x, dropout_mask = dropout(x, config.dropout, rng)
    outputs, layer_caches = layers_forward(params, config, x, inserted, state.present, rng)
    hidden, norm_cache = layer_norm_forward(params, "final_norm", outputs[-1])
    logits, output_cache = linear_forward(hidden, params["embedding"])  # (B, N, V)

    # decision 2: the last layer's output before the final norm
    pooled, pool_cache = config.operations.pool_forward(params, config, outputs)
    cache = (tokens, module_cache, dropout_mask, layer_caches, norm_cache, output_cache, pool_cache)
    return logits, State(pooled, np.ones_like(state.present)), cache


def backward(params, config, cache, dlogits, dnext_state=None):
    """Gradients of the parameters and of the incoming state. dnext_state None stands for zeros."""
    tokens, module_cache, dropout_mask, layer_caches, norm_cache, output_cache, pool_cache = cache
    dhidden, dembedding = linear_backward(dlogits, output_cache)
    dlast, grads = layer_norm_backward(dhidden, norm_cache)
    doutputs = np.zeros((config.layers, *dlast.shape))  # (L, B, N, D)
    if dnext_state is not None:
        doutputs, dparams = config.operations.pool_backward(config, dnext_state.pooled, pool_cache)
        add_into(grads, dparams)
    doutputs[-1] += dlast
    dx, dinserted, dlayer_params = layers_backward(config, doutputs, layer_caches)
    grads |= dlayer_params
    dx = dx * dropout_mask
    np.add.at(dembedding, tokens, dx)  # the tied embedding's second gradient
    not_read = (0, config.max_positions - tokens.shape[1])
    grads["embedding"] = dembedding
    grads["positions"] = np.pad(dx.sum(0), (not_read, (0, 0)))

    dpooled, dparams = config.operations.module_backward(dinserted, module_cache)
    add_into(grads, prefixed("module.", dparams))
    dstate = initial_state(params, config, len(tokens))._replace(pooled=dpooled)
    zeros = {name: np.zeros_like(value) for name, value in params.items()}
    return zeros | grads, dstate


def initial_state(params, config, batch):
    """What a document starts with: nothing to insert."""
    return config.operations.empty_state(config, batch)


def layers_forward(params, config, x, inserted, present, rng):
    """All layers over x (B, N, D); returns their outputs (L, B, N, D)."""
    outputs = []
    caches = []
    for layer in range(config.layers):
        p = subtree(params, f"layers.{layer}.")
        own = inserted if layer + 1 in config.insertion_layers else inserted[:, :0]
        x, cache = layer_forward(p, config, x, own, present, rng)
        outputs.append(x)
        caches.append(cache)
    return np.stack(outputs), caches


def layers_backward(config, doutputs, caches):
    """Gradients of x, of inserted and of the parameters, from those of all layers' outputs."""
    dx = np.zeros(doutputs.shape[1:])  # (B, N, D)
    dinserted = 0.0
    grads = {}
    for layer in reversed(range(config.layers)):
        dx = dx + doutputs[layer]  # decision 6: z's gradient too
        dx, dinserted_here, dlayer_params = layer_backward(config, dx, caches[layer])
        grads |= prefixed(f"layers.{layer}.", dlayer_params)
        if dinserted_here.shape[1]:  # the layer saw the vectors
            # decision 9: every layer sees the same vectors
            dinserted = dinserted + dinserted_here
    return dx, dinserted, grads


def layer_forward(p, config, x, inserted, present, rng):
    """The layer's output (B, N, D): attention, then x + W_2 gelu(W_1 norm(x) + b_1) + b_2."""
    x, attention_cache = window_attention_forward(p, config, x, inserted, present, rng)
    normed, norm_cache = layer_norm_forward(p, "mlp_norm", x)
    before, hidden_cache = affine_forward(p, "mlp_hidden", normed)
    hidden, gelu_cache = gelu_forward(before)  # (B, N, F)
    out, output_cache = affine_forward(p, "mlp_output", hidden)
    out, dropout_mask = dropout(out, config.dropout, rng)
    cache = (attention_cache, norm_cache, hidden_cache, gelu_cache, output_cache, dropout_mask)
    return x + out, cache


def layer_backward(config, dy, cache):
    attention_cache, norm_cache, hidden_cache, gelu_cache, output_cache, dropout_mask = cache
    dhidden, grads = affine_backward(dy * dropout_mask, output_cache)
    dbefore = gelu_backward(dhidden, gelu_cache)
    dnormed, dhidden_params = affine_backward(dbefore, hidden_cache)
    dx, dnorm_params = layer_norm_backward(dnormed, norm_cache)
    dx, dinserted, dattention_params = window_attention_backward(config, dy + dx, attention_cache)
    return dx, dinserted, grads | dhidden_params | dnorm_params | dattention_params


# ----------------------------------------------------------------------------
# through segments: a document in windows, its loss and gradients
class Window(NamedTuple):
    """A part of a document that is read at once; only predictions at scored positions count."""

    tokens: np.ndarray  # (B, N)
    targets: np.ndarray  # (B, N)
    scored: np.ndarray  # (B, N) bool


def windows_of(config, document):
    """The Windows of a document (B, n), all lanes alike.

    Every token after the first is scored once, in order (4.2). A window begins T - o tokens after
    the previous one, which has already scored its first o predictions.
    """
    predictions = document.shape[1] - 1
    end = max(min(predictions, 1), predictions - config.overlap)  # of o left, all have been scored
    windows = []
    for start in range(0, end, config.segment - config.overlap):
        stop = min(start + config.segment, predictions)  # decision 7: the last window is short
        tokens = document[:, start:stop]
        targets = document[:, start + 1 : stop + 1]
        scored_before = config.overlap if start else 0
        scored = np.arange(stop - start) + 0 * tokens >= scored_before  # (B, N)
        windows.append(Window(tokens, targets, scored))
    return windows


def loss_and_gradients(params, config, windows, seed=None):
    """Mean loss of a document's scored tokens, and its gradients through all windows."""
    count = sum(window.scored.sum() for window in windows)
    state = initial_state(params, config, len(windows[0].tokens))
    loss = 0.0
    caches = []
    for t, window in enumerate(windows):
        rng = None if seed is None else np.random.default_rng([seed, t])
        logits, state, cache = forward(params, config, window.tokens, state, rng)
        part, loss_cache = cross_entropy_forward(logits, window.targets, window.scored)
        loss += part
        caches.append((cache, loss_cache))
    grads = {}
    dstate = None
    for cache, loss_cache in reversed(caches):
        dlogits = cross_entropy_backward(1 / count, loss_cache)
        dparams, dstate = backward(params, config, cache, dlogits, dstate)
        add_into(grads, dparams)
    return loss / count, grads


# ----------------------------------------------------------------------------
# what every Transformer has: a first reading needs what it does, not how
NORM_EPSILON = 1e-5  # under the square root of layer_norm; decision 1: GPT-2's epsilon


def mean_over_positions_forward(p, mixed):
    """(B, N, D) -> (B, D)."""
    return mixed.mean(1), mixed.shape  # Eq. 1's sum over i, divided by T


# z = sum_i m_i / N: dm_i = dz / N
def mean_over_positions_backward(dpooled, shape):
    """The gradient of mixed; there are no parameters."""
    return np.broadcast_to(dpooled[:, None] / shape[1], shape), {}


def masked_attention_forward(query, key, value, mask, rate, rng):
    """softmax(q·k / sqrt(E)) v: query (B, H, N, E); key, value (B, H, K, E).

    mask is true where a query sees a key, and broadcasts to (B, H, N, K).
    """
    similarity = query @ key.mT * query.shape[-1] ** -0.5  # (B, H, N, K)
    scores = np.where(mask, similarity, -np.inf)
    weights, _ = softmax_forward(scores)
    dropped, dropout_mask = dropout(weights, rate, rng)
    out = dropped @ value  # (B, H, N, E)
    return out, (query, key, value, weights, dropped, dropout_mask)


# s = q k^T / sqrt(E), y = softmax(s) v:
# dv = w^T dy, ds = softmax'(dy v^T), dq = ds k / sqrt(E), dk = ds^T q / sqrt(E)
def masked_attention_backward(dout, cache):
    """Gradients of query, key and value, exactly zero for a key that nobody sees."""
    query, key, value, weights, dropped, dropout_mask = cache
    ddropped = dout @ value.mT  # (B, H, N, K)
    dweights = ddropped * dropout_mask
    dscores = softmax_backward(dweights, weights) * query.shape[-1] ** -0.5
    dquery = dscores @ key
    dkey = dscores.mT @ query
    dvalue = dropped.mT @ dout
    return dquery, dkey, dvalue


def split_heads(x, heads):
    """(B, N, H*E) -> (B, H, N, E)"""
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).swapaxes(1, 2)


def merge_heads(x):
    """(B, H, N, E) -> (B, N, H*E), the adjoint of split_heads."""
    batch, heads, length, width = x.shape
    return x.swapaxes(1, 2).reshape(batch, length, heads * width)


def softmax_forward(scores):
    """Softmax over the last axis; -inf scores get exactly zero."""
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    weights = exponentials / exponentials.sum(-1, keepdims=True)
    return weights, weights  # the cache is the weights themselves


# w = softmax(s): ds = w (dw - w·dw)
def softmax_backward(dweights, weights):
    mean = (dweights * weights).sum(-1, keepdims=True)
    return weights * (dweights - mean)


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


def gelu_forward(x):
    """GPT-2's approximation of GELU: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    curve = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + curve), (x, curve)


# y = x/2 (1 + t), t = tanh(u), u = c (x + a x^3):
# dx = dy/2 (1 + t + x (1 - t^2) u'), u' = c (1 + 3 a x^2)
def gelu_backward(dy, cache):
    x, curve = cache
    inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return dy * 0.5 * (1 + curve + x * (1 - curve**2) * inner)


def affine_forward(p, name, x):
    """y = x W^T + b with W = p[name] and b = p[name_bias]; y = x W^T if there is no bias."""
    y, linear_cache = linear_forward(x, p[name])
    biased = f"{name}_bias" in p
    if biased:
        y = y + p[f"{name}_bias"]
    return y, (name, biased, linear_cache)


# y = x W^T + b: dx = dy W, dW = dy^T x, db = sum of dy
def affine_backward(dy, cache):
    name, biased, linear_cache = cache
    dx, dweight = linear_backward(dy, linear_cache)
    grads = {name: dweight}
    if biased:
        sum_axes = tuple(range(dy.ndim - 1))  # all but the last
        grads[f"{name}_bias"] = dy.sum(sum_axes)
    return dx, grads


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
# starting values: GPT-2's weights and the module's; a first reading skips them
DEVIATION = 0.02  # of GPT-2's weights at the start; decision 3: GPT-2's own deviation


def init_params(config, rng):
    """All parameters as {dotted name: float64 array}; matrices are (out, in)."""
    d = config.width
    params = {"embedding": rng.normal(0, DEVIATION, (config.vocabulary, d))}
    # decision 3: positions start smaller
    params["positions"] = rng.normal(0, 0.01, (config.max_positions, d))
    for layer in range(config.layers):
        params |= prefixed(f"layers.{layer}.", init_layer(config, rng))
    params |= init_norm("final_norm", d)
    return params | prefixed("module.", config.operations.init_module(config, rng))


def init_layer(config, rng):
    """A layer of GPT-2."""
    d = config.width
    residual = DEVIATION / math.sqrt(2 * config.layers)  # decision 3: what writes to the residual
    p = init_norm("norm", d) | init_norm("mlp_norm", d)
    for name in ("query", "key", "value"):
        p |= init_gpt2(rng, name, d, d)
    p |= init_gpt2(rng, "output", d, d, residual)
    p |= init_gpt2(rng, "mlp_hidden", config.feed_forward, d)
    return p | init_gpt2(rng, "mlp_output", d, config.feed_forward, residual)


def init_gpt2(rng, name, fan_out, fan_in, deviation=DEVIATION):
    """A matrix from a normal distribution, and a bias of zeros."""
    return {name: rng.normal(0, deviation, (fan_out, fan_in)), f"{name}_bias": np.zeros(fan_out)}


def init_module(config, rng):
    """The recurrence module, all that is added to GPT-2 (decision 3: variance 1 / fan_in)."""
    p = {"layer_scores": np.zeros(config.layers)}  # decision 2: equal shares at first
    fan_in = config.width
    for layer in range(1, config.module_layers + 1):
        p |= init_affine(rng, f"hidden_{layer}", config.module_width, fan_in)
        fan_in = config.module_width
    return p | init_affine(rng, "inserted", config.vectors * config.width, fan_in)


def init_affine(rng, name, fan_out, fan_in):
    return {name: init_linear(rng, fan_out, fan_in), f"{name}_bias": np.zeros(fan_out)}


def empty_state(config, batch):
    """The state in which no window came before."""
    return State(np.zeros((batch, config.width)), np.zeros(batch, bool))


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
VARIED = ("pooling", "pool", "pool_final_norm")  # whose defaults are the published ones


def operations_with(**replaced):
    """A namespace of this file's functions, some of them replaced by a variant's."""
    return SimpleNamespace(**(globals() | replaced))


def operations_of(config):
    """The published operations, or those of the variant that a config asks for."""
    is_default = all(getattr(config, name) == getattr(Config, name) for name in VARIED)
    if is_default and config.vectors > 0:
        return operations_with()
    variants = "reference.variants.pretrained_recurrence"
    return importlib.import_module(variants).operations_of(config)


def check_config(config):
    """Raise ValueError, naming the field, for a config that cannot work."""
    for name, kind in Config.__annotations__.items():
        value = getattr(config, name)
        least = 0 if name in ("vectors", "module_layers") else 1
        if kind is int and name != "overlap" and value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    if config.width % config.heads:
        nearest = max(1, round(config.width / config.heads)) * config.heads
        raise ValueError(
            f"width {config.width} is not a multiple of heads {config.heads}; "
            f"the nearest is {nearest}"
        )
    if config.segment > config.max_positions:
        raise ValueError(
            f"segment {config.segment} is longer than the position table; "
            f"max_positions is {config.max_positions}"
        )
    if not 0 <= config.overlap < config.segment:
        ends = f"0..{config.segment - 1} for segment {config.segment}"
        raise ValueError(f"overlap is {config.overlap}; it must lie in {ends}")
    operations_of(config)  # raises ValueError for an unknown variant
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout is {config.dropout}; it must be at least 0 and below 1")
    numbers = config.insertion_layers if config.vectors else (1,)  # plain GPT-2 has none
    if not (numbers and isinstance(numbers, tuple) and tuple(sorted(set(numbers))) == numbers):
        raise ValueError(f"insertion_layers {numbers} must be a tuple, ascending, at least one")
    if numbers[0] < 1 or numbers[-1] > config.layers:
        raise ValueError(f"insertion_layers {numbers} must lie in 1..{config.layers}")


if __name__ == "__main__":  # a demonstration, or --check [--case NAME]
    raise SystemExit(importlib.import_module("reference.gradients").main("pretrained_recurrence"))
