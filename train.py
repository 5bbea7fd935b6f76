"""Train a long-memory Transformer: python train.py --help.

The loop is in `train`. A Run holds all that the loop needs; accelerated/training/run.py opens and saves it.

    lane       one of B documents that are read side by side; each has its own state
    segment    the next N tokens of every lane, which the model reads at once
    rollout    the `horizon` segments of one iteration; gradient flows through the state between them
    scored     a token is scored if its prediction counts: not padding, not tokens repeated by an overlap
"""

from accelerated.program.errors import begin_program, run_program

if __name__ == "__main__":  # before torch is imported, which takes seconds
    command = begin_program("train.py", "accelerated.training.options")

import math

import torch

from accelerated import protocol, replay
from accelerated.evaluation import generation, score
from accelerated.program.interruption import Interruption
from accelerated.program.progress import Progress
from accelerated.training import optimization, process
from accelerated.training import run as runs

END = "⟫"  # of the prompt in a printed sample


def train(run: runs.Run) -> str | None:
    """Train until the run has ended; returns the name of the signal that stopped it earlier, or None."""
    training, save_due, stopped = run.settings.training, False, run.ended
    with Interruption(told=process.rank() == 0) as interruption, progress_bar(run) as steps:
        if run.validation_due:  # the run was stopped in a validation
            runs.save(run, validate(run, steps, interruption))
            stopped = any(process.summed([bool(interruption.signal)], run.device)) or run.ended
        for run.step in () if stopped else steps:
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
            optimization.check_finite(run.step, measured, run.saved)
            nats, run.gradient_norm = measured.pop("loss"), measured.pop("gradient's norm", run.gradient_norm)
            if update_due:
                update(run)

            # Log: sums here, written as means
            run.log.add(nats, scored, text_bytes)
            show_progress(run, steps, nats / max(1, text_bytes), auxiliary=measured)
            run.validation_due |= runs.validates_after(run.step, training)
            if run.log_due():
                log_means(run, auxiliary=measured)

            # Validating and saving wait for the next update: a checkpoint holds no gathered gradients
            save_due |= run.validation_due or run.step % training.save_every == 0 or run.step == training.steps
            if run.gathered:
                continue

            # Validate; Ctrl-C leaves a validation, which is then due when the run is resumed
            is_best = validate(run, steps, interruption) if run.validation_due else False

            # Save. Processes vote, so that all do the same
            stopped, late = process.summed([bool(interruption.signal), run.time_to_save()], run.device)
            if save_due or stopped or late:
                runs.save(run, is_best)
                save_due = False
            if stopped or run.ended:
                break
    run.log.draw()
    return (interruption.signal or "a signal") if stopped and (run.validation_due or not run.ended) else None


def next_segments(run: runs.Run) -> tuple[list, int, int]:
    """The next `horizon` segments of this process's lanes; the scored tokens and their bytes of text in all lanes."""
    training = run.settings.training
    segments, own = run.reader.rollout(training.horizon), process.own_lanes(training.batch)
    run.tokens += training.horizon * training.batch * run.settings.model_config.segment
    mine = [segment.keep_lanes(own).to(run.device) for segment in segments]
    return mine, replay.count_scored(segments), score.count_bytes(segments, run.tokenizer)


def forward_and_backward(run: runs.Run, segments: list, scored: int) -> torch.Tensor:
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


def update(run: runs.Run) -> None:
    """Take one optimiser step with the averaged and clipped gradients."""
    optimization.set_learning_rate(run.optimizer, optimization.learning_rate(run.step, run.settings.training))
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.gathered = 0


def progress_bar(run: runs.Run) -> Progress:
    """The steps that are left, shown by the first process."""
    done, steps = run.step, run.settings.training.steps
    return Progress("training", steps, "step", done, over=range(done + 1, steps + 1), show=process.rank() == 0)


