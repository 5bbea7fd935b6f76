"""Object matching on a small grid (Compressive Transformers, 5.7): take the object that was not in the first room.

    first room   hall         second room
    S .          S .          S b              S: where the agent enters
    . a    ->    . .    ->    a .              a: an object of the first room; b: one of the second room alone

A clock moves the agent on after STEPS steps, in the hall after as many or fewer. It sees only the cell that it is in. agent.py
learns it.
"""

from typing import NamedTuple

import numpy as np

SIDE = 2  # cells in a row of a room
CELLS = SIDE * SIDE
ENTRANCE = 0
OBJECTS = 4
STEPS = 12  # in the first room and in the second, and at most in the hall
LENGTH = 3 * STEPS  # of the longest episode
MOVES = np.array([(-1, 0), (1, 0), (0, -1), (0, 1), (0, 0)])  # (actions, 2), by rows and columns
TAKE = len(MOVES) - 1  # the action that does not move
FIRST, HALL, SECOND = range(3)
OBJECT = (
    3 * CELLS
)  # the observation of the first object; those before it are the empty cells of the three places
NOTHING = OBJECT + OBJECTS  # the observation after the end
OBSERVATIONS = NOTHING + 1


class World(NamedTuple):
    """An episode in each of B lanes, all at the same step."""

    hall: int  # steps in the hall, 0 .. STEPS
    clock: int  # steps since the beginning
    cell: np.ndarray  # (B,), where the agent is
    objects: np.ndarray  # (B, 2): the one in the first room, and the one that is right to take
    places: (
        np.ndarray
    )  # (B, 3): the first one's cell in the first room, and the cells of both in the second
    ended: np.ndarray  # (B,)


def room_at(world: World, clock: int) -> int:
    """FIRST, HALL or SECOND."""
    return FIRST if clock < STEPS else HALL if clock < STEPS + world.hall else SECOND


def begin(lanes: int, hall: int, rng: np.random.Generator) -> World:
    """Episodes at their first step; objects stand anywhere except where the agent enters."""
    free = np.delete(np.arange(CELLS), ENTRANCE)
    objects = rng.permuted(np.tile(np.arange(OBJECTS), (lanes, 1)), axis=1)[:, :2]
    second = rng.permuted(np.tile(free, (lanes, 1)), axis=1)[:, :2]
    places = np.column_stack([rng.choice(free, lanes), second])
    return World(hall, 0, np.full(lanes, ENTRANCE), objects, places, np.zeros(lanes, bool))


def observe(world: World) -> np.ndarray:
    """What the agent sees (B,), 0 .. OBSERVATIONS - 1: the empty cell that it is in, the object there, or NOTHING."""
    room = room_at(world, world.clock)
    seen = room * CELLS + world.cell
    for place, number in {FIRST: [(0, 0)], SECOND: [(1, 0), (2, 1)]}.get(
        room, []
    ):  # columns of places and of objects
        seen = np.where(
            world.cell == world.places[:, place], OBJECT + world.objects[:, number], seen
        )
    return np.where(world.ended, NOTHING, seen)


def act(world: World, actions: np.ndarray) -> tuple[World, np.ndarray]:
    """The world after actions (B,), and rewards (B,): 1 for taking the object that was not in the first room, -1 for the other.

    Walls stop the agent. Only objects of the second room can be taken; that ends an episode, and there are no more rewards.
    """
    taking = (actions == TAKE) & ~world.ended & (room_at(world, world.clock) == SECOND)
    wrong, right = (taking & (world.cell == world.places[:, place]) for place in (1, 2))
    clock = world.clock + 1
    row, column = (np.stack(np.divmod(world.cell, SIDE), 1) + MOVES[actions]).clip(0, SIDE - 1).T
    stays = room_at(world, clock) == room_at(world, world.clock)
    cell = row * SIDE + column if stays else np.full_like(world.cell, ENTRANCE)
    ended = world.ended | right | wrong | (clock >= 2 * STEPS + world.hall)
    return world._replace(clock=clock, cell=cell, ended=ended), right * 1.0 - wrong
