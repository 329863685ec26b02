"""The command itself, as a process."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import yaml

from gateway.tests.conftest import auth_files
from spillway_gateway.testing.certificates import make_pair
from spillway_gateway.testing.faults import HoldInStream
from spillway_gateway.testing.running import gateway_config


async def run(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "spillway_gateway",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_check_and_bad_files(tmp_path: Path, start_engine: Any) -> None:
    good = tmp_path / "good.yaml"
    good.write_text(yaml.safe_dump(gateway_config([await start_engine()])))
    bad = tmp_path / "bad.yaml"
    bad.write_text("modles: []")

    checked = await run("--config", str(good), "--check")
    refused = await run("--config", str(bad))

    output, _ = await checked.communicate()
    assert (checked.returncode, output.decode().strip()) == (0, f"{good}: valid")
    _, errors = await refused.communicate()
    assert refused.returncode == 1
    assert errors.decode().strip().startswith("spillway-gateway: modles: unknown setting; did you mean 'models'?")


async def test_a_file_of_keys_is_checked_before_it_is_used(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(yaml.safe_dump({"tenants": [{"name": "a", "keys": ["sha256:" + "0" * 64]}]}))
    bad.write_text(yaml.safe_dump({"tenants": [{"name": "a", "keys": ["sha256:" + "0" * 64], "prioritty": "high"}]}))

    checked, refused = await run("--check-keys", str(good)), await run("--check-keys", str(bad))

    output, _ = await checked.communicate()
    assert (checked.returncode, output.decode().strip()) == (0, f"{good}: valid")
    _, errors = await refused.communicate()
    assert refused.returncode == 1
    assert "bad.yaml: tenants[0]: " in errors.decode() and "0000" not in errors.decode()


async def test_a_port_in_use_is_one_sentence(tmp_path: Path, start_engine: Any) -> None:
    engine = await start_engine()
    config = tmp_path / "gateway.yaml"
    config.write_text(yaml.safe_dump(gateway_config([engine], listen={"port": engine.port})))

    process = await run("--config", str(config))
    _, errors = await process.communicate()

    assert process.returncode == 1
    (line,) = errors.decode().strip().splitlines()
    assert f"cannot listen on 127.0.0.1:{engine.port}" in line


async def test_sigterm_ends_with_status_zero(tmp_path: Path, start_engine: Any) -> None:
    engine = await start_engine()
    config = tmp_path / "gateway.yaml"
    config.write_text(yaml.safe_dump(gateway_config([engine], listen={"port": 0})))
    process = await run("--config", str(config))
    assert process.stderr is not None
    async with asyncio.timeout(120):
        while b"is ready" not in await process.stderr.readline():
            pass
        process.send_signal(signal.SIGTERM)
        _, rest = await process.communicate()

    assert process.returncode == 0
    assert b"Traceback" not in rest


@pytest.mark.parametrize("replaced", ["keys.yaml", "tls.crt", "gateway.yaml"])
async def test_sigterm_does_not_wait_for_a_file_that_is_read(tmp_path: Path, start_engine: Any, replaced: str) -> None:
    """A pipe is in its place: a read of it ends when the writer closes it."""
    for name, content in zip(("tls.crt", "tls.key"), make_pair("gateway"), strict=True):
        (tmp_path / name).write_bytes(content)
    config = tmp_path / "gateway.yaml"
    sections = {
        "auth": auth_files(tmp_path, [{"name": "a", "keys": ["sha256:" + "0" * 64]}], reloadSeconds=0.05),
        "listen": {
            "port": 0,
            "tls": {"certFile": str(tmp_path / "tls.crt"), "keyFile": str(tmp_path / "tls.key"), "reloadSeconds": 0.05},
        },
        "reload": {"periodSeconds": 0.05},
    }
    config.write_text(yaml.safe_dump(gateway_config([await start_engine()], **sections)))
    process = await run("--config", str(config))
    assert process.stderr is not None
    async with asyncio.timeout(120):
        while b"is ready" not in await process.stderr.readline():
            pass
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "pipe").replace(tmp_path / replaced)
        writer = await asyncio.to_thread(os.open, tmp_path / replaced, os.O_WRONLY)  # returns once the gateway reads
        try:
            process.send_signal(signal.SIGTERM)
            _, rest = await process.communicate()
        finally:
            os.close(writer)

    assert process.returncode == 0
    assert b"Traceback" not in rest


async def test_sighup_during_the_start_ends_nothing(tmp_path: Path, start_engine: Any) -> None:
    """The writer of the file may send it before the gateway listens."""
    config = tmp_path / "gateway.yaml"
    config.write_text(yaml.safe_dump(gateway_config([await start_engine()], listen={"port": 0})))
    process = await run("--config", str(config))
    assert process.stderr is not None
    async with asyncio.timeout(120):
        while b"listening on" not in await process.stderr.readline():
            pass
        process.send_signal(signal.SIGHUP)
        while b"is ready" not in await process.stderr.readline():
            assert not process.stderr.at_eof()
        process.terminate()
        await process.communicate()
    assert process.returncode == 0


class Several:
    """A gateway of several processes, by what it logs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.port = 0

    async def next_pid(self) -> int:
        """The pid of the next process that says that it serves."""
        assert self.process.stderr is not None
        while line := (await self.process.stderr.readline()).decode():
            if found := re.search(r"will listen on http://127.0.0.1:(\d+)", line):
                self.port = int(found[1])
            if found := re.search(r"process (\d+) serves", line):
                return int(found[1])
        raise AssertionError("it has ended")

    def server_of(self, reply: aiohttp.ClientResponse, pids: set[int]) -> int:
        """The process at the other end of the reply's connection."""
        assert reply.connection is not None and reply.connection.transport is not None
        own = reply.connection.transport.get_extra_info("sockname")[1]
        (found,) = [
            pid
            for pid in pids
            if own in {each.raddr.port for each in psutil.Process(pid).net_connections() if each.raddr}
        ]
        return found


