"""An adapted classifier as an ONNX file: the network as it is in a state, and the adjustment.

The graph has the inputs ``images``, (batch, channels, height, width) with any number of images, and
``log_prior``, (classes,), whose default is the label estimate of the state. Its outputs are
``logits``, adjusted to ``log_prior``, and ``raw_logits``, those of the original head. Normalisation
of pixels is part of the graph where it is part of the model. The file is written only if
onnxruntime predicts as torch does.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from twoshift.adapters import AdaptedHead, adapted_heads, detach, score
from twoshift.calibration import Calibration
from twoshift.errors import BatchError, MissingExtra, ModelError
from twoshift.export._metadata import metadata_of
from twoshift.methods import LabelAware, LiveStream, frozen
from twoshift.models.head import capture_features
from twoshift.storage import atomic_file

OPSET = 20
TOLERANCE = 1e-4  # between logits of torch and of onnxruntime
MOST_IMAGES = 64  # to compare them on
IMAGES, LOG_PRIOR = INPUTS = ("images", "log_prior")
OUTPUTS = ("logits", "raw_logits")
BATCH = "batch"  # name of the dimension
TALKATIVE = "torch.onnx._internal.exporter._registration"  # tells that torchvision is missing
_exporting = threading.Lock()  # torch traces one network at a time
Arrays = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        file: The ONNX file.
        opset: Version of the operators.
        images: Number of images that torch and onnxruntime were compared on.
        difference: The largest difference between their logits.
    """

    file: Path
    opset: int
    images: int
    difference: float


def export_onnx(
    live: LabelAware | LiveStream[LabelAware],
    file: str | Path,
    images: Tensor,
    *,
    facts: Calibration | None = None,
    classes: Sequence[str] | None = None,
) -> Exported:
    """Write the network in its present state to an ONNX file, and what is known of it.

    The file is opset 20 and says in its metadata what the classes are called, which facts were
    found, and how the label estimate goes on (`LabelEstimate`). It appears only if onnxruntime
    gives the same logits as torch, to 1e-4, on all images together and on a single one, with the
    label distribution of the state and with another one.

    Args:
        live: What `twoshift.recommended` returns, or a stream of it; it is not changed.
        file: The file to write; an existing one is replaced.
        images: Images to compare on, (B, channels, height, width), at best real ones; up to 64 of
            them are used. Height and width are those that the file will take.
        facts: The calibration of the model.
        classes: Names of the classes; those in the facts by default.

    Raises:
        ModelError: The network cannot be exported, or predicts differently then.
        MissingExtra: onnx, onnxscript or onnxruntime is not installed.
    """
    _require_packages()
    with _snapshot(live) as held:
        if facts is not None and facts.classifier is not None:
            facts.classifier.check(detach(held.model))
        x, net = _checked(held, images), frozen(held).cpu()
        metadata = metadata_of(held, facts, classes)
    log_prior = next(head.prior for _, head in adapted_heads(net)).clamp_min(1e-30).log()
    with _exporting, _quiet(), torch.inference_mode(False), torch.no_grad():
        content = _serialised(net, x, log_prior, metadata)
        difference = _compare(net, content, x, log_prior)
    file = Path(file)
    with atomic_file(file) as temporary:
        temporary.write_bytes(content)
    return Exported(file, OPSET, len(x), difference)


