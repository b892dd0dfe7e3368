"""asyncio facade: nothing is implemented twice, waiting is polling on a timer.

::

    transfer = agent.read(peer, pairs)
    await finished(transfer)
    async for event in events(agent): ...

Everything runs in the event loop's thread; no thread is started and the loop is
never blocked longer than one ``poll``.  Cancelling the task that waits for a
transfer cancels the transfer where the backend can, and leaves it draining: its
memory stays pinned until it is terminal, as after a timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable

from kvtransport.agent import Agent
from kvtransport.errors import UnsupportedError
from kvtransport.events import Event, NotificationEvent
from kvtransport.layout.blocks import AnyPair
from kvtransport.peer import Peer
from kvtransport.transfer import Transfer
from kvtransport.waiting import check_duration

_SPINS = 64
_SHORTEST_S, _LONGEST_S = 50e-6, 2e-3


class _Pause:
    """First only lets other tasks run, then sleeps longer and longer, up to 2 ms."""

    def __init__(self) -> None:
        self._count = 0

    async def __call__(self) -> None:
        self._count += 1
        over = self._count - _SPINS
        await asyncio.sleep(0 if over <= 0 else min(_SHORTEST_S * over, _LONGEST_S))


async def finished(transfer: Transfer, timeout_s: float | None = None) -> Transfer:
    """Return ``transfer`` when it is DONE; raise its error when it ended otherwise.

    ``TransferTimeoutError`` after ``timeout_s`` seconds leaves it draining, as
    ``Transfer.wait`` does.
    """
    loop, pause = asyncio.get_running_loop(), _Pause()
    until = loop.time() + check_duration(timeout_s, "timeout_s") if timeout_s is not None else None
    try:
        while not transfer.poll().terminal and (until is None or loop.time() < until):
            await pause()
    except asyncio.CancelledError:
        with contextlib.suppress(UnsupportedError):
            transfer.cancel()
        raise
    # Does not block: the transfer is terminal, or its time is up.
    transfer.wait(0)
    return transfer


async def read(
    agent: Agent, peer: Peer, pairs: Iterable[AnyPair], *, deadline_s: float | None = None
) -> Transfer:
    """Post a read and wait for it; raises what ``Agent.read`` and the transfer raise."""
    return await finished(agent.read(peer, pairs, deadline_s=deadline_s))


async def write(
    agent: Agent,
    peer: Peer,
    pairs: Iterable[AnyPair],
    *,
    deadline_s: float | None = None,
    notify: bytes | None = None,
) -> Transfer:
    """Post a write and wait for it; raises what ``Agent.write`` and the transfer raise."""
    return await finished(agent.write(peer, pairs, deadline_s=deadline_s, notify=notify))


async def events(agent: Agent) -> AsyncIterator[Event]:
    """Yield ended transfers and lost peers for ever; ends with ``ClosedError``."""
    pause = _Pause()
    while True:
        for event in agent.poll():
            yield event
            pause = _Pause()
        await pause()


async def notifications(agent: Agent) -> AsyncIterator[NotificationEvent]:
    """Yield messages for ever; ends with ``ClosedError``."""
    pause = _Pause()
    while True:
        for event in agent.notifications():
            yield event
            pause = _Pause()
        await pause()


async def close(agent: Agent, drain_s: float = 5.0) -> None:
    """Close without blocking the loop; raises what ``Agent.close`` raises.

    Draining waits, so it runs in a worker thread; backends that declare
    ``threading = "single"`` are closed in this one.
    """
    if agent.capabilities.threading == "single":
        agent.close(drain_s)
    else:
        await asyncio.to_thread(agent.close, drain_s)
