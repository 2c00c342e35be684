"""ImageNet-LT and ImageNet-C.

Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge",
https://arxiv.org/abs/1409.0575; the long tail of Liu et al., "Large-Scale Long-Tailed Recognition
in an Open World", https://arxiv.org/abs/1904.05160; the corruptions of Hendrycks and Dietterich,
https://arxiv.org/abs/1903.12261.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from twoshift.data._inventory import (
    Inventory,
    Published,
    check_part,
    image_files,
    inventories,
    take_inventory,
)
from twoshift.data.base import ImageSet, datasets
from twoshift.data.cifar import check_split
from twoshift.data.files import ImageFiles
from twoshift.errors import SettingError

Corruption = Literal[  # here, where importing them takes no SciPy
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
]

TRAIN, TEST = "ImageNet_LT_train.txt", "ImageNet_LT_test.txt"

IMAGENET = Published(
    "imagenet_lt",
    folders=("imagenet", "ImageNet", "ILSVRC2012", "imagenet/ILSVRC/Data/CLS-LOC"),
    lists="imagenet-lt",
    images="Get ILSVRC2012 from https://image-net.org and sort it into train/WNID and val/WNID.",
    labels="Get the lists of ImageNet-LT from "
    "https://github.com/zhmiao/OpenLongTailRecognition-OLTR.",
)


@image_files("imagenet_lt", squash=False)
def inventory(split: str, root: Path) -> Inventory:
    """ImageNet-LT: 115,846 photographs, 1280 to 5 a class; tested on the 50,000 of ImageNet."""
    check_split(split)
    if split == "train":
        return IMAGENET.inventory("", split, root, TRAIN, "train")
    return IMAGENET.inventory("", split, root, TEST, "val")


@inventories.register("imagenet_c")
def corrupted_inventory(split: str, root: Path, part: Corruption, severity: int = 3) -> Inventory:
    """One corruption of ImageNet-C, by the list of ImageNet-LT's test images.

    A severity in the part (``fog-3``) counts more than the setting.
    """
    from twoshift.data.corrupted import TREES, missing_published, published_folder

    if split != "test":
        raise SettingError("split of imagenet_c", must_be="'test'", got=repr(split))
    corruption, _, own = part.partition("-")
    check_part("imagenet_c", corruption, get_args(Corruption))
    if (level := own or str(severity)) not in tuple("12345"):
        raise SettingError("severity of imagenet_c", must_be="1 to 5", got=level)
    clean = inventory("test", root)
    name, cure = (
        f"imagenet_c:{part}",
        "Get the five archives of https://zenodo.org/records/2235448.",
    )
    if not len(clean.paths):  # without its list nobody knows the files
        lists = tuple(problem for problem in clean.problems if TEST in problem)
        return Inventory(name, split, problems=lists, cure=IMAGENET.labels)
    images = ImageFiles(clean.paths)
    whole = ImageSet("imagenet_lt", split, images, clean.labels, clean.classes)
    folder = published_folder(root / TREES["imagenet_lt"], corruption) / level
    return Inventory(
        name,
        split,
        [str(folder / path.parent.name / path.name) for path in images.paths],
        clean.labels,
        clean.classes,
        [str(path) for path in missing_published(whole, corruption, int(level), root)],
        problems=() if folder.is_dir() else (f"the folder {folder}",),
        source=f"{folder.relative_to(root)}, by {TEST}",
        cure=cure,
    )


@datasets.register("imagenet_c")
def imagenet_c(
    split: str,
    root: Path,
    part: str,
    *,
    size: int = 224,
    frame: int = 256,
    squash: bool = False,
) -> ImageSet:
    """ImageNet-C: imagenet_c:CORRUPTION-SEVERITY, such as fog-3; published test images only.

    They are cut to the test-time view already, so the frame is not used. The clean images need not
    be here, the list of ImageNet-LT's test images must.
    """
    del frame
    return take_inventory(f"imagenet_c:{part}", split, root).image_set(size, size, squash)
