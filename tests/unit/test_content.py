"""Equal prefixes have equal hashes, however they are written; others have not."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.content import block_hashes, join_segments
from kvplan.core.request import Request, Segment

Token = tuple[str, int]


def hashes(*segments: tuple[str, int, int], block_size: int = 4) -> list[bytes]:
    return list(block_hashes([Segment(*s) for s in segments], block_size))


def tokens(segments: list[Segment]) -> list[Token]:
    return [(s.stream, s.start + i) for s in segments for i in range(s.length)]


# Names that hold the marks which a careless encoding would use between its parts.
names = st.sampled_from(["a", "b", "a:1", "1:a", "a@0+1", "", "é", "a,", "11:a@0+1"])
segment_lists = st.lists(
    st.builds(Segment, names, st.integers(0, 3), st.integers(0, 5)), min_size=0, max_size=6
)


@st.composite
def segmentations(draw: st.DrawFn) -> tuple[list[Segment], list[Segment]]:
    """Some segments, and the same tokens cut at other places."""
    segments = draw(segment_lists)
    pieces = []
    for segment in segments:
        cuts = draw(st.lists(st.integers(0, segment.length), max_size=3).map(sorted))
        for start, end in pairwise([0, *cuts, segment.length]):
            pieces.append(Segment(segment.stream, segment.start + start, end - start))
    return segments, pieces


def test_neighbours_that_continue_each_other_become_one() -> None:
    found = join_segments([Segment("a", 0, 3), Segment("a", 3, 2), Segment("a", 6, 1), Segment("b", 7, 1)])
    assert list(found) == [Segment("a", 0, 5), Segment("a", 6, 1), Segment("b", 7, 1)]


def test_empty_segments_vanish_and_do_not_part_what_belongs_together() -> None:
    found = join_segments([Segment("z", 9, 0), Segment("a", 0, 3), Segment("b", 0, 0), Segment("a", 3, 1)])
    assert list(found) == [Segment("a", 0, 4)]


def test_nothing_joined_is_nothing() -> None:
    assert list(join_segments([])) == []
    assert list(join_segments([Segment("a", 0, 0)])) == []


@given(segmentations())
def test_joined_segments_depend_on_the_tokens_alone(pair: tuple[list[Segment], list[Segment]]) -> None:
    one, other = (list(join_segments(segments)) for segments in pair)
    assert one == other
    assert tokens(one) == tokens(pair[0])
    assert all(s.length for s in one)


def test_only_full_blocks_have_a_hash() -> None:
    # 11 tokens in blocks of 4: two full blocks and a tail of 3.
    assert len(hashes(("a", 0, 11))) == 2
    assert hashes(("a", 0, 3)) == []


@given(segmentations(), st.integers(1, 5))
def test_the_hashes_do_not_depend_on_how_the_tokens_are_cut(
    pair: tuple[list[Segment], list[Segment]], block_size: int
) -> None:
    one, other = (list(block_hashes(segments, block_size)) for segments in pair)
    assert one == other
    assert len(one) == len(tokens(pair[0])) // block_size


@given(segment_lists, segment_lists, st.integers(1, 3))
def test_hashes_are_equal_exactly_where_the_whole_prefix_is(
    one: list[Segment], other: list[Segment], block_size: int
) -> None:
    pairs = zip(block_hashes(one, block_size), block_hashes(other, block_size), strict=False)
    for i, (a, b) in enumerate(pairs, start=1):
        assert (a == b) == (tokens(one)[: i * block_size] == tokens(other)[: i * block_size])


def test_the_same_block_after_another_prefix_has_another_hash() -> None:
    first, second = hashes(("a", 0, 4), ("s", 0, 4)), hashes(("b", 0, 4), ("s", 0, 4))
    assert first[1] != second[1]


def test_a_prompt_that_only_shares_its_start_shares_only_those_blocks() -> None:
    # 10 shared tokens in blocks of 4: two blocks; the third differs in its last two tokens.
    one, other = hashes(("s", 0, 10), ("x", 0, 2)), hashes(("s", 0, 10), ("y", 0, 2))
    assert one[:2] == other[:2]
    assert one[2] != other[2]


def test_another_start_in_the_same_stream_is_other_content() -> None:
    assert hashes(("a", 0, 4)) != hashes(("a", 4, 4))


def test_streams_whose_names_hold_separators_are_kept_apart() -> None:
    spellings = [
        (("a:1", 0, 4),),
        (("a", 0, 1), ("1", 0, 3)),
        (("a", 0, 1), (":1", 0, 3)),
        (("a:1", 0, 1), ("a:1", 10, 3)),
        (("a", 1, 4),),
        (("a@0", 1, 4),),
    ]
    found = [hashes(*spelling)[0] for spelling in spellings]
    assert len(set(found)) == len(spellings)


def test_no_name_can_imitate_several_segments() -> None:
    """Written without a mark after each count, both would read 1:a@0+115:bbbbb@0+110:xxx@0+127:@0+11:z@0+1."""
    three = hashes(("a", 0, 1), ("bbbbb@0+110:xxx", 0, 12), ("@0+11:z", 0, 1), block_size=14)
    four = hashes(("a", 0, 11), ("bbbbb", 0, 1), ("xxx@0+127:", 0, 1), ("z", 0, 1), block_size=14)
    assert three != four


def test_hashes_are_made_one_by_one() -> None:
    """A stream of 10^18 tokens costs nothing until it is asked for."""
    lazily = block_hashes([Segment("a", 0, 10**18)], 16)
    assert [next(lazily), next(lazily)] == hashes(("a", 0, 32), block_size=16)


def test_a_follow_up_prompt_holds_the_earlier_answer() -> None:
    """Prompt of 3, answer of 5; the next turn's prompt is all 8 and 4 more."""
    first = Request("q1", 0, 3, 5)
    segments = (Segment("p:q1", 0, 3), Segment("o:q1", 0, 5), Segment("p:q2", 0, 4))
    second = Request("q2", 9, 12, 1, content=segments)
    assert list(block_hashes(second.full_content(), 4))[:2] == list(block_hashes(first.full_content(), 4))


def test_a_request_without_content_shares_nothing() -> None:
    one, other = Request("x", 0, 8, 8), Request("y", 0, 8, 8)
    assert not set(block_hashes(one.full_content(), 4)) & set(block_hashes(other.full_content(), 4))


def test_the_answer_follows_the_prompt_in_the_full_content() -> None:
    assert Request("x", 0, 8, 2).full_content() == (Segment("p:x", 0, 8), Segment("o:x", 0, 2))
    given_content = (Segment("s", 5, 8),)
    assert Request("x", 0, 8, 2, content=given_content).full_content() == (
        *given_content,
        Segment("o:x", 0, 2),
    )
