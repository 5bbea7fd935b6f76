"""Memformer (Wu, Lan, Gu and Yu, 2020) and Memory Replay Back-Propagation, forward and backward in NumPy.

The model carries S memory slots from segment to segment of a document. Step t, from 0, reads segment s_{t-1} and the slots M_t,
predicts segment s_t and writes the slots M_{t+1}. Algorithm 1 counts so too; Eq. 5 writes s_t, M_{t-1}, s_{t+1}, M_t. An encoder
reads; then each slot attends to itself and to the encodings of s_{t-1}, never to another slot. A decoder predicts s_t from the
same encodings. Gradient passes from step to step through the slots alone. Memory Replay Back-Propagation stores only the slots
of a rollout and computes each step again on the way back. Without encoder layers the model is Figure 1b, which reads s_t itself.

`slot_attention_forward` writes memory and `cross_attention_forward` reads it; `forward` is the whole model, from (tokens, state)
to (logits, next state); `memory_replay` trains it. Each backward stands below its forward.

Glossary of step t: code symbol, meaning, symbol, shape
    tokens             token ids of one segment of N tokens              s_t             (B, N)
    segment            N, tokens in a segment; the paper's L
    slots              S, memory slots
    state.memory       the slots; of every layer in the decoder-only     M_t             (B, 1 or L, S, D)
    state.previous     the previous segment, which the encoder reads     s_{t-1}         (B, N)
    reading            what the encoder reads, masked when infilling     s_{t-1}         (B, N)
    readable           where reading is no padding                                       (B, N) bool
    prompt             what the decoder reads after the task's token                     (B, N)
    encoded            the encoder's final hidden states                                 (B, N, D)
    source             what attention takes keys and values from                         (B, K, D)
    positions          parameter; a vector for every clipped distance    R_{i-j}         (R, E)
    distance_key, content_bias, distance_bias   Transformer-XL's         W_r, u, v       (HE, D), (H, E), (H, E)
    retention          parameter; a bias on a slot's score of itself     none            (H,)

B batch (lanes: documents read side by side), D width, H heads, E head width, F feed-forward width, V vocabulary, L layers,
R distances, K keys. Decisions are numbered in docs/decisions/memformer.md.
"""

import math
import runpy
import sys
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

# ----------------------------------------------------------------------------
# configuration: sizes and variants, and what a segment hands to the next one; read it first
TASKS = ("continuation", "infilling", "recall")  # section 2.3
SPECIALS = ("begin", "mask", *TASKS)  # token ids V, V + 1, ... (decision 10: one embedding)
POSITIONS = ("simplified", "transformer_xl")  # Eqs. 2-4, Eq. 1


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
        positions: relative positions in self-attention, simplified (Eqs. 2-4) or transformer_xl (Eq. 1)
        max_distance: distance at and beyond which the simplified positions are the same
        retention: starting value of the learned bias with which a slot attends to itself
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
    retention: float = 0.0
    dropout: float = 0.0

    def __post_init__(self):
        check_config(self)

    def special(self, name):
        """The id of a special token."""
        return self.vocabulary + SPECIALS.index(name)

    @property
    def memories(self):
        """Memories that a state holds: one, or one per layer in the decoder-only model."""
        return 1 if self.encoder_layers else self.decoder_layers

    def distances(self, causal):
        """Signed distances i - j that have a row: from 0 if causal, else from -largest (decision 1: rows of R)."""
        longest = (
            self.segment if causal and self.encoder_layers else self.segment - 1
        )  # the decoder reads N + 1 tokens
        largest = min(longest, self.max_distance) if self.positions == "simplified" else longest
        return np.arange(0 if causal else -largest, largest + 1)


class State(NamedTuple):
    """What a segment hands to the next one (decision 5: memory, previous tokens); axis 0 of every field is the lane."""

    memory: np.ndarray  # (B, 1, S, D), decoder-only (B, L, S, D)
    previous: np.ndarray  # (B, N) token ids, decoder-only (B, 0)


# ----------------------------------------------------------------------------
# the method: what a first reading is for; each slot is written anew from itself and a segment, and tokens read the slots
def slot_attention_forward(p, config, memory, encoded, readable):
    """The next memory (B, S, D): each slot attends to [itself | encoded (B, N, D)], 1 + N keys (Figure 2c)."""
    normal, norm_cache = layer_norm_forward(
        p, "memory_norm", memory
    )  # decision 3: memory normed first
    source, source_cache = layer_norm_forward(p, "norm", encoded)
    (query, key, value), projections_cache = projections_forward(p, config.heads, normal, source)
    self_key, self_key_cache = affine_forward(
        p, "key", normal
    )  # slots and encodings share the key projection
    self_key = split_heads(self_key, config.heads)
    scores, scores_cache = slot_scores_forward(
        query, self_key, key, p["retention"], readable_mask(readable)
    )
    new, mean_cache = slot_mean_forward(
        scores, split_heads(memory, config.heads), value
    )  # decision 7: its own value
    caches = (
        (norm_cache, source_cache),
        (projections_cache, self_key_cache),
        (scores_cache, mean_cache),
    )
    return merge_heads(
        new
    ), caches  # decision 7: nothing comes after; decision 15: no dropout either


def slot_attention_backward(config, dnew, cache):
    """Gradients of memory, of encoded and of the parameters."""
    (norm_cache, source_cache), (projections_cache, self_key_cache), (scores_cache, mean_cache) = (
        cache
    )
    dscores, dslots, dvalue = slot_mean_backward(split_heads(dnew, config.heads), mean_cache)
    dquery, dself_key, dkey, dretention = slot_scores_backward(dscores, scores_cache)
    dnormal, dsource, grads = projections_backward(dquery, dkey, dvalue, projections_cache)
    dnormal_by_key, dself_key_params = affine_key_backward(merge_heads(dself_key), self_key_cache)
    grads |= {
        name: grads[name] + grad for name, grad in dself_key_params.items()
    }  # both uses of the key projection
    dmemory, dmemory_norm = layer_norm_backward(dnormal + dnormal_by_key, norm_cache)
    dencoded, dnorm = layer_norm_backward(dsource, source_cache)
    return (
        merge_heads(dslots) + dmemory,
        dencoded,
        grads | dmemory_norm | dnorm | {"retention": dretention},
    )


