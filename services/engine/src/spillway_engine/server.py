"""`python -m spillway_engine.server MODULE ARGUMENTS...`: vLLM's API server, after its own parser has judged extraArgs.

The process that serves is the one that judges, so what the parser imports is imported once. Without extraArgs there is
nothing to judge, and vLLM starts at once.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
from collections.abc import Sequence

from spillway_connector.setting_names import SettingNames
from spillway_engine.argument_verdicts import ArgumentVerdictError, argument_verdicts, installed_parser
from spillway_engine.pod_channel import REFUSED_EXIT_CODE, PodBrief, encode_message

_SENTENCES_MAX = 20  # of one refusal


def refusal(arguments: Sequence[str], names: SettingNames) -> str | None:
    """Return the reasons for which this vLLM would not start, one sentence on each line; None: there are none."""
    try:
        found = argument_verdicts(arguments, installed_parser())
    except ArgumentVerdictError:
        return None  # vLLM judges them when it starts, in its own words
    sentences = [f"{names.name(verdict.setting)}: {verdict.problem}; {verdict.remedy}" for verdict in found]
    more = [f"and {len(sentences) - _SENTENCES_MAX} more"] if len(sentences) > _SENTENCES_MAX else []
    return "\n".join(sentences[:_SENTENCES_MAX] + more) or None


def main() -> int:
    module, *arguments = sys.argv[1:]
    brief = PodBrief.from_environment(os.environ)
    extra = arguments[len(arguments) - brief.extra_arguments :]
    reason = refusal(extra, brief.names) if extra else None
    if reason is not None:
        _tell(brief, reason)
        return REFUSED_EXIT_CODE
    sys.argv = [module, *arguments]
    # This does what `python -m MODULE` does, also for the processes that vLLM spawns from here.
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def _tell(brief: PodBrief, reason: str) -> None:
    if brief.control_fd is None:
        print(reason, file=sys.stderr, flush=True)
        return
    with socket.socket(fileno=brief.control_fd) as parent:
        parent.sendall(encode_message({"event": "refused", "reason": reason}))


if __name__ == "__main__":
    sys.exit(main())
