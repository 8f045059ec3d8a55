"""Kernels that process the rows of a table, in numba or plain torch.

numba kernels cover float32, float64 and bfloat16 on the CPU; plain torch covers the rest. The
kernels settle, step and look up rows for any optimizer, whose rule is passed as a `Program`. numba
is imported when the first kernel runs.
"""
