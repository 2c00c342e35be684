"""Every error a user can meet.

TwoshiftError
├── InputError            a wrong batch or value passed to a function
│   ├── BatchError        images of the wrong shape, type or content
│   ├── PriorError        not a valid label distribution
│   └── SettingError      a setting that is unknown or out of range
├── UnknownName           no method, model, corruption ... with that name
├── ModelError            a model that cannot be used this way
│   ├── HeadError         no classifier head, or more than one candidate
│   └── MismatchError     an adapter, checkpoint or state of another model
├── DataError             something is wrong with a data set
│   ├── DataMissing       a data set that is not on this machine
│   └── DataCorrupt       data that are truncated, edited or not what they claim to be
├── StorageError          a file or folder that cannot be read or written
│   └── CheckpointError   a saved model, adapter or state that cannot be used
└── MissingExtra          an optional package that is not installed

A message says what is wrong, what it must be, what was found instead, and what to do about it.
A TwoshiftWarning says what works, but not as well as it might seem.
"""

from __future__ import annotations


class TwoshiftError(Exception):
    """Base class of all errors: catch it to catch every one of them.

    Args:
        what: The wrong thing and its owner, for example ``"alpha of ema"``.
        must_be: What it must be: a range, a shape, a kind of file.
        got: The value found instead.
        cure: How to fix it, as a sentence or a command.
    """

    def __init__(
        self,
        what: str,
        *,
        must_be: object = None,
        got: object = None,
        cure: str | None = None,
    ) -> None:
        parts = [what]
        if must_be is not None:
            parts.append(f"must be {must_be}")
        if got is not None:
            parts.append(f"got {got}")
        message = ", ".join(parts)
        super().__init__(f"{message}. {cure}" if cure else message)
        self.what, self.must_be, self.got, self.cure = what, must_be, got, cure


class InputError(TwoshiftError, ValueError):
    """A wrong batch or value passed to a function."""


class BatchError(InputError):
    """Images of the wrong shape, type or content."""


class PriorError(InputError):
    """Not a valid label distribution."""


class SettingError(InputError):
    """A setting that is unknown or out of range."""


class UnknownName(TwoshiftError, KeyError):
    """No method, model, corruption ... is registered under that name."""

    __str__ = Exception.__str__  # KeyError would show the message in quotes


class ModelError(TwoshiftError):
    """A model that cannot be used this way."""


class HeadError(ModelError):
    """No classifier head, or more than one candidate."""


class MismatchError(ModelError):
    """An adapter, checkpoint or state that belongs to another model."""


class DataError(TwoshiftError):
    """Something is wrong with a data set."""


class DataMissing(DataError, FileNotFoundError):
    """The data set is not on this machine."""

    __str__ = Exception.__str__


class DataCorrupt(DataError):
    """Data that are truncated, edited or not what they claim to be."""


class StorageError(TwoshiftError):
    """A file or folder that cannot be read or written."""


class CheckpointError(StorageError):
    """A saved model, adapter or state that is missing, damaged or made with other settings."""


class MissingExtra(TwoshiftError, ImportError):
    """An optional package that is not installed."""


class TwoshiftWarning(UserWarning):
    """Something that works, but not as well as it might seem."""
