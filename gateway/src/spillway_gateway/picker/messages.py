"""The messages of Envoy's external processing and of gRPC's health protocol that the picker uses.

Names and numbers of fields are those of ``envoy/service/ext_proc/v3/external_processor.proto``, the files that it
imports, and ``grpc/health/v1/health.proto``; enums are numbers. The package with all of Envoy's messages (xds-protos)
cannot be used: it brings older files of OpenTelemetry's messages, which replace those that the trace exporter needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH_SERVICE = "grpc.health.v1.Health"
SERVING, NOT_SERVING = 1, 2  # HealthCheckResponse.ServingStatus
APPEND, OVERWRITE = 0, 2  # HeaderValueOption.HeaderAppendAction: APPEND_IF_EXISTS_OR_ADD, OVERWRITE_IF_EXISTS_OR_ADD

_PACKAGE = "spillway.picker"
_STRUCT = struct_pb2.DESCRIPTOR.package + ".Struct"
_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {"bool": _FIELD.TYPE_BOOL, "bytes": _FIELD.TYPE_BYTES, "int": _FIELD.TYPE_INT32, "text": _FIELD.TYPE_STRING}
# Message -> field -> number and type. `*` behind a type: repeated. `|`: one of a message's fields of that kind is set.
_MESSAGES: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "HeaderValue": {"key": (1, "text"), "value": (2, "text"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "HeaderValue*")},
    "HeaderValueOption": {
        "header": (1, "HeaderValue"),
        "append_action": (3, "int"),
        "keep_empty_value": (4, "bool"),
    },
    "HeaderMutation": {"set_headers": (1, "HeaderValueOption*"), "remove_headers": (2, "text*")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {"trailers": (1, "HeaderMap")},
    "FilterMetadataEntry": {"key": (1, "text"), "value": (2, _STRUCT)},
    "Metadata": {"filter_metadata": (1, "FilterMetadataEntry*")},
    "ProtocolConfiguration": {
        "request_body_mode": (1, "int"),
        "response_body_mode": (2, "int"),
        "send_body_without_waiting_for_header_response": (3, "bool"),
    },
    "ProcessingRequest": {
        "request_headers": (2, "HttpHeaders|"),
        "response_headers": (3, "HttpHeaders|"),
        "request_body": (4, "HttpBody|"),
        "response_body": (5, "HttpBody|"),
        "request_trailers": (6, "HttpTrailers|"),
        "response_trailers": (7, "HttpTrailers|"),
        "metadata_context": (8, "Metadata"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "BodyMutation": {
        "body": (1, "bytes|"),
        "clear_body": (2, "bool|"),
        "streamed_response": (3, "StreamedBodyResponse|"),
    },
    "CommonResponse": {
        "header_mutation": (2, "HeaderMutation"),
        "body_mutation": (3, "BodyMutation"),
        "clear_route_cache": (5, "bool"),
    },
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "TrailersResponse": {"header_mutation": (1, "HeaderMutation")},
    "HttpStatus": {"code": (1, "int")},
    "ImmediateResponse": {"status": (1, "HttpStatus"), "headers": (2, "HeaderMutation"), "body": (3, "bytes")},
    "ProcessingResponse": {
        "request_headers": (1, "HeadersResponse|"),
        "response_headers": (2, "HeadersResponse|"),
        "request_body": (3, "BodyResponse|"),
        "response_body": (4, "BodyResponse|"),
        "request_trailers": (5, "TrailersResponse|"),
        "response_trailers": (6, "TrailersResponse|"),
        "immediate_response": (7, "ImmediateResponse|"),
        "dynamic_metadata": (8, _STRUCT),
    },
    "HealthCheckRequest": {"service": (1, "text")},
    "HealthCheckResponse": {"status": (1, "int")},
}


def _described(name: str, fields: Mapping[str, tuple[int, str]]) -> descriptor_pb2.DescriptorProto:
    message = descriptor_pb2.DescriptorProto(name=name)
    for field, (number, kind) in fields.items():
        given = message.field.add(name=field, number=number, label=_FIELD.LABEL_OPTIONAL)
        base = kind.rstrip("*|")
        if kind.endswith("*"):
            given.label = _FIELD.LABEL_REPEATED
        elif kind.endswith("|"):
            if not message.oneof_decl:
                message.oneof_decl.add(name="kind")
            given.oneof_index = 0
        if base in _SCALARS:
            given.type = _SCALARS[base]
        else:
            given.type = _FIELD.TYPE_MESSAGE
            given.type_name = f".{base}" if base == _STRUCT else f".{_PACKAGE}.{base}"
    return message


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="spillway/picker.proto", package=_PACKAGE, syntax="proto3")
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    file.message_type.extend(_described(name, fields) for name, fields in _MESSAGES.items())
    pool = descriptor_pool.Default()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


_CLASS = _classes()
BodyMutation: Any = _CLASS["BodyMutation"]
BodyResponse: Any = _CLASS["BodyResponse"]
CommonResponse: Any = _CLASS["CommonResponse"]
HeaderMutation: Any = _CLASS["HeaderMutation"]
HeadersResponse: Any = _CLASS["HeadersResponse"]
HealthCheckRequest: Any = _CLASS["HealthCheckRequest"]
HealthCheckResponse: Any = _CLASS["HealthCheckResponse"]
HeaderValue: Any = _CLASS["HeaderValue"]
HeaderValueOption: Any = _CLASS["HeaderValueOption"]
HttpHeaders: Any = _CLASS["HttpHeaders"]
HttpStatus: Any = _CLASS["HttpStatus"]
ImmediateResponse: Any = _CLASS["ImmediateResponse"]
ProcessingRequest: Any = _CLASS["ProcessingRequest"]
ProcessingResponse: Any = _CLASS["ProcessingResponse"]
StreamedBodyResponse: Any = _CLASS["StreamedBodyResponse"]
TrailersResponse: Any = _CLASS["TrailersResponse"]
