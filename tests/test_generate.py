# SPDX-License-Identifier: Apache-2.0
"""Text in, text out: the same with drafts and without, whatever ends a sequence, and the cache that is left."""

import json
import random
import sys
from dataclasses import replace

import pytest
import spec_kit
import torch
from click.testing import CliRunner
from spec_kit import decode, difference, micro_config, one

import v41
from v41.cli import cli
from v41.spec import verify
from v41.text_stream import TextStream, finish, push

torch.set_num_threads(1)
module = sys.modules["v41.generate"]
G = torch.Generator().manual_seed(0)
PROMPTS = [torch.randint(3, 60, (n,), generator=G).tolist() for n in (3, 9, 14)]
MOST = 14


class Letters:
    """A byte-level tokenizer: token i is one character of the base-64 alphabet, but 60 to 63 are the four bytes of one character."""

    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz01234567"
    table = [c.encode() for c in alphabet] + [bytes([b]) for b in "\U0001f40d".encode()]

    def decode(self, ids, skip_special_tokens):
        assert not skip_special_tokens
        return b"".join(self.table[i] for i in ids).decode("utf-8", "replace")


@pytest.fixture(scope="module")
def params():
    return v41.init_params(micro_config(), 0)


@pytest.fixture(scope="module")
def plain(params):
    """Plain greedy tokens of every prompt and the caches after each."""
    cache, logits = spec_kit.prefill(params, PROMPTS, 60)
    tokens, caches = decode(params, cache, logits, MOST)
    return [row[:MOST] for row in tokens.tolist()], caches


def check_cache(params, made, plain):
    """The cache of each sequence is that of plain decoding before its last token."""
    for b, g in enumerate(made.sequences):
        want = one(plain[1][len(g.tokens) - 1], b)
        if made.statistics.offered == ():
            want = replace(want, draft_length=torch.zeros_like(want.length))
        name = difference(params, one(made.cache, b), want)
        assert name is None or (made.statistics.offered == () and name.startswith("mtp")), f"sequence {b} differs in {name}"


@pytest.mark.parametrize("draft", [True, False])
def test_greedy_text_is_plain_decodings_with_drafts_and_without(params, plain, draft):
    made = v41.generate(params, PROMPTS, max_tokens=MOST, stop_tokens=(), draft=draft)
    assert [list(g.tokens) for g in made.sequences] == plain[0]
    assert {g.finish for g in made.sequences} == {"length"} and {g.text for g in made.sequences} == {None}
    check_cache(params, made, plain)
    s = made.statistics
    assert s.tokens == 3 * (MOST - 1) and len(s.offered) == len(s.accepted) == (5 if draft else 0)
    assert s.tokens_per_step > 1 if draft else s.steps == s.tokens
    assert s.tokens == s.steps + sum(s.accepted)


def test_a_prompt_alone_and_in_chunks_gives_what_it_gives_in_a_batch(params, plain, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 4)
    made = v41.generate(params, PROMPTS[1:], max_tokens=6, stop_tokens=())
    assert [list(g.tokens) for g in made.sequences] == [t[:6] for t in plain[0][1:]]
    made = v41.generate(params, PROMPTS[2:], max_tokens=6, stop_tokens=())
    assert list(made.sequences[0].tokens) == plain[0][2][:6]


def test_drawn_tokens_depend_on_seed_and_place_not_on_partners_or_chunks(params, monkeypatch):
    options = {"max_tokens": 4, "stop_tokens": (), "temperature": 1.5, "top_p": 0.95}
    first = v41.generate(params, PROMPTS, seed=1, **options).sequences
    monkeypatch.setattr(module, "CHUNK", 5)
    assert v41.generate(params, PROMPTS[:1], seed=1, **options).sequences[0] == first[0]
    assert v41.generate(params, PROMPTS, seed=2, **options).sequences != first


@pytest.fixture
def all_accepted(monkeypatch, plain):
    """Drafts are the tokens of plain decoding, so that every block is accepted whole."""

    def propose(params, cache, state, ops):
        drafts = torch.zeros_like(state.drafts)
        for b, n in enumerate(cache.length.tolist()):
            at = n - len(PROMPTS[b])
            row = plain[0][b][at + 1 : at + 1 + state.depth]
            drafts[b, : len(row)] = torch.tensor(row, dtype=torch.int32)
        return replace(state, drafts=drafts, offered=torch.full_like(state.offered, state.depth))

    monkeypatch.setattr(verify, "propose", propose)


