"""Memformer (Wu, Lan, Gu and Yu, 2020) and Memory Replay Back-Propagation, in NumPy.

The model carries S memory slots from segment to segment of a document. Step t, from 0, reads
segment s_{t-1} and the slots M_t, predicts segment s_t and writes the slots M_{t+1}. Algorithm 1
counts so too; Eq. 5 writes s_t, M_{t-1}, s_{t+1}, M_t. An encoder reads; then each slot attends to
itself and to the encodings of s_{t-1}, never to another slot. A decoder predicts s_t from the same
encodings. Gradient passes from step to step through the slots alone. Memory Replay Back-Propagation
stores only the slots of a rollout and computes each step again on the way back. Without encoder
layers the model is Figure 1b, which reads s_t itself.

`slot_attention_forward` writes memory and `cross_attention_forward` reads it; `forward` is the
whole model, from (tokens, state) to (logits, next state); `memory_replay` trains it. Each backward
stands below its forward. `params` are all parameters, {dotted name: array}, and `p` those of one
part, without its prefix; `grads` and `d..._params` are gradients of parameters by name.

Glossary of step t: code symbol, meaning, symbol, shape
    tokens            token ids of one segment of N tokens              s_t        (B, N)
    segment           N, tokens in a segment; the paper's L
    slots             S, memory slots
    state.memory      the slots; of every layer in the decoder-only     M_t        (B, 1 or L, S, D)
    slot_bias         parameter; added to slots before they are normed  v_bias     (1 or L, S, D)
    state.previous    the previous segment, which the encoder reads     s_{t-1}    (B, N)
    reading           what the encoder reads, masked when infilling     s_{t-1}    (B, N)
    readable          where reading is no padding                                  (B, N) bool
    prompt            what the decoder reads after the task's token                (B, N)
    encoded           the encoder's final hidden states                            (B, N, D)
    source            what attention takes keys and values from                    (B, K, D)
    positions         parameter; a vector for every clipped distance    R_{i-j}    (R, E)
    distance_key      Transformer-XL's matrix of distances              W_r        (HE, D)
    content_bias, distance_bias   Transformer-XL's vectors              u, v       (H, E), (H, E)

B batch (lanes: documents read side by side), D width, H heads, E head width, F feed-forward width,
V vocabulary, L layers, R distances, K keys. Decisions are numbered in docs/decisions/memformer.md.
"""

import runpy
import sys
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

# ----------------------------------------------------------------------------
# configuration: sizes and variants, and what a segment hands to the next one; read it first
TASKS = ("continuation", "infilling", "recall")  # section 2.3
SPECIALS = ("begin", "mask", *TASKS)  # token ids V, V + 1, ... (decision 10: one embedding)
CHOICES = {
    "positions": ("simplified", "transformer_xl"),  # Eqs. 2-4, Eq. 1
    "slot_value": ("itself", "projected"),  # section 2.2.3, its last sentence and its third
    "slot_normalization": ("none", "biased"),  # decision 17: biased normalisation
}


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
        positions: relative positions in self-attention, simplified (Eqs. 2-4) or
            transformer_xl (Eq. 1)
        max_distance: distance at and beyond which the simplified positions are the same
        slot_value: a slot's own value when it is written, the slot itself or projected
        slot_normalization: what happens to slots before a segment reads them, nothing (none), or
            each is added to a learned bias and divided by its length (biased)
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

    def special(self, name):
        """The id of a special token."""
        return self.vocabulary + SPECIALS.index(name)

    @property
    def slot_sets(self):
        """Sets of slots that a state holds: 1, or L in the decoder-only model."""
        return 1 if self.encoder_layers else self.decoder_layers

    def distances(self, causal):
        """Signed distances i - j that have a row, from 0 if causal (decision 1: rows of R)."""
        decoder_reads_one_more = causal and self.encoder_layers  # the task's token
        largest = self.segment if decoder_reads_one_more else self.segment - 1
        if self.positions == "simplified":
            largest = min(largest, self.max_distance)
        smallest = 0 if causal else -largest
        return np.arange(smallest, largest + 1)


class State(NamedTuple):
    """What a segment hands to the next one (decision 5: memory, previous tokens), lane first."""

    memory: np.ndarray  # (B, 1, S, D), decoder-only (B, L, S, D)
    previous: np.ndarray  # (B, N) token ids, decoder-only (B, 0)


# ----------------------------------------------------------------------------
# the method: what a first reading is for: slots are written, each from itself; tokens read them
def slot_attention_forward(p, config, memory, encoded, readable):
    """The next memory (B, S, D): each slot attends to [itself | encoded], 1 + N keys (Figure 2c).

    memory (B, S, D); encoded (B, N, D); readable (B, N) is false on padding, or None.
    """
    normed, norm_cache = layer_norm_forward(p, "memory_norm", memory)  # decision 3: it is normed
    source, source_cache = layer_norm_forward(p, "norm", encoded)
    query, key, value, projections_cache = projections_forward(p, config.heads, normed, source)
    self_key, self_key_cache = affine_forward(p, "key", normed)  # by the same matrix as key
    self_key = split_heads(self_key, config.heads)  # (B, H, S, E)

    mask = readable_mask(readable)
    scores, scores_cache = slot_scores_forward(query, self_key, key, mask)
    self_value, self_value_cache = slot_value_forward(p, config, memory, normed)
    new, mean_cache = slot_mean_forward(scores, self_value, value)
    new = merge_heads(new)  # decision 7: nothing comes after; decision 15: no dropout either
    norms_cache = (norm_cache, source_cache)
    attention_cache = (self_key_cache, scores_cache, self_value_cache, mean_cache)
    return new, (norms_cache, projections_cache, attention_cache)


def slot_attention_backward(config, dnew, cache):
    """Gradients of memory, of encoded and of the parameters."""
    norms_cache, projections_cache, attention_cache = cache
    norm_cache, source_cache = norms_cache
    self_key_cache, scores_cache, self_value_cache, mean_cache = attention_cache
    dnew = split_heads(dnew, config.heads)  # (B, H, S, D/H)
    dscores, dself_value, dvalue = slot_mean_backward(dnew, mean_cache)
    dquery, dself_key, dkey = slot_scores_backward(dscores, scores_cache)

    dnormed_by_key, dself_key_params = affine_key_backward(merge_heads(dself_key), self_key_cache)
    dnormed, dsource, grads = projections_backward(dquery, dkey, dvalue, projections_cache)
    dmemory_by_value, dnormed_by_value, dself_value_params = slot_value_backward(
        dself_value, self_value_cache
    )
    add_into(grads, dself_key_params)  # the other use of the key projection
    add_into(grads, dself_value_params)  # and, if a slot's value is projected, of value's
    dencoded, dnorm_params = layer_norm_backward(dsource, source_cache)
    dnormed = dnormed + dnormed_by_key + dnormed_by_value
    dmemory, dmemory_norm_params = layer_norm_backward(dnormed, norm_cache)
    dmemory = dmemory_by_value + dmemory
    grads |= dnorm_params | dmemory_norm_params
    return dmemory, dencoded, grads


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
    """Gradients of query, self_key and key (B, H, S or N, E)."""
    query, self_key, key = cache
    scale = query.shape[-1] ** -0.5
    dself_score = dscores[..., :1]  # (B, H, S, 1)
    dothers = dscores[..., 1:]  # (B, H, S, N)
    dquery = (dself_score * self_key + dothers @ key) * scale
    dself_key = dself_score * query * scale
    dkey = dothers.mT @ query * scale
    return dquery, dself_key, dkey


