"""Kernels in Triton, for float32, float64, bfloat16 and float16 tables on NVIDIA GPUs.

translate.py     turn the rules' plain functions into Triton functions
rule_math.py     the operations that a rule may use, on blocks of columns
closed_forms.py  apply many missed steps to a row at once
rows.py          the kernels: look up, step, settle
batch.py         the ids of a batch, on the device
ledger.py        the recorded steps, on the device
id_check.py      check ids without waiting for the device
operators.py     launch the kernels

No function in this package waits for the device, except to raise an error or to return a value that
Python code needs. Triton is imported when a kernel is first launched.
"""
