"""Results as typed objects and as the plain data of records."""

import json

import pytest

from tests.bench.stored import make_result, without_trace
from tests.documents import ROOT
from twoshift.bench.result import Result
from twoshift.errors import InputError

RECORD = make_result().to_json()


def test_a_result_comes_back_from_its_record():
    for result in (make_result(adapter="trained"), without_trace(make_result())):
        assert Result.from_json(json.loads(json.dumps(result.to_json()))) == result
    assert "trace" not in without_trace(make_result()).to_json()


def test_published_records_keep_their_layout():
    for line in (ROOT / "results" / "pacs.jsonl").read_text().splitlines():
        assert Result.from_json(json.loads(line)).to_json() == json.loads(line)


def test_what_a_record_may_leave_out():
    result = Result.from_json({k: RECORD[k] for k in ("key", "cell", "source", "metrics")})
    assert (result.adapter, result.facts, result.trace) == (None, {}, None)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ([], "what run_cell returns, got none of its cell, key, metrics, source"),
        ({k: v for k, v in RECORD.items() if k != "metrics"}, "none of its metrics"),
        ({**RECORD, "cell": {**RECORD["cell"], "colour": "red"}}, "'colour'"),
        ({**RECORD, "cell": ["tent"]}, "the cell of a record, must be"),
        ({**RECORD, "source": {"dataset": "toy"}}, "known by its weights"),
        ({**RECORD, "source": {**RECORD["source"], "height": 3}}, "'height'"),
    ],
)
def test_other_data_are_refused(record, says):
    with pytest.raises(InputError, match=says):
        Result.from_json(record)
