"""Check and measure hotrow on an NVIDIA GPU: `make gpu`, or `python -m benchmarks.gpu`.

checks.py  one function for each promise; each raises an error if the promise is broken
times.py   a training step of hotrow and of torch's optimizers, timed after an equality check

The package needs only torch with CUDA, Triton, numpy and numba. It doesn't use the network.
"""
