"""Overlapped evaluation scores every token once.

Adding Recurrence to Pretrained Transformers, sections 3.3 and 4.2, Figure 3. A window reads T
tokens. The next one begins T - o tokens later, and so reads the last o of them again. Those have
been predicted already: they are read as context, and not scored again. With T = 4 and o = 2:

    token     0  1  2  3  4  5  6  7
    window 0  r  r  r  r                  it predicts tokens 1, 2, 3 and 4
    window 1        r  r  r  r            it predicts tokens 5 and 6
    window 2              r  r  r         it predicts token 7

So o = 0 gives windows that share nothing, and o = T - 1 a new window for each token. The first test
asks for each token alone which window predicts it. The second compares losses with calls of the
NumPy reference, a window at a time: of plain GPT-2, whose windows know nothing of each other, and
of the model that carries a vector from window to window.
"""

from collections import Counter

import numpy as np
from hypothesis import given, note
from hypothesis import strategies as st

from accelerated.data.windows import Document, cut
from accelerated.evaluation.score import token_nats
from reference import pretrained_recurrence as ref
from tests.conftest import examples
from tests.start_here.strategies import settings_of

TOLERANCE = 1e-10  # float64


def window_of(token, size, overlap):
    """Where the window begins that scores a token: the first that reads the token before it."""
    start = 0
    while start + size <= token - 1:
        start += size - overlap
    return start


@given(length=st.integers(0, 40), size=st.integers(1, 12), data=st.data())
def test_every_token_after_the_first_is_scored_once_and_in_order(length, size, data):
    """Figure 3, of the windows in accelerated/data and of the reference's."""
    overlap = data.draw(st.integers(0, size - 1), "overlap")
    # (token, where the window begins that scores it)
    expected = [(token, window_of(token, size, overlap)) for token in range(1, length)]

    found = []
    for window in cut(length, size, overlap):
        tokens = range(window.first, window.stop + 1)
        found += [(token, window.start) for token in tokens]
    check_scored("accelerated/data/windows.py", found, expected)

    found = []
    config = ref.Config(segment=size, overlap=overlap)
    document = np.arange(length)[None]  # a token's id is its place
    for window in ref.windows_of(config, document):
        assert window.scored.any(), "the reference reads a window of which it scores nothing"
        found += [(token, window.tokens[0, 0]) for token in window.targets[window.scored]]
    check_scored("the reference", found, expected)

    for token, start in expected:
        context = token - start  # tokens that the prediction sees
        assert start == 0 or overlap < context <= size, (
            f"token {token} is predicted from {context} tokens; only a document's first window may "
            f"give it no more than the overlap, {overlap}"
        )


def check_scored(who, found, expected):
    """Fail, naming the token, unless each is scored once, by the expected window, in order."""
    times = Counter(token for token, _ in found)
    for token, start in expected:
        assert times[token] == 1, (
            f"{who} scores token {token} {times[token]} times, so the sum of all losses is not the "
            "document's"
        )
        assert (token, start) in found, (
            f"{who} does not score token {token} in the window that begins at {start}, so it is "
            "predicted from another context"
        )
    assert found == expected, f"{who} scores other tokens besides, or in another order: {found}"


@examples(10)
@given(data=st.data())
def test_losses_are_those_of_each_window_alone(data):
    """Section 4.2, of three documents of different lengths, of which not every token counts.

    A window reads the vector that the one before it has left; plain GPT-2 has none. The length of a
    window, the overlap, the pooling and the layers that read the vectors are drawn.
    """
    setting = data.draw(settings_of("pretrained_recurrence"))
    lanes = data.draw(st.integers(1, 3), label="documents side by side")
    note(f"{setting.config}")
    config = setting.config
    lengths = setting.rng.integers(2, 3 * config.segment + 2, size=3)
    texts = [setting.rng.integers(config.vocabulary, size=length) for length in lengths]
    counts = [setting.rng.random(length - 1) < 0.8 for length in lengths]
    documents = []
    for text, scored in zip(texts, counts, strict=True):
        documents.append(Document("", text[:-1], text[1:], scored))

    for number, found in enumerate(token_nats(setting.model.eval(), documents, lanes)):
        expected = nats_by_windows(setting.params, config, texts[number])
        assert len(found) == len(expected), (
            f"document {number} has {len(expected)} tokens to predict, and {len(found)} losses"
        )
        for place, counts_here in enumerate(counts[number]):
            right = expected[place] if counts_here else np.nan  # a token that does not count
            apart = abs(found[place] - right)
            is_right = apart <= TOLERANCE * (1 + right) if counts_here else np.isnan(found[place])
            assert is_right, (
                f"document {number}: the loss of token {place + 1} is {found[place]:.9g} nats, and "
                f"{right:.9g} if its window is read by itself: the score would be another text's"
            )


def nats_by_windows(params, config, text):
    """The loss in nats of each token after the first, by the reference, a window at a time."""
    state = ref.initial_state(params, config, 1)
    nats = []
    start = 0
    while len(nats) < len(text) - 1:
        # The last token is predicted and never read
        stop = min(start + config.segment, len(text) - 1)
        logits, state, _ = ref.forward(params, config, text[None, start:stop], state)
        for token in range(len(nats) + 1, stop + 1):  # those that no window before has predicted
            row = logits[0, token - 1 - start]
            nats.append(np.log(np.exp(row).sum()) - row[text[token]])
        start += config.segment - config.overlap
    return np.array(nats)
