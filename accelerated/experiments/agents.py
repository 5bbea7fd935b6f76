"""The command `python -m accelerated.experiments.agents`: agents by their memory, Figure 5 of Compressive Transformers.

Every row is trained with seeds 0, 1 and 2, one agent at a time, and kept as soon as it is trained. The same command continues
after an interruption; only the agent that was being trained begins anew. The page and its picture are written at the end.
"""

import argparse
import datetime
import json
import signal
import statistics
import sys
import time
from pathlib import Path

import torch

from accelerated.applications import agent, matching
from accelerated.experiments.table import machine, markdown, mean_and_spread, wrapped
from accelerated.experiments.trials import SEEDS
from accelerated.program.errors import InputError, check_choice, run_program
from accelerated.program.files import disk_errors, locked, written_whole
from accelerated.program.progress import Progress
from accelerated.training.log import figure_class, new_figure, save_figure
from accelerated.training.options import OptionParser

NAME = "compressive-figure-5"
ROWS = {f"rate-{rate}": ("compressive", {"compression_rate": rate}) for rate in (1, 2, 3, 4, 6)}
ROWS |= {name: (name, {}) for name in agent.CORES if name != "compressive"}
MEAN_OF = 10  # updates in a point of a curve
LAST = 0.1  # the part of training whose successes are the result
SOLVED = 0.9  # success that counts as solved
ADVICE = "give another --out"
ABOUT = f"""An agent sees an object in a room, walks through a hall and takes, of two objects in another room, the one that it
has not seen (`accelerated/applications/matching.py`). It is in each for {matching.STEPS} steps, and reads a token a step, in
segments of as many. So only memory reaches from a choice to the first room. Whoever takes any object is right half of the
time.

The rows `rate-` are Compressive Transformers of two layers, width 32, {agent.SEGMENT // 2} rows of memory and as many of
compressed memory. In the second room the memories of a layer reach back 12 steps before it at rate 1, which is the hall alone,
and 18, 24, 30 and 42 at rates 2, 3, 4 and 6. All are trained by an actor-critic with V-trace, with the same settings, which were
chosen by single runs of rate 4."""


def parse_options(argv: list[str]) -> argparse.Namespace:
    """The options of a command line; raises InputError for a row that does not exist or an --out that cannot be written."""
    parser = OptionParser(
        prog="python -m accelerated.experiments.agents", allow_abbrev=False, description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    text = f"of {', '.join(ROWS)} (default all)"
    parser.add_argument("--rows", nargs="+", default=list(ROWS), metavar="NAME", help=text)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), metavar="N", help="(default 0 1 2)")
    text = "updates of each agent; an update is an episode in each of 128 lanes (default 500)"
    parser.add_argument("--updates", type=int, default=500, metavar="N", help=text)
    parser.add_argument("--out", type=Path, default=Path("docs/results"), metavar="FOLDER", help="(default docs/results)")
    options = parser.parse(argv)
    for row in options.rows:
        check_choice("--rows", row, ROWS, InputError)
    if options.updates < MEAN_OF:
        raise InputError(f"--updates {options.updates} must be at least {MEAN_OF}, which are one point of a curve")
    if min(options.seeds) < 0:
        raise InputError(f"--seeds {min(options.seeds)} must be at least 0")
    with disk_errors(options.out, ADVICE):
        options.out.mkdir(parents=True, exist_ok=True)
    figure_class()  # says now if matplotlib is missing
    return options


def read_record(path: Path, updates: int) -> dict:
    """The record of agents that were trained before, or an empty one; raises InputError if they were trained otherwise."""
    settings = agent.Settings()._asdict() | {"updates": updates}
    fresh = {"settings": settings, "machine": machine(), "torch": torch.__version__, "agents": {}}
    try:
        record = json.loads(path.read_text())
        found = record["settings"]
    except FileNotFoundError:
        return fresh
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read ({error!r}); remove it, or {ADVICE}") from None
    if found != settings:
        raise InputError(f"{path} has agents of other settings, {found} and not {settings}; {ADVICE}, or the same --updates")
    return record


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
    for name, own in record["agents"].items():
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
    parts += ["```bash\npython -m accelerated.experiments.agents\n```", wrapped(measured)]
    parts += [f"![the share of right choices by environment steps]({NAME}.svg)", markdown(head, *rows)]
    return "\n\n".join([*parts, wrapped(f"Settings: {settings}.")]) + "\n"


def draw(record: dict, path: Path) -> None:
    """Draw success against steps, the mean of a row's seeds, with all seeds as thin lines."""
    figure, axes = new_figure()
    lanes = record["settings"]["lanes"]
    for number, (name, own) in enumerate(record["agents"].items()):
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


def by_number(own: tuple[str, dict]) -> int:
    """The seed of a (seed, agent), to sort by."""
    return int(own[0])


def train_missing(options: argparse.Namespace, paths: dict[str, Path]) -> None:
    """Train the agents that the record lacks; write the record, the picture and the page after each."""
    record = read_record(paths["json"], options.updates)
    missing = [(s, row) for s in options.seeds for row in options.rows if str(s) not in record["agents"].get(row, {})]
    for seed, row in missing:
        successes, seconds = curve(row, seed, options.updates)
        record["agents"].setdefault(row, {})[str(seed)] = {"successes": successes, "seconds": round(seconds, 1)}
        trained = record["agents"]  # in the order of rows and seeds
        record["agents"] = {name: dict(sorted(trained[name].items(), key=by_number)) for name in ROWS if name in trained}
        record["date"] = datetime.date.today().isoformat()
        with written_whole(paths["json"], ADVICE) as path:
            path.write_text(json.dumps(record) + "\n")
        Progress.say(f"{row}, seed {seed}: {100 * final(successes):.1f}% right at the end, {seconds:.0f} s")
    if record["agents"]:
        draw(record, paths["svg"])
        with written_whole(paths["md"], ADVICE) as path:
            path.write_text(page(record))


def main(argv: list[str]) -> None:
    """Train what is missing, and write what came out."""
    options = parse_options(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    torch.set_num_threads(1)  # so small a model is slower with more
    paths = {kind: options.out / f"{NAME}.{kind}" for kind in ("json", "md", "svg", "lock")}
    try:
        with locked(paths["lock"], f"another process trains agents for {options.out}; wait until it ends, or {ADVICE}"):
            train_missing(options, paths)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("agents that were trained are kept; continue with the same command") from None
    print(f"wrote {paths['md']}, .json and .svg")


if __name__ == "__main__":
    run_program("agents", main, sys.argv[1:])
