"""Measured speeds, as tables for a terminal and as JSON.

``python -m benchmarks.speed_report`` makes ``docs/speed.md`` of what is in ``results/``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.timing import Check
from reproduction import markdown
from twoshift.errors import TwoshiftError
from twoshift.storage import atomic_file, write_json

Measurements = dict[str, Any]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer rounds; times are rough")]
Out = Annotated[Path, typer.Option("--out", help="JSON file to write")]
LIMITS_HEAD = ("measured", "value", "limit", "")
COLOURS = {"pass": "green", "FAIL": "red"}
METHODS_HEAD = ("method", "network", "ms/batch", "/ forward", "forwards", "backwards", "peak MB")


def finish(out: Path, checks: Sequence[Check], *notes: str, **facts: Any) -> None:
    """Print and write what was measured; the exit code is 1 if a limit is broken.

    Args:
        out: JSON file to write.
        checks: The measured values and their limits.
        notes: Lines to print below the tables.
        facts: Other contents of the file, by name.
    """
    speeds = {**facts, "checks": [{**asdict(c), "ok": c.ok} for c in checks]}
    console = Console(width=None if Console().is_terminal else 120)
    console.print(_table("Limits", LIMITS_HEAD, _limit_rows(speeds)))
    if "methods" in speeds:
        console.print(_table("Methods, per batch", METHODS_HEAD, _method_rows(speeds)))
    for note in notes:
        console.print(note, markup=False)
    try:
        write_json(out, speeds)
    except TwoshiftError as e:
        Console(stderr=True).print(f"{type(e).__name__}: {e}", style="red", markup=False)
        raise typer.Exit(2) from e
    if not all(c.ok for c in checks):
        raise typer.Exit(1)


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table for a terminal, with verdicts in colour."""
    table = Table(*heads, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(Text(entry, COLOURS.get(entry, "")) for entry in row))
    return table


def page(speeds: Measurements, streams: Measurements) -> str:
    """The page ``docs/speed.md``.

    Args:
        speeds: What `benchmarks.speed` measured.
        streams: What `benchmarks.streams` measured.
    """
    s, t = speeds["settings"], streams["settings"]
    shape = f"{s['batch'][0]} images of {s['batch'][2]} x {s['batch'][3]}"
    opening = (
        "Made by `make speed`, which fails if a limit is broken: if even the lower quartile is "
        "above it. Ratios are medians, with quartiles, over rounds in which the candidates take "
        "turns, so that a busy machine changes them little. The milliseconds are those of one "
        f"machine ({s['machine']}, {s['threads']} threads, torch {s['versions']['torch']}). "
        f"Network: {s['network']}; batches of {shape}."
    )
    many = (
        f"Measured with {t['network']}, images of {t['size']} x {t['size']}, {t['threads']} "
        "thread. The streams are those of `recommended`; C is the number of classes. Memory is "
        "what the process needs beyond the model, at its peak where that is said; calibrations "
        "that are saved or loaded are part of it. Times are medians, with quartiles."
    )
    return f"""\
# Speed

{markdown.paragraph(opening)}

## Methods

The cost of a batch. Forwards and backwards are passes through the network per image of the stream.
Peak memory is counted from the start of the first batch.

{markdown.table(METHODS_HEAD, _method_rows(speeds))}
## Limits

{markdown.table(LIMITS_HEAD, _limit_rows(speeds))}
## Many streams, many classes

{markdown.paragraph(many)}

{markdown.table(LIMITS_HEAD, _limit_rows(streams))}
{FASTER}"""


FASTER = """\
## Faster

- **Channels last.** On a CPU, give images as `x.contiguous(memory_format=torch.channels_last)`, as
  streams of `twoshift.data` do: convolutions and batch statistics are quicker.
- **Compiled.** `live.compile()` compiles the network inside by `torch.compile`. The next batch
  takes long, half a minute for a ResNet-18. It is worth that where forward passes are most of the
  time, as in `matched`, `bn_stats` and `recommended`; methods that learn gain little. Names,
  states, `reset`, `save` and streams stay as they are; predictions change by rounding. It needs
  a C++ compiler, and says so if there is none.
- **Memory that stays.** glibc returns memory after every batch and asks for it again, which was a
  third of the CPU time of a batch above where nothing else ran in the process. A service that
  predicts all day can keep it, by `MALLOC_TRIM_THRESHOLD_=1073741824` and
  `MALLOC_MMAP_THRESHOLD_=1073741824` in its environment.
- **Threads that wait.** Where other work shares the cores, `GOMP_SPINCOUNT=0` in the environment
  lets the threads of torch wait without using a core; so does `OMP_NUM_THREADS=1`, by having one.
"""


def main(results: Path = Path("results"), out: Path = Path("docs/speed.md")) -> None:
    """Write the page."""
    files = ("speed.json", "streams-speed.json")
    speeds, streams = (json.loads((results / name).read_text()) for name in files)
    with atomic_file(out) as temporary:
        temporary.write_text(page(speeds, streams))


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


if __name__ == "__main__":
    typer.run(main)
