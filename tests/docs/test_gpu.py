"""Test that the times in docs/how-to/gpu.md and the READMEs match the records."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
COLUMNS = "hotrow, graph", "hotrow", "torch fused", "torch default", "torch SparseAdam (skips rows)"


def read_records():
    records = [json.loads(path.read_text()) for path in (ROOT / "benchmarks/records/gpu").iterdir()]
    return {
        (f"{w['rows']:,} x {w['columns']}", f"{w['ids']:,}"): record
        for record in records
        if (w := record.get("workload"))
    }


def time_of(record, name):
    return record["peers"][name]["device_ms"]["median"]


def test_the_times_match_the_records():
    page = (ROOT / "docs/how-to/gpu.md").read_text()
    rows = re.findall(r"^\| (\d.*? x \d+) \| (.*?) \| (.*?) \| (.*) \|$", page, re.MULTILINE)
    records = read_records()
    assert len(rows) == len(records) == 4
    for size, ids, distinct_ids, times in rows:
        record = records[size, ids]
        assert distinct_ids == f"{record['distinct_ids']:,}"
        assert times.split(" | ") == [f"{time_of(record, name):.2f}" for name in COLUMNS]


def test_the_times_in_the_readmes_match_the_records():
    record = read_records()["1,000,000 x 256", "16,384"]
    times = [f"{time_of(record, name):.1f} ms" for name in COLUMNS[:3]]
    for name in ("README.md", "README.zh-CN.md"):
        (line,) = re.findall(r"^- \*\*NVIDIA GPU.*?\]", (ROOT / name).read_text(), re.M | re.S)
        assert re.findall(r"[\d.]+ ms", line) == times
