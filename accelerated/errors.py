"""Error messages in one line, and files that are written completely or not at all."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

DISK_ADVICE = "free some space, or give another --data-dir"


class InputError(Exception):
    """Raised for input that cannot work; the message says what is wrong, what was expected and what to do."""


def option_name(field: str) -> str:
    """The command-line option that sets a field of the settings, for messages."""
    return "--" + field.replace("_", "-")


@contextlib.contextmanager
def disk_errors(path: Path, advice: str = DISK_ADVICE) -> Iterator[None]:
    """Turn the OSError of a full or read-only disk into an InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; {advice}") from None


@contextlib.contextmanager
def written_whole(path: Path, advice: str = DISK_ADVICE) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to `path` at the end: the file appears complete or not at all.

    If writing fails, an older file stays, the temporary file is deleted, and a disk error becomes an InputError.
    """
    path = Path(path)
    temporary = path.with_name(path.name + ".writing")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())  # so that it is complete even after a power failure
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError if the disk is full
        raise InputError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}; {advice}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def run_program(name: str, main: Callable[[list[str]], None]) -> None:
    """Run main on the command line; an InputError prints one line to stderr and exits with code 2."""
    try:
        main(sys.argv[1:])
    except InputError as error:
        sys.stderr.write(f"{name}: {' '.join(str(error).split())}\n")
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError, for a GPU a subclass of it
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in ("out of memory", "can't allocate")):
            raise
        sys.stderr.write(
            f"{name}: out of memory; give a smaller --batch, or in training a smaller --horizon, a larger --accumulate or "
            "--backprop memory_replay\n"
        )
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write(f"\n{name}: interrupted\n")
        sys.exit(130)
    except BrokenPipeError:  # the output was closed, as in: python eval.py RUN | head
        sys.stderr.close()
        sys.exit(1)
