"""Frames of video files by time, decoded when they are asked for; pictures stored one by one."""

import hashlib
import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lensemble_node.worker.training.containers import stored
from lensemble_node.worker.training.containers.parquet import EXTRA
from lensemble_node.worker.training.containers.stored import PIECE_BYTES

MAX_OPEN_FILES = 8
Times = NDArray[np.float64]


class Videos:
    """Reads frames of video files; what decoding needs is loaded on first use."""

    def __init__(self) -> None:
        self._library: Any = None
        self._open: OrderedDict[Path, Any] = OrderedDict()
        self._stamps: tuple[Path, Times] | None = None
        self._digest: tuple[Path, str] | None = None

    @property
    def _av(self) -> Any:  # noqa: ANN401 - an optional package
        if self._library is None:
            self._library = stored.optional("av", EXTRA, "reading video")
        return self._library

    def frames(self, path: Path, times: Times, interval: float, channels: int) -> NDArray[np.uint8]:
        """The frames nearest to ``times`` (ascending, seconds), none further than half an interval.

        Returns uint8 (n, height, width, channels).

        Raises:
            ValueError: a frame is not there.
            OSError: the file cannot be read or decoded.
        """
        container = self._container(path)
        stream = container.streams.video[0]
        container.seek(int(max(0.0, times[0]) / stream.time_base), stream=stream, backward=True)
        pixels = "gray" if channels == 1 else "rgb24"
        found: list[NDArray[np.uint8]] = []
        try:
            for frame in container.decode(stream):
                while len(found) < len(times) and frame.time > times[len(found)] + interval / 2:
                    raise ValueError(f"no frame at {times[len(found)]:.3f} s of {path.name}")
                if abs(frame.time - times[len(found)]) <= interval / 2:
                    picture = frame.to_ndarray(format=pixels)
                    found.append(picture.reshape(frame.height, frame.width, channels))
                if len(found) == len(times):
                    return np.stack(found)
        except self._av.error.FFmpegError as error:
            raise OSError(f"{path.name}: {error}") from error
        raise ValueError(f"no frame at {times[len(found)]:.3f} s of {path.name}")

    def picture(self, raw: bytes, channels: int) -> NDArray[np.uint8]:
        """One picture from the bytes of its own file: uint8 (height, width, channels).

        Raises:
            OSError: it cannot be decoded.
        """
        try:
            with self._av.open(io.BytesIO(raw)) as container:
                frame = next(container.decode(video=0))
                shown = frame.to_ndarray(format="gray" if channels == 1 else "rgb24")
        except (self._av.error.FFmpegError, StopIteration) as error:
            raise OSError(f"a picture of {len(raw)} bytes: {error}") from error
        made: NDArray[np.uint8] = shown.reshape(frame.height, frame.width, channels)
        return made

    def stamps(self, path: Path) -> Times:
        """When the frames of a file are shown, in seconds, ascending; nothing is decoded.

        Raises:
            OSError: the file cannot be read.
        """
        if self._stamps is None or self._stamps[0] != path:
            container = self._container(path)
            stream = container.streams.video[0]
            container.seek(0)
            try:
                packets = [p.pts for p in container.demux(stream) if p.pts is not None]
            except self._av.error.FFmpegError as error:
                raise OSError(f"{path.name}: {error}") from error
            shown = np.sort(np.array(packets, dtype=np.float64)) * float(stream.time_base)
            self._stamps = path, shown
        return self._stamps[1]

    def digest(self, path: Path) -> str:
        """SHA-256 of the file, hex; that of the last file asked for is kept."""
        if self._digest is None or self._digest[0] != path:
            running = hashlib.sha256()
            with path.open("rb") as file:
                while piece := file.read(PIECE_BYTES):
                    running.update(piece)
            self._digest = path, running.hexdigest()
        return self._digest[1]

    def close(self) -> None:
        for container in self._open.values():
            container.close()
        self._open.clear()

    def _container(self, path: Path) -> Any:  # noqa: ANN401 - as above
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        try:
            container = self._av.open(str(path))
        except self._av.error.FFmpegError as error:
            raise OSError(f"{path.name}: {error}") from error
        if not container.streams.video or container.streams.video[0].codec_context is None:
            container.close()
            raise OSError(f"{path.name} holds no video that can be decoded")
        container.streams.video[0].codec_context.thread_count = 1
        self._open[path] = container
        if len(self._open) > MAX_OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        return container
