"""Named data sets: the papers' own, and what the package datasets opens; corpus.py uses them."""

import re
import zipfile
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from accelerated.data.config import HUB, ON_THE_HUB
from accelerated.data.sources import SPLIT_NAMES, Source, Text, with_missing_splits
from accelerated.data.windows import SPLITS
from accelerated.program.errors import InputError
from accelerated.program.files import file_checksum

ENWIK8 = "https://mattmahoney.net/dc/enwik8.zip"
ENWIK8_SHA256 = "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"
ENWIK8_ENDS = (0, 90_000_000, 95_000_000, 100_000_000)  # bytes, of the papers' splits

# Of an article: a section has several =, and " = 5 = " is a formula
HEADING = re.compile(rb" = (?!=)(?=.*[A-Za-z]).* = \n")


def opened_by_datasets(data: str, column: str) -> dict[str, Any]:
    """Return {split: table with that column of text} of what the package datasets opens.

    That is a set of ON_THE_HUB, hf:OWNER/NAME, hf:OWNER/NAME:CONFIG, or hf:FOLDER. The package
    keeps what it has opened in HF_HOME. Raises InputError if there is no such column or no split
    train.
    """
    import datasets

    name = ON_THE_HUB.get(data, data.removeprefix(HUB))
    path, _, config = name.partition(":")
    # Its errors are reported below, in one line
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        opened = datasets.load_dataset(path, config or None)
    except Exception as error:  # the library raises many types
        reason = error.__cause__ or error
        words = f"datasets cannot open it ({str(reason) or type(reason).__name__})"
        raise InputError(f"--data {data}: {words}; check name, files and network") from None

    assert isinstance(opened, datasets.DatasetDict)
    tables = {}
    for name, table in opened.items():
        if name in SPLIT_NAMES:
            tables[SPLIT_NAMES[str(name)]] = table
    if "train" not in tables:
        found = ", ".join(map(str, opened))
        raise InputError(f"--data {data} has no split train, only {found}; give a set that has one")
    for table in tables.values():
        if getattr(table.features.get(column), "dtype", None) not in ("string", "large_string"):
            found = ", ".join(table.column_names)
            raise InputError(
                f"--data {data} needs a string column `{column}`, has {found}; "
                "name the one that holds the text by --text-column"
            )
    return tables


def table_source(data: str, column: str = "text") -> Source:
    """The Source of what the package datasets opens: each row's `column` is a document.

    WikiText's lines are joined to articles.
    """
    tables = opened_by_datasets(data, column)

    def texts(split: str) -> Iterator[Text]:
        cells = tables[split].select_columns(column)
        rows = ((row[column] or "").encode(errors="replace") for row in cells)
        documents = articles(rows) if data.startswith("wikitext") else rows
        for number, document in enumerate(documents, start=1):
            yield Text(f"{split}:{number}", (partial(bytes, document),))

    files = []
    for table in tables.values():
        files += [Path(file["filename"]) for file in table.cache_files]
    given = {split: partial(texts, split) for split in tables}
    name = f"{data} {column}"  # of the cache
    return Source(name, tuple(files), lambda: with_missing_splits(given))


def articles(rows: Iterable[bytes]) -> Iterator[bytes]:
    """The articles of WikiText's lines: each begins at a heading between two blank lines.

    The first begins at the file's beginning.
    """
    lines = [row or b" \n" for row in rows]  # the hub has an empty row for a blank line
    # is_blank[i + 1] is of line i; the file's beginning counts as blank
    is_blank = [True, *(not line.strip() for line in lines), False]
    headings = []
    for number, line in enumerate(lines):
        stands_alone = is_blank[number] and is_blank[number + 2]
        if stands_alone and HEADING.fullmatch(line):
            headings.append(number)
    for start, stop in pairwise([0, *headings[1:], len(lines)]):
        if stop > 0:
            yield b"".join(lines[start:stop])


def enwik8(data_dir: Path) -> Source:
    """The first 10^8 bytes of a Wikipedia dump, split at 90 and 95 million bytes.

    Raises InputError, which says where to get it, if it is not in data_dir.
    """
    path = data_dir / "enwik8" / "enwik8.zip"
    if not path.is_file() or file_checksum(path) != ENWIK8_SHA256:
        raise InputError(f"put {ENWIK8} (sha256 {ENWIK8_SHA256}) at {path}")

    def part(start: int, stop: int) -> bytes:
        return zipfile.ZipFile(path).read("enwik8")[start:stop]

    texts = []
    for split, (start, stop) in zip(SPLITS, pairwise(ENWIK8_ENDS), strict=True):
        texts.append((split, Text("enwik8", (partial(part, start, stop),))))
    return Source("enwik8", (path,), lambda: texts)
