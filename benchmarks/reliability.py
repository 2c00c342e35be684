"""What hostile input, kills, threads and full disks do: ``python -m benchmarks.reliability``.

Every part of the fuzz suite is run with all its cases, in processes that may die. Numbers go into a
JSON file, from which ``docs/reliability.md`` is made. The exit code is 1 if anything but a
`TwoshiftError` came of it.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import twoshift
from benchmarks.reliability_report import page
from tests.fuzz import workers
from tests.fuzz.kills import kill_while_saving
from twoshift.bench.provenance import revision
from twoshift.storage import atomic_file, write_json

# cases of every part
CASES = {
    "batches": 190,  # streams, each with 80 bad or unusual batches
    "machine": 40,
    "tampered": 5100,
    "files": 2450,
    "threads": 40,
    "full_disk": 280,
}
KILLS = {1: 200, 2: 60}  # by the number of processes that save at once
SEED = 0


def facts() -> dict[str, Any]:
    """Where and with what it was run."""
    return {
        "versions": {
            "twoshift": twoshift.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "revision": revision(),
        "machine": f"{platform.system()}, {platform.machine()}",
        "cores": os.cpu_count(),
        "seed": SEED,
    }


def killed(share: float) -> workers.Report:
    """Kill processes that save, with a reader beside."""
    report, start = workers.Report(), time.monotonic()
    for savers, kills in KILLS.items():
        try:
            happened = kill_while_saving(max(1, round(kills * share)), SEED, savers=savers)
            report.counts.update(happened)
        except AssertionError as e:
            report.counts.update({"problems": 1})
            report.problems.append(f"python -m tests.fuzz.kills {kills} {SEED} 0.08 {savers}: {e}")
    report.seconds = time.monotonic() - start
    return report


def measure(part: str, share: float) -> dict[str, Any]:
    """Run one part; the numbers are what `docs/reliability.md` shows."""
    if part == "kills":
        report = killed(share)
    else:
        report = workers.run(part, max(1, round(CASES[part] * share)), SEED)
    counts: Counter[str] = report.counts
    return {
        "counts": {name: int(count) for name, count in sorted(counts.items()) if count},
        "problems": report.problems,
        "seconds": round(report.seconds),
    }


def main(
    parts: Annotated[list[str] | None, typer.Argument(help="Only these; the others stay")] = None,
    share: Annotated[float, typer.Option(help="Share of the cases to run")] = 1.0,
    out: Annotated[Path, typer.Option("--out", help="JSON file")] = Path(
        "results/reliability.json"
    ),
    page_file: Annotated[Path | None, typer.Option("--page", help="Markdown page")] = None,
) -> None:
    """Run the fuzz suite; the exit code is 1 if anything went wrong."""
    known = ["kills", *CASES]
    if unknown := [part for part in parts or [] if part not in known]:
        raise typer.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(known)}")
    found = json.loads(out.read_text())["parts"] if parts and out.exists() else {}
    for part in parts or known:
        found[part] = measure(part, share)
        counts = ", ".join(f"{count:,} {name}" for name, count in found[part]["counts"].items())
        typer.echo(f"{part}: {counts} ({found[part]['seconds']} s)")
        for problem in found[part]["problems"]:
            typer.echo(f"PROBLEM {problem}")
        measured = {"settings": facts(), "parts": {name: found[name] for name in sorted(found)}}
        write_json(out, measured)
    if page_file is not None:
        with atomic_file(page_file) as temporary:
            temporary.write_text(page(measured))
    if any(found[part]["problems"] for part in found):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
