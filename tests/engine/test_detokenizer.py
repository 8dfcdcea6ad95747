"""Tokens to text: whole characters, and stop strings wherever the tokens are cut."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layby.engine.detokenizer import Detokenizer, StopMatcher, StopStrings
from layby.engine.toy import ByteTokenizer


class Pieces:
    """A tokenizer whose token ``i`` is the ``i``-th piece of one given byte string."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._tokenizer = ByteTokenizer(pieces=pieces)
        self.ids = [258 + index for index in range(len(pieces))]

    def stream(self, stops: tuple[str, ...] = (), min_tokens: int = 0) -> tuple[list[str], str]:
        """What each token shows, and what the end flushes."""
        text = Detokenizer(self._tokenizer, StopStrings(stops), min_tokens)
        shown = []
        for token in self.ids:
            shown.append(text.push([token]))
            if text.stopped_by is not None:
                break
        return shown, text.flush()


def every_split(data: bytes) -> list[list[bytes]]:
    """All ways to cut ``data`` into consecutive pieces."""
    splits = []
    inner = range(1, len(data))
    for count in range(len(data)):
        for cuts in combinations(inner, count):
            bounds = [0, *cuts, len(data)]
            splits.append([data[a:b] for a, b in pairwise(bounds)])
    return splits


def reference(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The rule, read off the whole text: first end of any stop string, the longest there."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_case_13_characters_split_over_tokens_in_every_way_come_out_whole() -> None:
    """Guards against U+FFFD in mid-stream: 12 bytes, 2,048 splits."""
    text = "a你好🎉é"
    for pieces in every_split(text.encode()):
        shown, rest = Pieces(pieces).stream()
        assert "".join(shown) + rest == text
        assert rest == ""
        assert not any("�" in part for part in shown)


@pytest.mark.parametrize("kept_bytes", [1, 2, 3])
def test_case_13_a_character_cut_by_the_end_is_one_replacement_character(kept_bytes: int) -> None:
    """The same as decoding the whole answer at once, so streamed and whole agree."""
    data = b"a" + "🎉".encode()[:kept_bytes]
    shown, rest = Pieces([bytes([byte]) for byte in data]).stream()
    assert ("".join(shown), rest) == ("a", "�")
    assert "".join(shown) + rest == data.decode(errors="replace")


def test_bytes_that_can_no_longer_become_a_character_are_replaced_at_once() -> None:
    shown, rest = Pieces([b"\xf0\x9f", b"x", b"\xff", b"y"]).stream()
    assert (shown, rest) == (["", "�x", "�", "y"], "")


def test_case_12_nothing_of_a_stop_string_over_seven_tokens_leaks() -> None:
    """A B C D … J one letter a token; the match is cut and ends the text."""
    shown, rest = Pieces([bytes([c]) for c in b"ABCDEFGHIJK"]).stream(("DEFGHIJ",))
    assert shown == ["A", "B", "C", "", "", "", "", "", "", ""]
    assert rest == ""


def test_case_12_held_text_comes_out_on_a_near_miss() -> None:
    shown, rest = Pieces([bytes([c]) for c in b"ABCDEFGHIX"]).stream(("DEFGHIJ",))
    assert shown == ["A", "B", "C", "", "", "", "", "", "", "DEFGHIX"]
    assert rest == ""


def test_case_12_held_text_comes_out_when_the_length_is_reached() -> None:
    shown, rest = Pieces([bytes([c]) for c in b"ABCDEF"]).stream(("DEFGHIJ",))
    assert shown == ["A", "B", "C", "", "", ""]
    assert rest == "DEF"


def test_case_12_of_two_stops_of_which_one_begins_the_other_the_first_complete_one_ends() -> None:
    for stops in (("DEF", "DEFGH"), ("DEFGH", "DEF")):
        shown, rest = Pieces([b"ABC", b"DE", b"FGH"]).stream(stops)
        assert ("".join(shown), rest) == ("ABC", "")


def test_a_near_miss_that_contains_the_beginning_of_the_next_try_is_still_held() -> None:
    """ "aab" in "aaab": after the mismatch two of the characters still count."""
    shown, rest = Pieces([b"a", b"a", b"a", b"b"]).stream(("aab",))
    assert (shown, rest) == (["", "", "a", ""], "")


def test_of_stops_completed_by_the_same_character_the_longest_counts() -> None:
    matcher = StopMatcher(StopStrings(["c", "abc"]))
    assert matcher.push("xabcz") == "x"
    assert matcher.matched == "abc"


def test_a_stop_inside_a_longer_possible_one_ends_the_text_without_waiting() -> None:
    matcher = StopMatcher(StopStrings(["abcdef", "cd"]))
    assert matcher.push("ab") == ""
    assert matcher.push("cd") == "ab"
    assert matcher.matched == "cd"


def test_the_text_of_the_first_min_tokens_tokens_is_not_searched() -> None:
    shown, rest = Pieces([b"x", b"STOP", b"y", b"STOP"]).stream(("STOP",), min_tokens=2)
    assert ("".join(shown), rest) == ("xSTOPy", "")


def test_special_tokens_add_nothing() -> None:
    text = Detokenizer(ByteTokenizer(), StopStrings(()))
    assert text.push([ByteTokenizer.BOS, *b"hi", ByteTokenizer.EOS]) == "hi"
    assert text.flush() == ""


@st.composite
def streams(draw: st.DrawFn) -> tuple[str, list[bytes], tuple[str, ...]]:
    """A text over a small alphabet, cut at random bytes, and stops likely to occur in it."""
    alphabet = st.sampled_from("ab你🎉")
    text = draw(st.text(alphabet, max_size=30))
    data = text.encode()
    cuts = draw(st.sets(st.integers(1, max(1, len(data) - 1)), max_size=20))
    bounds = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    pieces = [data[a:b] for a, b in pairwise(bounds)]
    stops = draw(st.lists(st.text(alphabet, min_size=1, max_size=5), max_size=4))
    return text, pieces, tuple(stops)


@settings(max_examples=1000, deadline=None)
@given(streams())
def test_any_stream_joined_equals_the_rule_applied_to_the_whole(
    stream: tuple[str, list[bytes], tuple[str, ...]],
) -> None:
    text, pieces, stops = stream
    shown, rest = Pieces(pieces).stream(stops)
    expected, _ = reference(text, stops)
    assert "".join(shown) + rest == expected


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=40), st.lists(st.integers(0, 40), max_size=10))
def test_any_bytes_in_any_pieces_decode_as_they_would_at_once(data: bytes, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    shown, rest = Pieces([data[a:b] for a, b in pairwise(bounds)]).stream()
    assert "".join(shown) + rest == data.decode(errors="replace")


@settings(max_examples=300, deadline=None)
@given(streams())
def test_no_more_is_held_back_than_could_begin_a_stop_string(
    stream: tuple[str, list[bytes], tuple[str, ...]],
) -> None:
    """What has been shown is everything but the longest end that begins some stop string."""
    text, _, stops = stream
    matcher = StopMatcher(StopStrings(stops))
    shown, seen = "", ""
    for char in text:
        shown += matcher.push(char)
        seen += char
        if matcher.matched is not None:
            return
        held = max(
            (k for stop in stops for k in range(len(stop)) if seen.endswith(stop[:k])), default=0
        )
        assert shown == seen[: len(seen) - held]
