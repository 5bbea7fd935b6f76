"""How the programs refuse what cannot work."""

import contextlib
import os
import sys


class InputError(Exception):
    """Something the user gave cannot work; the message says what is wrong, what was expected and what to do."""


def option_name(field):
    """The command-line option of a setting's field, for messages."""
    return "--" + field.replace("_", "-")


@contextlib.contextmanager
def disk_errors(path, advice="free some space, or give another --data-dir"):
    """A disk that is full or may not be written to, inside, as InputError."""
    try:
        yield
    except OSError as error:
        if error.filename and not os.path.realpath(error.filename).startswith(os.path.realpath(path)):
            raise InputError(f"cannot read {error.filename}: {error.strerror}") from None
        raise InputError(f"cannot write {path}: {error.strerror or error}; {advice}") from None


def run_program(name, main):
    """Run main on the command line; an InputError becomes one line on the error stream and exit code 2."""
    try:
        main(sys.argv[1:])
    except InputError as error:
        sys.stderr.write(f"{name}: {' '.join(str(error).split())}\n")
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:  # torch has one for a GPU and none for a CPU
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in ("out of memory", "can't allocate")):
            raise
        sys.stderr.write(
            f"{name}: out of memory; give a smaller --batch, or to train a smaller --horizon, --accumulate, or --backprop "
            "memory_replay\n"
        )
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write(f"\n{name}: interrupted\n")
        sys.exit(130)
    except BrokenPipeError:  # what reads our output has gone: python eval.py RUN | head
        sys.stderr.close()
        sys.exit(1)
