"""Text to token ids and back, exact to the byte, from ``tokenizer.json`` or GGUF metadata."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layby.errors import InvalidRequestError, ModelError
from layby.models.gguf_file import GgufFile
from layby.models.hf_directory import read_json

if TYPE_CHECKING:
    import tokenizers

_LONG_TEXT_CHARS = 10_000
"""From here on it pays to encode where other Python threads can go on meanwhile."""

END_OF_TURN_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "<|eot|>",
    "<|EOT|>",
    "<｜end▁of▁sentence｜>",
    "<end_of_turn>",
    "</s>",
)
"""Tokens that end an answer wherever a vocabulary has them as control tokens.

Many models name only some of theirs as end-of-sequence token.
"""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
"""GGUF's token types."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ONE_DIGIT = r"\p{N}"

_PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": (_GPT2_SPLIT,),
    "gpt-2": (_GPT2_SPLIT,),
    "smollm": (_ONE_DIGIT, _GPT2_SPLIT),
    "llama-bpe": (_LLAMA3_SPLIT,),
    "llama3": (_LLAMA3_SPLIT,),
    "llama-v3": (_LLAMA3_SPLIT,),
    "smaug-bpe": (_LLAMA3_SPLIT,),
    "falcon3": (_LLAMA3_SPLIT,),
    "qwen2": (_QWEN2_SPLIT,),
    "deepseek-r1-qwen": (_QWEN2_SPLIT,),
    "tekken": (_TEKKEN_SPLIT,),
}
"""``tokenizer.ggml.pre`` → expressions that cut the text into words, applied one after another."""

_BOS_BY_DEFAULT = frozenset(("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"))
"""Pre-tokenizers whose models want a BOS token where the file does not say."""

