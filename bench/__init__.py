"""What a training step of one table costs, beside its peers: `python -m bench.train`.

workloads.py    the sizes, the peers and the goals
batches.py      Zipf ids, the same for every peer
peers.py        a table and its optimizer, of hotrow and of others
equality.py     a peer's rows beside dense torch's
timing.py       a workload's times, A B A B
memory.py       the peak memory of a step
startup.py      the time a program takes to begin
job.py          one of these three in a process of its own
records.py      what was found, as JSON
page.py         docs/performance.md, made from the records
train.py        the command
"""
