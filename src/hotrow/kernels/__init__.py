"""Row kernels: numba for float32 and float64 on the CPU, plain torch for everything else.

Nothing here knows an optimizer; a rule is handed in. numba is imported with the first kernel.
"""
