"""Records: published results, one JSON object per line of ``results/*.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path

from twoshift.bench.result import Result as Record

__all__ = ["Record", "read"]


def read(path: Path) -> list[Record]:
    """All records of a file."""
    return [Record.from_json(json.loads(line)) for line in path.read_text("utf-8").splitlines()]
