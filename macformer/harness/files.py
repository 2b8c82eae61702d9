"""The one way to write a file: it is whole, or it is as it was."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A temporary path beside `file`. When the block ends it becomes `file`; if the block fails, it is removed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "r+b") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def write(file: Path, content: str | bytes) -> None:
    with replacing(file) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
