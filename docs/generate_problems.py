"""Write docs/reference/problems.md from the registry; ``--check`` fails if it is stale."""

import sys
from collections.abc import Iterator
from pathlib import Path

from lightning_rlprof.analysis.diagnosis.diagnosis import PROBLEM_GROUPS, PROBLEMS, REMEDIES
from lightning_rlprof.analysis.diagnosis.problem import Problem, Remedy

__all__ = ["main", "page"]

FOLDER = Path(__file__).with_name("reference")

_HEAD = """\
<!-- Written by docs/generate_problems.py; change the registry or the generator, not this page. -->

# Problems and remedies

All {problems} problems of [`rlprof findings`](../findings.md), and {remedies} remedies. A problem
is reported if each quantity is beyond its limit, with its whole interval. A remedy is only shown
under a problem of the run.
`rlprof findings --explain ID` prints one of them.
"""


def page() -> str:
    """Return the whole page."""
    parts = [_HEAD.format(problems=len(PROBLEMS), remedies=len(REMEDIES))]
    for group, problems in PROBLEM_GROUPS.items():
        parts.append(f"## {group}\n")
        parts += ["| problem | reported if |", "|---|---|"]
        parts += [f"| [{each.title}](#{each.id}) | {_conditions(each)} |" for each in problems]
        parts.append("")
        for each in problems:
            parts += [*_section(each), ""]
    return "\n".join(parts)


def _conditions(what: Problem | Remedy) -> str:
    return "; ".join(
        each.quantity.text
        if each.bound == "yes"
        else f"not: {each.quantity.text}"
        if each.bound == "no"
        else f"{each.quantity.text}: {each.bound}"
        for each in what.when
    )


def _section(problem: Problem) -> Iterator[str]:
    yield f"### `{problem.id}` {{#{problem.id}}}\n"
    yield f"{problem.title}.\n"
    yield f"- Do: {problem.act}"
    yield f"- Ruled out if: {problem.ruled_out_if}."
    yield f"- See: `{problem.look}`"
    for remedy in problem.remedies:
        yield ""
        when = f", if {_conditions(remedy)}" if remedy.when else ""
        guide = f"[{remedy.title}](../{remedy.guide.partition('/')[2]})"
        yield f"Remedy `{remedy.id}`: {guide}{when}. Risk: {remedy.risk}\n"
        yield "| setting | default | change |"
        yield "|---|---|---|"
        for each in remedy.settings:
            default = f"`{each.default}`" if each.default else ""
            yield f"| {each.framework}: `{each.key}` | {default} | {each.change} |"


def main(arguments: list[str]) -> int:
    """Write the page, or with ``--check`` compare it; returns the exit status."""
    path, text = FOLDER / "problems.md", page()
    if "--check" not in arguments:
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"Wrote {path.name}")
    elif not path.is_file() or path.read_text(encoding="utf-8") != text:
        print(f"{path.name} is stale: python docs/generate_problems.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
