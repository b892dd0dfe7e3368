"""What ``bench_policies.py`` says about its samples: tables, ratios, a page."""

from __future__ import annotations

import base64
import html
import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from policy_load import Run, Turn
from rich import box
from rich.console import Console
from rich.table import Table

_RESAMPLES = 1000
_PERCENTILES = (50, 95)


def quantile(values: Sequence[float], percent: float) -> float:
    """Nearest rank: the smallest value that ``percent`` of all do not exceed; NaN of none."""
    if not values:
        return math.nan
    return sorted(values)[max(1, math.ceil(len(values) * percent / 100)) - 1]


@dataclass
class Row:
    """All runs of one combination."""

    name: str
    runs: list[Run] = field(default_factory=list)

    @property
    def turns(self) -> list[Turn]:
        return [turn for run in self.runs for turn in run.turns]

    @property
    def ttft_s(self) -> list[float]:
        return [turn.ttft_s for turn in self.turns]

    @property
    def tpot_s(self) -> list[float]:
        return [turn.tpot_s for turn in self.turns if turn.tpot_s is not None]

    @property
    def preemptions(self) -> float | None:
        counts = [run.preemptions for run in self.runs]
        return None if None in counts else sum(count for count in counts if count is not None)

    @property
    def refused(self) -> int:
        return sum(run.refused for run in self.runs)

    @property
    def failed(self) -> int:
        return sum(run.failed for run in self.runs)

    def summary(self) -> dict[str, Any]:
        """One row as plain values; times in seconds, None for what could not be measured."""
        kept = [value for run in self.runs for value in run.retained]
        seconds = sum(run.seconds for run in self.runs)
        decode: Counter[str] = Counter()
        for run in self.runs:
            decode.update({name: int(count) for name, count in run.decode_outcomes.items()})
        return {
            "name": self.name,
            "runs": len(self.runs),
            "turns": len(self.turns),
            **{f"ttft_p{p}_s": _known(quantile(self.ttft_s, p)) for p in (50, 95, 99)},
            "tpot_p50_s": _known(quantile(self.tpot_s, 50)),
            "tokens_per_s": sum(t.tokens for t in self.turns) / seconds if seconds else None,
            "pulled_tokens": sum(t.pulled for t in self.turns),
            "outcomes": dict(Counter(t.outcome for t in self.turns)),
            "decode_outcomes": dict(decode),
            "retained_mean_bytes": statistics.mean(kept) if kept else None,
            "retained_peak_bytes": max(kept, default=None),
            "preemptions": self.preemptions,
            "refused": self.refused,
            "failed": self.failed,
        }


@dataclass(frozen=True)
class Ratio:
    """One row over the best of others, with a 90 % bootstrap interval."""

    what: str
    value: float
    low: float
    high: float

    @property
    def text(self) -> str:
        return f"{self.what} = {self.value:.2f} (90 %: {self.low:.2f} to {self.high:.2f})"


Sampling = Callable[[Turn], float | None]


def _ttft(turn: Turn) -> float | None:
    return turn.ttft_s


def _tpot(turn: Turn) -> float | None:
    return turn.tpot_s


def ratio(
    mine: Row, others: Sequence[Row], percent: float, sampling: Sampling, what: str
) -> Ratio | None:
    """``mine`` over the best of ``others``; None without samples of all.

    Whole repeats and, in them, whole conversations are drawn again, the same
    ones for every row: turns of one conversation are no independent samples.
    The best is chosen anew in each draw, as it was among the measured rows.
    """
    rows = [mine, *others]
    samples = [_by_conversation(row, sampling) for row in rows]
    repeats = sorted({repeat for found in samples for repeat in found})

    def of(draw: Sequence[tuple[int, int]]) -> float:
        each = [
            quantile(
                [v for repeat, seed in draw for v in found.get(repeat, {}).get(seed, [])], percent
            )
            for found in samples
        ]
        return math.nan if any(map(math.isnan, each)) else each[0] / min(each[1:])

    everything = [
        (repeat, seed)
        for repeat in repeats
        for seed in sorted({seed for found in samples for seed in found.get(repeat, {})})
    ]
    value = of(everything) if others and everything else math.nan
    if math.isnan(value):
        return None
    rng = random.Random(0)
    drawn = []
    for _ in range(_RESAMPLES):
        draw = []
        for repeat in rng.choices(repeats, k=len(repeats)):
            seeds = [seed for at, seed in everything if at == repeat]
            draw += [(repeat, seed) for seed in rng.choices(seeds, k=len(seeds))]
        drawn.append(of(draw))
    drawn = [number for number in drawn if not math.isnan(number)]
    return Ratio(what, value, quantile(drawn, 5), quantile(drawn, 95))


