"""The record of `benchmarks.speed` as tables for a terminal and as a page of the documentation."""

from __future__ import annotations

from typing import Any

from rich.table import Table

Record = dict[str, Any]
LIMITS_HEAD = ("measured", "value", "limit", "")
METHODS_HEAD = ("method", "network", "ms/batch", "/ forward", "forwards", "backwards", "peak MB")


def limits(record: Record) -> Table:
    """What must stay in its range."""
    table = Table(*LIMITS_HEAD, title="Limits", title_justify="left")
    colours = {"pass": "[green]pass[/]", "FAIL": "[red]FAIL[/]", "": ""}
    for name, value, limit, verdict in _limit_rows(record):
        table.add_row(name, value.replace("[", r"\["), limit, colours[verdict])
    return table


def per_method(record: Record) -> Table:
    """What a batch costs."""
    table = Table(*METHODS_HEAD, title="Methods, per batch", title_justify="left")
    for row in _method_rows(record):
        table.add_row(*row)
    return table


def markdown(record: Record) -> str:
    """The page ``docs/speed.md``."""
    s = record["settings"]
    lines = [
        "# Speed",
        "",
        "Made by `make speed`, which fails where a limit is broken. Ratios are medians over rounds",
        "in which the candidates take turns, with quartiles; a busy machine moves them less. The",
        f"milliseconds are of one machine ({s['machine']}, {s['threads']} threads, torch "
        f"{s['versions']['torch']}).",
        f"Network: {s['network']}; batches of {s['batch'][0]} images of "
        f"{s['batch'][2]} x {s['batch'][3]}.",
        "",
        "## Methods",
        "",
        "Per batch; forwards and backwards are images through the network per image of the stream.",
        "Peak memory is above what is there before the first batch.",
        "",
        *_markdown_table(METHODS_HEAD, _method_rows(record)),
        "",
        "## Limits",
        "",
        *_markdown_table(LIMITS_HEAD, _limit_rows(record)),
    ]
    return "\n".join(lines) + "\n"


def _limit_rows(record: Record) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for c in record["checks"]:
        number = f"{c['value']:.4g}" if c["value"] < 1000 else f"{c['value']:,.0f}"
        value = f"{number}x" if c["unit"] == "x" else f"{number} {c['unit']}"
        spread = f" [{c['spread'][0]:.3f}, {c['spread'][1]:.3f}]" if c["spread"] else ""
        low, high = c["low"], c["high"]
        if high is None:
            limit = f"at least {low:g}" if low else ""
        else:
            limit = f"{low:g} to {high:,.6g}" if low else f"at most {high:,.6g}"
        verdict = "" if not limit else "pass" if c["ok"] else "FAIL"
        rows.append((c["name"], value + spread, limit, verdict))
    return rows


def _method_rows(record: Record) -> list[tuple[str, ...]]:
    return [
        (
            name,
            cost["norm"],
            f"{cost['ms']:.1f}",
            f"{cost['ratio']:.2f}x",
            f"{cost['forwards']:.2f}",
            f"{cost['backwards']:.2f}",
            "" if cost["peak_mb"] is None else f"{cost['peak_mb']:.0f}",
        )
        for name, cost in record["methods"].items()
    ]


def _markdown_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|---|" + "---:|" * (len(head) - 1),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
