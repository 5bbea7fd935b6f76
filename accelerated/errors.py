"""How the programs refuse what cannot work."""

import sys


class InputError(Exception):
    """Something the user gave cannot work; the message says what is wrong, what was expected and what to do."""


def option_name(field):
    """The command-line option of a setting's field, for messages."""
    return "--" + field.replace("_", "-")


def run_program(name, main):
    """Run main on the command line; an InputError becomes one line on the error stream and exit code 2."""
    try:
        main(sys.argv[1:])
    except InputError as error:
        sys.stderr.write(f"{name}: {' '.join(str(error).split())}\n")
        sys.exit(2)