def slot_mean_forward(scores, slots, value):
    """New slots (B, H, S, D/H): the mean of its own and of value (B, H, N, D/H) by softmax."""
    weights, _ = softmax_forward(scores)  # (B, H, S, 1 + N)
    new = weights[..., :1] * slots + weights[..., 1:] @ value
    return new, (weights, slots, value)


# y = w* m + w v, [w*, w] = softmax(z): dm = w* dy, dv = w^T dy, dz = softmax'([m·dy, dy v^T])
def slot_mean_backward(dnew, cache):
    """Gradients of scores, slots and value."""
    weights, slots, value = cache
    dself_weight = (slots * dnew).sum(-1, keepdims=True)  # (B, H, S, 1)
    dothers = dnew @ value.mT  # (B, H, S, N)
    dweights = np.concatenate([dself_weight, dothers], axis=-1)
    dscores = softmax_backward(dweights, weights)
    dslots = weights[..., :1] * dnew
    dvalue = weights[..., 1:].mT @ dnew
    return dscores, dslots, dvalue


def cross_attention_forward(p, config, x, source, readable, rng):
    """x (B, N, D) plus what it finds in source (B, K, D), by content alone.

    The source is the normed memory (Figure 2b) or, in the decoder, the encodings.
    """
    normed, norm_cache = layer_norm_forward(p, "norm", x)
    query, key, value, projections_cache = projections_forward(p, config.heads, normed, source)
    mask = readable_mask(readable)
    out, attention_cache = masked_attention_forward(query, key, value, mask, config.dropout, rng)
    out, output_cache = affine_forward(p, "output", merge_heads(out))
    out, dropout_mask = dropout(out, config.dropout, rng)
    return x + out, (norm_cache, projections_cache, attention_cache, output_cache, dropout_mask)


def cross_attention_backward(config, dy, cache):
    """Gradients of x, of source and of the parameters."""
    norm_cache, projections_cache, attention_cache, output_cache, dropout_mask = cache
    dout, grads = affine_backward(dy * dropout_mask, output_cache)
    dout = split_heads(dout, config.heads)
    dquery, dkey, dvalue = masked_attention_backward(dout, attention_cache)
    dnormed, dsource, dprojection_params = projections_backward(
        dquery, dkey, dvalue, projections_cache
    )
    dx, dnorm_params = layer_norm_backward(dnormed, norm_cache)
    grads |= dprojection_params | dnorm_params
    return dy + dx, dsource, grads


# ----------------------------------------------------------------------------
# the model: the whole of it first, then encoder, decoder, layers, relative positions (Eqs. 2-6)
def initial_state(params, config, batch):
    """What a document starts with: the learned slots, and a segment of begin tokens."""
    if config.slot_normalization == "biased":  # zeros are read as v_bias / ||v_bias||
        memory = np.zeros((batch, config.slot_sets, config.slots, config.width))
    else:  # decision 8: learned, not zeros
        memory = np.tile(params["initial_memory"], (batch, 1, 1, 1))  # (B, 1 or L, S, D)
    length = config.segment if config.encoder_layers else 0
    return State(memory, np.full((batch, length), config.special("begin")))


def initial_state_backward(config, dstate):
    """Gradient of the learned slots: the sum over lanes. dstate is zero where none started."""
    if config.slot_normalization == "biased":
        return {}
    return {"initial_memory": dstate.memory.sum(0)}


def forward(params, config, tokens, state, rng=None, task=None):
    """Read one segment (Eqs. 5-7): logits (B, N, V), the next state, the cache for `backward`.

    tokens (B, N), N = config.segment; rng turns dropout on. task None is continuation: row i of the
    logits predicts token i + 1; otherwise token i of task.prompt. ValueError if N differs, or if
    the decoder-only model is given a task.
    """
    check_segment(config, tokens, task)
    slots, slots_cache = slot_normalization_forward(params, config, state.memory)
    if config.encoder_layers:
        if task is None:
            task = continuation(tokens, state.previous)
        hidden, memory, stack_cache = encoder_decoder_forward(params, config, task, slots, rng)
        next_state = State(memory, tokens)
    else:
        hidden, memory, stack_cache = decoder_only_forward(params, config, tokens, slots, rng)
        next_state = State(memory, state.previous)

    # decision 10: one embedding, here without the special tokens
    embedding = params["embedding"][: config.vocabulary]
    logits, output_cache = linear_forward(hidden * config.width**-0.5, embedding)  # (B, N, V)
    return logits, next_state, (slots_cache, stack_cache, output_cache)


def backward(params, config, cache, dlogits, dnext_state=None):
    """Gradients of the parameters and of the incoming state.

    They come from the gradients of the logits and of the next state; dnext_state None stops the
    latter at the segment's end. Token ids have no gradient: dstate.previous is zeros.
    """
    slots_cache, stack_cache, output_cache = cache
    zero_state = State(*map(np.zeros_like, initial_state(params, config, len(dlogits))))
    if dnext_state is None:
        dnext_state = zero_state

    dhidden, dembedding = linear_backward(dlogits, output_cache)
    dhidden = dhidden * config.width**-0.5
    stack_backward = encoder_decoder_backward if config.encoder_layers else decoder_only_backward
    dslots, grads = stack_backward(params, config, dhidden, dnext_state.memory, stack_cache)
    dmemory, dslot_params = slot_normalization_backward(dslots, slots_cache)
    grads |= dslot_params
    grads["embedding"][: config.vocabulary] += dembedding  # the tied embedding's second gradient

    zeros = {name: np.zeros_like(value) for name, value in params.items()}
    return zeros | grads, zero_state._replace(memory=dmemory)


def advance(params, config, tokens, state, rng=None, task=None):
    """The state after a segment by the memory path alone: no decoder, no logits.

    The path is encoder and writer, or all layers of the decoder-only model.
    """
    check_segment(config, tokens, task)
    slots, _ = slot_normalization_forward(params, config, state.memory)
    if config.encoder_layers == 0:
        _, memory, _ = decoder_only_forward(params, config, tokens, slots, rng)
        return State(memory, state.previous)
    if task is None:
        task = continuation(tokens, state.previous)
    slots = slots[:, 0]  # (B, S, D)
    _, memory, _ = encoder_forward(params, config, task.reading, slots, task.readable, rng)
    return State(memory[:, None], tokens)


