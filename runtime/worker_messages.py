"""What the pool and its worker processes say to each other outside steps: start, compile, attach, errors.

Owns the messages' shape (msgpack maps with a `kind`). Steps themselves go through the arena only.

    worker -> pool   hello(scratch, stages, labels, kernels, rows): where the weights in its memory are found, if others
                     may read them . compiled(kernel) . progress(stage, done, total)
                     ready(weights, huge, unlocked, sees): of weights in its own memory the bytes, the part of these in
                     huge pages, why they are not locked where they should be, and how many others' it can read
                     error(type, message, hint)
    pool -> worker   compile(kernel) . attach(prefix, scratch, stages, rows): where those of all workers are found
                     (empty frame: doorbell)

A card worker compiles for itself while it attaches, tells of its card in ready(facts), and does errands between steps:

    pool -> worker   copy(source, target, positions) . read(name, slot, first, count) . write(name, slot, first, rows)
    worker -> pool   done(rows), rows being the bytes of a state's rows where there are some to send
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import msgpack

from bloomery.runtime.arena import ArenaShape, Lowered
from bloomery.runtime.errors import BloomeryError, ModelFileError, PlanError, WorkerLost

DOORBELL = b""

_ERROR_TYPES: Mapping[str, type[BloomeryError]] = {"ModelFileError": ModelFileError, "PlanError": PlanError}


@dataclass(frozen=True)
class WorkerStart:
    """Everything a worker is started with; travels as its one command line argument, in JSON.

    `owner` is the coordinator's name for files (`runtime_files`), `parent` its pid. `cpu` is the logical CPU to be
    pinned to. `spins`, `idle_ns` and `deadline_ns` are how long to spin at a barrier (pauses), to watch for the next
    step and to wait for another rank; one that `yields` lets others have its core meanwhile, one that does not sleeps
    for moments. `workload` is `module:function` of what makes the stages. `taps` and `target` are
    `architectures.load_program`'s; with `keep_choices` the program leaves the routers' choices behind
    (`router_choices`). Beside a card: `hand_offs` are the numbers of the routed layers with experts on the
    host, `tiers` is the text of the ExpertTiers, which says what experts these are, `hand_off_ns` is how long a side
    waits for the other inside a step. `weight_nodes` are the NUMA nodes of
    the ranks; `weight_files` those of a copy of the weights (`host_weights`), none where they are mapped. With
    `own_weights` a worker copies to its own memory what it multiplies, and with `mlock` it locks that there; with
    `lends` other ranks see that memory, and whoever is done with its share of a row's experts helps the others; `rows`
    is where a successor finds what its predecessor left there.
    """

    rank: int
    generation: int
    endpoint: str
    owner: str
    parent: int
    model: str
    taps: tuple[int, ...]
    target: str
    shape: ArenaShape
    cpu: int
    spins: int
    idle_ns: int
    deadline_ns: int
    time_stages: bool
    workload: str
    keep_choices: bool
    yields: bool = True
    hand_offs: tuple[int, ...] = ()
    hand_off_ns: int = 0
    weight_nodes: tuple[int, ...] = ()
    weight_files: tuple[str, ...] = ()
    own_weights: bool = False
    mlock: bool = False
    lends: bool = False
    rows: str = ""
    tiers: str = ""

    MODULE: ClassVar[str] = "bloomery.cpu_experts"
    TITLE: ClassVar[str] = "CPU-expert worker"

    @property
    def who(self) -> str:
        """What messages call the worker."""
        return f"{self.TITLE} {self.rank}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        lists = {name: tuple(fields[name]) for name in ("taps", "hand_offs", "weight_nodes", "weight_files")}
        if "stream_tiers" in fields:
            lists["stream_tiers"] = tuple((rows, text) for rows, text in fields["stream_tiers"])
        return cls(**{**fields, **lists, "shape": ArenaShape(**fields["shape"])})

    @property
    def identity(self) -> bytes:
        """Routing identity of this worker's socket: a restarted worker's differs from its predecessor's."""
        return b"%d.%d" % (self.rank, self.generation)


@dataclass(frozen=True)
class EngramOptions:
    """`cache_bytes`: room for rows that were read. `direct`: read past the page cache (O_DIRECT)."""

    cache_bytes: int = 256 << 20
    direct: bool = False


@dataclass(frozen=True)
class EngramStart(WorkerStart):
    """Of the engram I/O process; it has one rank, 0, and is pinned to no CPU (`cpu` is -1)."""

    cache_bytes: int = 0
    direct: bool = False

    MODULE: ClassVar[str] = "bloomery.engram_io"
    TITLE: ClassVar[str] = "engram I/O process"


@dataclass(frozen=True)
class CardStart(WorkerStart):
    """Of the worker of card number `card`; its rank comes after those of the CPU-expert workers. To blocks of at least
    `stream_rows` rows experts on the host come (0: there are none); `stream_tiers` says from how many rows on which
    ones stand on the card then: (rows, text of ExpertTiers), ascending, the last "", which is all of them; without any
    it is always all. `deterministic`: no row is computed in a block."""

    card: int = 0
    stream_rows: int = 0
    stream_tiers: tuple[tuple[int, str], ...] = ()
    deterministic: bool = False

    MODULE: ClassVar[str] = "bloomery.gpu_worker"
    TITLE: ClassVar[str] = "card worker"

    @property
    def who(self) -> str:
        return self.TITLE


def encode(kind: str, **fields: Any) -> bytes:
    packed: bytes = msgpack.packb({"kind": kind, **fields})
    return packed


def decode(frame: bytes) -> dict[str, Any]:
    message: dict[str, Any] = msgpack.unpackb(frame)
    return message


def lowered_of(message: Mapping[str, Any]) -> Lowered:
    """The `scratch` and `stages` of a hello or attach message."""
    return Lowered(tuple((name, nbytes) for name, nbytes in message["scratch"]), message["stages"])


def error_fields(error: BaseException) -> dict[str, str]:
    """Fields of the error message for an exception."""
    if isinstance(error, BloomeryError):
        return {"type": type(error).__name__, "message": error.message, "hint": error.hint}
    return {"type": type(error).__name__, "message": str(error), "hint": ""}


def error_of(message: Mapping[str, Any], who: str) -> BloomeryError:
    """The exception to raise in the coordinator: the worker's own where it is somebody's input, else WorkerLost."""
    kind = _ERROR_TYPES.get(message["type"])
    if kind is not None:
        return kind(f"{message['message']} (reported by {who})", message["hint"])
    return WorkerLost(f"{who} failed: {message['type']}: {message['message']}", message["hint"])
