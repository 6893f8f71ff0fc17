"""Hand-made frames for tests of messages."""

import struct
import zlib

from holdfast.request.wire import MAGIC, VERSION


def sealed(body: bytes, *, kind: int = 7, version: int = VERSION, magic: bytes = MAGIC) -> bytes:
    """Return a frame with the right length and checksum around any body."""
    return struct.pack("<4sHHII", magic, version, kind, len(body), zlib.crc32(body)) + body
