"""Every YAML composes; every model trains on every task; what does not fit is said in one sentence."""

import re
from pathlib import Path

import pytest
from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import OmegaConf

from lra_data.base import DataError
from macformer.harness import config as configs
from macformer.harness.run import run
from macformer.report import cells
from tests.conftest import MODELS, ROOT, TASKS, Compose

GROUPS = {
    group.name: sorted(file.stem for file in group.glob("*.yaml"))
    for group in (ROOT / "configs").iterdir()
    if group.is_dir()
}


def test_every_group_is_in_a_configuration() -> None:
    text = (ROOT / "configs" / "train.yaml").read_text()
    assert {group for group in GROUPS if re.search(rf"^  - (optional )?{group}:", text, re.M)} == GROUPS.keys()


@pytest.mark.parametrize(("group", "option"), [(group, option) for group in GROUPS for option in GROUPS[group]])
def test_every_yaml_composes_and_its_targets_are_there(group: str, option: str, composed: Compose) -> None:
    config = composed(f"{group}={option}")
    OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    targets = re.findall(r"_target_: (\S+)", OmegaConf.to_yaml(config))
    assert len(targets) >= 4
    assert all(callable(get_object(target)) for target in targets)


@pytest.mark.parametrize(("group", "name"), [(group, name) for group in ("model", "task") for name in GROUPS[group]])
def test_a_model_and_a_task_carry_the_name_of_their_file(group: str, name: str, composed: Compose) -> None:
    assert composed(f"{group}={name}")[group].name == name


@pytest.mark.parametrize("protocol", GROUPS["protocol"])
@pytest.mark.parametrize("task", TASKS)
def test_the_cpu_trainer_shortens_every_task(
    task: str, protocol: str, composed: Compose, sources: Path, tmp_path: Path
) -> None:
    """Its texts fit under either protocol. A misnamed file in configs/task_trainer would be passed over in silence."""
    words = [f"task={task}", f"protocol={protocol}"]
    usual, short = (composed(*words, f"trainer={trainer}").task for trainer in ("paper", "cpu"))
    assert short.data.length <= usual.data.length / 8
    assert short.learning_rate > usual.learning_rate
    few = "task.data.examples={train: 40, dev: 4, test: 4}"
    folder = tmp_path if task == "listops" else sources
    config = composed(*words, "trainer=cpu", few, f"paths.data={folder}")
    assert configs.build(config, "task.data", folder=str(folder)).spec.length == short.data.length


def test_the_schedule_of_the_release_has_10000_steps_in_all(composed: Compose) -> None:
    sizes = {"text": (80, 32), "listops": (1000, 32), "retrieval": (800, 16)}
    for task, (warmup, batch) in sizes.items():
        trainer = composed("model=macformer_exp_released", f"task={task}", "trainer=released").trainer
        assert (trainer.warmup_steps, trainer.batch_size) == (warmup, batch)
        assert trainer.warmup_steps + trainer.steps == 10_000


def test_the_papers_batches_are_those_that_the_report_knows(composed: Compose) -> None:
    for task in TASKS:
        config = composed(f"task={task}").task
        assert cells.PAPER["batch_size"][task] == config.batch_size
        assert cells.PAPER["lengths"][task].items() <= dict(config.data).items()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("model", "protocol"), [*((model, "paper") for model in MODELS), ("rfa", "clean")])
