"""The layout of a plan, which tells a kernel where one table and its batch are in memory.

A kernel finds all tables through a single matrix of plans, with one row per table. Passing each
array to numba separately would take longer than processing a small batch. Importing this module
doesn't import numba.
"""

from __future__ import annotations

# What a kernel does with the rows of a batch.
SETTLE, STEP, LOOK_UP = range(3)

# The columns of a plan contain addresses and sizes, which are int64. `GROUPS` is the memory address
# of a `GroupedIds` that contains `IDS` ids, `DISTINCT_IDS` of them distinct. `BATCH` is the address
# of the gradients for STEP, and of the output for LOOK_UP. `IS_TRANSPOSED` is 1 if the table and
# the slots are stored as (COLUMNS, ROWS). The addresses of the slots come last.
TABLE, ROWS, COLUMNS, IS_TRANSPOSED, ROW_STEPS, GROUPS, IDS, DISTINCT_IDS, BATCH, SLOTS = range(10)
