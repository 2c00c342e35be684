"""Small trees of image files in the layouts of the large data sets.

Every class has its own colour plus noise, so that a small network can learn it. Training lists are
long-tailed, test lists have the opposite tail, and both contain absolute paths of another machine,
as the published lists do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from PIL import Image

TAIL = (12, 6, 3)  # images per class in a training list; reversed in a test list
SIZE = (48, 40)  # width, height
ELSEWHERE = "/data9/someone/sets"

IMAGENET = ("n01440764", "n01443537", "n01484850")
VISDA = ("aeroplane", "bicycle", "bus")
OFFICE_HOME = ("Alarm_Clock", "Backpack", "Batteries")
DOMAINNET = ("airplane", "ambulance", "apple")
PACS = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")


def write_image(path: Path, label: int, seed: int, size: tuple[int, int] = SIZE) -> None:
    """Write an image of the class: its colour plus noise, in the format of the file name."""
    rng = np.random.default_rng([label, seed])
    colour = np.random.default_rng([label, 77]).integers(40, 216, 3)
    pixels = colour + rng.normal(0, 25, (size[1], size[0], 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)


def write_list(path: Path, lines: Iterable[tuple[str, int]]) -> None:
    """Write a list file with lines of PATH LABEL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{image} {label}\n" for image, label in lines))


def _fill(
    folder: Path,
    classes: Sequence[str],
    counts: Sequence[int],
    name: str,
    extra: int = 1,
    size: tuple[int, int] = SIZE,
) -> list[tuple[str, int]]:
    """Write class folders with ``extra`` unlisted images each; return the ends of the lines."""
    lines = []
    for label, (title, count) in enumerate(zip(classes, counts, strict=True)):
        for i in range(count + extra):
            file = name.format(title=title, label=label, number=100 * label + i)
            write_image(folder / title / file, label, i, size)
            if i < count:
                lines.append((f"{title}/{file}", label))
    return lines


def _elsewhere(prefix: str, lines: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return [(f"{ELSEWHERE}/{prefix}/{tail}", label) for tail, label in lines]


def make_imagenet_tree(root: Path, test: int = 8) -> Path:
    """``imagenet/train``, ``imagenet/val`` in class folders, and the lists of ImageNet-LT."""
    lists = root / "lists" / "imagenet-lt"
    train = _fill(root / "imagenet/train", IMAGENET, TAIL, "{title}_{number}.JPEG")
    val = [test] * len(IMAGENET)
    test_lines = _fill(root / "imagenet/val", IMAGENET, val, "ILSVRC2012_val_{number:08}.JPEG", 0)
    write_list(lists / "ImageNet_LT_train.txt", [(f"train/{t}", y) for t, y in train])
    write_list(lists / "ImageNet_LT_test.txt", [(f"val/{t}", y) for t, y in test_lines])
    return root


def make_imagenet_c_tree(
    root: Path, corruptions: Mapping[str, str], severities: Iterable[int] = (3,), test: int = 8
) -> Path:
    """``ImageNet-C/<group>/<corruption>/<severity>/<wnid>``; ``corruptions`` maps name to group.

    An empty group leaves that folder out. File names are those of `make_imagenet_tree`.
    """
    for name, group in corruptions.items():
        for severity in severities:
            folder = root / "ImageNet-C" / group / name / str(severity)
            counts = [test] * len(IMAGENET)
            _fill(folder, IMAGENET, counts, "ILSVRC2012_val_{number:08}.JPEG", 0, (32, 32))
    return root


def make_visda_tree(root: Path) -> Path:
    """``visda-c/train`` (PNG), ``visda-c/validation`` (JPEG), and the RSUT lists."""
    lists = root / "lists" / "visda-c-rsut"
    train = _fill(root / "visda-c/train", VISDA, TAIL, "src_1_{number}__10_349_150.png")
    test = _fill(root / "visda-c/validation", VISDA, TAIL[::-1], "{title}_{number}.jpg")
    write_list(lists / "train_RS.txt", _elsewhere("visda/train", train))
    write_list(lists / "validation_UT.txt", _elsewhere("visda/validation", test))
    (lists / "category.txt").write_text("\n".join(VISDA) + "\n")
    return root


def make_office_home_tree(root: Path) -> Path:
    """``OfficeHomeDataset_10072016/{Art,Clipart,Product,Real World}`` and the RSUT lists.

    As in the public lists, the folder ``Real World`` is called ``Real_World``, and ``category.txt``
    has another order than the labels.
    """
    lists = root / "lists" / "office-home-rsut"
    home = root / "OfficeHomeDataset_10072016"
    for folder, title, listed in (
        ("Clipart", "Clipart", "Clipart"),
        ("Product", "Product", "Product"),
        ("Real World", "RealWorld", "Real_World"),
    ):
        lines = _fill(home / folder, OFFICE_HOME, [max(TAIL)] * 3, "{number:05}.jpg", 0)
        for kind, counts in (("RS", TAIL), ("UT", TAIL[::-1])):
            lines_by_class = [[x for x in lines if x[1] == c][:n] for c, n in enumerate(counts)]
            chosen = _elsewhere(f"office-home/images/{listed}", chain(*lines_by_class))
            write_list(lists / f"{title}_{kind}.txt", chosen)
    _fill(home / "Art", OFFICE_HOME, [2, 2, 2], "{number:05}.jpg", 0)
    (lists / "category.txt").write_text("\n".join(OFFICE_HOME[::-1]) + "\n")
    return root


def make_domainnet_tree(root: Path) -> Path:
    """``domainnet/{clipart,painting,real,sketch}`` and the lists of 40 classes (here three)."""
    lists = root / "lists" / "domainnet-40"
    shares = {"clipart": TAIL, "painting": (4, 8, 4), "real": (9, 9, 9), "sketch": TAIL[::-1]}
    for domain, counts in shares.items():
        name = f"{domain}_{{label:03}}_{{number:06}}.jpg"
        lines = _fill(root / "domainnet" / domain, DOMAINNET, counts, name, 0)
        test = [line for i, line in enumerate(lines) if i % 3 == 0]  # 30 % in the real lists
        train = [line for i, line in enumerate(lines) if i % 3 != 0]
        for split, chosen in (("train", train), ("test", test)):
            listed = _elsewhere(f"domainnet/{domain}", chosen)
            write_list(lists / f"{domain}_{split}_mini.txt", listed)
    return root


def make_pacs_tree(root: Path, folder: str = "pacs") -> Path:
    """``pacs/{photo,art_painting,cartoon,sketch}``, unbalanced; no lists."""
    for shift, domain in enumerate(("photo", "art_painting", "cartoon", "sketch")):
        counts = [6 + (3 * (c + shift)) % 7 for c in range(len(PACS))]
        _fill(root / folder / domain, PACS, counts, "pic_{number:03}.jpg", 0)
    return root
