# SPDX-License-Identifier: Apache-2.0
"""Makes checkpoints/tiny/tokenizer.json: a byte-level BPE of 512 tokens, the same bytes on every run.

Usage: python checkpoints/make_tokenizer.py [FILE]

Ids: 0 begin, 1 end, 2 pad, 3..258 the bytes in the order of the letters that byte-level BPE writes them as, then merges, then the
release's chat tokens. The text below is ours. It holds every sentence in several cases, with accents, in full-width letters and with
different white space, so that many tokens fall together in the compressed vocabulary of the Engram.
"""

import json
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

from tokenizers import pre_tokenizers

VOCAB = 512
FIRST = ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<\uff5c\u2581pad\u2581\uff5c>")
# System is not special and is normalized, as in the release, where it is also the noise token of the draft.
LAST = ("<\uff5cSystem\uff5c>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<think>", "</think>", "\uff5cDSML\uff5c")
LAST += ("<\uff5cdeepseek_image\uff5c>",)
PLAIN = ("<\uff5cSystem\uff5c>",)

SENTENCES = (
    "The gate chooses two experts for each token, and the others stay silent.",
    "A window holds the last rows; older rows are compressed in groups of two.",
    "the table has one row for every short run of words",
    "One layer reads what another layer wrote, and the stream carries both.",
    "Every block keeps its own scale: a power of two, never a fraction.",
    "Caf\u00e9, na\u00efve, r\u00e9sum\u00e9, \u00dcbergr\u00f6\u00dfe, \u00c5ngstr\u00f6m, se\u00f1or, fa\u00e7ade, cr\u00e8me br\u00fbl\u00e9e.",
    "Cafe, naive, resume, Ubergrosse, Angstrom, senor, facade, creme brulee.",
    "What is drafted must be checked; what is checked may be kept.",
    "Ten, twenty, thirty: 10, 20, 30. Then 1024 + 1024 = 2048.",
    "Where the tests fail, the code is wrong, or the test is.",
    "Zero rows in, zero rows out: no row, no sum, no error.",
    'She asked: "How many tokens were there?" - "Five, I\'d say; it\'s been a while."',
    "for row in rows:\n    if row is None:\n\t\treturn total\n\n    total += row.scale\n",
)


def full_width(text: str) -> str:
    """Letters and digits as their full-width forms, which NFKC folds back."""
    return "".join(chr(ord(letter) + 0xFEE0) if "!" <= letter <= "~" else letter for letter in text)


def corpus() -> list[str]:
    plain = [text for sentence in SENTENCES for text in (sentence, sentence, sentence.lower())]
    loud = [text for sentence in SENTENCES for text in (sentence.upper(), sentence.upper(), sentence.title())]
    spaced = [sentence.replace(" ", "  ").replace(",", ",\n") + "\n\n\r\n\t" for sentence in SENTENCES]
    return plain + loud + spaced + [full_width("the window, The Window, a row, A ROW")] * 2


def byte_letters() -> list[str]:
    """The letters that byte-level BPE writes bytes as: 188 printable bytes as themselves, the other 68 as U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(code) for code in (*printable, *range(0x100, 0x100 + 256 - len(printable)))]


def merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    """The word with every occurrence of the pair joined, from the left."""
    out: list[str] = []
    place = 0
    while place < len(word):
        width = 2 if word[place : place + 2] == pair else 1
        out.append("".join(word[place : place + width]))
        place += width
    return tuple(out)


def train(words: Counter[tuple[str, ...]], count: int, taken: set[str]) -> list[tuple[str, str]]:
    """Merges of the most frequent pair, ties to the smaller pair, until `count` new tokens exist."""
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in words.items():
            for pair in pairwise(word):
                pairs[pair] += times
        pair = min((pair for pair in pairs if pair[0] + pair[1] not in taken), key=lambda pair: (-pairs[pair], pair))
        merges.append(pair)
        taken.add(pair[0] + pair[1])
        joined: Counter[tuple[str, ...]] = Counter()
        for word, times in words.items():
            joined[merged(word, pair)] += times
        words = joined
    return merges


def added(number: int, content: str) -> dict[str, object]:
    plain = content in PLAIN
    return {
        "id": number,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": plain,
        "special": not plain,
    }


def tokenizer() -> dict[str, object]:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    words = Counter(tuple(word) for text in corpus() for word, _ in level.pre_tokenize_str(text))
    base = [*FIRST, *byte_letters()]
    merges = train(words, VOCAB - len(base) - len(LAST), set(base))
    vocab = [*base, *(left + right for left, right in merges)]
    numbers = [*enumerate(FIRST), *((VOCAB - len(LAST) + place, content) for place, content in enumerate(LAST))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added(number, content) for number, content in numbers],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(vocab)},
            "merges": [list(pair) for pair in merges],
        },
    }


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "tiny" / "tokenizer.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(tokenizer(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{target.name}: {VOCAB} tokens, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
