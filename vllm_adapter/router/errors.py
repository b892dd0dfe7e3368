"""What can go wrong in the router, named after situations.

::

    KVTransportError
    ├── RequestRefusedError           the client's request, with an HTTP status
    └── PeerError
        └── EngineError               one engine, one leg
            ├── EngineUnreachableError   no connection: nobody listens
            ├── EngineLostError          the connection broke
            ├── EngineSilentError        its probes went unanswered
            ├── EngineDeadlineError      alive, but the leg took too long
            └── EngineFaultError         it answered, but with a failure
"""

from __future__ import annotations

from typing import ClassVar

from kvtransport.errors import KVTransportError, PeerError
from kvtransport_vllm.router.answer import Answer


class RequestRefusedError(KVTransportError):
    """The router answers the client itself; ``param`` names the field at fault."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class EngineError(PeerError):
    """A leg failed; another engine may do better.  ``outcome`` is its metric label."""

    retryable = True
    outcome: ClassVar[str] = "failed"

    def __init__(self, message: str, *, engine: str, answer: Answer | None = None) -> None:
        super().__init__(message, peer=engine)
        self.answer = answer


class EngineUnreachableError(EngineError):
    """No connection could be made; the engine takes no traffic until it answers.

    ``refused`` says that its host is there and nobody listens.
    """

    outcome = "unreachable"

    def __init__(self, message: str, *, engine: str, refused: bool = False) -> None:
        super().__init__(message, engine=engine)
        self.refused = refused


class EngineLostError(EngineError):
    """The connection broke before the answer was complete."""

    outcome = "lost"


class EngineSilentError(EngineError):
    """The engine stopped answering its probes while the leg was under way."""

    outcome = "silent"


class EngineDeadlineError(EngineError, TimeoutError):
    """The leg's own deadline passed; doing the same work again elsewhere won't help."""

    outcome = "deadline"


class EngineFaultError(EngineError):
    """The engine answered with a server error; ``answer`` holds it when there is one."""

    outcome = "fault"
