"""Messages to a running worker, sent with a task.

    consumer: WorkerMessage(index, set_epoch=3, save=7) ──pickled──> index queue ──> worker:
        saves the states of its generators, calls dataset.set_epoch(3), receives the index

torch's worker understands tasks, the request to begin an epoch, and the end. Anything else has to
happen while a message is unpickled in the worker, after every earlier task.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import get_worker_info

from dataloaders.seeding import states

__all__ = ["WorkerMessage"]


class WorkerMessage:
    """Unpickle as ``value`` in a worker, and carry out the requests on the way.

    Args:
        value: what the worker finds in place of the message.
        set_epoch: the argument for ``set_epoch`` of the worker's copy of the dataset, if it has
            that method.
        save: a number under which the worker saves the states of torch's, NumPy's and ``random``'s
            generators before it does anything else.
        restore: the number of the saved states to go back to; ignored if others were saved since.
    """

    __slots__ = ("restore", "save", "set_epoch", "value")

    def __init__(
        self,
        value: Any,
        *,
        set_epoch: int | None = None,
        save: int | None = None,
        restore: int | None = None,
    ) -> None:
        self.value = value
        self.set_epoch = set_epoch
        self.save = save
        self.restore = restore

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (self.value, self.set_epoch, self.save, self.restore)


_saved: tuple[int, Any] | None = None


def _receive(value: Any, set_epoch: int | None, save: int | None, restore: int | None) -> Any:
    global _saved
    info = get_worker_info()
    if info is None:
        return value
    if _saved is not None and restore == _saved[0]:
        states.restore(_saved[1])
    if save is not None:
        _saved = save, states.states_now()
    # After both, since the dataset's set_epoch may draw random numbers.
    method = getattr(info.dataset, "set_epoch", None)
    if set_epoch is not None and callable(method):
        method(set_epoch)
    return value
