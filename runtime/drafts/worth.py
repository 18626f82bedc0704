"""Whether checking a guess is worth its time: estimates of what a row costs and of how often guesses are right

Owns both estimates and the rule that follows from them. Knows steps as numbers of rows and seconds only.

A step of S sequences that checks x guessed tokens takes base(S) + row * x seconds and brings S tokens and the accepted
ones. One more guessed token, accepted with probability p, raises the tokens per second if p tokens in row seconds are
more than the step brings without it: p * seconds > row * tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

_RATE = 0.1  # weight of the newest outcome in an estimate
_DOWN = 0.3  # of one that took less time than estimated: what delays a step does not make any faster
_OUTLIER = 2.0  # a step that took longer than so many times the estimate counts as having taken that
ROW_SHARE = 0.25
"""What a row is taken to cost before any was measured, as a share of a step without guesses."""
PROBE_STEPS = 64
"""Steps in a row without a checked guess before one is checked to see whether that is still right; as many more each
time that it is, up to the eighth time."""
PROBE_TOKENS = 4
_ACCEPT_RATE = 0.15
_START = 0.7


class StepCosts:
    """What steps without prompt rows cost, from those that were run."""

    def __init__(self) -> None:
        self._base: dict[int, float] = {}
        self._row: float | None = None

    def known(self, sequences: int) -> bool:
        return sequences in self._base

    def base(self, sequences: int) -> float:
        """Seconds of a step of so many sequences without guesses; `known` says whether there is an estimate."""
        return self._base[sequences]

    @property
    def row(self) -> float:
        """Seconds that a guessed token's row adds."""
        return ROW_SHARE * next(iter(self._base.values()), 0.0) if self._row is None else self._row

    def observe(self, sequences: int, guessed: int, seconds: float) -> None:
        """Moves the estimates towards what a step took; of an error each guessed row takes as much as the base."""
        base = self._base.get(sequences)
        if base is None:
            self._base[sequences] = max(seconds - guessed * self.row, 0.5 * seconds)
            return
        expected = base + guessed * self.row
        change = (updated(expected, seconds) - expected) / (1 + guessed)
        self._base[sequences] = base + change
        if guessed:
            self._row = max(0.0, self.row + change)


def updated(estimate: float, seconds: float) -> float:
    """An estimate of a duration after another measurement."""
    rate = _DOWN if seconds < estimate else _RATE
    return estimate + rate * (min(seconds, _OUTLIER * estimate) - estimate)


class Probes:
    """When to check a guess that does not seem worth it."""

    def __init__(self) -> None:
        self._without = self._failed = self._more = 0

    def due(self) -> bool:
        """Counts a step that would check nothing although there was something to check; True for one that should.
        Those come in threes: what the first costs may be to catch up with the text."""
        self._without += 1
        if self._more:
            self._more -= 1
        elif self._without <= PROBE_STEPS * min(self._failed + 1, 8):
            return False
        else:
            self._failed += 1
            self._more = 2
        self._without = 0
        return True

    def paid(self) -> None:
        """Guesses were checked because they seemed worth it."""
        self._without = self._failed = self._more = 0


def worth_checking(chances: Sequence[Sequence[float]], base: float, row: float, room: int, sequences: int) -> list[int]:
    """How many tokens of each guess to check, `room` at most in all. `chances[i][j]` is the chance of the j-th token of
    guess i if those before it are right; every guess belongs to another of the step's sequences."""
    candidates = []
    for index, guess in enumerate(chances):
        right = 1.0
        for place, chance in enumerate(guess):
            right *= chance
            candidates.append((right, -place, index))
    candidates.sort(reverse=True)
    counts, tokens, seconds = [0] * len(chances), float(sequences), base
    for right, _, index in candidates[:room]:
        if right * seconds <= row * tokens:
            break
        counts[index] += 1
        tokens += right
        seconds += row
    return counts


class Acceptance:
    """How often guessed tokens of one text are right if those before them are: for drafts that are asked only for what
    is likely to pay."""

    def __init__(self) -> None:
        self._all = _START
        self._texts: dict[int, tuple[int, float]] = {}

    def of(self, slot: int, text: int) -> float:
        number, chance = self._texts.get(slot, (-1, 0.0))
        return chance if number == text else self._all

    def observe(self, slot: int, text: int, checked: int, accepted: int) -> None:
        chance = self.of(slot, text)
        for right in [1.0] * accepted + [0.0] * (checked > accepted):
            chance += _ACCEPT_RATE * (right - chance)
            self._all += _RATE * (right - self._all)
        self._texts[slot] = text, chance


def best_length(chances: Sequence[float], base: float, row: float, token: float, most: int, sequences: int) -> int:
    """How many tokens to guess for each of the sequences that have `chances`, 0 to `most`, if guesses for number i are
    right with `chances[i]` each and guessing takes `token` seconds a token for all of them together."""
    best, rate, tokens, seconds = 0, sequences / base, float(sequences), base
    right = [1.0] * len(chances)
    for length in range(1, most + 1):
        right = [before * chance for before, chance in zip(right, chances, strict=True)]
        tokens += sum(right)
        seconds += token + row * len(chances)
        if tokens / seconds > rate:
            best, rate = length, tokens / seconds
    return best
