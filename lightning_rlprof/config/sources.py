"""Mappings, YAML files, keywords and the environment as one plain mapping in our own keys."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from io import StringIO
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from lightning_rlprof.config.blocks import IntegratedConfig
from lightning_rlprof.config.omegaconf import plain, resolvable, resolving
from lightning_rlprof.config.validation import near, near_match
from lightning_rlprof.config.verl import ANYTHING, ROLES, Translation, find, translate
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.system.location import redact

PREFIX = "RLPROF__"
"""Begins the name of a variable that sets a key: ``RLPROF__INTEGRATED__STAGE=actor_update``."""

_WRAPPER = "profiler_config"
_MOST = 10_000  # Values; a training's whole file has some hundreds.
_WINDOW = ("profile_step_start", "profile_step_end")
_ABSENT = object()
_HOMES = ("global_profiler", _WRAPPER)
# A file with one of these keys configures a whole training; its other keys are not resolved.
_LOOKED_AT = {*_HOMES, "trainer", "profiler"}
_LOOKED_AT |= {place.partition(".")[0] for place in ROLES if place}


def read(source: Mapping[str, Any] | str | PathLike[str]) -> Mapping[str, Any]:
    """The mapping itself, or the one in a YAML file.

    Raises:
        ConfigError: No such file, no YAML, or no mapping in it.
    """
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | PathLike):
        raise ConfigError(
            f"a configuration must be a mapping or the path of a YAML file, not {source!r}"
        )
    what = f"configuration {redact(str(source))!r}"
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{what} cannot be read: {why}") from error
    data = _loaded(text, what)
    if not isinstance(data or {}, Mapping):
        raise ConfigError(f"{what} holds {type(data).__name__}, not a mapping")
    return data or {}


def _loaded(text: str, what: str) -> Any:
    """Return the value of some YAML; ``what`` begins the message where it is none."""
    try:
        # From a string, errors would quote the line, which may contain a secret.
        data = yaml.load(StringIO(text), _Loader)
    except RecursionError as error:
        raise ConfigError(f"{what} contains brackets or blocks nested too deeply") from error
    except Exception as error:
        # YAML raises its errors, or ValueError for an invalid date or number.
        said = " ".join(str(error).split()).replace('"<file>", ', "")
        raise ConfigError(f"{what} is not valid YAML: {said}") from error
    if not _is_small(data):
        raise ConfigError(
            f"{what} holds more than {_MOST:,} values, or contains itself: check its "
            f"aliases (*name)"
        )
    return data


class _Loader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice, of which YAML would drop the first silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # A scalar may say that it is a set; YAML refuses that itself.
        pairs: Any = node.value if node.id == "mapping" else ()
        keys = [key.value for key, _ in pairs if isinstance(key, yaml.ScalarNode)]
        for at, key in enumerate(keys):
            if key in keys[:at] and key != "<<":
                raise yaml.MarkedYAMLError(
                    problem=f"{key} is set twice", problem_mark=node.start_mark
                )
        return super().construct_mapping(node, deep)


def _is_small(value: Any) -> bool:
    """Tell whether a value holds at most `_MOST` others, each counted wherever it stands."""
    left, count = [value], 0
    while left and count <= _MOST:
        count += 1
        each = left.pop()
        if isinstance(each, Mapping):
            left += each.values()
        elif isinstance(each, list):
            left += each
    return not left


def canonical(
    data: Mapping[str, Any], fields: Collection[str], origins: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return rlprof keys from a block of rlprof, MindSpeed-RL or verl, alone or in a whole file.

    A mapping with ``profiler_config`` or with profiling keys of verl may be the file of a whole
    training: what else it holds is not looked at. rlprof keys beside verl's win over them.

    Args:
        data: A mapping; OmegaConf's is resolved where it is read, and only there.
        fields: The top-level keys of the configuration.
        origins: Filled with the spelling that each translated key came from.

    Raises:
        ConfigError: A misspelled or unsupported key, a reference that cannot be resolved.
    """
    with resolving():
        data, fields = _looked_at(data, fields)
        translation = translate(data)
        if translation is None and _WRAPPER not in data:
            return {str(key): plain(data[key]) for key in data}
        _refuse_misspelled(data, fields)
        own = {key: plain(data[key]) for key in map(str, data) if _name(key) in fields}
        block = plain(data[_WRAPPER]) if _WRAPPER in data else {}
    if not isinstance(block or {}, Mapping):
        raise ConfigError(f"{_WRAPPER}={block!r} is not a mapping of keys such as integrated")
    translation = translation or Translation()
    origins = {} if origins is None else origins
    origins.update(translation.origins)
    return lay(_nested(translation.values), origins, merge(block or {}, own))


