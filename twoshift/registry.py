"""Names -> classes or functions, with near-miss hints and settings read from signatures.

A package (``twoshift.methods``, ``twoshift.estimators``, ...) owns one :class:`Registry`. Its
modules register their classes or functions with a decorator; the registry imports all modules when
it is first used.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from numbers import Integral, Real
from typing import Any, Generic, TypeVar

from twoshift.errors import SettingError, UnknownName

T = TypeVar("T", bound=Callable[..., Any])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What the user may have meant, as a question; empty if no known name is near."""
    spelt = {k.lower(): k for k in known}
    wanted = name.lower()
    close = difflib.get_close_matches(wanted, spelt, n=1) or [
        k for k in spelt if wanted and k.startswith(wanted)
    ]
    return f"Did you mean {spelt[close[0]]!r}?" if close else ""


def near_miss(name: str, known: Iterable[str]) -> str:
    """A suggestion of what the user may have meant, and a list of all known names."""
    known = sorted(set(known))
    return f"{did_you_mean(name, known)} Known: {', '.join(known)}.".lstrip()


class Registry(Generic[T]):
    """The entries of one package, by name.

    Args:
        kind: Word for an entry in messages, for example ``"method"``.
        package: Package whose modules define the entries; they are imported when first needed.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self._package = package
        self._entries: dict[str, T] = {}
        self._imported = False

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that registers a class or function as ``name``."""
        if name != name.lower() or not name.replace("_", "").replace("-", "").isalnum():
            raise ValueError(f"{self.kind} name {name!r} must be lower case, digits, '-' or '_'")
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered twice")

        def add(entry: T) -> T:
            if not inspect.getdoc(entry):
                raise ValueError(f"{self.kind} {name!r} needs a docstring: lists show it")
            self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        if name not in self:
            cure = near_miss(name, self._entries)
            raise UnknownName(f"unknown {self.kind} {name!r}", cure=cure)
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        self._import_all()
        return iter(sorted(self._entries))

    def __contains__(self, name: object) -> bool:
        self._import_all()
        return name in self._entries

    def describe(self, name: str) -> str:
        """The first line of the entry's docstring."""
        return (inspect.getdoc(self[name]) or "").splitlines()[0]

    def create(self, name: str, *args: Any, **settings: Any) -> Any:
        """Build the entry called ``name``; an unknown setting is refused with a hint."""
        entry = self[name]
        check_settings(f"{self.kind} {name!r}", entry, settings)
        return entry(*args, **settings)

    def name_of(self, entry: object) -> str:
        """The name under which ``entry`` is registered."""
        self._import_all()
        for name, registered in self._entries.items():
            if registered is entry:
                return name
        raise UnknownName(f"{entry!r} is not a registered {self.kind}")

    def _import_all(self) -> None:
        if self._imported:
            return
        self._imported = True  # before the imports, since a module may use the registry itself
        package = importlib.import_module(self._package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self._package}.{module.name}")


def parameters_of(entry: Any) -> Mapping[str, inspect.Parameter]:
    """Parameters of a class or function; cached, since inspecting a signature is slow."""
    return _parameters_of(entry)


@cache  # not on the public function: mypy would not accept a class as its argument
def _parameters_of(entry: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(entry).parameters


def signature_settings(entry: Callable[..., Any]) -> dict[str, Any]:
    """Settings of a class or function: its parameters that have a default, with the defaults."""
    return {p.name: p.default for p in parameters_of(entry).values() if p.default is not p.empty}


def documented(entry: Any) -> dict[str, str]:
    """What a docstring says about each argument or attribute, each as one line."""
    found: dict[str, str] = {}
    last = None
    inside = False
    for line in (inspect.getdoc(entry) or "").splitlines():
        indent, text = len(line) - len(line.lstrip()), line.strip()
        if indent == 0 and text:
            inside, last = text in ("Args:", "Attributes:"), None
        elif inside and indent == 4 and (named := re.match(r"([\w, ]+): (.*)", text)):
            last = named[1]
            found[last] = named[2]
        elif last is not None and text:
            found[last] += f" {text}"
    return {name: text for names, text in found.items() for name in names.split(", ")}


def check_settings(owner: str, entry: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Refuse settings that ``entry`` does not have."""
    parameters = parameters_of(entry)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in settings:
        if name not in parameters:
            cure = near_miss(name, signature_settings(entry))
            raise SettingError(f"{owner} has no setting {name!r}", cure=cure)


RANGES: dict[str, Callable[[Any], bool]] = {
    "from 0 to 1": lambda x: 0 <= x <= 1,
    "at least 0": lambda x: x >= 0,
    "at least 0 and finite": lambda x: 0 <= x < math.inf,
    "at least 1": lambda x: x >= 1,
    "at least 3": lambda x: x >= 3,
    "above 0": lambda x: x > 0,
    "above 0, at most 1": lambda x: 0 < x <= 1,
    "above 0 and finite": lambda x: 0 < x < math.inf,
    "a whole number from 0": lambda x: x >= 0 and isinstance(x, Integral),
    "a whole number from 1": lambda x: x >= 1 and isinstance(x, Integral),
    "a whole number from 2": lambda x: x >= 2 and isinstance(x, Integral),
}


def check_numbers(owner: str, must_be: str, **values: Any) -> None:
    """Refuse settings out of range: ``check_numbers("rotta", "from 0 to 1", nu=nu, alpha=alpha)``.

    Args:
        owner: Name of the method, estimator or model that has the settings.
        must_be: Range of the values: a key of ``RANGES``, which is also the text of the error.
        values: Settings by name.
    """
    for name, value in values.items():
        if not (isinstance(value, Real) and RANGES[must_be](value)):
            raise SettingError(f"{name} of {owner}", must_be=must_be, got=repr(value))


def check_choice(owner: str, choices: Iterable[object], **values: object) -> None:
    """Refuse settings outside of ``choices``: ``check_choice("cotta", LOSSES, loss=loss)``."""
    known = list(choices)
    for name, value in values.items():
        if value not in known:
            must_be = f"one of {', '.join(map(repr, known))}"
            cure = did_you_mean(str(value), [k for k in known if isinstance(k, str)]) or None
            raise SettingError(f"{name} of {owner}", must_be=must_be, got=repr(value), cure=cure)
