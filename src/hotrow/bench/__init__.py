"""Benchmark hotrow and torch on a training step of a single table.

A peer is one implementation of the step, such as hotrow or a torch optimizer.

batches.py      the ids of each step, the same for every peer
workload.py     a workload: table, batch, optimizer and peers
peers.py        hotrow, torch's optimizers and the one-hot matmul behind one interface
equality.py     compare a peer's rows with those of dense training
floor.py        the bytes that a step must move, and the machine's copy speed
memory.py       the peak memory of a step, and the memory that a peer needs
clock.py        time the parts of a step on the CPU or on a GPU
percentiles.py  medians and percentiles of times
measurement.py  compare, measure and time all peers, which take turns (A B A B)
process.py      run a measurement in a child process with its own settings
environment.py  the settings of the child process, the machine and the versions
report.py       format parts of a record as text
"""
