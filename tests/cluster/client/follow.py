"""Runs in a pod of the cluster: writes a line whenever a gateway has other engines than before.

python3 follow.py FOLDER ADDRESS:PORT ...              until FOLDER/stop exists

Each line of FOLDER/changes.jsonl: {"at": Unix seconds, "gateway": ADDRESS:PORT, "offered": {uid of a pod: its name},
"up": [uids]}. Offered: discovery wants requests to go there; up: they do. Both are null while the gateway does not
answer, and `at` is then when it was asked.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import aiohttp

POLL_SECONDS = 0.1
ANSWER_SECONDS = 10.0
UP = re.compile(r"^spillway_gateway_engine_up\{([^}]*)\} 1\.0$", re.MULTILINE)
ENGINE = re.compile(r'engine="([^"]*)"')


async def follow(session: aiohttp.ClientSession, gateway: str, stop: Path, out: TextIO) -> None:
    last: object = None
    while not os.path.exists(stop):  # noqa: ASYNC240 - a check of a file in memory
        at = time.time()
        try:
            async with session.get(f"http://{gateway}/spillway/config") as reply:
                discovered = (await reply.json())["discovered"]
            async with session.get(f"http://{gateway}/metrics") as reply:
                metrics = await reply.text()
            at = time.time()
            view = _view(discovered, metrics)
        except (aiohttp.ClientError, TimeoutError, OSError):
            view = {"offered": None, "up": None}
        if view != last:
            out.write(json.dumps({"at": at, "gateway": gateway, **view}) + "\n")
            out.flush()
            last = view
        await asyncio.sleep(POLL_SECONDS)


def _view(discovered: dict[str, Any], metrics: str) -> dict[str, Any]:
    engines = [engine for model in discovered.values() for engine in model["engines"]]
    uids = {engine["name"]: engine["instance"].split()[0] for engine in engines}
    offered = {uids[engine["name"]]: engine["name"] for engine in engines if engine["withheld"] is None}
    names = {match.group(1) for labels in UP.findall(metrics) if (match := ENGINE.search(labels))}
    return {"offered": offered, "up": sorted(uids[name] for name in names if name in uids)}


async def main(folder: Path, gateways: list[str]) -> None:
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    with (folder / "changes.jsonl").open("w") as out:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(*(follow(session, gateway, folder / "stop", out) for gateway in gateways))


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True)
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2:]))
