"""The client's half of back-pressure: how much credit a request starts with and when more is granted.

Owns the arithmetic of one request's window. It does not know sockets.
"""

from __future__ import annotations

from bloomery.runtime.messages import CREDIT_SCHEMA, DEFAULT_CREDIT
from bloomery.runtime.protocol import Kind, Message


class CreditWindow:
    """Grants back what the caller has taken, in portions of half the window."""

    def __init__(self, request_id: bytes, window: int = DEFAULT_CREDIT) -> None:
        self.window = max(1, window)
        self._request_id = request_id
        self._taken = 0

    def take(self, cost: int) -> Message | None:
        """Call when the caller has taken a chunk of this cost; returns a CREDIT message when one is due."""
        self._taken += cost
        if 2 * self._taken < self.window:
            return None
        chunks, self._taken = self._taken, 0
        return Message(Kind.CREDIT, self._request_id, {CREDIT_SCHEMA.fields[0].name: chunks})
