"""The simulator over real sockets: OpenAI surface, events with replay, metrics, faults."""

from __future__ import annotations

import asyncio
import json

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from spillway_simulator.model.events import Medium

STORE = Medium.SHARED.value
CHAT = {"messages": [{"role": "user", "content": "tell me about tides and the moon"}], "max_tokens": 5}


def events_of(payload):
    return msgspec.msgpack.decode(payload)[1]


async def announced(host):
    """The media under which the present process has stored anything, in order."""
    frames = await replayed(host.publisher.replay_url)
    return [event[6] for frame in frames[:-1] for event in events_of(frame[-1]) if event[0] == "BlockStored"]


async def fault(client, simulator, **document):
    name = document.pop("engine", "engine-0")
    return await client.post(f"{simulator.admin_url}/engines/{name}/fault", json=document)


async def listening(url):
    """The port answers again; bounded by the test's own timeout."""
    while True:
        try:
            async with httpx.AsyncClient(timeout=120) as client:
                return await client.get(f"{url}/health")
        except httpx.TransportError:
            await asyncio.sleep(0)


async def replayed(url, start=0, count=None):
    """All frames of one replay, the end marker included."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.connect(url)
        await socket.send_multipart([b"", start.to_bytes(8, "big")])
        frames = [await socket.recv_multipart()]
        while frames[-1][-2] != b"\xff" * 8:
            frames.append(await socket.recv_multipart())
        return frames
    finally:
        socket.close(linger=0)
        context.term()


async def test_answers_are_deterministic_and_say_that_they_are_simulated(simulator):
    async with simulator(engines=2) as running, httpx.AsyncClient(timeout=120) as client:
        replies = [await client.post(f"{host.url}/v1/chat/completions", json=CHAT) for host in running.hosts]
        documents = [reply.json() for reply in replies]
        assert {reply.headers["x-spillway-simulated"] for reply in replies} == {"true"}
        assert {document["system_fingerprint"] for document in documents} == {"spillway-simulator"}
        first, second = (document["choices"][0]["message"]["content"] for document in documents)
        assert first == second and len(first) == 15
        for path in ("/health", "/ready", "/v1/models", "/metrics", "/version", "/spillway/config", "/nothing"):
            assert (await client.get(running.hosts[0].url + path)).headers["x-spillway-simulated"] == "true"


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
async def test_a_stream_is_the_plain_reply_in_pieces(simulator, route):
    body = CHAT if route.startswith("chat") else {"prompt": "once upon a time", "max_tokens": 5}
    async with simulator() as running, httpx.AsyncClient(timeout=120) as client:
        url = f"{running.hosts[0].url}/v1/{route}"
        plain = (await client.post(url, json=body)).json()
        streamed = await client.post(url, json={**body, "stream": True, "stream_options": {"include_usage": True}})
        *lines, done = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
        documents = [json.loads(line) for line in lines]
        assert done == "[DONE]"
        assert {document["system_fingerprint"] for document in documents} == {"spillway-simulator"}
        choices = [document["choices"][0] for document in documents if document["choices"]]
        text = "".join(choice["delta"]["content"] if "delta" in choice else choice["text"] for choice in choices)
        message = plain["choices"][0]
        assert text == (message["message"]["content"] if "message" in message else message["text"])
        assert choices[-1]["finish_reason"] == message["finish_reason"] == "length"
        assert documents[-1]["usage"]["completion_tokens"] == 5


async def test_the_next_turn_finds_prompt_and_answer(simulator):
    async with simulator() as running, httpx.AsyncClient(timeout=120) as client:
        url = f"{running.hosts[0].url}/v1/chat/completions"
        first = (await client.post(url, json={**CHAT, "max_tokens": 20, "ignore_eos": True})).json()
        assert first["usage"]["prompt_tokens_details"] is None
        conversation = [*CHAT["messages"], first["choices"][0]["message"], {"role": "user", "content": "and now?"}]
        second = (await client.post(url, json={"messages": conversation, "max_tokens": 1})).json()
        known = first["usage"]["prompt_tokens"] + 20 - 1  # the last token of an answer is never computed
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == known // 4 * 4


async def test_tokenize_render_and_detokenize_agree_with_what_is_cached(simulator):
    async with simulator() as running, httpx.AsyncClient(timeout=120) as client:
        url = running.hosts[0].url
        tokens = (await client.post(f"{url}/tokenize", json=CHAT)).json()["tokens"]
        rendered = (await client.post(f"{url}/v1/chat/completions/render", json={**CHAT, "cache_salt": "s"})).json()
        assert rendered["token_ids"] == tokens and rendered["cache_salt"] == "s"
        text = (await client.post(f"{url}/detokenize", json={"tokens": tokens})).json()["prompt"]
        assert text == CHAT["messages"][0]["content"]
        await client.post(f"{url}/v1/completions", json={"prompt": tokens, "max_tokens": 1})
        again = (await client.post(f"{url}/v1/chat/completions", json=CHAT)).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(tokens) - 1) // 4 * 4


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"messages":[]}', 400),
        (b'{"messages":[{"role":"user","content":7}]}', 400),
        (b'{"messages":[{"role":"user","content":"x"}],"n":2}', 400),
        (b'{"messages":[{"role":"user","content":"x"}],"max_tokens":-1}', 400),
        (b'{"messages":[{"role":"user","content":"x"}],"max_tokens":99999999}', 400),
        (b'{"messages":[{"role":"user","content":"x"}],"model":"other"}', 404),
    ],
)
async def test_bad_bodies_are_refused_with_a_reason(simulator, body, status):
    async with simulator() as running, httpx.AsyncClient(timeout=120) as client:
        reply = await client.post(f"{running.hosts[0].url}/v1/chat/completions", content=body)
        assert reply.status_code == status and reply.json()["error"]["message"]


@pytest.mark.parametrize("form", ["array", "map"])
async def test_events_have_the_form_of_their_version_and_can_be_replayed(simulator, form):
    async with simulator(eventForm=form) as running, httpx.AsyncClient(timeout=120) as client:
        tokens = list(range(9))
        body = {"prompt": tokens, "max_tokens": 1, "cache_salt": "t"}
        await client.post(f"{running.hosts[0].url}/v1/completions", json=body)
        frames = await replayed(running.hosts[0].publisher.replay_url)
        assert {len(frame) for frame in frames} == ({3} if form == "array" else {4})
        assert [int.from_bytes(frame[-2], "big") for frame in frames[:-1]] == list(range(len(frames) - 1))
        events = [event for frame in frames[:-1] for event in events_of(frame[-1])]
        joined, device = events[:2]  # the first: from which store the engine loads
        assert (joined[1], joined[6]) == ([], STORE) if form == "array" else joined["medium"] == STORE
        if form == "array":
            assert len(device) == 12 and device[0] == "BlockStored" and device[3:5] == [tokens[:8], 4]
            assert device[6] == "GPU" and device[8] == [["t"], None]
            hashes = device[1]
            cpu = next(event for event in events if event[6] == "CPU")
            lower = cpu[1]
            assert cpu[2:5] == [None, [], 0]
        else:
            assert device["type"] == "BlockStored" and device["token_ids"] == tokens[:8] and device["block_size"] == 4
            assert device["extra_keys"] == [["t"], None]
            hashes = device["block_hashes"]
            cpu = next(event for event in events if event["medium"] == "CPU")
            lower = cpu["block_hashes"]
            assert cpu["token_ids"] == [] and cpu["block_size"] == 0
        assert all(type(item) is int for item in hashes) and all(len(item) == 32 for item in lower)
        assert [int.from_bytes(item[-8:], "big") for item in lower] == hashes
        tail = await replayed(running.hosts[0].publisher.replay_url, start=1)
        assert tail == frames[1:]


async def test_subscribers_see_batches_live_and_miss_the_dropped_ones(simulator):
    async with simulator(cpuBlocks=0, sharedBlocks=0) as running, httpx.AsyncClient(timeout=120) as client:
        host = running.hosts[0]
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.connect(host.publisher.events_url)
        try:
            await monitor.recv_multipart()

            async def received() -> int:
                return int.from_bytes((await socket.recv_multipart())[1], "big")

            asked = 0
            while True:  # the handshake does not report the subscription, so ask until something arrives
                await client.post(f"{host.url}/v1/completions", json={"prompt": [asked] * 5, "max_tokens": 1})
                asked += 1
                if await socket.poll(50):
                    break
            while (last := await received()) < asked - 1:  # one batch for each: those of earlier questions may be late
                pass
            await fault(client, running, fault="drop_events", batches=1)
            for prompt in ([200] * 5, [201] * 5):
                await client.post(f"{host.url}/v1/completions", json={"prompt": prompt, "max_tokens": 1})
            assert await received() == last + 2
            lost = await replayed(host.publisher.replay_url, start=last + 1)
            assert len(lost) == 3  # both batches and the end
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)
            context.term()


async def test_metrics_name_what_was_found_where(simulator):
    async with simulator(deviceBlocks=8, cpuBlocks=64) as running, httpx.AsyncClient(timeout=120) as client:
        url = running.hosts[0].url
        for prompt in (1, 2, 3, 1):
            await client.post(f"{url}/v1/completions", json={"prompt": [prompt] * 21, "max_tokens": 1})
        page = (await client.get(f"{url}/metrics")).text
        values = {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in page.splitlines() if line[0] != "#"
        }
        labels = 'model_name="simulated",engine="0"'
        assert values[f"vllm:external_prefix_cache_hits_total{{{labels}}}"] == 20
        assert values[f'vllm:prompt_tokens_by_source_total{{{labels},source="local_compute"}}'] == 64
        assert values[f'spillway_cpu_tier_blocks{{{labels},state="used"}}'] == 15
        assert f'vllm:cache_config_info{{{labels},block_size="4",num_gpu_blocks="8"' in page


async def test_a_client_that_leaves_frees_its_request(simulator):
    async with simulator(preset="cpu-smollm2-135m") as running:
        host = running.hosts[0]
        async with httpx.AsyncClient(timeout=120) as client:
            body = {"prompt": [1], "max_tokens": 10_000, "ignore_eos": True, "stream": True}
            async with client.stream("POST", f"{host.url}/v1/completions", json=body) as reply:
                await anext(reply.aiter_bytes())
                assert host.model.running_requests == 1
        while host.model.running_requests:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0)
        assert host.model.counters.cancelled_requests == 1 and host.model.device.used_blocks == 0


async def test_faults_that_refuse(simulator):
    async with simulator() as running, httpx.AsyncClient(timeout=120) as client:
        url = running.hosts[0].url
        assert (await fault(client, running, fault="refuse", status=503, requests=1)).status_code == 200
        assert (await client.post(f"{url}/v1/chat/completions", json=CHAT)).status_code == 503
        assert (await client.post(f"{url}/v1/chat/completions", json=CHAT)).status_code == 200
        await fault(client, running, fault="not_ready", reason="draining")
        assert (await client.get(f"{url}/ready")).json() == {"ready": False, "reason": "draining"}
        await fault(client, running, fault="clear")
        assert (await client.get(f"{url}/ready")).status_code == 200
        assert (await fault(client, running, fault="explode")).status_code == 400
        assert (await fault(client, running, fault="clear", engine="engine-9")).status_code == 404


@pytest.mark.parametrize("stream", [True, False])
async def test_a_reply_can_end_early(simulator, stream):
    async with simulator() as running, httpx.AsyncClient(timeout=120) as client:
        url = f"{running.hosts[0].url}/v1/chat/completions"
        await fault(client, running, fault="die_in_stream", after_tokens=2)
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(url, json={**CHAT, "stream": stream})
        await fault(client, running, fault="die_in_stream", after_tokens=2, how="error_event")
        reply = await client.post(url, json={**CHAT, "stream": stream})
        if stream:
            assert reply.text.endswith("data: [DONE]\n\n") and '"code":500' in reply.text
        else:
            assert reply.status_code == 500
        assert running.hosts[0].model.device.used_blocks == 0
        assert (await client.post(url, json=CHAT)).status_code == 200


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
async def test_an_answer_goes_on_behind_its_own_beginning(simulator, route):
    body = CHAT if route.startswith("chat") else {"prompt": "once upon a time", "max_tokens": 5}
    body = {**body, "max_tokens": 12, "ignore_eos": True, "stream": True}
    async with simulator() as running, httpx.AsyncClient(timeout=120) as client:
        url = f"{running.hosts[0].url}/v1/"
        plain = (await client.post(url + route, json=body)).text
        asked = (await client.post(url + route, json={**body, "return_token_ids": True})).text
        lines = [line for line in asked.split("\n\n") if line.startswith("data: {")]
        documents = [json.loads(line.removeprefix("data: ")) for line in lines]
        first = documents[0] if route.startswith("chat") else documents[0]["choices"][0]
        answer = [token for document in documents for token in document["choices"][0].get("token_ids") or []]
        assert len(answer) == 12
        assert '"token_ids":[' not in plain and '"prompt_token_ids":[' not in plain
        body = {"prompt": first["prompt_token_ids"] + answer[:7], "max_tokens": 5, "ignore_eos": True}
        rest = (await client.post(url + "completions", json=body)).json()["choices"][0]["text"]
        assert rest == (await client.post(url + "../detokenize", json={"tokens": answer[7:]})).json()["prompt"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_drain_ends_what_it_leaves_no_time_for(simulator, stream):
    async with simulator(answerTokens=3000, deviceBlocks=1000) as running, httpx.AsyncClient() as client:
        host = running.hosts[0]
        url = f"{host.url}/v1/chat/completions"
        body = {"messages": CHAT["messages"], "stream": stream}
        answer = asyncio.create_task(client.post(url, json=body, timeout=120))
        while not host.model.running_requests:
            await client.get(f"{host.url}/health")
        await fault(client, running, fault="drain", timeout_seconds=0)
        reply = await answer
        assert "shutting down" in reply.text and "[DONE]" not in reply.text
        assert (await client.get(f"{host.url}/ready")).status_code == 503
        assert (await client.post(url, json=CHAT)).status_code == 503
        assert host.model.device.used_blocks == 0
        await fault(client, running, fault="clear")
        assert (await client.post(url, json=CHAT)).status_code == 200


async def test_a_killed_engine_refuses_and_comes_back_empty_when_cleared(simulator):
    async with simulator(engines=2) as running, httpx.AsyncClient(timeout=120) as client:
        host = running.hosts[0]
        await client.post(f"{host.url}/v1/chat/completions", json=CHAT)
        await fault(client, running, fault="kill")
        with pytest.raises(httpx.TransportError):
            await client.get(f"{host.url}/health")
        assert (await client.get(f"{running.hosts[1].url}/health")).status_code == 200
        await fault(client, running, fault="clear")
        await listening(host.url)
        assert await announced(host) == [STORE] and not host.model.device.keys()


async def test_a_restart_in_place_keeps_addresses_and_starts_sequences_anew(simulator):
    async with simulator() as running, httpx.AsyncClient(timeout=120) as client:
        host = running.hosts[0]
        await client.post(f"{host.url}/v1/chat/completions", json=CHAT)
        before = (host.url, host.publisher.events_url, host.publisher.replay_url)
        assert set(await announced(host)) > {STORE}
        await fault(client, running, fault="restart")
        await listening(host.url)
        assert (host.url, host.publisher.events_url, host.publisher.replay_url) == before
        assert await announced(host) == [STORE], "from which store it loads, and nothing of the old process"


async def test_a_hanging_engine_takes_requests_and_says_nothing(simulator):
    async with simulator() as running, httpx.AsyncClient(timeout=120) as client:
        url = running.hosts[0].url
        await fault(client, running, fault="hang")
        with pytest.raises(httpx.ReadTimeout):
            await client.get(f"{url}/health", timeout=httpx.Timeout(60.0, read=0.05))
        await fault(client, running, fault="clear")
        assert (await client.post(f"{url}/v1/chat/completions", json=CHAT)).status_code == 200


async def test_resetting_the_prefix_cache_is_announced(simulator):
    async with simulator() as running, httpx.AsyncClient(timeout=120) as client:
        await client.post(f"{running.hosts[0].url}/v1/chat/completions", json=CHAT)
        assert (await fault(client, running, fault="reset_prefix_cache")).status_code == 200
        frames = await replayed(running.hosts[0].publisher.replay_url)
        assert events_of(frames[-2][-1]) == [["AllBlocksCleared"]]