def slot_scores_forward(query, self_key, key, retention, mask):
    """Scores (B, H, S, 1 + N) of each slot: of itself, plus retention (H,) (decision 9: bias per head), then of N encodings."""
    scale = query.shape[-1] ** -0.5
    self_score = (query * self_key).sum(-1, keepdims=True) * scale + retention[
        :, None, None
    ]  # (B, H, S, 1)
    scores = np.where(mask, query @ key.swapaxes(-1, -2) * scale, -np.inf)  # (B, H, S, N)
    return np.concatenate([self_score, scores], axis=-1), (query, self_key, key)


# z* = c q·k* + rho, z = c q k^T, c = 1/sqrt(E): dq = c (dz* k* + dz k), dk* = c dz* q, dk = c dz^T q, drho = sum dz*
def slot_scores_backward(dscores, cache):
    """Gradients of query, self_key, key (B, H, S or N, E) and retention."""
    query, self_key, key = cache
    dself_score, dscores = dscores[..., :1], dscores[..., 1:]
    scale = query.shape[-1] ** -0.5
    dquery = (dself_score * self_key + dscores @ key) * scale
    dkey = dscores.swapaxes(-1, -2) @ query * scale
    return dquery, dself_score * query * scale, dkey, dself_score.sum((0, 2, 3))


def slot_mean_forward(scores, slots, value):
    """New slots (B, H, S, D/H): each the mean of itself and of value (B, H, N, D/H) by softmax(scores)."""
    weights, _ = softmax_forward(scores)  # (B, H, S, 1 + N)
    return weights[..., :1] * slots + weights[..., 1:] @ value, (weights, slots, value)


# y = w* m + w v, [w*, w] = softmax(z): dm = w* dy, dv = w^T dy, dz = softmax'([m·dy, dy v^T])
def slot_mean_backward(dnew, cache):
    """Gradients of scores, slots and value."""
    weights, slots, value = cache
    dweights = np.concatenate(
        [(slots * dnew).sum(-1, keepdims=True), dnew @ value.swapaxes(-1, -2)], axis=-1
    )
    return (
        softmax_backward(dweights, weights),
        weights[..., :1] * dnew,
        weights[..., 1:].swapaxes(-1, -2) @ dnew,
    )


def cross_attention_forward(p, config, x, source, readable, rng):
    """x (B, N, D) plus what it finds in source (B, K, D), by content alone: normed memory (Figure 2b) or encodings."""
    normal, norm_cache = layer_norm_forward(p, "norm", x)
    (query, key, value), projections_cache = projections_forward(p, config.heads, normal, source)
    out, attention_cache = masked_attention_forward(
        query, key, value, readable_mask(readable), config.dropout, rng
    )
    out, output_cache = affine_forward(p, "output", merge_heads(out))
    out, dropout_mask = dropout_forward(out, config.dropout, rng)
    return x + out, (norm_cache, projections_cache, attention_cache, output_cache, dropout_mask)


def cross_attention_backward(config, dy, cache):
    norm_cache, projections_cache, attention_cache, output_cache, dropout_mask = cache
    dout, grads = affine_backward(dropout_backward(dy, dropout_mask), output_cache)
    dquery, dkey, dvalue = masked_attention_backward(
        split_heads(dout, config.heads), attention_cache
    )
    dnormal, dsource, dprojections = projections_backward(dquery, dkey, dvalue, projections_cache)
    dx, dnorm = layer_norm_backward(dnormal, norm_cache)
    return dy + dx, dsource, grads | dprojections | dnorm


def masked_attention_forward(query, key, value, mask, rate, rng):
    """softmax(q·k / sqrt(E)) v: query (B, H, N, E); key, value (B, H, K, E).

    mask is true where a query sees a key, and broadcasts to (B, H, N, K).
    """
    similarity = query @ key.swapaxes(-1, -2) * query.shape[-1] ** -0.5  # (B, H, N, K)
    scores = np.where(mask, similarity, -np.inf)
    weights, _ = softmax_forward(scores)
    dropped, dropout_mask = dropout_forward(weights, rate, rng)
    out = dropped @ value  # (B, H, N, E)
    return out, (query, key, value, weights, dropped, dropout_mask)


# s = q k^T / sqrt(E), y = softmax(s) v: dv = w^T dy, ds = softmax'(dy v^T), dq = ds k / sqrt(E), dk = ds^T q / sqrt(E)
def masked_attention_backward(dout, cache):
    """Gradients of query, key and value, exactly zero for a key that nobody sees."""
    query, key, value, weights, dropped, dropout_mask = cache
    ddropped = dout @ value.swapaxes(-1, -2)  # (B, H, N, K)
    dweights = dropout_backward(ddropped, dropout_mask)
    dscores = softmax_backward(dweights, weights) * query.shape[-1] ** -0.5
    dquery = dscores @ key
    dkey = dscores.swapaxes(-1, -2) @ query
    dvalue = dropped.swapaxes(-1, -2) @ dout
    return dquery, dkey, dvalue


def projections_forward(p, heads, x, source):
    """Query of x (B, N, D), key and value of source (B, K, D), by head: (B, H, N, E), (B, H, K, E) twice (Eq. 2)."""
    made = [
        affine_forward(p, name, rows)
        for name, rows in (("query", x), ("key", source), ("value", source))
    ]
    return [split_heads(rows, heads) for rows, _ in made], [cache for _, cache in made]


# q = x W_q^T, k = s W_k^T, v = s W_v^T: dx = dq W_q, ds = dk W_k + dv W_v
def projections_backward(dquery, dkey, dvalue, caches):
    """Gradients of x, of source and of the parameters."""
    query_cache, key_cache, value_cache = caches
    dx, grads = affine_backward(merge_heads(dquery), query_cache)
    dsource_by_key, dkey_params = affine_key_backward(merge_heads(dkey), key_cache)
    dsource_by_value, dvalue_params = affine_backward(merge_heads(dvalue), value_cache)
    return dx, dsource_by_key + dsource_by_value, grads | dkey_params | dvalue_params


def readable_mask(readable):
    """(B, N) -> (B, 1, 1, N): every query sees the keys that are no padding; None is no padding at all."""
    return np.ones((1, 1, 1, 1), bool) if readable is None else readable[:, None, None, :]


# ----------------------------------------------------------------------------
# the model: the whole of it first, then encoder, decoder, their layers and relative positions (Eqs. 2-6)
def initial_state(params, config, batch):
    """What a document starts with: the learned slots, and a segment of begin tokens."""
    memory = np.tile(
        params["initial_memory"], (batch, 1, 1, 1)
    )  # (B, 1 or L, S, D), decision 8: learned, not zeros
    width = config.segment if config.encoder_layers else 0
    return State(memory, np.full((batch, width), config.special("begin")))


