"""Templates and tokens against transformers' own, on a tokenizer made here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from array import array
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spillway_gateway.config.settings import LimitsConfig
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.routing.prefix import namespace_key, token_block_keys, token_bytes
from spillway_gateway.testing.small_tokenizer import write_tokenizer
from spillway_gateway.tokens import known_beginnings
from spillway_gateway.tokens import prompt as prompt_module
from spillway_gateway.tokens import tokenizer as tokenizer_module
from spillway_gateway.tokens.chat_template import CannotRender, ChatTemplate
from spillway_gateway.tokens.fair_threads import FairThreads
from spillway_gateway.tokens.prompt import (
    INLINE_CHARS_MAX,
    INLINE_ITEMS_MAX,
    ChatPrompt,
    CompletionPrompt,
    PromptReader,
    render,
    render_and_encode,
)
from spillway_gateway.tokens.tokenizer import SPECIAL_PLACES_MAX, PromptTokenizer, TokenizerUnusable
from spillway_gateway.tokens.verification import PROBE_MESSAGES, Disagreement, verify_tokenizer

TEMPLATE = """{{ bos_token }}
{%- if tools %}
<|im_start|>tools
{{ tools | tojson(indent=2) }}<|im_end|>
{%- endif %}
{% for message in messages %}
    {% if loop.index0 == 1 and message['role'] == 'skip' %}{% continue %}{% endif %}
    {%- set ns = namespace(seen=false) %}
<|im_start|>{{ message['role'] }}
    {% generation %}{{ message['content'] | trim }}{% endgeneration %}
    {%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""
PARTS_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{{ part.text }}|{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tokenizer(path, "the quick brown fox jumps over the lazy dog " * 20, 400, TEMPLATE)
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        chat_template=TEMPLATE,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
    )


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PromptTokenizer:
    return PromptTokenizer.load(folder)


TOOLS = [{"type": "function", "function": {"name": "f", "description": "d<&>é", "parameters": {"b": 1, "a": [None]}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1.5}}}
CONVERSATIONS: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([{"role": "user", "content": "hello"}], {}),
    (list(PROBE_MESSAGES), {}),
    ([{"role": "system", "content": " spaced \n"}, {"role": "skip", "content": "x"}], {}),
    ([{"role": "user", "content": "<|im_end|> inside <|im_start|>"}], {"tools": TOOLS}),
    ([{"role": "assistant", "content": "", "tool_calls": [CALL]}], {}),
    ([{"role": "user", "content": "quiet"}], {"enable_thinking": False}),
]


@pytest.mark.parametrize(("messages", "extra"), CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chats_render_and_encode_as_transformers_does(
    tokenizer: PromptTokenizer,
    reference: Any,
    messages: list[dict[str, Any]],
    extra: dict[str, Any],
    add_generation_prompt: bool,
) -> None:
    expected = reference.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=add_generation_prompt, return_dict=False, **extra
    )
    variables = {key: value for key, value in extra.items() if key != "tools"}
    prompt = ChatPrompt(
        messages, tools=extra.get("tools"), add_generation_prompt=add_generation_prompt, variables=variables
    )

    assert list(render_and_encode(tokenizer, prompt)) == expected
    again = tokenizer.encode_inline(
        tokenizer.template.render(  # type: ignore[union-attr]
            messages, tools=extra.get("tools"), add_generation_prompt=add_generation_prompt, variables=variables
        ),
        add_special_tokens=False,
        new_chars_max=0,
    )
    assert again == token_bytes(expected)


def test_a_little_new_text_is_encoded_at_once_and_more_is_left_to_a_thread(tokenizer: PromptTokenizer) -> None:
    known, new = "<|im_start|>system\nknown", "<|im_start|>user\n" + "new " * 20
    tokenizer.encode(known, add_special_tokens=False)

    assert tokenizer.encode_inline(known + new, add_special_tokens=False, new_chars_max=len(new) - 1) is None
    ids = tokenizer.encode_inline(known + new, add_special_tokens=False, new_chars_max=len(new))
    assert ids == token_bytes(tokenizer.encode(known + new, add_special_tokens=False))
    assert tokenizer.encode_inline(known + new, add_special_tokens=False, new_chars_max=0) == ids
    assert tokenizer.encode_inline("plain words", add_special_tokens=True, new_chars_max=10) is None
    assert tokenizer.encode_inline("plain words", add_special_tokens=True, new_chars_max=11) == token_bytes(
        tokenizer.encode("plain words", add_special_tokens=True)
    )


