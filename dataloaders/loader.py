"""DataLoader: torch's DataLoader with interchangeable backends.

DataLoader(dataset, ..., backend=None)
    │ __iter__
    ├── no argument beyond torch's ───> backends.stock: torch's own iterator
    └── backend= / DATALOADERS_BACKEND ──> registry ──> Backend.open(self) ──> Session.epoch()
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
import torch.utils.data
from torch.utils.data import Dataset, Sampler

from dataloaders import registry
from dataloaders.backend import Backend, Session
from dataloaders.errors import (
    BackendWarning,
    DataLoadersError,
    MissingDependency,
    OptionError,
    UnknownBackend,
)
from dataloaders.plan import Plan
from dataloaders.specification import (
    check_device,
    given_device,
    own_iteration,
    own_length,
    state_of,
)
from dataloaders.tuning import auto

__all__ = ["BACKEND_VARIABLE", "DataLoader", "wrap"]

BACKEND_VARIABLE = "DATALOADERS_BACKEND"
"""The environment variable that names the backend of every loader without ``backend=``."""

T_co = TypeVar("T_co", covariant=True)
_TorchLoader = torch.utils.data.DataLoader

# Sessions and torch iterators of the parent process, kept alive so that this one never frees them.
_INHERITED: list[tuple[Session, object]] = []


class DataLoader(_TorchLoader[T_co]):
    """Batches of ``dataset``, made by the backend of your choice; torch's loader by default.

    Takes torch's own parameters with torch's names, defaults and accepted combinations, and behaves
    as ``torch.utils.data.DataLoader`` does, to the bit, as long as none of the arguments below is
    given. ``num_workers``, ``prefetch_factor`` and ``pin_memory`` also take ``"auto"``: the values
    that `dataloaders.tune` learned for this dataset on this machine, else a rule based on usable
    cores, memory and shared memory. The attributes are always plain ints and bools.

    Args:
        dataset: as in torch, like all arguments up to ``in_order``.
        backend: a name ("stock", "synthetic", ...; see ``dataloaders backends``), a `Backend`
            instance with options, "auto" for what ``dataloaders tune --backends`` learned (else
            "stock"), or None for ``$DATALOADERS_BACKEND``, else "stock".
        device: where batches are delivered. None leaves that to the backend: stock leaves them in
            host memory; prefetch, dali and synthetic deliver on the current CUDA device if there is
            one. With a backend that delivers in host memory, any device but the CPU means
            ``Prefetch(that backend)``.
        seed: makes shuffling and random augmentation a function of (seed, epoch, index): the same
            for any number of workers. None leaves torch's random streams alone.
        on_error: what to do with a sample that cannot be loaded; only "raise" in this version.

    Raises:
        OptionError: an argument that torch's loader does not have has an invalid value (also a
            ValueError).
        UnknownBackend: no backend has that name (also a ValueError).
        MissingDependency: the backend's package is not installed (also an ImportError).
        BackendUnavailable: at ``iter()``, when the backend cannot serve this loader.
        ValueError, TypeError: as torch's loader raises them.
    """

    # Set on the instance only where given: subclasses have attributes and properties of these
    # names.
    backend: str | Backend | None = None
    device: torch.device | str | int | None = None
    seed: int | None = None
    on_error: str = "raise"

    # Private state, with defaults here so that unpickled, copied and wrapped loaders have it too.
    _session: Session | None = None
    _iterator = None  # torch's; programs delete the instance's to end its workers
    # What the open session was asked for, and the process that opened it.
    _opened: tuple[str | Backend, int] | None = None
    _given_epoch: int | None = None
    _iterations: int = 0
    # A wrapped loader that iterates in its own way; and one whose own len() counts.
    _source: _TorchLoader[Any] | None = None
    _sized: _TorchLoader[Any] | None = None

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | Literal["auto"] = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | Literal["auto"] | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        backend: str | Backend | None = None,
        device: torch.device | str | int | None = None,
        seed: int | None = None,
        on_error: str = "raise",
    ) -> None:
        _check_options(backend, device, seed, on_error)
        if "auto" in (num_workers, prefetch_factor, pin_memory):
            settings = auto.resolve(
                dataset,
                batch_size=batch_size,
                batch_sampler=batch_sampler,
                collate_fn=collate_fn,
                num_workers=num_workers,
                prefetch_factor=prefetch_factor,
                pin_memory=pin_memory,
                # Torch accepts these three only with workers, so "auto" must not choose 0 workers.
                needs_workers=bool(persistent_workers or multiprocessing_context or timeout),
                backend=_name_of(backend),
            )
            num_workers, prefetch_factor, pin_memory = settings
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,  # type: ignore[arg-type]
            collate_fn,
            pin_memory,  # type: ignore[arg-type]
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,  # type: ignore[arg-type]
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        given = {"backend": backend, "device": device, "seed": seed}
        vars(self).update({name: value for name, value in given.items() if value is not None})

    def __iter__(self) -> Any:
        """Return an iterator over one epoch, made by this loader's backend."""
        session = self._current_session()
        try:
            batches = session.epoch()
        except Exception as error:  # such as a dataset that a cache refuses, or cannot read whole
            wanted = self._wanted_backend()
            if self.backend is not None or wanted == "stock":
                raise
            session.close()
            self._session = self._delivering(registry.load("stock")()).open(self)
            batches = self._session.epoch()  # raises what is an error of torch's loader as well
            text = str(error) if isinstance(error, DataLoadersError) else repr(error)
            why = "; ".join([_refused(wanted) + f": {text}", *getattr(error, "__notes__", ())])
            warnings.warn(why, BackendWarning, stacklevel=2)
        self._iterations += 1
        return batches

    def __len__(self) -> int:
        """Return the number of batches in an epoch, as torch's or the wrapped loader counts."""
        own = own_length(self)
        return super().__len__() if own is None else len(own)

    def explain(self) -> Plan:
        """Return what will run where for this loader, stage by stage; print it. Never raises."""
        wanted = self._wanted_backend()
        try:
            backend, refusal, learned = self._resolve_backend(wanted)
            plan = self._delivering(backend).explain(self)
        except DataLoadersError as error:
            return Plan(str(wanted), obstacle=str(error))
        except Exception as error:  # a third-party backend; this method never raises
            return Plan(str(wanted), obstacle=f"it cannot be made, or explained: {error!r}")
        return replace(plan, notes=(*plan.notes, *filter(None, (learned, refusal))))

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, for ``seed=`` and for samplers that count epochs.

        Calls ``set_epoch`` of the sampler, the batch sampler and the dataset where they have one
        (DistributedSampler, Hugging Face datasets). Without it, each ``iter()`` counts as an epoch.
        As with torch's loader, persistent workers keep the copies of the dataset that they were
        started with.
        """
        self._given_epoch = epoch
        inner = getattr(self.batch_sampler, "sampler", None)
        holders = (self._source, self.sampler, self.batch_sampler, inner, self.dataset)
        targets = {id(target): target for target in holders}
        for target in targets.values():
            forward = getattr(target, "set_epoch", None)
            if callable(forward):
                forward(epoch)

    def __getstate__(self) -> dict[str, Any]:
        """Return all but what is open: a copy or an unpickled loader opens its own session."""
        return {**state_of(self), "_iterator": None}  # live workers belong to who started them

    def _current_session(self) -> Session:
        wanted = self._wanted_backend()
        if self._session is not None and self._opened is not None:
            asked, pid = self._opened
            if pid != os.getpid():
                # A fork inherited this session; its threads and workers belong to the parent.
                # Torch's iterator, when it is freed, tells its workers to end, and those are the
                # parent's. So this process neither closes nor frees what it inherited.
                _INHERITED.append((self._session, self._iterator))
                self._session = self._iterator = None
            # By identity: a backend's options may hold tensors, whose == has no truth value.
            elif asked is wanted or (isinstance(asked, str) and asked == wanted):
                return self._session
            else:
                self._session.close()
                self._session = None
        backend, refusal, _ = self._resolve_backend(wanted)
        if refusal is not None:
            warnings.warn(refusal, BackendWarning, stacklevel=3)
        self._session = self._delivering(backend).open(self)
        self._opened = wanted, os.getpid()
        return self._session

    def _delivering(self, backend: Backend) -> Backend:
        """Return ``backend``, within Prefetch if a device is to get batches from host memory."""
        device = given_device(self)
        if device is None or device.type == "cpu" or backend.delivers != "host":
            return backend
        return registry.load("prefetch")(inner=backend)  # type: ignore[call-arg]

    def _wanted_backend(self) -> str | Backend:
        if self.backend is not None:
            return self.backend
        return os.environ.get(BACKEND_VARIABLE) or "stock"

    def _resolve_backend(self, wanted: str | Backend) -> tuple[Backend, str | None, str | None]:
        """Return the backend that will serve, why the wanted one cannot, and what "auto" is."""
        if isinstance(wanted, Backend):
            return wanted, None, None
        backend: Backend | None = None
        about = obstacle = None
        if wanted == "auto":
            backend, about = auto.backend_for(self)
            refused = f'backend="auto": {backend and backend.name} cannot serve a loader any more'
        elif self.backend is not None or wanted == "stock":
            return registry.load(wanted)(), None, None
        else:
            refused = _refused(wanted)
            try:
                backend = registry.load(wanted)()
            except UnknownBackend as error:
                raise UnknownBackend(f"${BACKEND_VARIABLE}: {error}") from None
            except MissingDependency as error:
                obstacle = str(error)
        if backend is not None:
            obstacle = backend.explain(self).obstacle
            if obstacle is None:
                return backend, None, about
        return registry.load("stock")(), obstacle and f"{refused}: {obstacle}", about


def wrap(
    loader: _TorchLoader[T_co],
    *,
    backend: str | Backend | None = None,
    device: torch.device | str | int | None = None,
    seed: int | None = None,
    on_error: str = "raise",
) -> DataLoader[T_co]:
    """Return a `DataLoader` that loads what ``loader`` loads, with the arguments given here.

    For a loader that somebody else made: dataset, samplers, workers and collation are shared with
    it, not copied. A loader that already is a `dataloaders.DataLoader` keeps its class. If
    ``loader`` iterates in its own way (a subclass of torch's that overrides ``__iter__`` or what
    that calls, or a loader that Accelerate prepared), stock iterates it in that way. What else its
    class can do stays with it, such as ``loader.state_dict()`` of torchdata's StatefulDataLoader.

    Raises:
        TypeError: ``loader`` is not a ``torch.utils.data.DataLoader``.
        OptionError: as in `DataLoader`; also ``seed`` for a loader that iterates in its own way,
            because ``seed=`` does not reach the generators that it draws from.
        UnknownBackend, MissingDependency: as in `DataLoader`.
    """
    if not isinstance(loader, _TorchLoader):
        raise TypeError(
            f"wrap() takes a torch.utils.data.DataLoader and got {type(loader).__name__}; "
            "for other iterables make a DataLoader of their dataset"
        )
    _check_options(backend, device, seed, on_error)
    # type(), not isinstance(): Accelerate's loaders claim the class of the loader that they hold.
    ours = issubclass(type(loader), DataLoader)
    kind: type[DataLoader[T_co]] = type(loader) if ours else DataLoader  # type: ignore[assignment]
    wrapped = kind.__new__(kind)
    source = own_iteration(loader)
    if source is not None and seed is not None:
        raise OptionError(
            f"seed={seed!r}: {type(source).__name__} iterates by a method of its own, which "
            "seed= cannot reach; wrap a loader that inherits __iter__ from torch's"
        )
    # Written to __dict__, because torch's __setattr__ refuses some names on a finished loader.
    sized = own_length(loader)
    # A subclass may have properties named as our arguments.
    wrapped.__dict__.update(_state_of(loader), _iterator=None, _source=source, _sized=sized)
    wrapped.__dict__.update(backend=backend, device=device, seed=seed, on_error=on_error)
    return wrapped


def _refused(wanted: str | Backend) -> str:
    return f"${BACKEND_VARIABLE}={wanted} cannot serve a loader, which stays stock"


def _name_of(backend: str | Backend | None) -> str:
    """Return the name of the backend that the argument or the environment asks for, or ""."""
    if isinstance(backend, Backend):
        return backend.name
    return backend or os.environ.get(BACKEND_VARIABLE) or ""


def _state_of(loader: _TorchLoader[Any]) -> dict[str, Any]:
    """Return the instance attributes of ``loader``, including all that torch's own loader has."""
    state = state_of(loader)
    if "dataset" not in state:  # a wrapper around another loader, which forwards attribute access
        for name in vars(_TorchLoader([0])):  # type: ignore[arg-type]
            if hasattr(loader, name):
                state[name] = getattr(loader, name)
    return state


def _check_options(backend: object, device: object, seed: object, on_error: object) -> None:
    if isinstance(backend, str):
        if backend != "auto":  # raises here, not at iter(): a wrong name, a missing package
            registry.load(backend)
    elif backend is not None and not isinstance(backend, Backend):
        raise OptionError(
            f"backend={backend!r}: must be a name such as 'stock', a Backend instance such as "
            "Stock(), or None"
        )
    check_device(device, f"device={device!r}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise OptionError(f"seed={seed!r}: must be an int or None")
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise OptionError(f"seed={seed!r}: must fit in 64 bits")
    if on_error != "raise":
        raise OptionError(
            f"on_error={on_error!r}: only 'raise' exists in this version; "
            "to skip bad samples, leave them out of the sampler"
        )
