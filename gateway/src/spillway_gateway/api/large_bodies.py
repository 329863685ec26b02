"""Reads request bodies that are too long to be parsed at once.

The event loop serves every stream of the process, and a native parser holds the GIL, so one body may block neither the
loop nor a thread. A body is scanned in steps of about a millisecond, and all long bodies together get one step per
event loop iteration. A body that is cheap to parse is then parsed as a short one is. For any other body only an outline
is parsed, which holds its short members, and its prompt is matched by its raw bytes.

Costs are those of the worst shapes, measured with msgspec 0.20 and CPython 3.11 on one core of a Xeon of 2.5 GHz, in
milliseconds per MB: `[],` 307 (the garbage collector included), `{"a":{"b":[]}},` 294, distinct keys 70, floats 105,
`"ab",` 26, `12345,` 19, escapes 10, text 0.3 and 4 if memory is new.
"""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter

import msgspec
import xxhash
from msgspec import structs

from spillway_gateway.api.engine_fields import NAMES as READ_WHOLE
from spillway_gateway.api.multipart import Part, audio_of, field_edits, parts_in_steps
from spillway_gateway.api.parsed_body import ParsedBody
from spillway_gateway.api.routes import ApiRoute
from spillway_gateway.errors import ClientBadRequest, RequestTooLarge
from spillway_gateway.tokens.prompt import CompletionPrompt, RawPrompt
from spillway_gateway.tokens.text_blocks import BYTES_PER_TOKEN
from spillway_gateway.upstream.forward import Body
from spillway_gateway.upstream.json_walk import JsonWalk, Member, NotAnObject
from spillway_gateway.upstream.splice import Edit, MemberValue, Opening, edited, insertion, opening_of, replacements

SHORT_BODY_BYTES_MAX = 64 * 1024  # 20 ms at 307 ms per MB
PARSE_SECONDS_MAX = 0.020
VALUES_MAX = 500_000  # strings, arrays and objects of a scanned body; each takes about 0.2 us
OUTLINE_MEMBER_BYTES_MAX = 4096
IDS_MAX = 2 * 1024 * 1024  # longer than any model's context; they are copied at once for hashing

_STEP_SECONDS = 0.001
_STEP_BYTES = 8 * 1024  # 2 ms of the densest JSON
_COUNT_BYTES = 32 * 1024
_COUNT_AGAIN_BYTES = 4 * 1024  # of a piece that is new, as a body's last one mostly is: only its new end is counted
_COUNTED_MAX = 32_768  # pieces whose cost is remembered, in 7 MB: 100 MiB of bodies that begin as others did
_COPY_BYTES = 1024 * 1024
# The cost of decoding, and of what the parsers in this folder do with each message.
_SECONDS_PER_BYTE = 4e-9
_SECONDS_PER_ESCAPE = 25e-9
_SECONDS_PER_COMMA = 0.5e-6
_SECONDS_PER_CONTAINER = 2e-6
_SECONDS_PER_STRING = 0.2e-6
_SECONDS_PER_SYNTAX_BYTE = 0.1e-6  # outside of strings; numbers, mostly

_UNMARKED = bytes(byte for byte in range(256) if byte not in b",[{\\")  # what costs no more than its length
_EMPTY = {ord('"'): b'""', ord("["): b"[]", ord("{"): b"{}"}
_read_ids = msgspec.json.Decoder(list[int]).decode


