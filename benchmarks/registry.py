"""Every peer that the suite knows by name: hotrow's and torch's, FBGEMM's and JAX's."""

from __future__ import annotations

from benchmarks import fbgemm_peers, jax_peers
from hotrow.bench import peers
from hotrow.bench.peers import PeerType

PEER_TYPES = peers.PEER_TYPES | {
    "fbgemm": PeerType(
        "FBGEMM's table-batched embedding, on CPUs",
        fbgemm_peers.build_fbgemm,
        install_command=fbgemm_peers.INSTALL_COMMAND,
    ),
    "jax dense": PeerType("JAX and optax", jax_peers.build_dense, 2.0, jax_peers.INSTALL_COMMAND),
    "jax lazy": PeerType(
        "JAX, touched rows only, by hand", jax_peers.build_lazy, 0.0, jax_peers.INSTALL_COMMAND
    ),
}
