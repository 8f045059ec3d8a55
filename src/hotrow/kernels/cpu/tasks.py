"""Task numbers for the compiled loop over rows; importing this module doesn't import numba."""

SETTLE, STEP, LOOK_UP = range(3)
