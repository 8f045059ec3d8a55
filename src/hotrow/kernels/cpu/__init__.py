"""Kernels compiled by numba for the CPU."""
