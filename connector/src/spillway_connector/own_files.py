"""Opening, making and removing what a store keeps in its directory, where others may have put something else there.

Whoever may write to the directory (a hostPath, a shared claim) can put a link, a FIFO or a file of the node in the
place of any file, and exchange folders while they are used. So no link below the root is followed: each folder is
opened relative to its parent, and a file counts only if the open descriptor is a regular file without a second name.
What is written to must also belong to this process's user, the directory's or root, and others may not write to it. No
open waits: a FIFO without a writer answers at once.

``depth``: how many names at the end of a path are the store's own. The path before them is the operator's, links in it
included.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_log = logging.getLogger(__name__)

AnyPath = str | os.PathLike[str]

SMALL_FILE_BYTES_MAX = 16 << 20  # of a document or mark, whatever lies in its place
_ROOT = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_FOLDER = _ROOT | os.O_NOFOLLOW
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
}
# Device number -> the owner of a file that this process makes, and the write permissions of others that it shows. They
# differ from what was asked for if a server maps users (root_squash) or the file system has no modes (SMB).
_MADE_HERE: dict[int, tuple[int, int]] = {}
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NotOwn(OSError):
    """Error: something else lies in the place of a file or folder of the store. It was neither read nor changed."""

    def __init__(self, path: AnyPath, what: str) -> None:
        super().__init__(errno.ELOOP, f"{os.fspath(path)} is {what}, not a file of this store; remove it")


@contextmanager
def folder_of(path: AnyPath, depth: int) -> Iterator[tuple[int, str]]:
    """The folder that ``path`` lies in, as a descriptor for ``dir_fd``, and its name there.

    Raises NotOwn if a link is in the place of a folder, OSError.
    """
    base, *names = os.fspath(path).rsplit("/", depth)
    if len(names) < depth:  # relative to the working directory
        base, *names = os.path.abspath(path).rsplit("/", depth)
    descriptor = os.open(base or "/", _ROOT)
    try:
        for name in names[:-1]:
            inner = _open_folder(path, name, descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor, names[-1]
    finally:
        os.close(descriptor)


def open_own(
    path: AnyPath, flags: int, depth: int, *, mode: int = 0o600, links: int = 1, owners_checked: bool = True
) -> int:
    """Open a regular file of the store, without waiting.

    links: names that the file may have. owners_checked: whether a file that is opened for writing has to be of an owner
    and a mode that an engine trusts; an operator's commands work on the files of any user.
    Raises NotOwn, OSError.
    """
    writing = flags & (os.O_WRONLY | os.O_RDWR)
    with folder_of(path, depth) as (folder, name):
        try:
            descriptor = os.open(name, flags | _FILE, mode, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV, errno.EMLINK):
                what = _kind_at(folder, name)
                if what is not None:
                    raise NotOwn(path, what) from None
            raise
        try:
            status = os.fstat(descriptor)
            what = _foreign(status, links)
            if what is None and writing and owners_checked:
                if flags & os.O_EXCL:
                    _MADE_HERE[status.st_dev] = (status.st_uid, status.st_mode & _OTHERS_WRITE)
                else:
                    what = _untrusted(status, os.fspath(path).rsplit("/", depth)[0])
            if what is not None:
                raise NotOwn(path, what)
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


def open_anew(path: AnyPath, depth: int) -> int:
    """An empty file, open for reading and writing, in the place of whatever has the name. Raises OSError."""
    clear_the_place(path, depth)
    unlink_own(path, depth, missing_ok=True)  # what a killed process left; its name is known to others
    return open_own(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, depth)


def read_own(path: AnyPath, depth: int) -> bytes:
    """All of a small file, which may be getting its name just now and have two.

    Raises NotOwn (of a file that no store makes so large too), OSError (FileNotFoundError).
    """
    descriptor = open_own(path, os.O_RDONLY, depth, links=2)
    try:
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            raw = file.read(SMALL_FILE_BYTES_MAX + 1) or b""
            while more := file.read(SMALL_FILE_BYTES_MAX + 1 - len(raw)):
                raw += more
    finally:
        os.close(descriptor)
    if len(raw) > SMALL_FILE_BYTES_MAX:
        raise NotOwn(path, f"a file of more than {SMALL_FILE_BYTES_MAX} bytes")
    return raw


def write_new(path: AnyPath, depth: int, contents: bytes) -> None:
    """Make a file that is not there yet. Raises OSError (FileExistsError)."""
    descriptor = open_own(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, depth)
    try:
        view = memoryview(contents)
        while view.nbytes:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)


def status_of(path: AnyPath, depth: int) -> os.stat_result:
    """Status of what has that name; a link is not followed. Raises NotOwn, OSError."""
    with folder_of(path, depth) as (folder, name):
        return os.stat(name, dir_fd=folder, follow_symlinks=False)


def is_regular(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode)


def kind_of(status: os.stat_result) -> str:
    """A name for the kind of a file that is not regular, for messages."""
    return _KINDS.get(stat.S_IFMT(status.st_mode), "no regular file")


def unlink_own(path: AnyPath, depth: int, *, missing_ok: bool = False) -> None:
    """Remove a name. A link goes, and what it points to stays. Raises NotOwn, OSError."""
    try:
        with folder_of(path, depth) as (folder, name):
            os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        if not missing_ok:
            raise


def rename_own(source: AnyPath, target: AnyPath, depth: int, target_depth: int | None = None) -> None:
    """Give a file another name, in the place of what has it. Raises NotOwn, OSError."""
    with (
        folder_of(source, depth) as (source_folder, source_name),
        folder_of(target, depth if target_depth is None else target_depth) as (target_folder, target_name),
    ):
        os.rename(source_name, target_name, src_dir_fd=source_folder, dst_dir_fd=target_folder)


def link_own(source: AnyPath, target: AnyPath, depth: int, target_depth: int | None = None) -> None:
    """Give a file a second name. Raises NotOwn, OSError."""
    with (
        folder_of(source, depth) as (source_folder, source_name),
        folder_of(target, depth if target_depth is None else target_depth) as (target_folder, target_name),
    ):
        os.link(source_name, target_name, src_dir_fd=source_folder, dst_dir_fd=target_folder, follow_symlinks=False)


def renew_own(path: AnyPath, depth: int, at_ns: int) -> None:
    """Set the times of a file. Raises NotOwn, OSError."""
    with folder_of(path, depth) as (folder, name):
        os.utime(name, ns=(at_ns, at_ns), dir_fd=folder, follow_symlinks=False)


def make_folders(path: AnyPath, depth: int) -> None:
    """Make the missing folders among the last ``depth`` folders of a path. Raises NotOwn, OSError (FileExistsError: a
    file has the name of a folder)."""
    text = os.fspath(path)
    for left in range(depth - 1, -1, -1):
        part = text.rsplit("/", left)[0] if left else text
        with folder_of(part, depth - left) as (folder, name):
            try:
                os.mkdir(name, 0o755, dir_fd=folder)
            except FileExistsError as error:
                try:
                    os.close(_open_folder(part, name, folder))
                except NotADirectoryError:
                    raise FileExistsError(error.errno, error.strerror, part) from None


def remove_empty_folder(path: AnyPath, depth: int) -> bool:
    """Whether it was empty and has been removed."""
    try:
        with folder_of(path, depth) as (folder, name):
            os.rmdir(name, dir_fd=folder)
    except OSError:
        return False
    return True


def clear_the_place(path: AnyPath, depth: int, *, links: int = 1) -> None:
    """Take away what lies in the place of a file of the store and is none: a link or a special file is removed, a
    folder renamed. Regular files stay. Raises OSError."""
    with folder_of(path, depth) as (folder, name):
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return
        what = _foreign(status, links)
        if what is None:
            return
        if stat.S_ISDIR(status.st_mode):
            os.rename(name, f"{name}.foreign-{os.urandom(4).hex()}", src_dir_fd=folder, dst_dir_fd=folder)
        else:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
    _log.error("%s was %s: it was taken away; what it points to was neither read nor changed", path, what)


def first_written(path: AnyPath, is_whole: Callable[[bytes], bool], make: Callable[[], bytes]) -> bytes | None:
    """Return what a small file in the root says to all processes; the first to come writes it.

    Args:
        path: Directly in the root.
        is_whole: Whether contents are undamaged; the file is made again if they are not.
        make: Makes the contents.

    Returns:
        None: another process has removed it meanwhile.

    Raises:
        OSError: It can be neither read nor written.
    """
    found = _whole(path, is_whole)
    if found is not None:
        return found
    partial = f"{os.fspath(path)}.{os.urandom(8).hex()}"
    write_new(partial, 1, make())
    try:
        link_own(partial, path, 1)
    except FileExistsError:
        pass
    except PermissionError:
        rename_own(partial, path, 1)  # no hard links here
    finally:
        unlink_own(partial, 1, missing_ok=True)
    return _whole(path, is_whole)


def _whole(path: AnyPath, is_whole: Callable[[bytes], bool]) -> bytes | None:
    try:
        clear_the_place(path, 1, links=2)
        raw = read_own(path, 1)
    except FileNotFoundError:
        return None
    if is_whole(raw):
        return raw
    unlink_own(path, 1, missing_ok=True)
    return None


def learn_owner(root: Path) -> None:
    """Find out how the file system shows the files that this process makes. In a read-only directory, nothing."""
    path = root / f"probe-{os.urandom(8).hex()}"
    with suppress(OSError):
        os.close(open_own(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 1))
        unlink_own(path, 1, missing_ok=True)


def open_to_others(root: Path) -> str | None:
    """Half a sentence on who else may put files into ``root``; None if only its users may, or if that is unknown.

    Users are the directory's owner and the group that a volume is given to a pod by (fsGroup), where this process is
    in it. Raises OSError.
    """
    status = os.stat(root)
    owner, shown = _MADE_HERE.get(status.st_dev, (os.geteuid(), 0))
    if status.st_mode & stat.S_IWOTH and not shown & stat.S_IWOTH:
        return f"every user may write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    if status.st_mode & stat.S_IWGRP and not shown & stat.S_IWGRP and status.st_gid not in _groups():
        return f"group {status.st_gid}, which this process is not in, may write to it"
    if status.st_uid not in (0, os.geteuid(), owner):
        return f"it belongs to user {status.st_uid}, and this process is user {os.geteuid()}"
    return None


def _open_folder(path: AnyPath, name: str, inside: int) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=inside)
    except NotADirectoryError:
        if _kind_at(inside, name) == _KINDS[stat.S_IFLNK]:
            raise NotOwn(path, f"behind {name}, a symbolic link") from None
        raise


def _kind_at(folder: int, name: str) -> str | None:
    """Return the kind of file that has this name; None: it is a regular file, or there is none."""
    try:
        return _KINDS.get(stat.S_IFMT(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode))
    except OSError:
        return None


def _foreign(status: os.stat_result, links: int) -> str | None:
    if not stat.S_ISREG(status.st_mode):
        return kind_of(status)
    if status.st_nlink > links:
        return f"a file with {status.st_nlink} names (hard links)"
    return None


def _untrusted(status: os.stat_result, root: str) -> str | None:
    """Return why no engine may write to a file: who owns it, and who else may write to it. Raises OSError."""
    owner, shown = _MADE_HERE.get(status.st_dev, (os.geteuid(), 0))
    if status.st_uid not in (0, os.geteuid(), owner) and status.st_uid != os.stat(root or "/").st_uid:
        return f"a file of user {status.st_uid}, and this process is user {os.geteuid()}"
    if status.st_mode & stat.S_IWOTH and not shown & stat.S_IWOTH:
        return f"a file that every user may write to (mode {stat.S_IMODE(status.st_mode):04o})"
    # Kubelet makes all files of a volume with an fsGroup writable for that group.
    if status.st_mode & stat.S_IWGRP and not shown & stat.S_IWGRP and status.st_gid not in _groups():
        return f"a file that group {status.st_gid}, which this process is not in, may write to"
    return None


def _groups() -> set[int]:
    return {os.getegid(), *os.getgroups()}
