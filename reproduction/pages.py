"""``docs/reproduction.md`` and ``docs/beyond.md``: claims tested on the records in ``results/``."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from reproduction import gains, markdown, order, regret
from reproduction.claims import (
    BEYOND,
    FAILS,
    FEWEST,
    HOLDS,
    UNMEASURED,
    VERDICTS,
    Check,
    Claim,
    Comparisons,
    Finding,
    compare_tables,
    judge,
    load_claims,
    table,
)
from reproduction.records import Record
from twoshift.metrics import FEW
from twoshift.report.columns import heading
from twoshift.report.markdown import plain

TEMPLATES = Path(__file__).with_name("templates")
NUMBERS = ("corruptions", "seeds", "paper", "ours", "corruptions that agree")  # columns, by head
Findings = Sequence[tuple[Check, Finding]]
Verdicts = Sequence[tuple[Claim, Findings]]


def page(records: Sequence[Record], claims: Sequence[Claim] | None = None) -> str:
    """The paper's claims, as Markdown."""
    claims = load_claims() if claims is None else claims
    return _page("reproduction", claims, records, order=order.section(records))


def beyond_page(records: Sequence[Record]) -> str:
    """Our own claims, as Markdown."""
    sections = {"gains": gains.section(records), "regret": regret.section(records)}
    return _page("beyond", load_claims(BEYOND), records, **sections)


def _page(name: str, claims: Sequence[Claim], records: Sequence[Record], **sections: str) -> str:
    judged, comparisons = _judge(claims, records)
    return fill(
        name,
        extent=_extent(judged, comparisons),
        rules=fill("rules", few=FEW, fewest=FEWEST),
        summary=_summary(judged),
        claims="\n".join(_section(*claim) for claim in judged),
        **sections,
    )


def fill(name: str, **values: object) -> str:
    """The text of ``templates/NAME.md`` with values in its fields."""
    return (TEMPLATES / f"{name}.md").read_text("utf-8").format(**values)


def verdicts(records: Sequence[Record]) -> Counter[str]:
    """How often each verdict is given on the paper's claims."""
    return _count(_judge(load_claims(), records)[0])


def _judge(claims: Sequence[Claim], records: Sequence[Record]) -> tuple[Verdicts, Comparisons]:
    comparisons = compare_tables({check.table for c in claims for check in c.checks}, records)
    judged = [(c, [(check, judge(check, comparisons)) for check in c.checks]) for c in claims]
    return judged, comparisons


def _count(judged: Verdicts) -> Counter[str]:
    return Counter(f.verdict for _, findings in judged for _, f in findings)


def _extent(judged: Verdicts, comparisons: Comparisons) -> str:
    """How much of each table was measured, and how it differs from the paper's.

    Tables that agree in all of this share a line.
    """
    corruptions: dict[str, set[str]] = defaultdict(set)
    for check, f in (pair for _, findings in judged for pair in findings):
        corruptions[check.table].update(f.parts)
    names: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, parts in corruptions.items():
        facts = ("", "", UNMEASURED)
        if table(name).kind == "counts":
            facts = ("", "", "nothing: counted on the paper's network")
        elif parts:
            seeds = {s.pair for streams in comparisons[name].measurements.values() for s in streams}
            facts = (str(len(parts)), str(len(seeds)), plain("; ".join(comparisons[name].notes)))
        names[facts].append(f"`{name}`")
    rows = [[", ".join(tables), *facts] for facts, tables in names.items()]
    return _table(["table", "corruptions", "seeds", "differs from the paper in"], rows)


def _summary(judged: Verdicts) -> str:
    counts = _count(judged)
    total = ", ".join(f"{v} {counts[v]}" for v in VERDICTS)
    rows = [
        [f"[{check.says}](#{_anchor(claim.title)})", *_numbers(check, f), _bold(f.verdict)]
        for claim, findings in judged
        for check, f in findings
    ]
    lines = ["## In short", "", f"{counts.total()} comparisons: {total}.", ""]
    return "\n".join([*lines, _table(["claim", "paper", "ours", "verdict"], rows)])


def _section(claim: Claim, findings: Findings) -> str:
    lines = [f"## {claim.title}", ""]
    if claim.paper:
        lines += [markdown.paragraph(f"“{claim.paper}” ({claim.where})", "> "), ""]
    heads = ["compared", "at", "claimed", "paper", "ours", "corruptions that agree", "verdict"]
    rows = [_row(check, f) for check, f in findings]
    lines += [markdown.paragraph(claim.reading), "", _table(heads, rows)]
    if sentences := " ".join(filter(None, (_sentence(check, f) for check, f in findings))):
        lines += [markdown.paragraph(sentences), ""]
    parts = [_parts(check, f) for check, f in findings if f.parts and f.interval is None]
    return "\n".join([*lines, *parts, ""] if parts else lines)


def _row(check: Check, f: Finding) -> list[str]:
    low, high = check.side
    agreeing = sum(low < difference < high for difference in f.parts.values())
    return [
        _difference(check, f),
        heading(check.column),
        f"{check.claimed} 0" if check.within is None else f"within {check.within:g}{_unit(check)}",
        *_numbers(check, f),
        f"{agreeing} of {len(f.parts)}" if f.parts else "",
        _bold(f.verdict),
    ]


def _difference(check: Check, f: Finding) -> str:
    several = f.verdict == UNMEASURED and len(check.rivals) > 1
    rival = "the strongest other row" if several else f.rival
    group, _, row = check.row.rpartition(": ")
    prefix = f"{group}: " if group else ""
    return f"{prefix}{row} − {rival.removeprefix(prefix)}"


def _sentence(check: Check, f: Finding) -> str:
    text = {HOLDS: check.holds, FAILS: check.fails}.get(f.verdict, "")
    return text.format(size=f"{abs(f.ours or 0):.1f}", rival=f.rival)


def _parts(check: Check, f: Finding) -> str:
    parts = ", ".join(f"{heading(c)} {d:+.1f}" for c, d in f.parts.items())
    return f"- {_difference(check, f)}, {heading(check.column)}: {parts}."


def _numbers(check: Check, f: Finding) -> tuple[str, str]:
    """The paper's number, with as many digits as it prints, and ours."""
    unit = _unit(check)
    paper = "" if f.paper is None else f"{f.paper:+.2f}{unit}"
    ours = "" if f.ours is None else f"{f.ours:+.{2 if unit else 1}f}{unit}"
    if f.interval is not None:
        ours += f" [{f.interval[0]:+.1f}, {f.interval[1]:+.1f}]"
    return paper, ours


def _unit(check: Check) -> str:
    return " %" if table(check.table).kind == "counts" else ""


def _bold(verdict: str) -> str:
    return f"**{verdict}**" if verdict in (HOLDS, FAILS) else verdict


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; a column about the paper is left out if it is empty."""
    columns = zip(heads, zip(*rows, strict=True), strict=True)
    shown = {head: column for head, column in columns if any(column) or "paper" not in head}
    return markdown.table(list(shown), zip(*shown.values(), strict=True), NUMBERS)


def _anchor(title: str) -> str:
    """The link target of a heading."""
    return re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))
