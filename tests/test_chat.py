# SPDX-License-Identifier: Apache-2.0
"""The chat encoding on its documented structure, character for character."""

import inspect
from types import ModuleType

import pytest

from v41 import chat
from v41.chat import encode_chat

BAR, MARK = "\uff5c", "\u2581"
BOS, EOS = f"<{BAR}begin{MARK}of{MARK}sentence{BAR}>", f"<{BAR}end{MARK}of{MARK}sentence{BAR}>"
S, U, A = (f"<{BAR}{x}{BAR}>" for x in ("System", "User", "Assistant"))
LINE = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


def message(role, content, **rest):
    return {"role": role, "content": content, **rest}


TWO = [message("system", "Be exact."), message("user", "Hello")]
PAST = [
    message("user", "one"),
    message("assistant", "two", reasoning="because"),
    message("user", "three"),
]
CALL = {"name": "weather", "arguments": {"city": "Ulm", "days": 2, "wind": True}}
TOOL = [
    message("user", "Weather?"),
    message("assistant", None, reasoning="look", tool_calls=[CALL]),
    message("tool", "rain"),
    message("tool", "wind"),
    message("user", "And?"),
]
CALLED = (
    f'\n\n<{BAR}DSML{BAR} calls>\n<{BAR}DSML{BAR} invoke name="weather">\n'
    f'<{BAR}DSML{BAR} parameter name="city" string="true">Ulm</{BAR}DSML{BAR} parameter>\n'
    f'<{BAR}DSML{BAR} parameter name="days" string="false">2</{BAR}DSML{BAR} parameter>\n'
    f'<{BAR}DSML{BAR} parameter name="wind" string="false">true</{BAR}DSML{BAR} parameter>\n'
    f"</{BAR}DSML{BAR} invoke>\n</{BAR}DSML{BAR} calls>"
)
CASES = {
    "thinking, with a system message": (TWO, {}, f"{BOS}{S}{LINE.format(75)}Be exact.{U}Hello{A}<think>"),
    "thinking, without one": (TWO[1:], {"effort": "max"}, f"{BOS}{S}{LINE.format(100)}{U}Hello{A}<think>"),
    "effort as a number": (TWO[1:], {"effort": 1}, f"{BOS}{S}{LINE.format(1)}{U}Hello{A}<think>"),
    "chat, with a system message": (TWO, {"thinking": False}, f"{BOS}{S}Be exact.{U}Hello{A}</think>"),
    "chat, without one": (TWO[1:], {"thinking": False}, f"{BOS}{U}Hello{A}</think>"),
    "earlier reasoning is dropped": (PAST, {"effort": "low"}, f"{BOS}{S}{LINE.format(50)}{U}one{A}</think>two{EOS}{U}three{A}<think>"),
    "earlier reasoning stays with tools": (
        PAST,
        {"tools": True},
        f"{BOS}{S}{LINE.format(75)}{U}one{A}<think>because</think>two{EOS}{U}three{A}<think>",
    ),
    "chat mode has no reasoning": (PAST, {"thinking": False}, f"{BOS}{U}one{A}</think>two{EOS}{U}three{A}</think>"),
    "an answer after the last question keeps its reasoning": (
        PAST[:2],
        {},
        f"{BOS}{S}{LINE.format(75)}{U}one{A}<think>because</think>two{EOS}",
    ),
    "a later system message asks": (
        [*PAST[:2], message("system", "rule")],
        {"thinking": False},
        f"{BOS}{U}one{A}</think>two{EOS}{S}rule{A}</think>",
    ),
    "a system message between question and answer": (
        [message("user", "q"), message("system", "rule")],
        {"thinking": False},
        f"{BOS}{U}q{S}rule{A}</think>",
    ),
    "tools": (
        TOOL,
        {},
        f"{BOS}{S}{LINE.format(75)}{U}Weather?{A}<think>look</think>{CALLED}{EOS}"
        f"{U}<tool_result>rain</tool_result>\n\n<tool_result>wind</tool_result>\n\nAnd?{A}<think>",
    ),
    "user turns in a row are one": ([message("user", "a"), message("user", "b")], {"thinking": False}, f"{BOS}{U}a\n\nb{A}</think>"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_conversation_reads_as_documented(name):
    messages, options, want = CASES[name]
    assert encode_chat(messages, **options) == want


@pytest.mark.parametrize(
    "messages, options, text",
    [
        ([], {}, "messages: none"),
        ([message("developer", "x")], {}, r"messages\[0\]: role 'developer' is not one of"),
        ([message("user", "x"), message("user", ["y"])], {}, r"messages\[1\]: content is a list, not text"),
        ([message("user", "x", reasoning="y")], {}, r"messages\[0\]: a user message has no \['reasoning'\]"),
        ([message("user", f"<{BAR}deepseek_image{BAR}>")], {}, r"messages\[0\]: holds the image placeholder"),
        (TWO, {"effort": 0}, "effort: 0 is not 1 to 100"),
        (TWO, {"effort": True}, "effort: True is not 1 to 100"),
        (TWO, {"effort": "medium"}, "effort: 'medium' is not 1 to 100"),
    ],
)
def test_what_the_encoding_has_not_is_refused(messages, options, text):
    with pytest.raises(ValueError, match=text):
        encode_chat(messages, **options)


def test_messages_stay_as_they_were():
    before = repr(TOOL)
    encode_chat(TOOL)
    assert repr(TOOL) == before


@pytest.mark.parametrize(
    "old, new",
    [
        ("i >= last", "i >= 0"),
        ("keep or", ""),
        ("SYSTEM if thinking or", "SYSTEM if"),
        ("{DSML} {name}{opened}", "{DSML}{name}{opened}"),
        ("+ called + EOS", "+ called"),
        ('(m["role"] == "system" and i > 0)', "False"),
        ('"high": 75', '"high": 50'),
    ],
)
def test_the_cases_catch_a_mutant(old, new):
    source = inspect.getsource(chat)
    assert old in source
    made = ModuleType("chat_mutant")
    exec(compile(source.replace(old, new), "chat_mutant", "exec"), made.__dict__)
    assert any(made.encode_chat(messages, **options) != want for messages, options, want in CASES.values())