def initial_state_backward(config, dstate):
    """Gradient of the learned slots: the sum over lanes. dstate is zero in lanes that did not start."""
    return {"initial_memory": dstate.memory.sum(0)}


def forward(params, config, tokens, state, rng=None, task=None):
    """Read one segment (Eqs. 5-7); returns logits (B, N, V), the next state, and the cache for `backward`.

    tokens (B, N), N = config.segment; rng turns dropout on. task None is continuation: row i of the logits predicts token i + 1;
    otherwise token i of task.prompt. ValueError if N differs, or if the decoder-only model is given a task.
    """
    check_segment(config, tokens, task)
    if config.encoder_layers == 0:
        hidden, memory, stack_cache = decoder_only_forward(
            params, config, tokens, state.memory, rng
        )
        next_state = State(memory, state.previous)
    else:
        task = continuation(tokens, state.previous) if task is None else task
        encoded, memory, encoder_cache = encoder_forward(
            params, config, task.reading, state.memory[:, 0], task.readable, rng
        )
        # decision 6: one position more
        prompt = np.concatenate(
            [config.special(TASKS[0]) + task.kind[:, None], task.prompt], axis=1
        )  # (B, N + 1)
        hidden, decoder_cache = decoder_forward(params, config, prompt, encoded, task.readable, rng)
        rows = (task.kind == TASKS.index("continuation"))[:, None] + np.arange(
            config.segment
        )  # (B, N), those that predict
        hidden = np.take_along_axis(hidden, rows[..., None], 1)  # (B, N, D)
        next_state, stack_cache = (
            State(memory[:, None], tokens),
            (encoder_cache, decoder_cache, rows),
        )
    embedding = params["embedding"][
        : config.vocabulary
    ]  # decision 10: one embedding, without special tokens
    logits, output_cache = linear_forward(hidden * config.width**-0.5, embedding)
    return logits, next_state, (stack_cache, output_cache)


def backward(params, config, cache, dlogits, dnext_state=None):
    """Gradients of the parameters and of the incoming state, from those of the logits and of the next state.

    dnext_state None stops the gradient at the segment's end. Token ids have no gradient: dstate.previous is zeros.
    """
    stack_cache, output_cache = cache
    dhidden, dembedding = linear_backward(dlogits, output_cache)
    dhidden = dhidden * config.width**-0.5
    stopped = np.zeros((len(dlogits), config.memories, config.slots, config.width))
    dmemory = stopped if dnext_state is None else dnext_state.memory
    if config.encoder_layers == 0:
        dmemory, grads = decoder_only_backward(params, config, dhidden, dmemory, stack_cache)
    else:
        encoder_cache, decoder_cache, rows = stack_cache
        drows = np.zeros((len(dlogits), config.segment + 1, config.width))
        np.put_along_axis(drows, rows[..., None], dhidden, 1)
        dencoded, grads = decoder_backward(params, config, drows, decoder_cache)
        dmemory, dencoder = encoder_backward(params, config, dencoded, dmemory[:, 0], encoder_cache)
        dmemory = dmemory[:, None]
        add_into(grads, dencoder)
    grads["embedding"][: config.vocabulary] += dembedding  # the tied embedding's second gradient
    previous = np.zeros((len(dlogits), config.segment if config.encoder_layers else 0))
    return {name: grads.get(name, np.zeros_like(value)) for name, value in params.items()}, State(
        dmemory, previous
    )


def advance(params, config, tokens, state, rng=None, task=None):
    """The state after a segment by the memory path alone: encoder and writer, or all layers of the decoder-only model."""
    check_segment(config, tokens, task)
    if config.encoder_layers == 0:
        return State(
            decoder_only_forward(params, config, tokens, state.memory, rng)[1], state.previous
        )
    task = continuation(tokens, state.previous) if task is None else task
    return State(
        encoder_forward(params, config, task.reading, state.memory[:, 0], task.readable, rng)[1][
            :, None
        ],
        tokens,
    )


def encoder_forward(params, config, reading, memory, readable, rng):
    """M_{t+1} = Encoder(s_{t-1}, M_t) (Eq. 5): reading (B, N), memory (B, S, D) -> encoded (B, N, D), next memory (B, S, D)."""
    p, x, caches = subtree(params, "encoder."), params["embedding"][reading], []
    for layer in range(config.encoder_layers):
        x, cache = encoder_layer_forward(
            subtree(p, f"layers.{layer}."), config, x, memory, readable, rng
        )
        caches.append(cache)
    encoded, norm_cache = layer_norm_forward(p, "norm", x)  # decision 3: a final norm
    next_memory, writer_cache = slot_attention_forward(
        subtree(params, "writer."), config, memory, encoded, readable
    )
    return encoded, next_memory, (reading, caches, norm_cache, writer_cache)


def encoder_backward(params, config, dencoded, dnext_memory, cache):
    """Gradients of memory and of the parameters."""
    reading, caches, norm_cache, writer_cache = cache
    dmemory, dencoded_written, dwriter = slot_attention_backward(config, dnext_memory, writer_cache)
    dx, grads = layer_norm_backward(dencoded + dencoded_written, norm_cache)
    for layer in reversed(range(config.encoder_layers)):
        dx, dmemory_read, dlayer = encoder_layer_backward(config, dx, caches[layer])
        dmemory = dmemory + dmemory_read  # every layer reads the same memory
        grads |= prefixed(f"layers.{layer}.", dlayer)
    dembedding = np.zeros_like(params["embedding"])
    np.add.at(dembedding, reading, dx)
    return dmemory, prefixed("encoder.", grads) | prefixed("writer.", dwriter) | {
        "embedding": dembedding
    }


def decoder_forward(params, config, prompt, encoded, readable, rng):
    """Final hidden states (B, N + 1, D) of prompt (B, N + 1), the task's token in front (Eq. 6)."""
    p, x, caches = subtree(params, "decoder."), params["embedding"][prompt], []
    for layer in range(config.decoder_layers):
        x, cache = decoder_layer_forward(
            subtree(p, f"layers.{layer}."), config, x, encoded, readable, rng
        )
        caches.append(cache)
    hidden, norm_cache = layer_norm_forward(p, "norm", x)
    return hidden, (prompt, caches, norm_cache)


