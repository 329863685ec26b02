"""Steps that belong to one party: what vLLM's scheduler is shown, and that such a step leaves the scheduler as it was.

The scheduler here has vLLM's own queues and requests; `plan` stands for its `schedule`.
"""

from __future__ import annotations

import queue
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.request import Request, RequestStatus

from spillway_connector.engine.features.fair_steps import FairSteps, awaiting_others
from spillway_connector.engine.requests.tenancy import TenantContext
from spillway_connector.plan.sessions import SessionHint
from spillway_connector.plan.step_shares import FLOOD_STEPS, HELD_SHARE, LEAST_TOKENS
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.generation import RequestState
from spillway_connector.testing.vllm_parts import part_of

STEP_TOKENS, BLOCK_TOKENS, PROMPT = 1000, 16, 3000
BLOCKED = (RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
OTHER_QUEUES = ("skipped_waiting", "kv_holding_waiting")  # of 0.23; of later versions


def output_of(tokens: dict[str, int]) -> SchedulerOutput:
    return replace(
        SchedulerOutput.make_empty(), num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values())
    )


class Rig:
    def __init__(self, other_queue: str = OTHER_QUEUES[0]) -> None:
        self.clock = SteppedClock()
        self.states: dict[str, Any] = {}
        self.steps = FairSteps(self.states.get, STEP_TOKENS, self.clock)
        self.scheduler: Any = part_of(
            Scheduler,
            running=[],
            waiting=FCFSRequestQueue(),
            max_num_scheduled_tokens=STEP_TOKENS,
            num_spec_tokens=0,
            block_size=BLOCK_TOKENS,
        )
        setattr(self.scheduler, other_queue, FCFSRequestQueue())
        self.other_queue = getattr(self.scheduler, other_queue)
        self.shown: list[str] = []
        self.bound = 0

    def request(self, name: str, session: str, computed: int = 0) -> Request:
        made = Request(name, [1] * PROMPT, SamplingParams(), None)
        made.num_computed_tokens = computed
        hint = SessionHint(session.encode())
        self.states[name] = part_of(RequestState, req_context=TenantContext(req_id=name, session=hint))
        self.steps.came(self.states[name])
        return made

    def runs(self, name: str, session: str, computed: int) -> Request:
        request = self.request(name, session, computed)
        request.status = RequestStatus.RUNNING
        self.scheduler.running.append(request)
        return request

    def waits(self, name: str, session: str) -> Request:
        request = self.request(name, session)
        self.scheduler.waiting.add_request(request)
        return request

    def flood(self) -> None:
        """The session `flood` has taken more than its part, beside the session `user`."""
        self.steps._shares.came(self.party("user"), self.clock())
        self.steps._shares.computed({self.party("flood"): FLOOD_STEPS * STEP_TOKENS + 1}, self.clock())

    def party(self, session: str) -> Any:
        return self.steps._party_of(self.request(f"of {session}", session))

    def step(self, computes: int = 1) -> list[str]:
        """Returns what vLLM is shown; it computes so many tokens of each."""

        def plan() -> SchedulerOutput:
            scheduler = self.scheduler
            running = [each for each in scheduler.running if each.next_decode_eligible_step == 0]
            shown = [*running, *self.other_queue, *scheduler.waiting]
            self.shown = [each.request_id for each in shown]
            self.bound = scheduler.max_num_scheduled_tokens
            tokens = Counter({name: computes for name in self.shown})
            return output_of(tokens)

        self.steps.schedule(self.scheduler, plan)
        assert all(each.next_decode_eligible_step == 0 for each in self.scheduler.running)
        assert self.scheduler.max_num_scheduled_tokens == STEP_TOKENS
        return self.shown


def test_a_session_alone_has_vllms_steps() -> None:
    rig = Rig()
    rig.runs("a", "flood", computed=500)
    rig.waits("b", "flood")
    assert rig.step() == ["a", "b"] and rig.bound == STEP_TOKENS


def test_a_step_of_the_user_leaves_the_flood_out_and_the_next_one_its_prompts_alone() -> None:
    rig = Rig()
    rig.flood()
    rig.runs("begun", "flood", computed=500)
    rig.runs("decodes", "flood", computed=PROMPT - 1)
    rig.runs("answers", "user", computed=PROMPT - 1)
    rig.waits("next", "flood")
    rig.waits("asked", "user")

    assert rig.step() == ["answers", "asked"]
    assert rig.bound == STEP_TOKENS
    assert [each.request_id for each in rig.scheduler.waiting] == ["asked", "next"]
    assert rig.step() == ["decodes", "answers", "asked"]
    assert rig.step() == ["answers", "asked"]


