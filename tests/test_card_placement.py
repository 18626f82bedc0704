"""Plan a on paper: terms, tiers and refusals for machines that are not here, and what bloomery-plan says of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from deepseek_data import tiny4, tiny41
from oracle_data import quantised_file
from paper_model import PaperQwen3

from bloomery.gpu_worker.launches import MAX_ROWS
from bloomery.gpu_worker.lowering import lower
from bloomery.gpu_worker.prompt_lowering import LEAST_ROWS, lower_prompt
from bloomery.gpu_worker.sizing import SizingContext
from bloomery.launcher import plan as plan_program
from bloomery.runtime import card_probe, placement
from bloomery.runtime.architectures import build_program
from bloomery.runtime.card_probe import CardRoom
from bloomery.runtime.daemon_config import DaemonConfig
from bloomery.runtime.errors import PlanError
from bloomery.runtime.expert_tiers import ExpertTiers, routed_ops
from bloomery.runtime.hot_list import HotList
from bloomery.runtime.memory_terms import CARD_ROWS, PROMPT_ROWS, card_scratch_bytes
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.placement import MemoryRoom, Plan, make_plan
from bloomery.runtime.program import Program, RoutedExperts
from bloomery.runtime.step_prediction import HAND_OFF_SECONDS, LAUNCH_SECONDS, Bandwidth, predict

GIB = 1 << 30
CONFIG = DaemonConfig("paper", plan="a", context=8192, slots=1, prompt_block=512, processes=14)
EXPERTS = 128


@pytest.fixture(scope="module")
def program() -> Program:
    return build_program(PaperQwen3())


def room(card: float, host: float, shared: float = 64) -> MemoryRoom:
    """GiB free of a card, of the host and in /dev/shm; a card of 0 is none."""
    cards = (CardRoom(0, "paper card", "sm_90", int(card * GIB), int(card * GIB)),) if card else ()
    return MemoryRoom(int(host * GIB), int(shared * GIB), cards, "" if card else "the NVIDIA driver sees no card")


def term(plan: Plan, name: str) -> int:
    return sum(term.nbytes for term in plan.terms if term.name == name)


# card, host, /dev/shm in GiB; changes to CONFIG; the plan, or which term is refused; least, greatest share on the card
BUDGETS: Sequence[tuple[float, float, float, dict[str, Any], str, float, float]] = (
    (141, 128, 64, {}, "a", 1.0, 1.0),
    (24, 64, 32, {}, "a", 1.0, 1.0),
    (20, 64, 32, {}, "a", 1.0, 1.0),
    (16, 64, 32, {}, "a", 0.70, 0.85),
    (12, 64, 32, {}, "a", 0.45, 0.65),
    (8, 64, 32, {}, "a", 0.2, 0.4),
    (3.2, 64, 32, {}, "a", 0.0, 0.1),
    (1.5, 64, 32, {}, "dense weights takes", 0, 0),
    (3, 64, 32, {"context": 40960}, "KV cache takes", 0, 0),
    (8, 8, 8, {}, "host experts takes", 0, 0),
    (16, 64, 32, {"plan": "auto", "context": 0}, "a", 0.5, 0.85),
    (1.5, 64, 32, {"plan": "auto"}, "cpu", 0, 0),
    (0, 64, 32, {"plan": "auto"}, "cpu", 0, 0),
    (0, 64, 32, {}, "plan a needs a card", 0, 0),
    (24, 64, 0.01, {}, "logits takes", 0, 0),
)


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda b: f"{b[0]}-{b[1]}-{b[4]}")
def test_budgets(program: Program, budget: tuple[float, float, float, dict[str, Any], str, float, float]) -> None:
    card, host, shared, changes, outcome, least, greatest = budget
    config, free = replace(CONFIG, **changes), room(card, host, shared)
    if outcome not in ("a", "cpu"):
        with pytest.raises(PlanError, match=outcome) as caught:
            make_plan(config, program, free)
        assert caught.value.hint and ("too many; " in caught.value.message or "takes" not in outcome)
        return
    plan = make_plan(config, program, free)
    assert plan.name == outcome and plan.total("mapped", "shared", "private") <= free.memory
    if outcome == "cpu":
        assert plan.card is None and plan.tiers is None and plan.note
        return
    assert plan.card and plan.tiers and plan.total("card") <= plan.card.free
    assert least <= plan.tiers.share <= greatest
    assert term(plan, "card experts") + term(plan, "host experts") == sum(
        layer.nbytes * layer.experts for layer in routed_ops(program)
    )
    assert plan.processes == (0 if plan.tiers.share == 1 else 14)
    if plan.tiers.share < 1:
        smallest = min(layer.nbytes for layer in plan.tiers.layers)
        assert plan.card.free - plan.total("card") < smallest, "another expert would have fitted"


@pytest.mark.parametrize("block", [24, 512])
def test_experts_on_the_host_are_copied_where_both_fit(
    program: Program, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """`copy` asks for it, `auto` takes it where it pays and leaves a fifth of the memory; what comes to the card for
    prompts is wanted in the file as well."""
    config = replace(CONFIG, prompt_block=block)
    pays: list[int] = []
    monkeypatch.setattr("bloomery.runtime.placement.own_copy_pays", lambda nbytes, ranks: bool(pays))
    mapped = make_plan(config, program, room(8, 64))
    experts = term(mapped, "host experts")
    assert mapped.host_weights == "mmap" and mapped.total("mapped") == experts > 8 * GIB
    assert make_plan(replace(config, host_weights="mmap"), program, room(8, 64)) == mapped
    pays.append(1)
    assert make_plan(replace(config, host_weights="mmap"), program, room(8, 64)) == mapped
    copied = make_plan(config, program, room(8, 64))
    assert copied.host_weights == "copy" and copied.digest == mapped.digest and copied.tiers == mapped.tiers
    assert term(copied, "host experts") == experts and copied.total("mapped") == term(copied, "streamed experts")
    assert bool(copied.stream_rows) == (block == 512)
    assert term(copied, "streamed experts") == (experts if copied.stream_rows else 0)
    assert copied.total("private") - term(copied, "snapshots") == (
        mapped.total("private") - term(mapped, "snapshots") + experts
    )
    taken = copied.total("mapped", "shared", "private") - term(copied, "snapshots")
    for part, wanted in ((0.79, "copy"), (0.81, "mmap")):
        assert make_plan(config, program, room(8, taken / part / GIB)).host_weights == wanted
    forced = replace(config, host_weights="copy")
    assert make_plan(forced, program, room(8, (taken + GIB) / GIB)).host_weights == "copy"
    with pytest.raises(PlanError, match="too many"):
        make_plan(forced, program, room(8, taken / GIB - 0.1))
    assert make_plan(forced, program, room(141, 64)).host_weights == "mmap", "all on the card"


def test_a_refusal_is_exact(program: Program) -> None:
    """With the bytes that it names the plan fits; with one less it does not."""
    bare = replace(CONFIG, context=16384)
    with pytest.raises(PlanError) as caught:
        make_plan(bare, program, room(2, 64))
    words = caught.value.message.split()
    missing = int(words[words.index("too") - 1])
    exact = 2 * GIB + missing

    def at(nbytes: int) -> Plan:
        return make_plan(bare, program, replace(room(1, 64), cards=(CardRoom(0, "c", "sm_90", nbytes, nbytes),)))

    assert at(exact).total("card") == exact
    with pytest.raises(PlanError, match=" 1 too many"):
        at(exact - 1)


@pytest.mark.parametrize("name", ("qwen3moe-Q4_K_M", "deepseek2-v3-Q3_K_M", "deepseek2-lite-Q8_0", "llama-Q4_K_M"))
@pytest.mark.parametrize("context", [64, 4096])
def test_scratch_is_bounded_by_its_term(name: str, context: int) -> None:
    program = build_program(ModelFile.open(quantised_file(name)))
    for rows in (MAX_ROWS, 200):
        check_scratch(program, context, rows)


@pytest.mark.parametrize("path", (lambda: tiny41("a"), tiny4), ids=("deepseek41", "deepseek4"))
def test_scratch_of_deepseek_is_bounded_by_its_term(path: Callable[[], Path]) -> None:
    for context, rows in ((64, MAX_ROWS), (4096, 200)):
        check_scratch(build_program(ModelFile.open(path())), context, rows)


def check_scratch(program: Program, context: int, rows: int) -> None:
    """No less than what lowering asks for, and not several times as much: of attention's parts, which not every model
    needs, at most 256 MiB."""
    assert (CARD_ROWS, PROMPT_ROWS) == (MAX_ROWS, LEAST_ROWS)
    sizing = SizingContext(program, context, "f16")
    lower(program, sizing, MAX_ROWS, MAX_ROWS)
    if rows > MAX_ROWS:
        lower_prompt(program, sizing, rows, rows)
    wanted = sum(sizing.wanted.values())
    assert wanted <= card_scratch_bytes(program, context, rows) <= 3 * wanted + (288 << 20)


def test_scratch_of_true_shapes(program: Program) -> None:
    check_scratch(program, 16384, MAX_ROWS)
    check_scratch(program, 16384, 512)


def test_tiers_follow_the_hot_list(program: Program) -> None:
    layers = routed_ops(program)
    each = sum(layer.nbytes for layer in layers)
    ranks = {layer.layer: tuple(range(EXPERTS - 1, -1, -1)) for layer in layers}
    hot = HotList("paper", len(layers), EXPERTS, ranks)
    tiers = ExpertTiers.chosen(program, 10 * each, hot)
    assert set(tiers.on_card.values()) == {tuple(range(EXPERTS - 10, EXPERTS))}
    assert tiers.card_bytes == 10 * each and tiers.host_layers == tuple(range(len(layers)))
    plain = ExpertTiers.chosen(program, 10 * each, None)
    assert set(plain.on_card.values()) == {tuple(range(10))}
    counts = {layer.layer: tuple(1000 if layer.layer == 5 else 1 for _ in range(EXPERTS)) for layer in layers}
    counts[7] = (90_000, *(1 for _ in range(EXPERTS - 1)))
    counted = ExpertTiers.chosen(program, 10 * each, replace(hot, counts=counts))
    assert counted.on_card[layers[7].gate] == (EXPERTS - 1,), "one expert of layer 7 takes nearly all its calls"
    assert counted.hit_share(layers[7], replace(hot, counts=counts)) == pytest.approx(90_000 / 90_127)
    assert counted.hit_share(layers[7], None) == 1 / EXPERTS
    for made in (tiers, plain, counted, ExpertTiers.everything(program), ExpertTiers.chosen(program, 0, None)):
        assert dict(ExpertTiers.of_text(program, made.text()).on_card) == dict(made.on_card)
    assert ExpertTiers.of_text(program, "") == ExpertTiers.everything(program)
    assert ExpertTiers.everything(program).host_layers == ()


def test_placements_differ_in_their_digest(program: Program) -> None:
    plans = [make_plan(CONFIG, program, room(size, 64)) for size in (141, 24, 16, 12)]
    assert plans[0].digest == plans[1].digest and len({plan.digest for plan in plans}) == 3


def test_the_card_with_most_room_is_taken_and_card_memory_limits_it(program: Program) -> None:
    cards = tuple(CardRoom(i, f"card {i}", "sm_90", size * GIB, size * GIB) for i, size in enumerate((12, 48, 16)))
    plan = make_plan(CONFIG, program, replace(room(0, 64), cards=cards))
    assert plan.card and plan.card.number == 1
    assert cards[1].limited(24 * GIB).free == 24 * GIB and cards[1].limited(0) == cards[1]
    assert cards[0].limited(24 * GIB).free == 12 * GIB


def test_prediction_is_bytes_over_bandwidth(program: Program) -> None:
    speed = Bandwidth(host=80e9, card=3.3e12)
    fixed = LAUNCH_SECONDS * len(program.ops)
    whole = predict(program, ExpertTiers.everything(program), speed, position=1024, cache_bytes=2)
    none = predict(program, ExpertTiers.chosen(program, 0, None), speed, position=1024, cache_bytes=2)
    host = predict(program, None, speed, position=1024, cache_bytes=2)
    assert whole and none and host
    assert whole.card_bytes == pytest.approx(2.0e9, rel=0.1), "about 2.0 GB are read a token"
    assert none.host_bytes == pytest.approx(1.07e9, rel=0.03), "of which 1.07 GB are routed experts"
    assert whole.seconds == pytest.approx(whole.card_bytes / 3.3e12 + fixed) and whole.hand_offs == 0
    assert none.bound_seconds == pytest.approx(none.card_bytes / 3.3e12 + none.host_bytes / 80e9)
    assert none.seconds == pytest.approx(none.bound_seconds + fixed + 48 * HAND_OFF_SECONDS)
    assert host.seconds == pytest.approx(host.host_bytes / 80e9) and host.host_bytes == pytest.approx(whole.card_bytes)
    half = ExpertTiers.chosen(program, ExpertTiers.everything(program).card_bytes // 2, None)
    between = predict(program, half, speed, position=1024, cache_bytes=2)
    assert between and whole.seconds < between.seconds < none.seconds
    assert predict(program, half, Bandwidth(card=1e12), position=0, cache_bytes=2) is None
    assert predict(program, None, Bandwidth(card=1e12), position=0, cache_bytes=2) is None


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = plan_program.main(["--demo", "tiny-qwen3moe", "--no-probe", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_program_shows_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--plan", "a", "--card", "2GiB", "--host", "8GiB", "--card-speed", "1TB", "--json")
    found = json.loads(out)
    assert status == 0 and found["plan"] == "a" and found["expert_share_on_card"] == 1.0
    assert found["free"] == {"memory": 8 * GIB, "shared": 8 * GIB, "card": 2 * GIB}
    assert {entry["name"] for entry in found["terms"]} >= {"dense weights", "card experts", "KV cache", "card scratch"}
    assert found["prediction"]["hand_offs"] == 0
    used = {entry["name"]: entry["nbytes"] for entry in found["terms"] if entry["place"] == "card"}
    small = sum(used.values()) - used["card experts"] // 2
    arguments = ("--plan", "a", "--card", str(small), "--host", "8GiB")
    status, out, _ = run(capsys, *arguments, "--host-speed", "50GB", "--card-speed", "1TB")
    assert status == 0 and "host experts" in out and "hand-offs" in out
    status, out, _ = run(capsys, *arguments)
    assert status == 0 and "not predicted" in out


def test_the_program_refuses_by_name_and_by_term(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "--plan", "a", "--card", "600MiB")
    assert status == 1 and not out and "card margin takes" in err and "too many" in err
    status, _, err = run(capsys, "--plan", "bp")
    assert status == 1 and "plan bp (plan a, with the other cards as tiers of experts) is not built yet" in err
    with pytest.raises(SystemExit):
        run(capsys, "--card", "much")


def test_without_a_card_auto_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(placement, "may_have_card", lambda: False)
    status, out, _ = run(capsys)
    assert status == 0 and "no card: no NVIDIA driver is loaded" in out

    def nothing() -> tuple[CardRoom, ...]:
        raise PlanError("plans with a card need PyCUDA, which is not installed", "pip install it")

    monkeypatch.setattr(placement, "may_have_card", lambda: True)
    monkeypatch.setattr(placement, "probe_cards", nothing)
    status, out, _ = run(capsys)
    assert status == 0 and "no card: plans with a card need PyCUDA" in out
    status, _, err = run(capsys, "--plan", "a")
    assert status == 1 and "need PyCUDA" in err and "pip install it" in err


def test_a_probe_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_probe, "_MODULE", "bloomery.gpu_worker.no_such_module")
    with pytest.raises(PlanError, match=r"the cards cannot be probed: .*no_such_module"):
        card_probe.probe_cards()


def test_prompts_with_a_host_have_terms_and_a_threshold(program: Program) -> None:
    """What streaming takes is named, leaves less for experts, and is left out where blocks are too short or it does not
    fit; a link measured a little differently gives the same plan."""
    plan = make_plan(CONFIG, program, room(12, 64))
    assert plan.tiers and plan.stream_rows == 128 and not plan.stream_note
    layer = max(sum(program.weights[name].nbytes for name in names) for names in matrices(program))
    assert 2 * layer <= term(plan, "expert staging") <= 2 * layer + 16384 and term(plan, "pinned buffers") == 128 << 20
    short = make_plan(replace(CONFIG, prompt_block=32), program, room(12, 64))
    assert short.stream_rows == 0 and "pays from 128 rows on" in short.stream_note and not term(short, "expert staging")
    assert short.tiers and short.tiers.share > plan.tiers.share and short.digest != plan.digest
    small = make_plan(replace(CONFIG, prompt_block=8192), program, room(4, 64))
    assert small.stream_rows == 0 and "expert staging and what 8192 rows" in small.stream_note
    chosen = make_plan(replace(CONFIG, prompt_block=0), program, room(12, 64))
    assert chosen.prompt_block == 4096 and chosen.tiers and 0.7 * plan.tiers.share < chosen.tiers.share
    assert make_plan(replace(CONFIG, prompt_block=0), program, room(5, 64)).prompt_block in (1024, 2048)
    assert make_plan(replace(CONFIG, prompt_block=0), program, room(24, 64)).prompt_block == 512
    (card,) = room(12, 64).cards

    def at(link: float) -> Plan:
        return make_plan(CONFIG, program, replace(room(12, 64), cards=(replace(card, link=link),)))

    assert at(50e9) == replace(at(51e9), card=at(50e9).card) and at(50e9).stream_rows == 64
    slow = at(0.5e9)
    assert slow.stream_rows == 0 and "and blocks have 512" in slow.stream_note
    assert make_plan(CONFIG, program, room(24, 64)).stream_rows == 0, "nothing is on the host"


def test_short_blocks_leave_experts_to_the_host(program: Program) -> None:
    """Fewer the longer the block, down to none; the coldest; and only if it was asked for."""
    layers = routed_ops(program)
    ranks = {layer.layer: tuple(range(EXPERTS - 1, -1, -1)) for layer in layers}
    hot = HotList("paper", len(layers), EXPERTS, ranks)
    config, free = replace(CONFIG, prompt_block=4096, shared_blocks=True), room(10, 64)
    free = replace(free, cards=(replace(free.cards[0], link=50e9),))
    plan = make_plan(config, program, free, hot)
    rows, texts = zip(*plan.stream_tiers, strict=True)
    assert rows[0] == plan.stream_rows == 64 and list(rows) == sorted(set(rows)) and texts[-1] == ""
    assert plan.tiers is not None
    held = [plan.tiers, *(ExpertTiers.of_text(program, text) for text in texts)]
    for fewer, more in pairwise(held):
        for gate, ids in more.on_card.items():
            assert set(fewer.on_card[gate]) < set(ids)
            assert set(ids) == set(range(EXPERTS - len(ids), EXPERTS)), "the coldest are those with the least ids"
    alone = make_plan(replace(config, shared_blocks=False), program, free, hot)
    assert alone.stream_tiers == () and alone.digest != plan.digest
    assert term(plan, "activations") > term(alone, "activations"), "more rows are handed over at once"


def test_deterministic_plans_have_no_blocks(program: Program) -> None:
    """Experts stay on the host for prompts, too; and what was computed so is told from what was computed in blocks."""
    config, free = replace(CONFIG, prompt_block=4096), room(10, 64)
    free = replace(free, cards=(replace(free.cards[0], link=50e9),))
    blocks, alike = make_plan(config, program, free), make_plan(replace(config, deterministic=True), program, free)
    assert blocks.stream_rows and not alike.stream_rows and alike.deterministic and not blocks.deterministic
    assert "round" in alike.stream_note and alike.digest != blocks.digest
    assert term(alike, "expert staging") == 0 < term(blocks, "expert staging")
    whole = [make_plan(replace(config, deterministic=each), program, room(24, 64)) for each in (False, True)]
    assert whole[0].digest != whole[1].digest


def matrices(program: Program) -> list[tuple[str, str, str]]:
    return [(op.gate, op.up, op.down) for op in program.ops if isinstance(op, RoutedExperts)]
