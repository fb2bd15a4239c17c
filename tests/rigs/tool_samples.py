"""Holds tools, calls of tools and a template that reasons, for tests of the HTTP API over fake members."""

from __future__ import annotations

from deploy.testing.tiny_family import TEMPLATE

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells the weather.", "parameters": CITY}},
    {"type": "function", "function": {"name": "time"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
THINKING = TEMPLATE.replace(
    "<|turn|>assistant\n{% endif %}",
    "<|turn|>assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>\n"
    "{% else %}<think></think>{% endif %}{% endif %}",
)
"""Makes a prompt end inside the reasoning, unless the request turns it off."""
