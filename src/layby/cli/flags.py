"""Flags made of the fields of a dataclass: one for each, so that the two cannot drift apart.

A command takes the finished object; the flags stand in its place on the command line::

    @takes(engine=engine_flags(), sampling=sampling_flags(max_tokens=256))
    def generate(prompts: list[str], engine: EngineConfig, sampling: SamplingParams) -> None: ...
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from layby.engine.config import EngineConfig
from layby.errors import ConfigError, InvalidRequestError, QueueFullError
from layby.sampling_params import SamplingParams

_NONE = "none"
"""How None is said on the command line."""

_EXPECTED = {
    "int_parsing": "must be an integer",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
}
"""What typer's checks find, by the names that pydantic has for it."""

_SAMPLING: dict[str, tuple[str, str | None]] = {
    "n": ("Samples drawn for each prompt.", "samples"),
    "max_tokens": (
        "Most tokens to generate. none: as many as the context and the KV cache hold.",
        "tokens",
    ),
    "min_tokens": ("Generate so many before the text may end.", "tokens"),
    "temperature": ("0 is greedy; larger is more random.", None),
    "top_p": ("Keep the smallest set of tokens whose probability reaches this.", "probability"),
    "top_k": ("Keep this many most likely tokens; 0: all.", "tokens"),
    "min_p": ("Drop tokens less likely than this share of the most likely one.", "share"),
    "repetition_penalty": ("Divides the logits of tokens seen before; 1: off.", "factor"),
    "presence_penalty": ("Subtracted once from the logits of generated tokens.", "logits"),
    "frequency_penalty": ("Subtracted from them once per occurrence.", "logits"),
    "logit_bias": ("ID=BIAS: add BIAS to the logit of token ID; may be repeated.", "logits"),
    "seed": ("Makes the answer repeatable. none: another one each time.", None),
    "stop": ("Text that ends the answer and is not part of it; may be repeated.", "text"),
    "stop_token_ids": ("Token that ends the answer; may be repeated.", "token id"),
    "ignore_eos": ("Go on past the model's own end.", None),
    "logprobs": ("Log-probabilities of each token and of so many others.", "tokens"),
    "prompt_logprobs": ("The same for the prompt's tokens.", "tokens"),
}
"""Help and unit of every field of SamplingParams. A new field without an entry is an error."""


@dataclass(frozen=True, slots=True)
class FlagGroup:
    """Parameters of a command that together make one object.

    Attributes:
        parameters: What typer sees.
        build: Takes their values by name and makes the object.
    """

    parameters: Sequence[inspect.Parameter]
    build: Callable[..., Any]


def engine_flags(
    *, model_argument: bool = False, without: Collection[str] = (), **defaults: Any
) -> FlagGroup:
    """Flags that make an :class:`EngineConfig`.

    Args:
        model_argument: The model may also be named by an argument, without a flag.
        without: Fields that get no flag.
        defaults: Where they differ from those of the fields.
    """
    hints = get_type_hints(EngineConfig)
    parameters = [
        _flag(
            option.name,
            Literal[option.metadata["choices"]]
            if option.metadata["choices"]
            else hints[option.name],
            defaults.get(option.name, option.default),
            help_text=option.metadata["help"],
            unit=option.metadata["unit"],
        )
        for option in dataclasses.fields(EngineConfig)
        if option.name not in without
    ]
    if not model_argument:
        return FlagGroup(parameters, EngineConfig.from_options)
    argument = typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
    positional = inspect.Parameter(
        "positional_model",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, argument],
    )
    return FlagGroup([positional, *parameters], _engine_config)


def sampling_flags(*, without: Collection[str] = (), **defaults: Any) -> FlagGroup:
    """Flags that make a :class:`SamplingParams`; arguments as those of ``engine_flags``."""
    hints = get_type_hints(SamplingParams)
    parameters = []
    for option in dataclasses.fields(SamplingParams):
        if option.name in without:
            continue
        help_text, unit = _SAMPLING[option.name]
        annotation = _on_command_line(hints[option.name])
        # A field of several values has none by default.
        default = [] if get_origin(annotation) is list else option.default
        parameters.append(
            _flag(
                option.name,
                annotation,
                defaults.get(option.name, default),
                help_text=help_text,
                unit=unit,
            )
        )
    return FlagGroup(parameters, _sampling_params)


