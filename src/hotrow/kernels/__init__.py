"""Kernels that process the rows of a table, in numba or plain torch.

numba kernels cover float32, float64 and bfloat16 on the CPU; plain torch covers the rest. The
kernels settle, update and look up rows for any optimizer. A `Program` passes the optimizer's rule
to them. numba is imported when the first kernel runs.
"""
