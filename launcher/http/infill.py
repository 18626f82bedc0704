"""Fill-in-the-middle prompts: what comes before and after a gap, and other files, in the order of llama-server.

Owns the order and how much of each part is kept. It needs a model whose vocabulary has the three special tokens.
"""

from __future__ import annotations

from typing import Any

from bloomery.launcher.http.backend import Backend
from bloomery.launcher.http.errors import invalid, unsupported
from bloomery.launcher.http.fields import shown, string

NAMES = ("fim_pre", "fim_suf", "fim_mid")


async def infill_prompt(backend: Backend, body: dict[str, Any], n_predict: int, batch: int) -> list[int]:
    """Token ids of the prompt. Raises RequestError("unsupported") if the model has no such tokens."""
    special = (await backend.call("special_tokens"))["tokens"]
    missing = [name for name in NAMES if name not in special]
    if missing:
        raise unsupported(f"Infill is not supported by this model: its vocabulary lacks {', '.join(missing)}")
    for name in ("input_prefix", "input_suffix"):
        if name not in body:
            raise invalid(f'"{name}" is required', field=name)
    extra = _extra(body.get("input_extra"))
    prompt = await backend.tokenize(string(body, "prompt"), add_special=False)
    before = await backend.tokenize(string(body, "input_prefix"), add_special=False, parse_special=False)
    after = await backend.tokenize(string(body, "input_suffix"), add_special=False, parse_special=False)
    # Three quarters of a batch for what comes before the gap, a quarter for what follows.
    kept_after = min(len(after), max(0, batch // 4 - (2 + len(prompt))))
    kept_before = min(len(before), 3 * (batch // 4))
    others = await _other_files(backend, extra, special)
    room = backend.facts.context - batch - (2 * n_predict if n_predict > 0 else 0)
    others = others[max(0, len(others) - max(0, room)) :]
    before_part = [special["fim_pre"], *before[len(before) - kept_before :], *prompt]
    after_part = [special["fim_suf"], *after[:kept_after]]
    first = [backend.facts.bos] if backend.facts.add_bos and backend.facts.bos is not None else []
    spm = bool(body.get("spm_infill"))
    parts = after_part + before_part if spm else before_part + after_part
    return [*first, *others, *parts, special["fim_mid"]]


def _extra(extra: Any) -> list[dict[str, Any]]:
    if extra is None:
        return []
    expected = '"input_extra" must be an array of {"filename": string, "text": string}'
    if not isinstance(extra, list):
        raise invalid(f"{expected}, found {shown(extra)}", field="input_extra")
    for entry in extra:
        if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
            raise invalid(f"{expected}, found {shown(entry)}", field="input_extra")
        if not isinstance(entry.get("filename", ""), str):
            raise invalid(f"{expected}, found {shown(entry)}", field="input_extra")
    return extra


async def _other_files(backend: Backend, extra: list[dict[str, Any]], special: dict[str, int]) -> list[int]:
    """Other files, each behind its name (or a separator line where the vocabulary has no token for that)."""
    tokens: list[int] = []
    if "fim_rep" in special:
        tokens += [special["fim_rep"], *await backend.tokenize("myproject\n", add_special=False, parse_special=False)]
    for entry in extra:
        if "fim_sep" in special:
            name = entry.get("filename", "tmp")
            tokens += [special["fim_sep"], *await backend.tokenize(f"{name}\n", add_special=False, parse_special=False)]
        else:
            text = "\n\n--- snippet ---\n\n"
            tokens += await backend.tokenize(text, add_special=False, parse_special=False)
        tokens += await backend.tokenize(entry["text"], add_special=False, parse_special=False)
    if "fim_sep" in special:
        text = "filename\n"
        tokens += [special["fim_sep"], *await backend.tokenize(text, add_special=False, parse_special=False)]
    return tokens
