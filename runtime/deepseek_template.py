"""The chat format of DeepSeek V4.1 and V4 as a Jinja template, for model files that bring none.

Owns the format: system text with the reasoning effort and the tools, turns, reasoning that is kept or dropped, tool
calls in DSML, tool results merged into user turns. Whether a file gets it is decided here too, but not how templates
run.

The template reads `messages`, `tools`, `enable_thinking` (default true), `reasoning_effort` (low, medium, high, xhigh,
max or 1 to 100; V4.1 only) and `add_generation_prompt`.
"""

from __future__ import annotations

from bloomery.runtime.model_file import ModelFile

_NEEDED = ("<｜User｜>", "<｜Assistant｜>")
_SYSTEM = "<｜System｜>"

_TEMPLATE = r"""
{%- set thinking = enable_thinking if enable_thinking is defined else true %}
{%- set efforts = {'low': 25, 'medium': 50, 'high': 50, 'xhigh': 75, 'max': 100} %}
{%- set effort = reasoning_effort if reasoning_effort is defined and reasoning_effort else 'high' %}
{%- if effort is string %}
  {%- if effort not in efforts %}
    {{- raise_exception('reasoning_effort must be low, medium, high, xhigh, max or a number from 1 to 100') }}
  {%- endif %}
  {%- set effort = efforts[effort] %}
{%- elif effort < 1 or effort > 100 %}
  {{- raise_exception('reasoning_effort must be from 1 to 100') }}
{%- endif %}
{%- set ns = namespace(last_user=-1, tools=false, open_user=false) %}
{%- if tools is defined and tools %}{% set ns.tools = true %}{% endif %}
{%- for message in messages %}
  {%- if message.role in ['user', 'developer', 'tool'] %}{% set ns.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{%- set leading = messages[0].content if messages and messages[0].role == 'system' else '' %}
{{- bos_token }}
{%- if leading or thinking or ns.tools %}
  {{- '@SYSTEM@' }}
  {%- if thinking and @EFFORT@ %}
    {{- 'Reasoning Effort: ' ~ effort ~ ' (range 1-100, the higher the value, the more thorough the reasoning)\n\n' }}
  {%- endif %}
  {{- leading }}
  {%- if ns.tools %}
    {{- '\n\n' if leading else '' }}
    {{- '## Tools\n\nYou can call tools. To do so, end your answer with one block of this form; ' }}
    {{- 'an invoke for each call:\n\n<｜DSML｜@CALLS@>\n<｜DSML｜@S@invoke name="TOOL">\n' }}
    {{- '<｜DSML｜@S@parameter name="NAME" string="true or false">VALUE</｜DSML｜@S@parameter>\n' }}
    {{- '</｜DSML｜@S@invoke>\n</｜DSML｜@CALLS@>\n\n' }}
    {{- 'With string="true" VALUE is the text itself, with string="false" it is JSON.\n\n' }}
    {{- '### Available Tool Schemas\n' }}
    {%- for tool in tools %}
      {{- '\n' ~ ((tool.function if tool.function is defined else tool) | tojson) }}
    {%- endfor %}
  {%- endif %}
{%- endif %}
{%- for message in messages %}
  {%- set content = message.content if message.content else '' %}
  {%- if message.role == 'system' %}
    {%- if not loop.first %}
      {{- '@SYSTEM@' ~ content }}
      {%- set ns.open_user = false %}
    {%- endif %}
  {%- elif message.role in ['user', 'developer', 'tool'] %}
    {{- '\n\n' if ns.open_user else '<｜User｜>' }}
    {{- '<tool_result>' ~ content ~ '</tool_result>' if message.role == 'tool' else content }}
    {%- set ns.open_user = true %}
  {%- elif message.role == 'latest_reminder' %}
    {{- '<｜latest_reminder｜>' ~ content }}
    {%- set ns.open_user = false %}
  {%- elif message.role == 'assistant' %}
    {%- set ns.open_user = false %}
    {{- '<｜Assistant｜>' }}
    {%- if thinking and (ns.tools or loop.index0 > ns.last_user) %}
      {{- '<think>' ~ (message.reasoning_content if message.reasoning_content else '') }}
    {%- endif %}
    {{- '</think>' ~ content }}
    {%- if message.tool_calls %}
      {{- '\n\n<｜DSML｜@CALLS@>\n' }}
      {%- for call in message.tool_calls %}
        {%- set function = call.function if call.function is defined else call %}
        {{- '<｜DSML｜@S@invoke name="' ~ function.name ~ '">\n' }}
        {%- if function.arguments is mapping %}
          {%- for key, value in function.arguments.items() %}
            {{- '<｜DSML｜@S@parameter name="' ~ key ~ '" string="' }}
            {{- 'true">' ~ value if value is string else 'false">' ~ (value | tojson) }}
            {{- '</｜DSML｜@S@parameter>\n' }}
          {%- endfor %}
        {%- elif function.arguments %}
          {{- raise_exception('the arguments of a tool call must be a JSON object') }}
        {%- endif %}
        {{- '</｜DSML｜@S@invoke>\n' }}
      {%- endfor %}
      {{- '</｜DSML｜@CALLS@>' }}
    {%- endif %}
    {{- eos_token }}
  {%- else %}
    {{- raise_exception('unknown role ' ~ message.role) }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<｜Assistant｜>' ~ ('<think>' if thinking else '</think>') }}
{%- endif %}
"""


def chat_template_text(model: ModelFile) -> str:
    """The file's own template; if it has none and is DeepSeek V4.1 or V4 with the tokens of its format, that; or ""."""
    text = str(model.metadata.get("tokenizer.chat_template") or "")
    if text or model.architecture not in ("deepseek41", "deepseek4"):
        return text
    tokens = model.key("tokenizer.ggml.tokens", list, [])
    if not all(token in tokens for token in _NEEDED):
        return ""
    return deepseek_template(spaced=model.architecture == "deepseek41", system=_SYSTEM in tokens)


def deepseek_template(*, spaced: bool, system: bool) -> str:
    """`spaced`: V4.1, whose tags have a space after the DSML mark and whose system text begins with the effort."""
    values = {
        "@SYSTEM@": _SYSTEM if system else "",
        "@EFFORT@": "true" if spaced else "false",
        "@CALLS@": " calls" if spaced else "tool_calls",
        "@S@": " " if spaced else "",
    }
    text = _TEMPLATE
    for name, value in values.items():
        text = text.replace(name, value)
    return text
