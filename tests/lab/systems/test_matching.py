"""Object matching: it is the game that its page describes, and whoever does not remember is right by chance."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from accelerated.lab.systems import matching
from accelerated.lab.systems.matching import ENTRANCE, HALL, LENGTH, SIDE, STEPS


def play(worlds, choose):
    """(observations (T, B), rewards (T, B)) of an episode in which choose(clock, observation) acts."""
    seen, rewards = [], []
    for _ in range(LENGTH):
        seen.append(matching.observe(worlds))
        worlds, found = matching.act(worlds, choose(worlds.clock, seen[-1]))
        rewards.append(found)
    return np.array(seen), np.array(rewards)


def told(objects, places, actions):
    """What is seen and earned in one lane, by the rules in words; the cell is (row, column)."""
    (first, other), (room_one, own, right) = objects, (divmod(place, SIDE) for place in places)
    (row, column), over, seen, earned = divmod(ENTRANCE, SIDE), False, [], []
    for clock, action in enumerate(actions):
        room = ("first", "hall", "second")[clock // STEPS]
        if clock % STEPS == 0:
            row, column = divmod(ENTRANCE, SIDE)
        here = {("first", room_one): first, ("second", own): first, ("second", right): other}.get((room, (row, column)))
        seen.append("over" if over else (room, row, column) if here is None else here)
        takes = action == 4 and room == "second" and here is not None and not over
        earned.append((1 if here == other else -1) if takes else 0)
        over = over or takes
        if action < 4:
            down, along = [(-1, 0), (1, 0), (0, -1), (0, 1)][action]
            row, column = min(max(row + down, 0), SIDE - 1), min(max(column + along, 0), SIDE - 1)
    return seen, earned


@given(st.integers(0, 10**6))
def test_each_lane_is_the_game_that_its_rules_tell(seed):
    rng = np.random.default_rng(seed)
    world, actions, meanings = matching.begin(3, rng), rng.integers(5, size=(LENGTH, 3)), {}
    found, rewards = play(world, lambda clock, _: actions[clock])
    for lane in range(3):
        seen, earned = told(world.objects[lane], world.places[lane], actions[:, lane])
        assert rewards[:, lane].tolist() == earned
        assert all(meanings.setdefault(token, what) == what for token, what in zip(found[:, lane].tolist(), seen, strict=True))
    assert len({*meanings.values()}) == len(meanings) and {*meanings} <= {*range(matching.OBSERVATIONS)}


def test_nothing_is_drawn_more_often_than_it_should_be():
    world, free = matching.begin(20_000, np.random.default_rng(0)), [1, 2, 3]
    assert (world.objects[:, 0] != world.objects[:, 1]).all() and (world.places[:, 1] != world.places[:, 2]).all()
    for values, kinds in ((world.objects, range(matching.OBJECTS)), (world.places, free)):
        for column in values.T:
            counts = np.bincount(column, minlength=len(kinds))[list(kinds)]
            assert counts.sum() == 20_000 and np.abs(counts / 20_000 - 1 / len(kinds)).max() < 0.015


@given(st.integers(0, 10**6))
def test_without_memory_nobody_beats_chance(seed):
    """If the objects change roles, the hall and the second room look the same to whatever acts, and rewards are opposite."""
    rng = np.random.default_rng(seed)
    world, policy = matching.begin(20, rng), rng.integers(5, size=(LENGTH, matching.OBSERVATIONS))
    swapped = world._replace(objects=world.objects[:, ::-1], places=world.places[:, [0, 2, 1]])
    played = (play(own, lambda clock, seen: policy[clock, seen]) for own in (world, swapped))  # it remembers nothing
    (seen, rewards), (others, opposite) = played
    assert (seen[HALL * STEPS :] == others[HALL * STEPS :]).all() and (rewards == -opposite).all()
