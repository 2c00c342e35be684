"""Many streams over one network, and the lock that lets threads share it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from torch import Tensor

from twoshift.accuracy import Expected
from twoshift.errors import InputError, ModelError, UnknownName
from twoshift.methods._state import State
from twoshift.registry import near_miss

if TYPE_CHECKING:
    from twoshift.methods.base import Method

M = TypeVar("M", bound="Method")


class Follower(Protocol):
    """What follows the predictions of a stream, such as an estimator of its labels."""

    def state(self) -> State:
        """A copy of everything that batches change."""

    def hold(self, state: State) -> None:
        """Take over a state that is known to fit."""


class Lock:
    """A re-entrant lock; a copy of its owner gets a lock of its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()  # for copy and pickle, which cannot copy the lock inside


@dataclass(eq=False)
class Kept:
    """What is kept of a stream while another one has the network."""

    state: State = field(default_factory=dict)
    estimates: list[State] = field(default_factory=list)


class Streams:
    """Whose state is in a network, and the states of the other streams.

    The states change places when another stream is used, not before.

    Attributes:
        lock: Held while the network is used.
        saving: Held while a state is written: one save at a time, beside predictions.
        own: The stream of the method itself.
        named: The others.
    """

    def __init__(self) -> None:
        self.lock, self.saving = Lock(), Lock()
        self.own = Kept()
        self.named: dict[str, Kept] = {}
        self._active: Kept | None = self.own
        self._depth = 0
        self._estimators: list[Follower] = []
        self._starts: list[State] = []

    def join(self, estimator: Follower) -> None:
        """Give every stream an estimate of its own, from the estimator's present one."""
        if not any(e is estimator for e in self._estimators):
            self._estimators.append(estimator)
            self._starts.append(estimator.state())

    def add(self, name: str, state: State) -> Kept:
        """A new stream that starts in ``state``."""
        self.named[name] = Kept(state)
        return self.named[name]

    def drop(self, name: str) -> None:
        """Forget a stream."""
        with self.lock:
            if name not in self.named:
                raise UnknownName(f"no stream {name!r}", cure=near_miss(name, self.named))
            if self._depth:
                raise ModelError(f"stream {name!r} cannot be dropped while the network is in use")
            if self.named.pop(name) is self._active:
                self._active = None

    @contextmanager
    def using(self, method: Method, stream: Kept | None = None) -> Iterator[None]:
        """Within the block, the network is this thread's and has the state of ``stream``.

        Args:
            method: The method around the network.
            stream: Whose turn it is; by default whoever has it in an outer block, else the method.
        """
        with self.lock:
            if not self._depth:
                self._switch(method, self.own if stream is None else stream)
            elif stream is not None and stream is not self._active:
                raise ModelError("a stream was used within a call of another one")
            depth = self._depth
            try:
                self._depth = depth + 1
                yield
            finally:
                self._depth = depth

    def _switch(self, method: Method, stream: Kept) -> None:
        if stream is self._active:
            return
        if self._active is not None:
            self._active.estimates = [e.state() for e in self._estimators]
            self._active.state = method._take_state()
        self._active = None  # if this is interrupted, what is in the network is nobody's
        method._put_state(stream.state)
        known = len(stream.estimates)  # estimators may have joined later
        estimates = [*stream.estimates, *self._starts[known:]]
        for estimator, estimate in zip(self._estimators, estimates, strict=True):
            estimator.hold(estimate)
        self._active = stream


class LiveStream(Generic[M]):
    """One stream of several that share a network: a state of its own, and light.

    ``method.stream(name)`` makes it. Calling it predicts and adapts, as calling the method does,
    but nothing that other streams did is felt, and nothing is left behind for them. It may be used
    from any thread.

    Attributes:
        name: Its name.
    """

    def __init__(self, method: M, name: str, kept: Kept) -> None:
        self.name, self._method, self._kept = name, method, kept

    def __call__(self, x: Tensor) -> Tensor:
        """Predict a batch and adapt to it."""
        with self._active() as method:
            logits: Tensor = method(x)
            return logits

    @property
    def prior(self) -> Tensor:
        """The label distribution of this stream, for a method that has one."""
        with self._active() as method:
            prior: Tensor = method.prior  # type: ignore[assignment]
            return prior

    @property
    def expected_accuracy(self) -> Expected | None:
        """How often the last predictions are expected to be right, where that is known."""
        with self._active() as method:
            return getattr(method, "expected_accuracy", None)

    @property
    def view_in_use(self) -> int:
        """Which statistics predict this stream, as a position in `VIEWS`."""
        with self._active() as method:
            return method.view_in_use

    def state(self) -> State:
        """A copy of the whole state, as a flat dictionary."""
        with self._active() as method:
            return method.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state, bit for bit; one that does not fit is refused and changes nothing."""
        with self._active() as method:
            method.load_state(state)

    def reset(self) -> None:
        """Return exactly to the initial state."""
        with self._active() as method:
            method.reset()

    def save(self, folder: str | Path) -> None:
        """Write the whole state to ``folder``, as `Method.save` does; `Method.load` takes it."""
        from twoshift.methods._saving import save_method

        with self._method._streams.saving:
            save_method(self._method, Path(folder), self.state())

    def load(self, folder: str | Path) -> None:
        """Go on from a saved state of the same model and method with the same settings."""
        from twoshift.methods._saving import read_state

        self.load_state(read_state(self._method, Path(folder)))

    def close(self) -> None:
        """Forget this stream; it cannot be used any more."""
        with self._method._streams.lock:
            with self._active():
                pass  # not a stream of the same name that was made later
            self._method.drop(self.name)

    @contextmanager
    def _active(self) -> Iterator[M]:
        streams = self._method._streams
        with streams.lock:
            if streams.named.get(self.name) is not self._kept:
                cure = f"Begin it anew: live.stream({self.name!r})."
                raise ModelError(f"stream {self.name!r} was closed", cure=cure)
            with streams.using(self._method._core, self._kept):
                yield self._method

    def __repr__(self) -> str:
        return f"<stream {self.name!r} of {type(self._method).__name__}>"


def check_name(name: object) -> str:
    """A stream's name, or why it cannot be one."""
    if not isinstance(name, str) or not name:
        raise InputError("name of a stream", must_be="a string, not empty", got=repr(name))
    return name
