import numpy as np

from twoshift.calibration._windows import SIZE, draw_windows, label_shares


def test_windows_hold_images_of_the_classes_there_are():
    labels = np.array([0] * 50 + [1] * 5 + [3] * 2)
    windows = draw_windows(labels, 4, 40, rng=np.random.default_rng(0))
    assert [rows.shape for rows in windows] == [(SIZE,)] * 40
    shares = np.array([label_shares(labels[rows], 4) for rows in windows])
    assert (shares[:, 2] == 0).all()
    assert (shares.max(0)[[0, 1, 3]] > 0.7).all()  # each class is the most frequent one sometimes
    assert set(np.concatenate(windows)) == set(range(len(labels)))


def test_the_same_seed_draws_the_same_windows():
    labels = np.arange(60) % 3
    first, second, other = (
        draw_windows(labels, 3, 5, rng=np.random.default_rng(s)) for s in (0, 0, 1)
    )
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)


def test_a_single_class_is_drawn_whatever_the_label_distribution():
    windows = draw_windows(np.full(7, 2), 4, 20, rng=np.random.default_rng(0))
    assert set(np.concatenate(windows)) == set(range(7))


def test_shares_count_labels():
    assert label_shares(np.array([0, 3, 3, 1]), 5).tolist() == [0.25, 0.25, 0, 0.5, 0]
