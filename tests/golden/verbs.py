"""Contracts of the command line: JSON of each verb on each run, options, exit codes, SQL tables."""

import errno
import io
import json
import os
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import typer

from lightning_rlprof.analysis.catalog import CATALOG
from lightning_rlprof.cli.app import app
from tests.golden.golden import FEW, MANY, Contract, answer, rlprof, rows_of
from tests.golden.inputs import RUNS

SHOWN = [each for each in CATALOG if each.place != "verb"]
"""Analyses that ``rlprof show`` has; the others are verbs of their own."""

_QUERY = "select name, kind, count(*) as spans, sum(end_ns - start_ns) as total_ns from spans"
_QUERY += " group by all order by all"
# How each verb with --json is called; {run} is the input, {other} one to compare it with.
VERBS = {
    "compare": ("compare {run} {other}", "compare {run} {other} --fail-if-slower 3%"),
    "critical-path": ("show {run} critical_path --by rank", "show {run} device_critical_path"),
    "findings": ("findings {run}",),
    "hang": ("hang {run}",),
    "ingest": ("ingest {run} -j 1",),
    "ledger": ("show {run} ledger",),
    "show": ("show {run}", *(f"show {{run}} {each.name}" for each in SHOWN)),
    "stragglers": ("stragglers {run}",),
    "summary": ("summary {run} --all", "summary {run}", "summary {run} --by rank"),
    "whatif": ("whatif {run} --speedup actor_update=2",),
}
_OTHER = {"demo": "slow", "slow": "demo", "async": "demo"}


_SHORT = {"show", "summary"}


def _verb(verb: str, run: str) -> Any:
    """Return the answers of a verb; what repeats the first answer is left out of the others."""
    found, other = {}, _OTHER.get(run, "kineto")
    for line in VERBS[verb]:
        rows = FEW if verb in _SHORT else MANY
        found[line.format(run="RUN", other=other)] = answer(line.format(run=run, other=other), rows)
    first, *others = found.values()
    for each in others:
        for key in [key for key in each if key != "tables" and each[key] == first.get(key)]:
            del each[key]
        if "tables" in each:
            each["tables"] = [one for one in each["tables"] if one not in first.get("tables", ())]
    return found


def _alone() -> dict[str, Any]:
    """Return the answers of verbs that read no run, or many."""
    Path("config.yaml").write_text("steps: [2, 3]\nintegrated: {stage: actor_update}\n")
    Path("model.json").write_text(json.dumps(_MODEL))
    size = "size --model model.json --devices 8xH100-80G --prompt-length 512 --response-length 1024"
    lines = ("ls .", "config check config.yaml", f"{size} --batch 64", "ascend parse ascend -j 1")
    return {
        line: answer(line)
        for line in (*lines, "findings --explain all", "findings --explain rollout")
    }


_MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


def _doctor() -> dict[str, Any]:
    """Return the keys of `doctor` and its checks; all else is about the machine."""
    status, out, _ = rlprof("doctor", "--json")
    found = json.loads(out)
    keys = {key: sorted(found[key][0]) for key in ("checks", "frameworks")}
    names = {key: [each["name"] for each in found[key]] for key in keys}
    return {"exit code": status, "top": sorted(found), "keys": keys, "names": names}


class _Ending(io.StringIO):
    """A standard output that raises when something is written, as where its reader has gone."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error

    def fileno(self) -> int:
        return os.open(os.devnull, os.O_WRONLY)


_EXITS = """\
--version
help exit-codes
help nothing
nothing
summary demo
summary demo --json
summary demo --nothing
summary nothing
summary demo slow
show demo nothing
show demo kernels
show demo staleness --rank 9
sql demo select
sql demo "select 1"
sql demo "drop table spans"
compare demo demo --fail-if-slower 3%
compare fast slow --fail-if-slower 3%
compare short short --fail-if-slower 0.1%
config check good.yaml
config check bad.yaml
config check nothing.yaml
ingest demo -j 1
ingest nothing -j 1
ingest broken -j 1
ascend parse ascend -j 1
ascend parse nothing
capture demo
watch demo --stacks
hang demo
hang kineto
whatif demo --speedup actor_update
findings --explain nothing
report demo -o demo
export demo -o new.json
export demo -o good.yaml
watch demo --once
size
run
export demo --to
"""


def _exit_codes() -> dict[str, int]:
    Path("good.yaml").write_text("steps: [2]\n")
    Path("bad.yaml").write_text("stepz: [2]\n")
    Path("broken").mkdir()
    Path("broken/rank-00000.jsonl").write_text("nothing\n")
    _shortened_run("slow", Path("short"), steps=6)
    _faster_run("slow", Path("fast"))
    found = {line: rlprof(*shlex.split(line))[0] for line in _EXITS.splitlines()}
    for name, error in (
        ("Ctrl-C", KeyboardInterrupt()),
        ("its reader has gone", BrokenPipeError()),
        ("a bug", RuntimeError()),
        ("no space", OSError(errno.ENOSPC, "no space left on device")),
    ):
        found[f"summary demo, and then: {name}"] = rlprof("summary", "demo", stdout=_Ending(error))[
            0
        ]
    return found


def _lines_of(run: str) -> Iterator[tuple[Path, list[str]]]:
    """Yield the name of each rank's file of a run, and its lines."""
    for path in sorted(Path(run).glob("rank-*.jsonl")):
        yield Path(path.name), path.read_text().splitlines()


