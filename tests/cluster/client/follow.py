"""Runs in a pod of the cluster: writes a line whenever a gateway uses other engines than before.

python3 follow.py FOLDER ADDRESS:PORT ...              until FOLDER/stop exists

Each line of FOLDER/changes.jsonl: {"at": Unix seconds, "gateway": ADDRESS:PORT, "engines": [names that are up]}, with
null for engines while the gateway does not answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import TextIO

import aiohttp

POLL_SECONDS = 0.1
ANSWER_SECONDS = 1.0
UP = re.compile(r"^spillway_gateway_engine_up\{([^}]*)\} 1\.0$", re.MULTILINE)
ENGINE = re.compile(r'engine="([^"]*)"')


async def follow(session: aiohttp.ClientSession, gateway: str, stop: Path, out: TextIO) -> None:
    last: object = ()
    while not os.path.exists(stop):  # noqa: ASYNC240 - a check of a file in memory
        try:
            async with session.get(f"http://{gateway}/metrics") as reply:
                text = await reply.text()
            engines = sorted(match.group(1) for labels in UP.findall(text) if (match := ENGINE.search(labels)))
        except (aiohttp.ClientError, TimeoutError, OSError):
            engines = None
        if engines != last:
            out.write(json.dumps({"at": time.time(), "gateway": gateway, "engines": engines}) + "\n")
            out.flush()
            last = engines
        await asyncio.sleep(POLL_SECONDS)


async def main(folder: Path, gateways: list[str]) -> None:
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    with (folder / "changes.jsonl").open("w") as out:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(*(follow(session, gateway, folder / "stop", out) for gateway in gateways))


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True)
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2:]))
