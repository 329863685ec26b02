"""Decision of `generatedTokens: auto` with the chat template of a model that thinks, and after how many answers.

    python bench/thinking_templates.py TEMPLATE... [--set preserve_thinking=true] [--turns 5] [--tool-calls 0 4]

TEMPLATE: a file with the model's Jinja template, for example the `chat_template.jinja` of its repository. The gateway's
own code renders the chats, and the connector's own count of answers decides. Each chat has --turns questions; an answer
thinks for 2,000 characters, or as long as 500 tokens, and says 600, and calls --tool-calls tools one after the other
first, each behind some thinking. The client sends answers back whole, thinking included, and names its session or not.
No model runs. Chunks are 512 characters, about as long as a block of 128 tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spillway_connector.plan.answers import AnswerReuse
from spillway_gateway.tokens.chat_template import ChatTemplate

CHUNK_CHARS = 512
QUESTION_CHARS, THINKING_CHARS, SAID_CHARS = 1_200, 2_000, 600
ANSWERS_MAX = 600


def chunk_keys(text: str) -> list[bytes]:
    """Keys of the full chunks, each of which covers all before it."""
    digest, keys = hashlib.sha256(), []
    for end in range(CHUNK_CHARS, len(text) + 1, CHUNK_CHARS):
        digest.update(text[end - CHUNK_CHARS : end].encode())
        keys.append(digest.digest())
    return keys


def decided(
    template: ChatTemplate, variables: Mapping[str, Any], *, turns: int, tool_calls: int, named: bool
) -> tuple[bool, int, float | None]:
    """Whether answers are kept in the end, after how many answers that was decided, and the share that came back."""
    reuse, numbers = AnswerReuse(), itertools.count()
    decided_at = answers = 0
    while answers < ANSWERS_MAX:
        chat = next(numbers)
        messages: list[dict[str, str]] = [{"role": "system", "content": _text("You help.", SAID_CHARS)}]
        for turn in range(turns):
            messages.append({"role": "user", "content": _text(f"chat {chat} asks {turn}", QUESTION_CHARS)})
            for call in range(tool_calls + 1):
                prompt = template.render(messages, variables=variables)
                session = f"chat {chat}" if named else None
                kept = reuse.keeps
                reuse.requested(chunk_keys(prompt), session)
                serial = f"{chat} {turn} {call}"
                thinking, said = _text(f"hm {serial}", THINKING_CHARS), _text(f"it is {serial}", SAID_CHARS)
                answer = f"<think>\n{thinking}\n</think>\n\n{said}"
                reuse.answered(chunk_keys(prompt + answer)[len(prompt) // CHUNK_CHARS], session)
                answers += 1
                if reuse.keeps is not kept or (decided_at == 0 and reuse.sent_back_share is not None):
                    decided_at = answers
                messages.append({"role": "assistant", "content": answer})
                if call < tool_calls:
                    messages.append({"role": "tool", "content": _text(f"result {serial}", QUESTION_CHARS)})
    return reuse.keeps, decided_at, reuse.sent_back_share


def _text(begin: str, characters: int) -> str:
    return (f"{begin} " * (characters // len(begin) + 1))[:characters].strip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("templates", nargs="+", type=Path)
    parser.add_argument("--set", nargs="*", default=[], help="variables of the template: NAME=JSON")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tool-calls", nargs="+", type=int, default=[0, 4])
    options = parser.parse_args(arguments)
    variables = {name: json.loads(value) for name, _, value in (given.partition("=") for given in options.set)}
    for path in options.templates:
        template = ChatTemplate(path.read_text(encoding="utf-8"), {"bos_token": "", "eos_token": ""})
        for tool_calls, named in itertools.product(options.tool_calls, (True, False)):
            keeps, at, share = decided(template, variables, turns=options.turns, tool_calls=tool_calls, named=named)
            print(
                f"{path.name}, {tool_calls} tool calls, sessions {'named' if named else 'unknown'}: "
                f"{'kept' if keeps else 'not kept'}, decided after {at} answers, share sent back {share:.2f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
