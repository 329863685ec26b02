"""A name server on loopback with scripted answers and faults."""

from __future__ import annotations

import asyncio
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


class NameServer(asyncio.DatagramProtocol):
    """records: (name, type) -> values. code: every question is answered with it. silent: none is."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.code: dns.rcode.Rcode | None = None
        self.silent = False
        self.asked: list[tuple[str, str]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, sender: Any) -> None:
        query = dns.message.from_wire(data)
        question = query.question[0]
        key = (question.name.to_text(), dns.rdatatype.to_text(question.rdtype))
        self.asked.append(key)
        if self.silent:
            return
        reply = dns.message.make_response(query)
        reply.flags |= dns.flags.RA
        values = self.records.get(key)
        if values:
            reply.answer.append(dns.rrset.from_text(question.name, 5, "IN", key[1], *values))
        elif not any(name == key[0] for name, _ in self.records):
            reply.set_rcode(dns.rcode.NXDOMAIN)
        if self.code is not None:
            reply.answer.clear()
            reply.set_rcode(self.code)
        self.transport.sendto(reply.to_wire(), sender)
