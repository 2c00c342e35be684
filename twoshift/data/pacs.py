"""PACS: seven classes as photographs, paintings, cartoons and sketches.

Li et al., "Deeper, Broader and Artier Domain Generalization", https://arxiv.org/abs/1710.03077.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from twoshift.data._inventory import Inventory, check_part, class_folders, image_files

Domain = Literal["photo", "art_painting", "cartoon", "sketch"]

CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
_FOLDERS = ("pacs", "PACS", "pacs/kfold", "PACS/kfold", "kfold", "")


@image_files("pacs", squash=True)
def inventory(split: str, root: Path, part: Domain) -> Inventory:
    """PACS: photo, art_painting, cartoon or sketch; 9,991 images, 7 classes.

    Both splits contain all images of the domain: train on one domain, test on another one. The
    official fold lists are not used, so results do not depend on whether they are present.
    """
    check_part("pacs", part, get_args(Domain))
    candidates = [root / folder / part for folder in _FOLDERS]
    domain = next((folder for folder in candidates if folder.is_dir()), candidates[0])
    cure = (
        "Get PACS from https://domaingeneralization.github.io and unpack it as pacs/DOMAIN/CLASS."
    )
    return class_folders(f"pacs:{part}", split, domain, CLASSES, cure)
