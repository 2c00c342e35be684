"""ImageNet-LT and ImageNet-C.

Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge",
https://arxiv.org/abs/1409.0575; the long tail of Liu et al., "Large-Scale Long-Tailed Recognition
in an Open World", https://arxiv.org/abs/1904.05160; the corruptions of Hendrycks and Dietterich,
https://arxiv.org/abs/1903.12261.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from twoshift.data._inventory import Inventory, Published, check_part, image_files, inventories
from twoshift.data._lists import missing_files
from twoshift.data.base import ImageSet, datasets
from twoshift.data.files import ImageFiles
from twoshift.errors import SettingError

Corruption = Literal[  # defined here, because importing corruptions.py needs SciPy
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
    """ImageNet-LT: 115,846 photographs, 1280 to 5 a class; tested on ImageNet's 50,000."""
    file, folder = (TRAIN, "train") if split == "train" else (TEST, "val")
    return IMAGENET.inventory("", split, root, file, folder)


@inventories.register("imagenet_c")
def corrupted_inventory(split: str, root: Path, part: Corruption, severity: int = 3) -> Inventory:
    """One corruption of ImageNet-C, of the test images that ImageNet-LT lists.

    A severity in the part (``fog-3``) overrides the setting.
    """
    from twoshift.data.corrupted import TREES, published_folder, published_paths

    if split != "test":
        raise SettingError("split of imagenet_c", must_be="'test'", got=repr(split))
    corruption, _, suffix = part.partition("-")
    check_part("imagenet_c", corruption, get_args(Corruption))
    if (level := suffix or str(severity)) not in tuple("12345"):
        raise SettingError("severity of imagenet_c", must_be="1 to 5", got=level)
    clean = inventory("test", root)
    name = f"imagenet_c:{part}"
    if not len(clean.paths):  # the list names the files
        problems = tuple(problem for problem in clean.problems if TEST in problem)
        return Inventory(name, split, problems=problems, cure=IMAGENET.labels)
    folder = published_folder(root / TREES["imagenet_lt"], corruption) / level
    paths = published_paths(folder, ImageFiles(clean.paths))
    return Inventory(
        name,
        split,
        list(map(str, paths)),
        clean.labels,
        clean.classes,
        list(map(str, missing_files(paths))),
        problems=() if folder.is_dir() else (f"the folder {folder}",),
        source=f"{folder.relative_to(root)}, by {TEST}",
        cure="Download the five archives of https://zenodo.org/records/2235448.",
    )


@datasets.register("imagenet_c")
def imagenet_c(
    split: str, root: Path, part: str, *, size: int = 224, frame: int = 256, squash: bool = False
) -> ImageSet:
    """ImageNet-C: imagenet_c:CORRUPTION-SEVERITY, such as fog-3; published test images only.

    The images are already cropped to the test-time view, so ``frame`` is ignored. The list of
    ImageNet-LT's test images is needed; the clean images are not.
    """
    return inventories["imagenet_c"](split, root, part).image_set(size, size, squash)
