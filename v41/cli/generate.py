# SPDX-License-Identifier: Apache-2.0
"""`v41 generate`: text from a checkpoint folder, streamed to stdout."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from v41.chat import encode_chat
from v41.generate import Generation, Statistics
from v41.generate import generate as run
from v41.params_io import load_params
from v41.tokenizer import open_tokenizer


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--prompt", "prompts", multiple=True, required=True, help="Text to continue; again for a batch.")
@click.option("--chat", is_flag=True, help="Take each prompt as a user turn in the release's chat encoding.")
@click.option("--system", help="With --chat: the system message.")
@click.option("--effort", help="With --chat: think first; 1 to 100, low, high or max.")
@click.option("--max-tokens", type=int, default=128, show_default=True)
@click.option("--stop", "stops", multiple=True, help="Text that ends a continuation.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the best token.")
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--no-draft", is_flag=True, help="Plain decoding; the draft head is not loaded.")
@click.option("--json", "machine", is_flag=True, help="Print JSON on stdout at the end instead of streaming.")
def generate(
    checkpoint: Path,
    prompts: tuple[str, ...],
    chat: bool,
    system: str | None,
    effort: str | None,
    max_tokens: int,
    stops: tuple[str, ...],
    temperature: float,
    top_p: float,
    seed: int,
    no_draft: bool,
    machine: bool,
) -> None:
    """Continue prompts with the model of a CHECKPOINT folder. Figures go to stderr."""
    tokenizer = open_tokenizer(checkpoint / "tokenizer.json")
    if not chat and (system is not None or effort is not None):
        raise ValueError("--system and --effort: only with --chat")
    params = load_params(checkpoint, draft=not no_draft)
    bos = params.config.bos_token_id
    texts = [in_chat(p, system, effort) for p in prompts] if chat else list(prompts)
    lists = [([] if chat else [bos]) + tokenizer.encode(t, add_special_tokens=False).ids for t in texts]
    if chat:
        check_markers(tokenizer, texts, lists, checkpoint)
    options: dict[str, Any] = {"max_tokens": max_tokens, "stop_strings": stops, "temperature": temperature, "top_p": top_p, "seed": seed}
    show = None if machine else printer(len(lists))
    made = run(params, lists, draft=not no_draft and params.draft is not None, tokenizer=tokenizer, on_token=show, **options)
    tell(made, machine, len(lists))


def in_chat(prompt: str, system: str | None, effort: str | None) -> str:
    """One user turn, with the header of the answer."""
    messages = ([{"role": "system", "content": system}] if system is not None else []) + [{"role": "user", "content": prompt}]
    if effort is None:
        return encode_chat(messages, thinking=False)
    return encode_chat(messages, effort=int(effort) if effort.isdigit() else effort)


def check_markers(tokenizer: Any, texts: list[str], lists: list[list[int]], checkpoint: Path) -> None:
    """ValueError where the tokenizer does not know the markers of the chat encoding: they would fall apart into ordinary tokens."""
    from v41 import chat

    for text, ids in zip(texts, lists, strict=True):
        for marker in (chat.BOS, chat.SYSTEM, chat.USER, chat.ASSISTANT, chat.THINK, chat.THOUGHT):
            if marker in text and tokenizer.token_to_id(marker) not in ids:
                raise ValueError(f"{checkpoint}: tokenizer.json has no token {marker!r}, which --chat needs")


def printer(count: int) -> Any:
    """Writes text as it comes; of several prompts the first one streams and the others follow at the end."""

    def show(sequence: int, token: int | None, text: str) -> None:
        if sequence == 0 and text:
            click.echo(text, nl=False)
            sys.stdout.flush()

    return show


def figures(s: Statistics) -> dict[str, Any]:
    """The statistics with their quotients."""
    rates = [round(a / o, 4) if o else None for a, o in zip(s.accepted, s.offered, strict=True)]
    return asdict(s) | {"tokens_per_step": s.tokens_per_step, "tokens_per_second": s.tokens_per_second, "acceptance": rates}


def tell(made: Generation, machine: bool, count: int) -> None:
    """The end of the output: JSON, or the other sequences and one line of figures on stderr."""
    told = figures(made.statistics)
    if machine:
        sequences = [{"text": g.text, "tokens": list(g.tokens), "finish": g.finish} for g in made.sequences]
        click.echo(json.dumps({"sequences": sequences, "statistics": told}, ensure_ascii=False))
        return
    click.echo()
    for i in range(1, count):
        click.echo(f"--- {i}\n{made.sequences[i].text}")
    s = made.statistics
    accepted = "" if not s.offered else f", accepted by place {told['acceptance']}"
    click.echo(f"{s.tokens} tokens in {s.steps} steps, {s.tokens_per_step:.2f} a step{accepted}; ", nl=False, err=True)
    click.echo(f"{s.tokens_per_second:.2f} tokens/s, prefill {s.prefill_seconds:.2f} s", err=True)
