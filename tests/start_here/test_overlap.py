"""Overlapped evaluation scores every token once (Adding Recurrence to Pretrained Transformers, sections 3.3 and 4.2, Figure 3).

A window reads T tokens; the next one begins T - o tokens later, and so reads the last o of them again. Those have been predicted
already, with more context: they are read, and not scored again. So o = 0 gives disjoint windows, and o = T - 1 a new window for
each token. The oracle here asks for each token alone which window predicts it. Losses are then compared with calls of the NumPy
reference, a window at a time: plain GPT-2, whose windows know nothing of each other, and with the vector that is carried.
"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data.windows import Document, cut
from accelerated.evaluation.score import token_nats
from accelerated.pretrained_recurrence import PretrainedRecurrence
from reference import pretrained_recurrence as ref

LENGTHS = st.integers(0, 40)
SIZES = {
    "vocabulary": 13,
    "width": 8,
    "layers": 2,
    "heads": 4,
    "feed_forward": 7,
    "max_positions": 9,
    "module_width": 5,
}


def window_of(token, n, size, overlap):
    """Where the window begins that scores this token of n: the first that reads the token before it."""
    start = 0
    while not token - 1 < start + size:
        start += size - overlap
    return start


@given(n=LENGTHS, size=st.integers(1, 12), data=st.data())
def test_every_token_after_the_first_is_scored_once_and_in_order(n, size, data):
    overlap = data.draw(st.integers(0, size - 1))
    windows = cut(n, size, overlap)
    scored = [
        (token, window.start)
        for window in windows
        for token in range(window.first, window.stop + 1)
    ]
    assert scored == [(token, window_of(token, n, size, overlap)) for token in range(1, n)]
    context = [token - start for token, start in scored]  # tokens that the prediction sees
    assert all(
        seen == token or overlap < seen <= size
        for (token, _), seen in zip(scored, context, strict=True)
    )
    of_reference = ref.windows_of(ref.Config(segment=size, overlap=overlap), np.arange(n)[None])
    assert scored == [
        (token, window.tokens[0, 0])
        for window in of_reference
        for token in window.targets[window.scored]
    ]


@given(
    seed=st.integers(0, 2**31),
    lanes=st.integers(1, 3),
    overlap=st.integers(0, 5),
    vectors=st.integers(0, 1),
)
def test_losses_are_those_of_each_window_alone(seed, lanes, overlap, vectors):
    """Three documents of different lengths, T = 6. A window reads the vector that the one before it left, plain GPT-2 none."""
    config, rng = (
        ref.Config(**SIZES, segment=6, overlap=overlap, vectors=vectors),
        np.random.default_rng(seed),
    )
    model = PretrainedRecurrence(config, seed).double().eval()
    params = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    texts = [rng.integers(13, size=n) for n in rng.integers(2, 18, size=3)]
    documents = [Document("", text[:-1], text[1:], np.ones(len(text) - 1, bool)) for text in texts]
    for text, found in zip(texts, token_nats(model, documents, lanes), strict=True):
        state, start, expected = ref.initial_state(params, config, 1), 0, []
        while len(expected) < len(text) - 1:
            read = text[start : min(start + 6, len(text) - 1)]
            logits, state, _ = ref.forward(params, config, read[None], state)
            for token in range(len(expected) + 1, start + len(read) + 1):
                row = logits[0, token - 1 - start]
                expected.append(np.log(np.exp(row).sum()) - row[text[token]])
            start += 6 - overlap
        assert np.allclose(found, expected, rtol=1e-10, atol=1e-10)
