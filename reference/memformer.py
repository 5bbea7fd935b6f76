"""Memformer (Wu, Lan, Gu, Yu, 2020), and Memory Replay Back-Propagation, forward and backward in NumPy.

A document is read segment by segment. An encoder reads a segment together with S memory slots, and writes the slots anew:
each slot attends to itself and to what the encoder made of the segment, never to another slot. A decoder predicts the next
segment from what the encoder made of the last one. The slots are all that carries gradient, which must flow through many of
their updates; Memory Replay Back-Propagation does that at the memory of one segment: it stores the slots alone, and computes
each segment again on the way back.
`forward` takes (tokens, state) to (logits, next state), `backward` the gradient of the next state to that of the incoming one.
`through_time` and `memory_replay` are the two ways over a rollout. No encoder layers gives the decoder-only model of Figure 1b.

Glossary: code symbol, meaning, paper symbol, shape
    tokens             token ids of one segment of N tokens              s_{t+1}         (B, N)
    segment            N, tokens in a segment                            L
    slots              S, memory slots
    state.memory       the slots; of every layer in the decoder-only     M_{t-1}         (B, 1 or L, S, D)
    state.previous     the segment before, which the encoder reads       s_t             (B, N)
    reading            what the encoder reads, masked when infilling     s_t             (B, N)
    readable           where reading is no padding                                       (B, N) bool
    prompt             what the decoder reads after the task's token                     (B, N)
    encoded            the encoder's final hidden states                                 (B, N, D)
    positions          parameter; a vector for every clipped distance    R_{i-j}         (R, E)
    distance_key, content_bias, distance_bias   Transformer-XL's         W_r, u, v       (HE, D), (H, E), (H, E)
    index              which row of the distances a query and key need                   (N, K)
    retention          parameter; a bias on a slot's score of itself     none, see 9     (H,)

B batch (lanes), D width, H heads, E head width, F feed-forward width, V vocabulary, L layers.

Departures and decisions (the paper decides; its authors' released code is a later model and settles little)
     1. Eqs. 3-4 are read with softmax and 1/sqrt(E). R is one table a layer, E wide, shared by heads and by its two roles, key
        and value, from N(0, 0.5^2); distances are clipped at max_distance. Causal attention needs distances from 0 up, the
        encoder both signs.
     2. Biases as Eq. 2 on query, key and value, and on every other projection. Under "transformer_xl" (Eq. 1) self-attention's
        query, key and value have none, as there, and R is the sinusoid of the signed distance. A key's bias adds the same to all
        scores of a query, which softmax does not notice: it stands because Eq. 2 has it, and its gradient is exactly zero, not
        the rounding that a sum would leave and Adam would enlarge.
     3. Pre-norm, with a final norm on encoder and decoder. The paper does not say. The memory is normed before its projections,
        and so is what the writer reads, in the encoder-decoder a second time: one writer serves both models.
     4. Encoder layer: self-attention, memory cross-attention, feed-forward (ReLU), each with its residual (Figure 2a).
     5. The decoder that predicts s_{t+1} reads the encoding of s_t, into which the encoder has read M_{t-1}. So the state is
        (memory, previous tokens), and a document's first segment is predicted from a segment of begin tokens.
     6. The decoder reads the task's token and then N tokens, and has N + 1 positions. In continuation position i + 1 predicts
        token i + 1 of the segment, the first token having been predicted by the segment before; in infilling and recall the whole
        segment is predicted, the first token by the task's token.
     7. Slot attention: a slot's own value is the slot itself, in H slices of D/H, unprojected and without norm, residual, dropout
        or feed-forward after it: "if one slot only attends itself, then the information in that slot will not change in the next
        timestep" (2.2.3) holds exactly under no other reading. Keys of slots and of encodings share a projection.
     8. The initial memory is learned, one vector per slot, N(0, 1) at the start.
     9. retention: a learned bias per head on a slot's score of itself, like a forget gate's bias in an LSTM. At 0, where the
        paper's presets start it, an untrained slot keeps about 1/(N + 1) of itself in a segment and forgets at once.
    10. Embedding, for encoder, decoder and output, is one matrix, N(0, 1), logits divided by sqrt(D). Its last five rows are the
        special tokens, which are never predicted; the decoder-only model has none.
    11. Infilling (2.3): spans of Poisson(3.5) tokens, 30% of a segment together, each replaced by one mask token; a span of none
        inserts one. The shortened text is padded, and padding is seen by nobody. The decoder predicts the whole segment (BART).
        The memory is written from the masked text, as the encoder has no other.
    12. Recall is of the segment before the one that the encoder reads. A document's first two segments have none, and its first
        has nothing to fill in: continuation takes their place, so that the shares of the other two are a little below those
        drawn. Every token that a task asks for counts alike.
    13. Decoder-only (Figure 1b; the model of Table 3): each layer attends to [its memory | the tokens so far] through one set of
        projections, memory without positions, and writes its memory from its own output. It continues texts and nothing else.
    14. Algorithm 1 with K segments 0 .. K - 1 (the paper's loop runs over T + 1). M_K, free from the first recomputation, goes on
        to the next rollout (the paper saves M_T, the memory before the last write). Losses are summed and divided once by the
        rollout's scored tokens. The gradient of the memory that a rollout begins with is returned.
    15. Dropout, on the matrices of self- and cross-attention and before each residual sum, not on what memory is written with,
        acts only when `forward` is given a random generator. A replayed segment must draw the same numbers as in the first
        pass, so each has a generator of its own, and the encoder draws before the decoder: the memory path alone agrees.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

NORM_EPSILON = 1e-6  # under the square root of layer_norm
TASKS = ("continuation", "infilling", "recall")  # section 2.3
POSITION_DEVIATION = 0.5  # of the simplified positions at the start
SPECIALS = ("begin", "mask", *TASKS)  # token ids V, V + 1, ...
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
        for name in ("vocabulary", "width", "decoder_layers", "heads", "head_width", "feed_forward", "segment", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.encoder_layers < 0:
            raise ValueError(f"encoder_layers is {self.encoder_layers}; it must be at least 0")
        if self.width % self.heads:
            nearest = max(1, round(self.width / self.heads)) * self.heads
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}; the nearest is {nearest}")
        if self.positions not in POSITIONS:
            raise ValueError(f"positions is {self.positions!r}; it must be one of {', '.join(POSITIONS)}")
        if self.positions == "transformer_xl" and self.width % 2:
            raise ValueError(f"width {self.width} is odd; the sinusoids of transformer_xl positions need an even one")
        if self.max_distance < 1:
            raise ValueError(f"max_distance is {self.max_distance}; it must be at least 1")
        if not math.isfinite(self.retention):
            raise ValueError(f"retention is {self.retention}; it must be a finite number")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be at least 0 and below 1")

    def special(self, name):
        """The id of a special token."""
        return self.vocabulary + SPECIALS.index(name)

    @property
    def memories(self):
        """Memories that a state holds: one, or one per layer in the decoder-only model."""
        return 1 if self.encoder_layers else self.decoder_layers

    def distances(self, causal):
        """The distances i - j that have a row: 0 .. largest, in the encoder -largest .. largest, largest clipped or not."""
        longest = self.segment if causal and self.encoder_layers else self.segment - 1  # N tokens may follow a task's token
        largest = min(longest, self.max_distance) if self.positions == "simplified" else longest
        return np.arange(0 if causal else -largest, largest + 1)


class State(NamedTuple):
    """What a segment hands to the next one; axis 0 of every field is the lane."""

    memory: np.ndarray  # (B, 1, S, D), decoder-only (B, L, S, D)
    previous: np.ndarray  # (B, N) token ids, decoder-only (B, 0)


class Task(NamedTuple):
    """What one segment is to do in every lane (section 2.3); axis 0 is the lane."""

    kind: np.ndarray  # (B,) index into TASKS
    reading: np.ndarray  # (B, N) token ids that the encoder reads
    readable: np.ndarray  # (B, N) bool, false on the padding after a text with masked spans
    prompt: np.ndarray  # (B, N) token ids that the decoder reads after the task's token


class Segment(NamedTuple):
    """One step of a rollout."""

    tokens: np.ndarray  # (B, N)
    targets: np.ndarray  # (B, N)
    scored: np.ndarray  # (B, N) bool
    starts: np.ndarray  # (B,) bool, where a document begins
    task: Task | None = None  # None is continuation


def truncated_normal(rng, shape, deviation):
    """Normal cut at two sigma, rescaled so that its standard deviation is `deviation` after the cut (0.8796 of the uncut)."""
    draw = rng.standard_normal(shape)
    while (outside := np.abs(draw) > 2).any():
        draw[outside] = rng.standard_normal(int(outside.sum()))
    return draw * (deviation / 0.8796256610342398)


def init_linear(rng, fan_out, fan_in):
    return truncated_normal(rng, (fan_out, fan_in), fan_in**-0.5)


def init_norm(width):
    return {"scale": np.ones(width), "bias": np.zeros(width)}


def init_affine(rng, name, fan_out, fan_in):
    return {name: init_linear(rng, fan_out, fan_in), f"{name}_bias": np.zeros(fan_out)}


def init_attention(config, rng, causal, memory):
    """Self-attention, over its layer's own memory too in the decoder-only model."""
    d, inner = config.width, config.heads * config.head_width
    p = prefixed("norm.", init_norm(d)) | (prefixed("memory_norm.", init_norm(d)) if memory else {})
    if config.positions == "simplified":
        for name in ("query", "key", "value"):
            p |= init_affine(rng, name, inner, d)
        p["positions"] = rng.normal(0, POSITION_DEVIATION, (len(config.distances(causal)), config.head_width))
    else:
        p |= {name: init_linear(rng, inner, d) for name in ("query", "key", "value", "distance_key")}
        p |= {name: rng.normal(0, 0.02, (config.heads, config.head_width)) for name in ("content_bias", "distance_bias")}
    return p | init_affine(rng, "output", d, inner)


