"""Looks for requests' KV at other engines, and keeps what is found no longer than useful.

A lookup begins when its request arrives, so that it runs while the request
queues.  What it finds is leased: memory that the peer's own requests can't have.

Threading
    Scheduler thread only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvtransport.lease.holding import Purpose
from kvtransport_vllm import params
from kvtransport_vllm.turns import Phase, Turn

if TYPE_CHECKING:
    from kvtransport.lease.held import LookupResult
    from kvtransport_vllm.engine import Engine
    from kvtransport_vllm.params import TransferParams

LOOKUP_WAIT_S = 0.002
"""How long a scheduling step waits in all for the lookups of requests that are new in it.

An answer takes a fraction of a millisecond, but a request that has to ask again
does so a whole step of the engine later.
"""

UNASKED_S = 2.0
"""For how long a request that the scheduler does not get to keeps what it found.

Its own handoff is kept: it takes up the peer's memory anyway until it is fetched.
"""


class Lookups:
    """The lookups of one engine's requests."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._patience_s = self._patience()
        self._look_through_s = 0.0

    def start(self, turn: Turn, wanted: TransferParams) -> None:
        """Ask the engines that ``wanted`` names, or all."""
        request = turn.request
        turn.wanted_s = time.monotonic()
        if turn.chain is None:
            turn.chain = self._engine.content.chain(request, request.all_token_ids)
        self._engine.admit_address(wanted)
        turn.lookup = self._engine.control.lookup(
            turn.chain,
            ask=self._engine.whom_to_ask(wanted),
            handoff_request_id=wanted.remote_request_id if wanted.remote_prefill else "",
            deadline_s=self._engine.config.lookup_timeout_s,
        )

    def answer(self, turn: Turn) -> LookupResult | None:
        """The result, if there is one; a new lookup may wait for it, not for long."""
        if turn.lookup is None:
            self.start(turn, params.parse(turn.request.kv_transfer_params))
        assert turn.lookup is not None
        new, turn.asked = not turn.asked, True
        if not new or self._patience_s <= 0:
            return turn.lookup.poll()
        began_s = time.monotonic()
        result = turn.lookup.wait(self._patience_s)
        self._patience_s -= time.monotonic() - began_s
        return result

    def step_planned(self, turns: Iterable[Turn]) -> None:
        """A step was planned: the next one has patience again."""
        self._patience_s = self._patience()
        now = time.monotonic()
        if now >= self._look_through_s:
            self._look_through_s = now + UNASKED_S / 4
            self._give_back(turns, now - UNASKED_S)

    def _give_back(self, turns: Iterable[Turn], since_s: float) -> None:
        """Give back KV for which the scheduler has not asked since then.

        Once per turn: a scheduler that comes by seldom finds others ready while
        a turn looks again, so that otherwise it might never be ready itself.
        """
        for turn in turns:
            if turn.gave_back or turn.wanted_s >= since_s or turn.waits_with is None:
                continue
            mine = turn.waits_with.purpose == Purpose.HANDOFF.value and all(turn.handoff)
            if not mine:
                turn.gave_back = True
                turn.give_back()

    def forget(self, turns: Iterable[Turn]) -> None:
        """Nothing that was found until now counts any more; ask for it again."""
        for turn in turns:
            if turn.phase in (Phase.LOOKING, Phase.FOUND):
                turn.give_back()

    def _patience(self) -> float:
        return LOOKUP_WAIT_S if self._engine.alone else 0.0