class LargeBodies:
    """Parses long bodies in turns. Each gateway process has one, on its event loop."""

    def __init__(self, step_seconds: float = _STEP_SECONDS) -> None:
        self._turn = asyncio.Lock()
        self._step_seconds = step_seconds  # of small steps in a row, in one event loop iteration
        self._counted: OrderedDict[tuple[str, bytes], float] = OrderedDict()  # seconds by owner and digest of a piece
        self._seed = secrets.randbits(64)  # so that no client knows another piece with the digest of a cheap one

    async def parse(self, route: ApiRoute, body: Body, text_bytes_max: int, owner: str = "") -> ParsedBody:
        """Parse the body as route.parse() does.

        Args:
            text_bytes_max: The bytes to keep of a prompt that is matched by its raw bytes.
            owner: The tenant of the body. The time of a request reveals nothing about other tenants' bodies.

        Raises:
            ClientBadRequest, RequestTooLarge: The latter for more than VALUES_MAX values.
        """
        if route.body is None:
            return audio_of(body, await self._parts(body))
        if await self._seconds_by_count(body, owner) <= PARSE_SECONDS_MAX:
            return await self._parse_whole(route, body)
        names = [field.encode_name for field in structs.fields(route.body)]
        walk = JsonWalk(body, names)
        if await self._seconds_by_walk(walk, body) <= PARSE_SECONDS_MAX:
            return await self._parse_whole(route, body)
        return await self._parse_outline(route, body, walk, text_bytes_max)

    async def set_texts(
        self, route: ApiRoute, body: Body, replaced: Mapping[str, MemberValue], inserted: Mapping[str, MemberValue]
    ) -> Body:
        """The body with other top-level members, or fields of a form. Raises ClientBadRequest and RequestTooLarge."""
        edits: list[Edit] = []
        if route.body is None:
            parts = await self._parts(body)
            for name, value in replaced.items():
                edits += field_edits(parts, name, value)
            return await self._edited(body, sorted(edits))
        opening = opening_of(body, _STEP_BYTES)
        if replaced or opening is None:
            walk = JsonWalk(body, replaced)
            await self._seconds_by_walk(walk, body)
            opening = Opening(walk.inside, walk.empty)
            for name, value in replaced.items():
                edits += replacements(body, walk.members.get(name, ()), value)
        edits += [insertion(opening, name, value) for name, value in inserted.items()]
        return await self._edited(body, sorted(edits))

    async def _parts(self, body: Body) -> list[Part]:
        parts: list[Part] = []
        rest = parts_in_steps(body)

        def step() -> bool:
            for part in rest:
                if part is None:
                    return False
                parts.append(part)
            return True

        await self._in_steps(step)
        return parts

    # -- estimated cost of parsing -----------------------------------------------------------------------------------

    async def _seconds_by_count(self, body: Body, owner: str) -> float:
        """An upper bound: commas and brackets inside strings count too. Stops once the bound on parsing is exceeded."""
        seconds = len(body) * _SECONDS_PER_BYTE
        at, view = 0, memoryview(body)

        def count() -> bool:
            nonlocal at, seconds
            seconds += self._marks_seconds(view[at : at + _COUNT_BYTES], owner)
            at += _COUNT_BYTES
            return at >= len(body) or seconds > PARSE_SECONDS_MAX

        await self._in_steps(count)
        return seconds

    def _marks_seconds(self, piece: memoryview, owner: str) -> float:
        """The cost of a piece's commas, brackets and escapes. A turn of a conversation begins as the one before it, and
        a digest takes a seventh of the time."""
        name = owner, xxhash.xxh3_128_digest(piece, self._seed)
        seconds = self._counted.get(name)
        if seconds is None and len(piece) > _COUNT_AGAIN_BYTES:
            parts = range(0, len(piece), _COUNT_AGAIN_BYTES)
            seconds = sum([self._marks_seconds(piece[at : at + _COUNT_AGAIN_BYTES], owner) for at in parts])
            self._keep_count(name, seconds)
        elif seconds is None:
            marks = bytes(piece).translate(None, _UNMARKED)  # one pass, while counting each takes four
            seconds = marks.count(b",") * _SECONDS_PER_COMMA
            seconds += (marks.count(b"[") + marks.count(b"{")) * _SECONDS_PER_CONTAINER
            seconds += marks.count(b"\\") * _SECONDS_PER_ESCAPE
            self._keep_count(name, seconds)
        else:
            self._counted.move_to_end(name)
        return seconds

    def _keep_count(self, name: tuple[str, bytes], seconds: float) -> None:
        self._counted[name] = seconds
        if len(self._counted) > _COUNTED_MAX:
            self._counted.popitem(last=False)

    async def _seconds_by_walk(self, walk: JsonWalk, body: Body) -> float:
        """Return the cost of parsing the body, after a scan of all of it."""
        escapes = 0

        def step() -> bool:
            nonlocal escapes
            escapes += body.count(b"\\", walk.at, walk.at + _STEP_BYTES)
            done = walk.advance(_STEP_BYTES)
            if walk.strings + walk.containers > VALUES_MAX:
                raise RequestTooLarge(
                    f"The request body holds more than {VALUES_MAX} JSON values in {len(body)} bytes; send it in parts"
                )
            return done

        try:
            await self._in_steps(step)
        except NotAnObject as error:
            raise ClientBadRequest(f"The request body is not a JSON object: {error}", code="invalid_json") from error
        return (
            walk.text_bytes * _SECONDS_PER_BYTE
            + (len(body) - walk.text_bytes) * _SECONDS_PER_SYNTAX_BYTE
            + escapes * _SECONDS_PER_ESCAPE
            + walk.strings * _SECONDS_PER_STRING
            + walk.containers * _SECONDS_PER_CONTAINER
        )

    # -- parsing -----------------------------------------------------------------------------------------------------

    async def _parse_whole(self, route: ApiRoute, body: Body) -> ParsedBody:
        await self._turn.acquire()
        try:
            return route.parse(body)
        finally:  # no other body is parsed in this iteration
            asyncio.get_running_loop().call_soon(self._turn.release)

    async def _parse_outline(self, route: ApiRoute, body: Body, walk: JsonWalk, text_bytes_max: int) -> ParsedBody:
        """Parse the outline. The last of several equal members counts, as in every parser that routes.parse() uses."""
        members = {name: found[-1] for name, found in walk.members.items()}
        long = {}
        for name, member in members.items():
            size = member.end - member.start
            if name in READ_WHOLE and size > SHORT_BODY_BYTES_MAX:
                raise RequestTooLarge(
                    f"{name}: {size} bytes given in a body of {len(body)}, at most {SHORT_BODY_BYTES_MAX} needed; send "
                    "less of it"
                )
            if name not in READ_WHOLE and size > OUTLINE_MEMBER_BYTES_MAX:
                long[name] = member
        outline = b",".join(
            msgspec.json.encode(name)
            + b":"
            + (_EMPTY.get(body[member.start], b"null") if name in long else bytes(body[member.start : member.end]))
            for name, member in members.items()
        )
        parsed = route.parse(b"{" + outline + b"}")
        if not long:  # the body is long by members that are not read here
            return parsed
        parsed = structs.replace(parsed, server_tools=parsed.server_tools or "tools" in long)
        salt = parsed.prompt.cache_salt
        if isinstance(parsed.prompt, CompletionPrompt) and len(long) == 1:
            ids = await self._ids(body, *long.values())
            if ids is not None:
                return structs.replace(parsed, prompt=structs.replace(parsed.prompt, prompt=ids))
        in_order = sorted(long.values())
        text, kept = [], 0
        for member in in_order:
            text.append(bytes(body[member.start : min(member.end, member.start + text_bytes_max - kept)]))
            kept += len(text[-1])
        tokens = sum([await self._tokens(body, member) for member in in_order])
        return structs.replace(parsed, prompt=RawPrompt(b"".join(text), max(1, tokens), salt), longest_tokens=tokens)

    async def _ids(self, body: Body, member: Member) -> array[int] | None:
        """Return the token ids of an array that holds only numbers; None for any other value."""
        if member.strings or member.containers != 1 or body[member.start] != ord("["):
            return None
        if await self._tokens(body, member) > IDS_MAX:
            return None
        ids = array("I")
        at, last = member.start + 1, member.end - 1

        def read() -> bool:
            nonlocal at
            end = body.find(b",", min(at + _STEP_BYTES, last), last)
            end = last if end < 0 else end
            ids.extend(_read_ids(b"[" + body[at:end] + b"]"))
            at = end + 1
            return at > last

        try:
            await self._in_steps(read)
        except (msgspec.MsgspecError, OverflowError):
            return None
        return ids

    async def _tokens(self, body: Body, member: Member) -> int:
        """Estimated tokens of a value: of its text, or its numbers if it holds no text."""
        if member.strings:
            return member.text_bytes // BYTES_PER_TOKEN
        numbers, at = 1, member.start

        def count() -> bool:
            nonlocal numbers, at
            numbers += body.count(b",", at, min(at + _COUNT_BYTES, member.end))
            at += _COUNT_BYTES
            return at >= member.end

        await self._in_steps(count)
        return numbers

    # -- steps -------------------------------------------------------------------------------------------------------

    async def _edited(self, body: Body, edits: Iterable[Edit]) -> Body:
        if len(body) <= _COPY_BYTES:
            return edited(body, edits)
        result = bytearray()
        source = memoryview(body)
        pieces: list[memoryview | bytes] = []
        copied = 0
        for start, end, text in edits:
            pieces += (source[copied:start], text)
            copied = end
        pieces.append(source[copied:])
        rest = iter([piece[at : at + _COPY_BYTES] for piece in pieces for at in range(0, len(piece), _COPY_BYTES)])

        def copy() -> bool:
            nonlocal result
            piece = next(rest, None)
            if piece is not None:
                result += piece
            return piece is None

        await self._in_steps(copy)
        return result

    async def _in_steps(self, step: Callable[[], bool]) -> None:
        """Run `step`, a bounded piece of work, until it returns True."""
        while True:
            async with self._turn:
                until = perf_counter() + self._step_seconds
                while True:
                    if step():
                        return
                    if perf_counter() >= until:
                        break
                await asyncio.sleep(0)
