"""Everything kvtransport raises, named after situations, not after libraries.

::

    KVTransportError
    ├── ConfigError (ValueError)
    │   ├── UnknownBackendError
    │   └── UnknownOptionError
    ├── BackendUnavailableError
    ├── UnsupportedError
    ├── RegistrationError
    │   ├── RegionBusyError            retryable
    │   └── RegistrationLimitError
    ├── DescriptorError (ValueError)
    │   ├── OutOfBoundsError
    │   ├── LengthMismatchError
    │   └── StaleDescriptorError
    ├── PeerError
    │   ├── MalformedMetadataError
    │   ├── IncompatiblePeerError
    │   ├── HandshakeTimeoutError (TimeoutError)   retryable
    │   ├── AuthenticationError
    │   └── PeerLostError (ConnectionError)        retryable
    ├── TransferError
    │   ├── TransferFailedError
    │   ├── TransferTimeoutError (TimeoutError)    retryable
    │   ├── TransferCancelledError
    │   └── IntegrityError
    ├── BackpressureError              retryable
    ├── ProtocolError
    ├── ClosedError
    ├── ForkError
    ├── UndrainedError
    └── BackendContractError

``retryable`` says whether the same call may succeed later with no change of
configuration.  Only ``BackendContractError`` means a bug in a backend; every
other error is something that a healthy deployment can meet.
"""

from __future__ import annotations

from typing import ClassVar


class KVTransportError(Exception):
    """Base of every error raised by this library.

    ``backend``, ``peer`` and ``transfer_id`` say where it happened when that
    is known; ``native`` is the driver's own error, kept for the log.
    """

    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        backend: str | None = None,
        peer: str | None = None,
        transfer_id: int | None = None,
        native: BaseException | None = None,
    ) -> None:
        super().__init__(message)
        self.backend = backend
        self.peer = peer
        self.transfer_id = transfer_id
        self.native = native


class ConfigError(KVTransportError, ValueError):
    """A setting is missing, malformed or contradicts another one."""


class UnknownBackendError(ConfigError):
    """No installed distribution provides a backend of that name."""


class UnknownOptionError(ConfigError):
    """A configuration key does not exist; the message names the nearest."""


class BackendUnavailableError(KVTransportError):
    """The backend cannot run here; ``hint`` says what to install or set."""

    def __init__(self, message: str, *, hint: str = "", backend: str | None = None) -> None:
        super().__init__(f"{message}. {hint}" if hint else message, backend=backend)
        self.hint = hint


class UnsupportedError(KVTransportError):
    """The backend declares that it lacks ``capability``."""

    def __init__(self, message: str, *, capability: str, backend: str | None = None) -> None:
        super().__init__(message, backend=backend)
        self.capability = capability


class RegistrationError(KVTransportError):
    """Memory could not be registered; nothing of the call stays registered."""


class RegionBusyError(RegistrationError):
    """A transfer still uses the region; wait for it, then try again."""

    retryable = True


class RegistrationLimitError(RegistrationError):
    """The device or the declared capabilities allow no further region."""


class DescriptorError(KVTransportError, ValueError):
    """Descriptors were refused before anything was posted."""


class OutOfBoundsError(DescriptorError):
    """A descriptor reaches outside its region."""


class LengthMismatchError(DescriptorError):
    """Local and remote descriptors do not describe the same number of bytes."""


class StaleDescriptorError(DescriptorError):
    """The region or peer that a descriptor names is gone or was replaced."""


class PeerError(KVTransportError):
    """Something is wrong with, or between us and, one peer."""


class MalformedMetadataError(PeerError):
    """Peer metadata could not be decoded; nothing of it was imported."""


class IncompatiblePeerError(PeerError):
    """Both sides are healthy but must not exchange KV; names field and values."""


class HandshakeTimeoutError(PeerError, TimeoutError):
    """The peer did not answer the handshake by its deadline."""

    retryable = True


class AuthenticationError(PeerError):
    """The peer does not hold the cluster secret."""


class PeerLostError(PeerError, ConnectionError):
    """The peer died, restarted or cannot be reached any more."""

    retryable = True


class TransferError(KVTransportError):
    """A posted transfer ended without delivering its data."""


class TransferFailedError(TransferError):
    """The transfer failed and is quiet: none of it can still land."""


class TransferTimeoutError(TransferError, TimeoutError):
    """The deadline passed; the transfer is draining and pins its memory."""

    retryable = True


class TransferCancelledError(TransferError):
    """The transfer was cancelled and is quiet."""


class IntegrityError(TransferError):
    """Bytes arrived but do not match what the sender declared."""


class BackpressureError(KVTransportError):
    """The backend's queue is full; nothing was posted, try again later."""

    retryable = True


class ProtocolError(KVTransportError):
    """A control message was malformed, oversized or out of place."""


class ClosedError(KVTransportError):
    """The object was closed before this call."""


class ForkError(KVTransportError):
    """The object was created in another process and did not survive fork."""


class UndrainedError(KVTransportError):
    """Closing is complete but some memory had to be quarantined for ever."""


class BackendContractError(KVTransportError):
    """A backend broke its contract: unknown ticket, second completion, ..."""
