"""How the rows of a benchmark look: a table for people, JSON, CSV and Markdown for everything else.

Knows the names of a row's figures, not how they were measured.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from bloomery.launcher.tables import new_console, new_table

Row = dict[str, Any]
QUIET: Final = 0.95  # a lower share of their CPUs that our workers had is worth a remark


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _spread(value: float) -> str:
    return f"{100 * value:.1f} %"


def _rate(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"


def _milli(value: float) -> str:
    return f"{value:.3f}"


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:.3f} GB"


# heading, name in a row, how it is written
COLUMNS: Final[tuple[tuple[str, str, Callable[[Any], str]], ...]] = (
    ("test", "test", str),
    ("depth", "depth", str),
    ("threads", "threads", str),
    ("tok/s", "tokens_per_s", _rate),
    ("spread", "spread", _spread),
    ("peer tok/s", "against_tokens_per_s", _rate),
    ("peer spread", "against_spread", _spread),
    ("ratio", "ratio", "{:.2f}".format),
    ("ratio spread", "ratio_spread", _spread),
    ("CPU ratio", "cpu_ratio", "{:.2f}".format),
    ("its spread", "cpu_ratio_spread", _spread),
    ("bytes/step", "bytes_per_step", _gigabytes),
    ("read GB/s", "read_gbps", "{:.1f}".format),
    ("ceiling GB/s", "ceiling_gbps", "{:.1f}".format),
    ("of ceiling", "ceiling_share", _percent),
    ("bound tok/s", "bound_tokens_per_s", _rate),
    ("GOP/s", "gops", "{:.0f}".format),
    ("arithmetic GOP/s", "arithmetic_gops", "{:.0f}".format),
    ("of it", "arithmetic_share", _percent),
    ("step ms", "step_ms", _milli),
    ("card leg ms", "card_leg_ms", _milli),
    ("host leg ms", "host_leg_ms", _milli),
    ("card waits ms", "card_wait_ms", _milli),
    ("host waits ms", "host_wait_ms", _milli),
    ("overlap bound ms", "overlap_bound_ms", _milli),
    ("of bound", "of_overlap_bound", "{:.2f}".format),
    ("predicted ms", "predicted_ms", _milli),
    ("hand-off p50 us", "hand_off_us_p50", "{:.1f}".format),
    ("p99 us", "hand_off_us_p99", "{:.1f}".format),
    ("card GB/s", "card_gbps", "{:.0f}".format),
    ("of its copy rate", "copy_share", _percent),
    ("link GB/s", "link_gbps", "{:.1f}".format),
    ("of its copies' rate", "link_share", _percent),
)
KIND_COLUMNS: Final[tuple[tuple[str, str, Callable[[Any], str]], ...]] = (
    ("of the step", "share", _percent),
    ("ms/step", "seconds", lambda value: f"{1e3 * value:.3f}"),
    ("at barriers", "barrier_seconds", lambda value: f"{1e3 * value:.3f}"),
    ("MB/step", "bytes", lambda value: f"{value / 1e6:.1f}" if value else ""),
    ("GB/s", "gbps", lambda value: f"{value:.1f}" if value >= 0.05 else ""),
    ("of ceiling", "ceiling_share", lambda value: _percent(value) if value >= 0.005 else ""),
    ("GOP/s", "gops", lambda value: f"{value:.1f}" if value >= 0.05 else ""),
)
PART_COLUMNS: Final[tuple[tuple[str, str, Callable[[Any], str]], ...]] = (
    ("MB/token", "bytes", lambda value: f"{value / 1e6:.1f}"),
    ("ms/token", "seconds", lambda value: f"{1e3 * value:.3f}"),
    ("spread", "spread", _spread),
    ("GB/s", "gbps", "{:.1f}".format),
    ("of ceiling", "ceiling_share", _percent),
    ("peer ms/token", "against_seconds", lambda value: f"{1e3 * value:.3f}"),
    ("peer spread", "against_spread", _spread),
    ("peer GB/s", "against_gbps", "{:.1f}".format),
    ("of ceiling", "against_ceiling_share", _percent),
    ("ratio", "ratio", "{:.2f}".format),
    ("ratio spread", "ratio_spread", _spread),
)


def as_json(rows: Sequence[Row]) -> str:
    """An array with one object a row; figures that were not measured are null."""
    return json.dumps(list(rows), indent=1)


def as_csv(rows: Sequence[Row]) -> str:
    """One line a row; figures of kinds of op are columns "experts_seconds", "experts_gbps", ... Lists are left out."""
    flat = [dict(_flat(row)) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue().rstrip("\n")


def _flat(row: Row) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if name == "kinds":
            for kind, figures in value.items():
                for figure in ("seconds", "gbps", "gops"):
                    yield f"{kind.replace(' ', '_')}_{figure}", figures[figure]
        elif name == "parts":
            for part, figures in (value or {}).items():
                yield from ((f"{part.replace(' ', '_')}_part_{figure}", figures[figure]) for figure in figures)
        elif not isinstance(value, list):
            yield name, value


def as_markdown(rows: Sequence[Row]) -> str:
    """The conditions, a table of rows, and a table of kinds of op for each."""
    lines = [*_conditions(rows), "", *_markdown_table(*_table(rows))]
    for row in rows:
        lines += ["", f"{_title(row)}{':' if row['kinds'] else ''}"]
        lines += ["", *_markdown_table(*_kind_table(row))] if row["kinds"] else []
        if row["parts"]:
            lines += ["", f"{_parts_title(row)}:", "", *_markdown_table(*_part_table(row))]
    return "\n".join(lines)


def _markdown_table(headings: Sequence[str], body: Sequence[Sequence[str]]) -> Iterator[str]:
    for cells in (headings, ["---"] * len(headings), *body):
        yield f"| {' | '.join(cells)} |"


def print_tables(rows: Sequence[Row]) -> None:
    console = new_console()
    for line in _conditions(rows):
        console.print(line)
    pages = [("Rates", *_table(rows)), *((_title(row), *_kind_table(row)) for row in rows if row["kinds"])]
    pages += [(_parts_title(row), *_part_table(row)) for row in rows if row["parts"]]
    for title, headings, body in pages:
        table = new_table(title)
        for heading in headings:
            table.add_column(heading, justify="left" if heading in ("test", "kind of op", "part") else "right")
        for cells in body:
            table.add_row(*cells)
        console.print(table)


def _conditions(rows: Sequence[Row]) -> list[str]:
    row = rows[0]
    lines = [
        f"{row['model']} ({row['architecture']}, {row['model_bytes'] / 1e9:.2f} GB), bloomery {row['version']}, prompt"
        f" block {row['prompt_block']}, cache {row['cache_type']}, instruction set {row['isa']}",
        _plan_line(row),
        f"{row['cpu']}; {row['repeats']} rounds; load {row['load_before']:.1f} before, {row['load_after']:.1f} after",
    ]
    for row in rows:
        lines += [f"{_name(row)}: {_peer_line(peer)}" for peer in row["peers"]]
    systems = {row["against_system"].strip(" |") for row in rows if row["against_system"]}
    lines += [f"llama.cpp: {system}" for system in sorted(systems)]
    share = min((row["quiet_share"] for row in rows if row["quiet_share"] is not None), default=1.0)
    if share < QUIET:
        lines.append(
            f"Other programs were running: our workers had their CPUs {100 * share:.0f} % of the time at worst."
            " Rates and ratios of this run are no benchmark."
        )
    return lines


def _plan_line(row: Row) -> str:
    if row["card"] is None:
        return f"plan {row['plan']}" + (f" (no card: {row['plan_note']})" if row["plan_note"] else "")
    share = f"{100 * row['expert_share_on_card']:.1f} % of the experts on it"
    return f"plan {row['plan']} on {row['card']}, {share}"


def _peer_line(peer: Row) -> str:
    line = f"{peer['against']}: {_rate(peer['against_tokens_per_s'])} tok/s, ratio {peer['ratio']:.2f}"
    return line + (f", by CPU time {peer['cpu_ratio']:.2f}" if "cpu_ratio" in peer else "")


def _table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    columns = [column for column in COLUMNS if any(row[column[1]] is not None for row in rows)]
    body = [[write(row[name]) if row[name] is not None else "" for _, name, write in columns] for row in rows]
    return [heading for heading, _, _ in columns], body


def _kind_table(row: Row) -> tuple[list[str], list[list[str]]]:
    body = [
        [kind, *(write(figures[name]) for _, name, write in KIND_COLUMNS)] for kind, figures in row["kinds"].items()
    ]
    return ["kind of op", *(heading for heading, _, _ in KIND_COLUMNS)], body


def _part_table(row: Row) -> tuple[list[str], list[list[str]]]:
    parts = row["parts"]
    columns = [column for column in PART_COLUMNS if all(column[1] in figures for figures in parts.values())]
    body = [[part, *(write(figures[name]) for _, name, write in columns)] for part, figures in parts.items()]
    return ["part", *(heading for heading, _, _ in columns)], body


def _parts_title(row: Row) -> str:
    return f"{_name(row)}: parts of a token by differences between files"


def _name(row: Row) -> str:
    return f"{row['test']} at depth {row['depth']}, {row['threads']} {'thread' if row['threads'] == 1 else 'threads'}"


def _title(row: Row) -> str:
    return f"{_name(row)}: {row['steps']} steps, coordinator {row['coordinator_us']:.0f} us a step"
