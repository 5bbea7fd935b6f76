"""The one exception that train.py and eval.py turn into a single line and exit code 2."""


class InputError(Exception):
    """Something the user gave cannot work; the message says what is wrong, what was expected and what to do."""
