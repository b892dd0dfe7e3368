"""``kvt calibrate``: measure a running pair, print where pulling begins to pay.

For each length the decode engine first gets a prompt of its own and retains it;
then the prefill engine gets the same prompt, which it can only know by pulling,
and another prompt of that length with reuse switched off, which it has to
compute.  Rates are fitted to every second sample and checked against the others,
so the printed error is of a prediction, not of a fit.  Traffic of others at the
same time is part of what is measured.
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvtransport.errors import ConfigError, KVTransportError
from kvtransport.policy.fit import fit
from kvtransport.policy.rates import ComputeRates, PullRates, break_even_tokens

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
LENGTHS = (128, 256, 512, 1024, 2048, 4096)


@dataclass(slots=True)
class Point:
    """Samples of one prompt length, in seconds, and the size of its pulls."""

    tokens: int
    compute_s: list[float] = field(default_factory=list)
    leg_s: list[float] = field(default_factory=list)
    pull_s: list[float] = field(default_factory=list)
    nbytes: int = 0
    descriptors: list[int] = field(default_factory=list)


class EngineClient:
    """The completions endpoint of one engine."""

    def __init__(self, url: str, option: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"{option}={url!r} must be of the form http://host:port")
        self._address = (parts.hostname, parts.port or 80)
        self._timeout_s = timeout_s
        self._model = self._call("GET", "/v1/models", None)["data"][0]["id"]

    def complete(self, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
        """One greedy token after ``prompt``."""
        body = {"model": self._model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
        return self._call("POST", "/v1/completions", body | fields)

    def _call(self, method: str, path: str, body: object) -> dict[str, Any]:
        host, port = self._address
        connection = http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except OSError as error:
            raise KVTransportError(f"http://{host}:{port}{path}: {error}") from error
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise KVTransportError(f"http://{host}:{port}{path}: {response.status}: {text[:300]}")
        answer: dict[str, Any] = json.loads(text)
        return answer


def measure(prefill: EngineClient, decode: EngineClient, point: Point, rng: random.Random) -> None:
    """Add one sample of either way to ``point``."""
    prompt = [rng.randrange(10, 250) for _ in range(point.tokens)]
    decode.complete(prompt)
    began = time.perf_counter()
    account = prefill.complete(prompt, kv_transfer_params=_PREFILL)["kv_transfer_params"]
    leg_s = time.perf_counter() - began
    turn = account["kvt_turn"]
    if turn["outcome"] == "pulled":
        point.leg_s.append(leg_s)
        point.pull_s.append(turn["pull_s"])
        point.descriptors.append(turn["descriptors"])
        point.nbytes = turn["bytes"]
    fresh = [rng.randrange(10, 250) for _ in range(point.tokens)]
    began = time.perf_counter()
    prefill.complete(fresh, kv_transfer_params=_PREFILL | {"kvt_reuse": False})
    point.compute_s.append(time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was learned, and how far off its predictions are."""

    pull: PullRates
    compute: ComputeRates
    token_nbytes: float
    descriptors_per_token: float

    @classmethod
    def of(cls, points: Sequence[Point]) -> Calibration:
        """Fit to every second sample; ``KVTransportError`` when nothing was pulled."""
        pulls = [
            ((1.0, float(descriptors), float(p.nbytes)), seconds)
            for p in points
            for descriptors, seconds in zip(p.descriptors[::2], p.pull_s[::2], strict=True)
        ]
        if not pulls:
            raise KVTransportError(
                "the prefill engine pulled nothing: is the decode engine among its peers, does it"
                " retain (bidirectional_kv_xfer), and is its recompute policy not never_pull?"
            )
        fixed, descriptor, byte = fit(*_table(pulls))
        steps = [
            ((1.0, float(p.tokens), p.tokens**2 / 2), seconds)
            for p in points
            for seconds in p.compute_s[::2]
        ]
        step, token, pair = fit(*_table(steps))
        largest = max((p for p in points if p.pull_s), key=lambda p: p.tokens)
        return cls(
            PullRates(fixed_s=float(fixed), descriptor_s=float(descriptor), byte_s=float(byte)),
            ComputeRates(
                step_s=float(step),
                token_s=float(token),
                pair_s=float(pair),
                chunk_tokens=max(p.tokens for p in points),
            ),
            largest.nbytes / largest.tokens,
            statistics.median(largest.descriptors) / largest.tokens,
        )

    def predict(self, point: Point) -> float:
        """Seconds of a pull of this length."""
        descriptors = statistics.median(point.descriptors)
        return self.pull.seconds(nbytes=point.nbytes, descriptors=descriptors)

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
        speed = 1 / self.pull.byte_s if self.pull.byte_s else 0.0
        values = {
            "pull_fixed_s": self.pull.fixed_s,
            "pull_descriptor_s": self.pull.descriptor_s,
            "pull_bytes_per_s": speed,
            "compute_step_s": self.compute.step_s,
            "compute_token_s": self.compute.token_s,
            "compute_pair_s": self.compute.pair_s,
        }
        return {name: float(f"{value:.4g}") for name, value in values.items()}


