"""The description of the interface (OpenAPI 3.1), made from the routes and their types."""

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from scheduler.gateway.calls import HttpError, NoQuery, Route
from scheduler.gateway.routes_orders import COMMANDS, ORDERS
from transport.errors import LocalProtocolError
from transport.ids import NAME_RULE

NAME: Final = "[a-z0-9][a-z0-9._-]{0,47}"
WHEEL: Final = r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,200}\.whl"
PARTS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    **{
        name: (NAME, {"type": "string", "pattern": f"^{NAME}$", "description": NAME_RULE})
        for name in ("run", "policy", "agent")
    },
    "subject": (".{1,200}", {"type": "string", "minLength": 1, "maxLength": 200}),
    "wheel": (WHEEL, {"type": "string", "pattern": f"^{WHEEL}$"}),
    "command": ("|".join(COMMANDS), {"type": "string", "enum": list(COMMANDS)}),
    "order": ("|".join(ORDERS), {"type": "string", "enum": list(ORDERS)}),
}
"""What ``{name}`` in a path is: a regular expression and a schema."""

_PART = re.compile(r"\{(\w+)\}")
_REFUSALS: Final = {
    "401": "No token, or one that does not (or no longer) count.",
    "403": "The token's role may not do this.",
    "429": "Too often, or a quota is full; Retry-After says when to come back where it is known.",
}


def path_pattern(path: str) -> re.Pattern[str]:
    """What a route's path matches, with a group for each part."""
    pattern, end = "", 0
    for match in _PART.finditer(path):
        pattern += re.escape(path[end : match.start()]) + f"(?P<{match[1]}>{PARTS[match[1]][0]})"
        end = match.end()
    return re.compile(pattern + re.escape(path[end:]))


def description(routes: Sequence[Route], version: str) -> dict[str, Any]:
    """The whole description, JSON-ready."""
    kinds = [HttpError, *(route.result for route in routes), *(r.query for r in routes)]
    kinds += [route.body for route in routes if route.body is not None]
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    results = schemas[1 : 1 + len(routes)]
    bodies = iter(schemas[1 + 2 * len(routes) :])
    paths: dict[str, dict[str, Any]] = {}
    for route, result in zip(routes, results, strict=True):
        body = next(bodies) if route.body is not None else None
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, result, body)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "farflow",
            "version": version,
            "summary": "A rollout scheduler's state, orders, jobs and events.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, result: dict[str, Any], body: dict[str, Any] | None) -> dict[str, Any]:
    roles = sorted(role.value for role in route.roles)
    said = {route.content_type: {"schema": result}}
    if route.path == "/v1/events":
        said["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/HttpError"}}}
    found: dict[str, Any] = {
        "operationId": _operation_id(route),
        "summary": route.summary,
        "description": f"Roles: {', '.join(roles)}." if roles else "No token is needed.",
        "parameters": [*_path_parameters(route.path), *_query_parameters(route.query)],
        "responses": {
            "200": {"description": "Done.", "content": said},
            **({code: {"description": text, "content": error} for code, text in _REFUSALS.items()}
               if roles else {}),
            "default": {"description": "Refused, with a code and what to do.", "content": error},
        },
        "security": [{"token": []}] if roles else [],
    }  # fmt: skip
    if body is not None:
        content = {"application/json": {"schema": body}}
        if route.toml is not None:
            content["application/toml"] = {"schema": {"type": "string"}}
        found["requestBody"] = {"required": not route.body_optional, "content": content}
    return found


def _operation_id(route: Route) -> str:
    words = re.findall(r"\w+", route.path.removeprefix("/v1"))
    return "_".join([route.method.lower(), *words])


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": PARTS[name][1]}
        for name in _PART.findall(path)
    ]


def _query_parameters(query: type[msgspec.Struct]) -> list[dict[str, Any]]:
    if query is NoQuery:
        return []
    _, components = msgspec.json.schema_components([query])
    schema = components[query.__name__]
    found = []
    for name, kind in schema["properties"].items():
        if "$ref" in str(kind):
            raise LocalProtocolError(f"{query.__name__}.{name}: a query has plain values")
        found.append({"name": name, "in": "query", "required": False, "schema": kind})
    return found
