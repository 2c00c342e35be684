"""The paper's claims, as ``claims.yaml`` lists them, asked of records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, Self

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from reproduction.records import Record
from twoshift.bench.table import MEAN, Table, load_table
from twoshift.bench.table_file import explained
from twoshift.errors import UnknownName
from twoshift.metrics import paired_difference
from twoshift.registry import near_miss
from twoshift.report.compare import Comparison, Seen, Spot, compare

CLAIMS, BEYOND = (Path(__file__).with_name(f"{name}.yaml") for name in ("claims", "beyond"))
PROFILE = "cpu"
FEWEST = 4  # corruptions, below which an interval says nothing
HOLDS, FAILS, OPEN, UNMEASURED = "holds", "fails", "open", "not measured"
Measured = dict[str, Comparison]  # by table
Interval = tuple[float, float]


class _Content(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Check(_Content):
    """A comparison; ``claims.yaml`` explains its parts."""

    says: str
    table: str
    row: str
    minus: str | list[str]
    column: str = MEAN
    claimed: Literal["above", "below", "near"]
    within: float | None = Field(None, gt=0)
    paper_table: str | None = None
    paper_row: str | None = None
    paper_minus: str | None = None
    holds: str = ""
    fails: str = ""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.claimed == "near") != (self.within is not None):
            raise ValueError("within must be given for what is claimed to be near, and only then")
        if not isinstance(self.minus, str) and self.claimed != "above":
            raise ValueError("several rows can only be claimed to be beaten")
        return self

    @property
    def rivals(self) -> list[str]:
        """The rows that are subtracted, one at a time."""
        return [self.minus] if isinstance(self.minus, str) else self.minus

    @property
    def side(self) -> Interval:
        """Where the difference is claimed to be."""
        if self.within is not None:
            return -self.within, self.within
        return (0.0, np.inf) if self.claimed == "above" else (-np.inf, 0.0)


class Claim(_Content):
    """What the paper, or nobody but us, says, and the comparisons that can tell."""

    title: str
    paper: str | None = None
    where: str | None = None
    reading: str
    checks: list[Check] = Field(min_length=1)


@dataclass(frozen=True)
class Finding:
    """What records say about a check; differences in points, or in percent of a count.

    Attributes:
        verdict: By `verdict`.
        rival: The row that was subtracted; of several, the strongest.
        ours: The difference; None if it was not measured.
        interval: 95 %, over corruptions; None where they are too few.
        parts: The difference by corruption.
        paper: The paper's difference, if it has one.
    """

    verdict: str
    rival: str
    ours: float | None = None
    interval: Interval | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    paper: float | None = None


def load_claims(path: Path = CLAIMS) -> list[Claim]:
    """Read the claims; rows and columns that no table has are refused."""
    try:
        claims = [Claim.model_validate(c) for c in yaml.safe_load(path.read_text("utf-8"))]
    except ValidationError as e:
        raise explained(f"a claim of {path}", Claim, e) from e
    for check in (check for claim in claims for check in claim.checks):
        known = table(check.table)
        theirs = table(check.paper_table or check.table)
        named = [(known, row) for row in (check.row, *check.rivals)]
        named += [(theirs, row) for row in (check.paper_row, check.paper_minus) if row]
        for place, row in named:
            if row not in place.rows:
                raise UnknownName(
                    f"no row {row!r} in {place.name}", cure=near_miss(row, place.rows)
                )
        if check.column not in (*known.columns, MEAN):
            cure = near_miss(check.column, known.columns)
            raise UnknownName(f"no column {check.column!r} in {known.name}", cure=cure)
    return claims


@cache
def table(name: str) -> Table:
    """A table, read once."""
    return load_table(name)


@cache
def _counts(name: str) -> dict[Spot, float]:
    return table(name).counts()


def measured(names: Iterable[str], records: Sequence[Record]) -> Measured:
    """The tables that there are records of; a record may belong to several."""
    found = {}
    for name in names:
        for compared in compare([table(name)], records, rest=False):
            if compared.profile == PROFILE:
                found[name] = compared
    return found


def find(check: Check, known: Measured) -> Finding:
    """Ask the records."""
    asked = table(check.table)
    paper = _paper(check, asked)
    if asked.kind == "counts":
        (rival,) = check.rivals
        share = _share(_counts(asked.name), check.row, rival, check.column)
        return Finding(verdict((share, share), check.side), rival, share, paper=paper)
    seen = known[asked.name].seen if asked.name in known else {}
    columns = asked.columns if check.column == MEAN else (check.column,)
    against = [_against(seen, check, rival, columns) for rival in check.rivals]
    verdicts = [f.verdict for f in against]
    # one rival that is clearly ahead is enough to fail; all must be beaten to hold
    joint = next((v for v in (FAILS, UNMEASURED, OPEN) if v in verdicts), HOLDS)
    decisive = [f for f in against if f.verdict == joint]
    strongest = min(decisive, key=lambda f: np.inf if f.ours is None else f.ours)
    return Finding(
        joint, strongest.rival, strongest.ours, strongest.interval, strongest.parts, paper
    )


def _against(
    seen: Mapping[Spot, list[Seen]], check: Check, rival: str, columns: Sequence[str]
) -> Finding:
    pairs = by_corruption(seen, check.row, rival, columns)
    if not pairs:
        return Finding(UNMEASURED, rival)
    ours, theirs = zip(*pairs.values(), strict=True)
    parts = {corruption: a - b for corruption, (a, b) in pairs.items()}
    if len(parts) < FEWEST:
        return Finding(OPEN, rival, float(np.mean(list(parts.values()))), None, parts)
    mean, low, high = paired_difference(ours, theirs)
    return Finding(verdict((low, high), check.side), rival, mean, (low, high), parts)


def by_corruption(
    seen: Mapping[Spot, list[Seen]], row: str, rival: str, columns: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """Accuracy of both rows in percent, on the same streams: mean over seeds, then over columns.

    A corruption that lacks one of the columns is left out.
    """
    pairs: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for column in columns:
        a, b = (
            {(s.stream, s.pair): 100 * s.accuracy for s in seen.get((name, column), ())}
            for name in (row, rival)
        )
        for stream in sorted(a.keys() & b.keys()):
            corruption = stream[0][0]
            pairs[corruption][column].append((a[stream], b[stream]))
    found = {}
    for corruption in sorted(pairs):
        if len(pairs[corruption]) == len(columns):
            ours, theirs = np.mean([np.mean(p, 0) for p in pairs[corruption].values()], 0)
            found[corruption] = (float(ours), float(theirs))
    return found


@cache
def corruptions_of(name: str) -> tuple[str, ...]:
    """All that a table has."""
    return tuple(dict.fromkeys(cell.corruption for cell in table(name).cells(PROFILE, 1)))


def whole_mean(seen: Sequence[Seen], name: str) -> float | None:
    """Mean accuracy in percent; None unless every corruption of the table is there."""
    whole = {s.stream[0] for s in seen} >= set(corruptions_of(name))
    return float(np.mean([100 * s.accuracy for s in seen])) if whole else None


def verdict(interval: Interval, side: Interval) -> str:
    """Holds if all of the interval is where it is claimed to be, fails if nothing of it is."""
    low, high = interval
    if side[0] < low and high < side[1]:
        return HOLDS
    return FAILS if high < side[0] or low > side[1] else OPEN


def _paper(check: Check, asked: Table) -> float | None:
    theirs = table(check.paper_table or check.table)
    row = check.paper_row or check.row
    rivals = [check.paper_minus] if check.paper_minus else check.rivals
    columns = [check.column]
    if check.column == MEAN and set(asked.columns) != set(theirs.columns):
        columns = list(asked.columns)  # the mean that ours is, not the one that is printed
    numbers = {
        name: np.mean([theirs.paper[name, c] for c in columns])
        for name in (row, *rivals)
        if all((name, c) in theirs.paper for c in columns)
    }
    there = [r for r in rivals if r in numbers]
    if row not in numbers or not there:
        return None
    if asked.kind == "counts":
        return _share(theirs.paper, row, there[0], check.column)
    return min(float(numbers[row] - numbers[r]) for r in there)


def _share(numbers: Mapping[Spot, float], row: str, rival: str, column: str) -> float:
    """How much more, in percent."""
    return 100 * (numbers[row, column] / numbers[rival, column] - 1)