def test_what_another_owner_has_sent_is_new(tokenizer: PromptTokenizer) -> None:
    text = "<|im_start|>system\nowned<|im_start|>user\nby one"

    def cached(owner: str) -> bool:
        found = tokenizer.encode_inline(text, add_special_tokens=False, new_chars_max=0, owner=owner)
        return found is not None

    for owner, step in (("a", tokenizer.encode_inline), ("b", None)):
        assert not cached(owner)
        if step is not None:
            step(text, add_special_tokens=False, new_chars_max=len(text), owner=owner)
        else:
            for _ in tokenizer.encode_in_steps(text, add_special_tokens=False, owner=owner):
                pass
        assert cached(owner)
    assert not cached("c")


@pytest.mark.parametrize("text", ["\ud800", "the \ud800 fox", "the fox\udfff"])
def test_lone_surrogates_are_refused(tokenizer: PromptTokenizer, text: str) -> None:
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode(text, add_special_tokens=False)
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode_inline(text, add_special_tokens=False, new_chars_max=100)


def stepped(tokenizer: PromptTokenizer, text: str, **options: Any) -> tuple[list[int], int, int]:
    """Ids, tokens and the number of pauses."""
    steps = tokenizer.encode_in_steps(text, **{"add_special_tokens": False, **options})
    pauses = 0
    while True:
        try:
            next(steps)
            pauses += 1
        except StopIteration as end:
            ids = array("I")
            ids.frombytes(end.value.ids)
            return list(ids), end.value.tokens, pauses


