"""Test that docs/performance.md, its figures and the READMEs' times match the records."""

import copy
import re
import xml.etree.ElementTree as ET

import pytest

from benchmarks import page, plots, readme, record_files
from benchmarks.report import describe
from benchmarks.workloads import WORKLOADS
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def found():
    return record_files.read(page.RECORDS)


def test_page_and_figures_match_the_records(tmp_path):
    page.main(["--docs", str(tmp_path)])
    assert (tmp_path / "performance.md").read_text() == (ROOT / "docs/performance.md").read_text()
    made, kept = (
        {file.name: file.read_text() for file in (folder / "performance").iterdir()}
        for folder in (tmp_path, ROOT / "docs")
    )
    assert made == kept


def test_numbers_in_the_readmes_match_the_records(found):
    for name in page.READMES:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert readme.update(text, found) == text


@pytest.mark.parametrize(
    ("name", "sentences"),
    [
        (
            "README.md",
            (
                "CPU 3x to 500x faster",
                "distributed ids is 8.0x",
                "4.0x faster than with fused Adam",
                "[250 ms",
                "they run [5x to 600x",
                "at most 30x",
            ),
        ),
        (
            "README.zh-CN.md",
            (
                "的 3 到 500 倍",
                "加速比是 8.0x",
                "fused Adam 的 4.0 倍",
                "降到 250 ms",
                "加速 5 到 600 倍",
                "最多只有 30 倍",
            ),
        ),
    ],
)
def test_new_records_change_the_numbers_in_the_readmes(found, name, sentences):
    changed = copy.deepcopy(found)
    peers = changed["sgd-1m-256"]["peers"]
    peers["hotrow"]["step"]["median_ms"] = 2.345
    peers["torch sparse"]["step"]["median_ms"] = 1234.5
    peers["torch sparse"]["hotrow_ratio"]["median"] = 0.25
    for workload, ratio in (
        ("adamw-50k-768", 1 / 2.9),
        ("adamw-10m-64", 1 / 500.5),
        ("adamw-1m-256-uniform", 1 / 8),
    ):
        changed[workload]["peers"]["torch fused"]["hotrow_ratio"]["median"] = ratio
    changed["recommender"]["ratio"]["median"] = 0.25
    changed["onehot-tabular"]["after"]["median_ms"] = 250.4
    for use, ratio in {"linear(x)": 5, "x @ table": 600, "q - x": 29.1}.items():
        (row,) = (
            each
            for each in changed["onehots"]["uses"]
            if each["use"] == use and each["classes"] == 200_000
        )
        row["hotrow"]["median_ms"] = row["torch"]["median_ms"] / ratio
    old = (ROOT / name).read_text(encoding="utf-8")
    text = readme.update(old, changed)
    for sentence in (*sentences, "| 1M x 256, 16,384, SGD | 2.3 ms | — | — | 1,234 ms (4.0x) |"):
        assert sentence in text
        assert sentence not in old
    assert readme.update(text, found) == readme.update(old, found)


def test_every_record_is_on_the_page(found):
    text = page.make_page(found)
    assert set(found) <= {*WORKLOADS, "onehots"}
    for name, record in found.items():
        if "peers" in record:
            assert f"\n<summary>{describe(record).title}" in text
            assert f"(performance/{name}.svg)" in text
        assert record["environment"]["commit"] in text
    assert "## When hotrow is not faster" in text
    assert text.count("<details>") == text.count("</details>")
    assert not re.search(r"<!-- \w+ -->|{{", text)  # every placeholder has been replaced
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
    assert [bar / bars[0] for bar in bars] == pytest.approx([1, 2, 3, 4])  # in decades above 0.1 ms
    words = texts(drawn)
    assert [words.index(f"{time:,.0f} ms") for time in times.values()] == sorted(
        words.index(f"{time:,.0f} ms") for time in times.values()
    )
    assert "dashed line: bandwidth floor, 0.1 ms" in words
    assert "torch.optim.SparseAdam (sparse=True) *" in words
    assert "* trains a different model" in words