def init_cross_attention(config, rng):
    d, inner = config.width, config.heads * config.head_width
    p = prefixed("norm.", init_norm(d))
    for name in ("query", "key", "value"):
        p |= init_affine(rng, name, inner, d)
    return p | init_affine(rng, "output", d, inner)


def init_mlp(config, rng):
    d, f = config.width, config.feed_forward
    return prefixed("mlp_norm.", init_norm(d)) | init_affine(rng, "mlp_hidden", f, d) | init_affine(rng, "mlp_output", d, f)


def init_writer(config, rng):
    d, inner = config.width, config.heads * config.head_width
    p = prefixed("memory_norm.", init_norm(d)) | prefixed("norm.", init_norm(d))
    p |= init_affine(rng, "query", inner, d) | init_affine(rng, "key", inner, d) | init_affine(rng, "value", d, d)
    return p | {"retention": np.full(config.heads, config.retention)}


def init_encoder(config, rng):
    p = {}
    for layer in range(config.encoder_layers):
        own = prefixed("attention.", init_attention(config, rng, causal=False, memory=False))
        read = init_cross_attention(config, rng) | prefixed("memory_norm.", init_norm(config.width))
        p |= prefixed(f"layers.{layer}.", own | prefixed("read.", read) | init_mlp(config, rng))
    return p | prefixed("norm.", init_norm(config.width))


def init_decoder(config, rng):
    p, alone = {}, config.encoder_layers == 0
    for layer in range(config.decoder_layers):
        own = prefixed("attention.", init_attention(config, rng, causal=True, memory=alone))
        other = prefixed("writer.", init_writer(config, rng)) if alone else prefixed("cross.", init_cross_attention(config, rng))
        p |= prefixed(f"layers.{layer}.", own | other | init_mlp(config, rng))
    return p | prefixed("norm.", init_norm(config.width))


def init_params(config, rng):
    """All parameters as {dotted name: float64 array}; matrices are (out, in)."""
    specials = len(SPECIALS) if config.encoder_layers else 0
    params = {"embedding": rng.normal(0, 1, (config.vocabulary + specials, config.width))}
    params["initial_memory"] = rng.normal(0, 1, (config.memories, config.slots, config.width))
    if config.encoder_layers:
        params |= prefixed("encoder.", init_encoder(config, rng)) | prefixed("writer.", init_writer(config, rng))
    return params | prefixed("decoder.", init_decoder(config, rng))


def prefixed(prefix, tree):
    """{name: a} -> {prefix + name: a}."""
    return {prefix + name: array for name, array in tree.items()}


def subtree(params, prefix):
    """The parameters below prefix, by their names without it."""
    return {name[len(prefix) :]: array for name, array in params.items() if name.startswith(prefix)}


def add_into(total, part):
    """Sum a dict of gradients into another; total is ours to change."""
    for name, array in part.items():
        total[name] = total[name] + array if name in total else array


def initial_state(params, config, batch):
    """What a document starts with: the learned slots, and a segment of begin tokens."""
    memory = np.tile(params["initial_memory"], (batch, 1, 1, 1))  # (B, 1 or L, S, D)
    width = config.segment if config.encoder_layers else 0
    return State(memory, np.full((batch, width), config.special("begin")))


def initial_state_backward(config, dstate):
    """Gradient into the learned slots, summed over lanes: zero dstate in lanes that did not start."""
    return {"initial_memory": dstate.memory.sum(0)}


def linear_forward(x, weight):
    """y = x W^T for x (..., in) and weight (out, in)."""
    return x @ weight.T, (x, weight)


# y = x W^T: dx = dy W, dW = dy^T x over all rows
def linear_backward(dy, cache):
    x, weight = cache
    dweight = dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])  # (out, in)
    return dy @ weight, dweight


