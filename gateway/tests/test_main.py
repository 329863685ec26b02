"""The command itself, as a process."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import yaml

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
