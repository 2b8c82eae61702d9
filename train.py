"""Train one model on one task and record the result: python train.py model=macformer_exp task=listops."""

import os
import sys
from dataclasses import asdict

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lra_data.base import SPLITS, DataError
from macformer import config as configs
from macformer import device as devices
from macformer import record as records


class RunFailed(Exception):
    """The run came to a bad end, which is in its record."""


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(config: DictConfig) -> None:
    run(config, list(HydraConfig.get().overrides.task))


def run(config: DictConfig, overrides: list[str]) -> records.Record:
    """Compose -> task -> model -> fit -> record."""
    configs.check_top(config)
    device = configs.checked("device", devices.choose, config.device)
    resolved = configs.container(config) | {"device": device.type}  # what ran, not what `auto` may mean elsewhere
    trainer = configs.build(config, "trainer")
    configs.check(config, "model")  # a typing error should not wait for the data
    task = configs.build(config, "task.data", folder=config.paths.data, origin=config.paths.get(config.task.name))
    run_id = records.run_id(resolved, task.fingerprint)
    file = records.path(config.paths.results, resolved, run_id)
    code = records.code()
    finished = records.finished(file)
    if finished and not config.force:
        print(f"{run_id} is finished: {file} (force=true repeats it)")
        if finished.code.commit != code.commit:
            print(f"warning: that record was made by commit {finished.code.commit}, this is {code.commit}")
        return finished
    file.parent.mkdir(parents=True, exist_ok=True)  # a place that cannot be written should fail now, not at the end

    devices.prepare(device, config.threads)
    torch.manual_seed(config.seed)
    model = configs.build(config, "model", **asdict(task.spec))
    parameters = sum(p.numel() for p in model.parameters())
    environment = records.environment(device.type, devices.describe(device), config.threads)
    sizes = " / ".join(f"{len(task.splits[split]):,}" for split in SPLITS)
    print(f"{config.model.name} ({parameters:,} parameters) on {config.task.name} ({task.source}: {sizes})")
    print(f"{trainer.total_steps:,} steps on {environment.device_name} ({device.type}); record: {file}")

    logger = None
    if config.logger:
        logger = configs.checked("logger", instantiate(config.logger, _partial_=True), config=resolved)
    result = trainer.fit(model, task, device, config.seed, log=logger and logger.log)
    record = records.Record(
        run_id=run_id,
        status=result.status,
        message=result.message,
        task=config.task.name,
        model=config.model.name,
        seed=config.seed,
        steps_done=len(result.losses),
        config=resolved,
        overrides=overrides,
        code=code,
        data=records.Data(
            fingerprint=task.fingerprint,
            source=task.source,
            examples={split: len(task.splits[split]) for split in SPLITS},
            majority=task.majority,
        ),
        environment=environment,
        parameters=parameters,
        quality=result.quality,
        time=result.time,
        memory=result.memory,
        history=result.history,
    )
    if record.status == "ok" or not finished:  # a repeat that fails does not cost the finished record
        records.write(record, file)
    if logger:
        logger.finish()
    print(records.summary(record))
    if record.status == "interrupted":
        raise KeyboardInterrupt
    if record.status != "ok":
        raise RunFailed(f"{run_id} ended as {record.status}: {record.message}")
    return record


if __name__ == "__main__":
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come through to here, to be said in a sentence
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(f"error: {configs.explain(error)}")
    except (configs.ConfigError, DataError, RunFailed, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