def _table(rows: Sequence[tuple[tuple[float, ...], float]]) -> tuple[Any, Any]:
    return np.array([q for q, _ in rows]), np.array([s for _, s in rows])


@app.command()
def calibrate(
    *,
    prefill: Annotated[str, typer.Option(help="The prefill engine, http://host:port.")],
    decode: Annotated[str, typer.Option(help="The decode engine, http://host:port.")],
    rounds: Annotated[int, typer.Option(min=2, help="Samples per length.")] = 6,
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
    points = [Point(tokens) for tokens in LENGTHS if tokens <= longest]
    for point in points:
        measure(*engines, Point(point.tokens), rng)  # first contact and warm-up don't count
    with Progress(console=console) as progress:
        task = progress.add_task("measuring", total=rounds * len(points))
        for _ in range(rounds):
            for point in points:
                measure(*engines, point, rng)
                progress.advance(task)
    found = Calibration.of(points)
    if as_json:
        result = {"break_even_tokens": found.break_even, "recompute_config": found.config()}
        typer.echo(json.dumps(result, indent=2))
    else:
        _show(found, points, console)


def _show(found: Calibration, points: Sequence[Point], console: Console) -> None:
    table = Table(title="medians, milliseconds")
    for column in ("tokens", "compute", "P leg with pull", "pull", "predicted", "predicted/pull"):
        table.add_column(column, justify="right")
    for p in (p for p in points if p.pull_s):
        # The samples that the fit has not seen.
        seen, predicted = statistics.median(p.pull_s[1::2]), found.predict(p)
        values = (statistics.median(p.compute_s), statistics.median(p.leg_s), seen, predicted)
        cells = [f"{1e3 * value:.2f}" for value in values]
        table.add_row(str(p.tokens), *cells, f"{predicted / seen:.2f}")
    console.print(table)
    speed = f"{1e-9 / found.pull.byte_s:.2f} GB/s" if found.pull.byte_s else "no limit seen"
    console.print(
        f"pull: {1e3 * found.pull.fixed_s:.2f} ms + {1e6 * found.pull.descriptor_s:.2f} us per"
        f" descriptor + bytes at {speed}; {found.token_nbytes / 1024:.1f} KiB per token"
    )
    console.print(
        f"compute: {1e3 * found.compute.step_s:.2f} ms + {1e6 * found.compute.token_s:.2f} us per"
        f" token + {1e9 * found.compute.pair_s:.3f} ns per pair of tokens"
    )
    even = found.break_even
    answer = "never, within a million tokens" if even is None else f"{even} tokens"
    console.print(f"[bold]break-even: {answer}[/bold] beyond the local hit, on an idle engine")
    console.print("to start the cost model with it:")
    console.print_json(json.dumps({"recompute": "cost_model", "recompute_config": found.config()}))
