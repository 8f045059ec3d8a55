"""Row kernels: numba for float32, float64 and bfloat16 on the CPU, plain torch for the rest.

Nothing here knows an optimizer: a rule is passed in as a `Program`. numba is imported with the
first kernel.
"""
