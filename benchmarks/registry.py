"""All peers of the suite by name: hotrow, torch, FBGEMM and JAX."""

from __future__ import annotations

from benchmarks import fbgemm_peers, jax_peers
from hotrow.bench import peers
from hotrow.bench.peers import PeerType

PEER_TYPES = peers.PEER_TYPES | {
    "fbgemm": PeerType(
        "FBGEMM's table-batched embedding on the CPU",
        fbgemm_peers.build_fbgemm,
        install_command=fbgemm_peers.INSTALL_COMMAND,
    ),
    "jax dense": PeerType(
        "JAX with optax and dense gradients", jax_peers.build_dense, 2.0, jax_peers.INSTALL_COMMAND
    ),
    "jax lazy": PeerType(
        "JAX, hand-written step that updates only touched rows",
        jax_peers.build_lazy,
        0.0,
        jax_peers.INSTALL_COMMAND,
    ),
}
