"""Object matching: it is the game that its page describes, and whoever does not remember is right by chance."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerated.lab.systems import matching
from accelerated.lab.systems.matching import CELLS, ENTRANCE, HALL, LENGTH, NOTHING, OBJECT, STEPS

UP, DOWN, LEFT, RIGHT, TAKE = range(5)


def play(worlds, choose):
    """(observations (T, B), rewards (T, B)) of an episode in which choose(clock, observation) acts."""
    seen, rewards = [], []
    for _ in range(LENGTH):
        seen.append(matching.observe(worlds))
        worlds, found = matching.act(worlds, choose(worlds.clock, seen[-1]))
        rewards.append(found)
    return np.array(seen), np.array(rewards)


@pytest.mark.parametrize("way, reward", [([DOWN], -1), ([DOWN, RIGHT], 1)], ids=["the first object", "the other one"])
def test_an_episode_is_the_game_that_its_page_describes(way, reward):
    """Object 3 is right of the entrance in the first room; in the second one it is below it, and object 1 beside it."""
    world = matching.World(0, np.array([ENTRANCE]), np.array([[3, 1]]), np.array([[1, 2, 3]]), np.array([False]))
    rooms = [UP, RIGHT, RIGHT, TAKE], [DOWN], [*way, TAKE]  # walls stop the agent; only objects of the second room are taken
    actions = [action for room in rooms for action in [*room, *[TAKE] * (STEPS - len(room))]]
    seen, rewards = play(world, lambda clock, _: np.array([actions[clock]]))
    first, hall, second = seen[:, 0].reshape(3, STEPS).tolist()
    assert first == [0, 0, *[OBJECT + 3] * (STEPS - 2)] and hall == [CELLS, *[CELLS + 2] * (STEPS - 1)]
    assert second == [2 * CELLS, *[OBJECT + 3, OBJECT + 1][: len(way)], *[NOTHING] * (STEPS - 1 - len(way))]
    assert rewards[:, 0].tolist() == [*[0] * (2 * STEPS + len(way)), reward, *[0] * (STEPS - 1 - len(way))]


@given(st.integers(0, 10**6))
def test_without_memory_nobody_beats_chance(seed):
    """If the objects change roles, the hall and the second room look the same to whatever acts, and rewards are opposite."""
    rng = np.random.default_rng(seed)
    world, policy = matching.begin(20, rng), rng.integers(5, size=(LENGTH, matching.OBSERVATIONS))
    swapped = world._replace(objects=world.objects[:, ::-1], places=world.places[:, [0, 2, 1]])
    played = (play(own, lambda clock, seen: policy[clock, seen]) for own in (world, swapped))  # it remembers nothing
    (seen, rewards), (others, opposite) = played
    assert (seen[HALL * STEPS :] == others[HALL * STEPS :]).all() and (rewards == -opposite).all()
