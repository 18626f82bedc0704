"""What a client asks for and what it gets back, as plain values: the language of engine and protocol.

One request produces, in this order: one `Admitted` (or a `Failed`), any number of `Progress`, any number of `Chunk`,
and exactly one `Final` or `Failed`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.pooling import Pooling

FinishReason: TypeAlias = Literal["stop", "length", "context", "aborted"]


SAMPLER_ORDER = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)
"""The steps between logit bias and draw, in llama.cpp's order."""
SAMPLERS = (*SAMPLER_ORDER, "adaptive_p")


@dataclass(frozen=True)
class SamplingParameters:
    """How the next token is chosen. temperature 0 is greedy (argmax, ties to the lower id); defaults as llama-server.

    Order: logit bias, the steps that `samplers` names in its order, draw. A step that is not named is left out;
    "adaptive_p" takes the place of the draw, wherever it stands. With `mirostat` 1 or 2 only temperature and that
    algorithm choose. `repeat_last_n` and `dry_penalty_last_n` count tokens (-1: all); what each step does is stated in
    `runtime.sampler_chain` and `runtime.dry`.

    `logprobs` asks for that many most probable tokens (0: none) of the model's own distribution: that of the raw
    logits, before bias, penalties, filters and temperature; with `post_sampling_probs` of the one that is drawn from.
    `seed` (0 to 2**32 - 1) None draws a fresh one, which Final reports; how it makes tokens of logits is stated at
    `runtime.sampling.Sampler`.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = 64
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: int = 0
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    min_keep: int = 0
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    samplers: tuple[str, ...] = SAMPLER_ORDER
    post_sampling_probs: bool = False


@dataclass(frozen=True)
class Constraint:
    """What the answer's text has to be: exactly one of a GBNF `grammar`, a `json_schema`, a `regex` (of the whole text)
    and a `lark` grammar in llguidance's notation.

    Without `triggers` it holds from the first token on, and the answer ends only where it may end. With `triggers` it
    holds from the first of these strings on that appears in the text, its first character included.
    """

    grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    regex: str | None = None
    lark: str | None = None
    triggers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reasoning:
    """How an answer's reasoning is marked: it stands at the beginning, between `start` and the first of `ends`; a
    prompt that ends with `start` (and blanks) has opened it already. Once `budget` tokens of it were chosen (-1: no
    limit), and the character at hand is whole, `message` and then `ends[0]` are forced."""

    start: str
    ends: tuple[str, ...]
    budget: int = -1
    message: str = ""


@dataclass(frozen=True)
class GenerationRequest:
    """One request. The prompt is exactly one of: `tokens` as they are; `text` tokenised as the file says
    (`add_special`, `parse_special`); `messages` (OpenAI-style role/content maps) rendered by the file's chat template,
    to which `template_variables` are passed. max_tokens -1: until the end token or the context's end; 0: only the
    prompt is processed.

    `constraint` keeps the text inside a grammar. `shown_tokens` are control tokens whose spelling belongs to the text.
    `score_prompt` returns the log-probability of each prompt token after the first. `logits` "all" returns the raw
    float32 logits after every evaluated token, "generated" only those that tokens were chosen from.

    `embeddings` other than "none" (with max_tokens 0) returns the prompt's hidden states in place of logits, pooled.

    `slot` asks for this slot: the request waits until it is idle. With `context_shift` a full slot forgets tokens and
    goes on: of those behind the first `keep`, `discard` (0: half of them); what is left is computed again.

    `reasoning` limits the tokens of reasoning and counts them, and keeps a constraint with triggers asleep meanwhile.

    At most `draft_tokens` tokens are guessed ahead in one step (None: as many as the daemon is set to; 0: none). The
    answer is the same with any number.
    """

    request_id: bytes
    tokens: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    template_variables: dict[str, Any] = field(default_factory=dict)
    add_special: bool = True
    parse_special: bool = True
    max_tokens: int = -1
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    cache_prompt: bool = True
    score_prompt: bool = False
    logits: Literal["none", "generated", "all"] = "none"
    slot: int | None = None
    embeddings: Pooling = "none"
    context_shift: bool = False
    keep: int = 0
    discard: int = 0
    constraint: Constraint | None = None
    shown_tokens: tuple[int, ...] = ()
    draft_tokens: int | None = None
    reasoning: Reasoning | None = None

    def __post_init__(self) -> None:
        assert len(self.request_id) == 16
        assert sum(prompt is not None for prompt in (self.tokens, self.text, self.messages)) == 1


@dataclass(frozen=True)
class TokenLogprob:
    """A chosen token, its natural-log probability, and the most probable alternatives (token, logprob), best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Admitted:
    request_id: bytes
    slot: int
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Progress:
    """Prompt processing: `processed` of `total` prompt tokens are in the cache, `cached` of them were there before."""

    request_id: bytes
    processed: int
    total: int
    cached: int
    seconds: float


@dataclass(frozen=True)
class Chunk:
    """New tokens and the whole-character text that they complete (may be empty: a character is still incomplete, or a
    possible stop string is held back). `prompt_logprobs` and `logits` (float32, rows x V) as asked for."""

    request_id: bytes
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[float, ...] = ()
    logits: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Final:
    """The end of a request. `stop` is the stop string or "" (end or stop token, which the chunks' `tokens` include);
    `shifted_tokens` were forgotten on the way (`context_shift`); `draft_tokens` guesses were checked and of them
    `draft_accepted` accepted; `reasoning_tokens` of the generated ones were reasoning, its closing mark included."""

    request_id: bytes
    reason: FinishReason
    stop: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    seed: int
    queue_seconds: float
    prompt_seconds: float
    generate_seconds: float
    shifted_tokens: int = 0
    draft_tokens: int = 0
    draft_accepted: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True)
class Failed:
    """The end of a request that could not be served; `code` is a row of the protocol's error table."""

    request_id: bytes
    code: str
    message: str
    hint: str = ""
    details: dict[str, int | float | str] = field(default_factory=dict)


Event: TypeAlias = Admitted | Progress | Chunk | Final | Failed
