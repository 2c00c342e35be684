"""Where a number comes from: pixels, versions, revision, threads, device, time, memory."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from twoshift import __version__
from twoshift.data.base import ImageSet


def run_facts(images: ImageSet, device: torch.device, seconds: float) -> dict[str, Any]:
    """Where a number comes from: pixels, versions, revision, threads, device, time, memory."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    divisor = 2**20 if sys.platform == "darwin" else 2**10
    return {
        "pixels": images.origin,
        "skipped_images": images.skipped,
        "twoshift": __version__,
        "revision": revision(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "seconds": round(seconds, 3),
        "peak_memory_mb": round(kilobytes / divisor),
    }


@cache
def revision() -> str | None:
    """The commit of the repository that the package is in; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
