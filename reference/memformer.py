"""Memformer (Wu, Lan, Gu and Yu, 2020) and Memory Replay Back-Propagation, in NumPy.

The model carries S memory slots from segment to segment of a document. Step t, from 0, reads
segment s_{t-1} and the slots M_t, predicts segment s_t and writes the slots M_{t+1}. Algorithm 1
counts so too; Eq. 5 writes s_t, M_{t-1}, s_{t+1}, M_t. An encoder reads; then each slot attends to
itself and to the encodings of s_{t-1}, never to another slot. A decoder predicts s_t from the same
encodings. Gradient passes from step to step through the slots alone. Memory Replay Back-Propagation
stores only the slots of a rollout and computes each step again on the way back.

`cross_attention_forward` reads memory and `slot_attention_forward` writes it; `forward` is the
whole model, from (tokens, state) to (logits, next state); `memory_replay` trains it. `params` are
all parameters, {dotted name: array}, and `p` those of one part, without its prefix. A backward
function returns the gradients of its forward function's arguments in their order, and last those
of the parameters, by name. reference/variants/memformer.py has other tasks and models.

Glossary of step t: code symbol, meaning, symbol, shape
    tokens            token ids of one segment of N tokens              s_t        (B, N)
    state.memory      the S slots                                       M_t        (B, 1, S, D)
    state.previous    the previous segment, which the encoder reads     s_{t-1}    (B, N)
    encoded           the encoder's final hidden states                            (B, N, D)
    source            what attention takes keys and values from                    (B, K, D)
    mask              true where a query sees a key; True if it sees all           (B, H, N, K)
    positions         parameter; a vector for every clipped distance    R_{i-j}    (R, E)

B batch (lanes: documents read side by side), D width, H heads, E head width, F feed-forward width,
V vocabulary, L layers, R distances, K keys. Decisions are numbered in docs/decisions/memformer.md.
"""

import importlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

# ----------------------------------------------------------------------------
# configuration: sizes and variants, and what a segment hands to the next one; read it first
# Token ids V, V + 1, ... (decision 10: one embedding); a segment begins with its task's (2.3)
SPECIALS = ("begin", "mask", "continuation", "infilling", "recall")


@dataclass(frozen=True)
class Config:
    """Sizes and variants of the model; impossible combinations raise ValueError naming the field.

    Fields:
        vocabulary: V, number of token ids, without the special tokens
        width: D, model width, a multiple of heads
        encoder_layers: layers of the encoder; 0 gives the decoder-only model of Figure 1b
        decoder_layers: layers of the decoder
        heads: H, attention heads
        head_width: E, width of a head
        feed_forward: F, width of the feed-forward hidden layer
        segment: N, tokens in a segment
        slots: S, memory slots, of each layer in the decoder-only model
        positions: of tokens in self-attention, simplified (Eqs. 2-4) or transformer_xl (Eq. 1)
        max_distance: distance at and beyond which the simplified positions are the same
        slot_value: a slot's own value when it is written, itself (not projected) or projected
        slot_normalization: how slots are read, none or biased (bias added, then unit length)
        dropout: dropout rate in training, 0 to below 1
    """

    vocabulary: int = 256
    width: int = 128
    encoder_layers: int = 2
    decoder_layers: int = 4
    heads: int = 4
    head_width: int = 32
    feed_forward: int = 512
    segment: int = 64
    slots: int = 32
    positions: str = "simplified"
    max_distance: int = 64
    slot_value: str = "itself"
    slot_normalization: str = "none"
    dropout: float = 0.0

    def __post_init__(self):
        check_config(self)

    @property
    def operations(self):
        """The published operations, or those of the variant that the config asks for."""
        return operations_of(self)

    @property
    def slot_sets(self):
        """Sets of slots that a state holds: 1, or L in the decoder-only model."""
        return 1 if self.encoder_layers else self.decoder_layers

    def special(self, name):
        """The id of a special token."""
        return self.vocabulary + SPECIALS.index(name)

    def distances(self, causal):
        """Signed distances i - j of queries and keys, (R,), from 0 if causal."""
        return self.operations.clipped_distances(self, causal)


class State(NamedTuple):
    """What a segment hands to the next one (decision 5: memory, previous tokens), lane first."""

    memory: np.ndarray  # (B, 1, S, D), decoder-only (B, L, S, D)
    previous: np.ndarray  # (B, N) token ids, decoder-only (B, 0)


