"""What the fuzz suite found, as the page ``docs/reliability.md``."""

from __future__ import annotations

from typing import Any

from reproduction import markdown

Measured = dict[str, Any]
HEADS = ("tried", "how often", "what happened")
FAILURES = ("problems", "crashes", "hangs")
ERRORS = ("Error", "UnknownName", "DataCorrupt", "DataMissing")


def page(measured: Measured) -> str:
    """The page ``docs/reliability.md``."""
    s, parts = measured["settings"], measured["parts"]
    problems = sum(len(part["problems"]) for part in parts.values())
    minutes = sum(part["seconds"] for part in parts.values()) / 60
    outcome = (
        "Nothing but a `TwoshiftError` came of any of it: no crash, no hang, no other exception, "
        "and no state that a refusal had changed."
        if not problems
        else f"{problems} cases ended otherwise than by a `TwoshiftError`; they are listed below."
    )
    opening = (
        "Made by `make fuzz`. It gives twoshift what nobody should give it, and counts what "
        f"happens. {outcome} The last full run took {minutes:.0f} minutes (torch "
        f"{s['versions']['torch']}, Python {s['versions']['python']}, {s['machine']}, "
        f"{s['cores']} cores, revision {s['revision']}, seed {s['seed']})."
    )
    failed = [problem for part in parts.values() for problem in part["problems"]]
    listed = "\n".join(f"    {line}" for problem in failed for line in problem.splitlines())
    return f"""\
# Reliability

{markdown.paragraph(opening)}

{markdown.table(HEADS, _rows(parts), numbers=("how often",))}
## What is tried

**Bad batches.** Every method on every small network of `twoshift.testing`, without and with an
adapter and a label estimate, and `recommended`. Batches of the wrong rank, shape, size or type;
empty ones; NaN, infinity and numbers that overflow; tensors that are sparse, quantised, nested,
masked, fake, on no device, without memory, or no tensors at all; images far outside of the
range or size that the calibration saw. Each is refused, the state is the same before and after,
bit for bit, and the next good batch gives what it would have given. Two in five are unusual
rather than bad: images that are stored in another way (strided, expanded, with gradients, from
inference mode) must be taken; those of another size or brightness may be, where the network
takes them and nothing is known of its images, and then the prediction must be finite.

**Sequences.** Good and bad batches, resets, saves, loads and streams in any order that
hypothesis thinks of, compared bit for bit with methods that saw the good batches only.

**Tampered folders.** Saved states, adapters, source models and calibrations whose cards,
tensors or bytes were changed, with checksums that fit again. Each is refused, or loads, and
what can predict then predicts finite numbers; within 2 GB of memory and two minutes.

**Kills.** A process is killed while it saves, and another one reads the folder all the time. It
always reads what was saved last or what was being saved, whole; the next save sweeps what was
left.

**Threads.** Eight threads use one method: each a stream of its own, and all of them the
method's own stream, with saves, resets and bad batches in between. What each stream predicted
is the same, bit for bit, as when it is alone; all states that were saved meanwhile load.

**Full disks.** States, adapters, source and training models, calibrations, result stores,
exports, pages and figures are saved with a random number of bytes left. The error is a
`StorageError`, the old content is still there, and nothing is left behind.

**Strangers' files.** Pickles, JSON lines of results, recipes, image lists, images, arrays and
weights that are damaged, cut, or made to do harm. What a results store takes must also come out
again, in every kind of report.

## Run it again

```bash
make fuzz                                       # all of it: half an hour on two idle cores
python -m benchmarks.reliability tampered       # one part
python -m tests.fuzz.workers tampered 58 59 0   # case 58 of a part, seed 0
```

A short run of the same functions is part of the tests (`tests/fuzz/test_short.py`).

## What is not covered

- GPUs, Windows, macOS, and network file systems.
- A model that does harm by itself: it is Python code, and runs.
- Somebody who changes a folder while it is being loaded, beyond saving to it.
- Losing power: folders are synced before they are renamed, but no disk was unplugged.
- Memory that runs out elsewhere than in a load.
{
        ""
        if not failed
        else f'''
## What went wrong

{listed}
'''
    }"""


def _rows(parts: Measured) -> list[tuple[str, str, str]]:
    rows = []
    for name, (what, unit) in UNITS.items():
        if name in parts:
            counts = parts[name]["counts"]
            rows.append((what, f"{counts.get(unit, 0):,}", _outcome(name, counts)))
    return rows


# what each part is called, and what of it is counted
UNITS = {
    "batches": ("bad and unusual batches", "batches"),
    "machine": ("steps in random order", "steps"),
    "tampered": ("tampered folders", "files"),
    "kills": ("kills while saving", "kills"),
    "threads": ("methods x networks under 8 threads", "methods x networks"),
    "full_disk": ("saves onto a full disk", "saves"),
    "files": ("strangers' files", "files"),
}


def _outcome(name: str, counts: dict[str, int]) -> str:
    refused = sum(count for kind, count in counts.items() if kind.endswith(ERRORS))
    said = {
        "batches": f"{refused:,} refused, {counts.get('taken', 0):,} taken",
        "machine": f"the same in all {counts.get('sequences', 0):,} sequences",
        "tampered": f"{refused:,} refused, {counts.get('taken', 0):,} loaded",
        "kills": f"{counts.get('read beside', 0):,} reads meanwhile, none torn",
        "threads": f"{counts.get('calls', 0):,} predictions as alone, "
        f"{counts.get('saved states loaded', 0):,} saved states loaded",
        "full_disk": f"{refused:,} refused, {counts.get('it fitted', 0):,} fitted",
        "files": f"{refused:,} refused, {counts.get('read', 0):,} read",
    }[name]
    failures = [f"**{counts[kind]:,} {kind}**" for kind in FAILURES if counts.get(kind)]
    return "; ".join([said, *failures])
