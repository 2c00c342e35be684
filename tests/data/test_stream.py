import itertools
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twoshift import priors
from twoshift.data.base import ImageSet, LazyImages
from twoshift.data.stream import Batch, Stream, batch_edges, prefetch, to_float
from twoshift.errors import DataCorrupt, DataError, PriorError, SettingError


def image_set(classes=5, each=40, channels=3, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(classes), each))
    images = rng.integers(0, 256, (len(labels), 6, 4, channels), dtype=np.uint8)
    return ImageSet("toy", "test", images, labels, tuple("abcdefgh"[:classes]))


DATA = image_set()
UNIFORM = priors.uniform(5)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("order", ["shuffled", "correlated"])
def test_batches_hold_the_images_at_the_logged_indices(channels, order):
    data = image_set(channels=channels)
    stream = Stream(data, priors.longtail(5, 10), batch_size=16, order=order)
    position = 0
    for step, batch in enumerate(stream):
        assert batch.step == step
        assert batch.x.dtype == torch.float32
        assert batch.y.dtype == torch.int64
        for x, y in zip(batch.x, batch.y, strict=True):
            row = stream.indices[position]
            assert y == data.labels[row]
            for c in range(channels):
                expected = torch.from_numpy(data.images[row, :, :, c].astype(np.float32) / 255)
                assert torch.equal(x[c], expected)
            position += 1
    assert position == len(stream.indices) == len(stream.labels)
    assert step + 1 == len(stream)


def test_colour_batches_are_channels_last_and_grey_ones_contiguous():
    colour = next(iter(Stream(image_set(channels=3), UNIFORM)))
    assert colour.x.is_contiguous(memory_format=torch.channels_last)
    grey = next(iter(Stream(image_set(channels=1), UNIFORM)))
    assert grey.x.is_contiguous()


def test_conversion_covers_the_whole_range():
    images = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
    x = to_float(images)
    assert (x.min(), x.max()) == (0, 1)
    assert torch.equal(
        (x * 255).round().to(torch.uint8).flatten(), torch.arange(256).to(torch.uint8)
    )
    assert images[0, 0, 1, 0] == 1  # untouched


@pytest.mark.parametrize("order", ["shuffled", "correlated"])
def test_same_seed_same_batches_again_and_again(order):
    stream = Stream(DATA, UNIFORM, batch_size=32, seed=4, order=order)
    twin = Stream(DATA, UNIFORM, batch_size=32, seed=4, order=order)
    for a, b, c in zip(stream, stream, twin, strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.x, c.x)
        assert torch.equal(a.y, c.y)
    other = Stream(DATA, UNIFORM, batch_size=32, seed=5, order=order)
    assert not np.array_equal(stream.indices, other.indices)


def test_changing_a_batch_does_not_change_the_stream():
    stream = Stream(DATA, UNIFORM)
    before = next(iter(stream)).x.clone()
    batch = next(iter(stream))
    batch.x.zero_()
    batch.y.zero_()
    assert torch.equal(next(iter(stream)).x, before)
    assert set(stream.labels.tolist()) == set(range(5))


def test_the_correlated_order_has_the_same_images_in_another_order():
    shuffled = Stream(DATA, UNIFORM, seed=2)
    bursts = Stream(DATA, UNIFORM, seed=2, order="correlated", concentration=0.05)
    assert sorted(shuffled.indices.tolist()) == sorted(bursts.indices.tolist())
    changes = [(np.diff(s.labels) != 0).mean() for s in (shuffled, bursts)]
    assert changes[0] > 0.6
    assert changes[1] < 0.3


def test_slots_are_used():
    few, many = (
        Stream(DATA, UNIFORM, order="correlated", concentration=1e6, slots=s) for s in (1, 20)
    )
    assert (np.diff(few.labels) != 0).sum() == 4  # one slot: one run per class
    assert (np.diff(many.labels) != 0).sum() > 60


def slow_sizes(images, batch_size, last):
    """Count image by image, then adjust the last batch."""
    sizes = []
    for i in range(images):
        if i % batch_size == 0:
            sizes.append(0)
        sizes[-1] += 1
    if sizes and sizes[-1] < batch_size:
        if last == "drop":
            sizes.pop()
        elif last == "merge" and len(sizes) > 1 and sizes[-1] < batch_size / 2:
            rest = sizes.pop()
            sizes[-1] += rest
    return sizes