def _looked_at(
    data: Mapping[str, Any], fields: Collection[str]
) -> tuple[Mapping[str, Any], Collection[str]]:
    """Return a mapping whose references can be resolved, and the keys in it that may be ours."""
    if not _LOOKED_AT & {*data}:
        return resolvable(data, data), fields
    if isinstance(data.get("model"), Mapping):  # A mapping is the training's model; ours is a path.
        fields = {*fields} - {"model"}
    return resolvable(data, {*fields, *_LOOKED_AT}), fields


def lay(
    verls: Mapping[str, Any], origins: dict[str, str], ours: Mapping[str, Any]
) -> dict[str, Any]:
    """Lay rlprof keys over those translated from verl.

    If rlprof keys set the first or last step, verl's list of steps is dropped: it would win.

    Args:
        verls: The translated keys, and others.
        origins: What each translated key came from; loses the keys that are no longer verl's.
        ours: Keys of rlprof.
    """
    block = ours.get("integrated")
    names = {_name(key) for key in block} if isinstance(block, Mapping) else set()
    if "steps" in origins and not names.isdisjoint(_WINDOW):
        verls = {key: value for key, value in verls.items() if key != "steps"}
        del origins["steps"]
    forget(origins, ours)
    return merge(verls, ours)


def from_words(words: Sequence[str]) -> dict[str, Any]:
    """Return overrides as Hydra's command line has them, as a mapping.

    Example::

        >>> from_words(["+trainer.profile_steps=[1, 2]", "trainer.device=cuda"])
        {'trainer': {'profile_steps': [1, 2], 'device': 'cuda'}}

    Raises:
        ConfigError: A word is not ``KEY=VALUE``, or its value is not YAML.
    """
    merged: dict[str, Any] = {}
    for word in words:
        key, is_set, text = word.partition("=")
        name = key.lstrip("+")
        if not (is_set and name) or name.startswith("~"):
            raise ConfigError(
                f"{word!r} is not an override: write KEY=VALUE, such as 'steps=[1,2]'"
            )
        merged = merge(merged, _nested({name: _loaded(text, word)}))
    return merged


def given_keys(data: Mapping[str, Any], fields: Collection[str]) -> dict[str, list[str] | None]:
    """Return each key that a mapping sets, and the dotted rlprof keys that follow from it.

    These are empty for a key of verl whose tool or role is not selected, and None for one that says
    something to verl's own code alone.

    Example::

        >>> given_keys({"trainer": {"profile_steps": [1]}}, ["steps"])
        {'trainer.profile_steps': ['steps', 'tools']}
        >>> given_keys({"global_profiler": {"_target_": "verl.ProfilerConfig"}}, ["steps"])
        {'global_profiler._target_': None}
    """
    origins: dict[str, str] = {}
    canonical(data, fields, origins)
    with resolving():
        data, fields = _looked_at(data, fields)
        keys: dict[str, list[str] | None] = {}
        for item in find(data):
            is_given, ours = item.value is not None, item.row.ours
            own = [name for name, key in origins.items() if item.key in key.split(", ")]
            # Such a key may be given twice, for a role and for all; only one is the origin.
            twice = item.place is None or item.row.theirs.endswith(".tool")
            if not own and twice and is_given:
                own = [name for name in origins if name == ours]
            keys[item.key] = None if is_given and item.row.accepts == ANYTHING else own
        for home in (data.get(_WRAPPER) or {}, data):
            block = {key: plain(home[key]) for key in home if _name(key) in fields}
            keys |= {key: [key] for key in _dotted(block)}
    return keys


def _dotted(block: Mapping[str, Any]) -> Iterator[str]:
    """Return the keys of a mapping and of the blocks in it, whose values are not looked into."""
    for key, value in block.items():
        if isinstance(value, Mapping) and value and key != "wrap":
            yield from (f"{_name(key)}.{_name(below)}" for below in value)
        else:
            yield _name(key)


