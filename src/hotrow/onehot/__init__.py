"""One-hot tensors that hold ids instead of zeros."""
