"""Tiers that add up: what the device holds needs no row of the CPU tier until the device gives it up.

With eager stores every block is copied to the CPU tier when it has been computed and stays in both, so that device and
CPU tier together hold no more than the larger of them. Here, once the CPU tier is full of what sessions may use again:

- a new chunk is not stored when it is computed but owed: it is stored when the device is about to give its block up,
  which never happens to a block that is used again and again;
- when the CPU tier needs a row, a chunk that the device holds and will keep leaves first, unless the oldest chunks are
  of sessions that are gone (plan/sessions.py); it is owed from then on;
- the device gives a block up when it comes near the head of the free queue (plan/leaving.py), or, while that queue is
  short, when the last request that uses it ends. It is held by a reference until its copy has ended, unless too many
  are held or vLLM would lack free blocks in the next step. Then it returns to its end of the queue.

A block that vLLM takes all the same before its copy has ended is lost to the CPU tier: its row is never published, and
no step waits.

A shared tier is offered what the CPU tier receives. So a chunk that was never there is in no tier that outlives the
engine or that a neighbour can read. Such chunks are stored before the device gives them up if requests of two sessions
use them, and all of them, those used last first, while the engine settles (engine/scheduler/settling.py). So is what a
shared tier lacks of a prompt that another engine goes on with.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple, cast

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import LoadStoreSpec, OffloadKey, ReqContext

from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.manager.tiering import TieringManager
from spillway_connector.engine.patches.patching import replace_on
from spillway_connector.engine.requests.state import RequestFields
from spillway_connector.engine.requests.tenancy import UNKNOWN_REQUEST, hands_over, session_of_context
from spillway_connector.plan.leaving import LeavingWindow

logger = logging.getLogger(__name__)

_STEPS_UNDER_WAY_MAX = 16  # vLLM plans so many steps, at most, before it has the result of the first
_HELD_SHARE_MAX = 0.5  # of the device's blocks, for copies: what is beyond it can be taken before it has been copied


class LateStore(NamedTuple):
    """One job: chunks of one context, each in one device block."""

    job_id: int
    context: ReqContext
    blocks: list[int]
    rows: LoadStoreSpec


@dataclass(slots=True, eq=False)
class _Job:
    keys: list[OffloadKey]
    context: ReqContext
    blocks: list[int]
    ranks_pending: int
    settling: bool = False  # stored because the engine has no work
    held: list[KVCacheBlock] = field(default_factory=list)  # by a reference, the first to be given up first
    lost: set[OffloadKey] = field(default_factory=set)


_NO_JOB: tuple[_Job | None, OffloadKey] = None, OffloadKey(b"")


class LateStores:
    """The chunks that the device holds and the CPU tier does not, and their stores. EngineCore process, scheduler
    thread.

    For models whose chunks are single blocks of one KV group: a chunk's key then is vLLM's hash of the block.
    """

    def __init__(self, manager: TieringManager, window: LeavingWindow, *, ranks: int, shared: bool) -> None:
        """ranks: how many report each job. shared: whether a shared tier is offered what the CPU tier receives."""
        self._manager, self._tier = manager, manager.primary_tier
        self._window = window
        self._ranks = ranks
        self._shared = shared
        self._device: BlockPool | None = None
        self._owed: dict[OffloadKey, ReqContext] = {}  # on the device alone
        # The owed chunks that never were in the CPU tier, if there is a shared tier; the most recently used come last.
        self._alone: dict[OffloadKey, None] = {}
        # Owed chunks to be stored in this step: alone and of several sessions, or handed over to another engine.
        self._common: dict[OffloadKey, None] = {}
        self._spare: dict[OffloadKey, ReqContext] = {}  # on both, of requests that began to run; the latest last
        self._unwanted: dict[OffloadKey, None] = {}  # on the device alone, of sessions that are gone
        self._near_head: set[int] = set()  # blocks, when the head was last looked at
        self._look_again = False  # a request has ended since, or what is near the head is owed only now
        self._looked: tuple[int, int] = 0, 0  # blocks that were looked at, and that no request held
        self._to_hold: dict[OffloadKey, KVCacheBlock] = {}  # of requests that ended since the last step
        self._held_blocks = 0
        self._needed_blocks = 0  # by the running requests in the next step; vLLM preempts one if they are not free
        self._from_head: set[int] = set()  # those of the held blocks that were about to be taken
        self._left: deque[set[int]] = deque([set()], maxlen=_STEPS_UNDER_WAY_MAX)  # blocks that requests gave up
        self._jobs: dict[int, _Job] = {}
        self._copied_blocks: dict[int, tuple[_Job, OffloadKey]] = {}  # by device block

    @classmethod
    def wanted(
        cls, manager: TieringManager, settings: ConnectorConfig, window: LeavingWindow, *, ranks: int
    ) -> LateStores | None:
        """Make them, unless the settings have every chunk stored when it was computed."""
        shared = bool(manager.secondary_tiers)
        why_not = settings.why_stored_early()
        logger.debug("storing: %s means %s", settings.storing, f"eager: {why_not}" if why_not else "late")
        return None if why_not else cls(manager, window, ranks=ranks, shared=shared)

    def bind(self, device: BlockPool) -> None:
        """Learn which blocks vLLM takes."""
        self._device = device
        take = device.get_new_blocks

        def get_new_blocks(num_blocks: int) -> list[KVCacheBlock]:
            missed = self._owed_at_head(num_blocks)
            blocks = take(num_blocks)
            self._window.took(num_blocks)
            self._forget(missed)
            copied, lost = self._copied_blocks, len(missed)
            if copied:
                for block in blocks:
                    if block.block_id in copied:
                        job, key = copied[block.block_id]
                        job.lost.add(key)
                        lost += 1
            self._window.lost(lost)
            return blocks

        replace_on(device, "get_new_blocks", get_new_blocks)

    def _owed_at_head(self, count: int) -> list[OffloadKey]:
        """The chunks, on the device alone, of the next blocks that vLLM takes. Several of these blocks hold the same
        chunk if requests computed it at the same time."""
        if not self._owed or self._device is None:
            return []
        keys = (cast(OffloadKey, block.block_hash) for block in islice(_free_blocks(self._device), count))
        return list(dict.fromkeys(key for key in keys if key is not None and key in self._owed))

    def _forget(self, missed: Sequence[OffloadKey]) -> None:
        """Forget chunks whose blocks were taken before a copy had begun, unless another block holds the same chunk."""
        gone = [key for key in missed if self._block_of(key) is None]
        for key in gone:
            del self._owed[key]
            self._alone.pop(key, None)
        if gone:
            self._manager.count_late_stores(0, len(gone))

    def _block_of(self, key: OffloadKey) -> KVCacheBlock | None:
        device = self._device
        return None if device is None else device.cached_block_hash_to_block.get_one_block(key)  # type: ignore[arg-type]

    def _keeps(self, key: OffloadKey) -> bool:
        """Whether the device holds the chunk and is not about to give it up."""
        block = self._block_of(key)
        return block is not None and (block.ref_cnt > 0 or block.block_id not in self._near_head)

    # -- of the CPU tier

    def postpones(self, keys: Collection[OffloadKey], context: ReqContext) -> bool:
        """Whether these new chunks are stored later; if so, they are owed from now on. A chunk that cannot be found on
        the device by its key, such as an adapter's, is stored at once. While sessions that are gone make room, every
        chunk is stored at once: that costs one copy, and no block has to be held for it."""
        if self._tier.has_room(len(keys)) or self._manager.spills.at_once(context):
            return False
        if any(self._block_of(key) is None for key in keys):
            return False
        owed = [key for key in keys if key not in self._tier.resident]
        self._owed.update(dict.fromkeys(owed, context))
        self._tier.will_store(owed, context)
        if self._shared:
            self._alone.update(dict.fromkeys(owed))
        return True

    def take_spare(self, count: int, may_leave: Callable[[OffloadKey], bool]) -> list[tuple[OffloadKey, ReqContext]]:
        """Take up to `count` chunks of the CPU tier that the device keeps, those used last first."""
        taken: list[tuple[OffloadKey, ReqContext]] = []
        passed: list[tuple[OffloadKey, ReqContext]] = []
        spare, resident = self._spare, self._tier.resident
        while spare and len(taken) < count:
            key, context = spare.popitem()
            if key not in resident:
                continue
            if not may_leave(key):  # while it is being loaded, for example
                passed.append((key, context))
            elif self._keeps(key):
                taken.append((key, context))
        spare.update(reversed(passed))
        return taken

    def put_back(self, spare: Sequence[tuple[OffloadKey, ReqContext]]) -> None:
        """Put chunks back that stay in the CPU tier after all."""
        self._spare.update(reversed(spare))

    def gave_up(
        self,
        spare: Sequence[tuple[OffloadKey, ReqContext]],
        gone: Collection[OffloadKey],
        others: Collection[OffloadKey],
    ) -> None:
        """Note that these chunks have left the CPU tier. The device may hold some of `others` and of those that gone
        sessions have left (`gone`), too; the latter are owed only if a request uses them after all."""
        self._owed.update(spare)
        self._unwanted.update(dict.fromkeys(key for key in gone if self._block_of(key) is not None))
        self._owed.update((key, UNKNOWN_REQUEST) for key in others if self._block_of(key) is not None)
        self._look_again |= bool(others)

    # -- of requests

    def found_on_device(self, keys: Sequence[OffloadKey], context: ReqContext) -> None:
        """A request begins to run behind these chunks, which the device held or has loaded."""
        if not self._tier.free_rows():
            spare, resident = self._spare, self._tier.resident
            for key in keys:
                if key in resident:
                    spare.pop(key, None)
                    spare[key] = context
        if self._unwanted:
            back = [key for key in keys if key in self._unwanted]
            self._owed.update(dict.fromkeys(back, context))
            for key in back:
                del self._unwanted[key]
        if self._alone:
            self._use_alone(keys, context)
        if hands_over(context) and (owed := [key for key in keys if key in self._owed]):
            lacking = self._manager.spills.lacks(owed)  # in order: a prefix is of use from its head on
            for key in filter(lacking.__contains__, owed):
                self._owed[key], self._common[key] = context, None

    def _use_alone(self, keys: Sequence[OffloadKey], context: ReqContext) -> None:
        session = session_of_context(context)
        for key in keys:
            owner = self._owed.get(key) if key in self._alone else None
            if owner is None:
                continue
            before = session_of_context(owner)
            if session is not None and before is not None and session[1].session != before[1].session:
                self._common[key] = None
            del self._alone[key]
            self._owed[key], self._alone[key] = context, None

    def scheduled(
        self, output: SchedulerOutput, state_of: Callable[[str], RequestFields | None], chunk_tokens: int
    ) -> None:
        """A step was planned; called before its stores are."""
        for name in output.preempted_req_ids or ():
            if (status := state_of(name)) is not None:
                self._left[-1].update(status.group_states[0].block_ids)
        for new in output.scheduled_new_reqs:
            if (status := state_of(new.req_id)) is not None:
                found = status.group_states[0].offload_keys[: new.num_computed_tokens // chunk_tokens]
                self.found_on_device(found, status.req_context)

    def ending(self, keys: Sequence[OffloadKey], blocks: Sequence[int] = ()) -> None:
        """A request is about to give up its blocks."""
        self._look_again = True
        self._left[-1].update(blocks)
        device, owed = self._device, self._owed
        if not owed or device is None or device.get_num_free_blocks() >= self._window.blocks:
            return
        room = self._room()
        held: list[tuple[OffloadKey, KVCacheBlock]] = []
        for key in keys:
            if len(held) >= room:
                break
            block = self._block_of(key) if key in owed and key not in self._to_hold else None
            if block is not None and block.ref_cnt == 1:
                held.append((key, block))
        del held[max(0, len(held) + device.get_num_free_blocks() - self._needed_blocks) :]
        if held:
            device.touch([block for _, block in held])
            self._to_hold.update(reversed(held))  # as vLLM frees them: the end of the prefix first

    # -- of steps

    def due(
        self, new_job_id: Callable[[], int], *, needed_blocks: int, settling: int | None = None
    ) -> Iterator[LateStore]:
        """The stores of the step that has been scheduled.

        Args:
            needed_blocks: blocks that running requests may take in the next step. If 0, none runs: nothing is about
                to leave the device, and in a CPU tier that is smaller than the window copies would evict each other
                endlessly.
            settling: chunks to be stored although the device keeps them; None: there is nothing to settle.
        """
        self._window.end_step()
        self._left.append(set())
        self._needed_blocks = needed_blocks
        leaving = dict(self._to_hold)
        if needed_blocks and (self._owed or self._spare):
            room = self._room()
            for block in self._head():
                key = cast(OffloadKey, block.block_hash)
                if key is None or key not in self._owed or key in leaving:
                    continue
                leaving[key] = block
                if room > 0 and (device := cast(BlockPool, self._device)).get_num_free_blocks() > needed_blocks:
                    device.touch([block])
                    self._to_hold[key] = block
                    self._from_head.add(block.block_id)
                    room -= 1
        if self._common or (settling or 0) > 0:
            kept = {key: block for key, block in self._never_stored(settling or 0).items() if key not in leaving}
            why = "the engine has time, or several sessions or another engine use them"
            yield from self._store(kept, {}, new_job_id, why=why, settling=settling is not None)
        if leaving:
            to_hold, self._to_hold = self._to_hold, {}
            yield from self._store(leaving, to_hold, new_job_id)

    def _never_stored(self, count: int) -> dict[OffloadKey, KVCacheBlock]:
        """Take the chunks of several sessions, and `count` others: the request that ran last comes first, and of each
        the head of its prefix."""
        chosen, self._common = list(self._common), {}
        if count > 0:
            by_request: dict[int, list[OffloadKey]] = {}
            for key in self._alone:
                by_request.setdefault(id(self._owed.get(key)), []).append(key)
            chosen += islice(chain.from_iterable(reversed(by_request.values())), count)
        found: dict[OffloadKey, KVCacheBlock] = {}
        for key in chosen:
            block = self._block_of(key) if key in self._owed else None
            if block is None:
                self._alone.pop(key, None)
            else:
                found[key] = block
        return found

    def _room(self) -> int:
        """Device blocks that may yet be held."""
        blocks = 0 if self._device is None else int(_HELD_SHARE_MAX * self._device.num_gpu_blocks)
        return blocks - self._held_blocks - len(self._to_hold)

    def _head(self) -> list[KVCacheBlock]:
        """The free blocks that vLLM takes next; none if this was asked a moment ago."""
        device, window = self._device, self._window
        if device is None:
            return []
        free, blocks = device.get_num_free_blocks(), window.blocks
        unused = free + self._held_blocks + len(self._to_hold)
        freed = self._look_again or blocks > self._looked[0] or unused + window.taken_since_look > self._looked[1]
        if not window.look_is_due(free, freed=freed):
            return []
        head = list(islice(_free_blocks(device), blocks))
        window.looked()
        self._look_again, self._looked = False, (blocks, unused)
        self._near_head = {block.block_id for block in head}
        if len(self._owed) + len(self._unwanted) > 2 * device.num_gpu_blocks:  # some were given up unseen
            self._owed = {key: context for key, context in self._owed.items() if self._block_of(key) is not None}
            self._unwanted = {key: None for key in self._unwanted if self._block_of(key) is not None}
        return head

    def _store(
        self,
        leaving: dict[OffloadKey, KVCacheBlock],
        held: dict[OffloadKey, KVCacheBlock],
        new_job_id: Callable[[], int],
        *,
        why: str = "the device gives them up",
        settling: bool = False,
    ) -> Iterator[LateStore]:
        by_context: dict[int, tuple[ReqContext, list[OffloadKey]]] = {}
        for key in leaving:
            context = self._owed.pop(key, None)
            if context is not None:
                by_context.setdefault(id(context), (context, []))[1].append(key)
        for context, keys in by_context.values():
            output = self._tier.prepare_store(keys, context)
            stored = [] if output is None else list(output.keys_to_store)
            if output is None:
                self._owed.update(dict.fromkeys(keys, context))
                self._look_again = True
            else:
                for key in keys:
                    self._alone.pop(key, None)
            if not stored:
                continue
            assert output is not None
            blocks = [leaving[key].block_id for key in stored]
            job = _Job(stored, context, blocks, self._ranks)
            job.settling = settling
            job.held = [held.pop(key) for key in stored if key in held]
            self._held_blocks += len(job.held)
            job_id = new_job_id()
            self._jobs[job_id] = job
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("request %s: late store %d of %d chunks: %s", context.req_id, job_id, len(stored), why)
            self._copied_blocks.update((block, (job, key)) for block, key in zip(blocks, stored, strict=True))
            yield LateStore(job_id, context, blocks, output.store_spec)
        self._let_go(list(held.values()))  # no row could be freed for them

    def ended(self, completed_jobs: dict[int, int], failed_jobs: set[int]) -> None:
        """completed_jobs: by how many ranks each was reported; those of this class are taken out of both."""
        for job_id in completed_jobs.keys() & self._jobs.keys():
            job = self._jobs[job_id]
            job.ranks_pending -= completed_jobs.pop(job_id)
            if job_id in failed_jobs:
                failed_jobs.discard(job_id)
                job.lost.update(job.keys)
            if job.ranks_pending:
                continue
            del self._jobs[job_id]
            for block in job.blocks:  # one that was taken may be part of a later job
                if self._copied_blocks.get(block, _NO_JOB)[0] is job:
                    del self._copied_blocks[block]
            self._release(job)
            if job.lost:
                self._manager.fail_store(job.lost)
            self._manager.count_late_stores(len(job.keys) - len(job.lost), len(job.lost))
            if job.settling:
                self._manager.count_settled(len(job.keys) - len(job.lost))
            self._manager.complete_store(job.keys, job.context)

    def lose_all(self, since: int = -1) -> None:
        """Publish nothing of the jobs behind job `since`: their blocks may hold something else than their keys say."""
        for job in (job for job_id, job in self._jobs.items() if job_id > since):
            job.lost.update(job.keys)

    def lose(self, blocks: Collection[int]) -> None:
        """Publish nothing that is copied from these device blocks, nor, now or later, from those that requests gave up
        since steps under way were planned: vLLM does not check what such a request computed behind a bad block."""
        given_up = set(chain.from_iterable(self._left))
        for number in self._copied_blocks.keys() & given_up.union(blocks):
            job, key = self._copied_blocks[number]
            job.lost.add(key)
        for key in [key for key in self._owed if (block := self._block_of(key)) and block.block_id in given_up]:
            del self._owed[key]
            self._alone.pop(key, None)

    # -- of resets

    def device_resetting(self) -> None:
        """The device forgets all of its chunks, or is to do so if nothing holds a block."""
        self.lose_all()
        for job in self._jobs.values():
            self._release(job)
        self._let_go(list(self._to_hold.values()))
        self._to_hold.clear()

    def device_was_reset(self) -> None:
        self._owed.clear()
        self._unwanted.clear()
        self._alone.clear()
        self._common.clear()
        self._near_head.clear()

    def tier_resetting(self) -> Iterator[tuple[int, int, list[OffloadKey]]]:
        """Return (job, ranks that have not reported it, its chunks) for all jobs, which the caller follows now."""
        self.device_resetting()
        self.device_was_reset()
        self._spare.clear()
        self._copied_blocks.clear()
        jobs, self._jobs = self._jobs, {}
        for job_id, job in jobs.items():
            yield job_id, job.ranks_pending, job.keys

    @property
    def alone(self) -> int:
        """The number of chunks that the device alone holds and that no other tier was ever offered."""
        return len(self._alone)

    @property
    def copying(self) -> int:
        """Chunks."""
        return sum(len(job.keys) for job in self._jobs.values())

    @property
    def under_way(self) -> bool:
        return bool(self._jobs or self._to_hold)

    def _release(self, job: _Job) -> None:
        held, job.held = job.held, []
        self._held_blocks -= len(held)
        self._let_go(held)

    def _let_go(self, held: list[KVCacheBlock]) -> None:
        """Free held blocks: those that were about to be taken are next, in order; those of ended requests are last."""
        device = self._device
        if not held or device is None:
            return
        device.free_blocks(held)
        free = [block for block in held if block.ref_cnt == 0 and block.block_id in self._from_head]
        self._from_head.difference_update(block.block_id for block in held)
        for block in free:
            device.free_block_queue.remove(block)
        device.free_block_queue.prepend_n(free)


def _free_blocks(device: BlockPool) -> Iterator[KVCacheBlock]:
    """Yield the free blocks in the order in which vLLM takes them."""
    queue = device.free_block_queue
    block = queue.fake_free_list_head.next_free_block
    while block is not None and block is not queue.fake_free_list_tail:
        yield block
        block = block.next_free_block
