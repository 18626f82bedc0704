"""What drafts bring on real texts: paired times, tokens a step, acceptance by place. Prints JSON lines.

    python tests/draft_figures.py -m model.gguf --texts prose.txt code.txt --rounds 8
    python tests/draft_figures.py -m model.gguf --model-draft small.gguf --texts prose.txt --fixed

Each round continues another place of the text twice in one engine, with and without drafts in turns; both answers must
be equal. "repeat" and "random" are texts of their own: one sentence again and again; tokens drawn almost evenly.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.runtime.architectures import build_program
from bloomery.runtime.drafts.draft import Draft
from bloomery.runtime.drafts.drafting import Drafting, DraftLimits
from bloomery.runtime.drafts.lookup import LookupDraft
from bloomery.runtime.drafts.model import ModelDraft
from bloomery.runtime.engine import Engine
from bloomery.runtime.host_pool import HostPool
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.requests import Chunk, Event, Final, GenerationRequest, SamplingParameters
from bloomery.runtime.tokenizer import Tokenizer

CONTEXT, PROMPT = 1024, 400
SENTENCE = "The quick brown fox jumps over the lazy dog and runs away. "


class Stand:
    """An engine over one pool; a draft can be another for each text."""

    def __init__(self, path: str, draft_path: str, processes: int, stack: ExitStack) -> None:
        self._stack, self._processes = stack, processes
        model, self.pool = self._open(path)
        self.tokenizer = Tokenizer.from_model_file(model)
        self._draft_pool = self._open(draft_path)[1] if draft_path else None
        self._numbers = iter(range(1, 1 << 30))

    def _open(self, path: str) -> tuple[ModelFile, HostPool]:
        model = self._stack.enter_context(ModelFile.open(path))
        pool = HostPool.start(path, build_program(model), context=CONTEXT, slots=1, processes=self._processes)
        self._stack.callback(pool.close)
        return model, pool

    def engine(self, limits: DraftLimits) -> tuple[Engine, Drafting]:
        vocabulary = self.tokenizer.vocabulary
        draft: Draft = ModelDraft(self._draft_pool, vocabulary) if self._draft_pool else LookupDraft()
        drafting = Drafting(draft, limits, self.pool.max_out_rows)
        return Engine(self.pool, self.tokenizer, None, drafting=drafting), drafting

    def answer(self, engine: Engine, prompt: list[int], **fields: Any) -> tuple[list[int], Final]:
        events: list[Event] = []
        request = GenerationRequest(next(self._numbers).to_bytes(16, "big"), tokens=tuple(prompt), **fields)
        engine.submit(request, events.append)
        while engine.turn():
            pass
        assert isinstance(events[-1], Final), events[-1]
        return [token for event in events if isinstance(event, Chunk) for token in event.tokens], events[-1]

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
    engine, drafting = stand.engine(limits)
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
    steps = counts["draft_steps"]
    return {
        "text": Path(text).stem,
        "tokens_per_step": round(generated / (generated - counts["draft_accepted"]), 3),
        "time_ratio": round(math.prod(medians) ** (1 / len(medians)), 4),
        "tokens_per_second": {str(key): round(statistics.median(value), 1) for key, value in rates.items()},
        "checked": counts["draft_tokens"],
        "accepted": counts["draft_accepted"],
        "accepted_by_place": [round(count / steps, 3) for count in counts["draft_accepted_at"]] if steps else [],
        "ratios": [round(ratio, 3) for order in ratios for ratio in order],
    }


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
    args = parser.parse_args()
    with ExitStack() as stack:
        stand = Stand(args.model, args.model_draft, args.threads, stack)
        for text in args.texts:
            limits = DraftLimits(args.draft_max, fixed=args.fixed)
            figures = measure(stand, text, args.rounds, args.n, limits)
            names = {"model": Path(args.model).stem, "draft": Path(args.model_draft).stem or "lookup"}
            print(json.dumps(names | {"fixed": args.fixed} | figures), flush=True)


if __name__ == "__main__":
    main()
