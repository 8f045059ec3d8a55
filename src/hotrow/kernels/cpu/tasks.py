"""The tasks of the compiled loop over rows; `operators.py` reads them without importing numba."""

SETTLE, STEP, LOOK_UP = range(3)
