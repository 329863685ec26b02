"""The facts that routing reads from the bodies of each API; no body can break a parser."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.api.chat import parse_chat
from spillway_gateway.api.completions import parse_completion
from spillway_gateway.api.messages import parse_messages
from spillway_gateway.api.pooling import parse_pooling
from spillway_gateway.api.responses import parse_responses
from spillway_gateway.api.routes import ROUTES
from spillway_gateway.errors import ClientBadRequest
from spillway_gateway.tokens.prompt import ChatPrompt, CompletionPrompt
from spillway_gateway.tokens.text_blocks import chat_text


def chat_of(parse: Any, **body: Any) -> ChatPrompt:
    prompt = parse(json.dumps(body).encode()).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_an_anthropic_conversation_is_the_chat_the_engine_makes_of_it() -> None:
    prompt = chat_of(
        parse_messages,
        system=[{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "Be brief."}],
        tools=[{"name": "look", "description": "d", "input_schema": {"properties": {}}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm"},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                    {"type": "text", "text": "so?"},
                ],
            },
        ],
    )

    assert prompt.exact
    call = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    assert list(prompt.messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "rain"},
        {"role": "user", "content": "so?"},
    ]
    function = {"name": "look", "description": "d", "parameters": {"properties": {}, "type": "object"}}
    assert prompt.tools == [{"type": "function", "function": function}]


LENGTHS = {
    "/v1/chat/completions": ({"messages": []}, "max_tokens", None),
    "/v1/completions": ({"prompt": "a"}, "max_tokens", 16),
    "/v1/messages": ({"messages": []}, "max_tokens", None),
    "/v1/responses": ({"input": "a"}, "max_output_tokens", None),
}


@pytest.mark.parametrize("path", list(LENGTHS))
@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        *((500, 500), (500.0, 500), ("500", 500), (" 500 ", 500), ("5e2", 500), (True, 1)),
        *((0.5, None), ("many", None), ("1e400", None), ([500], None), ("5" * 40, None)),
    ],
)
def test_the_length_of_an_answer_is_read_as_engines_read_it(path: str, given: Any, tokens: int | None) -> None:
    body, name, default = LENGTHS[path]
    parse = next(route.parse for route in ROUTES if route.path == path)
    assert parse(json.dumps({**body, name: given}).encode()).reply_tokens_max == tokens
    assert parse(json.dumps(body).encode()).reply_tokens_max == default


@pytest.mark.parametrize("n", [3, 3.0, "3"])
def test_so_is_the_number_of_answers(n: Any) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        body, name, _ = LENGTHS[path]
        parse = next(route.parse for route in ROUTES if route.path == path)
        parsed = parse(json.dumps({**body, name: "500", "n": n}).encode())
        assert (parsed.choices, parsed.reply_tokens_max) == (3, 1500)


@pytest.mark.parametrize("n", ["0" * 40 + "3", "3." + "0" * 40, " " * 40 + "3"])
def test_a_number_of_answers_that_only_engines_would_read_is_refused(n: str) -> None:
    """Engines would take each of these as 3."""
    for path in ("/v1/chat/completions", "/v1/completions"):
        body, _, _ = LENGTHS[path]
        parse = next(route.parse for route in ROUTES if route.path == path)
        with pytest.raises(ClientBadRequest, match=r"^n: "):
            parse(json.dumps({**body, "n": n}).encode())


def test_responses_are_chats() -> None:
    prompt = chat_of(parse_responses, instructions="Be brief.", input="hi", cache_salt="s")
    assert prompt.exact and prompt.cache_salt == "s"
    assert list(prompt.messages) == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    parts = [{"type": "input_text", "text": "hi"}]
    prompt = chat_of(parse_responses, input=[{"role": "user", "content": parts}])
    assert prompt.exact
    assert list(prompt.messages) == [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert not chat_of(parse_responses, input="and?", previous_response_id="resp_1").exact


@pytest.mark.parametrize(
    ("body", "prompt", "other_tokens"),
    [
        ({"input": "one"}, "one", 0),
        ({"input": ["one", "x" * 40]}, "one", 10),
        ({"input": [1, 2]}, array("I", [1, 2]), 0),
        ({"input": [[1, 2], [3, 4, 5]]}, array("I", [1, 2]), 3),
        ({"input": [-1]}, "", 1),
        ({"input": [1, 2, 3.5]}, "", 3),
        ({"input": ["東京" * 20, "東京" * 20]}, "東京" * 20, 40),
        ({"query": "q", "documents": [{"text": "z" * 40}, {"text": "z" * 40}]}, "q", 20),
        ({"query": "q", "documents": {"content": [{"type": "text", "text": "z" * 40}]}}, "q", 11),
        ({"input": {"image": 1}}, "", 0),
        ({"texts": ["one"]}, "one", 0),
        ({"query": "q", "documents": ["first", "y" * 8]}, "q\x1ffirst", 2),
        ({}, "", 0),
    ],
)
def test_the_first_of_a_batch_routes_and_all_of_it_counts(
    body: dict[str, Any], prompt: object, other_tokens: int
) -> None:
    parsed = parse_pooling(json.dumps(body).encode())
    assert isinstance(parsed.prompt, CompletionPrompt)
    assert (parsed.prompt.prompt, parsed.other_tokens) == (prompt, other_tokens)


@pytest.mark.parametrize(
    ("given", "cut"), [(None, None), (-1, None), (0, 1), (8, 8), ("8", 8), (8.5, None), ("x", None), ([8], None)]
)
def test_the_length_to_which_an_engine_cuts_a_prompt(given: object, cut: int | None) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "truncate_prompt_tokens": given}
    assert parse_chat(json.dumps(chat).encode()).prompt_tokens_max == cut
    completion = {"prompt": "hi", "truncate_prompt_tokens": given}
    assert parse_completion(json.dumps(completion).encode()).prompt_tokens_max == cut


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "messages", "input", "tool_result", "name"]),
            inner | st.sampled_from(["text", "tool_use", "tool_result", "thinking", "user", "message"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)
FIELDS = ("messages", "input", "prompt", "system", "tools", "token_ids", "query", "documents", "instructions", "model")


@given(st.dictionaries(st.sampled_from(FIELDS), json_like | st.lists(json_like, max_size=3)))
def test_any_body_is_parsed_or_refused(document: dict[str, Any]) -> None:
    body = json.dumps(document).encode()
    for route in ROUTES:
        try:
            parsed = route.parse(body)
        except ClientBadRequest as error:
            assert error.message
        else:
            if isinstance(parsed.prompt, ChatPrompt):
                chat_text(parsed.prompt.messages, parsed.prompt.tools, 1000)
