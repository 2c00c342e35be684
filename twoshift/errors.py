"""Every error a user can meet.

TwoshiftError
├── InputError            a batch or value handed to a function
│   ├── BatchError        images of the wrong shape, type or content
│   ├── PriorError        a label distribution that is none
│   └── SettingError      a setting that is unknown or out of range
├── UnknownName           no method, model, corruption ... of that name
├── ModelError            a model that cannot be used this way
│   ├── HeadError         no classifier head, or more than one candidate
│   └── MismatchError     adapter, checkpoint or state of another model
├── DataError             a data set
│   ├── DataMissing       not on this machine
│   └── DataCorrupt       there, but truncated, edited or not what it says it is
├── StorageError          a file or folder that cannot be read or written
│   └── CheckpointError   a saved model, adapter or state that is damaged
└── MissingExtra          an optional package is not installed

A message says what is wrong, what it must be, what it got, and the cure.
"""

from __future__ import annotations


class TwoshiftError(Exception):
    """The root of the tree: catch this to catch them all.

    Args:
        what: What is wrong, and whose it is.
        must_be: What would have been right.
        got: What was found instead.
        cure: What to do about it, as a sentence or a command.
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
    """A batch or value handed to a function is wrong."""


class BatchError(InputError):
    """Images of the wrong shape, type or content."""


class PriorError(InputError):
    """A label distribution that is none."""


class SettingError(InputError):
    """A setting that is unknown or out of range."""


class UnknownName(TwoshiftError, KeyError):
    """Nothing is registered under that name."""

    __str__ = Exception.__str__  # KeyError would show the message in quotes


class ModelError(TwoshiftError):
    """A model that cannot be used this way."""


class HeadError(ModelError):
    """No classifier head found, or more than one candidate."""


class MismatchError(ModelError):
    """An adapter, checkpoint or state that belongs to another model."""


class DataError(TwoshiftError):
    """Something is wrong with a data set."""


class DataMissing(DataError, FileNotFoundError):
    """The data set is not on this machine."""

    __str__ = Exception.__str__


class DataCorrupt(DataError):
    """The data are there, but truncated, edited or not what they say they are."""


class StorageError(TwoshiftError):
    """A file or folder that cannot be read or written."""


class CheckpointError(StorageError):
    """A saved model, adapter or state that is damaged."""


class MissingExtra(TwoshiftError, ImportError):
    """An optional package is not installed."""
