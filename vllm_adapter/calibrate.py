"""``kvt calibrate``: measure a running pair, print where pulling begins to pay.

For each length the decode engine first gets a prompt of its own and retains it;
then the prefill engine gets the same prompt, which it can only know by pulling,
and another prompt of that length with reuse switched off, which it has to
compute.  The prefill engine's answer goes to the decode engine as a router would
bring it, so nothing stays behind on either.  Besides how well the rates fit, it
prints how well they predict: rates fitted to one half of the samples are compared
with the medians of the other half, and the other way round.  Traffic of others at
the same time is part of what is measured.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvtransport.errors import ConfigError, KVTransportError
from kvtransport.policy.fit import fit
from kvtransport.policy.rates import ComputeRates, PullRates, break_even_tokens

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
Observation = tuple[tuple[float, float, float], float]
"""Three quantities, and the seconds that they took."""

LENGTHS = (128, 256, 512, 1024, 2048, 4096)

_SETTLE_S = 0.3
"""Threads of an engine that has just computed go on spinning (OpenMP's do so for
0.2 s), which slows down whoever shares its cores."""


@dataclass(frozen=True, slots=True)
class Pull:
    """One pull: the whole answer of the prefill engine and, within it, the transfer."""

    leg_s: float
    pull_s: float
    descriptors: int
    nbytes: int


@dataclass(slots=True)
class Point:
    """Samples of one prompt length; ``not_pulled`` counts by outcome."""

    tokens: int
    compute_s: list[float] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)
    not_pulled: Counter[str] = field(default_factory=Counter)

    @property
    def enough(self) -> bool:
        """Whether there is a pull to fit to and another one to check the fit with."""
        return len(self.pulls) >= 2

    @property
    def halves(self) -> tuple[list[Pull], list[Pull]]:
        """Every second pull, so that both halves saw the machine in the same moods."""
        return self.pulls[::2], self.pulls[1::2]

    @property
    def measured_s(self) -> float:
        """Usual time of a pull."""
        return _usual(self.pulls)

    @property
    def scatter_s(self) -> tuple[float, float]:
        """Quartiles of the pulls' times."""
        lower, upper = np.quantile([pull.pull_s for pull in self.pulls], (0.25, 0.75))
        return float(lower), float(upper)


