"""Where a setting comes from: the configuration file, then variables, then flags, each stronger.

Knows nothing about any setting: the fields of a dataclass are the settings, with their types and
defaults. Each service has its own copy of this file, because the services share no code; a test
keeps the copies equal. Standard library only.
"""

from __future__ import annotations

import argparse
import difflib
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Final, NoReturn

FILE_VARIABLE: Final = "ISOBATCH_CONFIG"
SECTIONS: Final = ("scheduler", "executor")
SHOW_FLAG: Final = "--show-config"
_FILE_FLAG: Final = "--config"
# For variables, which may well be meant for something else.
_VARIABLE_CUTOFF: Final = 0.7


class SettingsError(Exception):
    """Settings cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and the place that it comes from."""

    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Source:
    """What a service's settings are, and how they are called."""

    section: str  # table of the configuration file
    prefix: str  # of variables
    program: str
    description: str
    help: Mapping[str, str]  # by field
    flags: Mapping[str, tuple[str, ...]]  # of fields whose flag is not their name


@dataclass(frozen=True, slots=True)
class Loaded:
    """All settings of a service by field, and whether they are only to be shown."""

    settings: Mapping[str, Setting]
    is_shown: bool

    @property
    def values(self) -> dict[str, Any]:
        """The values alone."""
        return {name: setting.value for name, setting in self.settings.items()}


def default_file(environ: Mapping[str, str]) -> Path | None:
    """Return the path of the user's configuration file, whether or not it exists."""
    base = environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):
        home = environ.get("HOME", "")
        if not os.path.isabs(home):
            return None
        base = os.path.join(home, ".config")
    return Path(base) / "isobatch" / "config.toml"


def read_file(environ: Mapping[str, str], path: str | None = None) -> tuple[dict[str, Any], str]:
    """Return the configuration file as a table of tables, and its path; empty where none is.

    `path`, else the variable ISOBATCH_CONFIG, names a file that must exist. Raises SettingsError.
    """
    named = path if path is not None else environ.get(FILE_VARIABLE)
    file = Path(named) if named else default_file(environ)
    if file is None or (not named and not file.exists()):
        return {}, ""
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SettingsError(
            f"[config] the file must be readable, got {error.strerror}: {file}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"[config] the file must be TOML, got {error}: {file}") from error
    for name, table in document.items():
        if name not in SECTIONS:
            raise SettingsError(f"[config] {_unknown('table', name, SECTIONS)}: {file}")
        if not isinstance(table, dict):
            raise SettingsError(f"[config] [{name}] must be a table, got {table!r}: {file}")
    return document, str(file)


def nearest(name: str, known: Sequence[str], cutoff: float = 0.5) -> str:
    """Return `; did you mean X?` for the known name that is nearest, or nothing.

    `cutoff` is the likeness that it takes, from 0 to 1 (difflib's ratio).
    """
    found = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {found[0]}?" if found else ""


def _unknown(kind: str, name: str, known: Sequence[str]) -> str:
    hint = nearest(name, known) or f"; known are {', '.join(known)}"
    return f"a {kind} must be a known one, got {name}{hint}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"[config] {message}")


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "1", "yes", "on"):
        return True
    if text.lower() in ("false", "0", "no", "off"):
        return False
    raise argparse.ArgumentTypeError(f"must be true or false, got {text!r}")


_CONVERT: Final[Mapping[str, Callable[[str], Any]]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": _boolean,
}


def load(
    kind: type[Any], source: Source, arguments: Sequence[str], environ: Mapping[str, str]
) -> Loaded:
    """Return the settings of the dataclass `kind`; those set nowhere and without default are left.

    Raises SettingsError; `--help` prints and exits.
    """
    types = {each.name: str(getattr(each.type, "__name__", each.type)) for each in fields(kind)}
    found = {
        each.name: Setting(each.default, "default")
        for each in fields(kind)
        if each.default is not MISSING
    }
    parser = _parser(source, types)
    given, extra = parser.parse_known_args(list(arguments))
    if extra:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        hint = nearest(extra[0].partition("=")[0], flags)
        raise SettingsError(f"[config] unrecognized arguments: {' '.join(extra)}{hint}")
    values = vars(given)
    found.update(_from_file(types, source, environ, values.pop("config_file", None)))
    found.update(_from_environment(types, source, environ))
    is_shown = bool(values.pop("show_config", False))
    found.update({name: Setting(value, "flag") for name, value in values.items()})
    return Loaded({name: found[name] for name in types if name in found}, is_shown)


