"""A file that is reloaded when it changes or on SIGHUP; if it has an error, the last good one stays in use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from phalanx.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_BYTES = 1 << 20  # 10,000 replicas or keys


class WatchedFile(Generic[T]):
    """See the module's docstring.

    Args:
        flag: that names the file, for messages.
        parse: text and name of the file -> its value. Raises ConfigError.
        use: takes each new value.
    """

    def __init__(self, file: Path, flag: str, parse: Callable[[str, str], T], use: Callable[[T], None]) -> None:
        self._file = file
        self._flag = flag
        self._parse = parse
        self._use = use
        self._seen: tuple[int, int, int] | None = None
        self._text: str | None = None

    def load(self) -> None:
        """Read it for the first time.

        Raises:
            ConfigError: says what is wrong, with the line.
        """
        self._seen = self._stamp()
        self._text = self._read()
        self._use(self._parse(self._text, str(self._file)))

    def reload(self, *, if_changed: bool) -> None:
        """Read it again; logs an error in it and keeps the last good one.

        Args:
            if_changed: only if its time, size or inode has changed since the last look.
        """
        stamp = self._stamp()
        if if_changed and stamp == self._seen:
            return
        self._seen = stamp
        try:
            text = self._read()
            value = self._parse(text, str(self._file))
        except ConfigError as error:
            log.error("%s has an error, and the last good file stays in use: %s", self._flag, error)
            return
        if text != self._text:
            self._text = text
            self._use(value)
            log.info("%s was read again", self._file)

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            status = self._file.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> str:
        try:
            with self._file.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"{self._flag} {self._file} cannot be read: {error.strerror}.") from error
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{self._flag} {self._file} is larger than {MAX_BYTES >> 20} MiB.")
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{self._flag} {self._file} is not UTF-8: {error}.", remedy="Write it as UTF-8."
            ) from error
