"""RoBERTa with recurrence for question answering (Adding Recurrence ..., 5.4), in NumPy.

The paper is Adding Recurrence to Pretrained Transformers. An encoder reads at most 512 tokens. A
question and what it asks about may have more: each window begins with the question and goes on with
the next part of the text. The final layer's outputs over a window are averaged, a small network
makes one vector of the average, and layer 2 of the next window attends to that vector beside its
own tokens. The answer is a span of the text, yes, or no. Every token has a logit to be the span's
start and one to be its end. Which of the three it is, is read from the [CLS] token's outputs, of
which the maximum over all windows is taken.
`forward` maps (tokens, state) to (outputs, next state), `backward` the gradient of the next state
to that of the incoming one.

The file is in the order of reading: what is new, then the encoder, `forward`. The operations that
every Transformer has are those of pretrained_recurrence.py, the same paper's.
Decisions Q1 to Q9: docs/decisions/pretrained_recurrence.md.

Glossary: code symbol, meaning, paper symbol, shape
    tokens      token ids of one window: [CLS] question [SEP] text [SEP]             (B, N)
    readable    true except on padding; all false once a lane's example has ended    (B, N)
    x           a layer's input, then its output                       h^(l)         (B, N, D)
    pooled      the mean of the final layer's readable outputs         z             (B, D)
    inserted    what the network makes of pooled                       h_prev        (B, 1, D)
    first       the maximum over windows of the [CLS] outputs                        (B, D)
    present     whether a window came before                                         (B,)
    spans       logits to be the span's start, and its end                           (B, 2, K N)
    kinds       logits of span, yes and no                                           (B, 3)

B batch (lanes, one example each), N tokens in a window, K windows, D width, H heads, E head width,
F feed-forward width, V vocabulary, L layers. `grads` and `d..._params` are gradients of parameters,
{name: array}.
"""

import math
import sys
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from reference.memorizing import check_gradients
from reference.pretrained_recurrence import (
    DEVIATION,
    NORM_EPSILON,  # noqa: F401  of accelerated/lab/systems/roberta.py
    add_into,
    affine_backward,
    affine_forward,
    cross_entropy_backward,
    cross_entropy_forward,
    dropout,
    init_affine,
    init_gpt2,
    init_norm,
    layer_norm_backward,
    layer_norm_forward,
    masked_attention_backward,
    masked_attention_forward,
    merge_heads,
    prefixed,
    projections_backward,
    projections_forward,
    split_heads,
    subtree,
)

# ----------------------------------------------------------------------------
# configuration: sizes of the encoder, and what a window hands to the next one; read it first
KINDS = ("span", "yes", "no")


@dataclass(frozen=True)
class Config:
    """Sizes of the encoder; impossible combinations raise ValueError naming the field.

    Fields:
        vocabulary: V, number of token ids
        width: D, model width, a multiple of heads
        layers: L, number of layers
        heads: H, attention heads
        feed_forward: F, width of the feed-forward hidden layer
        segment: N, tokens in a window, and rows of the position embedding
        recurrent: carry a vector from window to window; without it windows are disjoint
        insertion_layer: the layer at which the vector is inserted, counted from 1
        module_layers: hidden layers of the network that makes the vector
        module_width: width of that network's hidden layers
        dropout: dropout rate in training, 0 to below 1
    """

    vocabulary: int = 50265
    width: int = 768
    layers: int = 12
    heads: int = 12
    feed_forward: int = 3072
    segment: int = 512
    recurrent: bool = True
    insertion_layer: int = 2
    module_layers: int = 2
    module_width: int = 768
    dropout: float = 0.1

    def __post_init__(self):
        check_config(self)


class State(NamedTuple):
    """What a window hands to the next one; axis 0 of every field is the lane."""

    pooled: np.ndarray  # (B, D)
    first: np.ndarray  # (B, D)
    present: np.ndarray  # (B,) bool, false before an example's first window


