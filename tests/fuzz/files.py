"""Files that strangers wrote: pickles, results, recipes, lists, images, arrays and weights.

A case is one file. It is refused, or read to the end and used.
"""

from __future__ import annotations

import io
import json
import os
import random
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image

from tests.bench.stored import make_result
from tests.fuzz.pickles import ATTACKS, bad_pickles
from tests.fuzz.tamper import DEEP, VALUES, _nudged, _places
from tests.fuzz.workers import Case
from tests.toys import make_net
from twoshift.bench.cell import cell_from
from twoshift.bench.export import export_csv
from twoshift.bench.store import Store, export_lines, import_lines
from twoshift.cli.report import report_command
from twoshift.data import load
from twoshift.data._unpickle import read_pickle
from twoshift.data.files import ImageFiles
from twoshift.errors import TwoshiftError
from twoshift.models.weights import load_weights
from twoshift.train.recipes import AdapterRecipe, SourceRecipe, load_recipe, recipe_names

Read = Callable[[Path, random.Random], None]
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM")


def prepare(folder: Path) -> Case:
    """See `tests.fuzz.workers`."""
    kinds: dict[str, Read] = {
        "pickles": _pickle,
        "results": _results,
        "recipes": _recipe,
        "lists": _list,
        "images": _image,
        "arrays": _arrays,
        "weights": _weights,
    }
    names = sorted(kinds)

    def try_one(rng: random.Random, case: int) -> Counter[str]:
        name = names[case % len(names)]
        place = folder / str(case)
        place.mkdir()
        try:
            kinds[name](place, rng)
            happened = "read"
        except TwoshiftError as e:
            happened = type(e).__name__
        except Exception as e:
            e.add_note(name)
            raise
        return Counter({"files": 1, name: 1, happened: 1})

    return try_one


def changed(content: bytes, rng: random.Random) -> bytes:
    """Some bytes are flipped, cut out, put in or repeated."""
    raw = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        place = rng.randrange(len(raw) + 1)
        match rng.randrange(6):
            case 0 | 1 if place < len(raw):
                raw[place] ^= 1 << rng.randrange(8)
            case 2:
                del raw[place : place + rng.choice([1, 4, 100, len(raw)])]
            case 3:
                raw[place:place] = rng.randbytes(rng.choice([1, 4, 50]))
            case 4:
                raw[place:place] = raw[place : place + rng.choice([4, 100])]
            case _:
                raw[place : place + 4] = struct.pack(">I", rng.choice([0, 1, 2**31, 2**32 - 1]))
    return bytes(raw)


