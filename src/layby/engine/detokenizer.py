"""Tokens to text as they come: whole characters only, and nothing of a stop string.

Both halves cost time linear in the text: nothing is decoded or searched twice.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from layby.engine.interfaces import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class StopStrings:
    """Stop strings of a request, prepared once and shared by its samples.

    For every string the failure table of Knuth, Morris and Pratt: entry ``k`` is the length of the
    longest proper prefix of the string that is also a suffix of its first ``k + 1`` characters.
    """

    __slots__ = ("strings", "tables")

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = tuple(dict.fromkeys(strings))
        self.tables = tuple(_failure_table(text) for text in self.strings)


class StopMatcher:
    """Searches one growing text for stop strings and says how much of it is safe to show.

    The rule: the text ends at the first character that completes a stop string, whichever string
    that is; if it completes several at once, the longest of them (the one that begins first)
    counts. The text is cut where that string begins. So the outcome does not depend on how the
    text was cut into tokens, and generation never goes on to see whether another string would
    have begun earlier.
    """

    __slots__ = ("_held", "_matched_lengths", "_stops", "matched")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        # For each string, how many of its characters the end of the text matches at present.
        self._matched_lengths = [0] * len(stops.strings)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take more text; return what can be shown now.

        Held back is the longest end of the text with which a stop string could begin. After a
        match ``matched`` is the string, and everything from its beginning on is gone.
        """
        if not self._stops.strings or not text:
            return text
        for count, char in enumerate(text, 1):
            stop = self._advance(char)
            if stop is not None:
                self.matched = stop
                seen = self._held + text[:count]
                self._held = ""
                return seen[: len(seen) - len(stop)]
        seen = self._held + text
        safe = len(seen) - max(self._matched_lengths)
        self._held = seen[safe:]
        return seen[:safe]

    def flush(self) -> str:
        """What was held back; for the end of a text in which no stop string was completed."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Move every string's state by one character; the longest string completed, if any."""
        done: str | None = None
        lengths = self._matched_lengths
        for index, stop in enumerate(self._stops.strings):
            length = lengths[index]
            table = self._stops.tables[index]
            while length and stop[length] != char:
                length = table[length - 1]
            if stop[length] == char:
                length += 1
            lengths[index] = length
            if length == len(stop) and (done is None or length > len(done)):
                done = stop
        return done


class Detokenizer:
    """One sample's text, token by token.

    A character whose bytes are spread over several tokens appears with the last of them. Bytes
    that can no longer become a character are U+FFFD, as in ``bytes.decode(errors="replace")``; an
    unfinished character at the very end likewise. The pieces joined are always the whole text.

    Args:
        tokenizer: Knows the bytes of each token.
        stops: The request's stop strings.
        min_tokens: The text of this many first tokens is not searched for stop strings.
        begins_text: The text stands for itself and does not go on with a prompt: a space in front
            of it that is the tokenizer's own (SentencePiece) is no part of it.
    """

    __slots__ = ("_decoder", "_drops_space", "_matcher", "_tokenizer", "_unsearched_tokens")

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: StopStrings,
        min_tokens: int = 0,
        *,
        begins_text: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._decoder = _Utf8Decoder(errors="replace")
        self._matcher = StopMatcher(stops)
        self._unsearched_tokens = min_tokens
        self._drops_space = begins_text and tokenizer.strips_leading_space

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, or None. Nothing may be pushed after one."""
        return self._matcher.matched

    def push(self, token_ids: Sequence[int]) -> str:
        """Take tokens; return the text that can be shown now (possibly empty)."""
        shown = []
        for token in token_ids:
            raw = self._tokenizer.token_bytes(token)
            if self._drops_space and raw:
                self._drops_space = False
                raw = raw.removeprefix(b" ")
            text = self._decoder.decode(raw)
            if self._unsearched_tokens > 0:
                self._unsearched_tokens -= 1
            else:
                text = self._matcher.push(text)
            shown.append(text)
            if self._matcher.matched is not None:
                break
        return "".join(shown)

    def read(self, token_ids: Sequence[int], *, ends: bool) -> str:
        """``push``, and ``flush`` if the text ends with these tokens."""
        text = self.push(token_ids)
        return text + self.flush() if ends else text

    def flush(self) -> str:
        """End the text; return what was held back. Empty after a stop string.

        The replacement of an unfinished last character can itself complete a stop string, which
        then cuts the text like any other.
        """
        if self._matcher.matched is not None:
            return ""
        text = self._matcher.push(self._decoder.decode(b"", final=True))
        return text if self._matcher.matched is not None else text + self._matcher.flush()


def _failure_table(text: str) -> list[int]:
    table = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = table[length - 1]
        if text[index] == text[length]:
            length += 1
        table[index] = length
    return table
