"""Owns the bookkeeping while an architecture emits its program: buffers, checked weights, cache states, op order.

It knows the naming of GGUF tensors (`blk.<layer>.<role>.weight`) and nothing of any particular architecture.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from bloomery.runtime.engram_hash import EngramHash
from bloomery.runtime.errors import ModelFileError
from bloomery.runtime.model_file import ModelFile, Tensor
from bloomery.runtime.ops_drafts import DraftFacts
from bloomery.runtime.program import (
    Add,
    Argmax,
    Buffer,
    CacheState,
    EmbedRows,
    MatMul,
    Op,
    Program,
    RmsNorm,
    SelectRows,
    View,
)

_Shape = tuple[int, ...]


class ProgramBuilder:
    """Collects one program. `prefix` is put before tensor and op names (`layer(i)` sets it to "blk.<i>.").

    Buffers are named by their role and shared by all layers. After `select_rows` new buffers hold the O wanted rows.
    """

    def __init__(self, model: ModelFile, epsilon: float) -> None:
        self.model = model
        self.epsilon = epsilon
        self.prefix = ""
        self.rows: Literal["step", "out"] = "step"
        self._buffers: dict[str, Buffer] = {}
        self._states: dict[str, CacheState] = {}
        self._weights: dict[str, Tensor] = {}
        self._borrowed: set[str] = set()
        self._ops: list[Op] = []

    # -- names ------------------------------------------------------------------------------------------------------
    def layer(self, index: int) -> None:
        """What follows belongs to layer `index`."""
        self.prefix = f"blk.{index}."

    def weight(self, role: str, shape: _Shape, suffix: str = "weight") -> str:
        """The full name of tensor `<prefix><role>.<suffix>`, which must exist with this shape (ne order)."""
        name = f"{self.prefix}{role}.{suffix}"
        self._weights[name] = self.model.tensor(name, shape)
        return name

    def grouped_weight(self, role: str, shape: tuple[int, int, int]) -> str:
        """A weight of one matrix a group, `shape` = (inputs, outputs, groups). Files store it so or with the matrices'
        rows one after the other, (inputs, outputs * groups): the same bytes."""
        name = f"{self.prefix}{role}.weight"
        inputs, outputs, groups = shape
        stored = self.model.tensors.get(name)
        if stored is None or len(stored.shape) < 3:
            self._weights[name] = replace(self.model.tensor(name, (inputs, outputs * groups)), shape=shape)
        else:
            self._weights[name] = self.model.tensor(name, shape)
        return name

    def optional_weight(self, role: str, shape: _Shape, suffix: str = "weight") -> str | None:
        """Like `weight`, or None if the file does not have the tensor."""
        return self.weight(role, shape, suffix) if self.model.has(f"{self.prefix}{role}.{suffix}") else None

    def buffer(self, role: str, width: int, dtype: Literal["f32", "i32"] = "f32") -> View:
        """The whole buffer `role`; declared on first use, of one width throughout the program."""
        name = role if self.rows == "step" else f"{role}.out"
        wanted = Buffer(name, width, self.rows, dtype)
        assert self._buffers.setdefault(name, wanted) == wanted, f"buffer {name} declared twice: {wanted}"
        return View(name, 0, width)

    def state(self, role: str, width: int, heads: int = 1) -> str:
        """A cache state of the present layer: `heads` heads of `width` elements for each (slot, position)."""
        name = f"{self.prefix}{role}"
        self._states[name] = CacheState(name, heads * width, heads=heads)
        return name

    def add_state(self, state: CacheState) -> str:
        """Declares a state of any kind; returns its name."""
        assert state.name not in self._states, f"state {state.name} declared twice"
        self._states[state.name] = state
        return state.name

    def emit(self, op: Op) -> None:
        self._ops.append(op)

    def op_name(self, role: str) -> str:
        return f"{self.prefix}{role}"

    def borrow(self, lender: ModelFile, name: str, shape: _Shape) -> str:
        """A tensor of another file, which must have it with this shape."""
        self._weights[name] = lender.tensor(name, shape)
        self._borrowed.add(name)
        return name

    # -- ops that every architecture emits --------------------------------------------------------------------------
    def embed(self, width: int, vocabulary: int) -> View:
        """The residual stream: the token's row of token_embd."""
        hidden = self.buffer("hidden", width)
        self.emit(EmbedRows("token_embd", hidden, self.weight("token_embd", (width, vocabulary))))
        return hidden

    def norm(self, role: str, x: View, out: View) -> View:
        """RMS norm of each head of x with the weight `role`; returns out."""
        self.emit(RmsNorm(self.op_name(role), x, out, self.weight(role, (x.width,)), self.epsilon))
        return out

    def matmul(self, x: View, *products: tuple[str, View]) -> None:
        """out = weight(role) @ x + bias(role) for each (role, out), as one op; biases where the file has them."""
        self.emit(
            MatMul(
                self.op_name("+".join(role for role, _ in products)),
                x,
                tuple(out for _, out in products),
                tuple(self.weight(role, (x.elements, out.elements)) for role, out in products),
                tuple(self.optional_weight(role, (out.elements,), "bias") for role, out in products),
            )
        )

    def add_to(self, hidden: View, role: str, y: View) -> None:
        """hidden += y."""
        self.emit(Add(self.op_name(role), hidden, y, hidden))

    def select_rows(self, hidden: View) -> View:
        """From here on only the rows whose logits are wanted are computed."""
        assert self.rows == "step"
        self.rows = "out"
        selected = self.buffer(hidden.buffer, hidden.width)
        self.emit(SelectRows("select_rows", hidden, selected))
        return selected

    def select_also(self, view: View) -> View:
        """Another whole buffer, cut to the wanted rows; after `select_rows`."""
        assert self.rows == "out"
        selected = self.buffer(view.buffer, view.width)
        self.emit(SelectRows(f"select_{view.buffer}", view, selected))
        return selected

    def head(self, hidden: View, vocabulary: int) -> None:
        """Final norm, logits and greedy token. A file without output.weight uses token_embd for the logits (tied)."""
        self.prefix = ""
        normed = self.norm("output_norm", hidden, self.buffer("normed", hidden.width))
        logits = self.buffer("logits", vocabulary)
        role = "output" if self.model.has("output.weight") else "token_embd"
        weight = self.weight(role, (hidden.width, vocabulary))
        self.emit(MatMul("output", normed, (logits,), (weight,), (None,)))
        self.emit(Argmax("argmax", logits, self.buffer("argmax", 1, "i32")))

    # -- the end ----------------------------------------------------------------------------------------------------
    def finish(
        self,
        *,
        vocabulary: int,
        context_length: int,
        layers: int,
        read_elsewhere: Iterable[str] = (),
        engram: EngramHash | None = None,
        inputs: tuple[str, ...] = (),
        reports: tuple[str, ...] = (),
        draft: DraftFacts | None = None,
        taps: tuple[int, ...] = (),
        target: str = "",
    ) -> Program:
        """The program. Tensors of the file that no op reads are an error: they would be a variant of the architecture
        that these ops do not compute. `read_elsewhere` names those that building used up, or that are rightly left.
        """
        known = self._weights.keys() - self._borrowed | set(read_elsewhere)
        unknown = [name for name in self.model.tensors if name not in known]
        if unknown:
            raise ModelFileError(
                f"{self.model.path}: tensor {unknown[0]} ({len(unknown)} such) has no place in architecture "
                f"{self.model.architecture} as it is implemented here",
                "the file is an unsupported variant, or its general.architecture is wrong",
            )
        return Program(
            architecture=self.model.architecture,
            buffers=self._buffers,
            states=self._states,
            weights=self._weights,
            ops=tuple(self._ops),
            vocabulary=vocabulary,
            context_length=context_length,
            layers=layers,
            logits="logits.out",
            argmax="argmax.out",
            engram=engram,
            inputs=inputs,
            reports=reports,
            draft=draft,
            taps=taps,
            target=target,
        )


def heads(whole: View, count: int, width: int, *, start: int = 0, stride: int = 0) -> View:
    """`count` heads of `width` elements inside a view of one piece, `stride` apart (default: side by side)."""
    assert whole.count == 1 and whole.elements >= start + (count - 1) * (stride or width) + width
    return View(whole.buffer, whole.start + start, width, count, stride or width)