# ----------------------------------------------------------------------------
# the method: a window's outputs become one vector, and the next window attends to it; start here
def next_state_forward(state, x, readable):
    """The State after outputs x (B, N, D) of a window; an example that has ended keeps its own."""
    reads = readable[:, 0]  # (B,), its [CLS]
    pooled, mean_cache = mean_of_rows_forward(x, readable)
    largest, larger_cache = larger_forward(state.first, x[:, 0])
    # "max pool the embedding of the [CLS] token across windows"
    first = np.where(state.present[:, None], largest, x[:, 0])
    new = State(
        pooled=np.where(reads[:, None], pooled, state.pooled),
        first=np.where(reads[:, None], first, state.first),
        present=state.present | reads,
    )
    return new, (reads, state.present, mean_cache, larger_cache)


# z' = z or mean(x), f' = f or x_0 or max(f, x_0): each gradient goes where the value came from
def next_state_backward(dnext, cache):
    """Gradients of the incoming state and of x (B, N, D)."""
    reads, present, mean_cache, larger_cache = cache
    dpooled = np.where(reads[:, None], dnext.pooled, 0)
    dfirst = np.where(reads[:, None], dnext.first, 0)
    dx = mean_of_rows_backward(dpooled, mean_cache)
    dlargest = np.where(present[:, None], dfirst, 0)
    dold_first, dnew_first = larger_backward(dlargest, larger_cache)
    dx[:, 0] += np.where(present[:, None], dnew_first, dfirst)
    dstate = State(
        pooled=dnext.pooled - dpooled,
        first=dnext.first - dfirst + dold_first,
        present=dnext.present,
    )
    return dstate, dx


def mean_of_rows_forward(x, counted):
    """The mean of x (B, N, D) over the rows that are counted (B, N); zero if there are none."""
    count = np.maximum(counted.sum(1, keepdims=True), 1)  # (B, 1)
    shares = counted / count  # (B, N)
    return (x * shares[..., None]).sum(1), shares


# z = Σ s_i x_i: dx_i = s_i dz
def mean_of_rows_backward(dmean, shares):
    return shares[..., None] * dmean[:, None]


def larger_forward(a, b):
    """The larger of two arrays, entry by entry; a's if they are equal."""
    return np.maximum(a, b), a >= b


# y = max(a, b): da = dy if a >= b, db = dy elsewhere
def larger_backward(dout, of_a):
    return dout * of_a, dout * ~of_a


def vector_forward(p, config, pooled):
    """h_prev (B, 1, D) of z (B, D), by a small network (5.4; decision Q3: two hidden layers)."""
    hidden = pooled
    caches = []
    for layer in range(1, config.module_layers + 1):
        before, affine_cache = affine_forward(p, f"hidden_{layer}", hidden)
        hidden, gelu_cache = exact_gelu_forward(before)
        caches.append((affine_cache, gelu_cache))
    inserted, output_cache = affine_forward(p, "inserted", hidden)
    return inserted[:, None], (caches, output_cache)


def vector_backward(dinserted, cache):
    """Gradients of z and of the parameters."""
    caches, output_cache = cache
    dhidden, grads = affine_backward(dinserted[:, 0], output_cache)
    for affine_cache, gelu_cache in reversed(caches):
        dbefore = exact_gelu_backward(dhidden, gelu_cache)
        dhidden, dlayer_params = affine_backward(dbefore, affine_cache)
        grads |= dlayer_params
    return dhidden, grads


def post_norm_attention_forward(p, config, x, inserted, mask, rng):
    """norm(x (B, N, D) plus what its tokens find in inserted (B, S, D), if any, and in x)."""
    source = x if inserted is None else np.concatenate([inserted, x], axis=1)  # (B, S + N, D)
    query, key, value, projections_cache = projections_forward(p, config.heads, x, source)
    out, attention_cache = masked_attention_forward(query, key, value, mask, config.dropout, rng)
    out, output_cache = affine_forward(p, "output", merge_heads(out))
    out, dropout_mask = dropout(out, config.dropout, rng)
    out, norm_cache = layer_norm_forward(p, "norm", x + out)  # RoBERTa's norm comes after the sum
    return out, (projections_cache, attention_cache, output_cache, dropout_mask, norm_cache)


