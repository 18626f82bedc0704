"""The ops at the border between card and host: what one side writes for the other, and what it waits for.

They are put into programs by the placement pass (`split_program`) and have no meaning of their own: a program with them
computes what it computes without them, up to the order of one sum. How the sides meet is `hand_off`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.runtime.views import View


@dataclass(frozen=True)
class HandOffSend:
    """Card: gives the host x and, of each row's chosen experts, those that lie on the host (in rank order, then one
    negative id if there are fewer than chosen ones), with their mixing weights. `experts` names the gate tensor whose
    slot map says where they lie."""

    name: str
    index: int
    x: View
    ids: View
    mix: View
    experts: str


@dataclass(frozen=True)
class HandOffReceive:
    """Card: out = x + what the host answered."""

    name: str
    index: int
    x: View
    out: View


@dataclass(frozen=True)
class HandOffWait:
    """Host: waits until the card has written `outs` (x, ids, mix)."""

    name: str
    index: int
    outs: tuple[View, View, View]


@dataclass(frozen=True)
class HandOffAnswer:
    """Host: says that this rank's part of x is there."""

    name: str
    index: int
    x: View
