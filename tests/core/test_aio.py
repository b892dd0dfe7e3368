"""The asyncio facade."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvtransport import aio
from kvtransport.backend import Completion
from kvtransport.errors import ClosedError, TransferFailedError, TransferTimeoutError
from kvtransport.layout.blocks import Pair
from kvtransport.transfer import TransferState


def pairs(duo, n=100):
    return [Pair.ranges(duo.a.region, [0], duo.remote, [0], n)]


def test_read_write_and_notifications(duo):
    async def main():
        done = await aio.read(duo.a.agent, duo.peer, pairs(duo))
        assert done.state is TransferState.DONE
        await aio.write(duo.a.agent, duo.peer, pairs(duo), notify=b"hello")
        async for event in aio.notifications(duo.b.agent):
            assert event.payload == b"hello"
            break

    asyncio.run(main())
    assert np.array_equal(duo.a.memory[:100], duo.b.memory[:100])


def test_waiting_lets_other_tasks_run(duo):
    duo.a.backend.held = True

    async def finish_later():
        await asyncio.sleep(0.02)
        duo.a.backend.finish_all()

    async def main():
        await asyncio.gather(aio.read(duo.a.agent, duo.peer, pairs(duo)), finish_later())

    asyncio.run(main())


def test_failure_and_timeout(duo):
    duo.a.backend.held = True

    async def main():
        failing = duo.a.agent.read(duo.peer, pairs(duo))
        duo.a.backend.finish(1, TransferFailedError("no"))
        with pytest.raises(TransferFailedError):
            await aio.finished(failing)
        late = duo.a.agent.read(duo.peer, pairs(duo))
        with pytest.raises(TransferTimeoutError):
            await aio.finished(late, 0.01)
        assert late.state is TransferState.DRAINING

    asyncio.run(main())


def test_cancelled_task_cancels_the_transfer(duo):
    duo.a.backend.held = True

    async def main():
        transfer = duo.a.agent.read(duo.peer, pairs(duo))
        task = asyncio.create_task(aio.finished(transfer))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert transfer.state is TransferState.DRAINING
        duo.a.backend.events.append(Completion(1, cancelled=True))
        transfer.poll()
        assert transfer.state is TransferState.CANCELLED

    asyncio.run(main())


def test_events_until_close(duo):
    async def main():
        transfer = duo.a.agent.read(duo.peer, pairs(duo))
        seen = []

        async def collect():
            async for event in aio.events(duo.a.agent):
                seen.append(event.transfer)
                await aio.close(duo.a.agent)

        with pytest.raises(ClosedError):
            await collect()
        assert seen == [transfer]

    asyncio.run(main())
