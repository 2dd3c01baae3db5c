"""Keeps a log readable: the same line at most once a minute."""

REPEAT_S = 60.0
MAX_TOPICS = 64


class Quiet:
    """Remembers what was last said on each topic, and when."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, float]] = {}

    def may_say(self, topic: str, text: str, now: float) -> bool:
        """Whether ``text`` is news at ``now`` (seconds); if so it is remembered as said."""
        said, at = self._last.get(topic, ("", 0.0))
        if said == text and now - at < REPEAT_S:
            return False
        if topic not in self._last and len(self._last) >= MAX_TOPICS:
            self._last.clear()
        self._last[topic] = (text, now)
        return True