def encoder_decoder_forward(params, config, task, memory, rng):
    """Eqs. 5-6: hidden states (B, N, D) of the rows that predict; next memory (B, 1, S, D)."""
    slots = memory[:, 0]  # (B, S, D)
    encoded, new_slots, encoder_cache = encoder_forward(
        params, config, task.reading, slots, task.readable, rng
    )

    # decision 6: one position more, with the task's token first
    task_token = config.special(TASKS[0]) + task.kind[:, None]  # (B, 1)
    prompt = np.concatenate([task_token, task.prompt], axis=1)  # (B, N + 1)
    hidden, decoder_cache = decoder_forward(params, config, prompt, encoded, task.readable, rng)

    # Row i predicts token i of the prompt. Continuation leaves out row 0, other tasks the last
    first_row = task.kind == TASKS.index("continuation")  # (B,) bool, as a number 0 or 1
    rows = first_row[:, None] + np.arange(config.segment)  # (B, N)
    hidden = np.take_along_axis(hidden, rows[..., None], axis=1)  # (B, N, D)
    return hidden, new_slots[:, None], (encoder_cache, decoder_cache, rows)


def encoder_decoder_backward(params, config, dhidden, dnext_memory, cache):
    """Gradients of memory (B, 1, S, D) and of the parameters."""
    encoder_cache, decoder_cache, rows = cache
    drows = np.zeros((len(dhidden), config.segment + 1, config.width))  # (B, N + 1, D)
    np.put_along_axis(drows, rows[..., None], dhidden, axis=1)
    dencoded, grads = decoder_backward(params, config, drows, decoder_cache)
    dslots, dencoder_params = encoder_backward(
        params, config, dencoded, dnext_memory[:, 0], encoder_cache
    )
    add_into(grads, dencoder_params)  # the embedding is in both
    return dslots[:, None], grads


def encoder_forward(params, config, reading, memory, readable, rng):
    """M_{t+1} = Encoder(s_{t-1}, M_t) (Eq. 5): encoded (B, N, D) and next memory (B, S, D).

    reading (B, N) token ids, memory (B, S, D); readable (B, N) is false on padding, or None.
    """
    p = subtree(params, "encoder.")
    x = params["embedding"][reading]  # (B, N, D)
    caches = []
    for layer in range(config.encoder_layers):
        layer_params = subtree(p, f"layers.{layer}.")
        x, cache = encoder_layer_forward(layer_params, config, x, memory, readable, rng)
        caches.append(cache)
    encoded, norm_cache = layer_norm_forward(p, "norm", x)  # decision 3: a final norm

    writer = subtree(params, "writer.")
    next_memory, writer_cache = slot_attention_forward(writer, config, memory, encoded, readable)
    return encoded, next_memory, (reading, caches, norm_cache, writer_cache)


def encoder_backward(params, config, dencoded, dnext_memory, cache):
    """Gradients of memory and of the parameters."""
    reading, caches, norm_cache, writer_cache = cache
    dmemory, dencoded_written, dwriter_params = slot_attention_backward(
        config, dnext_memory, writer_cache
    )
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
    return dmemory, grads


def decoder_forward(params, config, prompt, encoded, readable, rng):
    """Final hidden states (B, N + 1, D) of prompt (B, N + 1), the task's token in front (Eq. 6)."""
    p = subtree(params, "decoder.")
    x = params["embedding"][prompt]  # (B, N + 1, D)
    caches = []
    for layer in range(config.decoder_layers):
        layer_params = subtree(p, f"layers.{layer}.")
        x, cache = decoder_layer_forward(layer_params, config, x, encoded, readable, rng)
        caches.append(cache)
    hidden, norm_cache = layer_norm_forward(p, "norm", x)
    return hidden, (prompt, caches, norm_cache)


def decoder_backward(params, config, dhidden, cache):
    """Gradients of encoded, summed over the layers, and of the parameters."""
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


def encoder_layer_forward(p, config, x, memory, readable, rng):
    """A layer's x (B, N, D), which also reads memory (B, S, D) (Fig. 2a).

    Self-attention, memory cross-attention, feed-forward (decision 4: in this order).
    """
    attention = subtree(p, "attention.")
    x, attention_cache = self_attention_forward(
        attention, config, x, memory=None, causal=False, readable=readable, rng=rng
    )
    normed_memory, memory_cache = layer_norm_forward(p, "read.memory_norm", memory)
    read = subtree(p, "read.")
    x, read_cache = cross_attention_forward(read, config, x, normed_memory, None, rng)
    x, mlp_cache = relu_mlp_forward(p, config, x, rng)
    return x, (attention_cache, memory_cache, read_cache, mlp_cache)


def encoder_layer_backward(config, dx, cache):
    """Gradients of x, of memory and of the parameters."""
    attention_cache, memory_cache, read_cache, mlp_cache = cache
    dx, grads = relu_mlp_backward(dx, mlp_cache)
    dx, dnormed_memory, dread_params = cross_attention_backward(config, dx, read_cache)
    dmemory, dmemory_norm_params = layer_norm_backward(dnormed_memory, memory_cache)
    dx, _, dattention_params = self_attention_backward(config, dx, attention_cache)
    grads |= dmemory_norm_params
    grads |= prefixed("read.", dread_params)
    grads |= prefixed("attention.", dattention_params)
    return dx, dmemory, grads


def decoder_layer_forward(p, config, x, encoded, readable, rng):
    """A layer's x (B, N + 1, D), which also reads encoded (B, N, D).

    Causal self-attention, cross-attention to the encodings, feed-forward.
    """
    attention = subtree(p, "attention.")
    x, attention_cache = self_attention_forward(
        attention, config, x, memory=None, causal=True, readable=None, rng=rng
    )
    cross = subtree(p, "cross.")
    x, cross_cache = cross_attention_forward(cross, config, x, encoded, readable, rng)
    x, mlp_cache = relu_mlp_forward(p, config, x, rng)
    return x, (attention_cache, cross_cache, mlp_cache)


def decoder_layer_backward(config, dx, cache):
    """Gradients of x, of encoded and of the parameters."""
    attention_cache, cross_cache, mlp_cache = cache
    dx, grads = relu_mlp_backward(dx, mlp_cache)
    dx, dencoded, dcross_params = cross_attention_backward(config, dx, cross_cache)
    dx, _, dattention_params = self_attention_backward(config, dx, attention_cache)
    grads |= prefixed("cross.", dcross_params)
    grads |= prefixed("attention.", dattention_params)
    return dx, dencoded, grads


