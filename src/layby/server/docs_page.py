"""The /docs page: one self-contained HTML page made from the OpenAPI description.

It loads nothing from anywhere, so it works on a machine without internet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import escape
from typing import Any, Final

_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --accent: #0a7d5a; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem }
h1 { margin-bottom: 0 } h2 { margin-top: 2.5rem; font-size: 1.15rem }
code, pre { font: 14px/1.45 ui-monospace, monospace }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: 6px; padding: .7rem;
  overflow-x: auto }
.method { background: var(--accent); color: #fff; border-radius: 4px; padding: .1rem .45rem;
  font-size: .8rem; margin-right: .5rem }
.path { font: 600 1.1rem ui-monospace, monospace }
table { border-collapse: collapse; width: 100%; font-size: .9rem }
td, th { border-top: 1px solid var(--line); padding: .3rem .6rem .3rem 0; text-align: left;
  vertical-align: top }
summary { cursor: pointer; margin: .5rem 0 }
.muted { opacity: .7 }
"""


def render_docs(openapi: Mapping[str, Any], base_url: str, model: str) -> str:
    """The page.

    Args:
        openapi: The application's OpenAPI description.
        base_url: How the reader reached the server; goes into the examples.
        model: Name of the served model; likewise.
    """
    info = openapi["info"]
    info_line = (
        f"<p class=muted>{escape(info['version'])} · serving <code>{escape(model)}</code> · "
        '<a href="/openapi.json">openapi.json</a> · <a href="/metrics">metrics</a> · '
        '<a href="/health">health</a></p>'
    )
    key_line = (
        "<p>With <code>--api-key</code>, add <code>-H 'Authorization: Bearer KEY'</code> to calls "
        "other than <code>/health</code>, <code>/metrics</code> and this page.</p>"
    )
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width, initial-scale=1">',
        f"<title>{escape(info['title'])} API</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(info['title'])}</h1>",
        info_line,
        f"<p>{_text(info['description'])}</p>",
        key_line,
    ]
    schemas = openapi["components"]["schemas"]
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            parts.append(_operation(path, method.upper(), operation, schemas, base_url, model))
    parts.append("</body></html>")
    return "\n".join(parts)


def example_curl(
    base_url: str, path: str, model: str, *, method: str = "POST", needs_key: bool = False
) -> str:
    """A command that can be pasted into a shell; the key, if one is needed, is left to fill in."""
    url = _shell_quoted(base_url + path.replace("{model}", model))
    verb = "" if method in ("GET", "POST") else f" -X {method}"
    if method in ("GET", "DELETE"):
        return f"curl{verb} {url}"
    body = json.dumps(_example_body(path, model), ensure_ascii=False)
    key = "  -H 'Authorization: Bearer KEY' \\\n" if needs_key else ""
    header = "  -H 'Content-Type: application/json' \\\n"
    return f"curl{verb} {url} \\\n{key}{header}  -d {_shell_quoted(body)}"


def _example_body(path: str, model: str) -> dict[str, Any]:
    match path:
        case "/v1/chat/completions":
            messages = [{"role": "user", "content": "Name three rivers."}]
            return {"model": model, "messages": messages, "max_tokens": 64, "temperature": 0}
        case "/v1/completions":
            prompt = "Once upon a time"
            return {"model": model, "prompt": prompt, "max_tokens": 64, "temperature": 0}
        case "/v1/requests/{request_id}":
            return {"priority": -1}
        case "/admin/kv-pool":
            return {"blocks": 4096}
        case "/tokenize":
            return {"prompt": "Once upon a time"}
        case _:
            return {"tokens": [1, 2, 3]}


def _shell_quoted(text: str) -> str:
    """Quotes only where the shell needs them, always for JSON."""
    if all(char.isalnum() or char in "-._~:/[]@" for char in text) and "[" not in text:
        return text
    return "'" + text.replace("'", "'\\''") + "'"


def _operation(
    path: str,
    method: str,
    operation: Mapping[str, Any],
    schemas: Mapping[str, Any],
    base_url: str,
    model: str,
) -> str:
    answers = " · ".join(
        f"{status} {_text(answer['description'].removesuffix('.'))}"
        for status, answer in sorted(operation["responses"].items())
        if status != "422"  # FastAPI's own, which install_error_handlers turns into 400
    )
    return (
        f"<h2><span class=method>{method}</span><span class=path>{escape(path)}</span></h2>"
        f"<p>{_text(operation['summary'])}. {_text(operation['description'])}"
        f"<br><span class=muted>{answers}</span></p>"
        f"<pre>{escape(example_curl(base_url, path, model, method=method))}</pre>"
        + _fields(operation, schemas)
    )


def _fields(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    if "requestBody" not in operation:
        return ""
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    return (
        "<details><summary>Fields</summary><table><tr><th>Name<th>Type<th>Default<th>Meaning</tr>"
        f"{_rows(body, schemas)}</table></details>"
    )


def _rows(schema: Mapping[str, Any], schemas: Mapping[str, Any], prefix: str = "") -> str:
    """One row for each field of an object, those of the objects in it after the field itself."""
    described = schemas[schema["$ref"].rpartition("/")[2]]
    required = described.get("required", ())
    rows = ""
    for name, field in described["properties"].items():
        rows += (
            f"<tr><td><code>{escape(prefix + name)}</code><td>{escape(_type(field))}"
            f"<td>{'required' if name in required else escape(_default(field))}"
            f"<td>{_text(field['description'])}</tr>"
        )
        for option in field.get("anyOf", [field]):
            if "$ref" in option:
                rows += _rows(option, schemas, f"{prefix}{name}.")
            elif "$ref" in option.get("items", {}):
                rows += _rows(option["items"], schemas, f"{prefix}{name}[].")
    return rows


def _text(text: str) -> str:
    """Text as HTML; what stands between backticks is code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))


def _type(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        names = [_type(option) for option in field["anyOf"]]
        return " or ".join(name for name in names if name != "null")
    if "$ref" in field:
        return "object"
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(field.get("type", "any"))


def _default(field: Mapping[str, Any]) -> str:
    default = field.get("default")
    return "" if default is None else json.dumps(default)