# y = norm(x + W_o attention(x, [h | x])):
# dsum = norm'(dy), dx = dsum + dq W_q + dsource at x's positions, dh = dsource at h's
def post_norm_attention_backward(config, dy, cache):
    """Gradients of x, of inserted (B, S, D) and of the parameters."""
    projections_cache, attention_cache, output_cache, dropout_mask, norm_cache = cache
    dsum, grads = layer_norm_backward(dy, norm_cache)
    dout, doutput_params = affine_backward(dsum * dropout_mask, output_cache)
    dout = split_heads(dout, config.heads)
    dquery, dkey, dvalue = masked_attention_backward(dout, attention_cache)
    dx, dsource, dprojection_params = projections_backward(dquery, dkey, dvalue, projections_cache)
    grads |= doutput_params | dprojection_params
    vectors = dsource.shape[1] - dy.shape[1]  # S, or 0 without
    return dsum + dx + dsource[:, vectors:], dsource[:, :vectors], grads


def window_keys_mask(readable, present, vectors):
    """Which of [inserted | tokens] the tokens see, (B, 1, 1, S + N).

    They see what is readable, and [CLS] in any case, so that each sees a key.
    """
    seen = readable.copy()
    seen[:, 0] = True
    sees_inserted = np.broadcast_to(present[:, None], (len(present), vectors))
    mask = np.concatenate([sees_inserted, seen], axis=1)  # (B, S + N)
    return mask[:, None, None]


# ----------------------------------------------------------------------------
# the model: RoBERTa's encoder, and the heads that choose an answer
def initial_state(params, config, batch):
    """What an example begins with: nothing read."""
    pooled = np.zeros((batch, config.width))
    first = np.zeros((batch, config.width))
    return State(pooled, first, present=np.zeros(batch, bool))


def forward(params, config, tokens, readable, state, rng=None):
    """Read one window: outputs of the final layer (B, N, D), next state, cache for `backward`.

    tokens and readable (B, N), N <= config.segment; state from `initial_state` or from the previous
    window; rng turns dropout on. Raises ValueError for another N.
    """
    length = tokens.shape[1]
    if not 1 <= length <= config.segment:
        raise ValueError(
            f"a window of {length} tokens; it must have 1 to {config.segment}, the segment"
        )
    inserted = None
    module_cache = None
    if config.recurrent:
        inserted, module_cache = vector_forward(subtree(params, "module."), config, state.pooled)

    x = params["embedding"][tokens] + params["positions"][:length]
    x, norm_cache = layer_norm_forward(params, "embedding_norm", x)
    x, dropout_mask = dropout(x, config.dropout, rng)
    layer_caches = []
    for layer in range(1, config.layers + 1):
        p = subtree(params, f"layers.{layer - 1}.")
        own = inserted if layer == config.insertion_layer else None
        mask = window_keys_mask(readable, state.present, 0 if own is None else 1)
        x, cache = layer_forward(p, config, x, own, mask, rng)
        layer_caches.append(cache)
    next_state, state_cache = next_state_forward(state, x, readable)
    cache = (tokens, module_cache, norm_cache, dropout_mask, layer_caches, state_cache)
    return x, next_state, cache


def backward(params, config, cache, doutputs, dnext_state):
    """Gradients of the parameters and of the incoming state.

    They come from those of the outputs (B, N, D) and of the next state.
    """
    tokens, module_cache, norm_cache, dropout_mask, layer_caches, state_cache = cache
    dstate, dx = next_state_backward(dnext_state, state_cache)
    dx = dx + doutputs
    grads = {}
    for layer in reversed(range(config.layers)):
        dx, dinserted, dlayer_params = layer_backward(config, dx, layer_caches[layer])
        grads |= prefixed(f"layers.{layer}.", dlayer_params)
        if dinserted.shape[1]:  # the layer that saw the vector
            dpooled, dmodule_params = vector_backward(dinserted, module_cache)
            dstate = dstate._replace(pooled=dstate.pooled + dpooled)
            grads |= prefixed("module.", dmodule_params)
    dx, dnorm_params = layer_norm_backward(dx * dropout_mask, norm_cache)
    grads |= dnorm_params

    grads["embedding"] = np.zeros_like(params["embedding"])
    np.add.at(grads["embedding"], tokens, dx)
    grads["positions"] = np.zeros_like(params["positions"])
    grads["positions"][: tokens.shape[1]] = dx.sum(0)
    zeros = {name: np.zeros_like(value) for name, value in params.items()}
    return zeros | grads, dstate