def decoder_backward(params, config, dhidden, cache):
    """Gradients of encoded, summed over the layers, and of the parameters."""
    prompt, caches, norm_cache = cache
    dx, grads = layer_norm_backward(dhidden, norm_cache)
    dencoded = 0.0
    for layer in reversed(range(config.decoder_layers)):
        dx, dencoded_layer, dlayer = decoder_layer_backward(config, dx, caches[layer])
        dencoded = dencoded + dencoded_layer
        grads |= prefixed(f"layers.{layer}.", dlayer)
    dembedding = np.zeros_like(params["embedding"])
    np.add.at(dembedding, prompt, dx)
    return dencoded, prefixed("decoder.", grads) | {"embedding": dembedding}


def encoder_layer_forward(p, config, x, memory, readable, rng):
    """Self-attention, memory cross-attention and feed-forward of x (B, N, D) (Fig. 2a; decision 4: in this order)."""
    x, attention_cache = self_attention_forward(
        subtree(p, "attention."), config, x, None, False, readable, rng
    )
    normal_memory, memory_cache = layer_norm_forward(p, "read.memory_norm", memory)
    x, read_cache = cross_attention_forward(
        subtree(p, "read."), config, x, normal_memory, None, rng
    )
    x, mlp_cache = feed_forward_forward(p, config, x, rng)
    return x, (attention_cache, memory_cache, read_cache, mlp_cache)


def encoder_layer_backward(config, dx, cache):
    attention_cache, memory_cache, read_cache, mlp_cache = cache
    dx, grads = feed_forward_backward(dx, mlp_cache)
    dx, dnormal_memory, dread = cross_attention_backward(config, dx, read_cache)
    dmemory, dmemory_norm = layer_norm_backward(dnormal_memory, memory_cache)
    dx, _, dattention = self_attention_backward(config, dx, attention_cache)
    return (
        dx,
        dmemory,
        grads | dmemory_norm | prefixed("read.", dread) | prefixed("attention.", dattention),
    )


def decoder_layer_forward(p, config, x, encoded, readable, rng):
    """Causal self-attention, cross-attention to encoded (B, N, D) and feed-forward of x (B, N + 1, D)."""
    x, attention_cache = self_attention_forward(
        subtree(p, "attention."), config, x, None, True, None, rng
    )
    x, cross_cache = cross_attention_forward(
        subtree(p, "cross."), config, x, encoded, readable, rng
    )
    x, mlp_cache = feed_forward_forward(p, config, x, rng)
    return x, (attention_cache, cross_cache, mlp_cache)


def decoder_layer_backward(config, dx, cache):
    attention_cache, cross_cache, mlp_cache = cache
    dx, grads = feed_forward_backward(dx, mlp_cache)
    dx, dencoded, dcross = cross_attention_backward(config, dx, cross_cache)
    dx, _, dattention = self_attention_backward(config, dx, attention_cache)
    return dx, dencoded, grads | prefixed("cross.", dcross) | prefixed("attention.", dattention)


def self_attention_forward(p, config, x, memory, causal, readable, rng):
    """x (B, N, D) plus what its tokens find in each other and, in the decoder-only model, in normed memory (B, S, D)."""
    normal, norm_cache = layer_norm_forward(p, "norm", x)
    source = normal if memory is None else np.concatenate([memory, normal], axis=1)  # (B, S + N, D)
    (query, key, value), projections_cache = projections_forward(
        p, config.heads, normal, source
    )  # decision 13: one set for both
    mask = self_attention_mask(x.shape[1], source.shape[1] - x.shape[1], causal, readable)
    attend = (
        simplified_attention_forward
        if config.positions == "simplified"
        else transformer_xl_attention_forward
    )
    out, attention_cache = attend(
        p, query, key, value, config.distances(causal), mask, config.dropout, rng
    )
    out, output_cache = affine_forward(p, "output", merge_heads(out))
    out, dropout_mask = dropout_forward(out, config.dropout, rng)
    return x + out, (norm_cache, projections_cache, attention_cache, output_cache, dropout_mask)


def self_attention_backward(config, dy, cache):
    """Gradients of x, of memory (of no rows without) and of the parameters."""
    norm_cache, projections_cache, attention_cache, output_cache, dropout_mask = cache
    dout, grads = affine_backward(dropout_backward(dy, dropout_mask), output_cache)
    attend_backward = (
        simplified_attention_backward
        if config.positions == "simplified"
        else transformer_xl_attention_backward
    )
    dquery, dkey, dvalue, dpositions = attend_backward(
        split_heads(dout, config.heads), attention_cache
    )
    dnormal, dsource, dprojections = projections_backward(dquery, dkey, dvalue, projections_cache)
    slots = dsource.shape[1] - dnormal.shape[1]  # S, or 0 without memory
    dx, dnorm = layer_norm_backward(dnormal + dsource[:, slots:], norm_cache)
    return dy + dx, dsource[:, :slots], grads | dpositions | dprojections | dnorm


def self_attention_mask(length, slots, causal, readable):
    """Which keys each query sees, (B or 1, 1, N, S + N): all slots; tokens up to itself if causal, and no padding."""
    mask = np.ones((length, length), bool)
    mask = (np.tril(mask) if causal else mask) & readable_mask(readable)
    return np.concatenate([np.ones((*mask.shape[:-1], slots), bool), mask], axis=-1)


def feed_forward_forward(p, config, x, rng):
    """x + dropout(W_2 relu(W_1 norm(x) + b_1) + b_2)"""
    normal, norm_cache = layer_norm_forward(p, "mlp_norm", x)
    before, hidden_cache = affine_forward(p, "mlp_hidden", normal)
    hidden = np.maximum(before, 0)  # (B, N, F)
    out, output_cache = affine_forward(p, "mlp_output", hidden)
    out, dropout_mask = dropout_forward(out, config.dropout, rng)
    return x + out, (norm_cache, hidden_cache, hidden, output_cache, dropout_mask)


def feed_forward_backward(dy, cache):
    norm_cache, hidden_cache, hidden, output_cache, dropout_mask = cache
    dhidden, grads = affine_backward(dropout_backward(dy, dropout_mask), output_cache)
    dnormal, dweights = affine_backward(dhidden * (hidden > 0), hidden_cache)
    dx, dnorm = layer_norm_backward(dnormal, norm_cache)
    return dy + dx, grads | dweights | dnorm


def simplified_attention_forward(p, query, key, value, distances, mask, rate, rng):
    """Eqs. 3-4: softmax(q·(k_j + R_{i-j}) / sqrt(E)) (v_j + R_{i-j}), one R for both roles (decision 1: one table): (B, H, N, E).

    query (B, H, N, E); key, value (B, H, K, E), whose last N have positions; distances (R,) of the rows of R.
    """
    table, index = p["positions"], distance_index(query.shape[2], distances)
    weights, weights_cache = relative_weights_forward(
        query, key, query @ table.T, index, mask, rate, rng
    )  # Eq. 3
    by_distance = by_key_backward(
        weights[..., -len(index) :], (index, len(table))
    )  # sums: the adjoint of looking up
    out = weights @ value + by_distance @ table  # Eq. 4
    return out, ((query, table, weights_cache), (value, weights, by_distance, index))


