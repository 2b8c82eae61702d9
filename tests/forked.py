"""Programs in processes of their own that need not load torch first: forks of a server that has done so once.

A program that a person starts spends four of its five seconds loading torch. Here each run gets what it would get from
a shell (arguments, environment, signals, exit code, output, a fresh __main__), and code that was loaded but never used.
Not for what is to work without torch, nor for joblib: its workers are let go when an interpreter ends, not a fork.
"""

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from multiprocessing import get_context, set_start_method
from multiprocessing.context import ForkServerProcess
from pathlib import Path

ROOT = Path(__file__).parent.parent
SERVER = get_context("forkserver")
# What `python train.py` loads, by itself and by its configuration, and what `make figure-ppsbn` does.
LOADED = "train macformer.model macformer.attention lra_data.listops torch.profiler tests.forked scripts.figure_ppsbn"
SERVER.set_forkserver_preload(LOADED.split())


def start(*words: str, output: Path, errors: Path, env: Mapping[str, str] | None = None) -> ForkServerProcess:
    """`python words...` (a file or -c), begun: it writes into two files."""
    given = dict(os.environ if env is None else env)
    process = SERVER.Process(target=_work, args=(words, str(output), str(errors), given))
    output.touch()
    process.start()
    atexit.register(process.kill)  # or a test that fails before its end would wait for it
    return process


def lines(process: ForkServerProcess, output: Path) -> Iterator[str]:
    """What it writes, as it comes, until it ends."""
    begun = ""
    with open(output) as file:
        while True:
            ended = not process.is_alive()  # asked first: what it wrote before is read below
            *whole, begun = (begun + file.read()).split("\n")
            yield from whole
            if ended:
                return
            time.sleep(0.01)


def run(*words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`python words...`, to its end, with what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        process = start(*words, output=output, errors=errors, env=env)
        process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(words, process.exitcode, output.read_text(), errors.read_text())


def _work(words: tuple[str, ...], output: str, errors: str, env: dict[str, str]) -> None:
    for stream, file in ((1, output), (2, errors)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.stdout.reconfigure(write_through=bool(env.get("PYTHONUNBUFFERED")))  # as at the start of an interpreter
    os.environ.update(env)  # beside what was set when the modules were loaded
    os.chdir(ROOT)
    set_start_method(None, force=True)  # the system's own for the program's workers, not the one that began this
    first, *rest = words
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")
