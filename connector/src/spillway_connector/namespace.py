"""The namespace of stored blocks: everything that changes their bytes or their meaning, in one document.

Two engines share blocks exactly when their documents are equal. The document is canonical JSON; its blake3 digest
(16 bytes) is part of every file name, key and frame header, and the document itself is stored once beside the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from blake3 import blake3

from spillway_connector.errors import ConfigError

NAMESPACE_DIGEST_BYTES = 16
STORE_ID_BYTES = 8
FORMAT_VERSION = 1  # of the frame around every stored block: tiers/frame.py, docs/formats.md
_FORMAT_FIELD = "frame_format"


@dataclass(frozen=True, slots=True)
class Namespace:
    """``document``: canonical JSON (sorted names, no spaces, ASCII). Build it with :meth:`of`."""

    document: bytes

    @classmethod
    def of(cls, facts: Mapping[str, object]) -> Namespace:
        """Canonicalise ``facts`` (JSON values only: str, int, bool, None, finite float, list, dict with str names).

        The frame's format version is added, so a format change is a namespace change.
        Raises ConfigError when a value has no JSON form: a lossy form could make two layouts look alike.
        """
        _refuse_lossy_names(facts, "namespace")
        try:
            text = json.dumps(
                {**facts, _FORMAT_FIELD: FORMAT_VERSION},
                sort_keys=True,
                separators=(",", ":"),
                ensure_ascii=True,
                allow_nan=False,
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"namespace: every fact needs a JSON value; {error}") from error
        return cls(text.encode("ascii"))

    @property
    def digest16(self) -> bytes:
        """The 16-byte digest of the document, as in names and headers."""
        return blake3(self.document).digest(length=NAMESPACE_DIGEST_BYTES)

    def may_own(self, document: bytes) -> bool:
        """Whether ``document`` has this namespace's digest; a stored document without it is damaged."""
        return blake3(document).digest(length=NAMESPACE_DIGEST_BYTES) == self.digest16

    @property
    def hex(self) -> str:
        return self.digest16.hex()


def store_id_of(place: bytes, namespace_digest: bytes) -> bytes:
    """The name of one namespace in one place, which engines and gateways compare. Pure.

    place: the same in all processes that use it, on whatever node, and in no other place. Two stores with equal names
    find each other's blocks. Blocks of another model, generation of vLLM, dtype or encryption key are in another
    namespace, and the local disks of two nodes are two places.
    """
    return blake3(namespace_digest + place).digest(length=STORE_ID_BYTES)


DIFFERENCE_CHARS_MAX = 4_000  # the sentence goes into logs, and what is stored may be of any content


def explain_difference(ours: bytes, theirs: bytes) -> str:
    """One sentence that names the fields in which two namespace documents differ.

    Either may be damaged (it was read from a disk or a server); then the sentence reports that. At most
    DIFFERENCE_CHARS_MAX characters.
    """
    try:
        our_facts = dict(_flatten("", json.loads(ours)))
    except (ValueError, RecursionError):
        return "our namespace document is not JSON"
    try:
        their_facts = dict(_flatten("", json.loads(theirs)))
    except (ValueError, RecursionError):
        return "the stored namespace document is not JSON (damaged)"
    differences = []
    for path in sorted(our_facts.keys() | their_facts.keys()):
        if path not in their_facts:
            differences.append(f"{path}: ours {our_facts[path]}, stored has none")
        elif path not in our_facts:
            differences.append(f"{path}: ours has none, stored {their_facts[path]}")
        elif our_facts[path] != their_facts[path]:
            differences.append(f"{path}: ours {our_facts[path]}, stored {their_facts[path]}")
    if not differences:
        return "the documents say the same"
    sentence = "; ".join(differences)
    return sentence if len(sentence) <= DIFFERENCE_CHARS_MAX else f"{sentence[: DIFFERENCE_CHARS_MAX - 3]}..."


def _flatten(path: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flatten(f"{path}.{name}" if path else str(name), inner)
    elif isinstance(value, list) and value:
        for position, inner in enumerate(value):
            yield from _flatten(f"{path}[{position}]", inner)
    else:
        yield path or "document", json.dumps(value)


def _refuse_lossy_names(value: object, path: str) -> None:
    # json.dumps turns the names 1 and "1" into the same text and tuples into lists.
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise ConfigError(f"{path}: the name {name!r} is a {type(name).__name__}; use a string")
            _refuse_lossy_names(inner, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for position, inner in enumerate(value):
            _refuse_lossy_names(inner, f"{path}[{position}]")