class EngineClient:
    """The completions endpoint of one engine; ``KVTransportError`` when it fails."""

    def __init__(self, url: str, option: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"{option}={url!r} must be of the form http://host:port")
        self._address = (parts.hostname, parts.port or 80)
        self._timeout_s = timeout_s
        try:
            served = self._call("GET", "/v1/models", None)["data"][0]
            self._model = served["id"]
            self.longest_prompt = int(served["max_model_len"]) - 2
        except (LookupError, TypeError, ValueError) as error:
            raise KVTransportError(f"{option}={url!r} lists no model of vLLM's") from error

    def complete(self, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
        """One greedy token after ``prompt``."""
        body = {"model": self._model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
        return self._call("POST", "/v1/completions", body | fields)

    def prefill(self, prompt: Sequence[int]) -> dict[str, Any]:
        """The prefill leg of a turn: what the decode engine has to be told."""
        params = self.complete(prompt, kv_transfer_params=_PREFILL).get("kv_transfer_params")
        if not isinstance(params, dict) or "kvt_turn" not in params:
            raise KVTransportError("the prefill engine does not run KVTransportConnector")
        return params

    def _call(self, method: str, path: str, body: object) -> dict[str, Any]:
        host, port = self._address
        connection = http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise KVTransportError(f"http://{host}:{port}{path}: {error!r}") from error
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise KVTransportError(f"http://{host}:{port}{path}: {response.status}: {text[:300]}")
        try:
            answer: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise KVTransportError(f"http://{host}:{port}{path}: no JSON: {text[:300]}") from error
        return answer


def measure(prefill: EngineClient, decode: EngineClient, point: Point, rng: random.Random) -> None:
    """Add one sample of either way to ``point``."""
    prompt = [rng.randrange(10, 250) for _ in range(point.tokens)]
    decode.complete(prompt)
    time.sleep(_SETTLE_S)
    began = time.perf_counter()
    handoff = prefill.prefill(prompt)
    leg_s = time.perf_counter() - began
    # Or the prefill engine would keep the prompt until handoff_ttl_s is over.
    decode.complete(prompt, kv_transfer_params=handoff)
    turn = handoff["kvt_turn"]
    if turn["outcome"] == "pulled":
        point.pulls.append(Pull(leg_s, turn["pull_s"], turn["descriptors"], turn["bytes"]))
    else:
        point.not_pulled[turn["outcome"]] += 1
    fresh = [rng.randrange(10, 250) for _ in range(point.tokens)]
    time.sleep(_SETTLE_S)
    began = time.perf_counter()
    prefill.complete(fresh, kv_transfer_params={"kvt_reuse": False})
    point.compute_s.append(time.perf_counter() - began)


def lengths(longest: int) -> list[int]:
    """The prompt lengths to measure, none above ``longest``."""
    return sorted({min(length, longest) for length in LENGTHS})


def samples_per_round(tokens: int) -> int:
    """Short prompts cost least, so there are more of them."""
    return 2 if tokens < 1024 else 1


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was learned, and how far off its predictions are.

    ``halves`` are the rates that either half of the pulls alone would give.
    """

    pull: PullRates
    halves: tuple[PullRates, PullRates]
    compute: ComputeRates
    token_nbytes: float
    descriptors_per_token: float

    @classmethod
    def of(cls, points: Sequence[Point]) -> Calibration:
        """Fit to the medians of each length that was pulled twice or more.

        To medians: on a busy machine single samples are far apart, and what
        matters is the usual time.  ``KVTransportError`` when nothing was pulled
        twice.
        """
        usable = [p for p in points if p.enough]
        if not usable:
            reasons = "; ".join(f"{p.tokens} tokens: {why_not(p)}" for p in points)
            raise KVTransportError(
                "the prefill engine pulled too little: is the decode engine among its peers, does"
                " it retain (bidirectional_kv_xfer), and is its recompute policy not never_pull?"
                f" {reasons}"
            )
        step, token, pair = _fit(
            [
                ((1.0, float(p.tokens), p.tokens**2 / 2), statistics.median(p.compute_s))
                for p in points
                if p.compute_s
            ]
        )
        largest = max(usable, key=lambda p: p.tokens)
        return cls(
            _pull_rates([p.pulls for p in usable]),
            (
                _pull_rates([p.halves[0] for p in usable]),
                _pull_rates([p.halves[1] for p in usable]),
            ),
            ComputeRates(
                step_s=float(step),
                token_s=float(token),
                pair_s=float(pair),
                chunk_tokens=max(p.tokens for p in points),
            ),
            statistics.median(pull.nbytes for pull in largest.pulls) / largest.tokens,
            statistics.median(pull.descriptors for pull in largest.pulls) / largest.tokens,
        )

    def predict(self, point: Point) -> float:
        """Seconds of a pull of this length with its usual bytes and descriptors."""
        return _seconds(self.pull, point.pulls)

    def held_out(self, point: Point) -> float:
        """Predicted over measured where rates and median come from different pulls.

        Of the two ways to choose the halves the one that is further from 1.
        """
        first, second = point.halves
        return max(
            _seconds(self.halves[0], second) / _usual(second),
            _seconds(self.halves[1], first) / _usual(first),
            key=_distance,
        )

    @property
    def break_even(self) -> int | None:
        """Tokens from which on pulling pays on an idle engine."""
        return break_even_tokens(
            self.pull,
            self.compute,
            token_nbytes=self.token_nbytes,
            descriptors_per_token=self.descriptors_per_token,
        )

    def config(self) -> dict[str, float]:
        """``recompute_config`` that starts the cost model with these rates."""
        # The fit leaves bytes out when descriptors explain the times; 0 would mean "unknown".
        speed = 1 / max(self.pull.byte_s, 1e-15)
        values = {
            "pull_fixed_s": self.pull.fixed_s,
            "pull_descriptor_s": self.pull.descriptor_s,
            "pull_bytes_per_s": speed,
            "compute_step_s": self.compute.step_s,
            "compute_token_s": self.compute.token_s,
            "compute_pair_s": self.compute.pair_s,
        }
        return {name: float(f"{value:.4g}") for name, value in values.items()}

    def row(self, point: Point) -> dict[str, Any]:
        """Medians of one length that was pulled often enough, and the prediction."""
        measured, predicted = point.measured_s, self.predict(point)
        return {
            "tokens": point.tokens,
            "pulls": len(point.pulls),
            "not_pulled": dict(point.not_pulled),
            "compute_s": statistics.median(point.compute_s),
            "leg_s": statistics.median(pull.leg_s for pull in point.pulls),
            "measured_s": measured,
            "quartiles_s": point.scatter_s,
            "predicted_s": predicted,
            "ratio": predicted / measured,
            "held_out_ratio": self.held_out(point),
            "descriptors": statistics.median(pull.descriptors for pull in point.pulls),
            "bytes": statistics.median(pull.nbytes for pull in point.pulls),
        }

    def report(self, points: Sequence[Point]) -> dict[str, Any]:
        """Everything that was found, as plain values."""
        rows = [self.row(point) for point in points if point.enough]
        return {
            "break_even_tokens": self.break_even,
            "worst_ratio": max((row["ratio"] for row in rows), key=_distance),
            "worst_held_out_ratio": max((row["held_out_ratio"] for row in rows), key=_distance),
            "token_nbytes": self.token_nbytes,
            "descriptors_per_token": self.descriptors_per_token,
            "recompute_config": self.config(),
            "points": rows,
            "skipped": [
                {"tokens": p.tokens, "pulls": len(p.pulls), "not_pulled": dict(p.not_pulled)}
                for p in points
                if not p.enough
            ],
        }


def why_not(point: Point) -> str:
    """How many samples of this length were not pulled, in words."""
    reasons = ", ".join(f"{outcome} {count}" for outcome, count in point.not_pulled.items())
    return f"{point.not_pulled.total()} not pulled ({reasons or 'not tried'})"


def _distance(ratio: float) -> float:
    """From 1, where half is as far off as double."""
    return abs(math.log(max(ratio, 1e-9)))


def _median_pull(pulls: Sequence[Pull]) -> Observation:
    descriptors = statistics.median(pull.descriptors for pull in pulls)
    nbytes = statistics.median(pull.nbytes for pull in pulls)
    return (1.0, float(descriptors), float(nbytes)), _usual(pulls)


def _usual(pulls: Sequence[Pull]) -> float:
    return statistics.median(pull.pull_s for pull in pulls)


def _seconds(rates: PullRates, pulls: Sequence[Pull]) -> float:
    """What ``rates`` say of pulls with these bytes and descriptors."""
    (_, descriptors, nbytes), _ = _median_pull(pulls)
    return rates.seconds(nbytes=nbytes, descriptors=descriptors)


def _pull_rates(pulls: Sequence[Sequence[Pull]]) -> PullRates:
    """One sequence of pulls per length."""
    fixed, descriptor, byte = map(float, _fit([_median_pull(length) for length in pulls]))
    return PullRates(fixed_s=fixed, descriptor_s=descriptor, byte_s=byte)


def _fit(rows: Sequence[Observation]) -> Any:
    """Rates for medians: none of them is an accident, so each has its full say."""
    quantities = np.array([quantities for quantities, _ in rows])
    return fit(quantities, np.array([s for _, s in rows]), usual_error=math.inf)


@app.command()
def calibrate(
    *,
    prefill: Annotated[str, typer.Option(help="The prefill engine, http://host:port.")],
    decode: Annotated[str, typer.Option(help="The decode engine, http://host:port.")],
    rounds: Annotated[
        int,
        typer.Option(min=2, help="Samples of the longest prompts; short ones get twice as many."),
    ] = 10,
    longest: Annotated[int, typer.Option(min=128, help="Longest prompt in tokens.")] = 4096,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds per request.")] = 120.0,
    seed: Annotated[int, typer.Option(help="Prompts are random numbers of this seed.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure pulling against computing on a running pair and print the break-even."""
    console = Console(stderr=as_json)
    engines = (
        EngineClient(prefill, "--prefill", timeout_s),
        EngineClient(decode, "--decode", timeout_s),
    )
    # Another seed per run, or P's prefix cache would know the prompts of the last one.
    rng = random.Random(f"{seed}:{time.time_ns()}")  # noqa: S311  # prompts are no secret
    most = min(longest, *(engine.longest_prompt for engine in engines))
    points = [Point(tokens) for tokens in lengths(most)]
    for point in points:
        measure(*engines, Point(point.tokens), rng)  # first contact and warm-up don't count
    with Progress(console=console) as progress:
        order = [point for point in points for _ in range(samples_per_round(point.tokens))]
        task = progress.add_task("measuring", total=rounds * len(order))
        for _ in range(rounds):
            for point in order:
                measure(*engines, point, rng)
                progress.advance(task)
    found = Calibration.of(points)
    if as_json:
        typer.echo(json.dumps(found.report(points), indent=2))
    else:
        _show(found, points, console)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _show(found: Calibration, points: Sequence[Point], console: Console) -> None:
    report = found.report(points)
    table = Table(title="medians, milliseconds", box=box.SIMPLE_HEAD)
    for column in (
        "tokens",
        "compute",
        "P leg",
        "pull",
        "quartiles",
        "predicted",
        "ratio",
        "held out",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for row in report["points"]:
        table.add_row(
            str(row["tokens"]),
            _ms(row["compute_s"]),
            _ms(row["leg_s"]),
            _ms(row["measured_s"]),
            "-".join(map(_ms, row["quartiles_s"])),
            _ms(row["predicted_s"]),
            f"{row['ratio']:.2f}",
            f"{row['held_out_ratio']:.2f}",
        )
    console.print(table)
    for point in (p for p in points if p.not_pulled):
        left_out = "" if point.enough else "; left out"
        console.print(f"{point.tokens} tokens: {why_not(point)}{left_out}")
    speed = f"{1e-9 / found.pull.byte_s:.2f} GB/s" if found.pull.byte_s else "no limit seen"
    console.print(
        f"pull: {1e3 * found.pull.fixed_s:.2f} ms + {1e6 * found.pull.descriptor_s:.2f} us per"
        f" descriptor + bytes at {speed}; {found.token_nbytes / 1024:.1f} KiB and"
        f" {found.descriptors_per_token:.3g} descriptors per token"
    )
    console.print(
        f"compute: {1e3 * found.compute.step_s:.2f} ms + {1e6 * found.compute.token_s:.2f} us per"
        f" token + {1e9 * found.compute.pair_s:.3f} ns per pair of tokens"
    )
    console.print(
        f"predicted / measured pull, furthest from 1: {report['worst_ratio']:.2f};"
        f" of pulls held out of the fit: {report['worst_held_out_ratio']:.2f}"
    )
    even = found.break_even
    answer = "never, within a million tokens" if even is None else f"{even} tokens"
    console.print(f"[bold]break-even: {answer}[/bold] beyond the local hit, on an idle engine")
    console.print("to start the cost model with it:")
    console.print_json(json.dumps({"recompute": "cost_model", "recompute_config": found.config()}))