@given(st.integers(0, 300), st.integers(1, 70), st.sampled_from(["merge", "keep", "drop"]))
def test_batch_sizes(images, batch_size, last):
    edges = batch_edges(images, batch_size, last)
    assert edges[0] == 0
    assert np.diff(edges).tolist() == slow_sizes(images, batch_size, last)


@pytest.mark.parametrize(
    ("images", "last", "sizes"),
    [
        (64 + 31, "merge", [95]),
        (64 + 32, "merge", [64, 32]),
        (64 + 31, "keep", [64, 31]),
        (64 + 31, "drop", [64]),
        (31, "merge", [31]),
        (128, "merge", [64, 64]),
    ],
)
def test_the_last_batch(images, last, sizes):
    assert np.diff(batch_edges(images, 64, last)).tolist() == sizes


@settings(deadline=None)
@given(
    st.integers(1, 70),
    st.sampled_from(["merge", "keep", "drop"]),
    st.sampled_from(["uniform", "forward-10", "backward-3"]),
)
def test_prior_and_length_describe_the_actual_stream(batch_size, last, name):
    target = priors.named(name, 5)
    stream = Stream(DATA, target, batch_size=batch_size, last=last)
    labels = torch.cat([batch.y for batch in stream]).tolist()
    assert len(list(stream)) == len(stream)
    assert stream.labels.tolist() == labels
    np.testing.assert_allclose(stream.prior, [labels.count(c) / len(labels) for c in range(5)])
    np.testing.assert_allclose(stream.target, target)
    if last != "drop":
        np.testing.assert_allclose(stream.prior, target, atol=0.02)


def test_a_class_with_share_zero_is_in_the_prior():
    stream = Stream(DATA, [0.5, 0.5, 0, 0, 0])
    assert stream.prior.tolist() == [0.5, 0.5, 0, 0, 0]


def test_without_a_prior_every_image_is_drawn_once():
    few = DATA.subset(np.flatnonzero((DATA.labels != 3) | (np.arange(len(DATA)) % 2 == 0)))
    stream = Stream(few)
    assert sorted(stream.indices.tolist()) == list(range(len(few)))
    np.testing.assert_allclose(stream.prior, few.counts / len(few))


def test_pool_and_default_size():
    assert len(Stream(DATA, UNIFORM).indices) == 200
    assert len(Stream(DATA, UNIFORM, pool=7).indices) == 35


def test_streams_are_joined_with_chain():
    streams = [Stream(DATA, UNIFORM, batch_size=50), Stream(image_set(seed=1), [1, 0, 0, 0, 0])]
    steps = [batch.step for batch in itertools.chain(*streams)]
    assert steps == [0, 1, 2, 3, 0]


def test_memory_mapped_images_stay_on_disk(tmp_path):
    np.save(tmp_path / "x.npy", DATA.images)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    data = ImageSet("toy", "test", mapped, DATA.labels, DATA.classes)
    stream = Stream(data, UNIFORM)
    assert isinstance(stream.data.images, np.memmap)
    for a, b in zip(stream, Stream(DATA, UNIFORM), strict=True):
        assert torch.equal(a.x, b.x)


def test_labels_of_another_integer_type_become_int64():
    data = ImageSet("toy", "test", DATA.images, DATA.labels.astype(np.int32), DATA.classes)
    assert next(iter(Stream(data, UNIFORM))).y.dtype == torch.int64


