"""Train a long-memory Transformer: python train.py --help.

The loop is in `train`. A Run (accelerated/training/run.py) holds all that the loop needs;
opening.py beside it opens one.

    lane       one of B documents that are read side by side; each has its own state
    segment    the next N tokens of every lane, which the model reads at once
    rollout    the `horizon` segments of one iteration; gradient flows through their states
    scored     a token is scored if its prediction counts: not padding, not repeated by an overlap
"""

from accelerated.program.errors import begin_program, run_program

command = ()
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
    training = run.settings.training
    is_first = process.rank() == 0
    progress = Progress("training", training.steps, "step", run.step, show=is_first)
    with Interruption(told=is_first) as interruption, progress as bar:
        if run.validation_due:  # the resumed checkpoint's validation was interrupted
            save_and_validate(run, bar, interruption)
        while not run.ended:
            run.step += 1

            # Read the next segments of this process's lanes
            segments, scored, text_bytes = next_segments(run)

            # Forward and backward: accumulate gradients, move the state on
            loss, auxiliary = forward_and_backward(run, segments, scored)
            measured = {"loss": loss} | auxiliary

            # Average and clip the gradients, or accumulate those of more iterations first
            update_due = optimization.update_due(run.step, training)
            if update_due:
                process.average_gradients(run.model.parameters(), run.device)
                norm = optimization.average_and_clip(run.model, run.since_update, training.clip)
                measured["gradient's norm"] = norm

            # Read what was measured, the only wait for the device in an iteration
            numbers = process.read_numbers(measured)
            optimization.check_finite(run.step, numbers)

            # Update the parameters
            rate = optimization.learning_rate(run.step, training)
            if update_due:
                run.gradient_norm = numbers["gradient's norm"]
                optimization.set_learning_rate(run.optimizer, rate)
                run.optimizer.step()
                run.optimizer.zero_grad()
                run.since_update = 0

            # Log: sums here, written as means
            run.nats += numbers["loss"]
            run.scored += scored
            run.text_bytes += text_bytes
            losses = {name: numbers[name] for name in auxiliary}
            show_progress(run, bar, numbers["loss"] / max(1, text_bytes), losses)
            run.mark_what_is_due()
            if run.log_due():
                run.log_means(rate, run.tokens_per_second(bar), losses)

            # Save and validate after an update: a checkpoint holds no accumulated gradients
            if not run.since_update and save_and_validate(run, bar, interruption):
                return interruption.signal or "a signal"  # that another process heard
    return None


def next_segments(run: opening.Run) -> tuple[list[lanes.Segment], int, int]:
    """The next `horizon` segments of this process's lanes.

    Also returns how many tokens are scored in all lanes, and the bytes of text that they spell.
    """
    training = run.settings.training
    segments = run.reader.rollout(training.horizon)
    run.tokens += training.horizon * training.batch * run.settings.model_config.segment
    if training.clear_memory:
        segments = [segment.with_all_starts() for segment in segments]
    own_lanes = process.own_lanes(training.batch)
    mine = [segment.keep_lanes(own_lanes) for segment in segments]
    return mine, replay.count_scored(segments), lanes.count_bytes(segments, run.tokenizer)


