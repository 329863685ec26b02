"""The gateway's errors. Each class names the owner of the fault, and its message what to change.

`status`, `kind` and `code` are what error_bodies.py puts into OpenAI's error shape.
"""

from __future__ import annotations

from spillway_settings.wire import ENDING_ERROR


class GatewayError(Exception):
    """Root of everything the gateway itself raises for a request."""

    status = 500
    kind = "server_error"
    code: str | None = "internal_error"
    param: str | None = None
    retry_after_seconds: int | None = None

    def __init__(self, message: str = "", retry_after_seconds: int | None = None) -> None:
        super().__init__(message)
        if retry_after_seconds is not None:
            self.retry_after_seconds = retry_after_seconds

    @property
    def message(self) -> str:
        return str(self.args[0]) or self.__class__.__name__


class ConfigError(Exception):
    """The configuration cannot be used; the message names the setting and the remedy."""


class ClientBadRequest(GatewayError):
    status = 400
    kind = "invalid_request_error"
    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class RequestTooLarge(GatewayError):
    status = 413
    kind = "invalid_request_error"
    code = "request_too_large"


class UnsupportedEncoding(GatewayError):
    """A compressed body: engines accept none, and its real size is not known."""

    status = 415
    kind = "invalid_request_error"
    code = "unsupported_content_encoding"


class RequestBodyTimeout(GatewayError):
    status = 408
    kind = "invalid_request_error"
    code = "request_timeout"


class ModelNotFound(GatewayError):
    status = 404
    kind = "invalid_request_error"
    code = "model_not_found"
    param = "model"


class KeyMissing(GatewayError):
    status = 401
    kind = "invalid_request_error"
    code = "missing_api_key"


class KeyUnknown(GatewayError):
    status = 401
    kind = "invalid_request_error"
    code = "invalid_api_key"


class ModelForbidden(GatewayError):
    status = 403
    kind = "invalid_request_error"
    code = "model_not_allowed"
    param = "model"


class OperatorOnly(GatewayError):
    status = 403
    kind = "invalid_request_error"
    code = "operator_only"


class RouteNotSalted(GatewayError):
    """The engines cannot keep tenants apart on this route; see auth.unsaltedRoutes."""

    status = 403
    kind = "invalid_request_error"
    code = "route_not_salted"


class TokensNotCounted(GatewayError):
    """A tenant with a token limit sent a request whose tokens no reply reports."""

    status = 403
    kind = "invalid_request_error"
    code = "tokens_not_counted"


class BackgroundNotCounted(GatewayError):
    """A tenant with limits asked for a response in the background, which none of them would hold."""

    status = 403
    kind = "invalid_request_error"
    code = "background_not_counted"
    param = "background"


class ResponseNotFound(GatewayError):
    status = 404
    kind = "invalid_request_error"
    code = "response_not_found"


class TenantLimited(GatewayError):
    """A limit of the tenant is reached; the same request may pass after retry_after_seconds."""

    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"


class RequestSuspected(GatewayError):
    """An engine ended while it served this very request; see upstream/suspects.py. No status that clients retry."""

    status = 422
    kind = "invalid_request_error"
    code = "request_suspected"


class GatewayOverloaded(GatewayError):
    """The engines have no room for any tenant."""

    status = 503
    kind = "service_unavailable"
    code = "engines_full"
    retry_after_seconds = 2


class NoEngineReady(GatewayError):
    """Error: no engine of the model can take a request; names the engines and what they answered."""

    status = 503
    kind = "service_unavailable"
    code = "no_engine_ready"
    retry_after_seconds = 2


class NoEngineInTime(NoEngineReady):
    """The request has waited for an engine for as long as it may."""


class GatewayDraining(GatewayError):
    status = 503
    kind = "service_unavailable"
    code = "gateway_draining"
    retry_after_seconds = 2


class UpstreamError(GatewayError):
    """An attempt on one engine failed; the subclass names the wait or the fault."""

    status = 502
    kind = "upstream_error"
    code = "engine_disconnected"
    reason = "disconnected"  # label of spillway_gateway_retries_total, a closed set


class EngineRefused(UpstreamError):
    code = "engine_unreachable"
    reason = "refused"


class EngineConnectTimeout(UpstreamError):
    status = 504
    code = "engine_unreachable"
    reason = "connect_timeout"


class EngineDisconnected(UpstreamError):
    """The engine closed or broke the connection before the reply was whole."""


class EngineFailed(UpstreamError):
    """The engine's HTTP server answered that the engine failed, or gave the answer up."""

    code = "engine_failed"
    reason = "failed"


class EngineFirstByteTimeout(UpstreamError):
    status = 504
    code = "engine_timeout"
    reason = "first_byte_timeout"


class EngineIdleTimeout(UpstreamError):
    status = 504
    code = "engine_timeout"
    reason = "idle_timeout"


class EngineWentDown(UpstreamError):
    """Health polls declared the engine down while a request still waited for its first byte."""

    reason = "went_down"


class EngineEnding(UpstreamError):
    """The engine is shutting down, and the time for its running requests is over."""

    status = 503
    code = ENDING_ERROR
    reason = "ending"
    retry_after_seconds = 2

    @classmethod
    def of(cls, engine_name: str) -> EngineEnding:
        return cls(f"Engine {engine_name} is shutting down, and this reply was not finished in time")


def engine_failure(engine_name: str, message: str) -> EngineFailed | EngineEnding:
    """Return the error for a failure that an engine reports. message: ENDING_ERROR if no request is why it ends."""
    if message == ENDING_ERROR:
        return EngineEnding.of(engine_name)
    return EngineFailed(f"Engine {engine_name} failed: {message}")


class AdapterNotServed(UpstreamError):
    """The engine has no such LoRA adapter, or could not load it; another one may."""

    status = 404
    kind = "invalid_request_error"
    code = "model_not_found"
    param = "model"
    reason = "adapter"


class EngineBadReply(UpstreamError):
    """The reply is not HTTP."""

    code = "engine_bad_reply"
    reason = "bad_reply"
