"""The bytes of a trace file, decompressed while they are read."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from isal import isal_zlib

from lightning_rlprof.errors import TraceError

BOMB_RATIO = 200
"""Real traces are 10 to 22 times as long as their .gz and up to 100 times as long as their .zst."""

BOMB_BYTES = 1 << 28
"""Up to here a compressed file may expand by any ratio: two seconds of work."""

_CHUNK, _STEP = 1 << 14, 1 << 16  # bytes that are read, and decompressed, at once
_GZIP_MEMBER = 31  # for zlib: with the header of gzip, and its checksum at the end
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class _Stream(Protocol):
    """Where bytes come from: a plain file, or something that decompresses one."""

    def readinto(self, view: memoryview, /) -> int | None:
        """Fill the beginning of ``view``; 0 at the end."""


class _DamagedError(Exception):
    """The compressed data ends early or is broken; the text says how."""


class Source(AbstractContextManager["Source"]):
    """Read a plain, gzip or zstd file as one stream; which of them, its first bytes tell.

    ``problem`` says why the stream ended before the file's end, None if it did not.

    Args:
        path: The file.

    Raises:
        TraceError: It cannot be opened or read, or expands beyond `BOMB_RATIO`, or is compressed by
            zstd and the package for that is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.problem: str | None = None
        self._path = path
        self._read = 0
        try:
            self._file = path.open("rb")
            magic = self._file.read(len(_ZSTD))
            self._file.seek(0)
            self._size = path.stat().st_size
        except OSError as error:
            raise TraceError(f"{path}: cannot be read ({error.strerror})") from error
        self._limit: int | None = None
        self._stream: _Stream = self._file
        if magic.startswith((_GZIP, _ZSTD)):
            self._limit = max(BOMB_BYTES, BOMB_RATIO * self._size)
            gzip = magic.startswith(_GZIP)
            self._stream = _Gzip(self._file) if gzip else _Zstd(self._file, path)

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self._file.close()

    def readinto(self, view: memoryview) -> int:
        """Fill the beginning of ``view`` (not empty) and return how much; 0 when all is read."""
        if self.problem is not None:
            return 0
        try:
            count = self._stream.readinto(view) or 0
        except _DamagedError as damage:
            self.problem = str(damage)
            return 0
        except OSError as error:
            raise TraceError(f"{self._path}: cannot be read ({error.strerror})") from error
        self._read += count
        if self._limit is not None and self._read > self._limit:
            raise TraceError(
                f"{self._path}: its {self._size:,} bytes expand to more than {self._limit:,}, "
                f"{BOMB_RATIO} times as many; decompress it yourself if it is a trace"
            )
        return count

    def share_read(self, unused: int) -> float:
        """Return what part of the file was read, without ``unused`` bytes of what it returned."""
        used = (self._read - unused) / max(self._read, 1)
        return min(self._file.tell() / max(self._size, 1), 1.0) * used


class _Gzip:
    """Gzip members, one after the other.

    Everything before a cut is returned, where `isal.igzip` loses what one call has decompressed.
    Damage costs what follows, and up to `_STEP` bytes before it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._rest = b""
        self._member: Any = isal_zlib.decompressobj(_GZIP_MEMBER)

    def readinto(self, view: memoryview, /) -> int:
        while not self._member.eof or self._next_member():
            data = self._member.unconsumed_tail or self._rest or self._file.read(_CHUNK)
            self._rest = b""
            try:
                out = self._member.decompress(data, min(len(view), _STEP))
            except isal_zlib.error as error:  # type: ignore[misc]  # its stub says Exception()
                raise _DamagedError(f"its compressed data is damaged ({error})") from error
            if out:
                view[: len(out)] = out
                return len(out)
            if not data and not self._member.eof:
                raise _DamagedError("its compressed data is truncated")
        return 0

    def _next_member(self) -> bool:
        """Begin the next member, after zeros that only fill up a block; False without one."""
        rest = self._member.unused_data.lstrip(b"\0")
        while not rest and (more := self._file.read(_CHUNK)):
            rest = more.lstrip(b"\0")
        if rest and not rest.startswith(_GZIP[:1]):
            raise _DamagedError("its compressed data is followed by other data")
        if rest:
            self._rest, self._member = rest, isal_zlib.decompressobj(_GZIP_MEMBER)
        return bool(rest)


class _Zstd:
    """Zstd frames, one after the other; a window above 128 MiB is refused."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        try:
            import zstandard
        except ImportError as error:
            file.close()
            raise TraceError(
                f"{path}: compressed with zstd; to read it: pip install zstandard"
            ) from error
        self._error: type[Exception] = zstandard.ZstdError
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
        self._any = False
        self._stream = decompressor.stream_reader(file, read_across_frames=True)

    def readinto(self, view: memoryview, /) -> int:
        try:
            # The first gives what comes before damage; it may give nothing for a single read.
            count: int = self._stream.readinto1(view[:_STEP]) or self._stream.readinto(view)
        except self._error as error:
            raise _DamagedError(f"its compressed data is damaged ({error})") from error
        self._any = self._any or count > 0
        if not self._any:  # the first block is not whole; later ones end where the events do
            raise _DamagedError("its compressed data is truncated")
        return count
