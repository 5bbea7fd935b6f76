"""An actor-critic with V-trace (IMPALA, Espeholt et al. 2018) whose memory is any of the models or an LSTM; for object matching.

As in Compressive Transformers, section 5.7, the model replaces the LSTM. It reads observations as tokens. The first OUTPUTS
tokens are never observed: their logits are the policy and the value, so a model needs no change.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from accelerated.lab.systems import matching
from accelerated.models import model_class, presets_of
from accelerated.protocol import Output, logits_of
from accelerated.replay import seeded
from accelerated.training.optimization import average_and_clip, check_finite

ACTIONS = len(matching.MOVES)
OUTPUTS = ACTIONS + 1  # logits: the actions', then the value
VOCABULARY = OUTPUTS + matching.OBSERVATIONS
SEGMENT = matching.STEPS  # tokens; in the second room the first one is two segments back
SIZES = {"width": 32, "heads": 2, "feed_forward": 64, "segment": SEGMENT}
CORES = {  # the sizes of each core; memories are shorter than the way from the first room to the second
    "compressive": SIZES | {"layers": 2, "head_width": 16, "memory": SEGMENT // 2, "compressed_memory": SEGMENT // 2},
    "block_recurrent": SIZES
    | {"layers": 2, "head_width": 16, "window": SEGMENT // 2, "recurrent_layers": (1,), "states": 8, "dropout": 0.0},
    "memformer": SIZES | {"encoder_layers": 1, "decoder_layers": 1, "head_width": 16, "slots": 8, "retention": 4.0},
    "pretrained_recurrence": SIZES | {"layers": 3, "max_positions": SEGMENT, "module_width": 32},
    "memorizing": SIZES
    | {"layers": 2, "head_width": 16, "memory_layer": 1, "memory": 3 * SEGMENT, "retrieved": 8, "dropout": 0.0},
    "lstm": {"width": 32, "layers": 1},
}


class LSTMState(NamedTuple):
    """The state of an LSTM; axis 0 is the lane."""

    hidden: torch.Tensor  # (B, L, D)
    cell: torch.Tensor  # (B, L, D)


class LSTM(nn.Module):
    """torch's LSTM with as much of the models' protocol as an agent needs; gradient flows through its state."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, width))  # (V, D)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.output = nn.Parameter(torch.randn(VOCABULARY, width) * width**-0.5)  # (V, D)

    def initial_state(self, batch: int) -> LSTMState:
        """Zeros."""
        return LSTMState(*self.embedding.new_zeros(2, batch, self.lstm.num_layers, self.lstm.hidden_size))

    def auxiliary_parameters(self) -> list[nn.Parameter]:
        """None: there is no auxiliary loss."""
        return []

    def output_matrix(self) -> torch.Tensor:
        """(V, D)."""
        return self.output

    def forward(self, tokens: torch.Tensor, state: LSTMState) -> Output:
        """Read tokens (B, N), any number of them; logits are (B, N, V)."""
        given = tuple(field.transpose(0, 1).contiguous() for field in state)  # (L, B, D)
        hidden, after = self.lstm(functional.embedding(tokens, self.embedding), given)
        return Output(logits_of(self, hidden), LSTMState(*(field.transpose(0, 1) for field in after)), {})

    @torch.no_grad()
    def step(self, token: torch.Tensor, state: LSTMState) -> tuple[torch.Tensor, LSTMState]:
        """Logits (B, V) after token (B,), and the next state."""
        output = self(token[:, None], state)
        return output.logits[:, 0], output.state


def make_core(name: str, seed: int = 0, **sizes: Any) -> nn.Module:
    """The core of an agent, one of CORES, with other sizes if they are given. It begins with equal actions and values of 0."""
    chosen = CORES[name] | sizes
    if name == "lstm":
        with seeded(seed, torch.device("cpu")):
            core = LSTM(**chosen)
    else:
        core = model_class(name)(presets_of(name).Config(vocabulary=VOCABULARY, **chosen), seed)
    with torch.no_grad():
        core.output_matrix()[:OUTPUTS] = 0
    return core


class Settings(NamedTuple):
    """How an agent is trained."""

    lanes: int = 128  # episodes in an update
    learning_rate: float = 0.002
    discount: float = 0.9
    entropy: float = 0.0005  # weight of the policy's entropy, in nats
    clip: float = 1.0  # of the gradient's norm


class Targets(NamedTuple):
    """What V-trace gives to learn from, both (B, T)."""

    values: torch.Tensor  # v_s
    advantages: torch.Tensor  # what grad log pi is multiplied by


