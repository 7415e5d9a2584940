"""Writing pictures one after the other, as GIF or MP4, without ever holding them all (case C63).

GIF: one palette for the whole animation, taken from the first picture; of every later picture only what changed is
stored. MP4: frames go straight into an ffmpeg process (the `video` extra).
"""

import gc
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from PIL import GifImagePlugin, Image

from clawq.errors import UserError
from clawq.types import Array

#: Colours of a GIF, one more is "unchanged".
COLOURS = 127


class FrameWriter(Protocol):
    """Takes pictures uint8 [H, W, 3], all of one size."""

    def add(self, picture: Array) -> None: ...
    def close(self) -> None: ...


def open_animation(path: Path, frames_per_s: float) -> FrameWriter:
    """A writer for a `.gif` or `.mp4` file.

    Raises:
        UserError: another ending, or an MP4 without the `video` extra.
    """
    if path.suffix == ".gif":
        return GifWriter(path, frames_per_s)
    if path.suffix == ".mp4":
        return Mp4Writer(path, frames_per_s)
    raise UserError(f"{path}: animations are .gif or .mp4")


class GifWriter:
    """An endless GIF, written picture by picture; memory is two pictures."""

    def __init__(self, path: Path, frames_per_s: float) -> None:
        self._out: IO[bytes] = path.open("wb")
        # GIF counts hundredths of a second.
        self._duration_ms = max(20, round(100 / frames_per_s) * 10)
        self._palette: Image.Image | None = None
        self._shown: Array | None = None

    def add(self, picture: Array) -> None:
        """Append one picture."""
        image = Image.fromarray(picture)
        if self._palette is None:
            self._palette = image.quantize(COLOURS, dither=Image.Dither.NONE)
            self._begin(self._palette)
        indices = np.asarray(image.quantize(palette=self._palette, dither=Image.Dither.NONE))
        self._write(indices)
        self._shown = indices

    def close(self) -> None:
        """Finish the file. Idempotent."""
        if not self._out.closed:
            self._out.write(b";")
            self._out.close()

    def _begin(self, first: Image.Image) -> None:
        first.info["loop"] = 0
        header, _ = GifImagePlugin.getheader(self._image(np.asarray(first)), info={"loop": 0})
        for block in header:
            self._out.write(block)
        # getheader of a single picture leaves out the request to repeat for ever.
        self._out.write(b"\x21\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00")

    def _write(self, indices: Array) -> None:
        top, left = 0, 0
        if self._shown is not None:
            changed = indices != self._shown
            rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
            # A picture like the one before still takes its time: one unchanged pixel.
            top, bottom = (int(rows[0]), int(rows[-1])) if len(rows) else (0, 0)
            left, right = (int(columns[0]), int(columns[-1])) if len(columns) else (0, 0)
            indices = np.where(changed, indices, COLOURS).astype(np.uint8)[top : bottom + 1, left : right + 1]
        options: dict[str, Any] = {"duration": self._duration_ms, "disposal": 1, "transparency": COLOURS}
        for block in GifImagePlugin.getdata(self._image(indices), (left, top), **options):
            self._out.write(block)
        # Pillow's encoder leaves each picture in a reference cycle; at 1080p those would be hundreds of megabytes.
        gc.collect(0)

    def _image(self, indices: Array) -> Image.Image:
        assert self._palette is not None
        image = Image.fromarray(np.ascontiguousarray(indices, np.uint8), "P")
        image.putpalette(self._palette.getpalette() or [])
        return image


class Mp4Writer:
    """H.264 by a bundled ffmpeg; memory is one picture."""

    def __init__(self, path: Path, frames_per_s: float) -> None:
        try:
            import imageio_ffmpeg  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
            from imageio.v2 import get_writer
        except ImportError as error:
            raise UserError("an mp4 needs the `video` extra (pip install imageio-ffmpeg); or record a gif") from error
        # Widths and heights of H.264 are even; other sizes than multiples of 16 are fine.
        self._writer: Any = get_writer(path, fps=frames_per_s, codec="libx264", quality=7, macro_block_size=2)

    def add(self, picture: Array) -> None:
        """Append one picture."""
        self._writer.append_data(picture)

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()


__all__ = ["FrameWriter", "GifWriter", "Mp4Writer", "open_animation"]
