"""Lowering of chains: the launches of norms with products after them, sums in products, and experts with their choice.

Owns the parameters of the kernels `normed_matmul`, `normed_scores`, `normed_choice`, `open_experts`, `close_experts`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bloomery.gpu_worker.chains import NormedChoice, NormedExperts, NormedProduct, Shared, Spreading, Summed, read_later
from bloomery.gpu_worker.hand_off_lowering import landing, lower_receive, sending
from bloomery.gpu_worker.launches import MAX_ROWS, float_word
from bloomery.gpu_worker.lowering_deepseek4 import softplus_choice
from bloomery.gpu_worker.products import (
    FLOAT_TYPES,
    JOBS,
    SUPER_TYPES,
    UNIT_TYPES,
    Activations,
    Job,
    activation_form,
    blocks,
    job_words,
    most_openers,
    resident,
    ring_bytes,
    rows_of_warp,
)
from bloomery.runtime.model_file import Tensor
from bloomery.runtime.ops_deepseek4 import SoftplusRouter
from bloomery.runtime.ops_hand_off import HandOffReceive
from bloomery.runtime.program import Add, MatMul, RoutedExperts, Router

if TYPE_CHECKING:
    from bloomery.gpu_worker.fusions import AddNorm
    from bloomery.gpu_worker.lowering import Lowering

_NORM_THREADS: Final = 512
_SCORERS: Final = 4  # warps of a block; matmul.cu
_LEAST_OPENERS: Final = 8  # warps of a block of open_experts
_OPENERS_EACH: Final = 2  # blocks that a multiprocessor is to have
_UNEVEN: Final = 1.06
"""How much more than the least of its warps' turns a block may have, if it has more warps for it."""
_MOST_OUTPUTS: Final = 49152
"""Of a product that makes the norm: a head has so much to do that smaller blocks without a norm are faster."""
_CLOSERS: Final = 2  # blocks of close_experts that a multiprocessor holds
_LEAST_SHARED: Final = 96 << 10
"""Bytes of shared memory that a block has on every card that is supported."""
_MOST_USED: Final = 16
_MOST_EXPERTS: Final = 256  # router.cuh
_MOST_SPREAD: Final = 4  # spread.cuh
NO_SCORES: Final = (0,) * 10
NO_RESIDUAL: Final = (0,) * 4


def lower_chain(
    lowering: Lowering, chain: Shared | Summed | Spreading | NormedProduct | NormedExperts | NormedChoice
) -> None:
    """The launches of a chain; its ops one after the other where there is no kernel for all of it."""
    match chain:
        case Summed(op=MatMul() as product, add=add):
            lowering.lower_matmul(product, residual(lowering, add))
            lowering.forget_written(product, add)
        case Summed(op=HandOffReceive() as receive, add=add):
            lower_receive(lowering, receive, add)
            lowering.forget_written(receive, add)
        case Shared():
            _experts(lowering, chain, None)
        case Summed(op=Shared() as shared, add=add):
            _experts(lowering, shared, add)
        case NormedProduct():
            _normed_product(lowering, chain)
        case NormedExperts():
            _normed_experts(lowering, chain)
        case NormedChoice():
            _normed_choice(lowering, chain)
        case Spreading():
            _spreading(lowering, chain)


def _experts(lowering: Lowering, shared: Shared, add: Add | None) -> None:
    if joined_experts(lowering, shared.experts) and lowering._count(shared.experts.x):
        open_and_close(lowering, shared, NO_SCORES, add)
        lowering.forget_written(*shared.parts, add)
    else:
        lowering.lower_each(*shared.parts, *([add] if add else []))


def residual(lowering: Lowering, add: Add | None) -> tuple[int, ...]:
    """The Residual of matmul.cu."""
    return (*lowering.context.view(add.x), *lowering.context.view(add.out)) if add else NO_RESIDUAL