def affine_forward(p, name, x):
    """x W^T + b, where p has a bias of that name (Eq. 2)."""
    y, cache = linear_forward(x, p[name])
    biased = f"{name}_bias" in p
    return (y + p[f"{name}_bias"] if biased else y), (name, biased, cache)


# y = x W^T + b: dx = dy W, dW = dy^T x, db = sum of dy
def affine_backward(dy, cache):
    """Gradients of x, and of the weight and the bias by name."""
    name, biased, linear_cache = cache
    dx, dweight = linear_backward(dy, linear_cache)
    dbias = dy.sum(tuple(range(dy.ndim - 1)))
    if name == "key":  # q.b is the same for all keys, so softmax cancels it: exactly zero, not the sum's rounding
        dbias = np.zeros_like(dbias)
    return dx, {name: dweight} | ({f"{name}_bias": dbias} if biased else {})


def layer_norm_forward(x, scale, bias):
    """Zero mean and unit variance over the last axis, then scale and bias."""
    centred = x - x.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + NORM_EPSILON)
    normal = centred * inverse
    return normal * scale + bias, (normal, inverse, scale)


# n = (x - mean x) / deviation: dx = (dn - mean(dn) - n mean(n dn)) / deviation
def layer_norm_backward(dy, cache):
    normal, inverse, scale = cache
    dnormal = dy * scale
    dx = inverse * (dnormal - dnormal.mean(-1, keepdims=True) - normal * (dnormal * normal).mean(-1, keepdims=True))
    sum_axes = tuple(range(dy.ndim - 1))
    return dx, {"scale": (dy * normal).sum(sum_axes), "bias": dy.sum(sum_axes)}


def norm_forward(p, name, x):
    y, cache = layer_norm_forward(x, p[f"{name}.scale"], p[f"{name}.bias"])
    return y, (name, cache)


def norm_backward(dy, cache):
    name, norm_cache = cache
    dx, grads = layer_norm_backward(dy, norm_cache)
    return dx, prefixed(f"{name}.", grads)


def softmax_forward(scores):
    """Softmax over the last axis; -inf scores get exactly zero."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights, weights


# w = softmax(s): ds = w (dw - w·dw)
def softmax_backward(dweights, weights):
    return weights * (dweights - (dweights * weights).sum(-1, keepdims=True))


def dropout_forward(x, rate, rng):
    """Inverted dropout; rng None (evaluation) or rate 0 passes x through."""
    if rng is None or rate == 0:
        return x, None
    dropout_mask = (rng.random(x.shape) >= rate) / (1 - rate)
    return x * dropout_mask, dropout_mask


def dropout_backward(dy, dropout_mask):
    return dy if dropout_mask is None else dy * dropout_mask


def split_heads(x, heads):
    """(B, N, H*E) -> (B, H, N, E)"""
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)


def merge_heads(x):
    """(B, H, N, E) -> (B, N, H*E), the adjoint of split_heads."""
    batch, heads, length, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, heads * width)


def sinusoids(distances, width):
    """Transformer-XL's R of signed distances: (R,) -> (R, D)."""
    frequency = 10_000.0 ** (-np.arange(0, width, 2) / width)  # (D/2,)
    angle = distances[:, None] * frequency
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)


def distance_index(length, distances):
    """The row of `distances` for query i and key j of `length` tokens: i - j, clipped to the nearest row, (N, N)."""
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    return np.clip(distance, distances[0], distances[-1]) - distances[0]


def by_key_forward(by_distance, index):
    """Scores by distance (B, H, N, R) -> scores by key (B, H, N, K), index (N, K)."""
    out = np.take_along_axis(by_distance, np.broadcast_to(index, (*by_distance.shape[:2], *index.shape)), -1)
    return out, (index, by_distance.shape[-1])


def by_key_backward(dout, cache):
    """The adjoint: what belongs to one distance is added up, clipped duplicates included."""
    return by_distance_forward(dout, *cache)[0]


def by_distance_forward(by_key, index, rows):
    """Weights by key (B, H, N, K) -> weights by distance (B, H, N, R): the sum over the keys at each distance."""
    out = np.zeros((*by_key.shape[:3], rows))
    for query, row in enumerate(index):
        np.add.at(out[:, :, query], (slice(None), slice(None), row), by_key[:, :, query])
    return out, index


def by_distance_backward(dout, index):
    return by_key_forward(dout, index)[0]


def simplified_attention_forward(p, query, key, value, index, seen, rate, rng):
    """Eqs. 3-4: softmax(q.(k_j + R_{i-j}) / sqrt(E)) (v_j + R_{i-j}).

    query (B, H, N, E); key, value (B, H, K, E), of which the last N have positions; index (N, N); seen broadcasts to
    (B, H, N, K). Returns (B, H, N, E).
    """
    table, own = p["positions"], slice(key.shape[2] - index.shape[1], None)
    scores = query @ key.swapaxes(-1, -2)  # (B, H, N, K)
    by_key, key_cache = by_key_forward(query @ table.T, index)
    scores[..., own] += by_key  # Eq. 3
    weights, _ = softmax_forward(np.where(seen, scores * query.shape[-1] ** -0.5, -np.inf))
    dropped, keep = dropout_forward(weights, rate, rng)
    by_distance, distance_cache = by_distance_forward(dropped[..., own], index, len(table))
    out = dropped @ value + by_distance @ table  # Eq. 4
    return out, (query, key, value, table, own, weights, dropped, keep, by_distance, key_cache, distance_cache)


def simplified_attention_backward(dout, cache):
    """Gradients of query, key, value and, from both of its roles, of R."""
    query, key, value, table, own, weights, dropped, keep, by_distance, key_cache, distance_cache = cache
    ddropped = dout @ value.swapaxes(-1, -2)  # (B, H, N, K)
    ddropped[..., own] += by_distance_backward(dout @ table.T, distance_cache)
    dscores = softmax_backward(dropout_backward(ddropped, keep), weights) * query.shape[-1] ** -0.5
    dby_distance = by_key_backward(dscores[..., own], key_cache)  # (B, H, N, R)
    dquery = dscores @ key + dby_distance @ table
    dtable = np.einsum("bhnr,bhne->re", dby_distance, query) + np.einsum("bhnr,bhne->re", by_distance, dout)
    return dquery, dscores.swapaxes(-1, -2) @ query, dropped.swapaxes(-1, -2) @ dout, {"positions": dtable}


