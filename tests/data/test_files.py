"""Image files: every mode, geometry against a slow reference, damage, and caching."""

from __future__ import annotations

import gc
import os
import pickle
import socket
import struct
import zlib
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from warnings import simplefilter

import numpy as np
import psutil
import pytest
from PIL import Image

from twoshift.data import files
from twoshift.data.base import ImageSet
from twoshift.data.files import ImageFiles, drop_bad, unreadable
from twoshift.errors import DataCorrupt, DataMissing, SettingError

SIDE = 16


def noise(seed: int = 0, height: int = SIDE, width: int = SIDE, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def smooth(height: int, width: int) -> np.ndarray:
    """Colours that change slowly, so that JPEG hardly alters them."""
    red, green = 255 * np.mgrid[:height, :width] / np.array([height, width]).reshape(2, 1, 1)
    return np.stack([red, green, (red + green) / 2], -1).astype(np.uint8)


@pytest.fixture
def pngs(tmp_path):
    """Twelve images of noise, and their pixels."""
    pixels = np.stack([noise(seed) for seed in range(12)])
    paths = []
    for number, image in enumerate(pixels):
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(image).save(paths[-1])
    return paths, pixels


@pytest.fixture
def decodings(monkeypatch):
    """One entry for every image that is decoded."""
    images = []
    to_rgb = files._to_rgb
    monkeypatch.setattr(files, "_to_rgb", lambda image: images.append(image) or to_rgb(image))
    return images


def read(path, side: int = SIDE) -> np.ndarray:
    """Read a square image of that side, without resizing."""
    return ImageFiles([path], side, side)[np.array([0])][0]


# --- modes


def mode(path) -> str:
    with Image.open(path) as image:
        return image.mode


def grey(values) -> np.ndarray:
    return np.repeat(np.asarray(values, np.uint8)[..., None], 3, -1)


def test_grey_and_black_and_white(tmp_path):
    values = noise(channels=1)[..., 0]
    Image.fromarray(values).save(tmp_path / "l.png")
    np.testing.assert_array_equal(read(tmp_path / "l.png"), grey(values))
    Image.fromarray(values > 99).save(tmp_path / "1.png")
    assert mode(tmp_path / "1.png") == "1"
    np.testing.assert_array_equal(read(tmp_path / "1.png"), grey(255 * (values > 99)))


@pytest.mark.parametrize("transparency", [None, 3, bytes(range(0, 256, 16))])
def test_palettes(tmp_path, transparency):
    colours, numbers = noise(1, 1, 16)[0], noise(channels=1)[..., 0] % 16
    image = Image.fromarray(numbers).convert("P")
    image.putpalette(colours.tobytes())
    image.putdata(numbers.ravel().tolist())
    options = {} if transparency is None else {"transparency": transparency}
    image.save(tmp_path / "p.png", **options)
    assert mode(tmp_path / "p.png") == "P"
    np.testing.assert_array_equal(read(tmp_path / "p.png"), colours[numbers])


def test_alpha_is_dropped(tmp_path):
    rgba = noise(channels=4)
    Image.fromarray(rgba).save(tmp_path / "rgba.png")
    np.testing.assert_array_equal(read(tmp_path / "rgba.png"), rgba[..., :3])
    la = noise(channels=2)
    Image.fromarray(la).save(tmp_path / "la.png")
    assert mode(tmp_path / "la.png") == "LA"
    np.testing.assert_array_equal(read(tmp_path / "la.png"), grey(la[..., 0]))


@pytest.mark.parametrize(("name", "tolerance"), [("cmyk.tif", 1), ("cmyk.jpg", 12)])
def test_cmyk(tmp_path, name, tolerance):
    expected = smooth(SIDE, SIDE).astype(float)
    key = 255 - expected.max(-1)
    inks = 255 - 255 * expected / np.maximum(255 - key, 1)[..., None]
    cmyk = np.concatenate([inks, key[..., None]], -1).round().astype(np.uint8)
    Image.fromarray(cmyk, "CMYK").save(tmp_path / name, quality=100)
    assert mode(tmp_path / name) == "CMYK"
    assert np.abs(read(tmp_path / name) - expected).max() <= tolerance + 1


@pytest.mark.parametrize("name", ["little.png", "big.tif", "wide.tif"])
def test_sixteen_bits_are_scaled_not_clipped(tmp_path, name):
    values = np.linspace(0, 65535, SIDE * SIDE).astype(np.uint16).reshape(SIDE, SIDE)
    kind = {"little.png": "<u2", "big.tif": ">u2", "wide.tif": "<i4"}[name]
    Image.fromarray(values.astype(kind)).save(tmp_path / name)
    assert mode(tmp_path / name) in ("I;16", "I;16B", "I")
    np.testing.assert_array_equal(read(tmp_path / name), grey(values // 256))


def test_sixteen_bit_colours(tmp_path):
    values = np.random.default_rng(0).integers(0, 65536, (SIDE, SIDE, 3))
    lines = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)

    def chunk(name: bytes, content: bytes) -> bytes:
        check = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)

    head = struct.pack(">IIBBBBB", SIDE, SIDE, 16, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    (tmp_path / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + parts)
    np.testing.assert_array_equal(read(tmp_path / "x.png"), values // 256)


def test_values_without_a_known_range_are_refused(tmp_path):
    Image.fromarray(np.full((SIDE, SIDE), 70_000, np.int32)).save(tmp_path / "i.tif")
    Image.fromarray(np.full((SIDE, SIDE), 0.5, np.float32)).save(tmp_path / "f.tif")
    with pytest.raises(DataCorrupt, match="values outside 0 to 65535"):
        read(tmp_path / "i.tif")
    with pytest.raises(DataCorrupt, match="floating-point"):
        read(tmp_path / "f.tif")


def test_the_orientation_of_a_camera_is_ignored(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # held upright
    Image.fromarray(smooth(SIDE, SIDE)).save(tmp_path / "x.png", exif=exif)
    np.testing.assert_array_equal(read(tmp_path / "x.png"), smooth(SIDE, SIDE))


# --- geometry


def slow_resize(image: np.ndarray, side: int, axis: int) -> np.ndarray:
    """One axis of an antialiased bilinear resize: a triangle as wide as the reduction, by hand."""
    image = np.moveaxis(image.astype(float), axis, 0)
    scale = len(image) / side
    width = max(scale, 1.0)
    out = np.zeros((side, *image.shape[1:]))
    for i in range(side):
        centre, total = (i + 0.5) * scale, 0.0
        for j in range(len(image)):
            weight = max(0.0, 1 - abs(j + 0.5 - centre) / width)
            out[i] += weight * image[j]
            total += weight
        out[i] /= total
    return np.moveaxis(out, 0, axis)


SHAPES = [(40, 40), (40, 61), (75, 33), (9, 14), (24, 25), (33, 500), (20, 24)]


@pytest.mark.parametrize("squash", [True, False])
@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_frames_and_centres(tmp_path, height, width, squash):
    frame, size = 24, 19
    image = noise(height, height, width)
    Image.fromarray(image).save(tmp_path / "x.png")
    shorter = min(height, width)
    tall, broad = (frame if squash else int(frame * side / shorter) for side in (height, width))
    whole = slow_resize(slow_resize(image, broad, 1), tall, 0)
    top, left = round((tall - frame) / 2), round((broad - frame) / 2)
    want = whole[top : top + frame, left : left + frame]

    images = ImageFiles([tmp_path / "x.png"], size, frame, squash)
    (got,) = images.framed(slice(None))
    assert got.shape == (frame, frame, 3)
    assert np.abs(got - want).max() < 1.01  # Pillow rounds after each axis
    margin = round((frame - size) / 2)
    inner = slice(margin, margin + size)
    np.testing.assert_array_equal(images[slice(None)][0], got[inner, inner])


@pytest.mark.parametrize(("height", "width"), [(375, 500), (640, 427), (200, 180)])
def test_the_usual_view_of_imagenet(tmp_path, height, width):
    """Resize(256), CenterCrop(224), one after the other on the whole image."""
    image = Image.fromarray(noise(0, height, width))
    image.save(tmp_path / "x.png")
    shorter = min(height, width)
    broad, tall = int(256 * width / shorter), int(256 * height / shorter)
    left, top = round((broad - 224) / 2), round((tall - 224) / 2)
    whole = image.resize((broad, tall), Image.Resampling.BILINEAR)
    want = np.asarray(whole.crop((left, top, left + 224, top + 224)))
    got = ImageFiles([tmp_path / "x.png"])[np.array([0])][0]
    np.testing.assert_array_equal(got, want)


def test_a_line_of_pixels_does_not_fill_the_memory(tmp_path):
    Image.new("RGB", (20_000, 1), (9, 8, 7)).save(tmp_path / "x.png")
    with pytest.raises(DataCorrupt, match=r"x\.png: 20000 x 1 pixels"):
        ImageFiles([tmp_path / "x.png"])[slice(None)]
    assert (ImageFiles([tmp_path / "x.png"], squash=True)[slice(None)] == (9, 8, 7)).all()


def test_like_an_array(pngs):
    paths, pixels = pngs
    images = ImageFiles([str(path) for path in paths], SIDE, SIDE)
    assert images.shape == pixels.shape
    assert (len(images), images.dtype, images.ndim) == (12, np.uint8, 4)
    assert images.paths == tuple(paths)
    rows = np.array([3, 0, 3, 11])
    np.testing.assert_array_equal(images[rows], pixels[rows])
    np.testing.assert_array_equal(images[2:7:2], pixels[2:7:2])
    assert images[rows].flags.c_contiguous
    assert images[rows[:0]].shape == (0, SIDE, SIDE, 3)
    part = images.subset(rows).subset(slice(1, 3))
    assert part.paths == (paths[0], paths[3])
    np.testing.assert_array_equal(part[np.array([1, 0])], pixels[[3, 0]])


def test_images_may_be_changed_after_reading(pngs):
    paths, pixels = pngs
    images = ImageFiles(paths, SIDE, SIDE)
    images[slice(None)][:] = 0
    images.framed(slice(None))[:] = 0
    np.testing.assert_array_equal(images[slice(None)], pixels)


@pytest.mark.parametrize("size", [0, 17])
def test_bad_sizes_are_refused(size):
    with pytest.raises(SettingError, match="size, must be 1 to 16"):
        ImageFiles([], size, 16)


# --- damage


def damaged(tmp_path, kind):
    path = tmp_path / "bad.jpg"
    Image.fromarray(noise(0, 64, 64)).save(path, quality=95)
    content = path.read_bytes()
    if kind == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(
            {"truncated": content[: len(content) // 2], "text": b"<html>not found"}.get(kind, b"")
        )
    return path


@pytest.mark.parametrize("cache", ["0", "100"])
@pytest.mark.parametrize("kind", ["truncated", "text", "empty", "folder"])
def test_damaged_files_are_named(tmp_path, monkeypatch, pngs, kind, cache):
    monkeypatch.setenv(files.CACHE_MB, cache)
    paths, pixels = pngs
    images = ImageFiles([*paths, damaged(tmp_path, kind)], SIDE, SIDE)
    for _ in range(2):  # a failure is not cached
        with pytest.raises(DataCorrupt, match=r"bad\.jpg.*--skip-bad"):
            images[slice(None)]
    np.testing.assert_array_equal(images[:12], pixels)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataMissing, match=r"gone\.png.*--skip-bad"):
        ImageFiles([tmp_path / "gone.png"])[slice(None)]


@pytest.mark.parametrize("most", [100, 200])  # Pillow refuses the first and warns of the second
@pytest.mark.parametrize("warnings", ["error", "ignore"])
def test_bombs_are_refused(pngs, monkeypatch, most, warnings, recwarn):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
    simplefilter(warnings)
    with pytest.raises(DataCorrupt, match=rf"0\.png is too large to decode.*{most} pixels"):
        ImageFiles(pngs[0][:1])[slice(None)]


def test_a_bomb_of_a_few_bytes_is_refused_at_once(tmp_path):
    """A PNG that says it has 30,000 x 30,000 pixels, in 400 bytes."""
    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(100_000))), (b"IEND", b"")]
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    with pytest.raises(DataCorrupt, match="too large to decode"):
        ImageFiles([tmp_path / "bomb.png"])[slice(None)]


@pytest.mark.parametrize("kind", ["EPS", "TGA", "ICO"])
def test_other_formats_are_not_opened(tmp_path, kind, monkeypatch):
    """A PostScript file would be run by ghostscript, whatever its name is."""
    opened = []
    for plugin in ("EpsImagePlugin.EpsImageFile", "TgaImagePlugin.TgaImageFile"):
        monkeypatch.setattr(f"PIL.{plugin}._open", lambda self: opened.append(self))
    Image.fromarray(noise()).save(tmp_path / "image.jpg", kind)
    with pytest.raises(DataCorrupt, match=r"cannot decode .*image\.jpg"):
        ImageFiles([tmp_path / "image.jpg"])[slice(None)]
    assert opened == []


@pytest.mark.parametrize("name", ["x.jpg", "x.png", "x.webp", "x.bmp", "x.gif", "x.ppm", "x.tiff"])
def test_every_image_suffix_is_a_format_that_is_opened(tmp_path, name):
    Image.fromarray(smooth(SIDE, SIDE)).save(tmp_path / name)
    assert read(tmp_path / name).shape == (SIDE, SIDE, 3)


def test_pipes_devices_and_sockets_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "device.png").symlink_to("/dev/zero")
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket.png"))
        for name in ("pipe", "device", "loop", "socket"):
            with pytest.raises(DataCorrupt, match=f"{name}.png"):
                ImageFiles([tmp_path / f"{name}.png"])[slice(None)]


def labelled(paths) -> ImageSet:
    labels = np.arange(len(paths)) % 3
    return ImageSet("toy", "test", ImageFiles(paths, SIDE, SIDE), labels, ("a", "b", "c"))


def test_bad_images_are_dropped_and_counted(tmp_path, pngs, decodings):
    paths, pixels = pngs
    mixed = [paths[0], damaged(tmp_path, "truncated"), *paths[1:3], tmp_path / "gone", paths[3]]
    data = labelled(mixed)
    problems = unreadable(data.images)
    assert {row: type(e) for row, e in problems.items()} == {1: DataCorrupt, 4: DataMissing}
    good = drop_bad(data)
    assert good.skipped == 2
    assert good.labels.tolist() == [0, 2, 0, 2]
    decodings.clear()
    np.testing.assert_array_equal(good.images[slice(None)], pixels[:4])
    assert not decodings  # already cached by the search
    assert drop_bad(good) is good


def test_a_set_of_bad_images_only_is_an_error(tmp_path):
    with pytest.raises(DataCorrupt, match=r"none of the 1 images of toy.*bad\.jpg"):
        drop_bad(labelled([damaged(tmp_path, "text")]))


def test_arrays_have_no_bad_images():
    data = ImageSet("toy", "test", noise()[None], np.zeros(1, np.int64), ("a",))
    assert drop_bad(data) is data


# --- caching


def test_decoded_once(pngs, decodings):
    paths, pixels = pngs
    images = ImageFiles(paths, SIDE - 2, SIDE)
    images[np.array([1, 1, 5])]
    assert len(decodings) == 2
    part = images.subset(np.array([5, 6]))
    np.testing.assert_array_equal(part.framed(slice(None)), pixels[5:7])
    assert len(decodings) == 3  # 5 was cached
    images[slice(None)]
    images.framed(slice(None))
    assert len(decodings) == 12


def test_a_part_is_cached_if_the_whole_does_not_fit(pngs, decodings, monkeypatch):
    gc.collect()  # memory of other tests must not be freed during this one
    monkeypatch.setenv(files.CACHE_MB, str(5 * 3 * SIDE**2 / 2**20 + files._reserved_bytes / 2**20))
    paths, pixels = pngs
    images = ImageFiles(paths, SIDE, SIDE)
    for _ in range(2):
        np.testing.assert_array_equal(images[slice(None)], pixels)
    assert len(decodings) == 24
    part = images.subset(np.arange(4))
    for _ in range(2):
        np.testing.assert_array_equal(part[slice(None)], pixels[:4])
    assert len(decodings) == 28
    more = ImageFiles(paths[:2], SIDE, SIDE)
    for _ in range(2):  # the budget is for the whole process
        more[slice(None)]
    assert len(decodings) == 32
    del part
    gc.collect()
    again = ImageFiles(paths[:2], SIDE, SIDE)
    for _ in range(2):
        again[slice(None)]
    assert len(decodings) == 34


def test_the_default_budget_is_a_quarter_of_thefree_memory(monkeypatch):
    monkeypatch.delenv(files.CACHE_MB, raising=False)
    assert 0 < files.free_memory() < psutil.virtual_memory().total
    monkeypatch.setattr(files, "free_memory", lambda: 4000)
    assert files._budget() == 1000


@pytest.mark.parametrize("name", files.PROCESS_COUNTS)
@pytest.mark.parametrize(("value", "count"), [("4", 4), ("1", 1), ("0", 1), ("", 1)])
def test_processes_share_memory_and_cores(monkeypatch, pngs, name, value, count):
    for other in files.PROCESS_COUNTS:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    monkeypatch.setenv(files.CACHE_MB, "8")
    assert files._budget() == 8 * 2**20 // count
    monkeypatch.delenv(files.CACHE_MB)
    monkeypatch.setattr(files, "free_memory", lambda: 16_000)
    assert files._budget() == 4000 // count
    pools = []
    executor = files.ThreadPoolExecutor
    monkeypatch.setattr(files, "ThreadPoolExecutor", lambda n: pools.append(n) or executor(n))
    monkeypatch.setattr(files, "_cores", lambda: 8)
    np.testing.assert_array_equal(ImageFiles(pngs[0], SIDE, SIDE)[slice(None)], pngs[1])
    assert pools == [8 // count]


@pytest.mark.parametrize("value", ["much", "inf"])
def test_a_budget_must_be_a_number(monkeypatch, pngs, value):
    monkeypatch.setenv(files.CACHE_MB, value)
    images = ImageFiles(pngs[0], SIDE, SIDE)
    for _ in range(2):
        with pytest.raises(SettingError, match=rf"TWOSHIFT_CACHE_MB.*megabytes.*'{value}'"):
            images[slice(None)]


def test_pickles_carry_no_pixels(pngs):
    paths, pixels = pngs
    images = ImageFiles(paths, SIDE - 4, SIDE, squash=True).subset(np.array([4, 2]))
    images[slice(None)]
    content = pickle.dumps(images)
    assert len(content) < pixels[0].size
    copy = pickle.loads(content)
    assert (copy.paths, copy.size, copy.frame, copy.squash) == (images.paths, 12, 16, True)
    np.testing.assert_array_equal(copy.framed(slice(None)), pixels[[4, 2]])


@pytest.mark.slow
def test_another_process_may_read(pngs):
    paths, pixels = pngs
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        frames = pool.submit(ImageFiles(paths, SIDE, SIDE).framed, np.arange(12)).result()
    np.testing.assert_array_equal(frames, pixels)


@pytest.mark.parametrize("cache", ["0", "100"])
def test_many_readers_at_once(pngs, monkeypatch, cache):
    monkeypatch.setenv(files.CACHE_MB, cache)
    monkeypatch.setattr(files, "_cores", lambda: 3)
    paths, pixels = pngs
    for turn in range(5):
        images = ImageFiles(paths, SIDE, SIDE)
        rows = [np.random.default_rng([turn, i]).integers(0, 12, 20) for i in range(8)]
        with ThreadPoolExecutor(8) as pool:
            for chosen, got in zip(rows, pool.map(images.__getitem__, rows), strict=True):
                np.testing.assert_array_equal(got, pixels[chosen])
