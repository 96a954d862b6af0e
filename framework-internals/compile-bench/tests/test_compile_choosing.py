"""Which changes the combined fix keeps where not all of them work at once, with made-up trials."""

import itertools

import pytest

from compile_bench.fixes.fixer import choose
from compile_bench.fixes.types import Trial

A, B, C, D, E = (("model.py", line) for line in (3, 5, 8, 13, 21))


class Trials:
    """Refuses any set that holds one of ``wrong``; counts what it is asked.

    Args:
        wrong: sets of changes that spoil whatever they are in.
        hidden: changes that lie behind the first of all, and are not seen without it.
    """

    def __init__(self, *wrong, hidden=()):
        self.wrong = [frozenset(each) for each in wrong]
        self.hidden = frozenset(hidden)
        self.asked = []

    def __call__(self, places):
        assert places
        self.asked.append(places)
        for each in self.wrong:
            if each <= places:
                return Trial(f"off with {sorted(line for _, line in each)}")
        if self.hidden & places and A not in places:
            return Trial("not seen", unseen=True)
        return Trial("", graphs=len(places))


def test_what_holds_as_one_is_tried_once():
    trials = Trials()
    choice = choose((A, B, C), trials)
    assert (choice.kept, choice.refused, choice.conflicts) == ({A, B, C}, {}, {})
    assert choice.trial.graphs == 3
    assert len(trials.asked) == 1


def test_one_that_is_wrong_takes_no_other_with_it():
    trials = Trials([B])
    choice = choose((A, B, C), trials)
    assert choice.kept == {A, C}
    assert choice.trial.graphs == 2  # the trial of what is kept, not of all
    assert choice.refused == {B: "off with [5]"}
    assert choice.conflicts == {}
    assert len(trials.asked) == 5


def test_of_two_in_each_others_way_the_costlier_is_kept():
    for costliest_first, lost in (((A, B, C), B), ((B, C, A), A)):
        choice = choose(costliest_first, Trials([A, B]))
        assert choice.kept == {A, B, C} - {lost}
        assert choice.refused == {}
        assert choice.conflicts == {lost: "off with [3, 5]"}


def test_one_that_is_wrong_and_two_in_each_others_way():
    choice = choose((A, B, C, D), Trials([D], [A, C]))
    assert choice.kept == {A, B}
    assert choice.refused == {D: "off with [13]"}
    assert choice.conflicts == {C: "off with [3, 8]"}


def test_what_is_seen_only_with_another_is_tried_with_it():
    """Alone it proves nothing, which is not to say that it is wrong."""
    choice = choose((B, A, C), Trials([C], hidden=[B]))
    assert (choice.kept, choice.refused) == ({A, B}, {C: "off with [8]"})
    # Beside others it may turn out to be wrong after all: then that is the reason.
    choice = choose((B, A, C), Trials([A, B], hidden=[B]))
    assert (choice.kept, choice.refused, choice.conflicts) == ({A, C}, {B: "off with [3, 5]"}, {})
    choice = choose((B, C), Trials(hidden=[B]))
    assert (choice.kept, choice.refused) == ({C}, {B: "not seen"})


def test_nothing_is_kept_where_nothing_holds():
    choice = choose((A, B), Trials([A], [B]))
    assert (choice.kept, choice.trial) == (frozenset(), None)
    assert choice.refused == {A: "off with [3]", B: "off with [5]"}
    one = Trials([A])
    assert choose((A,), one).trial is None
    assert len(one.asked) == 1
    none = Trials()
    assert choose((), none).trial is None
    assert none.asked == []


@pytest.mark.parametrize("hidden", [(), (D,), (D, E)])
def test_whatever_is_in_the_way_what_is_kept_holds_in_few_trials(hidden):
    """All ways in which up to three pairs or singles of five are wrong."""
    places = (A, B, C, D, E)
    spoilers = [each for size in (1, 2) for each in itertools.combinations(places, size)]
    for wrong in itertools.chain.from_iterable(itertools.combinations(spoilers, count) for count in range(4)):
        trials = Trials(*wrong, hidden=hidden)
        choice = choose(places, trials)
        assert len(trials.asked) == len(set(trials.asked)) <= 2 * len(places) + 1
        assert choice.kept | choice.refused.keys() | choice.conflicts.keys() == set(places)
        assert (choice.trial is None) == (not choice.kept)
        assert not choice.kept or not choice.trial.verdict
        assert all(choice.conflicts.values())
        assert all(choice.refused.values())
        # Nothing that holds could still be added.
        assert all(Trials(*wrong, hidden=hidden)(choice.kept | {place}).verdict for place in choice.conflicts)
