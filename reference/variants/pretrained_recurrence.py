"""Variants of Adding Recurrence to Pretrained Transformers: other poolings, and plain GPT-2.

`reference/pretrained_recurrence.py` has the method. For a config that asks for one of these,
`operations_of` replaces some of the paper's functions by functions of the same signature:

    pooling          max or attention: how positions become one vector (3.1)
    pool             advance: positions that the next window reads again are not pooled
    pool_final_norm  the last layer's output is pooled after the final norm
    vectors          0: GPT-2 alone, the baseline (Table 1)

`checkpointed` has the method's gradients with less memory (3.2), `greedy_continuation` its examples
(5.3).
"""

import numpy as np

from reference import pretrained_recurrence as paper


# ----------------------------------------------------------------------------
# pooling: other ways to make one vector of a window's positions
def max_over_positions_forward(p, mixed):
    """The largest value of each of the D numbers, (B, rows, D) -> (B, D).

    decision 9: a maximum, by feature.
    """
    largest = mixed.argmax(1)[:, None]  # (B, 1, D)
    pooled = np.take_along_axis(mixed, largest, axis=1)[:, 0]
    return pooled, (largest, mixed.shape)


# z_d = max_i m_id: dm_id = dz_d at the first i that has the maximum, 0 elsewhere
def max_over_positions_backward(dpooled, cache):
    """The gradient of mixed; there are no parameters."""
    largest, shape = cache
    dmixed = np.zeros(shape)
    np.put_along_axis(dmixed, largest, dpooled[:, None], axis=1)
    return dmixed, {}


def attention_over_positions_forward(p, mixed):
    """Positions weighted by how well they fit a learned fixed key f, (B, rows, D) -> (B, D)."""
    scale = mixed.shape[-1] ** -0.5
    weights, _ = paper.softmax_forward(mixed @ p["fixed_key"] * scale)  # (B, rows)
    pooled = (weights[..., None] * mixed).sum(1)
    return pooled, (p["fixed_key"], scale, mixed, weights)


# s = m f / sqrt(D), z = sum_i softmax(s)_i m_i:
# ds = softmax'(m dz), dm_i = w_i dz + ds_i f / sqrt(D), df = m^T ds / sqrt(D)
def attention_over_positions_backward(dpooled, cache):
    """Gradients of mixed and of the fixed key."""
    fixed_key, scale, mixed, weights = cache
    dweights = (mixed * dpooled[:, None]).sum(-1)  # (B, rows)
    dscores = paper.softmax_backward(dweights, weights) * scale
    dmixed = weights[..., None] * dpooled[:, None] + dscores[..., None] * fixed_key
    dfixed_key = np.tensordot(dscores, mixed, 2)
    return dmixed, {"fixed_key": dfixed_key}


def init_attention_module(config, rng):
    """The recurrence module, with the fixed key of pooling by attention."""
    module = paper.init_module(config, rng)
    # decision 9: starts at zero
    first = {"layer_scores": module["layer_scores"], "fixed_key": np.zeros(config.width)}
    return first | module


# ----------------------------------------------------------------------------
# what is pooled: fewer positions, or the last layer's output after the final norm
def pooled_rows(config, length):
    """How many positions are pooled, beginning with the first (decision 8: all by default)."""
    return length if config.pool == "all" else max(1, length - config.overlap)


def pool_part_forward(params, config, outputs):
    """One vector (B, D) of the part of outputs (L, B, N, D) that the config pools."""
    norm_cache = None
    if config.pool_final_norm:
        last, norm_cache = paper.layer_norm_forward(params, "final_norm", outputs[-1])
        outputs = np.concatenate([outputs[:-1], last[None]])
    length = outputs.shape[2]
    rows = pooled_rows(config, length)
    pooled, pool_cache = paper.pool_forward(params, config, outputs[:, :, :rows])
    return pooled, (length, norm_cache, pool_cache)


# z = pool(part of h): dh = pool'(dz), zero at positions that are not pooled, and through the norm
def pool_part_backward(config, dpooled, cache):
    """Gradients of outputs and of the parameters."""
    length, norm_cache, pool_cache = cache
    dpart, grads = paper.pool_backward(config, dpooled, pool_cache)  # (L, B, rows, D)
    not_pooled = (0, length - dpart.shape[2])
    doutputs = np.pad(dpart, ((0, 0), (0, 0), not_pooled, (0, 0)))  # (L, B, N, D)
    if norm_cache:
        doutputs[-1], dnorm_params = paper.layer_norm_backward(doutputs[-1], norm_cache)
        grads |= dnorm_params
    return doutputs, grads


