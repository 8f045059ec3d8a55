"""What a step costs beside its peers, and beside the memory's speed: `hotrow bench`.

workload.py     what any workload is
workloads.py    the list: sizes, who takes part, goals, suites
tables.py       one table as a workload
models.py       a whole model as a workload, before and after `convert`
networks.py     those models
startup.py      a whole program as a workload: the time it takes to begin
batches.py      the ids, the same for every peer
kinds.py        every peer by name
peers.py        a table and its optimizer, of hotrow and of torch
fbgemm.py       the same of FBGEMM
jaxpeers.py     the same of JAX
equality.py     a peer's rows beside dense torch's
timing.py       the times of the peers, A B A B
memory.py       the peak memory of a step
floor.py        the bytes that a step must move, and how fast this machine copies
job.py          a part of a workload, in a process of its own
running.py      all parts of all workloads that were asked for
records.py      where it was measured, and records as files
telling.py      a record for people
plots.py        a record as a figure

A workload has a `name`, `about` it in words, and five methods: `small()`, the same in a size that
only tries the harness; `among(peers)`, the same with some of its peers; `parts()`, what is run in
processes of its own, with `run(part, told)`; and `record(results)`, which puts them together.
"""
