"""Ctrl-C and SIGTERM, which must stop a conversion wherever it is."""

import signal
import threading
from types import FrameType
from typing import Any


class Terminated(BaseException):
    """SIGTERM, raised where the program is, so that what was half written is removed."""


class Stopping:
    """Within its block both signals raise, SIGINT KeyboardInterrupt and SIGTERM Terminated.

    Python drops an exception that is raised in a callback (of a weak reference, say, of which imports have many), and
    some packages turn one into an error of their own: `check` raises it again.
    """

    def __init__(self) -> None:
        self._received: type[BaseException] | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():  # no other one may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _stop(self, number: int, _: FrameType | None) -> None:
        self._received = KeyboardInterrupt if number == signal.SIGINT else Terminated
        raise self._received

    def check(self) -> None:
        """Raise what a signal before this call has raised, if something has kept it from ending the program."""
        if self._received is not None:
            raise self._received
