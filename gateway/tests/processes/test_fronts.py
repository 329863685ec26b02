"""Two fronts and the process that counts and routes for both, over real HTTP and engines; each front has a port."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
import yaml

from spillway_gateway.access.keys import hash_key
from spillway_gateway.processes import fronts as fronts_module
from spillway_gateway.processes.fronts import is_stopped
from spillway_gateway.processes.messages import Frames, Routed, append_frame, from_router
from spillway_gateway.testing.faults import HoldInStream, Slow, Status
from spillway_gateway.testing.kv_publisher import KvPublisher
from spillway_gateway.testing.running import UNTIL_SECONDS_MAX, gateway_config, until
from spillway_gateway.testing.running_fronts import RunningFronts, running_fronts

KEY = "sk-" + "a" * 40
OPERATOR = "sk-" + "o" * 40
PROMPT = list(range(200))


def limited(folder: Path, **limits: int) -> dict[str, str]:
    tenants = [
        {"name": "a", "keys": [hash_key(KEY)], **limits},
        {"name": "operator", "keys": [hash_key(OPERATOR)], "operator": True},
    ]
    (folder / "keys.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    (folder / "salt").write_text("s" * 32)
    return {"keysFile": str(folder / "keys.yaml"), "saltSecretFile": str(folder / "salt")}


def ask(http: aiohttp.ClientSession, url: str, **fields: Any) -> Any:
    body = {"model": "fake", "prompt": PROMPT, **fields}
    return http.post(url + "/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}"})


async def status_of(http: aiohttp.ClientSession, url: str, **fields: Any) -> tuple[int, dict[str, str]]:
    async with ask(http, url, **fields) as reply:
        await reply.read()
        return reply.status, {name.lower(): value for name, value in reply.headers.items()}


def running_requests(fronts: RunningFronts) -> int:
    return sum(engine.running_requests for fleet in fronts.gateway.fleets for engine in fleet.engines.values())


async def once(condition: Callable[[], object], act: Callable[[], None]) -> None:
    """Act before what made the condition hold is written to a socket."""
    loop, acted = asyncio.get_running_loop(), asyncio.Event()

    def look() -> None:
        if condition():
            act()
            acted.set()
        else:
            loop.call_soon(look)

    look()
    async with asyncio.timeout(120):
        await acted.wait()


async def sums(http: aiohttp.ClientSession, fronts: RunningFronts, series: str) -> float:
    async with http.get(fronts.ops_url + "/metrics") as reply:
        text = await reply.text()
    return sum(float(found) for found in re.findall(rf"^{series}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))


async def test_a_prompt_sent_by_one_process_is_found_by_the_other(start_engine: Any) -> None:
    engines = [await start_engine(f"fake-{at}", publisher=KvPublisher()) for at in range(3)]
    async with running_fronts(gateway_config(engines)) as fronts, aiohttp.ClientSession() as http:
        first, second = fronts.urls
        status, headers = await status_of(http, first)
        assert status == 200
        index = fronts.gateway.fleets[0].index
        await until(lambda: index.blocks >= 192 // 16)
        await until(lambda: all(front.reported_sizes() == (16,) for front in fronts.started))
        found = [await status_of(http, url) for url in (second, first, second)]

        assert [headers["x-spillway-engine"] for _, headers in found] == 3 * [headers["x-spillway-engine"]]
        assert [headers["x-spillway-prefix-tokens"] for _, headers in found] == 3 * ["192"]
        assert await sums(http, fronts, "spillway_gateway_requests_total") == 4
        assert await sums(http, fronts, "spillway_gateway_event_batches_total") == 192 // 16  # each once
        await until(lambda: running_requests(fronts) == 0)
        state = await (await http.get(fronts.ops_url + "/ui/state")).json()
        assert len(state["decisions"]) == 4


async def test_routing_sees_the_requests_of_both_processes(start_engine: Any) -> None:
    release = asyncio.Event()
    engines = [await start_engine(f"fake-{at}") for at in range(2)]
    for engine in engines:
        engine.fault = HoldInStream(2, release)
    async with running_fronts(gateway_config(engines)) as fronts, aiohttp.ClientSession() as http:
        replies = []
        for at in range(8):
            prompt = [1000 * at + token for token in range(100)]
            replies.append(await ask(http, fronts.urls[at % 2], prompt=prompt, stream=True))
        running = [engine.running_requests for engine in fronts.gateway.fleets[0].engines.values()]
        assert running == [4, 4]
        release.set()
        for reply in replies:
            assert (await reply.read()).endswith(b"data: [DONE]\n\n")
        await until(lambda: running_requests(fronts) == 0)


async def test_limits_hold_over_both_processes_together(start_engine: Any, tmp_path: Path) -> None:
    release = asyncio.Event()
    engine = await start_engine()
    engine.fault = HoldInStream(2, release)
    config = gateway_config([engine], auth=limited(tmp_path, concurrentRequestsMax=5))
    async with running_fronts(config) as fronts, aiohttp.ClientSession() as http:
        replies = await asyncio.gather(*(ask(http, fronts.urls[at % 2], stream=True) for at in range(12)))
        assert sorted(reply.status for reply in replies) == 5 * [200] + 7 * [429]
        release.set()
        for reply in replies:
            await reply.read()
        again = await asyncio.gather(*(status_of(http, fronts.urls[at % 2]) for at in range(5)))
        assert [status for status, _ in again] == 5 * [200]


async def test_a_rate_is_one_for_both_processes(start_engine: Any, tmp_path: Path) -> None:
    engine = await start_engine()
    config = gateway_config([engine], auth=limited(tmp_path, requestsPerMinute=6))
    async with running_fronts(config) as fronts, aiohttp.ClientSession() as http:
        fronts.gateway.gatekeeper._clock = lambda: 1000.0  # no time passes
        answers = [await status_of(http, fronts.urls[at % 2]) for at in range(10)]

    assert [status for status, _ in answers] == 6 * [200] + 4 * [429]
    assert all(int(headers["retry-after"]) >= 10 for status, headers in answers if status == 429)


async def test_the_queue_before_full_engines_is_one(start_engine: Any) -> None:
    release = asyncio.Event()
    engine = await start_engine()
    engine.fault = HoldInStream(2, release)
    admission = {"requestsPerEngineMax": 1, "waitingRequestsMax": 2}
    async with running_fronts(gateway_config([engine], admission=admission)) as fronts, aiohttp.ClientSession() as http:
        first = await ask(http, fronts.urls[0], stream=True)
        queue = fronts.gateway.admissions["fake"]
        waiting = asyncio.create_task(status_of(http, fronts.urls[1], stream=True))
        given_up = asyncio.create_task(status_of(http, fronts.urls[0], stream=True))
        await until(lambda: queue.waiting_requests == 2)
        refused, _ = await status_of(http, fronts.urls[1])
        assert refused == 503

        given_up.cancel()  # its client disconnects
        await until(lambda: queue.waiting_requests == 1)
        release.set()
        assert (await first.read()).endswith(b"data: [DONE]\n\n")
        assert (await waiting)[0] == 200
        await until(lambda: queue.admitted_requests == 0)


async def test_a_process_that_dies_gives_back_what_it_held_and_is_started_again(
    start_engine: Any, tmp_path: Path
) -> None:
    release = asyncio.Event()
    engine = await start_engine()
    config = gateway_config([engine], auth=limited(tmp_path, concurrentRequestsMax=3))
    async with running_fronts(config) as fronts, aiohttp.ClientSession() as http:
        assert (await status_of(http, fronts.urls[0]))[0] == 200
        await sums(http, fronts, "spillway_gateway_requests_total")  # counts of the first process are sent
        engine.fault = HoldInStream(2, release)
        held = [await ask(http, fronts.urls[0], stream=True) for _ in range(2)]
        other = await ask(http, fronts.urls[1], stream=True)
        assert (await status_of(http, fronts.urls[1]))[0] == 429
        fronts.started[0].kill()
        await until(lambda: running_requests(fronts) == 1)
        release.set()
        assert (await other.read()).endswith(b"data: [DONE]\n\n")
        for reply in held:
            reply.close()

        await until(lambda: len(fronts.started) == 3 and fronts.server.fronts.listening == 2)
        answers = [await status_of(http, url) for url in fronts.urls[1:]]
        assert [status for status, _ in answers] == [200, 200]
        assert await sums(http, fronts, "spillway_gateway_process_restarts_total") == 1
        assert await sums(http, fronts, "spillway_gateway_requests_total") >= 4
        await until(lambda: fronts.gateway.admissions["fake"].admitted_requests == 0)


async def test_the_engine_of_a_waiting_request_is_told_its_prefix(start_engine: Any) -> None:
    publisher, known, store = KvPublisher(), list(range(1000, 1032)), "nvme/0123456789abcdef"
    engine = await start_engine(publisher=publisher)
    publisher.stored([1, 2], None, known, 16)
    publisher.stored([1, 2], None, [], 0, medium=store)
    publisher.removed([1, 2])
    engine.fault = HoldInStream(2, asyncio.Event())
    config = gateway_config([engine], admission={"requestsPerEngineMax": 1})
    async with running_fronts(config) as fronts, aiohttp.ClientSession() as http:
        index = fronts.gateway.fleets[0].index
        await until(lambda: index.shared_reach_of("fake-0").blocks == {"nvme": 2})
        held = await ask(http, fronts.urls[0], stream=True)
        await until(lambda: all(front.reported_full() for front in fronts.started))
        waiting = asyncio.create_task(status_of(http, fronts.urls[1], prompt=known + PROMPT))
        await until(lambda: [seen for seen in engine.seen if seen.path == "/spillway/promote"])
        (hint,) = [json.loads(seen.body) for seen in engine.seen if seen.path == "/spillway/promote"]
        assert hint["token_ids"] == known
        waiting.cancel()
        held.close()


async def test_a_process_that_hangs_is_ended_and_replaced(start_engine: Any) -> None:
    engine = await start_engine()
    async with running_fronts(gateway_config([engine])) as fronts, aiohttp.ClientSession() as http:
        fronts.server.fronts.silent_looks_max = 1  # less than what passes between two counts
        await until(lambda: fronts.server.fronts.restarts_total)
        fronts.server.fronts.silent_looks_max = 1000
        await until(lambda: fronts.server.fronts.listening == 2)
        assert (await status_of(http, fronts.urls[-1]))[0] == 200


async def test_a_decision_with_all_its_candidates_passes(start_engine: Any) -> None:
    engines = [await start_engine(f"fake-{at}") for at in range(3)]
    async with running_fronts(gateway_config(engines)) as fronts, aiohttp.ClientSession() as http:
        await status_of(http, fronts.urls[0])
        decision = fronts.gateway.recent.decisions[-1].decision
    buffer = bytearray()
    routed = Routed(1, decision, 0.5)
    append_frame(routed, buffer)
    assert len(decision.candidates) == 3
    assert Frames(from_router).feed(bytes(buffer)) == [routed]


async def test_what_one_process_finds_out_about_an_engine_the_other_knows(start_engine: Any) -> None:
    engines = [await start_engine(f"fake-{at}") for at in range(2)]
    document = gateway_config(engines)
    document["health"] = {"periodSeconds": 30}
    async with running_fronts(document) as fronts, aiohttp.ClientSession() as http:
        _, headers = await status_of(http, fronts.urls[0])
        stopped = next(engine for engine in engines if engine.name == headers["x-spillway-engine"])
        await stopped.stop()
        status, headers = await status_of(http, fronts.urls[0])
        assert (status, headers["x-spillway-route"]) == (200, "retry")
        await until(lambda: not fronts.gateway.fleets[0].engines[stopped.name].routable)
        status, headers = await status_of(http, fronts.urls[1])
        assert (status, headers["x-spillway-route"]) == (200, "only")


async def test_requests_leave_an_engine_that_hangs(start_engine: Any) -> None:
    engines = [await start_engine(f"fake-{at}") for at in range(2)]
    config = gateway_config(engines)
    config["health"] = {"periodSeconds": 30}
    async with running_fronts(config) as fronts, aiohttp.ClientSession() as http:
        _, headers = await status_of(http, fronts.urls[0])
        hung = next(engine for engine in engines if engine.name == headers["x-spillway-engine"])
        hung.fault = Slow(3600, 0)
        waiting = asyncio.create_task(status_of(http, fronts.urls[1], stream=True))
        engine = fronts.gateway.fleets[0].engines[hung.name]
        await once(lambda: engine.running_requests, lambda: engine.hung("polls time out"))
        async with asyncio.timeout(120):  # less than a request waits for a first byte
            status, headers = await waiting
        assert (status, headers["x-spillway-route"]) == (200, "retry")


async def test_a_stored_response_is_found_through_either_process(start_engine: Any) -> None:
    engines = [await start_engine(f"fake-{at}") for at in range(3)]
    async with running_fronts(gateway_config(engines)) as fronts, aiohttp.ClientSession() as http:
        body = {"model": "fake", "input": "hello"}
        async with http.post(fronts.urls[0] + "/v1/responses", json=body) as reply:
            response, engine = await reply.json(), reply.headers["x-spillway-engine"]
        for url in fronts.urls:
            async with http.get(f"{url}/v1/responses/{response['id']}") as reply:
                assert (reply.status, reply.headers["x-spillway-engine"]) == (200, engine)
        async with http.get(fronts.urls[1] + "/v1/responses/resp_unknown") as reply:
            assert reply.status == 404


async def test_a_changed_configuration_reaches_all_processes(start_engine: Any, tmp_path: Path) -> None:
    engines = [await start_engine(f"fake-{at}") for at in range(2)]
    document = gateway_config(engines[:1], aliases=["old"], reload={"periodSeconds": 0.05})
    path = tmp_path / "gateway.yaml"
    path.write_text(yaml.safe_dump({**document, "processes": 2}))
    async with running_fronts(document, config_path=path) as fronts, aiohttp.ClientSession() as http:
        document = gateway_config(engines[1:], aliases=["new"], reload={"periodSeconds": 0.05})
        path.write_text(yaml.safe_dump({**document, "processes": 2}))
        await until(lambda: all("new" in front._gateway.models for front in fronts.started))
        async with asyncio.timeout(UNTIL_SECONDS_MAX):
            # Until the new engine was asked for its state, which nothing announces.
            while (await status_of(http, fronts.urls[0], model="new"))[0] == 503:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for url in fronts.urls:
            status, headers = await status_of(http, url, model="new")
            assert (status, headers["x-spillway-engine"]) == (200, "fake-1")
            assert (await status_of(http, url, model="old"))[0] == 404


async def test_operators_ask_any_process_where_there_is_one_port(start_engine: Any, tmp_path: Path) -> None:
    engine = await start_engine()
    async with (
        running_fronts(gateway_config([engine], auth=limited(tmp_path))) as fronts,
        aiohttp.ClientSession() as http,
    ):
        await status_of(http, fronts.urls[0])
        for url in fronts.urls:
            for key, status in ((KEY, 403), (OPERATOR, 200)):
                async with http.get(url + "/metrics", headers={"authorization": f"Bearer {key}"}) as reply:
                    assert reply.status == status
                    text = await reply.text()
            assert re.search(r'^spillway_gateway_requests_total\{.*status="2xx"\} 1.0$', text, re.MULTILINE)
            async with http.get(url + "/ui/") as reply:
                assert reply.status == 200
                assert reply.headers["content-security-policy"]


async def test_each_process_drains_its_streams(start_engine: Any) -> None:
    release = asyncio.Event()
    engine = await start_engine()
    engine.fault = HoldInStream(2, release)
    async with running_fronts(gateway_config([engine])) as fronts, aiohttp.ClientSession() as http:
        replies = [await ask(http, url, stream=True) for url in fronts.urls]
        fronts.server.begin_shutdown()
        async with http.get(fronts.ops_url + "/ready") as reply:
            assert reply.status == 503
        await until(
            lambda: all(front._server.servers == [] or front._gateway.lifecycle.draining for front in fronts.started)
        )
        release.set()
        for reply in replies:
            assert (await reply.read()).endswith(b"data: [DONE]\n\n")
        assert [await front.wait() for front in fronts.started] == [0, 0]


async def test_an_error_of_the_router_is_the_client_s_error(start_engine: Any) -> None:
    engine = await start_engine()
    async with running_fronts(gateway_config([engine])) as fronts, aiohttp.ClientSession() as http:
        engine.ready = (503, {"ready": False, "reason": "loading"})
        await until(lambda: not fronts.gateway.fleets[0].engines["fake-0"].routable)
        for url in fronts.urls:
            async with ask(http, url) as reply:
                assert reply.status == 503
                assert (await reply.json())["error"]["code"] == "no_engine_ready"
        engine.ready = (200, {"ready": True})
        engine.fault = Status(503)
        await until(lambda: fronts.gateway.fleets[0].engines["fake-0"].routable)
        assert (await status_of(http, fronts.urls[0]))[0] == 503
        await until(lambda: running_requests(fronts) == 0)


async def test_engines_that_are_all_lost_for_a_moment_cost_time_and_no_answer(start_engine: Any) -> None:
    engines = [await start_engine(name) for name in "ab"]
    document = gateway_config(engines, health={"periodSeconds": 3600, "returnSeconds": UNTIL_SECONDS_MAX})
    async with running_fronts(document) as fronts, aiohttp.ClientSession() as http:
        for engine in engines:
            await engine.stop()
        (admission,) = fronts.gateway.admissions.values()
        first = asyncio.create_task(status_of(http, fronts.urls[0]))
        await until(lambda: admission.waiting_requests == 1)
        asked = [first, *(asyncio.create_task(status_of(http, url)) for url in fronts.urls)]
        await until(lambda: admission.waiting_requests == len(asked))
        for engine in engines:
            await engine.start(engine.port)

        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * len(asked)
        await until(lambda: running_requests(fronts) == 0)


async def test_the_gateway_is_ready_while_a_process_serves(start_engine: Any) -> None:
    engine = await start_engine()
    async with running_fronts(gateway_config([engine]), count=3) as fronts, aiohttp.ClientSession() as http:
        assert await sums(http, fronts, "spillway_gateway_serving_processes") == 3
        assert (await http.get(fronts.ops_url + "/ready")).status == 200
        fronts.server.fronts._draining = True  # none is started again
        for front in fronts.started:
            front.kill()
        await until(lambda: fronts.server.fronts.listening == 0)
        async with http.get(fronts.ops_url + "/ready") as reply:
            assert (reply.status, (await reply.json())["reason"]) == (503, "no process accepts connections yet")


async def test_a_process_that_a_signal_has_stopped_is_told_from_a_running_one() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
    assert not is_stopped(process.pid)

    process.send_signal(signal.SIGSTOP)
    await until(lambda: is_stopped(process.pid))
    process.kill()
    await process.wait()

    assert not is_stopped(process.pid)


async def test_a_front_that_is_stopped_is_killed_after_a_few_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in looks: a front that only says nothing has many more of them."""

    class Stopped:
        pid = 1
        killed = False

        def kill(self) -> None:
            self.killed = True

    looks: list[int] = []

    def stopped(pid: int) -> bool:
        looks.append(pid)
        return len(looks) not in (1, 3)

    monkeypatch.setattr(fronts_module, "is_stopped", stopped)
    fronts = fronts_module.Fronts(1, lambda *_: None, lambda: iter(()))  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(fronts_module, "LOOK_SECONDS", 0.0)
    process, session = Stopped(), Mock(has_spoken=lambda: True)
    await fronts._watch(session, process)  # type: ignore[arg-type]

    assert process.killed
    assert len(looks) == 3 + fronts_module.STOPPED_LOOKS_MAX