def show_progress(run: runs.Run, steps: Progress, nats_per_byte: float, auxiliary: dict[str, float]) -> None:
    """Show an iteration's measurements beside the bar."""
    measure = "bits/byte" if run.settings.tasks.continuation_alone else "bits/byte over all tasks"
    compression = f", compression loss {sum(auxiliary.values()):.4f}" if auxiliary else ""
    rate = f"{run.tokens_per_second():,.0f} tokens/s"
    steps.set_postfix_str(f"{nats_per_byte / math.log(2):.3f} {measure}{compression}, {rate}", refresh=False)


def log_means(run: runs.Run, auxiliary: dict[str, float]) -> None:
    """Write a line of metrics.jsonl: the mean loss since the last one, and other current numbers."""
    rate = optimization.learning_rate(run.step, run.settings.training)
    others = {"gradient_norm": run.gradient_norm, "tokens_per_second": run.tokens_per_second()} | auxiliary
    run.log.record(run.step, learning_rate=rate, **others)


def validation_score(run: runs.Run, clear_memory: bool = False) -> score.Score:
    """The Score of the validation documents: of the split, or of what --validation-segments allows, from all over it."""
    with run.computing():
        return score.evaluate(run.model, run.validation, run.tokenizer, run.lanes_at_once, clear_memory)


def validate(run: runs.Run, steps: Progress, interruption: Interruption) -> bool:
    """Validate in the first process while the others wait; returns whether this is the best score so far."""
    is_best, run.validated = False, None
    if process.rank() == 0 and not interruption.signal:
        with run.timeout(steps), interruption.leaves():
            run.validated = validation_score(run)
    run.validation_due = process.rank() == 0 and run.validated is None
    if run.validated:
        bits = run.validated.bits_per_byte
        is_best, run.best = bits < run.best, min(run.best, bits)
        run.log.validation(run.step, run.validated)
        run.since_best = runs.validations_since_best(run.folder, run.step)
        best = "the best so far" if is_best else f"the best was {run.best:.3f}"
        best += f"; {run.since_best} in a row brought no better one, so training ends" if run.stopped_early else ""
        steps.say(f"step {run.step:,}: validation {bits:.3f} bits per byte on {run.validated.tokens:,} tokens; {best}")
    [run.since_best] = process.summed([run.since_best if process.rank() == 0 else 0], run.device)  # waits for the first
    return is_best


def report(run: runs.Run) -> None:
    """Print and log the validation score, with the state carried on and with it cleared at every segment."""
    carried = run.validated or validation_score(run)
    cleared = None if score.carries_nothing(run.model) else validation_score(run, clear_memory=True)
    print(runs.final_lines(run, carried, cleared))
    run.log.validation(run.step, carried, cleared, final=True)
    run.log.draw()


def sample(run: runs.Run) -> None:
    """Print the opening of a validation document and a continuation of it."""
    training = run.settings.training
    prompt = generation.prompt_from(next(document for document in run.corpus.splits["valid"] if len(document.inputs)))
    generator = torch.Generator(run.device).manual_seed(training.seed)
    with run.computing():
        tokens = generation.continue_text(
            run.model, prompt.to(run.device), training.sample, generation.Sampling(temperature=0.8), generator
        )
        continuation = generation.show_text(run.tokenizer, [token.item() for token in tokens])
    opening = generation.show_text(run.tokenizer, prompt[0].tolist())
    print(f"a sample: the opening of a validation document, and after {END} how the model continues it:")
    print(f"{opening}{END}{continuation}")


def main(settings: runs.Settings, beginning: runs.Beginning) -> None:
    """Train as the command line says, then report, or say how to continue."""
    with runs.open_run(settings, beginning) as run:
        resume = f"python train.py --resume {run.folder}{run.data_dir_option}"
        stopped, taken = train(run), process.peak_memory(run.device)
        if process.rank() > 0:
            return
        if taken:
            print(taken)
        if stopped:
            print(f"stopped by {stopped} and saved; continue with: {resume}")
            return
        try:
            report(run)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"the model is saved; for its last report: {resume}") from None
        if run.settings.training.sample and run.tokenizer.spells_text:
            sample(run)
        print(f"saved in {run.folder}; evaluate it with: python eval.py {run.folder}{run.data_dir_option}")


if __name__ == "__main__":
    run_program("train.py", main, *command)
