"""Converts ASGI's headers to and from the messages of Envoy's external processing. Pure.

The names of the header and of its place in the metadata are those of the Inference Extension's protocol (proposal 004,
"Endpoint Picker Protocol").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from spillway_gateway.picker.messages import (
    APPEND,
    OVERWRITE,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HeaderValue,
    HeaderValueOption,
    HttpStatus,
    ImmediateResponse,
    ProcessingResponse,
    TrailersResponse,
)
from spillway_gateway.upstream.forward import Body, Headers, header

DESTINATION_HEADER = "x-gateway-destination-endpoint"
DESTINATION_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
# Envoy passes on at most 64 KiB of a body at once.
_PIECE_BYTES = 60_000
_OF_THE_CONNECTION = (b"content-length", b"transfer-encoding", b"host")


def headers_of(given: Any) -> Headers:
    """Return the headers of a HeaderMap, pseudo-headers included, with names in lower case."""
    return [
        (each.key.lower().encode(), each.raw_value or each.value.encode("utf-8", "surrogateescape"))
        for each in given.headers
    ]


def request_scope(headers: Headers) -> tuple[str, bytes, bytes, Headers]:
    """Return method, path, query and headers as an ASGI server gives them."""
    target = header(headers, b":path") or b"/"
    path, _, query = target.partition(b"?")
    method = (header(headers, b":method") or b"GET").decode("latin-1")
    authority = header(headers, b":authority")
    plain = [pair for pair in headers if not pair[0].startswith(b":")]
    if authority is not None:
        plain.append((b"host", authority))
    return method, path, query, plain


def subset_of(request: Any) -> frozenset[str] | None:
    """Return the addresses (IP:PORT) that the proxy accepts; None: any."""
    hints = [each.value for each in request.metadata_context.filter_metadata if each.key == SUBSET_NAMESPACE]
    hint = hints[-1] if hints else None
    if hint is None or SUBSET_KEY not in hint.fields:
        return None
    value = hint.fields[SUBSET_KEY]
    listed = [each.string_value for each in value.list_value.values] or value.string_value.split(",")
    return frozenset(each.strip() for each in listed if each.strip())


def body_wanted() -> bytes:
    """The answer to a request's headers if its body comes whole: only then is an engine chosen."""
    return _serialized(ProcessingResponse(request_headers=HeadersResponse()))


def request_to_engine(given: Headers, head: bytes, destination: str) -> bytes:
    """Return the message with the request's headers for the engine.

    Args:
        given: the headers of the request, with pseudo-headers.
        head: the head of the request to the engine, as upstream.forward.request_head writes it.
        destination: IP:PORT of the engine.
    """
    answer = ProcessingResponse()
    _direct(answer, answer.request_headers.response, given, head, destination)
    return _serialized(answer)


def whole_request_to_engine(given: Headers, head: bytes, destination: str, body: Body | None) -> bytes:
    """Return the same as the answer to a whole body, with the engine's body; None: the body is unchanged."""
    answer = ProcessingResponse()
    common = answer.request_body.response
    _direct(answer, common, given, head, destination)
    if body is not None:
        _replace_body(common, bytes(body))
    return _serialized(answer)


def _direct(answer: Any, common: Any, given: Headers, head: bytes, destination: str) -> None:
    """Fill in the engine's address and the request's headers. common: the answer's response."""
    first, *lines = head.rstrip(b"\r\n").split(b"\r\n")
    wanted: Headers = []
    for line in lines:
        name, _, value = line.partition(b": ")
        if name not in _OF_THE_CONNECTION:
            wanted.append((name, value))
    path = first.split(b" ")[1]
    if header(given, b":path") != path:
        wanted.append((b":path", path))
    wanted.append((DESTINATION_HEADER.encode(), destination.encode()))
    kept = [pair for pair in given if not pair[0].startswith(b":")]
    common.header_mutation.CopyFrom(_mutation(kept, wanted))
    common.clear_route_cache = True
    answer.dynamic_metadata.get_or_create_struct(DESTINATION_NAMESPACE)[DESTINATION_HEADER] = destination