def self_attention_forward(p, config, x, memory, causal, readable, rng):
    """x (B, N, D) plus what its tokens find in each other.

    In the decoder-only model they also look at the normed memory (B, S, D); else it is None.
    """
    normed, norm_cache = layer_norm_forward(p, "norm", x)
    source = normed
    if memory is not None:
        source = np.concatenate([memory, normed], axis=1)  # (B, S + N, D)
    # decision 13: one set for both
    query, key, value, projections_cache = projections_forward(p, config.heads, normed, source)

    slots = source.shape[1] - x.shape[1]  # S, or 0 without memory
    mask = self_attention_mask(x.shape[1], slots, causal, readable)
    distances = config.distances(causal)
    if config.positions == "simplified":
        attend = simplified_attention_forward
    else:
        attend = transformer_xl_attention_forward
    out, attention_cache = attend(p, query, key, value, distances, mask, config.dropout, rng)

    out, output_cache = affine_forward(p, "output", merge_heads(out))
    out, dropout_mask = dropout(out, config.dropout, rng)
    return x + out, (norm_cache, projections_cache, attention_cache, output_cache, dropout_mask)


def self_attention_backward(config, dy, cache):
    """Gradients of x, of memory (of no rows without) and of the parameters."""
    norm_cache, projections_cache, attention_cache, output_cache, dropout_mask = cache
    dout, grads = affine_backward(dy * dropout_mask, output_cache)
    dout = split_heads(dout, config.heads)
    if config.positions == "simplified":
        attend_backward = simplified_attention_backward
    else:
        attend_backward = transformer_xl_attention_backward
    dquery, dkey, dvalue, dposition_params = attend_backward(dout, attention_cache)

    dnormed, dsource, dprojection_params = projections_backward(
        dquery, dkey, dvalue, projections_cache
    )
    slots = dsource.shape[1] - dnormed.shape[1]  # S, or 0 without memory
    dmemory = dsource[:, :slots]
    dx, dnorm_params = layer_norm_backward(dnormed + dsource[:, slots:], norm_cache)
    grads |= dposition_params | dprojection_params | dnorm_params
    return dy + dx, dmemory, grads


def self_attention_mask(length, slots, causal, readable):
    """Which keys each query sees, (B or 1, 1, N, S + N).

    It sees all slots, and of the tokens those up to itself if causal, and no padding.
    """
    tokens = np.ones((length, length), bool)
    if causal:
        tokens = np.tril(tokens)
    tokens = tokens & readable_mask(readable)  # (B or 1, 1, N, N)
    all_slots = np.ones((*tokens.shape[:-1], slots), bool)
    return np.concatenate([all_slots, tokens], axis=-1)


def readable_mask(readable):
    """(B, N) -> (B, 1, 1, N): every query sees the keys that are no padding; None is no padding."""
    if readable is None:
        return np.ones((1, 1, 1, 1), bool)
    return readable[:, None, None, :]


def relu_mlp_forward(p, config, x, rng):
    """x + dropout(W_2 relu(W_1 norm(x) + b_1) + b_2)"""
    normed, norm_cache = layer_norm_forward(p, "mlp_norm", x)
    before, hidden_cache = affine_forward(p, "mlp_hidden", normed)
    hidden = np.maximum(before, 0)  # (B, N, F)
    out, output_cache = affine_forward(p, "mlp_output", hidden)
    out, dropout_mask = dropout(out, config.dropout, rng)
    return x + out, (norm_cache, hidden_cache, hidden, output_cache, dropout_mask)


def relu_mlp_backward(dy, cache):
    """Gradients of x and of the parameters."""
    norm_cache, hidden_cache, hidden, output_cache, dropout_mask = cache
    dhidden, grads = affine_backward(dy * dropout_mask, output_cache)
    dnormed, dhidden_params = affine_backward(dhidden * (hidden > 0), hidden_cache)
    dx, dnorm_params = layer_norm_backward(dnormed, norm_cache)
    grads |= dhidden_params | dnorm_params
    return dy + dx, grads


def simplified_attention_forward(p, query, key, value, distances, mask, rate, rng):
    """Eqs. 3-4: softmax(q·(k_j + R_{i-j}) / sqrt(E)) (v_j + R_{i-j}): (B, H, N, E).

    One R has both roles (decision 1: one table). query (B, H, N, E); key, value (B, H, K, E), whose
    last N have positions; distances (R,) of the rows of R.
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
    """Gradients of query, key, value and, from both of its roles, of R."""
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

    s is by_distance (B, H, N, R), of the last N keys; index (N, N) is each pair's distance.
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
    """Gradients of query, of key and of by_distance (B, H, N, R)."""
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
    """By key (B, H, N, N) -> by distance (B, H, N, R): the sum over the keys at each distance.

    It serves gradients, and weights too.
    """
    index, distances = cache
    at_row = index[..., None] == np.arange(distances)  # (N, N, R)
    return np.einsum("bhqk,qkr->bhqr", dout, at_row)


def distance_index(length, distances):
    """The row of `distances` for query i and key j of `length` tokens, (N, N).

    It is that of i - j, or the nearest.
    """
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    return np.clip(distance, distances[0], distances[-1]) - distances[0]


# ----------------------------------------------------------------------------
# through segments: memory replay, the paper's way to train, and full back-propagation
class Segment(NamedTuple):
    """One step of a rollout."""

    tokens: np.ndarray  # (B, N)
    targets: np.ndarray  # (B, N)
    scored: np.ndarray  # (B, N) bool
    starts: np.ndarray  # (B,) bool, where a document begins
    task: tuple | None = None  # a Task; None is continuation


def memory_replay(params, config, segments, state, seed=None):
    """Algorithm 1 (decision 14: K segments, 0 to K - 1), with one segment's cache at a time.

    Returns what `through_time` does: mean loss, its gradients, that of the first state, next state.
    """
    scored = count_scored(segments)

    # Forward: the states before all segments, by the memory path alone
    replay_buffer = [state]  # Alg. 1, l.1-2
    for t, segment in enumerate(segments[:-1]):  # l.3
        before = state_read(params, config, segment, replay_buffer[-1])
        rng = segment_rng(seed, t)
        after = advance(params, config, segment.tokens, before, rng, segment.task)  # l.4
        replay_buffer.append(after)  # l.5

    # Backward: each segment is computed again, from the state before it
    loss = 0.0
    grads = {}
    next_state = None
    dstate = None  # l.7: the gradient of M_K is zero
    for t in reversed(range(len(segments))):  # l.8
        before = replay_buffer.pop()
        rng = segment_rng(seed, t)
        part, after, cache = segment_forward(params, config, segments[t], before, rng)  # l.9-10
        dparams, dstate = segment_backward(params, config, 1 / scored, dstate, cache)  # l.11-12
        loss = loss + part
        add_into(grads, dparams)
        if next_state is None:  # the last segment comes first
            next_state = after  # M_K
    return loss / scored, grads, dstate, next_state  # l.14


def through_time(params, config, segments, state, seed=None):
    """Full back-propagation through a rollout.

    Returns the mean loss, its gradients, that of the rollout's first state, and the next state.
    """
    scored = count_scored(segments)
    loss = 0.0
    caches = []
    for t, segment in enumerate(segments):
        part, state, cache = segment_forward(params, config, segment, state, segment_rng(seed, t))
        loss = loss + part
        caches.append(cache)

    grads = {}
    dstate = None
    for cache in reversed(caches):
        dparams, dstate = segment_backward(params, config, 1 / scored, dstate, cache)
        add_into(grads, dparams)
    return loss / scored, grads, dstate, state


def segment_forward(params, config, segment, state, rng):
    """(summed loss, next state, cache) of one segment, from the state that was carried to it."""
    state = state_read(params, config, segment, state)
    logits, state, cache = forward(params, config, segment.tokens, state, rng, segment.task)
    loss, loss_cache = cross_entropy_forward(logits, segment.targets, segment.scored)
    return loss, state, (segment, cache, loss_cache)


def segment_backward(params, config, dloss, dnext_state, cache):
    """Gradients of the parameters and of the state that was carried to the segment."""
    segment, forward_cache, loss_cache = cache
    dlogits = cross_entropy_backward(dloss, loss_cache)
    grads, dread = backward(params, config, forward_cache, dlogits, dnext_state)

    # Where a document starts, the state that was read is the learned one, not the carried one
    zero = State(np.zeros_like(dread.memory), np.zeros_like(dread.previous))
    dinitial = choose_lanes(segment.starts, dread, zero)
    dcarried = choose_lanes(segment.starts, zero, dread)
    add_into(grads, initial_state_backward(config, dinitial))
    return grads, dcarried


def state_read(params, config, segment, state):
    """The state that a segment reads: carried, or the initial one where a document starts."""
    initial = initial_state(params, config, len(segment.starts))
    return choose_lanes(segment.starts, initial, state)


def choose_lanes(starts, first, second):
    """A state that is `first` in the lanes where starts (B,) is true and `second` elsewhere."""
    fields = []
    for a, b in zip(first, second, strict=True):
        chosen = starts.reshape(-1, *[1] * (a.ndim - 1))  # (B, 1, ...), as many axes as the field
        fields.append(np.where(chosen, a, b))
    return first._make(fields)


def count_scored(segments):
    """Scored tokens of a rollout, at least 1."""
    return max(1, sum(int(segment.scored.sum()) for segment in segments))


def segment_rng(seed, index):
    """The generator of one segment's dropout, the same whenever it is computed, or None."""
    return None if seed is None else np.random.default_rng([seed, index])


