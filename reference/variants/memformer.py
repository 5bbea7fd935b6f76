"""Variants of Memformer: other tasks, the decoder-only model, other slots, Eq. 1's positions.

`reference/memformer.py` has the method. For a config or a task that asks for one of these,
`operations_of` replaces some of the paper's functions by functions of the same signature:

    task                infilling and recall, as `forward` takes them (2.3)
    encoder_layers      0: the decoder-only model, which reads s_t itself (Figure 1b)
    slot_value          projected: a slot's own value is projected, too (2.2.3)
    slot_normalization  biased: a slot is read with a length of 1 (decision 17: biased slots)
    positions           transformer_xl: sinusoids, and two vectors for all queries (Eq. 1)

`through_time` trains by full back-propagation.

Glossary, beside that of the paper's file: code symbol, meaning, symbol, shape
    reading           what the encoder reads, masked when infilling                (B, N)
    readable          where reading is no padding                                  (B, N) bool
    slot_bias         parameter; added to slots before they are normed  v_bias     (1 or L, S, D)
    distance_key      Transformer-XL's matrix of distances              W_r        (HE, D)
    content_bias, distance_bias   Transformer-XL's vectors              u, v       (H, E), (H, E)
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from reference import memformer as paper

# ----------------------------------------------------------------------------
# tasks: infilling and recall beside continuation, each lane its own (section 2.3)
TASKS = ("continuation", "infilling", "recall")


class Task(NamedTuple):
    """What every lane does in one segment (2.3); axis 0 is the lane."""

    kind: np.ndarray  # (B,) index into TASKS
    reading: np.ndarray  # (B, N) token ids that the encoder reads
    readable: np.ndarray  # (B, N) bool, false on the padding after a text with masked spans
    prompt: np.ndarray  # (B, N) token ids that the decoder reads after the task's token


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
    """Replace spans of Poisson(span) tokens of text (N,) by one mask token each (2.3).

    Returns the shorter text, and masked (N,) bool, which says what tokens were replaced.
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


def config_of_task(config, chosen):
    """A copy of the config, for one segment, whose operations do its task and mask the padding.

    Raises ValueError for the decoder-only model, which can only continue a text.
    """
    if config.encoder_layers == 0:
        raise ValueError(
            "the decoder-only model (encoder_layers 0) has no tasks but continuation; "
            "leave task out"
        )

    class TaskConfig(type(config)):
        task = chosen
        operations = property(operations_of)

    return TaskConfig(**vars(config))


def encoder_task_forward(params, config, tokens, state, rng):
    """Eq. 5 of a task: encodings of what it reads, (B, N, D), and the next state."""
    read_state = state._replace(previous=config.task.reading)
    return paper.encoder_forward(params, config, tokens, read_state, rng)


def encoder_task_backward(params, config, dencoded, dnext_state, cache):
    """Gradients of memory and of the parameters."""
    return paper.encoder_backward(params, config, dencoded, dnext_state, cache)


def prediction_task_forward(params, config, tokens, encoded, rng):
    """Eq. 6 of a task: hidden states (B, N, D) of the rows that predict."""
    task = config.task
    task_token = config.special(TASKS[0]) + task.kind[:, None]  # (B, 1)
    prompt = np.concatenate([task_token, task.prompt], axis=1)  # (B, N + 1)
    hidden, cache = paper.decoder_forward(params, config, prompt, encoded, rng)

    # Row i predicts token i of the prompt. Continuation leaves out row 0, other tasks the last
    first_row = task.kind == TASKS.index("continuation")  # (B,) bool, as a number 0 or 1
    rows = first_row[:, None] + np.arange(config.segment)  # (B, N)
    hidden = np.take_along_axis(hidden, rows[..., None], axis=1)  # (B, N, D)
    return hidden, (rows, cache)


