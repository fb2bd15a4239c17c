"""Compares answers with the OpenAPI document that describes them: `Description` finds what the document says of an
answer, and checks bodies and events against its schemas. It knows nothing of clusters."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema
from edge_client import events


class Description:
    """A `Description` reads one OpenAPI document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def operation(self, method: str, path: str) -> dict[str, Any]:
        found: dict[str, Any] = self.document["paths"][path][method]
        return found

    def examples(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Returns all examples of bodies: the path, the name and the body of each."""
        return [
            (path, name, example["value"])
            for path, methods in self.document["paths"].items()
            for operation in methods.values()
            for content in operation.get("requestBody", {}).get("content", {}).values()
            for name, example in content.get("examples", {}).items()
        ]

    def response(self, method: str, path: str, status: int) -> dict[str, Any]:
        """Returns what the document says of a status. Raises KeyError if it says nothing."""
        named = self.operation(method, path)["responses"][str(status)]
        if "$ref" not in named:
            return dict(named)
        return dict(self.document["components"]["responses"][named["$ref"].rpartition("/")[2]])

    def flaws(self, method: str, path: str, answer: httpx.Response) -> list[str]:
        """Returns how an answer differs from what the document says of it."""
        described = self.response(method, path, answer.status_code)
        media_type = answer.headers["content-type"].partition(";")[0]
        schema = described["content"][media_type]["schema"]
        flaws = [
            f"no header {name}"
            for name in described["headers"]
            if self.document["components"]["headers"][name]["required"] and name not in answer.headers
        ]
        if media_type == "application/json":
            return flaws + self.mismatches(answer.json(), schema)
        if media_type == "text/event-stream":
            for event in payloads(answer):
                flaws += self.mismatches(event, schema["properties"]["data"]["anyOf"][-1]["contentSchema"])
        return flaws

    def mismatches(self, value: object, schema: dict[str, Any]) -> list[str]:
        """Returns how a JSON value differs from a schema of the document."""
        whole = {**schema, "components": self.document["components"]}
        validator = jsonschema.Draft202012Validator(whole)
        return [f"{list(error.absolute_path)}: {error.message[:300]}" for error in validator.iter_errors(value)]


async def description_of(client: httpx.AsyncClient, headers: dict[str, str] | None = None) -> Description:
    """Returns the document that a router serves. Raises HTTPStatusError if it serves none, or none without a key."""
    return Description((await client.get("/openapi.json", headers=headers)).raise_for_status().json())


def payloads(answer: httpx.Response) -> list[Any]:
    """Returns the data of the events of a streamed answer, without `[DONE]`."""
    blocks = [block.partition("data: ")[2] for block in answer.text.split("\n\n") if "data: " in block]
    return [event for event in events("".join(f"data: {block}\n\n" for block in blocks)) if event != "[DONE]"]
