"""Folders with the settings of a catalogue model and a byte tokenizer, for engines with made-up weights."""

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from holdfast.models.catalogue import find_model


def write_dummy_model(folder: Path, name: str, **settings: object) -> Path:
    """The folder of a model that load_format="dummy" can open; `settings` replace those of its config.json."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    config = {**find_model(name)[1], **settings}
    (path / "config.json").write_text(json.dumps(config))
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(path / "tokenizer.json"))
    return path