def prediction_task_backward(params, config, dhidden, cache):
    """Gradients of encoded and of the parameters."""
    rows, decoder_cache = cache
    drows = np.zeros((len(dhidden), config.segment + 1, config.width))  # (B, N + 1, D)
    np.put_along_axis(drows, rows[..., None], dhidden, axis=1)
    return paper.decoder_backward(params, config, drows, decoder_cache)


def self_attention_mask(length, slots, causal, readable):
    """Which keys each query sees, (B or 1, 1, N, S + N).

    It sees all slots, and of the tokens those up to itself if causal, and no padding.
    """
    tokens = paper.earlier_mask(length) if causal else np.ones((length, length), bool)
    tokens = tokens & readable_mask(readable)  # (B or 1, 1, N, N)
    all_slots = np.ones((*tokens.shape[:-1], slots), bool)
    return np.concatenate([all_slots, tokens], axis=-1)


def readable_mask(readable):
    """(B, N) -> (B, 1, 1, N): every query sees the keys that are no padding; None is no padding."""
    if readable is None:
        return np.ones((1, 1, 1, 1), bool)
    return readable[:, None, None, :]


# ----------------------------------------------------------------------------
# the decoder-only model of Figure 1b: each layer has slots of its own, which its tokens write
def empty_previous_state(params, config, batch):
    """What a document starts with: the learned slots of every layer, and no tokens."""
    state = paper.learned_state(params, config, batch)
    return state._replace(previous=state.previous[:, :0])


def decoder_only_forward(params, config, tokens, state, rng):
    """Final hidden states (B, N, D) of tokens (B, N) and the next state, slots (B, L, S, D)."""
    p = paper.subtree(params, "decoder.")
    x = params["embedding"][tokens]  # (B, N, D)
    next_memories = []
    caches = []
    for layer in range(config.decoder_layers):
        layer_params = paper.subtree(p, f"layers.{layer}.")
        memory = state.memory[:, layer]
        x, next_memory, cache = memory_layer_forward(layer_params, config, x, memory, rng)
        next_memories.append(next_memory)
        caches.append(cache)
    hidden, norm_cache = paper.layer_norm_forward(p, "norm", x)
    next_state = state._replace(memory=np.stack(next_memories, axis=1))
    return hidden, next_state, (tokens, caches, norm_cache)


def decoder_only_backward(params, config, dhidden, dnext_state, cache):
    """Gradients of memory (B, L, S, D) and of the parameters."""
    tokens, caches, norm_cache = cache
    dx, ddecoder_params = paper.layer_norm_backward(dhidden, norm_cache)
    dmemory = np.zeros_like(dnext_state.memory)
    for layer in reversed(range(config.decoder_layers)):
        dnext_memory = dnext_state.memory[:, layer]
        dx, dlayer_memory, dlayer_params = memory_layer_backward(
            config, dx, dnext_memory, caches[layer]
        )
        dmemory[:, layer] = dlayer_memory
        ddecoder_params |= paper.prefixed(f"layers.{layer}.", dlayer_params)
    dembedding = np.zeros_like(params["embedding"])
    np.add.at(dembedding, tokens, dx)

    grads = {"embedding": dembedding}
    grads |= paper.prefixed("decoder.", ddecoder_params)
    return dmemory, grads


def no_decoder_forward(params, config, tokens, encoded, rng):
    """The hidden states that predict, which `decoder_only_forward` has computed."""
    return encoded, None


def no_decoder_backward(params, config, dhidden, cache):
    """The gradient of encoded; there are no parameters."""
    return dhidden, {}


def memory_layer_forward(p, config, x, memory, rng):
    """A layer of Figure 1b: x (B, N, D) and the next memory (B, S, D), which x writes.

    Tokens attend to [memory | x] up to themselves.
    """
    attention = paper.subtree(p, "attention.")
    normed_memory, memory_cache = paper.layer_norm_forward(attention, "memory_norm", memory)
    x, attention_cache = memory_self_attention_forward(attention, config, x, normed_memory, rng)
    x, mlp_cache = paper.relu_mlp_forward(p, config, x, rng)
    writer = paper.subtree(p, "writer.")
    write = config.operations.slot_attention_forward
    next_memory, writer_cache = write(writer, config, memory, x)
    return x, next_memory, (memory_cache, attention_cache, mlp_cache, writer_cache)