def forward_and_backward(
    run: opening.Run, segments: list[lanes.Segment], scored: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Accumulate the gradients of a rollout, and move the state on.

    The lanes are read in `accumulate` groups, one after another. `scored` counts the tokens of all
    processes, whose gradients are averaged, not summed. Returns this process's loss, the summed
    -log p in nats, and the auxiliary losses by name.
    """
    training = run.settings.training
    scored_by_each = scored / process.world_size()
    total = torch.zeros((), device=run.device)
    auxiliary: dict[str, torch.Tensor] = {}
    with run.computing():
        for start in range(0, len(segments[0].tokens), run.lanes_at_once):
            rows = slice(start, start + run.lanes_at_once)
            loss, losses, state = run.backprop(
                run.model,
                [segment.keep_lanes(rows).to(run.device) for segment in segments],
                protocol.keep_lanes(run.state, rows),
                divisor=scored_by_each,
                share=1 / training.accumulate,
                rank=process.rank(),
            )
            run.state = protocol.write_lanes(run.state, rows, state)
            total = total + loss
            for name, value in losses.items():
                auxiliary[name] = auxiliary[name] + value if name in auxiliary else value
    run.since_update += 1
    return total * scored_by_each, auxiliary


def show_progress(
    run: opening.Run, bar: Progress, nats_per_byte: float, auxiliary: dict[str, float]
) -> None:
    """Count an iteration, and show its measurements beside the bar."""
    measure = "bits/byte" if isinstance(run.reader, lanes.Lanes) else "bits/byte over all tasks"
    shown = [f"{nats_per_byte / math.log(2):.3f} {measure}"]
    if auxiliary:
        shown.append(f"compression loss {sum(auxiliary.values()):.4f}")
    shown.append(f"{run.tokens_per_second(bar):,.0f} tokens/s")
    bar.set_postfix_str(", ".join(shown), refresh=False)
    bar.update()


def save_and_validate(run: opening.Run, bar: Progress, interruption: Interruption) -> bool:
    """Save and validate if that is due; returns whether a signal stops the run.

    Processes vote, so that all do the same. It saves before it validates, so that no training
    is lost, and again with the result.
    """
    [signals] = process.all_reduce_sum([bool(interruption.signal)], run.device)
    stops = signals > 0 and not run.ended
    if run.save_due or stops:
        run.save()
    if run.validation_due and not stops:
        if process.rank() == 0:
            bar.say(run.note_score(validation_score(run)))
        run.validation_due = False
        run.save()
    return stops


def validation_score(run: opening.Run, clear_memory: bool = False) -> score.Score:
    """The Score of the documents to validate on: the split, or what --validation-tokens says.

    With --clear-memory the memory is cleared here too.
    """
    clear_memory = clear_memory or run.settings.training.clear_memory
    with run.computing():
        return score.evaluate(
            run.model, run.validation, run.tokenizer, run.lanes_at_once, clear_memory
        )


def report(run: opening.Run) -> None:
    """Print and log the last validation, with the state carried on and cleared at each segment."""
    carried = run.score or validation_score(run)
    cleared = None
    if not (run.settings.training.clear_memory or score.is_stateless(run.model)):
        cleared = validation_score(run, clear_memory=True)
    print(run.last_lines(carried, cleared))
    run.log_validation(carried, cleared, final=True)


def sample(run: opening.Run) -> None:
    """Print the opening of a validation document, and how the best weights continue it."""
    training = run.settings.training
    document = next(document for document in run.corpus.splits["valid"] if len(document.inputs))
    prompt = torch.as_tensor(document.inputs[:32].astype("int64"))[None]  # (1, n)
    generator = torch.Generator(run.device).manual_seed(training.seed)
    sampling = continuation.Sampling(temperature=0.8)
    with run.computing():
        tokens = continuation.continue_text(
            run.model, prompt.to(run.device), training.sample, sampling, generator
        )
        continued = samples.show_text(run.tokenizer, tokens)
    given = samples.show_text(run.tokenizer, prompt[0].tolist())
    print(f"a sample: a validation document's opening, and after {END} how the model continues it:")
    print(f"{given}{END}{continued}")


def main(settings: opening.Settings, start: opening.Start) -> None:
    """Train as the command line says, then report, or say how to continue."""
    with opening.open_run(settings, start) as run:
        stopped = train(run)
        if process.rank() > 0:
            return
        resume = run.command("train.py --resume")
        if stopped:
            print(f"stopped by {stopped} and saved; continue with: {resume}")
            return
        try:
            report(run)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"the model is saved; for its last report: {resume}") from None
        print(run.load_best())
        if run.settings.training.sample:
            sample(run)
        print(f"saved in {run.folder}; what clearing the memory costs, by position and by token:")
        print(f"  {run.command('eval.py positions')}")
        print(f"  {run.command('eval.py view')} --out page.html")


if __name__ == "__main__":
    run_program("train.py", main, *command)
