"""Which loss trains what, as the papers have it: the table that test_reach.py measures and that
trust.py puts into docs/trust.md.

A loss is read in one pass over a segment; the subject "LOSS WHEN VARIANT" names it. LOSS is `own`
(the segment's own tokens), `infilling` or `recall` (Memformer's other tasks), `compression` (the
compression's own loss), or one of these after `next-`: the next segment's loss, which arrives
through the state alone. WHEN is `first` or `later`: the segment's place in its document.
"""

import re

ALL = "●"
PART = "◐"
ZERO = "0"
SAME = " "  # of a group's parameters; SAME leaves what an earlier row says
COMMON = {
    "embedding": "embedding",
    "attention": None,
    "positions": "position_bias",
    "norms": "norm",
    "MLP": "mlp_(?!norm)",
}
# {paper: {group of parameters: pattern of their names}}; a name is in the last that is found in it,
# or else in None's
GROUPS = {
    "compressive": COMMON
    | {
        "embedding": r"embedding|tails\.|clusters",
        "positions": "distance_|content_bias|query_bias|positions",
    }
    | {
        "compression": r"compression\.",
        "decoder": r"compression\.decoder",
        "key biases": "key_bias",
    },
    "block_recurrent": COMMON
    | {
        "read": "cross_",
        "states": r"\.state\.",
        "IDs": r"state\.ids",
        "gates": r"state\.(attention_gate|mlp)",
    }
    | {"first": r"state\.initial"},
    "memformer": {
        "embedding": "embedding",
        "encoder": r"encoder\.",
        "read": r"\.read\.|memory_norm",
        "writer": r"writer\.",
    }
    | {"decoder": None, "first": "initial_memory", "key biases": "key_bias"},
    "memorizing": COMMON | {"gate": "memory_gate"},
    "pretrained_recurrence": COMMON
    | {
        "positions": "positions",
        "pooling": r"module\.(layer_scores|fixed_key)",
        "network": r"module\.(?!layer_scores|fixed_key)",
    }
    | {"key biases": "key_bias"},
}
# {paper: [(what a page calls it, pattern of subjects, cells)]}; a later row changes the cells of
# earlier ones
ROWS = {
    "compressive": [
        ("the segment's own tokens", "^own", "●●●●●000"),
        ("the compression's loss", "^compression", "00000000"),
        (
            "... once evicted rows are not zeros",
            "^compression (later .*(attention_|auto_|one-)|.*memory$)",
            "     ●● ",
        ),
        ("the next segment's tokens", "^next-own", "00000000"),
        (
            "... under `bptt`, once evicted rows are not zeros",
            "^next-own (later .*(bptt|holds)|.*memory-bptt$)",
            "     ●  ",
        ),
        ("the next segment's compression loss", "^next-compression", "00000000"),
    ],
    "block_recurrent": [
        ("the segment's own tokens", "^own", "●●●●●●●●●0"),
        ("... of a document's first segment", "^own first", "         ●"),
        ("... if a segment is one block", "^own .*xl-recurrent", "      ◐ 0 "),
        ("the next segment's tokens", "^next-own", "●◐◐◐◐●●●●0"),
        ("... to a document's first segment", "^next-own first", "         ●"),
        (
            "... under feedback or with two recurrent layers",
            "^next-own .*(feedback|two-|adjacent-)",
            "     ◐    ",
        ),
        (
            "... if the last layer is the recurrent one",
            "^next-own .*(last-|one-layer)",
            "     0    ",
        ),
        ("... if it is the only one", "^next-own .*one-layer", "  0 00    "),
    ],
    "memformer": [
        ("the segment's own tokens (continuation)", "^own", "●●●0●00"),
        ("infilling", "^infilling", "●●●0●00"),
        ("recall", "^recall", "●●●0●00"),
        ("... any of them in a document's first segment", "^[a-z]+ first", "     ● "),
        ("... if a segment is one token", "^[a-z]+ .*one-token", " ◐  ◐  "),
        ("the next segment's tokens", "^next-own", "●●●●000"),
        ("the next segment's infilling", "^next-infilling", "●●●●000"),
        ("the next segment's recall", "^next-recall", "●●●●000"),
        ("... any of them to a document's first segment", "^next-.* first", "     ● "),
        ("... if a segment is one token", "^next-.*one-token", " ◐     "),
        ("... in the decoder-only model", "^next-.*decoder-only", "    ◐  "),
        ("all of them, if there is one slot", "one-slot", "  ◐    "),
    ],
    "memorizing": [
        ("the segment's own tokens", "^own", "●●●●●●"),
        ("the next segment's tokens", "^next-own", "●◐◐◐◐●"),
        ("... if the last layer looks up", "^next-own .*last-", "     0"),
        ("... if there is one layer", "^next-own .*one-layer", "  0 00"),
    ],
    "pretrained_recurrence": [
        ("the window's own tokens", "^own", "●●●●●0●0"),
        ("... of a document's first window", "^own first", "      0 "),
        ("the next window's tokens", "^next-own", "●●●◐●●●0"),
        ("... to a document's first window", "^next-own first", "      0 "),
        ("... if z is pooled after the norm", "^next-own .*after-the-norm", "   ●    "),
        ("... if there is one layer", "^next-own .*one-layer", "     0  "),
        ("... in plain GPT-2", "^next-own .*plain", "00000   "),
        ("all of them, if a window is one token", "one-token", " ◐      "),
    ],
}


def group_of(paper: str, name: str) -> str:
    """The group of a parameter: the last whose pattern it has, else that without a pattern."""
    found = None
    for group, pattern in GROUPS[paper].items():
        if pattern is None:
            found = found or group
        elif re.search(pattern, name):
            found = group
    return found


def expected_cells(paper: str, subject: str) -> dict[str, str]:
    """{group: ALL, PART or ZERO} of a subject."""
    cells = {}
    for _, pattern, row in ROWS[paper]:
        if not re.search(pattern, subject):
            continue
        for group, cell in zip(GROUPS[paper], row, strict=True):
            if cell != SAME:
                cells[group] = cell
    return cells
