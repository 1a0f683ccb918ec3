# SPDX-License-Identifier: Apache-2.0
"""Text of a growing token list, piece by piece, with stop strings (docs/speculation.md 6)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

REPLACEMENT = "\ufffd"  # what the first bytes of a character decode to


@dataclass(frozen=True)
class TextStream:
    """`text` is final; tokens whose text ends inside a character wait in `waiting`; the first `sent` characters were handed out."""

    text: str = ""
    waiting: tuple[int, ...] = ()
    sent: int = 0
    stopped: bool = False


def push(stream: TextStream, token: int, tokenizer: Any, stops: Sequence[str]) -> tuple[TextStream, str]:
    """(stream with one more token, the text that may be shown now).

    For a byte-level tokenizer: text is cut between characters only. The text ends in front of the first stop string; what could be the
    beginning of one is held back.
    """
    waiting = (*stream.waiting, token)
    piece = tokenizer.decode(list(waiting), skip_special_tokens=False)
    if piece.endswith(REPLACEMENT):
        return replace(stream, waiting=waiting), ""
    text = stream.text + piece
    found = [at for stop in stops if (at := text.find(stop, max(len(stream.text) - len(stop) + 1, 0))) >= 0]
    if found:
        text = text[: min(found)]
        return TextStream(text, (), len(text), True), text[stream.sent :]
    shown = len(text) - max((held(text, stop) for stop in stops), default=0)
    return TextStream(text, (), shown), text[stream.sent : shown]


def held(text: str, stop: str) -> int:
    """How many characters at the end of the text could begin the stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def finish(stream: TextStream, tokenizer: Any) -> tuple[TextStream, str]:
    """(stream, the rest): nothing waits any longer; half a character reads as the replacement character."""
    text = stream.text + (tokenizer.decode(list(stream.waiting), skip_special_tokens=False) if stream.waiting else "")
    return TextStream(text, (), len(text), stream.stopped), text[stream.sent :]
