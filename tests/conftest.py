"""What tests in several rooms need."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("twoshift", deadline=None)  # a busy machine is no failure
settings.load_profile("twoshift")


@pytest.fixture(scope="session", autouse=True)
def few_windows():
    """Calibration draws hundreds of windows; what they are good for is tested by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("twoshift.calibration.cross_fitting.WINDOWS", 12)
        yield


@pytest.fixture(scope="session", autouse=True)
def few_shifts():
    """Calibration simulates streams of 512 images under 13 conditions: here of 128, under 5."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("twoshift.calibration.shifts.SEVERITIES", (3,))
        patch.setattr("twoshift.calibration.shifts.BATCH", 16)
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with the real data sets, as users have them; read it, never write to it."""
    if given := os.environ.get("TWOSHIFT_TEST_DATA"):
        return Path(given)
    script = Path(__file__).resolve().parents[2] / "shared" / "data" / "unpack.py"
    if not script.is_file():
        pytest.skip("the real data are not here: set TWOSHIFT_TEST_DATA")
    return _unpack_once(script, Path(tempfile.gettempdir()) / f"twoshift-test-data-{os.getuid()}")


def _unpack_once(script: Path, target: Path) -> Path:
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers wait here, then find it done
        if not target.exists():
            fresh = target.with_name(f"{target.name}.fresh")
            shutil.rmtree(fresh, ignore_errors=True)  # left by a run that was killed
            subprocess.run([sys.executable, script, fresh], check=True, stdout=subprocess.DEVNULL)
            fresh.rename(target)
    return target
