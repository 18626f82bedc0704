"""Whether a draft model has the vocabulary of the model that it guesses for

Owns the comparison. Knows no draft.
"""

from __future__ import annotations

from bloomery.runtime.errors import ModelFileError
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.tokenizer.vocabulary import Vocabulary

MOST_PADDING = 128
"""Tokens that one of the two may have more, at its end: files are padded to round numbers."""


def shared_vocabulary(model: ModelFile, draft: ModelFile) -> int:
    """The number of tokens that both files have, the same under each id. ModelFileError names the first difference.
    Rules about BOS may differ: the draft model is given the model's tokens, not texts."""
    ours, theirs = Vocabulary.from_model_file(model), Vocabulary.from_model_file(draft)
    if ours.model != theirs.model:
        _refuse(model, draft, f"its tokenizer is {theirs.model!r}, the model's {ours.model!r}")
    shared = min(len(ours.texts), len(theirs.texts))
    for token, (text, other) in enumerate(zip(ours.texts, theirs.texts, strict=False)):
        if text != other:
            _refuse(model, draft, f"token {token} is {other!r}, the model's {text!r}")
    if max(len(ours.texts), len(theirs.texts)) - shared > MOST_PADDING:
        _refuse(model, draft, f"it has {len(theirs.texts)} tokens, the model {len(ours.texts)}")
    return shared


def _refuse(model: ModelFile, draft: ModelFile, difference: str) -> None:
    raise ModelFileError(
        f"{draft.path} cannot draft for {model.path}: {difference}",
        "a draft model must have the model's vocabulary: choose a smaller one of the same family",
    )
