"""Object matching on a small grid: take the object that was not in the first room.

The task is that of Compressive Transformers, 5.7.

    first room   hall         second room
    S .          S .          S b              S: where the agent enters
    . a    ->    . .    ->    a .              a: an object of the first room; b: of the second

A clock moves the agent on after STEPS steps, in the hall after as many or fewer. It sees only the
cell that it is in. agent.py learns it.
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
# the observation of the first object; those before it are the empty cells of the three places
OBJECT = 3 * CELLS
NOTHING = OBJECT + OBJECTS  # the observation after the end
OBSERVATIONS = NOTHING + 1


class World(NamedTuple):
    """An episode in each of B lanes, all at the same step."""

    hall: int  # steps in the hall, 0 .. STEPS
    clock: int  # steps since the beginning
    cell: np.ndarray  # (B,), where the agent is
    objects: np.ndarray  # (B, 2): the one in the first room, and the one that is right to take
    # (B, 3): the first one's cell in the first room, and the cells of both in the second
    places: np.ndarray
    ended: np.ndarray  # (B,)

    @property
    def room(self) -> int:
        """FIRST, HALL or SECOND: where all agents are."""
        if self.clock < STEPS:
            return FIRST
        return HALL if self.clock < STEPS + self.hall else SECOND


def begin(lanes: int, hall: int, rng: np.random.Generator) -> World:
    """Episodes at their first step; objects stand anywhere except where the agent enters."""
    free = np.delete(np.arange(CELLS), ENTRANCE)
    objects = rng.permuted(np.tile(np.arange(OBJECTS), (lanes, 1)), axis=1)[:, :2]
    second = rng.permuted(np.tile(free, (lanes, 1)), axis=1)[:, :2]
    places = np.column_stack([rng.choice(free, lanes), second])
    return World(hall, 0, np.full(lanes, ENTRANCE), objects, places, np.zeros(lanes, bool))


def observe(world: World) -> np.ndarray:
    """What the agent sees (B,), 0 .. OBSERVATIONS - 1.

    That is the empty cell that it is in, the object there, or NOTHING.
    """
    earlier, first, other = world.places.T
    old, new = OBJECT + world.objects.T
    standing = {FIRST: [(earlier, old)], HALL: [], SECOND: [(first, old), (other, new)]}
    seen = world.room * CELLS + world.cell
    for place, number in standing[world.room]:
        seen = np.where(world.cell == place, number, seen)
    return np.where(world.ended, NOTHING, seen)


def act(world: World, actions: np.ndarray) -> tuple[World, np.ndarray]:
    """The world after actions (B,), and rewards (B,).

    1 is for taking the object that was not in the first room, -1 for the other. Only objects of the
    second room can be taken; that ends an episode, and there are no more rewards. Walls stop the
    agent.
    """
    taking = (actions == TAKE) & ~world.ended & (world.room == SECOND)
    _, first, other = world.places.T
    wrong = taking & (world.cell == first)
    right = taking & (world.cell == other)
    later = world._replace(clock=world.clock + 1)

    cell = np.full_like(world.cell, ENTRANCE)
    if later.room == world.room:
        square = np.stack(np.divmod(world.cell, SIDE), 1)  # (B, 2)
        row, column = (square + MOVES[actions]).clip(0, SIDE - 1).T
        cell = row * SIDE + column
    ended = world.ended | right | wrong | (later.clock >= 2 * STEPS + world.hall)
    return later._replace(cell=cell, ended=ended), right * 1.0 - wrong
