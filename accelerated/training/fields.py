"""An option for every field of a config, with its help, for the command lines."""

import argparse
import dataclasses
import inspect
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accelerated.data.config import default_data_dir
from accelerated.program.errors import InputError, option_name
from accelerated.program.parser import OptionParser, whole_numbers

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")
METAVARS = {int: "INT", float: "FLOAT", str: "NAME"}
FIELD = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def field_help(config_class: type) -> dict[str, str]:
    """{field: help} of a config, from the `Fields:` of its docstring and of its base classes'."""
    texts = {}
    for kind in reversed(config_class.__mro__[:-1]):
        described = inspect.cleandoc(kind.__doc__ or "")
        texts |= {name: " ".join(words.split()) for name, words in FIELD.findall(described)}
    return texts


def add_options(
    parser: OptionParser,
    title: str,
    config: Any,
    prefix: str = "",
    leave_out: Collection[str] = (),
) -> None:
    """Add an option for each field of config, a dataclass instance, with its value as default."""
    texts = field_help(type(config))
    group = parser.add_argument_group(title)
    for field in dataclasses.fields(config):
        if field.name in leave_out:
            continue
        default = getattr(config, field.name)
        text = f"{texts[field.name]} (default {as_given(default)})".replace("%", "%%")
        option: dict[str, Any] = {"help": text, "default": argparse.SUPPRESS}
        if isinstance(default, bool):
            option["action"] = argparse.BooleanOptionalAction
        elif isinstance(default, tuple):
            option |= {"type": whole_numbers, "metavar": "INT,..."}
        else:
            option |= conversion(default)
        name = prefix + field.name
        group.add_argument(option_name(name), dest=name, **option)


def conversion(default: Any) -> dict[str, Any]:
    """What add_argument takes for an option of the type of this default."""
    kind = type(default)
    return {"type": kind, "metavar": METAVARS[kind]}


def as_given(default: object) -> str:
    """A default as one would give it on the command line."""
    text = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return text or "none"


def add_data_dir(parser: OptionParser) -> None:
    """Add --data-dir."""
    usual = default_data_dir()
    text = f"folder of downloaded data sets and tokenised texts (default {usual})"
    parser.add_argument("--data-dir", metavar="FOLDER", type=Path, default=usual, help=text)


def changed(config: Config, values: dict, prefix: str = "") -> Config:
    """Return config with these values.

    An impossible value raises InputError that names its option, prefix included.
    """
    try:
        return dataclasses.replace(config, **values)
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        if name in {field.name for field in dataclasses.fields(config)}:
            raise InputError(f"{option_name(prefix + name)} {rest}") from None
        raise InputError(str(error)) from None
