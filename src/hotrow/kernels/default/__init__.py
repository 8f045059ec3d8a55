"""Kernels in plain torch, for any dtype and device."""
