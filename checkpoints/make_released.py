# SPDX-License-Identifier: Apache-2.0
"""A folder with the names, dtypes, shapes, shards and sizes of the released checkpoint, and holes for its bytes: 510 GB that use 20 MB.

    python checkpoints/make_released.py OUT                  the folder
    python checkpoints/make_released.py --manifest FILE      name, dtype and shape of all 96,085 tensors as gzipped JSON

Every byte reads as zero. The tokenizer is a stand-in with the right number of ids and of compressed ids.
"""

import gzip
import json
import os
import shutil
import struct
import sys
from pathlib import Path

from v41.checkpoint.header import NAMES
from v41.checkpoint.reader import INDEX
from v41.released import Listed, released_table
from v41.spec.config import Config
from v41.stand_in import stand_in_tokenizer

CONFIG = Path(__file__).resolve().parent.parent / "v41" / "data" / "released_config.json"
SHARDS = 48


def shard_number(name: str, config: Config) -> int:
    """The released plan: vision, embedding, one shard a layer, head, draft stages, then the Engrams."""
    parts = name.split(".")
    if ".engram." in name:
        return 47 + config.engram_layer_ids.index(int(parts[1]))
    if parts[0] == "layers":
        return 3 + int(parts[1])
    if parts[0] == "mtp":
        return 44 + int(parts[1])
    if parts[0] in ("vision", "aligner"):
        return 1
    return 2 if parts[0] in ("embed", "image_start", "image_end", "image_newline") else 43


def shard_header(tensors: dict[str, Listed]) -> tuple[bytes, int]:
    """Header of a shard, and its payload's size."""
    records, position = {}, 0
    for name, listed in tensors.items():
        size = listed.dtype.itemsize
        for n in listed.shape:
            size *= n
        records[name] = {"dtype": NAMES[listed.dtype], "shape": list(listed.shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **records}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, position


def make(out: Path, config_file: Path = CONFIG) -> None:
    """Writes the folder; holes need a filesystem that has sparse files."""
    config = Config.from_json(config_file)
    out.mkdir(parents=True, exist_ok=True)
    shards: dict[int, dict[str, Listed]] = {}
    for name, listed in released_table(config).items():
        shards.setdefault(shard_number(name, config), {})[name] = listed
    weight_map, total = {}, 0
    for number, tensors in sorted(shards.items()):
        file = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        header, size = shard_header(tensors)
        (out / file).write_bytes(header)
        os.truncate(out / file, len(header) + size)
        weight_map |= dict.fromkeys(tensors, file)
        total += size
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(config_file, out / "config.json")
    if config.engram_layer_ids:
        tokenizer = stand_in_tokenizer(config.vocab_size, config.engram_compressed_vocab_size)
        (out / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


def manifest_text(config_file: Path = CONFIG) -> bytes:
    """The list of tensors, sorted by name, as JSON."""
    listed = [item.as_dict(name) for name, item in sorted(released_table(Config.from_json(config_file)).items())]
    return json.dumps(listed, separators=(",", ":")).encode()


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--manifest":
        Path(sys.argv[2]).write_bytes(gzip.compress(manifest_text(), 9, mtime=0))
    elif len(sys.argv) == 2:
        make(Path(sys.argv[1]))
    else:
        sys.exit(__doc__)