# ----------------------------------------------------------------------------
# plain GPT-2: nothing is inserted, and nothing is pooled
def no_module_forward(p, config, pooled):
    """No vectors, (B, 0, D)."""
    return np.zeros((len(pooled), 0, config.width)), pooled.shape


def no_module_backward(dinserted, shape):
    """The gradient of z, which has no numbers; there are no parameters."""
    return np.zeros(shape), {}


def no_pool_forward(params, config, outputs):
    """A vector without numbers, (B, 0)."""
    return np.zeros((outputs.shape[1], 0)), outputs.shape


def no_pool_backward(config, dpooled, shape):
    """The gradient of outputs, all zero; there are no parameters."""
    return np.zeros(shape), {}


def no_state(config, batch):
    """A state without numbers and flags."""
    return paper.State(np.zeros((batch, 0)), np.zeros((batch, 0), bool))


def init_no_module(config, rng):
    """No parameters."""
    return {}


# ----------------------------------------------------------------------------
# through segments: windows that are computed again, and continuations
def checkpointed(params, config, windows, seed=None):
    """The loss and gradients of `loss_and_gradients`, with one window's cache at a time (3.2).

    decision 11: z alone is stored; on the way back each window is computed again.
    """
    count = max(1, sum(int(window.scored.sum()) for window in windows))
    states = [paper.initial_state(params, config, len(windows[0].tokens))]
    for t, window in enumerate(windows[:-1]):
        rng = None if seed is None else np.random.default_rng([seed, t])
        _, state, _ = paper.forward(params, config, window.tokens, states[-1], rng)
        states.append(state)

    loss = 0.0
    grads = {}
    dstate = None
    for t in reversed(range(len(windows))):
        window = windows[t]
        rng = None if seed is None else np.random.default_rng([seed, t])
        logits, _, cache = paper.forward(params, config, window.tokens, states.pop(), rng)
        part, loss_cache = paper.cross_entropy_forward(logits, window.targets, window.scored)
        dlogits = paper.cross_entropy_backward(1 / count, loss_cache)
        dparams, dstate = paper.backward(params, config, cache, dlogits, dstate)
        loss = loss + part
        paper.add_into(grads, dparams)
    return loss / count, grads


def greedy_continuation(params, config, context, count):
    """Continue a context (B, n), n >= 1, by greedy decoding (5.3); returns (B, count).

    The context is read window by window. The continuation stands in a new window, which begins with
    the context's last token, or its last config.overlap tokens, and knows what came before only
    through h_prev. Raises ValueError if that window gets longer than config.segment.
    """
    state = paper.initial_state(params, config, len(context))
    stride = config.segment - config.overlap
    stop = context.shape[1] - config.overlap  # a rest of o tokens has been pooled
    for start in range(0, stop, stride):
        window = context[:, start : start + config.segment]
        _, state, _ = paper.forward(params, config, window, state)
    text = context[:, -max(1, config.overlap) :]  # decision 12: the last is read again
    for _ in range(count):
        logits, _, _ = paper.forward(params, config, text, state)
        most_probable = logits[:, -1:].argmax(-1)  # (B, 1)
        text = np.concatenate([text, most_probable], axis=1)
    return text[:, text.shape[1] - count :]


# ----------------------------------------------------------------------------
# operations
POOLS = ("all", "advance")
POOLINGS = ("mean", "max", "attention")


def operations_of(config):
    """The paper's operations, some replaced by those of the variants that the config asks for.

    Raises ValueError, naming the field, for an unknown pooling or pool.
    """
    for field, known in (("pooling", POOLINGS), ("pool", POOLS)):
        value = getattr(config, field)
        if value not in known:
            raise ValueError(f"{field} is {value!r}; it must be one of {', '.join(known)}")
    replaced = {}
    if config.pool != "all" or config.pool_final_norm:
        replaced |= {"pool_forward": pool_part_forward, "pool_backward": pool_part_backward}
    if config.pooling == "max":
        replaced |= {
            "mean_over_positions_forward": max_over_positions_forward,
            "mean_over_positions_backward": max_over_positions_backward,
        }
    if config.pooling == "attention":
        replaced |= {
            "mean_over_positions_forward": attention_over_positions_forward,
            "mean_over_positions_backward": attention_over_positions_backward,
            "init_module": init_attention_module,
        }
    if config.vectors == 0:
        replaced = {
            "module_forward": no_module_forward,
            "module_backward": no_module_backward,
            "pool_forward": no_pool_forward,
            "pool_backward": no_pool_backward,
            "empty_state": no_state,
            "init_module": init_no_module,
        }
    return paper.operations_with(**replaced)
