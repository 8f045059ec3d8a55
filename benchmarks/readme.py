"""Update the measured numbers in both READMEs, in the timing table and in sentences."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from benchmarks.onehots import DENSE_USES
from hotrow.bench.workload import Record

# Workloads in the timing table; both languages use the same labels.
WORKLOADS = {
    "adamw-1m-256": "1M x 256, 16,384, AdamW",
    "adamw-50k-768": "50,257 x 768, 4,096, AdamW",
    "adamw-10m-64": "10M x 64, 16,384, AdamW",
    "adagrad-1m-256": "1M x 256, 16,384, Adagrad",
    "sgd-1m-256": "1M x 256, 16,384, SGD",
}
PEERS = ("torch fused", "torch default", "torch sparse")
Numbers = dict[str, str]


def update(readme: str, records: dict[str, Record]) -> str:
    """Return a README, in either language, with the numbers from the records."""
    text = replace_rows(readme, table_rows(records))
    for patterns, measure in SENTENCES:
        matches = [match for pattern in patterns for match in re.finditer(pattern, text)]
        assert len(matches) == 1, f"a README must contain one sentence like {patterns[0]!r}"
        text = replace_groups(text, matches[0], measure(records))
    return text


def table_rows(records: dict[str, Record]) -> str:
    """Return the rows of the timing table, without its header."""
    lines = []
    for name, label in WORKLOADS.items():
        peers = records[name]["peers"]
        cells = [f"{peers['hotrow']['step']['median_ms']:.1f} ms"]
        for peer_name in PEERS:
            peer = peers.get(peer_name, {})
            if "step" not in peer:
                cells.append("—")
                continue
            time = peer["step"]["median_ms"]
            shown = f"{time:,.0f}" if time >= 100 else f"{time:.1f}"
            star = " *" if "SparseAdam" in peer["label"] else ""
            cells.append(f"{shown} ms ({_speedup(records, name, peer_name):.1f}x){star}")
        lines.append("| " + " | ".join([label, *cells]) + " |")
    return "\n".join(lines) + "\n"


def replace_rows(readme: str, rows: str) -> str:
    """Return the README with the rows of its timing table replaced by `rows`."""
    pattern = r"(^\|[^\n]*\| hotrow \|[^\n]*\n\|[-| :]+\n)(?:\|[^\n]*\n)+"
    changed, count = re.subn(pattern, lambda m: m[1] + rows, readme, flags=re.MULTILINE)
    assert count == 1, "a README must contain exactly one timing table"
    return changed


def replace_groups(text: str, match: re.Match[str], numbers: Numbers) -> str:
    """Return the text with each named group of the match replaced by the number with that name."""
    assert set(match.re.groupindex) == set(numbers)
    for name in sorted(numbers, key=match.start, reverse=True):  # last first: spans stay valid
        text = text[: match.start(name)] + numbers[name] + text[match.end(name) :]
    return text


def _speedup(records: dict[str, Record], workload: str, peer: str) -> float:
    ratio: float = records[workload]["peers"][peer]["hotrow_ratio"]["median"]
    return 1 / ratio


def _fused_range(records: dict[str, Record]) -> Numbers:
    """Return hotrow's smallest and largest speedup over fused AdamW in the timing table."""
    ratios = [_speedup(records, name, "torch fused") for name in WORKLOADS if "adamw" in name]
    return {"low": f"{min(ratios):.0f}", "high": f"{max(ratios):.0f}"}


def _uniform(records: dict[str, Record]) -> Numbers:
    """Return hotrow's speedup over fused AdamW with uniform ids."""
    return {"ratio": f"{_speedup(records, 'adamw-1m-256-uniform', 'torch fused'):.1f}"}


def _recommender(records: dict[str, Record]) -> Numbers:
    """Return the speedup of the recommender."""
    return {"ratio": f"{1 / records['recommender']['ratio']['median']:.1f}"}


def _one_hots(records: dict[str, Record]) -> Numbers:
    """Return the range of the speedups with 200,000 columns, and the limit for dense results."""
    small, dense = [], []
    for use in records["onehots"]["uses"]:
        if use["classes"] == 200_000:
            ratio = use["torch"]["median_ms"] / use["hotrow"]["median_ms"]
            (dense if use["use"] in DENSE_USES else small).append(ratio)
    return {
        "low": f"{min(small):.0f}",
        "high": f"{max(small):.0f}",
        "dense": f"{math.ceil(max(dense))}",
    }


def _tabular(records: dict[str, Record]) -> Numbers:
    """Return the speedup, the times and the memory of the tabular model with one-hot fields."""
    record = records["onehot-tabular"]
    peak = record["peak_extra_bytes"]
    return {
        "ratio": f"{1 / record['ratio']['median']:.0f}",
        "before_s": f"{record['before']['median_ms'] / 1e3:.1f}",
        "after_ms": f"{record['after']['median_ms']:.0f}",
        "before_gb": f"{peak['before'] / 1e9:.1f}",
        "after_mb": f"{peak['after'] / 1e6:.0f}",
    }


# For each sentence: its English and Chinese patterns, and the function that returns its numbers.
SENTENCES: tuple[tuple[tuple[str, str], Callable[[dict[str, Record]], Numbers]], ...] = (
    (
        (r"CPU (?P<low>\d+)x to (?P<high>\d+)x faster", r"的 (?P<low>\d+) 到 (?P<high>\d+) 倍"),
        _fused_range,
    ),
    (
        (r"distributed ids is\s+(?P<ratio>[\d.]+)x", r"加速比是 (?P<ratio>[\d.]+)x"),
        _uniform,
    ),
    (
        (r"(?P<ratio>[\d.]+)x faster than with fused Adam", r"fused Adam 的 (?P<ratio>[\d.]+) 倍"),
        _recommender,
    ),
    (
        (
            r"trains (?P<ratio>\d+)x faster. A step takes \[(?P<after_ms>\d+) ms\s+instead of "
            r"(?P<before_s>[\d.]+) s\]\S+ and needs (?P<after_mb>\d+) MB of extra memory instead "
            r"of (?P<before_gb>[\d.]+) GB",
            r"训练速度是原来的 (?P<ratio>\d+) 倍（\[每步从 (?P<before_s>[\d.]+) s 降到 "
            r"(?P<after_ms>\d+) ms\]\S+额外占用的内存从 (?P<before_gb>[\d.]+) GB 降到 "
            r"(?P<after_mb>\d+) MB",
        ),
        _tabular,
    ),
    (
        (
            r"they run \[(?P<low>\d+)x to (?P<high>\d+)x\s+faster\]\S+ but at most (?P<dense>\d+)x",
            r"加速 (?P<low>\d+) 到 (?P<high>\d+) 倍\]\S+最多只有 (?P<dense>\d+) 倍",
        ),
        _one_hots,
    ),
)
