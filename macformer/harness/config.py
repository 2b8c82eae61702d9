"""Between Hydra's YAML and our constructors: one clear sentence for what does not fit. No torch."""

import inspect
import re
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_type_hints

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, create_model

CONFIGS = Path(__file__).parents[2] / "configs"
NOT_ARGUMENTS = ("_target_", "_partial_", "name")
STRICT = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)
# Launchers, and the extras of pyproject.toml that bring them. With ray goes all that setup installs, or pip would let
# it break the others' versions.
EXTRAS = {"joblib": "sweep", "submitit_local": "sweep", "submitit_slurm": "sweep"}
EXTRAS["ray"] = "dev,sweep,figures,translate,ray"


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
    arguments = {name: value for name, value in container(check(config, key)).items() if name != "name"}
    make = instantiate(arguments | {"_partial_": True}, _convert_="all")
    signature = inspect.signature(make)
    taken = {name: value for name, value in given.items() if name in signature.parameters}
    try:
        signature.bind(**taken)
    except TypeError as error:
        raise ConfigError(f"{key}: {error}") from None
    try:
        return make(**taken)
    except ValueError as error:
        raise ConfigError(f"{key}: {' '.join(str(error).split())}") from error


def check(config: DictConfig, key: str) -> DictConfig:
    """The node at `key`, its keys and those below it fitting the constructors they go to by name and type."""
    node = OmegaConf.select(config, key)
    try:
        target = get_object(node._target_)
    except ImportError:
        raise ConfigError(f"{key}._target_={node._target_} is not there to be imported") from None
    hints = get_type_hints(target.__init__ if inspect.isclass(target) else target, include_extras=True)
    types = {name: hints.get(name, Any) for name in inspect.signature(target).parameters}
    values = {name: value for name, value in container(node).items() if name not in NOT_ARGUMENTS}
    for name in types.keys() & values.keys():
        if isinstance(values[name], dict) and "_target_" in values[name]:
            check(config, f"{key}.{name}")
            types[name] = Any
    fields: dict[str, Any] = {name: (kind, None) for name, kind in types.items()}
    fit(values, create_model("Arguments", __config__=STRICT, **fields), target.__name__, key)
    return node


class Paths(BaseModel):
    """The other paths are where a task's source is, or null."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, str | None]
    data: str
    results: str
    outputs: str


class Top(BaseModel):
    """The keys of configs/train.yaml; those of the groups go to constructors, which know them better."""

    model_config = STRICT
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    device: str
    threads: PositiveInt
    force: bool
    evaluate: str | None
    dry_run: bool
    paths: Paths
    task: dict[str, Any]
    model: dict[str, Any]
    trainer: dict[str, Any]
    logger: dict[str, Any]
    pad: Literal["full", "trim"]
    bucket: bool
    protocol: dict[str, Any]


def fit(values: Any, schema: type[BaseModel], goal: str, key: str = "") -> None:
    """The values of the node at `key` must have the names and types of the schema, which `goal` wants."""
    try:
        schema.model_validate(values)
    except ValidationError as error:
        first, where = error.errors()[0], key
        for part in first["loc"]:
            if isinstance(values, dict):  # else a member of a union, which pydantic names as well
                where, values = f"{where}.{part}".strip("."), values.get(part)
        problems = {
            "missing": f" is missing: {goal} needs it",
            "extra_forbidden": f" is not known; the keys of {goal} are {', '.join(schema.model_fields)}",
        }
        unfit = f"={values} does not fit {goal}: it {first['msg'].removeprefix('Input ')}"
        raise ConfigError(where + problems.get(first["type"], unfit)) from None


def explain(error: Exception) -> str:
    """One sentence for an error of the command line or of the YAML files, where Hydra's own is longer."""
    if sweep := re.match(r"Ambiguous value for argument '(.+)'", str(error)):
        return f"{sweep[1]} has several values: add -m to sweep over them"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        if group == "hydra/launcher" and name in EXTRAS:
            return f"hydra/launcher={name} is not installed: pip install -c constraints.txt -e '.[{EXTRAS[name]}]'"
        return f"{group}={name} is not known; choose one of {', '.join(error.options)}"
    cause = error.__cause__ if isinstance(error, HydraException) else error
    if isinstance(cause, OmegaConfBaseException) and isinstance(cause.parent_node, DictConfig):
        known = [str(name) for name in cause.parent_node if name not in NOT_ARGUMENTS]
        return f"{cause.full_key} is not known; the keys there are {', '.join(known)}"
    return " ".join(str(error).split())
