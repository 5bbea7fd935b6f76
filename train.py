"""Train a long-memory Transformer: python train.py --help.

The loop is in `train`. A Run holds all that the loop needs; accelerated/training/run.py opens and saves it.

    lane       one of B documents that are read side by side; each has its own state
    segment    the next N tokens of every lane, which the model reads at once
    rollout    the `horizon` segments of one iteration; gradient flows through the state between them
    scored     a token is scored if its prediction counts: not padding, not tokens repeated by an overlap
"""

import math
import sys

import torch
from tqdm import tqdm

from accelerated import protocol, replay
from accelerated.data.recall import CHANCE
from accelerated.evaluation import generation, score
from accelerated.program.errors import run_program
from accelerated.training import optimization, process
from accelerated.training.options import parse_training
from accelerated.training.run import Run, open_run, save


def train(run: Run) -> str | None:
    """Train to the last step; returns the name of the signal that stopped the run early, or None."""
    training = run.settings.training
    save_due = validation_due = False
    with process.Interruption() as interruption, progress_bar(run) as steps:
        for run.step in steps:
            # Read the next segments of this process's lanes
            segments, scored, text_bytes = next_segments(run)

            # Forward and backward: add to the gathered gradients, move the state on
            measured = {"loss": forward_and_backward(run, segments, scored)} | run.auxiliary

            # Average and clip the gradients, or gather those of more iterations first
            if update_due := optimization.update_due(run.step, training):
                process.average_gradients(run.model.parameters(), run.device)
                measured["gradient's norm"] = optimization.average_and_clip(run.model, run.gathered, training.clip)

            # Read what was measured, which is all that an iteration waits for; then update the parameters
            measured = process.read_numbers(measured, summed_over_processes="loss")
            optimization.check_finite(run.step, measured)
            nats, run.gradient_norm = measured.pop("loss"), measured.pop("gradient's norm", run.gradient_norm)
            if update_due:
                update(run)

            # Log: sums here, written as means
            run.log.add(nats, scored, text_bytes)
            show_progress(run, steps, nats / max(1, text_bytes), auxiliary=measured)
            if run.step % training.log_every == 0 or run.step == training.steps:
                log_means(run, auxiliary=measured)

            # Validating and saving wait for the next update: a checkpoint holds no gathered gradients.
            # Processes vote, so that all do the same
            any_stopped, any_late = process.summed([bool(interruption.signal), run.time_to_save()], run.device)
            validation_due |= training.validate_every > 0 and run.step % training.validate_every == 0
            save_due |= bool(any_stopped or any_late) or run.step % training.save_every == 0 or run.step == training.steps
            if run.gathered:
                continue

            # Validate
            is_best = validate(run) if validation_due else False

            # Save, after every validation too
            if save_due or validation_due:
                save(run, is_best)
                save_due = validation_due = False
            if any_stopped:
                break
    run.log.draw()
    return (interruption.signal or "a signal") if any_stopped and run.step < training.steps else None


def next_segments(run: Run) -> tuple[list, int, int]:
    """The next `horizon` segments of this process's lanes; the scored tokens and their bytes of text in all lanes."""
    training = run.settings.training
    segments, own = run.reader.rollout(training.horizon), process.own_lanes(training.batch)
    run.tokens += training.horizon * training.batch * run.settings.model_config.segment
    mine = [segment.keep_lanes(own).to(run.device) for segment in segments]
    return mine, replay.count_scored(segments), score.count_bytes(segments, run.tokenizer)


def forward_and_backward(run: Run, segments: list, scored: int) -> torch.Tensor:
    """Add the gradients of a rollout to the gathered ones, move the state on, and return this process's summed -log p (nats).

    The lanes are read in `accumulate` groups, one after another. `scored` counts the tokens of all processes.
    """
    training, loss, group_size = run.settings.training, 0.0, run.lanes_at_once
    with run.computing():
        for first in range(0, len(segments[0].tokens), group_size):
            rows = slice(first, first + group_size)
            part, state = replay.BACKPROP[training.backprop](
                run.model, [segment.keep_lanes(rows) for segment in segments], protocol.keep_lanes(run.state, rows),
                scored=scored / process.world_size(),  # the processes' gradients are averaged, not summed
                share=1 / training.accumulate, rank=process.rank(),
            )  # fmt: skip
            loss, run.state = loss + part, protocol.put_lanes(run.state, rows, state)
    run.gathered += 1
    return loss * (scored / process.world_size())


def update(run: Run) -> None:
    """Take one optimiser step with the averaged and clipped gradients."""
    optimization.set_learning_rate(run.optimizer, optimization.learning_rate(run.step, run.settings.training))
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.gathered = 0


