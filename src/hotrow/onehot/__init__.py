"""One-hot tensors that store ids instead of zeros."""

from hotrow.onehot import rules

__all__ = ["rules"]  # the import registers the rules
