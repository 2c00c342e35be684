"""OfficeHome: everyday objects in four domains, three of which have long-tailed lists.

Venkateswara et al., "Deep Hashing Network for Unsupervised Domain Adaptation",
https://arxiv.org/abs/1706.07522, with the RSUT lists of Tan et al.,
https://arxiv.org/abs/1910.10320. The order of their ``category.txt`` is not that of their labels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from twoshift.data._inventory import Inventory, Published, check_part, image_files
from twoshift.errors import DataMissing

Domain = Literal["clipart", "product", "real_world"]

OFFICE_HOME = Published(
    "office_home",
    folders=("OfficeHome", "office-home", "office_home", "OfficeHomeDataset_10072016"),
    lists="office-home-rsut",
    images="Get OfficeHomeDataset_10072016.zip from https://www.hemanthdv.org/officeHomeDataset.html.",
    labels="Get the RSUT lists from https://github.com/LeoXinhaoLee/Imbalanced-Source-free-Domain-"
    "Adaptation.",
)

# name of the domain in the names of list files, and its possible folder names
_NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "clipart": ("Clipart", ("Clipart",)),
    "product": ("Product", ("Product",)),
    "real_world": ("RealWorld", ("Real World", "RealWorld", "Real_World")),
}


@image_files("office_home", squash=True)
def inventory(split: str, root: Path, part: Domain) -> Inventory:
    """OfficeHome (RSUT): clipart, product or real_world; 65 classes, 1,017 to 1,985 images."""
    if str(part) == "art":
        raise DataMissing(
            "office_home:art has no RSUT lists: the domain is too small for a long tail",
            cure=f"Use one of {', '.join(_NAMES)}, or all images of Art as folder:PATH/Art.",
        )
    check_part("office_home", part, get_args(Domain))
    prefix, folders = _NAMES[part]
    image_folders = [*folders, *(f"images/{folder}" for folder in folders)]
    file = f"{prefix}_{'RS' if split == 'train' else 'UT'}.txt"
    return OFFICE_HOME.inventory(part, split, root, file, *image_folders)
