"""One engine's core is killed again and again, as soon as it has requests, while clients ask without a pause."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from stack_driver.deadlines import eventually
from stack_driver.engine_processes import engine_core, vllm_group
from stack_driver.known_answers import KnownAnswers
from stack_driver.shared_stores import NvmeStore

from .dialects import DIALECTS, Crowd, Exchange, body_of
from .fleet import Fleet, words

PART = "kills"
KILLS = 3
VICTIM = 0
CLIENTS = 8  # one plain and one stream of each dialect, at any time
REQUESTS_AT_KILL = 2  # a request that is alone on an engine which ends is not sent again
PROMPT_WORDS = 120
TOKENS_MAX = 8


def run(fleet: Fleet) -> None:
    fleet.ready()
    stack, name = fleet.stack, f"engine-{VICTIM}"
    known = [stack.compute_and_store(engine) for engine in stack.engines]
    restarts = stack.component(name).restarts
    others = [core for index, core in enumerate(fleet.cores()) if index != VICTIM]
    with _load(fleet) as crowd:
        for _ in range(KILLS):
            before = stack.process(name)
            group = vllm_group(before)
            eventually(
                f"{name} has requests", lambda: stack.engines[VICTIM].running() >= REQUESTS_AT_KILL, timeout_seconds=600
            )
            engine_core(group).signal(signal.SIGKILL)
            stack.local.wait_engine_ready(VICTIM, not_process=before)
    exchanges = crowd.join()
    fleet.ready()

    failed = [one for one in exchanges if not one.answered]
    interrupted = [one for one in failed if one.stream and one.parts and one.error_is_clear]
    lost = [one for one in failed if one not in interrupted]
    seen = f"{len(interrupted)} streams interrupted with a clear error, {len(lost)} lost"
    case = f"kill -9 of one core {KILLS} times, {len(exchanges)} requests, plain and streams"
    fleet.rows.add(PART, case, seen, not lost and len(exchanges) > KILLS * CLIENTS)
    for one in lost[:8]:
        print("     ", one, flush=True)
    started = stack.component(name).restarts - restarts
    seen = f"{started} times; {fleet.lost_since(others)} other engines lost"
    fleet.rows.add(PART, "started again", seen, started == KILLS and not fleet.lost_since(others))
    _show_tier(fleet, known)


def _show_tier(fleet: Fleet, known: list[KnownAnswers]) -> None:
    stack = fleet.stack
    stored, store = stack.stored(), stack.store
    assert isinstance(store, NvmeStore)
    whole = store.holds(store.blocks())
    fleet.rows.add(PART, "the shared tier's blocks", f"{stored}, all whole: {whole}", whole and stored > 0)
    answers = [stack.ask_shared(engine, one) for one in known for engine in stack.engines]  # compared there
    loaded = sum(answer.source == "shared" for answer in answers)
    fleet.rows.add(PART, "what was stored before", f"loaded {loaded} of {len(answers)} times", loaded == len(answers))


@contextmanager
def _load(fleet: Fleet) -> Iterator[Crowd]:
    """Each client sends a request when it has the reply to its last one, until the block ends."""
    crowd, over, numbers = Crowd(fleet.gateway), threading.Event(), itertools.count()

    def ask(dialect: str, stream: bool) -> None:
        while not over.is_set():
            name = f"kills-{dialect}-{'stream' if stream else 'plain'}-{next(numbers)}"
            body = body_of(dialect, fleet.model, words(name, PROMPT_WORDS), TOKENS_MAX, stream=stream)
            one: Exchange = crowd.send(name, dialect, body)
            one.ended.wait()

    kinds = itertools.islice(itertools.cycle(itertools.product(DIALECTS, (False, True))), CLIENTS)
    clients = [threading.Thread(target=ask, args=kind, daemon=True) for kind in kinds]
    for client in clients:
        client.start()
    try:
        yield crowd
    finally:
        over.set()
        for client in clients:
            client.join()
