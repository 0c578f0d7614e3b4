"""`offsetrl drops`: what was left out of training, by reason and task, and whether long or hard items suffer from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from infra.audit_command import audit_policy
from infra.dead_letters_command import say, source_of, with_log
from infra.drops import MIN_GROUPS, REPEAT, Difference, Drops, Side, drops
from infra.lifecycle import Exit
from infra.log import Log
from infra.settings import Settings
from infra.text_table import columns

_HEADS = (
    "fate", "trajectories", "groups", "share", "sampled mean", "median", "longer by", "95 % interval",
    "group reward", "solved", "higher by", "95 % interval",
)  # fmt: skip


def command(settings: Settings, *, policies: Sequence[str], solved: float, as_json: bool) -> int:
    """Print the comparison of each policy."""

    def body(log: Log) -> int:
        found = [drops_of(log, settings, policy, solved) for policy in policies]
        say(json.dumps([facts(each) for each in found]) if as_json else "\n\n".join("\n".join(told(e)) for e in found))
        return Exit.OK

    return with_log(settings, body)


def drops_of(log: Log, settings: Settings, policy: str, solved: float) -> Drops:
    """What was left out of one policy's training."""
    found = audit_policy(log, settings, policy)
    return drops(log, found, source_of(settings, policy), max_tokens=settings.kafka.max_tokens, solved=solved)


def facts(found: Drops) -> dict[str, Any]:
    """As plain data."""
    return {
        "run": found.run,
        "policy": found.policy,
        "settled": found.settled,
        "missing_members": found.missing_members,
        "interval": "95 %, normal, standard error clustered by group",
        "trained": _facts(found.trained, found.settled),
        "left_out": _facts(found.left_out, found.settled),
        "reasons": [_facts(side, found.settled) for side in found.reasons],
        "tasks": [{"task": task, "trained": kept, "left_out": lost} for task, kept, lost in found.tasks],
    }


def told(found: Drops) -> list[str]:
    """For people: tables, then what they say."""
    sides = [found.trained, found.left_out, *found.reasons]
    lines = [
        f"{found.run}.{found.policy}: {found.settled} trajectories, {found.left_out.trajectories} of them left out"
    ]
    lines += ["", *columns(_HEADS, [_row(side, found.settled) for side in sides])]
    tasks = [(task, kept, lost, _share(lost, kept + lost)) for task, kept, lost in found.tasks]
    if tasks:
        lines += ["", *columns(("task", "trained", "left out", "share"), tasks)]
    lines += ["", *(sentence for side in sides[1:] for sentence in sentences(side))]
    if any(side.fate == REPEAT for side in found.reasons):
        lines.append(f"{REPEAT} ones are second attempts of members that count already: no loss, and not in the sum")
    if found.missing_members:
        lines.append(
            f"{found.missing_members} members were asked for and never came: their lengths are known to nobody"
        )
    lines.append("Intervals: 95 %, normal, standard error clustered by group; left out minus trained.")
    return lines


def sentences(side: Side) -> list[str]:
    """What the figures of those left out say; nothing where nothing was compared."""
    found = []
    for difference, unit, more, less in (
        (side.length, "sampled tokens", "longer ones", "shorter ones"),
        (side.reward, "group reward", "easier items", "harder items"),
    ):
        if difference is None:
            continue
        if not difference.enough:
            text = f"too few groups to compare {unit} ({difference.num_groups}; {MIN_GROUPS} are needed on each side)"
        elif difference.direction == 0:
            text = f"no difference in {unit} seen ({_signed(difference.difference)}, {_interval(difference)})"
        else:
            which = more if difference.direction > 0 else less
            text = f"{which} are left out more: {_signed(difference.difference)} in {unit}, {_interval(difference)}"
        found.append(f"{side.fate}: {text}")
    return found


def _facts(side: Side, settled: int) -> dict[str, Any]:
    share = side.trajectories / settled if settled and side.fate != REPEAT else None
    content = {**asdict(side), "share": share}
    for name in ("length", "reward"):
        difference: Difference | None = getattr(side, name)
        content[name] = difference and {
            **asdict(difference),
            "enough_groups": difference.enough,
            "direction": difference.direction,
        }
    return content


def _row(side: Side, settled: int) -> tuple[object, ...]:
    return (
        side.fate,
        side.trajectories,
        side.groups,
        "-" if side.fate == REPEAT else _share(side.trajectories, settled),
        _number(side.mean_sampled, 1),
        _number(side.median_sampled, 1),
        *_columns_of(side.length),
        _number(side.mean_group_reward, 3),
        _number(side.mean_group_solved, 3),
        *_columns_of(side.reward),
    )


def _columns_of(difference: Difference | None) -> tuple[str, str]:
    return ("-", "-") if difference is None else (_signed(difference.difference), _interval(difference))


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _signed(value: float) -> str:
    return f"{value:+.3g}"


def _interval(difference: Difference) -> str:
    return f"{difference.low:+.3g} to {difference.high:+.3g}" if difference.enough else "too few groups"
