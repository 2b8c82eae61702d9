"""Sources that are three text files, an example a line; and how a source that is not there is named."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from tqdm import tqdm

from lra_data.base import SPLITS, Build, DataError, Example, Source


def line_files(
    task: str,
    folder: str,
    origin: str | None,
    names: Mapping[str, str],
    rows: Mapping[str, int],
    parse: Callable[[bytes], Example],
    hint: str,
    header: bytes | None = None,
) -> tuple[Build, dict[str, Path]]:
    """What `cached` wants to know of the files `names` in `origin` (default: `folder`).

    `parse` raises ValueError for a line that is wrong. Files with as many `rows` as LRA's count as LRA's, any others as
    a stand-in. `hint` says how to get them.
    """
    paths = {split: Path(origin or folder) / names[split] for split in SPLITS}

    def require() -> None:
        for path in paths.values():
            if not path.is_file():
                raise missing(task, folder, origin, f"the file {path}", hint)

    def build() -> tuple[Source, dict[str, Iterable[Example]]]:
        require()
        counted = {split: _count(path, header) for split, path in paths.items()}
        return "lra" if counted == rows else "stand-in", {
            split: _parsed(path, parse, header) for split, path in paths.items()
        }

    if origin:  # a place that was named must be there, packed data or not
        require()
    return build, {path.name: path for path in paths.values()}


def _count(path: Path, header: bytes | None) -> int:
    with open(path, "rb") as file:
        return sum(line.rstrip(b"\r\n") != header for line in file)


def _parsed(path: Path, parse: Callable[[bytes], Example], header: bytes | None) -> Iterator[Example]:
    """The examples of a file whose lines end with LF or CRLF; with a progress bar in bytes."""
    size = path.stat().st_size
    with (
        open(path, "rb") as file,
        tqdm(total=size, desc=f"reading {path.name}", unit="B", unit_scale=True, mininterval=1) as bar,
    ):
        for number, line in enumerate(file, 1):
            bar.update(len(line))
            row = line.rstrip(b"\r\n")
            if number == 1 and row == header:
                continue
            try:
                yield parse(row)
            except ValueError as error:
                raise DataError(f"{path}, line {number}: {error}") from None


def missing(task: str, folder: str, origin: str | None, what: str, hint: str, otherwise: str = "") -> DataError:
    """Says what to put where, and the command that prepares the data then."""
    keys = ("" if folder == "data" else f" paths.data={folder}") + (f" paths.{task}={origin}" if origin else "")
    command = f"python -m lra_data prepare {task}{keys}"
    return DataError(f"task={task} needs {what}, which is not there: {hint}, then run `{command}`{otherwise}")


def check_length(length: int, max_length: int) -> None:
    """The longest text must fit."""
    if max_length > length:
        raise DataError(f"task.data.length={length} is too short for task.data.max_length={max_length}: raise it")
