"""Which form a template's model writes: found out from the template's source.

Owns the marks by which forms are known. Knows nothing of reading them.
"""

from __future__ import annotations

from bloomery.launcher.chat_output.tool_formats import FORMATS, ToolFormat

THINK_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
)

# The first whose marks are all in the template is taken.
_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("dsml", ("｜DSML｜",)),
    ("deepseek", ("tool▁calls▁begin",)),
    ("qwen-xml", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3", ("<|start_header_id|>", "tools")),
    ("llama3", ("<|python_tag|>",)),
)


def tool_format(template: str) -> ToolFormat:
    """The form of calls; "generic" if the template knows of none."""
    for name, marks in _MARKS:
        if all(mark in template for mark in marks):
            return FORMATS[name]
    return FORMATS["generic"]


def think_tags(template: str, prompt_end: str) -> tuple[str, str]:
    """What opens and closes reasoning; <think> where nothing says otherwise."""
    for tags in THINK_TAGS:
        if tags[1] in template or tags[0] in prompt_end:
            return tags
    return THINK_TAGS[0]


def opens_reasoning(prompt_end: str, opening: str) -> bool:
    """Whether the prompt ends with reasoning opened and nothing in it."""
    return prompt_end.rstrip().endswith(opening)