def transformer_xl_attention_forward(p, query, key, value, index, seen, rate, rng):
    """Eq. 1: softmax(((q + u).k_j + (q + v).W_r R_{i-j}) / sqrt(E)) v_j, shapes as above; p["rows"] (R, D) are the sinusoids."""
    heads, own = query.shape[1], slice(key.shape[2] - index.shape[1], None)
    projected, projection_cache = linear_forward(p["rows"][None], p["distance_key"])
    distance_key = split_heads(projected, heads)[0]  # (H, R, E)
    content_query, distance_query = query + p["content_bias"][:, None], query + p["distance_bias"][:, None]
    scores = content_query @ key.swapaxes(-1, -2)  # (a) and (c)
    by_key, key_cache = by_key_forward(distance_query @ distance_key.swapaxes(-1, -2), index)
    scores[..., own] += by_key  # (b) and (d)
    weights, _ = softmax_forward(np.where(seen, scores * query.shape[-1] ** -0.5, -np.inf))
    dropped, keep = dropout_forward(weights, rate, rng)
    cache = (content_query, distance_query, key, value, distance_key, own, weights, dropped, keep, key_cache, projection_cache)
    return dropped @ value, cache


def transformer_xl_attention_backward(dout, cache):
    """Gradients of query, key, value, and of W_r, u and v."""
    content_query, distance_query, key, value, distance_key, own, weights, dropped, keep, key_cache, projection_cache = cache
    dscores = softmax_backward(dropout_backward(dout @ value.swapaxes(-1, -2), keep), weights) * dout.shape[-1] ** -0.5
    dby_distance = by_key_backward(dscores[..., own], key_cache)
    dcontent, ddistance = dscores @ key, dby_distance @ distance_key  # (B, H, N, E)
    ddistance_key = (dby_distance.swapaxes(-1, -2) @ distance_query).sum(0)  # (H, R, E)
    _, dweight = linear_backward(merge_heads(ddistance_key[None]), projection_cache)
    grads = {"distance_key": dweight, "content_bias": dcontent.sum((0, 2)), "distance_bias": ddistance.sum((0, 2))}
    return dcontent + ddistance, dscores.swapaxes(-1, -2) @ content_query, dropped.swapaxes(-1, -2) @ dout, grads


RELATIVE_ATTENTION = {
    "simplified": (simplified_attention_forward, simplified_attention_backward),
    "transformer_xl": (transformer_xl_attention_forward, transformer_xl_attention_backward),
}


def seen_keys(length, remembered, causal, readable):
    """Which keys each query sees: all of memory; of the tokens those up to itself if causal, and none of the padding."""
    seen = np.tril(np.ones((length, length), bool)) if causal else np.ones((length, length), bool)
    if readable is not None:
        seen = seen & readable[:, None, None, :]  # (B, 1, N, N)
    return np.concatenate([np.ones((*seen.shape[:-1], remembered), bool), seen], axis=-1)


def self_attention_forward(p, config, x, memory, causal, readable, rng):
    """x (B, N, D) plus what its tokens find in each other and, in the decoder-only model, in memory (B, S, D)."""
    normal, norm_cache = norm_forward(p, "norm", x)
    keyed, memory_cache, remembered = normal, None, 0
    if memory is not None:
        normal_memory, memory_cache = norm_forward(p, "memory_norm", memory)
        keyed, remembered = np.concatenate([normal_memory, normal], axis=1), memory.shape[1]
    (query, query_cache), (key, key_cache), (value, value_cache) = (
        affine_forward(p, name, rows) for name, rows in (("query", normal), ("key", keyed), ("value", keyed))
    )
    distances = config.distances(causal)
    p = p | {"rows": sinusoids(distances, config.width)}
    heads = (split_heads(part, config.heads) for part in (query, key, value))
    seen = seen_keys(x.shape[1], remembered, causal, readable)
    attend = RELATIVE_ATTENTION[config.positions][0]
    out, attention_cache = attend(p, *heads, distance_index(x.shape[1], distances), seen, config.dropout, rng)
    out, output_cache = affine_forward(p, "output", merge_heads(out))
    out, keep = dropout_forward(out, config.dropout, rng)
    caches = (norm_cache, memory_cache, query_cache, key_cache, value_cache, attention_cache, output_cache, keep)
    return x + out, (remembered, caches)


def self_attention_backward(config, dy, cache):
    """Gradients of x, of memory (None without) and of the parameters."""
    remembered, (norm_cache, memory_cache, query_cache, key_cache, value_cache, attention_cache, output_cache, keep) = cache
    dout, grads = affine_backward(dropout_backward(dy, keep), output_cache)
    dquery, dkey, dvalue, dpositions = RELATIVE_ATTENTION[config.positions][1](split_heads(dout, config.heads), attention_cache)
    dnormal, dquery_params = affine_backward(merge_heads(dquery), query_cache)
    dkeyed, dkey_params = affine_backward(merge_heads(dkey), key_cache)
    dvalued, dvalue_params = affine_backward(merge_heads(dvalue), value_cache)
    grads = grads | dpositions | dquery_params | dkey_params | dvalue_params
    dkeyed = dkeyed + dvalued
    dx, dnorm = norm_backward(dnormal + dkeyed[:, remembered:], norm_cache)
    if memory_cache is None:
        return dy + dx, None, grads | dnorm
    dmemory, dmemory_norm = norm_backward(dkeyed[:, :remembered], memory_cache)
    return dy + dx, dmemory, grads | dnorm | dmemory_norm


def cross_attention_forward(p, config, x, source, readable, rng):
    """x (B, N, D) plus what it finds in source (B, K, D), by content alone (Figure 2b)."""
    normal, norm_cache = norm_forward(p, "norm", x)
    (query, query_cache), (key, key_cache), (value, value_cache) = (
        affine_forward(p, name, rows) for name, rows in (("query", normal), ("key", source), ("value", source))
    )
    query, key, value = (split_heads(part, config.heads) for part in (query, key, value))
    scores = query @ key.swapaxes(-1, -2) * config.head_width**-0.5  # (B, H, N, K)
    if readable is not None:
        scores = np.where(readable[:, None, None, :], scores, -np.inf)
    weights, _ = softmax_forward(scores)
    dropped, keep_weights = dropout_forward(weights, config.dropout, rng)
    out, output_cache = affine_forward(p, "output", merge_heads(dropped @ value))
    out, keep = dropout_forward(out, config.dropout, rng)
    attention_cache = (query, key, value, weights, dropped, keep_weights)
    return x + out, (norm_cache, query_cache, key_cache, value_cache, attention_cache, output_cache, keep)


def cross_attention_backward(config, dy, cache):
    """Gradients of x, of source and of the parameters."""
    norm_cache, query_cache, key_cache, value_cache, attention_cache, output_cache, keep = cache
    query, key, value, weights, dropped, keep_weights = attention_cache
    dout, grads = affine_backward(dropout_backward(dy, keep), output_cache)
    dout = split_heads(dout, config.heads)
    ddropped = dropout_backward(dout @ value.swapaxes(-1, -2), keep_weights)
    dscores = softmax_backward(ddropped, weights) * config.head_width**-0.5
    dnormal, dquery_params = affine_backward(merge_heads(dscores @ key), query_cache)
    dkeyed, dkey_params = affine_backward(merge_heads(dscores.swapaxes(-1, -2) @ query), key_cache)
    dvalued, dvalue_params = affine_backward(merge_heads(dropped.swapaxes(-1, -2) @ dout), value_cache)
    dx, dnorm = norm_backward(dnormal, norm_cache)
    return dy + dx, dkeyed + dvalued, grads | dquery_params | dkey_params | dvalue_params | dnorm