# ----------------------------------------------------------------------------
# the method: what a first reading is for: tokens read memory; slots are written, each from itself
def cross_attention_forward(p, config, x, source, rng, mask=True):
    """x (B, N, D) plus what it finds in source (B, K, D): normed memory (Fig. 2b) or encodings."""
    normed, norm_cache = layer_norm_forward(p, "norm", x)
    query, key, value, projections_cache = projections_forward(p, config.heads, normed, source)
    out, attention_cache = masked_attention_forward(query, key, value, mask, config.dropout, rng)
    out, output_cache = affine_forward(p, "output", merge_heads(out))
    out, dropout_mask = dropout(out, config.dropout, rng)
    return x + out, (norm_cache, projections_cache, attention_cache, output_cache, dropout_mask)


def cross_attention_backward(config, dy, cache):
    norm_cache, projections_cache, attention_cache, output_cache, dropout_mask = cache
    dout, grads = affine_backward(dy * dropout_mask, output_cache)
    dout = split_heads(dout, config.heads)
    dquery, dkey, dvalue = masked_attention_backward(dout, attention_cache)
    dnormed, dsource, dprojections = projections_backward(dquery, dkey, dvalue, projections_cache)
    dx, dnorm_params = layer_norm_backward(dnormed, norm_cache)
    grads |= dprojections | dnorm_params
    return dy + dx, dsource, grads


def slot_attention_forward(p, config, memory, encoded, mask=True):
    """The next memory (B, S, D), from memory (B, S, D) and encoded (B, N, D) (Figure 2c).

    Each slot, normed for query and key, attends to 1 + N keys: its own and those of encoded.
    """
    normed, norm_cache = layer_norm_forward(p, "memory_norm", memory)  # decision 3: it is normed
    source, source_cache = layer_norm_forward(p, "norm", encoded)
    query, key, value, projections_cache = projections_forward(p, config.heads, normed, source)
    self_key, self_key_cache = affine_forward(p, "key", normed)  # by the same matrix as key
    self_key = split_heads(self_key, config.heads)  # (B, H, S, E)
    self_value = split_heads(memory, config.heads)  # decision 7: its own value, not projected

    scores, scores_cache = slot_scores_forward(query, self_key, key, mask)
    new, mean_cache = slot_mean_forward(scores, self_value, value)
    new = merge_heads(new)  # decision 7: nothing comes after; decision 15: no dropout either
    cache = (norm_cache, source_cache, projections_cache, self_key_cache, scores_cache, mean_cache)
    return new, cache


def slot_attention_backward(config, dnew, cache):
    norm_cache, source_cache, projections_cache, self_key_cache, scores_cache, mean_cache = cache
    dnew = split_heads(dnew, config.heads)  # (B, H, S, D/H)
    dscores, dself_value, dvalue = slot_mean_backward(dnew, mean_cache)
    dquery, dself_key, dkey = slot_scores_backward(dscores, scores_cache)

    dnormed_by_key, dself_key_params = affine_key_backward(merge_heads(dself_key), self_key_cache)
    dnormed, dsource, grads = projections_backward(dquery, dkey, dvalue, projections_cache)
    add_into(grads, dself_key_params)  # the other use of the key projection
    dencoded, dnorm_params = layer_norm_backward(dsource, source_cache)
    dmemory, dmemory_norm_params = layer_norm_backward(dnormed + dnormed_by_key, norm_cache)
    grads |= dnorm_params | dmemory_norm_params
    return merge_heads(dself_value) + dmemory, dencoded, grads


def slot_scores_forward(query, self_key, key, mask):
    """Scores (B, H, S, 1 + N) of each slot: of itself, then of N encodings.

    query, self_key (B, H, S, E); key (B, H, N, E) (decision 9: nothing favours the slot itself).
    """
    scale = query.shape[-1] ** -0.5
    self_score = (query * self_key).sum(-1, keepdims=True) * scale  # (B, H, S, 1)
    similarity = query @ key.mT * scale  # (B, H, S, N)
    scores = np.where(mask, similarity, -np.inf)
    scores = np.concatenate([self_score, scores], axis=-1)  # (B, H, S, 1 + N)
    return scores, (query, self_key, key)


# z* = c q·k*, z = c q k^T, c = 1/sqrt(E):
# dq = c (dz* k* + dz k), dk* = c dz* q, dk = c dz^T q
def slot_scores_backward(dscores, cache):
    query, self_key, key = cache
    scale = query.shape[-1] ** -0.5
    dself_score = dscores[..., :1]  # (B, H, S, 1)
    dothers = dscores[..., 1:]  # (B, H, S, N)
    dquery = (dself_score * self_key + dothers @ key) * scale
    dself_key = dself_score * query * scale
    dkey = dothers.mT @ query * scale
    return dquery, dself_key, dkey


