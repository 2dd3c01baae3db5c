"""The table of ``lensemblectl members``."""

from rich.console import RenderableType
from rich.text import Text

from lensemble.ctl import replies
from lensemblectl import words
from lensemblectl.render import listing

COLOURS = {"alive": "green", "suspect": "yellow", "dead": "bold red", "left": "dim"}


def table(reply: replies.MemberList) -> list[RenderableType]:
    """A line on the one that answers, a row for each other member, and why some are in trouble."""
    if not reply.profile:
        return [Text(f"{reply.name} has joined no federation: it knows no members")]
    rows = listing(
        "NAME", "NODE", "STATE", "SINCE", "RTT", "PATH", "INC", "FLAPS", right=("INC", "FLAPS")
    )
    for each in reply.members:
        rows.add_row(
            f"{each.name} *" if each.coordinator else each.name,
            words.short(each.node),
            Text(each.state, COLOURS.get(each.state, "")),
            words.brief(each.since_s),
            "" if each.rtt_ms is None else words.milliseconds(each.rtt_ms),
            each.path,
            str(each.incarnation),
            str(each.flaps) if each.flaps else "",
        )
    parts: list[RenderableType] = [Text(words.members_line(reply), "bold"), Text()]
    parts.append(rows if reply.members else Text("no other member yet"))
    if any(each.coordinator for each in reply.members):
        parts.append(Text("* the coordinator", "dim"))
    troubled = [each for each in reply.members if each.state in {"suspect", "dead"}]
    if troubled:
        parts.append(Text())
    parts += [Text(words.member_line(each, reply), "yellow") for each in troubled]
    drained = [each for each in reply.members if each.drain]
    parts += [Text(f"{each.name or words.short(each.node)} is {each.drain}") for each in drained]
    if reply.refused:
        parts.append(Text(f"refused: {words.counts(reply.refused)}", "dim"))
    return parts
