"""All episodes of some fragments, as the exporter's Stitcher gives them one after another."""

from collections.abc import Iterable, Iterator

from clawq.programs.episodes import Episode, Stitcher
from clawq.types import Fragment


def stitch(fragments: Iterable[Fragment]) -> Iterator[Episode]:
    """Those that break off included."""
    stitcher = Stitcher()
    for fragment in fragments:
        yield from stitcher.add(fragment)
    yield from stitcher.close()
