"""NOTE and its memory against a loop that takes one image at a time."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.methods import slow
from tests.methods.test_onda import doubles, slowed
from tests.toys import CLASSES, make_batches, make_net, same
from twoshift.errors import BatchError, ModelError, SettingError
from twoshift.methods._reservoir import place
from twoshift.methods.note import NOTE
from twoshift.methods.source import Source
from twoshift.models.norm import batch_norms

NAME = "resnet_iabn"


@torch.no_grad()
def undecided():
    """A network that predicts all classes, in float64; the toy's favour is for one of them."""
    net = make_net(NAME).double()
    logits = net(torch.cat(doubles(NAME)))
    net.fc.bias -= logits.mean(0)
    return net


class SlowMemory:
    """Prediction-balanced reservoir sampling as the paper tells it."""

    def __init__(self, capacity):
        self.items, self.arrived, self.capacity = [], [0] * CLASSES, capacity
        self.generator = torch.Generator()

    def draw(self, options):
        return options[torch.randint(len(options), (1,), generator=self.generator).item()]

    def add(self, image, label):
        self.arrived[label] += 1
        if len(self.items) < self.capacity:
            self.items.append((image, label))
            return
        sizes = [sum(c == k for _, c in self.items) for k in range(CLASSES)]
        largest = [k for k in range(CLASSES) if sizes[k] == max(sizes)]
        if label not in largest:
            leaving = self.draw(largest)
        else:
            chance = torch.rand(1, generator=self.generator).item()
            if chance >= sizes[label] / self.arrived[label]:
                return
            leaving = label
        place = self.draw([i for i, (_, c) in enumerate(self.items) if c == leaving])
        self.items[place] = (image, label)


def entropy_over_images_and_classes(logits):
    terms = []
    for z in logits:
        p = z.exp() / z.exp().sum()
        terms += [-q * q.log() for q in p]
    return sum(terms) / len(terms)


