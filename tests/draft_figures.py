"""What drafts bring on real texts: paired times, tokens a step, acceptance by place. Prints JSON lines.

    python tests/draft_figures.py -m model.gguf --texts prose.txt code.txt --rounds 8
    python tests/draft_figures.py -m model.gguf --model-draft small.gguf --texts prose.txt --fixed
    python tests/draft_figures.py -m model.gguf --texts prose.txt code.txt --rounds 8 -n 64 --plot drafts.svg

Each round continues another place of the text twice in one engine, with and without drafts in turns; both answers must
be equal. "repeat" and "random" are texts of their own: one sentence again and again; tokens drawn almost evenly.

With --plot nothing is timed, so its figures are the same wherever it runs: greedy continuations with fixed guesses of
1, 2, 4 and 7 tokens, by lookup and by the draft model if there is one. All answers at a place must be equal.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.launcher.plots import check_plot, new_figure
from bloomery.runtime.architectures import build_program
from bloomery.runtime.drafts.draft import MOST_TOKENS, Draft
from bloomery.runtime.drafts.drafting import Drafting, DraftLimits
from bloomery.runtime.drafts.lookup import LookupDraft
from bloomery.runtime.drafts.model import ModelDraft
from bloomery.runtime.drafts.vocabulary_check import shared_vocabulary
from bloomery.runtime.engine import Engine
from bloomery.runtime.host_pool import HostPool
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.requests import Chunk, Event, Final, GenerationRequest, SamplingParameters
from bloomery.runtime.tokenizer import Tokenizer

CONTEXT, PROMPT = 1024, 400
GUESSES = (1, 2, 4, 7)
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")
SENTENCE = "The quick brown fox jumps over the lazy dog and runs away. "


class CountingDrafting(Drafting):
    """Counts the guesses that were checked, by their length: near the end of an answer they are shorter."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lengths: Counter[int] = Counter()

    def learn(self, parts: Sequence[tuple[Any, int]], seconds: float) -> None:
        self.lengths.update(rows - 1 for _, rows in parts if rows > 1)
        super().learn(parts, seconds)

    def shares(self) -> list[float]:
        """Accepted tokens by place, of the guesses that reach it."""
        reach = [sum(count for length, count in self.lengths.items() if length > place) for place in range(MOST_TOKENS)]
        accepted = self.counts()["draft_accepted_at"]
        return [round(at / count, 3) for at, count in zip(accepted, reach, strict=False) if count]


