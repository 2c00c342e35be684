from __future__ import annotations

import re

import pytest

from twoshift.report.predictions import accuracy_band, bars, label_lines, render

SUMMARY = {
    "images": 1200,
    "errors": 2,
    "first_error": "cannot decode <b>.png",
    "compared": 1198,
    "changed": 100,
    "classes": ["ant", "bee", "<cat>"],
    "counts": [600, 398, 200],
    "labels": [0.5, 0.2, 0.3],
    "training": [0.1, 0.8, 0.1],
    "accuracy": [0.8, 0.7, 0.9],
    "trace": [
        {"image": 600, "stream": "s", "labels": [0.6, 0.2, 0.2], "accuracy": [0.8, 0.7, 0.9]},
        {"image": 1200, "stream": "s", "labels": [0.4, 0.2, 0.4], "accuracy": [0.6, 0.5, 0.7]},
    ],
    "most": [[0.9, 3, "a<b>.png", 0, 2]],
}


def test_the_page_says_what_the_summary_says():
    pytest.importorskip("jinja2")
    page = render(SUMMARY, ["data:image/png;base64,AAAA"], "images/", "recommended")
    text = re.sub(r"\s+", " ", re.sub("<style>.*?</style>", "", page, flags=re.S))
    assert "<b>1,200</b> images" in text
    assert "<b>80.0 %</b> expected accuracy (70.0 to 90.0)" in text
    assert "<b>8.3 %</b> changed" in text
    assert "<b>2</b> could not be read" in text
    assert "ant → <b>&lt;cat&gt;</b>" in text
    assert 'src="data:image/png;base64,AAAA"' in text
    assert "<cat>" not in page  # names are never markup
    assert "a<b>.png" not in page
    assert not re.search(r"(src|href)=\"http", page)


def test_lines_are_in_their_coordinates():
    first, second, _ = label_lines(SUMMARY["trace"], SUMMARY["classes"])
    assert first.name == "ant"
    assert first.points == "320.0,0.0 640.0,53.3"  # 0.6 is the largest share of all
    assert second.name == "<cat>"
    assert accuracy_band(SUMMARY["trace"]) == (
        "320.0,32.0 640.0,64.0",
        "320.0,48.0 640.0,80.0 640.0,48.0 320.0,16.0",
    )
    assert label_lines(SUMMARY["trace"][:1], SUMMARY["classes"]) == []
    assert accuracy_band([]) is None


def test_bars_are_in_order():
    assert [bar.name for bar in bars(SUMMARY)] == ["ant", "<cat>", "bee"]
    assert bars({**SUMMARY, "training": None})[0].training is None
