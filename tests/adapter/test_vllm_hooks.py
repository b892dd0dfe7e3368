"""The vLLM functions whose behaviour the adapter relies on, pinned by content.

When one changes, this fails and names it: read the change, decide whether the
adapter still holds, then pin the new hash (``python tests/adapter/test_vllm_hooks.py``
prints them for the installed vLLM).  Comments and docstrings don't count.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import textwrap
from importlib import import_module

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
    f"{_POOL}.touch": "one reference more, out of the free queue",
    f"{_POOL}.free_blocks": "one reference less, back into the free queue",
    "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin"
    "._get_kv_connector_output": "start, results, report: in this order, once a step",
    "vllm.distributed.kv_transfer.kv_connector.utils:KVOutputAggregator.aggregate": (
        "a pull has ended when every rank has said so"
    ),
}

PINS: dict[str, dict[str, str]] = {
    "0.30": {
        "vllm.v1.core.sched.scheduler:Scheduler._handle_failed_recving": "52bf676991df0f82",
        "vllm.v1.core.sched.scheduler:Scheduler._update_waiting_for_remote_kv": "1ce09429eea0215a",
        "vllm.v1.core.sched.scheduler:Scheduler._update_from_kv_xfer_finished": "b6540d0fb4997125",
        "vllm.v1.core.sched.scheduler:Scheduler._connector_finished": "4b0a66b339a47053",
        "vllm.v1.core.sched.scheduler:Scheduler._free_request": "ac96cbc501ce576d",
        "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": "8b03285f3f6bb39e",
        "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache": "283de935fe62272d",
        "vllm.v1.core.block_pool:BlockPool.touch": "9e08b26decc08ed2",
        "vllm.v1.core.block_pool:BlockPool.free_blocks": "734fa41937d6a9a7",
        "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin._get_kv_connector_output": "267d7b67a3f8156b",
        "vllm.distributed.kv_transfer.kv_connector.utils:KVOutputAggregator.aggregate": "975b6e7a1ada5fcc",
    },
    "0.31": {
        "vllm.v1.core.sched.scheduler:Scheduler._handle_failed_recving": "52bf676991df0f82",
        "vllm.v1.core.sched.scheduler:Scheduler._update_waiting_for_remote_kv": "b75af7a932eabe61",
        "vllm.v1.core.sched.scheduler:Scheduler._update_from_kv_xfer_finished": "b6540d0fb4997125",
        "vllm.v1.core.sched.scheduler:Scheduler._connector_finished": "4b0a66b339a47053",
        "vllm.v1.core.sched.scheduler:Scheduler._free_request": "62dcd6a58cb12125",
        "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": "9f8f1660569a967c",
        "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache": "2136e2ffcecf2b52",
        "vllm.v1.core.block_pool:BlockPool.touch": "9e08b26decc08ed2",
        "vllm.v1.core.block_pool:BlockPool.free_blocks": "734fa41937d6a9a7",
        "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin._get_kv_connector_output": "c79ecd68d9f8558c",
        "vllm.distributed.kv_transfer.kv_connector.utils:KVOutputAggregator.aggregate": "975b6e7a1ada5fcc",
    },
    "0.32": {
        "vllm.v1.core.sched.scheduler:Scheduler._handle_failed_recving": "52bf676991df0f82",
        "vllm.v1.core.sched.scheduler:Scheduler._update_waiting_for_remote_kv": "038939f2969f2254",
        "vllm.v1.core.sched.scheduler:Scheduler._update_from_kv_xfer_finished": "c708a4073fdcb50c",
        "vllm.v1.core.sched.scheduler:Scheduler._connector_finished": "4b0a66b339a47053",
        "vllm.v1.core.sched.scheduler:Scheduler._free_request": "efc6d43fc80acee8",
        "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": "9f8f1660569a967c",
        "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache": "18dc07bcae64dde3",
        "vllm.v1.core.block_pool:BlockPool.touch": "9e08b26decc08ed2",
        "vllm.v1.core.block_pool:BlockPool.free_blocks": "734fa41937d6a9a7",
        "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin._get_kv_connector_output": "c79ecd68d9f8558c",
        "vllm.distributed.kv_transfer.kv_connector.utils:KVOutputAggregator.aggregate": "975b6e7a1ada5fcc",
    },
}


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
    for name in FUNCTIONS:
        print(f'        "{name}": "{current(name)}",')
