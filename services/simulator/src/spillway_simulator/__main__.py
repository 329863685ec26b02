"""python -m spillway_simulator [--config FILE] [--set KEY=VALUE ...]

Prints one JSON line with the addresses when every engine listens; its `models` can go into a gateway's configuration as
it is. Ends on SIGINT and SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop
import zmq

from spillway_simulator.errors import SettingsError
from spillway_simulator.server.simulator import Simulator
from spillway_simulator.settings import Settings, load_settings


async def serve(settings: Settings) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    simulator = Simulator(settings)
    await simulator.start()
    try:
        print(json.dumps(simulator.addresses()), flush=True)
        await stop.wait()
    finally:
        simulator.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="spillway_simulator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    try:
        settings = load_settings(options.config, options.overrides)
        uvloop.run(serve(settings))
    except (SettingsError, ValueError) as error:
        print(f"spillway_simulator: {error}", file=sys.stderr)
        return 2
    except (OSError, zmq.ZMQError) as error:
        print(f"spillway_simulator: cannot listen: {error}; choose other ports with --set port=N ...", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