# s = q R^T, y = w v + a R, a is w by distance: dv = w^T dy, da = dy R^T, dR = ds^T q + a^T dy, dq = (dq of w) + ds R
def simplified_attention_backward(dout, cache):
    """Gradients of query, key, value and, from both of its roles, of R."""
    (query, table, weights_cache), (value, weights, by_distance, index) = cache
    dweights = dout @ value.swapaxes(-1, -2)  # (B, H, N, K)
    dweights[..., -query.shape[2] :] += by_key_forward(dout @ table.T, index)[0]
    dquery, dkey, dscores = relative_weights_backward(dweights, weights_cache)
    dtable = np.einsum("bhnr,bhne->re", dscores, query) + np.einsum(
        "bhnr,bhne->re", by_distance, dout
    )
    return dquery + dscores @ table, dkey, weights.swapaxes(-1, -2) @ dout, {"positions": dtable}


def relative_weights_forward(query, key, by_distance, index, mask, rate, rng):
    """Weights (B, H, N, K) = dropout(softmax((q·k_j + s_{i-j}) / sqrt(E))); s is by_distance (B, H, N, R), of the last N keys."""
    scores = query @ key.swapaxes(-1, -2)  # (B, H, N, K)
    by_key, by_key_cache = by_key_forward(by_distance, index)
    scores[..., -len(index) :] += by_key
    weights, _ = softmax_forward(
        np.where(mask, scores * query.shape[-1] ** -0.5, -np.inf)
    )  # decision 1: with 1/sqrt(E)
    dropped, dropout_mask = dropout_forward(weights, rate, rng)
    return dropped, (query, key, weights, dropout_mask, by_key_cache)


# z = (q k^T + t) / sqrt(E), w = softmax(z): dz = softmax'(dw), dq = dz k / sqrt(E), dk = dz^T q / sqrt(E), dt = dz / sqrt(E)
def relative_weights_backward(dweights, cache):
    query, key, weights, dropout_mask, by_key_cache = cache
    dscores = (
        softmax_backward(dropout_backward(dweights, dropout_mask), weights)
        * query.shape[-1] ** -0.5
    )
    dby_distance = by_key_backward(dscores[..., -query.shape[2] :], by_key_cache)  # (B, H, N, R)
    return dscores @ key, dscores.swapaxes(-1, -2) @ query, dby_distance


def by_key_forward(by_distance, index):
    """Scores by distance (B, H, N, R) -> scores by key (B, H, N, N); index (N, N) is each pair's distance."""
    out = np.take_along_axis(
        by_distance, np.broadcast_to(index, (*by_distance.shape[:2], *index.shape)), -1
    )
    return out, (index, by_distance.shape[-1])


# t_ij = s_i[r], r = index_ij: ds_i[r] = sum of dt_ij over the keys j with index_ij = r, clipped duplicates included
def by_key_backward(dout, cache):
    """By key (B, H, N, N) -> by distance (B, H, N, R), of gradients and of weights: the sum over the keys at each distance."""
    index, distances = cache
    out = np.zeros((*dout.shape[:3], distances))
    for query, row in enumerate(index):
        np.add.at(out[:, :, query], (slice(None), slice(None), row), dout[:, :, query])
    return out


def distance_index(length, distances):
    """The row of `distances` for query i and key j of `length` tokens: i - j, clipped to the nearest row, (N, N)."""
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    return np.clip(distance, distances[0], distances[-1]) - distances[0]


# ----------------------------------------------------------------------------
# through segments: memory replay, the paper's way to train, beside full back-propagation through time
class Segment(NamedTuple):
    """One step of a rollout."""

    tokens: np.ndarray  # (B, N)
    targets: np.ndarray  # (B, N)
    scored: np.ndarray  # (B, N) bool
    starts: np.ndarray  # (B,) bool, where a document begins
    task: tuple | None = None  # a Task; None is continuation


def memory_replay(params, config, segments, state, seed=None):
    """Algorithm 1 (decision 14: K segments, 0 to K - 1): returns what `through_time` does, with one segment's cache at a time."""
    scored = max(1, sum(int(segment.scored.sum()) for segment in segments))
    replay_buffer = [state]  # Alg. 1, l.1-2
    for t, segment in enumerate(segments[:-1]):  # l.3
        before = state_read(params, config, segment, replay_buffer[-1])
        replay_buffer.append(
            advance(params, config, segment.tokens, before, segment_rng(seed, t), segment.task)
        )  # l.4-5
    loss, grads = 0.0, {}
    last, dstate = None, None  # l.7: the gradient of M_K is zero
    for t in reversed(range(len(segments))):  # l.8
        part, after, cache = segment_forward(
            params, config, segments[t], replay_buffer.pop(), segment_rng(seed, t)
        )  # l.9-10
        last = after if last is None else last
        dparams, dstate = segment_backward(params, config, 1 / scored, dstate, cache)  # l.11-12
        loss = loss + part
        add_into(grads, dparams)
    return loss / scored, grads, dstate, last  # l.14


def through_time(params, config, segments, state, seed=None):
    """Full back-propagation through a rollout: (mean loss, its gradients, that of the rollout's first state, next state)."""
    scored, loss, caches = max(1, sum(int(segment.scored.sum()) for segment in segments)), 0.0, []
    for t, segment in enumerate(segments):
        part, state, cache = segment_forward(params, config, segment, state, segment_rng(seed, t))
        loss = loss + part
        caches.append(cache)
    grads, dstate = {}, None
    for cache in reversed(caches):
        dparams, dstate = segment_backward(params, config, 1 / scored, dstate, cache)
        add_into(grads, dparams)
    return loss / scored, grads, dstate, state


def segment_forward(params, config, segment, state, rng):
    """(summed loss, next state, cache) of one segment."""
    state = state_read(params, config, segment, state)
    logits, state, cache = forward(params, config, segment.tokens, state, rng, segment.task)
    loss, loss_cache = cross_entropy_forward(logits, segment.targets, segment.scored)
    return loss, state, (segment, cache, loss_cache)


