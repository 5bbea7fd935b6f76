"""Object matching is the game that its page describes; without memory one is right by chance."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerated.lab.systems import matching
from accelerated.lab.systems.matching import CELLS, ENTRANCE, HALL, LENGTH, NOTHING, OBJECT, STEPS

UP, DOWN, LEFT, RIGHT, TAKE = range(5)


def play(worlds, choose):
    """(observations, rewards), (T, B) each, of an episode; choose(clock, observation) acts."""
    seen = []
    rewards = []
    for _ in range(LENGTH):
        seen.append(matching.observe(worlds))
        worlds, found = matching.act(worlds, choose(worlds.clock, seen[-1]))
        rewards.append(found)
    return np.array(seen), np.array(rewards)


ENTERED = 2 * CELLS  # what is seen at the entrance of the second room
ENDINGS = {  # {how the second room goes: (actions, what is seen meanwhile, the last reward)}
    "the first object": ([DOWN], [ENTERED, OBJECT + 3], -1),
    "the other one": ([DOWN, RIGHT], [ENTERED, OBJECT + 3, OBJECT + 1], 1),
    "the time is over": ([UP] * STEPS, [ENTERED] * STEPS, 0),
}


@pytest.mark.parametrize("hall", [0, 3, STEPS])
@pytest.mark.parametrize("ending", ENDINGS)
def test_an_episode_is_the_game_that_its_page_describes(ending, hall):
    """Object 3 is right of the entrance in the first room.

    In the second one it is below it, and object 1 beside it. Walls stop the agent; only objects of
    the second room are taken. Nothing is seen after the end.
    """
    way, second, reward = ENDINGS[ending]
    objects = np.array([[3, 1]])
    places = np.array([[1, 2, 3]])
    world = matching.World(hall, 0, np.array([ENTRANCE]), objects, places, np.array([False]))
    waits = STEPS - 4
    actions = [UP, RIGHT, RIGHT, TAKE, *[TAKE] * waits]
    actions += [DOWN, *[TAKE] * STEPS][:hall]
    actions += [*way, *[TAKE] * LENGTH]
    seen, rewards = play(world, lambda clock, _: np.array([actions[clock]]))

    first = [0, 0, *[OBJECT + 3] * (STEPS - 2)]
    in_the_hall = [CELLS, *[CELLS + 2] * (STEPS - 1)][:hall]
    expected = first + in_the_hall + second
    left = LENGTH - len(expected)  # steps after the end
    assert seen[:, 0].tolist() == expected + [NOTHING] * left
    assert rewards[:, 0].tolist() == [0] * (len(expected) - 1) + [reward] + [0] * left


@given(st.integers(0, 10**6))
def test_without_memory_nobody_beats_chance(seed):
    """If the objects change roles, whoever remembers nothing sees the same and gets the opposite.

    The hall and the second room look the same to it.
    """
    rng = np.random.default_rng(seed)
    world = matching.begin(20, STEPS, rng)
    assert (world.places != ENTRANCE).all()
    assert np.diff(world.objects).all()
    assert np.diff(world.places[:, 1:]).all()
    swapped = world._replace(objects=world.objects[:, ::-1], places=world.places[:, [0, 2, 1]])

    policy = rng.integers(5, size=(LENGTH, matching.OBSERVATIONS))
    seen, rewards = play(world, lambda clock, observation: policy[clock, observation])
    others, opposite = play(swapped, lambda clock, observation: policy[clock, observation])
    assert (seen[HALL * STEPS :] == others[HALL * STEPS :]).all()
    assert (rewards == -opposite).all()
