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
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data.windows import Document, cut
from accelerated.evaluation.score import token_nats
from accelerated.pretrained_recurrence import PretrainedRecurrence
from reference import pretrained_recurrence as ref

V = 13  # vocabulary
T = 6  # tokens of a window
SIZES = {
    "vocabulary": V,
    "segment": T,
    "max_positions": 9,
    "layers": 2,
    "width": 8,
    "heads": 4,
    "feed_forward": 7,
    "module_width": 5,
}
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


@given(
    seed=st.integers(0, 2**31),
    lanes=st.integers(1, 3),  # how many documents are read side by side
    overlap=st.integers(0, T - 1),
    vectors=st.integers(0, 1),  # 0 is plain GPT-2
)
def test_losses_are_those_of_each_window_alone(seed, lanes, overlap, vectors):
    """Section 4.2, of three documents of different lengths.

    A window reads the vector that the one before it has left; plain GPT-2 has none.
    """
    config = ref.Config(**SIZES, overlap=overlap, vectors=vectors)
    model = PretrainedRecurrence(config, seed).eval()
    params = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    rng = np.random.default_rng(seed)
    texts = [rng.integers(V, size=length) for length in rng.integers(2, 3 * T, size=3)]
    documents = []
    for text in texts:
        every_token = np.ones(len(text) - 1, bool)
        documents.append(Document("", text[:-1], text[1:], every_token))

    for number, found in enumerate(token_nats(model, documents, lanes)):
        expected = nats_by_windows(params, config, texts[number])
        assert len(found) == len(expected), (
            f"document {number} has {len(expected)} tokens to predict, and {len(found)} losses"
        )
        apart = np.abs(found - expected)
        at = apart.argmax()
        assert apart[at] <= TOLERANCE * (1 + expected[at]), (
            f"document {number}: the loss of token {at + 1} is {found[at]:.9g} nats, and "
            f"{expected[at]:.9g} if its window is read by itself"
        )


def nats_by_windows(params, config, text):
    """The loss in nats of each token after the first, by the reference, a window at a time."""
    state = ref.initial_state(params, config, 1)
    nats = []
    start = 0
    while len(nats) < len(text) - 1:
        stop = min(start + T, len(text) - 1)  # the last token is predicted and never read
        logits, state, _ = ref.forward(params, config, text[None, start:stop], state)
        for token in range(len(nats) + 1, stop + 1):  # those that no window before has predicted
            row = logits[0, token - 1 - start]
            nats.append(np.log(np.exp(row).sum()) - row[text[token]])
        start += T - config.overlap
    return np.array(nats)
