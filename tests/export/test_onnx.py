"""Exported files against torch, by onnxruntime."""

from __future__ import annotations

import builtins
import json
import threading

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("onnxscript")
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from tests.export.snapshots import ASSUMES, snapshot  # noqa: E402
from tests.toys import CLASSES, make_adapter, make_batches, make_net  # noqa: E402
from twoshift import EMA, LabelAware, LabelEstimate, Tent, attach, calibrate, recommended  # noqa: E402
from twoshift.errors import (  # noqa: E402
    BatchError,
    MismatchError,
    MissingExtra,
    ModelError,
    SettingError,
)
from twoshift.export import onnx as exporting  # noqa: E402
from twoshift.export.onnx import export_onnx  # noqa: E402
from twoshift.methods import Inputs, Source, frozen  # noqa: E402

CLASS_NAMES = ["ant", "bee", "cat", "dog", "elk"]


def opened(file):
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def images(net="resnet_bn", count=6, seed=8):
    return make_batches(net, (count,), seed)[0]


def by_hand(live, x, prior):
    """Adjusted and raw logits of the frozen network, layer by layer after the features."""
    net, seen = frozen(live), []
    head = net.fc if hasattr(net, "fc") else net.head
    head.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    net(x)
    raw = head.head(seen[0])
    return raw / 1.7 + prior.log() - torch.tensor(ASSUMES).log(), raw


@pytest.mark.parametrize("net", ["resnet_bn", "resnet_gn", "vit"])
def test_any_batch_and_any_label_distribution(net, tmp_path):
    live = snapshot(net)
    before = live.state()
    done = export_onnx(live, tmp_path / "model.onnx", images(net), classes=CLASS_NAMES)
    assert all(torch.equal(tensor, live.state()[name]) for name, tensor in before.items())
    assert (done.images, done.opset) == (6, 20)
    assert done.difference < 1e-4
    session = opened(done.file)
    assert session.get_inputs()[0].shape == ["batch", 3, 16, 16]
    assert [i.name for i in session.get_overridable_initializers()] == ["log_prior"]
    assert [(o.name, o.shape) for o in session.get_outputs()] == [
        ("logits", ["batch", CLASSES]),
        ("raw_logits", ["batch", CLASSES]),
    ]
    other = torch.tensor([0.02, 0.08, 0.2, 0.3, 0.4])
    for count in (1, 3, 70):
        x = images(net, count, seed=9)
        for prior, scale in ((live.prior_ahead, None), (other, 1.0), (other, 7.0)):
            given = {} if scale is None else {"log_prior": (scale * prior).log().numpy()}
            found = session.run(None, {"images": x.numpy(), **given})
            for expected, got in zip(by_hand(live, x, prior), found, strict=True):
                np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
    meta = session.get_modelmeta()
    assert (meta.producer_name, json.loads(meta.custom_metadata_map["twoshift.classes"])) == (
        "twoshift",
        CLASS_NAMES,
    )
    if net != "resnet_bn":  # no statistics that were frozen: the loop is what the method does
        labels = LabelEstimate(meta.custom_metadata_map)
        for x in make_batches(net, (70, 1, 12), seed=11):
            (raw,) = session.run(["raw_logits"], {"images": x.numpy()})
            np.testing.assert_allclose(labels(raw), live(x), rtol=0, atol=1e-3)


def test_the_file_has_no_traces_and_is_valid(tmp_path):
    out = tmp_path / "new" / "model.onnx"
    done = export_onnx(snapshot("mlp", sizes=(4,)), out, images("mlp", count=1))
    content = done.file.read_bytes()
    model = onnx.load_from_string(content)
    onnx.checker.check_model(model, full_check=True)
    assert {o.domain: o.version for o in model.opset_import}[""] == 20
    for trace in (b".py", b"stack_trace", str(tmp_path).encode()):
        assert trace not in content
    assert [f.name for f in done.file.parent.iterdir()] == ["model.onnx"]


def test_facts_and_streams(tmp_path):
    net = make_net("mlp")
    pairs = [(x, torch.arange(len(x)) % CLASSES) for x in make_batches("mlp", (40, 40))]
    known = {"source_prior": "uniform", "classes": CLASS_NAMES, "simulate": False}
    facts = calibrate(net, pairs, held_out=pairs, **known)
    live = recommended(net, facts)
    stream = live.stream("camera")
    stream(images("mlp", 20))
    done = export_onnx(stream, tmp_path / "m.onnx", images("mlp"), facts=facts)
    metadata = opened(done.file).get_modelmeta().custom_metadata_map
    assert json.loads(metadata["twoshift.classes"]) == CLASS_NAMES
    told = json.loads(metadata["twoshift.facts"])
    assert told["temperature"] == facts.of("running")["temperature"]
    assert told["held_out"] == facts.held_out
    assert json.loads(metadata["twoshift.inputs"])["size"] == [8, 8]
    prior = json.loads(metadata["twoshift.label_distribution"])
    assert prior == pytest.approx(stream.prior.tolist())
    assert live.prior.tolist() == pytest.approx([0.2] * 5)  # another stream
    with pytest.raises(BatchError, match="must be"):
        export_onnx(live, tmp_path / "n.onnx", images(), facts=facts)
    with pytest.raises(MismatchError, match="another model"):
        export_onnx(snapshot(), tmp_path / "n.onnx", images(), facts=facts)
    assert [f.name for f in tmp_path.iterdir()] == ["m.onnx"]


