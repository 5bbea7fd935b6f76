"""Train a long-memory Transformer: python train.py --help.

The loop is in `train`. A Run (accelerated/training/run.py) holds all that the loop needs; opening.py beside it opens one.

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
from accelerated.data import lanes
from accelerated.evaluation import sample as samples
from accelerated.evaluation import score
from accelerated.generation import continuation
from accelerated.program.interruption import Interruption
from accelerated.program.progress import Progress
from accelerated.training import opening, optimization, process

END = "⟫"  # of the prompt in a printed sample


def train(run: opening.Run) -> str | None:
    """Train to the last step; returns the name of the signal that stopped it earlier, or None."""
    training, first, stopped = run.settings.training, process.rank() == 0, False
    left, bar = (
        range(run.step + 1, training.steps + 1),
        Progress("training", training.steps, "step", run.step, show=first),
    )
    with Interruption(told=first) as interruption, bar as steps:
        for run.step in left:
            # Read the next segments of this process's lanes
            segments, scored, text_bytes = next_segments(run)

            # Forward and backward: add to the gathered gradients, move the state on
            measured = forward_and_backward(run, segments, scored)

            # Average and clip the gradients, or gather those of more iterations first
            if update_due := optimization.update_due(run.step, training):
                process.average_gradients(run.model.parameters(), run.device)
                measured["gradient's norm"] = optimization.average_and_clip(
                    run.model, run.gathered, training.clip
                )

            # Read what was measured, which is all that an iteration waits for; then update the parameters
            measured = process.read_numbers(measured)
            optimization.check_finite(run.step, measured)
            nats, run.gradient_norm = (
                measured.pop("loss"),
                measured.pop("gradient's norm", run.gradient_norm),
            )
            if update_due:
                update(run)

            # Log: sums here, written as means
            run.log.add(nats, scored, text_bytes)
            show_progress(run, steps, nats / max(1, text_bytes), auxiliary=measured)
            run.note_what_is_due()
            if run.log_due():
                log_means(run, steps, auxiliary=measured)

            # Validating and saving wait for the next update: a checkpoint holds no gathered gradients
            if not run.gathered and (stopped := validate_and_save(run, steps, interruption)):
                break
    return (interruption.signal or "a signal") if stopped and not run.ended else None


def next_segments(run: opening.Run) -> tuple[list, int, int]:
    """The next `horizon` segments of this process's lanes; the scored tokens and their bytes of text in all lanes."""
    training = run.settings.training
    segments, own_lanes = run.reader.rollout(training.horizon), process.own_lanes(training.batch)
    run.tokens += training.horizon * training.batch * run.settings.model_config.segment
    mine = [segment.keep_lanes(own_lanes) for segment in segments]
    return mine, replay.count_scored(segments), lanes.count_bytes(segments, run.tokenizer)


def forward_and_backward(run: opening.Run, segments: list, scored: int) -> dict[str, torch.Tensor]:
    """Add the gradients of a rollout to the gathered ones and move the state on; returns "loss" and the auxiliary losses by name.

    The loss is this process's summed -log p in nats. The lanes are read in `accumulate` groups, one after another. `scored`
    counts the tokens of all processes, whose gradients are averaged, not summed.
    """
    training, measured, group_size = run.settings.training, {}, run.lanes_at_once
    per_process = scored / process.world_size()
    with run.computing():
        for first in range(0, len(segments[0].tokens), group_size):
            rows = slice(first, first + group_size)
            group, state = (
                [each.keep_lanes(rows).to(run.device) for each in segments],
                protocol.keep_lanes(run.state, rows),
            )
            loss, auxiliary, state = replay.BACKPROP[training.backprop](
                run.trained,
                group,
                state,
                scored=per_process,
                share=1 / training.accumulate,
                rank=process.rank(),
            )
            run.state = protocol.put_lanes(run.state, rows, state)
            for name, value in ({"loss": loss} | auxiliary).items():
                measured[name] = measured.get(name, 0.0) + value
    run.gathered += 1
    return measured | {"loss": measured["loss"] * per_process}


def update(run: opening.Run) -> None:
    """Take one optimiser step with the averaged and clipped gradients."""
    optimization.set_learning_rate(
        run.optimizer, optimization.learning_rate(run.step, run.settings.training)
    )
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.gathered = 0


