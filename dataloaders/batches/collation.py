"""Whether torch's default collation is unmodified."""

from __future__ import annotations

from torch.utils.data._utils import collate


def collates_as_torch() -> bool:
    """Whether ``default_collate`` treats everything as torch made it.

    Its table of functions is public and may be changed. The entry that DALI's plugin for torch adds
    when it is imported, for a class of its own, does not count.
    """
    return all(
        function.__module__ == collate.__name__
        or str(getattr(kind, "__module__", "")).startswith("nvidia.dali.")
        for kind, function in collate.default_collate_fn_map.items()
    )
