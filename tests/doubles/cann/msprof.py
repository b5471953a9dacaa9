#!/usr/bin/env python3
"""A stand-in for CANN's `msprof`: it writes what the double heard in the layout of the real one.

It knows the command lines that torch_npu uses and refuses others. Of the device it says nothing, as
there is none. Times are the double's, of the host, and no measurement of anything.
"""

import argparse
import json
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

STAMP = "20260101000000"
MSTX_LAYER, HOST = 6, 31
# connectionId of the first range, in CANN's database
FIRST_CONNECTION = 4_000_000_001
NONE = 0xFFFFFFFF
KINDS = {"marker": 0, "push/pop": 1, "start/end": 2, "marker_ex": 3}
EVENTS = (
    "startNs INTEGER, endNs INTEGER, eventType INTEGER, rangeId INTEGER, category INTEGER, "
    "message INTEGER, globalTid INTEGER, endGlobalTid INTEGER, domainId INTEGER, "
    "connectionId INTEGER"
)


class Heard(NamedTuple):
    """One range or mark."""

    kind: str
    message: str
    domain: str
    thread: int
    start_ns: int
    end_ns: int


def heard(folder: Path) -> list[Heard]:
    """Return what ended while the profiler ran, by start; the rest is lost, as in CANN."""
    begun: dict[int, dict[str, Any]] = {}
    found = []
    for line in (folder / "host/data/double.jsonl").read_text().splitlines():
        call = json.loads(line)
        if call["call"] == "mstxRangeStart":
            begun[call["id"]] = call
        elif call["call"] == "mstxRangeEnd" and call["id"] in begun:
            start = begun.pop(call["id"])
            found.append(_heard("start/end", start, call["unix_ns"]))
        elif call["call"] == "mstxMark":
            kind = "marker_ex" if call["stream"] else "marker"
            found.append(_heard(kind, call, call["unix_ns"]))
    return sorted(found, key=lambda one: one.start_ns)


def _heard(kind: str, call: dict[str, Any], end_ns: int) -> Heard:
    return Heard(kind, call["message"], call["domain"], call["tid"], call["unix_ns"], end_ns)


def timeline(found: list[Heard], info: dict[str, str]) -> list[dict[str, Any]]:
    """Return the events of ``msprof_*.json``: times are texts of µs, process ids are encoded."""
    process = (int(info["pid"]) << 10 | MSTX_LAYER << 5 | HOST) & NONE
    named = {"process_name": {"name": info["pid_name"]}, "process_labels": {"labels": "CPU"}}
    named["process_sort_index"] = {"sort_index": MSTX_LAYER}  # type: ignore[dict-item]
    head = [
        {"name": name, "pid": process, "tid": 0, "args": args, "ph": "M"}
        for name, args in named.items()
    ]
    rows = [
        {
            "name": one.message,
            "pid": process,
            "tid": one.thread,
            "ts": f"{one.start_ns // 1000}.{one.start_ns % 1000:03d}",
            "dur": (one.end_ns - one.start_ns) / 1000,
            "args": {"event_type": one.kind, "domain": one.domain},
            "ph": "X",
        }
        for one in found
    ]
    return [*head, *rows]


def write_text(folder: Path, found: list[Heard], info: dict[str, str]) -> None:
    """Write the timeline, and the table that torch_npu waits for."""
    out = folder / "mindstudio_profiler_output"
    out.mkdir(exist_ok=True)
    (out / f"msprof_{STAMP}.json").write_text(json.dumps(timeline(found, info)))
    (out / f"msprof_tx_{STAMP}.csv").write_text("pid,tid,event_type,message,domain\n")


def write_db(folder: Path, found: list[Heard], info: dict[str, str]) -> None:
    """Write the three tables of CANN's database that hold MSTX."""
    path = folder / f"msprof_{STAMP}.db"
    path.unlink(missing_ok=True)
    words = {word: number for number, word in enumerate(sorted({w for o in found for w in o[1:3]}))}
    with sqlite3.connect(path) as db:
        db.execute(f"CREATE TABLE MSTX_EVENTS ({EVENTS})")
        db.execute("CREATE TABLE STRING_IDS (id INTEGER PRIMARY KEY, value TEXT)")
        db.execute("CREATE TABLE ENUM_MSTX_EVENT_TYPE (id INTEGER PRIMARY KEY, name TEXT)")
        flipped = [(number, word) for word, number in words.items()]
        db.executemany("INSERT INTO STRING_IDS VALUES (?, ?)", flipped)
        kinds = [(number, kind) for kind, number in KINDS.items()]
        db.executemany("INSERT INTO ENUM_MSTX_EVENT_TYPE VALUES (?, ?)", kinds)
        for number, one in enumerate(found):
            thread = int(info["pid"]) << 32 | one.thread
            row = (one.start_ns, one.end_ns, KINDS[one.kind], NONE, NONE, words[one.message])
            row += (thread, thread, words[one.domain], FIRST_CONNECTION + number)
            db.execute(f"INSERT INTO MSTX_EVENTS VALUES ({', '.join('?' * 10)})", row)
    db.close()


def main(words: list[str]) -> int:
    """Do what torch_npu asks for."""
    parser = argparse.ArgumentParser(prog="msprof", allow_abbrev=False)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--export", choices=["on"])
    action.add_argument("--analyze", choices=["on"])
    parser.add_argument("--type", choices=["db", "text"], default="text")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args(words)
    if asked.export:
        info = json.loads((asked.output / "host/info.json").read_text())
        write = write_db if asked.type == "db" else write_text
        write(asked.output, heard(asked.output), info)
        # torch_npu looks for the files every 0.1 s and fails if this ends before it has seen them.
        time.sleep(1.0)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