def segment_backward(params, config, dloss, dnext_state, cache):
    """Gradients of the parameters and of the state that was carried to the segment."""
    segment, forward_cache, loss_cache = cache
    grads, dstate = backward(
        params, config, forward_cache, cross_entropy_backward(dloss, loss_cache), dnext_state
    )
    zero = State(*(np.zeros_like(field) for field in dstate))
    add_into(grads, initial_state_backward(config, choose_lanes(segment.starts, dstate, zero)))
    return grads, choose_lanes(segment.starts, zero, dstate)


def state_read(params, config, segment, state):
    """The state that a segment reads: carried, or the initial one where a document starts."""
    return choose_lanes(segment.starts, initial_state(params, config, len(segment.starts)), state)


def choose_lanes(starts, first, second):
    """A state that is `first` in the lanes where starts (B,) is true and `second` elsewhere."""
    return State(
        *(
            np.where(starts.reshape(-1, *[1] * (a.ndim - 1)), a, b)
            for a, b in zip(first, second, strict=True)
        )
    )


def segment_rng(seed, index):
    """The generator of one segment's dropout, the same whenever it is computed, or None."""
    return None if seed is None else np.random.default_rng([seed, index])


# ----------------------------------------------------------------------------
# demonstration: gradients against finite differences, replay against full back-propagation, a tiny fit
def rollout_of(config, document, rng):
    """A document (B, K N + 1) as a rollout that also fills in (segments 1, 4, ...) and recalls (segments 2, 5, ...)."""
    n, segments = config.segment, []
    texts = np.split(document[:, :-1], (document.shape[1] - 1) // n, axis=1)
    for t, tokens in enumerate(texts):
        task, targets = None, document[:, t * n + 1 : (t + 1) * n + 1]
        if config.encoder_layers and t % 3 == 1:
            task, targets = infilling(config, texts[t - 1], 0.3, 3.5, rng), texts[t - 1]
        if config.encoder_layers and t % 3 == 2:
            task, targets = recall(texts[t - 1], texts[t - 2]), texts[t - 2]
        segments.append(
            Segment(
                tokens, targets, np.ones(tokens.shape, bool), np.full(len(tokens), t == 0), task
            )
        )
    return segments


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
    """Check gradients and memory replay, then fit a tiny text; exits with an error if a check fails."""
    rng = np.random.default_rng(0)
    sizes = {
        "width": 12,
        "heads": 2,
        "head_width": 5,
        "feed_forward": 20,
        "encoder_layers": 1,
        "decoder_layers": 1,
    }
    config = Config(vocabulary=11, segment=6, slots=4, max_distance=4, **sizes)
    params = init_params(config, rng)
    segments = rollout_of(config, rng.integers(config.vocabulary, size=(2, 25)), rng)
    print(
        f"Memformer, four segments of {config.segment} tokens: continuation, infilling, recall, continuation."
    )
    state = initial_state(params, config, 2)
    _, grads, _, _ = through_time(params, config, segments, state)
    check_gradients(
        lambda moved: through_time(moved, config, segments, state)[0], params, grads, rng
    )
    dropping = replace(config, dropout=0.2)
    _, exact, _, _ = through_time(params, dropping, segments, state, seed=1)
    _, replayed, _, _ = memory_replay(params, dropping, segments, state, seed=1)
    apart = max(
        np.abs(exact[name] - replayed[name]).max() / np.abs(grad).max()
        for name, grad in exact.items()
        if grad.any()
    )
    print(
        f"Memory replay and full back-propagation through time, with dropout: gradients at most {apart:.1e} apart.\n"
    )
    if not apart < 1e-9:
        raise SystemExit("memory replay disagrees with back-propagation through time")
    print(
        "Fitting these 48 predictions of random tokens by memory replay (there is nothing to learn but the text):"
    )
    for step in range(1, 201):
        loss, grads, _, _ = memory_replay(
            params, config, segments, initial_state(params, config, 2)
        )
        params = {
            name: params[name] - 0.02 * 0.98**step * np.sign(grad) for name, grad in grads.items()
        }
        if step in (1, 10, 50, 200):
            print(
                f"  step {step:3d}: {loss / np.log(2):.3f} bits per token (uniform: {np.log2(config.vocabulary):.3f})"
            )
    fresh = state = initial_state(params, config, 2)
    for segment in segments[:3]:
        state = advance(params, config, segment.tokens, state, task=segment.task)
    cleared = state._replace(memory=fresh.memory)
    for label, start in (
        ("memory and previous tokens carried", state),
        ("memory cleared", cleared),
        ("both cleared", fresh),
    ):
        logits, _, _ = forward(params, config, segments[3].tokens, start)
        nats, _ = cross_entropy_forward(logits, segments[3].targets, segments[3].scored)
        print(f"Fourth segment, {label}: {nats / 12 / np.log(2):.3f} bits per token")


# ----------------------------------------------------------------------------
# what every Transformer has: a first reading needs what it does, not how
NORM_EPSILON = 1e-6  # under the square root of layer_norm


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


def affine_forward(p, name, x):
    """y = x W^T + b of that name; y = x W^T if p has no such bias."""
    y, linear_cache = linear_forward(x, p[name])
    biased = f"{name}_bias" in p
    if biased:
        y = y + p[f"{name}_bias"]
    return y, (name, biased, linear_cache)


# y = x W^T + b: dx = dy W, dW = dy^T x, db = sum of dy
def affine_backward(dy, cache):
    """Gradients of x, and of the weight and the bias by name."""
    name, biased, linear_cache = cache
    dx, dweight = linear_backward(dy, linear_cache)
    grads = {name: dweight}
    if biased:
        sum_axes = tuple(range(dy.ndim - 1))  # all but the last
        grads[f"{name}_bias"] = dy.sum(sum_axes)
    return dx, grads


def affine_key_backward(dkey, cache):
    """affine_backward of keys, which all share q·b: softmax cancels it, so db is exactly zero."""
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
    """Gradients of x (..., in) and of the weight (out, in)."""
    x, weight = cache
    dx = dy @ weight
    dy_rows = dy.reshape(-1, dy.shape[-1])
    x_rows = x.reshape(-1, x.shape[-1])
    dweight = dy_rows.T @ x_rows
    return dx, dweight


def split_heads(x, heads):
    """(B, N, H*E) -> (B, H, N, E)"""
    batch, length, width = x.shape
    by_head = x.reshape(batch, length, heads, width // heads)  # (B, N, H, E)
    return by_head.transpose(0, 2, 1, 3)


def merge_heads(x):
    """(B, H, N, E) -> (B, N, H*E), the adjoint of split_heads."""
    batch, heads, length, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, heads * width)


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


def prefixed(prefix, tree):
    """{name: a} -> {prefix + name: a}."""
    return {prefix + name: array for name, array in tree.items()}


def subtree(params, prefix):
    """The parameters below prefix, by their names without it."""
    return {
        name.removeprefix(prefix): array
        for name, array in params.items()
        if name.startswith(prefix)
    }


def add_into(total, part):
    """Sum a dict of gradients into another; total is ours to change."""
    for name, array in part.items():
        total[name] = total[name] + array if name in total else array


# ----------------------------------------------------------------------------
# variants: the other two tasks, the decoder-only model and positions after Eq. 1; a first reading skips them
class Task(NamedTuple):
    """What every lane does in one segment (2.3); axis 0 is the lane."""

    kind: np.ndarray  # (B,) index into TASKS
    reading: np.ndarray  # (B, N) token ids that the encoder reads
    readable: np.ndarray  # (B, N) bool, false on the padding after a text with masked spans
    prompt: np.ndarray  # (B, N) token ids that the decoder reads after the task's token


def continuation(tokens, previous):
    """The task of a language model (Eq. 7): predict the successor of every token from the previous segment."""
    return Task(np.zeros(len(tokens), int), previous, np.ones(tokens.shape, bool), tokens)


def infilling(config, previous, fraction, span, rng):
    """Predict previous (B, N) from previous with masked spans (decision 11: all of it, 30% masked); targets are previous."""
    reading, readable = np.zeros_like(previous), np.zeros(previous.shape, bool)
    for lane, text in enumerate(previous):
        masked = mask_spans(text, config.special("mask"), fraction, span, rng)
        reading[lane, : len(masked)], readable[lane, : len(masked)] = masked, True
    return Task(np.full(len(previous), TASKS.index("infilling")), reading, readable, previous)


def mask_spans(text, mask, fraction, span, rng):
    """text (N,) with round(fraction N) tokens in spans of Poisson(span) tokens, each span replaced by one mask token (2.3).

    The last span is cut to what is left of that number. An empty span inserts a mask, but only if longer spans have made room, so
    the text never grows. All ways to place the spans between the remaining tokens are equally likely.
    """
    budget, lengths = round(fraction * len(text)), []
    while sum(lengths) < budget:
        length = min(int(rng.poisson(span)), budget - sum(lengths))
        if length or len(lengths) < sum(lengths):
            lengths.append(length)
    items = len(text) - budget + len(lengths)  # tokens that remain, and masks
    places = dict(
        zip(rng.permutation(items).tolist(), lengths, strict=False)
    )  # {which item is a mask: tokens it replaces}
    out, at = [], 0
    for item in range(items):
        out.append(mask if item in places else text[at])
        at += places.get(item, 1)
    return np.array(out)


def recall(previous, earlier):
    """Predict `earlier` (B, N), the segment before previous (decision 12: the encoder's own before); targets are earlier."""
    return Task(
        np.full(len(previous), TASKS.index("recall")),
        previous,
        np.ones(previous.shape, bool),
        earlier,
    )


def decoder_only_forward(params, config, tokens, memory, rng):
    """Figure 1b: tokens (B, N), memory (B, L, S, D) -> final hidden states (B, N, D) and next memory."""
    p, x = subtree(params, "decoder."), params["embedding"][tokens]
    memories, caches = [], []
    for layer in range(config.decoder_layers):
        x, next_memory, cache = memory_layer_forward(
            subtree(p, f"layers.{layer}."), config, x, memory[:, layer], rng
        )
        memories.append(next_memory)
        caches.append(cache)
    hidden, norm_cache = layer_norm_forward(p, "norm", x)
    return hidden, np.stack(memories, axis=1), (tokens, caches, norm_cache)


def decoder_only_backward(params, config, dhidden, dnext_memory, cache):
    tokens, caches, norm_cache = cache
    dx, grads = layer_norm_backward(dhidden, norm_cache)
    dmemory = np.zeros_like(dnext_memory)
    for layer in reversed(range(config.decoder_layers)):
        dx, dmemory[:, layer], dlayer = memory_layer_backward(
            config, dx, dnext_memory[:, layer], caches[layer]
        )
        grads |= prefixed(f"layers.{layer}.", dlayer)
    dembedding = np.zeros_like(params["embedding"])
    np.add.at(dembedding, tokens, dx)
    return dmemory, prefixed("decoder.", grads) | {"embedding": dembedding}


def memory_layer_forward(p, config, x, memory, rng):
    """A layer of Figure 1b: x (B, N, D) attends to [memory (B, S, D) | x]; its output writes the next memory."""
    normal_memory, memory_cache = layer_norm_forward(p, "attention.memory_norm", memory)
    x, attention_cache = self_attention_forward(
        subtree(p, "attention."), config, x, normal_memory, True, None, rng
    )
    x, mlp_cache = feed_forward_forward(p, config, x, rng)
    next_memory, writer_cache = slot_attention_forward(
        subtree(p, "writer."), config, memory, x, None
    )
    return x, next_memory, (memory_cache, attention_cache, mlp_cache, writer_cache)


def memory_layer_backward(config, dx, dnext_memory, cache):
    memory_cache, attention_cache, mlp_cache, writer_cache = cache
    dmemory, dx_written, dwriter = slot_attention_backward(config, dnext_memory, writer_cache)
    dx, grads = feed_forward_backward(dx + dx_written, mlp_cache)
    dx, dnormal_memory, dattention = self_attention_backward(config, dx, attention_cache)
    dmemory_read, dmemory_norm = layer_norm_backward(dnormal_memory, memory_cache)
    return (
        dx,
        dmemory + dmemory_read,
        grads | dmemory_norm | prefixed("writer.", dwriter) | prefixed("attention.", dattention),
    )


def transformer_xl_attention_forward(p, query, key, value, distances, mask, rate, rng):
    """Eq. 1: softmax(((q + u)·k_j + (q + v)·W_r R_{i-j}) / sqrt(E)) v_j, shapes as above; R is fixed sinusoids."""
    rows = sinusoids(distances, p["distance_key"].shape[1])  # (R, D)
    projected, projection_cache = linear_forward(rows[None], p["distance_key"])
    distance_key = split_heads(projected, query.shape[1])[0]  # (H, R, E)
    content_query = query + p["content_bias"][:, None]  # (a) and (c)
    distance_query = query + p["distance_bias"][:, None]  # (b) and (d)
    by_distance = distance_query @ distance_key.swapaxes(-1, -2)  # (B, H, N, R)
    index = distance_index(query.shape[2], distances)
    weights, weights_cache = relative_weights_forward(
        content_query, key, by_distance, index, mask, rate, rng
    )
    return weights @ value, (
        (distance_query, distance_key, projection_cache),
        (value, weights, weights_cache),
    )


# q' = q + u, q'' = q + v, p = R W_r^T, s = q'' p^T: dq'' = ds p, dp = ds^T q'', dq = dq' + dq'', du, dv = sums, dW_r = dp^T R
def transformer_xl_attention_backward(dout, cache):
    (distance_query, distance_key, projection_cache), (value, weights, weights_cache) = cache
    dcontent, dkey, dscores = relative_weights_backward(
        dout @ value.swapaxes(-1, -2), weights_cache
    )
    ddistance = dscores @ distance_key  # (B, H, N, E)
    ddistance_key = (dscores.swapaxes(-1, -2) @ distance_query).sum(0)  # (H, R, E)
    _, dweight = linear_backward(merge_heads(ddistance_key[None]), projection_cache)
    grads = {
        "distance_key": dweight,
        "content_bias": dcontent.sum((0, 2)),
        "distance_bias": ddistance.sum((0, 2)),
    }
    return dcontent + ddistance, dkey, weights.swapaxes(-1, -2) @ dout, grads


def sinusoids(distances, width):
    """Transformer-XL's R of signed distances: (R,) -> (R, D), all sines first, then all cosines."""
    angle = distances[:, None] * 10_000.0 ** (-np.arange(0, width, 2) / width)  # (R, D/2)
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)


