"""Format parts of a record as text: title, peer labels, equality and numbers."""

from __future__ import annotations

from hotrow.bench.workload import Record

TASK_TITLES = {
    "forward": "Forward pass",
    "gradient": "Forward and backward",
    "step": "A training step",
}


def title(record: Record) -> str:
    """Return a title with the optimizer or task, and the sizes."""
    subject = record["optimizer"] or TASK_TITLES[record["task"]]
    ids = f"{record['ids']:,} {'uniform ' if record['zipf_exponent'] is None else ''}ids"
    sizes = f"{record['rows']:,} x {record['columns']}, {ids}"
    dtype = record["dtype"]
    return f"{subject}, {sizes}" + ("" if dtype == "float32" else f", {dtype}")


def peer_label(record: Record, name: str) -> str:
    """Return a peer's label, with any sizes that differ from the workload's sizes."""
    peer = record["peers"][name]
    text = str(peer.get("label", name.partition(",")[0]))
    text += "" if peer["rows"] == record["rows"] else f", {peer['rows']:,} rows"
    text += f", {peer['ids']:,} ids" if "ids" in peer else ""
    if "threads" in peer:
        text += f", {peer['threads']} thread" + ("s" if peer["threads"] > 1 else "")
    return text


def trains_other_model(record: Record, name: str) -> bool:
    """Return whether this peer is SparseAdam or lazy Adam, which skip rows without a gradient."""
    label = record["peers"].get(name, {}).get("label", "")
    return "SparseAdam" in label or "lazy Adam" in label


def equality(record: Record, comparison: Record) -> str:
    """State whether a peer's rows equal those of dense training, and give the errors."""
    verdict = "equal" if comparison["equal"] else "**not equal**"
    rows, error = comparison["rows_compared"], comparison["max_error"]
    if record["task"] == "forward":
        bits = "bit for bit" if comparison["equal"] else f"with a maximum error of {error:.2g}"
        return f"the output is {verdict} to the table on {rows} sampled rows, {bits}."
    dtype, dense_error = record["dtype"], comparison["max_error_of_dense"]
    if record["task"] == "gradient":
        text = f"the gradient is {verdict} to torch's dense gradient"
    else:
        text = f"the weights are {verdict} to those of dense {comparison['reference']}"
    text += (
        f" on {rows} sampled rows. The maximum error is {error:.2g} "
        f"(dense {dtype} training: {dense_error:.2g})"
    )
    if record["task"] == "step":
        change = comparison["max_change_of_dense"]
        text += f", and weights moved by up to {change:.2g}"
        if dense_error > change / 2:
            text += f". {dtype} rounding dominates, so the comparison is inconclusive"
    return text + "."


def number_range(values: Record, middle: str, low: str, high: str, scale: float = 1) -> str:
    """Format a median and its percentiles."""
    a, b, c = (number(values[key] * scale) for key in (middle, low, high))
    return f"{a} [{b}, {c}]"


def number(value: float) -> str:
    """Format a number with three significant digits, or all digits before the decimal point.

    >>> number(0.01234), number(12.34), number(12345.6)
    ('0.0123', '12.3', '12,346')
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
