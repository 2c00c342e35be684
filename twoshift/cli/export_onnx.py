"""``twoshift export onnx``: a saved adaptation state as an ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twoshift.cli._options import (
    Data,
    ModelSettings,
    OwnModel,
    Trained,
    Weights,
    check_whose,
    when_stopped,
)
from twoshift.cli.train import assignments
from twoshift.errors import DataMissing, SettingError, StorageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from twoshift.calibration import Calibration
    from twoshift.data.base import Images
    from twoshift.methods import LabelAware
    from twoshift.train.checkpoint import SourceModel

EXAMPLE = (
    "Example: twoshift export onnx --model resnet50 --weights mine.safetensors "
    "--calibration facts --state state -o model.onnx"
)


@when_stopped("The file was not written.")
def onnx_command(
    state: Annotated[Path, typer.Option(help="Folder of the adaptation state: live.save(FOLDER)")],
    out: Annotated[Path, typer.Option("--out", "-o", help="ONNX file to write")],
    source: Trained = None,
    model: OwnModel = None,
    weights: Weights = None,
    change: ModelSettings = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="Folder of its facts, for class names and metadata"),
    ] = None,
    images: Annotated[
        str | None,
        typer.Option(
            help="Images to compare torch and onnxruntime on: a folder, list:FILE, cifar10 ...; "
            "by default those of the source's data set, else generated ones"
        ),
    ] = None,
    size: Annotated[
        int | None, typer.Option(min=1, help="Side of the images, where nothing else tells")
    ] = None,
    data: Data = None,
) -> None:
    """Write an adapted model in its saved state as an ONNX file.

    Inputs are the images and log_prior, whose default is the state's label estimate; outputs are
    the adjusted logits and the raw ones. The file appears only if onnxruntime predicts as torch.
    """
    check_whose("export onnx", model, source)
    if source is not None and (weights is not None or change):
        raise SettingError("export onnx --source has no option --weights or --set")
    if out.is_dir():
        raise StorageError(f"cannot write {out}", must_be="a file", got="a folder")
    from twoshift.export.onnx import export_onnx

    trained = None if source is None else _source(source)
    net = _given(str(model), weights, state, change) if trained is None else trained.model
    facts = _facts(calibration, trained)
    live = _load(state, net)
    pictures, whose = _pictures(live, trained, images, size, data)
    classes = None if trained is None else trained.card.classes
    done = export_onnx(live, out, pictures, facts=facts, classes=classes)
    typer.echo(f"{out}: opset {done.opset}, {out.stat().st_size / 1e6:.1f} MB")
    typer.echo(
        f"onnxruntime and torch differ by at most {done.difference:.1e}, on {done.images} {whose}"
    )


def _source(folder: Path) -> SourceModel:
    from twoshift.train.checkpoint import load_source

    return load_source(folder)


def _given(model: str, weights: str | None, state: Path, change: list[str] | None) -> nn.Module:
    from twoshift.models.given import open_model
    from twoshift.storage import read_card

    known = read_card(state, "adaptation state").get("estimator") or {}
    classes = known.get("settings", {}).get("classes")
    return open_model(model, weights, classes, assignments(change))


def _facts(folder: Path | None, source: SourceModel | None) -> Calibration | None:
    from twoshift.calibration import Calibration, calibration_of

    if folder is None and source is not None and calibration_of(source) is not None:
        folder = source.folder
    return None if folder is None else Calibration.load(folder)


def _load(state: Path, net: nn.Module) -> LabelAware:
    from twoshift.methods import LabelAware

    return LabelAware.load(state, net)


def _pictures(
    live: LabelAware,
    source: SourceModel | None,
    images: str | None,
    size: int | None,
    data: Path | None,
) -> tuple[Tensor, str]:
    """Images to compare on, and whose they are."""
    from twoshift.data.stream import to_float
    from twoshift.export.onnx import MOST_IMAGES

    shape = _shape(live, source, size)
    if images is not None:
        return to_float(_named(images, shape, data)[:MOST_IMAGES]), f"images of {images}"
    if source is not None:
        try:
            known = _of_source(source, data)
        except DataMissing:
            pass  # the model may be on another machine than its data
        else:
            return to_float(known[:MOST_IMAGES]), f"images of {source.card.dataset}"
    if shape is None:
        raise SettingError(
            "size of the images", must_be="given", cure="Give --images, or the side: --size 224."
        )
    return _generated(live, *shape), "generated images"


def _shape(
    live: LabelAware, source: SourceModel | None, size: int | None
) -> tuple[int, int] | None:
    """Height and width of the images, as far as they are known."""
    if size is None and live.inputs is not None and live.inputs.size is not None:
        return live.inputs.size
    if size is None and source is not None:
        size = source.card.recipe.get("decoding", {}).get("size")
    return None if size is None else (size, size)


def _named(images: str, shape: tuple[int, int] | None, data: Path | None) -> Images:
    """Images by the name of a data set, or all in a folder."""
    from twoshift.data import load
    from twoshift.data.base import datasets
    from twoshift.data.files import frame_of
    from twoshift.registry import parameters_of

    decoding: dict[str, Any] = {}
    if shape is not None:  # files are cut to squares; what does not fit is refused later
        decoding = {"size": shape[0], "frame": frame_of(shape[0])}
    if Path(images).is_dir():
        return _in_folder(images, decoding)
    takes = parameters_of(datasets[images.partition(":")[0]])
    return load(images, "test", data, **(decoding if "size" in takes else {})).images


def _in_folder(folder: str, decoding: dict[str, Any]) -> Images:
    from twoshift.data.files import ImageFiles
    from twoshift.predict.inputs import open_gallery

    return ImageFiles([Path(name) for name in open_gallery(f"folder:{folder}").ids], **decoding)


def _of_source(source: SourceModel, data: Path | None) -> Images:
    from twoshift.data import load

    decoding = source.card.recipe.get("decoding", {})
    return load(source.card.dataset, "test", data, **decoding).images


def _generated(live: LabelAware, height: int, width: int) -> Tensor:
    """Images like photographs, in the range that the model was calibrated on."""
    import numpy as np
    from torch import nn

    from twoshift.data.photographs import photograph
    from twoshift.data.stream import to_float
    from twoshift.export.onnx import MOST_IMAGES
    from twoshift.methods import Inputs

    inputs, rng = live.inputs or Inputs(), np.random.default_rng(0)
    first = next((m for m in live.model.modules() if isinstance(m, nn.Conv2d)), None)
    channels = inputs.channels or (3 if first is None else first.in_channels)
    x = to_float(np.stack([photograph(rng, height, width, channels) for _ in range(MOST_IMAGES)]))
    if inputs.low is None or inputs.high is None:
        return x
    return inputs.low + (inputs.high - inputs.low) * x
