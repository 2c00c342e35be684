"""Makes timm importable beside a torch without CUDA."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

KEPT = []  # a definition ends with its library


def make_importable() -> None:
    torchvision = find_spec("torchvision")
    if find_spec("timm") is None or torchvision is None or torchvision.origin is None:
        return
    try:
        for compiled in Path(torchvision.origin).parent.glob("_C*.so"):
            torch.ops.load_library(compiled)
    except (
        OSError
    ):  # it wants CUDA; its import then fails for these two operators, which no test needs
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        KEPT.append(library)


make_importable()
