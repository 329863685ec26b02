"""An engine whose pages and replies are as large as a bad day makes them: `python -m attack.large_engine MODEL`.

It lists ADAPTERS adapters, has METRICS_BYTES of metrics, and answers each request with REPLY_BYTES.
"""

from __future__ import annotations

import asyncio
import json
import sys

ADAPTERS = 60_000
METRICS_BYTES = 4_000_000
REPLY_BYTES = 4_000_000
_EVENT = b"data: " + json.dumps({"choices": [{"text": "x" * 1000, "index": 0}]}).encode() + b"\n\n"


def pages(model: str) -> dict[str, bytes]:
    adapters = [{"id": f"adapter-{number}", "parent": model} for number in range(ADAPTERS)]
    line = 'vllm:request_success_total{engine="0",model_name="%s",finished_reason="%d"} 1.0\n'
    lines = "".join(line % (model, number) for number in range(METRICS_BYTES // len(line % (model, 10_000))))
    return {
        "/v1/models": json.dumps({"object": "list", "data": [{"id": model}, *adapters]}).encode(),
        "/metrics": lines.encode(),
        "/version": b'{"version": "0.32.0"}',
    }


def plain_reply() -> bytes:
    return json.dumps({"choices": [{"text": "x" * REPLY_BYTES, "index": 0}]}).encode()


async def serve(model: str) -> None:
    known, plain = pages(model), plain_reply()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode("latin-1"):
                path = head.split()[1]
                length = next(
                    (int(line[15:]) for line in head.lower().split("\r\n") if line[:15] == "content-length:"), 0
                )
                body = await reader.readexactly(length)
                streams = b'"stream":true' in body.replace(b" ", b"")
                kind = b"text/event-stream" if streams else b"application/json"
                parts = (
                    [_EVENT] * (REPLY_BYTES // len(_EVENT)) if streams else [known.get(path, plain if body else b"{}")]
                )
                size = sum(map(len, parts))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (kind, size))
                for part in parts:
                    writer.write(part)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096)
    print(f"large engine on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
