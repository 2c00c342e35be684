from __future__ import annotations

import csv

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twoshift.errors import SettingError
from twoshift.predict.answers import rows_of
from twoshift.predict.inputs import Gallery
from twoshift.predict.plan import Batch
from twoshift.predict.reading import Seen
from twoshift.predict.table import Shape, Sheet, check_format, join

CLASSES = ("a", "b", "c")


def seen_of(count, bad):
    gallery = Gallery("g", [f"i,{i}" for i in range(count)], ["s"] * count, np.arange(count), list)
    good = [i for i in range(count) if i not in bad]
    errors = {i: f"bad {i}" for i in bad}
    return gallery, Seen(Batch("s", 7, 0, count), None, good, errors)


@given(
    st.integers(1, 9).flatmap(
        lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)), st.integers(1, 3))
    )
)
def test_rows_are_what_they_should_be(case):
    count, bad, top = case
    gallery, seen = seen_of(count, bad)
    logits = torch.randn(count - len(bad), 3) * 3
    plain = torch.randn(count - len(bad), 3)
    shape = Shape(CLASSES, top=top, probabilities=True)
    given = (logits, plain) if len(logits) else (None, None)
    values = rows_of(gallery, seen, *given, 5, shape)
    assert {*values} == {c.name for c in shape.columns()} | {"batch"}
    p = torch.softmax(logits.double(), 1).numpy()
    k = 0
    for i in range(count):
        assert values["path"][i] == f"i,{i}"
        assert (values["batch"][i], values["state_version"][i]) == (7, 5)
        if i in bad:
            assert values["error"][i] == f"bad {i}"
            assert values["class"][i] is None
            assert np.isnan(values["probability"][i])
            continue
        assert values["error"][i] is None
        order = sorted(range(3), key=lambda c: -p[k, c])
        for place in range(top):
            ending = f"_{place + 1}" if place else ""
            assert values[f"class{ending}"][i] == CLASSES[order[place]]
            assert values[f"probability{ending}"][i] == pytest.approx(p[k, order[place]], abs=1e-6)
        entropy = -sum(q * np.log(q) for q in p[k])
        assert values["entropy"][i] == pytest.approx(entropy, abs=1e-5)
        assert values["unadapted"][i] == CLASSES[int(plain[k].argmax())]
        assert values["p_b"][i] == pytest.approx(p[k, 1], abs=1e-6)
        k += 1


def sheet(first, count=3):
    gallery, seen = seen_of(count, {1})
    shape = Shape(CLASSES, online=False, baseline=False)
    filled = Sheet(shape.columns())
    logits = torch.full((count - 1, 3), 0.0).index_fill(1, torch.tensor([first]), 2.0)
    filled.add(rows_of(gallery, seen, logits, None, 1, shape))
    return filled


def test_csv(tmp_path):
    for i in range(2):
        sheet(i).write(tmp_path / f"{i}.csv", ".csv")
    join([tmp_path / "0.csv", tmp_path / "1.csv"], tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["path"] for row in rows] == ["i,0", "i,1", "i,2"] * 2
    assert [row["class"] for row in rows] == ["a", "", "a", "b", "", "b"]
    assert [row["error"] for row in rows] == ["", "bad 1", ""] * 2
    assert "batch" not in rows[0]


def test_parquet_has_the_same_rows(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    for i in range(2):
        sheet(i).write(tmp_path / f"{i}.parquet", ".parquet")
    join([tmp_path / "0.parquet", tmp_path / "1.parquet"], tmp_path / "out.parquet")
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["class"] for row in rows] == ["a", None, "a", "b", None, "b"]
    assert rows[1]["probability"] is None
    assert rows[0]["probability"] == pytest.approx(np.exp(2) / (np.exp(2) + 2), rel=1e-6)


def test_other_formats_are_refused(tmp_path):
    with pytest.raises(SettingError, match=r"FILE\.parquet or FILE\.csv, got out\.txt"):
        check_format(tmp_path / "out.txt")