def _by_conversation(row: Row, sampling: Sampling) -> dict[int, dict[int, list[float]]]:
    """Samples of a row by repeat and conversation."""
    found: dict[int, dict[int, list[float]]] = {}
    for run in row.runs:
        for turn in run.turns:
            value = sampling(turn)
            if value is not None:
                found.setdefault(run.repeat, {}).setdefault(turn.seed, []).append(value)
    return found


def policy_verdicts(rows: Sequence[Row]) -> list[str]:
    """How the cost model compares with the best fixed threshold, retention alike."""
    fixed = [r for r in rows if r.name.startswith("threshold") and r.name.endswith(" budgeted")]
    models = [r for r in rows if r.name == "cost_model budgeted"]
    lines = []
    for model in models:
        for percent in _PERCENTILES:
            what = f"TTFT p{percent}: cost_model / best of {len(fixed)} fixed thresholds"
            found = ratio(model, fixed, percent, _ttft, what)
            if found is not None:
                lines.append(f"{found.text}: {judge(found)}")
        paired = {row.name: turn_by_turn(model, row) for row in fixed}
        known = {name: value for name, value in paired.items() if not math.isnan(value)}
        if known:
            name = max(known, key=lambda each: known[each])
            lines.append(
                f"TTFT turn by turn, median: cost_model / {name} = {known[name]:.2f}"
                " (the fixed threshold that does best in this)"
            )
    return lines


def turn_by_turn(mine: Row, other: Row) -> float:
    """Median ratio of the same turns' TTFT; NaN without any.

    Most of the spread of TTFT is between short and long prompts and cancels here.
    """
    theirs = {
        (run.repeat, turn.seed, turn.number): turn.ttft_s
        for run in other.runs
        for turn in run.turns
    }
    ratios = [
        turn.ttft_s / theirs[key]
        for run in mine.runs
        for turn in run.turns
        if (key := (run.repeat, turn.seed, turn.number)) in theirs
    ]
    return quantile(ratios, 50)


def judge(found: Ratio) -> str:
    """The verdict in words; a difference counts when the whole interval is above 1."""
    if found.value <= 1:
        return "no worse"
    return "no worse within noise" if found.low <= 1 else "WORSE"


def _judge_equal(found: Ratio) -> str:
    if found.low <= 1 <= found.high:
        return "equal within noise"
    return "HIGHER" if found.low > 1 else "lower"


def pressure_verdicts(rows: Sequence[Row]) -> list[str]:
    """Retention on against off: preemptions, lost requests, time per token."""
    off = next((r for r in rows if r.name.endswith(" off")), None)
    lines = []
    for row in (r for r in rows if off is not None and r is not off):
        assert off is not None  # the loop is empty otherwise
        lines.append(f"{row.name} / {off.name}: {_counts(row, off)}")
        found = ratio(row, [off], 50, _tpot, f"{row.name} / {off.name}: TPOT p50")
        if found is not None:
            lines.append(f"{found.text}: {_judge_equal(found)}")
    return lines


def _counts(row: Row, off: Row) -> str:
    lost = f"refused {row.refused} and {off.refused}, failed {row.failed} and {off.failed}"
    same = (row.refused, row.failed) == (off.refused, off.failed)
    lost += f" ({'equal' if same else 'NOT EQUAL'})"
    if row.preemptions is None or off.preemptions is None:
        return f"preemptions unknown, {lost}"
    return (
        f"preemptions {row.preemptions:.0f} and {off.preemptions:.0f}"
        f" ({compare_counts(row.preemptions, off.preemptions)}), {lost}"
    )


