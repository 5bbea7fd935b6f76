"""python -m docs.ports.end_to_end --model NAME --out FOLDER: a training run that a port repeats.

It takes train.py's options. Into FOLDER it writes, each with a .json beside it:

    steps.safetensors    what the first ten rollouts read, and their losses
    trained.safetensors  the trained parameters and a text: bits per byte, 50 most probable tokens

docs/porting.md tells how to use the files.
"""

import importlib
import sys
from pathlib import Path

import numpy as np
import torch

import train
from accelerated.evaluation.score import evaluate
from accelerated.generation.continuation import Sampling, continue_text
from accelerated.program.errors import InputError, option_name, run_program
from accelerated.training import opening, optimization, options
from accelerated.training.folder import read_metrics
from reference import vectors
from reference.gradients import Case, function_of
from reference.rollout import Segment

TEXT = Path(__file__).parents[1] / "results" / "log.md"
OPTIONS = (
    "--preset tiny --steps 150 --warmup 20 --batch 4 --horizon 4 --dtype float64 --device cpu "
    "--log-every 1 --validate-every 0 --validation-tokens 0 --data"
)
# The files say nothing of these, so they cannot be changed
FIXED = {"optimizer": "adamw", "accumulate": 1, "update_every": 1, "log_every": 1}
FIXED |= {"clear_memory": False}
STEPS = 10
PROMPT = 32  # tokens of the text
CONTINUED = 50


def main(argv: list[str]) -> None:
    """Train as the options say, and write the files into the run's folder."""
    settings, start = options.parse([*OPTIONS.split(), str(TEXT), *argv])
    training = settings.training
    for name, value in FIXED.items():
        if getattr(training, name) != value:
            raise InputError(f"{option_name(name)} is {value} here; leave it out")
    with opening.open_run(settings, start) as run:
        case = read_ahead(run)
        if train.train(run) is None:
            write_steps(run, case)
            write_trained(run)
            print(f"{run.folder} has steps and trained, .safetensors and .json")


def read_ahead(run: opening.Run) -> Case:
    """Parameters, state and segments of the first ten steps: copies, for the reference."""
    reference = importlib.import_module(f"reference.{run.settings.model}")
    place = run.reader.state_dict()
    segments = []
    for segment in run.reader.rollout(STEPS * run.settings.training.horizon):
        arrays = (field.numpy() for field in segment[:4])
        task = None
        if segment.task:
            make = function_of(reference, "Task")
            task = make(*(field.numpy() for field in segment.task))
        segments.append(Segment(*arrays, task))
    run.reader.load_state_dict(place)
    params = parameters_of(run)
    fresh = reference.initial_state(params, run.model.config, 1)
    state = fresh._make(field.numpy().copy() for field in run.state)
    return Case(reference, run.model.config, params, state, segments)


def parameters_of(run: opening.Run) -> dict[str, np.ndarray]:
    """{name: array} of the parameters as they are now."""
    return {name: value.numpy().copy() for name, value in run.model.state_dict().items()}


def write_steps(run: opening.Run, case: Case) -> None:
    """Write what the first steps were given, their losses and their gradients' norms."""
    training = run.settings.training
    records = [record for record in read_metrics(run.folder) if "loss" in record][:STEPS]
    rows = vectors.given_of(case)
    for name in ("loss", "gradient_norm"):
        rows[f"adamw/{name}"] = np.array([record[name] for record in records])
    betas = run.optimizer.defaults["betas"]
    apart = set(run.model.auxiliary_parameters())
    adamw = {
        "horizon": training.horizon,
        "rates": [optimization.learning_rate(record["step"], training) for record in records],
        "beta1": betas[0],
        "beta2": betas[1],
        "epsilon": run.optimizer.defaults["eps"],
        "decay of matrices": training.weight_decay,
        "clip": training.clip,
        "clipped apart": [n for n, value in run.model.named_parameters() if value in apart],
    }
    write(run, "steps", rows, {"steps": {"adamw": adamw}})


def write_trained(run: opening.Run) -> None:
    """Write the parameters and the validation text; the .json says what they give."""
    document = next(document for document in run.validation if len(document.inputs))
    text = np.append(document.inputs, document.targets[-1]).astype(np.int64)
    with run.computing():
        score = evaluate(run.model, [document], run.tokenizer, lanes=1)
        prompt = torch.as_tensor(text[None, :PROMPT])
        drawn = continue_text(run.model, prompt, CONTINUED, Sampling(temperature=0.0), None)
        continuation = [int(token) for token in drawn]
    gives = score._asdict() | {"bits_per_byte": score.bits_per_byte, "prompt": PROMPT}
    rows = {f"given/param/{name}": value for name, value in parameters_of(run).items()}
    rows["given/text"] = text
    write(run, "trained", rows, {"trained": gives | {"continuation": continuation}})


def write(run: opening.Run, name: str, rows: dict, more: dict) -> None:
    """Write a file of these rows, and what stands beside it."""
    about = vectors.about(run.settings.model, name, run.model.config) | more
    vectors.write(run.folder / f"{name}.safetensors", rows, about)


if __name__ == "__main__":
    run_program("docs.ports.end_to_end", main, sys.argv[1:])
