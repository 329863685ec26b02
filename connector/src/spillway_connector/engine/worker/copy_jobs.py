"""The copies of one rank, from the step that asks for them to the report of their end.

A failure never ends in an exception here: a load that was refused or failed counts as ended, with the device blocks
that hold undefined bytes, and a failed store as completed and failed, so that its row never becomes a hit. Each job is
submitted once and reported once, in whichever step it ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from spillway_connector import metrics
from spillway_connector.device.copier import Direction
from spillway_connector.engine.ipc.samples import Samples
from spillway_connector.errors import DeviceCopyError

logger = logging.getLogger(__name__)

DeviceBlocks = Sequence[int] | npt.NDArray[Any]  # ids, of all KV groups
Submit = Callable[[], bool]  # hands the copy to the transport; False if that refused it
Sides = tuple[Any, Any]  # (source, destination) of a store, as the generation's vLLM describes them
SubmitStores = Callable[[int, Sequence[Sides]], bool]  # the same for the stores of a step, as one copy with that id


@dataclass(frozen=True, slots=True)
class EndedCopy:
    """A copy that ended. size_bytes, seconds: of a complete copy, if the transport measured them."""

    job_id: int
    success: bool
    size_bytes: int | None = None
    seconds: float | None = None


@dataclass(slots=True)
class Received:
    """Requests whose load has ended. failed: the requests among them with device blocks that hold undefined bytes."""

    requests: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


@dataclass(slots=True)
class StepReport:
    """A report for the scheduler.

    Attributes:
        failed: Completed jobs that moved nothing, or only part of it, and loads that failed within their step, whose
            other copies may still be moving.
    """

    completed: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    loaded_blocks: int = field(default=0, compare=False)  # whole device blocks, all layers
    loading_seconds: float = field(default=0.0, compare=False)  # that their copies took


@dataclass(slots=True)
class _Load:
    request_id: str
    device_blocks: DeviceBlocks


@dataclass(slots=True)
class _Piece:
    job_id: int
    device_blocks: DeviceBlocks


@dataclass(slots=True)
class _LoadInPieces:
    request_id: str
    moving: set[int] = field(default_factory=set)  # pieces
    last_seen: bool = False
    invalid_blocks: set[int] = field(default_factory=set)
    in_step: bool = False  # the step that brought it reads its blocks
    blocks: int = 0  # of a load within a step, the same ones in each piece
    seconds: float = 0.0  # that its copies took
    step_ended: bool = False
    failed: bool = False  # and reported as such


class CopyJobs:
    """The copy jobs of one rank, on its model-runner thread. Job ids are the scheduler's; pieces have own ids.

    The stores of a step are one copy, which has the id of the first of them. Each of the many requests of a batch fills
    a block now and then, and one copy for each would cost the model thread more than the bytes do.
    """

    def __init__(self, submit_stores: SubmitStores) -> None:
        self._submit_stores = submit_stores
        self._samples = Samples()
        # Kept until their completion, which may be some steps later.
        self._loads: dict[int, _Load] = {}
        self._in_pieces: dict[int, _LoadInPieces] = {}
        self._pieces: dict[int, _Piece] = {}  # being copied
        self._waiting_stores: list[tuple[int, Sides]] = []
        self._stores: dict[int, list[int]] = {}  # jobs of each copy that moves
        self._refused_loads: list[int] = []  # never submitted; they end with the next finish()
        self._invalid_blocks: set[int] = set()
        self._report = StepReport()

    def start_load(self, job_id: int, request_id: str, device_blocks: DeviceBlocks, submit: Submit) -> None:
        self._loads[job_id] = _Load(request_id, device_blocks)
        if not submit():
            self._refused_loads.append(job_id)

    def start_piece(
        self,
        piece_id: int,
        job_id: int,
        request_id: str,
        copy: tuple[DeviceBlocks, Submit] | None,
        *,
        last: bool,
        lost_blocks: Iterable[int],
        in_step: bool = False,
    ) -> bool:
        """Start a part of load `job_id`, which ends when `last` has been seen and every piece has ended.

        Args:
            in_step: The running step reads what is loaded. Its request is not reported as received, and a failure must
                be known by the next :meth:`finish`.
            copy: None if there is nothing (more) to copy.
            lost_blocks: Device blocks of the job that will not be filled.

        Returns:
            Whether the transport took the copy.
        """
        load = self._in_pieces.setdefault(job_id, _LoadInPieces(request_id, in_step=in_step))
        load.last_seen |= last
        load.invalid_blocks.update(lost_blocks)
        if copy is None:
            return True
        device_blocks, submit = copy
        load.moving.add(piece_id)
        load.blocks = len(device_blocks)
        self._pieces[piece_id] = _Piece(job_id, device_blocks)
        if not submit():
            self._end_piece(piece_id, success=False)
            return False
        return True

    def fail_piece(self, piece_id: int) -> None:
        """Mark a piece as failed: its blocks hold wrong bytes, although its copy may still be moving."""
        piece = self._pieces.get(piece_id)
        if piece is not None:
            self._in_pieces[piece.job_id].invalid_blocks.update(int(block) for block in piece.device_blocks)

    def queue_store(self, job_id: int, sides: Sides) -> None:
        """Keep the store for the next :meth:`submit_stores`."""
        self._waiting_stores.append((job_id, sides))

    def submit_stores(self) -> None:
        if not self._waiting_stores:
            return
        waiting, self._waiting_stores = self._waiting_stores, []
        if self._submit_together(waiting):
            return
        for store in waiting:  # what one of them cannot do must not fail the others
            if len(waiting) == 1 or not self._submit_together([store]):
                self._complete(store[0], failed=Direction.STORE)

    def _submit_together(self, stores: Sequence[tuple[int, Sides]]) -> bool:
        job_ids, sides = zip(*stores, strict=True)
        if not self._submit_stores(job_ids[0], sides):
            return False
        self._stores[job_ids[0]] = list(job_ids)
        return True

    def copies_of(self, job_ids: AbstractSet[int]) -> set[int]:
        """The ids by which the transport knows these jobs: their own, their pieces', or their step's."""
        copies = set(job_ids)
        for job_id in job_ids & self._in_pieces.keys():
            copies |= self._in_pieces[job_id].moving
        copies.update(copy_id for copy_id, jobs in self._stores.items() if not job_ids.isdisjoint(jobs))
        return copies

    def under_way(self) -> set[int]:
        """The ids by which the transport knows every copy that was submitted and whose end was not asked for."""
        return {*self._loads, *self._pieces, *self._stores}

    def finish(self, ended: Iterable[EndedCopy]) -> Received:
        """Process the copies that have ended since the last call; once a step, after its computation.

        Raises DeviceCopyError when a copy has failed that an earlier step computed with: nothing tells which tokens
        are wrong.
        """
        received = Received()
        refused, self._refused_loads = self._refused_loads, []
        for copy in (*(EndedCopy(job_id, success=False) for job_id in refused), *ended):
            load, is_piece = self._loads.get(copy.job_id), copy.job_id in self._pieces
            direction = Direction.STORE if load is None and not is_piece else Direction.LOAD
            if logger.isEnabledFor(logging.DEBUG):
                jobs = self._stores.get(copy.job_id, [copy.job_id])
                size, seconds, end = copy.size_bytes, copy.seconds, "copied" if copy.success else "not copied"
                logger.debug("%s jobs %s are %s: %s bytes in %s s", direction.value, jobs, end, size, seconds)
            if copy.success and copy.size_bytes is not None and copy.seconds is not None:
                self._samples.add(metrics.DEVICE_COPY_BYTES, copy.size_bytes, direction.value)
                self._samples.add(metrics.DEVICE_COPY_SECONDS, copy.seconds, direction.value)
                self._measure(copy.job_id, copy.seconds)
            if is_piece:
                self._end_piece(copy.job_id, copy.success)
                continue
            if load is not None:
                received.requests.add(load.request_id)
                if not copy.success:
                    received.failed.add(load.request_id)
            for job_id in self._stores.pop(copy.job_id, [copy.job_id]):
                self._complete(job_id, failed=None if copy.success else direction)
        self._end_loads_in_pieces(received)
        return received

    def _measure(self, copy_id: int, seconds: float) -> None:
        piece, load = self._pieces.get(copy_id), self._loads.get(copy_id)
        if piece is not None:
            whole = self._in_pieces[piece.job_id]
            if whole.in_step:  # each of its pieces has the same blocks
                whole.seconds += seconds
            else:
                self._report.loaded_blocks += len(piece.device_blocks)
                self._report.loading_seconds += seconds
        elif load is not None:
            self._report.loaded_blocks += len(load.device_blocks)
            self._report.loading_seconds += seconds

    @property
    def idle(self) -> bool:
        """Whether every job has ended, and its end been asked for."""
        held = self._loads, self._in_pieces, self._pieces, self._waiting_stores, self._stores, self._refused_loads
        return not any(held) and not self._invalid_blocks and self._report == StepReport()

    @property
    def loads_move(self) -> bool:
        """Whether the transport has a load whose end was not asked for."""
        return not self._refused_loads and bool(self._loads or self._pieces)

    def is_load(self, job_id: int) -> bool:
        """Whether the transport moves this copy to the device; asked before finish() takes in its end."""
        return job_id in self._loads or job_id in self._pieces

    def _end_piece(self, piece_id: int, success: bool) -> None:
        piece = self._pieces.pop(piece_id)
        load = self._in_pieces[piece.job_id]
        load.moving.discard(piece_id)
        if not success:
            load.invalid_blocks.update(int(block) for block in piece.device_blocks)
            self._samples.add(metrics.DEVICE_COPY_FAILURES, 1, Direction.LOAD.value)

    def _end_loads_in_pieces(self, received: Received) -> None:
        for job_id, load in list(self._in_pieces.items()):
            if load.in_step:
                self._end_step_of(job_id, load)
                continue
            if load.moving or not load.last_seen:
                continue
            del self._in_pieces[job_id]
            received.requests.add(load.request_id)
            self._report.completed.add(job_id)
            if load.invalid_blocks:
                received.failed.add(load.request_id)
                self._report.failed.add(job_id)
                self._invalid_blocks |= load.invalid_blocks
                logger.warning("KV load job %d is incomplete; its request recomputes the rest", job_id)

    def _end_step_of(self, job_id: int, load: _LoadInPieces) -> None:
        if load.invalid_blocks and not load.failed:
            if load.step_ended:
                raise DeviceCopyError(
                    f"KV load job {job_id} failed after request {load.request_id} had computed with it; "
                    "the engine must start again"
                )
            load.failed = True
            self._report.failed.add(job_id)
            self._invalid_blocks |= load.invalid_blocks
            logger.warning("KV load job %d failed within its step; its request recomputes", job_id)
        load.step_ended = True
        if not load.moving:
            del self._in_pieces[job_id]
            self._report.completed.add(job_id)
            if not load.failed:
                self._report.loaded_blocks += load.blocks
                self._report.loading_seconds += load.seconds

    def _complete(self, job_id: int, failed: Direction | None) -> None:
        """Report a job for the scheduler, exactly once, and drop it here."""
        self._report.completed.add(job_id)
        load = self._loads.pop(job_id, None)
        if failed is None:
            return
        self._report.failed.add(job_id)
        if load is not None:
            self._invalid_blocks.update(int(block) for block in load.device_blocks)
        self._samples.add(metrics.DEVICE_COPY_FAILURES, 1, failed.value)
        logger.warning(
            "KV %s job %d failed; %s", failed.value, job_id, "dropped" if load is None else "its request recomputes"
        )

    def take_invalid_blocks(self) -> set[int]:
        """Device blocks whose load failed since the last call; call after finish(), in the same step."""
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def take_report(self) -> StepReport:
        """The jobs that ended since the last call."""
        report, self._report = self._report, StepReport()
        return report

    def take_samples(self) -> Samples:
        """The samples since the last call."""
        samples, self._samples = self._samples, Samples()
        return samples
