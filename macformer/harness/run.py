"""One run: plan -> data -> model -> training -> record."""

from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from lra_data.base import SPLITS, DataError
from macformer.harness import checkpoint as checkpoints
from macformer.harness import config as configs
from macformer.harness import device as devices
from macformer.harness import record as records
from macformer.harness.failures import RunFailed
from macformer.harness.plan import RunPlan, differences
from macformer.harness.progress import duration, mebibytes

EXPECTED = (configs.ConfigError, DataError, RunFailed, OSError)


def run(config: DictConfig, overrides: list[str], concurrent: int | None = 0) -> records.Record | None:
    """Plan -> data -> model -> training -> record. `concurrent`: other runs that may be on its device."""
    plan = RunPlan(config)
    task, device, trainer = plan.task(), plan.device, plan.trainer
    file, checkpoint = plan.record_and_checkpoint(task.fingerprint)
    run_id, code, finished = checkpoint.run_id, records.code(), records.finished(file)
    if finished and not (config.force or config.evaluate or config.dry_run):
        print(f"{run_id} is finished: {file} (force=true repeats it)")
        if finished.code.commit != code.commit:
            print(f"warning: that record was made by commit {finished.code.commit}, this is {code.commit}")
        return finished

    model = plan.model(task)
    parameters = sum(p.numel() for p in model.parameters())
    environment = records.environment(device.type, devices.describe(device), config.threads, trainer.precision)
    examples: dict[str, int] = {split: len(task.splits[split]) for split in SPLITS}
    data = records.Data(fingerprint=task.fingerprint, source=task.source, examples=examples, majority=task.majority)
    sizes = " / ".join(f"{count:,}" for count in examples.values())
    print(f"{config.model.name} ({parameters:,} parameters) on {config.task.name} ({task.source}: {sizes})")
    if config.evaluate:
        evaluate_only(config.evaluate, plan, model, task)
        return None
    where = "nothing is recorded: a dry run" if config.dry_run else f"record: {file}"
    on = f"{trainer.total_steps:,} steps on {environment.device_name} ({device}, {trainer.precision})"
    print(f"{on}{attention_backends(model, device)}; {where}")
    if config.dry_run:
        print_forecast(plan, model, task)
        return None

    changes = differences(plan.resolved, overrides)
    file.parent.mkdir(parents=True, exist_ok=True)  # a place that cannot be written should fail now, not at the end
    with checkpoint.lock():
        finished = records.finished(file)  # another process may just have finished it
        if finished and not config.force:
            return finished
        saved, logger = checkpoint.unfinished(finished), None
        if saved:
            print(f"going on from step {saved['step']:,} ({checkpoint.file}; delete it to start anew)")
            if (commit := checkpoint.sessions[-1].commit) != code.commit:
                print(f"warning: commit {commit} saved it, this is {code.commit}")
        first_step, device_name = saved["step"] + 1 if saved else 1, environment.device_name
        checkpoint.begin(first_step=first_step, commit=code.commit, device_name=device_name, concurrent=concurrent)
        if config.logger:
            began = checkpoint.sessions[0].began
            logger = configs.build(config, "logger", settings=plan.resolved, run_id=run_id, began=began)
        result = trainer.fit(model, task, device, config.seed, checkpoint.save, saved, logger and logger.log)
        record = records.Record(
            run_id=run_id,
            task=config.task.name,
            model=config.model.name,
            seed=config.seed,
            steps_done=len(result.losses),
            config=plan.resolved,
            overrides=overrides,
            code=code,
            data=data,
            environment=environment,
            sessions=checkpoint.sessions,
            concurrent=checkpoint.concurrent,
            differences=changes,
            batch_size=trainer.batch_size,
            padding=trainer.pad,
            bucketing=trainer.bucket,
            parameters=parameters,
            skipped_steps=result.skipped_steps,
            **{name: getattr(result, name) for name in ("status", "message", "quality", "time", "memory", "history")},
        )
        if record.status == "ok" or not finished:  # a repeat that fails does not cost the finished record
            records.write(record, file)
        if record.status in ("ok", "diverged"):
            checkpoint.finish(record.steps_done if record.status == "ok" else None)
        if logger:
            logger.finish(file)
    print(records.summary(record))
    if record.status == "interrupted":
        saved_yet = checkpoint.file.exists()
        print(f"the same command goes on from {checkpoint.file}" if saved_yet else "nothing is saved yet")
    if result.signal:  # it may have come too late for this run: a sweep is to stop all the same
        raise KeyboardInterrupt(result.signal)
    if record.status != "ok":
        raise RunFailed(f"{run_id} ended as {record.status}: {record.message}", record.status)
    return record


def attention_backends(model: nn.Module, device: torch.device) -> str:
    """What computes the attention, for the first lines. Empty for a model that has no submodule named `attention`."""
    found = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "attention"]
    backends = {each.backend(device) if hasattr(each, "backend") else type(each).__name__ for each in found}
    return f", attention: {' and '.join(sorted(backends))}" if found else ""


def evaluate_only(name: str, plan: RunPlan, model: nn.Module, task: Any) -> None:
    """Test the weights of a checkpoint, named by its file or its run's id."""
    saved = checkpoints.load_for(plan.resolved, task.fingerprint, name)
    for which, weights in {"best on dev": saved["best_weights"], "last": saved["model"]}.items():
        if weights:  # there are no best ones before the first evaluation
            outcomes, loss = plan.trainer.test(model, task, plan.device, weights)
            print(
                f"{saved['run_id']}, weights {which} of {saved['step']:,} steps: test accuracy {outcomes.mean():.2%} "
                f"of {len(outcomes):,} (majority class {task.majority:.2%}), loss {loss:.4f}"
            )


def print_forecast(plan: RunPlan, model: nn.Module, task: Any) -> None:
    """What the run would cost."""
    cost = plan.trainer.forecast(model, task, plan.device, plan.config.seed)
    a_step, parts = cost.train_seconds / plan.trainer.total_steps, (cost.train_seconds, cost.evaluation_seconds)
    total, training, evaluation = map(duration, (sum(parts), *parts))
    print(f"a step takes {1000 * a_step:.3g} ms (mean of {cost.measured_steps})")
    print(f"peak memory of training {mebibytes(cost.memory.peak_bytes)} ({cost.memory.method})")
    print(f"expected: {total} in all, {training} of it training and {evaluation} evaluation")
