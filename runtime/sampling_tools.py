"""What choosing tokens needs of a tokenizer, made once an engine: tokens of DRY's breakers, compiled constraints.

Owns nothing of a request. Made when first asked for, because most requests never do.
"""

from __future__ import annotations

from bloomery.runtime.constraint import ConstraintCompiler
from bloomery.runtime.dry import BreakerCache
from bloomery.runtime.tokenizer import Tokenizer


class SamplingTools:
    """Threads may share one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.breakers = BreakerCache(tokenizer)
        self.constraints = ConstraintCompiler(tokenizer)