def slot_mean_forward(scores, slots, value):
    """New slots (B, H, S, D/H): softmax-weighted mean of the old ones and value (B, H, N, D/H)."""
    weights, _ = softmax_forward(scores)  # (B, H, S, 1 + N)
    new = weights[..., :1] * slots + weights[..., 1:] @ value
    return new, (weights, slots, value)


# y = w* m + w v, [w*, w] = softmax(z): dm = w* dy, dv = w^T dy, dz = softmax'([m·dy, dy v^T])
def slot_mean_backward(dnew, cache):
    weights, slots, value = cache
    dself_weight = (slots * dnew).sum(-1, keepdims=True)  # (B, H, S, 1)
    dothers = dnew @ value.mT  # (B, H, S, N)
    dweights = np.concatenate([dself_weight, dothers], axis=-1)
    dscores = softmax_backward(dweights, weights)
    dslots = weights[..., :1] * dnew
    dvalue = weights[..., 1:].mT @ dnew
    return dscores, dslots, dvalue


# ----------------------------------------------------------------------------
# the model: the whole of it first, then encoder, decoder, layers, relative positions (Eqs. 2-6)
def forward(params, config, tokens, state, rng=None, task=None):
    """Read one segment (Eqs. 5-7): logits (B, N, V), the next state, the cache for `backward`.

    tokens (B, N), N = config.segment; rng turns dropout on. Row i of the logits predicts token
    i + 1, unless a task of `reference/variants/memformer.py` is given. Raises ValueError if N is
    not the segment length, or if the decoder-only model is given a task.
    """
    check_segment(config, tokens)
    config = with_task(config, task)
    read = config.operations.encoder_forward
    encoded, next_state, read_cache = read(params, config, tokens, state, rng)  # Eq. 5
    predict = config.operations.prediction_forward
    hidden, prediction_cache = predict(params, config, tokens, encoded, rng)  # Eq. 6

    # decision 10: one embedding, here without the special tokens
    embedding = params["embedding"][: config.vocabulary]
    logits, output_cache = linear_forward(hidden * config.width**-0.5, embedding)  # (B, N, V)
    return logits, next_state, (config, read_cache, prediction_cache, output_cache)


def backward(params, config, cache, dlogits, dnext_state=None):
    """Gradients of the parameters and of the incoming state; those of its token ids are zeros.

    dnext_state None stops the gradient at the segment's end.
    """
    config, read_cache, prediction_cache, output_cache = cache  # the config knows of its task
    zero_state = State(*map(np.zeros_like, initial_state(params, config, len(dlogits))))
    if dnext_state is None:
        dnext_state = zero_state

    dhidden, dembedding = linear_backward(dlogits, output_cache)
    dhidden = dhidden * config.width**-0.5
    predict_backward = config.operations.prediction_backward
    dencoded, grads = predict_backward(params, config, dhidden, prediction_cache)
    read_backward = config.operations.encoder_backward
    dmemory, dread_params = read_backward(params, config, dencoded, dnext_state, read_cache)
    add_into(grads, dread_params)  # the embedding is in both
    grads["embedding"][: config.vocabulary] += dembedding  # the tied embedding's third gradient

    zeros = {name: np.zeros_like(value) for name, value in params.items()}
    return zeros | grads, zero_state._replace(memory=dmemory)


def advance(params, config, tokens, state, rng=None, task=None):
    """The state after a segment by the memory path alone: no decoder, no logits."""
    check_segment(config, tokens)
    config = with_task(config, task)
    _, next_state, _ = config.operations.encoder_forward(params, config, tokens, state, rng)
    return next_state


def initial_state(params, config, batch):
    """What a document starts with: the learned slots, and a segment of begin tokens."""
    return config.operations.learned_state(params, config, batch)


def initial_state_backward(config, dstate):
    """Gradients of its parameters. dstate must be zero in lanes that did not start."""
    return config.operations.learned_state_backward(dstate)


def learned_state(params, config, batch):
    """The learned slots (decision 8: learned, not zeros), and a segment of begin tokens."""
    memory = np.tile(params["initial_memory"], (batch, 1, 1, 1))  # (B, 1, S, D)
    return State(memory, np.full((batch, config.segment), config.special("begin")))


def learned_state_backward(dstate):
    """Gradient of the learned slots: the sum over lanes."""
    return {"initial_memory": dstate.memory.sum(0)}