def mlp_forward(p, config, x, rng):
    """dropout(W_2 relu(W_1 x + b_1) + b_2)"""
    before, hidden_cache = linear_forward(x, p["mlp_hidden"])
    hidden = np.maximum(before + p["mlp_hidden_bias"], 0)  # (B, N, F)
    out, output_cache = linear_forward(hidden, p["mlp_output"])
    out, keep = dropout_forward(out + p["mlp_output_bias"], config.dropout, rng)
    return out, (hidden_cache, hidden, output_cache, keep)


def mlp_backward(dout, cache):
    hidden_cache, hidden, output_cache, keep = cache
    dout = dropout_backward(dout, keep)
    dhidden, doutput = linear_backward(dout, output_cache)
    dbefore = dhidden * (hidden > 0)
    dx, dweight = linear_backward(dbefore, hidden_cache)
    biases = {"mlp_hidden_bias": dbefore.sum((0, 1)), "mlp_output_bias": dout.sum((0, 1))}
    return dx, {"mlp_hidden": dweight, "mlp_output": doutput} | biases


def feed_forward_forward(p, config, x, rng):
    """x plus the feed-forward network of its norm."""
    normal, norm_cache = norm_forward(p, "mlp_norm", x)
    out, mlp_cache = mlp_forward(p, config, normal, rng)
    return x + out, (norm_cache, mlp_cache)


def feed_forward_backward(dy, cache):
    norm_cache, mlp_cache = cache
    dnormal, grads = mlp_backward(dy, mlp_cache)
    dx, dnorm = norm_backward(dnormal, norm_cache)
    return dy + dx, grads | dnorm


def slot_attention_forward(p, config, memory, encoded, readable):
    """Figure 2c: each slot of memory (B, S, D) attends to [itself | encoded (B, N, D)], 1 + N keys, and becomes what it sees."""
    normal, norm_cache = norm_forward(p, "memory_norm", memory)
    source, source_cache = norm_forward(p, "norm", encoded)
    query, query_cache = affine_forward(p, "query", normal)
    own_key, own_key_cache = affine_forward(p, "key", normal)
    key, key_cache = affine_forward(p, "key", source)
    value, value_cache = affine_forward(p, "value", source)
    query, own_key, key, value, slots = (split_heads(part, config.heads) for part in (query, own_key, key, value, memory))
    scale = config.head_width**-0.5
    own = (query * own_key).sum(-1, keepdims=True) * scale + p["retention"][:, None, None]  # (B, H, S, 1)
    others = query @ key.swapaxes(-1, -2) * scale  # (B, H, S, N)
    if readable is not None:
        others = np.where(readable[:, None, None, :], others, -np.inf)
    weights, _ = softmax_forward(np.concatenate([own, others], axis=-1))  # (B, H, S, 1 + N)
    new = weights[..., :1] * slots + weights[..., 1:] @ value  # (B, H, S, D/H); the slot is its own value
    caches = (norm_cache, source_cache, query_cache, own_key_cache, key_cache, value_cache)
    return merge_heads(new), (caches, (query, own_key, key, value, slots, weights))


def slot_attention_backward(config, dnew, cache):
    """Gradients of memory, of encoded and of the parameters."""
    (norm_cache, source_cache, query_cache, own_key_cache, key_cache, value_cache), parts = cache
    query, own_key, key, value, slots, weights = parts
    dnew = split_heads(dnew, config.heads)
    dslots = merge_heads(weights[..., :1] * dnew)
    dvalue = weights[..., 1:].swapaxes(-1, -2) @ dnew
    dweights = np.concatenate([(slots * dnew).sum(-1, keepdims=True), dnew @ value.swapaxes(-1, -2)], axis=-1)
    dscores = softmax_backward(dweights, weights)
    down, dothers = dscores[..., :1], dscores[..., 1:]
    scale = config.head_width**-0.5
    dnormal, grads = affine_backward(merge_heads((down * own_key + dothers @ key) * scale), query_cache)
    dnormal_as_key, down_key_params = affine_backward(merge_heads(down * query * scale), own_key_cache)
    dsource, dkey_params = affine_backward(merge_heads(dothers.swapaxes(-1, -2) @ query * scale), key_cache)
    dsource_as_value, dvalue_params = affine_backward(merge_heads(dvalue), value_cache)
    add_into(dkey_params, down_key_params)  # slots and encodings share the projection
    dmemory, dmemory_norm = norm_backward(dnormal + dnormal_as_key, norm_cache)
    dencoded, dnorm = norm_backward(dsource + dsource_as_value, source_cache)
    grads |= dkey_params | dvalue_params | dmemory_norm | dnorm | {"retention": down.sum((0, 2, 3))}
    return dslots + dmemory, dencoded, grads


def encoder_layer_forward(p, config, x, memory, readable, rng):
    """Self-attention, memory cross-attention and feed-forward (Figure 2a) of x (B, N, D), reading memory (B, S, D)."""
    x, attention_cache = self_attention_forward(subtree(p, "attention."), config, x, None, False, readable, rng)
    normal_memory, memory_cache = norm_forward(p, "read.memory_norm", memory)
    x, read_cache = cross_attention_forward(subtree(p, "read."), config, x, normal_memory, None, rng)
    x, mlp_cache = feed_forward_forward(p, config, x, rng)
    return x, (attention_cache, memory_cache, read_cache, mlp_cache)


def encoder_layer_backward(config, dx, cache):
    """Gradients of x, of memory and of the parameters."""
    attention_cache, memory_cache, read_cache, mlp_cache = cache
    dx, grads = feed_forward_backward(dx, mlp_cache)
    dx, dnormal_memory, dread = cross_attention_backward(config, dx, read_cache)
    dmemory, dmemory_norm = norm_backward(dnormal_memory, memory_cache)
    dx, _, dattention = self_attention_backward(config, dx, attention_cache)
    return dx, dmemory, grads | dmemory_norm | prefixed("read.", dread) | prefixed("attention.", dattention)


def decoder_layer_forward(p, config, x, encoded, readable, rng):
    """Causal self-attention, cross-attention to encoded (B, N, D) and feed-forward of x (B, N + 1, D)."""
    x, attention_cache = self_attention_forward(subtree(p, "attention."), config, x, None, True, None, rng)
    x, cross_cache = cross_attention_forward(subtree(p, "cross."), config, x, encoded, readable, rng)
    x, mlp_cache = feed_forward_forward(p, config, x, rng)
    return x, (attention_cache, cross_cache, mlp_cache)


