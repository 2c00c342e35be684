"""Names -> classes or functions, with near-miss hints and settings read from signatures.

A room (``twoshift.methods``, ``twoshift.estimators``, ...) owns one :class:`Registry`. Its files
register what they define with a decorator; the registry imports them when it is first asked.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Generic, TypeVar

from twoshift.errors import SettingError, UnknownName

T = TypeVar("T", bound=Callable[..., Any])


def near_miss(name: str, known: Iterable[str]) -> str:
    """A sentence that proposes what the user may have meant, and lists what there is."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(known)}."


class Registry(Generic[T]):
    """The entries of one room.

    Args:
        kind: What an entry is called in messages, for example ``"method"``.
        package: The package whose modules hold the entries; imported when first needed.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self._package = package
        self._entries: dict[str, T] = {}
        self._complete = False

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: make a class or function known under ``name``."""
        if name != name.lower() or not name.replace("_", "").replace("-", "").isalnum():
            raise ValueError(f"{self.kind} name {name!r} must be lower case, digits, '-' and '_'")
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered twice")

        def keep(entry: T) -> T:
            if not inspect.getdoc(entry):
                raise ValueError(f"{self.kind} {name!r} needs a docstring: its first line is shown")
            self._entries[name] = entry
            return entry

        return keep

    def __getitem__(self, name: str) -> T:
        self._import_all()
        try:
            return self._entries[name]
        except KeyError:
            raise UnknownName(
                f"unknown {self.kind} {name!r}", cure=near_miss(name, self._entries)
            ) from None

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
        """Build the entry called ``name``; an unknown setting is an error with a hint."""
        entry = self[name]
        check_settings(f"{self.kind} {name!r}", entry, settings)
        return entry(*args, **settings)

    def name_of(self, entry: object) -> str:
        """The name under which ``entry`` is registered."""
        self._import_all()
        for name, known in self._entries.items():
            if known is entry:
                return name
        raise UnknownName(f"{entry!r} is not a registered {self.kind}")

    def _import_all(self) -> None:
        if self._complete:
            return
        self._complete = True  # before the imports: they may ask the registry themselves
        package = importlib.import_module(self._package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self._package}.{module.name}")


def parameters_of(entry: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a class or function; remembered, since reading them is slow."""
    return _parameters_of(entry)


@cache
def _parameters_of(entry: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(entry).parameters


def signature_settings(entry: Callable[..., Any]) -> dict[str, Any]:
    """Names and defaults of the settings of a class or function: its keyword parameters."""
    return {p.name: p.default for p in parameters_of(entry).values() if p.default is not p.empty}


def check_settings(owner: str, entry: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuse a setting that ``entry`` does not have."""
    parameters = parameters_of(entry).values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters]
    for name in given:
        if name not in known:
            raise SettingError(
                f"{owner} has no setting {name!r}", cure=near_miss(name, signature_settings(entry))
            )