def test_a_flood_that_decodes_alone_is_left_out_of_a_step_of_the_user_too() -> None:
    rig = Rig()
    rig.flood()
    rig.runs("decodes", "flood", computed=PROMPT - 1)
    rig.waits("asked", "user")
    assert [rig.step(), rig.step()] == [["asked"], ["decodes", "asked"]]


def test_a_step_of_the_flood_has_few_tokens_besides_those_that_decode() -> None:
    rig = Rig()
    rig.flood()
    rig.runs("begun", "flood", computed=500)
    for number in range(10):
        rig.runs(f"decodes {number}", "user", computed=PROMPT - 1)

    assert rig.step()[-1] == "begun"
    assert rig.bound == 10 + LEAST_TOKENS


def test_a_short_step_has_room_for_a_block_and_for_drafts() -> None:
    rig = Rig()
    rig.scheduler.block_size, rig.scheduler.num_spec_tokens = 512, 2
    rig.flood()
    rig.runs("begun", "flood", computed=500)
    rig.runs("decodes", "user", computed=PROMPT - 1)
    rig.step()
    assert rig.bound == 3 + 512


def test_a_prompt_that_was_overtaken_takes_no_step_from_those_that_decode() -> None:
    """vLLM gives out a step's tokens in the order of its running requests."""
    rig = Rig()
    rig.runs("begun", "flood", computed=500)
    rig.runs("begun too", "other", computed=500)
    rig.runs("answers", "user", computed=PROMPT - 1)
    rig.runs("decodes", "flood", computed=PROMPT - 1)
    in_order = ["answers", "decodes", "begun", "begun too"]
    assert rig.step() == in_order, "without a flood"
    rig.runs("answers too", "user", computed=PROMPT - 1)
    rig.flood()
    rig.step()
    assert [each.request_id for each in rig.scheduler.running] == [*in_order[:2], "answers too", *in_order[2:]]


def test_a_flood_whose_drafts_are_verified_decodes_in_every_step() -> None:
    """vLLM's worker has the drafts of its last step alone, and reads a placeholder as a token for others."""
    rig = Rig()
    rig.scheduler.num_spec_tokens = 2
    rig.flood()
    rig.runs("begun", "flood", computed=500)
    rig.runs("decodes", "flood", computed=PROMPT - 1)
    rig.waits("asked", "user")
    assert [rig.step(), rig.step()] == [["decodes", "asked"]] * 2


@pytest.mark.parametrize("other_queue", OTHER_QUEUES)
def test_what_waits_in_vllms_other_queue_is_left_out_too_and_keeps_its_order(other_queue: str) -> None:
    rig = Rig(other_queue)
    rig.flood()
    for name in ("loads", "loads too"):
        loads = rig.request(name, "flood")
        loads.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        rig.other_queue.add_request(loads)
    for name in ("first", "second"):
        rig.waits(name, "flood")
    rig.waits("asked", "user")

    assert rig.step() == ["asked"]
    assert [each.request_id for each in rig.other_queue] == ["loads", "loads too"]
    assert [each.request_id for each in rig.scheduler.waiting] == ["asked", "first", "second"]


@pytest.mark.parametrize("status", BLOCKED)
def test_a_user_who_is_not_ready_keeps_no_step_from_the_flood_and_is_in_each(status: RequestStatus) -> None:
    """vLLM looks only at the requests that it plans to see whether a load or a grammar is done."""
    rig = Rig()
    rig.flood()
    rig.runs("begun", "flood", computed=500)
    loading = rig.request("loading", "user")
    loading.status = status
    rig.other_queue.add_request(loading)

    assert rig.step() == ["begun", "loading"]
    assert rig.bound == LEAST_TOKENS


def test_a_step_that_computes_nothing_of_the_user_is_followed_by_one_of_what_the_flood_has_begun() -> None:
    rig = Rig()
    rig.flood()
    rig.runs("begun", "flood", computed=500)
    rig.waits("next", "flood")
    rig.waits("asked", "user")
    loading = rig.request("loading", "user")
    loading.status = BLOCKED[0]
    rig.other_queue.add_request(loading)

    assert rig.step(computes=0) == ["loading", "asked"]
    assert rig.step(computes=0) == ["begun", "loading"], "the next prompt would take the blocks that the user waits for"
    assert rig.bound == STEP_TOKENS
    assert sorted(rig.step()) == ["asked", "begun", "loading", "next"] and rig.bound == STEP_TOKENS


