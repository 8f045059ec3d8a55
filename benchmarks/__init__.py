"""The full benchmark suite, and the scripts that write the pages of measurements.

cli.py           the command: `python -m benchmarks --suite full`
suite.py         run workloads one after the other, each in its own process
workloads.py     every workload by name, and the suites
workload.py      the interface of a workload
tables.py        one table as a workload, measured by hotrow.bench
goals.py         goals of such a workload, and whether a record meets them
registry.py      every peer by name
fbgemm_peers.py  FBGEMM's table-batched embedding as a peer
jax_peers.py     JAX's as peers
models.py        a whole model as a workload, before and after `convert`
networks.py      those models
startup.py       a whole program as a workload: the time it takes to start
record_files.py  records as JSON files, with commit and machine
report.py        a record as text
plots.py         charts of records
page.py          docs/performance.md from records/ and performance.md
sameness.py      docs/sameness.md: every optimizer's step compared with torch's
scale.py         docs/scale.md: bytes on the network, tables on disk
"""
