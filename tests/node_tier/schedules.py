"""Random schedules of three engines on one region: stores, loads, evictions, sessions, waiting requests, what clients
retain, resets, weights that are named, failing copies, killed engines, and engines that are stopped between two lines
while the others act.

Each engine is a NodeRows on files of its own opening, as in a process of its own; ranks and shared tiers are played by
reads and writes of the rows. What is loaded has to be what was stored under that key, by an engine of that namespace,
since the last reset of the loading engine.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from blake3 import blake3
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from spillway_connector.engine.node_tier import picture, rows
from spillway_connector.engine.node_tier.row_checks import NodeRowsSpec, RowChecks
from spillway_connector.engine.node_tier.rows import NodeRows
from spillway_connector.engine.requests.tenancy import TenantContext
from spillway_connector.errors import DeviceCopyError, TierTimeout
from spillway_connector.node.region import REMOVED_LEASE_MS, NodeRegion
from spillway_connector.plan import node_index, node_records
from spillway_connector.plan.foreign_rows import FLOOR_KEPT_MS
from spillway_connector.plan.node_index import DEAD_ROWS_KEPT_MS, FREE, READY, WRITING
from spillway_connector.plan.sessions import SessionHint
from spillway_connector.plan.waiting import Turn
from spillway_connector.testing.generation import make_node_tier
from spillway_connector.tiers.disk.slab.writers import new_number

ROW_BYTES = 4096
TOKEN_BYTES = 32
CONTEXT = ReqContext(req_id="r")
_LOCKED_OUT = "another process held the lock"
_CHANGED = "rows that it was writing have changed"
_SHARING = frozenset(str(module.__file__) for module in (picture, rows, node_index, node_records))
_LINES_MAX = 80  # of an action in these modules, most are shorter
FEW_ROWS = (0, 1, node_records.FEW_ROWS)  # up to which number rows are changed one by one
NAMESPACES = (b"a" * 16, b"a" * 16, b"a" * 16, b"b" * 16)  # most engines share theirs


class Killed(BaseException):
    """The process of an engine ends here."""


@dataclass(eq=False)
class Job:
    """kind: store, load or read (of a shared tier's store). reset_rows: once a reset has dropped it."""

    kind: str
    keys: list[OffloadKey]
    rows: list[int]
    spec: NodeRowsSpec | None = None
    reset_rows: list[int] | None = None
    written: bool = False
    copied: list[bytes] | None = None
    number: int = 0


@dataclass(eq=False)
class Engine:
    region: NodeRegion
    tier: NodeRows
    namespace: bytes
    checks: RowChecks
    jobs: list[Job] = field(default_factory=list)
    is_changing: bool = False  # it holds the lock
    reset_at: int = 0  # serial of the last store before it
    is_outcast: bool = False  # the others have taken it for dead


class Schedule:
    """One random schedule. `seen` counts what happened in it."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.rows = self.random.choice((2, 4, 7))
        self.keys = [OffloadKey(bytes([number]) * 36) for number in range(2 * self.rows + 1)]
        self.seconds = 1000.0
        self.serial = 0
        self.stored: dict[bytes, tuple[bytes, OffloadKey, int]] = {}  # by token
        self.ghosts: list[tuple[list[int], float, NodeRegion]] = []  # copies of killed engines, until when
        self.seen: Counter[str] = Counter()
        self.opened: list[NodeRows] = []
        self.is_one_stopped = False  # within an action
        self.engines = [self.start() for _ in range(3)]

    def start(self) -> Engine:
        region = NodeRegion(self.folder, self.rows, ROW_BYTES, new_number())
        namespace = self.random.choice(NAMESPACES)
        tier = make_node_tier(region, namespace, True, self.random.choice((0.0, 0.3)), clock=lambda: self.seconds)
        assert isinstance(tier, NodeRows)
        self.opened.append(tier)
        tier._spare_rows = self.random.choice((0, 1, 2)).__index__  # type: ignore[method-assign]
        engine = Engine(region, tier, namespace, RowChecks(region))
        _watch_lock(engine)
        return engine

    def run(self, steps: int) -> None:
        actions: list[tuple[Callable[[Engine], None], int]] = [
            (self.store, 12),
            (self.write, 16),
            (self.end, 20),
            (self.end_together, 6),
            (self.load, 16),
            (self.copy, 8),
            (self.read, 6),
            (self.touch, 4),
            (self.ask, 4),
            (self.wait, 3),
            (self.retain, 1),
            (self.sync, 8),
            (self.pass_time, 6),
            (self.haunt, 2),
            (self.reset, 1),
            (self.rename, 1),
            (self.kill, 1),
            (self.kill_within, 1),
            (self.lock_out, 1),
            (self.stop_within, 30),
            (self.cast_out, 2),
        ]
        chosen, weights = zip(*actions, strict=True)
        for _ in range(steps):
            engine = self.random.choice(self.engines)
            self.random.choices(chosen, weights)[0](engine)
            self.check()
        self.finish()

    # -- actions

    def some_keys(self, most: int = 3) -> list[OffloadKey]:
        return self.random.sample(self.keys, self.random.randint(1, most))

    def some_context(self) -> ReqContext:
        """One of a session, or of none. Some sessions end, and some announce when they come back."""
        session = self.random.choice((b"", b"a", b"b", b"c", b"d", b"e"))
        hint = SessionHint(session, self.random.random() < 0.2, self.random.choice((None, None, 0.5, 60.0)))
        return TenantContext("r", session=hint) if session else CONTEXT

    def store(self, engine: Engine) -> None:
        output = engine.tier.prepare_store(self.some_keys(), self.some_context())
        self.seen["stored" if output is not None else "no room"] += 1
        if output is not None and output.evicted_keys:
            self.seen["evicted"] += 1
        if output is not None and output.keys_to_store:
            rows = output.store_spec.block_ids.tolist()
            engine.jobs.append(Job("store", list(output.keys_to_store), rows))

    def write(self, engine: Engine) -> None:
        for job in engine.jobs:
            if job.kind == "store" and not job.written:
                self.serial += 1
                for key, row in zip(job.keys, job.rows, strict=True):
                    token = blake3(engine.namespace + key + self.serial.to_bytes(8, "little")).digest(TOKEN_BYTES)
                    self.stored[token] = engine.namespace, key, self.serial
                    self.put(engine.region, row, token)
                job.written = True
                return

    def load(self, engine: Engine) -> None:
        ready = [key for key in self.some_keys(4) if key in engine.tier.ready]
        if not ready:
            return
        if (
            not self.is_one_stopped and self.random.random() < 0.3
        ):  # another engine acts between the look-up and the load
            self.store(self.random.choice(self.engines))
        spec = engine.tier.prepare_load(ready, CONTEXT)
        assert isinstance(spec, NodeRowsSpec)
        self.serial += 1
        job = Job("load", ready, spec.block_ids.tolist(), spec, number=self.serial)
        try:
            engine.checks.require(spec)
        except DeviceCopyError:
            job.spec = None
            self.seen["refused"] += 1
        else:
            engine.checks.submitted(job.number, spec)
            self.seen["loads"] += 1
        engine.jobs.append(job)

    def copy(self, engine: Engine) -> None:
        for job in engine.jobs:
            if job.kind == "load" and job.spec is not None and job.copied is None:
                job.copied = [self.get(engine.region, row) for row in job.rows]
                return

    def read(self, engine: Engine) -> None:
        ready = [key for key in self.some_keys() if key in engine.tier.ready]
        pinned = engine.tier.prepare_read(ready, CONTEXT) if ready else None
        if pinned is not None:
            engine.jobs.append(Job("read", ready, pinned.block_ids.tolist()))

    def end(self, engine: Engine) -> None:
        if not engine.jobs:
            return
        job = self.random.choice(engine.jobs)
        if job.kind == "store" and not job.written and self.random.random() < 0.8:
            return
        engine.jobs.remove(job)
        if job.kind == "load" and job.spec is not None:
            copied = job.copied or [self.get(engine.region, row) for row in job.rows]
            held = engine.checks.still_held(job.number)
            assert held or engine.is_outcast, "a row that an engine reads was given to another chunk"
            if held and job.reset_rows is None:
                for key, token in zip(job.keys, copied, strict=True):
                    self.judge(engine, key, token)
        if job.reset_rows is not None:
            engine.tier.release(job.reset_rows)
        elif job.kind == "store":
            good = job.written and self.random.random() < 0.8
            engine.tier.complete_store(job.keys, CONTEXT, good)
            self.seen["published" if good else "failed"] += 1
        else:
            engine.tier.complete_load(job.keys, CONTEXT)

    def end_together(self, engine: Engine, others_store: float = 0.2) -> None:
        """End the jobs of one step: what was stored is read for a shared tier before the others may see it."""
        with engine.tier.together():
            for _ in range(self.random.randint(1, 3)):
                self.end(engine)
                self.read(engine)
                if self.random.random() < others_store:
                    self.store(self.random.choice([each for each in self.engines if each is not engine]))
        self.seen["together"] += 1

    def end_alone(self, engine: Engine) -> None:
        self.end_together(engine, others_store=0.0)

    def touch(self, engine: Engine) -> None:
        engine.tier.touch(self.some_keys(), self.some_context())

    def ask(self, engine: Engine) -> None:
        """A request of a session begins, and perhaps ends."""
        context = self.some_context()
        engine.tier.on_new_request(context)
        engine.tier.touch(self.some_keys(), context)
        if self.random.random() < 0.8:
            engine.tier.on_request_finished(context)

    def wait(self, engine: Engine) -> None:
        """A request waits, or has its turn."""
        name, waiting = str(self.random.randrange(3)), engine.tier.waiting
        if name in waiting:
            waiting.end(name)
        else:
            waiting.begin(name, b"", Turn(0.0, self.serial), self.some_keys(), self.seconds)
        waiting.pass_time(self.seconds)

    def retain(self, engine: Engine) -> None:
        engine.tier.hold(b"", self.random.choice((0.3, 1.0)), self.random.choice((0.4, 5.0)), self.some_keys())

    def sync(self, engine: Engine) -> None:
        had_left = engine.tier._left is not None
        engine.tier.sync()
        engine.tier.take_events()
        self.seen["came back"] += had_left and engine.tier._left is None

    def pass_time(self, _: Engine) -> None:
        self.seconds += self.random.choice((0.01, 0.3, 1.1, 6.0))

    def haunt(self, _: Engine) -> None:
        """A device whose engine was killed goes on writing for a moment."""
        for written, until, region in self.ghosts:
            for row in written if self.seconds < until else ():
                self.put(region, row, b"\xff" * TOKEN_BYTES)

    def reset(self, engine: Engine) -> None:
        for job in engine.jobs:
            if job.reset_rows is None:
                job.reset_rows = engine.tier.rows_of(job.keys)
        engine.reset_at = self.serial
        engine.tier.reset_cache()
        self.seen["resets"] += 1

    def rename(self, engine: Engine) -> None:
        """Change the engine's weights while copies are under way, and name them, with a new name or a former one."""
        for job in engine.jobs:
            if job.reset_rows is None:
                job.reset_rows = engine.tier.rows_of(job.keys)
        engine.tier.weights_changed()
        engine.tier.reset_cache()
        for _ in range(self.random.randint(0, 3)):  # until it has a name, it shares nothing
            self.random.choice((self.load, self.touch, self.sync, self.end, self.write))(engine)
            assert not engine.tier.ready and engine.tier.prepare_store(self.some_keys(), CONTEXT) is None
        engine.namespace = self.random.choice(NAMESPACES)
        engine.reset_at = 0  # what others stored under this name, also before the reset
        engine.tier.use_namespace(engine.namespace)
        self.seen["renamed"] += 1
        self.seen["found under a name"] += bool(engine.tier.ready)

    def kill(self, engine: Engine) -> None:
        written = [row for job in engine.jobs if job.kind == "store" for row in job.rows]
        self.ghosts.append((written, self.seconds + 0.9 * DEAD_ROWS_KEPT_MS / 1000, engine.region))
        engine.region.lease.release()  # what the kernel does
        engine.region._lock.close()
        self.engines.remove(engine)
        self.engines.append(self.start())
        self.seen["killed"] += 1

    def kill_within(self, engine: Engine) -> None:
        """Killed while it changes the index: before the stamps of a claim, or between a stamp and what follows."""
        index = engine.region.index
        if self.random.random() < 0.5:
            index.counts = _Dying(index.counts, 0)  # type: ignore[assignment]
        else:
            writes = self.random.randint(0, 4)
            index.stamps = _Dying(index.stamps, writes)  # type: ignore[assignment]
            index.stamp_array = _dying_array(index.stamp_array, writes)
        try:
            self.random.choice((self.store, self.end, self.end_together, self.reset))(engine)
        except Killed:
            self.seen["killed within"] += 1
        self.kill(engine)

    def lock_out(self, engine: Engine) -> None:
        """The lock cannot be had: the engine leaves, and comes back when it can."""

        def change(*_: object) -> object:
            raise TierTimeout(_LOCKED_OUT)

        engine.region.change = change  # type: ignore[method-assign,assignment]
        self.random.choice((self.store, self.load, self.read, self.end, self.end_together, self.reset))(engine)
        del engine.region.change
        self.seen["left"] += engine.tier._left is not None

    def stop_within(self, engine: Engine) -> None:
        """Stop the engine between two lines until the others have acted: they take its rows, if they may."""
        others = [each for each in self.engines if each is not engine]
        action = self.random.choice((self.store, self.store, self.end, self.end, self.end_alone, self.load, self.read))

        def others_act() -> None:
            if engine.is_changing:  # the others wait for the lock
                return
            self.seen["stopped within"] += 1
            self.seen["stopped at a store"] += action == self.store
            for _ in range(self.random.randint(1, 6)):
                act = self.random.choice((self.store, self.write, self.end, self.end, self.load, self.sync))
                act(self.random.choice(others))

        self.is_one_stopped = True
        with _at_line(self.random.randint(1, _LINES_MAX), others_act):
            action(engine)
        self.is_one_stopped = False

    def cast_out(self, engine: Engine) -> None:
        """Remove the engine's lease, and stop it between two lines until the others have taken it for dead, an engine
        has started, and they have taken its rows. What it does then harms none of them."""
        (engine.region.path / "writers" / f"{engine.region.lease.number:016x}").unlink()
        engine.is_outcast = True
        self.engines.remove(engine)

        def others_act() -> None:
            if engine.is_changing:
                return
            self.seen["taken for dead"] += 1
            self.take_for_dead()
            self.engines.append(self.start())
            for _ in range(self.random.randint(1, 12)):
                act = self.random.choice((self.store, self.write, self.end, self.end, self.load, self.sync))
                act(self.random.choice(self.engines))

        self.is_one_stopped = True  # and no other one within its action
        with _at_line(self.random.randint(1, _LINES_MAX), others_act):
            self.random.choice((self.store, self.end, self.end, self.end_alone, self.load, self.read))(engine)
        self.is_one_stopped = False
        self.seconds += 0.5
        engine.tier.sync()
        assert not engine.tier.is_joined
        while engine.jobs:
            self.end(engine)
        engine.region.lease.release()
        engine.region._lock.close()
        while len(self.engines) < 3:
            self.engines.append(self.start())
        self.take_for_dead()

    def take_for_dead(self) -> None:
        """The others look for engines that have ended, until an engine without a lease counts as one."""
        for seconds in (0.5, REMOVED_LEASE_MS / 1000, DEAD_ROWS_KEPT_MS / 1000):
            self.seconds += seconds
            for each in self.engines:
                each.tier.sync()

    # -- judgements

    def put(self, region: NodeRegion, row: int, token: bytes) -> None:
        view = region.memory.create_kv_memoryview().cast("B")
        view[row * ROW_BYTES : row * ROW_BYTES + TOKEN_BYTES] = token
        view.release()

    def get(self, region: NodeRegion, row: int) -> bytes:
        view = region.memory.create_kv_memoryview().cast("B")
        token = bytes(view[row * ROW_BYTES : row * ROW_BYTES + TOKEN_BYTES])
        view.release()
        return token

    def judge(self, engine: Engine, key: OffloadKey, token: bytes) -> None:
        assert token in self.stored, "bytes that no engine stored were loaded"
        namespace, stored_key, serial = self.stored[token]
        assert (namespace, stored_key) == (engine.namespace, key), "another chunk's bytes were loaded"
        assert serial > engine.reset_at, "a chunk of before a reset was loaded"

    def check(self) -> None:
        for engine in self.engines:
            for job in engine.jobs:
                if job.kind == "read" and job.reset_rows is None:
                    for key, row in zip(job.keys, job.rows, strict=True):
                        self.judge(engine, key, self.get(engine.region, row))
        index = self.engines[0].region.index
        free = (index.stamp_array & np.uint64(3)) == FREE
        assert not any(map(index.is_pinned, np.flatnonzero(free).tolist())), "a free row is pinned"
        entries = [index.entry(row) for row in range(self.rows)]
        if None in entries:  # published late, while another engine writes or reads the row
            assert self.seen["taken for dead"] and index.lost(0)
        held = [(entry.namespace, entry.key) for entry in entries if entry is not None and entry.namespace]
        # After a reset, the engines that did not make it may still use the row of before; one that was taken for dead
        # may publish what another has stored since; and an engine that is stopped when it has looked for a chunk may
        # claim a row for it that another one has got meanwhile.
        may_be_twice = self.seen["resets"] or self.seen["taken for dead"] or self.seen["stopped at a store"]
        assert may_be_twice or len(held) == len(set(held)), "one chunk has two rows"
        for engine in self.engines:
            assert engine.tier._left in (None, _LOCKED_OUT, _CHANGED), engine.tier._left
            pictured = engine.tier._rows
            assert {row: key for key, row in pictured.items()} == engine.tier._chunk_in
            assert engine.tier.ready <= pictured.keys()

    def finish(self) -> None:
        """No row is lost: what the killed had claimed is free again."""
        for engine in list(self.engines):
            self.kill(engine)
        for engine in self.engines:
            engine.jobs.clear()
        last = self.engines[0]
        for _ in range(6):
            self.seconds += 0.5
            last.tier.sync()
        counted = last.region.index.count()
        assert not counted[WRITING], counted
        self.seconds += FLOOR_KEPT_MS / 1000
        fresh = [OffloadKey(bytes([200 + number]) * 36) for number in range(self.rows)]
        assert last.tier.prepare_store(fresh, CONTEXT) is not None
        last.tier.complete_store(fresh, CONTEXT, True)
        assert last.region.index.count()[READY] == self.rows

    def close(self) -> None:
        """Close what the kernel closes with a process."""
        for tier in self.opened:
            tier.shutdown()


def _watch_lock(engine: Engine) -> None:
    lock = engine.region._index_lock
    acquire, release = lock.acquire, lock.release

    def noted_acquire(patience_seconds: float) -> None:
        acquire(patience_seconds)
        engine.is_changing = True

    def noted_release() -> None:
        release()
        engine.is_changing = False

    lock.acquire, lock.release = noted_acquire, noted_release  # type: ignore[method-assign]


@contextmanager
def _at_line(number: int, act: Callable[[], None]) -> Iterator[None]:
    """Act once before the line of that number which runs in the modules that share the rows."""
    left = number

    def at_line(_: FrameType, event: str, __: object) -> object:
        nonlocal left
        if event == "line":
            left -= 1
            if not left:
                sys.settrace(None)
                act()
        return at_line if left > 0 else None

    def at_call(frame: FrameType, _: str, __: object) -> object:
        return at_line if left > 0 and frame.f_code.co_filename in _SHARING else None

    former = sys.gettrace()
    sys.settrace(at_call)
    try:
        yield
    finally:
        sys.settrace(former)


class _Dying:
    """Array in the place of words, of which the engine lives to write so many more."""

    def __init__(self, words: Any, writes: int) -> None:
        self._words, self._writes = words, writes

    def __getitem__(self, at: Any) -> Any:
        return self._words[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        if not self._writes:
            raise Killed
        self._writes -= 1
        self._words[at] = value


class _DyingArray(np.ndarray[Any, np.dtype[np.uint64]]):
    writes = 0

    def __setitem__(self, at: Any, value: Any) -> None:
        super().__setitem__(at[: self.writes], value[: self.writes])
        raise Killed


def _dying_array(words: node_records.U64, writes: int) -> node_records.U64:
    dying = words.view(_DyingArray)
    dying.writes = writes
    return dying


def run(seed: int, steps: int = 120) -> Counter[str]:
    folder = Path(tempfile.mkdtemp(prefix="node-tier-", dir="/dev/shm"))
    schedule = Schedule(seed, folder)
    node_records.FEW_ROWS = schedule.random.choice(FEW_ROWS)
    try:
        schedule.run(steps)
        return schedule.seen
    except AssertionError as error:
        raise AssertionError(f"schedule {seed}: {error}") from error
    finally:
        node_records.FEW_ROWS = FEW_ROWS[-1]
        schedule.close()
        shutil.rmtree(folder, ignore_errors=True)
