"""One finding about the training step."""

from __future__ import annotations

from dataclasses import dataclass

from dataloaders.measuring.intervals import Interval

__all__ = ["Finding"]


@dataclass(frozen=True)
class Finding:
    """Says what in the step costs time, why, and what to write instead.

    Attributes:
        name: of the rule, such as "synchronisation".
        message: what was found, why it costs, and what to write instead.
        where: ``file:line`` in the user's code, or None.
        source: the guide that the advice comes from: its section, or an address.
        gain: seconds a batch that the change would save, measured; None if it was not measured.
        anyway: whether it holds whatever holds the loop back: something left on, a wait that keeps
            the host from running ahead.
    """

    name: str
    message: str
    where: str | None
    source: str
    gain: Interval | None = None
    anyway: bool = False

    def __str__(self) -> str:
        where = "" if self.where is None else f"{self.where}: "
        gain = ""
        if self.gain is not None:
            low, high = 1e3 * self.gain.low, 1e3 * self.gain.high
            gain = f"; measured here: {1e3 * self.gain.estimate:.2f} ms a batch less "
            gain += f"({low:.2f} to {high:.2f})"
        return f"{where}{self.message}{gain} [{self.source}]"
