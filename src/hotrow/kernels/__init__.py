"""Row kernels: numba for float32, float64 and bfloat16 on the CPU, plain torch for the rest.

They settle, step and look up rows for any optimizer: each call gets its rule as a `Program`. numba
is imported with the first kernel.
"""