def encoder_forward(params, config, tokens, state, rng):
    """M_{t+1} = Encoder(s_{t-1}, M_t) (Eq. 5): encodings (B, N, D) and the next state."""
    p = subtree(params, "encoder.")
    memory = state.memory[:, 0]  # (B, S, D)
    x = params["embedding"][state.previous]  # (B, N, D)
    caches = []
    for layer in range(config.encoder_layers):
        layer_params = subtree(p, f"layers.{layer}.")
        x, cache = encoder_layer_forward(layer_params, config, x, memory, rng)
        caches.append(cache)
    encoded, norm_cache = layer_norm_forward(p, "norm", x)  # decision 3: a final norm

    writer = subtree(params, "writer.")
    write = config.operations.slot_attention_forward
    next_memory, writer_cache = write(writer, config, memory, encoded)
    next_state = State(next_memory[:, None], tokens)
    return encoded, next_state, (state.previous, caches, norm_cache, writer_cache)


def encoder_backward(params, config, dencoded, dnext_state, cache):
    reading, caches, norm_cache, writer_cache = cache
    dnext_memory = dnext_state.memory[:, 0]
    write_backward = config.operations.slot_attention_backward
    dmemory, dencoded_written, dwriter_params = write_backward(config, dnext_memory, writer_cache)
    dx, dencoder_params = layer_norm_backward(dencoded + dencoded_written, norm_cache)
    for layer in reversed(range(config.encoder_layers)):
        dx, dmemory_read, dlayer_params = encoder_layer_backward(config, dx, caches[layer])
        dmemory = dmemory + dmemory_read  # every layer reads the same memory
        dencoder_params |= prefixed(f"layers.{layer}.", dlayer_params)
    dembedding = np.zeros_like(params["embedding"])
    np.add.at(dembedding, reading, dx)

    grads = {"embedding": dembedding}
    grads |= prefixed("encoder.", dencoder_params)
    grads |= prefixed("writer.", dwriter_params)
    return dmemory[:, None], grads


def prediction_forward(params, config, tokens, encoded, rng):
    """Hidden states (B, N, D) of the tokens, each of which predicts the next (Eqs. 6-7)."""
    # decision 6: one position more, with the task's token first
    task_token = np.full((len(tokens), 1), config.special("continuation"))
    prompt = np.concatenate([task_token, tokens], axis=1)  # (B, N + 1)
    hidden, cache = decoder_forward(params, config, prompt, encoded, rng)
    return hidden[:, 1:], cache


def prediction_backward(params, config, dhidden, cache):
    drows = np.pad(dhidden, ((0, 0), (1, 0), (0, 0)))  # (B, N + 1, D)
    return decoder_backward(params, config, drows, cache)


def decoder_forward(params, config, prompt, encoded, rng):
    """Final hidden states (B, N + 1, D) of prompt (B, N + 1)."""
    p = subtree(params, "decoder.")
    x = params["embedding"][prompt]  # (B, N + 1, D)
    caches = []
    for layer in range(config.decoder_layers):
        layer_params = subtree(p, f"layers.{layer}.")
        x, cache = decoder_layer_forward(layer_params, config, x, encoded, rng)
        caches.append(cache)
    hidden, norm_cache = layer_norm_forward(p, "norm", x)
    return hidden, (prompt, caches, norm_cache)


def decoder_backward(params, config, dhidden, cache):
    prompt, caches, norm_cache = cache
    dx, ddecoder_params = layer_norm_backward(dhidden, norm_cache)
    dencoded = 0.0
    for layer in reversed(range(config.decoder_layers)):
        dx, dencoded_read, dlayer_params = decoder_layer_backward(config, dx, caches[layer])
        dencoded = dencoded + dencoded_read  # every layer reads the same encodings
        ddecoder_params |= prefixed(f"layers.{layer}.", dlayer_params)
    dembedding = np.zeros_like(params["embedding"])
    np.add.at(dembedding, prompt, dx)

    grads = {"embedding": dembedding}
    grads |= prefixed("decoder.", ddecoder_params)
    return dencoded, grads


def encoder_layer_forward(p, config, x, memory, rng):
    """Self-attention, memory (B, S, D), feed-forward (Fig. 2a; decision 4: in this order)."""
    attention = subtree(p, "attention.")
    attend = config.operations.self_attention_forward
    x, attention_cache = attend(attention, config, x, causal=False, rng=rng)
    normed_memory, memory_cache = layer_norm_forward(p, "read.memory_norm", memory)
    read = subtree(p, "read.")
    x, read_cache = cross_attention_forward(read, config, x, normed_memory, rng)
    x, mlp_cache = relu_mlp_forward(p, config, x, rng)
    return x, (attention_cache, memory_cache, read_cache, mlp_cache)


