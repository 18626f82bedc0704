"""Chains of a decode step against the same ops launched one by one, on the emulator: the same bits."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from emulated_card import EmulatedCard
from oracle_data import quantised_file
from running import rows_of

from bloomery.gpu_worker.chains import Chained, NormedExperts, NormedProduct, Summed, chained
from bloomery.gpu_worker.fusions import fused
from bloomery.gpu_worker.lowering import Lowering
from bloomery.runtime.architectures import build_program
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.program import View

pytestmark = pytest.mark.timeout(300)


class Unchained(Lowering):
    def parts(self) -> Iterable[Chained]:
        return fused(self.program)


@pytest.mark.parametrize("rows", (1, 3))
def test_chains_change_no_bit(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms in products, sums in products, experts that choose for themselves: all buffers as before."""
    program = build_program(ModelFile.open(quantised_file("qwen3moe-Q4_K_M")))
    found = []
    for lowering in (Lowering, Unchained):
        monkeypatch.setattr("bloomery.gpu_worker.lowering.Lowering", lowering)
        card = EmulatedCard(program, rows=8)
        launches = card.run(rows_of(np.arange(7, 7 + rows)), block=False)
        names = {launch.kernel.function for launch in launches}
        assert ("normed_scores" in names) == (lowering is Lowering)
        assert ("normed_matmul" in names) == (lowering is Lowering and rows == 1)
        found.append({name: card.read(View(name, 0, buffer.width), rows) for name, buffer in program.buffers.items()})
    for name, values in found[0].items():
        assert np.array_equal(values, found[1][name]), name


def test_what_is_chained() -> None:
    """Every layer's sums, norms and experts; ops stay in order."""
    program = build_program(ModelFile.open(quantised_file("qwen3moe-Q4_K_M")))
    parts = list(chained(fused(program)))
    layers = sum(op.name.endswith("routed_experts") for op in program.ops)
    for kind, least in ((NormedExperts, layers - 1), (NormedProduct, layers), (Summed, layers)):
        assert sum(isinstance(part, kind) for part in parts) >= least, kind
    names = [name for part in parts for name in part.name.split(" & ")]
    assert names == [name for part in fused(program) for name in part.name.split(" & ")]
