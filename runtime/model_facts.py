"""What WELCOME and status say about a model: gathered from file, tokenizer and template.

Owns the gathering. It does not know sockets or executors.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.runtime.deepseek_template import chat_template_text
from bloomery.runtime.facts import ModelFacts
from bloomery.runtime.model_file import ModelFile

if TYPE_CHECKING:
    from bloomery.runtime.placement import Plan
    from bloomery.runtime.tokenizer import Tokenizer


def model_facts(model: ModelFile, tokenizer: Tokenizer, plan: Plan, alias: str, draft: str) -> ModelFacts:
    """The facts of an open model file. `alias` is the operator's name for it (default: the file's own), `draft` the
    kind of guesses."""
    name = str(model.metadata.get("general.name") or Path(model.path).stem)
    return ModelFacts(
        name=name,
        alias=alias or name,
        path=str(model.path),
        architecture=model.architecture,
        parameters=sum(math.prod(tensor.shape) for tensor in model.tensors.values()),
        file_bytes=sum(tensor.nbytes for tensor in model.tensors.values()),
        file_type=file_type_name(model),
        vocabulary=tokenizer.vocabulary,
        context=plan.context,
        trained_context=model.hyper("context_length", int, 0),
        slots=plan.slots,
        bos=tokenizer.bos,
        eos=tokenizer.eos,
        end_tokens=tuple(sorted(tokenizer.end_tokens)),
        add_bos=tokenizer.add_bos,
        tokenizer_digest=tokenizer.digest,
        chat_template=chat_template_text(model),
        draft=draft,
        width=model.hyper("embedding_length", int, 0),
        tokenizer=str(model.metadata.get("tokenizer.ggml.model") or ""),
    )


def file_type_name(model: ModelFile) -> str:
    """The quant type that most of the bytes are in: what `general.file_type` says in words, and true for any file."""
    sizes: dict[str, int] = {}
    for tensor in model.tensors.values():
        sizes[tensor.quant_type.name] = sizes.get(tensor.quant_type.name, 0) + tensor.nbytes
    return max(sizes, key=sizes.__getitem__, default="")
