"""Finds the format in which a model writes calls of tools, by its chat template."""

from __future__ import annotations

import re

from fabric.contracts import ConfigError
from modalities.answers.json_formats import HermesFormat, Llama3Format, MistralFormat
from modalities.answers.pieces import ToolFormat
from modalities.answers.pythonic_format import PythonicFormat
from modalities.answers.xml_format import Qwen3CoderFormat

TOOL_FORMAT_NAMES = ("auto", "hermes", "llama3", "mistral", "pythonic", "qwen3_coder")
_BLOCKS = re.compile(r"\{[%{].*?[%}]\}", re.DOTALL)
_TOOLS_VARIABLE = re.compile(r"(?<![\w.'\"<])tools\b(?![\w'\">])")


def find_tool_format(name_or_auto: str, template_text: str) -> ToolFormat:
    """Returns the format of this name; for `auto`, the one that the chat template writes. A template that writes none
    gets Hermes, the one that most models know. Raises ConfigError for another name."""
    if name_or_auto not in TOOL_FORMAT_NAMES:
        names = ", ".join(f"`{name}`" for name in TOOL_FORMAT_NAMES)
        raise ConfigError(f"the tool format must be one of {names}, not `{name_or_auto}`")
    name = _written_format(template_text) if name_or_auto == "auto" else name_or_auto
    formats: dict[str, ToolFormat] = {
        "llama3": Llama3Format(),
        "mistral": MistralFormat(has_args_token="[ARGS]" in template_text),
        "pythonic": PythonicFormat(),
        "qwen3_coder": Qwen3CoderFormat(),
    }
    return formats.get(name, HermesFormat())


def _written_format(template_text: str) -> str:
    if "[TOOL_CALLS]" in template_text:
        return "mistral"
    if "<function=" in template_text:
        return "qwen3_coder"
    if "<tool_call>" in template_text:
        return "hermes"
    if "[func_name" in template_text:
        return "pythonic"
    has_llama_marks = "<|python_tag|>" in template_text or "ipython" in template_text
    return "llama3" if has_llama_marks and '"parameters"' in template_text else "hermes"


def template_takes_tools(template_text: str) -> bool:
    """Returns whether the source of a chat template reads the variable `tools`."""
    return any(_TOOLS_VARIABLE.search(block) for block in _BLOCKS.findall(template_text))
