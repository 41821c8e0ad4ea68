"""Training loops as people write them, each a function of its models and steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional


class Loop(NamedTuple):
    """How a loop makes its models and optimizers, and how it runs steps of them."""

    make: Callable[[], Any]  # models first, then optimizers
    run: Callable[[Any, int], None]
    pick: Callable[[Any], tuple[nn.Module, Any]]  # what to record
    budget: str


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.up(self.norm(x)))
        return x + functional.dropout(self.down(hidden), 0.1, self.training)


class Language(nn.Module):
    """As nanoGPT: returns logits and loss."""

    def __init__(self, width: int = 64, vocabulary: int = 200) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits, functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def make_language() -> Any:
    torch.manual_seed(1)
    model = Language()
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def _tokens(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch made on the fly."""
    found = torch.stack([torch.randint(0, 200, (33,)) for _ in range(rows)])
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


@torch.no_grad()
def _evaluate(model: nn.Module) -> float:
    model.eval()
    loss = model(*_tokens(2))[1].item()
    model.train()
    return float(loss)


def run_language(state: Any, steps: int) -> None:
    """Evaluates between steps, keeps logits and loss, clears gradients at the end."""
    model, optimizer = state
    torch.manual_seed(2)
    for step in range(steps):
        if step % 2 == 1:
            _evaluate(model)
        x, y = _tokens(8)
        logits, loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del x, y
    assert logits.shape[0] == 8


