"""Run records -> the paper's Table 2: time and memory relative to the Transformer, accuracy, beside the paper's.

Records are only put into one table if they ran under the same conditions. What differs from the paper's protocol
(that is, from `python train.py model=M task=T` as the YAML files stand) is in the table's title; a model with a
changed key is a row of its own.
"""

import json
import math
import shlex
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from macformer import record as records
from macformer.record import Record

ROOT = Path(__file__).parent.parent.parent
PAPER = json.loads((ROOT / "results" / "paper.json").read_text())
MEASURES = ("time", "memory", "accuracy")
BASELINE = "transformer"
# Device, threads and precision stand in the environment.
NOT_CONDITIONS = ("name", "seed", "device", "threads", "precision", *records.NOT_IN_RUN_ID)


def load(results: Path) -> tuple[list[Record], list[str]]:
    """All records below results/runs, and one sentence for each file that is none."""
    found, problems = [], []
    for file in sorted((results / "runs").rglob("*.json")):
        try:
            found.append(records.read(file))
        except ValueError as error:
            problems.append(str(error))
    return found, problems


def render(found: list[Record], problems: list[str]) -> str:
    """The tables as Markdown; with no record at all, the paper's with a dash in each cell of ours."""
    finished = [record for record in found if record.status == "ok"]
    parts = [_render(table) for table in _tables(finished)] or [_render(Table(columns={}))]
    failed = [f"{r.run_id} ended as {r.status}: {r.message}" for r in found if r.status != "ok"]
    for heading, lines in (("Failed runs", failed), ("Files left out", problems)):
        if lines:
            parts.append("\n".join([f"**{heading}**", "", *(f"- {line}" for line in lines)]))
    return "\n\n".join(parts) + "\n"


@dataclass
class Run:
    """A record, and how its conditions differ from the paper's protocol."""

    record: Record
    row: str  # the model's name, with its changed keys
    shared: tuple[str, ...]  # conditions that hold for all tasks of a table
    own: tuple[str, ...]  # those of its task


@dataclass
class Table:
    columns: dict[str, list[Run]]  # by task


