"""The gateway's assumptions when it continues an answer, in this interpreter's vLLM: the shape of its chunks, what its
completions take, and how its detokenizer goes on behind a junction. Every version runs this."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    DeltaMessage,
)
from vllm.entrypoints.openai.completion.protocol import (
    CompletionRequest,
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from spillway_gateway.testing.small_tokenizer import write_tokenizer
from spillway_gateway.upstream.continuation.continued_events import ContinuedEvents, body_of, plan_of
from spillway_gateway.upstream.continuation.junction import joined, known_junction, pieces
from spillway_gateway.upstream.continuation.sent_answer import KeptBytes, SentAnswer

TEXT = " No caf\u00e9 \u4e2d\u6587 \U0001f600\U0001f680 \u00fcber, and so on.\n" * 2
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """A tokenizer with so few merges that most characters beyond ASCII are several tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, "and so on, over and over", 270, "")
    made: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return PreTrainedTokenizerFast(tokenizer_object=made)


def detokenizer(tokenizer: Any, prompt: list[int], stop: list[str]) -> FastIncrementalDetokenizer:
    params = SamplingParams(stop=stop, output_kind=RequestOutputKind.DELTA)
    names = EngineCoreRequest.__struct_fields__
    fields: dict[str, Any] = dict.fromkeys(names)
    fields |= {"request_id": "r", "prompt_token_ids": prompt, "sampling_params": params, "arrival_time": 0.0}
    return FastIncrementalDetokenizer(tokenizer, EngineCoreRequest(**fields))


def events_of(
    tokenizer: Any, prompt: list[int], tokens: list[int], stop: list[str], *, chat: bool, group: int = 1
) -> list[bytes]:
    """Return the events that vLLM's serving classes write for a request with return_token_ids."""
    own = detokenizer(tokenizer, prompt, stop)
    events = []
    if chat:
        role = ChatCompletionResponseStreamChoice(
            index=0, delta=DeltaMessage(role="assistant", content=""), logprobs=None, finish_reason=None
        )
        begin = ChatCompletionStreamResponse(
            id="one", object="chat.completion.chunk", created=1, choices=[role], model="m", prompt_token_ids=prompt
        )
        events.append(begin)
    for start in range(0, len(tokens), group):
        ids = tokens[start : start + group]
        stopped = own.update(ids, False)
        last = stopped is not None or start + group >= len(tokens)
        text = own.get_next_output_text(last, True)
        finish = ("stop" if stopped is not None else "length") if last else None
        if chat:
            end = {"stop_reason": stopped} if last else {}
            choice = ChatCompletionResponseStreamChoice(
                index=0, delta=DeltaMessage(content=text), logprobs=None, finish_reason=finish, token_ids=ids, **end
            )
            chunk = ChatCompletionStreamResponse(
                id="one", object="chat.completion.chunk", created=1, choices=[choice], model="m"
            )
        else:
            choice = CompletionResponseStreamChoice(
                index=0,
                text=text,
                logprobs=None,
                finish_reason=finish,
                stop_reason=stopped,
                prompt_token_ids=prompt if start == 0 else None,
                token_ids=ids,
            )
            chunk = CompletionStreamResponse(id="one", object="text_completion", created=1, model="m", choices=[choice])
        events.append(chunk)
        if last:
            break
    return [f"data: {event.model_dump_json(exclude_unset=True)}\n\n".encode() for event in events]


def shown_text(events: bytes) -> tuple[str, Any, Any]:
    text, finish, reason = "", None, None
    for line in events.split(b"\n\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                text += choice["delta"]["content"] if "delta" in choice else choice["text"]
                finish, reason = choice["finish_reason"] or finish, choice.get("stop_reason") or reason
    return text, finish, reason


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("stop", [[], ["no such"], ["o on.\n N"], ["ber, and", "\u6587 "]])
def test_an_answer_that_is_cut_at_any_token_has_the_same_text(
    tokenizer: PreTrainedTokenizerFast, chat: bool, group: int, stop: list[str]
) -> None:
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    asked = events_of(tokenizer, PROMPT, tokens, stop, chat=chat, group=group)
    body: dict[str, Any] = {"model": "m", "stream": True, "stop": stop, "max_tokens": len(tokens)}
    body |= {"messages": []} if chat else {"prompt": PROMPT}
    plan = plan_of(json.dumps(body).encode(), chat=chat)
    whole = shown_text(b"".join(asked))
    for cut in range(1, len(asked)):
        sent = SentAnswer(KeptBytes(lambda: 1 << 20), chat=chat, tokens_max=10_000)
        shown = b"".join(sent.take(event) for event in asked[:cut])
        assert b'token_ids":[' not in shown
        assert sent.lost is None
        junction = known_junction(sent, plan.held_back)
        for piece in pieces(sent, plan.held_back) if junction is None else ():
            text = tokenizer.decode(sent.tokens[piece.start : piece.end].tolist())
            junction = joined(piece, text, sent.sent_text(), plan.held_back)
            if junction is not None:
                break
        assert junction is not None, f"no junction behind {shown_text(shown)[0]!r}"
        request = CompletionRequest(**json.loads(body_of(plan, sent, junction.tokens, len(tokens) - junction.tokens)))
        assert request.prompt == PROMPT + tokens[: junction.tokens]
        assert request.max_tokens == len(tokens) - junction.tokens
        continued = ContinuedEvents(plan, sent, junction)
        rest = events_of(tokenizer, request.prompt, tokens[junction.tokens :], stop, chat=False, group=group)
        shown += b"".join(continued.take(event) for event in rest)
        assert shown_text(shown) == whole


def test_a_continuation_samples_as_the_chat_did() -> None:
    sampling = {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "stop": ["x"],
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "logit_bias": {"5": 1.0},
        "allowed_token_ids": [1, 2],
    }
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, **sampling}
    plan = plan_of(json.dumps(chat).encode(), chat=True)
    sent = SentAnswer(KeptBytes(lambda: 1 << 20), chat=True, tokens_max=100)
    sent.prompt = b"1,2"
    request = CompletionRequest(**json.loads(body_of(plan, sent, 0, 50)))
    defaults: dict[str, Any] = {}
    assert repr(request.to_sampling_params(50, defaults)) == repr(
        ChatCompletionRequest(**chat).to_sampling_params(50, defaults)
    )
    assert request.max_tokens == 50
    assert request.return_token_ids
