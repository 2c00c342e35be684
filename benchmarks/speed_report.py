"""The measurements of `benchmarks.speed`, as tables for a terminal and as ``docs/speed.md``."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from reproduction import markdown

Measurements = dict[str, Any]
LIMITS_HEAD = ("measured", "value", "limit", "")
METHODS_HEAD = ("method", "network", "ms/batch", "/ forward", "forwards", "backwards", "peak MB")


def limits(speeds: Measurements) -> Table:
    """The checks and their limits."""
    table = Table(*LIMITS_HEAD, title="Limits", title_justify="left")
    colours = {"pass": "[green]pass[/]", "FAIL": "[red]FAIL[/]", "": ""}
    for name, value, limit, verdict in _limit_rows(speeds):
        table.add_row(name, value.replace("[", r"\["), limit, colours[verdict])
    return table


def per_method(speeds: Measurements) -> Table:
    """What a batch costs under each method."""
    table = Table(*METHODS_HEAD, title="Methods, per batch", title_justify="left")
    for row in _method_rows(speeds):
        table.add_row(*row)
    return table


def page(speeds: Measurements) -> str:
    """The page ``docs/speed.md``."""
    s = speeds["settings"]
    shape = f"{s['batch'][0]} images of {s['batch'][2]} x {s['batch'][3]}"
    opening = (
        "Made by `make speed`, which fails if a limit is broken. Ratios are medians, with "
        "quartiles, over rounds in which the candidates take turns, so that a busy machine changes "
        f"them little. The milliseconds are those of one machine ({s['machine']}, {s['threads']} "
        f"threads, torch {s['versions']['torch']}). Network: {s['network']}; batches of {shape}."
    )
    explanation = (
        "The cost of a batch. Forwards and backwards are passes through the network per image of "
        "the stream. Peak memory is counted from the start of the first batch."
    )
    lines = [
        "# Speed",
        "",
        markdown.paragraph(opening),
        "",
        "## Methods",
        "",
        markdown.paragraph(explanation),
        "",
        markdown.table(METHODS_HEAD, _method_rows(speeds)),
        "## Limits",
        "",
        markdown.table(LIMITS_HEAD, _limit_rows(speeds)),
    ]
    return "\n".join(lines)


def _limit_rows(speeds: Measurements) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for c in speeds["checks"]:
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


def _method_rows(speeds: Measurements) -> list[tuple[str, ...]]:
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
        for name, cost in speeds["methods"].items()
    ]