def takes(**groups: FlagGroup) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace each parameter of a command that is named here by the flags of its group.

    An error that is about a setting names the flag, as it is typed, and tells where to look it up.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in signature.parameters.values():
            if parameter.name in groups:
                parameters += groups[parameter.name].parameters
            else:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        names = [flag.name for flag in parameters]
        # Typer hands the context to a parameter of this type; it is no flag.
        context_parameter = inspect.Parameter(
            "typer_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context
        )
        parameters.append(context_parameter)

        @functools.wraps(command)
        def call(*, typer_context: typer.Context, **values: Any) -> None:
            try:
                for name, group in groups.items():
                    own = {flag.name: values.pop(flag.name) for flag in group.parameters}
                    values[name] = group.build(**own)
                command(**values)
            except (ConfigError, InvalidRequestError, QueueFullError) as error:
                message = with_flags(str(error), names)
                if message != str(error):
                    error.args = (message,)
                    error.add_note(f"see: {typer_context.command_path} --help")
                raise

        vars(call)["__signature__"] = signature.replace(parameters=parameters)
        call.__annotations__ = {flag.name: flag.annotation for flag in parameters}
        return call

    return decorate


def with_flags(message: str, names: Collection[str]) -> str:
    """A message about settings, with each of these names as the flag that sets it.

    A name of one word, such as ``model``, may just be that word: it counts only where the message
    says what it must be.
    """
    of_one_word = [name for name in names if "_" not in name]
    of_several = [name for name in names if "_" in name]
    pattern = rf"(?<![\w-])(?:{'|'.join(of_several)})(?!\w)|^(?:{'|'.join(of_one_word)})(?= must )"
    return re.sub(pattern, lambda found: _as_flag(found[0]), message)


def in_own_words(error: typer.BadParameter) -> str:
    """What is wrong with the value of a flag, without the terms of the library that checked it."""
    errors = getattr(error.__cause__, "errors", None)
    if errors is None:
        return error.message
    fault = errors()[0]
    if fault["type"] == "value_error":  # raised by a parser of ours
        return str(fault["ctx"]["error"])
    if fault["type"] not in _EXPECTED:
        return error.message
    return f"{_EXPECTED[fault['type']].format_map(fault.get('ctx', {}))}, got {fault['input']!r}"


def _as_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _flag(
    name: str, annotation: Any, default: Any, *, help_text: str, unit: str | None
) -> inspect.Parameter:
    is_optional = type(None) in get_args(annotation)
    if not default and default not in (0, ""):  # None, or a list of nothing
        # Where the help says what comes instead, "none" would only confuse.
        shown: bool | str = False if "Default:" in help_text else _NONE
    else:
        shown = True
    option: Any = typer.Option(
        _as_flag(name) + _off_switch(name, annotation),
        help=f"{help_text} ({unit})" if unit else help_text,
        show_default=shown,
        parser=_or_none(annotation) if is_optional else None,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[annotation, option],
    )


def _off_switch(name: str, annotation: Any) -> str:
    return f"/--no-{name.replace('_', '-')}" if annotation is bool else ""


def _or_none(annotation: Any) -> Callable[[Any], Any]:
    """A parser of one value, or of ``none``."""
    kind = next(part for part in get_args(annotation) if part is not type(None))
    wanted = {int: "an integer", float: "a number", str: "text"}[kind]

    def parse(text: Any) -> Any:
        if str(text).lower() == _NONE:
            return None
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"must be {wanted} or {_NONE}, got {text!r}") from None

    return parse


def _on_command_line(annotation: Any) -> Any:
    """The type of a flag for a field of this type: several values are a repeated flag."""
    origin = get_origin(annotation)
    if origin is tuple:
        return list[get_args(annotation)[0]]  # type: ignore[misc]  # a type made at run time
    if origin in (Union, types.UnionType) or origin is None:
        return annotation
    return list[str]


def _engine_config(*, positional_model: str | None, model: str, **options: Any) -> EngineConfig:
    if positional_model is None:
        return EngineConfig.from_options(model=model, **options)
    if model not in (positional_model, EngineConfig().model):
        raise ConfigError(
            f"two models are named, {positional_model!r} and --model {model!r}; give one"
        )
    return EngineConfig.from_options(model=positional_model, **options)


def _sampling_params(*, logit_bias: Sequence[str] = (), **options: Any) -> SamplingParams:
    return SamplingParams(logit_bias=dict(map(_token_bias, logit_bias)), **options)


def _token_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise InvalidRequestError(
            f"logit_bias must have the form ID=BIAS, such as 42=-1.5; got {text!r}",
            param="logit_bias",
        ) from None