def first_place(tokens, wanted):
    return next(i for i, t in enumerate(tokens) if t in wanted) + 1 if set(tokens) & wanted else len(tokens)


@pytest.mark.parametrize("place", [0, 1, 2, 4, 6, 7])
def test_a_stop_token_at_any_place_ends_the_sequence_there(params, plain, all_accepted, place):
    stops = {row[place] for row in plain[0]}
    made = v41.generate(params, PROMPTS, max_tokens=MOST, stop_tokens=sorted(stops), tokenizer=Letters())
    for b, g in enumerate(made.sequences):
        n = first_place(plain[0][b], stops)
        assert list(g.tokens) == plain[0][b][:n]
        assert g.finish == ("stop" if g.tokens[-1] in stops else "length")
        shown = g.tokens[:-1] if g.finish == "stop" else g.tokens
        assert g.text == Letters().decode(list(shown), skip_special_tokens=False)
    check_cache(params, made, plain)


@pytest.mark.parametrize("place", [0, 1, 3, 5, 9])
def test_a_stop_string_that_ends_inside_a_block_takes_the_rest_of_it_back(params, plain, all_accepted, place):
    texts = [[Letters().decode([t], skip_special_tokens=False) for t in row] for row in plain[0]]
    stop = "".join(texts[0][max(place - 1, 0) : place + 1])
    made = v41.generate(params, PROMPTS, max_tokens=MOST, stop_tokens=(), stop_strings=[stop, "never"], tokenizer=Letters())
    for b, g in enumerate(made.sequences):
        whole = Letters().decode(plain[0][b], skip_special_tokens=False)
        ends = whole.find(stop)
        if ends < 0:
            assert list(g.tokens) == plain[0][b] and g.text == whole and g.finish == "length"
        else:
            n = next(n for n in range(1, MOST + 1) if stop in Letters().decode(plain[0][b][:n], skip_special_tokens=False))
            assert list(g.tokens) == plain[0][b][:n] and g.text == whole[:ends] and g.finish == "stop"
    assert made.sequences[0].finish == "stop" and len(made.sequences[0].tokens) <= place + 1
    check_cache(params, made, plain)
    assert bool((made.cache.high - made.cache.length <= 5).all())


def test_a_cache_that_is_not_taken_back_is_noticed(params, plain, all_accepted, monkeypatch):
    monkeypatch.setattr(module, "rewind", lambda cache, length: cache)
    stop = Letters().decode(plain[0][0][2:4], skip_special_tokens=False)
    made = v41.generate(params, PROMPTS, max_tokens=MOST, stop_tokens=(), stop_strings=[stop], tokenizer=Letters())
    with pytest.raises(AssertionError, match="sequence 0 differs in length"):
        check_cache(params, made, plain)


def test_every_token_is_told_once_with_the_text_that_it_completes(params, plain):
    told = []
    made = v41.generate(params, PROMPTS, max_tokens=MOST, stop_tokens=(), stop_strings=["ZZZZ"], tokenizer=Letters(), on_token=lambda *x: told.append(x))
    for b, g in enumerate(made.sequences):
        assert [t for s, t, _ in told if s == b and t is not None] == list(g.tokens)
        assert "".join(text for s, _, text in told if s == b) == g.text == Letters().decode(list(g.tokens), skip_special_tokens=False)


def test_a_continuation_may_fill_every_position(params):
    small = replace(params, config=replace(params.config, max_position_embeddings=20))
    made = v41.generate(small, PROMPTS[2:], max_tokens=7, stop_tokens=())
    assert len(made.sequences[0].tokens) == 7 and made.cache.length.tolist() == [20]
    with pytest.raises(ValueError, match="max_tokens: 8 after a prompt of 14 tokens exceeds max_position_embeddings 20"):
        v41.generate(small, PROMPTS[2:], max_tokens=8)


# Text


