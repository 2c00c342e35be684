"""Weights files of other people: what fits is loaded exactly, anything else is refused."""

import hashlib
import os
import pickle
import socket
import warnings
import zipfile
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from twoshift import models
from twoshift.errors import CheckpointError, MismatchError, ModelError, StorageError
from twoshift.models.weights import load_weights, read_weights


def make_net(classes=5, norm="bn", seed=0, width=4):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = models.create("resnet18", classes=classes, width=width, norm=norm)
        with torch.no_grad():
            for tensor in net.state_dict().values():
                if tensor.is_floating_point():
                    tensor.uniform_(0.1, 1)
                else:
                    tensor.fill_(seed + 7)
    return net


def torchvision_file(path, net):
    """As torchvision publishes them: an ordered dictionary of tensors, pickled in a zip."""
    torch.save(OrderedDict((n, t.clone()) for n, t in net.state_dict().items()), path)
    return path


def same(a, b, leave=()):
    a, b = a.state_dict(), b.state_dict()
    return all(torch.equal(a[n], b[n]) for n in a if n not in leave)


@pytest.mark.parametrize("norm", ["bn", "iabn"])
def test_a_torchvision_style_file(tmp_path, norm):
    donor, net = make_net(seed=1), make_net(norm=norm)
    path = torchvision_file(tmp_path / "resnet18-5c106cde.pth", donor)
    assert not same(net, donor)
    loaded = load_weights(net, path)
    assert same(net, donor)
    assert loaded.left == ()
    assert loaded.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"state_dict": state, "epoch": 90, "arch": "resnet18"},
        lambda state: {"model": state, "optimizer": {"lr": 0.1}},
        lambda state: {f"module.{n}": t for n, t in state.items()},
        lambda state: {"state_dict": {f"module.{n}": t for n, t in state.items()}},
        lambda state: {n: t for n, t in state.items() if not n.endswith("num_batches_tracked")},
        lambda state: {n: nn.Parameter(t) if t.dim() == 4 else t for n, t in state.items()},
    ],
    ids=["state_dict", "model", "module", "both", "no counters", "parameters"],
)
def test_what_training_scripts_save(tmp_path, wrap):
    donor, net = make_net(seed=1), make_net()
    torch.save(wrap(donor.state_dict()), tmp_path / "checkpoint.pt")
    load_weights(net, tmp_path / "checkpoint.pt")
    counters = [n for n in net.state_dict() if n.endswith("num_batches_tracked")]
    assert same(net, donor, leave=counters)


def test_safetensors_and_half_precision(tmp_path):
    donor, net = make_net(seed=1), make_net()
    half = {n: t.half() if t.is_floating_point() else t for n, t in donor.state_dict().items()}
    save_file(half, tmp_path / "model.safetensors")
    load_weights(net, str(tmp_path / "model.safetensors"))
    assert net.conv1.weight.dtype == torch.float32
    torch.testing.assert_close(net.conv1.weight, donor.conv1.weight, rtol=1e-3, atol=1e-3)


def test_the_old_file_format(tmp_path):
    donor, net = make_net(seed=1), make_net()
    path = tmp_path / "old.pth"
    torch.save(donor.state_dict(), path, _use_new_zipfile_serialization=False)
    load_weights(net, path)
    assert same(net, donor)


def test_another_number_of_classes_leaves_the_classifier(tmp_path):
    donor, net, untouched = make_net(classes=1000, seed=1), make_net(), make_net()
    loaded = load_weights(net, torchvision_file(tmp_path / "w.pth", donor))
    assert loaded.left == ("fc.weight", "fc.bias")
    assert same(net, donor, leave=loaded.left)
    assert torch.equal(net.fc.weight, untouched.fc.weight)
    assert torch.equal(net.fc.bias, untouched.fc.bias)


def refused(net, state, tmp_path, match):
    before = {n: t.clone() for n, t in net.state_dict().items()}
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(MismatchError, match=match):
        load_weights(net, tmp_path / "w.pth")
    return all(torch.equal(t, before[n]) for n, t in net.state_dict().items())


def test_what_does_not_fit_is_named_and_nothing_is_loaded(tmp_path):
    state = make_net(seed=1).state_dict()
    some = {n: t for n, t in state.items() if not n.startswith("layer4.1.conv")}
    assert refused(
        make_net(), some, tmp_path, r"2 missing: layer4\.1\.conv1\.weight, layer4\.1\.conv2"
    )
    more = {**state, "layer5.weight": torch.zeros(1)}
    assert refused(
        make_net(), more, tmp_path, r"fit ResNet18: 1 not in the model: layer5\.weight\. Create"
    )
    other = {**state, "layer1.0.conv1.weight": torch.zeros(4, 4, 1, 1)}
    assert refused(
        make_net(), other, tmp_path, r"conv1\.weight \(4, 4, 1, 1\) instead of \(4, 4, 3, 3\)"
    )
    wider = make_net(width=8).state_dict()
    assert refused(make_net(), wider, tmp_path, r"of another shape: conv1.weight.*, \.\.\.")
    headless = {n: t for n, t in state.items() if not n.startswith("fc.")}
    assert refused(make_net(), headless, tmp_path, r"2 missing: fc\.weight, fc\.bias")