def memory_layer_backward(config, dx, dnext_memory, cache):
    """Gradients of x, of memory and of the parameters."""
    memory_cache, attention_cache, mlp_cache, writer_cache = cache
    write_backward = config.operations.slot_attention_backward
    dmemory, dx_written, dwriter_params = write_backward(config, dnext_memory, writer_cache)
    dx, grads = paper.relu_mlp_backward(dx + dx_written, mlp_cache)
    dx, dnormed_memory, dattention_params = memory_self_attention_backward(
        config, dx, attention_cache
    )
    dmemory_read, dmemory_norm_params = paper.layer_norm_backward(dnormed_memory, memory_cache)
    dattention_params |= dmemory_norm_params
    grads |= paper.prefixed("writer.", dwriter_params)
    grads |= paper.prefixed("attention.", dattention_params)
    return dx, dmemory + dmemory_read, grads


def memory_self_attention_forward(p, config, x, memory, rng):
    """x (B, N, D) plus what its tokens find in the normed memory (B, S, D) and in earlier ones."""
    normed, norm_cache = paper.layer_norm_forward(p, "norm", x)
    source = np.concatenate([memory, normed], axis=1)  # (B, S + N, D)
    # decision 13: one set for both
    query, key, value, projections_cache = paper.projections_forward(
        p, config.heads, normed, source
    )
    mask = self_attention_mask(x.shape[1], memory.shape[1], causal=True, readable=None)
    distances = config.distances(causal=True)
    attend = config.operations.simplified_attention_forward
    out, attention_cache = attend(p, query, key, value, distances, mask, config.dropout, rng)
    out, output_cache = paper.affine_forward(p, "output", paper.merge_heads(out))
    out, dropout_mask = paper.dropout(out, config.dropout, rng)
    return x + out, (norm_cache, projections_cache, attention_cache, output_cache, dropout_mask)


def memory_self_attention_backward(config, dy, cache):
    """Gradients of x, of memory and of the parameters."""
    norm_cache, projections_cache, attention_cache, output_cache, dropout_mask = cache
    dout, grads = paper.affine_backward(dy * dropout_mask, output_cache)
    dout = paper.split_heads(dout, config.heads)
    attend_backward = config.operations.simplified_attention_backward
    dquery, dkey, dvalue, dposition_params = attend_backward(dout, attention_cache)
    dnormed, dsource, dprojection_params = paper.projections_backward(
        dquery, dkey, dvalue, projections_cache
    )
    dmemory = dsource[:, : config.slots]
    dnormed = dnormed + dsource[:, config.slots :]
    dx, dnorm_params = paper.layer_norm_backward(dnormed, norm_cache)
    grads |= dposition_params | dprojection_params | dnorm_params
    return dy + dx, dmemory, grads


def decoder_only_distances(config, causal):
    """Distances with a row of R: no task's token makes a segment longer."""
    distances = paper.clipped_distances(config, causal)
    return distances[distances < config.segment]


def init_decoder_only(config, rng):
    """Parameters of the decoder-only model, which has no special tokens."""
    d = config.width
    params = {}
    params["embedding"] = rng.normal(0, 1, (config.vocabulary, d))
    params["initial_memory"] = rng.normal(0, 1, (config.slot_sets, config.slots, d))
    for layer in range(config.decoder_layers):
        params |= paper.prefixed(f"decoder.layers.{layer}.", init_memory_layer(config, rng))
    return params | paper.init_norm("decoder.norm", d)