def test_a_growing_size_is_drawn_as_a_line(found):
    record = copy.deepcopy(found["adamw-10m-64"])
    ours = [peer for name, peer in record["peers"].items() if name.startswith("hotrow")]
    sizes = sorted(ours, key=lambda peer: peer["rows"])
    sizes[0]["step"]["median_ms"], sizes[-1]["step"]["median_ms"] = 5.18, 6.09
    words = texts(plots.plot(record))
    assert "median time of a step by number of rows, both axes logarithmic" in words
    assert {"1,000,000", "10,000,000"} < set(words)
    assert "hotrow.optim.AdamW: 5.18 ms to 6.09 ms" in words
    fused = record["peers"]["torch fused"]
    fused["step"]["median_ms"] = 412.0  # at one size
    assert "torch.optim.AdamW(fused=True): 412 ms" in texts(plots.plot(record))
    threads = copy.deepcopy(record)
    for name, peer in threads["peers"].items():
        peer["rows"] = record["rows"]
        if name != "hotrow":
            peer["threads"] = 1
    text = "median time of a step by number of threads, both axes logarithmic"
    assert text in texts(plots.plot(threads))


def test_models_are_drawn_and_startup_is_not(found):
    record = copy.deepcopy(found["onehot-tabular"])
    record["before"]["median_ms"] = 12_956.0
    assert "12,956 ms" in texts(plots.plot(record))
    assert plots.plot(found["startup"]) is None


def test_an_inconclusive_comparison_is_reported(found):
    for name, inconclusive in (("adamw-50k-768-bf16", True), ("adamw-50k-768", False)):
        remarks = " ".join(describe(found[name]).remarks)
        assert ("the comparison is inconclusive" in remarks) == inconclusive


def test_every_machine_has_one_line(found):
    found = {name: record for name, record in found.items() if name != "onehots"}
    (line,) = page.machines_list(found).splitlines()
    commits = {record["environment"]["commit"] for record in found.values()}
    assert all(line.count(commit) == 1 for commit in commits)
    other = copy.deepcopy(found)
    changes = {"cpu": "another", "date": "2026-11-22", "load_average_before": 1.8}
    other["sgd-1k-16"]["environment"].update(changes)
    first, second = page.machines_list(other).splitlines()
    assert "another" not in first
    assert second.endswith(": sgd-1k-16, 2026-11-22, load average 1.8 before the runs.")


def test_the_summary_marks_results_that_are_not_dense(found):
    changed = copy.deepcopy(found)

    def row(name, **times):
        for peer, (median, ratio) in times.items():
            measured = changed[name]["peers"][peer.replace("_", " ")]
            measured["step"]["median_ms"] = median
            measured["hotrow_ratio"] = {"median": ratio, "p20": ratio, "p80": ratio}
        (line,) = page.summary_table(changed, [name]).splitlines()[2:]
        return line

    changed["adamw-1m-256"]["peers"]["hotrow"]["step"]["median_ms"] = 6.49
    line = row("adamw-1m-256", torch_fused=(168.0, 1 / 25.9), torch_sparse=(20.2, 1 / 3.1))
    assert "| **6.49 ms** | 168 ms (25.9x) |" in line
    assert "20.2 ms (3.1x) † |" in line
    line = row("sgd-1m-256", torch_sparse=(5.28, 1 / 1.45))
    assert "5.28 ms (1.45x) ‡ |" in line  # sparse SGD has a larger error
    line = row("adagrad-1m-256", torch_sparse=(13.8, 1 / 3.25))
    assert "13.8 ms (3.25x) |" in line


def test_the_speedup_chart_has_every_optimizer(found):
    changed = copy.deepcopy(found)
    changed["adamw-1m-256"]["peers"]["torch fused"]["hotrow_ratio"]["median"] = 1 / 25.9
    words = texts(page.speedup_plot(changed))
    for name in page.OPTIMIZERS:
        assert describe(found[name]).title in words
    assert "25.9x" in words


def test_records_have_no_samples(found):
    for record in found.values():
        assert "samples" not in str(record)