def test_every_model_trains_on_every_task(model: str, protocol: str, task: str, cell: Compose) -> None:
    record = run(cell(task, model, f"protocol={protocol}"), [])
    assert record.status == "ok"
    assert record.steps_done == 10
    assert record.data.source == ("generated" if task == "listops" else "stand-in")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.attention.features=1.5", "features=1.5 does not fit RMFAttention: it should be a valid integer"),
        ("+model.attention.featurs=64", "model.attention.featurs is not known; the keys of RMFAttention are head_dim"),
        ("model.attention.sampling=best", "sampling=best .* should be 'paper', 'release', 'exact01' or 'order1'"),
        ("model.pooling=max", "model.pooling=max .* should be 'padded' or 'masked'"),
        ("model.attention.features=0", "model: features=0 must be a whole number of at least 1"),
        ("model.attention.kernel=cos", "model: kernel='cos' is not known; choose one of exp, inv"),
        ("model.dropout=1.0", "model: dropout=1.0 must be"),
        ("model.dropout=0.999999", "model: dropout=0.999999 must be"),
        ("trainer.precision=half", "trainer.precision=half .* should be 'auto', 'float32', 'bfloat16' or 'float16'"),
        ("trainer.dev_examples=some", "trainer.dev_examples.*some .* should be"),
        ("trainer.accumulate=3", "trainer: accumulate=3 must be at most batch_size=2"),
        ("trainer.steps=ten", "trainer.steps=ten does not fit Trainer: it should be a valid integer"),
        ("trainer.batch_size=0", "trainer.batch_size=0 does not fit Trainer: it should be greater than 0"),
        ("trainer.steps=0", "trainer.steps=0 does not fit Trainer"),
        ("trainer.warmup_steps=1", "warmup_steps=1 does not fit Trainer: it should be greater than or equal to 2"),
        ("trainer.dev_examples=0", "trainer.dev_examples=0 does not fit Trainer"),
        ("task.data.examples.train=many", "task.data.examples.train=many does not fit load"),
        ("task.data.examples.train=0", "task.data.examples.train=0 does not fit load: it should be greater than 0"),
        ("~task.data.examples.dev", "task.data.examples.dev is missing: load needs it"),
        ("~model.attention", "model: missing a required argument: 'attention'"),
        ("model._target_=macformer.model.Nope", "model._target_=macformer.model.Nope is not there"),
        ("model.feedforward=-1", "model: feedforward=-1 must be"),
        ("+model.attention.generator=3", "model.attention.generator=3 .* should be an instance of Generator"),
        ("task.learning_rate=-1.0", "trainer.learning_rate=-1.0 does not fit Trainer: it should be greater than 0"),
        ("task.learning_rate=nan", "trainer.learning_rate=nan does not fit Trainer"),
        ("device=tpu", "^device=tpu is not known; choose one of auto, cpu, cuda, or cuda:N"),
        ("device=cuda:x", "^device=cuda:x is not known; choose one of"),
        ("device=0", "device=0 does not fit train.yaml: it should be a valid string"),
        ("seed=true", "seed=True does not fit train.yaml: it should be a valid integer"),
        ("seed=-1", "seed=-1 does not fit train.yaml"),
        ("paths.results=null", "paths.results=None does not fit train.yaml: it should be a valid string"),
        ("paths.text=5", "paths.text=5 does not fit train.yaml: it should be a valid string"),
        ("threads=0", "threads=0 does not fit train.yaml"),
        ("force=maybe", "force=maybe does not fit train.yaml"),
        ("+foo=1", "foo is not known; the keys of train.yaml are seed, device"),
    ],
)
def test_what_does_not_fit_is_said_in_one_sentence(override: str, sentence: str, cell: Compose) -> None:
    with pytest.raises(configs.ConfigError, match=sentence) as error:
        run(cell("listops", "macformer_exp", override), [])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("sed=1", "sed is not known; the keys there are"),
        ("model=rfa,transformer", "model=rfa,transformer has several values: add -m to sweep"),
        ("task=images", "task=images is not known; choose one of listops, retrieval, text"),
    ],
)
def test_what_hydra_refuses_is_said_in_one_sentence(override: str, sentence: str, composed: Compose) -> None:
    with pytest.raises(HydraException) as error:
        composed(override)
    assert configs.explain(error.value).startswith(sentence)
    assert "\n" not in configs.explain(error.value)


@pytest.mark.parametrize(("task", "file"), [("text", "aclImdb_v1.tar.gz"), ("retrieval", "new_aan_pairs.train.tsv")])
def test_a_missing_source_is_named_with_the_command(task: str, file: str, cell: Compose, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    with pytest.raises(DataError, match=f"{empty}/{file}, which is not there.*python -m lra_data prepare {task}"):
        run(cell(task, "rfa", f"paths.data={empty}"), [])
    assert not [path for path in empty.rglob("*") if path.is_file() and path.suffix != ".lock"]
