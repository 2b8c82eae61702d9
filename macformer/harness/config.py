"""Between Hydra's YAML and our constructors: one clear sentence for what does not fit. No torch."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_type_hints

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, PositiveInt, PydanticSchemaGenerationError, TypeAdapter, ValidationError

CONFIGS = Path(__file__).parents[2] / "configs"
NOT_ARGUMENTS = ("_target_", "_partial_", "name")
# Launchers, and the extras of pyproject.toml that bring them. With ray goes all that setup installs, or pip would let
# it break the others' versions.
EXTRAS = {
    "joblib": "sweep",
    "submitit_local": "sweep",
    "submitit_slurm": "sweep",
    "ray": "dev,sweep,figures,translate,ray",
}


class ConfigError(Exception):
    """A key or value that does not fit: one sentence that names it and the way out."""


def compose(*overrides: str) -> DictConfig:
    """What `python train.py overrides...` gets as its configuration."""
    before = GlobalHydra.instance().hydra  # a run may be going on, which was composed by Hydra itself
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return hydra.compose("train", list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error
    finally:
        GlobalHydra.instance().hydra = before


def container(node: DictConfig) -> dict[str, Any]:
    """The node as a plain dict, every reference to another key replaced by its value."""
    return cast(dict[str, Any], OmegaConf.to_container(node, resolve=True))


def build(config: DictConfig, key: str, **given: Any) -> Any:
    """What the node at `key` describes: its _target_, called with its keys and with what it takes of `given`."""
    node = check(config, key)
    arguments = {name: value for name, value in container(node).items() if name != "name"}
    make = instantiate(arguments | {"_partial_": True}, _convert_="all")
    takes = inspect.signature(get_object(node._target_)).parameters
    for missing in (p.name for p in takes.values() if p.default is p.empty and p.name not in {*arguments, *given}):
        raise ConfigError(f"{key}.{missing} is missing: {node._target_} needs it")
    return checked(key, make, **{name: value for name, value in given.items() if name in takes})


def checked(key: str, make: Callable[..., Any], *arguments: Any, **given: Any) -> Any:
    """make(...), its complaint about a value turned into a ConfigError."""
    try:
        return make(*arguments, **given)
    except ValueError as error:
        raise ConfigError(f"{key}: {' '.join(str(error).split())}") from error


def check(config: DictConfig, key: str) -> DictConfig:
    """The node at `key`, its keys and those below it fitting the constructors they go to by name and type."""
    node = OmegaConf.select(config, key)
    try:
        target = get_object(node._target_)
    except ImportError:
        raise ConfigError(f"{key}._target_={node._target_} is not there to be imported") from None
    takes = list(inspect.signature(target).parameters)
    types = get_type_hints(target.__init__ if inspect.isclass(target) else target, include_extras=True)
    for name in node:
        if name in NOT_ARGUMENTS:
            continue
        if name not in takes:
            raise ConfigError(f"{key}.{name} is not known: {target.__name__} takes {', '.join(takes)}")
        value = node[name]
        if isinstance(value, DictConfig) and "_target_" in value:
            check(config, f"{key}.{name}")
            continue
        if isinstance(value, DictConfig):
            value = container(value)
        _fit(f"{key}.{name}", value, types[name], target.__name__)
    return node


class Top:
    """The keys of configs/train.yaml; those of the groups go to constructors, which know them better."""

    seed: Annotated[int, Field(ge=0, lt=2**32)]
    device: Literal["auto", "cpu", "cuda"]
    threads: PositiveInt
    force: bool
    evaluate: str | None
    dry_run: bool
    paths: dict[str, str | None]
    task: dict[str, Any]
    model: dict[str, Any]
    trainer: dict[str, Any]
    logger: dict[str, Any]
    pad: Literal["full", "trim"]
    bucket: bool
    protocol: dict[str, Any]


def check_top(config: DictConfig) -> None:
    """The keys at the top, by name and type."""
    values, kinds = container(config), get_type_hints(Top, include_extras=True)
    if unknown := values.keys() - kinds.keys():
        raise ConfigError(f"{min(unknown)} is not known; the keys there are {', '.join(kinds)}")
    for name, kind in kinds.items():
        if name not in values:
            raise ConfigError(f"{name} is missing; configs/train.yaml has it")
        _fit(name, values[name], kind, "train.yaml")
    for name in ("data", "results", "outputs"):  # the other paths are where a task's source is, or null
        _fit(f"paths.{name}", values["paths"].get(name), str, "train.yaml")


def _fit(key: str, value: Any, kind: Any, goal: str) -> None:
    """The value must be of the kind that the goal wants."""
    try:
        TypeAdapter(kind).validate_python(value, strict=True)
    except PydanticSchemaGenerationError:
        raise ConfigError(f"{key}={value} does not fit {goal}: it can only be set from Python") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join([key, *(str(part) for part in first["loc"])]) if isinstance(value, dict) else key
        if first["type"] == "missing":
            raise ConfigError(f"{where} is missing: {goal} needs it") from None
        message = first["msg"].removeprefix("Input ")
        raise ConfigError(f"{where}={first['input']} does not fit {goal}: it {message}") from None


def explain(error: Exception) -> str:
    """One sentence for an error of the command line or of the YAML files, where Hydra's own is longer."""
    if sweep := re.match(r"Ambiguous value for argument '(.+)'", str(error)):
        return f"{sweep[1]} has several values: add -m to sweep over them"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        if group == "hydra/launcher" and name in EXTRAS:
            wanted = f"pip install -c constraints.txt -e '.[{EXTRAS[name]}]'"
            return f"hydra/launcher={name} is not installed: {wanted}"
        return f"{group}={name} is not known; choose one of {', '.join(error.options)}"
    cause = error.__cause__ if isinstance(error, HydraException) else error
    if isinstance(cause, OmegaConfBaseException) and isinstance(cause.parent_node, DictConfig):
        known = [str(name) for name in cause.parent_node if name not in NOT_ARGUMENTS]
        return f"{cause.full_key} is not known; the keys there are {', '.join(known)}"
    return " ".join(str(error).split())