def run_by_hand(net, layers, batches, memory, every, lr, optimizer, frozen):
    parameters = [
        p
        for path, m in layers.items()
        if not any(path.startswith(f) for f in frozen)
        for p in (m.weight, m.bias)
    ]
    optimizer, logits = optimizer(parameters, lr), []
    for i, x in enumerate(torch.cat(batches)):
        with torch.no_grad():
            z = net(x[None])[0]
        logits.append(z)
        memory.add(x, int(z.argmax()))
        if (i + 1) % every == 0:
            for layer in layers.values():
                layer.train()
            loss = entropy_over_images_and_classes(net(torch.stack([y for y, _ in memory.items])))
            optimizer.step(torch.autograd.grad(loss, parameters))
            for layer in layers.values():
                layer.eval()
    return torch.stack(logits)


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 5e-3, "momentum": 0.2, "capacity": 6, "update_every": 4},
        {"capacity": 8, "update_every": 10, "freeze": ["layer4"]},
        {"lr": 0.1, "optim": "sgd", "capacity": 12, "update_every": 16},
    ],
    ids=["small", "frozen", "sgd"],
)
def test_against_a_plain_loop(settings):
    lr, every = settings.get("lr", 1e-4), settings["update_every"]
    frozen = settings.get("freeze", [])
    batches, (net, layers) = doubles(NAME), slowed(undecided(), settings.get("momentum", 0.01))
    live, memory = NOTE(undecided(), **settings), SlowMemory(settings["capacity"])
    logits = torch.cat([live(x) for x in batches])
    optimizer = slow.SGD if settings.get("optim") == "sgd" else slow.Adam
    expected = run_by_hand(net, layers, batches, memory, every, lr, optimizer, frozen)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    source = undecided()
    for path, layer in batch_norms(live.model):
        wanted = layers[path]
        torch.testing.assert_close(layer.weight, wanted.weight, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(layer.bias, wanted.bias, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(layer.running_mean, wanted.mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(layer.running_var, wanted.var, rtol=1e-6, atol=1e-6)
        first = source.get_submodule(path)
        assert torch.equal(layer.weight, first.weight) == (path.split(".")[0] in frozen)
        assert not torch.equal(layer.running_mean, first.running_mean)
    assert torch.equal(live.memory["images"], torch.stack([x for x, _ in memory.items]))
    assert live.memory["classes"].tolist() == [c for _, c in memory.items]
    assert live.memory["arrivals"].tolist() == memory.arrived
    assert torch.equal(live.generator.get_state(), memory.generator.get_state())
    assert min(memory.arrived) > 0  # else the balance was not put to the test


def test_batches_do_not_matter():
    stream, runs = torch.cat(doubles(NAME)), []
    for size in (1, 7, 12, len(stream)):
        live = NOTE(undecided(), lr=5e-3, momentum=0.2, capacity=8, update_every=12)
        runs.append((torch.cat([live(x) for x in stream.split(size)]), live.state()))
    for logits, state in runs[1:]:
        torch.testing.assert_close(logits, runs[0][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state, runs[0][1], rtol=1e-5, atol=1e-5)


def test_before_the_first_update_it_is_the_source_model():
    net, batches = make_net(NAME), make_batches(NAME, (8, 5, 1, 7))
    live, source = NOTE(net, update_every=22), Source(net)
    for x in batches:
        torch.testing.assert_close(live(x), source(x))
    assert same(dict(live.model.state_dict()), dict(net.state_dict()))
    assert torch.equal(live.memory["images"], torch.cat(batches))
    live(batches[0])  # the tail was not dropped: one more image and it learns
    assert not torch.equal(live.model.bn1.weight, net.bn1.weight)


def test_only_norm_weights_and_statistics_move():
    net = make_net(NAME)
    live = NOTE(net, freeze=["layer4"], capacity=6, update_every=4)
    for x in make_batches(NAME):
        live(x)
        assert not any(m.training for m in live.model.modules())
    moves, source = slow.affine(live.model, ["layer4"]), dict(net.named_parameters())
    for path, parameter in live.model.named_parameters():
        assert torch.equal(parameter, source[path]) == (path not in moves), path
        assert (parameter.grad is None) == (path not in moves), path
    assert live.model.layer4[0].bn1.num_batches_tracked == 5


def test_the_loss_is_finite_where_the_model_is_sure():
    live = NOTE(make_net(NAME))
    logits = torch.tensor([[1e4, 0.0, -1e4], [0.0, 0.0, 0.0]], requires_grad=True)
    loss = live.loss(logits)
    torch.testing.assert_close(loss, torch.tensor(3.0).log() / 2 / 3)
    loss.backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("settings", [{"capacity": 1, "update_every": 1}, {"update_every": 3}])
def test_batches_of_one(settings):
    live = NOTE(make_net(NAME), lr=5e-3, **settings)
    for x in make_batches(NAME, (1,) * 10):
        assert live(x).isfinite().all()
    assert all(t.isfinite().all() for t in live.moving().values())
    assert len(live.memory["images"]) == min(10, live.capacity)


def test_kept_images_are_the_methods_own():
    x, y = make_batches(NAME, (6, 6))
    live, other = (NOTE(make_net(NAME), lr=5e-3, update_every=8) for _ in range(2))
    live(x)
    other(x.clone())
    x.zero_()
    assert torch.equal(live(y), other(y))
    assert same(live.state(), other.state())


def test_saved_channels_last_it_goes_on_bit_for_bit(tmp_path):
    last = torch.channels_last
    batches = [x.contiguous(memory_format=last) for x in make_batches(NAME, (7, 8, 9))]
    live = NOTE(make_net(NAME), lr=5e-3, capacity=6, update_every=4)
    live(batches[0])
    live.save(tmp_path / "s")
    restored = NOTE.load(tmp_path / "s", make_net(NAME))
    for x in batches[1:]:
        assert torch.equal(restored(x), live(x))
    assert same(restored.state(), live.state())


@pytest.mark.parametrize("optim", ["adam", "sgd"])
def test_reset_forgets_memory_moments_and_draws(optim):
    live = NOTE(make_net(NAME), lr=5e-3, optim=optim, capacity=6, update_every=4)
    first, batches = live.state(), make_batches(NAME)
    logits = [live(x) for x in batches]
    assert live.optimizer.state
    assert live.memory
    live.reset()
    assert same(live.state(), first)
    assert not live.optimizer.state
    assert not live.memory
    assert all(torch.equal(live(x), z) for x, z in zip(batches, logits, strict=True))


def test_images_that_cannot_be_learnt_from_are_refused_before_they_are_kept():
    live, (x, y) = NOTE(make_net(NAME), update_every=8), make_batches(NAME, (5, 20))
    with pytest.raises(BatchError, match=r"pixels below 1e\+12"):
        live(torch.full_like(x, 1e25))
    live(x)
    with pytest.raises(BatchError, match="like the images that the method remembers"):
        live(torch.rand(6, 3, 20, 20))
    assert len(live.memory["images"]) == 5
    assert live(y).isfinite().all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"capacity": 0}, "capacity of note, must be a whole number from 1, got 0"),
        ({"capacity": 6.5}, "capacity of note, must be a whole number"),
        ({"update_every": 0}, "update_every of note, must be a whole number from 1"),
        ({"momentum": -0.1}, "momentum of the statistics"),
        ({"lr": 0}, "lr of the optimiser, must be above 0"),
        ({"optim": "adamw"}, "optim of a method, must be one of 'adam', 'sgd'"),
        ({"freeze": ["layer44"]}, "Did you mean 'layer4'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(SettingError, match=message):
        NOTE(make_net(NAME), **settings)


def test_models_without_iabn_layers_are_refused():
    with pytest.raises(ModelError, match="IABN layers"):
        NOTE(make_net("resnet_bn"))


def fill(labels, capacity, seed):
    """Which arrivals are in the memory after all have come, with their classes and the counts."""
    generator = torch.Generator().manual_seed(seed)
    kept, arrivals, who = [], Counter(), []
    for i, label in enumerate(labels):
        slot = place(label, kept, arrivals, capacity, generator)
        if slot is not None:
            who[slot : slot + 1] = [i]
    return who, kept, arrivals


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 12), st.integers(0, 2**31)
)
def test_no_class_gives_way_unless_it_is_among_the_largest(labels, capacity, seed):
    who, kept, arrivals = fill(labels, capacity, seed)
    assert kept == [labels[i] for i in who]
    assert len(set(who)) == len(kept) == min(capacity, len(labels))
    assert arrivals == Counter(labels)
    sizes = Counter(kept)
    for label, count in arrivals.items():
        assert sizes[label] == count or sizes[label] >= max(sizes.values()) - 1


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_of_mostly_one_class_leaves_a_balanced_memory(seed):
    g = torch.Generator().manual_seed(seed)
    share = torch.tensor([0.9, 0.04, 0.03, 0.03])
    labels = torch.multinomial(share, 600, True, generator=g).tolist()
    assert sorted(Counter(fill(labels, 8, seed)[1]).items()) == [(k, 2) for k in range(4)]


@pytest.mark.parametrize("classes", [1, 2])
def test_every_arrival_of_a_class_is_equally_likely_to_be_kept(classes):
    """While a class is among the largest it is a plain reservoir."""
    runs, arrivals, capacity = 3000, 12 * classes, 4 * classes
    labels = [i % classes for i in range(arrivals)]
    seen = Counter(i for seed in range(runs) for i in fill(labels, capacity, seed)[0])
    error = (1 / 3 * 2 / 3 / runs) ** 0.5
    for i in range(arrivals):
        assert abs(seen[i] / runs - 1 / 3) < 4 * error, i