def _write(run: Path, name: Path, lines: list[str]) -> None:
    run.mkdir(exist_ok=True)
    (run / name).write_text("\n".join(lines) + "\n")


def _shortened_run(source: str, run: Path, steps: int) -> None:
    """Write a run with the first steps of another one."""
    for name, (first, *lines) in _lines_of(source):
        spans = [
            line for line in lines if not line.startswith('["span"') or json.loads(line)[3] <= steps
        ]
        _write(run, name, [first, *spans])


def _faster_run(source: str, run: Path) -> None:
    """Write a run in which everything takes half as long."""
    for name, (first, *lines) in _lines_of(source):
        cells = [json.loads(line) for line in lines]
        for cell in cells:
            if cell[0] == "span":
                cell[4:6] = [cell[4] // 2, cell[5] // 2]
        _write(run, name, [first, *map(json.dumps, cells)])


def _verbs() -> dict[str, Any]:
    """Return each verb with its arguments and options, and their defaults."""
    return dict(_verbs_below("rlprof", typer.main.get_command(app)))


def _verbs_below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    for each, below in getattr(command, "commands", {}).items():
        yield from _verbs_below(f"{name} {each}", below)
    if not hasattr(command, "commands"):
        yield name, [_option(each) for each in command.params]


def _option(param: Any) -> str:
    words = [*param.opts, *param.secondary_opts]
    if param.param_type_name == "argument":
        words = [str(param.metavar or param.name)]
    elif not param.is_flag:
        words.append(str(param.metavar or ""))
    value = getattr(param.default, "value", param.default)
    default = "" if value in (None, False, (), []) or callable(value) else f" = {value}"
    times = " (repeatable)" if param.nargs == -1 or getattr(param, "multiple", False) else ""
    return " ".join(filter(None, words)) + default + times


def _analyses() -> dict[str, Any]:
    """Return each analysis with its group and columns, of a run of one rank."""
    found = {}
    for each in SHOWN:
        (table,) = answer(f"show demo {each.name}", 0)["tables"]
        found[each.name] = {"group": each.group, "columns": table["columns"]}
    return found


def _sql(run: str) -> dict[str, Any]:
    """Return the columns of each SQL table with type and unit, and the rows of one query."""
    units: dict[str, dict[str, str]] = {}
    for table, column, unit, *_ in rows_of("sql", run, "--describe"):
        units.setdefault(table, {})[column] = unit
    columns = {}
    for table, own in units.items():
        types = {name: kind for name, kind, *_ in rows_of("sql", run, f'describe "{table}"')}
        columns[table] = [f"{name} {types[name]} {unit}".strip() for name, unit in own.items()]
    return {
        "columns": columns,
        "query": answer(f'sql {run} "{_QUERY}"'),
        "refused": answer(f'sql {run} "drop table spans"'),
    }


CONTRACTS: dict[str, Contract] = {
    **{f"{run}/{verb}.json": partial(_verb, verb, run) for run in RUNS for verb in VERBS},
    **{f"{run}/sql.json": partial(_sql, run) for run in RUNS},
    "command-line/without-a-run.json": _alone,
    "command-line/doctor.json": _doctor,
    "command-line/exit-codes.json": _exit_codes,
    "command-line/options.json": _verbs,
    "command-line/analyses.json": _analyses,
}