def run_accumulated(state: Any, steps: int) -> None:
    """Three batches per step, clipped, with an average of the weights."""
    model, optimizer = state
    torch.manual_seed(2)
    average = [p.detach().clone() for p in model.parameters()]
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(3):
            _, loss = model(*_tokens(4))
            (loss / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for mean, p in zip(average, model.parameters(), strict=True):
                mean.lerp_(p, 0.1)


def _perceptron(first: int, width: int, last: int, norm: bool = True) -> nn.Module:
    def block() -> nn.Module:
        layers = [nn.LeakyReLU(0.2), nn.Linear(width, width)]
        return nn.Sequential(*layers, *([nn.BatchNorm1d(width)] if norm else []))

    blocks = [block() for _ in range(5)]
    return nn.Sequential(nn.Linear(first, width), *blocks, nn.Linear(width, last))


def make_gan() -> Any:
    torch.manual_seed(0)
    models = _perceptron(16, 128, 64), _perceptron(64, 128, 1)
    return *models, *(torch.optim.Adam(one.parameters(), 1e-3) for one in models)


def run_gan(state: Any, steps: int) -> None:
    generator, critic, of_generator, of_critic = state
    torch.manual_seed(3)
    for _ in range(steps):
        real, fake = torch.randn(256, 64), generator(torch.randn(256, 16))
        of_critic.zero_grad()
        loss = functional.softplus(-critic(real)).mean()
        loss = loss + functional.softplus(critic(fake.detach())).mean()
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        functional.softplus(-critic(fake)).mean().backward()
        of_generator.step()


def make_towers() -> Any:
    torch.manual_seed(0)
    model = _perceptron(32, 128, 64)
    return model, torch.optim.AdamW(model.parameters())


def run_towers(state: Any, steps: int) -> None:
    """One tower for both sides of a contrastive loss: two forwards, one backward."""
    model, optimizer = state
    torch.manual_seed(3)
    for _ in range(steps):
        sides = [functional.normalize(model(torch.randn(256, 32))) for _ in range(2)]
        alike = sides[0] @ sides[1].T * 10
        names = torch.arange(256)
        loss = functional.cross_entropy(alike, names)
        loss = (loss + functional.cross_entropy(alike.T, names)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def run_lengths(state: Any, steps: int) -> None:
    """Accumulates batches of several sizes, the largest one in the middle."""
    model, optimizer = state
    torch.manual_seed(3)
    for _ in range(steps):
        optimizer.zero_grad()
        for rows in (64, 256, 128):
            model(torch.randn(rows, 32)).square().mean().backward()
        optimizer.step()


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def block(first: int, last: int) -> nn.Module:
            convolution = nn.Conv2d(first, last, 3, padding=1)
            return nn.Sequential(convolution, nn.BatchNorm2d(last), nn.ReLU(True))

        self.first, self.second = block(3, 16), block(16, 32)
        self.third, self.up = block(32, 32), block(64, 16)
        self.classes = nn.Conv2d(32, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        second = self.second(functional.max_pool2d(first, 2))
        third = self.third(functional.max_pool2d(second, 2))
        up = functional.interpolate(third, scale_factor=2)
        up = self.up(torch.cat([second, up], 1))
        up = functional.interpolate(up, scale_factor=2)
        return self.classes(torch.cat([first, up], 1))


def make_segmenter() -> Any:
    torch.manual_seed(0)
    model = UNet()
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def run_segmenter(state: Any, steps: int) -> None:
    model, optimizer = state
    torch.manual_seed(3)
    for _ in range(steps):
        image, classes = torch.randn(4, 3, 32, 32), torch.randint(0, 5, (4, 32, 32))
        out = model(image)
        overlap = functional.softmax(out, 1).gather(1, classes[:, None]).mean()
        loss = functional.cross_entropy(out, classes) + 1 - overlap
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = _perceptron(8, 64, 64, norm=False)
        self.actions, self.value = nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.body(x))
        return functional.log_softmax(self.actions(hidden), -1), self.value(hidden)


def make_ppo() -> Any:
    torch.manual_seed(0)
    model = Policy()
    return model, torch.optim.Adam(model.parameters(), 3e-4, eps=1e-5)


def run_ppo(state: Any, steps: int) -> None:
    """Roll out without gradients, then epochs of clipped updates."""
    model, optimizer = state
    torch.manual_seed(5)
    for step in range(steps):
        if step % 2 == 0:
            seen = torch.randn(512, 8)
            with torch.no_grad():
                log_p, value = model(seen)
            taken = torch.multinomial(log_p.exp(), 1)
            before, gain = log_p.gather(1, taken), torch.randn(512, 1) - value
            returns = gain + value
        log_p, value = model(seen)
        ratio = (log_p.gather(1, taken) - before).exp()
        policy = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        entropy = -(log_p.exp() * log_p).sum(-1).mean()
        loss = (value - returns).square().mean() - policy - 0.01 * entropy
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def make_denoiser() -> Any:
    torch.manual_seed(0)

    def block(first: int, last: int) -> nn.Module:
        layers = nn.Conv2d(first, last, 3, padding=1), nn.GroupNorm(4, last), nn.SiLU()
        return nn.Sequential(*layers)

    widths = (4, 16, 16, 16, 16)
    blocks = [block(*pair) for pair in pairwise(widths)]
    model = nn.Sequential(*blocks, nn.Conv2d(16, 3, 3, padding=1))
    return model, torch.optim.AdamW(model.parameters())


def run_denoiser(state: Any, steps: int) -> None:
    """A diffusion trainer with an exponential average of the weights."""
    model, optimizer = state
    torch.manual_seed(3)
    kept = torch.linspace(0.99, 0.01, 100)
    average = [p.detach().clone() for p in model.parameters()]
    for _ in range(steps):
        image, noise = torch.randn(4, 3, 16, 16), torch.randn(4, 3, 16, 16)
        time = torch.randint(0, 100, (4,))
        share = kept[time].view(-1, 1, 1, 1)
        noisy = share.sqrt() * image + (1 - share).sqrt() * noise
        given = torch.cat([noisy, share.expand(4, 1, 16, 16)], 1)
        loss = functional.mse_loss(model(given), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(average, list(model.parameters()), 0.05)


LOOPS = {
    "language": Loop(make_language, run_language, lambda s: s, "70%"),
    "accumulated": Loop(make_language, run_accumulated, lambda s: s, "85%"),
    "generator": Loop(make_gan, run_gan, lambda s: (s[0], s[2]), "93%"),
    "critic": Loop(make_gan, run_gan, lambda s: (s[1], (s[3], s[2])), "85%"),
    "towers": Loop(make_towers, run_towers, lambda s: s, "75%"),
    "lengths": Loop(make_towers, run_lengths, lambda s: s, "80%"),
    "segmenter": Loop(make_segmenter, run_segmenter, lambda s: s, "80%"),
    "ppo": Loop(make_ppo, run_ppo, lambda s: s, "80%"),
    "denoiser": Loop(make_denoiser, run_denoiser, lambda s: s, "70%"),
}


def state_of(state: Any) -> list[torch.Tensor]:
    """Copies of all that training changes in models and optimizers, and of chance."""
    models = [one for one in state if isinstance(one, nn.Module)]
    optimizers = [one for one in state if isinstance(one, torch.optim.Optimizer)]
    found = [t for m in models for t in (*m.parameters(), *m.buffers())]
    found += [p.grad for m in models for p in m.parameters() if p.grad is not None]
    for one in optimizers:
        found += [t for of_p in one.state.values() for t in of_p.values()]
    return [t.detach().clone() for t in (*found, torch.get_rng_state())]
