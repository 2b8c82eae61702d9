"""The paper's second toy experiment (Figure 4): a Transformer that translates Multi30K, with and without ppSBN.

    python -m scripts.figure_ppsbn                       # both arms, five seeds: an hour on two cores
    python -m scripts.figure_ppsbn --multi30k FOLDER     # where Multi30K's files are
    python -m scripts.figure_ppsbn --seeds 0,1 --epochs 2 --output /tmp/figure

A run takes one thread of the CPU, and as many runs go side by side as there are cores. Finished runs are not repeated.
Ctrl-C stops all; the same command goes on after the last whole epoch of each run.
"""

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing import Process, active_children, parent_process
from multiprocessing.connection import wait
from pathlib import Path

from pydantic import ValidationError

from lra_data.base import DataError
from macformer.harness import device as devices
from macformer.harness import files
from macformer.harness import record as records
from macformer.paper import experiments
from scripts.table import find_block, write_block

try:
    from macformer.paper import figure4, multi30k, translation
    from macformer.paper.translation import Settings
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is not there; pip install 'macformer[figures,translate]' (make setup does)")

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / "results" / "figures"
SEEDS = "0,1,2,3,4"
BEGIN, END = "<!-- written by `make figure-ppsbn` -->", "<!-- until here: ppsbn -->"
DEFAULTS = Settings().model_dump(exclude={"seed", "pre_sbn", "post_sbn"})


def train_all(runs: Sequence[Settings], corpus: multi30k.Corpus, results: Path, outputs: Path, jobs: int) -> int:
    """Each run in a process of its own, `jobs` at a time, which ends with this one; returns how many failed."""
    processes = [Process(target=_train, args=(run, corpus, results, outputs), daemon=True) for run in runs]
    for process in processes:
        while len(running := active_children()) >= jobs:
            wait([other.sentinel for other in running])
        process.start()
    for process in processes:
        process.join()
    return sum(process.exitcode != 0 for process in processes)


def _train(settings: Settings, corpus: multi30k.Corpus, results: Path, outputs: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it, too, and ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # If the parent is killed, this process ends, too: the same command, given again, must find its runs left alone.
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()  # type: ignore[union-attr]
    name = f"{settings.model}, seed {settings.seed}"
    try:
        translation.run(settings, corpus, results, outputs)
    except (FloatingPointError, DataError, OSError) as error:
        sys.exit(f"error: {name}: {error}")
    except (RuntimeError, MemoryError) as error:
        if devices.is_out_of_memory(error):
            sys.exit(f"error: {name}: out of memory: lower --jobs, or raise --steps-per-epoch (smaller batches)")
        raise


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--multi30k", type=Path, default=ROOT / "data" / "multi30k", help="default: data/multi30k")
    parser.add_argument("--output", type=Path, default=HOME, help="where the figure goes")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="where the records go: below runs/")
    parser.add_argument("--outputs", type=Path, default=ROOT / "outputs", help="where the checkpoints go")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs side by side; default: all cores")
    parser.add_argument("--seeds", default=SEEDS, help=f"default: {SEEDS}")
    for name, value in DEFAULTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value}")
    try:
        make_figure(parser.parse_args(arguments), sys.argv[1:] if arguments is None else arguments)
    except (DataError, ValueError, OSError) as error:
        says = records.complaint(error) if isinstance(error, ValidationError) else str(error)
        sys.exit(f"error: {says.removeprefix('Value error, ').replace(' Input should', ' should')}")
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on after the last whole epoch of each run", file=sys.stderr)
        sys.exit(130)


def make_figure(options: argparse.Namespace, words: Sequence[str]) -> None:
    """Train what is not finished, and draw all. `words`: as they were typed."""
    at_home, shared = options.output.resolve() == HOME, {name: getattr(options, name) for name in DEFAULTS}
    if not all(seed.isdecimal() for seed in options.seeds.split(",")):
        raise ValueError(f"--seeds {options.seeds} should be whole numbers, as in 0,1,2")
    if at_home and (shared, options.seeds) != (DEFAULTS, SEEDS):
        raise ValueError("other settings or seeds need an --output: results/figures has the whole figure")
    seeds = sorted(set(map(int, options.seeds.split(","))))
    runs = [Settings(seed=seed, pre_sbn=on, post_sbn=on, **shared) for seed in seeds for on in (False, True)]
    corpus = multi30k.load(options.multi30k, options.vocabulary)
    multi30k.batches(corpus.splits["train"].lengths, options.steps_per_epoch, seed=0, epoch=0)
    options.output.mkdir(parents=True, exist_ok=True)
    find_block(BEGIN, END)  # all that can go wrong should do so now, not when the work is done
    files_of = [translation.record_file(run, corpus.fingerprint, options.results) for run in runs]
    left = [run for run, file in zip(runs, files_of, strict=True) if not translation.finished(file)]
    print(f"{len(runs) - len(left)} of {len(runs)} runs are finished", flush=True)
    if failed := train_all(left, corpus, options.results, options.outputs, max(1, options.jobs)):
        raise DataError(f"{failed} of {len(left)} runs failed (see above)")
    found = [record for file in files_of if (record := translation.finished(file))]
    if len({(record.code.commit, record.environment.device_name) for record in found}) > 1:
        print("warning: these runs are of several commits or machines; the figure names the first", file=sys.stderr)
    report = figure4.report(found, " ".join(["python -m scripts.figure_ppsbn", *([] if at_home else words)]))
    verdict = experiments.sentence4(report)
    files.write(options.output / "ppsbn.json", json.dumps(report, indent=1) + "\n")
    files.write(options.output / "ppsbn.md", figure4.markdown(report, verdict))
    figure4.draw(report).write(options.output)
    if at_home:  # the README shows this very figure
        write_block(BEGIN, END, f"{verdict} {figure4.reached(report)}\n")
    print(f"{verdict}\nwritten to {options.output}: ppsbn.{{json,md,png,svg}}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
