"""The log of turns: one JSON line per turn, for as long as the file takes them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvtransport.errors import ConfigError

if TYPE_CHECKING:
    from typing import TextIO

logger = logging.getLogger("kvtransport.vllm.turns")


class TurnLog:
    """Appends records to a file; without a path it does nothing.

    The constructor raises ``ConfigError`` for a path that can't be opened.
    Later failures (a full disk) are logged once and end the log, not the engine.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: TextIO | None = None
        if path:
            try:
                self._file = Path(path).open("a", buffering=1)  # noqa: SIM115  # closed by us
            except OSError as error:
                raise ConfigError(f"turn_log={path!r} cannot be opened: {error}") from error

    @property
    def wanted(self) -> bool:
        """Whether a record would be written."""
        return self._file is not None

    def write(self, record: Mapping[str, object]) -> None:
        """Append one line."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(record) + "\n")
        except OSError as error:
            logger.error("turn_log=%s ends here: %s", self._path, error)  # noqa: TRY400
            self.close()

    def close(self) -> None:
        """End the log.  Calls after the first do nothing."""
        file, self._file = self._file, None
        if file is not None:
            # What could not be written is tried again here, and fails again.
            with suppress(OSError):
                file.close()
