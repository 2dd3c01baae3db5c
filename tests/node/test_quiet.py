from hypothesis import given
from hypothesis import strategies as st

from lensemble_node.quiet import MAX_TOPICS, REPEAT_S, Quiet


def test_the_same_line_comes_once_a_minute_and_news_at_once() -> None:
    quiet = Quiet()
    assert quiet.may_say("dial", "no answer", 0.0)
    assert not quiet.may_say("dial", "no answer", REPEAT_S - 1)
    assert quiet.may_say("dial", "refused", REPEAT_S - 1)
    assert quiet.may_say("other", "refused", REPEAT_S - 1)
    assert quiet.may_say("dial", "refused", 2 * REPEAT_S)


@given(st.lists(st.text(max_size=3), max_size=400))
def test_however_many_topics_there_are_little_is_remembered(topics: list[str]) -> None:
    quiet = Quiet()
    for topic in topics:
        quiet.may_say(topic, "x", 0.0)
    assert len(quiet._last) <= MAX_TOPICS
