"""Says how models write what is not plain text in their answers: reasoning and calls of tools.

`find_tool_format` and `find_reasoning_format` choose the formats by a model's chat template. A `ToolFormat` has a
grammar, which makes a model write calls whose arguments fit the schemas of the tools, and a parser; `answer_parser`
combines the parsers for reasoning and calls. A parser reads the text of a choice once, in any parts, and loses none of
it: what is no call is text.

`pieces` defines the parts of an answer and the interface of a format. `json_formats` has the formats in which a call is
JSON (Hermes, Llama 3, Mistral), `json_calls` reads such JSON, and `json_scanner` follows a value without building it.
`pythonic_format` has calls that are written in Python (Llama 4), and `python_values` reads their values. `xml_format`
has the format of Qwen3-Coder, `xml_grammar` its grammar, and `parameter_types` the types of its values. `call_grammars`
has what all grammars share, `closed_schemas` keeps models from inventing properties, `text_source` what all parsers
share, `reasoning` the marks of reasoning, and `tool_formats` the search for a format.

The router uses this folder. It knows nothing of HTTP, of OpenAI's formats, of tokens or of llguidance: grammars are
text.
"""

from modalities.answers.call_grammars import JSON_WHITESPACE, arguments_grammar
from modalities.answers.closed_schemas import closed_schema
from modalities.answers.json_scanner import JsonScanner
from modalities.answers.pieces import (
    AnswerParser,
    AnswerPiece,
    ReasoningPiece,
    TextPiece,
    ToolCallArguments,
    ToolCallStart,
    ToolChoice,
    ToolFormat,
    ToolSpec,
    join_pieces,
)
from modalities.answers.reasoning import ReasoningFormat, after_reasoning, answer_parser, find_reasoning_format
from modalities.answers.tool_formats import TOOL_FORMAT_NAMES, find_tool_format, template_takes_tools

__all__ = [
    "JSON_WHITESPACE",
    "TOOL_FORMAT_NAMES",
    "AnswerParser",
    "AnswerPiece",
    "JsonScanner",
    "ReasoningFormat",
    "ReasoningPiece",
    "TextPiece",
    "ToolCallArguments",
    "ToolCallStart",
    "ToolChoice",
    "ToolFormat",
    "ToolSpec",
    "after_reasoning",
    "answer_parser",
    "arguments_grammar",
    "closed_schema",
    "find_reasoning_format",
    "find_tool_format",
    "join_pieces",
    "template_takes_tools",
]
