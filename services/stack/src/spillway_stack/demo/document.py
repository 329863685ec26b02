"""The long document that the demo asks about: the log book of a small harbour, generated for each run.

Pure and deterministic: the same seed, edition and number of entries give the same text on every machine. The edition
stands in the first line, so two runs share no prefix and a cold request is cold although a shared tier holds earlier
documents.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

ENTRIES_MAX = 400  # ships' names do not repeat within a book

_HARBOURS = ("Sallow Quay", "Merrowhaven", "Tarn Mouth", "Old Pellan", "Inchgarth", "Brine Steps", "Cobble Sound")
_KEEPERS = ("Ada Thornby", "Isak Wren", "Marit Oakes", "Tobias Fell", "Nora Quill", "Emil Garrow", "Hester Lund")
_FIRST = (
    *("Amber", "Brave", "Copper", "Distant", "Early", "Faithful", "Gentle", "Hidden", "Ivory", "Jolly"),
    *("Kindly", "Little", "Merry", "Northern", "Open", "Patient", "Quiet", "Restless", "Silver", "Tidy"),
)
_SECOND = (
    *("Anchor", "Bittern", "Cormorant", "Dolphin", "Ermine", "Falcon", "Gannet", "Heron", "Ibis", "Jackdaw"),
    *("Kestrel", "Lantern", "Marten", "Nightjar", "Otter", "Petrel", "Quail", "Robin", "Sandpiper", "Tern"),
)
_KINDS = ("schooner", "ketch", "steamer", "brig", "barge", "cutter", "trawler", "lugger")
_ORIGINS = (
    *("Bergen", "Lisbon", "Riga", "Cork", "Hamburg", "Genoa", "Aberdeen", "Bordeaux", "Gdansk", "Tromso"),
    *("Malta", "Rotterdam", "Porto", "Stockholm", "Naples", "Dublin"),
)
_CARGOES = (
    *("salt", "timber", "oranges", "copper wire", "wool", "slate", "olive oil", "barley", "pianos", "tea"),
    *("window glass", "paper", "honey", "rope", "apples", "bricks", "coffee", "books"),
)
_WEATHER = (
    *("The fog lifted before noon", "A light rain fell all morning", "The wind stood in the west"),
    *("The sea lay flat as a plate", "Hail rattled on the customs roof", "The evening was clear and cold"),
    *("Gulls sat on every bollard", "The tide ran high that night", "Thin ice floated by the steps"),
)
_EVENTS = (
    *("the crew mended a torn sail on the quay", "her cook traded two cheeses for a kettle"),
    *("the pilot brought her in without a bell", "a boy from the village caught her first line"),
    *("the crane stuck halfway and was freed with a broom handle", "her captain stayed to hear the choir"),
    *("a grey cat walked aboard and would not leave", "the customs clerk counted the crates twice"),
    *("the lamp on the mole had to be lit early", "the ferry waited to let her pass"),
)
_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One entry, the subject of a question."""

    number: int
    ship: str
    kind: str
    origin: str
    cargo: str
    berth: int
    text: str


@dataclass(frozen=True, slots=True)
class LogBook:
    title: str
    harbour: str
    edition: str
    arrivals: tuple[Arrival, ...]

    @property
    def text(self) -> str:
        return "\n".join([self.title, "", *(arrival.text for arrival in self.arrivals)])

    def shortened(self, entries: int) -> LogBook:
        """Return the book with fewer entries: a prefix of this one."""
        return LogBook(self.title, self.harbour, self.edition, self.arrivals[:entries])

    @property
    def question(self) -> str:
        """Return a question about the very first entry: the answer is at the far end of the cached prefix."""
        first = self.arrivals[0]
        return f"From which port did the {first.kind} {first.ship} arrive?"

    @property
    def expected_answer(self) -> str:
        """Return the correct answer to `question`."""
        return self.arrivals[0].origin


def write_log_book(seed: int, edition: str, entries: int) -> LogBook:
    """Write 1 to ENTRIES_MAX entries. Of two books of one seed and edition, the entries of one begin the other's."""
    if not 1 <= entries <= ENTRIES_MAX:
        raise ValueError(f"a log book has 1 to {ENTRIES_MAX} entries, not {entries}")
    chance = random.Random(f"log book {seed}")  # noqa: S311  a story, not a secret
    harbour = _HARBOURS[seed % len(_HARBOURS)]
    keeper = chance.choice(_KEEPERS)
    ships = [f"{first} {second}" for first in _FIRST for second in _SECOND]
    chance.shuffle(ships)
    title = f"Copy {edition} of the log book of the harbour of {harbour}, kept by {keeper}, harbour master."
    return LogBook(
        title, harbour, edition, tuple(_arrival(chance, number, ships[number - 1]) for number in range(1, entries + 1))
    )


def _arrival(chance: random.Random, number: int, ship: str) -> Arrival:
    kind, origin, cargo = chance.choice(_KINDS), chance.choice(_ORIGINS), chance.choice(_CARGOES)
    berth = chance.randrange(2, 30)
    day, month = 1 + (number * 3) % 28, _MONTHS[min(len(_MONTHS) - 1, number // 14)]
    text = (
        f"Entry {number}, {day} {month}. The {kind} {ship} arrived from {origin} with {cargo} and lay at "
        f"berth {berth}. {chance.choice(_WEATHER)}; {chance.choice(_EVENTS)}."
    )
    return Arrival(number, ship, kind, origin, cargo, berth, text)


def conversation(book: LogBook) -> list[dict[str, str]]:
    """Return chat messages with the document first, so that every question about it shares the prefix."""
    return [{"role": "user", "content": f"{book.text}\n\n{book.question}"}]


def longest_book(book: LogBook, prompt_tokens_max: int, count_tokens: Callable[[LogBook], int]) -> LogBook:
    """Return the longest beginning of `book` whose conversation has fewer than `prompt_tokens_max` tokens. It bisects.

    `count_tokens` grows with the entries. Raises ValueError when even one entry is too long.
    """
    if count_tokens(book.shortened(1)) >= prompt_tokens_max:
        raise ValueError(f"one entry and its question have {prompt_tokens_max} tokens or more")
    fits, too_long = 1, len(book.arrivals) + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if count_tokens(book.shortened(middle)) < prompt_tokens_max:
            fits = middle
        else:
            too_long = middle
    return book.shortened(fits)
