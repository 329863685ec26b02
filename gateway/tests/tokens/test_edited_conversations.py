"""Facts remembered of a conversation never change how its next request is read, however the client has edited it."""

from __future__ import annotations

import asyncio
import itertools
import json
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway_gateway.api.large_bodies import LargeBodies
from spillway_gateway.config.settings import LimitsConfig
from spillway_gateway.fleet import block_runs
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.routing import prefix
from spillway_gateway.routing.prefix import KEYS_MAX, PromptBlocks
from spillway_gateway.testing.small_tokenizer import write_tokenizer
from spillway_gateway.tokens import known_beginnings
from spillway_gateway.tokens import tokenizer as tokenizer_module
from spillway_gateway.tokens.fair_threads import FairThreads
from spillway_gateway.tokens.prompt import ChatPrompt, PromptReader
from spillway_gateway.tokens.tokenizer import PromptTokenizer

BLOCK = 4
ENGINES = ("a", "b")
TEMPLATE = """{% if tools %}<|im_start|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"a": [None]}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

texts = st.text(max_size=30) | st.sampled_from(["the fox " * 12, "<|im_end|>", "\u6771\u4eac \U0001f642"])
parts = st.lists(
    st.builds(lambda text: {"type": "text", "text": text}, texts)
    | st.just({"type": "image_url", "image_url": {"url": "http://host/image"}}),
    max_size=3,
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": texts | texts | texts | parts},
    optional={"tool_calls": st.just([CALL])},
)
edits = st.tuples(st.sampled_from(["add", "add", "add", "change", "cut", "drop", "tools", "again"]), messages)


def edited(chat: dict[str, Any], kind: str, message: dict[str, Any], at: int) -> dict[str, Any]:
    """The chat after an edit. at: the place in it, of those that are changed or dropped in the middle."""
    chat = deepcopy(chat)
    said = chat["messages"]
    if kind == "add" or not said:
        said.append(message)
    elif kind == "change":
        said[at % len(said)] = message
    elif kind == "cut":
        del said[1 + at % len(said) :]
    elif kind == "drop":
        del said[at % len(said)]
    elif kind == "tools":
        chat["tools"] = None if chat["tools"] else [TOOL]
    return chat


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    folder: Path = tmp_path_factory.mktemp("model")
    write_tokenizer(folder, "the quick brown fox jumps over the lazy dog " * 20, 400, TEMPLATE)
    return PromptTokenizer.load(folder)


@given(turns=st.lists(st.tuples(edits, st.integers(0, 9), st.sampled_from(ENGINES)), min_size=2, max_size=8))
@settings(deadline=None)
def test_an_edited_conversation_is_read_as_one_that_is_new(tokenizer: PromptTokenizer, turns: list[Any]) -> None:
    with ExitStack() as stack:
        for module, name, value in (
            (known_beginnings, "MARKS", tuple(2**power for power in range(2, 16))),
            (known_beginnings, "MARK_CHARS", 4),
            (tokenizer_module, "KEPT_SEGMENTS_MIN", 1),
            (prefix, "RUN_BLOCKS", 4),
            (block_runs, "RUN_BLOCKS", 4),
            (block_runs, "SHORT_RUN_BLOCKS", 2),
        ):
            stack.enter_context(patch.object(module, name, value))
        asyncio.run(_read_all(tokenizer, turns))


async def _read_all(tokenizer: PromptTokenizer, turns: list[Any]) -> None:
    engines: Any = SimpleNamespace(block_sizes=(BLOCK,))
    threads, owners = FairThreads(1, "t"), map(str, itertools.count())
    reader = PromptReader("m", engines, tokenizer, threads, LimitsConfig)
    index = PrefixIndex("m", bytes_max=10_000_000, orphans_max=10, default_block_tokens=BLOCK, clock=lambda: 1.0)
    for name in ENGINES:
        index.add_engine(name)
    bodies, chat = LargeBodies(), {"messages": [], "tools": None}
    try:
        for (kind, message), at, engine in turns:
            chat = edited(chat, kind, message, at)
            prompt = ChatPrompt(chat["messages"], chat["tools"])
            found = await reader.read(prompt, "tenant")
            alone = await PromptReader("m", engines, tokenizer, threads, LimitsConfig).read(prompt, next(owners))
            assert found == alone

            body = json.dumps(chat).encode()
            assert await bodies._seconds_by_count(body, "tenant") == pytest.approx(
                await LargeBodies()._seconds_by_count(body, "tenant")
            )
            assert index.match(found.keys, BLOCK) == _one_by_one(index, found)
            expected = index.expect(engine, found.keys, 30.0)
            assert index.match(found.keys, BLOCK) == _one_by_one(index, found)
            for _ in index.accepted(engine, found.keys, 30.0, expected):
                pass
            assert index.match(found.keys, BLOCK) == _one_by_one(index, found)
    finally:
        threads.close()


def _one_by_one(index: PrefixIndex, blocks: PromptBlocks) -> object:
    """Match without runs that were remembered."""
    with (
        patch.object(block_runs, "RUN_BLOCKS", KEYS_MAX + 1),
        patch.object(block_runs, "SHORT_RUN_BLOCKS", KEYS_MAX + 1),
    ):
        return index.match(blocks.keys, BLOCK)
