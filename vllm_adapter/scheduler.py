"""The scheduler side of the connector: who may read what, and when to pull.

Architecture
    ``Ledger`` and ``ControlPlane`` (``kvtransport.lease``) do the protocol;
    ``HeldBlocks`` turns holdings into block references; ``Turn`` is the state
    of one request.  This class answers vLLM's scheduler hooks with them.

One plan, one execution
    ``get_num_new_matched_tokens`` promises tokens only from a lease in hand,
    ``update_state_after_alloc`` queues exactly that read, and a settled turn
    never promises again.  Nothing waits without a deadline: a lookup has one,
    a transfer has one, and a lease that runs out fails its transfer.

Threading
    Every method runs in the scheduler's thread.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.request import RequestStatus

from kvtransport.policy.recompute import PullQuestion
from kvtransport_vllm import outcomes, params
from kvtransport_vllm.lookups import Lookups
from kvtransport_vllm.meta import PeerKey, PullJob, StepMetadata, StepReport
from kvtransport_vllm.steps import waiting_work
from kvtransport_vllm.telemetry import Telemetry
from kvtransport_vllm.turns import Phase, Turn

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvtransport.lease.held import HeldLease
    from kvtransport_vllm.engine import Engine
    from kvtransport_vllm.meta import PullReport
    from kvtransport_vllm.params import TransferParams
    from kvtransport_vllm.stats import TransportStats

logger = logging.getLogger("kvtransport.vllm.scheduler")


class SchedulerSide:
    """Answers the scheduler's questions for one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._held = engine.held
        self._turns: dict[str, Turn] = {}
        self._to_start: list[PullJob] = []
        self._announced: set[PeerKey] = set()
        self._live: dict[str, Request] = {}
        self._waiting: dict[str, Request] = {}
        self._watermark_blocks = 0
        self._lookups = Lookups(engine)
        self.telemetry = Telemetry(engine)

    def bind(self, pool: BlockPool, watermark_blocks: int) -> None:
        """Use the engine's blocks; its cache can be reset from now on, whatever is held.

        vLLM empties its prefix cache only while no block is in use, and asks
        connectors afterwards, if at all.  What is held or was found was computed
        before, maybe with other weights: it goes first, even when requests that
        run make vLLM's own part fail.
        """
        self._held.bind(pool)
        self._watermark_blocks = watermark_blocks
        empty = pool.reset_prefix_cache

        def reset_prefix_cache() -> bool:
            self.reset_cache()
            return bool(empty())

        pool.reset_prefix_cache = reset_prefix_cache

    # -- a request arrives -------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Start the lookup at once, so that it runs while the request queues."""
        self._live[request.request_id] = request
        wanted = params.parse(request.kv_transfer_params)
        if wanted.refused:
            self.telemetry.refused_params(request.request_id, wanted.refused)
        if not (wanted.prefill_only or wanted.remote_prefill):
            return
        turn = Turn(request, "prefill_to_decode" if wanted.remote_prefill else "decode_to_prefill")
        turn.conversation = wanted.conversation
        if wanted.remote_prefill:
            turn.handoff = (wanted.engine_id, wanted.remote_request_id)
        self._turns[request.request_id] = turn
        self.telemetry.began(turn)
        reason = self._unwilling(turn, wanted)
        if reason:
            self._settle(turn, reason)
            return
        self._lookups.start(turn, wanted)

    def _unwilling(self, turn: Turn, wanted: TransferParams) -> str:
        """Why this request is not even looked up; empty when it is."""
        request = turn.request
        config = self._engine.config
        if not wanted.reuse or not self._engine.content.describable(request):
            return outcomes.DISABLED
        if request.skip_reading_prefix_cache:
            return outcomes.DISABLED
        if turn.direction == "decode_to_prefill" and not config.bidirectional_kv_xfer:
            return outcomes.DISABLED
        if request.num_prompt_tokens <= config.group_tokens:
            return outcomes.TOO_SHORT
        return ""

    # -- the scheduler asks ------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, local_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that a pull would add beyond ``local_tokens``; None: ask again."""
        turn = self._turns.get(request.request_id)
        if turn is not None and not turn.admitted:
            # Once admitted, what is in the local cache is what was computed or pulled.
            turn.local_tokens = local_tokens
        if turn is not None and turn.phase is not Phase.SETTLED:
            turn.wanted_s = time.monotonic()
            if turn.phase is Phase.LOADING:
                # Preempted or reset while loading: what was promised is not repeated.
                return 0, False
            if turn.phase is Phase.LOOKING and not self._resolve(turn):
                return None, False
        self._make_room_for(request, local_tokens)
        self._waiting[request.request_id] = request
        if turn is None or turn.phase is not Phase.FOUND:
            return 0, False
        return self._promise(turn)

    def _resolve(self, turn: Turn) -> bool:
        """Take the lookup's answer if there is one; whether it is known now."""
        result = self._lookups.answer(turn)
        if result is None:
            return False
        turn.lookup = None
        turn.lookup_s = result.seconds
        if result.lease is not None:
            turn.found(result.lease)
        self.telemetry.looked_up(turn)
        if result.lease is None:
            self._settle(turn, self.telemetry.outcome_of_lookup(result))
        return True

    def _promise(self, turn: Turn) -> tuple[int, bool]:
        lease = turn.lease
        if lease is None or not lease.valid(time.monotonic()):
            self._settle(turn, outcomes.LEASE_EXPIRED)
            return 0, False
        # One token is always computed here: its logits start the answer.
        usable = min(lease.tokens, turn.request.num_tokens - 1)
        beyond = usable - turn.local_tokens
        if beyond <= 0:
            cut = lease.diverged
            self._settle(turn, outcomes.CONTENT_MISMATCH if cut else outcomes.LOCAL_HIT)
            return 0, False
        question = self._question(turn, beyond)
        decision = self._engine.decide(question)
        turn.decision, turn.queued_nbytes = decision.reason, question.queued_nbytes
        turn.predicted_pull_s = decision.predicted_pull_s
        turn.predicted_compute_s = decision.predicted_compute_s
        if not decision.pull:
            self._settle(turn, outcomes.POLICY)
            return 0, False
        turn.planned_tokens = beyond
        return beyond, True

    def _question(self, turn: Turn, beyond: int) -> PullQuestion:
        assert turn.lease is not None  # only called with a lease in hand
        first, end = self._span(turn.local_tokens, beyond)
        remote = turn.lease.block_ids[0][first:end]
        runs = 1 + int(np.count_nonzero(np.diff(remote) != 1)) if len(remote) else 0
        load_tokens, load_pairs = waiting_work(self._live.values(), turn.request, self._undecided)
        return PullQuestion(
            tokens_beyond_local=beyond,
            local_tokens=turn.local_tokens,
            descriptors=runs * self._engine.tables,
            nbytes=len(remote) * self._engine.block_nbytes,
            peer=peer_name(turn.lease),
            direction=turn.direction,
            load_tokens=load_tokens,
            load_pairs=load_pairs,
            queued_nbytes=self._queued_nbytes(turn.lease),
        )

    def _undecided(self, request: Request) -> bool:
        """Whether it is still open if the request's prompt is pulled or computed."""
        turn = self._turns.get(request.request_id)
        return turn is not None and turn.phase in (Phase.LOOKING, Phase.FOUND)

    def _queued_nbytes(self, lease: HeldLease) -> int:
        """Bytes already being pulled from the same engine."""
        blocks = sum(
            len(turn.destination[0])
            for turn in self._turns.values()
            if turn.phase is Phase.LOADING
            and turn.lease is not None
            and turn.lease.peer is lease.peer
        )
        return blocks * self._engine.block_nbytes

    def _span(self, local_tokens: int, tokens: int) -> tuple[int, int]:
        block = self._engine.block_tokens
        return local_tokens // block, -(-(local_tokens + tokens) // block)

    # -- the scheduler has allocated ---------------------------------------

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, external_tokens: int
    ) -> None:
        """Queue the promised read, once; give the lease back if it isn't wanted."""
        self._waiting.pop(request.request_id, None)
        turn = self._turns.get(request.request_id)
        if turn is None:
            return
        turn.admitted = True
        if turn.chain is not None:
            # Once: the next turn is here, so its predecessor need not wait for it.
            self._engine.ledger.note_admitted(turn.chain.digests)
            turn.chain = None
        if turn.phase is not Phase.FOUND:
            return
        if external_tokens == 0:
            self._settle(turn, outcomes.LOCAL_HIT)
            return
        self._start(turn, blocks.get_block_ids(), external_tokens)

    def _start(self, turn: Turn, block_ids: tuple[list[int], ...], tokens: int) -> None:
        lease = turn.lease
        assert lease is not None  # FOUND implies a lease
        first, end = self._span(turn.local_tokens, tokens)
        local = tuple(np.asarray(ids[first:end], dtype=np.int32) for ids in block_ids)
        remote = tuple(np.asarray(ids[first:end], dtype=np.int32) for ids in lease.block_ids)
        turn.phase = Phase.LOADING
        turn.loading_since_s = time.monotonic()
        turn.planned_tokens = tokens
        turn.destination = local
        self._engine.recompute.pull_started(peer=peer_name(lease))
        self._to_start.append(
            PullJob(
                request_id=turn.request_id,
                peer=PeerKey(lease.peer.engine_id, lease.peer.incarnation),
                local_blocks=local,
                remote_blocks=remote,
                deadline_s=lease.deadline,
                timeout_s=self._engine.config.transfer_timeout_s,
            )
        )

    # -- the end of a scheduling step --------------------------------------

    def build_connector_meta(self, output: SchedulerOutput) -> StepMetadata:
        """Hand this step's reads and lease renewals to the workers."""
        for request_id in output.num_scheduled_tokens:
            self._waiting.pop(request_id, None)
        self._relieve_waiting()
        self._held.sweep()
        self._lookups.step_planned(self._turns.values())
        pulls, self._to_start = self._to_start, []
        meta = StepMetadata(pulls=pulls, boot_id=self._engine.boot_id)
        meta.idle = output.total_num_scheduled_tokens == 0 and self._only_pulls()
        for turn in self._turns.values():
            if turn.phase is Phase.LOADING and turn.lease is not None:
                meta.renewed[turn.request_id] = turn.lease.deadline
                if turn.aborted or turn.lease.lost:
                    meta.cancelled.append(turn.request_id)
        self._engine.steps.began(output, self._live, pulling=bool(meta.renewed))
        self._announce_peers(meta)
        return meta

    def _only_pulls(self) -> bool:
        """Whether nobody would have to wait for a worker that waits for a pull.

        Asked before the step counts as being in flight.  With asynchronous
        scheduling one before it may be, which would keep its news to itself.
        """
        return (
            self._engine.alone
            and not self._engine.steps.awaited
            and all(r.status is RequestStatus.WAITING_FOR_REMOTE_KVS for r in self._live.values())
        )

    def _announce_peers(self, meta: StepMetadata) -> None:
        """Tell workers about engines they don't know yet, before a pull needs them."""
        live = {
            PeerKey(peer.engine_id, peer.incarnation): dict(peer.agents)
            for peer in self._engine.control.engines()
        }
        for turn in self._turns.values():
            # A pull's own peer counts even when the control plane lost it meanwhile.
            if turn.phase is Phase.LOADING and turn.lease is not None:
                peer = turn.lease.peer
                live.setdefault(PeerKey(peer.engine_id, peer.incarnation), dict(peer.agents))
        for key, agents in live.items():
            if key not in self._announced:
                meta.peers[key] = agents
        meta.retired = [key for key in self._announced if key not in live]
        self._announced = set(live)

    # -- memory pressure ---------------------------------------------------

    def _make_room_for(self, request: Request, local_tokens: int) -> None:
        """Give up holdings so that admission does not fail because of them."""
        block = self._engine.block_tokens
        blocks = -(-(request.num_tokens + 1) // block) - local_tokens // block
        reserved = self._engine.reserved_blocks(self._turns.values())
        self._held.make_room(max(0, blocks) + reserved + self._watermark_blocks + 1)

    def _relieve_waiting(self) -> None:
        """A request was asked about or loaded but not scheduled: memory may be why."""
        for request in self._waiting.values():
            held = request.num_computed_tokens
            self._make_room_for(request, held)

    def has_pending_block_frees(self) -> bool:
        """Give blocks up before vLLM preempts anybody; whether any were given."""
        running = max(1, self._engine.steps.requests)
        return self._held.make_room(self._held.free_blocks + running)

    # -- transfers end -----------------------------------------------------

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Settle the pulls that ended in the last step."""
        report = output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            self._take_reports(report)
        failed = output.failed_recving or ()
        for request_id in output.finished_recving or ():
            turn = self._turns.get(request_id)
            if turn is not None:
                self._pull_ended(turn, failed=request_id in failed)

    def _take_reports(self, report: StepReport) -> None:
        for request_id, pull in report.pulls.items():
            turn = self._turns.get(request_id)
            if turn is None:
                continue
            turn.report = pull if turn.report is None else turn.report.merge(pull)
            if pull.quarantined:
                self._held.quarantine(request_id, turn.destination)

    def _pull_ended(self, turn: Turn, *, failed: bool) -> None:
        report = turn.report
        turn.pull_s = time.monotonic() - turn.loading_since_s
        error = report.error if report is not None else ""
        if failed or report is None:
            error = error or outcomes.TRANSPORT
        if turn.aborted:
            # With the policy "fail", vLLM has ended the request because of this very pull.
            broken = turn.request.status is RequestStatus.FINISHED_ERROR
            self._settle(turn, (broken and error) or outcomes.ABORTED)
            del self._turns[turn.request_id]
            self.telemetry.turn_finished(turn)
            return
        if error or report is None:
            self._settle(turn, error)
            return
        turn.pulled_tokens = turn.planned_tokens
        self._waiting[turn.request_id] = turn.request
        self._settle(turn, outcomes.PULLED)
        self._learn(turn, report)

    def _learn(self, turn: Turn, report: PullReport) -> None:
        assert turn.lease is not None  # a pull has one
        self._engine.observe_transfer(
            peer=peer_name(turn.lease),
            report=report,
            queued_nbytes=turn.queued_nbytes,
            total_s=turn.pull_s,
        )

    # -- a request ends ----------------------------------------------------

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> dict[str, Any] | None:
        """Hold the finished request's KV; what P's answer tells D, if it is P's."""
        self._waiting.pop(request.request_id, None)
        self._live.pop(request.request_id, None)
        turn = self._turns.get(request.request_id)
        if turn is not None and turn.phase is Phase.LOADING:
            # vLLM keeps the blocks until the workers report; so do we the turn.
            turn.aborted = True
            return None
        if turn is not None:
            if turn.phase is not Phase.SETTLED:
                self._settle(turn, outcomes.ABORTED)
            del self._turns[request.request_id]
        result = self._hold(request, block_ids, turn)
        self._held.sweep()
        if turn is not None:
            self.telemetry.turn_finished(turn)
        return result

    def _hold(
        self, request: Request, block_ids: tuple[list[int], ...], turn: Turn | None
    ) -> dict[str, Any] | None:
        wanted = params.parse(request.kv_transfer_params)
        if wanted.prefill_only:
            if not self._engine.finished_by_length(request):
                return None
            self._engine.hold(request, block_ids, handoff=True)
            return self._engine.handoff_params(request, turn)
        if self._engine.config.bidirectional_kv_xfer and wanted.reuse:
            self._engine.hold(request, block_ids, handoff=False)
        return None

    def _settle(self, turn: Turn, outcome: str) -> None:
        if turn.phase is Phase.SETTLED:
            return
        # A handoff is over for its decode engine however the turn ended, so its
        # prefill engine may free it; a retained holding serves other readers.
        turn.settle(outcome, delivered=turn.direction == "prefill_to_decode")
        if turn.lease is None and all(turn.handoff):
            # No lease to give back: say in words that nobody will fetch it.
            self._engine.control.discard_handoff(*turn.handoff)
        self.telemetry.settled(turn)

    def step_ended(self) -> TransportStats | None:
        """The step's output is processed: learn from it, yield what was counted."""
        predicted = self._engine.steps.ended()
        if predicted is not None:
            self.telemetry.step_predicted(predicted)
        return self.telemetry.take(self._turns.values())

    def reset_cache(self) -> bool:
        self._lookups.forget(self._turns.values())
        return self._held.reset()

    def set_ranks(self, blobs: dict[tuple[int, int], bytes]) -> None:
        self._engine.set_ranks(blobs)

    def shutdown(self) -> None:
        for turn in self._turns.values():
            self._settle(turn, outcomes.ABORTED)
            self.telemetry.turn_finished(turn)
        self._turns.clear()
        self.telemetry.close()
        self._engine.close()


def peer_name(lease: HeldLease) -> str:
    """How policies name a peer: by its place, so that a restarted engine keeps its price.

    vLLM makes a new engine id at every start unless it is configured.
    """
    return f"{lease.peer.name}/{lease.peer.incarnation}"
