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


@pytest.mark.parametrize("hall", [0, 3, STEPS])
@pytest.mark.parametrize(
    "way, reward", [([DOWN], -1), ([DOWN, RIGHT], 1)], ids=["the first object", "the other one"]
)
def test_an_episode_is_the_game_that_its_page_describes(way, reward, hall):
    """Object 3 is right of the entrance in the first room; in the second one it is below it, and object 1 beside it."""
    world = matching.World(
        hall, 0, np.array([ENTRANCE]), np.array([[3, 1]]), np.array([[1, 2, 3]]), np.array([False])
    )
    rooms = (
        [UP, RIGHT, RIGHT, TAKE],
        [DOWN],
        [*way, TAKE],
    )  # walls stop the agent; only objects of the second room are taken
    actions = [
        act
        for room, n in zip(rooms, (STEPS, hall, STEPS), strict=True)
        for act in [*room, *[TAKE] * n][:n]
    ]
    actions += [TAKE] * (STEPS - hall)  # after the end
    seen, rewards = play(world, lambda clock, _: np.array([actions[clock]]))
    first, between, second = np.split(seen[:, 0], [STEPS, STEPS + hall])
    left = LENGTH - STEPS - hall - 1 - len(way)  # steps after what was taken
    assert first.tolist() == [0, 0, *[OBJECT + 3] * (STEPS - 2)]
    assert between.tolist() == [CELLS, *[CELLS + 2] * (STEPS - 1)][:hall]
    assert second.tolist() == [2 * CELLS, *[OBJECT + 3, OBJECT + 1][: len(way)], *[NOTHING] * left]
    assert rewards[:, 0].tolist() == [*[0] * (LENGTH - left - 1), reward, *[0] * left]


def test_an_episode_ends_when_the_time_in_the_second_room_is_over():
    world = matching.begin(2, 5, np.random.default_rng(0))
    for clock in range(LENGTH):
        assert (
            (matching.observe(world) == NOTHING).all()
            == world.ended.all()
            == (clock >= 2 * STEPS + 5)
        )
        world, _ = matching.act(world, np.array([UP, UP]))


@given(st.integers(0, 10**6))
def test_without_memory_nobody_beats_chance(seed):
    """If the objects change roles, the hall and the second room look the same to whatever acts, and rewards are opposite."""
    rng = np.random.default_rng(seed)
    world, policy = (
        matching.begin(20, STEPS, rng),
        rng.integers(5, size=(LENGTH, matching.OBSERVATIONS)),
    )
    swapped = world._replace(objects=world.objects[:, ::-1], places=world.places[:, [0, 2, 1]])
    played = (
        play(own, lambda clock, seen: policy[clock, seen]) for own in (world, swapped)
    )  # it remembers nothing
    (seen, rewards), (others, opposite) = played
    assert (
        (world.places != ENTRANCE).all()
        and np.diff(world.objects).all()
        and np.diff(world.places[:, 1:]).all()
    )
    assert (seen[HALL * STEPS :] == others[HALL * STEPS :]).all() and (rewards == -opposite).all()
