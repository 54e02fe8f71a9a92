"""What a person types while a live view redraws the terminal."""

import os
import select
import sys
from types import TracebackType

try:
    import termios
    import tty
except ImportError:  # no Unix terminal
    termios = None  # type: ignore[assignment]

_ENTER, _ERASE, _KILL_LINE = ("\n", "\r"), ("\x7f", "\b"), "\x15"


class TypedLine:
    """Reads keys without waiting for Enter and without echo; a context manager that gives the terminal back.

    Where the input is no terminal (a pipe, a service) nothing is ever typed.

    Attributes:
        text: of the line so far.
    """

    def __init__(self) -> None:
        self.text = ""
        self._stream = sys.stdin.fileno() if termios is not None and sys.stdin.isatty() else None

    @property
    def usable(self) -> bool:
        """Whether somebody can type."""
        return self._stream is not None

    def __enter__(self) -> "TypedLine":
        if self._stream is not None:
            self._before = termios.tcgetattr(self._stream)
            tty.setcbreak(self._stream)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            termios.tcsetattr(self._stream, termios.TCSADRAIN, self._before)

    def poll(self) -> str | None:
        """A line that was ended with Enter, stripped; None: none yet, or an empty one."""
        if self._stream is None or not select.select([self._stream], [], [], 0)[0]:
            return None
        return self.feed(os.read(self._stream, 256).decode(errors="ignore"))

    def feed(self, keys: str) -> str | None:
        """Takes keys as they were pressed; what follows an Enter begins the next line."""
        for place, key in enumerate(keys):
            if key in _ENTER:
                line, self.text = self.text.strip(), keys[place + 1 :]
                return line or None
            if key in _ERASE:
                self.text = self.text[:-1]
            elif key == _KILL_LINE:
                self.text = ""
            elif key.isprintable():
                self.text += key
        return None