def test_pieces_of_text_are_the_text_up_to_the_first_stop_string():
    g, tokenizer = random.Random(4), Letters()
    for _ in range(400):
        tokens = [g.choice((0, 0, 1, 2, 60, 61, 62, 63, 63)) for _ in range(g.randint(1, 14))]
        if g.random() < 0.5:
            tokens[g.randint(0, len(tokens) - 1) :] = [60, 61, 62, 63, 0]
        stops = ["AAB", "BA", "\U0001f40dA"][: g.randint(0, 3)]
        stream, shown = TextStream(), ""
        for token in tokens:
            stream, piece = push(stream, token, tokenizer, stops)
            shown += piece
            assert "\U0001f40d" not in piece[1:-1] or piece.count("\U0001f40d")
            if stream.stopped:
                break
        stream, rest = finish(stream, tokenizer)
        whole = tokenizer.decode(tokens, skip_special_tokens=False)
        ends = min((at for s in stops if (at := whole.find(s)) >= 0), default=None)
        assert shown + rest == stream.text == (whole if ends is None else whole[:ends])
        assert stream.stopped == (ends is not None)


def test_nothing_is_shown_that_a_later_token_takes_back():
    stream, shown = TextStream(), []
    for token in (2, 0, 0, 1):  # C A A B with the stop string AAB
        stream, piece = push(stream, token, Letters(), ["AAB"])
        shown.append(piece)
    assert shown == ["C", "", "", ""] and stream.text == "C" and stream.stopped
    stream, shown = TextStream(), []
    for token in (60, 61, 62, 63):
        stream, piece = push(stream, token, Letters(), [])
        shown.append(piece)
    assert shown == ["", "", "", "\U0001f40d"]


# Arguments


@pytest.mark.parametrize(
    "options, text",
    [
        ({"prompts": []}, "prompts: .* is not a list"),
        ({"prompts": "text"}, "prompts: 'text' is not a list"),
        ({"prompts": ["text"]}, r"prompts\[0\]: a text, but there is no tokenizer"),
        ({"prompts": [[1], []]}, r"prompts\[1\]: empty"),
        ({"prompts": [[1, 64]]}, r"prompts\[0\]: 64 is not a token id"),
        ({"max_tokens": 0}, "max_tokens: 0 is not an integer of at least 1"),
        ({"stop_strings": ["x"]}, "stop_strings: given, but there is no tokenizer"),
        ({"stop_strings": [""], "tokenizer": Letters()}, "stop_strings: an empty one"),
        ({"temperature": 1.0, "rule": "greedy"}, "rule: 'greedy' with temperature 1.0"),
        ({"temperature": -1.0}, "temperature: -1.0 at sequence 0"),
        ({"rule": "typical"}, "rule: 'typical' is not one of"),
    ],
)
def test_bad_arguments_are_named(params, options, text):
    given = {"prompts": [[1, 2, 3]], "max_tokens": 2} | options
    with pytest.raises(ValueError, match=text):
        v41.generate(params, given.pop("prompts"), **given)


def test_what_cannot_speculate_says_so(params):
    with pytest.raises(ValueError, match="regime 'released' .* has no speculation"):
        v41.generate(replace(params, numerics=v41.Numerics("released")), [[1, 2]], max_tokens=2)
    with pytest.raises(ValueError, match="draft: the parameters have no draft head; draft=False decodes plainly"):
        v41.generate(replace(params, draft=None), [[1, 2]], max_tokens=2)
    assert len(v41.generate(replace(params, draft=None), [[1, 2]], max_tokens=2, stop_tokens=(), draft=False).sequences[0].tokens) == 2


# The command


def command(*arguments):
    return CliRunner().invoke(cli, ["generate", str(spec_kit.GOLDEN), *arguments])


def test_the_command_streams_text_and_tells_figures_as_json():
    arguments = ("--prompt", "Hello there", "--max-tokens", "3")
    told = command(*arguments, "--json")
    assert told.exit_code == 0, told.output
    made = json.loads(told.stdout)
    assert len(made["sequences"][0]["tokens"]) == 3 and len(made["statistics"]["acceptance"]) == 5
    streamed = command(*arguments, "--no-draft")
    assert streamed.exit_code == 0 and streamed.stdout == made["sequences"][0]["text"] + "\n"
    assert "2 tokens in 2 steps, 1.00 a step" in streamed.stderr


@pytest.mark.parametrize(
    "arguments, text",
    [
        (("--prompt", "a", "--chat"), "tokenizer.json has no token"),
        (("--prompt", "a", "--system", "b"), "--system and --effort: only with --chat"),
        (("--prompt", "a", "--chat", "--effort", "101"), "effort: 101 is not 1 to 100"),
    ],
)
def test_the_command_refuses_what_the_checkpoint_or_the_options_have_not(arguments, text):
    told = command(*arguments)
    assert told.exit_code != 0 and isinstance(told.exception, ValueError) and text in str(told.exception)
