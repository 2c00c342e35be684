"""Tensors on disk, their fingerprint, and modules that are built to fit them."""

import math
import tracemalloc

import pytest
import torch
from torch import nn

from twoshift import models, storage
from twoshift.errors import CheckpointError, StorageError

VALUES = {
    "float": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
    "nan": torch.tensor([math.nan, -0.0, math.inf]),
    "half": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
    "int": torch.arange(3),
    "scalar": torch.tensor(0.1, dtype=torch.float64),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "empty": torch.empty(0, 3),
}


def test_tensors_come_back_bit_for_bit(tmp_path):
    storage.write_tensors(tmp_path / "t.safetensors", VALUES)
    back = storage.read_tensors(tmp_path / "t.safetensors")
    assert back.keys() == VALUES.keys()
    for name, tensor in VALUES.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name].nan_to_num(7), tensor.nan_to_num(7))
    assert storage.fingerprint(back) == storage.fingerprint(VALUES)
    back["float"].zero_()  # it can be written into
    assert [p.name for p in tmp_path.iterdir()] == ["t.safetensors"]


def test_shared_memory_and_gradients_do_not_matter(tmp_path):
    weight = nn.Parameter(torch.ones(4))
    storage.write_tensors(tmp_path / "t.safetensors", {"a": weight, "b": weight, "c": weight[:2]})
    back = storage.read_tensors(tmp_path / "t.safetensors")
    assert [len(back[k]) for k in "abc"] == [4, 4, 2]
    assert not back["a"].requires_grad


@pytest.mark.parametrize(
    "tensor", [torch.empty(3, device="meta"), torch.eye(3).to_sparse()], ids=["meta", "sparse"]
)
def test_tensors_that_cannot_be_saved_are_refused(tmp_path, tensor):
    with pytest.raises(StorageError, match="tensors that cannot be saved"):
        storage.write_tensors(tmp_path / "t.safetensors", {"x": tensor})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"rubbish", b"\x80\x04K\x01.", b"\xff" * 64])
def test_what_is_no_safetensors_file_is_refused(tmp_path, content):
    (tmp_path / "t.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        storage.read_tensors(tmp_path / "t.safetensors")


def test_a_missing_tensor_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot read .*t\.safetensors"):
        storage.read_tensors(tmp_path / "t.safetensors")


def test_the_fingerprint_sees_names_types_shapes_and_bits():
    base = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.zeros(2)}
    variants = [
        {"v": base["w"], "b": base["b"]},
        {"w": base["w"].reshape(4), "b": base["b"]},
        {"w": base["w"].t(), "b": base["b"]},
        {"w": base["w"].double(), "b": base["b"]},
        {"w": base["w"], "b": -base["b"]},
        {"w": torch.nextafter(base["w"], torch.tensor(9.0)), "b": base["b"]},
        {"w": base["w"]},
    ]
    prints = {storage.fingerprint(v) for v in [base, *variants]}
    assert len(prints) == len(variants) + 1
    assert storage.fingerprint(dict(reversed(base.items()))) == storage.fingerprint(base)
    assert len(storage.fingerprint({"empty": torch.empty(0), "scalar": torch.tensor(1)})) == 64


def test_a_tensor_and_a_value_of_one_name_are_refused():
    with pytest.raises(CheckpointError, match=r"a tensor and facts\.fisher a value"):
        storage.join_tensors("facts", {"fisher": 0.5}, {"facts.fisher.x": torch.ones(1)}, ".")


@pytest.mark.parametrize(
    "name", ["resnet18_cifar", "resnet50", "efficientnet_lite0", "vit_cifar", "convnext_cifar"]
)
def test_a_module_is_built_to_fit_once(name):
    """The outline draws no random numbers: what follows is as if there had been none."""

    def build():
        return models.create(name, classes=3)

    torch.manual_seed(0)
    weights = build().state_dict()
    expected = torch.rand(1)
    torch.manual_seed(0)
    module = storage.build_to_fit(build, weights)
    assert torch.equal(torch.rand(1), expected)
    assert storage.fingerprint(module.state_dict()) == storage.fingerprint(weights)
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(3, 2)}, r"size mismatch of weight: \(3, 2\) instead of \(2, 2\)"),
        ({"weight": torch.ones(2, 2, dtype=torch.int64)}, "weight is torch.int64 instead of"),
        ({"weight": torch.ones(2, 2, dtype=torch.complex64)}, "weight is torch.complex64"),
        ({"other": torch.ones(1)}, "other is not in the model"),
        ({"weight": None}, "weight is missing"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change, message):
    weights = {**nn.Linear(2, 2).state_dict(), **change}
    with pytest.raises(CheckpointError, match=message):
        storage.build_to_fit(
            lambda: nn.Linear(2, 2), {k: v for k, v in weights.items() if v is not None}
        )


@pytest.mark.parametrize("size", [10**6, 10**12])
def test_a_module_of_another_size_than_its_weights_is_not_built(size):
    tracemalloc.start()
    with pytest.raises((CheckpointError, RuntimeError), match=r"size mismatch|overflow"):
        storage.build_to_fit(lambda: nn.Linear(size, size), nn.Linear(2, 2).state_dict())
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()


class Reads(nn.Module):
    """Reads a weight while it is built, as no module without memory can."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.largest = self.weight.max().item()


def test_a_module_that_reads_its_weights_can_be_built():
    built = storage.build_to_fit(Reads, {"weight": torch.zeros(2)})
    assert built.weight.tolist() == [0, 0]
    with pytest.raises(CheckpointError, match="size mismatch"):
        storage.build_to_fit(Reads, {"weight": torch.zeros(3)})
