"""What the engine asks of a tokenizer and of a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, from 0."""
        ...

    @property
    def longest_token_bytes(self) -> int:
        """Most bytes of text that one token stands for."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The beginning-of-sequence token, if the model has one."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens with which the model ends an answer."""
        ...

    @property
    def strips_leading_space(self) -> bool:
        """Whether the first token of a text carries a space that is not part of the text."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; with the model's own BOS where ``add_special_tokens``."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence of ids."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Exactly the bytes that the token adds to a text; empty for special tokens."""
        ...

    def token_text(self, token_id: int) -> str:
        """How to show one token on its own."""
        ...


class ChatTemplate(Protocol):
    """Messages to prompt text, in the form the model was trained on."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt's text, special tokens included.

        Raises:
            InvalidRequestError: The template does not take these messages.
        """
        ...