def test_batch_norm_and_group_norm_do_not_mix(tmp_path):
    bn, gn = make_net(), make_net(norm="gn")
    assert refused(
        make_net(norm="gn"), bn.state_dict(), tmp_path, "create the model with norm='bn' or 'i"
    )
    assert refused(
        make_net(norm="iabn"), gn.state_dict(), tmp_path, "create the model with norm='gn'"
    )


def test_no_file(tmp_path):
    with pytest.raises(StorageError, match=r"no weights in .*nowhere\.pth.*Check the path"):
        load_weights(make_net(), tmp_path / "nowhere.pth")
    with pytest.raises(StorageError, match="must be a file"):
        load_weights(make_net(), tmp_path)


class Evil:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("save", [torch.save, lambda x, p: p.write_bytes(pickle.dumps(x))])
def test_code_in_a_file_is_not_run(tmp_path, save):
    trace = tmp_path / "ran"
    state = {**make_net().state_dict(), "conv1.bias": Evil(f"touch {trace}")}
    save(state, tmp_path / "evil.pth")
    with pytest.raises(
        CheckpointError, match=r"evil\.pth is damaged, or has more than tensors in it"
    ):
        load_weights(make_net(), tmp_path / "evil.pth")
    assert not trace.exists()


@pytest.mark.parametrize("kind", ["pth", "safetensors"])
@pytest.mark.parametrize("cut", [0, 1, 7, 100, 5_000, -1])
def test_truncated_files(tmp_path, kind, cut):
    state, path = make_net().state_dict(), tmp_path / f"w.{kind}"
    save_file(state, path) if kind == "safetensors" else torch.save(state, path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=rf"w\.{kind} is"):
        load_weights(make_net(), path)


def small_net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 3))


def test_a_flipped_byte_ends_in_a_refusal_or_a_load(tmp_path):
    path = torchvision_file(tmp_path / "w.pth", small_net())
    good, refusals = path.read_bytes(), 0
    for at in range(0, len(good), 23):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :])
        try:
            load_weights(small_net(), path)
        except (CheckpointError, MismatchError):
            refusals += 1
    assert refusals > 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>Not found</html>", "is damaged, or has"),
        ([1, 2], "must be a state_dict, got list"),
        ({}, "must be a state_dict"),
        (torch.zeros(3), "must be a state_dict, got Tensor"),
        ({"epoch": 3, "weights": {}}, "entries that are not tensors: epoch, weights"),
        ({"conv1.weight": torch.tensor([1.0, float("nan")])}, r"NaN or infinity in conv1\.weight"),
    ],
)
def test_files_that_are_something_else(tmp_path, content, message):
    path = tmp_path / "w.pth"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(CheckpointError, match=message):
        read_weights(path)


def test_any_module_of_the_users(tmp_path):
    donor, net = small_net(), small_net()
    torch.save(donor.state_dict(), tmp_path / "own.pt")
    load_weights(net, tmp_path / "own.pt")
    assert same(net, donor)


class TwoHeads(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.fc, self.head = nn.Linear(4, classes), nn.Linear(4, 2)


@pytest.mark.parametrize("make", [TwoHeads, lambda: nn.Conv2d(3, 4, 3)])
def test_a_module_without_one_clear_head_must_fit_entirely(tmp_path, make):
    donor, net = make(), make()
    torch.save(donor.state_dict(), tmp_path / "own.pt")
    assert load_weights(net, tmp_path / "own.pt").left == ()
    assert same(net, donor)
    assert refused(
        TwoHeads(), TwoHeads(classes=5).state_dict(), tmp_path, r"fc\.weight \(5, 4\) instead"
    )


def test_most_backbones_bring_no_weights():
    with pytest.raises(ModelError, match=r"no package provides weights of ResNet18.*a file"):
        models.create("resnet18", width=4, pretrained=True)


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda net: torch.compile(net, backend="eager")])
def test_a_wrapped_model_takes_the_weights_of_the_bare_one(tmp_path, wrap):
    net, donor = (nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)) for _ in range(2))
    torch.save(donor.state_dict(), tmp_path / "w.pth")
    load_weights(wrap(net), tmp_path / "w.pth")
    assert torch.equal(net[1].weight, donor[1].weight)


def plain_net(dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten()).to(dtype)


