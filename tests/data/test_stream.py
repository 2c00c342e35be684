import hashlib
import itertools
import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twoshift import priors
from twoshift.data.base import ImageSet, LazyImages
from twoshift.data.schedules import named
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


# -- streams of records: these must never change ----------------------------------------------

STREAMS_OF_RECORDS = {
    ("shuffled", None): "5413d8d9ec3ae9c0",
    ("shuffled", "uniform"): "32cf7cca64faad4e",
    ("shuffled", "forward-50"): "b69c3f7239f0c0f2",
    ("shuffled", "dirichlet-0.5"): "6950180b263825ac",
    ("correlated", None): "ef60be6802f6ab5d",
    ("correlated", "uniform"): "938b898c29d44068",
    ("correlated", "forward-50"): "8789bd1939f848fa",
    ("correlated", "dirichlet-0.5"): "b5b3024bb0efd165",
}


@pytest.mark.parametrize(("order", "labels"), STREAMS_OF_RECORDS)
def test_streams_stay_what_they_are(order, labels):
    """Others have measured on these streams: if this fails, their records mean something else."""
    sizes = [60, 55, 50, 45, 40, 40, 40, 40, 35, 30]
    truth = np.random.default_rng(0).permutation(np.repeat(np.arange(10), sizes))
    pixels = np.zeros((len(truth), 2, 2, 1), np.uint8)
    data = ImageSet("toy", "test", pixels, truth, tuple("abcdefghij"))
    prior = None if labels is None else priors.named(labels, 10, seed=3)
    stream = Stream(data, prior, seed=3, order=order, batch_size=16)
    digest = hashlib.sha256(stream.indices.astype("<i8").tobytes()).hexdigest()
    assert digest[:16] == STREAMS_OF_RECORDS[order, labels]


# -- orders, schedules, fewer images ----------------------------------------------------------


@settings(deadline=None)
@given(
    st.sampled_from(["correlated", "sorted", "bursts-0.1", "bursts-1", "markov-0.9"]),
    st.sampled_from(["uniform", "forward-5", "drift-5", "switch-5"]),
    st.one_of(st.none(), st.integers(20, 150)),
    st.integers(0, 1000),
)
def test_an_order_has_the_same_images_and_repeats(order, labels, images, seed):
    target = named(labels, 5)
    make = partial(Stream, DATA, target, seed=seed, images=images, batch_size=16)
    shuffled, ordered, again = make(), make(order=order), make(order=order)
    assert sorted(shuffled.indices.tolist()) == sorted(ordered.indices.tolist())
    assert np.array_equal(ordered.indices, again.indices)
    np.testing.assert_array_equal(ordered.prior, shuffled.prior)
    assert len(set(ordered.indices.tolist())) == len(ordered.indices) <= (images or 200)


def test_under_a_schedule_an_order_holds_within_its_parts():
    for labels, parts in (("switch-10", 2), ("drift-10", 10)):
        target = named(labels, 5)
        plain, ordered = (Stream(DATA, target, order=order) for order in ("shuffled", "sorted"))
        pairs = zip(*(np.array_split(s.indices, parts) for s in (plain, ordered)), strict=True)
        for a, b in pairs:
            assert sorted(a.tolist()) == sorted(b.tolist())
            runs = list(itertools.groupby(DATA.labels[b].tolist()))
            assert len(runs) == len(set(DATA.labels[b].tolist()))


def test_the_prior_of_a_schedule_is_that_of_its_images():
    stream = Stream(DATA, named("switch-10", 5), batch_size=16)
    np.testing.assert_array_equal(stream.prior, np.bincount(stream.labels) / len(stream.labels))
    np.testing.assert_allclose(stream.target, stream.prior, atol=0.02)
    with pytest.raises(PriorError, match="length 5"):
        Stream(DATA, named("switch-10", 4))


@pytest.mark.parametrize("labels", [None, "uniform", "forward-10"])
def test_fewer_images_with_the_same_labels(labels):
    prior = None if labels is None else priors.named(labels, 5)
    whole = Stream(DATA, prior)
    few = Stream(DATA, prior, images=len(whole.indices) // 2)
    assert 0.9 * len(whole.indices) < 2 * len(few.indices) <= len(whole.indices)
    np.testing.assert_allclose(few.prior, whole.prior, atol=0.03)
    more = Stream(DATA, prior, images=10**6)
    assert np.array_equal(more.indices, whole.indices)


# -- several data sets, one after another -----------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 7), st.integers(1, 40), st.integers(20, 200))
def test_data_sets_follow_one_another_where_the_stream_is_cut(count, batch_size, images):
    # the pixels of set i are all i: they tell which set an image comes from
    sets = [replace(DATA, images=np.full_like(DATA.images, i)) for i in range(count)]
    stream = Stream(sets, UNIFORM, batch_size=batch_size, images=images)
    single = Stream(DATA, UNIFORM, batch_size=batch_size, images=images)
    assert np.array_equal(stream.indices, single.indices)
    x = torch.cat([batch.x for batch in stream])
    shown = (255 * x[:, 0, 0, 0]).round().int().tolist()
    total = len(stream.indices)
    assert shown == [slow_part(position, count, total) for position in range(total)]
    sizes = np.diff(stream.cuts)
    assert sizes.max() - sizes.min() <= 1


def slow_part(position, count, total):
    """The part of a position: the last one that starts at or before it."""
    return max(i for i in range(count) if i * total // count <= position)


def test_images_of_several_sets_are_at_their_rows():
    sets = [DATA, replace(DATA, images=255 - DATA.images), lazy_set()]
    stream = Stream(sets, UNIFORM, batch_size=48)
    x = torch.cat([batch.x for batch in stream])
    for position, row in enumerate(stream.indices):
        plain = torch.from_numpy(DATA.images[row].astype(np.float32)).permute(2, 0, 1) / 255
        inverted = stream.cuts[1] <= position < stream.cuts[2]
        assert torch.allclose(x[position], 1 - plain if inverted else plain)


def test_sets_say_where_their_pixels_come_from():
    fog, clean = replace(DATA, origin="fog", skipped=2), replace(DATA, origin="files")
    stream = Stream([fog, clean, fog], UNIFORM)
    assert (stream.data.origin, stream.data.skipped) == ("fog; files", 2)
    assert Stream([fog], UNIFORM).data is fog


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ([], "at least one, got none"),
        ([DATA, image_set(seed=1)], "the same images in the same order"),
        ([DATA, image_set(each=20)], "200 images|100 images"),
        ([DATA, image_set(channels=1)], "the same images"),
    ],
)
def test_sets_that_do_not_fit_together_are_refused(sets, says):
    with pytest.raises(DataError, match=says):
        Stream(sets, UNIFORM)


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
        ({"order": "burst-1"}, SettingError, "Did you mean 'bursts-0.1'"),
        ({"order": "bursts-0"}, SettingError, "above 0"),
        ({"images": 0}, SettingError, "images of a stream, must be a whole number from 1"),
        ({"images": 4}, SettingError, "images of a stream, must be at least 5"),
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