def encoder_layer_backward(config, dx, cache):
    attention_cache, memory_cache, read_cache, mlp_cache = cache
    dx, grads = relu_mlp_backward(dx, mlp_cache)
    dx, dnormed_memory, dread_params = cross_attention_backward(config, dx, read_cache)
    dmemory, dmemory_norm_params = layer_norm_backward(dnormed_memory, memory_cache)
    dx, dattention_params = self_attention_backward(config, dx, attention_cache)
    grads |= dmemory_norm_params
    grads |= prefixed("read.", dread_params)
    grads |= prefixed("attention.", dattention_params)
    return dx, dmemory, grads


def decoder_layer_forward(p, config, x, encoded, rng):
    """Causal self-attention, cross-attention to encoded (B, N, D), feed-forward."""
    attention = subtree(p, "attention.")
    x, attention_cache = self_attention_forward(attention, config, x, causal=True, rng=rng)
    cross = subtree(p, "cross.")
    attend = config.operations.cross_attention_forward
    x, cross_cache = attend(cross, config, x, encoded, rng)
    x, mlp_cache = relu_mlp_forward(p, config, x, rng)
    return x, (attention_cache, cross_cache, mlp_cache)


def decoder_layer_backward(config, dx, cache):
    attention_cache, cross_cache, mlp_cache = cache
    dx, grads = relu_mlp_backward(dx, mlp_cache)
    dx, dencoded, dcross_params = cross_attention_backward(config, dx, cross_cache)
    dx, dattention_params = self_attention_backward(config, dx, attention_cache)
    grads |= prefixed("cross.", dcross_params)
    grads |= prefixed("attention.", dattention_params)
    return dx, dencoded, grads


def self_attention_forward(p, config, x, causal, rng, mask=True):
    """x (B, N, D) plus what its tokens find in each other, or in earlier ones if causal."""
    normed, norm_cache = layer_norm_forward(p, "norm", x)
    query, key, value, projections_cache = projections_forward(p, config.heads, normed, normed)
    if causal:
        mask = earlier_mask(x.shape[1])
    distances = config.distances(causal)
    attend = config.operations.simplified_attention_forward
    out, attention_cache = attend(p, query, key, value, distances, mask, config.dropout, rng)
    out, output_cache = affine_forward(p, "output", merge_heads(out))
    out, dropout_mask = dropout(out, config.dropout, rng)
    return x + out, (norm_cache, projections_cache, attention_cache, output_cache, dropout_mask)


def self_attention_backward(config, dy, cache):
    norm_cache, projections_cache, attention_cache, output_cache, dropout_mask = cache
    dout, grads = affine_backward(dy * dropout_mask, output_cache)
    dout = split_heads(dout, config.heads)
    attend_backward = config.operations.simplified_attention_backward
    dquery, dkey, dvalue, dposition_params = attend_backward(dout, attention_cache)
    dnormed, dsource, dprojections = projections_backward(dquery, dkey, dvalue, projections_cache)
    dx, dnorm_params = layer_norm_backward(dnormed + dsource, norm_cache)
    grads |= dposition_params | dprojections | dnorm_params
    return dy + dx, grads


def earlier_mask(length):
    """Which keys each token sees: itself and those before it, (N, N)."""
    return np.tril(np.ones((length, length), bool))


def relu_mlp_forward(p, config, x, rng):
    """x + dropout(W_2 relu(W_1 norm(x) + b_1) + b_2)"""
    normed, norm_cache = layer_norm_forward(p, "mlp_norm", x)
    before, hidden_cache = affine_forward(p, "mlp_hidden", normed)
    hidden = np.maximum(before, 0)  # (B, N, F)
    out, output_cache = affine_forward(p, "mlp_output", hidden)
    out, dropout_mask = dropout(out, config.dropout, rng)
    return x + out, (norm_cache, hidden_cache, hidden, output_cache, dropout_mask)


def relu_mlp_backward(dy, cache):
    norm_cache, hidden_cache, hidden, output_cache, dropout_mask = cache
    dhidden, grads = affine_backward(dy * dropout_mask, output_cache)
    dnormed, dhidden_params = affine_backward(dhidden * (hidden > 0), hidden_cache)
    dx, dnorm_params = layer_norm_backward(dnormed, norm_cache)
    grads |= dhidden_params | dnorm_params
    return dy + dx, grads