class Stand:
    """An engine over one pool; a draft can be another for each text."""

    def __init__(self, path: str, draft_path: str, processes: int, stack: ExitStack, slots: int = 1) -> None:
        self._stack, self._processes, self._slots = stack, processes, slots
        model, self.pool = self._open(path)
        self.tokenizer = Tokenizer.from_model_file(model)
        self._draft_pool, self._shared = None, 0
        if draft_path:
            draft_model, self._draft_pool = self._open(draft_path)
            self._shared = shared_vocabulary(model, draft_model)
        self._numbers = iter(range(1, 1 << 30))

    def _open(self, path: str) -> tuple[ModelFile, HostPool]:
        model = self._stack.enter_context(ModelFile.open(path))
        pool = HostPool.start(path, build_program(model), context=CONTEXT, slots=self._slots, processes=self._processes)
        self._stack.callback(pool.close)
        return model, pool

    @property
    def drafts(self) -> list[str]:
        return ["lookup"] + ["model"] * (self._draft_pool is not None)

    def engine(self, limits: DraftLimits, kind: str) -> tuple[Engine, CountingDrafting]:
        model = self._draft_pool if kind == "model" else None
        draft: Draft = ModelDraft(model, self._shared) if model else LookupDraft()
        drafting = CountingDrafting(draft, limits, self.pool.max_out_rows)
        return Engine(self.pool, self.tokenizer, None, drafting=drafting), drafting

    def answer(self, engine: Engine, prompt: list[int], **fields: Any) -> tuple[list[int], Final]:
        return self.answers(engine, [prompt], **fields)[0]

    def answers(self, engine: Engine, prompts: list[list[int]], **fields: Any) -> list[tuple[list[int], Final]]:
        """Of all prompts at the same time."""
        streams: list[list[Event]] = [[] for _ in prompts]
        for prompt, events in zip(prompts, streams, strict=True):
            request = GenerationRequest(next(self._numbers).to_bytes(16, "big"), tokens=tuple(prompt), **fields)
            engine.submit(request, events.append)
        while engine.turn():
            pass
        found = []
        for events in streams:
            final = events[-1]
            assert isinstance(final, Final), final
            found.append(([token for event in events if isinstance(event, Chunk) for token in event.tokens], final))
        return found

    def prompts(self, text: str) -> Iterator[tuple[list[int], SamplingParameters]]:
        random, place, round_ = np.random.default_rng(5), 0, 0
        tokens = [] if text in ("repeat", "random") else self.tokenizer.encode(Path(text).read_text(encoding="utf-8"))
        while True:
            drawn = SamplingParameters(temperature=0.8, seed=round_)
            if text == "repeat":
                yield self.tokenizer.encode(SENTENCE * 12), SamplingParameters(temperature=0)
            elif text == "random":
                sampling = SamplingParameters(temperature=5, top_k=0, top_p=1, min_p=0, seed=round_)
                yield random.integers(3, self.tokenizer.vocabulary - 99, PROMPT // 2).tolist(), sampling
            else:
                yield tokens[place : place + PROMPT], drawn if round_ % 2 else SamplingParameters(temperature=0)
                place = (place + 2000) % (len(tokens) - PROMPT)
            round_ += 1


def measure(stand: Stand, text: str, rounds: int, length: int, limits: DraftLimits) -> dict[str, Any]:
    """Of pairs: the time with drafts over that without, as the geometric mean of the medians of both orders, so that
    what the first leaves in caches for the second does not count."""
    engine, drafting = stand.engine(limits, stand.drafts[-1])
    ratios: tuple[list[float], list[float]] = ([], [])
    rates: dict[bool, list[float]] = {False: [], True: []}
    generated = 0
    for round_, (prompt, sampling) in zip(range(rounds), stand.prompts(text), strict=False):
        fields: dict[str, Any] = {"sampling": sampling, "max_tokens": length, "ignore_eos": True}
        stand.answer(engine, prompt, **{**fields, "max_tokens": 2}, draft_tokens=0)
        found: dict[bool, tuple[list[int], Final]] = {}
        for drafted in (False, True) if round_ % 2 else (True, False):
            found[drafted] = stand.answer(engine, prompt, **fields, draft_tokens=None if drafted else 0)
            rates[drafted].append((length - 1) / found[drafted][1].generate_seconds)
        assert found[False][0] == found[True][0], "the answer depends on the draft"
        ratios[round_ % 2].append(found[True][1].generate_seconds / found[False][1].generate_seconds)
        generated += length - 1
    medians = [statistics.median(order) for order in ratios if order]
    counts = drafting.counts()
    return {
        "text": Path(text).stem,
        "tokens_per_step": round(generated / (generated - counts["draft_accepted"]), 3),
        "time_ratio": round(math.prod(medians) ** (1 / len(medians)), 4),
        "quartiles": [round(value, 4) for value in statistics.quantiles([*ratios[0], *ratios[1]], n=4)],
        "tokens_per_second": {str(key): round(statistics.median(value), 1) for key, value in rates.items()},
        "checked": counts["draft_tokens"],
        "accepted": counts["draft_accepted"],
        "accepted_by_place": drafting.shares(),
        "ratios": [round(ratio, 3) for order in ratios for ratio in order],
    }


def count(stand: Stand, text: str, kind: str, guesses: int, rounds: int, length: int) -> tuple[dict[str, Any], Any]:
    """What fixed guesses of so many tokens bring to greedy continuations, made side by side, and those continuations.
    A guess's place counts as accepted if all before it are; shares are of the guesses, tokens a step of all steps."""
    engine, drafting = stand.engine(DraftLimits(guesses, fixed=True), kind)
    assert rounds * (1 + guesses) <= stand.pool.max_out_rows, "too many rounds for guesses at all places in one step"
    prompts = [prompt for _, (prompt, _) in zip(range(rounds), stand.prompts(text), strict=False)]
    fields: dict[str, Any] = {"sampling": SamplingParameters(temperature=0), "ignore_eos": True}
    stand.answers(engine, prompts, **fields, max_tokens=1, draft_tokens=0)  # from caches all begin in the same step
    found = stand.answers(engine, prompts, **fields, max_tokens=length)
    finals = [final for _, final in found]
    guessed, accepted = (sum(getattr(final, f"draft_{what}") for final in finals) for what in ("tokens", "accepted"))
    generated = rounds * (length - 1)  # the first token is the prompt's last step's
    return {
        "text": Path(text).stem,
        "draft": kind,
        "guesses": guesses,
        "tokens_per_step": round(generated / (generated - accepted), 3),
        "checked": guessed,
        "accepted": accepted,
        "share": round(accepted / guessed, 3),
        "accepted_by_place": drafting.shares(),
    }, [tokens for tokens, _ in found]


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Left: acceptance by place, of the longest guesses. Right: tokens a step by length of the guess."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "bloomery", "svg.fonttype": "none"}):  # the same bytes each time
        figure = new_figure(9, 3.6)
        by_place, by_length = figure.subplots(1, 2)
        for index, key in enumerate(dict.fromkeys((row["text"], row["draft"]) for row in rows)):
            own = [row for row in rows if (row["text"], row["draft"]) == key]
            label, style = " by ".join(key), {"marker": "o", "color": COLOURS[index % len(COLOURS)]}
            shares = own[-1]["accepted_by_place"]
            by_place.plot(range(1, len(shares) + 1), shares, label=label, **style)
            by_length.plot([row["guesses"] for row in own], [row["tokens_per_step"] for row in own], **style)
        by_place.set(xlabel="place in a guess of 7 tokens", ylabel="share of guesses accepted up to here", ylim=(0, 1))
        by_length.set(xlabel="tokens guessed for a step", ylabel="tokens a step", xticks=GUESSES)
        by_place.legend()
        figure.suptitle(title)
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)