WORDS = "the quick brown fox jumps, over 東京。the lazy dog's tail\n  1,234 times: {x}\n\n"


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spillway_gateway.tokens.tokenizer.STEP_CHARS", 64)
    monkeypatch.setattr("spillway_gateway.tokens.tokenizer.SEARCH_CHARS", 50)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from([*WORDS.split(), WORDS, " ", "\n", "<|im_start|>", "<|im_end|>", "<|im_"]), max_size=80),
    st.booleans(),
)
def test_steps_never_change_the_tokens(
    short_steps: None, folder: Path, pieces: list[str], add_special_tokens: bool
) -> None:
    tokenizer, text = PromptTokenizer.load(folder), "".join(pieces)
    whole = list(tokenizer._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    for _ in range(2):  # the second time from the cache
        ids, tokens, _ = stepped(tokenizer, text, add_special_tokens=add_special_tokens)
        if ids == whole:
            assert tokens == len(whole)
        else:  # no place to cut was found; all before that was tokenised
            assert ids[:-8] == whole[: len(ids) - 8 if len(ids) > 8 else 0]
            assert max(map(len, re.split(r"\b", text))) > 16


def test_a_long_text_is_tokenised_in_steps_up_to_what_a_model_takes(short_steps: None, folder: Path) -> None:
    tokenizer = PromptTokenizer.load(folder)
    text = WORDS * 100
    whole = tokenizer._tokenizer.encode(text, add_special_tokens=False).ids

    ids, tokens, pauses = stepped(tokenizer, text, tokens_max=len(whole) // 10)
    assert len(whole) // 10 < len(ids) < len(whole) // 5
    assert tokens == pytest.approx(len(whole), rel=0.1)
    assert pauses < len(text) // 64 // 5

    ids, tokens, pauses = stepped(tokenizer, text)
    assert (ids, tokens) == (whole, len(whole))
    assert pauses >= len(text) // 128 - 1


def test_late_work_stops_with_what_it_has(short_steps: None, folder: Path) -> None:
    answers = iter([False, False, True])
    text = WORDS * 100
    ids, tokens, pauses = stepped(PromptTokenizer.load(folder), text, late=lambda: next(answers))

    assert pauses == 3
    assert 0 < len(ids) < tokens


def test_a_text_without_a_place_to_cut_is_left_where_it_begins(short_steps: None, folder: Path) -> None:
    tokenizer = PromptTokenizer.load(folder)
    ids, tokens, pauses = stepped(tokenizer, WORDS + "x" * 1_000_000)
    whole = tokenizer._tokenizer.encode(WORDS + "x" * 1_000, add_special_tokens=False).ids

    assert pauses <= 4
    assert len(ids) > 64 and ids[:-8] == whole[: len(ids) - 8]
    assert 500_000 < tokens < 2_000_000  # by the share of tokens in what was read


async def test_a_tenants_long_prompts_do_not_hold_up_anothers(folder: Path) -> None:
    index = PrefixIndex("m", bytes_max=10_000, orphans_max=1, default_block_tokens=4, clock=lambda: 0.0)
    order: list[str] = []
    all_wait = threading.Event()

    def until_all_wait() -> Generator[None, None, None]:
        all_wait.wait(60)
        yield

    with contextlib.closing(FairThreads(1, "test")) as threads:
        reader = PromptReader("m", index, PromptTokenizer.load(folder), threads, LimitsConfig)

        async def read(tenant: str, text: str) -> None:
            await reader.read(CompletionPrompt(text), tenant)
            order.append(tenant)

        async with asyncio.TaskGroup() as group:
            threads.run("", until_all_wait())  # or a quick thread ends a prompt before the last one is queued
            for at in range(3):
                group.create_task(read("long", f"{at} {WORDS}" * 4_000))
            group.create_task(read("short", "other words " * (INLINE_CHARS_MAX // 8)))
            await asyncio.sleep(0)
            all_wait.set()

    assert order[0] == "short"


class CountingThreads(FairThreads):
    """jobs: how many were given to it."""

    jobs = 0

    def run(self, group: str, steps: Generator[None, None, Any]) -> asyncio.Future[Any]:
        self.jobs += 1
        return super().run(group, steps)


SEEN = [{"role": role, "content": f"{at} {WORDS * 40}"} for at, role in enumerate(["user", "assistant"] * 12)]
COSTLY = {
    "new text": ([{"role": "user", "content": WORDS * 500}], {}),
    "many places": ([{"role": "user", "content": "<" * (SPECIAL_PLACES_MAX + 1)}], {}),
    "long tools": ([], {"tools": [{"function": {"name": "f", "description": "x" * INLINE_CHARS_MAX}}]}),
    "long arguments": ([{**CALL, "role": "assistant", "tool_calls": [{"function": "x" * INLINE_CHARS_MAX}]}], {}),
    "many messages": ([{"role": "user", "content": "x"}] * INLINE_ITEMS_MAX, {}),
    "another kind of part": ([{"role": "user", "content": [{"type": "text", "text": ["x" * INLINE_CHARS_MAX]}]}], {}),
}


@pytest.mark.parametrize("more", COSTLY)
async def test_a_turn_that_extends_a_long_chat_is_read_on_the_event_loop_and_what_costs_more_is_not(
    folder: Path, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_module, "TOKENIZE_SECONDS_MAX", 60.0)
    monkeypatch.setattr(prompt_module, "WAIT_SECONDS_MAX", 60.0)
    index = PrefixIndex("m", bytes_max=10_000, orphans_max=1, default_block_tokens=4, clock=lambda: 0.0)
    with contextlib.closing(CountingThreads(1, "test")) as threads:
        reader = PromptReader("m", index, tokenizer := PromptTokenizer.load(folder), threads, LimitsConfig)
        await reader.read(ChatPrompt(SEEN))
        assert threads.jobs == 1 and len(render(tokenizer, ChatPrompt(SEEN))) > 2 * INLINE_CHARS_MAX
        turn = [{"role": "user", "content": [{"type": "text", "text": "And then?"}]}]
        extended = await reader.read(ChatPrompt([*SEEN, *turn]))
        assert threads.jobs == 1
        ids = list(render_and_encode(tokenizer, ChatPrompt([*SEEN, *turn])))
        assert extended.keys == token_block_keys(namespace_key("m"), ids, 4)

        messages, members = COSTLY[more]
        await reader.read(ChatPrompt([*SEEN, *messages], **members))
        assert threads.jobs == 2


places_text = st.lists(st.sampled_from(["<", "<|im_start|>", "<|im_end|>", "<|im_", "é", "東京", " "]), max_size=20)


@given(text=places_text.map("".join), most=st.integers(1, 8))
def test_special_tokens_are_found_where_their_pattern_finds_them(
    tokenizer: PromptTokenizer, text: str, most: int
) -> None:
    assert tokenizer._special is not None and tokenizer._special_begin == "<"
    places = [found.start() for found in tokenizer._special.finditer(text)]
    with patch.object(tokenizer_module, "SPECIAL_PLACES_MAX", most):
        assert tokenizer._special_places(text) == places
        few = tokenizer._special_places(text, any_number=False)
    assert few == places if text.count("<") <= most else few in (places, None)


text = st.text(max_size=40) | st.sampled_from(["<|im_start|>", "<|im_end|>", "<|im_", "the fox", " "])


@settings(deadline=None)
@given(pieces=st.lists(text, max_size=8))
def test_segments_never_change_the_tokens(tokenizer: PromptTokenizer, reference: Any, pieces: list[str]) -> None:
    joined = "".join(pieces)

    assert list(tokenizer.encode(joined, add_special_tokens=False)) == reference.encode(
        joined, add_special_tokens=False
    )


def test_tool_arguments_as_text_become_objects_and_parts_become_text(tokenizer: PromptTokenizer) -> None:
    assert tokenizer.template is not None
    as_text = {**CALL, "function": {"name": "f", "arguments": '{"x": 1.5}'}}
    given_message = {
        "role": "assistant",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        "tool_calls": [as_text],
    }
    plain = {"role": "assistant", "content": "a\nb", "tool_calls": [CALL]}

    assert tokenizer.template.render([given_message]) == tokenizer.template.render([plain])
    assert as_text["function"] == {"name": "f", "arguments": '{"x": 1.5}'}


def test_templates_that_walk_parts_get_parts() -> None:
    template = ChatTemplate(PARTS_TEMPLATE, {})

    assert template.render([{"role": "user", "content": "one"}]) == "one|"


@pytest.mark.parametrize("message", [{"role": "user", "content": "x"}, {"content": "x", "role": "user"}])
def test_a_template_that_writes_out_messages_sees_their_members_in_vllm_s_order(message: dict[str, Any]) -> None:
    template = ChatTemplate("{{ messages | tojson }}", {})

    assert template.render([message]) == '[{"role": "user", "content": "x"}]'


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"content": "no role"},
        {"role": "developer", "content": "x"},
        {"role": "user", "content": 7},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
    ],
)
def test_what_cannot_be_mirrored_is_said(tokenizer: PromptTokenizer, message: dict[str, Any]) -> None:
    assert tokenizer.template is not None
    with pytest.raises(CannotRender):
        tokenizer.template.render([message])


UNSAFE = [
    "messages.append(1)",
    "messages[0].update({})",
    "messages[0].update.__name__",
    "messages[0].__class__.__mro__",
    "''.__class__.__mro__",
    "'{0.__class__.x}'.format(messages)",
    "raise_exception.__globals__.x",
    "strftime_now.__code__.x",
]


@pytest.mark.parametrize("unsafe", UNSAFE)
def test_templates_are_sandboxed(unsafe: str) -> None:
    template = ChatTemplate("{{ " + unsafe + " }}", {})
    with pytest.raises(CannotRender, match="SecurityError"):
        template.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("name", ["__class__", "__init__", "__dict__", "_iterable", "_iterator", "_recurse"])
@pytest.mark.parametrize("access", ["loop.{}.x", "loop['{}'].x", "(loop | attr('{}')).x"])
def test_a_loop_object_gives_away_no_more_than_its_public_attributes(name: str, access: str) -> None:
    expression = access.format(name)
    template = ChatTemplate("{% for message in messages %}{{ " + expression + " }}{% endfor %}", {})
    with pytest.raises(CannotRender, match="SecurityError"):
        template.render([{"role": "user", "content": "x"}])


def test_attributes_have_the_values_that_jinja2_s_own_sandbox_gives() -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    source = (
        "{% for message in messages %}{{ loop.index }} {{ loop.index0 }} {{ loop.first }} {{ loop.last }} "
        "{{ loop.length }} {{ loop.revindex }} {{ loop.revindex0 }} {{ loop.depth }} {{ loop.depth0 }} "
        "{{ loop.previtem }} {{ loop.nextitem }} {{ loop.cycle(1, 2) }} {{ loop.nothing }} "
        "{{ message.role }} {{ message.content }} {{ message.nothing is defined }} {{ message.items() | list }} "
        "{{ message.values is callable }} {{ message.tool_call_id }}\n{% endfor %}"
    )
    messages = [{"role": role, "content": "x"} for role in ("system", "user", "assistant")]
    expected = ImmutableSandboxedEnvironment().from_string(source).render(messages=messages)

    assert ChatTemplate(source, {}).render(messages) == expected


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerUnusable, match=r"tokenizer\.json does not exist"):
        PromptTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerUnusable, match="cannot be read"):
        PromptTokenizer.load(tmp_path)


