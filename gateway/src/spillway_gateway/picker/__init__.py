"""The gateway as an endpoint picker of Gateway API's Inference Extension: a proxy such as Envoy asks it for each
request, over external processing, and carries request and reply itself.

`processed_request.py` turns one stream of messages into a client and a connection, so that the rest of the gateway
(keys, limits, index, prices, sessions, usage, audit) is the same as for its own clients. `frames.py`, `grpc_call.py`
and `grpc_connection.py` are gRPC over HTTP/2, and know nothing of proxies.
"""