async def test_of_several_processes_one_is_killed_and_all_drain(tmp_path: Path, start_engine: Any) -> None:
    release = asyncio.Event()
    engine = await start_engine()
    engine.fault = HoldInStream(2, release)
    config = tmp_path / "gateway.yaml"
    config.write_text(yaml.safe_dump(gateway_config([engine], listen={"port": 0}, processes=2)))
    gateway = Several(await run("--config", str(config)))
    body = {"model": "fake", "prompt": "hello", "stream": True}
    async with asyncio.timeout(120), aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        pids = {await gateway.next_pid(), await gateway.next_pid()}
        streams: dict[int, list[aiohttp.ClientResponse]] = {pid: [] for pid in pids}
        while not all(streams.values()):  # the kernel chooses
            reply = await http.post(f"http://127.0.0.1:{gateway.port}/v1/completions", json=body)
            assert reply.status == 200
            streams[gateway.server_of(reply, pids)].append(reply)
        killed, other = pids
        os.kill(killed, signal.SIGKILL)
        for reply in streams[killed]:
            with pytest.raises(aiohttp.ClientError):
                await reply.read()
        assert await gateway.next_pid() not in pids
        gateway.process.send_signal(signal.SIGTERM)
        release.set()
        for reply in streams[other]:
            assert (await reply.read()).endswith(b"data: [DONE]\n\n")
        _, rest = await gateway.process.communicate()

    assert gateway.process.returncode == 0
    assert b"Traceback" not in rest


async def test_all_processes_end_with_the_one_that_routes(tmp_path: Path, start_engine: Any) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text(yaml.safe_dump(gateway_config([await start_engine()], listen={"port": 0}, processes=2)))
    gateway = Several(await run("--config", str(config)))
    async with asyncio.timeout(120):
        fronts = [psutil.Process(await gateway.next_pid()) for _ in range(2)]
        gateway.process.kill()
        await asyncio.to_thread(psutil.wait_procs, fronts)
        await gateway.process.communicate()

    assert not any(front.is_running() for front in fronts)


async def test_several_processes_refuse_a_port_in_use(tmp_path: Path, start_engine: Any) -> None:
    engine = await start_engine()
    config = tmp_path / "gateway.yaml"
    config.write_text(yaml.safe_dump(gateway_config([engine], listen={"port": engine.port}, processes=2)))

    process = await run("--config", str(config))
    _, errors = await process.communicate()

    assert process.returncode == 1
    (line,) = errors.decode().strip().splitlines()
    assert f"cannot listen on 127.0.0.1:{engine.port}" in line
