"""Kernels that process the rows of a table, in numba, Triton or plain torch.

The numba kernels support float32, float64 and bfloat16 tables on the CPU, and the Triton kernels
support tables on NVIDIA GPUs. Plain torch supports all other tables. The kernels settle, update and
look up rows for any optimizer. They get the optimizer's rule as a `Program`. numba is imported
when the first compiled kernel runs.
"""

import time

IMPORT_TIME = time.time()  # before any module with a rule is imported