def decoder_layer_backward(config, dx, cache):
    """Gradients of x, of encoded and of the parameters."""
    attention_cache, cross_cache, mlp_cache = cache
    dx, grads = feed_forward_backward(dx, mlp_cache)
    dx, dencoded, dcross = cross_attention_backward(config, dx, cross_cache)
    dx, _, dattention = self_attention_backward(config, dx, attention_cache)
    return dx, dencoded, grads | prefixed("cross.", dcross) | prefixed("attention.", dattention)


def memory_layer_forward(p, config, x, memory, rng):
    """A layer of Figure 1b: x (B, N, D) attends to [memory (B, S, D) | x]; its output writes the next memory."""
    x, attention_cache = self_attention_forward(subtree(p, "attention."), config, x, memory, True, None, rng)
    x, mlp_cache = feed_forward_forward(p, config, x, rng)
    next_memory, writer_cache = slot_attention_forward(subtree(p, "writer."), config, memory, x, None)
    return x, next_memory, (attention_cache, mlp_cache, writer_cache)


def memory_layer_backward(config, dx, dnext_memory, cache):
    """Gradients of x, of memory and of the parameters."""
    attention_cache, mlp_cache, writer_cache = cache
    dmemory, dx_written, dwriter = slot_attention_backward(config, dnext_memory, writer_cache)
    dx, grads = feed_forward_backward(dx + dx_written, mlp_cache)
    dx, dmemory_read, dattention = self_attention_backward(config, dx, attention_cache)
    return dx, dmemory + dmemory_read, grads | prefixed("writer.", dwriter) | prefixed("attention.", dattention)


def encoder_forward(params, config, reading, memory, readable, rng):
    """Mt = Encoder(st, Mt-1) (Eq. 5): reading (B, N), memory (B, S, D) -> encoded (B, N, D), next memory (B, S, D)."""
    p, x, caches = subtree(params, "encoder."), params["embedding"][reading], []
    for layer in range(config.encoder_layers):
        x, cache = encoder_layer_forward(subtree(p, f"layers.{layer}."), config, x, memory, readable, rng)
        caches.append(cache)
    encoded, norm_cache = norm_forward(p, "norm", x)
    next_memory, writer_cache = slot_attention_forward(subtree(params, "writer."), config, memory, encoded, readable)
    return encoded, next_memory, (reading, caches, norm_cache, writer_cache)


def encoder_backward(params, config, dencoded, dnext_memory, cache):
    """Gradients of memory and of the parameters."""
    reading, caches, norm_cache, writer_cache = cache
    dmemory, dencoded_written, dwriter = slot_attention_backward(config, dnext_memory, writer_cache)
    dx, grads = norm_backward(dencoded + dencoded_written, norm_cache)
    for layer in reversed(range(config.encoder_layers)):
        dx, dmemory_read, dlayer = encoder_layer_backward(config, dx, caches[layer])
        dmemory = dmemory + dmemory_read  # every layer reads the same memory
        grads |= prefixed(f"layers.{layer}.", dlayer)
    dembedding = np.zeros_like(params["embedding"])
    np.add.at(dembedding, reading, dx)
    return dmemory, prefixed("encoder.", grads) | prefixed("writer.", dwriter) | {"embedding": dembedding}


def decoder_forward(params, config, prompt, encoded, readable, rng):
    """Final hidden states (B, N + 1, D) of prompt (B, N + 1), the task's token in front (Eq. 6)."""
    p, x, caches = subtree(params, "decoder."), params["embedding"][prompt], []
    for layer in range(config.decoder_layers):
        x, cache = decoder_layer_forward(subtree(p, f"layers.{layer}."), config, x, encoded, readable, rng)
        caches.append(cache)
    hidden, norm_cache = norm_forward(p, "norm", x)
    return hidden, (prompt, caches, norm_cache)


def decoder_backward(params, config, dhidden, cache):
    """Gradients of encoded, summed over the layers, and of the parameters."""
    prompt, caches, norm_cache = cache
    dx, grads = norm_backward(dhidden, norm_cache)
    dencoded = 0.0
    for layer in reversed(range(config.decoder_layers)):
        dx, dencoded_layer, dlayer = decoder_layer_backward(config, dx, caches[layer])
        dencoded = dencoded + dencoded_layer
        grads |= prefixed(f"layers.{layer}.", dlayer)
    dembedding = np.zeros_like(params["embedding"])
    np.add.at(dembedding, prompt, dx)
    return dencoded, prefixed("decoder.", grads) | {"embedding": dembedding}


def decoder_only_forward(params, config, tokens, memory, rng):
    """Figure 1b: tokens (B, N), memory (B, L, S, D) -> final hidden states (B, N, D) and next memory."""
    p, x, memories, caches = subtree(params, "decoder."), params["embedding"][tokens], [], []
    for layer in range(config.decoder_layers):
        x, next_memory, cache = memory_layer_forward(subtree(p, f"layers.{layer}."), config, x, memory[:, layer], rng)
        memories.append(next_memory)
        caches.append(cache)
    hidden, norm_cache = norm_forward(p, "norm", x)
    return hidden, np.stack(memories, axis=1), (tokens, caches, norm_cache)


def decoder_only_backward(params, config, dhidden, dnext_memory, cache):
    """Gradients of memory (B, L, S, D) and of the parameters."""
    tokens, caches, norm_cache = cache
    dx, grads = norm_backward(dhidden, norm_cache)
    dmemory = np.zeros_like(dnext_memory)
    for layer in reversed(range(config.decoder_layers)):
        dx, dmemory[:, layer], dlayer = memory_layer_backward(config, dx, dnext_memory[:, layer], caches[layer])
        grads |= prefixed(f"layers.{layer}.", dlayer)
    dembedding = np.zeros_like(params["embedding"])
    np.add.at(dembedding, tokens, dx)
    return dmemory, prefixed("decoder.", grads) | {"embedding": dembedding}


def continuation(tokens, previous):
    """The task of predicting tokens' successors from the segment before: what a language model does (Eq. 7)."""
    return Task(np.zeros(len(tokens), int), previous, np.ones(tokens.shape, bool), tokens)


def infilling(config, previous, fraction, span, rng):
    """The task of predicting previous (B, N) whole from previous with masked spans; its targets are previous."""
    reading, readable = np.zeros_like(previous), np.zeros(previous.shape, bool)
    for lane, text in enumerate(previous):
        masked = mask_spans(text, config.special("mask"), fraction, span, rng)
        reading[lane, : len(masked)], readable[lane, : len(masked)] = masked, True
    return Task(np.full(len(previous), TASKS.index("infilling")), reading, readable, previous)


def mask_spans(text, mask, fraction, span, rng):
    """text (N,) with round(fraction N) tokens in spans of Poisson(span) tokens replaced by one mask each (2.3).

    The last span is cut to what is left of that number. A span of no tokens inserts a mask, where longer spans have made room for
    it: the text never grows. Where the spans stand is uniform over all ways to put them between the tokens that remain.
    """
    budget, lengths = round(fraction * len(text)), []
    while sum(lengths) < budget:
        length = min(int(rng.poisson(span)), budget - sum(lengths))
        if length or len(lengths) < sum(lengths):
            lengths.append(length)
    items = len(text) - budget + len(lengths)
    spans, out, at = dict(zip(rng.permutation(items).tolist(), lengths, strict=False)), [], 0  # {place among the items: length}
    for item in range(items):
        out.append(mask if item in spans else text[at])
        at += spans.get(item, 1)
    return np.array(out)


