"""A byte-level toy tokenizer and chat template, for tests and for trying the engine modelless."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from layby.errors import InvalidRequestError


class ByteTokenizer:
    """One token per byte: ids 0-255 are the bytes themselves, 256 is BOS, 257 is EOS.

    ``pieces`` adds tokens of several bytes from id 258 on. They are only ever decoded (a scripted
    executor emits them); ``encode`` always answers single bytes.
    """

    BOS = 256
    EOS = 257
    strips_leading_space = False

    def __init__(self, *, add_bos: bool = False, pieces: Sequence[bytes] = ()) -> None:
        self.add_bos = add_bos
        self.bos_id: int | None = self.BOS
        self.eos_ids = frozenset({self.EOS})
        self._table = [bytes([byte]) for byte in range(256)] + [b"", b"", *pieces]
        self.vocab_size = len(self._table)
        self.longest_token_bytes = max(map(len, self._shown))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """UTF-8 bytes of ``text`` as ids; a leading BOS only if the tokenizer was made so."""
        start = [self.BOS] if self.add_bos and add_special_tokens else []
        return start + list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD."""
        table = self._table if skip_special_tokens else self._shown
        return b"".join(table[token] for token in ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; empty for BOS and EOS."""
        return self._table[token_id]

    def token_text(self, token_id: int) -> str:
        """One token as text."""
        return self._shown[token_id].decode(errors="replace")

    @property
    def _shown(self) -> list[bytes]:
        return [*self._table[:256], b"<s>", b"</s>", *self._table[258:]]


class ToyChatTemplate:
    """``role: content`` lines; knows the roles system, user and assistant."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """One line per message, then ``assistant:`` if a generation prompt is wanted.

        Raises:
            InvalidRequestError: A message has another role.
        """
        for message in messages:
            if message["role"] not in ("system", "user", "assistant"):
                raise InvalidRequestError(
                    f"the chat template knows no role {message['role']!r}", param="messages"
                )
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(lines) + ("assistant:" if add_generation_prompt else "")
