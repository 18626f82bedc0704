"""Buffers and views: the activations that ops hand to each other, and which part of them an op means.

Owns shapes only; knows neither ops nor memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Buffer:
    """Activations of one step: (R, width) for rows="step", (O, width) for rows="out"; f32 or i32."""

    name: str
    width: int
    rows: Literal["step", "out"] = "step"
    dtype: Literal["f32", "i32"] = "f32"


@dataclass(frozen=True)
class View:
    """`count` heads of `width` elements in every row of a buffer: head h starts at element start + h*stride."""

    buffer: str
    start: int
    width: int
    count: int = 1
    stride: int = 0

    def __post_init__(self) -> None:
        assert self.width > 0 and self.count > 0 and self.start >= 0
        assert self.count == 1 or self.stride >= self.width

    @property
    def elements(self) -> int:
        return self.width * self.count

    @property
    def contiguous(self) -> bool:
        return self.count == 1 or self.stride == self.width

    @property
    def end(self) -> int:
        return self.start + (self.count - 1) * self.stride + self.width
