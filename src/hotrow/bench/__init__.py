"""Benchmarks of a training step: hotrow beside torch's own optimizers, on one table.

batches.py       the ids of each step, the same for every peer
workload.py      what is measured: the table, the batch, the optimizer, the peers
peers.py         a table and its optimizer behind one step: hotrow's, torch's, the one-hot matmul
equality.py      a peer's rows compared with dense torch's
floor.py         the bytes that a step must move, and this machine's copy speed
memory.py        the peak memory of a step, and how much memory a peer needs
statistics.py    medians and percentiles of times
measurement.py   equality, memory and times of all peers, in turn A B A B
process.py       a measurement in a child process with its own settings
environment.py   those settings, the machine and the versions
report.py        a record as text
"""
