"""Programs whose routers leave their choices behind: each layer's expert ids in a buffer of its own.

Owns the change of a program. Ordinary programs have one buffer of expert ids, which every layer overwrites; who wants
to know what the router of each layer picked runs the changed program and reads the buffers after a step. Nothing else
differs: every op computes what it computed.
"""

from __future__ import annotations

from dataclasses import replace

from bloomery.runtime.ops_deepseek4 import SoftplusRouter
from bloomery.runtime.program import Buffer, Op, Program, RoutedExperts, Router
from bloomery.runtime.tensor_roles import layer_of


def keep_choices(program: Program) -> Program:
    """The program with a buffer `expert_ids:LAYER` (rows x experts used, i32) for each layer that routes."""
    buffers: dict[str, Buffer] = dict(program.buffers)

    def own(op: Op) -> Op:
        if not isinstance(op, Router | SoftplusRouter | RoutedExperts):
            return op
        view, name = op.ids, choices_buffer(op)
        buffers[name] = replace(program.buffers[view.buffer], name=name)
        return replace(op, ids=replace(view, buffer=name))

    ops = tuple(own(op) for op in program.ops)
    return replace(program, ops=ops, buffers=buffers)


def choices_buffer(op: Router | SoftplusRouter | RoutedExperts) -> str:
    """The name of an op's buffer in a program that keeps choices."""
    layer = layer_of(op.name)
    assert layer is not None, op.name
    return f"expert_ids:{layer}"
