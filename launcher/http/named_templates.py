"""Chat templates by the names that llama-server's --chat-template takes, for files that have none or a wrong one.

Owns the sources. Each writes a conversation of system, user and assistant messages; tools need the file's own template.
"""

from __future__ import annotations

from bloomery.launcher.command_line import UsageError
from bloomery.runtime.chat_template import CHATML


def _turns(system: str, user: str, assistant: str, opening: str, *, strip: bool = False, before: str = "") -> str:
    """A template in which every message stands between fixed texts; `%` is where its content goes."""

    def written(shape: str) -> str:
        head, _, tail = shape.partition("%")
        content = "m['content'] | trim" if strip else "m['content']"
        return "{{ " + f"{head!r} + ({content}) + {tail!r}" + " }}"

    return (
        f"{{{{ {before!r} }}}}"
        "{% for m in messages %}"
        "{% if m['role'] in ('system', 'developer') %}"
        + written(system)
        + "{% elif m['role'] == 'assistant' %}"
        + written(assistant)
        + "{% else %}"
        + written(user)
        + "{% endif %}{% endfor %}"
        + f"{{% if add_generation_prompt %}}{{{{ {opening!r} }}}}{{% endif %}}"
    )


def _system_in_user(user: str, assistant: str, *, joint: str = "\n\n", opening: str = "", strip: bool = False) -> str:
    """A template whose system message is put in front of the next user message."""

    def written(shape: str, content: str) -> str:
        head, _, tail = shape.partition("%")
        return "{{ " + f"{head!r} + {content} + {tail!r}" + " }}"

    trim = " | trim" if strip else ""
    return (
        "{% set ns = namespace(system='') %}{% for m in messages %}"
        f"{{% if m['role'] == 'system' %}}{{% set ns.system = (m['content']{trim}) + {joint!r} %}}"
        "{% elif m['role'] == 'assistant' %}"
        + written(assistant, f"(m['content']{trim})")
        + "{% else %}"
        + written(user, f"ns.system + (m['content']{trim})")
        + "{% set ns.system = '' %}{% endif %}{% endfor %}"
        + f"{{% if add_generation_prompt %}}{{{{ {opening!r} }}}}{{% endif %}}"
    )


_LLAMA3 = "<|start_header_id|>{}<|end_header_id|>\n\n"
_LLAMA4 = "<|header_start|>{}<|header_end|>\n\n"
_COMMAND_R = "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>%<|END_OF_TURN_TOKEN|>"


def _marked(mark: str, end: str, *, strip: bool = False, before: str = "") -> str:
    names = [mark.format(role) for role in ("system", "user", "assistant")]
    system, user, assistant = (f"{name}%{end}" for name in names)
    return _turns(system, user, assistant, names[2], strip=strip, before=before)


NAMED_TEMPLATES: dict[str, str] = {
    "chatml": CHATML,
    "llama2": _system_in_user("[INST] % [/INST]", " % </s>", joint="\n\n"),
    "llama2-sys": (
        "{% set ns = namespace(system='') %}{% for m in messages %}"
        "{% if m['role'] == 'system' %}{% set ns.system = '<<SYS>>\\n' + m['content'] + '\\n<</SYS>>\\n\\n' %}"
        "{% elif m['role'] == 'assistant' %}{{ m['content'] + '</s>' }}"
        "{% else %}{{ '[INST] ' + ns.system + m['content'] + ' [/INST]' }}{% set ns.system = '' %}"
        "{% endif %}{% endfor %}"
    ),
    "llama3": _marked(_LLAMA3, "<|eot_id|>", strip=True),
    "llama4": _marked(_LLAMA4, "<|eot|>", strip=True),
    "mistral-v1": _system_in_user(" [INST] % [/INST]", " %</s>"),
    "mistral-v3": _system_in_user("[INST] % [/INST]", " %</s>"),
    "mistral-v3-tekken": _system_in_user("[INST]%[/INST]", "%</s>"),
    "mistral-v7": _turns("[SYSTEM_PROMPT] %[/SYSTEM_PROMPT]", "[INST] %[/INST]", " %</s>", ""),
    "mistral-v7-tekken": _turns("[SYSTEM_PROMPT]%[/SYSTEM_PROMPT]", "[INST]%[/INST]", "%</s>", ""),
    "command-r": _turns(
        _COMMAND_R.format("SYSTEM"),
        _COMMAND_R.format("USER"),
        _COMMAND_R.format("CHATBOT"),
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        strip=True,
    ),
    "phi3": _marked("<|{}|>\n", "<|end|>\n"),
    "phi4": _marked("<|im_start|>{}<|im_sep|>", "<|im_end|>"),
    "gemma": _system_in_user(
        "<start_of_turn>user\n%<end_of_turn>\n",
        "<start_of_turn>model\n%<end_of_turn>\n",
        opening="<start_of_turn>model\n",
        strip=True,
    ),
    "zephyr": _marked("<|{}|>\n", "<|endoftext|>\n"),
    "falcon3": _marked("<|{}|>\n", "\n"),
    "chatglm4": _marked("<|{}|>\n", "", before="[gMASK]<sop>"),
    "granite": _marked("<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>\n"),
    "vicuna": _turns("%\n\n", "USER: %\n", "ASSISTANT: %</s>\n", "ASSISTANT:"),
    "openchat": _turns(
        "%<|end_of_turn|>",
        "GPT4 Correct User: %<|end_of_turn|>",
        "GPT4 Correct Assistant: %<|end_of_turn|>",
        "GPT4 Correct Assistant:",
    ),
    "deepseek": _turns("%", "### Instruction:\n%\n", "### Response:\n%\n<|EOT|>\n", "### Response:\n"),
    "deepseek2": _turns("%\n\n", "User: %\n\n", "Assistant: %<｜end▁of▁sentence｜>", "Assistant:"),
    "deepseek3": _turns("%\n\n", "<｜User｜>%", "<｜Assistant｜>%<｜end▁of▁sentence｜>", "<｜Assistant｜>"),
}


def template_text(given: str) -> str:
    """Jinja source for the value of --chat-template: a name, or the source itself. "" for "". Raises UsageError."""
    if not given or given in NAMED_TEMPLATES:
        return NAMED_TEMPLATES.get(given, "")
    if len(given) < 40 and given.replace("-", "").replace(".", "").replace("_", "").isalnum():
        known = ", ".join(sorted(NAMED_TEMPLATES))
        raise UsageError(
            f"--chat-template {given}: no template of this name", f"there are {known}; or give Jinja source"
        )
    return given