def simplified_attention_forward(p, query, key, value, distances, mask, rate, rng):
    """Eqs. 3-4: softmax(q·(k_j + R_{i-j}) / sqrt(E)) (v_j + R_{i-j}): (B, H, N, E).

    One R has both roles (decision 1: one table). query (B, H, N, E); key, value (B, H, K, E), whose
    last N have positions; distances (R,) are those that the rows of R stand for.
    """
    table = p["positions"]  # (R, E)
    index = distance_index(query.shape[2], distances)  # (N, N)
    scores_by_distance = query @ table.T  # (B, H, N, R)
    weights, weights_cache = relative_weights_forward(
        query, key, scores_by_distance, index, mask, rate, rng
    )  # Eq. 3

    # Sums of the weights at each distance: the adjoint of looking up
    by_distance = by_key_backward(weights[..., -len(index) :], (index, len(table)))  # (B, H, N, R)
    out = weights @ value + by_distance @ table  # Eq. 4
    return out, (query, table, value, weights, by_distance, index, weights_cache)


# s = q R^T, y = w v + a R, a is w by distance:
# dv = w^T dy, da = dy R^T, dR = ds^T q + a^T dy, dq = (dq of w) + ds R
def simplified_attention_backward(dout, cache):
    query, table, value, weights, by_distance, index, weights_cache = cache
    dweights = dout @ value.mT  # (B, H, N, K)
    dweights_by_position, _ = by_key_forward(dout @ table.T, index)  # (B, H, N, N)
    dweights[..., -len(index) :] += dweights_by_position
    dquery, dkey, dscores = relative_weights_backward(dweights, weights_cache)

    dquery = dquery + dscores @ table
    dvalue = weights.mT @ dout
    dtable_in_scores = np.einsum("bhnr,bhne->re", dscores, query)
    dtable_in_values = np.einsum("bhnr,bhne->re", by_distance, dout)
    return dquery, dkey, dvalue, {"positions": dtable_in_scores + dtable_in_values}


def relative_weights_forward(query, key, by_distance, index, mask, rate, rng):
    """Weights (B, H, N, K) = dropout(softmax((q·k_j + s_{i-j}) / sqrt(E))).

    s is by_distance (B, H, N, R), for the last N keys; index (N, N) is the row of each pair.
    """
    scores = query @ key.mT  # (B, H, N, K)
    by_key, by_key_cache = by_key_forward(by_distance, index)
    scores[..., -len(index) :] += by_key
    scaled = scores * query.shape[-1] ** -0.5  # decision 1: with 1/sqrt(E)
    weights, _ = softmax_forward(np.where(mask, scaled, -np.inf))
    dropped, dropout_mask = dropout(weights, rate, rng)
    return dropped, (query, key, weights, dropout_mask, by_key_cache)


# z = (q k^T + t) / sqrt(E), w = softmax(z):
# dz = softmax'(dw), dq = dz k / sqrt(E), dk = dz^T q / sqrt(E), dt = dz / sqrt(E)
def relative_weights_backward(dweights, cache):
    query, key, weights, dropout_mask, by_key_cache = cache
    dscaled = softmax_backward(dweights * dropout_mask, weights)
    dscores = dscaled * query.shape[-1] ** -0.5  # (B, H, N, K)
    dquery = dscores @ key
    dkey = dscores.mT @ query
    dby_distance = by_key_backward(dscores[..., -query.shape[2] :], by_key_cache)
    return dquery, dkey, dby_distance


def by_key_forward(by_distance, index):
    """Scores by distance (B, H, N, R) -> by key (B, H, N, N); index (N, N) has each pair's row."""
    queries = np.arange(len(index))[:, None]
    by_key = by_distance[:, :, queries, index]
    return by_key, (index, by_distance.shape[-1])


# t_ij = s_i[r], r = index_ij:
# ds_i[r] = sum of dt_ij over the keys j with index_ij = r, clipped duplicates included
def by_key_backward(dout, cache):
    """By key (B, H, N, N) -> by distance (B, H, N, R): the sum over the keys at each distance."""
    index, distances = cache
    at_row = index[..., None] == np.arange(distances)  # (N, N, R)
    return np.einsum("bhqk,qkr->bhqr", dout, at_row)


def distance_index(length, distances):
    """The row of R for query i and key j, (N, N): that of the distance i - j, or the nearest."""
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    return np.clip(distance, distances[0], distances[-1]) - distances[0]


