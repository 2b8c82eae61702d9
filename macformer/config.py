"""Between Hydra's YAML and our constructors: one clear sentence for what does not fit. No torch."""

import inspect
from collections.abc import Callable
from typing import Any, cast, get_type_hints

from hydra.errors import HydraException, MissingConfigException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, TypeAdapter, ValidationError

NOT_ARGUMENTS = ("_target_", "_partial_", "name")


class ConfigError(Exception):
    """A key or value that does not fit: one sentence that names it and the way out."""


def container(node: DictConfig) -> dict[str, Any]:
    """The node as a plain dict, every reference to another key replaced by its value."""
    return cast(dict[str, Any], OmegaConf.to_container(node, resolve=True))


def build(config: DictConfig, key: str, **given: Any) -> Any:
    """What the node at `key` describes: its _target_, called with its keys and `given`."""
    node = check(config, key)
    arguments = {name: value for name, value in container(node).items() if name != "name"}
    make = instantiate(arguments | {"_partial_": True}, _convert_="all")
    return checked(key, make, **given)


def checked(key: str, make: Callable[..., Any], *arguments: Any, **given: Any) -> Any:
    """make(...), its complaint about a value turned into a ConfigError."""
    try:
        return make(*arguments, **given)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error


def check(config: DictConfig, key: str) -> DictConfig:
    """The node at `key`, its keys and those below it fitting the constructors they go to by name and type."""
    node = OmegaConf.select(config, key)
    target = get_object(node._target_)
    takes = list(inspect.signature(target).parameters)
    types = get_type_hints(target.__init__ if inspect.isclass(target) else target)
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
        try:
            adapter = TypeAdapter(types[name], config=ConfigDict(arbitrary_types_allowed=True))
            adapter.validate_python(value, strict=True)
        except ValidationError as error:
            message = error.errors()[0]["msg"].removeprefix("Input ")
            raise ConfigError(f"{key}.{name}={value} does not fit {target.__name__}: it {message}") from None
    return node


def explain(error: Exception) -> str:
    """One sentence for an error of the command line or of the YAML files, where Hydra's own is longer."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={name} is not known; choose one of {', '.join(error.options)}"
    cause = error.__cause__ if isinstance(error, HydraException) else error
    if isinstance(cause, OmegaConfBaseException) and isinstance(cause.parent_node, DictConfig):
        known = [str(name) for name in cause.parent_node if name not in NOT_ARGUMENTS]
        return f"{cause.full_key} is not known; the keys there are {', '.join(known)}"
    return str(error)
