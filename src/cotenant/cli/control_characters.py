r"""Control characters in texts of others: what a terminal would obey instead of showing it.

Beside the C0 controls these are the C1 controls, which some terminals take for the beginning of an escape sequence, and
the characters that change the direction or the line of a text.
"""

from __future__ import annotations

import codecs
import re

UNPRINTABLE = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")  # beside the C0 controls

_NEUTRALIZED = re.compile(f"(\x1b\\[[0-9;]{{0,32}}m)|[\x00-\x07\x0b\x0c\x0e-\x1f]|{UNPRINTABLE.pattern}")
_CONTROLS = re.compile(f"[\x00-\x1f]|{UNPRINTABLE.pattern}")
_UNFINISHED = re.compile("\x1b(\\[[0-9;]{0,32})?\\Z")


class Neutralizer:
    r"""Makes one stream of output harmless for a terminal: controls are shown, not obeyed.

    Colours, tabs, backspaces and carriage returns stay, for progress bars. Bytes that are not UTF-8 become the
    replacement character.

    >>> stream = Neutralizer()
    >>> stream.feed(b"\x1b[1mbold\x1b[0m \x1b]0;title\x07 \xc2\x9b2J \x1b[3")
    b'\x1b[1mbold\x1b[0m ^[]0;title^G <U+009B>2J '
    >>> stream.feed(b"1mred") + stream.end()
    b'\x1b[31mred'
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # perhaps the beginning of a colour

    def feed(self, data: bytes) -> bytes:
        """Return the harmless form of the next piece, as far as it is certain."""
        text = self._held + self._decoder.decode(data)
        unfinished = _UNFINISHED.search(text)
        self._held = unfinished[0] if unfinished else ""
        return _shown(text[: len(text) - len(self._held)])

    def end(self) -> bytes:
        """Return the rest."""
        rest = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        return _shown(rest)


def _shown(text: str) -> bytes:
    return _NEUTRALIZED.sub(_replacement, text).encode()


def inert(text: str) -> str:
    r"""Return a text with all of its control characters shown; also those that only a line or a terminal may have.

    >>> inert("\x1b[1mbold\n\u202etxt.exe")
    '^[[1mbold^J<U+202E>txt.exe'
    """
    return _CONTROLS.sub(lambda found: _picture(found[0]), text)


def _replacement(found: re.Match[str]) -> str:
    return found[1] or _picture(found[0])


def _picture(char: str) -> str:
    code = ord(char)
    return f"^{chr(code + 64)}" if code < 32 else f"<U+{code:04X}>"