def clipped_distances(config, causal):
    """Distances with a row of R: of N + 1 tokens if causal, else of N (decision 1: rows of R)."""
    largest = config.segment if causal else config.segment - 1
    largest = min(largest, config.max_distance)
    smallest = 0 if causal else -largest
    return np.arange(smallest, largest + 1)


# ----------------------------------------------------------------------------
# through segments: memory replay, the paper's way to train
def memory_replay(params, config, segments, state, seed=None):
    """Algorithm 1 (decision 14: K segments, 0 to K - 1), with one segment's cache at a time.

    segments are K pairs of tokens and targets, (B, N) each. A seed turns dropout on. Returns the
    mean loss, its gradients w.r.t. the parameters and the first state, and the next state.
    """
    share = 1 / sum(targets.size for _, targets in segments)

    # Forward: the states before all segments, by the memory path alone
    replay_buffer = [state]  # Alg. 1, l.1-2
    for t, (tokens, _) in enumerate(segments[:-1]):  # l.3
        rng = segment_rng(seed, t)
        state = advance(params, config, tokens, state, rng)  # l.4
        replay_buffer.append(state)  # l.5

    # Backward: each segment is computed again, from the state before it
    loss = 0.0
    grads = {}
    dstate = None  # l.7: the gradient of M_K is zero
    for t in reversed(range(len(segments))):  # l.8
        before = replay_buffer.pop()
        rng = segment_rng(seed, t)
        part, after, cache = segment_forward(params, config, segments[t], before, rng)  # l.9-10
        dparams, dstate = segment_backward(params, config, share, dstate, cache)  # l.11-12
        loss = loss + share * part
        add_into(grads, dparams)
        if t == len(segments) - 1:
            next_state = after  # M_K
    return loss, grads, dstate, next_state  # l.14


def segment_forward(params, config, segment, state, rng):
    """(summed loss, next state, cache) of one segment."""
    tokens, targets = segment
    logits, next_state, cache = forward(params, config, tokens, state, rng)
    loss, loss_cache = cross_entropy_forward(logits, targets, np.ones(targets.shape, bool))
    return loss, next_state, (cache, loss_cache)


def segment_backward(params, config, dloss, dnext_state, cache):
    forward_cache, loss_cache = cache
    dlogits = cross_entropy_backward(dloss, loss_cache)
    return backward(params, config, forward_cache, dlogits, dnext_state)


def segment_rng(seed, index):
    """The generator of one segment's dropout, the same each time; None without a seed."""
    return None if seed is None else np.random.default_rng([seed, index])


# ----------------------------------------------------------------------------
# what every Transformer has: a first reading needs what it does, not how
NORM_EPSILON = 1e-6  # under the square root of layer_norm


def projections_forward(p, heads, x, source):
    """Query (B, H, N, E) of x (B, N, D); key, value (B, H, K, E) of source (B, K, D) (Eq. 2)."""
    query, query_cache = affine_forward(p, "query", x)
    key, key_cache = affine_forward(p, "key", source)
    value, value_cache = affine_forward(p, "value", source)
    by_head = [split_heads(rows, heads) for rows in (query, key, value)]
    return *by_head, (query_cache, key_cache, value_cache)


# q = x W_q^T, k = s W_k^T, v = s W_v^T: dx = dq W_q, ds = dk W_k + dv W_v
def projections_backward(dquery, dkey, dvalue, cache):
    query_cache, key_cache, value_cache = cache
    dx, grads = affine_backward(merge_heads(dquery), query_cache)
    dsource_by_key, dkey_params = affine_key_backward(merge_heads(dkey), key_cache)
    dsource_by_value, dvalue_params = affine_backward(merge_heads(dvalue), value_cache)
    grads |= dkey_params | dvalue_params
    return dx, dsource_by_key + dsource_by_value, grads


def masked_attention_forward(query, key, value, mask, rate, rng):
    """softmax(q·k / sqrt(E)) v over the keys of the mask: (B, H, N, E)."""
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


def affine_key_backward(dkey, cache):
    """affine_backward with db exactly zero: all keys have the same q·b, which softmax cancels."""
    dx, grads = affine_backward(dkey, cache)
    if "key_bias" in grads:
        grads["key_bias"] = np.zeros_like(grads["key_bias"])  # not the rounding of a sum
    return dx, grads


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
# starting values: every parameter by its name; a first reading skips them
POSITION_DEVIATION = 0.5  # of the simplified positions at the start (decision 1: one table)