async def test_reader_uses_tokens_where_it_can_and_text_elsewhere(tokenizer: PromptTokenizer) -> None:
    index = PrefixIndex("m", bytes_max=10_000, orphans_max=1, default_block_tokens=4, clock=lambda: 0.0)
    messages = [{"role": "user", "content": "the quick brown fox " * 10}]
    with contextlib.closing(FairThreads(1, "test")) as executor:
        exact = PromptReader("m", index, tokenizer, executor, LimitsConfig)
        textual = PromptReader("m", index, None, executor, LimitsConfig)
        by_tokens = await exact.read(ChatPrompt(messages, cache_salt="s"))
        by_text = await textual.read(ChatPrompt(messages, cache_salt="s"))
        with_image = await exact.read(ChatPrompt([{"role": "user", "content": [{"type": "image_url"}]}]))
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:" + "A" * 4_000}}]}]
        by_text_with_image = await textual.read(ChatPrompt(image))
        beyond = await textual.read(CompletionPrompt("x" * (LimitsConfig().text_chars_max + 1)))
        ids = list(render_and_encode(tokenizer, ChatPrompt(messages)))
        short = await textual.read(CompletionPrompt("the fox"))
        as_ids = await textual.read(CompletionPrompt(array("I", ids), cache_salt="s"))
        long = [{"role": "user", "content": "new words " * INLINE_CHARS_MAX}]
        by_thread = await exact.read(ChatPrompt(long, cache_salt="s"))
        long_ids = list(render_and_encode(tokenizer, ChatPrompt(long)))

    assert by_tokens.keys == token_block_keys(namespace_key("m", None, "s"), ids, 4)
    assert by_tokens.prompt_tokens == len(ids)
    assert not set(by_tokens.keys) & set(by_text.keys)
    assert with_image.prompt_tokens >= 1
    assert by_tokens.text_tokens is None
    assert by_text.text_tokens == sum(len(part) for part in ("\x1e", "user", "\x1f", messages[0]["content"])) // 4
    assert by_text_with_image.text_tokens == beyond.text_tokens == 0
    assert short.keys == []
    assert as_ids == by_tokens
    assert by_thread.keys == token_block_keys(namespace_key("m", None, "s"), long_ids, 4)
    assert by_thread.prompt_tokens == len(long_ids)