def test_a_batch_is_frozen():
    batch = Batch(torch.zeros(1, 3, 2, 2), torch.zeros(1, dtype=torch.int64), 0)
    with pytest.raises(AttributeError):
        batch.step = 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch_size": 0}, SettingError, "batch_size"),
        ({"order": "corelated"}, SettingError, "Did you mean 'correlated'"),
        ({"last": "merged"}, SettingError, "Did you mean 'merge'"),
        ({"seed": -1}, SettingError, "seed"),
        ({"pool": 41}, DataError, "class 0: 41 images needed, 40 available"),
        ({"batch_size": 201, "last": "drop"}, DataError, "at least one batch of 201"),
        ({"order": "correlated", "slots": 0}, SettingError, "slots"),
        ({"order": "correlated", "concentration": 0.0}, SettingError, "concentration"),
        ({"prior": [0.5, 0.5]}, PriorError, "length 5"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Stream(DATA, arguments.pop("prior", UNIFORM), **arguments)


@pytest.mark.parametrize(
    "images",
    [DATA.images / 255.0, DATA.images[:-1], DATA.images[..., 0]],
    ids=["float", "few", "3d"],
)
def test_images_of_the_wrong_kind_are_refused(images):
    with pytest.raises(DataError, match="images of 'toy', must be uint8"):
        Stream(ImageSet("toy", "test", images, DATA.labels, DATA.classes), UNIFORM)


# --- images that are decoded while streaming


class Slow(LazyImages):
    """The images of an array; logs the threads that read them, and fails at some rows."""

    def __init__(self, images, bad=()):
        self.images, self.bad, self.log = images, bad, []

    @property
    def shape(self):
        return self.images.shape

    def __getitem__(self, rows):
        self.log.append(threading.current_thread().name)
        if set(self.bad) & set(rows.tolist()):
            raise DataCorrupt("a truncated image")
        return self.images[rows]

    framed = subset = __getitem__


def lazy_set(**settings):
    return replace(DATA, images=Slow(DATA.images, **settings))


def wait_until(condition) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def no_thread_is_left() -> bool:
    names = [thread.name for thread in threading.enumerate()]
    return not any(name.startswith("prefetch") for name in names)


def test_lazy_images_give_the_same_batches_each_time():
    stream = Stream(lazy_set(), UNIFORM, batch_size=32, seed=4)
    for _ in range(2):
        pairs = zip(stream, Stream(DATA, UNIFORM, batch_size=32, seed=4), strict=True)
        for lazy, plain in pairs:
            assert torch.equal(lazy.x, plain.x)
            assert torch.equal(lazy.y, plain.y)
            assert lazy.step == plain.step
        assert no_thread_is_left()
    for a, b in zip(stream, stream, strict=True):  # two iterators at once
        assert torch.equal(a.x, b.x)
    assert no_thread_is_left()


def test_the_next_batch_is_read_while_one_is_used():
    data = lazy_set()
    log = data.images.log
    batches = iter(Stream(data, UNIFORM, batch_size=50))
    next(batches)
    assert wait_until(lambda: len(log) == 2)
    time.sleep(0.02)
    assert len(log) == 2  # one ahead, no more
    assert log[1].startswith("prefetch")
    assert len(list(batches)) == 3
    assert len(log) == 4


def test_one_item_is_yielded_before_the_next_is_ready():
    ready = threading.Event()

    def make(i):
        assert i == 0 or ready.wait(20)
        return i

    items = prefetch(make, 2)
    assert next(items) == 0
    ready.set()
    assert list(items) == [1]


def test_an_error_is_raised_at_its_batch():
    plain = Stream(DATA, UNIFORM, batch_size=50)
    bad = int(plain.indices[120])  # in the third batch
    batches = iter(Stream(lazy_set(bad=[bad]), UNIFORM, batch_size=50))
    assert [next(batches).step, next(batches).step] == [0, 1]
    with pytest.raises(DataCorrupt, match="truncated"):
        next(batches)
    assert no_thread_is_left()


def test_no_thread_is_left_if_the_consumer_stops_early():
    stream = Stream(lazy_set(), UNIFORM, batch_size=20)
    for batch in stream:
        if batch.step == 2:
            break
    del batch
    assert no_thread_is_left()
    batches = iter(stream)
    next(batches)
    batches.close()
    assert no_thread_is_left()


def fail_on(stream):
    for _ in stream:
        raise ZeroDivisionError


def test_no_thread_is_left_if_the_consumer_raises():
    with pytest.raises(ZeroDivisionError) as caught:
        fail_on(Stream(lazy_set(), UNIFORM, batch_size=20))
    assert wait_until(no_thread_is_left)  # though the traceback keeps the iterator alive
    assert caught.tb is not None


def test_prefetching_nothing():
    assert list(prefetch(lambda i: i, 0)) == []
    assert list(prefetch(lambda i: i * i, 4)) == [0, 1, 4, 9]
