"""Checks of records that others wrote, before they enter a store.

A record is read by reports, tables and exports, long after it was imported. All that they rely on
is checked here; beyond that, records may have settings, metrics and facts of any name.
"""

from __future__ import annotations

import json
import unicodedata
from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from twoshift.bench.cell import NATURAL
from twoshift.bench.result import Result
from twoshift.data.orders import check_order
from twoshift.data.schedules import named
from twoshift.errors import InputError

DEEPEST = 20  # levels of settings and traces
MOST = 2**53  # the largest integer that every tool reads exactly


def _plain(text: str) -> str:
    if any(unicodedata.category(c) in ("Cc", "Cs") for c in text):
        raise ValueError("should have no control characters")
    return text


def _known_labels(labels: str) -> str:
    if labels != NATURAL:
        named(labels, classes=2)  # raises an error with a cure
    return labels


def _known_order(order: str) -> str:
    check_order(order)
    return order


Name = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_plain)]
Number = Annotated[float, Field(ge=-MOST, le=MOST)]
Amount = Annotated[float, Field(ge=0, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Share = Annotated[float, Field(ge=0, le=1)]
Settings = dict[Name, Any]


class _Content(BaseModel):
    # lax types would turn "3" into 3 here, but not in the record
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")


class _Model(_Content):
    source: Settings
    adapter: Settings | None = None
    seed: Count = 0


class _Cell(_Content):
    method: Name
    settings: Settings = {}
    adapter: Name | None = None
    estimator: Name = "ema"
    estimator_settings: Settings = {}
    corruption: Name = "clean"
    severity: Annotated[int, Field(ge=1, le=5)] = 5
    labels: Annotated[Name, AfterValidator(_known_labels)] = "uniform"
    seed: Count = 0
    batch_size: Annotated[int, Field(ge=1, le=MOST)] = 64
    order: Annotated[Name, AfterValidator(_known_order)] = "shuffled"
    model: _Model | None = None
    target: Name | None = None
    images: Annotated[int, Field(ge=1, le=MOST)] | None = None


class _Source(_Content):
    dataset: Name
    architecture: Name
    norm: Name | None
    width: Count | None
    strategy: Name
    seed: Count
    weights: Name
    calibration_folds: Count | None = None


class _Metrics(_Content):
    __pydantic_extra__: dict[Name, Number | None]

    images: Annotated[int, Field(ge=1, le=MOST)]
    accuracy: Share
    accuracy_first10: Share | None
    accuracy_last10: Share | None
    head_recall: Share | None
    medium_recall: Share | None
    tail_recall: Share | None
    s_error_final: Annotated[float, Field(ge=-2, le=2)] | None


class _Facts(_Content):
    __pydantic_extra__: dict[Name, Name | bool | Number | None]

    seconds: Amount | None = None
    peak_memory_mb: Amount | None = None


class _Trace(_Content):
    __pydantic_extra__: dict[Name, list[Number | None] | list[list[Number]]]

    accuracy: list[Share] = []
    s: list[Number] = []
    prior: list[list[Share]] = []
    true_prior: list[Share] = []


class _Record(_Content):
    key: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    cell: _Cell
    source: _Source
    adapter: Name | None = None
    metrics: _Metrics
    facts: _Facts = Field(default_factory=lambda: _Facts.model_validate({}))
    trace: _Trace | None = None


def read_record(line: bytes) -> Result:
    """The result on a line of JSON.

    Raises:
        InputError: The line is not JSON, or something in it is not what a result has there.
    """
    try:
        content = json.loads(line, parse_constant=_no_constant)
    except RecursionError:
        raise InputError("a result", must_be=f"at most {DEEPEST} levels deep") from None
    except ValueError as e:
        raise InputError(f"a result is not JSON: {e}") from e
    _check_depth(content)
    result = Result.from_json(content)
    try:
        _Record.model_validate(content)
    except ValidationError as e:
        first = e.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{place}: {first['msg']}", got=repr(first["input"])[:100]) from e
    epochs = None if result.cell.model is None else result.cell.model.source.get("epochs")
    if epochs is not None and type(epochs) is not int:
        raise InputError("cell.model.source.epochs", must_be="an integer", got=repr(epochs)[:100])
    if result.key != (key := result.cell.key):
        raise InputError("the key of a result", must_be=f"that of its cell, {key}", got=result.key)
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name}, which JSON does not have")


def _check_depth(content: Any) -> None:
    level = [content]
    for _ in range(DEEPEST):
        groups = [x for x in level if isinstance(x, dict | list)]
        level = [y for x in groups for y in (x.values() if isinstance(x, dict) else x)]
        if not level:
            return
    raise InputError("a result", must_be=f"at most {DEEPEST} levels deep")
