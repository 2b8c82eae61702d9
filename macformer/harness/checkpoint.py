"""The checkpoint of a run: one file, whole or not there. Loading it runs no code from it."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import filelock
import torch

from macformer.harness import files
from macformer.harness.failures import RunFailed
from macformer.harness.identity import identity_config
from macformer.harness.record import Record, Session

FORMAT = 1
# At `evaluate=`: what a checkpoint may have been made with and need not be evaluated with.
MAY_DIFFER = {"device", "threads", "trainer.precision", "trainer.tf32", "trainer.compile"}
KEPT = ("step", "model", "best_weights", "losses")  # of a finished run, for `evaluate=`


@dataclass
class Checkpoint:
    """<folder>/checkpoint.pt, marked with the run that it belongs to."""

    folder: Path  # has the run's id for its name
    config: dict[str, Any]
    fingerprint: str  # of the data

    def __post_init__(self) -> None:
        self.run_id, self.file = self.folder.name, self.folder / "checkpoint.pt"
        self.sessions: list[Session] = []  # the processes that worked on the run so far

    @contextmanager
    def lock(self) -> Iterator[None]:
        """No other process works on this run at the same time. The lock of one that was killed is free."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            held = filelock.FileLock(self.folder / "lock").acquire(timeout=0)
        except filelock.Timeout as busy:
            raise RunFailed(f"{self.run_id} is being trained by another process ({busy.lock_file})") from None
        with held:
            for half in self.folder.glob(f"{self.file.name}.*.tmp"):  # of a process that was killed while writing
                half.unlink()
            yield

    def unfinished(self, finished: Record | None) -> dict[str, Any] | None:
        """The state to go on from, if there is one that is not of the `finished` run: force=true begins anew."""
        if not self.file.exists():
            return None
        saved = load(self.file)
        if saved["run_id"] != self.run_id:
            raise RunFailed(f"{self.file} is of {saved['run_id']}: move it away, or delete it")
        sessions = [Session(**session) for session in saved["sessions"]]
        if saved["done"] or (finished and finished.sessions == sessions):
            return None
        self.sessions = sessions
        return saved

    def begin(self, **session: Any) -> None:
        """Another process, this one, works on the run."""
        self.sessions.append(Session(began=datetime.now(UTC).isoformat(" ", "milliseconds"), **session))

    @property
    def concurrent(self) -> int | None:
        """Other runs at work beside this one: the most of its sessions."""
        known = [session.concurrent for session in self.sessions if session.concurrent is not None]
        return max(known) if len(known) == len(self.sessions) else None

    def save(self, state: dict[str, Any], done: bool = False) -> None:
        """A disk that is full costs the checkpoint, not the run."""
        marks = {
            "format": FORMAT,
            "done": done,
            "run_id": self.run_id,
            "config": json.dumps(self.config),
            "fingerprint": self.fingerprint,
            "sessions": [session.model_dump() for session in self.sessions],
        }
        try:
            write(self.file, state | marks)
        except (OSError, RuntimeError) as error:  # torch's own writer raises RuntimeError
            print(f"warning: {self.file} cannot be written, the run goes on without: {error}", file=sys.stderr)

    def finish(self, steps: int | None) -> None:
        """Leave nothing to go on from. Only the weights of the last step stay; steps=None: the run diverged."""
        if not self.file.exists() or (saved := load(self.file))["done"]:
            return  # of an earlier, finished run
        if saved["step"] == steps:
            self.save({key: saved[key] for key in KEPT}, done=True)
        else:  # the last ones could not be written
            self.file.unlink()


def write(file: Path, state: dict[str, Any]) -> None:
    with files.replacing(file) as temporary, open(temporary, "wb") as stream:
        torch.save(state, stream)


def load(file: Path) -> dict[str, Any]:
    """What was saved, its tensors on the CPU."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        if state["format"] != FORMAT:
            raise ValueError(f"format {state['format']}")
    except FileNotFoundError:
        raise RunFailed(f"there is no checkpoint {file}") from None
    except Exception as error:  # what is no checkpoint can raise anything
        raise RunFailed(f"{file} cannot be read as a checkpoint: a run starts anew without it") from error
    return state


def load_for(config: dict[str, Any], fingerprint: str, name: str) -> dict[str, Any]:
    """The checkpoint of that file or run id, if it was made with this configuration and these data."""
    file = Path(name) if name.endswith(".pt") else Path(config["paths"]["outputs"]) / name / "checkpoint.pt"
    saved = load(file)
    theirs = identity_config(json.loads(saved["config"])) | {"data": saved["fingerprint"]}
    ours = identity_config(config) | {"data": fingerprint}
    compared = {key: (theirs.get(key), ours.get(key)) for key in sorted((theirs.keys() | ours.keys()) - MAY_DIFFER)}
    if differing := [f"{key}={its} (here {here})" for key, (its, here) in compared.items() if its != here]:
        raise RunFailed(f"{file} was trained with {', '.join(differing)}: evaluate it with the same keys")
    return saved
