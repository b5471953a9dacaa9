"""OmegaConf's mappings, and references ``${…}`` in plain ones, as plain values."""

import importlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from pydantic import BaseModel

from lightning_rlprof.errors import ConfigError

_MARK = "${"


def plain(value: Any) -> Any:
    """The same value out of dicts, lists and scalars; a model gives the keys that were set.

    Reading OmegaConf's mappings resolves what they refer to, so only what is needed is read.
    """
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        return {key: plain(value[key]) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | range):
        return [plain(item) for item in value]
    return value


def escaped(value: Any) -> Any:
    r"""A resolved value with each ``${`` in its texts escaped: resolving it again gives it back.

    Example::

        >>> print(escaped(["echo ${HOME}"])[0])
        echo \${HOME}
    """
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, Mapping):
        return {key: escaped(each) for key, each in value.items()}
    return [escaped(each) for each in value] if isinstance(value, list) else value


def resolvable(data: Mapping[str, Any], looked_at: Collection[str]) -> Mapping[str, Any]:
    """The mapping itself, or one of OmegaConf where it holds ``${…}`` as text.

    Args:
        data: The mapping.
        looked_at: Its keys that matter; references below others do not.

    Raises:
        ConfigError: OmegaConf is needed and not installed.
    """
    if _is_omega(data) or _MARK not in repr({k: data[k] for k in data if k in looked_at}):
        return data
    try:
        omega = importlib.import_module("omegaconf")
    except ImportError as error:
        raise ConfigError(
            "the configuration refers to other keys by ${…}: load it with OmegaConf, "
            "or write values"
        ) from error
    # Dates become texts, as OmegaConf itself reads them from YAML.
    created: Mapping[str, Any] = omega.OmegaConf.create(msgspec.to_builtins(plain(data)))
    return created


@contextmanager
def resolving() -> Iterator[None]:
    """Turn OmegaConf's own errors (unknown reference, ``???``) into one line.

    Raises:
        ConfigError: Something cannot be resolved.
    """
    try:
        yield
    except Exception as error:
        if not _is_omega(error):
            raise
        said = " ".join(str(error).split())
        raise ConfigError(f"cannot resolve the configuration: {said}") from error


def _is_omega(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "omegaconf"