def test_the_flood_decodes_in_a_step_of_the_user_that_may_have_no_room_either() -> None:
    rig = Rig()
    rig.flood()
    rig.runs("begun", "flood", computed=500)
    rig.runs("decodes", "flood", computed=PROMPT - 1)
    rig.waits("asked", "user")

    assert rig.step(computes=0) == ["asked"]
    assert rig.step() == ["decodes", "begun"], "a step of the flood"
    assert rig.step() == ["decodes", "asked"], "blocks may be short still"
    assert rig.step() == ["asked"], "there was room"


def test_a_step_that_fails_leaves_the_scheduler_as_it_was() -> None:
    rig = Rig()
    rig.flood()
    begun = rig.runs("begun", "flood", computed=500)
    rig.waits("asked", "user")

    def plan() -> Any:
        raise MemoryError

    with pytest.raises(MemoryError):
        rig.steps.schedule(rig.scheduler, plan)
    assert begun.next_decode_eligible_step == 0
    assert rig.scheduler.max_num_scheduled_tokens == STEP_TOKENS


def test_a_mark_that_another_rule_sets_within_the_step_stays() -> None:
    rig = Rig()
    rig.flood()
    begun = rig.runs("begun", "flood", computed=500)
    rig.waits("asked", "user")

    def plan() -> SchedulerOutput:
        begun.next_decode_eligible_step = 7
        return output_of({"asked": 1})

    rig.steps.schedule(rig.scheduler, plan)
    assert begun.next_decode_eligible_step == 7


# --- when a step is planned ------------------------------------------------------------------------------------------


class InputQueue:
    """Time passes while the engine waits for a request; the one that comes does so half a step later."""

    def __init__(self, rig: Rig, *coming: str) -> None:
        self._rig, self._coming = rig, list(coming)

    def get(self, timeout: float) -> tuple[str, str]:
        seconds = STEP_SECONDS / 2 if self._coming else timeout
        self._rig.clock.advance(min(timeout, seconds))
        if not self._coming or timeout < seconds:
            raise queue.Empty
        return "ADD", self._coming.pop(0)


STEP_SECONDS = 0.02


def a_flood_whose_steps_were_measured() -> Rig:
    rig = Rig()
    rig.runs("begun", "flood", computed=500)
    for _ in range(2):  # since half of one decays
        rig.flood()
    for _ in range(6):
        rig.clock.advance(STEP_SECONDS)
        rig.step(computes=STEP_TOKENS)
    return rig


def seconds_until_planned(rig: Rig, *coming: str, under_way: bool = True) -> float:
    """Return how long the engine takes requests before it plans. coming: their sessions."""
    connector = SimpleNamespace(scheduler_features=[rig.steps])
    core: Any = part_of(
        EngineCoreProc,
        scheduler=part_of(Scheduler, connector=connector),
        batch_queue=[object()] if under_way else None,
        input_queue=InputQueue(rig, *coming),
        _handle_client_request=lambda _, session: rig.request(f"comes of {session}", session),
    )
    came_first: list[object] = []
    began = rig.clock()
    awaiting_others(came_first.append)(core)
    assert came_first == [core]
    return rig.clock() - began


def test_the_step_behind_one_of_a_flood_is_planned_when_much_of_that_is_over() -> None:
    assert seconds_until_planned(a_flood_whose_steps_were_measured()) == pytest.approx(HELD_SHARE * STEP_SECONDS)


def test_a_step_is_planned_at_once_if_a_user_comes_and_not_if_the_flood_does() -> None:
    rig = a_flood_whose_steps_were_measured()
    assert seconds_until_planned(rig, "flood") == pytest.approx(HELD_SHARE * STEP_SECONDS)
    rig.step(computes=STEP_TOKENS)
    assert seconds_until_planned(rig, "user") == pytest.approx(STEP_SECONDS / 2)


def test_a_step_is_planned_at_once_behind_one_of_a_flood_that_had_no_room() -> None:
    rig = a_flood_whose_steps_were_measured()
    rig.step(computes=0)
    assert seconds_until_planned(rig) == 0


def test_a_step_is_planned_at_once_if_none_is_under_way_and_behind_one_of_the_user() -> None:
    rig = a_flood_whose_steps_were_measured()
    assert seconds_until_planned(rig, under_way=False) == 0
    rig.waits("asked", "user")
    rig.step()
    assert seconds_until_planned(rig) == 0
