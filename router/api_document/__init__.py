"""Describes the API of a router: `api_document` (in `whole_document`) returns its OpenAPI document, and `document_page`
(in `api_page`) the same as a page.

`operations` lists the operations with their errors (`refusals`) and `examples`. The schemas of requests are those of
the models that parse them (`request_schemas`); those of answers (`answer_schemas`) and of streamed events
(`chunk_schemas`) are written out, and tests compare real answers with them. To add an operation, add it to `operations`
and its schemas to the fitting module. The folder knows nothing of how requests are served.
"""

from router.api_document.api_page import document_page
from router.api_document.examples import SampleFeatures
from router.api_document.operations import ServedApi
from router.api_document.whole_document import api_document

__all__ = ["SampleFeatures", "ServedApi", "api_document", "document_page"]