# ----------------------------------------------------------------------------
# starting values: every parameter by its name; a first reading skips them
POSITION_DEVIATION = 0.5  # of the simplified positions at the start (decision 1: one table)


def init_params(config, rng):
    """All parameters as {dotted name: float64 array}; matrices are (out, in)."""
    d, specials = config.width, len(SPECIALS) if config.encoder_layers else 0
    params = {
        "embedding": rng.normal(0, 1, (config.vocabulary + specials, d))
    }  # decision 10: one embedding
    params["initial_memory"] = rng.normal(
        0, 1, (config.memories, config.slots, d)
    )  # decision 8: it is learned
    for layer in range(config.encoder_layers):
        params |= prefixed(f"encoder.layers.{layer}.", init_layer(config, rng, "read"))
    if config.encoder_layers:
        params |= prefixed("encoder.norm.", init_norm(d)) | prefixed(
            "writer.", init_writer(config, rng)
        )
    for layer in range(config.decoder_layers):
        params |= prefixed(
            f"decoder.layers.{layer}.",
            init_layer(config, rng, "cross" if config.encoder_layers else "writer"),
        )
    return params | prefixed("decoder.norm.", init_norm(d))


def init_layer(config, rng, name):
    """A layer by the name of what follows its self-attention: memory is read, encodings are crossed to, or a writer writes."""
    d, f = config.width, config.feed_forward
    p = prefixed("attention.", init_attention(config, rng, name != "read", name == "writer"))
    other = init_writer(config, rng) if name == "writer" else init_attention(config, rng)
    other |= prefixed("memory_norm.", init_norm(d)) if name == "read" else {}
    p |= prefixed(f"{name}.", other) | prefixed("mlp_norm.", init_norm(d))
    return p | init_affine(rng, "mlp_hidden", f, d) | init_affine(rng, "mlp_output", d, f)


