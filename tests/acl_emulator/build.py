"""Compile the emulator once for each variant; later runs take it from build/acl_emulator."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
_OUTPUT = Path(__file__).parents[2] / "build" / "acl_emulator"
_FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-fPIC")

# What older runtimes lack: each macro leaves one documented function out.
EVERYTHING: tuple[str, ...] = ()
CANN_8_3 = ("WITHOUT_BATCH", "WITHOUT_VERSION_STR", "WITHOUT_HOST_REGISTER_V2")
OLD_EVENTS = ("WITHOUT_EVENT_EX", "WITHOUT_EVENT_TIMEOUT", "WITHOUT_STREAM_ABORT")


# Set (to anything) in processes that have the sanitizer's runtime preloaded: `library` is then built with it.
SANITIZED_ENV = "ACL_EMULATOR_SANITIZED"
_SANITIZERS = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def library(without: tuple[str, ...] = EVERYTHING) -> Path:
    """A shared library with the documented interface, minus the named parts."""
    sources = sorted(path for path in SOURCES.glob("*.c") if path.name != "selftest.c")
    defines = [f"-D{name}" for name in without]
    optimised = _SANITIZERS if SANITIZED_ENV in os.environ else ("-O2",)
    return _compile("libascendcl", ".so", [*_FLAGS, *optimised, "-shared", *defines], sources)


def sanitizer_runtimes() -> str:
    """Return the value of LD_PRELOAD with which Python can load a sanitized library."""
    names = ("libasan.so", "libubsan.so")
    found = [
        subprocess.run(["cc", f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
        for name in names
    ]
    return ":".join(str(Path(path).resolve()) for path in found)


def selftest() -> Path:
    """The emulator's own test as a program, with the address and undefined-behaviour sanitizers in it."""
    return _compile("selftest", "", [*_FLAGS, *_SANITIZERS], sorted(SOURCES.glob("*.c")))


def _compile(stem: str, suffix: str, flags: list[str], sources: list[Path]) -> Path:
    digest = hashlib.sha256(" ".join(flags).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    output = _OUTPUT / f"{stem}-{digest.hexdigest()[:16]}{suffix}"
    if not output.exists():
        _OUTPUT.mkdir(parents=True, exist_ok=True)
        unfinished = output.with_name(f"{output.name}.{os.getpid()}")
        subprocess.run(["cc", *flags, *map(str, sources), "-o", str(unfinished)], check=True)
        unfinished.replace(output)
    return output
