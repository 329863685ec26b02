"""A shared tier behind vLLM's secondary-tier interface, as the connector's own manager uses it; no policy.

What a generation's interface calls things differs (answers, ids of rows, arguments); its room completes the class.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

from typing_extensions import override
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from spillway_connector.config import parse_tier
from spillway_connector.engine.requests.tenancy import hands_over, session_of_context, tenant_of_context
from spillway_connector.engine.shared_tiers.open_shared_tier import open_shared_tier
from spillway_connector.engine.shared_tiers.tier_stats import JointReport, TierReport
from spillway_connector.namespace import Namespace
from spillway_connector.plan.geometry import ChunkGeometry
from spillway_connector.plan.load_cost import Gate, JointGate, LoadGate, LoadPolicy, RateMeter
from spillway_connector.plan.prefix_memo import ChangeLog
from spillway_connector.transfer.announcements import Announcement
from spillway_connector.transfer.chain import TierChain
from spillway_connector.transfer.jobs import Behind, JobOutcome
from spillway_connector.transfer.lookups import Answers
from spillway_connector.transfer.shared_tier import SharedTier

logger = logging.getLogger(__name__)


class ChunkOwner(Protocol):
    """The part of a generation's spec that a tier reads."""

    geometry: ChunkGeometry
    announces_blocks: bool  # whether this engine publishes KV events

    @property
    def namespace(self) -> Namespace: ...


@dataclass
class TierJobResult(JobResult):
    """A job's end, key by key: one lost chunk does not take the others of its job with it."""

    failed_keys: frozenset[bytes] = field(default_factory=frozenset)
    seconds: float = 0.0  # from the submission to the last chunk that was moved, by the thread that moved it
    behind: Behind | None = None


class PrefixTier(SecondaryTierManager):
    """A tier that answers about a whole prefix at once.

    answered_requests: requests with a PENDING chunk that may have another answer now.
    """

    answered_requests: ChangeLog[str]
    locality: Any = None  # since 0.30: whether its bytes are on this machine

    def drain_jobs(self) -> None:
        """Refuse to drain: vLLM's manager calls this since 0.30 before it drops its rows, but the connector's own
        manager never does. It keeps the rows of jobs under way in quarantine instead of waiting for a store that may
        hang."""
        raise AssertionError("a tier of Spillway's connector is not drained")

    @property
    @abstractmethod
    def open(self) -> bool:
        """Whether the tier accepts lookups now; while False it answers MISS without being asked."""

    def take_arrived(self) -> Iterable[tuple[int, list[OffloadKey]]]:
        """(job, chunks) of loads under way: those loaded since the last call, each once; their jobs still end."""
        return ()

    def weights_changed(self) -> None:
        """The model's weights change: neither load nor store until there is another namespace."""

    def use_namespace(self, namespace: Namespace) -> None:
        """Load and store under this namespace from now on. Called after `weights_changed`. Stores of before end under
        the former one. Raises ConfigError; the tier then rests as before."""

    @abstractmethod
    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Answers:
        """Return lookup()'s answers for `keys` (at least one), up to and including the first MISS."""