def init_attention(config, rng, causal=None, memory=False):
    """Self-attention, or cross-attention if causal is None; memory is given a norm (decision 2: biases, except in Eq. 1)."""
    d, inner = config.width, config.heads * config.head_width
    p = prefixed("norm.", init_norm(d)) | (prefixed("memory_norm.", init_norm(d)) if memory else {})
    if causal is None or config.positions == "simplified":
        for name in ("query", "key", "value"):
            p |= init_affine(rng, name, inner, d)  # Eq. 2
        if causal is not None:
            p["positions"] = rng.normal(
                0, POSITION_DEVIATION, (len(config.distances(causal)), config.head_width)
            )
    else:
        p |= {
            name: init_linear(rng, inner, d) for name in ("query", "key", "value", "distance_key")
        }
        p |= {
            name: rng.normal(0, 0.02, (config.heads, config.head_width))
            for name in ("content_bias", "distance_bias")
        }
    return p | init_affine(rng, "output", d, inner)


def init_writer(config, rng):
    d, inner = config.width, config.heads * config.head_width
    p = prefixed("memory_norm.", init_norm(d)) | prefixed("norm.", init_norm(d))
    p |= (
        init_affine(rng, "query", inner, d)
        | init_affine(rng, "key", inner, d)
        | init_affine(rng, "value", d, d)
    )
    return p | {"retention": np.full(config.heads, config.retention)}  # decision 9: 0 or more


def init_affine(rng, name, fan_out, fan_in):
    return {name: init_linear(rng, fan_out, fan_in), f"{name}_bias": np.zeros(fan_out)}


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
# checks: what a Config and a segment must be; a first reading skips them
def check_config(config):
    """Raise ValueError, naming the field, if the model cannot work."""
    for name, kind in config.__annotations__.items():
        least = 0 if name == "encoder_layers" else 1
        if kind is int and getattr(config, name) < least:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least {least}")
    if config.width % config.heads:
        nearest = max(1, round(config.width / config.heads)) * config.heads
        raise ValueError(
            f"width {config.width} is not a multiple of heads {config.heads}; the nearest is {nearest}"
        )
    if config.positions not in POSITIONS:
        raise ValueError(
            f"positions is {config.positions!r}; it must be one of {', '.join(POSITIONS)}"
        )
    if config.positions == "transformer_xl" and config.width % 2:
        raise ValueError(
            f"width {config.width} is odd; the sinusoids of transformer_xl positions need an even one"
        )
    if not math.isfinite(config.retention):
        raise ValueError(f"retention is {config.retention}; it must be a finite number")
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout is {config.dropout}; it must be at least 0 and below 1")


def check_segment(config, tokens, task):
    if tokens.shape[1] != config.segment:
        raise ValueError(
            f"a segment of {tokens.shape[1]} tokens is not one of {config.segment}; pad it"
        )
    if task is not None and config.encoder_layers == 0:
        raise ValueError(
            "the decoder-only model (encoder_layers 0) has no tasks but continuation; leave task out"
        )


if __name__ == "__main__":
    if sys.argv[1:]:  # --check [--case NAME] is a program of its own
        sys.argv.insert(1, "memformer")
        runpy.run_module("reference.gradients", run_name="__main__")
    demonstrate()
