"""The three processes of the demo: prefill engine, decode engine, router."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from terminal import starting

from kvtransport_vllm.launch import (
    EnginePair,
    PairSpec,
    Service,
    free_ports,
    router_service,
    wait_ready,
)


@contextmanager
def running(
    console: Console, model: Path, *, backend: str, prefix_caching: bool, logs: Path
) -> Iterator[tuple[EnginePair, Service]]:
    """Start all three, warm the engines up, end everything afterwards.

    float32, because greedy answers in bfloat16 can differ by rounding alone when
    the same prompt is computed in other pieces, and "same answers" is the claim.
    """
    pair = EnginePair(
        PairSpec(
            model=model,
            logs=logs,
            backend=backend,
            common={"dtype": "float32", "max_model_len": 4096},
            prefill={"prefix_caching": prefix_caching},
        )
    )
    router = router_service(
        prefill=[pair.prefill],
        decode=[pair.decode],
        port=free_ports(1)[0],
        log=logs / "router.log",
        arguments=["--allow-reuse-override"],
    )
    with pair, router:
        with starting(console, ["prefill", "decode", "router"]) as ready:
            pair.start(progress=ready)
            router.start()
            wait_ready([router], timeout_s=60, progress=ready)
        yield pair, router
