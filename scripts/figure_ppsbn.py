"""The paper's second toy experiment (Figure 4): a Transformer that translates Multi30K, with and without ppSBN.

    python -m scripts.figure_ppsbn                       # both arms, five seeds, preset small: an hour on two cores
    python -m scripts.figure_ppsbn --full                # preset full, for a GPU
    python -m scripts.figure_ppsbn paths.multi30k=FOLDER # any key of configs/translate.yaml
    python -m scripts.figure_ppsbn --seeds 0,1 --output /tmp/figure attention=rmfa_exp

The runs are those of `python train.py -cn translate -m ppsbn=without,with seed=...`, over the cores of the machine
(with --full one after the other): finished ones are not repeated, and after a kill the same command goes on.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lra_data.base import DataError
from macformer.harness import config as configs
from macformer.harness import files
from macformer.harness import record as records
from macformer.harness.plan import RunPlan
from macformer.paper import experiments
from scripts.table import find_block, write_block

try:
    from macformer.paper import epochs
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is not there; pip install 'macformer[figures]' (make setup does)")

ROOT = Path(__file__).parent.parent
SEEDS = "0,1,2,3,4"
BEGIN, END = "<!-- written by `make figure-ppsbn` -->", "<!-- until here: ppsbn -->"
ARMS = {False: "without", True: "with"}


def plans(seeds: Sequence[str], overrides: Sequence[str]) -> Iterator[tuple[bool, RunPlan]]:
    """Each seed and arm; one sentence, as a ConfigError, for overrides that do not fit."""
    for seed in seeds:
        for ppsbn, option in ARMS.items():
            words = [*overrides, f"ppsbn={option}", f"seed={seed}"]
            config = configs.compose(*words, root="translate")
            for key in ("force", "evaluate", "dry_run"):
                if config[key]:
                    raise configs.ConfigError(f"{key} is for single runs: python train.py -cn translate")
            yield ppsbn, RunPlan(config, words)


def finished(seeds: Sequence[str], overrides: Sequence[str]) -> Iterator[tuple[bool, records.Translation]]:
    """The record of each arm and seed."""
    fingerprint = ""
    for ppsbn, plan in plans(seeds, overrides):
        fingerprint = fingerprint or plan.task().fingerprint
        file, _ = plan.record_and_checkpoint(fingerprint)
        record = records.finished(file)
        if not isinstance(record, records.Translation):
            raise DataError(f"{file} is not there, or not finished: the runs above should have made it")
        yield ppsbn, record


def sweep(words: Sequence[str]) -> int:
    """train.py with these words. A Ctrl-C reaches it, too: it saves its checkpoints, and is waited for."""
    with subprocess.Popen([sys.executable, str(ROOT / "train.py"), *words]) as process:
        while True:
            try:
                code = process.wait()
                return code if code >= 0 else 128 - code
            except KeyboardInterrupt:
                continue


def report_of(found: Sequence[tuple[bool, records.Translation]], command: str) -> dict[str, Any]:
    """What the figure and the claims are made of. Code, machine and settings are the first run's, without ppSBN."""
    first = found[0][1]
    assert first.quality
    model = {key: first.config["model"][key] for key in ("width", "heads", "layers")}
    return {
        "code": first.code.model_dump(),
        "environment": first.environment.model_dump(),
        "settings": model
        | {
            "command": command,
            "preset": first.config["trainer"]["name"],
            "epochs": first.config["trainer"]["epochs"],
            "vocabulary": first.config["task"]["data"]["vocabulary"],
            "parameters": first.parameters,
            "ppsbn_parameters": found[1][1].parameters - first.parameters,
            "source": first.data.source,
            "examples": first.data.examples,
            "signature": first.quality.signature,
            "search": "greedy" if first.quality.beam == 1 else f"{first.quality.beam} beams",
        },
        "runs": [_run(ppsbn, record) for ppsbn, record in found],
    }


def _run(ppsbn: bool, record: records.Translation) -> dict[str, Any]:
    assert record.quality
    assert record.time
    return {
        "ppsbn": ppsbn,
        "seed": record.seed,
        "run_id": record.run_id,
        "bleu": record.quality.test_bleu,
        "loss": record.quality.test_loss,
        "perplexity": record.quality.test_perplexity,
        "train_loss": record.history[-1].train_loss,
        "seconds": record.time.total,
        "history": [
            point.model_dump(include={"step", "train_loss", "dev_loss", "dev_perplexity", "dev_bleu"})
            for point in record.history
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="preset=full, for a GPU: one run after the other")
    parser.add_argument("--seeds", default=SEEDS, help=f"default: {SEEDS}")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "figures")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of configs/translate.yaml")
    options = parser.parse_intermixed_args(arguments)
    changes = [word for word in options.overrides if not word.startswith("paths.")]
    seeds = sorted(set(options.seeds.split(",")))
    overrides = [*["preset=full"][: options.full], *options.overrides]
    home = options.output.resolve() == parser.get_default("output")
    try:
        if wrong := [word for word in options.overrides if "=" not in word]:
            raise ValueError(f"{wrong[0]} is no key=value")
        if wrong := [word for word in changes if word.lstrip("+").startswith(("seed=", "ppsbn="))]:
            raise ValueError(f"{wrong[0]} is set here: --seeds, and both arms")
        if not all(seed.lstrip("-").isdecimal() for seed in seeds):
            raise ValueError(f"--seeds {options.seeds} should be whole numbers, as in 0,1,2")
        if home and (changes or options.seeds != SEEDS):
            raise ValueError("other keys or seeds need an --output: results/figures has the whole figure")
        (_, first), *_ = plans(seeds, overrides)
        first.task()
        options.output.mkdir(parents=True, exist_ok=True)
        find_block(BEGIN, END)  # all that can go wrong should do so now, not when the work is done
        arms = "ppsbn=" + ",".join(ARMS.values())
        where = ["sweep=joblib"][: not options.full]  # with --full there is one GPU for all
        if code := sweep(["-cn", "translate", "-m", *where, *overrides, "seed=" + ",".join(seeds), arms]):
            return code
        found = list(finished(seeds, overrides))
    except (configs.ConfigError, DataError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if len({(record.code.commit, record.environment.device_name) for _, record in found}) > 1:
        print("warning: these runs are of several commits or machines; the figure names the first", file=sys.stderr)
    words = ["python -m scripts.figure_ppsbn"] + ["--full"] * options.full + changes
    words += ["--seeds", options.seeds] * (options.seeds != SEEDS)
    report = report_of(found, " ".join(words))
    verdict, drawn = experiments.sentence4(report), epochs.draw(report)
    contents = {
        "ppsbn.json": (json.dumps(report, indent=1) + "\n").encode(),
        "ppsbn.csv": epochs.csv(report).encode(),
        "ppsbn.md": epochs.markdown(report, verdict).encode(),
        "ppsbn.png": drawn.png,
        "ppsbn.svg": drawn.svg,
    }
    for name, content in contents.items():
        files.write(options.output / name, content)
    if home:  # the README shows this very figure
        write_block(BEGIN, END, f"{verdict} {epochs.reached(report)}\n")
    print(verdict)
    print(f"written to {options.output}: {', '.join(contents)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