def recall(previous, earlier):
    """The task of predicting the segment `earlier`, before previous (both (B, N)), whole; its targets are `earlier`."""
    return Task(np.full(len(previous), TASKS.index("recall")), previous, np.ones(previous.shape, bool), earlier)


def predicting_rows(task):
    """The N of the decoder's N + 1 rows that predict, per lane (B, N): the task's token does not in continuation."""
    return (task.kind == TASKS.index("continuation"))[:, None] + np.arange(task.prompt.shape[1])


def check_segment(config, tokens, task):
    if tokens.shape[1] != config.segment:
        raise ValueError(f"a segment of {tokens.shape[1]} tokens is not one of {config.segment}; pad it")
    if task is not None and config.encoder_layers == 0:
        raise ValueError("the decoder-only model (encoder_layers 0) has no tasks but continuation; leave task out")


def forward(params, config, tokens, state, rng=None, task=None):
    """Read one segment.

    tokens (B, N) of ids below V, N = config.segment; state from `initial_state` or the segment before; rng turns dropout on.
    task None is continuation, where row i of the logits (B, N, V) predicts token i + 1; under infilling and recall row i predicts
    token i of the task's prompt. Returns logits, the next state, and the cache for `backward`. Raises ValueError if N is not
    config.segment, or if the decoder-only model is given a task.
    """
    check_segment(config, tokens, task)
    if config.encoder_layers == 0:
        hidden, memory, stack_cache = decoder_only_forward(params, config, tokens, state.memory, rng)
        rows, previous = None, state.previous
    else:
        readable = None if task is None else task.readable
        task = continuation(tokens, state.previous) if task is None else task
        encoded, memory, encoder_cache = encoder_forward(params, config, task.reading, state.memory[:, 0], readable, rng)
        prompt = np.concatenate([config.special(TASKS[0]) + task.kind[:, None], task.prompt], axis=1)  # (B, N + 1)
        hidden, decoder_cache = decoder_forward(params, config, prompt, encoded, readable, rng)
        rows = predicting_rows(task)[..., None]
        hidden, stack_cache = np.take_along_axis(hidden, rows, 1), (encoder_cache, decoder_cache)
        memory, previous = memory[:, None], tokens
    embedding = params["embedding"][: config.vocabulary]  # special tokens are never predicted
    logits, output_cache = linear_forward(hidden * config.width**-0.5, embedding)
    return logits, State(memory, previous), (stack_cache, rows, output_cache)


def backward(params, config, cache, dlogits, dnext_state=None):
    """Gradients of the parameters and of the incoming state, from those of the logits and of the next state.

    dnext_state None stops the gradient at the segment's end. Token ids have no gradient: dstate.previous is zeros.
    """
    stack_cache, rows, output_cache = cache
    dhidden, dembedding = linear_backward(dlogits, output_cache)
    dhidden = dhidden * config.width**-0.5
    dmemory = np.zeros((len(dlogits), config.memories, config.slots, config.width))
    dmemory = dmemory if dnext_state is None else dnext_state.memory
    if config.encoder_layers == 0:
        dmemory, grads = decoder_only_backward(params, config, dhidden, dmemory, stack_cache)
    else:
        drows = np.zeros((len(dlogits), config.segment + 1, config.width))
        np.put_along_axis(drows, rows, dhidden, 1)
        dencoded, grads = decoder_backward(params, config, drows, stack_cache[1])
        dmemory, dencoder = encoder_backward(params, config, dencoded, dmemory[:, 0], stack_cache[0])
        dmemory = dmemory[:, None]
        add_into(grads, dencoder)
    grads["embedding"][: config.vocabulary] += dembedding  # the tied embedding's second gradient
    previous = np.zeros((len(dlogits), config.segment if config.encoder_layers else 0))
    return {name: grads.get(name, np.zeros_like(value)) for name, value in params.items()}, State(dmemory, previous)


def advance(params, config, tokens, state, rng=None, task=None):
    """The state after a segment by the memory path alone: encoder and writer, or all layers of the decoder-only model."""
    check_segment(config, tokens, task)
    if config.encoder_layers == 0:
        return State(decoder_only_forward(params, config, tokens, state.memory, rng)[1], state.previous)
    reading, readable = (state.previous, None) if task is None else (task.reading, task.readable)
    return State(encoder_forward(params, config, reading, state.memory[:, 0], readable, rng)[1][:, None], tokens)


def cross_entropy_forward(logits, targets, scored):
    """Summed -log p of targets (B, N) at the scored (B, N) positions, in nats."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))  # (B, N, V)
    of_targets = np.take_along_axis(log_probabilities, targets[..., None], axis=-1)[..., 0]
    return -of_targets[scored].sum(), (log_probabilities, targets, scored)


# loss = -log p_target, p = softmax(logits): dlogits = p - onehot(target)
def cross_entropy_backward(dloss, cache):
    log_probabilities, targets, scored = cache
    one_hot = np.arange(log_probabilities.shape[-1]) == targets[..., None]  # (B, N, V)
    return dloss * (np.exp(log_probabilities) - one_hot) * scored[..., None]


def choose_lanes(starts, first, second):
    """A state that is `first` in the lanes where starts (B,) is true and `second` elsewhere."""
    return State(*(np.where(starts.reshape(-1, *[1] * (a.ndim - 1)), a, b) for a, b in zip(first, second, strict=True)))


def begin_forward(params, config, segment, state):
    """The state that a segment reads: carried, or the initial one where a document starts."""
    return choose_lanes(segment.starts, initial_state(params, config, len(segment.starts)), state)


def begin_backward(config, segment, dstate):
    """Gradients of the carried state and of the parameters, from that of the state that the segment read."""
    zero = State(*(np.zeros_like(field) for field in dstate))
    dinitial = initial_state_backward(config, choose_lanes(segment.starts, dstate, zero))
    return choose_lanes(segment.starts, zero, dstate), dinitial


def segment_rng(seed, index):
    """The generator of one segment's dropout, the same whenever it is computed; None for no dropout."""
    return None if seed is None else np.random.default_rng([seed, index])


def segment_forward(params, config, segment, state, rng):
    """(summed loss, next state, cache) of one segment."""
    logits, state, cache = forward(
        params, config, segment.tokens, begin_forward(params, config, segment, state), rng, segment.task
    )
    loss, loss_cache = cross_entropy_forward(logits, segment.targets, segment.scored)
    return loss, state, (segment, cache, loss_cache)


