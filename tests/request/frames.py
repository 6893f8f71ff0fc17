"""Hand-made frames for tests of messages."""

import struct
import zlib

from holdfast.request.step import Step, check_step
from holdfast.request.wire import MAGIC, VERSION, Codec

STEP_KIND = 1
STEPS = Codec({STEP_KIND: Step}, check_step)


def encode_step(step: Step) -> bytes:
    """Return a step as one frame."""
    return STEPS.encode(step, 1)


def decode_step(frame: bytes) -> Step:
    """Return the step of a frame, or raise MessageError."""
    return STEPS.decode(frame)[1]


def sealed(body: bytes, *, kind: int = 7, version: int = VERSION, magic: bytes = MAGIC) -> bytes:
    """Return a frame with the right length and checksum around any body."""
    return struct.pack("<4sHHII", magic, version, kind, len(body), zlib.crc32(body)) + body
