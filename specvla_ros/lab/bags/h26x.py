# SPDX-License-Identifier: Apache-2.0
"""Reads keyframes and gaps from H.264 and H.265 packets (Annex B), which decoders do not report.

FFmpeg conceals a lost H.264 packet: it outputs wrong images without a flag. The numbers in the slices show the gap.
"""

import re
from collections.abc import Iterator

_START = re.compile(rb"\x00\x00\x01")
_HEAD_BYTES = 64  # of a unit; what is read of it is in fewer
# H.264: types of units, and profiles whose sequence parameters describe the colours.
_SLICE, _IDR, _SEQUENCE = 1, 5, 7
_HIGH_PROFILES = (100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135)
_IRAP = range(16, 24)  # H.265: types of units from which decoding can start


def is_keyframe(codec: str, packet: bytes) -> bool:
    """True if decoding can start at a packet; `codec` is h264 or hevc."""
    if codec == "h264":
        return any(unit[0] & 31 == _IDR for unit in _units(packet))
    return any(unit[0] >> 1 & 63 in _IRAP for unit in _units(packet))


class FrameNumbers:
    """The frame numbers of an H.264 stream, which count frames that others refer to, modulo 16 to 65536.

    A gap of a whole cycle is not seen.
    """

    def __init__(self) -> None:
        self._bits = 0  # of a frame number; 0: unknown, or gaps are allowed
        self._planes = False  # colour planes are coded separately
        self._newest = 0  # number of the newest reference frame

    def lacks_one(self, packet: bytes) -> bool:
        """Takes a packet; returns whether a frame that others refer to is missing before it."""
        try:
            lacking = [self._take(unit) for unit in _units(packet)]
        except IndexError:  # cut off: decoding fails too
            return True
        return any(lacking)

    def _take(self, unit: bytes) -> bool:
        kind = unit[0] & 31
        if kind == _SEQUENCE:
            self._read_sequence(_Bits(unit))
        if kind not in (_SLICE, _IDR) or not self._bits:
            return False
        bits = _Bits(unit)
        for _ in range(3):  # first macroblock, type of the slice, its parameter set
            bits.golomb()
        number = bits.read((2 if self._planes else 0) + self._bits) % (1 << self._bits)
        ahead = 0 if kind == _IDR else (number - self._newest) % (1 << self._bits)
        if unit[0] >> 5 & 3 or kind == _IDR:  # others refer to it
            self._newest = number
        return ahead > 1

    def _read_sequence(self, bits: "_Bits") -> None:
        profile = bits.read(24) >> 16
        bits.golomb()
        self._planes = False
        if profile in _HIGH_PROFILES:
            chroma = bits.golomb()
            self._planes = chroma == 3 and bool(bits.read(1))
            bits.golomb(), bits.golomb(), bits.read(1)  # depths, transform bypass
            if bits.read(1):
                for i in range(12 if chroma == 3 else 8):
                    if bits.read(1):
                        bits.skip_scaling(16 if i < 6 else 64)
        length = bits.golomb() + 4
        order = bits.golomb()
        if order == 0:
            bits.golomb()
        elif order == 1:
            bits.read(1), bits.golomb(), bits.golomb()
            for _ in range(bits.golomb()):
                bits.golomb()
        bits.golomb()  # number of reference frames
        self._bits = 0 if bits.read(1) else length


class _Bits:
    """Reads the bits of a unit after its first byte; IndexError at its end."""

    def __init__(self, unit: bytes) -> None:
        self._data = unit[1:_HEAD_BYTES].replace(b"\x00\x00\x03", b"\x00\x00")
        self._at = 0

    def read(self, count: int) -> int:
        value = 0
        for _ in range(count):
            value = value << 1 | self._data[self._at >> 3] >> (7 - (self._at & 7)) & 1
            self._at += 1
        return value

    def golomb(self) -> int:
        """An unsigned Exp-Golomb number; a signed one has the same length."""
        zeros = 0
        while not self.read(1):
            zeros += 1
        return (1 << zeros) - 1 + self.read(zeros)

    def skip_scaling(self, size: int) -> None:
        last = following = 8
        for _ in range(size):
            if following:
                coded = self.golomb()
                following = (last + (coded + 1) // 2 * (1 if coded % 2 else -1)) % 256
            last = following or last


def _units(packet: bytes) -> Iterator[bytes]:
    """The starts of the units of a packet, without start codes."""
    for match in _START.finditer(packet):
        unit = packet[match.end() : match.end() + _HEAD_BYTES]
        if unit:
            yield unit
