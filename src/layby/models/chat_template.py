"""A model's chat template: messages in, one prompt text out, rendered in a sandbox."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from layby.errors import InvalidRequestError, ModelError
from layby.models.gguf_file import GgufFile
from layby.models.hf_directory import read_json

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]
"""One message as in OpenAI's chat API: ``role``, ``content`` and what the template may ask for."""

MAX_LOOP_STEPS = 1_000_000
"""Most iterations of all loops together in one rendering."""

MAX_REPEATED_ITEMS = 1_000_000
"""Longest result of ``*`` on a text or list, and largest number ``**`` may give, in bits."""

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_DEFAULT, _TOOL_USE = "default", "tool_use"
_STEPS_TAKEN = "layby_steps_taken"
"""The variable, shared by all scopes of one rendering, that counts its loops' iterations."""


class ChatTemplate:
    """The chat template of one model. Safe to use from several threads.

    Args:
        templates: Jinja sources by name; ``default``, and ``tool_use`` where a model has one for
            requests with tools. Empty: the model has no template, and ``render`` says so.
        special_tokens: Texts of ``bos_token`` and the like, as templates name them.
    """

    def __init__(
        self, templates: Mapping[str, str], *, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self._sources = dict(templates)
        self._special_tokens = dict(special_tokens or {})
        self._compiled: dict[str, jinja2.Template] = {}
        self._lock = threading.Lock()

    @classmethod
    def from_directory(cls, directory: Path) -> ChatTemplate:
        """From ``chat_template.jinja``, or else from ``tokenizer_config.json``.

        Raises:
            ModelError: A file cannot be read.
        """
        config = read_json(directory / "tokenizer_config.json")
        written = config.get("chat_template")
        templates: dict[str, str] = {}
        if isinstance(written, str):
            templates[_DEFAULT] = written
        elif isinstance(written, list):
            templates = {str(entry["name"]): str(entry["template"]) for entry in written}
        path = directory / "chat_template.jinja"
        if path.is_file():
            try:
                templates[_DEFAULT] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(f"cannot read {path}: {error}") from error
        special = {}
        for name in _SPECIAL_TOKENS:
            token = config.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                special[name] = text
        return cls(templates, special_tokens=special)

    @classmethod
    def from_gguf(cls, file: GgufFile) -> ChatTemplate:
        """From ``tokenizer.chat_template`` and its named variants."""
        prefix = "tokenizer.chat_template"
        templates = {}
        for key in file.metadata:
            text = file.text(key)
            if text is not None and key == prefix:
                templates[_DEFAULT] = text
            elif text is not None and key.startswith(prefix + "."):
                templates[key.removeprefix(prefix + ".")] = text
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        special = {}
        for name, key in (
            ("bos_token", "bos_token_id"),
            ("eos_token", "eos_token_id"),
            ("unk_token", "unknown_token_id"),
            ("pad_token", "padding_token_id"),
        ):
            index = file.integer(f"tokenizer.ggml.{key}")
            if isinstance(tokens, list) and index is not None and 0 <= index < len(tokens):
                special[name] = str(tokens[index])
        return cls(templates, special_tokens=special)

    @property
    def available(self) -> bool:
        """Whether the model has a template at all."""
        return _DEFAULT in self._sources

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for a conversation. Encode it without adding special tokens.

        Args:
            add_generation_prompt: End with what begins the assistant's answer.
            tools: Tool descriptions in OpenAI's form, for templates that know tools.
            kwargs: Further variables for the template, such as ``enable_thinking``.

        Raises:
            InvalidRequestError: The model has no template, a message is malformed, or the template
                rejects the messages; the message is the template's own.
        """
        from jinja2 import TemplateError

        prepared = [_prepare(message, index) for index, message in enumerate(messages)]
        if not prepared:
            raise InvalidRequestError("messages must not be empty", param="messages")
        if not self.available:
            raise InvalidRequestError(
                "the model has no chat template; use plain completions instead", param="messages"
            )
        name = _TOOL_USE if tools and _TOOL_USE in self._sources else _DEFAULT
        values: dict[str, Any] = {**self._special_tokens, **kwargs}
        values.update(
            messages=prepared,
            add_generation_prompt=add_generation_prompt,
            tools=[dict(tool) for tool in tools] if tools else None,
        )
        # Set last, so that a request's own variables cannot lift the bound.
        values[_STEPS_TAKEN] = [0]
        try:
            return self._template(name).render(values)
        except _RejectedError as error:
            raise InvalidRequestError(str(error), param="messages") from None
        except TemplateError as error:  # syntax, undefined values and breaches of the sandbox
            raise InvalidRequestError(
                f"the model's chat template failed: {error}", param="messages"
            ) from error
        except Exception as error:  # templates run arbitrary expressions on the user's messages
            raise InvalidRequestError(
                f"the model's chat template cannot take these messages "
                f"({type(error).__name__}: {error})",
                param="messages",
            ) from error

    def _template(self, name: str) -> jinja2.Template:
        with self._lock:
            if name not in self._compiled:
                self._compiled[name] = _environment().from_string(self._sources[name])
            return self._compiled[name]


class _RejectedError(Exception):
    """The template called ``raise_exception``."""


def _prepare(message: object, index: int) -> dict[str, Any]:
    """A message as templates expect it: plain text content, tool arguments as objects."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(
            f"messages[{index}] must be an object with a role", param="messages"
        )
    prepared = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        prepared["content"] = _join_parts(content, index)
    elif content is not None and not isinstance(content, str):
        raise InvalidRequestError(
            f"messages[{index}].content must be a string or a list of text parts",
            param="messages",
        )
    elif content is None and not message.get("tool_calls"):
        raise InvalidRequestError(f"messages[{index}] has no content", param="messages")
    if isinstance(message.get("tool_calls"), list):
        prepared["tool_calls"] = [_with_parsed_arguments(call) for call in message["tool_calls"]]
    return prepared