async def test_the_engine_s_own_tokens_decide(folder: Path, start_engine: Any) -> None:
    tokenizer = PromptTokenizer.load(folder)

    def as_gateway(body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            return list(render_and_encode(tokenizer, ChatPrompt(body["messages"])))
        return list(render_and_encode(tokenizer, CompletionPrompt(body["prompt"])))

    agreeing = await start_engine(name="agreeing", tokenize=as_gateway)
    other = await start_engine(name="other")
    mute = await start_engine(name="mute", tokenize_route=False)
    async with aiohttp.ClientSession() as session:

        async def verify(engine: Any) -> bool:
            return await verify_tokenizer(
                tokenizer, session, model="fake", engine_name=engine.name, engine_url=engine.url
            )

        assert await verify(agreeing)
        with pytest.raises(Disagreement, match="first difference"):
            await verify(other)
        assert not await verify(mute)


async def test_a_disagreeing_tokenizer_is_reported_and_unused(
    folder: Path, start_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from spillway_gateway.testing.running import gateway_config, running_gateway, until

    engine = await start_engine()
    async with running_gateway(gateway_config([engine], tokenizer=str(folder))) as running:
        reader = running.gateway.models["fake"].reader
        await until(lambda: reader.tokenizer is None)
        usable = running.gateway.metrics.registry.get_sample_value(
            "spillway_gateway_tokenizer_usable", {"model": "fake"}
        )

    assert usable == 0.0
    assert "the tokenizer disagrees with engine fake-0" in caplog.text


segments = st.sampled_from(["<|im_start|>the fox", "<|im_end|>\n", "<|im_start|>", "lazy dog ", "<|im_end|>"])


@pytest.fixture
def short_beginnings() -> Iterator[None]:
    """Keep beginnings of a few characters, too."""
    with (
        patch.object(known_beginnings, "MARKS", (4, 8, 16, 32, 64, 128, 256)),
        patch.object(known_beginnings, "MARK_CHARS", 4),
        patch.object(tokenizer_module, "KEPT_SEGMENTS_MIN", 1),
    ):
        yield


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=st.lists(st.lists(segments | st.text(max_size=3), max_size=6).map("".join), min_size=1, max_size=5),
    other=st.lists(segments, max_size=12).map("".join),
    owner=st.sampled_from(["", "a"]),
    stepped_turn=st.integers(0, 5),
)
def test_known_beginnings_never_change_the_tokens_of_a_growing_text(
    tokenizer: PromptTokenizer,
    reference: Any,
    short_beginnings: None,
    turns: list[str],
    other: str,
    owner: str,
    stepped_turn: int,
) -> None:
    for end in range(1, len(turns) + 1):
        grown = "".join(turns[:end])
        for text in (grown, grown, grown[: len(grown) // 2] + other, "".join(turns[: end - 1]) + other):
            expected = list(reference.encode(text, add_special_tokens=False))
            if end == stepped_turn:
                assert stepped(tokenizer, text, owner=owner)[0] == expected
            ids = tokenizer.encode_inline(text, add_special_tokens=False, new_chars_max=len(text), owner=owner)
            assert ids == token_bytes(expected)


@pytest.mark.parametrize("in_steps", [False, True])
def test_a_turn_of_a_long_conversation_looks_up_no_segment_of_the_turn_before_it(folder: Path, in_steps: bool) -> None:
    tokenizer, asked = PromptTokenizer.load(folder), 0
    turns = ["".join(f"<|im_start|>the fox {turn} {at}" for at in range(600)) for turn in range(3)]
    get_all = tokenizer._segments.get_all

    def counted(keys: Any) -> Any:
        nonlocal asked
        asked += len(keys)
        return get_all(keys)

    if in_steps:
        stepped(tokenizer, turns[0], owner="a")
    else:
        tokenizer.encode_inline(turns[0], add_special_tokens=False, new_chars_max=20_000, owner="a")
    for text, looked_up in ((turns[0], 2), (turns[0] + turns[1], 602), (turns[0] + turns[1], 2), ("".join(turns), 602)):
        asked = 0
        with patch.object(tokenizer._segments, "get_all", counted):
            ids = tokenizer.encode_inline(text, add_special_tokens=False, new_chars_max=20_000, owner="a")
        assert ids == token_bytes(tokenizer.encode(text, add_special_tokens=False))
        assert asked == pytest.approx(looked_up, abs=1)