def reply_to_client(given: Headers, status: int, headers: Headers) -> bytes:
    """Return the message with the reply's headers for the client.

    Args:
        given: the headers of the engine's reply, with pseudo-headers.
        status: the reply's status.
        headers: as the gateway would send them.
    """
    wanted = [pair for pair in headers if pair[0] not in _OF_THE_CONNECTION]
    if header(given, b":status") != b"%d" % status:
        wanted.append((b":status", b"%d" % status))
    kept = [pair for pair in given if not pair[0].startswith(b":")]
    mutation = CommonResponse(header_mutation=_mutation(kept, wanted))
    return _serialized(ProcessingResponse(response_headers=HeadersResponse(response=mutation)))


def without_request_trailers(given: Headers) -> bytes:
    """The answer to a request's trailers: the engine gets none of them."""
    return _serialized(ProcessingResponse(request_trailers=TrailersResponse(header_mutation=_mutation(given, []))))


def without_reply_trailers(given: Headers) -> bytes:
    """The answer to a reply's trailers: clients get none of them."""
    return _serialized(ProcessingResponse(response_trailers=TrailersResponse(header_mutation=_mutation(given, []))))


def immediate(status: int, headers: Headers, body: bytes) -> bytes:
    """The message with an answer of the gateway itself: the proxy asks no engine."""
    wanted = [pair for pair in headers if pair[0] not in _OF_THE_CONNECTION]
    answer = ImmediateResponse(status=HttpStatus(code=status), headers=_mutation([], wanted), body=body)
    return _serialized(ProcessingResponse(immediate_response=answer))


def request_body_pieces(body: Body, *, last: bool) -> Iterator[bytes]:
    """Messages with the whole body, in pieces that the proxy takes; the last one ends the request if nothing follows
    the body."""
    for piece, ends in _pieces(body):
        answer = ProcessingResponse()
        _fill(answer.request_body, piece, last=last and ends)
        yield _serialized(answer)


def reply_body_pieces(body: bytes, *, last: bool) -> Iterator[bytes]:
    """Messages with a part of the reply's body; the last one ends the reply if this is its last part."""
    for piece, ends in _pieces(body):
        answer = ProcessingResponse()
        _fill(answer.response_body, piece, last=last and ends)
        yield _serialized(answer)


def chunk_answer(body: bytes | None) -> bytes:
    """Return the answer to a chunk of the reply that the proxy keeps. body: replaces the chunk; None: unchanged."""
    answer = ProcessingResponse()
    answer.response_body.SetInParent()
    if body is not None:
        _replace_body(answer.response_body.response, body)
    return _serialized(answer)


def _replace_body(common: Any, body: bytes) -> None:
    if body:
        common.body_mutation.body = body
    else:
        common.body_mutation.clear_body = True


def _pieces(body: Body) -> Iterator[tuple[bytes, bool]]:
    """Yield each piece, and whether it is the last one."""
    for at in range(0, max(1, len(body)), _PIECE_BYTES):
        yield bytes(body[at : at + _PIECE_BYTES]), at + _PIECE_BYTES >= len(body)


def _fill(answer: Any, body: bytes, *, last: bool) -> None:
    """Fill the message in place: assigning a message to a field would copy it, with its body."""
    streamed = answer.response.body_mutation.streamed_response
    streamed.body = body
    streamed.end_of_stream = last


def _serialized(answer: Any) -> bytes:
    serialized: bytes = answer.SerializeToString()
    return serialized


def _mutation(given: Headers, wanted: Headers) -> Any:
    """Return the mutation from the given headers to the wanted ones. Content-length is removed: bodies may grow."""
    before, after = _by_name(given), _by_name(wanted)
    options = [
        _option(name, value, again=at > 0)
        for name, values in after.items()
        if before.get(name) != values
        for at, value in enumerate(values)
    ]
    removed = [name.decode("latin-1") for name in before if name not in after and name != b"host"]
    return HeaderMutation(set_headers=options, remove_headers=removed)


def _by_name(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, list[bytes]]:
    named: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        named.setdefault(name, []).append(value)
    return named


def _option(name: bytes, value: bytes, *, again: bool) -> Any:
    """Return a header option. again: add the value to those that the name has already."""
    header = HeaderValue(key=name.decode("latin-1"), raw_value=value)
    return HeaderValueOption(header=header, append_action=APPEND if again else OVERWRITE, keep_empty_value=True)
