"""The HTTP application: which paths there are, and what each of them does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

import layby
from layby.engine.async_engine import LONG_WORK, PROMPT_WORK
from layby.errors import ConfigError, InvalidRequestError, counted, prefixed, shown
from layby.server.admin import ADMIN_BODIES, add_admin_routes
from layby.server.answers import ChatAnswer, CompletionAnswer, Echo
from layby.server.docs_page import render_docs
from layby.server.durable import DurableRequests, digest_of
from layby.server.errors import UnknownModelError, error_answer, install_error_handlers
from layby.server.generation import Call, respond
from layby.server.http import ApiKeyGuard, Edge, json_response, read_body
from layby.server.live_calls import LiveCalls
from layby.server.owners import Owners
from layby.server.protocol import (
    Body,
    ChatCompletion,
    ChatCompletionRequest,
    ChatMessage,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    ErrorAnswer,
    GenerationRequest,
    Health,
    ModelCard,
    ModelList,
    PriorityRequest,
    Text,
    TokenizeRequest,
    Tokens,
)
from layby.server.requests import add_request_routes

if TYPE_CHECKING:
    from layby.engine import AsyncEngine

_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SET_BY_FIELDS: Final = frozenset({"self", "messages", "add_generation_prompt", "tools"})
_BAD_INPUT: Final[dict[int | str, dict[str, Any]]] = {
    400: {"model": ErrorAnswer, "description": "Bad input; names the parameter"}
}
_DESCRIPTION: Final = (
    "An OpenAI-compatible server that parks half-finished answers instead of losing them when "
    "memory runs short. Point any OpenAI client at `/v1`."
)


def create_app(
    engine: AsyncEngine,
    *,
    api_key: str | Sequence[str] | None = None,
    admin_api_key: str | None = None,
    durable: DurableRequests | None = None,
    isolate_prefix_cache: bool = False,
) -> FastAPI:
    """Make the application around a started engine.

    Args:
        engine: Runs the requests. The caller starts it and shuts it down.
        api_key: One key or several, any of which opens the paths that are not in
            ``OPEN_PATHS``; None asks for none.
        admin_api_key: Opens the paths under ``/admin/``; None: there are none.
        durable: Remembers calls beyond their connection, and has paths to come back to them;
            None forgets each with its connection. The caller recovers and closes it.
        isolate_prefix_cache: Calls with different keys share no cached prefixes.

    Raises:
        ConfigError: A key is empty or not ASCII, the admin's is one that others have, too, or
            prefixes are to be isolated without keys.
    """
    app = FastAPI(
        title="Layby",
        version=layby.__version__,
        description=_DESCRIPTION,
        docs_url=None,  # FastAPI's own page loads its scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(Edge, engine=engine)
    keys, owners = access_of(api_key, admin_api_key, isolate_prefix_cache)
    if keys or admin_api_key is not None:
        app.add_middleware(ApiKeyGuard, api_keys=keys, admin_api_key=admin_api_key)
    install_error_handlers(app)
    created = int(time.time())
    live = LiveCalls()
    _add_generating_routes(app, engine, owners, live, durable)
    add_request_routes(app, engine, owners, live, durable)
    _add_model_routes(app, engine, created)
    _add_operator_routes(app, engine)
    if admin_api_key is not None:
        add_admin_routes(app, engine)
    _describe_bodies(app, () if admin_api_key is None else ADMIN_BODIES)
    return app


def access_of(
    api_key: str | Sequence[str] | None, admin_api_key: str | None, isolate_prefix_cache: bool
) -> tuple[list[str], Owners]:
    """The keys that open the API, and who owns what by them.

    Raises:
        ConfigError: As ``create_app``; to be known before an engine is made.
    """
    keys = _api_keys(api_key)
    if not set(keys).isdisjoint([] if admin_api_key is None else _api_keys([admin_api_key])):
        raise ConfigError("the admin's API key must differ from the others")
    return keys, Owners(has_keys=bool(keys), isolates_prefixes=isolate_prefix_cache)


def _api_keys(api_key: str | Sequence[str] | None) -> list[str]:
    keys = [api_key] if isinstance(api_key, str) else list(api_key or ())
    for key in keys:
        if not key.isascii() or not key.isprintable() or key.strip() != key or not key:
            raise ConfigError("an API key must be non-empty ASCII without spaces around it")
    return keys


def _add_generating_routes(
    app: FastAPI,
    engine: AsyncEngine,
    owners: Owners,
    live: LiveCalls,
    durable: DurableRequests | None,
) -> None:
    busy: dict[int | str, dict[str, Any]] = {
        **_BAD_INPUT,
        429: {
            "model": ErrorAnswer,
            "description": "The queue is full, or memory saturated; see Retry-After",
        },
        503: {"model": ErrorAnswer, "description": "The engine takes no work"},
    }

    @app.post(
        "/v1/chat/completions",
        summary="Continue a conversation",
        description="The messages go through the model's chat template. With `stream`, the answer "
        "comes as server-sent events, ended by `data: [DONE]`.",
        responses={200: {"model": ChatCompletion, "description": "The answer"}, **busy},
        openapi_extra=_takes(ChatCompletionRequest),
    )
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, ChatCompletionRequest, engine)
        _check_model(engine, body.model)
        params = body.sampling_params()
        prompt = await _encode_chat(
            engine, body.messages, body.add_generation_prompt, body.chat_template_kwargs
        )
        owner = owners.of(request)
        salt = owners.cache_salt(owner, body.cache_salt)
        call = _call(body, [prompt], params, salt, prompt_param="messages", begins_text=True)
        if durable is not None:
            digest = digest_of("chat", body)
            return await durable.respond(request, call, owner=owner, kind="chat", digest=digest)
        chat_answer = ChatAnswer(engine.model_name, engine.tokenizer)
        return await respond(engine, request, call, chat_answer, live=live, owner=owner)

    @app.post(
        "/v1/completions",
        summary="Continue a text",
        description="The prompt is taken as it stands, without a chat template. Streams as "
        "`/v1/chat/completions` does.",
        responses={200: {"model": Completion, "description": "The answer"}, **busy},
        openapi_extra=_takes(CompletionRequest),
    )
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionRequest, engine)
        _check_model(engine, body.model)
        params = body.sampling_params()
        body.check_queue(engine.max_queued_seqs)
        prompts: Sequence[str | list[int]] = body.prompts
        echoes: list[Echo] = []
        if body.echo:
            work = sum(map(len, prompts)) + PROMPT_WORK * len(prompts)
            prompts, echoes = await engine.prepare_in_time(partial(_echoes, engine, body), work)
        owner = owners.of(request)
        salt = owners.cache_salt(owner, body.cache_salt)
        call = _call(body, prompts, params, salt, names_index=body.is_list_of_prompts)
        if durable is not None:
            kind, digest = "completion", digest_of("completion", body)
            return await durable.respond(
                request, call, owner=owner, kind=kind, digest=digest, echoes=echoes
            )
        answer = CompletionAnswer(engine.model_name, engine.tokenizer, params.n, echoes)
        return await respond(engine, request, call, answer, live=live, owner=owner)


def _call(
    body: GenerationRequest,
    prompts: Sequence[str | list[int]],
    params: layby.SamplingParams,
    cache_salt: str,
    *,
    prompt_param: str = "prompt",
    names_index: bool = False,
    begins_text: bool = False,
) -> Call:
    return Call(
        prompts=prompts,
        params=params,
        priority=body.priority,
        cache_salt=cache_salt,
        prompt_param=prompt_param,
        names_index=names_index,
        stream=body.stream,
        include_usage=body.stream_options.include_usage,
        begins_text=begins_text,
    )


def _check_model(engine: AsyncEngine, model: str | None) -> None:
    if model is not None and model != engine.model_name:
        raise UnknownModelError(model, engine.model_name)


async def _encode_chat(
    engine: AsyncEngine,
    messages: Sequence[ChatMessage],
    add_generation_prompt: bool,
    template_kwargs: dict[str, Any],
) -> list[int]:
    """Token ids of a conversation. The template writes all special tokens itself."""
    if engine.chat_template is None:
        raise InvalidRequestError(
            f"{engine.model_name} has no chat template: it takes plain prompts at /v1/completions",
            param="messages",
        )
    reserved = _SET_BY_FIELDS & template_kwargs.keys()
    if reserved:
        raise InvalidRequestError(
            f"chat_template_kwargs may not hold {min(reserved)}", param="chat_template_kwargs"
        )
    num_chars = sum(len(message.content) for message in messages)
    engine.check_chars(num_chars, "messages")
    render = partial(
        engine.chat_template.render,
        [message.for_template() for message in messages],
        add_generation_prompt=add_generation_prompt,
        **template_kwargs,
    )
    # What a template makes of further variables cannot be foreseen.
    work = LONG_WORK + 1 if template_kwargs else num_chars + PROMPT_WORK * len(messages)
    return await engine.prepare_in_time(
        lambda: engine.encode(render(), add_special_tokens=False, param="messages"), work
    )


def _echoes(
    engine: AsyncEngine, body: CompletionRequest
) -> tuple[list[str | list[int]], list[Echo]]:
    """The prompts as the engine will see them, and as the answer repeats them.

    With log-probabilities the prompts are encoded here, so that each number has its token.
    """
    prompts: list[str | list[int]] = []
    echoes = []
    for index, prompt in enumerate(body.prompts):
        if isinstance(prompt, str):
            ids: list[int] = []
            if body.logprobs is not None:
                with prefixed(f"prompt[{index}]", when=body.is_list_of_prompts):
                    ids = engine.encode(prompt)
            prompts.append(ids or prompt)
            echoes.append(Echo(prompt, ids))
        else:
            _check_vocabulary(engine, prompt, f"prompt[{index}]", "prompt")
            prompts.append(prompt)
            echoes.append(Echo(engine.tokenizer.decode(prompt), prompt))
    return prompts, echoes


def _check_vocabulary(engine: AsyncEngine, ids: Sequence[int], name: str, param: str) -> None:
    size = engine.tokenizer.vocab_size
    for token in ids:
        if not 0 <= token < size:
            raise InvalidRequestError(
                f"{name} holds token id {shown(token)}, but the vocabulary has "
                f"{counted(size, 'token')}",
                param=param,
            )


def _add_model_routes(app: FastAPI, engine: AsyncEngine, created: int) -> None:
    def card() -> ModelCard:
        return {
            "id": engine.model_name,
            "object": "model",
            "created": created,
            "owned_by": "layby",
            "max_model_len": engine.max_model_len,
        }

    @app.get(
        "/v1/models",
        summary="List the models",
        description="A server has one.",
        responses={200: {"model": ModelList, "description": "The list"}},
    )
    async def list_models() -> Response:
        return json_response({"object": "list", "data": [card()]})

    @app.get(
        "/v1/models/{model:path}",
        summary="Describe a model",
        description="`max_model_len` is its context: most tokens of prompt and answer together.",
        responses={
            200: {"model": ModelCard, "description": "The model"},
            404: {"model": ErrorAnswer, "description": "There is no such model"},
        },
    )
    async def retrieve_model(model: str) -> Response:
        if model != engine.model_name:
            # In a path it is a missing page; in a body it is bad input.
            _, body, _ = error_answer(UnknownModelError(model, engine.model_name))
            return json_response(body, 404)
        return json_response(card())

    @app.post(
        "/tokenize",
        summary="Text or messages to token ids",
        description="What a prompt or a conversation costs, without running it.",
        responses={200: {"model": Tokens, "description": "The ids, and their count"}, **_BAD_INPUT},
        openapi_extra=_takes(TokenizeRequest),
    )
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeRequest, engine)
        _check_model(engine, body.model)
        if (body.prompt is None) == (not body.messages):
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        if body.messages:
            ids = await _encode_chat(engine, body.messages, body.add_generation_prompt, {})
        else:
            assert body.prompt is not None  # one of the two is there
            encode = partial(engine.encode, body.prompt, body.add_special_tokens)
            ids = await engine.prepare_in_time(encode, len(body.prompt))
        return json_response(
            {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids}
        )

    @app.post(
        "/detokenize",
        summary="Token ids to text",
        description="The inverse of `/tokenize`; special tokens are shown.",
        responses={200: {"model": Text, "description": "The text"}, **_BAD_INPUT},
        openapi_extra=_takes(DetokenizeRequest),
    )
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeRequest, engine)
        _check_model(engine, body.model)

        def decode() -> str:
            _check_vocabulary(engine, body.tokens, "tokens", "tokens")
            # All tokens are shown, special ones too: the inverse of /tokenize.
            return engine.tokenizer.decode(body.tokens, False)

        text = await engine.prepare_in_time(decode, len(body.tokens))
        return json_response({"prompt": text})


def _add_operator_routes(app: FastAPI, engine: AsyncEngine) -> None:
    @app.get(
        "/health",
        summary="Whether the engine takes work",
        description="For probes and load balancers; needs no key. `pressure` is that on memory: "
        "while it is `saturated`, new work of the lowest class gets 429.",
        responses={
            200: {"model": Health, "description": "It does"},
            503: {"model": Health, "description": "Draining or dead, with the reason"},
        },
    )
    async def health() -> Response:
        pressure = engine.stats().pressure
        if engine.is_draining:
            reason = "the engine is shutting down: it finishes what it accepted"
            body = {"status": "draining", "pressure": pressure, "reason": reason}
            return json_response(body, 503)
        if not engine.is_healthy:
            reason = str(engine.error or "the engine has not been started")
            return json_response({"status": "dead", "pressure": pressure, "reason": reason}, 503)
        return json_response({"status": "ok", "pressure": pressure})

    @app.get(
        "/metrics",
        summary="Prometheus metrics",
        description="Queues, pools, preemptions, latencies; needs no key.",
        responses={200: {"content": {"text/plain": {}}, "description": "Prometheus' text format"}},
    )
    async def metrics() -> Response:
        return Response(engine.metrics_text(), media_type=_METRICS_TYPE)

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        try:
            base_url = str(request.base_url).rstrip("/")
        except ValueError:  # a Host header that is no host
            base_url = "http://127.0.0.1:8000"
        return HTMLResponse(render_docs(app.openapi(), base_url, engine.model_name))

    @app.get("/", include_in_schema=False)
    async def root() -> RedirectResponse:
        return RedirectResponse("/docs")


def _takes(model: type[Body]) -> dict[str, Any]:
    """The part of a route's description that names its body; ``read_body`` does the reading."""
    return {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}
            },
        }
    }


def _describe_bodies(app: FastAPI, others: Sequence[type[Body]]) -> None:
    """Add the models that ``_takes`` refers to, and others, to the app's OpenAPI description."""
    describe_routes = app.openapi
    models: list[type[Body]] = [
        ChatCompletionRequest,
        CompletionRequest,
        TokenizeRequest,
        DetokenizeRequest,
        PriorityRequest,
        *others,
    ]

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schemas = describe_routes().setdefault("components", {}).setdefault("schemas", {})
            for model in models:
                described = model.model_json_schema(ref_template="#/components/schemas/{model}")
                schemas.update(described.pop("$defs", {}))
                schemas[model.__name__] = described
        assert app.openapi_schema is not None  # FastAPI caches what it described
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # the way FastAPI documents