def init_memory_layer(config, rng):
    """Self-attention that also reads memory, after a norm, a writer, the feed-forward."""
    norms = paper.init_norm("norm", config.width) | paper.init_norm("memory_norm", config.width)
    attention = config.operations.init_attention(config, rng, config.distances(causal=True))
    p = paper.prefixed("attention.", norms | attention)
    p |= paper.prefixed("writer.", paper.init_writer(config, rng))
    return p | paper.init_mlp(config, rng)


# ----------------------------------------------------------------------------
# slots: biased normalisation, a projected value
def zero_state(params, config, batch):
    """A document starts with zeros, which are read as v_bias / ||v_bias||."""
    zeros = {"initial_memory": np.zeros_like(params["slot_bias"])}
    return without_bias(config).learned_state(zeros, config, batch)


def zero_state_backward(dstate):
    """No gradients: the initial state has no parameters."""
    return {}


def encoder_biased_forward(params, config, tokens, state, rng):
    """The encoder of the model without normalisation, which here reads normalised slots."""
    slots, slots_cache = slot_normalization_forward(params, state.memory)
    read = without_bias(config).encoder_forward
    read_state = state._replace(memory=slots)
    encoded, next_state, cache = read(params, config, tokens, read_state, rng)
    return encoded, next_state, (slots_cache, cache)


def encoder_biased_backward(params, config, dencoded, dnext_state, cache):
    """Gradients of memory and of the parameters."""
    slots_cache, read_cache = cache
    read_backward = without_bias(config).encoder_backward
    dslots, grads = read_backward(params, config, dencoded, dnext_state, read_cache)
    dmemory, dslot_params = slot_normalization_backward(dslots, slots_cache)
    return dmemory, grads | dslot_params


def slot_normalization_forward(params, memory):
    """A slot m' of memory (B, 1 or L, S, D) is read as (m' + v_bias) / ||m' + v_bias||."""
    biased = memory + params["slot_bias"]
    length = np.sqrt((biased**2).sum(-1, keepdims=True))
    slots = biased / length
    return slots, (slots, length)


# m = b / |b|, b = m' + v: dm' = (dm - m (m·dm)) / |b|, and dv is the sum over lanes
def slot_normalization_backward(dslots, cache):
    """Gradients of memory and of the parameters."""
    slots, length = cache
    along = (slots * dslots).sum(-1, keepdims=True)  # (B, 1 or L, S, 1)
    dmemory = (dslots - slots * along) / length
    return dmemory, {"slot_bias": dmemory.sum(0)}


def init_biased(config, rng):
    """Parameters with slot_bias, of length about 1 per slot, in the place of initial_memory."""
    params = {}
    for name, value in without_bias(config).init_encoder_decoder(config, rng).items():
        if name == "initial_memory":
            params["slot_bias"] = value * config.width**-0.5
        else:
            params[name] = value
    return params


def projected_slot_attention_forward(p, config, memory, encoded, mask=True):
    """Slot attention in which a slot's own value is projected by the matrix of encodings."""
    normed, norm_cache = paper.layer_norm_forward(p, "memory_norm", memory)
    source, source_cache = paper.layer_norm_forward(p, "norm", encoded)
    query, key, value, projections_cache = paper.projections_forward(
        p, config.heads, normed, source
    )
    self_key, self_key_cache = paper.affine_forward(p, "key", normed)
    self_value, self_value_cache = paper.affine_forward(p, "value", normed)
    self_key = paper.split_heads(self_key, config.heads)  # (B, H, S, E)
    self_value = paper.split_heads(self_value, config.heads)  # (B, H, S, D/H)
    scores, scores_cache = paper.slot_scores_forward(query, self_key, key, mask)
    new, mean_cache = paper.slot_mean_forward(scores, self_value, value)
    own_caches = (norm_cache, self_key_cache, self_value_cache)
    return paper.merge_heads(new), (
        own_caches,
        source_cache,
        projections_cache,
        scores_cache,
        mean_cache,
    )


