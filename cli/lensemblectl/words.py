"""Figures as people read them, and sentences made of replies."""

import math
from datetime import UTC, datetime
from typing import Any

from lensemble.ctl import replies

SHORT_HEX = 12
SHORT_HEX_IN_REASONS = 10
MAX_NAMES = 5


def duration(seconds: float) -> str:
    """``0.3 s``, ``42 s``, ``3 min 12 s``, ``2 h 05 min``, ``4 d 3 h``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 2 * 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def brief(seconds: float) -> str:
    """``0.4s``, ``73s``, ``12min``, ``3h``: for the cell of a table."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    for length, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"


def milliseconds(value: float) -> str:
    """``<1 ms``, ``12 ms``."""
    return "<1 ms" if value < 1 else f"{value:.0f} ms"


def size(count: int) -> str:
    """``912 B``, ``12.3 MB``: powers of 1000."""
    if count < 1000:
        return f"{count} B"
    value, units = count / 1000, ["kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        del units[0]
    return f"{value:.3g} {units[0]}"


def counted(count: int, noun: str) -> str:
    """``1 round``, ``3 rounds``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def short(digest: str) -> str:
    return digest[:SHORT_HEX]


def moment(unix_s: float | None) -> str:
    """Local date and time."""
    if unix_s is None:
        return ""
    return datetime.fromtimestamp(unix_s, tz=UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def names(of: tuple[str, ...]) -> str:
    """The first few, and how many more."""
    shown = ", ".join(of[:MAX_NAMES])
    return shown if len(of) <= MAX_NAMES else f"{shown} and {len(of) - MAX_NAMES} more"


def counts(of: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(of.items()))


def members_line(reply: replies.MemberList) -> str:
    """``a: 3 of 4 others alive; one is probed every 2 s (wan)``."""
    alive = sum(each.state == "alive" for each in reply.members)
    doubt = f"; it doubts itself ({reply.health} of 8)" if reply.health else ""
    return (
        f"{reply.name} sees {alive} of {len(reply.members)} others alive; it probes one every "
        f"{reply.interval_s:g} s ({reply.profile}){doubt}"
    )


def member_line(member: replies.MemberStatus, seen: replies.MemberList) -> str:
    """``b is suspect for 4.2 s: no answer to probes of c``."""
    why = member.reason
    known = [(seen.node, seen.name), *((each.node, each.name) for each in seen.members)]
    for node, name in known:
        if node and name:
            why = why.replace(node[:SHORT_HEX_IN_REASONS], name)
    line = f"{member.name or short(member.node)} is {member.state} for {duration(member.since_s)}"
    return f"{line}: {why}" if why else line


def progress(activity: str, step: int, steps: int, done: int, total: int) -> str:
    """``training 31/50``, ``sending update 12.3 MB/100 MB``, ``idle``."""
    if total:
        return f"{activity} {size(done)}/{size(total)}"
    return f"{activity} {step}/{steps}" if steps else activity


def round_line(status: replies.RoundStatus) -> str:
    """Where a round is and why it is not further, in one line."""
    if status.state == "closed":
        # At rest, or for an instant between two rounds: no round is in flight.
        return status.reason[:1].upper() + status.reason[1:] or "No round is in flight"
    attempt = f", attempt {status.attempt}" if status.attempt else ""
    on = f"; on {names(status.waiting_on)}" if status.waiting_on else ""
    why = f": {status.reason}{on}" if status.reason else ""
    return f"round {status.index}{attempt} {status.state.upper()}{why}"


def clock_line(status: replies.RoundStatus) -> str:
    """For how long, and for how long still."""
    until = "" if status.deadline_in_s is None else f", {duration(status.deadline_in_s)} left"
    return f"for {duration(status.since_s)}{until}"


def closed_line(closed: replies.RoundSummary) -> str:
    """One closed round."""
    parts = [
        f"{counted(len(closed.contributors), 'contributor')} ({names(closed.contributors)})",
        "" if closed.seconds is None else duration(closed.seconds),
        "" if closed.loss is None else f"loss {closed.loss:.4g}",
        f"state {short(closed.digest)}",
        followed(closed),
        *closed.alerts,
    ]
    attempt = f" at attempt {closed.attempt}" if closed.attempt else ""
    return f"round {closed.index} CLOSED{attempt}: {', '.join(part for part in parts if part)}"


STATE_BY = {
    "": "",
    "nothing": "held from the round before",
    "sum": "reached by the outer step taken here; the commit is verified",
    "state": "fetched from the coordinator",
}
"""How a node came to the state it last trained from."""


def followed(closed: replies.RoundSummary) -> str:
    """Who took the outer step themselves, and so verified the commits before, and what it saved."""
    if not closed.by_sum:
        return ""
    saved = f", {size(closed.bytes_saved)} saved" if closed.bytes_saved > 0 else ""
    return f"{closed.by_sum} of them followed by sums and verified the commit before{saved}"


def aborted_line(aborted: replies.RoundAborted) -> str:
    """One failed attempt."""
    after = f"; {aborted.next}" if aborted.next else ""
    return f"round {aborted.index}, attempt {aborted.attempt} ABORTED: {aborted.reason}{after}"


def run_line(run: replies.RunStatus) -> str:
    """How far a run is, and when it may end."""
    eta = ""
    if run.closed and run.remaining:
        eta = f", about {duration(run.elapsed_s / run.closed * run.remaining)} to go"
    aborted = (
        f", {counted(run.attempts_aborted, 'attempt')} aborted" if run.attempts_aborted else ""
    )
    return f"run {run.run}: {run.closed} of {run.rounds} rounds closed{aborted}{eta}"


def drift_line(drift: replies.DriftStatus) -> str:
    """How far the last training moved this node's latents, and what was done about it."""
    moved = f"{drift.before:.2g} latent variances off the round's start"
    turned = f"turned by {drift.rms_degrees:.1f} degrees rms, {drift.max_degrees:.1f} at most"
    done = f"; {drift.after:.2g} after turning back" if drift.aligned else ""
    latent = f"effective dimension {drift.dimension:.1f}, std {drift.std:.2f}"
    return f"{moved}, {turned}{done}; {latent}" + (f" ({drift.warning})" if drift.warning else "")


def public_line(figures: replies.PublicFigures) -> str:
    """What a state is worth on public data, in one line."""
    known = (
        ("std", figures.std),
        ("linear R2", figures.probe_r2),
        ("latent error", figures.latent_error),
        ("5-step state error", figures.state_error),
        ("effective dimension", figures.dimension),
        ("drift", figures.drift_before),
        ("after turning", figures.drift_after),
    )
    parts = [f"{name} {value:.3g}" for name, value in known if value is not None]
    return ", ".join(parts) if figures.finite else "not finite"


def budget_lines(privacy: replies.PrivacyStatus) -> list[str]:
    """Spent, left, and how many rounds that is."""
    left = max(0.0, privacy.epsilon - privacy.spent)
    whole = privacy.unit == "participant"
    about = "this node as a whole" if whole else f"each {privacy.unit} of this node"
    spent = f"epsilon {privacy.spent:.3f} of {privacy.epsilon:g}"
    lines = [
        f"about {about}, at delta {privacy.delta:g}:",
        f"  spent   {spent}, by {counted(privacy.releases, 'release')}",
        f"  left    epsilon {left:.3f}: {counted(privacy.rounds_left, 'round')} at this noise",
    ]
    if privacy.clip_factor is not None and privacy.clip_factor < 1.0:
        lines.append(f"  the last update was clipped to {privacy.clip_factor:.3g} of its norm")
    if privacy.clip_fraction is not None:
        lines.append(f"  {privacy.clip_fraction:.0%} of the updates since the start were clipped")
    return lines


def committed_lines(report: dict[str, Any]) -> list[str]:
    """A commitment as the survey makes it."""
    how = "as noted by the node" if report["noted"] else f"read in {duration(report['seconds'])}"
    about = f"{counted(report['episodes'], 'episode')}, {counted(report['steps'], 'transition')}"
    lines = [f"root {report['root']}", f"of {report['path']}: {about}, {how}"]
    if proof := report.get("proof"):
        lines.append(f"episode {proof['episode']} is in it: leaf {proof['leaf']}")
        lines += [f"  {step['side']:<5}  {step['digest']}" for step in proof["steps"]]
    return lines


def plan_lines(plan: dict[str, Any]) -> list[str]:
    """A plan as ``python -m lensemble.privacy`` makes it."""
    covered = counted(plan["rounds_within_budget"], "round")
    steps = plan["steps_per_round"]
    of_steps = f" of {steps} steps" if steps > 1 else ""
    sampled = f", sampled at {plan['sample_rate']:g}" if plan["sample_rate"] < 1 else ""
    spent = f"epsilon {plan['epsilon']:.2f} at delta {plan['delta']:g}"
    verdict = "" if plan["private"] else "; above 50 that is not private"
    asked = f"{counted(plan['rounds'], 'round')}{of_steps} at sigma {plan['sigma']:.4g}{sampled}"
    needed = f"all of them need sigma {enough(plan['sigma_needed'])}"
    lines = [
        f"{asked}: {spent}, about each {plan['unit']}{verdict}",
        f"a budget of {plan['budget']:g} covers {covered} at this sigma; {needed}",
    ]
    if plan["budget"] > 50:
        lines.append(f"a budget of {plan['budget']:g} is not private: it promises next to nothing")
    if plan.get("wide"):
        lines.append(f"updates take 4 bytes a parameter: {plan['wide']}")
    return lines + _utility_lines(plan)


def enough(sigma: float) -> str:
    """``sigma`` to two places, never rounded down: less would not do."""
    return f"{math.ceil(sigma * 100) / 100:.2f}"


def _utility_lines(plan: dict[str, Any]) -> list[str]:
    needed, noise = plan["participants_needed"], plan["noise_in_mean"]
    if needed is None:
        where = "the noise is in the gradients of each node"
        return [f"{where}; what it does to learning depends on how many episodes a node has"]
    lines = []
    if noise is not None:
        hopeless = ": expect no learning" if noise > 1 else ""
        lines.append(
            f"with {counted(plan['participants'], 'participant')} the noise in the mean is "
            f"{noise:.3g} times the largest update (norm {plan['clip_norm']:g}, "
            f"{plan['parameters']} parameters){hopeless}"
        )
    how = "2 x sigma x sqrt(parameters)"
    how = how if plan["placement"] == "distributed" else f"({how})^2"
    lines.append(
        f"learning needs about {counted(needed, 'participant')} at sigma {plan['sigma']:.4g} with "
        f"{plan['placement']} noise: {how}"
    )
    return lines
