"""One tenant's guesses, by the clock alone, at words that another tenant has sent, through the gateway on loopback.

    python bench/word_clock.py [--trials 200] [--letters 8 32 128 511] [--chars 2000 16000]

Tenant A sends a text of random words. Tenant B then sends that text and a new one of the same kind, in random order,
and says that the one which was answered sooner is A's: right in half of the trials if the gateway keeps no word. Twenty
looks: B adds up the times of twenty such texts, of which A has sent all or none. The gateway and the engine, which
answers at once, are processes of their own; nothing else is between. The command ends with 1 if a share is above what
chance gives in one run of 10,000.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import math
import os
import random
import socket
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from spillway_stack.bundled_model import choose_model

LOOKS = 20
KEYS = {name: f"sk-{name * 40}" for name in "ab"}
START_SECONDS_MAX = 60.0
CHANCE = 3.72  # standard deviations, which chance exceeds once in 10,000 times


class Tenant:
    """One kept connection with one tenant's key."""

    def __init__(self, port: int, name: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self._headers = {"authorization": f"Bearer {KEYS[name]}", "content-type": "application/json"}

    def ask(self, text: str) -> float:
        """Seconds until the answer is there."""
        body = json.dumps({"model": "fake", "prompt": text, "max_tokens": 1}).encode()
        began = time.perf_counter()
        self._connection.request("POST", "/v1/completions", body, self._headers)
        answer = self._connection.getresponse()
        answer.read()
        seconds = time.perf_counter() - began
        if answer.status != 200:
            raise RuntimeError(f"the gateway answered {answer.status}")
        return seconds


def text(draw: random.Random, chars: int, letters: int) -> str:
    return " ".join(
        "".join(draw.choices(string.ascii_lowercase, k=letters)) for _ in range(chars // (letters + 1) or 1)
    )


def right_guesses(attacked: Tenant, attacker: Tenant, trials: int, chars: int, letters: int) -> tuple[int, int, int]:
    """Count the guesses that are right with one look, and with LOOKS, and how many of the latter there were."""
    draw = random.Random(f"{chars} {letters} {time.time_ns()}")
    one = many = 0
    sooner = []
    for _ in range(trials):
        sent, new = text(draw, chars, letters), text(draw, chars, letters)
        attacked.ask(sent)
        order = [sent, new]
        draw.shuffle(order)
        seconds = {each: attacker.ask(each) for each in order}
        sooner.append(seconds[new] - seconds[sent])
        one += sooner[-1] > 0
    groups = [sorted(sooner[at : at + LOOKS]) for at in range(0, trials - LOOKS + 1, LOOKS)]
    for group in groups:
        many += sum(group[LOOKS // 4 : -LOOKS // 4]) > 0  # without the quarters that the machine disturbed most
    return one, many, len(groups)


@contextmanager
def gateway() -> Iterator[int]:
    """The port of a gateway with two tenants in front of an engine that answers at once."""
    tokenizer = choose_model("", lambda _: None).tokenizer
    with tempfile.TemporaryDirectory() as name:
        folder, processes = Path(name), []
        ports = [free_port(), free_port()]
        keys = [
            {"name": tenant, "keys": ["sha256:" + hashlib.sha256(key.encode()).hexdigest()]}
            for tenant, key in KEYS.items()
        ]
        (folder / "keys.yaml").write_text(yaml.safe_dump({"tenants": keys}))
        (folder / "salt").write_text("s" * 48)
        engine = {"name": "fake-0", "url": f"http://127.0.0.1:{ports[0]}"}
        document = {
            "models": [{"name": "fake", "tokenizer": str(tokenizer), "engines": [engine]}],
            "auth": {"keysFile": str(folder / "keys.yaml"), "saltSecretFile": str(folder / "salt")},
            "listen": {"host": "127.0.0.1", "port": ports[1]},
        }
        (folder / "gateway.yaml").write_text(yaml.safe_dump(document))
        fake = ["spillway_gateway.testing.fake_engine_host", "--port", str(ports[0]), "--no-tokenize-route"]
        try:
            with (folder / "log").open("wb") as log:
                for module, *rest in (fake, ["spillway_gateway", "--config", str(folder / "gateway.yaml")]):
                    command = [sys.executable, "-m", module, *rest]
                    processes.append(subprocess.Popen(command, stdout=log, stderr=log))
            wait(ports[1], folder / "log")
            yield ports[1]
        finally:
            for process in reversed(processes):
                process.terminate()
                process.wait(30)


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def wait(port: int, log: Path) -> None:
    until = time.monotonic() + START_SECONDS_MAX
    while time.monotonic() < until:
        try:
            Tenant(port, "b").ask("are you there?")
        except (OSError, RuntimeError, http.client.HTTPException):
            time.sleep(0.2)
        else:
            return
    raise RuntimeError(log.read_text())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--letters", type=int, nargs="+", default=[8, 32, 128, 511])
    parser.add_argument("--chars", type=int, nargs="+", default=[2_000, 16_000])
    given = parser.parse_args(arguments)
    above = False
    print(f"load {os.getloadavg()[0]:.1f}, {given.trials} trials a row, by chance 50 %")
    print(f"{'characters':>10}{'letters':>9}{'one look':>10}{f'{LOOKS} looks':>16}")
    with gateway() as port:
        attacked, attacker = Tenant(port, "a"), Tenant(port, "b")
        for chars in given.chars:
            for letters in given.letters:
                one, many, groups = right_guesses(attacked, attacker, given.trials, chars, letters)
                print(f"{chars:>10,}{letters:>9}{one / given.trials:>10.0%}{f'{many} of {groups}':>16}", flush=True)
                above |= one > given.trials / 2 + CHANCE * math.sqrt(given.trials) / 2
    return int(above)


if __name__ == "__main__":
    sys.exit(main())
