"""Claims, as ``claims.yaml`` and ``beyond.yaml`` list them, tested on records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import sub
from pathlib import Path
from typing import Literal, Self

import numpy as np
import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from reproduction.records import Record
from twoshift.bench.table import MEAN, Table, load_table
from twoshift.bench.table_file import explained
from twoshift.errors import UnknownName
from twoshift.metrics import mean_interval
from twoshift.registry import near_miss
from twoshift.report.compare import Comparison, Measurement, Spot, compare

CLAIMS, BEYOND = (Path(__file__).with_name(f"{name}.yaml") for name in ("claims", "beyond"))
PROFILE = "cpu"
FEWEST = 4  # corruptions that an interval needs
VERDICTS = HOLDS, FAILS, OPEN, UNMEASURED = "holds", "fails", "open", "not measured"
Comparisons = dict[str, Comparison]  # by table
Streams = Mapping[Spot, Sequence[Measurement]]  # accuracies of single streams, by row and column
Interval = tuple[float, float]
ABOVE: Interval = (0.0, np.inf)


class Check(BaseModel, extra="forbid", frozen=True):
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
        return ABOVE if self.claimed == "above" else (-np.inf, 0.0)


class Claim(BaseModel, extra="forbid", frozen=True):
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
        verdict: One of ``VERDICTS``.
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
        names = [("row", row, ours, ours.rows) for row in (check.row, *check.rivals)]
        rows = filter(None, (check.paper_row, check.paper_minus))
        names += [("row", row, theirs, theirs.rows) for row in rows]
        names.append(("column", check.column, ours, (*ours.columns, MEAN)))
        for kind, name, owner, known in names:
            if name not in known:
                cure = near_miss(name, known)
                raise UnknownName(f"no {kind} {name!r} in {owner.name}", cure=cure)
    return claims


table = cache(load_table)  # every table is loaded once


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
        (rival,), counts = check.rivals, _counts(ours.name)
        share = _share(counts[check.row, check.column], counts[rival, check.column])
        return Finding(verdict((share, share), check.side), rival, share, paper=paper)
    streams = comparisons[ours.name].measurements if ours.name in comparisons else {}
    columns = ours.columns if check.column == MEAN else (check.column,)
    findings = [against(streams, check.row, r, columns, check.side) for r in check.rivals]
    # one rival that is clearly ahead is enough to fail; all must be beaten to hold
    rank = (FAILS, UNMEASURED, OPEN, HOLDS).index
    strongest = min(findings, key=lambda f: (rank(f.verdict), f.ours or 0.0))
    return replace(strongest, paper=paper)


def against(
    streams: Streams, row: str, rival: str, columns: Sequence[str], side: Interval = ABOVE
) -> Finding:
    """What the streams say about the difference between two rows, claimed to be on a side."""
    parts = differences(streams, row, rival, columns)
    if not parts:
        return Finding(UNMEASURED, rival)
    values = list(parts.values())
    mean = float(np.mean(values))
    if len(values) < FEWEST:
        return Finding(OPEN, rival, mean, None, parts)
    interval = mean_interval(values)
    return Finding(verdict(interval, side), rival, mean, interval, parts)


def differences(streams: Streams, row: str, rival: str, columns: Sequence[str]) -> dict[str, float]:
    """Points of accuracy by which a row is ahead of its rival on the same streams, by corruption.

    Accuracies are means over seeds, then over columns. A corruption that lacks one of the columns
    is left out.
    """
    pairs: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for column in columns:
        a, b = (
            {(s.stream, s.pair): 100 * s.accuracy for s in streams.get((name, column), ())}
            for name in (row, rival)
        )
        for stream in sorted(a.keys() & b.keys()):
            pairs[stream[0][0]][column].append((a[stream], b[stream]))
    means = {
        corruption: np.mean([np.mean(p, 0) for p in by_column.values()], 0)
        for corruption, by_column in sorted(pairs.items())
        if len(by_column) == len(columns)
    }
    return {corruption: float(ours - theirs) for corruption, (ours, theirs) in means.items()}


@cache
def corruptions_of(name: str) -> tuple[str, ...]:
    """All corruptions of a table."""
    return tuple(dict.fromkeys(cell.corruption for cell in table(name).cells(PROFILE, 1)))


def whole_means(name: str, streams: Streams, row: str, columns: Sequence[str]) -> dict[str, float]:
    """Mean accuracy of a row of a table in percent, by column.

    Empty unless the row was measured on every corruption of the table in every column.
    """
    measured = {column: streams.get((row, column), ()) for column in columns}
    whole = set(corruptions_of(name))
    if not all({m.stream[0] for m in of_column} >= whole for of_column in measured.values()):
        return {}
    return {c: float(np.mean([100 * m.accuracy for m in measured[c]])) for c in columns}


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
        name: float(np.mean([theirs.paper[name, c] for c in columns]))
        for name in (row, *rivals)
        if all((name, c) in theirs.paper for c in columns)
    }
    rivals = [rival for rival in rivals if rival in numbers]
    if row not in numbers or not rivals:
        return None
    difference = _share if ours.kind == "counts" else sub
    return min(difference(numbers[row], numbers[rival]) for rival in rivals)


def _share(number: float, rival: float) -> float:
    """How much larger a number is than its rival, in percent."""
    return 100 * (number / rival - 1)
