"""Claims, as ``claims.yaml`` and ``beyond.yaml`` list them, tested on records."""

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
from twoshift.report.compare import Comparison, Measurement, Spot, compare

CLAIMS, BEYOND = (Path(__file__).with_name(f"{name}.yaml") for name in ("claims", "beyond"))
PROFILE = "cpu"
FEWEST = 4  # corruptions that an interval needs
HOLDS, FAILS, OPEN, UNMEASURED = "holds", "fails", "open", "not measured"
Comparisons = dict[str, Comparison]  # by table
Streams = Mapping[Spot, Sequence[Measurement]]  # accuracies of single streams, by row and column
Interval = tuple[float, float]


class _Content(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Check(_Content):
    """A comparison of two rows; ``claims.yaml`` explains the fields."""

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
            raise ValueError("within must be set if, and only if, claimed is near")
        if not isinstance(self.minus, str) and self.claimed != "above":
            raise ValueError("claimed must be above if minus lists several rows")
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
    """A claim of the paper, or one of ours, and the comparisons that test it."""

    title: str
    paper: str | None = None
    where: str | None = None
    reading: str
    checks: list[Check] = Field(min_length=1)


@dataclass(frozen=True)
class Finding:
    """What the records say about a check; differences in points, or in percent of a count.

    Attributes:
        verdict: One of the verdicts that `verdict` gives.
        rival: The row that was subtracted; the strongest if there are several.
        ours: Our difference; None if it was not measured.
        interval: The 95 % interval over corruptions; None if there are too few.
        parts: The difference on each corruption.
        paper: The paper's difference; None if the paper does not have one.
    """

    verdict: str
    rival: str
    ours: float | None = None
    interval: Interval | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    paper: float | None = None


def load_claims(path: Path = CLAIMS) -> list[Claim]:
    """Read the claims, and refuse rows and columns that their tables do not have."""
    try:
        claims = [Claim.model_validate(c) for c in yaml.safe_load(path.read_text("utf-8"))]
    except ValidationError as e:
        raise explained(f"a claim of {path}", Claim, e) from e
    for check in (check for claim in claims for check in claim.checks):
        ours = table(check.table)
        theirs = table(check.paper_table or check.table)
        rows = [(ours, row) for row in (check.row, *check.rivals)]
        rows += [(theirs, row) for row in (check.paper_row, check.paper_minus) if row]
        for owner, row in rows:
            if row not in owner.rows:
                cure = near_miss(row, owner.rows)
                raise UnknownName(f"no row {row!r} in {owner.name}", cure=cure)
        if check.column not in (*ours.columns, MEAN):
            cure = near_miss(check.column, ours.columns)
            raise UnknownName(f"no column {check.column!r} in {ours.name}", cure=cure)
    return claims


@cache
def table(name: str) -> Table:
    """A table, loaded once."""
    return load_table(name)


@cache
def _counts(name: str) -> dict[Spot, float]:
    return table(name).counts()


def compare_tables(names: Iterable[str], records: Sequence[Record]) -> Comparisons:
    """The tables that have records, by name; a record may belong to several tables."""
    return {
        name: comparison
        for name in names
        for comparison in compare([table(name)], records, rest=False)
        if comparison.profile == PROFILE
    }


def judge(check: Check, comparisons: Comparisons) -> Finding:
    """Test a check on the measured tables."""
    ours = table(check.table)
    paper = _paper(check, ours)
    if ours.kind == "counts":
        (rival,) = check.rivals
        share = _share(_counts(ours.name), check.row, rival, check.column)
        return Finding(verdict((share, share), check.side), rival, share, paper=paper)
    streams = comparisons[ours.name].measurements if ours.name in comparisons else {}
    columns = ours.columns if check.column == MEAN else (check.column,)
    findings = [_against(streams, check, rival, columns) for rival in check.rivals]
    verdicts = [f.verdict for f in findings]
    # one rival that is clearly ahead is enough to fail; all must be beaten to hold
    joint = next((v for v in (FAILS, UNMEASURED, OPEN) if v in verdicts), HOLDS)
    decisive = [f for f in findings if f.verdict == joint]
    strongest = min(decisive, key=lambda f: np.inf if f.ours is None else f.ours)
    return Finding(
        joint, strongest.rival, strongest.ours, strongest.interval, strongest.parts, paper
    )


def _against(streams: Streams, check: Check, rival: str, columns: Sequence[str]) -> Finding:
    pairs = by_corruption(streams, check.row, rival, columns)
    if not pairs:
        return Finding(UNMEASURED, rival)
    ours, theirs = zip(*pairs.values(), strict=True)
    parts = {corruption: a - b for corruption, (a, b) in pairs.items()}
    if len(parts) < FEWEST:
        return Finding(OPEN, rival, float(np.mean(list(parts.values()))), None, parts)
    mean, low, high = paired_difference(ours, theirs)
    return Finding(verdict((low, high), check.side), rival, mean, (low, high), parts)


def by_corruption(
    streams: Streams, row: str, rival: str, columns: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """Accuracy of both rows in percent on the same streams: mean over seeds, then over columns.

    A corruption that lacks one of the columns is left out.
    """
    pairs: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for column in columns:
        a, b = (
            {(s.stream, s.pair): 100 * s.accuracy for s in streams.get((name, column), ())}
            for name in (row, rival)
        )
        for stream in sorted(a.keys() & b.keys()):
            corruption = stream[0][0]
            pairs[corruption][column].append((a[stream], b[stream]))
    means = {}
    for corruption in sorted(pairs):
        if len(pairs[corruption]) == len(columns):
            ours, theirs = np.mean([np.mean(p, 0) for p in pairs[corruption].values()], 0)
            means[corruption] = (float(ours), float(theirs))
    return means


@cache
def corruptions_of(name: str) -> tuple[str, ...]:
    """All corruptions of a table."""
    return tuple(dict.fromkeys(cell.corruption for cell in table(name).cells(PROFILE, 1)))


def whole_mean(streams: Sequence[Measurement], name: str) -> float | None:
    """Mean accuracy in percent; None unless every corruption of the table was measured."""
    whole = {s.stream[0] for s in streams} >= set(corruptions_of(name))
    return float(np.mean([100 * s.accuracy for s in streams])) if whole else None


def verdict(interval: Interval, side: Interval) -> str:
    """Holds if the whole interval is on the claimed side, fails if none of it is."""
    low, high = interval
    if side[0] < low and high < side[1]:
        return HOLDS
    return FAILS if high < side[0] or low > side[1] else OPEN


def _paper(check: Check, ours: Table) -> float | None:
    theirs = table(check.paper_table or check.table)
    row = check.paper_row or check.row
    rivals = [check.paper_minus] if check.paper_minus else check.rivals
    columns = [check.column]
    if check.column == MEAN and set(ours.columns) != set(theirs.columns):
        columns = list(ours.columns)  # the mean over our columns, not the printed one
    numbers = {
        name: np.mean([theirs.paper[name, c] for c in columns])
        for name in (row, *rivals)
        if all((name, c) in theirs.paper for c in columns)
    }
    rivals = [rival for rival in rivals if rival in numbers]
    if row not in numbers or not rivals:
        return None
    if ours.kind == "counts":
        return _share(theirs.paper, row, rivals[0], check.column)
    return min(float(numbers[row] - numbers[rival]) for rival in rivals)


def _share(numbers: Mapping[Spot, float], row: str, rival: str, column: str) -> float:
    """How much larger a row's number is than its rival's, in percent."""
    return 100 * (numbers[row, column] / numbers[rival, column] - 1)