def layer_forward(p, config, x, inserted, mask, rng):
    """The layer's output (B, N, D): attention, then feed-forward, each with its norm behind."""
    x, attention_cache = post_norm_attention_forward(p, config, x, inserted, mask, rng)
    x, mlp_cache = post_norm_mlp_forward(p, config, x, rng)
    return x, (attention_cache, mlp_cache)


def layer_backward(config, dx, cache):
    """Gradients of x, of inserted and of the parameters."""
    attention_cache, mlp_cache = cache
    dx, grads = post_norm_mlp_backward(dx, mlp_cache)
    dx, dinserted, dattention_params = post_norm_attention_backward(config, dx, attention_cache)
    return dx, dinserted, grads | dattention_params


def post_norm_mlp_forward(p, config, x, rng):
    """norm(x + dropout(W_2 gelu(W_1 x + b_1) + b_2))"""
    before, hidden_cache = affine_forward(p, "mlp_hidden", x)
    hidden, gelu_cache = exact_gelu_forward(before)  # (B, N, F)
    out, output_cache = affine_forward(p, "mlp_output", hidden)
    out, dropout_mask = dropout(out, config.dropout, rng)
    out, norm_cache = layer_norm_forward(p, "mlp_norm", x + out)
    return out, (hidden_cache, gelu_cache, output_cache, dropout_mask, norm_cache)


def post_norm_mlp_backward(dy, cache):
    """Gradients of x and of the parameters."""
    hidden_cache, gelu_cache, output_cache, dropout_mask, norm_cache = cache
    dsum, dnorm_params = layer_norm_backward(dy, norm_cache)
    dhidden, grads = affine_backward(dsum * dropout_mask, output_cache)
    dbefore = exact_gelu_backward(dhidden, gelu_cache)
    dx, dhidden_params = affine_backward(dbefore, hidden_cache)
    grads |= dhidden_params | dnorm_params
    return dsum + dx, grads


def exact_gelu_forward(x):
    """x Phi(x), Phi the normal distribution's cumulative function.

    It is RoBERTa's GELU, and not GPT-2's approximation.
    """
    erf = np.vectorize(math.erf, otypes=[float])
    phi = 0.5 * (1 + erf(x / math.sqrt(2)))
    return x * phi, (x, phi)


# y = x Phi(x): dx = dy (Phi(x) + x phi(x)), phi the normal density
def exact_gelu_backward(dy, cache):
    x, phi = cache
    return dy * (phi + x * np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi))


def answer_forward(p, outputs, texts, first):
    """spans (B, 2, K N), -inf outside of the text, and kinds (B, 3).

    outputs are the K windows' (B, N, D); texts their masks (B, N), true on tokens of the text;
    first the last state's (B, D).
    """
    lengths = [x.shape[1] for x in outputs]
    rows = np.concatenate(outputs, axis=1)  # (B, K N, D)
    text = np.concatenate(texts, axis=1)  # (B, K N)
    logits, span_cache = affine_forward(p, "span", rows)  # (B, K N, 2)
    spans = np.where(text[:, None], logits.swapaxes(1, 2), -np.inf)
    kinds, kind_cache = affine_forward(p, "kind", first)
    return spans, kinds, (span_cache, kind_cache, lengths)


# spans = W_s h, kinds = W_k f + b:
# dh = W_s^T dspans, df = W_k^T dkinds; zero where spans are -inf, because dspans is
def answer_backward(dspans, dkinds, cache):
    """Gradients of outputs, of first and of the parameters."""
    span_cache, kind_cache, lengths = cache
    drows, grads = affine_backward(dspans.swapaxes(1, 2), span_cache)
    dfirst, dkind_params = affine_backward(dkinds, kind_cache)
    grads |= dkind_params
    ends = np.cumsum(lengths)
    doutputs = np.split(drows, ends[:-1], axis=1)
    return doutputs, dfirst, grads