def plot_counts(stand: Stand, args: argparse.Namespace) -> None:
    rows = []
    for text in args.texts:
        expected = None
        for kind in stand.drafts:
            for guesses in GUESSES:
                figures, answers = count(stand, text, kind, guesses, args.rounds, args.n)
                assert expected in (None, answers), "the answer depends on the draft"
                expected = answers
                rows.append(figures)
                print(json.dumps(figures), flush=True)
    title = f"{Path(args.model).stem}, greedy, {args.rounds} continuations of {args.n} tokens"
    plot(rows, title, args.plot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--model-draft", default="")
    parser.add_argument("--texts", nargs="+", default=["repeat", "random"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("-n", type=int, default=150)
    parser.add_argument("--draft-max", type=int, default=7)
    parser.add_argument("--fixed", action="store_true", help="check every guess")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="a picture (.svg, .png, .pdf) of acceptance instead of times")
    args = parser.parse_args()
    if args.plot:
        check_plot(args.plot)
    with ExitStack() as stack:
        stand = Stand(args.model, args.model_draft, args.threads, stack, args.rounds if args.plot else 1)
        if args.plot:
            return plot_counts(stand, args)
        for text in args.texts:
            limits = DraftLimits(args.draft_max, fixed=args.fixed)
            figures = measure(stand, text, args.rounds, args.n, limits)
            names = {"model": Path(args.model).stem, "draft": Path(args.model_draft).stem or "lookup"}
            print(json.dumps(names | {"fixed": args.fixed} | figures), flush=True)


if __name__ == "__main__":
    main()
