"""The error that a user sees in one line, and how a program ends with it. Any file may raise it."""

import contextlib
import difflib
import importlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from types import ModuleType
from typing import Any, NoReturn

OUT_OF_MEMORY = (
    "out of memory; give a smaller --batch or smaller sizes; "
    "train.py also takes --accumulate and memory_replay"
)
# What torch says of it, in a RuntimeError or another
SAID_WITHOUT_MEMORY = re.compile(
    "out of memory|can't allocate|Storage size calculation overflowed|Overflow when unpacking"
    "|int too big|array is too big|Maximum allowed dimension exceeded"
)


class InputError(Exception):
    """Raised for input that cannot work; says what is wrong, what was expected, what to do."""


def option_name(field: str) -> str:
    """The command-line option that sets a field of the settings, for messages."""
    return "--" + field.replace("_", "-")


def counted(count: int, what: str) -> str:
    """A number of things in words: 1 document, 2,000 documents."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def check_choice(
    name: str, value: str, choices: Collection[str], error: type[Exception] = ValueError
) -> None:
    """Raise an error that names the nearest choice, unless value is one of choices."""
    if value in choices:
        return
    nearest = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.0)[0]
    listed = ", ".join(choices)
    raise error(f"{name} is {value!r}; it must be one of {listed} (nearest: {nearest})")


def optional_package(module: str, needs: str, extra: str) -> ModuleType:
    """A module of a package that only an extra installs.

    Raises InputError, which says what needs it, if it is missing.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InputError(
            f"{needs} the package {module.partition('.')[0]}; "
            f"install the extra: pip install -e '.[{extra}]'"
        ) from None


def begin_program(name: str, options: str) -> Any:
    """Return what `parse` of the module `options` makes of the command line.

    It is called before torch is imported, which takes seconds. From here to run_program, Ctrl-C
    ends the program with one line.
    """
    signal.signal(signal.SIGINT, lambda *_: end_interrupted(name))
    with errors_in_one_line(name, heard=True):
        return importlib.import_module(options).parse(sys.argv[1:])


def run_program(name: str, main: Callable[..., None], *given: Any, heard: bool = False) -> None:
    """Run main(*given).

    An InputError prints one line to stderr and exits with code 2, Ctrl-C with 130. An output that
    is full or gone stops it only if it must be `heard`.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with errors_in_one_line(name, heard):
        main(*given)
        sys.stdout.flush()  # here, where a full disk is still answered in one line
    if "WORLD_SIZE" in os.environ:
        # Of torchrun: while Python ends, its threads can abort it (pytorch issue 190489)
        os._exit(0)


class Unheard(io.FileIO):
    """An output that drops what cannot be written: its reader may go away, its disk be full."""

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            return super().write(data)
        return len(data)


def open_outputs(heard: bool) -> None:
    """Open stdout and stderr anew: Unheard, unless stdout must be `heard`.

    What they cannot encode is escaped.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:  # nobody has put another there
            kind = io.FileIO if heard and number == 1 else Unheard
            output = io.BufferedWriter(kind(number, "w", closefd=False))
            opened = io.TextIOWrapper(
                output, stream.encoding, "backslashreplace", line_buffering=True
            )
            setattr(sys, name, opened)
            setattr(sys, f"__{name}__", opened)


@contextlib.contextmanager
def errors_in_one_line(name: str, heard: bool) -> Iterator[None]:
    """Context manager: errors that a user can mend end the program with one line."""
    try:
        open_outputs(heard)
        yield
    except InputError as error:
        end(name, str(error))
    except OSError as error:
        end_without_file(name, error)
    except Exception as error:
        if not (isinstance(error, MemoryError) or SAID_WITHOUT_MEMORY.search(str(error))):
            raise
        end(name, OUT_OF_MEMORY)
    except KeyboardInterrupt as interrupt:
        end_interrupted(name, str(interrupt))


def end_without_file(name: str, error: OSError) -> NoReturn:
    """Say which file cannot be used, or that the output cannot be written, and exit."""
    if error.filename is not None:
        end(name, f"cannot use {error.filename}: {error.strerror}; give another")
    # The output: nothing more is written to it, or Python reports it again when it ends
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if isinstance(error, BrokenPipeError):  # it was closed, as in: python eval.py RUN | head
        sys.exit(1)
    end(name, f"cannot write the output: {error.strerror}; send it elsewhere")


def end(name: str, message: str) -> NoReturn:
    """Print the message in one line and exit with code 2."""
    print(f"{name}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    sys.exit(2)


def end_interrupted(name: str, advice: str = "") -> NoReturn:
    """Say that the program was interrupted, and end it at once.

    Threads of libraries may still be at work.
    """
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    print(f"\n{name}: interrupted{advice and '; '}{advice}", file=sys.stderr, flush=True)
    os._exit(130)  # as shells expect it