def _join_parts(parts: Iterable[object], index: int) -> str:
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise InvalidRequestError(
                f"messages[{index}].content has a part of type {kind!r}; only text is taken",
                param="messages",
            )
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"messages[{index}].content has a text part without text", param="messages"
            )
        texts.append(text)
    return "\n".join(texts)


def _with_parsed_arguments(call: object) -> object:
    """OpenAI's API carries a call's arguments as JSON text, templates want the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return dict(call)
    return {**call, "function": {**function, "arguments": parsed}}


def _environment() -> jinja2.Environment:
    """A sandbox in which a template can neither reach Python's internals nor run for ever."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import pass_context

    @pass_context
    def bounded(context: Context, items: Iterable[Any]) -> Iterator[Any]:
        counter = context[_STEPS_TAKEN]
        for item in items:
            counter[0] += 1
            if counter[0] > MAX_LOOP_STEPS:
                raise SecurityError(f"its loops take more than {MAX_LOOP_STEPS} steps")
            yield item

    class Sandbox(ImmutableSandboxedEnvironment):
        """Bounds what the stock sandbox leaves open: nested loops and the size of products."""

        intercepted_binops = frozenset(("*", "**"))

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree = super()._parse(source, name, filename)
            for loop in list(tree.find_all(nodes.For)):
                loop.iter = nodes.Filter(
                    loop.iter, "layby_bounded", [], [], None, None, lineno=loop.lineno
                )
            tree.set_environment(self)
            return tree

        def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
            if _result_size(operator, left, right) > MAX_REPEATED_ITEMS:
                raise SecurityError(f"a result of {operator!r} is too large")
            return super().call_binop(context, operator, left, right)

    class GenerationBlock(Extension):
        """``{% generation %}`` marks the assistant's text for training; here it is transparent."""

        tags = {"generation"}  # noqa: RUF012 - as the base class declares it

        def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["layby_bounded"] = bounded
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _result_size(operator: str, left: Any, right: Any) -> float:
    """How large the product or power would be; 0 if it is an ordinary number."""
    if operator == "**":
        if isinstance(left, int) and isinstance(right, int):
            return left.bit_length() * abs(right)
        return 0
    for items, count in ((left, right), (right, left)):
        if isinstance(items, (str, list, tuple)) and isinstance(count, int):
            return len(items) * count
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() + right.bit_length()
    return 0


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON. Jinja's own filter escapes for HTML, which models have not seen in training."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise _RejectedError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