class Answer(NamedTuple):
    """What is asked for.

    start and end count the tokens of all windows one after another, and are read only of spans.
    """

    kind: np.ndarray  # (B,), an index of KINDS
    start: np.ndarray  # (B,)
    end: np.ndarray  # (B,)


def answer_loss_forward(spans, kinds, answer):
    """-log p of the kind and, if it is a span, half of those of start and end, summed over lanes.

    Start and end are chosen among all text of all windows.
    """
    scored = np.ones((len(kinds), 1), bool)
    of_kind, kind_cache = cross_entropy_forward(kinds[:, None], answer.kind[:, None], scored)
    is_span = answer.kind == KINDS.index("span")
    spans_asked = np.repeat(is_span[:, None], 2, axis=1)  # (B, 2)
    places = np.stack([answer.start, answer.end], axis=1)
    not_hidden = spans.argmax(-1)  # of a lane without a span, any place that is not -inf
    places = np.where(spans_asked, places, not_hidden)
    of_places, place_cache = cross_entropy_forward(spans, places, spans_asked)
    return of_kind + of_places / 2, (kind_cache, place_cache)


# loss = kind + (start + end) / 2
def answer_loss_backward(dloss, cache):
    """Gradients of spans and of kinds."""
    kind_cache, place_cache = cache
    dspans = cross_entropy_backward(dloss / 2, place_cache)
    dkinds = cross_entropy_backward(dloss, kind_cache)[:, 0]
    return dspans, dkinds


# ----------------------------------------------------------------------------
# through segments: an example's loss, back-propagated through all of its windows
def loss_and_gradients(params, config, windows, answer, rng=None):
    """Mean loss of a batch of examples, and its gradients through all windows.

    windows are [(tokens, readable, text)].
    """
    batch = len(answer.kind)
    state = initial_state(params, config, batch)
    outputs = []
    caches = []
    for tokens, readable, _ in windows:
        x, state, cache = forward(params, config, tokens, readable, state, rng)
        outputs.append(x)
        caches.append(cache)
    texts = [text for _, _, text in windows]
    heads = subtree(params, "answer.")
    spans, kinds, answer_cache = answer_forward(heads, outputs, texts, state.first)
    loss, loss_cache = answer_loss_forward(spans, kinds, answer)

    dspans, dkinds = answer_loss_backward(1 / batch, loss_cache)
    doutputs, dfirst, dheads = answer_backward(dspans, dkinds, answer_cache)
    grads = prefixed("answer.", dheads)
    dstate = State(pooled=np.zeros_like(dfirst), first=dfirst, present=state.present)
    for dx, cache in zip(reversed(doutputs), reversed(caches), strict=True):
        dparams, dstate = backward(params, config, cache, dx, dstate)
        add_into(grads, dparams)
    return loss / batch, grads


# ----------------------------------------------------------------------------
# demonstration: gradients by finite differences, then a question that needs two windows
def two_windows(rng, batch):
    """Examples whose first window says which of two tokens of the second one is the answer.

    Tokens: 0 begins a window, 2 is of the question or says nothing, 3 and 4 are the clues, 5 and 6
    the two that are chosen from.
    """
    clue, swapped = rng.integers(2, size=(2, batch))
    first = np.tile([0, 2, 2, 2, 2], (batch, 1))
    first[:, 2] = 3 + clue
    second = np.tile([0, 2, 2, 5, 6], (batch, 1))
    second[swapped == 1, 3:] = [6, 5]

    readable = np.ones((batch, 5), bool)
    text = np.tile([False, False, True, True, True], (batch, 1))
    at = 8 + (clue != swapped)  # token 3 or 4 of the second window
    answer = Answer(kind=np.zeros(batch, int), start=at, end=at)
    return [(first, readable, text), (second, readable, text)], answer


