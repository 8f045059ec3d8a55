"""The tasks of the compiled loop over rows."""

SETTLE, STEP, LOOK_UP = range(3)
