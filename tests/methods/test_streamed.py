"""Streamed statistics against sums over single images, kept in double precision."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from tests.calibration.trained import batches as pairs_of
from tests.calibration.trained import noisy, trained
from tests.methods.test_appearance import by_hand as looks_like
from tests.toys import CLASSES, make_batches, make_moments, make_net
from twoshift.adapters import attach, logit_adapter
from twoshift.data.stream import to_float
from twoshift.errors import MismatchError, ModelError, SettingError
from twoshift.methods import Source, create
from twoshift.methods.matched import class_moments

SIZES = (8, 5, 2, 8, 3, 9, 8, 4, 7, 6)


def norms(net):
    return {n: m for n, m in net.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}


def streamed_by_hand(net, moments, share, half_life, start, far, pseudo_count, doubt):
    """Predicts batch after batch, from a list of everything that it saw.

    Images of one batch count alike. Together they count as much as if their new ones had come one
    by one. Those of less than 1/256 of the stream are normalised by the images before them.
    """
    seen, votes, known = {name: [] for name in norms(net)}, [], {"distance": 0.0}
    looks, new = [], []

    def weights():
        """The weight of one image of each batch, by how many new images came after it."""
        found = []
        for i, (count, images) in enumerate(zip(new, looks, strict=True)):
            whole = sum(0.5 ** (age / half_life) for age in range(round(count)))
            if abs(count - round(count)) > 1e-9:  # of parts of an image
                whole = (1 - 0.5 ** (count / half_life)) / (1 - 0.5 ** (1 / half_life))
            found.append(whole * 0.5 ** (sum(new[i + 1 :]) / half_life) / len(images))
        return found

    def count_new(x):
        """An image is new as far as it looks different from the one before."""
        before, count = looks[-1][-1] if looks else None, 0.0
        looks.append([looks_like(image) for image in x])
        for now in looks[-1]:
            step = (
                1.0 if before is None else max(abs(a - b) for a, b in zip(now, before, strict=True))
            )
            count += min(max(step - 1e-5, 0.0) / 0.05, 1.0)
            before = now
        new.append(count)

    def statistics(name, of_image):
        """Mean and variance of all that a layer saw."""
        total = sum(w * len(batch) for w, batch in zip(of_image, seen[name], strict=True))
        first = square = 0
        for weight, batch in zip(of_image, seen[name], strict=True):
            for mean, mean_square in batch:
                first = first + weight / total * mean
                square = square + weight / total * mean_square
        return first, square - first**2

    def predict(x):
        slow = copy.deepcopy(net).double().eval()
        count_new(x)
        of_image, sizes = weights(), [len(images) for images in looks]
        added = pseudo_count * (1 + doubt * known["distance"])
        labels = torch.full((CLASSES,), added / CLASSES).double()
        for weight, batch in zip(of_image, votes, strict=False):
            for c in batch:
                labels[c] += weight
        q = labels / labels.sum()
        total = sum(w * n for w, n in zip(of_image, sizes, strict=True))
        distances = []
        for name, layer in norms(slow).items():
            means, variances = (torch.tensor(m).double() for m in moments[name])
            now = sum(q[c] * means[c] for c in range(CLASSES))
            wide = sum(q[c] * (variances[c] + means[c] ** 2) for c in range(CLASSES)) - now**2
            away = 0.0
            if votes:
                mean, var = statistics(name, of_image[:-1])
                ratios = (var + layer.eps) / (wide + layer.eps)
                each = [
                    (mean[c] - now[c]) ** 2 / (wide[c] + layer.eps) + math.log(ratios[c]) ** 2
                    for c in range(len(mean))
                ]
                away = float(sum(each) / len(each))
            distances.append(away)
            lost = away**2 / (away**2 + far**2)
            mix = (share + (1 - share) * lost) * total / (total + start * (1 - lost))

            def normalise(layer, args, name=name, now=now, wide=wide, mix=mix):
                values = args[0].flatten(2) if args[0].dim() > 2 else args[0][:, :, None]
                before = statistics(name, of_image[:-1]) if votes else None
                seen[name].append([(v.mean(1), v.square().mean(1)) for v in values])
                still = of_image[-1] * sizes[-1] / total < 1 / 256
                mean, var = before if still else statistics(name, of_image)
                then, spread = layer.running_mean.clone(), layer.running_var.clone()
                ratio = (var + layer.eps) / (wide + layer.eps)
                matched = mean + ratio.sqrt() * (then - now)
                layer.running_mean = (1 - mix) * then + mix * matched
                layer.running_var = spread ** (1 - mix) * (ratio * spread) ** mix

            layer.register_forward_pre_hook(normalise)
        known["distance"] = sum(distances) / len(distances)
        with torch.no_grad():
            logits = slow(x.double())
        votes.append(logits.argmax(1).tolist())
        return logits

    return predict


@pytest.mark.parametrize("name", ["resnet_bn", "mlp"])
@pytest.mark.parametrize("sizes", [(1,) * 10, SIZES], ids=["one by one", "batches"])
@pytest.mark.parametrize("far", [0.1, 3.0])
def test_statistics_and_labels_are_those_of_the_last_images(name, sizes, far):
    net = make_net(name)
    moments = make_moments(net)
    settings = {"share": 0.7, "half_life": 20.0, "start": 4.0, "pseudo_count": 2.0, "far": far}
    settings["doubt"] = 1.0
    live = create("streamed", copy.deepcopy(net).double(), moments=moments, **settings, change=1e9)
    by_hand = streamed_by_hand(net, moments, **settings)
    for x in make_batches(name, sizes):
        torch.testing.assert_close(live(x.double()), by_hand(x), rtol=1e-5, atol=1e-5)
    assert float(live.distance) > 0.01  # what is far matters here


def test_single_images_of_a_long_stream_are_normalised_by_those_before():
    net = make_net("mlp")
    moments = make_moments(net)
    settings = {"share": 0.7, "half_life": 1e3, "start": 4.0, "pseudo_count": 2.0, "far": 3.0}
    settings["doubt"] = 1.0
    live = create("streamed", copy.deepcopy(net).double(), moments=moments, **settings, change=1e9)
    by_hand = streamed_by_hand(net, moments, **settings)
    for i, x in enumerate(make_batches("mlp", (*(64,) * 6, 1, 1, 9, 1))):
        torch.testing.assert_close(live(x.double()), by_hand(x), rtol=1e-5, atol=1e-5)
        assert live._layers[0].look.still == (i in (6, 7, 9))


def test_single_precision_is_near():
    net = make_net("resnet_bn")
    moments = make_moments(net)
    live = create("streamed", net, moments=moments, change=1e9)
    by_hand = streamed_by_hand(net, moments, 0.6, 421.0, 32.0, 0.5, 10.0, 30.0)
    for x in make_batches("resnet_bn", SIZES):
        torch.testing.assert_close(live(x).double(), by_hand(x), rtol=1e-3, atol=1e-4)


def test_without_a_share_it_is_the_source_model():
    net = make_net("resnet_bn")
    live = create("streamed", net, moments=make_moments(net), share=0.0, far=1e9)
    source = Source(net)
    for x in make_batches("resnet_bn"):
        torch.testing.assert_close(live(x), source(x), rtol=1e-4, atol=1e-5)


def test_the_first_image_is_predicted_almost_by_the_source_model():
    net, (x,) = make_net("resnet_bn"), make_batches("resnet_bn", (1,))
    moments, expected = make_moments(net), Source(net)(x)
    far = [
        float((create("streamed", net, moments=moments, start=start)(x) - expected).abs().max())
        for start in (0.0, 32.0, 1e6)
    ]
    assert far[0] > 4 * far[1]
    assert far[2] < 1e-4


def test_labels_are_counted_without_the_distribution_that_the_logits_contain():
    net, shares = make_net("resnet_bn"), [0.6, 0.2, 0.1, 0.07, 0.03]
    moments, fair = make_moments(net), copy.deepcopy(net)
    with torch.no_grad():
        fair.fc.bias -= torch.tensor(shares).log()
    adapted = attach(net, logit_adapter(net, assumes=shares))
    live, plain = (create("streamed", m, moments=moments, doubt=0) for m in (adapted, fair))
    for x in make_batches("resnet_bn", SIZES):
        live(x)
        plain(x)
        torch.testing.assert_close(live.prior, plain.prior)
    assert float((live.prior - 1 / CLASSES).abs().max()) > 0.1


def shifted_digits(count):
    """Darker digits, mostly of three classes."""
    digits, rng = noisy("test", seed=2), np.random.default_rng(0)
    likely = np.where(digits.labels < 3, 1.0, 0.2)
    rows = rng.choice(len(digits), count, p=likely / likely.sum())
    return 0.6 * to_float(digits.images[rows]), torch.from_numpy(digits.labels[rows])


def predictions(x, size):
    of = trained("balanced_softmax")
    moments = class_moments(of.net, pairs_of(of.train))
    live = create("streamed", of.net, moments=moments)
    return torch.cat([live(part) for part in x.split(size)])


def test_batches_of_any_size_give_nearly_the_same_predictions():
    x, y = shifted_digits(256)
    # the first images see little of the stream, or all of their batch
    probs = {size: predictions(x, size)[64:].softmax(1) for size in (1, 4, 16, 64)}
    right = {size: float((p.argmax(1) == y[64:]).float().mean()) for size, p in probs.items()}
    for size in (4, 16, 64):
        assert float((probs[size] - probs[1]).abs().mean()) < 0.02
        assert abs(right[size] - right[1]) < 0.02  # three images of 192


@pytest.mark.slow
def test_accuracy_is_within_a_point_whatever_the_size_of_batches():
    """Of 2000 images: of 500, the start and a handful of close calls are more than a point."""
    x, y = shifted_digits(2000)
    right = [float((predictions(x, size).argmax(1) == y).float().mean()) for size in (1, 4, 16, 64)]
    assert max(right) - min(right) <= 0.01


@pytest.mark.parametrize("size", [64, 16, 1])
def test_images_that_look_different_start_afresh(size):
    """Images and votes so far then count as at most 8, as soon as 32 images look different."""
    net = make_net("resnet_bn")
    g = torch.Generator().manual_seed(0)
    x = torch.rand(192, 3, 8, 8, generator=g).mul_(torch.rand(192, 1, 1, 1, generator=g))
    live, steady = (
        create("streamed", net, moments=make_moments(net), change=change) for change in (1.0, 1e9)
    )
    for part in x[:128].split(size):
        live(part)
        steady(part)
    assert torch.equal(live.images, steady.images)
    before, largest = float(live.images), 0.0
    for part in (0.1 * x[128:]).split(size):
        live(part)
        steady(part)
        cut = float(live.images) < float(steady.images) - 60
        largest = max(largest, float(live.images))
    assert cut
    assert float(live.images) <= 8 + 64
    assert (largest > before) == (size < 32)  # of few images, nobody knows yet
    # every image has one vote
    assert float(live.counts.sum()) == pytest.approx(float(live.images), rel=1e-4)


def test_identical_frames_leave_everything_as_it_is():
    net = make_net("resnet_bn")
    (x,) = make_batches("resnet_bn", (40,))
    live = create("streamed", net, moments=make_moments(net))
    live(x)
    before = live.state()
    for frames in (1, 7, 64):
        live(x[-1:].expand(frames, -1, -1, -1))
    moved = {n for n, t in live.state().items() if not torch.equal(t, before[n])}
    assert moved <= {"distance", "recent"}
    assert torch.equal(live.state()["recent"][0], before["recent"][0])  # none is new


def test_of_features_every_row_is_new():
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)).eval()
    moments = {"1": torch.ones(2, CLASSES, 8)}
    live = create("streamed", net, moments=moments, half_life=1e9)
    live(torch.ones(40, 6))
    assert float(live.images) == pytest.approx(40, rel=1e-4)


def test_repeated_frames_are_counted_once():
    """A stuck or covered camera leaves statistics and votes as they are."""
    of = trained("balanced_softmax")
    moments = class_moments(of.net, pairs_of(of.train))
    x, y = shifted_digits(320)
    lives = [create("streamed", of.net, moments=moments) for _ in range(2)]
    for live in lives:
        live(x[:128])
    for frame in (torch.zeros_like(x[:64]), x[7:8].expand(64, -1, -1, -1)):
        for size in (64, 1, 16):
            for part in frame.split(size):
                lives[1](part)
    assert float(lives[1].images) < float(lives[0].images) + 4
    right = [(live(x[128:]).argmax(1) == y[128:]).float().mean() for live in lives]
    assert abs(float(right[0] - right[1])) <= 0.02


def test_after_a_change_of_the_images_statistics_are_soon_those_of_the_new_ones():
    of = trained("balanced_softmax")
    moments = class_moments(of.net, pairs_of(of.train))
    bright, y = shifted_digits(256)
    alone = create("streamed", of.net, moments=moments)
    alone(1 - bright)
    away, first = {}, slice(alone._layers[0].num_features)
    for change in (1.0, 1e9):
        live = create("streamed", of.net, moments=moments, change=change)
        for part in [*bright.split(64), *(1 - bright).split(64)[:2]]:
            live(part)
        away[change] = float((live.followed[:, first] - alone.followed[:, first]).abs().mean())
    assert away[1.0] < away[1e9] / 2
    live, images = create("streamed", of.net, moments=moments), []
    for part in bright[y.argsort()].split(64):  # other labels are no other pictures
        live(part)
        images.append(float(live.images))
    assert images == sorted(images)


def test_a_large_batch_is_taken_in_by_parts():
    """Predictions, labels and statistics: all as with batches of 64."""
    x, _ = shifted_digits(512)
    of = trained("balanced_softmax")
    moments, lives = class_moments(of.net, pairs_of(of.train)), []
    for size in (64, 256, 150):
        live = create("streamed", of.net, moments=moments)
        lives.append((torch.cat([live(part) for part in x.split(size)]), live))
    (small, one), (large, two), (odd, _) = lives
    assert torch.equal(small, large)
    assert all(torch.equal(one.state()[n], t) for n, t in two.state().items())
    assert not torch.equal(small, odd)  # parts of 64, 64 and 22


def test_many_classes_do_not_drown_the_votes():
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 1000))
    with torch.no_grad():
        net[3].bias[7] = 100.0
    moments = {"2": torch.stack([torch.zeros(1000, 8), torch.ones(1000, 8)])}
    live = create("streamed", net, moments=moments)
    assert float(live.prior.sum()) == pytest.approx(1)
    live(torch.rand(64, 3, 2, 2))
    assert live.prior[7] > 0.8


def test_what_it_cannot_do_is_refused():
    net = make_net("resnet_bn")
    moments = make_moments(net)
    with pytest.raises(ModelError, match="IABN"):
        create("streamed", make_net("resnet_iabn"), moments=moments)
    with pytest.raises(SettingError, match="twoshift calibrate"):
        create("streamed", net)
    for wrong in (
        {"share": 1.1},
        {"half_life": 0},
        {"start": -1},
        {"far": 0},
        {"pseudo_count": 0},
        {"doubt": -1},
        {"change": 0},
    ):
        with pytest.raises(SettingError):
            create("streamed", net, moments=moments, **wrong)


class Reused(nn.Module):
    """Uses one normalisation twice, on other values, and another one never."""

    def __init__(self):
        super().__init__()
        self.norm, self.idle = nn.BatchNorm1d(4), nn.BatchNorm1d(3)
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.fc(self.norm(x).relu() + self.norm(2 * x + 1))


def test_a_layer_that_is_used_twice_follows_both_and_an_idle_one_stays():
    net, g = Reused().eval(), torch.Generator().manual_seed(0)
    moments = {
        name: torch.ones(2, CLASSES, layer.num_features) for name, layer in norms(net).items()
    }
    live = create("streamed", net, moments=moments, half_life=8.0)
    weights, values = [], []
    for size in (5, 1, 3):
        x = torch.randn(size, 4, generator=g)
        live(x)
        keep = 0.5 ** (size / 8)
        weights = [w * keep for w in weights] + [(1 - keep) / (1 - 0.5 ** (1 / 8)) / size] * size
        values += list(torch.stack([x, 2 * x + 1], 1))
        weight = (torch.tensor(weights) / sum(weights))[:, None]
        both = torch.stack(values)
        mean = (weight * both.mean(1)).sum(0)
        var = (weight * both.square().mean(1)).sum(0) - mean**2
        expected = torch.cat([torch.stack([mean, var]), torch.zeros(2, 3)], 1)
        torch.testing.assert_close(live.followed, expected, rtol=1e-4, atol=1e-5)


def test_a_copy_goes_on_by_itself():
    net, first, then = make_net("resnet_bn"), *make_batches("resnet_bn", (4, 4))
    live = create("streamed", net, moments=make_moments(net))
    live(first)
    copied, state = copy.deepcopy(live), live.state()
    expected = copied(then)
    assert all(torch.equal(tensor, state[name]) for name, tensor in live.state().items())
    assert torch.equal(live(then), expected)


def test_it_may_be_moved_to_another_precision():
    net, batches = make_net("resnet_bn"), make_batches("resnet_bn", (4, 4))
    live, moved = (create("streamed", net, moments=make_moments(net)) for _ in range(2))
    for x in batches:
        torch.testing.assert_close(
            moved.double()(x.double()).float(), live(x), rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_networks_of_any_precision(dtype):
    net, batches = make_net("resnet_bn"), make_batches("resnet_bn", (8, 1, 5))
    moments = make_moments(net)
    live = create("streamed", net, moments=moments)
    other = create("streamed", copy.deepcopy(net).to(dtype), moments=moments)
    assert other.followed.dtype == torch.promote_types(dtype, torch.float32)
    for x in batches:
        close = {torch.float16: 0.1, torch.bfloat16: 1.0, torch.float64: 1e-3}[dtype]
        torch.testing.assert_close(other(x.to(dtype)).float(), live(x), rtol=close, atol=close)


def test_a_pickled_method_goes_on_as_before():
    net, first, *then = make_net("resnet_bn"), *make_batches("resnet_bn", (8, 4, 1, 5))
    live = create("streamed", net, moments=make_moments(net))
    live(first)
    restored = pickle.loads(pickle.dumps(live))
    for x in then:
        assert torch.equal(restored(x), live(x))
    assert all(torch.equal(t, live.state()[n]) for n, t in restored.state().items())


@pytest.mark.parametrize(
    ("name", "row"), [("followed", 1), ("usual", 0), ("usual", 2), ("recent", 0), ("recent", 2)]
)
def test_negative_numbers_and_variances_are_refused(name, row):
    net = make_net("resnet_bn")
    live = create("streamed", net, moments=make_moments(net))
    live(*make_batches("resnet_bn", (40,)))
    state = live.state()
    wrong = state[name].clone()
    wrong[row, 0] = -1
    with pytest.raises(MismatchError, match=name):
        live.load_state({**state, name: wrong})
    assert all(torch.equal(t, state[n]) for n, t in live.state().items())


@pytest.mark.parametrize(
    "extreme",
    [{"half_life": 1e17}, {"far": 1e200}, {"far": 1e-200}, {"doubt": 1e38}, {"pseudo_count": 1e38}],
    ids=str,
)
def test_extreme_settings_are_finite(extreme):
    net = make_net("resnet_bn")
    live = create("streamed", net, moments=make_moments(net), **extreme)
    for x in make_batches("resnet_bn", (40, 8, 1)):
        assert live(x).isfinite().all()


def test_a_state_of_no_images_goes_on():
    net = make_net("resnet_bn")
    live = create("streamed", net, moments=make_moments(net))
    live(*make_batches("resnet_bn", (64,)))
    state = live.state()
    live.load_state({**state, "images": torch.zeros(()), "usual": state["usual"] + 100})
    assert live(*make_batches("resnet_bn", (64,), seed=3)).isfinite().all()