# ----------------------------------------------------------------------------
# demonstration: gradients by finite differences, replay against full back-propagation, a tiny fit
def rollout_of(config, document, rng):
    """A document (B, K N + 1) as a rollout that has all tasks.

    It continues the text, fills in (segments 1, 4, ...) and recalls (segments 2, 5, ...).
    """
    n = config.segment
    texts = np.split(document[:, :-1], document.shape[1] // n, axis=1)
    segments = []
    for t, tokens in enumerate(texts):
        scored = np.ones(tokens.shape, bool)
        targets = document[:, t * n + 1 : (t + 1) * n + 1]
        task = None
        if config.encoder_layers and t % 3 == 1:
            task, scored = infilling(config, texts[t - 1], 0.3, 3.5, rng)
            targets = texts[t - 1]
        if config.encoder_layers and t % 3 == 2:
            task = recall(texts[t - 1], texts[t - 2])
            targets = texts[t - 2]
        starts = np.full(len(tokens), t == 0)
        segments.append(Segment(tokens, targets, scored, starts, task))
    return segments


def demonstrate():
    """Check gradients and memory replay, then fit a tiny text; exits with an error if one fails."""
    rng = np.random.default_rng(0)
    config = Config(
        vocabulary=11,
        width=12,
        encoder_layers=1,
        decoder_layers=1,
        heads=2,
        head_width=5,
        feed_forward=20,
        segment=6,
        slots=4,
        max_distance=4,
    )
    params = init_params(config, rng)
    segments = rollout_of(config, rng.integers(config.vocabulary, size=(2, 25)), rng)
    tasks = "continuation, infilling, recall, continuation"
    print(f"Memformer, four segments of {config.segment} tokens: {tasks}.")
    state = initial_state(params, config, 2)

    def loss(moved):
        return through_time(moved, config, segments, state)[0]

    _, grads, _, _ = through_time(params, config, segments, state)
    check_gradients(loss, params, grads, rng)
    check_memory_replay(params, replace(config, dropout=0.2), segments, state)
    params = fit_by_replay(params, config, segments)
    predict_with_less(params, config, segments)


def check_gradients(loss, params, grads, rng):
    """Compare grads with finite differences of loss(params), each along a random direction.

    Exits with an error if they differ; else prints the largest relative error.
    """
    step = 1e-6
    worst = 0.0
    for name, grad in grads.items():
        direction = rng.standard_normal(grad.shape)
        above = loss(params | {name: params[name] + step * direction})
        below = loss(params | {name: params[name] - step * direction})
        numeric = (above - below) / (2 * step)
        analytic = (grad * direction).sum()
        size = max(abs(numeric), abs(analytic), 1e-4)  # a difference is rounded to 1e-9 or so
        error = abs(numeric - analytic) / size
        if not error < 1e-4:
            raise SystemExit(
                f"WRONG: the gradient of {name} is {analytic:+.6e} by hand and {numeric:+.6e} by "
                "differences; --check says which function to look at"
            )
        worst = max(worst, error)

    print(
        f"Largest relative error {worst:.1e}: the hand-written backward pass is the "
        "forward pass's derivative.\n"
    )


def check_memory_replay(params, config, segments, state):
    """Compare gradients of both methods; exits with an error if they differ."""
    _, exact, _, _ = through_time(params, config, segments, state, seed=1)
    _, replayed, _, _ = memory_replay(params, config, segments, state, seed=1)
    for name, grad in exact.items():
        if not np.allclose(replayed[name], grad, rtol=1e-9, atol=1e-12):
            raise SystemExit(f"WRONG: memory replay's gradient of {name} is another one")
    print("Memory replay, with dropout, has the gradients of full back-propagation through time.\n")


def fit_by_replay(params, config, segments):
    """The parameters after 200 steps by the signs of the gradients; prints some of the losses."""
    print(
        f"Fitting these {count_scored(segments)} predictions of random tokens by memory replay "
        f"(a guess costs {np.log2(config.vocabulary):.3f} bits):"
    )
    for step in range(1, 201):
        state = initial_state(params, config, 2)
        loss, grads, _, _ = memory_replay(params, config, segments, state)
        rate = 0.02 * 0.98**step
        params = {name: params[name] - rate * np.sign(grad) for name, grad in grads.items()}
        if step in (1, 10, 50, 200):
            print(f"  step {step:3d}: {loss / np.log(2):.3f} bits per token")
    return params


def predict_with_less(params, config, segments):
    """Print how well the last segment is predicted with its state, and without parts of it."""
    fresh = initial_state(params, config, 2)
    state = fresh
    for segment in segments[:-1]:
        state = advance(params, config, segment.tokens, state, task=segment.task)
    starts = {
        "memory and previous tokens carried": state,
        "memory cleared": state._replace(memory=fresh.memory),
        "both cleared": fresh,
    }
    last = segments[-1]
    for label, start in starts.items():
        nats, _, _ = segment_forward(params, config, last, start, None)
        bits = nats / last.scored.sum() / np.log(2)
        print(f"Fourth segment, {label}: {bits:.3f} bits per token")


# ----------------------------------------------------------------------------
# what every Transformer has: a first reading needs what it does, not how
NORM_EPSILON = 1e-6  # under the square root of layer_norm


def projections_forward(p, heads, x, source):
    """Query of x (B, N, D); key and value of source (B, K, D), by head (Eq. 2).

    Their shapes are (B, H, N, E), (B, H, K, E) and, of a value, (B, H, K, E) or (B, H, K, D/H).
    """
    query, query_cache = affine_forward(p, "query", x)
    key, key_cache = affine_forward(p, "key", source)
    value, value_cache = affine_forward(p, "value", source)
    query = split_heads(query, heads)
    key = split_heads(key, heads)
    value = split_heads(value, heads)
    return query, key, value, (query_cache, key_cache, value_cache)


# q = x W_q^T, k = s W_k^T, v = s W_v^T: dx = dq W_q, ds = dk W_k + dv W_v
def projections_backward(dquery, dkey, dvalue, cache):
    """Gradients of x, of source and of the parameters."""
    query_cache, key_cache, value_cache = cache
    dx, grads = affine_backward(merge_heads(dquery), query_cache)
    dsource_by_key, dkey_params = affine_key_backward(merge_heads(dkey), key_cache)
    dsource_by_value, dvalue_params = affine_backward(merge_heads(dvalue), value_cache)
    grads |= dkey_params | dvalue_params
    return dx, dsource_by_key + dsource_by_value, grads


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
    rows = tuple(range(dy.ndim - 1))  # all axes but the last
    dweight = np.tensordot(dy, x, (rows, rows))
    return dx, dweight


def layer_norm_forward(p, name, x, epsilon=NORM_EPSILON):
    """Zero mean and unit variance over the last axis of x, then scale and bias of that name."""
    centred = x - x.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    standard = centred * inverse
    scale = p[f"{name}.scale"]
    y = standard * scale + p[f"{name}.bias"]
    return y, (name, standard, inverse, scale)


# n = (x - mean x) / deviation: dx = (dn - mean(dn) - n mean(n dn)) / deviation
def layer_norm_backward(dy, cache):
    """Gradients of x, and of the scale and the bias by name."""
    name, standard, inverse, scale = cache
    dstandard = dy * scale
    mean = dstandard.mean(-1, keepdims=True)
    correlation = (dstandard * standard).mean(-1, keepdims=True)
    dx = inverse * (dstandard - mean - standard * correlation)

    sum_axes = tuple(range(dy.ndim - 1))  # all but the last
    dscale = (dy * standard).sum(sum_axes)
    dbias = dy.sum(sum_axes)
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
    return weights, weights  # which are the cache too


# w = softmax(s): ds = w (dw - w·dw)
def softmax_backward(dweights, weights):
    mean = (dweights * weights).sum(-1, keepdims=True)
    return weights * (dweights - mean)


def dropout(x, rate, rng):
    """(x with random entries dropped and the others enlarged, what each is multiplied by).

    The gradient of x is multiplied by the same. rng None (evaluation) or rate 0 passes x through.
    """
    if rng is None or rate == 0:
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
    """The parameters below prefix, by their names without it."""
    return {
        name.removeprefix(prefix): array
        for name, array in params.items()
        if name.startswith(prefix)
    }


def add_into(total, part):
    """Sum a dict of gradients into another; total is ours to change."""
    for name, array in part.items():
        total[name] = total.get(name, 0.0) + array


# ----------------------------------------------------------------------------
# variants: tasks, the decoder-only model, projected slots, Eq. 1; a first reading skips them
class Task(NamedTuple):
    """What every lane does in one segment (2.3); axis 0 is the lane."""

    kind: np.ndarray  # (B,) index into TASKS
    reading: np.ndarray  # (B, N) token ids that the encoder reads
    readable: np.ndarray  # (B, N) bool, false on the padding after a text with masked spans
    prompt: np.ndarray  # (B, N) token ids that the decoder reads after the task's token


def continuation(tokens, previous):
    """The task of a language model (Eq. 7): predict the successor of every token."""
    kind = np.full(len(tokens), TASKS.index("continuation"))
    return Task(kind, previous, np.ones(tokens.shape, bool), tokens)


def infilling(config, previous, fraction, span, rng):
    """(Task, masked (B, N) bool): predict the masked tokens of previous (B, N) from the others.

    The targets are previous; `masked` says which of its tokens are (decision 11: 30% of them).
    """
    reading = np.zeros_like(previous)
    readable = np.zeros(previous.shape, bool)
    masked = np.zeros(previous.shape, bool)
    for lane, text in enumerate(previous):
        left, masked[lane] = mask_spans(text, config.special("mask"), fraction, span, rng)
        reading[lane, : len(left)] = left
        readable[lane, : len(left)] = True
    kind = np.full(len(previous), TASKS.index("infilling"))
    return Task(kind, reading, readable, previous), masked


def mask_spans(text, mask, fraction, span, rng):
    """(text (N,) with spans of Poisson(span) tokens each replaced by one mask token, masked) (2.3).

    masked (N,) bool says which tokens of the text were replaced.

    round(fraction N) tokens are masked; the last span is cut to what is left of that number. An
    empty span inserts a mask, but only if longer spans have made room, so the text never grows. All
    ways to place the spans between the remaining tokens are equally likely.
    """
    budget = round(fraction * len(text))
    lengths = []
    while sum(lengths) < budget:
        length = min(int(rng.poisson(span)), budget - sum(lengths))
        has_room = len(lengths) < sum(lengths)
        if length or has_room:
            lengths.append(length)

    items = len(text) - budget + len(lengths)  # tokens that remain, and masks
    places = rng.permutation(items)[: len(lengths)]  # of the masks
    tokens_of = np.ones(items, int)  # how many tokens of the text an item stands for
    tokens_of[places] = lengths
    is_mask = np.isin(np.arange(items), places)
    masked = np.repeat(is_mask, tokens_of)  # (N,)
    reading = np.full(items, mask)
    reading[~is_mask] = text[~masked]
    return reading, masked


def recall(previous, earlier):
    """Predict the segment before previous (decision 12: the encoder's own before).

    previous and earlier are (B, N); the targets are earlier.
    """
    kind = np.full(len(previous), TASKS.index("recall"))
    return Task(kind, previous, np.ones(previous.shape, bool), earlier)


def decoder_only_forward(params, config, tokens, memory, rng):
    """Figure 1b: final hidden states (B, N, D) and next memory (B, L, S, D).

    tokens (B, N), memory (B, L, S, D).
    """
    p = subtree(params, "decoder.")
    x = params["embedding"][tokens]  # (B, N, D)
    next_memories = []
    caches = []
    for layer in range(config.decoder_layers):
        layer_params = subtree(p, f"layers.{layer}.")
        x, next_memory, cache = memory_layer_forward(layer_params, config, x, memory[:, layer], rng)
        next_memories.append(next_memory)
        caches.append(cache)
    hidden, norm_cache = layer_norm_forward(p, "norm", x)
    return hidden, np.stack(next_memories, axis=1), (tokens, caches, norm_cache)


def decoder_only_backward(params, config, dhidden, dnext_memory, cache):
    """Gradients of memory and of the parameters."""
    tokens, caches, norm_cache = cache
    dx, ddecoder_params = layer_norm_backward(dhidden, norm_cache)
    dmemory = np.zeros_like(dnext_memory)
    for layer in reversed(range(config.decoder_layers)):
        dnext_layer_memory = dnext_memory[:, layer]
        dx, dlayer_memory, dlayer_params = memory_layer_backward(
            config, dx, dnext_layer_memory, caches[layer]
        )
        dmemory[:, layer] = dlayer_memory
        ddecoder_params |= prefixed(f"layers.{layer}.", dlayer_params)
    dembedding = np.zeros_like(params["embedding"])
    np.add.at(dembedding, tokens, dx)

    grads = {"embedding": dembedding}
    grads |= prefixed("decoder.", ddecoder_params)
    return dmemory, grads


def memory_layer_forward(p, config, x, memory, rng):
    """A layer of Figure 1b: x (B, N, D) and the next memory (B, S, D), which x writes.

    Tokens attend to [memory | x] up to themselves.
    """
    normed_memory, memory_cache = layer_norm_forward(p, "attention.memory_norm", memory)
    attention = subtree(p, "attention.")
    x, attention_cache = self_attention_forward(
        attention, config, x, memory=normed_memory, causal=True, readable=None, rng=rng
    )
    x, mlp_cache = relu_mlp_forward(p, config, x, rng)
    writer = subtree(p, "writer.")
    next_memory, writer_cache = slot_attention_forward(writer, config, memory, x, None)
    return x, next_memory, (memory_cache, attention_cache, mlp_cache, writer_cache)


def memory_layer_backward(config, dx, dnext_memory, cache):
    """Gradients of x, of memory and of the parameters."""
    memory_cache, attention_cache, mlp_cache, writer_cache = cache
    dmemory, dx_written, dwriter_params = slot_attention_backward(
        config, dnext_memory, writer_cache
    )
    dx, grads = relu_mlp_backward(dx + dx_written, mlp_cache)
    dx, dnormed_memory, dattention_params = self_attention_backward(config, dx, attention_cache)
    dmemory_read, dmemory_norm_params = layer_norm_backward(dnormed_memory, memory_cache)
    grads |= dmemory_norm_params
    grads |= prefixed("writer.", dwriter_params)
    grads |= prefixed("attention.", dattention_params)
    return dx, dmemory + dmemory_read, grads


def slot_normalization_forward(params, config, memory):
    """The slots that a segment reads, from those written (B, 1 or L, S, D): the same or normalised.

    Then a slot m' is read as (m' + v_bias) / ||m' + v_bias|| (decision 17: biased normalisation).
    """
    if config.slot_normalization == "none":
        return memory, None
    biased = memory + params["slot_bias"]
    length = np.sqrt((biased**2).sum(-1, keepdims=True))
    slots = biased / length
    return slots, (slots, length)


# m = b / |b|, b = m' + v: dm' = (dm - m (m·dm)) / |b|, and dv is the sum over lanes
def slot_normalization_backward(dslots, cache):
    """Gradients of memory and of the parameters."""
    if cache is None:  # memory itself
        return dslots, {}
    slots, length = cache
    along = (slots * dslots).sum(-1, keepdims=True)  # (B, 1 or L, S, 1)
    dmemory = (dslots - slots * along) / length
    return dmemory, {"slot_bias": dmemory.sum(0)}


def slot_value_forward(p, config, memory, normed):
    """A slot's own value (B, H, S, D/H), of memory or of its norm (B, S, D).

    The slot itself, or projected by the matrix of encodings (decision 7: its own value).
    """
    if config.slot_value == "itself":
        return split_heads(memory, config.heads), None
    self_value, cache = affine_forward(p, "value", normed)
    return split_heads(self_value, config.heads), cache


def slot_value_backward(dself_value, cache):
    """Gradients of memory, of its norm and of the parameters."""
    dself_value = merge_heads(dself_value)  # (B, S, D)
    if cache is None:  # the slot itself
        return dself_value, 0.0, {}
    dnormed, grads = affine_backward(dself_value, cache)
    return 0.0, dnormed, grads


def transformer_xl_attention_forward(p, query, key, value, distances, mask, rate, rng):
    """Eq. 1: softmax(((q + u)·k_j + (q + v)·W_r R_{i-j}) / sqrt(E)) v_j.

    Shapes are those of simplified_attention_forward; R is fixed sinusoids.
    """
    rows = sinusoids(distances, p["distance_key"].shape[1])  # (R, D)
    projected, projection_cache = linear_forward(rows[None], p["distance_key"])
    distance_key = split_heads(projected, query.shape[1])[0]  # (H, R, E)
    content_query = query + p["content_bias"][:, None]  # (a) and (c)
    distance_query = query + p["distance_bias"][:, None]  # (b) and (d)
    by_distance = distance_query @ distance_key.mT  # (B, H, N, R)
    index = distance_index(query.shape[2], distances)  # (N, N)
    weights, weights_cache = relative_weights_forward(
        content_query, key, by_distance, index, mask, rate, rng
    )
    cache = (distance_query, distance_key, projection_cache, value, weights, weights_cache)
    return weights @ value, cache


# q' = q + u, q'' = q + v, p = R W_r^T, s = q'' p^T:
# dq'' = ds p, dp = ds^T q'', dq = dq' + dq'', du, dv = sums, dW_r = dp^T R
def transformer_xl_attention_backward(dout, cache):
    """Gradients of query, key, value and of the parameters."""
    distance_query, distance_key, projection_cache, value, weights, weights_cache = cache
    dweights = dout @ value.mT  # (B, H, N, K)
    dvalue = weights.mT @ dout
    dcontent, dkey, dscores = relative_weights_backward(dweights, weights_cache)
    ddistance = dscores @ distance_key  # (B, H, N, E)
    ddistance_key = (dscores.mT @ distance_query).sum(0)  # (H, R, E)
    _, dweight = linear_backward(merge_heads(ddistance_key[None]), projection_cache)
    grads = {
        "distance_key": dweight,
        "content_bias": dcontent.sum((0, 2)),
        "distance_bias": ddistance.sum((0, 2)),
    }
    return dcontent + ddistance, dkey, dvalue, grads


def sinusoids(distances, width):
    """Transformer-XL's R of signed distances: (R,) -> (R, D), all sines first, then all cosines."""
    frequencies = 10_000.0 ** (-np.arange(0, width, 2) / width)  # (D/2,)
    angle = distances[:, None] * frequencies  # (R, D/2)
    sines = np.sin(angle)
    cosines = np.cos(angle)
    return np.concatenate([sines, cosines], axis=-1)


# ----------------------------------------------------------------------------
# starting values: every parameter by its name; a first reading skips them
POSITION_DEVIATION = 0.5  # of the simplified positions at the start (decision 1: one table)


def init_params(config, rng):
    """All parameters as {dotted name: float64 array}; matrices are (out, in)."""
    d = config.width
    specials = len(SPECIALS) if config.encoder_layers else 0
    params = {}
    # decision 10: one embedding; decision 8: the memory is learned
    params["embedding"] = rng.normal(0, 1, (config.vocabulary + specials, d))
    memory = (config.slot_sets, config.slots, d)
    if config.slot_normalization == "biased":
        params["slot_bias"] = rng.normal(0, d**-0.5, memory)  # its length is about 1, a slot's
    else:
        params["initial_memory"] = rng.normal(0, 1, memory)
    for layer in range(config.encoder_layers):
        params |= prefixed(f"encoder.layers.{layer}.", init_layer(config, rng, "encoder"))
    if config.encoder_layers:
        params |= init_norm("encoder.norm", d)
        params |= prefixed("writer.", init_writer(config, rng))
    stack = "decoder" if config.encoder_layers else "decoder_only"
    for layer in range(config.decoder_layers):
        params |= prefixed(f"decoder.layers.{layer}.", init_layer(config, rng, stack))
    return params | init_norm("decoder.norm", d)


def init_layer(config, rng, stack):
    """A layer of a stack: "encoder", "decoder" or "decoder_only"."""
    p = prefixed("attention.", init_self_attention(config, rng, stack))
    if stack == "encoder":  # it reads memory
        p |= prefixed("read.", init_cross_attention(config, rng))
        p |= init_norm("read.memory_norm", config.width)
    elif stack == "decoder":  # it reads the encodings
        p |= prefixed("cross.", init_cross_attention(config, rng))
    else:  # it writes its memory
        p |= prefixed("writer.", init_writer(config, rng))
    p |= init_norm("mlp_norm", config.width)
    p |= init_affine(rng, "mlp_hidden", config.feed_forward, config.width)
    p |= init_affine(rng, "mlp_output", config.width, config.feed_forward)
    return p


def init_self_attention(config, rng, stack):
    """decision 2: biases, except in Eq. 1; a decoder-only layer also reads memory, after a norm."""
    d = config.width
    inner = config.heads * config.head_width
    p = init_norm("norm", d)
    if stack == "decoder_only":
        p |= init_norm("memory_norm", d)
    if config.positions == "transformer_xl":  # Eq. 1
        for name in ("query", "key", "value", "distance_key"):
            p[name] = init_linear(rng, inner, d)
        for name in ("content_bias", "distance_bias"):
            p[name] = rng.normal(0, 0.02, (config.heads, config.head_width))
    else:
        for name in ("query", "key", "value"):
            p |= init_affine(rng, name, inner, d)  # Eq. 2
        rows = len(config.distances(causal=stack != "encoder"))
        p["positions"] = rng.normal(0, POSITION_DEVIATION, (rows, config.head_width))
    return p | init_affine(rng, "output", d, inner)


def init_cross_attention(config, rng):
    """Attention to memory or to encodings, without positions (decision 2: with biases)."""
    d = config.width
    inner = config.heads * config.head_width
    p = init_norm("norm", d)
    for name in ("query", "key", "value"):
        p |= init_affine(rng, name, inner, d)
    return p | init_affine(rng, "output", d, inner)


def init_writer(config, rng):
    """Slot attention, with norms of the memory and of what it is written from."""
    d = config.width
    inner = config.heads * config.head_width
    p = init_norm("memory_norm", d) | init_norm("norm", d)
    p |= init_affine(rng, "query", inner, d)
    p |= init_affine(rng, "key", inner, d)
    p |= init_affine(rng, "value", d, d)
    return p


def init_affine(rng, name, fan_out, fan_in):
    return {name: init_linear(rng, fan_out, fan_in), f"{name}_bias": np.zeros(fan_out)}


def init_linear(rng, fan_out, fan_in, gain=1.0):
    """A matrix (out, in) of a normal cut at two sigma; its deviation is gain / sqrt(in) then."""
    draw = rng.standard_normal((fan_out, fan_in))
    outside = np.abs(draw) > 2
    while outside.any():
        draw[outside] = rng.standard_normal(int(outside.sum()))
        outside = np.abs(draw) > 2
    deviation = gain * fan_in**-0.5
    return draw * (deviation / 0.8796256610342398)  # which the cut leaves of a deviation of 1


def init_norm(name, width):
    return {f"{name}.scale": np.ones(width), f"{name}.bias": np.zeros(width)}


# ----------------------------------------------------------------------------
# checks: what a Config and a segment must be; a first reading skips them
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
    for name, known in CHOICES.items():
        value = getattr(config, name)
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
    if config.positions == "transformer_xl" and config.width % 2:
        raise ValueError(
            f"width {config.width} is odd; the sinusoids of transformer_xl positions need an even "
            "one"
        )
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout is {config.dropout}; it must be at least 0 and below 1")


def check_segment(config, tokens, task):
    """Raise ValueError if the tokens or the task are none that the model can read."""
    if tokens.shape[1] != config.segment:
        raise ValueError(
            f"a segment of {tokens.shape[1]} tokens is not one of {config.segment}; pad it"
        )
    if task is not None and config.encoder_layers == 0:
        raise ValueError(
            "the decoder-only model (encoder_layers 0) has no tasks but continuation; "
            "leave task out"
        )


if __name__ == "__main__":
    if sys.argv[1:]:  # --check [--case NAME] is a program of its own
        sys.argv.insert(1, "memformer")
        runpy.run_module("reference.gradients", run_name="__main__")
    else:
        demonstrate()
