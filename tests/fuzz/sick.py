"""Cases that do what must not happen, to see that it is noticed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.workers import Case

DOES = ["nothing", "raise", "crash", "nothing", "hang", "eat", "nothing"]


def prepare(folder: Path) -> Case:
    """See `tests.fuzz.workers`."""

    def try_one(rng: random.Random, case: int) -> Counter[str]:
        match DOES[case]:
            case "raise":
                raise ZeroDivisionError
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "hang":
                time.sleep(1000)
            case "eat":
                bytearray(1 << 40)
        return Counter({"cases": 1})

    return try_one
