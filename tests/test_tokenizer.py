# SPDX-License-Identifier: Apache-2.0
"""The Engram token map, and the tokenizer of checkpoints/tiny."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from v41.tokenizer import checked_token_map, token_map

HERE = Path(__file__).parent
GOLDEN = HERE / "golden" / "tiny"
TINY = HERE.parent / "checkpoints" / "tiny" / "tokenizer.json"
SCRIPT = HERE.parent / "checkpoints" / "make_tokenizer.py"
TINY_COMPRESSED = 381


def test_the_map_equals_the_golden_one():
    golden = load_file(GOLDEN / "engram_map.safetensors")["token_map"]
    found = token_map(GOLDEN / "checkpoint" / "tokenizer.json")
    assert found.dtype == np.int64 and np.array_equal(found, golden)


def tiny_file(path: Path, tokens: dict[str, int], added: list[dict[str, object]]) -> Path:
    """The tiny tokenizer with other tokens and no merges."""
    data = json.loads(TINY.read_text(encoding="utf-8"))
    data["added_tokens"], data["model"]["vocab"], data["model"]["merges"] = added, tokens, []
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def in_bytes(text: str) -> str:
    """Text as the letters of byte-level BPE."""
    base = Tokenizer.from_file(str(TINY))
    return "".join(word for word, _ in base.pre_tokenizer.pre_tokenize_str(text))


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["row", "Row", "ROW", " row", "row\n"], [0, 0, 0, 0, 0]),  # case and outer white space
        (["e", "\u00e9", "\u00c8", "e\u0301"], [0, 0, 0, 0]),  # accents, composed or not
        ([" ", "\n", "\t\r\n ", "x"], [0, 0, 0, 1]),  # white space alone stays one space
        (["a b", "a\n\t b", "ab"], [0, 0, 1]),  # runs inside collapse, but stay
        (["\uff57", "w", "\ufb01", "fi"], [0, 0, 1, 1]),  # compatibility forms
        (["\u0301", "\u0300", "x"], [0, 1, 2]),  # normalized to nothing: the text itself
        (["\u00a0", " "], [0, 0]),  # NFKC turns the no-break space into a space before white space is looked at
        (["\u00df", "ss"], [0, 1]),  # lower case is not case folding
        (["a\ue000b", "a b"], [0, 0]),  # the mark for a lone space becomes a space wherever it stands
        (["2", "\u00b2", "\u2461"], [0, 0, 0]),
    ],
)
def test_texts_share_an_id_as_the_sequence_says(tmp_path, texts, expected):
    tokens = {in_bytes(text): number for number, text in enumerate(texts)}
    assert len(tokens) == len(texts)
    assert token_map(tiny_file(tmp_path / "t.json", tokens, [])).tolist() == expected


def test_parts_of_characters_keep_their_own_ids(tmp_path):
    """0xC3 and 0xE9 alone are not UTF-8: both decode to U+FFFD, yet they are two tokens."""
    assert token_map(tiny_file(tmp_path / "t.json", {"\u00c3": 0, "\u00e9": 1, "e": 2}, [])).tolist() == [0, 1, 2]


def test_a_hole_in_the_ids_is_refused(tmp_path):
    with pytest.raises(ValueError, match="3 tokens, but none has id 2"):
        token_map(tiny_file(tmp_path / "t.json", {"a": 0, "b": 1, "c": 3}, []))


def test_sizes_are_checked_against_the_config(tmp_path):
    assert len(checked_token_map(TINY, 512, TINY_COMPRESSED)) == 512
    with pytest.raises(ValueError, match="512 tokens, the config has vocab_size 129280"):
        checked_token_map(TINY, 129280, 99092)
    with pytest.raises(ValueError, match=f"{TINY_COMPRESSED} compressed ids, the config has engram_compressed_vocab_size 407"):
        checked_token_map(TINY, 512, 407)
    with pytest.raises(ValueError, match="no such tokenizer file"):
        token_map(tmp_path / "none.json")


def test_the_tiny_map_merges_and_fills_its_range():
    found = token_map(TINY)
    assert np.array_equal(np.unique(found), np.arange(TINY_COMPRESSED))
    assert found[2] == 2, "the pad token keeps its id, as in the release"
    first = [int(np.argmax(found == number)) for number in range(TINY_COMPRESSED)]
    assert first == sorted(first), "ids follow the first appearance"


def test_the_tiny_tokenizer_is_the_scripts_output(tmp_path):
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path / "t.json")], capture_output=True, text=True, check=True)
    assert "512 tokens" in done.stdout
    assert (tmp_path / "t.json").read_bytes() == TINY.read_bytes()


def test_the_tiny_tokenizer_gives_text_back():
    tokenizer = Tokenizer.from_file(str(TINY))
    for text in (
        "The gate chooses two experts.",
        "Caf\u00e9 \u4f60\u597d\n\n  x\t1024",
        "<\uff5cUser\uff5c>Hi<\uff5cAssistant\uff5c><think>ok</think>",
    ):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert [tokenizer.token_to_id(f"<\uff5c{word}\uff5c>") for word in ("System", "User", "Assistant", "deepseek_image")] == [
        505,
        506,
        507,
        511,
    ]
    assert tokenizer.encode("The window").ids != tokenizer.encode("the window").ids