def vtrace(
    behaviour: torch.Tensor,
    target: torch.Tensor,
    rewards: torch.Tensor,
    discounts: torch.Tensor,
    values: torch.Tensor,
    bootstrap: torch.Tensor,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> Targets:
    """The V-trace Targets of T steps in B lanes (Espeholt et al., Eq. 1 by Remark 1, and section 4.2).

    behaviour and target (B, T) are log-probabilities of the actions, by the policy that acted and by the one that learns.
    discounts (B, T) are 0 at an episode's last step. values (B, T) are V(x_s), bootstrap (B,) is the value after all steps.
    """
    ratios = (target - behaviour).exp()
    rhos, cs = ratios.clamp(max=rho_bar), ratios.clamp(max=c_bar)
    following = torch.cat([values[:, 1:], bootstrap[:, None]], 1)  # V(x_{s+1})
    deltas = rhos * (rewards + discounts * following - values)
    excess, found = torch.zeros_like(bootstrap), []
    for s in reversed(range(values.shape[1])):
        excess = deltas[:, s] + discounts[:, s] * cs[:, s] * excess  # v_s - V(x_s), Remark 1
        found.append(excess)
    targets = values + torch.stack(found[::-1], 1)
    after = torch.cat([targets[:, 1:], bootstrap[:, None]], 1)  # v_{s+1}
    return Targets(targets, rhos * (rewards + discounts * after - values))


class Rollout(NamedTuple):
    """An episode in each lane, (B, T); steps after its end are in it, but nobody acted in them."""

    tokens: torch.Tensor
    actions: torch.Tensor
    log_probs: torch.Tensor  # of the actions, by the policy that acted
    rewards: torch.Tensor
    acted: torch.Tensor


@torch.no_grad()
def play(core: nn.Module, lanes: int, rng: np.random.Generator, generator: torch.Generator) -> Rollout:
    """Play an episode in each lane by the model's `step`; rng draws the episodes, generator the actions."""
    world, state, steps = matching.begin(lanes, rng), core.initial_state(lanes), []
    for _ in range(matching.LENGTH):
        tokens, acted = torch.from_numpy(OUTPUTS + matching.observe(world)), torch.from_numpy(~world.ended)
        logits, state = core.step(tokens, state)
        log_policy = logits[:, :ACTIONS].log_softmax(-1)
        actions = torch.multinomial(log_policy.exp(), 1, generator=generator)  # (B, 1)
        world, rewards = matching.act(world, actions[:, 0].numpy())
        steps.append((tokens, actions[:, 0], log_policy.gather(1, actions)[:, 0], torch.from_numpy(rewards).to(logits), acted))
    return Rollout(*(torch.stack(field, 1) for field in zip(*steps, strict=True)))


def read_episode(core: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
    """(logits (B, T, OUTPUTS), mean auxiliary loss of the segments) of whole episodes (B, T).

    Gradient flows from segment to segment as far as the model lets it; a Compressive Transformer stops it at its memories.
    """
    state, logits, auxiliary, segments = core.initial_state(len(tokens)), [], 0.0, tokens.split(SEGMENT, 1)
    for segment in segments:
        output = core(segment, state)
        state = output.state
        logits.append(output.logits[..., :OUTPUTS])
        auxiliary = auxiliary + sum(output.auxiliary.values()) / len(segments)
    return torch.cat(logits, 1), auxiliary


class Losses(NamedTuple):
    """The parts of an actor-critic's objective, means over the steps that were acted in."""

    policy: torch.Tensor
    value: torch.Tensor
    entropy: torch.Tensor  # in nats; the objective has it with a minus

    def objective(self, entropy_weight: float) -> torch.Tensor:
        """What is minimised (Espeholt et al., section 4.2)."""
        return self.policy + 0.5 * self.value - entropy_weight * self.entropy


def actor_critic(logits: torch.Tensor, rollout: Rollout, discount: float) -> Losses:
    """The Losses of logits (B, T, OUTPUTS); no gradient flows through the targets. Episodes end with the rollout."""
    log_policy, values = logits[..., :ACTIONS].log_softmax(-1), logits[..., ACTIONS]
    log_probs = log_policy.gather(2, rollout.actions[..., None])[..., 0]
    continues = functional.pad(rollout.acted[:, 1:], (0, 1))  # False after the last step
    given = (rollout.log_probs, log_probs.detach(), rollout.rewards, discount * continues, values.detach())
    targets = vtrace(*given, torch.zeros_like(values[:, 0]))
    weights = rollout.acted / rollout.acted.sum()
    policy = -(weights * log_probs * targets.advantages).sum()
    value = (weights * (targets.values - values) ** 2).sum()
    entropy = -(weights[..., None] * log_policy.exp() * log_policy).sum()
    return Losses(policy, value, entropy)


def train(core: nn.Module, settings: Settings, seed: int) -> Iterator[float]:
    """Update the core for ever; yield after each update the share of its episodes in which the right object was taken.

    Actors are one update behind the learner, as if both worked at once; V-trace corrects for it. Raises InputError if the
    gradient becomes NaN or infinite.
    """
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(core.parameters(), lr=settings.learning_rate)
    rollout, update = play(core, settings.lanes, rng, generator), 0
    while True:
        upcoming, update = play(core, settings.lanes, rng, generator), update + 1
        logits, auxiliary = read_episode(core, rollout.tokens)
        optimizer.zero_grad()
        (actor_critic(logits, rollout, settings.discount).objective(settings.entropy) + auxiliary).backward()
        norm = average_and_clip(core, 1, settings.clip)
        check_finite(update, {"gradient norm": float(norm)}, lambda: "this agent was not kept")
        optimizer.step()
        yield (rollout.rewards > 0).any(1).float().mean().item()
        rollout = upcoming