def segment_backward(params, config, dloss, dnext_state, cache):
    """Gradients of the parameters and of the state that was carried to the segment."""
    segment, forward_cache, loss_cache = cache
    grads, dstate = backward(params, config, forward_cache, cross_entropy_backward(dloss, loss_cache), dnext_state)
    dstate, dinitial = begin_backward(config, segment, dstate)
    add_into(grads, dinitial)
    return grads, dstate


def count_scored(segments):
    """Scored tokens of a rollout, at least 1."""
    return max(1, sum(int(segment.scored.sum()) for segment in segments))


def through_time(params, config, segments, state, seed=None):
    """Full back-propagation through a rollout: all caches kept, then backward through all segments.

    Returns the mean loss of the scored tokens, its gradients, that of the state that the rollout began with, and the next state.
    """
    loss, caches, grads, dstate = 0.0, [], {}, None
    for t, segment in enumerate(segments):
        part, state, cache = segment_forward(params, config, segment, state, segment_rng(seed, t))
        loss = loss + part
        caches.append(cache)
    for cache in reversed(caches):
        dparams, dstate = segment_backward(params, config, 1 / count_scored(segments), dstate, cache)
        add_into(grads, dparams)
    return loss / count_scored(segments), grads, dstate, state


def memory_replay(params, config, segments, state, seed=None):
    """Memory Replay Back-Propagation (Algorithm 1): the same, with one segment's cache at a time."""
    replay_buffer = [state]  # l.1-2
    for t, segment in enumerate(segments[:-1]):  # l.3
        before = begin_forward(params, config, segment, replay_buffer[-1])
        replay_buffer.append(advance(params, config, segment.tokens, before, segment_rng(seed, t), segment.task))  # l.4-5
    loss, grads, dstate, last = 0.0, {}, None, None  # l.7: the gradient of M_K is zero
    for t in reversed(range(len(segments))):  # l.8
        part, after, cache = segment_forward(params, config, segments[t], replay_buffer.pop(), segment_rng(seed, t))  # l.9-10
        last = after if last is None else last
        dparams, dstate = segment_backward(params, config, 1 / count_scored(segments), dstate, cache)  # l.11-12
        loss = loss + part
        add_into(grads, dparams)
    return loss / count_scored(segments), grads, dstate, last  # l.14


def rollout_of(config, document, rng):
    """A document (B, K N + 1) as a rollout that also fills in (segments 1, 4, ...) and recalls (segments 2, 5, ...)."""
    n, texts, segments = config.segment, np.split(document[:, :-1], (document.shape[1] - 1) // config.segment, axis=1), []
    for t, tokens in enumerate(texts):
        task, targets = None, document[:, t * n + 1 : (t + 1) * n + 1]
        if config.encoder_layers and t % 3 == 1:
            task, targets = infilling(config, texts[t - 1], 0.3, 3.5, rng), texts[t - 1]
        if config.encoder_layers and t % 3 == 2:
            task, targets = recall(texts[t - 1], texts[t - 2]), texts[t - 2]
        segments.append(Segment(tokens, targets, np.ones(tokens.shape, bool), np.full(len(tokens), t == 0), task))
    return segments


def check_gradients(params, config, segments, rng):
    """Print a row per parameter, its gradient along a random direction against finite differences; returns the largest error."""
    state = initial_state(params, config, len(segments[0].tokens))
    _, grads, _, _ = through_time(params, config, segments, state)
    print(f"{'parameter':<40}{'shape':<10} analytic  numeric   relative error")
    worst = 0.0
    for name, value in params.items():
        direction = rng.standard_normal(value.shape)
        ends = [through_time(params | {name: value + h * direction}, config, segments, state)[0] for h in (1e-5, -1e-5)]
        numeric, analytic = (ends[0] - ends[1]) / 2e-5, (grads[name] * direction).sum()
        error = abs(numeric - analytic) / max(abs(numeric), abs(analytic), 1e-6)
        worst = max(worst, error)
        print(f"{name:<40}{'x'.join(map(str, value.shape)):<10}{analytic:+.6f} {numeric:+.6f} {error:.1e}")
    return worst


def demonstrate():
    """Check gradients against finite differences and replay against BPTT, then fit a tiny batch; prints what it shows."""
    rng = np.random.default_rng(0)
    config = Config(
        vocabulary=11, width=12, encoder_layers=1, decoder_layers=1, heads=2, head_width=5, feed_forward=20, segment=6, slots=4,
        max_distance=4,
    )  # fmt: skip
    params = init_params(config, rng)
    document = rng.integers(config.vocabulary, size=(2, 25))
    segments = rollout_of(config, document, rng)
    state = initial_state(params, config, 2)
    print(f"Memformer, four segments of {config.segment} tokens: continuation, infilling, recall, continuation.")
    worst = check_gradients(params, config, segments, rng)
    print(f"Largest relative error {worst:.1e}: the backward pass written by hand is the derivative of the forward pass.\n")
    if not worst < 1e-4:
        raise SystemExit("gradients disagree with finite differences")
    dropping = replace(config, dropout=0.2)
    _, exact, _, _ = through_time(params, dropping, segments, state, seed=1)
    _, replayed, _, _ = memory_replay(params, dropping, segments, state, seed=1)
    apart = max(np.abs(exact[name] - replayed[name]).max() / np.abs(grad).max() for name, grad in exact.items() if grad.any())
    print(f"Memory replay and full back-propagation through time, with dropout: gradients at most {apart:.1e} apart.\n")
    if not apart < 1e-9:
        raise SystemExit("memory replay disagrees with back-propagation through time")
    print("Gradient descent by memory replay on these 48 predictions of random tokens (there is nothing to learn but the text):")
    moments = {name: (np.zeros_like(value), np.zeros_like(value)) for name, value in params.items()}
    for step in range(1, 201):
        loss, grads, _, _ = memory_replay(params, config, segments, initial_state(params, config, 2))
        for name, grad in grads.items():  # Adam
            first, second = moments[name]
            moments[name] = first, second = 0.9 * first + 0.1 * grad, 0.99 * second + 0.01 * grad**2
            params[name] = params[name] - 0.01 * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.99**step)) + 1e-8)
        if step in (1, 10, 50, 200):
            print(f"  step {step:3d}: {loss / np.log(2):.3f} bits per token (uniform: {np.log2(config.vocabulary):.3f})")
    fresh = state = initial_state(params, config, 2)
    for segment in segments[:3]:
        state = advance(params, config, segment.tokens, state, task=segment.task)
    starts = {
        "memory and previous tokens carried": state,
        "memory cleared": state._replace(memory=fresh.memory),
        "both cleared": fresh,
    }
    for label, start in starts.items():
        logits = forward(params, config, segments[3].tokens, start)[0]
        nats, _ = cross_entropy_forward(logits, segments[3].targets, segments[3].scored)
        print(f"Fourth segment, {label}: {nats / 12 / np.log(2):.3f} bits per token")


if __name__ == "__main__":
    demonstrate()
