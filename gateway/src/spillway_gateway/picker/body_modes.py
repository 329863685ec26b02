"""Ways in which a proxy sends bodies: Envoy's processing modes, as the first message of a call names them. Pure.

In FULL_DUPLEX_STREAMED, which the Inference Extension prescribes, the proxy hands bodies over as they come. In BUFFERED
(requests) and STREAMED (replies) it keeps them until they are answered, so if the picker dies it still has them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from spillway_gateway.errors import GatewayError

STREAMED, BUFFERED, FULL_DUPLEX_STREAMED = 1, 2, 4  # ProcessingMode.BodySendMode
_NAMES = {0: "NONE", STREAMED: "STREAMED", 3: "BUFFERED_PARTIAL", BUFFERED: "BUFFERED", 5: "GRPC"}


class UnusableModes(GatewayError):
    """The proxy's processing modes do not send what the picker needs."""

    status = 500
    kind = "server_error"
    code = "proxy_misconfigured"


class BodyModes(NamedTuple):
    """Bodies that the proxy keeps: the request's, which comes whole; the reply's, of which it wants an answer to each
    chunk."""

    keeps_request: bool = False
    keeps_reply: bool = False


def body_modes(opening: Any) -> BodyModes:
    """Return the modes of a call. A proxy that names none, such as Envoy before 1.34, uses FULL_DUPLEX_STREAMED.

    Args:
        opening: the call's first message.

    Raises:
        UnusableModes: no request can be answered in these modes.
    """
    if not opening.HasField("protocol_config"):
        return BodyModes()
    given = opening.protocol_config
    request, reply = given.request_body_mode, given.response_body_mode
    if request not in (BUFFERED, FULL_DUPLEX_STREAMED):
        raise _unusable("request_body_mode", request, "FULL_DUPLEX_STREAMED or BUFFERED")
    if reply not in (STREAMED, FULL_DUPLEX_STREAMED):
        raise _unusable("response_body_mode", reply, "FULL_DUPLEX_STREAMED or STREAMED")
    if reply == STREAMED and not given.send_body_without_waiting_for_header_response:
        raise UnusableModes(
            "The proxy's response_body_mode STREAMED needs send_body_without_waiting_for_header_response: true, as a "
            "reply's head is answered once its beginning is known"
        )
    return BodyModes(request == BUFFERED, reply == STREAMED)


def _unusable(name: str, given: int, needed: str) -> UnusableModes:
    return UnusableModes(f"The proxy's {name} is {_NAMES.get(given, given)}; the endpoint picker needs {needed}")