def progress_bar(run: Run) -> tqdm:
    """The steps that are left, shown as a bar by the first process."""
    done, steps = run.step, run.settings.training.steps
    return tqdm(range(done + 1, steps + 1), initial=done, total=steps, unit="step", mininterval=1.0, disable=process.rank() > 0)


def show_progress(run: Run, steps: tqdm, nats_per_byte: float, auxiliary: dict[str, float]) -> None:
    """Show an iteration's measurements beside the bar."""
    measure = "bits/byte" if run.settings.tasks.continuation_alone else "bits/byte over all tasks"
    compression = f", compression loss {sum(auxiliary.values()):.4f}" if auxiliary else ""
    rate = f"{run.tokens_per_second():,.0f} tokens/s"
    steps.set_postfix_str(f"{nats_per_byte / math.log(2):.3f} {measure}{compression}, {rate}", refresh=False)


def log_means(run: Run, auxiliary: dict[str, float]) -> None:
    """Write a line of metrics.jsonl: the mean loss since the last one, and other current numbers."""
    rate = optimization.learning_rate(run.step, run.settings.training)
    others = {"gradient_norm": run.gradient_norm, "tokens_per_second": run.tokens_per_second()} | auxiliary
    run.log.record(run.step, learning_rate=rate, **others)


def validation_score(run: Run, clear_memory: bool = False) -> score.Score:
    """The Score of the validation split, or of as many of its segments as --validation-segments allows."""
    training, documents = run.settings.training, run.validation
    limit = training.validation_segments or None
    lanes = training.batch if limit else run.lanes_at_once  # a limit is of segments in each lane
    with run.computing():
        return score.evaluate(run.model, documents, run.tokenizer, lanes, clear_memory, limit)


def validate(run: Run) -> bool:
    """Validate in the first process while the others wait; returns whether this is the best score so far."""
    is_best = False
    if process.rank() == 0:
        result = validation_score(run)
        if result.tokens:
            loss, bits = result.nats / result.tokens, result.bits_per_byte
            is_best, run.best = bits < run.best, min(run.best, bits)
            run.log.write(step=run.step, validation_bits_per_byte=bits, validation_loss=loss)
    process.wait_for_all()
    return is_best


def report(run: Run) -> None:
    """Print the validation score, with the state carried on and with it cleared at every segment."""
    carried = validation_score(run)
    if carried.tokens == 0:
        limit = run.settings.training.validation_segments
        print(
            f"validation: the first {limit} segments of every lane score nothing; give more --validation-segments, or 0 for all"
        )
        return
    if score.carries_nothing(run.model):
        print(f"validation on {carried.tokens} tokens: {carried.bits_per_byte:.3f} bits per byte; this model carries no memory")
        return
    cleared = validation_score(run, clear_memory=True)
    print(f"validation on {carried.tokens} tokens, bits per byte: {carried.bits_per_byte:.3f} with the memory, "
          f"{cleared.bits_per_byte:.3f} with it cleared at every segment")  # fmt: skip
    if run.settings.data.data == "recall":
        print(
            f"right answers: {carried.accuracy:.1%} with the memory, {cleared.accuracy:.1%} with it cleared (chance {CHANCE:.0%})"
        )


def sample(run: Run) -> None:
    """Print the opening of a validation document and a continuation of it."""
    training = run.settings.training
    prompt = generation.prompt_from(next(document for document in run.corpus.splits["valid"] if len(document.inputs)))
    generator = torch.Generator(run.device).manual_seed(training.seed)
    with run.computing():
        tokens = generation.continue_text(
            run.model, prompt.to(run.device), training.sample, generation.Sampling(temperature=0.8), generator
        )
        text = generation.show_text(run.tokenizer, [*prompt[0].tolist(), *(token.item() for token in tokens)])
    print(f"a sample after the opening of a validation document:\n{text}")


def main(argv: list[str]) -> None:
    """Train as the command line says, then report, or say how to continue."""
    with open_run(*parse_training(argv)) as run:
        stopped, taken = train(run), process.peak_memory(run.device)
        if process.rank() > 0:
            return
        if taken:
            print(taken)
        if stopped:
            print(f"stopped by {stopped} and saved; continue with: python train.py --resume {run.folder}{run.data_dir_option}")
            return
        report(run)
        if run.settings.training.sample:
            sample(run)
        print(f"saved in {run.folder}; evaluate it with: python eval.py {run.folder}{run.data_dir_option}")


if __name__ == "__main__":
    run_program("train.py", main, sys.argv[1:])