def demonstrate():
    """Check gradients against finite differences, then fit examples with and without the vector."""
    rng = np.random.default_rng(0)
    config = Config(
        vocabulary=7,
        width=12,
        layers=2,
        heads=2,
        feed_forward=16,
        segment=5,
        module_width=8,
        dropout=0.0,
    )
    params = init_params(config, rng)
    params = {name: a + 0.3 * rng.standard_normal(a.shape) for name, a in params.items()}
    print("RoBERTa with recurrence: examples of two windows, back-propagated as one.")
    windows, answer = two_windows(rng, 3)

    def loss(moved):
        return loss_and_gradients(moved, config, windows, answer)[0]

    _, grads = loss_and_gradients(params, config, windows, answer)
    check_gradients(loss, params, grads, rng)

    windows, answer = two_windows(rng, 16)
    clue = "A clue in the first window says which of two tokens of the second one is the answer"
    print(f"{clue}; a guess costs ln 2 = 0.693:")
    nats = fit_answers(params, config, windows, answer)
    print(f"  {'one vector from window to window':<34}{nats:.3f} nats after 200 steps")
    without = {name: a for name, a in params.items() if not name.startswith("module.")}
    nats = fit_answers(without, replace(config, recurrent=False), windows, answer)
    print(f"  {'disjoint windows':<34}{nats:.3f} nats after 200 steps")


def fit_answers(params, config, windows, answer):
    """The loss of the last of 200 steps by the signs of the gradients."""
    loss = np.inf
    for step in range(1, 201):
        loss, grads = loss_and_gradients(params, config, windows, answer)
        rate = 0.02 * 0.98**step
        params = {name: params[name] - rate * np.sign(grad) for name, grad in grads.items()}
    return loss


# ----------------------------------------------------------------------------
# starting values: every parameter by its name; a first reading skips them
def init_network(config, rng, outputs):
    """The network that makes so many outputs of z."""
    p = {}
    fan_in = config.width
    for layer in range(1, config.module_layers + 1):
        p |= init_affine(rng, f"hidden_{layer}", config.module_width, fan_in)
        fan_in = config.module_width
    return p | init_affine(rng, "inserted", outputs, fan_in)


def init_params(config, rng):
    """All parameters as {dotted name: float64 array}; matrices are (out, in)."""
    d = config.width
    params = {}
    params["embedding"] = rng.normal(0, DEVIATION, (config.vocabulary, d))
    params["positions"] = rng.normal(0, DEVIATION, (config.segment, d))
    params |= init_norm("embedding_norm", d)
    for layer in range(config.layers):
        params |= prefixed(f"layers.{layer}.", init_encoder_layer(config, rng))
    params |= prefixed("masked.", init_gpt2(rng, "hidden", d, d))
    params |= init_norm("masked.norm", d)
    params["masked.bias"] = np.zeros(config.vocabulary)
    params["answer.span"] = rng.normal(0, DEVIATION, (2, d))  # softmax would cancel a bias
    params |= prefixed("answer.", init_gpt2(rng, "kind", len(KINDS), d))
    if config.recurrent:
        params |= prefixed("module.", init_network(config, rng, config.width))
    return params


def init_encoder_layer(config, rng):
    """Parameters of a layer; every matrix begins at N(0, 0.02^2), every bias at zero."""
    d = config.width
    p = init_norm("norm", d) | init_norm("mlp_norm", d)
    for name in ("query", "key", "value", "output"):
        p |= init_gpt2(rng, name, d, d)
    p |= init_gpt2(rng, "mlp_hidden", config.feed_forward, d)
    p |= init_gpt2(rng, "mlp_output", d, config.feed_forward)
    return p


# ----------------------------------------------------------------------------
# checks: what a Config must be; a first reading skips them
def check_config(config):
    """Raise ValueError, naming the field, if the model cannot work."""
    for name, kind in Config.__annotations__.items():
        value = getattr(config, name)
        least = 0 if name == "module_layers" else 1
        if kind is int and value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    if config.width % config.heads:
        nearest = max(1, round(config.width / config.heads)) * config.heads
        raise ValueError(
            f"width {config.width} is not a multiple of heads {config.heads}; "
            f"the nearest is {nearest}"
        )
    if config.insertion_layer > config.layers:
        raise ValueError(
            f"insertion_layer is {config.insertion_layer}; it must lie in 1..{config.layers}"
        )
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout is {config.dropout}; it must be at least 0 and below 1")


if __name__ == "__main__":
    if sys.argv[1:]:
        print("reference.roberta takes no options; leave them out", file=sys.stderr)
        sys.exit(2)
    demonstrate()