def forget(origins: dict[str, str], over: Mapping[str, Any]) -> None:
    """Take out the dotted keys that a mapping laid over them sets, alone or with all around them.

    Example::

        >>> origins = {"steps": "RLPROF__STEPS", "integrated.stage": "RLPROF__INTEGRATED__STAGE"}
        >>> forget(origins, {"steps": [1]})
        >>> origins
        {'integrated.stage': 'RLPROF__INTEGRATED__STAGE'}
    """
    for dotted in list(origins):
        value: Any = over
        for part in dotted.split("."):
            below = value if isinstance(value, Mapping) else {part: None}
            value = {_name(key): each for key, each in below.items()}.get(part, _ABSENT)
            if value is _ABSENT:
                break
        else:
            del origins[dotted]


def _name(key: Any) -> str:
    return str(key).replace("-", "_")


def from_environment(
    environment: Mapping[str, str], fields: Collection[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The keys that variables set, and for each dotted key its variable.

    ``__`` goes one level down, values are YAML: ``RLPROF__STEPS=[1, 3]``. Those of single options
    of nsys, where every value is text, are taken as they are, but for ``null``:
    ``RLPROF__NSIGHT__WORKER__TRACE=cuda,nvtx``.

    Raises:
        ConfigError: A variable is not a configuration key, or its value is not YAML.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for variable in sorted(name for name in environment if name.startswith(PREFIX)):
        path = variable.removeprefix(PREFIX).lower().split("__")
        if path[0] not in fields:
            raise ConfigError(
                f"{variable} is not a configuration key{_near_variable(path[0], fields)}"
            )
        text = environment[variable]
        origins[".".join(path)] = variable
        is_text = path[0] == "nsight" and len(path) > 2
        value = text if is_text and text != "null" else _loaded(text, f"{variable}={text!r}")
        values = merge(values, _nested({".".join(path): value}))
    return values, origins


def from_overrides(overrides: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """Keywords as a mapping; keys of ``integrated`` may be given flat.

    Raises:
        ConfigError: An unknown keyword, or a key given both flat and in ``integrated``.
    """
    flat = IntegratedConfig.model_fields
    values: dict[str, Any] = {}
    inner: dict[str, Any] = {}
    for key, value in overrides.items():
        if key not in fields and key not in flat:
            names = (*fields, *flat)
            raise ConfigError(f"{key} is not an option{near(key, names)} ({', '.join(names)})")
        (values if key in fields else inner)[key] = plain(value)
    if not inner:
        return values
    block = values.get("integrated") or {}
    twice = [key for key in inner if isinstance(block, Mapping) and key in block]
    if twice:
        raise ConfigError(f"{twice[0]} is set twice: as a keyword and in integrated")
    return merge(values, {"integrated": inner})


def merge(*blocks: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping, later ones laid over earlier ones, mappings inside mappings too.

    Example::

        >>> merge({"a": {"x": 1, "y": 1}}, {"a": {"y": 2}})
        {'a': {'x': 1, 'y': 2}}
    """
    merged: dict[str, Any] = {}
    for block in blocks:
        for key, value in block.items():
            below = merged.get(key)
            both = isinstance(below, Mapping) and isinstance(value, Mapping)
            merged[key] = merge(below or {}, value) if both else value
    return merged


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for dotted, value in values.items():
        nested = value
        for key in reversed(dotted.split(".")):
            nested = {key: nested}
        merged = merge(merged, nested)
    return merged


def _refuse_misspelled(data: Mapping[str, Any], fields: Collection[str]) -> None:
    for key in map(str, data):
        name = key.replace("-", "_")
        if name in fields or name in _HOMES:
            continue
        if name in IntegratedConfig.model_fields:
            raise ConfigError(f"{key} is one level down: integrated.{name}")
        close = near(name, (*fields, *_HOMES), 0.8)
        if close:
            raise ConfigError(f"{key} is not a key{close}")


def _near_variable(key: str, fields: Collection[str]) -> str:
    names = {name: name for name in fields}
    names |= {name: f"integrated__{name}" for name in IntegratedConfig.model_fields}
    close = near_match(key, names)
    if not close:
        return f"; write {PREFIX} and a key, such as {PREFIX}INTEGRATED__STAGE"
    return f"; did you mean '{PREFIX}{names[close].upper()}'?"
