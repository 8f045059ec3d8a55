"""The full benchmark suite, and scripts that generate documentation pages from measurements.

cli.py           command line: `python -m benchmarks --suite full`
suite.py         run workloads in sequence, each in its own process
workloads.py     all workloads by name, and the suites
workload.py      interface of a workload
tables.py        workloads that train one table, measured by hotrow.bench
goals.py         set goals for table workloads, and check whether a record meets them
registry.py      all peers by name
fbgemm_peers.py  FBGEMM's table-batched embedding as a peer
jax_peers.py     JAX peers
models.py        workloads that train a whole model before and after `convert`
networks.py      the models that models.py measures
startup.py       workload that measures a program's startup time
instructions.py  count the instructions in short steps, and compare them with torch's
onehots.py       measure operations on one-hots before and after `convert`, and by hand
record_files.py  read and write records as JSON files, with commit and machine
report.py        format a record as text
plots.py         draw charts of records
page.py          write docs/performance.md from records/ and performance.md
sameness.py      write docs/sameness.md, which compares every optimizer's error with torch's
scale.py         measure network traffic and tables on disk, and write docs/scale.md
lesson_frames.py measure the frame rate of the lesson page while a slider moves
explanation.py   train the models in docs/explanation and draw their figures
"""
