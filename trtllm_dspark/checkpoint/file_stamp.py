"""Notice a file that is replaced or rewritten between the reading of its header and of its values."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from trtllm_dspark.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class FileStamp:
    """A file as it was found: another one under its path, or another content, has another stamp."""

    path: Path
    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path, descriptor: int | None = None) -> FileStamp:
        """Return the stamp of the file at `path`, or of the open file that was found there."""
        found = os.stat(path) if descriptor is None else os.fstat(descriptor)
        return cls(path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open the file for reading; what was read counts once the block has ended without an error.

        Raises:
            CheckpointError: at the end of the block, when the file is not the stamped one any more.
        """
        with self.path.open("rb") as stream:
            yield stream
            # At the end: a change in the middle of the reading is seen too.
            if FileStamp.of(self.path, stream.fileno()) != self:
                raise CheckpointError(
                    f"{self.path} was replaced or changed while the checkpoint was read; start again when nothing "
                    "writes to it"
                )
