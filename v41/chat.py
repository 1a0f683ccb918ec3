# SPDX-License-Identifier: Apache-2.0
"""The release's chat encoding: messages to the text of a prompt (docs/speculation.md 7).

A message is a mapping with `role` ("system", "user", "assistant" or "tool") and `content`; an assistant message may have `reasoning` and
`tool_calls`, each a mapping with `name` and `arguments` (a mapping).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

BOS, EOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
SYSTEM, USER, ASSISTANT = "<\uff5cSystem\uff5c>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"
THINK, THOUGHT = "<think>", "</think>"
DSML = "\uff5cDSML\uff5c"
IMAGE = "<\uff5cdeepseek_image\uff5c>"
EFFORTS = {"low": 50, "high": 75, "max": 100}
KEYS = {"system": (), "user": (), "tool": (), "assistant": ("reasoning", "tool_calls")}

Message = Mapping[str, Any]


def effort_line(effort: int | str) -> str:
    """What opens a thinking conversation; effort is 1 to 100, or "low" (50), "high" (75) or "max" (100)."""
    value = EFFORTS.get(effort) if isinstance(effort, str) else effort
    if type(value) is not int or not 1 <= value <= 100:
        raise ValueError(f"effort: {effort!r} is not 1 to 100 or one of {sorted(EFFORTS)}")
    return f"Reasoning Effort: {value} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


def tag(name: str, attributes: Mapping[str, str], inside: str) -> str:
    """A tag of the tool-call markup; its name follows the marker behind a space."""
    opened = "".join(f' {key}="{value}"' for key, value in attributes.items())
    return f"<{DSML} {name}{opened}>{inside}</{DSML} {name}>"


def calls(tool_calls: Sequence[Message]) -> str:
    """The tool calls of an assistant turn: strings as they are, everything else as JSON."""
    invoked = []
    for call in tool_calls:
        parameters = []
        for key, value in call["arguments"].items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            parameters.append(tag("parameter", {"name": key, "string": "true" if isinstance(value, str) else "false"}, text))
        invoked.append(tag("invoke", {"name": call["name"]}, "\n" + "\n".join(parameters) + "\n"))
    return tag("calls", {}, "\n" + "\n".join(invoked) + "\n")


def turns(messages: Sequence[Message]) -> list[Message]:
    """Messages with tool results turned into user blocks, and user blocks that follow each other joined by an empty line."""
    made: list[Message] = []
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            role, content = "user", f"<tool_result>{content}</tool_result>"
        if role == "user" and made and made[-1]["role"] == "user":
            made[-1] = {"role": "user", "content": made[-1]["content"] + "\n\n" + content}
        else:
            made.append({**message, "role": role, "content": content})
    return made


def check(messages: Sequence[Message]) -> None:
    """ValueError with the message's number for roles, keys and contents that the encoding has not."""
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in KEYS:
            raise ValueError(f"messages[{i}]: role {role!r} is not one of {sorted(KEYS)}")
        unknown = sorted(set(message) - {"role", "content", *KEYS[role]})
        if unknown:
            raise ValueError(f"messages[{i}]: a {role} message has no {unknown}")
        if not isinstance(content, str) and not (content is None and role == "assistant"):
            raise ValueError(f"messages[{i}]: content is a {type(content).__name__}, not text")
        if IMAGE in (content or ""):
            raise ValueError(f"messages[{i}]: holds the image placeholder; there is no vision part, only text")
    if not messages:
        raise ValueError("messages: none")


def encode_chat(messages: Sequence[Message], *, thinking: bool = True, effort: int | str = "high", tools: bool = False) -> str:
    """The prompt: bos, the turns, and the header of the answer where the last turn asks for one.

    A system message stands behind its marker; in thinking mode the effort line comes first, behind the same marker, with or without a
    system message. User turns and later system messages are followed by the assistant header: marker and <think>, or </think> without
    thinking. Assistant turns end with eos. Reasoning before the last user turn is dropped, its header then being </think>, unless there
    are tools: tool messages, tool calls, or tools=True where they are described in the system message.
    Raises ValueError for messages that the encoding has not.
    """
    check(messages)
    keep = tools or any(m["role"] == "tool" or m.get("tool_calls") for m in messages)
    listed = turns(messages)
    asks = [m["role"] == "user" or (m["role"] == "system" and i > 0) for i, m in enumerate(listed)]
    last = max((i for i, asking in enumerate(asks) if asking), default=-1)
    text = BOS + (SYSTEM if thinking or listed[0]["role"] == "system" else "") + (effort_line(effort) if thinking else "")
    for i, message in enumerate(listed):
        shown = thinking and (keep or i >= last)
        text += turn(message, i == 0, shown)
        if asks[i] and (i + 1 == len(listed) or listed[i + 1]["role"] == "assistant"):
            text += ASSISTANT + (THINK if shown else THOUGHT)
    return text


def turn(message: Message, first: bool, shown: bool) -> str:
    """One turn; `shown`: the header before it opened the reasoning."""
    role, content = message["role"], message["content"]
    if role == "system":
        return content if first else SYSTEM + content
    if role == "user":
        return USER + content
    reasoning = (message.get("reasoning") or "") + THOUGHT if shown else ""
    called = "\n\n" + calls(message["tool_calls"]) if message.get("tool_calls") else ""
    return reasoning + content + called + EOS
