"""Models below adapters: policies on one model share its memory.

What always holds: a model is in memory once however many policies have adapters on it, and as long
as one of them is loaded; nobody writes its weights.
"""

from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from transport.runtime.model_folder import ComputeType, LoadedModel, load_model
from transport.weights.adapter import read_adapter


@dataclass(frozen=True)  # no slots: it is referred to weakly
class Base:
    """A model that no adapter is in, and the folder that it came from."""

    folder: Path
    loaded: LoadedModel


class Bases:
    """The models that adapters of one engine are on."""

    def __init__(self, *, device: str, compute: ComputeType) -> None:
        self._device = device
        self._compute: ComputeType = compute
        self._loaded: WeakValueDictionary[tuple[Path, str], Base] = WeakValueDictionary()

    def of(self, adapter: Path, folder: Path) -> Base:
        """The model in ``folder``, which is that of the adapter in the folder ``adapter``. Blocks;
        for one thread at a time.

        Raises:
            ModelError: a folder does not load; names the file and what is wrong.
        """
        key = (folder.resolve(), read_adapter(adapter)[1].full_digest)
        base = self._loaded.get(key)
        if base is None:
            loaded = load_model(folder, device=self._device, compute=self._compute)
            base = self._loaded[key] = Base(folder, loaded)
        return base