def init_params(config, rng):
    """All parameters as {dotted name: float64 array}; matrices are (out, in)."""
    return config.operations.init_encoder_decoder(config, rng)


def init_encoder_decoder(config, rng):
    """Parameters of the model (decision 10: one embedding; decision 8: the memory is learned)."""
    d = config.width
    params = {"embedding": rng.normal(0, 1, (config.vocabulary + len(SPECIALS), d))}
    params["initial_memory"] = rng.normal(0, 1, (1, config.slots, d))
    for layer in range(config.encoder_layers):
        params |= prefixed(f"encoder.layers.{layer}.", init_layer(config, rng, "read"))
    params |= init_norm("encoder.norm", d)
    params |= prefixed("writer.", init_writer(config, rng))
    for layer in range(config.decoder_layers):
        params |= prefixed(f"decoder.layers.{layer}.", init_layer(config, rng, "cross"))
    return params | init_norm("decoder.norm", d)


def init_layer(config, rng, reader):
    """Self-attention, attention to memory or to the encodings, and feed-forward."""
    causal = reader == "cross"  # in the decoder
    attention = config.operations.init_attention(config, rng, config.distances(causal))
    p = prefixed("attention.", attention)
    p |= prefixed(f"{reader}.", init_attention(config, rng))
    if not causal:  # the encoder norms the memory that it reads
        p |= init_norm("read.memory_norm", config.width)
    return p | init_mlp(config, rng)


def init_attention(config, rng, distances=()):
    """Attention, with R if it has distances (decision 2: biases, except in Eq. 1)."""
    d = config.width
    inner = config.heads * config.head_width
    p = init_norm("norm", d)
    for name in ("query", "key", "value"):
        p |= init_affine(rng, name, inner, d)  # Eq. 2
    if len(distances):
        p["positions"] = rng.normal(0, POSITION_DEVIATION, (len(distances), config.head_width))
    return p | init_affine(rng, "output", d, inner)


def init_writer(config, rng):
    """Slot attention, with norms of the memory and of what it is written from."""
    d = config.width
    inner = config.heads * config.head_width
    p = init_norm("memory_norm", d) | init_norm("norm", d)
    p |= init_affine(rng, "query", inner, d)
    p |= init_affine(rng, "key", inner, d)
    return p | init_affine(rng, "value", d, d)


def init_mlp(config, rng):
    """The feed-forward, with its norm."""
    p = init_norm("mlp_norm", config.width)
    p |= init_affine(rng, "mlp_hidden", config.feed_forward, config.width)
    return p | init_affine(rng, "mlp_output", config.width, config.feed_forward)


def init_affine(rng, name, fan_out, fan_in):
    return {name: init_linear(rng, fan_out, fan_in), f"{name}_bias": np.zeros(fan_out)}


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
VARIED = ("positions", "slot_value", "slot_normalization")  # whose defaults are the published ones


def operations_with(**replaced):
    """A namespace of this file's functions, some of them replaced by a variant's."""
    return SimpleNamespace(**(globals() | replaced))


def operations_of(config):
    """The published operations, or those of the variant that a config asks for."""
    is_default = all(getattr(config, name) == getattr(Config, name) for name in VARIED)
    if is_default and config.encoder_layers > 0:
        return operations_with()
    return importlib.import_module("reference.variants.memformer").operations_of(config)


def with_task(config, task):
    """The config; if a task is given, with the operations of that task."""
    if task is None:
        return config
    return importlib.import_module("reference.variants.memformer").config_of_task(config, task)


def check_config(config):
    """Raise ValueError, naming the field, if the model cannot work."""
    for name, kind in Config.__annotations__.items():
        value = getattr(config, name)
        least = 0 if name == "encoder_layers" else 1
        if kind is int and value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    if config.width % config.heads:
        nearest = max(1, round(config.width / config.heads)) * config.heads
        raise ValueError(
            f"width {config.width} is not a multiple of heads {config.heads}; "
            f"the nearest is {nearest}"
        )
    operations_of(config)  # raises ValueError for an unknown variant
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout is {config.dropout}; it must be at least 0 and below 1")


def check_segment(config, tokens):
    """Raise ValueError if tokens (B, N) do not have the segment length."""
    if tokens.shape[1] != config.segment:
        raise ValueError(
            f"a segment of {tokens.shape[1]} tokens is not one of {config.segment}; pad it"
        )


if __name__ == "__main__":  # a demonstration, or --check [--case NAME]
    raise SystemExit(importlib.import_module("reference.gradients").main("memformer"))