def compare_counts(mine: float, other: float) -> str:
    """Two counts of rare events differ when they are two standard deviations apart."""
    if mine == other:
        return "equal"
    return "equal within noise" if abs(mine - other) <= 2 * math.sqrt(mine + other) else "NOT EQUAL"


COLUMNS = (
    "policy, retention", "p50", "p95", "p99", "TPOT", "tok/s", "pulled", "mean", "peak", "pre",
    "ref", "fail",
)  # fmt: skip
TITLE = "TTFT and TPOT (p50) in ms; retained KV in MiB; preemptions, refused, failed"


def cells(row: Row) -> list[str]:
    """One row as text."""
    found = row.summary()
    return [
        row.name,
        *(_text(found[f"ttft_p{p}_s"], 1e3) for p in (50, 95, 99)),
        _text(found["tpot_p50_s"], 1e3, 1),
        _text(found["tokens_per_s"], 1),
        str(found["pulled_tokens"]),
        _text(found["retained_mean_bytes"], 2**-20),
        _text(found["retained_peak_bytes"], 2**-20),
        _text(row.preemptions, 1),
        str(row.refused),
        str(row.failed),
    ]


def _text(value: float | None, scale: float, digits: int = 0) -> str:
    return "?" if value is None else f"{value * scale:.{digits}f}"


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def console() -> Console:
    """A terminal as wide as it is, but a file or pipe wide enough for the table."""
    made = Console()
    return made if made.is_terminal else Console(width=100)


def show(rows: Sequence[Row], verdicts: Sequence[str], out: Console) -> None:
    """Print the table, what it says, and the first errors."""
    table = Table(title=TITLE, box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for column in COLUMNS:
        left = column == COLUMNS[0]
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for row in (row for row in rows if row.runs):
        table.add_row(*cells(row))
    out.print(table)
    for line in verdicts:
        out.print(line, soft_wrap=True, highlight=False)
    errors = [f"{row.name}: {error}" for row in rows for run in row.runs for error in run.errors]
    for error in errors[:5]:
        out.print(error, soft_wrap=True, highlight=False, markup=False)


def write(rows: Sequence[Row], verdicts: Sequence[str], stem: Path, conditions: str) -> None:
    """``STEM.json`` with every sample, ``STEM.png`` and ``STEM.html`` beside it."""
    rows = [row for row in rows if row.runs]
    found = {
        "conditions": conditions,
        "verdicts": list(verdicts),
        "rows": [row.summary() for row in rows],
        "runs": [asdict(run) for row in rows for run in row.runs],
    }
    stem.with_suffix(".json").write_text(json.dumps(found, indent=1))
    _chart(rows, stem.with_suffix(".png"))
    image = base64.b64encode(stem.with_suffix(".png").read_bytes()).decode()
    head = "".join(f"<th>{html.escape(column)}</th>" for column in COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(row)) + "</tr>"
        for row in rows
    )
    said = "".join(f"<p>{html.escape(line)}</p>" for line in verdicts)
    stem.with_suffix(".html").write_text(f"""<!doctype html><meta charset="utf-8">
<title>Recompute and retention policies</title><style>
body{{font:15px system-ui;margin:2rem auto;max-width:60rem}}td,th{{padding:.3rem .7rem;
text-align:right;border-bottom:1px solid #ddd}}td:first-child,th:first-child{{text-align:left}}
img{{max-width:100%}}</style><h1>Recompute and retention policies</h1>
<p>{html.escape(conditions)}</p>{said}
<img alt="time to first token by policy" src="data:image/png;base64,{image}">
<p>{html.escape(TITLE)}</p><table><tr>{head}</tr>{body}</table>""")


def _chart(rows: Sequence[Row], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 0.45 * len(rows) + 1.5), layout="constrained")
    for offset, (percent, color) in enumerate(
        zip(_PERCENTILES, ("#2563eb", "#93c5fd"), strict=True)
    ):
        places = [index + 0.38 * offset for index in range(len(rows))]
        widths = [1e3 * quantile(row.ttft_s, percent) for row in rows]
        axes.barh(places, widths, height=0.36, color=color, label=f"p{percent}")
    axes.set_yticks([i + 0.19 for i in range(len(rows))], [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("time to first token, ms")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)
    plt.close(figure)
