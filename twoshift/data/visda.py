"""VisDA-C: synthetic renderings as the source, photographs as the target.

Peng et al., "VisDA: The Visual Domain Adaptation Challenge", https://arxiv.org/abs/1710.06924, with
the RSUT lists of Tan et al., "Class-imbalanced Domain Adaptation: An Empirical Odyssey",
https://arxiv.org/abs/1910.10320: both are long-tailed, 100 to 1, in opposite class orders. A list
may name an image more than once, because classes with too few images were drawn with replacement.
"""

from __future__ import annotations

from pathlib import Path

from twoshift.data._inventory import Inventory, Published, image_files

VISDA = Published(
    "visda_c",
    folders=("visda-c", "VISDA-C", "VisDA-C", "visda", "VisDA"),
    lists="visda-c-rsut",
    images="Get train.tar and validation.tar from https://ai.bu.edu/visda-2017/.",
    labels="Get the RSUT lists from https://github.com/LeoXinhaoLee/Imbalanced-Source-free-Domain-"
    "Adaptation.",
)


@image_files("visda_c", squash=True)
def inventory(split: str, root: Path) -> Inventory:
    """VisDA-C (RSUT): 36,875 renderings, 13,400 photographs, 12 classes, long-tailed."""
    if split == "train":
        return VISDA.inventory("", split, root, "train_RS.txt", "train")
    return VISDA.inventory("", split, root, "validation_UT.txt", "validation")
