"""Admits only clients with the key derived from the cluster secret (RFC 27, ZAP)."""

from __future__ import annotations

from collections import Counter

import zmq
from zmq.utils import z85

from kvtransport.lease.security import CurveKeys

_ENDPOINT = "inproc://zeromq.zap.01"


class ZapHandler:
    """Answers libzmq's question "may this client key in?" in the control thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys) -> None:
        self._admitted = z85.decode(keys.client_public)
        self.counters: Counter[str] = Counter()
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ENDPOINT)

    def handle(self) -> None:
        frames = self.socket.recv_multipart(zmq.NOBLOCK)
        version, request_id = [*frames, b"", b""][:2]
        mechanism, key = (frames[5], frames[6]) if len(frames) > 6 else (b"", b"")
        admitted = mechanism == b"CURVE" and key == self._admitted
        self.counters["admitted" if admitted else "denied"] += 1
        code, text = (b"200", b"OK") if admitted else (b"400", b"unknown key")
        self.socket.send_multipart((version, request_id, code, text, b"", b""))
