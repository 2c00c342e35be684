"""DomainNet: 40 classes in four domains, whose label distributions differ naturally.

Peng et al., "Moment Matching for Multi-Source Domain Adaptation", https://arxiv.org/abs/1812.01754,
with the image lists of Tan et al., https://arxiv.org/abs/1910.10320.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from twoshift.data._inventory import Inventory, Published, check_part, image_files

Domain = Literal["clipart", "painting", "real", "sketch"]

DOMAINNET = Published(
    "domainnet",
    folders=("domainnet", "DomainNet", "domain_net"),
    lists="domainnet-40",
    images="Get the four domains (cleaned version) from https://ai.bu.edu/M3SDA/.",
    labels="Get the lists of 40 classes from https://github.com/LeoXinhaoLee/"
    "Imbalanced-Source-free-Domain-Adaptation.",
)


@image_files("domainnet", squash=True)
def inventory(split: str, root: Path, part: Domain) -> Inventory:
    """DomainNet, 40 classes: clipart, painting, real or sketch; natural label shift."""
    check_part("domainnet", part, get_args(Domain))
    return DOMAINNET.inventory(part, split, root, f"{part}_{split}_mini.txt", part)