def _tables(found: list[Record]) -> list[Table]:
    """The paper's protocol first. One table for each set of shared conditions, and for each setting of a task."""
    papers: dict[tuple[str, str], Paper] = {}
    groups: dict[Any, dict[str, dict[Any, list[Run]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for record in found:
        cell = record.model, record.task
        papers[cell] = papers.get(cell) or _paper(*cell)
        run = _place(record, papers[cell])
        environment = record.environment
        machine = environment.device_name, environment.threads, environment.precision, environment.torch
        groups[run.shared, machine][record.task][run.own, record.data.fingerprint].append(run)
    tables = []
    for _, by_task in sorted(groups.items()):
        together: dict[str, list[Run]] = {}  # tasks as the paper has them stand side by side
        apart = []
        for task, settings in sorted(by_task.items()):
            for (own, _), runs in sorted(settings.items(), key=lambda item: item[0]):
                if own or task in together:
                    apart.append(Table({task: runs}))
                else:
                    together[task] = runs
        if together:
            tables.append(Table(together))
        tables += apart
    return tables


@dataclass
class Paper:
    """`python train.py model=M task=T` as the YAML files stand: the paper's protocol, keys joined by dots."""

    values: dict[str, Any]
    follows: dict[str, str]  # keys that take the value of another one


def _paper(model: str, task: str) -> Paper:
    """Empty for a model or task that has no YAML any more."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            config = compose("train", [f"model={model}", f"task={task}"])
    except MissingConfigException:
        return Paper({}, {})
    raw = records.flat(OmegaConf.to_container(config))
    follows = {key: value[2:-1] for key, value in raw.items() if str(value).startswith("${")}
    return Paper(records.flat(OmegaConf.to_container(config, resolve=True)), follows)


def _place(record: Record, paper: Paper) -> Run:
    """Sort a run's differences into row, shared and own conditions."""
    actual = records.flat(record.config)
    row, shared, own = [], [], []
    if record.data.source == "stand-in":
        own.append(f"{record.task} on STAND-IN data, not LRA's")
    for key in sorted(actual.keys() | paper.values.keys()):
        group, _, name = key.partition(".")
        value, original = actual.get(key), paper.values.get(key)
        if value == original or group in NOT_CONDITIONS or name in NOT_CONDITIONS:
            continue
        if key in paper.follows and value == actual.get(paper.follows[key]):
            continue  # said where it comes from
        if group == "protocol" and key not in paper.follows.values():
            continue  # of another task
        change = f"{name or group} = {value}"
        if not paper.follows.get(key, "").startswith("task."):  # else the paper's value depends on the task
            change += f" (paper: {original})"
        if group == "model":
            row.append(f"{name}={value}")
        elif group == "task":
            own.append(f"{record.task} {change}")
        else:
            shared.append(f"{group} {change}" if name else change)
    label = record.model + (f" ({', '.join(row)})" if row else "")
    return Run(record, label, tuple(shared), tuple(own))


def _render(table: Table) -> str:
    runs = [run for column in table.columns.values() for run in column]
    conditions = list(dict.fromkeys(c for run in runs for c in (*run.own, *run.shared)))
    tasks = list(table.columns) if conditions else list(PAPER["accuracy"])
    rows = list(PAPER["accuracy"]["text"])
    rows += sorted({run.row for run in runs} - set(rows))
    cells = pd.DataFrame("-", index=pd.Index(rows, name="model"), columns=pd.Index([], dtype=str), dtype=object)
    notes, fill = [], []
    for task in tasks:
        ours = _means(table.columns.get(task, []))
        for measure in MEASURES:
            paper = PAPER[measure].get(task, {})
            cells[f"{task} {measure}"] = [_cell(ours.get(row), paper.get(row), measure) for row in rows]
        notes += _notes(task, table.columns.get(task, []))
        missing = [row for row in PAPER["accuracy"]["text"] if row not in ours]
        fill += _fill(task, table.columns.get(task, []), missing)
    lines = [*_title(runs, conditions), "", cells.to_markdown(colalign=["left"] + ["right"] * cells.shape[1])]
    lines += ["", "Time and memory are relative to the Transformer, accuracy is in percent; [the paper's value].", ""]
    lines += notes
    if conditions:
        models = ",".join(dict.fromkeys(run.record.model for run in runs))
        lines.append(
            "- **This is a shortened or changed protocol, not the paper's.** The full one (11,000 steps): "
            f"`python train.py -m model={models} task={','.join(tasks)}`."
        )
    return "\n".join(lines + fill)


def _means(runs: list[Run]) -> dict[str, dict[str, float]]:
    """Mean time, memory and accuracy a row, the spread of accuracy and the number of seeds."""
    frame = pd.DataFrame(
        [
            {
                "row": run.row,
                "seed": run.record.seed,
                "time": run.record.time.train_seconds,
                "memory": run.record.memory.peak_bytes,
                "accuracy": 100 * run.record.quality.test_accuracy,
            }
            for run in runs
            if run.record.time and run.record.memory and run.record.quality
        ],
        columns=["row", "seed", *MEASURES],
    )
    # Two records of one seed (they differ in a key that this task does not read) count as one.
    grouped = frame.groupby(["row", "seed"]).mean().groupby("row")
    means = grouped.mean()
    for measure in ("time", "memory"):
        means[measure] /= means[measure].get(BASELINE, float("nan"))
    means = means.assign(spread=grouped["accuracy"].std(), seeds=grouped.size())
    return {str(row): {str(key): float(value) for key, value in mean.items()} for row, mean in means.iterrows()}


def _cell(ours: dict[str, float] | None, paper: float | None, measure: str) -> str:
    """Ours, or a dash, and the paper's."""
    digits = 2 if measure == "accuracy" else 3
    text = f"{ours[measure]:.{digits}f}" if ours and not math.isnan(ours[measure]) else "-"
    if ours and measure == "accuracy" and ours["seeds"] > 1:
        text += f" ± {ours['spread']:.2f} (n={ours['seeds']:.0f})"
    return text if paper is None else f"{text} [{paper:.{digits}f}]"


def _title(runs: list[Run], conditions: list[str]) -> list[str]:
    """One paragraph, wrapped for the screen: all that sets this table apart."""
    if not runs:
        return ["**Table 2, the paper's protocol: no runs yet**"]
    environment = runs[0].record.environment
    threads = f"{environment.threads} thread{'s' * (environment.threads > 1)}"
    machine = f"{environment.device_name} ({threads}, {environment.precision}, torch {environment.torch})"
    if not conditions:
        return [f"**Table 2, the paper's protocol, on {machine}**"]
    title = f"**Table 2 on {machine}, NOT the paper's protocol: {'; '.join(conditions)}**"
    return textwrap.wrap(title, 110, break_long_words=False, break_on_hyphens=False)


def _notes(task: str, runs: list[Run]) -> list[str]:
    if not runs:
        return []
    data = runs[0].record.data
    sizes = " / ".join(f"{count:,}" for count in data.examples.values())
    error = 100 * (data.majority * (1 - data.majority) / data.examples["test"]) ** 0.5
    baseline = [run.record for run in runs if run.row == BASELINE]
    seconds = [record.time.train_seconds for record in baseline if record.time]
    peaks = [record.memory.peak_bytes for record in baseline if record.memory]
    absolute = (
        f"; the Transformer took {sum(seconds) / len(seconds):.1f} s and {sum(peaks) / len(peaks) / 2**20:.0f} MiB"
        if seconds and peaks
        else ""
    )
    return [
        f"- {task}: {data.source} data, {sizes} examples; the majority class scores {100 * data.majority:.2f} "
        f"(standard error {error:.2f}){absolute}."
    ]


def _fill(task: str, runs: list[Run], missing: list[str]) -> list[str]:
    """The command that fills the dashes of a task: that of a run that is there, with the other models."""
    if not missing:
        return []
    kept = [f"task={task}"]
    if runs:
        skip = ("model", "task=", "seed=", "force=", "paths.", "logger")
        kept += [shlex.quote(word) for word in runs[0].record.overrides if not word.startswith(skip)]
    return [f"- to fill the dashes of {task}: `python train.py -m model={','.join(missing)} {' '.join(kept)}`"]