def _spreading(lowering: Lowering, chain: Spreading) -> None:
    """One row's copies are made by the kernel that the result comes from."""
    op, post, collapse = chain.op, chain.post, chain.collapse
    if not spreads(lowering, chain):
        lowering.lower_each(op, post, *([collapse] if collapse else []))
        return
    if isinstance(op, Shared):
        lowering.label = op.name
        open_and_close(lowering, op, NO_SCORES, None, chain)
        lowering.forget_written(*op.parts, post, collapse)
        return
    width, outputs = op.x.elements, op.outs[0].elements
    weights, kind, row_bytes = lowering._weight(op.weights[0], width, outputs)
    lowering.label = op.name
    x = lowering.form_of(kind, op.x)
    lowering.label = chain.name
    grid = (lowering._warp_blocks(kind, width, [Job(0, 0, 0, outputs, 0)], 1),)
    words: tuple[int, ...] = (weights, lowering._row(op.outs[0])[0], outputs, x.values, x.scales, width, row_bytes)
    words, shared = (*words, *_spread(lowering, chain)), width // 4 * 5 + lowering.rings(kind, width)
    lowering.emit("matmul", "spread_matmul", grid, 32 * _SCORERS, *words, kind=kind, shared=shared)
    lowering.forget_written(op, post, collapse)


def spreads(lowering: Lowering, chain: Spreading) -> bool:
    """Whether there is a kernel for all of it."""
    op, post = chain.op, chain.post
    if lowering._count(post.y) != 1 or post.streams.count > _MOST_SPREAD:
        return False
    if isinstance(op, Shared):
        return joined_experts(lowering, op.experts)
    return lowering.program.weights[op.weights[0]].quant_type.name in UNIT_TYPES


def _spread(lowering: Lowering, chain: Spreading | None) -> tuple[int, ...]:
    """The Spread of spread.cuh; of none: zeros."""
    if chain is None:
        return (0,) * 9
    post, collapse = chain.post, chain.collapse
    (streams, _, copy), (out, _, out_copy) = lowering._heads(post.streams), lowering._heads(post.out)
    how = (lowering._row(post.post)[0], lowering._row(post.mixing)[0])
    collapsed = (lowering._row(collapse.pre)[0], lowering._row(collapse.out)[0]) if collapse else (0, 0)
    return (streams, copy, *how, out, out_copy, post.streams.count, *collapsed)


def _norm_words(lowering: Lowering, op: AddNorm) -> tuple[tuple[int, ...], Activations | None]:
    """The Normed of normed.cuh; and where the result is as Q8_K, if somebody wants it."""
    norm, width = op.norm, op.norm.x.width
    weight = lowering._weight(norm.weight, width, 1)[0]
    made = None
    types = {lowering.program.weights[name].quant_type.name for name in op.readers}
    if width % 256 == 0 and types & set(SUPER_TYPES):
        made = lowering._place("Q8_K", "activations:Q8_K", width, lowering._room(norm.x))
    target = (made.values, made.scales, made.stride) if made else (0, 0, 0)
    place = lowering.context.view
    return (*place(norm.x), weight, width, float_word(norm.epsilon), *place(norm.out), *target), made


def _normed_product(lowering: Lowering, chain: NormedProduct) -> None:
    """Products of the commonest type make the norm, those of others follow. For one row: blocks share no weights."""
    norm, product = chain.norm, chain.product
    width = product.x.elements
    kinds = [lowering.program.weights[name].quant_type for name in product.weights]
    names = [kind.name for kind in kinds if kind.name in SUPER_TYPES]
    few = sum(out.elements for out in product.outs) <= _MOST_OUTPUTS
    if lowering._count(product.x) != 1 or width % 256 or not names or not few:
        lowering.lower_each(norm, product)
        return
    most = max(names, key=names.count)
    kind = next(kind for kind in kinds if kind.name == most)
    shared = _NORM_THREADS // 32 * ring_bytes(kind, width) + 4 * width + width // 4 * 5
    if shared > lowering.context.block_shared:
        lowering.lower_each(norm, product)
        return
    chosen = [i for i, each in enumerate(kinds) if each.name == most][:JOBS]
    lowering._forget({norm.norm.out.buffer})
    words, made = _norm_words(lowering, norm)
    jobs, row_bytes = [], 0
    for i in chosen:
        out = product.outs[i]
        address, _, row_bytes = lowering._weight(product.weights[i], width, out.elements)
        jobs.append(Job(address, lowering._bias(product.biases[i], out.elements), *_place(lowering, product, i)))
    together = rows_of_warp(most, width)
    sets = sum(blocks(job.outputs, together) for job in jobs)
    grid = (min(resident(most) * lowering.context.multiprocessors, sets),)
    lowering.label = chain.name
    lowering.emit(
        "matmul", "normed_matmul", grid, _NORM_THREADS, *job_words(jobs), *words, row_bytes, kind=most, shared=shared
    )
    if made:
        lowering.formed["Q8_K"] = norm.norm.out, made
    rest = [i for i in range(len(kinds)) if i not in chosen]
    if rest:
        outs, weights = tuple(product.outs[i] for i in rest), tuple(product.weights[i] for i in rest)
        lowering.label = product.name
        lowering.lower_matmul(MatMul(product.name, product.x, outs, weights, tuple(product.biases[i] for i in rest)))
    lowering.forget_written(product)


