"""A split by hand: ``0:12,12:30@NODE``."""

import re
from collections.abc import Sequence

from lensemble.errors import ConfigError
from lensemble.ids import NodeId
from lensemble.wire.fence import MAX_STAGES
from lensemble_coord.inference.chain import Offer, Segment

MAX_SPLIT_CHARS = 1 << 13
_SEGMENT = re.compile(r"(\d{1,6}):(\d{1,6})(?:@(.{1,64}))?", re.ASCII)
_REMEDIATION = "Write it like --split 0:12,12:30@NODE; NODE is a name, or the start of an id."


def parse(
    text: str, layers: int, offers: Sequence[Offer], *, again: bool = False
) -> tuple[Segment, ...]:
    """The segments of ``text`` for a model of ``layers`` layers.

    A node is named by its name or by the start of its id, as long as it takes to tell it from the
    others.  Segments without a node are left to the planner; so are, where the model is planned
    ``again``, those on a node that is gone or barred.

    Raises:
        ConfigError: not of that form, gaps, overlaps, an unknown or ambiguous node, or one twice.
    """
    if len(text) > MAX_SPLIT_CHARS:
        raise ConfigError(f"--split of {len(text)} characters", _REMEDIATION)
    segments = tuple(_segment(part.strip(), offers, again=again) for part in text.split(","))
    if len(segments) > MAX_STAGES:
        raise ConfigError(f"--split has {len(segments)} segments; {MAX_STAGES} are the most")
    _check_cover(segments, layers)
    pinned = [segment.node for segment in segments if segment.node is not None]
    for node in pinned:
        if pinned.count(node) > 1:
            raise ConfigError(
                f"--split names {_title(node, offers)} twice; a node holds one stage of a run",
                "Give each segment another node, or join them.",
            )
    return segments


def _segment(part: str, offers: Sequence[Offer], *, again: bool) -> Segment:
    found = _SEGMENT.fullmatch(part)
    if found is None:
        raise ConfigError(f"--split: {part!r} is not FIRST:LAST or FIRST:LAST@NODE", _REMEDIATION)
    first, last = int(found[1]), int(found[2])
    if first >= last:
        raise ConfigError(f"--split: {part} has no layers", _REMEDIATION)
    named = found[3]
    if named is None or (again and not _usable(named, offers)):
        return Segment(first, last)
    return Segment(first, last, _node(named, offers))


def _usable(wanted: str, offers: Sequence[Offer]) -> bool:
    """Whether a node called so may hold a stage."""
    return any(
        not each.barred and (each.name == wanted or each.node.startswith(wanted)) for each in offers
    )


def _node(wanted: str, offers: Sequence[Offer]) -> NodeId:
    for matches in (
        [offer.node for offer in offers if offer.name == wanted],
        [offer.node for offer in offers if offer.node.startswith(wanted)],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            ids = ", ".join(sorted(node[:12] for node in matches)[:4])
            raise ConfigError(
                f"--split: {wanted!r} is {len(matches)} nodes: {ids}", "Give more of the id."
            )
    here = ", ".join(sorted(offer.name or offer.node[:8] for offer in offers)[:8])
    raise ConfigError(f"--split: no node {wanted!r} is here; here: {here or 'none'}", _REMEDIATION)


def _check_cover(segments: tuple[Segment, ...], layers: int) -> None:
    reached = 0
    for segment in segments:
        said = f"{segment.first}:{segment.last}"
        if segment.first > reached:
            raise ConfigError(f"--split leaves out layers {reached}:{segment.first}", _REMEDIATION)
        if segment.first < reached:
            raise ConfigError(f"--split: {said} overlaps the layers before {reached}", _REMEDIATION)
        reached = segment.last
    if reached != layers:
        raise ConfigError(f"--split ends at layer {reached}, the model at {layers}", _REMEDIATION)


def _title(node: NodeId, offers: Sequence[Offer]) -> str:
    return next((each.name for each in offers if each.node == node and each.name), node[:12])