def with_weight(path, make):
    """A file of the plain network whose first weight is what ``make`` makes of it."""
    state = plain_net().state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls half of these kinds experimental
        torch.save(state | {"0.weight": make(state["0.weight"])}, path)
    return path


ODD_TENSORS = {
    "sparse": (torch.Tensor.to_sparse, "a sparse tensor"),
    "sparse rows": (lambda w: w.flatten(1).to_sparse_csr(), "a sparse tensor"),
    "quantised": (lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8), "a quantised"),
    "meta": (lambda w: w.to("meta"), "on the device meta"),
    "nested": (lambda w: torch.nested.nested_tensor([w[0], w[1, :2]]), "a nested tensor"),
    "complex": (lambda w: w.to(torch.complex64), "complex numbers"),
    "endless": (lambda w: torch.ones(1).expand(10**13), "of more than the file"),
    "not finite": (lambda w: w.fill_(float("nan")), "NaN or infinity"),
    "small and not finite": (
        lambda w: w.fill_(float("nan")).to(torch.float8_e4m3fn),
        "NaN or infinity",
    ),
}


@pytest.mark.filterwarnings("ignore")  # torch's, of reading the odd kinds
@pytest.mark.parametrize("kind", ODD_TENSORS)
def test_tensors_that_cannot_be_weights_are_refused(tmp_path, kind):
    make, message = ODD_TENSORS[kind]
    net, before = plain_net(), plain_net()
    with pytest.raises(CheckpointError, match=rf"{message}.* in 0\.weight.*state_dict\(\)"):
        load_weights(net, with_weight(tmp_path / "w.pth", make))
    assert same(net, before)


@pytest.mark.parametrize(
    ("dtype", "name", "value"),
    [
        (torch.float32, "0.weight", torch.full((4, 3, 3, 3), 1e300, dtype=torch.float64)),
        (torch.float16, "0.weight", torch.full((4, 3, 3, 3), 1e6)),
        (torch.float16, "1.running_var", torch.full((4,), 7e4)),
        (torch.float32, "1.num_batches_tracked", torch.tensor(1e30)),
        (torch.float32, "1.num_batches_tracked", torch.tensor(0.5)),
    ],
)
def test_numbers_that_overflow_the_model_are_refused(tmp_path, dtype, name, value):
    net, before = plain_net(dtype), plain_net(dtype)
    torch.save(plain_net().state_dict() | {name: value}, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match=rf"weights of {name}, must be numbers that fit"):
        load_weights(net, tmp_path / "w.pth")
    assert same(net, before)


def test_numbers_of_another_type_that_fit_are_loaded(tmp_path):
    net, donor = plain_net(torch.float16), make_small(torch.float64)
    torch.save(donor.state_dict(), tmp_path / "w.pth")
    load_weights(net, tmp_path / "w.pth")
    assert torch.equal(net[0].weight, donor[0].weight.half())


def make_small(dtype):
    net = plain_net(dtype)
    with torch.no_grad():
        net[0].weight.mul_(2)
    return net


def test_a_zip_that_unpacks_to_more_than_it_is(tmp_path):
    path, packed = tmp_path / "w.pth", tmp_path / "packed.pth"
    torch.save({"w": torch.zeros(1_000_000)}, path)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.namelist():
            new.writestr(member, old.read(member))
    assert packed.stat().st_size < 50_000
    assert torch.load(packed, weights_only=True)["w"].shape == (1_000_000,)  # torch unpacks it
    with pytest.raises(CheckpointError, match="is compressed"):
        read_weights(packed)


def deep(levels):
    return b"\x80\x02})" + b"\x85" * levels + b"K\x01s."


@pytest.mark.parametrize("levels", [60, 200_000])
def test_tuples_in_tuples_without_end(tmp_path, levels):
    """Their hash took the process down: exit code 139."""
    path, other = tmp_path / "w.pth", tmp_path / "deep.pth"
    torch.save({"w": torch.zeros(3)}, path)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w") as new:
        for member in old.namelist():
            is_pickle = member.endswith("data.pkl")
            new.writestr(member, deep(levels) if is_pickle else old.read(member))
    with pytest.raises(CheckpointError, match="at most 50 tuples"):
        read_weights(other)
    torch.save({"w": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    other.write_bytes(deep(levels) + path.read_bytes())
    with pytest.raises(CheckpointError, match="at most 50 tuples"):
        read_weights(other)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_pipes_and_sockets_are_refused_without_waiting(tmp_path, suffix):
    os.mkfifo(tmp_path / f"pipe{suffix}")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / f"socket{suffix}"))
        for name in ("pipe", "socket"):
            with pytest.raises(StorageError, match="must be a file"):
                read_weights(tmp_path / f"{name}{suffix}")
