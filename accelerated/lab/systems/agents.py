"""The command `python -m accelerated.lab.systems.agents`: agents by their memory, Figure 5 of Compressive Transformers.

Every row is trained with seeds 0, 1 and 2, one agent at a time, and kept as soon as it is trained. The same command continues
after an interruption; only the agent that was being trained begins anew.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

from accelerated.lab.experiment import Experiment, conduct, experiment_parser, parsed
from accelerated.lab.markdown import markdown_table
from accelerated.lab.systems import agent, matching
from accelerated.lab.tables.page import mean_and_spread, wrapped
from accelerated.program.errors import InputError, run_program
from accelerated.program.progress import Progress
from accelerated.training.log import figure_class, new_figure, save_figure

ROWS = {f"rate-{rate}": ("compressive", {"compression_rate": rate}) for rate in (1, 2, 3, 4, 6)}
ROWS |= {name: (name, {}) for name in agent.CORES if name != "compressive"}
MEAN_OF = 10  # updates in a point of a curve
LAST = 0.1  # the part of training whose successes are the result
SOLVED = 0.9  # success that counts as solved
ABOUT = f"""An agent sees an object in a room, walks through a hall and takes, of two objects in another room, the one that it
has not seen (`accelerated/lab/systems/matching.py`). It is in each for {matching.STEPS} steps, and reads a token a step, in
segments of as many. So only memory reaches from a choice to the first room. Whoever takes any object is right half of the
time.

The rows `rate-` are Compressive Transformers of two layers, width 32, {agent.SEGMENT // 2} rows of memory and as many of
compressed memory. In the second room the memories of a layer reach back 12 steps before it at rate 1, which is the hall alone,
and 18, 24, 30 and 42 at rates 2, 3, 4 and 6. All are trained by an actor-critic with V-trace, with the same settings, which were
chosen by single runs of rate 4."""


def parse_options(argv: list[str]) -> argparse.Namespace:
    """The options of a command line; raises InputError for what cannot be."""
    parser = experiment_parser("agents", __doc__, list(ROWS))
    text = "updates of each agent; an update is an episode in each of 128 lanes (default 500)"
    parser.add_argument("--updates", type=int, default=500, metavar="N", help=text)
    options = parsed(parser, argv, list(ROWS))
    if options.updates < MEAN_OF:
        raise InputError(f"--updates {options.updates} must be at least {MEAN_OF}, which are one point of a curve")
    figure_class()  # says now if matplotlib is missing
    return options


def curve(row: str, seed: int, updates: int) -> tuple[list[float], float]:
    """Train an agent; return the share of successes, a mean of MEAN_OF updates each, and the seconds that it took."""
    core, sizes = ROWS[row]
    began, successes = time.monotonic(), []
    with Progress(f"{row}, seed {seed}", updates, "update") as bar:
        for success in agent.train(agent.make_core(core, seed, **sizes), agent.Settings(), seed):
            successes.append(success)
            bar.update()
            if len(successes) == updates:
                break
    means = [statistics.mean(successes[at : at + MEAN_OF]) for at in range(0, updates - MEAN_OF + 1, MEAN_OF)]
    return [round(mean, 4) for mean in means], time.monotonic() - began


def final(successes: list[float]) -> float:
    """The mean success of the last part of a curve."""
    return statistics.mean(successes[-max(1, round(LAST * len(successes))) :])


def steps_of(points: int, lanes: int) -> int:
    """Environment steps until a point of a curve."""
    return points * MEAN_OF * lanes * matching.LENGTH


def solved_after(successes: list[float], lanes: int) -> int | None:
    """Environment steps until a point of the curve reached SOLVED, or None."""
    return next((steps_of(at, lanes) for at, value in enumerate(successes, 1) if value >= SOLVED), None)


def page(record: dict) -> str:
    """The page of a record, in Markdown."""
    updates, lanes, rows = record["settings"]["updates"], record["settings"]["lanes"], []
    for name, own in record["runs"].items():
        curves = [found["successes"] for found in own.values()]
        reached = [solved_after(successes, lanes) for successes in curves]
        ends = mean_and_spread([100 * final(successes) for successes in curves], ".1f")
        steps = ", ".join("not" if found is None else f"{found / 1e6:.2f}" for found in reached)
        minutes = statistics.mean(found["seconds"] for found in own.values()) / 60
        rows.append([name, ", ".join(own), ends, steps, f"{minutes:.1f}"])
    head = ["memory", "seeds", "right at the end, percent", f"million steps until {100 * SOLVED:.0f}% are right", "minutes"]
    measured = f"""Measured on {record["date"]}, {record["machine"]}, torch {record["torch"]}, one thread. An agent sees
    {steps_of(updates // MEAN_OF, lanes) / 1e6:.2f} million steps: {updates} updates of {lanes} episodes of {matching.LENGTH}
    steps. The end is the last tenth of training; episodes in which nothing is taken are not right. Mean (least .. most) of
    the seeds. Steps are by seed. The method is in its [chapter](../compressive.md#memory-for-an-agent)."""
    settings = ", ".join(f"{name} {value:g}" for name, value in record["settings"].items())
    parts = ["# Compressive Transformers, Figure 5: memory for an agent", wrapped(ABOUT)]
    parts += ["```bash\npython -m accelerated.lab.systems.agents\n```", wrapped(measured)]
    parts += ["![the share of right choices by environment steps](compressive-figure-5.svg)", markdown_table(head, *rows)]
    return "\n\n".join([*parts, wrapped(f"Settings: {settings}.")]) + "\n"


def draw(record: dict, path: Path) -> None:
    """Draw success against steps, the mean of a row's seeds, with all seeds as thin lines."""
    figure, axes = new_figure()
    lanes = record["settings"]["lanes"]
    for number, (name, own) in enumerate(record["runs"].items()):
        curves = [found["successes"] for found in own.values()]
        steps, colour = [steps_of(at, lanes) / 1e6 for at in range(1, len(curves[0]) + 1)], f"C{number}"
        for successes in curves if len(curves) > 1 else ():
            axes.plot(steps, [100 * value for value in successes], color=colour, linewidth=0.5, alpha=0.4)
        means = [100 * statistics.mean(values) for values in zip(*curves, strict=True)]
        axes.plot(steps, means, color=colour, linestyle="-" if name.startswith("rate") else "--", label=name)
    axes.axhline(50, color="0.5", linewidth=1, linestyle=":")
    axes.set(xlabel="million environment steps", ylabel="right choices, percent of episodes", ylim=(0, 102))
    axes.set_title("Which object was not in the first room?")
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def experiment(updates: int) -> Experiment:
    """Figure 5, with agents of so many updates."""

    def train(row: str, seed: int) -> dict:
        """The successes of an agent by time."""
        successes, seconds = curve(row, seed, updates)
        return {"successes": successes, "seconds": round(seconds, 1)}

    def said(run: dict) -> str:
        """What came out of an agent."""
        return f"{100 * final(run['successes']):.1f}% right at the end, {run['seconds']:.0f} s"

    settings = agent.Settings()._asdict() | {"updates": updates}
    return Experiment("compressive-figure-5", list(ROWS), settings, train, said, page, draw)


def main(argv: list[str]) -> None:
    """Train what is missing, and write what came out."""
    options = parse_options(argv)
    conduct(experiment(options.updates), options)


if __name__ == "__main__":
    run_program("agents", main, sys.argv[1:])
