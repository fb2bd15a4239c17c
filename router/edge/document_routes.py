"""Serves the description of the API, as an OpenAPI document and as a page. Both are made when one of them is first
asked for, and kept.

The module knows nothing of what the document says.
"""

from __future__ import annotations

from functools import cached_property
from importlib import metadata
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from modalities.family import TakesFeatures
from router.api_document import SampleFeatures, ServedApi, api_document, document_page
from router.edge.access import request_label
from router.edge.request_pages import PAGE_HEADERS
from router.service import RouterService


class DocumentEdge:
    """A `DocumentEdge` holds the handlers of the description of one router's API."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    @cached_property
    def _document(self) -> dict[str, Any]:
        config = self._service.config
        return api_document(
            ServedApi(
                config.model_name,
                self._service.modalities,
                has_embeddings=config.embeddings != "off",
                asks_for_keys=self._service.keys.asks_for_keys,
                version=metadata.version("weft"),
                features=self._features(),
                voices=() if config.speech is None else config.speech.voices,
                adapters=tuple(config.adapters),
            )
        )

    def _features(self) -> SampleFeatures | None:
        """Returns features that the server takes in place of a picture, or None if it takes none."""
        family = self._service.family
        is_taken = self._service.config.takes_image_embeds and "image" in self._service.modalities
        if not is_taken or not isinstance(family, TakesFeatures):
            return None
        least = family.least_features()
        return SampleFeatures(
            least.num_tokens, family.shape.num_levels * family.shape.hidden_size, least.grid, least.size
        )

    @cached_property
    def _json(self) -> bytes:
        return msgspec.json.encode(self._document)

    @cached_property
    def _page(self) -> str:
        return document_page(self._document)

    async def as_json(self, request: Request) -> Response:
        """Returns the OpenAPI document."""
        headers = {"x-request-id": request_label(request.scope)}
        return Response(self._json, media_type="application/json", headers=headers)

    async def as_page(self, request: Request) -> Response:
        """Returns the document as a page for people."""
        return Response(self._page, headers=PAGE_HEADERS | {"x-request-id": request_label(request.scope)})
