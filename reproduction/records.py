"""Records: measured results as ``results/*.jsonl`` stores them, one JSON object per line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read(path: Path) -> list[Record]:
    """All records of a file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