_WHOLE_WORDS_FIRST = frozenset(("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"))
"""A word that is itself a token becomes that token, whatever the merges would make of it."""


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads; none ever waits for another.

    ``decode`` is the bytes of the tokens joined and read as UTF-8, so what a stream of
    ``token_bytes`` adds up to and what ``decode`` returns cannot differ. Bytes that are no UTF-8
    become U+FFFD there.

    Attributes:
        vocab_size: The largest token id plus one. The model's embedding may have more rows.
        longest_token_bytes: Most bytes of text that one token stands for.
        bos_id: Token that begins a text, or None.
        eos_ids: Tokens that end a sequence.
        strips_leading_space: A text's first token carries a space that is not part of the text
            (SentencePiece). ``decode`` drops it; whoever joins ``token_bytes`` of a whole text
            drops one leading space in the same way, as the engine does for an answer in a chat.
            The continuation of a prompt keeps it: there it is part of the text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None,
        eos_ids: Iterable[int],
        vocab_size: int | None = None,
    ) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._spelling = _Spelling.of(backend)
        self._bytes: dict[int, bytes] = {}
        self.bos_id = bos_id
        well_known = (backend.token_to_id(text) for text in END_OF_TURN_TOKENS)
        self.eos_ids = frozenset(eos_ids) | {
            token for token in well_known if token is not None and token in self._special
        }
        self.vocab_size = vocab_size or max(
            backend.get_vocab_size(with_added_tokens=True), max(self._added, default=0) + 1
        )
        self.strips_leading_space = self._spelling.strips_leading_space
        spelled = (self._spell(token_id) for token_id in range(self.vocab_size))
        self.longest_token_bytes = max(map(len, spelled), default=1)

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """From ``tokenizer.json`` and the configuration files beside it.

        Which tokens go around a text is what tokenizer.json's post-processor says, as in
        transformers 5; ``add_bos_token`` in tokenizer_config.json may contradict it and is not
        read.

        Raises:
            ModelError: There is no tokenizer.json, or it is damaged or of an unknown kind.
        """
        import tokenizers

        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{directory} holds no tokenizer.json, which Layby needs")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more precise
            raise ModelError(f"cannot read {path}: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = read_json(directory / "tokenizer_config.json")
        _add_missing_tokens(backend, config)
        bos = _token_id(backend, config.get("bos_token"))
        eos = _token_id(backend, config.get("eos_token"))
        eos_ids = {eos} if eos is not None else set()
        for name in ("generation_config.json", "config.json"):
            eos_ids |= _ids(read_json(directory / name).get("eos_token_id"))
        return cls(backend, bos_id=bos, eos_ids=eos_ids)

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Tokenizer:
        """From the metadata of a GGUF file.

        Raises:
            ModelError: The vocabulary is missing, inconsistent, or of a kind not supported.
        """
        model = file.text("tokenizer.ggml.model")
        tokens = file.strings("tokenizer.ggml.tokens")
        types = [int(kind) for kind in file.numbers("tokenizer.ggml.token_type")]
        types = types or [_NORMAL] * len(tokens)
        if not tokens or len(types) != len(tokens):
            raise ModelError(f"{file.path} holds {len(tokens)} tokens and {len(types)} token types")
        try:
            if model == "gpt2":
                backend = _byte_level_bpe(file, tokens, types)
            elif model == "llama":
                backend = _sentencepiece_bpe(file, tokens, types)
            else:
                raise ModelError(
                    f"{file.path}: tokenizer model is {model!r}; supported: 'gpt2', 'llama'"
                )
        except ModelError:
            raise
        except Exception as error:  # the library raises nothing more precise
            raise ModelError(f"{file.path}: the vocabulary is inconsistent: {error}") from error
        _add_gguf_added_tokens(file, backend, tokens, types)
        bos = file.integer("tokenizer.ggml.bos_token_id")
        eos = file.integer("tokenizer.ggml.eos_token_id")
        pre = file.text("tokenizer.ggml.pre")
        add_bos = file.flag("tokenizer.ggml.add_bos_token")
        if add_bos is None:
            add_bos = model == "llama" or pre in _BOS_BY_DEFAULT
        add_eos = file.flag("tokenizer.ggml.add_eos_token")
        _add_around(backend, bos if add_bos else None, eos if add_eos else None)
        ends = [file.integer(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
        return cls(
            backend,
            bos_id=bos,
            eos_ids={token for token in (eos, *ends) if token is not None},
            vocab_size=len(tokens),
        )

    def encode(
        self, text: str, add_special_tokens: bool = True, *, parse_special: bool = True
    ) -> list[int]:
        """Token ids of ``text``.

        Args:
            add_special_tokens: Put BOS (EOS) around the text if the model was trained so. Off
                for the output of a chat template, which writes them itself.
            parse_special: Read special tokens written in the text as such; if not, they are
                ordinary text.

        Raises:
            InvalidRequestError: The text holds a lone surrogate, so it has no UTF-8 form.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text is not valid Unicode: lone surrogate at character {error.start}",
                param="prompt",
            ) from None
        backend = self._backend if parse_special else self._without_special
        if len(text) < _LONG_TEXT_CHARS:
            return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)
        # The library's one way to encode without the GIL, and without the offsets it never needs.
        [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    @cached_property
    def _without_special(self) -> tokenizers.Tokenizer:
        """A copy that reads special tokens as ordinary text: the setting is the backend's."""
        backend = deepcopy(self._backend)
        backend.encode_special_tokens = True
        return backend

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence of tokens."""
        raw = b"".join(
            self.token_bytes(token, include_special=not skip_special_tokens) for token in ids
        )
        if self.strips_leading_space:
            raw = raw.removeprefix(b" ")
        return raw.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int, *, include_special: bool = False) -> bytes:
        """Exactly the bytes that a token adds to the text.

        Empty for a special token, unless asked for, and for an id that the vocabulary leaves open.
        """
        if token_id in self._special and not include_special:
            return b""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """A token for people to read: special tokens in full, U+FFFD for parts of characters."""
        return self.token_bytes(token_id, include_special=True).decode("utf-8", errors="replace")

    def is_special(self, token_id: int) -> bool:
        """Whether a token steers the model and is no part of the text."""
        return token_id in self._special

    def id_of(self, text: str) -> int | None:
        """The id of the token spelled so in the vocabulary, or None."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode("utf-8")
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        return b"" if token is None else self._spelling.bytes_of(token)


class _Spelling:
    """How a vocabulary writes bytes as text; the per-token part of the backend's decoder."""

    def __init__(self) -> None:
        self.byte_level = False
        self.byte_tokens = False
        self.replacements: list[tuple[str, str]] = []
        self.strips_leading_space = False

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> _Spelling:
        """Read it from the decoder. Raises ModelError for a step that is not known."""
        spelling = cls()
        if backend.decoder is None:
            raise ModelError("the tokenizer has no decoder, so its tokens cannot be made text")
        state = json.loads(backend.decoder.__getstate__())
        for step in state["decoders"] if state["type"] == "Sequence" else [state]:
            spelling._add_step(step)
        return spelling

    def _add_step(self, step: Mapping[str, Any]) -> None:
        kind = step["type"]
        if kind == "ByteLevel":
            self.byte_level = True
        elif kind == "ByteFallback":
            self.byte_tokens = True
        elif kind == "Replace" and "String" in step["pattern"]:
            self.replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            self.replacements.append((step["replacement"], " "))
            self.strips_leading_space |= step.get("prepend_scheme") != "never"
        elif kind == "Strip" and step["content"] == " " and step["start"] <= 1 and not step["stop"]:
            self.strips_leading_space |= step["start"] == 1
        elif kind != "Fuse":
            raise ModelError(f"the tokenizer's decoder has a step {kind!r} that is not supported")

    def bytes_of(self, token: str) -> bytes:
        if self.byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if self.byte_level:
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:
                return token.encode("utf-8")
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode("utf-8")


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's alphabet, character → byte.

    The printable bytes of Latin-1 stand for themselves; the others take, in order, the characters
    from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = sorted(set(range(256)) - set(printable))
    alphabet.update((chr(0x100 + index), byte) for index, byte in enumerate(others))
    return alphabet


_BYTE_OF_CHARACTER = _byte_alphabet()


def _byte_level_bpe(file: GgufFile, tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = file.text("tokenizer.ggml.pre") or "default"
    if pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"{file.path}: pre-tokenizer {pre!r} is not supported; "
            f"supported: {', '.join(_PRE_TOKENIZERS)}"
        )
    merges = []
    for merge in file.strings("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    backend = Tokenizer(
        models.BPE(
            vocab=_vocabulary(tokens, types),
            merges=merges,
            ignore_merges=pre in _WHOLE_WORDS_FIRST,
        )
    )
    splits = [
        pre_tokenizers.Split(Regex(expression), behavior="isolated")
        for expression in _PRE_TOKENIZERS[pre]
    ]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(file: GgufFile, tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = file.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ModelError(f"{file.path} holds {len(tokens)} tokens and {len(scores)} scores")
    vocabulary = _vocabulary(tokens, types)
    unknown = next((tokens[i] for i, kind in enumerate(types) if kind == _UNKNOWN), None)
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges_from_scores(tokens, types, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    adds_space = file.flag("tokenizer.ggml.add_space_prefix") is not False
    steps: list[Any] = [normalizers.Prepend("▁")] if adds_space else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    undo: list[Any] = [decoders.Strip(content=" ", left=1)] if adds_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *undo]
    )
    return backend


def _merges_from_scores(
    tokens: list[str], types: list[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """The merges that a SentencePiece BPE vocabulary implies, first the one to be made first.

    SentencePiece joins the neighbours whose union has the best score. So every way to cut a piece
    in two pieces is a merge, ranked by the piece's score.
    """
    pieces = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_NORMAL, _USER_DEFINED)
    }
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, index in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                ranked.append((-scores[index], -len(left), -len(right), left, right))
    ranked.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in ranked]


def _vocabulary(tokens: list[str], types: list[int]) -> dict[str, int]:
    """Token → id, without the entries that only pad the embedding."""
    return {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != _UNUSED
    }


def _add_gguf_added_tokens(
    file: GgufFile, backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]
) -> None:
    """Tokens that are matched whole in the text: control tokens and those of the model's user."""
    from tokenizers import AddedToken

    control = {index for index, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)}
    # Files without token types still name these.
    for name in ("bos", "eos", "eot", "eom"):
        index = file.integer(f"tokenizer.ggml.{name}_token_id")
        if index is not None and not 0 <= index < len(tokens):
            raise ModelError(
                f"{file.path}: {name}_token_id is {index}, but there are {len(tokens)} tokens"
            )
        if index is not None:
            control.add(index)
    backend.add_special_tokens(
        [AddedToken(tokens[index], normalized=False) for index in sorted(control)]
    )
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _USER_DEFINED
        ]
    )


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Tokens that only ``tokenizer_config.json`` lists, in the order of their ids."""
    from tokenizers import AddedToken

    listed = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if backend.token_to_id(entry["content"]) is None:
            options = ("single_word", "lstrip", "rstrip", "normalized", "special")
            backend.add_tokens(
                [AddedToken(entry["content"], **{k: entry[k] for k in options if k in entry})]
            )


def _add_around(backend: tokenizers.Tokenizer, bos: int | None, eos: int | None) -> None:
    """Make ``encode`` put these tokens around a text, and no others."""
    from tokenizers import processors

    special = [(backend.id_to_token(token), token) for token in (bos, eos) if token is not None]
    single = ["$A:0"]
    if bos is not None:
        single.insert(0, f"{backend.id_to_token(bos)}:0")
    if eos is not None:
        single.append(f"{backend.id_to_token(eos)}:0")
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, "$B:1"], special_tokens=special
    )


def _token_id(backend: tokenizers.Tokenizer, token: object) -> int | None:
    """The id of a token as tokenizer_config.json writes it: its text, or an object with it."""
    text = token.get("content") if isinstance(token, dict) else token
    found: int | None = backend.token_to_id(text) if isinstance(text, str) else None
    return found


def _ids(value: object) -> set[int]:
    """An entry that is one id, a list of ids, or nothing."""
    values = value if isinstance(value, list) else [value]
    return {item for item in values if isinstance(item, int)}