def show_progress(
    run: opening.Run, steps: Progress, nats_per_byte: float, auxiliary: dict[str, float]
) -> None:
    """Count an iteration, and show its measurements beside the bar."""
    measure = "bits/byte" if isinstance(run.reader, lanes.Lanes) else "bits/byte over all tasks"
    compression = f", compression loss {sum(auxiliary.values()):.4f}" if auxiliary else ""
    rate = f"{run.tokens_per_second(steps):,.0f} tokens/s"
    steps.set_postfix_str(
        f"{nats_per_byte / math.log(2):.3f} {measure}{compression}, {rate}", refresh=False
    )
    steps.update()


def log_means(run: opening.Run, steps: Progress, auxiliary: dict[str, float]) -> None:
    """Write a line of metrics.jsonl: the mean loss since the last one, and other current numbers."""
    rate = optimization.learning_rate(run.step, run.settings.training)
    others = {
        "gradient_norm": run.gradient_norm,
        "tokens_per_second": run.tokens_per_second(steps),
    } | auxiliary
    run.log.record(run.step, learning_rate=rate, **others)


def validate_and_save(run: opening.Run, steps: Progress, interruption: Interruption) -> bool:
    """Validate and save if that is due; returns whether a signal stops the run. Processes vote, so that all do the same."""
    if run.validation_due and process.rank() == 0:
        with steps.paused():
            line = run.note_score(validation_score(run))
        steps.say(line)
    run.validation_due = False
    [stopped] = process.summed([bool(interruption.signal)], run.device)
    if run.save_due or stopped:
        run.save()
    return bool(stopped)


def validation_score(
    run: opening.Run, clear_memory: bool = False, model: torch.nn.Module | None = None
) -> score.Score:
    """The Score of the validation documents: of the split, or of what --validation-segments allows, from all over it."""
    with run.computing(model):
        return score.evaluate(
            model or run.model, run.validation, run.tokenizer, run.lanes_at_once, clear_memory
        )


def report(run: opening.Run) -> None:
    """Print and log the validation score, with the state carried on and with it cleared at every segment."""
    carried = run.score or validation_score(run)
    cleared = None if score.carries_nothing(run.model) else validation_score(run, clear_memory=True)
    print(run.last_lines(carried, cleared))
    run.log.validation(run.step, carried, cleared, final=True)


def sample(run: opening.Run) -> None:
    """Print the opening of a validation document and a continuation of it."""
    training = run.settings.training
    document = next(document for document in run.corpus.splits["valid"] if len(document.inputs))
    prompt = torch.as_tensor(document.inputs[:32].astype("int64"))[None]  # (1, n)
    generator = torch.Generator(run.device).manual_seed(training.seed)
    with run.computing():
        tokens = continuation.continue_text(
            run.model,
            prompt.to(run.device),
            training.sample,
            continuation.Sampling(temperature=0.8),
            generator,
        )
        continued = samples.show_text(run.tokenizer, tokens)
    given = samples.show_text(run.tokenizer, prompt[0].tolist())
    print(
        f"a sample: the opening of a validation document, and after {END} how the model continues it:"
    )
    print(f"{given}{END}{continued}")


def main(settings: opening.Settings, start: opening.Start) -> None:
    """Train as the command line says, then report, or say how to continue."""
    with opening.open_run(settings, start) as run:
        if run.plain and process.rank() == 0:
            bits = [
                validation_score(run, model=model).bits_per_byte for model in (run.model, run.plain)
            ]
            print(
                "before training, bits per byte: {:.3f} with the added recurrence, {:.3f} without".format(
                    *bits
                )
            )
        run.plain = None  # frees it
        stopped = train(run)
        resume = run.command("train.py --resume")
        if process.rank() > 0:
            return
        if stopped:
            print(f"stopped by {stopped} and saved; continue with: {resume}")
            return
        try:
            report(run)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"the model is saved; for its last report: {resume}") from None
        if run.settings.training.sample:
            sample(run)
        print(f"saved in {run.folder}; evaluate it with: {run.command('eval.py')}")


if __name__ == "__main__":
    run_program("train.py", main, *command)
