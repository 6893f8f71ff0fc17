"""Random JSON schemas that any model can fill in a few hundred tokens, of every keyword that is followed here."""

import random
from typing import Any

WORDS = ("name", "id", "größe", "tags", "a b", "x-1", 'q"t', "value", "日本", "kind", "on", "z")
PATTERNS = ("^[a-c]{1,4}$", "^\\d{2,3}-[x-z]$", "^(yes|no)$", "^[A-Z][a-z]{0,3}$")
FORMATS = ("date", "time", "uuid", "ipv4", "date-time")


def make_schema(seed: int) -> dict[str, Any]:
    """The schema of this number: an object or a list at the top, or, now and then, something smaller."""
    chance = random.Random(seed)
    kind = chance.random()
    if kind < 0.7:
        return _with_definitions(chance, _object(chance, 3))
    return _array(chance, 2) if kind < 0.9 else _value(chance, 1)


def _with_definitions(chance: random.Random, schema: dict[str, Any]) -> dict[str, Any]:
    if chance.random() < 0.3:
        schema["$defs"] = {"leaf": _leaf(chance), "pair": _object(chance, 1)}
        schema["properties"]["ref"] = {"$ref": chance.choice(("#/$defs/leaf", "#/$defs/pair"))}
        schema.setdefault("required", []).append("ref")
    return schema


def _value(chance: random.Random, depth: int) -> dict[str, Any]:
    if depth <= 0 or chance.random() < 0.55:
        return _leaf(chance)
    return chance.choice((_object, _array, _any_of))(chance, depth)


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(WORDS, chance.randint(0, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {name: _value(chance, depth - 1) for name in names}}
    schema["additionalProperties"] = False
    if names and chance.random() < 0.8:
        schema["required"] = chance.sample(names, chance.randint(0, len(names)))
    return schema


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randint(0, 2)
    schema: dict[str, Any] = {"type": "array", "items": _value(chance, depth - 1), "maxItems": chance.randint(least, 3)}
    if least:
        schema["minItems"] = least
    if chance.random() < 0.2:
        schema = {"type": "array", "prefixItems": [_leaf(chance), _leaf(chance)], "items": False, "minItems": 2}
    return schema


def _any_of(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(chance, depth - 1) for _ in range(chance.randint(1, 3))]}


def _leaf(chance: random.Random) -> dict[str, Any]:
    low = chance.randint(-1000, 1000)
    return chance.choice(
        (
            {"type": "integer", "minimum": low, "maximum": low + chance.choice((0, 1, 9, 12345))},
            {"type": "number", "minimum": low, "exclusiveMaximum": low + 0.5 + chance.randint(0, 20)},
            {"type": "integer", "multipleOf": chance.choice((2, 5, 7)), "minimum": 0, "maximum": 500},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["string", "null"], "maxLength": chance.randint(0, 6)},
            {"type": "string", "minLength": 2, "maxLength": chance.randint(2, 9)},
            {"type": "string", "pattern": chance.choice(PATTERNS)},
            {"type": "string", "format": chance.choice(FORMATS)},
            {"enum": chance.sample(["a", 'b"', "c\n", 1, 2.5, None, True, ["x"], {"y": 1}], chance.randint(1, 5))},
            {"const": chance.choice(["fixed", 17, False, [1, "é"]])},
        )
    )
