"""Tokenizers of model files. `Tokenizer` and `Detokenizer` are what the rest of the program uses."""

from bloomery.runtime.tokenizer.detokenizer import Detokenizer
from bloomery.runtime.tokenizer.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Tokenizer"]
