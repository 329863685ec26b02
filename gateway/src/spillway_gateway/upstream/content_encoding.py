"""Takes the compression off an engine's reply. The gateway asks engines not to compress, since it reads what it
forwards; something between may compress nevertheless. Pure.
"""

from __future__ import annotations

import zlib

from spillway_gateway.errors import EngineBadReply

PIECE_BYTES_MAX = 256 * 1024  # given at once, however much a few compressed bytes become
_INFLATED = ("gzip", "x-gzip", "deflate")
_WINDOW = 32 + zlib.MAX_WBITS  # gzip's header or zlib's


class Inflater:
    """Unpacks one body: feed() what has arrived, then more() while it is pending, and end() at the body's end."""

    __slots__ = ("_decompressor", "_input")

    def __init__(self) -> None:
        self._decompressor = zlib.decompressobj(_WINDOW)
        self._input = b""

    @property
    def pending(self) -> bool:
        return bool(self._input)

    @property
    def finished(self) -> bool:
        """The whole body has been given."""
        return self._decompressor.eof and not self._input

    def feed(self, data: bytes) -> None:
        self._input += data

    def more(self) -> bytes:
        """The next piece; empty if more input is needed. Raises EngineBadReply."""
        decompressor = self._decompressor
        if decompressor.eof:
            raise EngineBadReply("the engine's reply goes on behind its compressed body")
        try:
            piece = decompressor.decompress(self._input, PIECE_BYTES_MAX)
        except zlib.error as error:
            raise EngineBadReply(f"the engine's reply is compressed, and broken ({error})") from error
        self._input = decompressor.unused_data if decompressor.eof else decompressor.unconsumed_tail
        return piece

    def end(self) -> None:
        """Raises EngineBadReply if the body is not whole."""
        if not self._decompressor.eof:
            raise EngineBadReply("the engine's compressed reply ends early")


def inflater_of(encodings: list[bytes]) -> Inflater | None:
    """encodings: the values of all Content-Encoding headers. None: not compressed. Raises EngineBadReply for what
    cannot be read."""
    named = [name for value in encodings for name in value.decode("latin-1").replace(" ", "").lower().split(",")]
    named = [name for name in named if name not in ("", "identity")]
    if not named:
        return None
    if len(named) > 1 or named[0] not in _INFLATED:
        shown = ", ".join(named)[:100]
        raise EngineBadReply(f"the engine's reply has content-encoding {shown!r}, though identity was asked for")
    return Inflater()
