"""docs/performance.md, its figures and the READMEs' times: made from the committed records."""

import copy
import re
import xml.etree.ElementTree as ET

import pytest

from benchmarks import page, plots, record_files
from benchmarks.report import describe
from benchmarks.workloads import WORKLOADS
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def found():
    return record_files.read(page.RECORDS)


def test_the_page_and_its_figures_are_those_of_the_records(tmp_path):
    page.main(["--docs", str(tmp_path)])
    assert (tmp_path / "performance.md").read_text() == (ROOT / "docs/performance.md").read_text()
    made, kept = (
        {file.name: file.read_text() for file in (folder / "performance").iterdir()}
        for folder in (tmp_path, ROOT / "docs")
    )
    assert made == kept


def test_the_readmes_times_are_those_of_the_records(found):
    rows = page.readme_rows(found)
    for name in page.READMES:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert rows in text
        assert page.replace_rows(text, rows) == text


def test_another_record_changes_the_readmes_times(found):
    changed = copy.deepcopy(found)
    peers = changed["sgd-1m-256"]["peers"]
    peers["hotrow"]["step"]["median_ms"] = 2.345
    peers["torch sparse"]["step"]["median_ms"] = 1234.5
    peers["torch sparse"]["hotrow_ratio"]["median"] = 0.25
    text = page.replace_rows((ROOT / "README.md").read_text(), page.readme_rows(changed))
    assert "| 1M x 256, 16,384, SGD | 2.3 ms | — | — | 1,234 ms (4.0 x) |" in text
    assert text.count("\n") == (ROOT / "README.md").read_text().count("\n")


def test_every_record_is_on_the_page(found):
    text = page.make_page(found)
    assert set(found) <= set(WORKLOADS)
    for name, record in found.items():
        if "peers" in record:
            assert f"\n## {describe(record).title}\n" in text
            assert f"(performance/{name}.svg)" in text
        assert record["environment"]["commit"] in text
    assert "## What is not faster" in text
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / "docs" / target).exists(), target


def texts(svg):
    return [text.text for text in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_bars_are_as_long_as_the_times(found):
    record = copy.deepcopy(found["adamw-1m-256"])
    peers = record["peers"]
    record["peers"] = {name: peers[name] for name in list(peers)[:4]}
    times = dict(zip(record["peers"], (1.0, 10.0, 100.0, 1000.0), strict=True))
    for name, time in times.items():
        record["peers"][name]["step"]["median_ms"] = time
        record["peers"][name]["floor_ms"] = 0.1
    drawn = plots.plot(record)
    bars = [
        float(rect.get("width"))
        for rect in ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}rect")
        if "hr-pill" in rect.get("class")
    ]
    assert [bar / bars[0] for bar in bars] == pytest.approx([1, 2, 3, 4])  # decades above 0.1 ms
    said = texts(drawn)
    assert [said.index(f"{time:,.0f} ms") for time in times.values()] == sorted(
        said.index(f"{time:,.0f} ms") for time in times.values()
    )
    assert "dashed: the floor, 0.1 ms" in said


def test_what_grows_is_drawn_as_a_line(found):
    record = copy.deepcopy(found["adamw-10m-64"])
    ours = [peer for name, peer in record["peers"].items() if name.startswith("hotrow")]
    sizes = sorted(ours, key=lambda peer: peer["rows"])
    sizes[0]["step"]["median_ms"], sizes[-1]["step"]["median_ms"] = 5.18, 6.09
    said = texts(plots.plot(record))
    assert "median time of a step over rows, both logarithmic" in said
    assert {"1,000,000", "10,000,000"} < set(said)
    assert "hotrow.optim.AdamW: 5.18 ms to 6.09 ms" in said
    fused = record["peers"]["torch fused"]
    fused["step"]["median_ms"] = 412.0  # at one size
    assert "torch.optim.AdamW(fused=True): 412 ms" in texts(plots.plot(record))
    threads = copy.deepcopy(record)
    for name, peer in threads["peers"].items():
        peer["rows"] = record["rows"]
        if name != "hotrow":
            peer["threads"] = 1
    assert "median time of a step over threads, both logarithmic" in texts(plots.plot(threads))


def test_models_are_drawn_and_startup_is_not(found):
    record = copy.deepcopy(found["onehot-tabular"])
    record["before"]["median_ms"] = 12_956.0
    assert "12,956 ms" in texts(plots.plot(record))
    assert plots.plot(found["startup"]) is None


def test_an_equality_that_tells_little_is_said_to(found):
    for name, little in (("adamw-50k-768-bf16", True), ("adamw-50k-768", False)):
        remarks = " ".join(describe(found[name]).remarks)
        assert ("tells little" in remarks) == little


def test_every_machine_has_one_line(found):
    (line,) = page.machines_list(found).splitlines()
    commits = {record["environment"]["commit"] for record in found.values()}
    assert all(line.count(commit) == 1 for commit in commits)
    other = copy.deepcopy(found)
    other["sgd-1k-16"]["environment"]["cpu"] = "another"
    first, second = page.machines_list(other).splitlines()
    assert "another" not in first
    assert second.endswith(": sgd-1k-16, 2026-11-22, load average before 1.8.")


def test_records_have_no_samples(found):
    for record in found.values():
        assert "samples" not in str(record)