def _flags(source: Source, name: str) -> tuple[str, ...]:
    return source.flags.get(name, (f"--{name.replace('_', '-')}",))


def _parser(source: Source, types: Mapping[str, str]) -> _Parser:
    parser = _Parser(
        prog=source.program,
        description=f"{source.description} A flag --some-name may be given as the variable "
        f"{source.prefix}SOME_NAME, or as some_name in the table [{source.section}] of the "
        "configuration file. Flags win over variables, and these over the file.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for name, type_name in types.items():
        parser.add_argument(
            *_flags(source, name), dest=name, type=_CONVERT[type_name], help=source.help[name],
            metavar=name.rpartition("_")[2].upper(),
        )  # fmt: skip
    parser.add_argument(
        _FILE_FLAG, dest="config_file", metavar="FILE",
        help=f"configuration file (TOML); also {FILE_VARIABLE}; default: isobatch/config.toml in "
        "$XDG_CONFIG_HOME or ~/.config",
    )  # fmt: skip
    parser.add_argument(
        SHOW_FLAG, dest="show_config", action="store_true",
        help="print every setting and where it comes from, as JSON, and exit",
    )  # fmt: skip
    return parser


def _from_file(
    types: Mapping[str, str], source: Source, environ: Mapping[str, str], path: str | None
) -> dict[str, Setting]:
    document, file = read_file(environ, path)
    found = {}
    for name, value in document.get(source.section, {}).items():
        if name not in types:
            raise SettingsError(
                f"[config] {_unknown('key', name, list(types))}: [{source.section}] in {file}"
            )
        wanted = types[name]
        # TOML has types of its own. A whole number will do where a fraction may stand.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if type(value).__name__ != wanted and not (wanted == "float" and is_number):
            raise SettingsError(
                f"[config] {name} must be of type {wanted}, got {value!r}: "
                f"[{source.section}] in {file}"
            )
        if isinstance(value, str) and "\0" in value:
            # Variables and flags cannot hold one, and no path may.
            raise SettingsError(
                f"[config] {name} must have no zero byte, got {value!r}: "
                f"[{source.section}] in {file}"
            )
        found[name] = Setting(float(value) if wanted == "float" else value, f"file {file}")
    return found


def _from_environment(
    types: Mapping[str, str], source: Source, environ: Mapping[str, str]
) -> dict[str, Setting]:
    names = {source.prefix + name.upper(): name for name in types}
    found = {}
    for variable, text in environ.items():
        if not variable.startswith(source.prefix):
            continue
        if variable not in names:
            raise SettingsError(
                f"[config] a variable must be a known one, got {variable}"
                f"{_nearest_variable(variable, source.prefix, names)}"
            )
        name = names[variable]
        try:
            value = _CONVERT[types[name]](text)
        except (ValueError, argparse.ArgumentTypeError) as error:
            what = str(error) if types[name] == "bool" else f"invalid {types[name]} value: {text!r}"
            raise SettingsError(
                f"[config] argument {'/'.join(_flags(source, name))}: {what} (from {variable})"
            ) from error
        found[name] = Setting(value, f"variable {variable}")
    return found


def _nearest_variable(variable: str, prefix: str, names: Mapping[str, str]) -> str:
    # The prefix, which all of them share, would make any two alike.
    own_names = [each.removeprefix(prefix) for each in names]
    hint = nearest(variable.removeprefix(prefix), own_names, _VARIABLE_CUTOFF)
    if not hint:
        return f"; known are {', '.join(names)}"
    return hint.replace("mean ", f"mean {prefix}", 1)


def as_json(loaded: Loaded) -> list[dict[str, Any]]:
    """Return every setting as plain data."""
    return [
        {"name": name, "value": setting.value, "origin": setting.origin}
        for name, setting in loaded.settings.items()
    ]