def projected_slot_attention_backward(config, dnew, cache):
    """Gradients of memory, of encoded and of the parameters."""
    own_caches, source_cache, projections_cache, scores_cache, mean_cache = cache
    norm_cache, self_key_cache, self_value_cache = own_caches
    dnew = paper.split_heads(dnew, config.heads)  # (B, H, S, D/H)
    dscores, dself_value, dvalue = paper.slot_mean_backward(dnew, mean_cache)
    dquery, dself_key, dkey = paper.slot_scores_backward(dscores, scores_cache)

    dself_key = paper.merge_heads(dself_key)
    dself_value = paper.merge_heads(dself_value)
    dnormed_by_key, dself_key_params = paper.affine_key_backward(dself_key, self_key_cache)
    dnormed, dsource, grads = paper.projections_backward(dquery, dkey, dvalue, projections_cache)
    dnormed_by_value, dself_value_params = paper.affine_backward(dself_value, self_value_cache)
    paper.add_into(grads, dself_key_params)  # the other uses of both projections
    paper.add_into(grads, dself_value_params)
    dnormed = dnormed + dnormed_by_key + dnormed_by_value
    dencoded, dnorm_params = paper.layer_norm_backward(dsource, source_cache)
    dmemory, dmemory_norm_params = paper.layer_norm_backward(dnormed, norm_cache)
    return dmemory, dencoded, grads | dnorm_params | dmemory_norm_params