def _place(lowering: Lowering, product: MatMul, i: int) -> tuple[int, int, int]:
    """Output address, outputs, output stride of a job."""
    address, stride = lowering._row(product.outs[i])
    return address, product.outs[i].elements, stride


def _normed_experts(lowering: Lowering, chain: NormedExperts) -> None:
    """Scores of normed rows; then experts that choose for themselves."""
    norm, product, router, experts = chain.norm, chain.routed.product, chain.routed.router, chain.shared.experts
    few = router.logits.elements <= _MOST_EXPERTS
    if not few or not joined_experts(lowering, experts) or not _scores_fit(lowering, product):
        lowering.lower_each(norm, chain.routed, Summed(chain.shared, chain.add) if chain.add else chain.shared)
        return
    _scores(lowering, norm, product)
    lowering.label = f"{router.name} & {experts.name}"
    open_and_close(lowering, chain.shared, _scored(lowering, router), chain.add)
    lowering.forget_written(router, *chain.shared.parts, chain.add)


def _normed_choice(lowering: Lowering, chain: NormedChoice) -> None:
    """Scores of normed rows, and the choice by the last block to end."""
    if not _scores_fit(lowering, chain.product):
        lowering.lower_each(chain.norm, chain.product, chain.router)
        return
    _scores(lowering, chain.norm, chain.product, chain.router)
    lowering.forget_written(chain.router)


def _scores_fit(lowering: Lowering, product: MatMul) -> bool:
    """Whether a router's product is one of few rows by floats, which `normed_scores` forms."""
    tensor, width = lowering.program.weights[product.weights[0]], product.x.elements
    kind, rows = tensor.quant_type.name, lowering._count(product.x)
    if kind not in FLOAT_TYPES or len(product.outs) > 1 or product.biases[0] or not 0 < rows <= MAX_ROWS:
        return False
    whole = tensor.quant_type.row_bytes(width) % 16 == 0 and lowering.context.view(product.x)[1] % 4 == 0
    return whole and _scores_shared(lowering, product) <= _LEAST_SHARED


def _scores_shared(lowering: Lowering, product: MatMul) -> int:
    """Bytes of shared memory: the normed row, rows of weights; the choice takes their place."""
    kind, width = lowering.program.weights[product.weights[0]].quant_type, product.x.elements
    return max(4 * width + _SCORERS * kind.row_bytes(width), 8 * product.outs[0].elements)


def _scores(lowering: Lowering, norm: AddNorm, product: MatMul, router: SoftplusRouter | None = None) -> None:
    """The launch of a norm and a router's product, perhaps with the choice."""
    width, count, rows = product.x.elements, product.outs[0].elements, lowering._count(product.x)
    weights, kind, row_bytes = lowering._weight(product.weights[0], width, count)
    lowering._forget({norm.norm.out.buffer})
    made_words, made = _norm_words(lowering, norm)
    words = (weights, row_bytes, count, *made_words, *lowering._row(product.outs[0]))
    function, names = "normed_scores", [norm.name, product.name]
    if router is not None:
        words = (*words, *softplus_choice(lowering, router), lowering.counters())
        function, names = "normed_choice", [*names, router.name]
    lowering.label = " & ".join(names)
    grid, shared = (blocks(count, _SCORERS), rows), _scores_shared(lowering, product)
    lowering.emit("matmul", function, grid, _NORM_THREADS, *words, kind=kind, shared=shared)
    if made:
        lowering.formed["Q8_K"] = norm.norm.out, made
    lowering.forget_written(product)


def _scored(lowering: Lowering, router: Router) -> tuple[int, ...]:
    """The Scored of router.cuh."""
    return (*lowering._row(router.logits), *lowering._choice(router))