class SharedTierBase(PrefixTier):
    """Built by vLLM's tier factory for `{"type": "nvme" | "redis" | "s3", ...}`; for the scheduler thread only."""

    def _open(self, spec: ChunkOwner, primary_kv_view: memoryview, tier_type: str, options: dict[str, Any]) -> None:
        """The rest of the constructor, after the constructor of vLLM's class. Raises ConfigError."""
        config = parse_tier(tier_type, options)
        self._rows = primary_kv_view.cast("B")
        self._open_under = partial(
            open_shared_tier,
            config,
            geometry=spec.geometry,
            rows=self._rows,
            announces_blocks=spec.announces_blocks,
        )
        self._shared = self._open_under(namespace=spec.namespace)
        self._former: list[SharedTier | TierChain] = []  # of former weights, until their stores have ended
        self.chain = self._shared if isinstance(self._shared, TierChain) else None
        self.answered_requests = self._shared.answered_requests
        self.report = JointReport([TierReport(member.tier_name, member) for member in self._members], self.chain)
        logger.info("Shared tier %s: namespace %s", self.names, spec.namespace.hex)

    @property
    def _members(self) -> Sequence[SharedTier]:
        return (self._shared,) if isinstance(self._shared, SharedTier) else self._shared.members

    @property
    def names(self) -> str:
        """The types of the tiers, the one above first, as processes report them."""
        return self.tier_type if self.chain is None else ">".join(tier.tier_name for tier in self.chain.members)

    def take_not_worth(self) -> Iterable[tuple[str, int]]:
        """(tier, lookups) that were not sent to a tier because loading from it alone does not pay."""
        if self.chain is None or not self.chain.not_worth:
            return ()
        count, self.chain.not_worth = self.chain.not_worth, 0
        return [(self.chain.members[1].tier_name, count)]

    @property
    @override
    def open(self) -> bool:
        return self._shared.open

    @override
    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Answers:
        return self._shared.lookup_prefix(keys, req_context.req_id)

    @override
    def take_arrived(self) -> Iterable[tuple[int, list[OffloadKey]]]:
        return cast(list[tuple[int, list[OffloadKey]]], self._shared.arrived())

    @property
    def introduced(self) -> bool:
        """Whether it was announced from which stores this engine loads."""
        return self._shared.introduced

    def take_announcements(self) -> list[tuple[str, Announcement]]:
        return self._shared.take_announcements()

    def count_request(self, keys: Sequence[OffloadKey]) -> None:
        self._shared.count_request(keys)

    def begin_request(self, req_context: ReqContext) -> None:
        if (named := session_of_context(req_context)) is not None:
            self._shared.begin_request_of_session(*named)

    def use_session(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """keys: the request's keys, in the order of its prefix, in whichever tier they are."""
        if (named := session_of_context(req_context)) is not None:
            self._shared.use_session(*named, keys)

    def retain(self, req_context: ReqContext, share: float, seconds: float, keys: Sequence[OffloadKey]) -> None:
        """The request asks to retain these chunks. See transfer/renewals.py."""
        self._shared.retain(tenant_of_context(req_context), share, seconds, keys)

    def end_request(self, req_context: ReqContext) -> None:
        if (named := session_of_context(req_context)) is not None:
            self._shared.end_request_of_session(*named)

    def known(self, keys: Sequence[OffloadKey]) -> set[OffloadKey]:
        """The keys of which the engine knows that the tier (the upper one of two) holds them, or that they are on their
        way to it."""
        return cast("set[OffloadKey]", self._members[0].known(keys))

    def stores_in_hand(self) -> int:
        """Chunks whose rows stores under way read."""
        return self._members[0].stores_in_hand()

    def take_promoted(self, job_id: int) -> Sequence[bytes]:
        """The chunks of a load that has ended which a tier below gave, to be stored in the tier above it."""
        return () if self.chain is None else self.chain.take_promoted(job_id)

    def give_up_behind(self, seconds_per_chunk: float, spared: Callable[[int], bool]) -> None:
        """See SharedTier.give_up_behind."""
        self._shared.give_up_behind(seconds_per_chunk, spared)

    @override
    def weights_changed(self) -> None:
        self._shared.weights_changed()

    @override
    def use_namespace(self, namespace: Namespace) -> None:
        former = self._shared
        self._shared = self._open_under(namespace=namespace, before=former)
        self._former.append(former)
        self.chain = self._shared if isinstance(self._shared, TierChain) else None
        if self.chain is not None and isinstance(former, TierChain):
            self.chain.use_gate_of(former)
        self.report.follow(self._members, self.chain)
        self.answered_requests.add_all()
        logger.info("Shared tier %s: namespace %s", self.names, namespace.hex)

    def _finished_of_former(self) -> list[JobOutcome]:
        """Close those whose last store has ended, on a thread of its own, because closing waits for their threads."""
        ended = []
        for former in self._former:
            ended += former.finished()
            former.step_end()
        for former in [one for one in self._former if not one.has_work()]:
            self._former.remove(former)
            threading.Thread(target=former.close, name="spillway-former-tier", daemon=True).start()
        return ended

    def _store(self, job_id: int, keys: Iterable[OffloadKey], rows: list[int], req_context: ReqContext) -> None:
        named = session_of_context(req_context)
        session = None if named is None else named[1]
        self._shared.submit_store(
            job_id,
            list(keys),
            rows,
            tenant=tenant_of_context(req_context),
            session=session,
            hand_over=hands_over(req_context),
        )

    def _load(self, job_id: int, keys: Iterable[OffloadKey], rows: list[int], req_context: ReqContext) -> None:
        if self.chain is None:
            self._shared.submit_load(job_id, list(keys), rows)
        else:
            self.chain.submit_load(job_id, list(keys), rows, tenant_of_context(req_context))

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        outcomes = self._shared.finished()
        if self._former:
            outcomes = [*self._finished_of_former(), *outcomes]
        if not outcomes:  # most steps
            return ()
        return [
            TierJobResult(
                outcome.job_id,
                success=outcome.success,
                failed_keys=frozenset(outcome.failed),
                seconds=outcome.seconds,
                behind=outcome.behind,
            )
            for outcome in outcomes
        ]

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._shared.request_finished(req_context.req_id)

    @override
    def shutdown(self) -> None:
        for opened in (*self._former, self._shared):
            opened.close()
        self._rows.release()


def gate_of(
    tier: SecondaryTierManager, policy: LoadPolicy, chunk_tokens: int, chunk_bytes: int, prefill_rate: RateMeter
) -> Gate:
    """Whether loads from a tier pay, by what they reach; a chain asks the gate of each of its tiers from then on."""
    chain = tier.chain if isinstance(tier, SharedTierBase) else None
    names = [tier.tier_type] if chain is None else [member.tier_name for member in chain.members]
    gates = [LoadGate(policy, chunk_tokens, chunk_bytes, RateMeter(policy.half_life_seconds)) for _ in names]
    if chain is None:
        return gates[0]
    gate = JointGate(names, gates, RateMeter(policy.half_life_seconds))
    chain.use_gate(gate, prefill_rate, chunk_bytes)
    return gate
