"""The vLLM functions whose behaviour the adapter relies on, pinned by content.

When one changes, this fails and names it: read the change, decide whether the
adapter still holds, then pin the new hash (``python tests/adapter/test_vllm_hooks.py``
prints them for the installed vLLM).  Comments and docstrings don't count.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import textwrap
from importlib import import_module
from pathlib import Path

import pytest
import vllm

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_POOL = "vllm.v1.core.block_pool:BlockPool"

# What the adapter assumes of each, in a few words.
FUNCTIONS = {
    f"{_SCHEDULER}._handle_failed_recving": "a failed load is recomputed from the local prefix",
    f"{_SCHEDULER}._update_waiting_for_remote_kv": "loaded blocks are cached, failed ones freed",
    f"{_SCHEDULER}._update_from_kv_xfer_finished": "our output hook runs before blocks are freed",
    f"{_SCHEDULER}._connector_finished": "we see computed blocks before they are freed",
    f"{_SCHEDULER}._free_request": "a request aborted while loading keeps its blocks",
    f"{_SCHEDULER}.finish_requests": "the same, for aborts",
    f"{_SCHEDULER}.reset_prefix_cache": "our holdings are asked to yield",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.reset_prefix_cache": "asks its coordinator",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.reset_prefix_cache": (
        "calls the pool's by its attribute, where our part stands in front"
    ),
    f"{_POOL}.reset_prefix_cache": "fails while a block is in use",
    f"{_POOL}.touch": "one reference more, out of the free queue",
    f"{_POOL}.free_blocks": "one reference less, back into the free queue",
    "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin"
    "._get_kv_connector_output": "start, results, report: in this order, once a step",
    "vllm.distributed.kv_transfer.kv_connector.utils:KVOutputAggregator.aggregate": (
        "a pull has ended when every rank has said so"
    ),
}

PINS: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "vllm_pins.json").read_text())


def minor() -> str:
    found = re.match(r"\d+\.\d+", vllm.__version__)
    assert found is not None
    return found[0]


def content_hash(source: str) -> str:
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


def current(name: str) -> str:
    module, path = name.split(":")
    found = import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return content_hash(inspect.getsource(found))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_is_the_one_the_adapter_was_written_for(name: str) -> None:
    assert minor() in PINS, f"no pins for vLLM {minor()}"
    assert current(name) == PINS[minor()][name], f"changed; relied on for: {FUNCTIONS[name]}"


if __name__ == "__main__":
    pins = {minor(): {name: current(name) for name in FUNCTIONS}}
    print(json.dumps(pins, indent=1))  # noqa: T201  # a program's output