class Adjusted(nn.Module):
    """The graph: logits under a label distribution, and those of the original head.

    Args:
        net: A frozen network with an adapter.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.path, _ = next(adapted_heads(net))

    def forward(self, images: Tensor, log_prior: Tensor) -> tuple[Tensor, Tensor]:
        """Adjusted and raw logits, (B, classes) each."""
        head = self.net.get_submodule(self.path)
        assert isinstance(head, AdaptedHead)
        prior = {f"{self.path}.prior": log_prior.softmax(0)}  # whatever it sums up to
        with capture_features(head) as features:
            logits = torch.func.functional_call(self.net, prior, (images,))
        return logits, head.raw(features[-1]).to(logits.dtype)


@contextmanager
def _snapshot(live: LabelAware | LiveStream[LabelAware]) -> Iterator[LabelAware]:
    """The method in a state that does not change within the block."""
    if isinstance(live, LiveStream):
        with live._active() as method:
            yield _label_aware(method)
    else:
        with _label_aware(live)._using():
            yield live


def _label_aware(method: Any) -> LabelAware:
    if not isinstance(method, LabelAware):
        raise ModelError(
            "what is exported",
            must_be="a LabelAware, since log_prior needs an adapter",
            got=type(method).__name__,
            cure="Use twoshift.recommended(model, facts).",
        )
    return method


def _checked(live: LabelAware, images: Tensor) -> Tensor:
    """The images to compare on, as the model takes them."""
    if live.dtype != torch.float32:
        raise ModelError(
            "weights of an exported model",
            must_be=torch.float32,
            got=live.dtype,
            cure="Load the state with the model in float32: model.float().",
        )
    if not isinstance(images, Tensor) or images.dim() != 4 or not len(images):
        got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise BatchError("images to compare on", must_be="a tensor (B, C, H, W)", got=got)
    x = images[:MOST_IMAGES].detach().cpu().contiguous()
    if x.dtype != torch.float32:
        raise BatchError("images to compare on", must_be=torch.float32, got=x.dtype)
    if not x.isfinite().all():
        raise BatchError("images to compare on", must_be="finite", got="NaN or infinity")
    if live.inputs is not None:
        live.inputs.check(x, float(x.min()), float(x.max()))
    return x


def _serialised(net: nn.Module, x: Tensor, log_prior: Tensor, metadata: Mapping[str, str]) -> bytes:
    """The ONNX file, by torch's exporter."""
    example = _several(x)[:2]  # a batch of one would stay one
    shapes = {IMAGES: {0: torch.export.Dim(BATCH)}, LOG_PRIOR: None}
    try:
        program = torch.export.export(
            Adjusted(net).eval(), (example, log_prior), dynamic_shapes=shapes, strict=False
        )
        made = torch.onnx.export(
            program,
            (),
            dynamo=True,
            opset_version=OPSET,
            input_names=INPUTS,
            output_names=OUTPUTS,
            verbose=False,
        )
        assert made is not None
        model = made.model_proto
        _finish(model, log_prior.numpy(), metadata)
        content: bytes = model.SerializeToString()
    except Exception as e:  # whatever torch's exporter raises for code that it cannot follow
        reason = " ".join(str(e).split())
        raise ModelError(
            f"{type(net).__name__} cannot be exported: {reason[:300]}",
            cure="Its forward must take any number of images: x.shape[0], not len(x).",
        ) from e
    return content


def _finish(model: Any, log_prior: NDArray[np.float32], metadata: Mapping[str, str]) -> None:
    """Give the file its default, names and metadata; take out traces of where it was made."""
    import onnx

    graph = model.graph
    graph.initializer.append(onnx.numpy_helper.from_array(log_prior, LOG_PRIOR))
    symbol = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if symbol and dimension.dim_param == symbol:
                dimension.dim_param = BATCH
    for part in (*graph.node, *graph.value_info, *graph.input, *graph.output, graph, model):
        del part.metadata_props[:]  # source files and lines of the exporter's machine
    for node in graph.node:
        node.doc_string = ""
    model.producer_name, model.producer_version = "twoshift", metadata["twoshift.version"]
    onnx.helper.set_model_props(model, dict(metadata))
    onnx.checker.check_model(model)


def _compare(net: nn.Module, content: bytes, x: Tensor, log_prior: Tensor) -> float:
    """The largest difference between logits of torch and of the file, or an error."""
    session, worst = _session(content), 0.0
    other = torch.arange(1.0, len(log_prior) + 1).log_softmax(0)
    for given in (None, other):
        for head in (head for _, head in adapted_heads(net)):
            head.prior.copy_((log_prior if given is None else given).softmax(0))
        for batch in (_several(x), x[:1]):
            expected = score(net, batch)
            feed: Arrays = {IMAGES: batch.numpy()}
            if given is not None:
                feed[LOG_PRIOR] = given.numpy()
            found = session.run(OUTPUTS, feed)
            for name, wanted, got in zip(OUTPUTS, expected[:2], found, strict=True):
                difference = _difference(wanted.numpy(), got)
                if not difference <= TOLERANCE:  # also for NaN
                    raise ModelError(
                        f"{name} of onnxruntime",
                        must_be=f"those of torch to {TOLERANCE:g}",
                        got=f"a difference of {difference:.3g} on {len(batch)} images",
                        cure="Nothing was written.",
                    )
                worst = max(worst, difference)
    return worst


def _several(x: Tensor) -> Tensor:
    """A batch of more than one image."""
    return x if len(x) > 1 else x.repeat(3, 1, 1, 1)


def _difference(wanted: NDArray[np.float32], got: NDArray[np.float32]) -> float:
    same_shape = wanted.shape == got.shape
    return float(np.abs(wanted - got).max()) if same_shape else float("inf")


def _session(content: bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # it would warn that log_prior has a default
    try:
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as e:  # of onnxruntime's own kinds
        raise ModelError(f"onnxruntime does not take the exported file: {e}") from e


def _require_packages() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as e:
        what = "ONNX files need onnx, onnxscript and onnxruntime"
        raise MissingExtra(what, cure="pip install 'twoshift[onnx]'") from e


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch's exporter says of its own parts."""
    logger = logging.getLogger(TALKATIVE)
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