def mutated(content: Any, rng: random.Random) -> Any:
    """Some values in plain data are changed, taken away or renamed."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        places = list(_places(content))
        if not places:
            break
        holder, key = rng.choice(places)
        match rng.choice(["replace", "replace", "nudge", "nudge", "remove", "rename"]):
            case "replace":
                holder[key] = rng.choice([*VALUES, "=1+1", "<b>", "|", "\n", "-inf", 57.0, 1e16])
            case "nudge":
                holder[key] = _nudged(holder[key], rng)
            case "remove":
                del holder[key]
            case _ if isinstance(holder, dict):
                holder[rng.choice(["x", "", "é", "a b", "key"])] = holder.pop(key)
    return content


def _pickle(folder: Path, rng: random.Random) -> None:
    content = bad_pickles(rng) if rng.random() < 0.9 else rng.choice(list(ATTACKS.values()))
    (folder / "batch").write_bytes(content)
    read_pickle(folder / "batch")


ODD_NAMES = [
    "=1+1",
    "+1",
    "@x",
    "<script>",
    "a|b",
    "`",
    "$x_y$",
    "\\input",
    "é",
    "a" * 400,
    "%",
    "&",
]
ODD_NUMBERS = [0.0, -0.0, 1e-300, 2.0**53, -1.5, 1, 0, True, None, 57.0]


def extended(content: Any, rng: random.Random) -> Any:
    """Names and numbers that a record may have, as odd as they can be."""
    cell = content["cell"]
    for _ in range(rng.choice([1, 3, 6])):
        name, number = rng.choice(ODD_NAMES), rng.choice(ODD_NUMBERS)
        match rng.randrange(9):
            case 0:
                content["metrics"][name] = number
            case 1:
                content["metrics"][rng.choice(list(content["metrics"]))] = number
            case 2:
                content["facts"][name] = rng.choice([number, rng.choice(ODD_NAMES)])
            case 3:
                content["facts"][rng.choice(["seconds", "peak_memory_mb", "torch"])] = number
            case 4:
                cell["settings"][name] = rng.choice([number, [], {}, [[name]], {name: number}])
            case 5:
                cell[rng.choice(["method", "corruption", "adapter", "target", "estimator"])] = name
            case 6:
                content["source"][rng.choice(["dataset", "architecture", "norm"])] = name
            case 7:
                content["trace"][rng.choice([name, "prior", "s", "accuracy", "true_prior"])] = (
                    rng.choice([[], [number], [[0.5, 0.5]], [[1.0]], [[]], [[0.1] * 3, [1.0]]])
                )
            case _:
                cell |= {"labels": rng.choice(["uniform", "forward-50", "backward-2", "natural"])}
    return content


def _results(folder: Path, rng: random.Random) -> None:
    """Lines of a results file; what a store takes must also come out, in every form."""
    content = make_result(rng.randrange(3), rng.choice(["tent", "note"])).to_json()
    content = json.loads(json.dumps(content))
    content = extended(content, rng) if rng.random() < 0.5 else mutated(content, rng)
    if rng.random() < 0.9:
        try:
            content["key"] = cell_from(content["cell"]).key
        except Exception:  # it is no cell, so it has no key
            content = mutated(content, rng)
    line = json.dumps(content).encode("utf-8", "surrogatepass")
    if rng.random() < 0.2:
        deep = [b"[" * DEEP, b'{"a":' * DEEP, b"\xff\xfe", b"\0", b"1e999", b"9" * 5000, b"NaN"]
        line = rng.choice([changed(line, rng), rng.choice(deep), line.replace(b"{", b"[", 1)])
    (folder / "lines.jsonl").write_bytes(line + rng.choice([b"", b"\n", b"\r\n", b"\n" + line]))
    store = folder / "results.db"
    with Store(store) as opened:
        import_lines(opened, folder / "lines.jsonl")
        if not len(opened):
            return
        list(opened.results(trace=True))
        opened.seconds()
        export_csv(opened, folder / "out.csv")
        export_lines(opened, folder / "out.jsonl", trace=True)
    report_command(store, [folder / f"out{end}" for end in (".html", ".md", ".tex", ".csv")])
    with Store(folder / "again.db") as again:
        assert import_lines(again, folder / "out.jsonl") == 1, "its own export was not taken"


YAML = [
    "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n" + "".join(
        f"{chr(100 + i)}: &{chr(100 + i)} [{','.join([f'*{chr(99 + i)}'] * 9)}]\n" for i in range(9)
    ),
    "!!python/object/apply:os.system ['true']", "&a [*a]", "? [a, b]\n: 1", "- 1", "3", "\t", "%",
    "lr: !!float nope", "lr: .nan", "lr: .inf", "lr: -0", "epochs: 1_000", "epochs: 0x10",
    "seed: 2020-01-01", "lr: !!timestamp 2020-99-99", "{" * 2000, "[" * 2000, "a: " * 500, "",
    "epochs: " + "9" * 5000, "lr: 1e999", "settings: {1: 2}", "settings: {width: 10000000000000}",
    "null", "~: 1", "lr: !!binary ====", "<<: 1", "<<: [1]", "a: *b", "---\na: 1\n---\nb: 2",
]  # fmt: skip


def _recipe(folder: Path, rng: random.Random) -> None:
    kind = rng.choice([SourceRecipe, AdapterRecipe])
    good = rng.choice(sorted(recipe_names(kind).values())).read_text()
    match rng.randrange(4):
        case 0:
            content = changed(good.encode(), rng)
        case 1:
            content = rng.choice(YAML).encode()
        case 2:
            content = f"{good}\n{rng.choice(YAML)}".encode()
        case _:
            text = json.dumps(mutated(yaml.safe_load(good), rng))
            content = text.encode("utf-8", "surrogatepass")
    (folder / "mine.yaml").write_bytes(content)
    load_recipe(kind, folder / "mine.yaml")


def _list(folder: Path, rng: random.Random) -> None:
    for i in range(3):
        Image.new("RGB", (4, 4)).save(folder / f"{i}.png")
    lines = [f"{i}.png {i}" for i in range(3)]
    odd = ["/etc/passwd 0", "../x 1", "x", "", "\0 1", "1.png 99999999999999999999", "1.png -1"]
    odd += ["1.png ²", "1.png 1e3", "a" * 9000 + " 1", ". 0", "/ 0", "é.png 1", "1.png\t1 1"]
    lines += rng.choices(odd, k=rng.randrange(3))
    rng.shuffle(lines)
    content = "\n".join(lines).encode()
    (folder / "list.txt").write_bytes(changed(content, rng) if rng.random() < 0.6 else content)
    if rng.random() < 0.5:
        names = b"a 0\nb 1\nc 2"
        (folder / "category.txt").write_bytes(changed(names, rng))
    data = load(f"list:{folder / 'list.txt'}", root=folder, size=4, frame=4)
    assert len(data.classes) > data.labels.max()
    data.images[np.arange(len(data))]


def _picture(rng: random.Random) -> bytes:
    mode = rng.choice(["RGB", "L", "P", "RGBA", "1", "I;16", "CMYK", "F", "LA"])
    size = rng.choice([(8, 8), (9, 7), (1, 1), (200, 1), (31, 64)])
    buffer = io.BytesIO()
    while True:
        try:
            Image.new(mode, size, 1).save(buffer, rng.choice(FORMATS))
            return buffer.getvalue()
        except (OSError, ValueError, KeyError):  # not every format has every mode
            mode = "RGB"


def _png(width: int, height: int, data: bytes, kind: int = 2) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    text = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 22)))
    parts = (chunk(b"IHDR", header), text, chunk(b"IDAT", data), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
BOMBS = [
    _png(2**31 - 1, 2**31 - 1, b""),
    _png(60_000, 60_000, zlib.compress(bytes(1 << 20))),
    _png(8, 8, zlib.compress(bytes(1 << 26))),
    _png(0, 8, b""),
    _png(13_000, 13_000, b""),
    b"GIF89a" + b"\xff" * 7,
    b"BM" + b"\xff" * 60,
    b"P6 99999999 99999999 255\n",
    b"P6 99999 9 255\n",
    b"II*\0\x08\0\0\0\xff\xff" + b"\xff" * 600,
    b"RIFF\xff\xff\xff\xffWEBPVP8 " + b"\xff" * 60,
    b"<svg/>",
    b"",
]


def _image(folder: Path, rng: random.Random) -> None:
    path = folder / rng.choice(["a.jpg", "a.png", "a.eps", "a"])
    match rng.randrange(5):
        case 0:
            bomb = rng.choice(BOMBS)
            path.write_bytes(changed(bomb, rng) if rng.random() < 0.5 else bomb)
        case 1:
            picture = _picture(rng)
            path.write_bytes(picture[: rng.randrange(len(picture))])
        case 2 if rng.random() < 0.3:
            path.write_bytes(POSTSCRIPT)
        case 3 if rng.random() < 0.3:
            os.mkfifo(path) if rng.random() < 0.5 else path.mkdir()
        case _:
            path.write_bytes(changed(_picture(rng), rng))
    special = not path.is_file() or path.read_bytes() == POSTSCRIPT
    images = ImageFiles([path], size=8, frame=rng.choice([8, 16]), squash=rng.random() < 0.5)
    assert images[np.array([0])].shape == (1, 8, 8, 3)
    assert not special, "what is no image was read"


def _arrays(folder: Path, rng: random.Random) -> None:
    path = folder / "mine.npz"
    images, labels = np.zeros((4, 3, 3, 3), np.uint8), np.arange(4)
    kinds: list[Any] = [
        images, images[0], images.astype(float), np.array(["a"]), np.array([]), np.array(3),
        np.zeros((4, 0, 3, 3), np.uint8), np.zeros((0, 3, 3, 3), np.uint8), labels, labels - 9,
        labels * 10**9, labels.astype(np.uint64) * 2**62, np.array([True] * 4), labels + 1j,
        np.array([None] * 4), np.zeros(4, [("a", int)]), np.array(["a", "b", "c", "d"]),
        np.array([b"\xff"] * 4), np.array(["2020"] * 4, "M8[Y]"),
    ]  # fmt: skip
    content = {"images": images, "labels": labels, "classes": np.array(list("abcd"))}
    for _ in range(rng.choice([0, 1, 2])):
        content[rng.choice(["images", "labels", "classes", "train_images"])] = rng.choice(kinds)
    (np.savez if rng.random() < 0.5 else np.savez_compressed)(path, **content)
    match rng.randrange(4):
        case 0:
            path.write_bytes(changed(path.read_bytes(), rng))
        case 1:
            _lie(path, rng)
    data = load(f"arrays:{path}", root=folder)
    assert data.images.shape[0] == len(data.labels)
    assert len(data.classes) > data.labels.max()


def _lie(path: Path, rng: random.Random) -> None:
    """One array claims another shape or type than it has, or unpacks to far more than it is."""
    headers = [
        "{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000,), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (4, -3, 3, 3), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (4, 4294967296, 4294967296, 3), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (4, 3, 3, 3), }",
        "{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (4,), }",
        "{'descr': '<U1000000000', 'fortran_order': False, 'shape': (1000,), }",
        "{'descr': '|u1', 'fortran_order': 3, 'shape': 'x', }",
        "__import__('os').getpid()",
        "(" * 5000,
        "{'descr': '|u1', 'fortran_order': False, 'shape': (2000000000,), }",
    ]
    header = rng.choice(headers).encode() + b"\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name in ("images", "labels"):
            start = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
            file.writestr(f"{name}.npy", start + bytes(rng.choice([0, 108, 1 << 25])))


def _weights(folder: Path, rng: random.Random) -> None:
    path, net = folder / "mine.pth", make_net("mlp")
    weights: dict[str, Any] = dict(net.state_dict())
    name = rng.choice(sorted(weights))
    t = weights[name]
    odd: list[Any] = [
        t.to_sparse(), t.to("meta"), t.double() * 1e300, t * float("nan"), t.to(torch.complex64),
        t[None], t.reshape(-1)[:0], t.expand(1000, *t.shape), 3, None, "x", [t], {"a": t}, t.half(),
        torch.quantize_per_tensor(t.float(), 0.1, 0, torch.quint8), t.to(torch.float8_e4m3fn),
    ]  # fmt: skip
    if rng.random() < 0.6:
        weights[name] = rng.choice(odd)
    if rng.random() < 0.2:
        weights[rng.choice(["", "x", "head.weight.x"])] = weights.pop(name)
    old = rng.random() < 0.3
    torch.save(weights, path, _use_new_zipfile_serialization=not old)
    if rng.random() < 0.5:
        path.write_bytes(changed(path.read_bytes(), rng))
    elif rng.random() < 0.2:
        path.write_bytes(bad_pickles(rng))
    before = {n: t.clone() for n, t in net.state_dict().items()}
    try:
        load_weights(net, path)
    except TwoshiftError:
        assert all(t.equal(before[n]) for n, t in net.state_dict().items()), "weights changed"
        raise
    assert all(t.isfinite().all() for t in net.state_dict().values())
