"""The ranks of a replica's further pod, made up: they wait to be ended, as vLLM's do."""

from __future__ import annotations

import argparse
import signal


def run_headless(arguments: argparse.Namespace) -> None:
    assert arguments.api_server_count == 0
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
