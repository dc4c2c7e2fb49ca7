"""The search of tune(): which settings it tries and chooses, on given rates."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaders.bottleneck import Interval
from dataloaders.tuning import Settings, Trial
from dataloaders.tuning.search import Search

ALONE = Settings(0, None, False)


def workers(count, prefetch=2):
    return Settings(count, prefetch if count else None, False)


def trial_of(settings, rate, **facts):
    return Trial(settings, "", Interval(rate, rate, rate), rate, **facts)


class Played:
    """A search in which ``rate`` gives the rates; ``asked`` are the settings that it tries.

    Workers from ``fails_at`` on fail.
    """

    def __init__(self, rate, *, busy=None, fails_at=99, **facts):
        self.rate, self.busy, self.fails_at = rate, busy, fails_at
        self.asked, self.why = [], []
        known = {"given": ALONE, "alone": ALONE, "most": 16, **facts}
        self.search = Search(make=self.make, **known)
        self.search.add(trial_of(self.search.alone, rate(self.search.alone)))
        assert list(self.search.run()) == []  # a search itself yields no batch

    def make(self, settings, why):
        yield from ()
        self.asked.append(settings)
        self.why.append(why)
        assert len(self.asked) < 200
        share = None if self.busy is None else self.busy(settings)
        trial = trial_of(settings, self.rate(settings), cpu_share=share)
        fails = settings.num_workers >= self.fails_at
        return replace(trial, failed="it failed") if fails else trial

    @property
    def counts(self):
        return [settings.num_workers for settings in self.asked]

    @property
    def choice(self):
        return self.search.choice


def by_workers(rates):
    """Return rates by number of workers; of a sequence each once, then the last one again."""
    left = {count: [each] if isinstance(each, float | int) else list(each)
            for count, each in rates.items()}  # fmt: skip

    def rate(settings):
        values = left[settings.num_workers]
        return values.pop(0) if len(values) > 1 else values[0]

    return rate


LINEAR = {count: 10.0 * (count or 1) for count in range(21)}
UP_TO_6 = {count: min(rate, 60.0) for count, rate in LINEAR.items()}
SEARCHES = {
    # What is searched, the rates by number of workers, which are tried, which is chosen.
    "twice as many while that pays": ({"given": workers(4)}, LINEAR, [2, 4, 8, 16], 16),
    "no more than the need takes": ({"needed": 100}, {0: 50, 2: 80, 4: 100}, [2, 4, 4, 4], 4),
    "what just meets it": ({"needed": 100}, {0: 50, 2: 90, 4: 104}, [2, 4, 4, 4], 4),
    "the smallest within 3 %": ({"most": 4}, {0: 50, 2: 194, 4: 200}, [2, *[4, 2] * 2, 4], 2),
    "no more than three in turns": (
        {"given": workers(8, 4)}, {0: 100, 8: 95, 2: 96, 4: 97}, [8, 0, 0, *[2, 4] * 3], 0
    ),
    "exactly what pays": ({"most": 8}, {0: 50, 2: 100, 4: 103, 8: 200}, [2, 4, 2, 4, 2, 4, 8], 8),
    "the loader as it is does not fit": (
        {"given": workers(20, 2)}, UP_TO_6, [2, 4, *[8, 16] * 3], 8
    ),
    # Noise
    "near ones in turns": (
        {"most": 4, "given": workers(4, 8)}, {0: 10, 2: 50, 4: [53, 51, 52]}, [2, 4, 4] * 3, 4
    ),
    "a lucky trial does not decide": (
        {"most": 2}, {0: 100, 2: [109, 100, 101]}, [2, 2, 0, 2, 0], 0
    ),
    "a lucky trial does not meet the need": (
        {"needed": 100.0}, {0: 40, 2: [101, 80, 80], 4: 160}, [2, 2, 4, 4, 2], 4
    ),
    "an unlucky trial does not end the doubling": (
        {"most": 8}, {0: 50, 2: 100, 4: [95, 200], 8: 400}, [2, 4, 2, 4, 8], 8
    ),
}  # fmt: skip


@pytest.mark.parametrize(("facts", "rates", "tried", "chosen"), SEARCHES.values(), ids=SEARCHES)
def test_which_numbers_of_workers_are_tried_and_chosen(facts, rates, tried, chosen):
    found = Played(by_workers(rates), **facts)
    assert (sorted(found.counts), set(found.counts)) == (sorted(tried), set(tried))
    assert found.choice == (workers(chosen) if chosen else ALONE)
    again = {why for n, why in enumerate(found.why) if found.asked[n] in found.asked[:n]}
    assert again <= {"again, in turns"}
    most = found.search.most
    assert found.search.limited == (max(tried, default=0) == chosen == most or most == 1)


@given(
    st.lists(st.floats(1, 100), min_size=17, max_size=17),
    st.integers(1, 16),
    st.integers(1, 2),
    st.none() | st.floats(1, 100),
)
def test_the_choice_suffices_for_any_rates(rates, most, fewest, needed):
    needed = float("inf") if needed is None else needed
    found = Played(lambda one: rates[one.num_workers], most=most, fewest=fewest, needed=needed)
    tried = found.counts
    assert all(tried.count(one) <= 3 for one in tried)
    assert set(tried) <= {0, *range(fewest, most + 1)}
    best = max(rates[one] for one in {0, *tried})
    assert rates[found.choice.num_workers] >= min(0.97 * best, needed)


def test_settings_without_room_are_not_tried():
    rate = by_workers(LINEAR)
    busy = Played(rate, busy=lambda one: 1 / 1.03 if one.num_workers == 4 else 0.9)
    assert busy.counts == [2, 4]  # all cores are: nothing larger can be faster
    full = Played(rate, most=8, shm_cap=lambda prefetch: 8 // prefetch)
    assert full.asked == [workers(2), workers(4), workers(8, 1)]
    long = Played(rate, most=8, shm_cap=lambda prefetch: 16 // prefetch, prefetch=4)
    assert long.asked == [workers(2, 4), workers(4, 4), workers(8, 2)]
    given = Played(rate, fails_at=8, given=workers(8), fewest=1)
    assert (given.counts, given.choice) == ([8], ALONE)
    died = Played(rate, fails_at=4, pinning=True)
    died.search.add(trial_of(ALONE, 900.0), comparable=False)
    assert (died.counts, died.choice) == ([2, 4], workers(2))
    died.search.add(replace(trial_of(workers(2), 900.0), failed="it died"))
    assert died.choice == ALONE


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize(
    ("given", "pinned", "pageable", "chosen"),
    [(False, 80, 30, True), (False, 31, 30, False), (True, 30, 31, True), (True, 30, 40, False)],
)
def test_pinning_both_ways_in_turns(most, given, pinned, pageable, chosen):
    present = Settings(0, None, given)

    def rate(settings):
        return 50.0 * settings.num_workers + (pinned if settings.pin_memory else pageable)

    found = Played(rate, most=most, fewest=most, pinning=True, given=present, alone=present)
    assert found.choice == Settings(most, 2, chosen)
    assert ("not pinned" in found.why) == given
    assert {one.pin_memory for one in found.asked[-2:]} == {False, True}
    assert Played(rate, most=0, pinning=True).asked == []  # without workers a copy more
