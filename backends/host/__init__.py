"""The embedded default backend: plain host memory, no driver, no hardware.

Between two processes of one machine it reads the peer's memory directly
(``process_vm_readv``); between machines, or where the kernel forbids that, the
peer's own thread serves the same requests over TCP.

This package is also the smallest complete backend to learn from:

=================  ========================================================
``config.py``      the options an operator may set
``backend.py``     the ``Backend`` methods; start reading here
``_body.py``       what one agent tells its peers (``export``, ``import_peer``)
``_table.py``      region ids to addresses, with the bounds and access checks
``_regions.py``    registered memory and how it is withdrawn safely
``_guard.py``      the words in our memory by which a reader notices that
``_identity.py``   which process of which machine a peer is
``_vm.py``         reading another process's memory
``_stream.py``     bytes and scatter lists over a socket, never without a bound
``_wire.py``       the frames of the serving protocol
``_handshake.py``  how two agents prove their tokens to each other
``_listener.py``   accepting connections
``_serve.py``      answering one connection's requests
``_channel.py``    asking a peer that serves us
``_lane.py``       one thread per peer that carries out its transfers
``_vectors.py``    scatter lists over raw addresses
``_wake.py``       waking a thread that sleeps in poll
``_sys.py``        the system calls that Python has no function for
=================  ========================================================
"""

from __future__ import annotations

from kvtransport.backend import Backend, BackendInfo
from kvtransport_backends.host.config import HostConfig

WIRE = "kvt-host/1"


def _load() -> type[Backend]:
    from kvtransport_backends.host.backend import HostBackend

    return HostBackend


INFO = BackendInfo(
    name="host",
    summary="host memory: process_vm_readv on one machine, TCP between machines",
    config=HostConfig,
    load=_load,
    wire=WIRE,
)

__all__ = ["INFO", "WIRE", "HostConfig"]
