"""The ranks of a replica's further pod, made up: they meet the leader, and then wait to be ended, as vLLM's do."""

from __future__ import annotations

import argparse
import signal

from vllm.rendezvous import meet_leader


def run_headless(arguments: argparse.Namespace) -> None:
    assert arguments.api_server_count == 0
    with meet_leader(arguments.master_addr, arguments.master_port):
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
