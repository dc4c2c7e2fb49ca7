"""A loop body called as a function: strict turns, and an end for both sides."""

from __future__ import annotations

import sqlite3
import threading
from typing import Any

import numpy as np
import pytest
import torch

from dataloaders.errors import CheckError
from dataloaders.scripts.lent_step import LentStep, Step


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_steps_and_bodies_take_turns() -> None:
    told: list[str] = []

    def use(step: Step) -> None:
        for number in range(3):
            told.append(f"before {number}")
            step(number)
            told.append(f"after {number}")

    for number in LentStep(use):
        told.append(f"body {number}")
    assert told == [f"{word} {n}" for n in range(3) for word in ("before", "body", "after")]


def test_a_loop_may_break_and_start_again() -> None:
    def use(step: Step) -> None:
        for number in range(5):
            step(number)

    lent = LentStep(use)
    got: list[int] = []
    for number in lent:
        got.append(number)
        if number == 1:
            break
    got += list(lent)
    assert got == [0, 1, 2, 3, 4]
    assert list(lent) == []


def test_the_borrowers_error_reaches_the_loop() -> None:
    def use(step: Step) -> None:
        step(0)
        raise LookupError("no such sample")

    with pytest.raises(LookupError, match="no such sample"):
        for _ in LentStep(use):
            pass


def test_closing_ends_the_borrower_in_mid_step() -> None:
    cleaned: list[bool] = []

    def use(step: Step) -> None:
        try:
            while True:
                step(0)
        finally:
            cleaned.append(True)

    lent = LentStep(use)
    assert next(iter(lent)) == 0
    lent.close()
    assert cleaned == [True]
    assert "dataloaders-tune" not in names()


def test_closing_what_never_began_or_has_ended_is_fine() -> None:
    LentStep(lambda step: None).close()
    lent = LentStep(lambda step: None)
    assert list(lent) == []
    lent.close()
    assert "dataloaders-tune" not in names()


def states() -> dict[str, Any]:
    return {
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "device": torch.get_default_device(),
        "numpy": np.geterr(),
    }


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_the_borrowers_thread_is_in_the_loops_modes(inference: bool, gradients: bool) -> None:
    seen: list[dict[str, Any]] = []
    with (
        torch.inference_mode(inference),
        torch.set_grad_enabled(gradients),
        torch.device("meta"),
        np.errstate(over="raise"),
    ):
        expected = states()
        assert list(LentStep(lambda step: seen.append(states()))) == []
    assert seen == [expected]
    assert expected["gradients"] is gradients
    assert expected["inference"] is inference
    assert states() != expected


def test_what_is_bound_to_a_thread_is_told_with_what_to_do() -> None:
    connection = sqlite3.connect(":memory:")
    with pytest.raises(CheckError, match=r"num_workers=1 or more.*call dataloaders\.tune") as error:
        list(LentStep(lambda step: connection.execute("select 1")))
    assert isinstance(error.value.__cause__, sqlite3.ProgrammingError)
    connection.close()


def test_a_workers_error_about_threads_is_left_as_it_is() -> None:
    def use(step: Step) -> None:
        raise ValueError("Caught ValueError in DataLoader worker process 0: only in main thread")

    with pytest.raises(ValueError, match=r"^Caught"):
        list(LentStep(use))