def test_an_adapter_that_changes_features_and_one_that_changes_nothing(tmp_path):
    net = make_net("mlp")
    adapter = make_adapter(net)
    live = LabelAware(Source(attach(net, adapter)), EMA(CLASSES))
    x = images("mlp", 5)
    live(x)
    session = opened(export_onnx(live, tmp_path / "m.onnx", x).file)
    logits, raw = session.run(None, {"images": x.numpy()})
    np.testing.assert_allclose(logits, frozen(live)(x), atol=1e-4)
    np.testing.assert_allclose(raw, net(x).detach(), atol=1e-4)
    kept = snapshot("mlp", adjusted=False)
    session = opened(export_onnx(kept, tmp_path / "n.onnx", x).file)
    assert [i.name for i in session.get_overridable_initializers()] == ["log_prior"]
    given = {"images": x.numpy(), "log_prior": np.zeros(CLASSES, np.float32)}
    for found in session.run(None, given):
        np.testing.assert_allclose(found, frozen(kept)(x), atol=1e-4)


def test_a_file_that_predicts_differently_is_refused(tmp_path, monkeypatch):
    real = exporting._finish

    def spoilt(model, *others):
        real(model, *others)
        weight = max(model.graph.initializer, key=lambda i: len(i.raw_data))
        array = onnx.numpy_helper.to_array(weight) * 1.01
        weight.CopyFrom(onnx.numpy_helper.from_array(array.astype(np.float32), weight.name))

    out = tmp_path / "model.onnx"
    out.write_text("what was there before")
    monkeypatch.setattr(exporting, "_finish", spoilt)
    with pytest.raises(
        ModelError, match=r"logits of onnxruntime, must be those of torch to 0.0001"
    ):
        export_onnx(snapshot("mlp", sizes=(4,)), out, images("mlp"))
    assert [f.name for f in tmp_path.iterdir()] == ["model.onnx"]
    assert out.read_text() == "what was there before"


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(12, CLASSES)

    def forward(self, x):
        return self.fc(x.reshape(len(x), -1))


def test_a_network_that_fixes_the_number_of_images_is_refused(tmp_path):
    live = LabelAware(Source(attach(Counting(), make_adapter(Counting()))), EMA(CLASSES))
    with pytest.raises(ModelError, match=r"Counting cannot be exported.*not len\(x\)"):
        export_onnx(live, tmp_path / "m.onnx", torch.rand(4, 3, 2, 2))
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_exported(tmp_path):
    out, x, live = tmp_path / "m.onnx", images("mlp"), snapshot("mlp", sizes=(4,))
    tent = Tent(make_net("resnet_bn"))
    with pytest.raises(ModelError, match="must be a LabelAware"):
        export_onnx(tent, out, x)
    with pytest.raises(ModelError, match="must be a LabelAware"):
        export_onnx(tent.stream("a"), out, x)
    for wrong in (x[0], x[:0], x.numpy()):
        with pytest.raises(BatchError, match=r"a tensor \(B, C, H, W\)"):
            export_onnx(live, out, wrong)
    with pytest.raises(BatchError, match="finite"):
        export_onnx(live, out, x / 0)
    with pytest.raises(BatchError, match="float32"):
        export_onnx(live, out, x.double())
    with pytest.raises(BatchError, match="where the calibration saw"):
        export_onnx(snapshot("mlp").expect(Inputs(low=0.0, high=1.0)), out, 255 * x)
    with pytest.raises(SettingError, match="names of the classes, must be 5"):
        export_onnx(live, out, x, classes=["a"])
    half = LabelAware(Source(attach(make_net("mlp").half(), make_adapter(make_net("mlp")))), EMA(5))
    with pytest.raises(ModelError, match=r"must be torch.float32, got torch.float16"):
        export_onnx(half, out, x)
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name == "onnxscript":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"pip install 'twoshift\[onnx\]'"):
        export_onnx(snapshot("mlp", sizes=(4,)), tmp_path / "m.onnx", images("mlp"))


@pytest.mark.slow
def test_two_threads_export_at_once(tmp_path):
    live, x, failed = snapshot("mlp"), images("mlp"), []

    def export(i):
        try:
            export_onnx(live.stream(f"{i}"), tmp_path / f"{i}.onnx", x)
        except Exception as e:
            failed.append(e)

    threads = [threading.Thread(target=export, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(list(tmp_path.iterdir())) == 2
