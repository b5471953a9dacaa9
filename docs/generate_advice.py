"""Write docs/reference/advice.md from the rules of advice; ``--check`` fails if it is stale."""

import sys
from collections.abc import Iterator
from pathlib import Path

from lightning_rlprof.analysis.advice.rule import Rule
from lightning_rlprof.analysis.advice.rules import RULE_GROUPS, RULES

__all__ = ["main", "page"]

FOLDER = Path(__file__).with_name("reference")

_HEAD = """\
<!-- Written by docs/generate_advice.py; change the rules or the generator, not this page. -->

# Rules of advice

All {count} rules of [`rlprof advise`](../advice.md). A rule is given if every quantity is beyond
its limit, with its whole interval. `rlprof explain ID` prints one of them.

"At most" in the output is the time that a rule is about. Rules marked "replay" are predicted by
[what-if](../critical-path.md#what-if) instead, if the run has what the replay needs.
"""
_SAVINGS = {
    "tail": "replay",
    "balance": "replay",
    "overlap": "replay",
    "removed": "replay",
    "share": "at most its share",
    "none": "none",
}


def page() -> str:
    """Return the whole page."""
    parts = [_HEAD.format(count=len(RULES))]
    for group, rules in RULE_GROUPS.items():
        parts.append(f"## {group}\n")
        parts += ["| rule | symptom | saving |", "|---|---|---|"]
        parts += [_row(rule) for rule in rules]
        parts.append("")
        for rule in rules:
            parts += [*_section(rule), ""]
    return "\n".join(parts)


def _row(rule: Rule) -> str:
    return f"| [`{rule.id}`](#{rule.id}) | {_symptom(rule)} | {_SAVINGS[rule.saving]} |"


def _symptom(rule: Rule) -> str:
    return "; ".join(
        each.quantity.text
        if each.bound == "yes"
        else f"not: {each.quantity.text}"
        if each.bound == "no"
        else f"{each.quantity.text}, {each.bound}"
        for each in rule.conditions
    )


def _section(rule: Rule) -> Iterator[str]:
    yield f"### `{rule.id}` {{#{rule.id}}}\n"
    yield f"{rule.title}.\n"
    yield "| setting | default | change |"
    yield "|---|---|---|"
    for each in rule.settings:
        default = f"`{each.default}`" if each.default else ""
        yield f"| {each.framework}: `{each.knob}` | {default} | {each.change} |"
    yield ""
    yield f"- Effect: {rule.effect}"
    yield f"- Risk: {rule.risk}"
    yield f"- Guide: [Performance tuning](../guides/tuning.md#{rule.id})"


def main(arguments: list[str]) -> int:
    """Write the page, or with ``--check`` compare it; returns the exit status."""
    path, text = FOLDER / "advice.md", page()
    if "--check" not in arguments:
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"Wrote {path.name}")
    elif not path.is_file() or path.read_text(encoding="utf-8") != text:
        print(f"{path.name} is stale: python docs/generate_advice.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