# ----------------------------------------------------------------------------
# relative positions of Transformer-XL (Eq. 1)
def transformer_xl_attention_forward(p, query, key, value, distances, mask, rate, rng):
    """Eq. 1: softmax(((q + u)·k_j + (q + v)·W_r R_{i-j}) / sqrt(E)) v_j.

    Shapes are those of simplified_attention_forward; R is fixed sinusoids.
    """
    rows = sinusoids(distances, p["distance_key"].shape[1])  # (R, D)
    projected, projection_cache = paper.linear_forward(rows[None], p["distance_key"])
    distance_key = paper.split_heads(projected, query.shape[1])[0]  # (H, R, E)
    content_query = query + p["content_bias"][:, None]  # (a) and (c)
    distance_query = query + p["distance_bias"][:, None]  # (b) and (d)
    by_distance = distance_query @ distance_key.mT  # (B, H, N, R)
    index = paper.distance_index(query.shape[2], distances)  # (N, N)
    weights, weights_cache = paper.relative_weights_forward(
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
    dcontent, dkey, dscores = paper.relative_weights_backward(dweights, weights_cache)
    ddistance = dscores @ distance_key  # (B, H, N, E)
    ddistance_key = (dscores.mT @ distance_query).sum(0)  # (H, R, E)
    ddistance_rows = paper.merge_heads(ddistance_key[None])
    _, dweight = paper.linear_backward(ddistance_rows, projection_cache)
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


def all_distances(config, causal):
    """All distances of a segment, whose decoder reads the task's token, too; none is clipped."""
    decoder_reads_one_more = causal and config.encoder_layers
    largest = config.segment if decoder_reads_one_more else config.segment - 1
    smallest = 0 if causal else -largest
    return np.arange(smallest, largest + 1)


def init_transformer_xl_attention(config, rng, distances):
    """Attention with Eq. 1's positions; its projections have no biases (decision 2: not here)."""
    d = config.width
    inner = config.heads * config.head_width
    p = paper.init_norm("norm", d)
    for name in ("query", "key", "value", "distance_key"):
        p[name] = paper.init_linear(rng, inner, d)
    for name in ("content_bias", "distance_bias"):
        p[name] = rng.normal(0, 0.02, (config.heads, config.head_width))
    return p | paper.init_affine(rng, "output", d, inner)


# ----------------------------------------------------------------------------
# through segments: full back-propagation, which memory replay is compared with (Table 3)
def through_time(params, config, segments, state, seed=None):
    """The loss and gradients of `memory_replay`, by the caches of all segments at once."""
    share = 1 / sum(targets.size for _, targets in segments)
    loss = 0.0
    caches = []
    for t, segment in enumerate(segments):
        rng = paper.segment_rng(seed, t)
        part, state, cache = paper.segment_forward(params, config, segment, state, rng)
        loss = loss + share * part
        caches.append(cache)

    grads = {}
    dstate = None
    for cache in reversed(caches):
        dparams, dstate = paper.segment_backward(params, config, share, dstate, cache)
        paper.add_into(grads, dparams)
    return loss, grads, dstate, state


# ----------------------------------------------------------------------------
# operations and checks
CHOICES = {
    "positions": ("simplified", "transformer_xl"),  # Eqs. 2-4, Eq. 1
    "slot_value": ("itself", "projected"),  # section 2.2.3, its last sentence and its third
    "slot_normalization": ("none", "biased"),  # decision 17: biased normalisation
}


def operations_of(config):
    """The paper's operations, some replaced by those of the variants that the config asks for.

    Raises ValueError, naming the field, for an unknown variant.
    """
    check_variant(config)
    replaced = other_variants(config)
    if config.slot_normalization == "biased":
        replaced |= {
            "learned_state": zero_state,
            "learned_state_backward": zero_state_backward,
            "encoder_forward": encoder_biased_forward,
            "encoder_backward": encoder_biased_backward,
            "init_encoder_decoder": init_biased,
        }
    return paper.operations_with(**replaced)


def without_bias(config):
    """The operations without biased normalisation."""
    return paper.operations_with(**other_variants(config))


def other_variants(config):
    """{operation: its function} of all other variants that the config asks for."""
    replaced = {}
    if config.encoder_layers == 0:
        replaced |= {
            "learned_state": empty_previous_state,
            "encoder_forward": decoder_only_forward,
            "encoder_backward": decoder_only_backward,
            "prediction_forward": no_decoder_forward,
            "prediction_backward": no_decoder_backward,
            "clipped_distances": decoder_only_distances,
            "init_encoder_decoder": init_decoder_only,
        }
    if config.positions == "transformer_xl":
        replaced |= {
            "simplified_attention_forward": transformer_xl_attention_forward,
            "simplified_attention_backward": transformer_xl_attention_backward,
            "clipped_distances": all_distances,
            "init_attention": init_transformer_xl_attention,
        }
    if config.slot_value == "projected":
        replaced |= {
            "slot_attention_forward": projected_slot_attention_forward,
            "slot_attention_backward": projected_slot_attention_backward,
        }
    if hasattr(config, "task"):
        write = replaced.get("slot_attention_forward", paper.slot_attention_forward)
        replaced |= with_masks(config, write)
        replaced |= {
            "encoder_forward": encoder_task_forward,
            "encoder_backward": encoder_task_backward,
            "prediction_forward": prediction_task_forward,
            "prediction_backward": prediction_task_backward,
        }
    return replaced


def with_masks(config, write):
    """{operation: its function} of attention to the encoder's tokens, with padding masked out."""
    readable = config.task.readable
    mask = readable_mask(readable)
    square = self_attention_mask(config.segment, 0, False, readable)
    published = paper.operations_with()
    return {
        "self_attention_forward": partial(published.self_attention_forward, mask=square),
        "cross_attention_forward": partial(published.cross_attention_forward, mask=mask),
        "slot_attention_forward": partial(write, mask=mask),
    }


def check_variant(config):
    """Raise ValueError, naming the field, for a variant that is unknown or cannot work."""
    for name, known in CHOICES.items():
        value = getattr(config, name)
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
    if config.positions == "transformer_xl" and config.width % 2:
        raise ValueError(
            f"width {config.width} is odd; the sinusoids of transformer_xl positions need an even "
            "one"
        )