def joined_experts(lowering: Lowering, op: RoutedExperts, more: int = 0) -> bool:
    """Whether `open_and_close` has kernels for these experts and so many that every row takes."""
    gate, up, down = (lowering.program.weights[name] for name in (op.gate, op.up, op.down))
    kinds = [tensor.quant_type.name for tensor in (gate, up, down)]
    known = kinds[0] == kinds[1] not in FLOAT_TYPES and kinds[2] in SUPER_TYPES and op.ids.elements + more <= _MOST_USED
    if not known or down.shape[0] % down.quant_type.block_elements:
        return known
    least = _opening_shared(gate, op.x.elements, _LEAST_OPENERS)
    closing = _closing(lowering, op, op.ids.elements + more, _CLOSERS)[2]
    return max(least, closing) <= lowering.context.block_shared


def _opening_shared(gate: Tensor, inputs: int, warps: int) -> int:
    """Shared memory of a block of open_experts: rings, and the row as Q8_K."""
    return warps * ring_bytes(gate.quant_type, inputs) + inputs // 4 * 5


def _closing(lowering: Lowering, op: RoutedExperts, items: int, less: int = 0) -> tuple[int, int, int]:
    """Blocks of close_experts, outputs of each at most, and its shared memory: rings, hidden rows as Q8_K, sums. A row
    has `less` blocks less."""
    down, rows = lowering.program.weights[op.down], lowering._count(op.x)
    hidden, outputs = down.shape[:2]
    together = rows_of_warp(down.quant_type.name, hidden)
    sets = blocks(outputs, together)
    closers = min(sets, max(1, blocks(_CLOSERS * lowering.context.multiprocessors, rows or 1) - less))
    each = together * blocks(sets, closers)
    return closers, each, items * (ring_bytes(down.quant_type, hidden) + hidden // 4 * 5 + 4 * each)


def joined_always(lowering: Lowering, shared: Shared) -> bool:
    """Whether `open_and_close` takes an expert that every row takes with these: one row (blocks share no weights), the
    same types and widths, and nobody reads what lies between its products."""
    op, always = shared.experts, shared.always
    if always is None or lowering._count(op.x) != 1 or not joined_experts(lowering, op, 1):
        return False
    weights = lowering.program.weights
    routed = [weights[name] for name in (op.gate, op.up, op.down)]
    own = [weights[name] for name in (*always.opened.weights, *always.closed.weights)]
    alike = all(
        one.quant_type == other.quant_type and one.shape[:2] == other.shape[:2]
        for one, other in zip(routed, own, strict=True)
    )
    between = (*always.opened.outs, always.hidden.out, *always.closed.outs)
    return alike and not any(read_later(lowering.program, always.add, view) for view in between)


def open_and_close(
    lowering: Lowering, shared: Shared, scored: tuple[int, ...], add: Add | None, spreading: Spreading | None = None
) -> None:
    """silu(gate) * up of every item; then down's products, their inputs rounded and their sums formed meanwhile. Each
    has a block more for the hand-off's half that it takes in, but no more than the card holds at a time: one too many
    begins when the others are done."""
    op, always = shared.experts, shared.always
    items = op.ids.elements + int(always is not None)
    rows, used, inputs, outputs = lowering._count(op.x), op.ids.elements, op.x.elements, op.out.elements
    hidden, experts = lowering.program.weights[op.gate].shape[1:]
    ids, mix, slots = lowering._row(op.ids), lowering._row(op.mix), lowering.context.slot_map(op.gate)
    gate, kind, row_bytes = lowering._weight(op.gate, inputs, hidden, experts)
    up = lowering._weight(op.up, inputs, hidden, experts)[0]
    x = lowering.form_of(kind, op.x)
    opened = lowering.context.scratch("gate", lowering._room(op.x) * items * hidden * 4)
    sends, lands = int(shared.send is not None), int(shared.receive is not None)
    most = max(1, (_OPENERS_EACH * lowering.context.multiprocessors - sends) // max(1, rows * items))
    sets = blocks(2 * hidden, max(2, rows_of_warp(kind, inputs)))
    room, tensor = lowering.context.block_shared, lowering.program.weights[op.gate]
    fitting = [w for w in range(_LEAST_OPENERS, most_openers(kind) + 1) if _opening_shared(tensor, inputs, w) <= room]
    openers = _warps_of_block(sets, most, max(fitting, default=_LEAST_OPENERS))
    grid = (min(blocks(sets, openers), most) + sends, items, rows)
    places = (gate, up, opened, hidden, hidden, x.values, x.scales, x.stride)
    words: tuple[int, ...] = (*places, *ids, *mix, used, slots, inputs, row_bytes, float_word(op.limit))
    early = bool(sends and lands)
    comes = landing(lowering, shared.receive, early)
    words = (*words, *_opened(lowering, shared), *scored, *sending(lowering, shared.send))
    words = (*words, *(comes if early else landing(lowering, None, False)))
    memory = _opening_shared(tensor, inputs, openers)
    lowering.emit("matmul", "open_experts", grid, 32 * openers, *words, kind=kind, shared=memory)
    down, kind, row_bytes = lowering._weight(op.down, hidden, outputs, experts)
    closers, each, memory = _closing(lowering, op, items, lands)
    words = (down, *lowering._row(op.out), outputs, opened, hidden, *ids, *mix, used, slots, hidden, row_bytes)
    after = [add, *((spreading.post, spreading.collapse) if spreading else ())]
    lowering.label = " & ".join([op.name, *(each.name for each in after if each)])
    own = lowering._weight(always.closed.weights[0], hidden, outputs)[0] if always else 0
    words = (*words, each, own, *residual(lowering, add), *_spread(lowering, spreading))
    words = (*words, *comes)
    lowering.emit("matmul", "close_experts", (closers + lands, rows), 32 * items, *words, kind=kind, shared=memory)


def _warps_of_block(sets: int, most: int, most_warps: int) -> int:
    """Of a block of open_experts, `most` of which share the sets of an item: so many that few wait for the last ones.
    More warps hide more of the way to memory."""
    turns = {warps: blocks(sets, warps * most) * warps for warps in range(_LEAST_OPENERS, most_warps + 1)}
    return max(warps for warps, all_of in turns.items() if all_of <= _UNEVEN * min(turns.values()))


def _opened(lowering: Lowering, shared: Shared) -> tuple[int, ...]:
    """The Opened of experts.cuh; of none: zeros."""
    always = shared.always
    if always is None:
        return (0,) * 3
    inputs, hidden = always.opened.x.elements, always.hidden.out.elements
    gate, up = (lowering._weight(name, inputs, hidden)[0] for name in always.opened.weights)
    return gate, up, float_word(always.hidden.limit)


def separate_experts(lowering: Lowering, op: RoutedExperts) -> None:
    """Products of every item (row and rank) with its expert's gate and up, silu, down, and the sum by ranks."""
    rows, used = lowering._count(op.x), op.ids.elements
    hidden = lowering.program.weights[op.gate].shape[1]
    items = lowering._room(op.x) * used
    kinds = [lowering.program.weights[name].quant_type.name for name in (op.gate, op.up, op.down)]
    gate, up = (lowering.context.scratch(name, items * hidden * 4) for name in ("gate", "up"))
    jobs = [(op.gate, Job(0, 0, gate, hidden, hidden)), (op.up, Job(0, 0, up, hidden, hidden))]
    for some in [jobs] if kinds[0] == kinds[1] else [jobs[:1], jobs[1:]]:
        _products(
            lowering, op, lowering.form_of(lowering.program.weights[some[0][0]].quant_type.name, op.x), some, False
        )
    form = activation_form(kinds[2])
    source = (gate, up, hidden, hidden, hidden, float_word(op.limit))
    opened = lowering._make_form(form, f"hidden:{form}", source, hidden, rows * used, items)
    parts = lowering.context.scratch("experts", items * op.out.elements * 4)
    _products(lowering, op, opened, [(op.down, Job(0, 0, parts, op.out.elements, op.out.elements))], True)
    mixed = (parts, *lowering._row(op.mix), used, *lowering._row(op.out), op.out.elements)
    lowering._each("experts_sum", op.out, *mixed)


def _products(
    lowering: Lowering, op: RoutedExperts, x: Activations, jobs: list[tuple[str, Job]], of_each_item: bool
) -> None:
    width, outputs, experts = lowering.program.weights[jobs[0][0]].shape
    placed = []
    for name, job in jobs:
        address, kind, row_bytes = lowering._weight(name, width, outputs, experts)
        placed.append(Job(address, 0, job.out, job.outputs, job.out_stride))
    rows, used = lowering._count(op.x), op.ids.elements
    grid = (lowering._warp_blocks(kind, width, placed, max(1, rows * used * len(jobs))), rows * used, len(jobs))
    ids, slots = lowering._row(op.ids), lowering.context.slot_map(op.gate)
    words = (x.values, x.scales, x.stride, int(of_each_item), *ids, used, slots, width, row_bytes)
    shared = lowering.rings(kind, width)
    lowering.emit("matmul", "experts", grid, 128, *job_words(placed), *words, kind=kind, shared=shared)
