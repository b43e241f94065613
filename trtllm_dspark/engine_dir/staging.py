"""Write a directory so that it appears whole or not at all.

A build fills `.NAME.building` beside its destination and renames it at the end. The lock on that directory dies with
its process, so a killed build leaves nothing that stops the next one, which empties the leftover and reuses it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trtllm_dspark.engine_dir.directory import open_engine_dir
from trtllm_dspark.engine_dir.manifest import MANIFEST_NAME, SCHEMA
from trtllm_dspark.errors import DeviceError, EngineError, UsageError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
logger = logging.getLogger(__name__)


class StagedDirectory:
    """The temporary sibling; `publish()` puts it in the destination's place."""

    def __init__(self, path: Path, destination: Path, lock: int, *, overwrite: bool) -> None:
        self.path = path
        self._destination = destination
        self._overwrite = overwrite
        self._locks = [lock]

    def publish(self) -> None:
        """Flush everything to the disk and rename; after this the destination is the new engine.

        Raises:
            UsageError: the destination appeared meanwhile and may not be replaced.
        """
        for file in sorted(self.path.rglob("*")):
            _fsync(file)
        _fsync(self.path)
        check_destination(self._destination, overwrite=self._overwrite)
        if self._destination.is_dir() and any(self._destination.iterdir()):
            # The old engine takes the staging name for a moment: lock it, so that no other build adopts it meanwhile.
            self._locks.append(_lock_directory(self._destination, self._destination))
            _exchange(self.path, self._destination)
        else:
            os.rename(self.path, self._destination)
        _fsync(self._destination.parent)

    def _discard(self) -> None:
        """Remove what stands under the staging name if it is ours, and give the locks back; again does nothing."""
        try:
            found = os.stat(self.path)
            if any(os.path.samestat(found, os.fstat(lock)) for lock in self._locks):
                _remove(self.path)
        except FileNotFoundError:
            pass
        while self._locks:
            os.close(self._locks.pop())


@contextmanager
def stage_directory(destination: Path, *, overwrite: bool) -> Iterator[StagedDirectory]:
    """Yield an empty temporary sibling of `destination`; it is removed unless it was published.

    Args:
        destination: directory to make; missing or empty, or an engine directory when `overwrite` is set.
        overwrite: replace an existing engine directory.

    Raises:
        UsageError: the destination may not be written, or another build writes it.
        DeviceError: the disk is full or fails.
    """
    destination = Path(os.path.abspath(destination))
    check_destination(destination, overwrite=overwrite)
    path = destination.with_name(f".{destination.name}.building")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        staged = StagedDirectory(path, destination, _lock_staging(path, destination), overwrite=overwrite)
        try:
            _recover(destination)
            # What came back may not be replaced unasked.
            check_destination(destination, overwrite=overwrite)
        except BaseException:
            staged._discard()
            raise
    except OSError as error:
        raise UsageError(
            f"cannot write beside --output_dir {destination} ({error.strerror}); choose another"
        ) from error
    try:
        _empty(path)
        yield staged
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        action = (
            "free space or choose another --output_dir" if full else "check the disk or choose another --output_dir"
        )
        staged._discard()
        left = f"remove {path} by hand" if path.exists() else "nothing was left behind"
        raise DeviceError(f"writing {destination} failed ({error}); {action}, {left}") from error
    finally:
        staged._discard()


def check_destination(destination: Path, *, overwrite: bool) -> None:
    """Refuse a destination whose content would be lost.

    Raises:
        UsageError: a file, a mount point, a directory that is no engine, or an engine without `overwrite`.
    """
    if not os.path.lexists(destination):
        return
    if destination.is_symlink() or not destination.is_dir():
        raise UsageError(f"--output_dir {destination} exists and is not a directory; choose another")
    if os.path.ismount(destination):
        # A rename puts the engine in place, which no system does over a mount point.
        raise UsageError(f"--output_dir {destination} is a mount point; choose a directory in it, {destination}/engine")
    try:
        empty = not any(destination.iterdir())
    except OSError as error:
        raise UsageError(f"--output_dir {destination} cannot be read ({error.strerror}); choose another") from error
    if empty:
        return
    if not is_engine_dir(destination):
        raise UsageError(f"--output_dir {destination} holds other files and is no engine directory; choose another")
    if not overwrite:
        raise UsageError(f"--output_dir {destination} already holds an engine; add --overwrite to replace it")


def is_engine_dir(path: Path) -> bool:
    """Tell whether a directory holds a manifest of any schema version of ours."""
    try:
        return f'"{SCHEMA}"' in (path / MANIFEST_NAME).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
            return False
        raise EngineError(
            f"{path / MANIFEST_NAME} cannot be read ({error.strerror}); choose another --output_dir"
        ) from error


def _lock_staging(staging: Path, destination: Path) -> int:
    """Create and lock the staging directory; returns the descriptor that holds the lock."""
    while True:
        staging.mkdir(exist_ok=True)
        try:
            lock = _lock_directory(staging, destination)
        except FileNotFoundError:
            continue
        # Another build may have renamed the directory between open and lock: then the lock is on its finished engine.
        try:
            if os.path.samestat(os.fstat(lock), os.stat(staging)):
                return lock
        except FileNotFoundError:
            pass
        os.close(lock)


def _lock_directory(directory: Path, destination: Path) -> int:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UsageError(
            f"another build is writing --output_dir {destination}; wait for it or choose another"
        ) from None
    return descriptor


def _empty(directory: Path) -> None:
    _make_writable(directory)
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _remove(directory: Path) -> None:
    """Remove a directory, one with write protection too; what stays is logged."""
    _make_writable(directory)
    try:
        shutil.rmtree(directory)
    except OSError as error:
        # It may have gone another way.
        if directory.exists():
            logger.warning("%s could not be removed (%s); remove it by hand", directory, error)


def _make_writable(directory: Path) -> None:
    """Allow entries of a directory and of those in it to be removed, as far as they are ours."""
    folders = [str(directory)]
    while folders:
        folder = folders.pop()
        with suppress(OSError):
            mode = os.stat(folder).st_mode
            if mode & stat.S_IRWXU != stat.S_IRWXU:
                os.chmod(folder, stat.S_IMODE(mode) | stat.S_IRWXU)
            with os.scandir(folder) as entries:
                folders += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


def _aside(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.replaced")


def _recover(destination: Path) -> None:
    """Finish a replacement in two steps that a killed build left half done; the caller holds the staging lock."""
    aside = _aside(destination)
    try:
        lock = _lock_directory(aside, destination)
    except FileNotFoundError:
        return
    try:
        if not os.path.lexists(destination) and _is_whole(aside):
            os.rename(aside, destination)
            logger.warning("%s was brought back: a build was killed while it replaced it", destination)
        else:
            _remove(aside)
    finally:
        os.close(lock)


def _is_whole(engine: Path) -> bool:
    try:
        open_engine_dir(engine, verify_hashes=False)
    except EngineError:
        return False
    return True


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> None:
    """Swap two directories in one step, or in two where the filesystem cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        arguments = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
        if libc.renameat2(*arguments) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(code, os.strerror(code), str(other))
    aside = _aside(other)
    os.rename(other, aside)
    try:
        os.rename(one, other)
    except OSError:
        os.rename(aside, other)
        raise
    _remove(aside)
