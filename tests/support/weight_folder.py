"""A weight store's folder with a few versions of one policy, for what reads such folders."""

from pathlib import Path

from version_store import KEY, POLICY, TRUSTED, Publisher, add, filled, make_all, opened

__all__ = ["KEY", "POLICY", "TRUSTED", "WeightFolder"]


class WeightFolder:
    """Versions 0 to ``count`` of ``POLICY`` under ``folder``/versions; ``states`` and
    ``publications`` by number. The store stays open, as it does in a process that runs."""

    def __init__(self, folder: Path, count: int = 3, **options) -> None:
        self.folder = folder / "versions"
        self.store = opened(self.folder, **options)
        self._publisher = Publisher(folder / "model")
        filled(self.store, self._publisher, count)
        self.states = self._publisher.states
        self.publications = self._publisher.publications

    def publish(self, version: int, parent: int) -> None:
        add(self.store, self._publisher.next(version, parent))

    def make_all(self, *asked) -> list[tuple[int | None, int, bool]]:
        """Composites and snapshots that the store wants: (base, version, whether it is kept)."""
        return make_all(self.store, *asked)

    def blob(self, digest: str) -> Path:
        return next(self.folder.glob(f"*/blobs/{digest}"))
