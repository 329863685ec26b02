"""Files that this process maps and that someone may cut, as ``: >``, ``cp`` and ``truncate`` do.

A touch of a page that is there no more is a SIGBUS, which ends the process. For a watched mapping it does not: the
whole mapping becomes zeros that belong to this process alone, the touch is made again, and ``is_whole`` is False from
then on. So whoever reads such a mapping looks before and after, and takes nothing from it once it is not whole.

The handler is a Python function that runs inside the touch. A touch that holds the GIL keeps it; one that does not
waits for it, and a thread that holds the GIL waits for no other thread's touch.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

_SA_SIGINFO, _SA_NODEFER = 4, 0x40000000
_CODE_AT, _ADDRESS_AT = 8, 16  # in siginfo_t of 64-bit Linux: why it comes, above 0 for a touch, and of which byte
_READ_WRITE = 1 | 2
_OWN_ZEROS_HERE = 0x02 | 0x10 | 0x20 | 0x4000  # MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS | MAP_NORESERVE
FORMER_MAX = 8  # handlers that are installed after ours; a library that installs one again and again is left alone
_FAILED = ctypes.c_void_p(-1).value


class _SigAction(ctypes.Structure):
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * (128 // ctypes.sizeof(ctypes.c_ulong))),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_libc = ctypes.PyDLL(None)  # with the GIL: two threads' touches are answered one after the other
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_SIZE_AT, _BLOCKS_AT = 6, 8  # words of struct stat of 64-bit Linux
_fstat = getattr(_libc, "fstat", None)  # a libc before 2.33 has none
_sigaction = _libc.sigaction
_sigaction.argtypes = [ctypes.c_int, ctypes.POINTER(_SigAction), ctypes.POINTER(_SigAction)]


@dataclass(slots=True, eq=False)
class WatchedMapping:
    """A mapping of a whole file, until ``forget``, which comes before the mapping ends."""

    address: int
    size_bytes: int
    _descriptor: int
    _blocks: int
    _touched_where_cut: bool = False
    _status: ctypes.Array[ctypes.c_long] = field(default_factory=ctypes.c_long * 32)

    @classmethod
    def of(cls, descriptor: int, address: int, size_bytes: int) -> WatchedMapping:
        """Watch a mapping of the file behind ``descriptor``. Raises OSError."""
        watched = cls(address, size_bytes, os.dup(descriptor), os.fstat(descriptor).st_blocks)
        _handler.add(watched)
        return watched

    @classmethod
    def at(cls, address: int) -> WatchedMapping | None:
        """The mapping that this byte of memory is in."""
        return next((each for each in _handler.watched if each.holds(address)), None)

    def holds(self, address: int) -> bool:
        return self.address <= address < self.address + self.size_bytes

    @property
    def is_whole(self) -> bool:
        """Whether the file has its size and every block that it had. Asked before a touch, so it keeps the handler."""
        _handler.keep()
        return self.looks_whole

    @property
    def looks_whole(self) -> bool:
        """Return what ``is_whole`` returns, for callers that also ask ``is_whole`` now and then. Keeps the GIL."""
        if self._touched_where_cut:
            return False
        if _fstat is None:
            found = os.fstat(self._descriptor)
            return found.st_size == self.size_bytes and found.st_blocks >= self._blocks
        status = self._status
        if _fstat(self._descriptor, status):
            return False
        return status[_SIZE_AT] == self.size_bytes and status[_BLOCKS_AT] >= self._blocks

    def replace(self) -> bool:
        """Map zeros in the place of the cut file, so that the touch can be made again; return whether it can."""
        if not self._touched_where_cut:
            self._touched_where_cut = True
            return bool(_mmap(self.address, self.size_bytes, _READ_WRITE, _OWN_ZEROS_HERE, -1, 0) != _FAILED)
        return True

    def forget(self) -> None:
        _handler.remove(self)
        self._touched_where_cut = True  # nothing may be taken from it
        os.close(self._descriptor)


class _Handler:
    """The process's handler of SIGBUS. What is none of these mappings goes to the handlers before it.

    A library may install its own later, as ``faulthandler.enable()`` does. Ours is then installed again, and such a
    one is asked like those before ours.
    """

    def __init__(self) -> None:
        self.watched: tuple[WatchedMapping, ...] = ()
        self._lock = threading.Lock()
        # That each installation of ours replaced. Each is asked once: one that in turn calls the handler before it, as
        # faulthandler does, comes back here.
        self._former: list[_SigAction] = []
        callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._callback = callback(self._handle)
        self._address = ctypes.cast(self._callback, ctypes.c_void_p).value
        self._found = _SigAction()

    def add(self, watched: WatchedMapping) -> None:
        with self._lock:
            begin, end = watched.address, watched.address + watched.size_bytes
            others = [each for each in self.watched if each.address >= end or each.address + each.size_bytes <= begin]
            self.watched = (*others, watched)  # what lay at these addresses before is mapped there no more
        self.keep()

    def remove(self, watched: WatchedMapping) -> None:
        with self._lock:
            self.watched = tuple(each for each in self.watched if each is not watched)

    def keep(self) -> None:
        """Install the handler unless it is the process's."""
        with self._lock:
            _sigaction(signal.SIGBUS, None, ctypes.byref(self._found))
            if self._found.handler == self._address or len(self._former) >= FORMER_MAX:
                return
            action, former = _SigAction(handler=self._address, flags=_SA_SIGINFO | _SA_NODEFER), _SigAction()
            if _sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(former)):
                logger.warning("SIGBUS cannot be handled: a file that is cut while it is mapped ends this process")
            self._former.append(former)

    def _handle(self, _signal: int, info: int, _context: int) -> None:
        is_touch = ctypes.c_int.from_address(info + _CODE_AT).value > 0
        address = ctypes.c_void_p.from_address(info + _ADDRESS_AT).value or 0
        for watched in self.watched:
            if is_touch and watched.holds(address) and watched.replace():
                return
        former = self._former.pop() if self._former else _SigAction()  # of zeros: what the system does, which is to end
        _sigaction(signal.SIGBUS, ctypes.byref(former), None)  # the touch is made again, and ends there
        if not is_touch:  # a process has sent it, as `kill` does
            signal.raise_signal(signal.SIGBUS)


_handler = _Handler()
