"""Fail when a function or a file is longer than the house rules allow."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_FOLDERS = (
    "kvtransport", "backends", "conformance", "vllm_adapter", "benchmarks", "examples", "tools"
)  # fmt: skip
_FUNCTION_LINES = 60
_FILE_LINES = 500


def _too_long(file: Path) -> Iterator[str]:
    text = file.read_text()
    name = file.relative_to(_ROOT)
    lines = len(text.splitlines())
    if lines > _FILE_LINES:
        yield f"{name}: {lines} lines, at most {_FILE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > _FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines, at most 60"


def main() -> int:
    """Print what is too long; 1 if anything is."""
    files = sorted(file for folder in _FOLDERS for file in (_ROOT / folder).rglob("*.py"))
    found = [message for file in files for message in _too_long(file)]
    print("\n".join(found) or f"{len(files)} files within {_FILE_LINES} lines")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
