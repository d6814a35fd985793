"""`CachedDataset`: samples that are costly to make are made once."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from bagua.common.errors import UsageError
from bagua.torch_api.contrib.cache_loader import CacheLoader


class CachedDataset(Dataset[Any]):
    """A data set whose samples come from a cache if any rank has asked for them before.

    The cache is a `CacheLoader` with the same arguments. Samples must be the same whenever they are
    asked for: what is drawn by chance, as augmentations are, belongs behind the cache.

    In files, and in servers named by `hosts`, samples outlive the job: a data set that changes
    needs another `dataset_name` then. Only another length is noticed, and an error.

    >>> import tempfile
    >>> squares = CachedDataset(
    ...     [0, 1, 4, 9], backend="files", dataset_name="squares", folder=tempfile.mkdtemp()
    ... )
    >>> squares[3], len(squares)
    (9, 4)
    """

    def __init__(
        self,
        dataset: Any,
        backend: str = "redis",
        dataset_name: str = "",
        writer_buffer_size: int = 1,
        **kwargs: Any,
    ) -> None:
        self.dataset = dataset
        self.cache_loader = CacheLoader(backend, dataset_name, writer_buffer_size, **kwargs)
        try:
            length = str(len(dataset))
        except (TypeError, NotImplementedError):
            return
        kept = self.cache_loader.store.agree(length)
        if kept != length:
            raise UsageError(
                f"this data set has {length} samples, but that in the cache under "
                f"dataset_name={dataset_name!r} has {kept}; give this one another name, or empty "
                "the cache"
            )

    def __getitem__(self, item: Any) -> Any:
        return self.cache_loader.get(item, self.dataset.__getitem__)

    def __len__(self) -> int:
        return len(self.dataset)
