"""DomainNet: 40 classes of four domains, with the label shift that they have by nature.

Peng et al., "Moment Matching for Multi-Source Domain Adaptation", https://arxiv.org/abs/1812.01754,
with the lists of Tan et al., https://arxiv.org/abs/1910.10320.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from twoshift.data.base import ImageSet, datasets
from twoshift.data.cifar import check_split
from twoshift.data.inventory import Inventory, Published, check_part, inventories

Domain = Literal["clipart", "painting", "real", "sketch"]

DOMAINNET = Published(
    "domainnet",
    folders=("domainnet", "DomainNet", "domain_net"),
    lists="domainnet-40",
    images="Get the four domains (cleaned version) from https://ai.bu.edu/M3SDA/.",
    labels="Get the lists of 40 classes from https://github.com/LeoXinhaoLee/"
    "Imbalanced-Source-free-Domain-Adaptation.",
)


@inventories.register("domainnet")
def inventory(split: str, root: Path, part: Domain) -> Inventory:
    """DomainNet: 40 classes of four domains."""
    check_split(split)
    check_part("domainnet", part, get_args(Domain))
    return DOMAINNET.inventory(part, split, root, f"{part}_{split}_mini.txt", part)


@datasets.register("domainnet")
def domainnet(
    split: str,
    root: Path,
    part: Domain,
    *,
    size: int = 224,
    frame: int = 256,
    squash: bool = True,
) -> ImageSet:
    """DomainNet, 40 classes: clipart, painting, real or sketch; label shift by nature."""
    return inventory(split, root, part).image_set(size, frame, squash)
