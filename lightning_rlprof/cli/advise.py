"""The verbs about advice: advise for a run, explain for what a rule or a finding means."""

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightning_rlprof.cli import console
from lightning_rlprof.cli.completion import SAVE_PATH, complete_advice
from lightning_rlprof.cli.open_run import Run, answer, count_warnings, open_run
from lightning_rlprof.errors import RlprofError

if TYPE_CHECKING:
    from lightning_rlprof.analysis.advice.rule import Rule
    from lightning_rlprof.analysis.findings.finding import Rule as FindingRule

_MOST = 4  # ways to decide more that are listed

Ignore = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID", autocompletion=complete_advice, help="Leave out this advice (repeatable)"
    ),
]
Id = Annotated[
    str | None,
    typer.Argument(
        metavar="[ID]",
        autocompletion=complete_advice,
        help="Advice or finding to explain; omit it to list them all",
    ),
]


def advise(run: Run = SAVE_PATH, ignore: Ignore = None) -> None:
    """List settings to change: evidence of the run, expected saving, risk.

    Example: rlprof advise RUN --ignore rollout-overlap
    """
    from lightning_rlprof.analysis.advice.advice import advice

    spans = open_run(run)
    table = advice(spans, ignore=ignore or ())
    if not console.is_table():
        answer(spans, [table], "")
        return
    from lightning_rlprof.report.advice_cards import advice_cards, what_to_record

    console.say(f"{spans.path}: advice", "bold")
    if table.abstained is not None:
        console.say(f"No data. {table.abstained}")
        return
    cards = advice_cards(table)
    if not cards:
        console.say("No advice is given.")
    for at, card in enumerate(cards[: console.limit()], start=1):
        console.say(f"{at}. {card.title} ({card.id})", "bold")
        if card.saving:
            console.say(f"   {card.saving}")
        console.say(f"   evidence: {card.evidence}")
        for setting in card.settings:
            console.say(f"   set: {setting}")
        console.say(f"   effect: {card.effect}")
        console.say(f"   risk: {card.risk}")
    console.status("")
    console.status(
        f"{table.note} See all: rlprof show {shlex.quote(str(spans.path))} advice", "dim"
    )
    wanted = what_to_record(table)
    if wanted:
        console.status("To decide more:", "dim")
    for how, number in wanted[:_MOST]:
        console.status(f"  {how} ({console.count(number, 'rule')})", "dim")
    count_warnings(spans)
    if cards:
        console.next_command("rlprof", "explain", cards[0].id)


def explain(name: Id = None) -> None:
    """Explain advice or a finding: what it needs, settings, effect, risk. Omit ID to list all.

    Example: rlprof explain clipped-responses
    """
    from lightning_rlprof.analysis.advice.rules import RULES
    from lightning_rlprof.analysis.findings.rules import rules_by_id

    findings = rules_by_id()
    if name is None:
        _list(findings)
        return
    rule, found = RULES.get(name), findings.get(name, [])
    if rule is None and not found:
        near = console.did_you_mean(name, [*RULES, *findings])
        hint = f"{near} List all: rlprof explain".strip()
        raise RlprofError(f"unknown advice or finding '{name}'", hint=hint, code="unknown_advice")
    if console.is_json():
        facts: dict[str, Any] = {"id": name, "advice": None if rule is None else _facts(rule)}
        console.put_json(facts | {"findings": [_finding_facts(each) for each in found]})
        return
    if rule is not None:
        _say_rule(rule)
    for each in found:
        _say_finding(name, each)


def _list(findings: "dict[str, list[FindingRule]]") -> None:
    from lightning_rlprof.analysis.advice.rules import RULE_GROUPS

    if console.is_json():
        known = [
            {"id": rule.id, "title": rule.title} for own in RULE_GROUPS.values() for rule in own
        ]
        titles = [{"id": name, "title": own[0].title} for name, own in findings.items()]
        console.put_json({"advice": known, "findings": titles})
        return
    for group, rules in RULE_GROUPS.items():
        console.say(f"{group} (advice)", "bold")
        for rule in rules:
            console.say(f"  {rule.id:26}  {rule.title}")
    console.say("Findings", "bold")
    for name, own in findings.items():
        console.say(f"  {name:26}  {own[0].title}")


def _facts(rule: "Rule") -> dict[str, Any]:
    return {
        "title": rule.title,
        "conditions": [
            {"quantity": each.quantity.text, "limit": each.bound} for each in rule.conditions
        ],
        "settings": [vars(each) for each in rule.settings],
        "effect": rule.effect,
        "risk": rule.risk,
        "guide": rule.guide,
    }


def _finding_facts(rule: "FindingRule") -> dict[str, Any]:
    keys = ("title", "threshold", "suggestion", "ruled_out_if", "command")
    return {key: getattr(rule, key) for key in keys}


def _say_rule(rule: "Rule") -> None:
    console.say(f"{rule.id}: {rule.title}", "bold")
    console.say("Given if:")
    for condition in rule.conditions:
        console.say(f"  {condition.quantity.text}: {condition.bound}")
    console.say("Settings:")
    for setting in rule.settings:
        console.say(f"  {setting.text}")
    console.say(f"Effect: {rule.effect}")
    console.say(f"Risk: {rule.risk}")
    console.say(f"Guide: {rule.guide}")


def _say_finding(name: str, rule: "FindingRule") -> None:
    side = "below" if rule.reports_below else "above"
    console.say(f"{name} (finding): {rule.title}", "bold")
    console.say(f"Reported {side} {rule.threshold:.0%}.")
    console.say(f"Try: {rule.suggestion}")
    console.say(f"Ruled out if: {rule.ruled_out_if}")
    console.say(f"See: {rule.command}")
